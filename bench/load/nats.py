"""Load over NATS: JetStream with acknowledgements, and core NATS without storage. Does not measure.

JetStream delivers with a push consumer without acknowledgements, its cheapest kind.
"""

from __future__ import annotations

import functools
import json
import re
import socket
import time
from collections.abc import Sequence

from bench.load import load
from bench.load.load import PAYLOAD_BYTES, TOPIC, Publisher, Stream, VerificationError

ACK_INBOX = b"acks"
DELIVERY = b"delivery"
MESSAGE = re.compile(rb"(?:PING\r\n)*MSG bench \d+ (?:\$JS\.ACK\.\S+ )?128\r\n")
PING_LINE = b"PING\r\n"


@functools.lru_cache(maxsize=2)
def jetstream_stream(count: int) -> Stream:
    head = b"PUB %s %s %d\r\n" % (TOPIC, ACK_INBOX, PAYLOAD_BYTES)
    return load.blocks_of(b"%s%s\r\n" % (head, payload) for payload in load.payloads(count))


@functools.lru_cache(maxsize=2)
def core_stream(count: int) -> Stream:
    """Return blocks that end with a PING: its PONG says that the server has processed the block."""
    head = b"PUB %s %d\r\n" % (TOPIC, PAYLOAD_BYTES)
    made = (b"%s%s\r\n" % (head, payload) for payload in load.payloads(count))
    return load.blocks_of(made, mark=PING_LINE)


def connect(address: tuple[str, int]) -> socket.socket:
    sock = load.connect(*address)
    sock.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nPING\r\n')
    _read_until(sock, b"PONG\r\n")
    return sock


def request(sock: socket.socket, subject: str, body: dict[str, object]) -> dict[str, object]:
    """Send one request of the JetStream API, on a connection that does nothing else."""
    text = json.dumps(body).encode()
    sock.sendall(
        b"SUB answer 9\r\nPUB %s answer %d\r\n%s\r\n" % (subject.encode(), len(text), text)
    )
    data = _read_until(sock, b"}\r\n")
    answer: dict[str, object] = json.loads(data[data.index(b"{") :])
    if "error" in answer:
        raise VerificationError(f"{subject}: {answer['error']}")
    return answer


def make_stream(address: tuple[str, int]) -> None:
    subject = TOPIC.decode()
    sock = connect(address)
    config: dict[str, object] = {"name": "S", "subjects": [subject], "storage": "file"}
    request(sock, "$JS.API.STREAM.CREATE.S", config)
    sock.close()


def make_consumer(address: tuple[str, int]) -> None:
    sock = connect(address)
    config = {"deliver_subject": DELIVERY.decode(), "ack_policy": "none", "deliver_policy": "all"}
    body: dict[str, object] = {"stream_name": "S", "config": config}
    request(sock, "$JS.API.CONSUMER.CREATE.S", body)
    sock.close()


class NatsAcks:
    """Counter of acknowledgements: a JSON object per JetStream publish, a PONG per block of core NATS."""

    def __init__(self, sock: socket.socket, jetstream: bool) -> None:
        self.sock = sock
        self.mark, self.weight = (b"}", 1) if jetstream else (b"O", load.BLOCK)
        self.acked = 0
        self.tail = b""

    def feed(self, data: bytes) -> int:
        if b'"error"' in data or b"-ERR" in data:
            raise VerificationError(f"NATS refused: {data[:300]!r}")
        if PING_LINE in self.tail + data:
            self.sock.send(b"PONG\r\n")
        self.tail = data[-5:]
        self.acked += data.count(self.mark) * self.weight
        return self.acked


class NatsSubscriber:
    """Subscriber that stores received data and counts lines: two for each message."""

    def __init__(self, address: tuple[str, int], count: int, jetstream: bool) -> None:
        self.data = load.buffer(count * (PAYLOAD_BYTES + 128) + 4096)
        self.view = memoryview(self.data)
        self.received = 0
        self.lines = 0
        self.sock = connect(address)
        self.sock.sendall(b"SUB %s 1\r\nPING\r\n" % (DELIVERY if jetstream else TOPIC))
        _read_until(self.sock, b"PONG\r\n")

    def readable(self) -> None:
        at = self.received
        got = self.sock.recv_into(self.view[at : at + load.READ_BYTES])
        if not got:
            raise ConnectionError("NATS closed the subscriber's connection")
        self.received = end = at + got
        self.lines += self.data.count(b"\n", at, end)
        # Start five bytes earlier, to count a PING that was split between two reads.
        pings = self.data.count(PING_LINE, max(at - 5, 0), end)
        if pings:
            self.lines -= pings
            self.sock.send(b"PONG\r\n")

    def has(self, messages: int) -> bool:
        return self.lines >= 2 * messages

    def verify(self, made: Sequence[bytes]) -> None:
        at = 0
        for index, payload in enumerate(made):
            head = MESSAGE.match(self.data, at)
            if head is None:
                raise VerificationError(f"not a message at byte {at}: {self.data[at : at + 80]!r}")
            at = head.end() + PAYLOAD_BYTES + 2
            if self.data[head.end() : at - 2] != payload:
                raise VerificationError(f"message {index} is not as published")
        if self.data[at : self.received].replace(PING_LINE, b""):
            raise VerificationError(f"{self.received - at} bytes too many")

    def close(self) -> None:
        self.sock.close()


def publisher(address: tuple[str, int], stream: Stream, jetstream: bool) -> Publisher:
    sock = connect(address)
    if jetstream:
        sock.sendall(b"SUB %s 2\r\nPING\r\n" % ACK_INBOX)
        _read_until(sock, b"PONG\r\n")
    return Publisher(sock, stream, NatsAcks(sock, jetstream))


def _read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    deadline = time.monotonic() + load.CONNECT_TIMEOUT_S
    while not data.endswith(end):
        if time.monotonic() > deadline:
            raise load.StallError(f"no {end!r} in {data[-200:]!r}")
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError("NATS closed the connection")
        data += more
    return data
