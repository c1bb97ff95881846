"""Every kind of bad input: it ends its own connection with a code and a reason, and harms nobody else."""

import socket
import struct
import zlib
from collections.abc import Iterable

import msgpack
import pytest
from websockets.frames import Opcode

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Dial, Start
from tests.system.support import metrics, resident_bytes
from tests.system.wombat.foreign import (
    ACK,
    ATTACH,
    ATTACHED,
    DETACH,
    DETACHED,
    PAYLOAD,
    PING,
    PONG,
    PUBLISH,
    Message,
    WebSocket,
    Wire,
    attach,
    detach,
    frame,
    message,
    pack,
    ping,
    publish,
)

MIB = 1024 * 1024
PAYLOAD_BYTES_MAX = 262_144
MESSAGE_BYTES_MAX = 2 * PAYLOAD_BYTES_MAX + 4096
PROTOCOL, TEXT, POLICY, TOO_BIG = 1002, 1003, 1008, 1009


def raw(kind: int, name: str, fields: bytes) -> bytes:
    """Encode a message whose fields are given as raw bytes."""
    return b"\x82" + pack("type") + pack(kind) + pack(name) + fields


def raw_publish(payload: bytes) -> bytes:
    return raw(
        PUBLISH,
        "publish",
        b"\x83" + pack("topic") + pack("t") + pack("sequence_number") + pack(9)
        # This is the last field, so that nothing has to follow it.
        + pack("message") + payload,
    )  # fmt: skip


def raw_topic(kind: int, name: str, topic: bytes) -> bytes:
    written = b"\xd9" + bytes([len(topic)]) + topic
    more = pack("message") + pack(b"x") + pack("sequence_number") + pack(9)
    return raw(kind, name, b"\x83" + pack("topic") + written + more)


def nested(depth: int, kind: bytes = b"\x91") -> bytes:
    return kind * depth + b"\xc0"


