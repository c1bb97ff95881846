"""Lines of a trace from bytes, and traces whose reader is slow, without a server."""

import json
from typing import Any

import msgspec
import pytest

from headrace.server.trace.lines import PAYLOAD_BYTES_MAX, PAYLOADS_MAX, Line
from headrace.server.trace.outlines import outline
from headrace.server.trace.tracing import TRACE_BYTES_MAX, TRACES_MAX, Filter, Trace, Tracing
from headrace.wire import readers, websocket
from headrace.wire.figg import messages as figg
from headrace.wire.logux import messages as logux
from headrace.wire.wombat import messages as wombat

SECRET = "the-secret-token"


class Peer:
    """The part of a connection that a trace sees."""

    def __init__(self, protocol: str = "figg", port: int = 1) -> None:
        self.protocol = protocol
        self.peer = f"10.0.0.1:{port}"
        self.names = (self.peer, "10.0.0.1")
        self.unfinished = b""
        self.only_topic = None


class Bench:
    """Traces of connections that do not exist."""

    def __init__(self) -> None:
        self.attached: Tracing | None = None
        self.lost = 0
        self.tracing = Tracing(self._attach, lambda: 7, self._count_lost)

    def _attach(self, tracing: Tracing | None) -> None:
        self.attached = tracing

    def _count_lost(self) -> None:
        self.lost += 1


async def taken(trace: Trace) -> list[dict[str, Any]]:
    """Return the lines that wait for the reader."""
    async for lines in trace.lines():
        return [json.loads(line) for line in lines.splitlines()]
    return []


def shown(lines: list[Line], *, payloads: bool = False) -> list[dict[str, Any]]:
    return [line.shown(payloads=payloads) for line in lines]


RECORD = b"\0\0\0\3foo"


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_figg_is_shown_in_both_directions(piece):
    found = outline("figg", b"", None)
    sent_by_client = b"".join(
        [
            figg.encode_attach("orders", 7),
            figg.encode_ping(5),
            figg.encode_of_reader(
                readers.Read("orders", "billing", newest=True, instance=9, window=100)
            ),
        ]
    )
    lines: list[Line] = []
    for at in range(0, len(sent_by_client), piece):
        lines += found.received(sent_by_client[at : at + piece])
    assert shown(lines) == [
        {"kind": "attach", "topic": "orders", "offset": 7},
        {"kind": "ping", "timestamp": 5},
        {"kind": "read", "topic": "orders", "reader": "billing", "newest": True, "window": 100},
    ]
    answers = figg.encode_attached("orders", 7) + figg.encode_data("orders", 7, [RECORD] * 3)
    assert shown(found.sent(answers + figg.encode_ack(4))) == [
        {"kind": "attached", "topic": "orders", "offset": 7},
        {
            "kind": "data",
            "topic": "orders",
            "messages": 3,
            "bytes": 9,
            "next_offset": 14,
            "to_next_offset": 28,
        },
        {"kind": "ack", "number": 4},
    ]


def test_publishes_of_one_read_are_one_line_for_each_topic():
    found = outline("figg", b"", None)
    data = b"".join(figg.encode_publish("a", number, b"foo") for number in range(10, 200))
    data += figg.encode_publish("b", 200, b"x" * 5)
    assert shown(found.received(data)) == [
        {"kind": "publish", "topic": "a", "messages": 190, "bytes": 570, **NUMBERS},
        {"kind": "publish", "topic": "b", "bytes": 5, **NUMBERS},
    ]


NUMBERS = {"number": 10, "to_number": 200}


def test_more_messages_than_one_call_decodes_are_all_shown():
    data = b"".join(figg.encode_ping(number) for number in range(1000))
    found = shown(outline("figg", b"", None).received(data))
    assert [line["timestamp"] for line in found] == list(range(1000))


def test_a_trace_that_begins_in_the_middle_of_a_message_shows_it_whole():
    data = figg.encode_publish("orders", 3, b"x" * 1000)
    found = outline("figg", data[:500], None)
    assert shown(found.received(data[500:])) == [
        {"kind": "publish", "topic": "orders", "bytes": 1000, "number": 3}
    ]


