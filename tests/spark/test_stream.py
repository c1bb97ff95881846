"""Streaming reads through real Spark: limits of each batch, topics that come and go, and losses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.log.read.index import decode_header
from headrace.testing import ServerProcess, wait_until
from tests.spark.conftest import Read, Start
from tests.spark.support import (
    SMALL,
    ask,
    error_of,
    expected_rows,
    finish,
    publish,
    query_of,
    send,
    wait_applied,
)
from tests.tools import takes_long

KEEP_LITTLE = (
    SMALL.replace("262144", "4096") + "[retention]\nbytes = 65536\nage_s = 0\ncheck_s = 0.1\n"
)


class Collected:
    """Rows of each batch of a query."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, frame: Any, batch: int) -> None:
        columns = frame.select("topic", "offset", "next_offset", "ordinal", "payload")
        self.batches.append([(*row[:4], bytes(row[4])) for row in columns.collect()])

    @property
    def rows(self) -> list[Any]:
        return [row for batch in self.batches for row in batch]

    def payloads(self, topic: str) -> list[bytes]:
        return [row[4] for row in self.rows if row[0] == topic]


@pytest.fixture
def run(read_stream: Read, checkpoint: str) -> Callable[..., Collected]:
    """Read everything since the end of the test's last run."""

    def make(**options: object) -> Collected:
        collected = Collected()
        frame = read_stream(**{"startingOffsets": "earliest"} | options)
        writer = frame.writeStream.foreachBatch(collected).trigger(availableNow=True)
        finish(writer.option("checkpointLocation", checkpoint).start())
        return collected

    return make


def numbered(first: int, last: int, size: int = 0) -> list[bytes]:
    return [(b"%d " % n).ljust(size, b"x") for n in range(first, last)]


# Limits of a batch


@pytest.mark.parametrize("where", ["url", pytest.param("path", marks=takes_long)])
def test_what_there_is_is_read_once_and_then_only_what_is_new(
    server: ServerProcess, run: Callable[..., Collected], topic: str, where: str
) -> None:
    place = {where: server.http_url if where == "url" else str(server.data_dir)}
    expected = expected_rows(topic, numbered(0, 50))
    for first, last in ((0, 30), (30, 30), (30, 50)):
        publish(server.figg_url, topic, numbered(first, last))
        wait_applied(server, topic)
        assert run(subscribe=topic, **place).rows == expected[first:last]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        pytest.param({"maxRowsPerTrigger": 100}, 100, marks=takes_long),
        ({"maxOffsetsPerTrigger": 100}, 100),
        pytest.param({"maxBytesPerTrigger": 10_400}, 100, marks=takes_long),
        ({"maxRowsPerTrigger": 90, "maxBytesPerTrigger": 10_400}, 90),
        ({"maxRowsPerTrigger": 150, "maxBytesPerTrigger": 10_400}, 100),
    ],
)
def test_a_batch_is_no_larger_than_it_may_be(
    server: ServerProcess,
    run: Callable[..., Collected],
    topic: str,
    options: dict[str, int],
    rows: int,
) -> None:
    publish(server.figg_url, topic, numbered(0, 250, 100))
    collected = run(subscribe=topic, **options)
    assert [len(batch) for batch in collected.batches] == [rows, rows, 250 - 2 * rows]
    assert collected.rows == expected_rows(topic, numbered(0, 250, 100))


def test_every_topic_gets_its_share_of_a_batch(
    server: ServerProcess, run: Callable[..., Collected], topic: str
) -> None:
    for name, count in (("a", 10), ("b", 200), ("c", 200)):
        publish(server.figg_url, f"{topic}/{name}", numbered(0, count))
    first, *_ = run(subscribePattern=f"{topic}/.*", maxRowsPerTrigger=110).batches
    shares = [sum(row[0] == f"{topic}/{name}" for row in first) for name in "abc"]
    assert shares == [10, 50, 50]


def test_a_query_begins_at_the_end_unless_it_is_told_otherwise(
    server: ServerProcess, read_stream: Read, topic: str, checkpoint: str
) -> None:
    publish(server.figg_url, topic, [b"before"])
    collected = Collected()
    writer = read_stream(subscribe=topic).writeStream.foreachBatch(collected)
    with query_of(writer.option("checkpointLocation", checkpoint).start()) as query:
        wait_until(lambda: query.recentProgress, 120, "the query to have begun")
        publish(server.figg_url, topic, [b"after"])
        wait_until(lambda: collected.rows, 120, "what was published")
    assert collected.payloads(topic) == [b"after"]


# Topics that come and go


