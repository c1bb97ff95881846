"""Load over Figg, written from the protocol's text alone. Does not measure.

The published records determine all bytes that a subscriber must receive, since offsets are byte positions.
Verification compares the whole stream, byte for byte.
"""

from __future__ import annotations

import functools
import http.client
import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote

from bench.load import load
from bench.load.load import BLOCK, TOPIC, Publisher, Stream, VerificationError

ATTACH, ATTACHED, PUBLISH, ACK, DATA, PING, PONG = 1, 2, 5, 6, 7, 8, 9
VERSION = 1
FROM_OFFSET = 0x8000
HEADER = struct.Struct(">HHI")
NUMBER = struct.Struct(">Q")
ACK_FRAME = struct.Struct(">HHIQ")


Connect = Callable[[str, int], socket.socket]
"""Function that connects to a host and a port."""


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, VERSION, len(payload)) + payload


def sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def attach(topic: bytes, offset: int | None) -> bytes:
    flags = 0 if offset is None else FROM_OFFSET
    return frame(ATTACH, struct.pack(">H", flags) + sized(topic) + NUMBER.pack(offset or 0))


def attached(topic: bytes, offset: int) -> bytes:
    return frame(ATTACHED, sized(topic) + NUMBER.pack(offset))


def publish_frames(
    made: Sequence[bytes], topics: Sequence[bytes] = (TOPIC,), first: int = 0
) -> Iterator[bytes]:
    """Yield PUBLISH frames numbered from `first`; record i goes to topics[i % len(topics)]."""
    names = [sized(topic) for topic in topics]
    pack = struct.Struct(">HHI").pack
    tail = struct.Struct(">QI").pack
    for index, payload in enumerate(made):
        name = names[index % len(names)]
        size = len(name) + 12 + len(payload)
        yield pack(PUBLISH, VERSION, size) + name + tail(first + index, len(payload)) + payload


@functools.lru_cache(maxsize=4)
def publish_stream(count: int, mixed: bool = False) -> Stream:
    return load.blocks_of(publish_frames(load.payloads(count, mixed)))


@functools.lru_cache(maxsize=4)
def data_stream(count: int, mixed: bool = False) -> Stream:
    """Return the DATA frames that a subscriber of a new topic receives."""
    return load.blocks_of(_data_frames(load.payloads(count, mixed)))


def _data_frames(made: Sequence[bytes]) -> Iterator[bytes]:
    pack = struct.Struct(f">HHII{len(TOPIC)}sQI").pack
    offset = 0
    for payload in made:
        size = len(payload)
        offset += 4 + size
        yield pack(DATA, VERSION, 16 + len(TOPIC) + size, len(TOPIC), TOPIC, offset, size) + payload


class FiggAcks:
    """Parser of ACKs, which must be well-formed and increasing."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.checked = 0
        self.acked = 0

    def feed(self, data: bytes) -> int:
        self.data += data
        end = len(self.data) // ACK_FRAME.size * ACK_FRAME.size
        for kind, version, size, number in ACK_FRAME.iter_unpack(self.data[self.checked : end]):
            if (kind, version, size) != (ACK, VERSION, 8) or number < self.acked:
                raise VerificationError(f"bad ACK {kind} {version} {size} {number}")
            self.acked = number + 1
        self.checked = end
        return self.acked


class FiggSubscriber:
    """Subscriber that stores everything that arrives after ATTACHED."""

    def __init__(
        self,
        address: tuple[str, int],
        expected: Stream,
        offset: int | None = None,
        topic: bytes = TOPIC,
        connect: Connect = load.connect,
    ) -> None:
        self.expected = expected
        self.data = load.buffer(len(expected.data) + 4096)
        self.view = memoryview(self.data)
        self.received = 0
        self.sock = connect(*address)
        self.request = attach(topic, offset)
        self.answer = attached(topic, offset or 0)

    def attach(self) -> None:
        self.sock.sendall(self.request)
        answer = load.receive_exactly(self.sock, len(self.answer))
        if answer != self.answer:
            raise VerificationError(f"ATTACHED is {answer!r}, not {self.answer!r}")

    def readable(self) -> None:
        at = self.received
        try:
            got = self.sock.recv_into(self.view[at : at + load.READ_BYTES])
        except BlockingIOError:  # part of a record of TLS
            return
        if not got:
            raise ConnectionError("the server closed the subscriber's connection")
        self.received = at + got

    def has(self, messages: int) -> bool:
        return self.received >= self.expected.ends[messages // BLOCK - 1]

    def verify(self, blocks: int) -> None:
        """Raise VerificationError unless exactly the bytes of the first `blocks` blocks have arrived."""
        end = self.expected.ends[blocks - 1]
        if self.received != end:
            raise VerificationError(f"received {self.received} bytes, expected {end}")
        with memoryview(self.expected.data) as expected:
            if self.view[:end] == expected[:end]:
                return
            at = 0
            for number, block_end in enumerate(self.expected.ends):
                if self.view[at:block_end] != expected[at:block_end]:
                    raise VerificationError(f"block {number}, from byte {at}, is not as published")
                at = block_end

    def close(self) -> None:
        self.sock.close()


def publisher(
    address: tuple[str, int], stream: Stream, connect: Connect = load.connect
) -> Publisher:
    return Publisher(connect(*address), stream, FiggAcks())


def ping(sock: socket.socket, number: int) -> None:
    """Send a PING and wait for its PONG, which proves that the connection has a session."""
    sock.sendall(frame(PING, NUMBER.pack(number)))
    if load.receive_exactly(sock, 16) != frame(PONG, NUMBER.pack(number)):
        raise VerificationError("PING was not answered with its own PONG")


def topic_records(address: tuple[str, int], prefix: str = "") -> dict[str, int]:
    """Return the number of records in each topic, read page by page from the HTTP API."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    found: dict[str, int] = {}
    after, more = "", True
    while more:
        query = f"/v1/topics?limit=1000&prefix={quote(prefix, safe='')}"
        connection.request("GET", query + (f"&after={quote(after, safe='')}" if after else ""))
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise VerificationError(f"GET {query}: {response.status} {body[:200]!r}")
        page = json.loads(body)
        for topic in page["topics"]:
            found[topic["name"]] = topic["records"]
            after = topic["name"]
        more = page["more"] and bool(page["topics"])
    connection.close()
    return found