def test_what_breaks_the_protocol_is_shown_with_the_reason():
    (line,) = shown(outline("figg", b"", None).received(b"\xff" * 100))
    assert line == {"kind": "bad", "reason": "unknown message type 65535"}
    (line,) = shown(outline("channel", b"", None).received(["{"]))
    assert line["kind"] == "bad"
    (line,) = shown(outline("logux", b"", "$logux/main").received(["[]"]))
    assert line["kind"] == "bad"


def test_wombat_is_shown_in_both_directions():
    found = outline("wombat", b"", None)
    messages = [wombat.encode_publish("orders", number, b"foo") for number in (4, 5)]
    assert shown(found.received([wombat.encode_attach("orders", "1@7"), *messages])) == [
        {"kind": "attach", "topic": "orders", "serial": "1@7"},
        {
            "kind": "publish",
            "topic": "orders",
            "messages": 2,
            "bytes": 6,
            "number": 4,
            "to_number": 5,
        },
    ]
    answers = wombat.encode_payloads("orders", 1, 7, [RECORD, RECORD])
    answers += wombat.encode_ack("orders", 5) + websocket.frame(b"", websocket.PONG)
    assert shown(found.sent(answers)) == [
        {
            "kind": "payload",
            "topic": "orders",
            "messages": 2,
            "bytes": 6,
            "serial": "1@14",
            "to_serial": "1@21",
        },
        {"kind": "ack", "topic": "orders", "number": 5},
        {"kind": "pong"},
    ]


@pytest.mark.parametrize("binary", [False, True])
def test_logux_is_shown_without_credentials(binary):
    found = outline("logux", b"", "$logux/main")

    def packed(message: list[Any]) -> bytes | str:
        data = logux.pack(message, binary=binary)
        return data if binary else data.decode()

    connect = packed(["connect", [0, 0], "node", 0, {"credentials": SECRET}])
    sync = packed(["sync", 2, {"type": "a"}, [1, "node", 0], {"type": "b"}, [2, "node", 0]])
    lines = found.received([connect, sync])
    first, second = shown(lines)
    assert first == {"kind": "connect", "topic": "$logux/main", "host": "node", "synced": 0}
    assert (second["kind"], second["messages"], second["added"]) == ("sync", 2, 2)
    assert SECRET not in str(shown(lines, payloads=True))
    assert shown(lines, payloads=True)[1]["payloads"] == ['{"type":"a"}', '{"type":"b"}']
    (answer,) = shown(found.sent(logux.encode(["synced", 2], binary=binary)))
    assert answer == {"kind": "synced", "topic": "$logux/main", "synced": 2}


@pytest.mark.parametrize("binary", [False, True])
def test_channels_are_shown_without_tokens(binary):
    found = outline("channel", b"", None)
    pack = msgspec.msgpack.encode if binary else lambda one: msgspec.json.encode(one).decode()
    hello = pack({"type": "hello", "processor": "p", "token": SECRET})
    send = pack({"type": "send", "channel": "doc", "number": 1, "payload": {"a": 1}})
    lines = found.received([hello, send])
    assert shown(lines) == [
        {"kind": "hello", "processor": "p"},
        {"kind": "send", "topic": "$channel/doc", "bytes": 7, "number": 1},
    ]
    assert SECRET not in str(shown(lines, payloads=True))
    held = [{"offset": at, "processor": "p", "number": 1, "ms": 1, "payload": 5} for at in (9, 18)]
    message = {"type": "messages", "channel": "doc", "count": 2, "messages": held, "more": False}
    (line,) = shown(found.sent(logux.encode(message, binary=binary)), payloads=True)
    assert line == {
        "kind": "messages",
        "topic": "$channel/doc",
        "messages": 2,
        "bytes": 2,
        "more": False,
        "offset": 9,
        "to_offset": 18,
        "payloads": ["5", "5"],
    }


def test_payloads_are_cut():
    payloads = [b"\xff" * 10_000] * 100
    line = Line("data", "t", messages=100, size=10**6, payloads=payloads)
    cut = line.shown(payloads=True)["payloads"]
    assert len(cut) == PAYLOADS_MAX
    assert cut[0] == "\\xff" * PAYLOAD_BYTES_MAX
    assert "payloads" not in line.shown(payloads=False)


