"""Inputs that a fuzzer begins with, by target, and deterministic changes of them."""

import json
import random
import struct

import msgspec

from headrace.log.batch.blocks import encode_block
from headrace.log.commit.journal import (
    JournalHeader,
    encode_frame,
    encode_headers,
    encode_single,
    entry_seed,
)
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.payload.logux import Envelope, encode_envelope, raw_event
from headrace.wire.figg import messages as figg
from headrace.wire.wombat import messages as wombat

SMALL_MAX = 255
"""Longest message that a target's way to cut bytes into messages can hold."""


def _of_messages(*messages: bytes | str) -> bytes:
    out = b""
    for message in messages:
        data = message.encode() if isinstance(message, str) else message
        assert len(data) <= SMALL_MAX
        out += bytes([len(data)]) + data
    return out


_FIGG_PUBLISHES = b"".join(
    figg.encode_publish(topic, number, payload)
    for number, (topic, payload) in enumerate(
        [("foo", b"bar"), ("foo", b"baz"), ("fop", b""), ("orders/1", b"x" * 40), ("foo", b"qux")]
    )
)
_FIGG_TO_SERVER = (
    figg.encode_attach("foo", 0)
    + figg.encode_attach("bar", None)
    + figg.encode_ping(7)
    + _FIGG_PUBLISHES
    + figg.encode_detach("foo")
)
_FIGG_TO_CLIENT = (
    figg.encode_attached("foo", 12)
    + figg.encode_data("foo", 12, [struct.pack(">I", 3) + b"bar", struct.pack(">I", 0)])
    + figg.encode_ack(4)
    + figg.encode_pong(7)
    + figg.encode_detached("foo")
)
_WOMBAT_TO_SERVER = _of_messages(
    wombat.encode_attach("foo", None),
    wombat.encode_attach("foo", "1-12"),
    wombat.encode_publish("foo", 0, b"bar"),
    wombat.encode_publish("foo", 1, b"baz"),
    wombat.encode_publish("bar", 65_535, b""),
    wombat.encode_ping(7),
    wombat.encode_detach("foo"),
)
_WOMBAT_TO_CLIENT = _of_messages(
    wombat.encode_attached("foo", "1-12"),
    wombat.encode_ack("foo", 1),
    wombat.encode_detached("foo"),
    wombat.encode_pong(msgspec.msgpack.encode(7)),
)
_LOGUX = [
    ["connect", 0, "10:uuid", 0],
    ["connect", 5, "10:client:tab", 0, {"token": "secret", "subprotocol": 1}],
    ["connect", [0, 1], "10:uuid", 3, {"credentials": "a"}],
    ["sync", 1, {"type": "foo"}, [1, "10:uuid", 0]],
    [
        "sync",
        2,
        {"type": "logux/subscribe", "channel": "a"},
        {"id": [1, "10:client:tab", 0], "time": 1},
    ],
    ["ping", 1],
    ["pong", 1],
    ["synced", 1],
    ["error", "wrong-format", "x"],
    ["headers", {"language": "en"}],
]
_CHANNEL = [
    {"type": "hello", "processor": "a", "version": 1, "token": "secret"},
    {"type": "join", "channel": "c"},
    {"type": "send", "channel": "c", "number": 0, "json": {"a": [1, 2.5, None]}},
    {"type": "send", "channel": "c", "number": 1, "base64": "Zm9v"},
    {"type": "fetch", "channel": "c", "limit": 10},
    {"type": "ack", "channel": "c", "offset": 12},
    {"type": "leave", "channel": "c"},
    {"type": "ping"},
]


def _texts(values: list[object]) -> list[str]:
    return [json.dumps(value) for value in values]


def _a_block() -> bytes:
    records = struct.pack(">I", 3) + b"bar" + struct.pack(">I", 0)
    return encode_block("foo", records, 2) + encode_block("orders/1", records, 2)


def _a_journal() -> bytes:
    """Return a journal file with three commits and room for more."""
    header = JournalHeader(1, 0, 1, 0, 65_536, bytes(16))
    out = [encode_headers(header)]
    for sequence in (1, 2, 3):
        position = sum(map(len, out))
        record = struct.pack(">I", 3) + b"bar"
        seed = entry_seed(header.generation, sequence)
        entry = encode_single(5, 7 * sequence, sequence, 1_800_000_000_000, record, seed)
        out += encode_frame(header, position, sequence, sequence - 1, [entry])
    whole = b"".join(out)
    return whole + bytes(header.size - len(whole))


_HTTP = (
    b"GET /v1/topics?prefix=a%20b&limit=3 HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"
    b"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"
    b"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;a=b\r\nabc\r\n0\r\nTrailer: x\r\n\r\n"
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
)
_SETTINGS = b"""
data_dir = "/tmp/x"
durability = "written"
[listen]
figg = "127.0.0.1:0"
origins = ["same-host", "https://example.com"]
[retention]
age_s = "7d"
bytes = "10GiB"
[[topics]]
prefix = "orders/"
retention_age_s = 3600
[[access.token]]
name = "a"
sha256 = "a4f67fd53d3886557e64880502f73ebcd0daf728e43d4cd6ea09505f38ef78ea"
grants = ["http"]
"""

SEEDS: dict[str, list[bytes]] = {
    "figg_server": [_FIGG_TO_SERVER, _FIGG_PUBLISHES],
    "figg_client": [_FIGG_TO_CLIENT],
    "figg_session": [_FIGG_TO_SERVER],
    "wombat_server": [_WOMBAT_TO_SERVER],
    "wombat_client": [_WOMBAT_TO_CLIENT],
    "wombat_session": [_WOMBAT_TO_SERVER],
    "logux_messages": [text.encode() for text in _texts(_LOGUX)]
    + [msgspec.msgpack.encode(value) for value in _LOGUX],
    "logux_session": [
        _of_messages(*_texts([_LOGUX[0], *_LOGUX[3:]])),
        _of_messages(*_texts(_LOGUX[2:])),
    ],
    "logux5_session": [_of_messages(*_texts(_LOGUX[1:]))],
    "channel_messages": [text.encode() for text in _texts(_CHANNEL)]
    + [msgspec.msgpack.encode(value) for value in _CHANNEL],
    "channel_session": [_of_messages(*_texts(_CHANNEL))],
    "payloads": [
        b'[1, {"a": [null, 1e300]}]',
        encode_message(StoredMessage("a", 3, Content(b'{"a": 1}', True))),
        encode_message(StoredMessage("a", 3, Content(b"\x00\xff", False))),
        encode_envelope(Envelope(raw_event({"type": "foo"}), created=(1, "10:uuid", 0))),
    ],
    "batch_blocks": [_a_block()],
    "journal": [_a_journal()],
    "http_request": [_HTTP],
    "settings": [_SETTINGS],
}

_INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff" * 4,
    b"\x00" * 8,
    b"\xa0",
    b"\r\n",
    b"\n",
    b":",
    b"$",
)


def changed(seed: bytes, chance: random.Random) -> bytes:
    """Return the input with one to four changes, as a fuzzer makes them."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = chance.choice(_INTERESTING)
        elif kind == 2:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data[at:at] = data[at : at + chance.randint(1, 60)]
        else:
            data[at : at + 4] = chance.randbytes(4)
    return bytes(data)