@pytest.mark.parametrize("where", ["url", pytest.param("path", marks=takes_long)])
def test_a_new_topic_joins_a_pattern(
    server: ServerProcess, read_stream: Read, topic: str, checkpoint: str, where: str
) -> None:
    place = {where: server.http_url if where == "url" else str(server.data_dir)}
    publish(server.figg_url, f"{topic}/a", [b"a"])
    wait_applied(server, f"{topic}/a")
    collected = Collected()
    frame = read_stream(subscribePattern=f"{topic}/.*", startingOffsets="earliest", **place)
    writer = frame.writeStream.foreachBatch(collected)
    with query_of(writer.option("checkpointLocation", checkpoint).start()) as query:
        wait_until(lambda: collected.rows, 120, "the first topic")
        publish(server.figg_url, f"{topic}/b", [b"b1", b"b2"])
        publish(server.figg_url, f"{topic}/a", [b"a2"])
        wait_until(lambda: len(collected.rows) == 4 or query.exception(), 120, "the second topic")
        assert query.exception() is None
    assert collected.payloads(f"{topic}/b") == [b"b1", b"b2"]
    assert collected.payloads(f"{topic}/a") == [b"a", b"a2"]


def test_a_topic_made_anew_goes_on_when_everything_of_the_old_one_was_read(
    server: ServerProcess, run: Callable[..., Collected], topic: str
) -> None:
    publish(server.figg_url, topic, numbered(0, 10))
    assert len(run(subscribe=topic).rows) == 10
    send(server, "DELETE", "/v1/topic", name=topic)
    publish(server.figg_url, topic, [b"new 1", b"new 2"])
    assert run(subscribe=topic).payloads(topic) == [b"new 1", b"new 2"]


def test_a_topic_made_anew_takes_with_it_what_was_not_read(
    server: ServerProcess, run: Callable[..., Collected], topic: str
) -> None:
    publish(server.figg_url, topic, numbered(0, 10))
    assert len(run(subscribe=topic).rows) == 10
    publish(server.figg_url, topic, numbered(10, 17))
    send(server, "DELETE", "/v1/topic", name=topic)
    publish(server.figg_url, topic, [b"new 1", b"new 2"])
    said = error_of(lambda: run(subscribe=topic))
    assert f"7 records of topic '{topic}' are gone that the query has not read" in said
    kept = run(subscribe=topic, failOnDataLoss=False)
    assert kept.payloads(topic) == [b"new 1", b"new 2"]


@pytest.mark.parametrize("count", [pytest.param(3, marks=takes_long), 20])
def test_a_log_that_is_another_one_than_the_checkpoints_is_refused(
    start: Start, run: Callable[..., Collected], count: int
) -> None:
    first, second = start(), start()
    publish(first.figg_url, "t", numbered(0, 10))
    publish(second.figg_url, "t", numbered(0, count))
    assert len(run(subscribe="t", url=first.http_url).rows) == 10
    said = error_of(lambda: run(subscribe="t", url=second.http_url))
    assert "this is another log than the checkpoint was made with" in said


# Losses


@pytest.mark.parametrize("where", ["url", pytest.param("path", marks=takes_long)])
def test_retention_that_overtakes_a_query_is_an_error_with_what_is_gone(
    start: Start, run: Callable[..., Collected], where: str
) -> None:
    server = start(config=KEEP_LITTLE)
    place = {where: server.http_url if where == "url" else str(server.data_dir)}
    publish(server.figg_url, "t", numbered(0, 10, 200))
    wait_applied(server, "t")
    assert len(run(subscribe="t", **place).rows) == 10
    publish(server.figg_url, "t", numbered(10, 2000, 200))
    wait_applied(server, "t")
    wait_settled(server, "t")
    offset, ordinal = start_of(server, "t")
    said = error_of(lambda: run(subscribe="t", **place))
    assert f"{ordinal - 10} records of topic 't' are gone that the query has not read" in said
    assert "set failOnDataLoss to false" in said
    kept = run(subscribe="t", failOnDataLoss=False, **place).rows
    assert kept == expected_rows("t", numbered(0, 10, 200) + numbered(10, 2000, 200))[ordinal:]
    assert kept[0][1] == offset


def start_of(server: ServerProcess, topic: str) -> tuple[int, int]:
    start = ask(server, "/v1/topic", name=topic)["start"]
    return start["offset"], start["ordinal"]


def wait_settled(server: ServerProcess, topic: str) -> None:
    """Wait until retention has done all it may: without its oldest segment, a topic would keep too little."""

    def settled() -> bool:
        found = ask(server, "/v1/topic", name=topic)
        first = found["segments"][0]
        kept = found["end"]["offset"] - first["end"]
        return found["start"]["offset"] == first["base"] > 0 and kept < 65536

    wait_until(settled, 120, "retention to be done")


