"""The load for every server, and the loop that drives it. Knows no protocol.

All data is encoded before the measurement starts. The loop only moves its send limit (64 blocks after the
last acknowledged one) and stores received data, which is verified after the measurement.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

BLOCK = 256
WINDOW_BLOCKS = 64
PAYLOAD_BYTES = 128
TOPIC = b"bench"
CONNECT_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 30.0
READ_BYTES = 1 << 20
# RESP and NATS use none of these bytes as marks, so counting a mark counts messages.
ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


class VerificationError(Exception):
    """Received data differs from the published data."""


class StallError(Exception):
    """Nothing arrived for STALL_TIMEOUT_S although something was due."""


@dataclass(frozen=True)
class Stream:
    """Encoded blocks: one buffer, and the position where each block ends."""

    data: bytes
    ends: tuple[int, ...]


class Acks(Protocol):
    def feed(self, data: bytes) -> int:
        """Process received bytes and return the total number of acknowledged messages."""


class Subscriber(Protocol):
    sock: socket.socket

    def readable(self) -> None:
        """Receive the available data."""

    def has(self, messages: int) -> bool:
        """True if this number of messages has arrived completely."""


class Publisher:
    """Sender of blocks, which measures the time from each block's first byte to its acknowledgement."""

    def __init__(self, sock: socket.socket, stream: Stream, acks: Acks) -> None:
        self.sock = sock
        self.acks = acks
        self.view = memoryview(stream.data)
        self.ends = stream.ends
        self.sent = 0
        self.acked_blocks = 0
        self.begun_at: list[float] = []  # one time for each block whose first byte is sent
        self.latencies_s: list[float] = []

    def send_up_to(self, block: int) -> bool:
        """Send up to the end of block number `block`; return True if the socket did not accept everything."""
        limit = self.ends[block - 1]
        if self.sent == limit:
            return False
        now = time.perf_counter()
        with contextlib.suppress(BlockingIOError):
            self.sent += self.sock.send(self.view[self.sent : limit])
        begun = len(self.begun_at)
        while begun < block and (begun == 0 or self.ends[begun - 1] < self.sent):
            self.begun_at.append(now)
            begun += 1
        return self.sent < limit

    def readable(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:  # part of a record of TLS
            return
        if not data:
            raise ConnectionError("the server closed the publisher's connection")
        now = time.perf_counter()
        acked = self.acks.feed(data) // BLOCK
        self.latencies_s += [now - at for at in self.begun_at[self.acked_blocks : acked]]
        self.acked_blocks = acked


@functools.lru_cache(maxsize=4)
def payloads(count: int, mixed: bool = False) -> tuple[bytes, ...]:
    """Return distinct printable payloads of 128 bytes, or of 64 to 192 bytes (mean 128) if `mixed`."""
    chance = random.Random(1)
    pool = bytes(chance.choices(ALPHABET, k=1 << 16))
    sizes = [chance.randint(64, 192) for _ in range(4096)] if mixed else [PAYLOAD_BYTES]
    made = []
    for number in range(count):
        size = sizes[number % len(sizes)] - 16
        at = number * 37 % (len(pool) - 192)
        made.append(b"%016d" % number + pool[at : at + size])
    return tuple(made)


def blocks_of(frames: Iterable[bytes], block: int = BLOCK, mark: bytes = b"") -> Stream:
    """Join encoded messages into blocks; each block ends with `mark`."""
    blocks: list[bytes] = []
    ends: list[int] = []
    waiting: list[bytes] = []
    position = 0
    for frame in frames:
        waiting.append(frame)
        if len(waiting) == block:
            blocks.append(b"".join(waiting) + mark)
            position += len(blocks[-1])
            ends.append(position)
            waiting.clear()
    assert not waiting, "the number of messages must be a multiple of the block"
    return Stream(b"".join(blocks), tuple(ends))


def connect(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes, for set-up only: it blocks until the socket's timeout."""
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError(f"closed after {len(data)} of {size} bytes")
        data += more
    return bytes(data)


def buffer(size: int) -> bytearray:
    """Allocate a receive buffer and touch its pages, so that no page fault happens while measuring."""
    made = bytearray(size)
    for at in range(0, size, 4096):
        made[at] = 1
    return made


def pump(
    publisher: Publisher, subscriber: Subscriber | None, blocks: int, window: int = WINDOW_BLOCKS
) -> float:
    """Publish up to block `blocks`, counted from the first of all.

    Return the seconds until the last acknowledgement and the last delivery. Raise StallError if nothing
    moves.
    """
    gc.collect()
    gc.disable()
    poll = select.epoll()
    publisher.sock.setblocking(False)
    poll.register(publisher.sock, select.EPOLLIN)
    if subscriber is not None:
        subscriber.sock.setblocking(False)
        poll.register(subscriber.sock, select.EPOLLIN)
    try:
        began = time.perf_counter()
        _loop(poll, publisher, subscriber, blocks, window)
        return time.perf_counter() - began
    finally:
        poll.close()
        gc.enable()


def _loop(
    poll: select.epoll, pub: Publisher, sub: Subscriber | None, blocks: int, window: int
) -> None:
    full = False  # True while the socket's send buffer is full
    pub_fd = pub.sock.fileno()
    while pub.acked_blocks < blocks or (sub is not None and not sub.has(blocks * BLOCK)):
        if not full:
            full = pub.send_up_to(min(pub.acked_blocks + window, blocks))
            if full:
                poll.modify(pub.sock, select.EPOLLIN | select.EPOLLOUT)
        events = poll.poll(STALL_TIMEOUT_S)
        if not events:
            raise StallError(f"{pub.acked_blocks} of {blocks} blocks acknowledged, then nothing")
        for fd, event in events:
            if fd != pub_fd:
                assert sub is not None
                sub.readable()
                continue
            if event & select.EPOLLOUT:
                full = False
                poll.modify(pub.sock, select.EPOLLIN)
            if event & ~select.EPOLLOUT:
                pub.readable()