NOT_MESSAGES = {
    "nothing": b"",
    "a byte that MessagePack never uses": b"\xc1",
    "text": b"hello",
    "JSON": b'{"type": 6, "ping": {"timestamp": 1}}',
    "nil": pack(None),
    "a number": pack(6),
    "an array": pack([6, {"timestamp": 1}]),
    "an empty map": pack({}),
    "an extension": msgpack.packb(msgpack.ExtType(5, b"x")),
    "half a message": ping(1)[:-1],
    "half a publish": publish("t", 9, b"foo" * 100)[:150],
    "a byte too many": ping(1) + b"\0",
    "two messages in one": ping(1) + ping(2),
    "keys that are numbers": pack({6: {"timestamp": 1}}),
    "keys that are binary": pack({b"type": 6, b"ping": {b"timestamp": 1}}),
    "no type": pack({"ping": {"timestamp": 1}}),
    "a type alone": pack({"type": 6}),
    "type nil": pack({"type": None, "ping": {"timestamp": 1}}),
    "type text": pack({"type": "6", "ping": {"timestamp": 1}}),
    "type with a fraction": pack({"type": 6.5, "ping": {"timestamp": 1}}),
    "type true": pack({"type": True, "attach": {"topic": "t"}}),
    "type 0": pack({"type": 0, "": {}}),
    "type 10": pack({"type": 10, "ping": {"timestamp": 1}}),
    "type 65535": pack({"type": 65535, "ping": {"timestamp": 1}}),
    "a negative type": pack({"type": -6, "ping": {"timestamp": 1}}),
    "a type of 64 bits": pack({"type": 2**64 - 1, "ping": {"timestamp": 1}}),
    "another name than the type's": pack({"type": PING, "pong": {"timestamp": 1}}),
    "the name of another type": pack({"type": PING, "attach": {"topic": "t"}}),
    "fields that are an array": pack({"type": PING, "ping": [1]}),
    "fields that are nil": pack({"type": PING, "ping": None}),
    "fields that are text": pack({"type": ATTACH, "attach": "t"}),
}
FOR_CLIENTS = {
    "ATTACHED": message(ATTACHED, "attached", topic="t", serial="1@7"),
    "ACK": message(ACK, "ack", topic="t", sequence_number=1),
    "PAYLOAD": message(PAYLOAD, "payload", topic="t", serial="1@7", message=b"x"),
    "PONG": message(PONG, "pong", timestamp=1),
    "DETACHED": message(DETACHED, "detached", topic="t"),
}
MISSING = {
    "ATTACH without a topic": message(ATTACH, "attach", serial="1@7"),
    "DETACH without a topic": message(DETACH, "detach"),
    "PUBLISH without a topic": message(PUBLISH, "publish", message=b"x", sequence_number=1),
    "PUBLISH without a message": message(PUBLISH, "publish", topic="t", sequence_number=1),
    "PUBLISH without a number": message(PUBLISH, "publish", topic="t", message=b"x"),
    "PING without a timestamp": message(PING, "ping"),
}
WRONG_TYPES = {
    **{
        f"topic {value!r}": message(ATTACH, "attach", topic=value)
        for value in (None, 5, 1.5, True, b"t", ["t"], {"t": 1})
    },
    **{
        f"serial {value!r}": message(ATTACH, "attach", topic="t", serial=value)
        for value in (7, 1.5, True, b"1@7", ["1@7"], {})
    },
    **{
        f"a message of {value!r}": publish("t", 9, value)
        for value in (None, 5, 1.5, True, {}, [256], [-1], ["x"], [1.5], [None], [[1]], [True])
    },
    **{
        f"number {value!r}": message(
            PUBLISH, "publish", topic="t", message=b"x", sequence_number=value
        )
        for value in (None, -1, 2**32, 2**64 - 1, 1.5, "1", True, [1], b"1")
    },
    **{
        f"timestamp {value!r}": message(PING, "ping", timestamp=value)
        for value in (None, "1", b"1", True, [1], {})
    },
    "an extension as timestamp": raw(
        PING, "ping", b"\x81" + pack("timestamp") + b"\xd6\xff\0\0\0\0"
    ),
    "a message of text that is not UTF-8": raw_publish(b"\xa2\xff\xfe"),
    "a topic that is not UTF-8": raw_topic(ATTACH, "attach", b"\xff\xfe"),
    "a published topic that is not UTF-8": raw_topic(PUBLISH, "publish", b"a\xc3"),
    "a topic with a lone surrogate": raw_topic(PUBLISH, "publish", b"\xed\xa0\x80"),
    "a topic with overlong UTF-8": raw_topic(DETACH, "detach", b"\xc0\xaf"),
}
MONSTERS = {
    "arrays nested 100,000 deep": nested(100_000),
    "maps nested 100,000 deep": nested(100_000, b"\x81\xa0"),
    "fields nested 100,000 deep": raw(PING, "ping", nested(100_000)),
    "a message nested 100,000 deep": raw_publish(nested(100_000)),
    "a timestamp nested 100,000 deep": raw(
        PING, "ping", b"\x81" + pack("timestamp") + nested(100_000)
    ),
    "an unknown field nested 100,000 deep": b"\x83" + pack("x") + nested(100_000) + ping(1)[1:],
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff" + ping(1)[1:],
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "fields of 4 billion": raw(PING, "ping", b"\xdf\xff\xff\xff\xff"),
    "a message of 4 billion numbers": raw_publish(b"\xdd\xff\xff\xff\xff\1\2\3"),
    "a message of 4 billion bytes": raw_publish(b"\xc6\xff\xff\xff\xffabc"),
    "a message of 4 billion characters": raw_publish(b"\xdb\xff\xff\xff\xffabc"),
    "a message of 2 billion bytes": raw_publish(b"\xc6\x7f\xff\xff\xffabc"),
    "a topic of 4 billion characters": raw(ATTACH, "attach", b"\x81\xa5topic\xdb\xff\xff\xff\xfft"),
    "an unknown field of 4 billion": b"\x83" + pack("x") + b"\xdd\xff\xff\xff\xff" + ping(1)[1:],
    "an extension of 4 billion bytes": b"\x82" + pack("x") + b"\xc9\xff\xff\xff\xff\1",
    "64 KiB of array heads": b"\xdd\xff\xff\xff\xff" * 13_000,
}
NAMES = {
    "an empty topic": attach(""),
    "an empty topic to detach from": detach(""),
    "an empty topic to publish to": publish("", 9, b"x"),
    "a topic of 256 bytes": attach("x" * 256),
    "a topic of 256 bytes to detach from": detach("é" * 128),
    "a topic of 256 bytes to publish to": publish("x" * 256, 9, b"x"),
    "a topic of 200 KB": attach("x" * 200_000),
    "a topic that Logux writes": publish("$logux/a", 9, b"x"),
    "a topic that Channel writes": publish("$channel/a", 9, b"x"),
    "one of those with an array": publish("$logux/a", 9, [1]),
}
TOO_LARGE = {
    "262,145 bytes": publish("t", 9, bytes(PAYLOAD_BYTES_MAX + 1)),
    "262,145 characters": publish("t", 9, "x" * (PAYLOAD_BYTES_MAX + 1)),
    "131,073 characters of two bytes": publish("t", 9, "é" * (PAYLOAD_BYTES_MAX // 2 + 1)),
    "262,145 numbers": publish("t", 9, [0] * (PAYLOAD_BYTES_MAX + 1)),
    "500,000 bytes": publish("t", 9, bytes(500_000)),
}
BAD = [
    *((f"{name}: {what}", bad, code)
      for name, code, kind in [
          ("not a message", PROTOCOL, NOT_MESSAGES),
          ("for clients", PROTOCOL, FOR_CLIENTS),
          ("missing", PROTOCOL, MISSING),
          ("wrong type", PROTOCOL, WRONG_TYPES),
          ("monster", PROTOCOL, MONSTERS),
          ("name", POLICY, NAMES),
          ("too large", TOO_BIG, TOO_LARGE),
      ]
      for what, bad in kind.items()),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "code"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_a_bad_message_closes_its_connection_after_acknowledging_what_came_before(
    dial: Dial, name: str, bad: bytes, code: int
) -> None:
    bystander, sinner, publisher = dial(), dial(), dial()
    bystander.attach(name)
    sinner.send(publish(name, 7, b"before"), bad, publish(name, 8, b"too late"))
    messages, closed = sinner.until_closed()
    assert messages == [Message(ACK, name, number=7)]
    assert closed.code == code, closed.reason
    assert closed.reason
    publisher.publish(name, b"after")
    assert [found.data for found in bystander.expect_payloads(2)] == [b"before", b"after"]
    assert bystander.alive()


def _frame(opcode: int, data: bytes, *, flags: int = 0x80, masked: bool = True) -> bytes:
    """Make a frame that the library would refuse to make; its mask is 0, which changes nothing."""
    mask, bit = (bytes(4), 0x80) if masked else (b"", 0)
    if len(data) < 126:
        head = struct.pack(">BB", flags | opcode, bit | len(data))
    elif len(data) < 1 << 16:
        head = struct.pack(">BBH", flags | opcode, bit | 126, len(data))
    else:
        head = struct.pack(">BBQ", flags | opcode, bit | 127, len(data))
    return head + mask + data


TEXTS = {
    "a text": frame(b"hello", Opcode.TEXT),
    "an empty text": frame(b"", Opcode.TEXT),
    "a long text": frame(b"hello " * 1000, Opcode.TEXT),
    "a long text beyond ASCII": frame("é€😀".encode() * 100, Opcode.TEXT),
    "the beginning of a text": frame(b"hello", Opcode.TEXT, fin=False),
    "MessagePack as text": _frame(Opcode.TEXT, ping(1)),
    "JSON as text": frame(b'{"type": 6, "ping": {"timestamp": 1}}', Opcode.TEXT),
}


@pytest.mark.parametrize("bad", TEXTS.values(), ids=TEXTS.keys())
def test_a_text_is_not_part_of_the_protocol(dial: Dial, name: str, bad: bytes) -> None:
    sinner = dial()
    sinner.send_bytes(frame(publish(name, 7, b"before")), bad, frame(publish(name, 8, b"late")))
    messages, closed = sinner.until_closed()
    assert messages == [Message(ACK, name, number=7)]
    assert closed.code == TEXT
    assert closed.reason
    reader = dial()
    assert reader.attach(name).endswith("@10")


# Frames


LONG = publish("t", 1, b"x" * 200)
BIN, CONT, PING_FRAME, PONG_FRAME, CLOSE = 2, 0, 9, 10, 8

BAD_FRAMES: dict[str, tuple[bytes, Iterable[int]]] = {
    "not masked": (_frame(BIN, ping(1), masked=False), [PROTOCOL]),
    "a long one, not masked": (_frame(BIN, LONG, masked=False), [PROTOCOL]),
    **{
        f"opcode {opcode}": (_frame(opcode, ping(1)), [PROTOCOL])
        for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)
    },
    "a ping of 126 bytes": (_frame(PING_FRAME, bytes(126)), [PROTOCOL]),
    "a pong of 70,000 bytes": (_frame(PONG_FRAME, bytes(70_000)), [PROTOCOL]),
    "a close of 126 bytes": (_frame(CLOSE, b"\x03\xe8" + b"x" * 124), [PROTOCOL]),
    "a ping in fragments": (_frame(PING_FRAME, b"x", flags=0), [PROTOCOL]),
    "a close in fragments": (_frame(CLOSE, b"\x03\xe8", flags=0), [PROTOCOL]),
    "a close of one byte": (_frame(CLOSE, b"\x03"), [PROTOCOL]),
    **{
        f"a close with code {code}": (_frame(CLOSE, struct.pack(">H", code)), [PROTOCOL])
        for code in (1, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65535)
    },
    "a close whose reason is not UTF-8": (_frame(CLOSE, b"\x03\xe8\xff"), [PROTOCOL, 1007]),
    "a continuation of nothing": (_frame(CONT, ping(1)), [PROTOCOL]),
    "a long continuation of nothing": (_frame(CONT, b"x" * 200), [PROTOCOL]),
    "a continuation of nothing that goes on": (_frame(CONT, ping(1), flags=0), [PROTOCOL]),
    "a long continuation of nothing that goes on": (_frame(CONT, LONG, flags=0), [PROTOCOL]),
    "a message inside another": (
        _frame(BIN, ping(1)[:5], flags=0) + _frame(BIN, ping(1)),
        [PROTOCOL],
    ),
    "a long message inside another": (
        _frame(BIN, LONG[:150], flags=0) + _frame(BIN, LONG),
        [PROTOCOL],
    ),
    "a text inside a message": (
        _frame(BIN, LONG[:150], flags=0) + _frame(Opcode.TEXT, b"x"),
        [PROTOCOL, TEXT],
    ),
    "a length written too long": (b"\x82\xfe\x00\x05" + bytes(4) + b"hello", [PROTOCOL]),
    "a length written far too long": (
        b"\x82\xff" + (200).to_bytes(8, "big") + bytes(4) + LONG[:200],
        [PROTOCOL],
    ),
    "a negative length": (b"\x82\xff" + b"\xff" * 8, [PROTOCOL, TOO_BIG]),
    "a frame of 8 exabytes": (b"\x82\xff\x7f" + b"\xff" * 7, [TOO_BIG]),
    "a frame of a gigabyte": (b"\x82\xff" + (1 << 30).to_bytes(8, "big"), [TOO_BIG]),
    "a frame of a byte too many": (
        b"\x82\xff" + (MESSAGE_BYTES_MAX + 1).to_bytes(8, "big"),
        [TOO_BIG],
    ),
    "a text of a gigabyte": (b"\x81\xff" + (1 << 30).to_bytes(8, "big"), [TOO_BIG]),
    "a whole frame of a byte too many": (
        _frame(BIN, bytes(MESSAGE_BYTES_MAX + 1)),
        [TOO_BIG],
    ),
    "fragments of a byte too many": (
        _frame(BIN, bytes(MESSAGE_BYTES_MAX), flags=0) + _frame(CONT, b"x"),
        [TOO_BIG],
    ),
    "many fragments of a byte too many": (
        _frame(BIN, b"", flags=0) + _frame(CONT, bytes(1000), flags=0) * 529,
        [TOO_BIG],
    ),
}


@pytest.mark.parametrize(("bad", "codes"), BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
@pytest.mark.parametrize("together", [False, True], ids=["alone", "behind others"])
def test_a_bad_frame_closes_its_connection_and_nothing_behind_it_is_read(
    dial: Dial, name: str, bad: bytes, codes: Iterable[int], together: bool
) -> None:
    bystander, sinner = dial(), dial()
    bystander.attach(name)
    before = [frame(publish(name, 7 + number, b"before")) for number in range(3)]
    if not together:
        sinner.send_bytes(*before)
        assert sinner.wait_ack(name, 9)
        before = []
    late = [frame(publish(name, 20 + number, b"too late")) for number in range(300)]
    sinner.send_bytes(*before, bad, *late)
    messages, closed = sinner.until_closed()
    # A peer that sends invalid frames may be closed before the ACK of its simultaneous publishes.
    assert {found.topic for found in messages} <= {name}
    assert {found.type for found in messages} <= {ACK}
    assert closed.code in codes, closed.reason
    assert closed.reason
    dial().publish(name, b"after")
    received = [found.data for found in bystander.expect_payloads(4)]
    assert received == [b"before"] * 3 + [b"after"]
    assert bystander.alive()


def test_a_message_that_is_compressed_unasked_is_refused(dial: Dial, name: str) -> None:
    sinner = dial()
    deflate = zlib.compressobj(wbits=-15)
    compressed = deflate.compress(publish(name, 1, b"x" * 1000)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    sinner.send_bytes(_frame(BIN, compressed[:-4], flags=0xC0))
    messages, closed = sinner.until_closed()
    assert messages == []
    assert closed.code == PROTOCOL
    assert closed.reason


def test_a_size_is_judged_from_the_header_and_costs_nothing(
    server: ServerProcess, dial: Dial
) -> None:
    """Only the header is sent, so a server that waits for the body would wait until the test times out."""
    before = resident_bytes(server.pid)
    for _ in range(20):
        sinner = dial()
        sinner.send_bytes(b"\x82\xff" + (1 << 32).to_bytes(8, "big"))
        messages, closed = sinner.until_closed()
        assert messages == []
        assert closed.code == TOO_BIG
        assert resident_bytes(server.pid) - before < 16 * MIB


def test_what_comes_of_a_frame_that_is_too_large_is_not_kept(
    server: ServerProcess, dial: Dial
) -> None:
    before = resident_bytes(server.pid)
    sinner = dial()
    sinner.send_bytes(b"\x82\xff" + (1 << 32).to_bytes(8, "big"))
    try:
        for _ in range(64):
            sinner.send_bytes(bytes(MIB))
    except OSError:
        pass  # the server may close the connection
    assert resident_bytes(server.pid) - before < 16 * MIB
    assert dial().alive()


@pytest.mark.parametrize("part", [b"", b"x", b"xx"], ids=["empty", "one byte", "two bytes"])
def test_fragments_without_end_cost_bounded_memory(
    server: ServerProcess, dial: Dial, part: bytes
) -> None:
    before = resident_bytes(server.pid)
    sinner = dial()
    sinner.send_bytes(_frame(BIN, LONG[:150], flags=0))
    fragments = _frame(CONT, part, flags=0) * 20_000
    try:
        for _ in range(100):
            sinner.send_bytes(fragments)
            assert resident_bytes(server.pid) - before < 8 * MIB
    except OSError:
        assert part, "empty fragments are not too large"
    assert dial().alive()


def test_announced_lengths_cost_no_memory(server: ServerProcess, dial: Dial) -> None:
    before = resident_bytes(server.pid)
    for bad in MONSTERS.values():
        sinner = dial()
        sinner.send(bad)
        sinner.until_closed()
        sinner.close()
        assert resident_bytes(server.pid) - before < 16 * MIB


def test_the_largest_message_is_not_refused(wombat: Wire) -> None:
    topic = "y" * 255
    wombat.send(publish(topic, 2**32 - 1, [255] * PAYLOAD_BYTES_MAX))
    assert wombat.wait_ack(topic, 2**32 - 1)


def test_a_topic_too_many_is_refused(dial: Dial, name: str) -> None:
    wire = dial()
    wire.send(*(attach(f"{name}/{number}") for number in range(1001)))
    messages, closed = wire.until_closed()
    assert {found.type for found in messages} == {ATTACHED}
    assert len(messages) == 1000
    assert closed.code == POLICY
    assert "topics_attached_max" in closed.reason


def test_why_a_connection_was_closed_is_logged_and_counted(start: Start) -> None:
    server = start()  # a busy one sums up what one address does
    key = "headrace_connections_closed_for_bad_input_total"
    for bad, word in [
        (frame(pack({"type": 4711})), "4711"),
        (_frame(5, b""), "opcode"),
        (b"\x82\xff" + (123456789).to_bytes(8, "big"), "123456789"),
    ]:
        logged, counted = len(server.stderr), metrics(server)[key]
        with Wire(server.ws) as wire:
            wire.send_bytes(bad)
            _, closed = wire.until_closed()
        assert word in closed.reason
        if closed.code != TOO_BIG:  # refused publishes of an address are logged as a sum
            wait_until(lambda: word in server.stderr[logged:], 30, f"{word} in the log")  # noqa: B023
        assert metrics(server)[key] == counted + 1


def test_half_a_message_followed_by_the_end_of_the_connection_does_no_harm(
    dial: Dial, name: str
) -> None:
    whole = frame(publish(name, 0, b"foo"))
    for size in range(1, len(whole)):
        with dial() as wire:
            wire.send_bytes(whole[:size])
    dial().publish(name, b"only")
    reader = dial()
    reader.attach(name, "@0")
    assert reader.expect(PAYLOAD).data == b"only"


def test_a_peer_that_stops_in_the_middle_of_a_message_delays_nobody(
    wombat: Wire, dial: Dial, name: str
) -> None:
    whole = frame(publish(name, 0, bytes(200_000)))
    wombat.send_bytes(whole[:100_000])
    dial().publish(name, b"foo")
    wombat.send_bytes(whole[100_000:])
    wombat.wait_ack(name, 0)
    reader = dial()
    reader.attach(name, "@0")
    assert [len(found.data) for found in reader.expect_payloads(2)] == [3, 200_000]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (_frame(5, b""), PROTOCOL),
        (_frame(BIN, ping(1), masked=False), PROTOCOL),
        (_frame(BIN, b"\xc1"), PROTOCOL),
        (_frame(Opcode.TEXT, b"hello"), TEXT),
        (b"\x82\xff" + (1 << 40).to_bytes(8, "big"), TOO_BIG),
    ],
    ids=["opcode", "unmasked", "not MessagePack", "text", "too large"],
)
def test_bad_input_in_one_piece_with_the_handshake_is_refused_as_well(
    server: ServerProcess, dial: Dial, name: str, bad: bytes, code: int
) -> None:
    late = b"".join(frame(publish(name, number, bytes(100))) for number in range(2000))
    websocket = WebSocket(server.ws)
    with socket.create_connection(server.ws, timeout=30) as connection:
        connection.sendall(websocket.to_send() + bad + late)
        messages: list[Message] = []
        while websocket.closed is None:
            data = connection.recv(65536)
            assert data, "closed without a word"
            messages += websocket.feed(data)
    assert messages == []
    assert websocket.closed.code == code
    assert websocket.closed.reason
    assert dial().attach(name).endswith("@0"), "nothing behind it was stored"