# Who is followed


async def test_connections_call_nobody_unless_there_is_a_trace():
    bench = Bench()
    assert bench.attached is None
    first = bench.tracing.begin(Filter("t", None, payloads=False))
    second = bench.tracing.begin(Filter("t", None, payloads=False))
    assert bench.attached is bench.tracing
    bench.tracing.end(first)
    assert bench.attached is bench.tracing
    bench.tracing.end(second)
    assert bench.attached is None


async def test_the_number_of_traces_is_limited():
    bench = Bench()
    for _ in range(TRACES_MAX):
        assert not bench.tracing.is_full
        bench.tracing.begin(Filter("t", None, payloads=False))
    assert bench.tracing.is_full


async def test_a_trace_of_a_topic_shows_also_the_acknowledgements_of_those_who_use_it():
    bench = Bench()
    trace = bench.tracing.begin(Filter("orders", None, payloads=False))
    user, other = Peer(port=1), Peer(port=2)
    bench.tracing.received(user, figg.encode_publish("orders", 0, b"foo"))
    bench.tracing.received(other, figg.encode_publish("others", 0, b"foo"))
    for peer in (user, other):
        bench.tracing.sent(peer, figg.encode_ack(0))
        bench.tracing.lost(peer)
    found = await taken(trace)
    assert {line["peer"] for line in found} == {user.peer}
    assert [line["kind"] for line in found] == ["publish", "ack", "gone"]
    assert found[0]["ms"] == 7
    assert [line["direction"] for line in found] == ["in", "out", "in"]


async def test_a_trace_of_a_peer_shows_no_other():
    bench = Bench()
    trace = bench.tracing.begin(Filter(None, "10.0.0.1:2", payloads=False))
    for port in (1, 2, 3):
        bench.tracing.received(Peer(port=port), figg.encode_ping(port))
    assert [line["timestamp"] for line in await taken(trace)] == [2]


async def test_a_peer_that_gets_another_name_is_shown_from_then_on_in_whole_messages():
    bench = Bench()
    trace = bench.tracing.begin(Filter(None, "billing", payloads=False))
    peer = Peer()
    data = figg.encode_publish("orders", 3, b"x" * 100)
    bench.tracing.received(peer, data[:50])
    peer.unfinished, peer.names = data[:50], (*peer.names, "billing")
    bench.tracing.received(peer, data[50:])
    assert [(line["kind"], line["bytes"]) for line in await taken(trace)] == [("publish", 100)]


async def test_a_slow_reader_loses_lines_and_is_told_how_many():
    bench = Bench()
    trace = bench.tracing.begin(Filter(None, "10.0.0.1", payloads=True))
    peer = Peer()
    count = 0
    while not bench.lost:
        bench.tracing.received(peer, figg.encode_publish("t", count, b"x" * PAYLOAD_BYTES_MAX))
        count += 1
    assert count * PAYLOAD_BYTES_MAX < TRACE_BYTES_MAX + 4 * PAYLOAD_BYTES_MAX
    bench.tracing.received(peer, figg.encode_ping(1))  # there would be room for this one
    *lines, last = await taken(trace)
    assert last == {"kind": "lost", "lines": 2}
    assert bench.lost == 2
    assert [line["number"] for line in lines] == list(range(count - 1))
    bench.tracing.received(peer, figg.encode_ping(2))
    assert [line["kind"] for line in await taken(trace)] == ["ping"]


async def test_the_end_of_the_server_ends_every_trace():
    bench = Bench()
    trace = bench.tracing.begin(Filter("t", None, payloads=False))
    bench.tracing.close()
    assert bench.tracing.is_full
    assert await taken(trace) == []


async def test_an_error_in_a_trace_is_logged_and_leaves_the_connection_alone(caplog):
    bench = Bench()
    trace = bench.tracing.begin(Filter(None, "10.0.0.1", payloads=False))
    bench.tracing.received(Peer(), "no bytes")
    assert "internal error in a trace" in caplog.text
    bench.tracing.received(Peer(port=2), figg.encode_ping(1))
    assert [line["kind"] for line in await taken(trace)] == ["ping"]
