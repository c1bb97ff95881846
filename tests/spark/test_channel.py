"""Channel messages through real Spark: it sends as a processor, and reads what others send."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from websockets.sync.client import connect

from headrace.testing import ServerProcess, wait_until
from tests.spark.conftest import Read, Start
from tests.spark.support import SMALL, ask, finish, topics_of
from tests.spark.test_sink import check_refused, write

WAIT_S = 120

HELD = f"""
{SMALL}
[retention]
wait_for = ["group:archive"]
"""


class Processor:
    """A raw client that has joined one channel and asks for pending messages."""

    def __init__(self, stack: ExitStack, server: ServerProcess, channel: str, name: str) -> None:
        host, port = server.ws
        url = f"ws://{host}:{port}/v1/channels"
        self._socket = stack.enter_context(connect(url, max_size=None, close_timeout=1))
        self._channel = channel
        self._say(type="hello", processor=name)
        self._hear("welcome")
        self._say(type="join", channel=channel, receive="poll")
        self._hear("joined")

    def send(self, number: int, payload: Any) -> dict[str, Any]:
        self._say(type="send", channel=self._channel, number=number, payload=payload)
        return self._hear("sent")

    def messages(self, count: int) -> list[dict[str, Any]]:
        """Return all pending messages, which must be `count`, and acknowledge them."""
        found: list[dict[str, Any]] = []
        while some := self._fetch():
            found += some
            self._say(type="ack", channel=self._channel, offset=found[-1]["offset"])
            self._hear("acked")
        assert len(found) == count
        return found

    def _fetch(self) -> list[dict[str, Any]]:
        self._say(type="fetch", channel=self._channel)
        messages: list[dict[str, Any]] = self._hear("messages")["messages"]
        return messages

    def _say(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))

    def _hear(self, kind: str) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=WAIT_S))
        assert message["type"] == kind, message
        return message


@pytest.fixture
def processors() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_spark_sends_reaches_members_once(
    spark: Any, server: ServerProcess, topic: str, processors: ExitStack
) -> None:
    member = Processor(processors, server, topic, "member")
    rows = spark.range(0, 3000, 1, 3).selectExpr("id as n", "id % 7 as seven")
    options = {"topic": f"$channel/{topic}", "encode": "channel", "processor": "spark"}
    once = {"producer": f"job {topic}", "batchId": 1}
    for _ in range(2):
        write(rows, server.http_url, **options, **once)
    found = member.messages(3000)
    assert [(one["processor"], one["number"]) for one in found] == [
        ("spark", number) for number in range(1, 3001)
    ]
    assert [one["payload"]["n"] for one in found] == list(range(3000))
    assert found[10]["payload"] == {"n": 10, "seven": 3}
    # Given numbers continue from there, and earlier numbers are not stored again.
    numbered = spark.createDataFrame(
        [(number, json.dumps(number)) for number in range(2990, 3003)],
        "number bigint, payload string",
    ).coalesce(1)
    write(numbered, server.http_url, **options)
    assert [one["payload"] for one in member.messages(2)] == [3001, 3002]
    assert topics_of(server, f"$channel/{topic}") == {f"$channel/{topic}": 3002}


def test_spark_reads_what_processors_send(
    server: ServerProcess, topic: str, processors: ExitStack, read: Read
) -> None:
    first = Processor(processors, server, topic, "ä")
    Processor(processors, server, topic, "other")  # the log is kept for this one
    first.send(1, {"n": 5, "tags": ["x", "y"]})
    first.send(2, "no object")
    options = {"subscribe": f"$channel/{topic}", "decode": "channel"}
    one, two = read(**options).orderBy("ordinal").collect()
    assert (one.topic, one.processor, one.number) == (f"$channel/{topic}", "ä", 1)
    assert (json.loads(bytes(one.payload)), one.is_json) == ({"n": 5, "tags": ["x", "y"]}, True)
    assert (two.number, bytes(two.payload)) == (2, b'"no object"')
    chosen = read("n bigint, tags array<string>, payload string, ordinal bigint", **options)
    assert [row[:2] for row in chosen.orderBy("ordinal").collect()] == [
        (5, ["x", "y"]),
        (None, None),
    ]


def test_a_stream_copies_a_channel_into_another_once(
    server: ServerProcess,
    topic: str,
    processors: ExitStack,
    checkpoint: str,
    read_stream: Read,
) -> None:
    source, target = f"{topic}/one", f"{topic}/two"
    senders = [Processor(processors, server, source, name) for name in ("a", "b")]
    reader = Processor(processors, server, target, "reader")

    def copy(checkpoint: str) -> None:
        frame = read_stream(
            subscribe=f"$channel/{source}", startingOffsets="earliest", decode="channel"
        )
        query = frame.drop("topic").writeStream.format("headrace").option("url", server.http_url)
        query = query.option("topic", f"$channel/{target}").option("encode", "channel")
        finish(query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start())

    for sender in senders:
        sender.send(1, "first")
        sender.send(2, "second")
    copy(checkpoint)
    found = [(one["processor"], one["number"], one["payload"]) for one in reader.messages(4)]
    assert found == [(name, n, said) for name in "ab" for n, said in ((1, "first"), (2, "second"))]
    senders[0].send(3, "third")
    copy(checkpoint)
    assert [(one["processor"], one["number"]) for one in reader.messages(1)] == [("a", 3)]
    # Without the checkpoint everything is copied again, but is already there.
    copy(f"{checkpoint}-2")
    reader.messages(0)
    assert topics_of(server, f"$channel/{target}") == {f"$channel/{target}": 5}


def test_a_gap_fails_the_write_and_leaves_nothing(
    spark: Any, server: ServerProcess, topic: str
) -> None:
    rows = spark.range(0, 100, 1, 2).selectExpr("id + 2 as number", "'{}' as payload")
    options = {"topic": f"$channel/{topic}", "encode": "channel", "processor": "spark"}
    said = f"the next number of 'spark' in channel '{topic}' is 1, not 2"
    check_refused(server, rows, said, **options)
    # These numbers are not in order.
    rows = spark.range(0, 100, 1, 2).selectExpr("100 - id as number", "'{}' as payload")
    check_refused(server, rows, "is 1, not 100", **options)


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (["if(id = 99, '{', '{}') as payload"], {"processor": "p"}, "its content is not JSON"),
        (["'1' as payload"], {}, "give the option processor, or a column processor"),
        (["'1' as payload", "nullif('p', if(id = 99, 'p', '')) as processor"], {}, "no processor"),
        (["1 as n", "repeat('x', if(id = 99, 256, 1)) as processor"], {}, "has 256"),
    ],
)
def test_a_row_that_is_no_message_fails_the_write_and_leaves_nothing(
    spark: Any,
    server: ServerProcess,
    topic: str,
    columns: list[str],
    options: dict[str, str],
    said: str,
) -> None:
    rows = spark.range(0, 100, 1, 2).selectExpr(*columns)
    check_refused(server, rows, said, topic=f"$channel/{topic}", encode="channel", **options)


def test_a_tracked_stream_holds_the_log_until_it_has_read_it(
    spark: Any,
    start: Start,
    processors: ExitStack,
    checkpoint: str,
    tmp_path: Any,
    read_stream: Read,
) -> None:
    from headrace.spark import track

    server = start(config=HELD)
    listener = track(spark, server.http_url)

    def archive() -> None:
        frame = read_stream(
            url=server.http_url,
            subscribe="$channel/doc",
            startingOffsets="earliest",
            groupId="archive",
            decode="channel",
        )
        query = frame.writeStream.format("parquet").option("path", str(tmp_path / "archive"))
        finish(query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start())

    def start_of_log() -> int:
        return int(ask(server, "/v1/topic", name="$channel/doc")["start"]["ordinal"])

    def cursor() -> int:
        found = ask(server, "/v1/cursors", reader="group:archive")["cursors"]
        return found[0]["ordinal"] if found else 0

    try:
        writer = Processor(processors, server, "doc", "writer")
        reader = Processor(processors, server, "doc", "reader")
        writer.send(1, "said")
        archive()
        wait_until(lambda: cursor() == 1, WAIT_S, "the cursor")
        writer.send(2, "said")
        reader.messages(2)
        # All members have both messages, and the query has one of them.
        wait_until(lambda: start_of_log() == 1, WAIT_S, "what all have read to be trimmed")
        archive()
        wait_until(lambda: cursor() == 2, WAIT_S, "the cursor")
        writer.send(3, "said")
        reader.messages(1)
        wait_until(lambda: start_of_log() == 2, WAIT_S, "what the query has read to be trimmed")
        found = spark.read.parquet(str(tmp_path / "archive")).orderBy("ordinal").collect()
        assert [(row.processor, row.number) for row in found] == [("writer", n) for n in (1, 2)]
    finally:
        spark.streams.removeListener(listener)
