"""Batch writes through real Spark: targets of rows, repeated writes, and refusals that leave nothing."""

import hashlib
from typing import Any

import pytest

from headrace.model import PAYLOAD_BYTES_MAX
from headrace.testing import ServerProcess, hold_port
from tests.spark.conftest import Start
from tests.spark.support import SMALL, error_of, finish, receive, topics_of, with_options


def write(frame: Any, url: str, mode: str = "append", **options: object) -> None:
    writer = with_options(frame.write.format("headrace").mode(mode), {"url": url, **options})
    writer.save()


def payloads(server: ServerProcess, topic: str, count: int) -> list[bytes]:
    return [payload for _, payload in receive(server.figg_url, topic, count)]


def numbers(spark: Any, count: int, tasks: int = 1) -> Any:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) as payload")


# Targets of rows


def test_each_row_goes_to_the_topic_it_names(spark: Any, server: ServerProcess, topic: str) -> None:
    rows = spark.range(0, 3000, 1, 3)
    named = rows.selectExpr(f"concat('{topic}/', id % 3) as topic", "cast(id as string) payload")
    write(named, server.http_url)
    for number in range(3):
        expected = [b"%d" % n for n in range(3000) if n % 3 == number]
        assert payloads(server, f"{topic}/{number}", 1000) == expected
    assert topics_of(server, topic) == {f"{topic}/{n}": 1000 for n in range(3)}


