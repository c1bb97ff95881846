"""Logux events through real Spark: what it writes reaches clients once, and it reads what clients write."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from websockets.sync.client import connect

from headrace.testing import ServerProcess
from tests.spark.conftest import Read
from tests.spark.support import finish, topics_of
from tests.spark.test_sink import check_refused, write
from tests.system.logux.conftest import logux_url

WAIT_S = 120
MS = 1475316540687


class Client:
    """A raw client of the first protocol."""

    def __init__(self, stack: ExitStack, server: ServerProcess, log: str, host: str) -> None:
        url = logux_url(server, log)
        self._socket = stack.enter_context(connect(url, max_size=None, close_timeout=1))
        self._say("connect", [0, 0], host, 0)
        assert self._hear("connected")

    def add(self, *events: tuple[dict[str, Any], list[Any]]) -> None:
        for number, (event, created) in enumerate(events, 1):
            self._say("sync", number, event, created)
            assert self._hear("synced") == ["synced", number]

    def events(self, count: int) -> list[tuple[dict[str, Any], list[Any]]]:
        """Return the next events that the client receives."""
        found = [self._hear("sync") for _ in range(count)]
        return [(event, created) for _, _, event, created in found]

    def has_all(self, count: int) -> bool:
        """True if exactly `count` events have come."""
        self._say("ping", 0)
        return bool(self._hear("pong") == ["pong", count])

    def _say(self, *message: Any) -> None:
        self._socket.send(json.dumps(message))

    def _hear(self, kind: str) -> list[Any]:
        while True:
            message: list[Any] = json.loads(self._socket.recv(timeout=WAIT_S))
            if message[0] == kind:
                return message
            assert message[0] in ("ping", "pong"), message


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_spark_writes_reaches_clients_once(
    spark: Any, server: ServerProcess, topic: str, clients: ExitStack
) -> None:
    client = Client(clients, server, topic, "client")
    rows = spark.range(0, 3000, 1, 3).selectExpr("'n' as type", "id as n", "id % 7 as seven")
    write(rows, server.http_url, topic=f"$logux/{topic}", encode="logux")
    found = client.events(3000)
    assert [event["n"] for event, _ in found] == list(range(3000))
    assert found[10][0] == {"type": "n", "n": 10, "seven": 3}
    assert len({json.dumps(created) for _, created in found}) == 3000
    assert len({created[1] for _, created in found}) == 1
    assert {created[1][:6] for _, created in found} == {"spark-"}
    again = spark.createDataFrame(
        [
            (json.dumps(event), json.dumps(created), None, "elsewhere")
            for event, created in [*found[:3], *found[-3:]]
        ]
        + [('{"type":"new"}', None, f"{MS} x 0", "x"), ('{"type":"new"}', None, f"{MS} x 0", "x")],
        "event string, created string, id string, origin string",
    )
    write(again, server.http_url, topic=f"$logux/{topic}", encode="logux")
    assert client.events(1) == [({"type": "new"}, [MS, "x", 0])]
    # The client also receives an event that was written in its name but that it did not send.
    own = spark.createDataFrame([("own", "client")], "type string, origin string")
    write(own, server.http_url, topic=f"$logux/{topic}", encode="logux")
    assert client.events(1)[0][0] == {"type": "own"}
    assert client.has_all(3002)
    assert topics_of(server, f"$logux/{topic}") == {f"$logux/{topic}": 3002}


def test_spark_reads_what_clients_have_written(
    server: ServerProcess, topic: str, clients: ExitStack, read: Read
) -> None:
    client = Client(clients, server, topic, "client")
    client.add(
        ({"type": "a", "n": 5, "tags": ["x", "y"]}, [MS, "client", 0]),
        ({"type": "b", "n": "no number"}, [MS + 0.5, "client", 0]),
    )
    options = {"subscribe": f"$logux/{topic}", "decode": "logux"}
    frame = read(**options).selectExpr("*", "unix_micros(time) as us")
    first, second = frame.orderBy("ordinal").collect()
    assert json.loads(first.event) == {"type": "a", "n": 5, "tags": ["x", "y"]}
    assert (first.topic, first.ordinal) == (f"$logux/{topic}", 0)
    assert (first.type, first.created) == ("a", f'[{MS},"client",0]')
    assert (first.id, first.us, first.origin) == (f"{MS} client 0", MS * 1000, "client")
    assert (second.type, second.us) == ("b", MS * 1000 + 500)
    chosen = read(
        "n bigint, tags array<string>, type string, time bigint, ordinal bigint", **options
    )
    assert chosen.orderBy("ordinal").collect() == [
        (5, ["x", "y"], "a", MS, 0),
        (None, None, "b", MS, 1),
    ]


def test_a_stream_copies_a_log_into_another_once(
    spark: Any,
    server: ServerProcess,
    topic: str,
    clients: ExitStack,
    checkpoint: str,
    read_stream: Read,
) -> None:
    source, target = f"$logux/{topic}/one", f"$logux/{topic}/two"
    writer = Client(clients, server, f"{topic}/one", "writer")
    reader = Client(clients, server, f"{topic}/two", "reader")
    added = [({"type": "t", "n": n}, [MS + n, "writer", 0]) for n in range(20)]

    def copy() -> None:
        frame = read_stream(subscribe=source, startingOffsets="earliest", decode="logux")
        query = frame.drop("topic").writeStream.format("headrace").option("url", server.http_url)
        query = query.option("topic", target).option("encode", "logux")
        finish(query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start())

    writer.add(*added[:12])
    copy()
    assert reader.events(12) == added[:12]
    writer.add(*added[12:])
    copy()
    assert reader.events(8) == added[12:]
    # Without the checkpoint everything is copied again, but is already there.
    checkpoint += "-2"
    copy()
    assert reader.has_all(20)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            ["if(id = 99, '[]', '{\"type\":\"t\"}') as event"],
            "its event is not an object with a string",
        ),
        (["nullif('t', if(id = 99, 't', '')) as type"], "a row has no type"),
        (["'t' as type", "if(id = 99, 'x', '1 a 0') as id"], "'x' is not an id"),
    ],
)
def test_a_row_that_is_no_event_fails_the_write_and_leaves_nothing(
    spark: Any, server: ServerProcess, topic: str, columns: list[str], said: str
) -> None:
    rows = spark.range(0, 100, 1, 2).selectExpr(*columns)
    check_refused(server, rows, said, topic=f"$logux/{topic}", encode="logux")


def test_events_go_to_logs_only(spark: Any, server: ServerProcess, topic: str) -> None:
    rows = spark.range(0, 100, 1, 2).selectExpr(
        f"if(id = 99, '{topic}', '$logux/{topic}') as topic", "'t' as type"
    )
    check_refused(server, rows, f"begin with '$logux/', not to '{topic}'", encode="logux")
