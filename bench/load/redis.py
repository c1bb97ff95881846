"""Load over Redis Streams: pipelined XADD, and XREAD BLOCK after the last id. Does not measure.

The server chooses the ids (`*`), as it chooses the offsets in Figg.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Iterator, Sequence

from bench.load import load
from bench.load.load import PAYLOAD_BYTES, TOPIC, Publisher, Stream, VerificationError

REPLY = re.compile(rb"\*1\r\n\*2\r\n\$%d\r\n%s\r\n\*(\d+)\r\n" % (len(TOPIC), TOPIC))
ENTRY = re.compile(rb"\*2\r\n\$\d+\r\n(\d+)-(\d+)\r\n\*2\r\n\$1\r\nd\r\n\$128\r\n")
FIELD_BYTES = len(b"*2\r\n$1\r\nd\r\n$128\r\n") + PAYLOAD_BYTES + 2


def command(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


def xadd_frames(made: Sequence[bytes], keys: Sequence[bytes] = (TOPIC,)) -> Iterator[bytes]:
    heads = [command(b"XADD", key, b"*", b"d", b"")[: -len(b"$0\r\n\r\n")] for key in keys]
    for index, payload in enumerate(made):
        yield b"%s$%d\r\n%s\r\n" % (heads[index % len(heads)], len(payload), payload)


@functools.lru_cache(maxsize=2)
def publish_stream(count: int) -> Stream:
    return load.blocks_of(xadd_frames(load.payloads(count)))


class RedisAcks:
    """Counter of acknowledgements: Redis answers each XADD with one bulk string, the id, hence one `$`."""

    def __init__(self) -> None:
        self.acked = 0

    def feed(self, data: bytes) -> int:
        if b"-ERR" in data or b"\n-" in data:
            raise VerificationError(f"Redis refused: {data[:200]!r}")
        self.acked += data.count(b"$")
        return self.acked


class RedisSubscriber:
    """Subscriber that reads everything after the last id it has seen, and stores the replies."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self.data = load.buffer(count * (PAYLOAD_BYTES + 128) + 4096)
        self.view = memoryview(self.data)
        self.received = 0
        self.records = 0
        self.reply_at = 0
        self.reply_records = 0
        self.stars = 0
        self.sock = load.connect(*address)
        self._ask(b"0")

    def _ask(self, after: bytes) -> None:
        self.sock.sendall(command(b"XREAD", b"BLOCK", b"0", b"STREAMS", TOPIC, after))

    def readable(self) -> None:
        at = self.received
        got = self.sock.recv_into(self.view[at : at + load.READ_BYTES])
        if not got:
            raise ConnectionError("Redis closed the reader's connection")
        self.received = end = at + got
        # Payloads contain no star. A reply has three stars in its head and two in each entry.
        self.stars += self.data.count(b"*", at, end)
        if not self.reply_records:
            head = REPLY.match(self.data, self.reply_at, end)
            if head is None:
                return
            self.reply_records = int(head[1])
        if self.stars < 3 + 2 * self.reply_records:
            return
        last = self.data.rfind(b"*", self.reply_at, end)
        if end < last + FIELD_BYTES:
            return
        entry_id = self.data[self.data.rfind(b"\n", 0, last - 2) + 1 : last - 2]
        self.records += self.reply_records
        self.reply_at, self.reply_records, self.stars = end, 0, 0
        self._ask(bytes(entry_id))

    def has(self, messages: int) -> bool:
        return self.records >= messages

    def verify(self, made: Sequence[bytes]) -> None:
        """Raise VerificationError unless every payload arrived in order, with increasing ids."""
        at, index, last_id = 0, 0, (0, 0)
        while at < self.received:
            head = REPLY.match(self.data, at)
            if head is None:
                raise VerificationError(f"not a reply at byte {at}")
            at = head.end()
            for _ in range(int(head[1])):
                entry = ENTRY.match(self.data, at)
                if entry is None:
                    raise VerificationError(f"not an entry at byte {at}")
                start = entry.end()
                at = start + PAYLOAD_BYTES + 2
                entry_id = (int(entry[1]), int(entry[2]))
                if entry_id <= last_id or self.data[start : at - 2] != made[index]:
                    raise VerificationError(f"entry {index} is not as published")
                last_id = entry_id
                index += 1
        if index != len(made):
            raise VerificationError(f"{index} of {len(made)} entries received")

    def close(self) -> None:
        self.sock.close()


def publisher(address: tuple[str, int], stream: Stream) -> Publisher:
    return Publisher(load.connect(*address), stream, RedisAcks())


def stream_lengths(address: tuple[str, int], keys: Sequence[bytes]) -> list[int]:
    sock = load.connect(*address)
    sock.settimeout(30)
    sock.sendall(b"".join(command(b"XLEN", key) for key in keys))
    data = bytearray()
    while data.count(b"\n") < len(keys):
        data += _some(sock)
    sock.close()
    return [int(line[1:]) for line in data.split(b"\r\n") if line]


def _some(sock: socket.socket) -> bytes:
    more = sock.recv(1 << 16)
    if not more:
        raise ConnectionError("Redis closed the connection")
    return more