def test_columns_of_what_was_read_need_not_be_dropped(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    write(numbers(spark, 10), server.http_url, topic=topic)
    reader = spark.read.format("headrace").option("url", server.http_url)
    again = reader.option("subscribe", topic).load()
    write(again, server.http_url)
    assert payloads(server, topic, 20) == [b"%d" % n for n in range(10)] * 2


def test_columns_become_members_of_json_payloads(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    rows = spark.range(3).selectExpr("id as n", "concat('s', id) as s")
    write(rows, server.http_url, topic=topic, encode="json")
    assert payloads(server, topic, 3) == [b'{"n":%d,"s":"s%d"}' % (n, n) for n in range(3)]


def test_no_rows_make_no_topic(spark: Any, server: ServerProcess, topic: str) -> None:
    write(numbers(spark, 5).where("payload = 'none'"), server.http_url, topic=topic)
    assert topics_of(server, topic) == {}


# Repeated writes


def test_a_batch_that_was_written_is_skipped_however_it_is_split(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    for tasks in (3, 1, 7):
        options = {"topic": topic, "producer": f"job {topic}", "batchId": 7}
        write(numbers(spark, 100, tasks), server.http_url, **options)
    assert topics_of(server, topic) == {topic: 100}
    write(numbers(spark, 10), server.http_url, topic=topic, producer=f"job {topic}", batchId=8)
    write(numbers(spark, 10), server.http_url, topic=topic, producer=f"other {topic}", batchId=7)
    expected = [b"%d" % n for count in (100, 10, 10) for n in range(count)]
    assert payloads(server, topic, 120) == expected


def test_without_a_producer_each_write_is_a_new_one(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    for _ in range(2):
        write(numbers(spark, 5), server.http_url, topic=topic)
    assert topics_of(server, topic) == {topic: 10}


# Refusals that leave nothing behind


def check_refused(server: ServerProcess, frame: Any, said: str, **options: object) -> None:
    before = topics_of(server)
    assert said in error_of(lambda: write(frame, server.http_url, **options))
    # Only growth counts: channels of other tests are trimmed and destroyed meanwhile.
    after = topics_of(server)
    assert {name for name in after if after[name] > before.get(name, 0)} == set()


@pytest.mark.parametrize("name", ["$logux/users", "$channel/news"])
def test_rows_for_reserved_name_spaces_are_refused(
    spark: Any, server: ServerProcess, topic: str, name: str
) -> None:
    mixed = spark.range(0, 100, 1, 2).selectExpr(
        f"if(id = 99, '{name}', '{topic}') as topic", "cast(id as string) as payload"
    )
    check_refused(server, mixed, f"'{name}'")
    check_refused(server, numbers(spark, 1), f"'{name}'", topic=name)


def test_a_null_payload_is_refused(spark: Any, server: ServerProcess, topic: str) -> None:
    rows = spark.range(0, 1000, 1, 2).selectExpr("nullif(cast(id as string), '999') as payload")
    check_refused(server, rows, "a row has no payload: null cannot be written", topic=topic)


def test_a_null_topic_is_refused(spark: Any, server: ServerProcess, topic: str) -> None:
    rows = spark.range(0, 1000, 1, 2).selectExpr(
        f"if(id = 999, null, '{topic}') as topic", "cast(id as string) as payload"
    )
    check_refused(server, rows, "a row has no topic: null cannot be written to")


def test_the_largest_payload_is_written_and_a_larger_one_refused(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    def rows(size: int) -> Any:
        return spark.range(0, 10, 1, 2).selectExpr(
            f"if(id = 9, repeat('x', {size}), 'y') as payload"
        )

    said = f"a row's payload has {PAYLOAD_BYTES_MAX + 1} bytes, a record may have"
    check_refused(server, rows(PAYLOAD_BYTES_MAX + 1), said, topic=topic)
    write(rows(PAYLOAD_BYTES_MAX), server.http_url, topic=topic)
    assert payloads(server, topic, 10) == [b"y"] * 9 + [b"x" * PAYLOAD_BYTES_MAX]


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (["payload", "id as who"], {"topic": "t"}, "the column 'who' would not be written"),
        (["id as who"], {"topic": "t"}, "there is no column payload to write"),
        (["id as payload"], {"topic": "t"}, "the column 'payload' must be binary or string, not"),
        (["payload"], {}, "say where to write: give the option topic, or a column topic"),
        (["payload", "'t' as topic"], {"topic": "t"}, "contradict each other: leave out one"),
        (["payload"], {"topic": "t", "mode": "overwrite"}, "only appends: use mode append"),
        (["payload"], {"topic": "t", "colour": "red"}, "unknown option 'colour' to write"),
        (["payload"], {"topic": "t", "producer": "p"}, "producer and batchId belong together"),
        (["payload"], {"topic": "t", "path": "/data"}, "valid ones are: "),
    ],
)
def test_a_write_that_makes_no_sense_is_refused(
    spark: Any, server: ServerProcess, columns: list[str], options: dict[str, str], said: str
) -> None:
    rows = spark.range(3).selectExpr("id", "cast(id as string) as payload").selectExpr(*columns)
    check_refused(server, rows, said, **options)


def test_a_server_that_is_down_is_an_error_with_its_address(spark: Any) -> None:
    with hold_port() as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        said = error_of(lambda: write(numbers(spark, 3), url, topic="t"))
    assert f"no server answers at {url}" in said


def test_of_several_servers_one_that_answers_is_taken(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    with hold_port() as closed:
        urls = f"http://127.0.0.1:{closed.getsockname()[1]},{server.http_url}"
        write(numbers(spark, 100, tasks=3), urls, topic=topic)
        assert payloads(server, topic, 100) == [b"%d" % n for n in range(100)]
        read = spark.read.format("headrace").option("url", urls).option("subscribe", topic).load()
        assert read.count() == 100


def test_a_token_is_needed_where_the_server_has_any(spark: Any, start: Start) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    config = f'{SMALL}\n[[access.token]]\nname = "spark"\nsha256 = "{digest}"\n'
    server = start(config=config)
    refused = f"{server.http_url} refuses the token"
    reader = spark.read.format("headrace").option("url", server.http_url).option("subscribe", "t")
    for token in ({}, {"token": "wrong"}):
        options = {"topic": "t", **token}
        assert refused in error_of(lambda o=options: write(numbers(spark, 3), server.http_url, **o))
        assert refused in error_of(lambda t=token: with_options(reader, t).load().collect())
    assert topics_of(server, token="secret") == {}
    write(numbers(spark, 3), server.http_url, topic="t", token="secret")
    assert topics_of(server, token="secret") == {"t": 3}
    assert reader.option("token", "secret").load().count() == 3


def test_a_row_of_a_stream_that_cannot_be_written_ends_the_query_and_leaves_nothing(
    spark: Any, server: ServerProcess, topic: str, checkpoint: str
) -> None:
    write(numbers(spark, 100), server.http_url, topic=topic)
    reader = spark.readStream.format("headrace").option("url", server.http_url)
    frame = reader.option("subscribe", topic).option("startingOffsets", "earliest").load()
    large = f"if(ordinal = 99, repeat('x', {PAYLOAD_BYTES_MAX + 1}), 'y') as payload"
    writer = frame.selectExpr(large).writeStream.format("headrace").option("url", server.http_url)
    writer = writer.option("topic", f"{topic}/copy").option("checkpointLocation", checkpoint)
    said = error_of(lambda: finish(writer.trigger(availableNow=True).start()))
    assert f"a row's payload has {PAYLOAD_BYTES_MAX + 1} bytes" in said
    assert topics_of(server, topic) == {topic: 100}
