"""Inputs that a fuzzer begins with, by target. Elsewhere: their changes (`changes.py`, `checksums.py`)."""

import struct
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgspec
from crc32c import crc32c

from headrace.config.settings import Config
from headrace.log.batch.blocks import encode_block
from headrace.log.commit.journal import (
    CRC,
    NOTE,
    SECTOR_BYTES,
    JournalHeader,
    NoteEntry,
    encode_entry,
    encode_frame,
    encode_headers,
    encode_single,
    entry_seed,
)
from headrace.payload.channel import Content, StoredMessage, encode_message, encode_row
from headrace.payload.logux import Envelope, encode_envelope, raw_event
from headrace.wire import readers, tokens
from headrace.wire.figg import messages as figg
from headrace.wire.wombat import messages as wombat

TOKEN = "secret"
"""The token that messages show."""
SMALL_MAX = 255
"""Longest message that a target's way to cut bytes into messages can hold."""


def joined(messages: Sequence[bytes]) -> bytes:
    """Return messages as one input: a byte with the length before each. `targets.messages_of` cuts it."""
    return b"".join(bytes([len(one)]) + one for one in messages if len(one) <= SMALL_MAX)


def _record(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


# Figg and Wombat

_READ = readers.Read("foo", "billing", True, 7, 65_536)
_HANDLED = readers.Handled("foo", 3, 12, 2)
_OF_READER: list[readers.ToClient] = [
    readers.Waiting("foo", 2),
    readers.Reading("foo", 3, 0, True, 1, 12, 2),
    readers.Records("foo", 1, 12, 2, 1_800_000_000_000, _record(b"bar") + _record(b"")),
    readers.Stored("foo", 3, 12),
    readers.Lost("foo", readers.SUPERSEDED, "another connection reads now"),
]
_OF_TOKEN: list[tokens.ToClient] = [
    tokens.AuthOk(60_000),
    tokens.AuthRefused(tokens.FORBIDDEN, "no grant for publish:foo"),
]
_FIGG_PUBLISHES = b"".join(
    figg.encode_publish(topic, number, payload)
    for number, (topic, payload) in enumerate(
        [("foo", b"bar"), ("foo", b"baz"), ("fop", b""), ("orders/1", b"x" * 40), ("foo", b"qux")]
    )
)
_FIGG_EQUAL = b"".join(figg.encode_publish("foo", number, b"12345") for number in range(40))
_FIGG_TO_SERVER = (
    figg.encode_attach("foo", 0)
    + figg.encode_attach("bar", None)
    + figg.encode_ping(7)
    + _FIGG_PUBLISHES
    + figg.encode_of_reader(_READ)
    + figg.encode_of_reader(_HANDLED)
    + figg.encode_detach("foo")
)
_FIGG_AUTH = figg.encode_auth(TOKEN) + figg.encode_attach("foo", 0)
_FIGG_TO_CLIENT = (
    b"".join(map(figg.encode_auth_answer, _OF_TOKEN[:1]))
    + figg.encode_attached("foo", 12)
    + figg.encode_data("foo", 12, [_record(b"bar"), _record(b""), _record(b"baz")])
    + figg.encode_ack(4)
    + figg.encode_pong(7)
    + b"".join(map(figg.encode_of_reader, _OF_READER))
    + figg.encode_detached("foo")
    + b"".join(map(figg.encode_auth_answer, _OF_TOKEN[1:]))
)
_WOMBAT_TO_SERVER = [
    wombat.encode_auth(TOKEN),
    wombat.encode_attach("foo", None),
    wombat.encode_attach("foo", "1@12"),
    wombat.encode_publish("foo", 0, b"bar"),
    wombat.encode_publish("foo", 1, b"baz"),
    wombat.encode_publish("bar", 65_535, b""),
    wombat.encode_publish("foo", 1, b"baz"),
    wombat.encode_ping(7),
    wombat.encode_of_reader(_READ),
    wombat.encode_of_reader(_HANDLED),
    wombat.encode_detach("foo"),
]
_WOMBAT_TO_CLIENT = [
    {"type": wombat.ATTACHED, "attached": {"topic": "foo", "serial": "1@12"}},
    {
        "type": wombat.PAYLOAD,
        "payload": {"topic": "foo", "serial": "1@19", "message": b"bar"},
    },
    {"type": wombat.ACK, "ack": {"topic": "foo", "sequence_number": 1}},
    {"type": wombat.PONG, "pong": {"timestamp": 7}},
    *(
        {"type": readers.TYPES[type(one)], readers.NAMES[readers.TYPES[type(one)]]: one}
        for one in _OF_READER
    ),
    *(
        {"type": tokens.TYPES[type(one)], tokens.NAMES[tokens.TYPES[type(one)]]: one}
        for one in _OF_TOKEN
    ),
    {"type": wombat.DETACHED, "detached": {"topic": "foo"}},
]

# Logux and channels

_LOGUX = [
    ["connect", [0, 0], "client1", {"token": TOKEN}],
    ["connect", [0, 1], "10:uuid", 3, {"credentials": "a", "subprotocol": "1.0.0"}],
    ["sync", 1, {"type": "foo"}, [1, "10:uuid", 0], {"type": "bar", "a": [None]}, [2.5, "b", 1]],
    ["synced", 1],
    ["ping", 1],
    ["pong", 1],
    ["connected", [0, 1], "server", [1, 2]],
    ["error", "wrong-format", "x"],
    ["headers", {"language": "en"}],
    ["own", 1],
]
_SUBSCRIBE = {"type": "logux/subscribe", "channel": "a", "filter": {"x": 1}}
_SINCE = {"id": "1 server:at:1:12 0", "time": 1}
_LOGUX_5 = [
    ["headers", {"language": "en"}],
    ["connect", 5, "10:client:tab", 0, {"token": TOKEN, "subprotocol": 1}],
    ["sync", 2, _SUBSCRIBE, {"id": [1, "10:client:tab", 0], "time": 1}],
    [
        *("sync", 3),
        *({"type": "a", "channel": "a"}, {"id": 2, "time": 2}),
        *({"type": "logux/unsubscribe", "channel": "a"}, {"id": [2, 1], "time": 2}),
        *({"type": "logux/undo", "id": "1 a 0"}, {"id": [3, "11:b:c", 1], "time": 3, "x": 1}),
    ],
    ["sync", 4, _SUBSCRIBE | {"channel": "b", "since": _SINCE}, {"id": [4, 0], "time": 4}],
    ["synced", 1],
    ["ping", 1],
    ["pong", 1],
]
_CHANNEL = [
    {"type": "hello", "processor": "a", "token": TOKEN, "instance": "i", "attempt": 1},
    {"type": "join", "channel": "c", "receive": "signal", "from": "state", "lease_s": 60},
    {"type": "join", "channel": "d", "from": 12},
    {"type": "send", "channel": "c", "number": 1, "payload": {"a": [1, 2.5, None]}},
    {"type": "fetch", "channel": "c", "ack": 3, "max": 10},
    {"type": "ack", "channel": "c", "offset": 12},
    {"type": "upload", "channel": "c", "offset": 12, "payload": {"a": 1}},
    {"type": "snapshot", "channel": "c"},
    {"type": "ping"},
    {"type": "leave", "channel": "c", "forget": True},
]
_BYTES_OF_CHANNEL = [
    {"type": "send", "channel": "c", "number": 2, "bytes": b"foo"},
    {"type": "upload", "channel": "c", "offset": 12, "bytes": b"foo"},
]


def _json(values: Sequence[object]) -> list[bytes]:
    return list(map(msgspec.json.encode, values))


def _msgpack(values: Sequence[object]) -> list[bytes]:
    return list(map(msgspec.msgpack.encode, values))


def _session(values: Sequence[object]) -> list[bytes]:
    """Return all messages of a connection in both encodings."""
    return [joined(_json(values)), joined(_msgpack(values))]


# Payloads and files

_MESSAGE = StoredMessage("a", 3, Content(b'{"a": 1}', True))
_PAYLOADS = [
    b'[1, {"a": [null, 1e300]}]',
    encode_message(_MESSAGE),
    encode_row(_MESSAGE._replace(number=0)),
    encode_message(StoredMessage("a" * 40, 300, Content(b"\x00\xff", False))),
    encode_envelope(Envelope(raw_event({"type": "foo"}), created=[1, "10:uuid", 0], origin="a")),
    encode_envelope(Envelope(raw_event({"type": "foo"}), created=["x", 2.5])),
    encode_envelope(Envelope(raw_event({"type": "foo"}), id="1 10:client:tab 0", time=1, meta={})),
]


def _blocks() -> bytes:
    records = _record(b"bar") + _record(b"")
    return (
        encode_block("foo", records, 2)
        + encode_block("orders/1", records, 2)
        + encode_block("$channel/c", b"".join(map(_record, _PAYLOADS[1:3])), 2)
        + encode_block("$logux/main", _record(_PAYLOADS[4]), 1)
    )


_MS = 1_800_000_000_000
JOURNAL_BYTES = 24_576
_NOTE = msgspec.msgpack.encode(NoteEntry(b"n", 0))


def _journal() -> bytes:
    """Return a journal file with three commits and room for more."""
    header = JournalHeader(1, 0, 1, 0, JOURNAL_BYTES, bytes(16))
    whole = encode_headers(header)
    for sequence in (1, 2, 3):
        seed = entry_seed(header.generation, sequence)
        entries = [
            encode_single(5, 7 * sequence, sequence, _MS, _record(b"bar"), seed),
            encode_entry(NOTE, 5, 0, 0, 0, _MS, _NOTE, b"note", seed=seed),
            encode_single(6, 7 * sequence, sequence, _MS, _record(b"bar"), seed),
        ]
        whole += b"".join(encode_frame(header, len(whole), sequence, sequence - 1, entries))
    return whole.ljust(header.size, b"\0")


def _journal_1() -> bytes:
    """Return a journal file of format 1 with two commits."""

    def sealed(data: bytes) -> bytes:
        return data + CRC.pack(crc32c(data))

    size = 4 * SECTOR_BYTES
    whole = sealed(struct.pack(">8sQQQ16s", b"HRJOURN1", 1, 1, size, bytes(16)))
    whole = whole.ljust(SECTOR_BYTES, b"\0")
    for sequence in (1, 2):
        entry = encode_single(5, 7 * sequence, sequence, _MS, _record(b"bar"), 0)
        fields = (0x48524631, 1, sequence, sequence - 1, len(entry), crc32c(entry))
        frame = sealed(struct.pack(">IQQQII", *fields)) + entry
        whole += frame.ljust(SECTOR_BYTES, b"\0")
    return whole.ljust(size, b"\0")


# HTTP and settings

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
hosts = ["log.example.com"]
[listen.tls]
cert = "/tmp/cert.pem"
key = "/tmp/key.pem"
client_ca = "/tmp/ca.pem"
off = ["http"]
[retention]
age_s = "7d"
bytes = "10GiB"
[[topics]]
prefix = "orders/"
retention_age_s = 3600
[access]
anonymous = ["subscribe:news/*"]
[[access.token]]
name = "a"
sha256 = "a4f67fd53d3886557e64880502f73ebcd0daf728e43d4cd6ea09505f38ef78ea"
grants = ["publish,create:orders/*", "inspect:*"]
[[access.certificate]]
match = "CN:shop"
grants = ["publish:orders/*"]
[access.jwt]
key_file = "/tmp/keys.pem"
algorithms = ["ES256"]
[[access.jwt.role]]
name = "all"
grants = ["all:*"]
"""


def _names_of(kind: Any) -> list[str]:
    """Return the names of all settings in a section, and of those inside it."""
    found = []
    for field in fields(kind):
        found.append(field.name)
        hint = get_type_hints(kind)[field.name]
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                found += _names_of(inner)
    return found


SEEDS: dict[str, list[bytes]] = {
    "figg_server": [_FIGG_AUTH, _FIGG_TO_SERVER, _FIGG_PUBLISHES, _FIGG_EQUAL],
    "figg_client": [_FIGG_TO_CLIENT],
    "figg_session": [_FIGG_AUTH + _FIGG_TO_SERVER, _FIGG_PUBLISHES],
    "wombat_server": [joined(_WOMBAT_TO_SERVER)],
    "wombat_client": [joined(_msgpack(_WOMBAT_TO_CLIENT))],
    "wombat_session": [joined(_WOMBAT_TO_SERVER)],
    "logux_messages": _json(_LOGUX + _LOGUX_5) + _msgpack(_LOGUX + _LOGUX_5),
    "logux_session": [*_session(_LOGUX[:1] + _LOGUX[2:]), *_session(_LOGUX[1:])],
    "logux5_session": [*_session(_LOGUX_5), *_session(_LOGUX_5[1:])],
    "channel_messages": _json(_CHANNEL + _BYTES_OF_CHANNEL)
    + _msgpack(_CHANNEL + _BYTES_OF_CHANNEL),
    "channel_session": _session(_CHANNEL + _BYTES_OF_CHANNEL),
    "payloads": _PAYLOADS,
    "batch_blocks": [_blocks()],
    "journal": [_journal(), _journal_1()],
    "http_request": [_HTTP],
    "settings": [_SETTINGS],
}

WORDS: dict[str, list[bytes]] = {
    "http_request": [
        *(b"GET", b"HEAD", b"OPTIONS", b"CONNECT", b"HTTP/1.0", b"HTTP/1.1", b"Expect"),
        *(b"Content-Length", b"Transfer-Encoding", b"chunked", b"Connection", b"close", b"Upgrade"),
        *(b"\r\n\r\n", b": ", b";", b"ffffffffffffffff", b"100-continue", b"Trailer", b"http://a/"),
    ],
    "settings": [
        *(name.encode() for name in sorted(set(_names_of(Config)))),
        *(b"[[", b"]]", b" = ", b'"""', b"'''", b"inf", b"nan", b"0x", b"1979-05-27", b"true"),
    ],
}
"""Words of a text format that a fuzzer should know, by target."""