def test_a_destroyed_topic_that_was_being_read_is_an_error(
    server: ServerProcess, read_stream: Read, topic: str, checkpoint: str
) -> None:
    publish(server.figg_url, topic, numbered(0, 10))
    frame = read_stream(subscribe=topic, startingOffsets="earliest", maxRowsPerTrigger=4)

    def destroy(frame: Any, batch: int) -> None:
        if batch == 0:
            send(server, "DELETE", "/v1/topic", name=topic)

    writer = frame.writeStream.foreachBatch(destroy).option("checkpointLocation", checkpoint)
    with query_of(writer.start()) as query:
        said = error_of(lambda: query.awaitTermination(30))
    assert f"6 records of topic '{topic}' are gone" in said
    assert "it was destroyed" in said


# Batches that were planned and not completed


@pytest.fixture
def plan(read_stream: Read, checkpoint: str) -> Callable[..., None]:
    """Plan a batch and fail in it, as a killed driver does."""

    def fail(frame: Any, batch: int) -> None:
        frame.count()
        raise RuntimeError("killed")

    def make(**options: object) -> None:
        frame = read_stream(**{"startingOffsets": "earliest"} | options)
        writer = frame.writeStream.foreachBatch(fail).trigger(availableNow=True)
        started = writer.option("checkpointLocation", checkpoint).start()
        assert "killed" in error_of(lambda: finish(started))

    return make


def ordinals(collected: Collected) -> list[int]:
    return [row[3] for row in collected.rows]


def test_a_first_batch_that_is_repeated_begins_where_it_began(
    server: ServerProcess, run: Callable[..., Collected], plan: Callable[..., None], topic: str
) -> None:
    publish(server.figg_url, topic, numbered(0, 10))
    plan(subscribe=topic)
    publish(server.figg_url, topic, numbered(10, 12))
    found = run(subscribe=topic, startingOffsets="latest")
    assert [len(batch) for batch in found.batches] == [10, 2]
    assert ordinals(found) == list(range(12))


@pytest.mark.parametrize(
    ("where", "joins"), [("url", True), pytest.param("path", False, marks=takes_long)]
)
def test_a_topic_that_is_gone_with_a_batch_of_it_is_an_error(
    server: ServerProcess,
    run: Callable[..., Collected],
    plan: Callable[..., None],
    topic: str,
    where: str,
    joins: bool,
) -> None:
    place = {where: server.http_url if where == "url" else str(server.data_dir)}
    options = {"subscribePattern": f"{topic}/.*", **place}
    publish(server.figg_url, f"{topic}/base", numbered(0, 3))
    if not joins:
        publish(server.figg_url, f"{topic}/t", numbered(0, 4))
        wait_applied(server, f"{topic}/t")
    wait_applied(server, f"{topic}/base")
    run(**options)
    publish(server.figg_url, f"{topic}/t", numbered(4, 11))
    wait_applied(server, f"{topic}/t")
    plan(**options)
    send(server, "DELETE", "/v1/topic", name=f"{topic}/t")
    wait_until(lambda: not list(index_files(server, f"{topic}/t")), 120, "the files to be deleted")
    said = error_of(lambda: run(**options))
    assert f"7 records of topic '{topic}/t' are gone that the query has not read" in said
    assert ordinals(run(**options, failOnDataLoss=False)) == []


def index_files(server: ServerProcess, topic: str) -> Iterator[Path]:
    for path in server.data_dir.glob("segments/*/*.idx"):
        header = decode_header(path.read_bytes())
        if header is not None and header.name == topic:
            yield path


def test_files_that_are_behind_the_server_are_waited_for(
    start: Start, run: Callable[..., Collected], plan: Callable[..., None]
) -> None:
    server = start(config=SMALL.replace("rotate_s = 0.2", "rotate_s = 3"))
    url, path = {"url": server.http_url}, {"path": str(server.data_dir)}
    publish(server.figg_url, "t", numbered(0, 5))
    run(subscribe="t", **url)
    publish(server.figg_url, "t", numbered(5, 15))
    plan(subscribe="t", **url)
    # Perhaps the files do not even have the topic yet.
    assert ordinals(run(subscribe="t", **path)) == list(range(5, 15))


def test_a_topic_that_was_destroyed_with_unread_records_is_an_error(
    server: ServerProcess, run: Callable[..., Collected], topic: str
) -> None:
    publish(server.figg_url, topic, numbered(0, 10))
    run(subscribe=topic)
    publish(server.figg_url, topic, numbered(10, 14))
    send(server, "DELETE", "/v1/topic", name=topic)
    for _ in range(2):
        said = error_of(lambda: run(subscribe=topic))
        assert f"4 records of topic '{topic}' are gone" in said
        assert "it was destroyed" in said
    assert ordinals(run(subscribe=topic, failOnDataLoss=False)) == []
    # The topic is forgotten then, so a recreated topic is read from its beginning.
    publish(server.figg_url, topic, numbered(0, 3))
    assert ordinals(run(subscribe=topic)) == [14, 15, 16]


# Queries as named readers


@pytest.fixture
def tracked(spark: Any) -> Any:
    from headrace.spark import track

    listeners = []

    def make(server: ServerProcess) -> None:
        listeners.append(track(spark, server.http_url))

    yield make
    for listener in listeners:
        spark.streams.removeListener(listener)


def cursors(server: ServerProcess, reader: str) -> dict[str, int]:
    found = ask(server, "/v1/cursors", reader=reader)["cursors"]
    return {one["topic"]: one["ordinal"] for one in found}


def test_the_progress_of_a_query_with_a_group_is_a_cursor_that_shows_its_lag(
    server: ServerProcess,
    run: Callable[..., Collected],
    tracked: Any,
    topic: str,
    headrace: Any,
) -> None:
    tracked(server)
    reader = f"group:{topic}"
    publish(server.figg_url, topic, numbered(0, 30))
    run(subscribe=topic, groupId=topic)
    wait_until(lambda: cursors(server, reader) == {topic: 30}, 120, "the cursor")
    publish(server.figg_url, topic, numbered(30, 37))
    listed = headrace("topics", topic, environ={"HEADRACE_HTTP": server.http_url})
    assert f"{reader} -7" in listed.stdout, listed.stderr
    run(subscribe=topic, groupId=topic)
    wait_until(lambda: cursors(server, reader) == {topic: 37}, 120, "the cursor")


def test_a_query_without_a_group_leaves_no_cursor(
    server: ServerProcess, run: Callable[..., Collected], tracked: Any, topic: str
) -> None:
    tracked(server)
    publish(server.figg_url, f"{topic}/a", numbered(0, 3))
    publish(server.figg_url, f"{topic}/b", numbered(0, 3))
    run(subscribe=f"{topic}/a")
    # Listeners hear of queries one after the other: when the second is known, the first has been handled.
    run(subscribe=f"{topic}/a,{topic}/b", groupId=topic)
    wait_until(lambda: cursors(server, f"group:{topic}"), 120, "the second query's cursor")
    found = ask(server, "/v1/cursors", topic=f"{topic}/a")["cursors"]
    assert [one["reader"] for one in found] == [f"group:{topic}"]


def test_retention_waits_for_a_query_that_is_behind(
    start: Start, run: Callable[..., Collected], tracked: Any
) -> None:
    config = f'{KEEP_LITTLE}wait_for = ["group:slow"]\n'
    server = start(config=config)
    tracked(server)
    publish(server.figg_url, "t", numbered(0, 10, 200))
    run(subscribe="t", groupId="slow", url=server.http_url)
    wait_until(lambda: cursors(server, "group:slow") == {"t": 10}, 120, "the cursor")
    for topic in ("t", "unread"):
        publish(server.figg_url, topic, numbered(10, 2000, 200))
        wait_applied(server, topic)
    # Retention has trimmed the topic that no reader holds.
    wait_settled(server, "unread")
    assert start_of(server, "t")[1] <= 10
    rows = run(subscribe="t", groupId="slow", url=server.http_url).rows
    assert [row[3] for row in rows] == list(range(10, 2000))
    wait_settled(server, "t")


@takes_long
def test_two_queries_with_one_group_are_not_for_long(
    read_stream: Read, server: ServerProcess, topic: str, tmp_path: Path
) -> None:
    publish(server.figg_url, topic, [b"one"])

    def start(name: str) -> Any:
        stream = read_stream(subscribe=topic, groupId=topic, startingOffsets="earliest")
        written = stream.writeStream.format("noop").option(
            "checkpointLocation", str(tmp_path / name)
        )
        return written.start()

    with query_of(start("first")) as first:
        first.processAllAvailable()
        with query_of(start("second")) as second:
            said = error_of(lambda: second.awaitTermination(120))
        assert f"another query on this machine has the groupId '{topic}'" in said
        assert first.isActive
    # The same query can start again at once.
    with query_of(start("first")) as again:
        publish(server.figg_url, topic, [b"two"])
        again.processAllAvailable()
        assert again.exception() is None
