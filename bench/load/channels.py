"""Load for channels of three processors: one sends, two receive and acknowledge. Does not measure.

The load is the same for Headrace, over WebSocket as its protocol page says, and for Redis Streams. Redis has
a stream for each channel and a consumer group for each receiver, and trims entries that both have
acknowledged.
"""

from __future__ import annotations

import json
import re
import select
import time
from abc import ABC, abstractmethod
from collections import deque

from bench.load import load
from bench.load.load import STALL_TIMEOUT_S, StallError, VerificationError
from bench.load.logux import frame, unframe, websocket
from bench.load.redis import command

PATH = "/v1/channels"
PAYLOAD = b"x" * 64
TRIMMED_EVERY = 10
"""Number of messages in a stream between two XTRIMs."""

_MESSAGES = re.compile(rb'\{"type":"messages","channel":"(\w+)"')
_ONE = re.compile(rb'"offset":(\d+),"processor":"a","number":(\d+)')
_ACKED = b'{"type":"acked"'
_SENT = b'{"type":"sent"'


def name(index: int) -> bytes:
    return b"doc%06d" % index


class Side(ABC):
    """Connections of one sender and two receivers. Message numbers of a channel count from 1."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.sent = self.answered = 0
        self.received = [0, 0]
        self.acknowledged = [0, 0]
        self._next = [[1] * channels, [1] * channels]
        self._begun_at: list[float] = []
        self.latencies_s: list[float] = []

    @abstractmethod
    def files(self) -> list[int]: ...

    @abstractmethod
    def send(self, first: int, last: int) -> None:
        """Send the messages `first` to `last` (exclusive), over all channels in turn."""

    @abstractmethod
    def readable(self, file: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def run(self, count: int, window: int) -> float:
        """Send `count` more messages, with at most `window` of them undelivered.

        Return the seconds until all are acknowledged.
        """
        poll = select.epoll()
        for file in self.files():
            poll.register(file, select.EPOLLIN)
        began = time.perf_counter()
        until = self.sent + count
        try:
            while min(self.answered, *self.acknowledged) < until:
                last = min(until, min(self.answered, *self.received) + window)
                if last > self.sent:
                    now = time.perf_counter()
                    self._begun_at += [now] * (last - self.sent)
                    self.send(self.sent, last)
                    self.sent = last
                ready = poll.poll(STALL_TIMEOUT_S)
                if not ready:
                    raise StallError(f"{self.received} of {self.sent} received")
                for file, _ in ready:
                    self.readable(file)
        finally:
            poll.close()
        return time.perf_counter() - began

    def got(self, receiver: int, channel: int, number: int, now: float) -> None:
        wanted = self._next[receiver]
        if number != wanted[channel]:
            raise VerificationError(f"{number} came instead of {wanted[channel]}")
        wanted[channel] += 1
        self.received[receiver] += 1
        self.latencies_s.append(now - self._begun_at[(number - 1) * self.channels + channel])


class Channels(Side):
    """The load on channels of Headrace."""

    def __init__(self, address: tuple[str, int], channels: int) -> None:
        super().__init__(channels)
        self._clients = [_Client(address, processor) for processor in "abc"]
        self._by_file = {client.sock.fileno(): i for i, client in enumerate(self._clients)}
        self._index = {name(i): i for i in range(channels)}
        self._acking: list[deque[int]] = [deque(), deque()]

    def join(self, first: int, last: int) -> None:
        for client in self._clients:
            for at in range(first, last, 500):
                some = range(at, min(at + 500, last))
                client.sock.sendall(
                    b"".join(frame(b'{"type":"join","channel":"%b"}' % name(i)) for i in some)
                )
                for one in client.wait(len(some)):
                    if b'"joined"' not in one:
                        raise VerificationError(f"not joined: {one!r}")

    def files(self) -> list[int]:
        return list(self._by_file)

    def send(self, first: int, last: int) -> None:
        text = b'{"type":"send","channel":"%b","number":%d,"payload":"%b"}'
        count = self.channels
        self._clients[0].sock.sendall(
            b"".join(
                frame(text % (name(i % count), i // count + 1, PAYLOAD)) for i in range(first, last)
            )
        )

    def readable(self, file: int) -> None:
        who = self._by_file[file]
        frames = self._clients[who].frames()
        if who == 0:
            for one in frames:
                if not one.startswith(_SENT):
                    raise VerificationError(f"not sent: {one!r}")
            self.answered += len(frames)
            return
        receiver, now = who - 1, time.perf_counter()
        answers = []
        for one in frames:
            if one.startswith(_ACKED):
                self.acknowledged[receiver] += self._acking[receiver].popleft()
                continue
            head = _MESSAGES.match(one)
            if head is None:
                raise VerificationError(f"not expected: {one!r}")
            messages = _ONE.findall(one)
            for _, number in messages:
                self.got(receiver, self._index[head[1]], int(number), now)
            last = messages[-1][0]
            answers.append(frame(b'{"type":"ack","channel":"%b","offset":%b}' % (head[1], last)))
            self._acking[receiver].append(len(messages))
        if answers:
            self._clients[who].sock.sendall(b"".join(answers))

    def close(self) -> None:
        for client in self._clients:
            client.sock.close()


class _Client:
    def __init__(self, address: tuple[str, int], processor: str) -> None:
        self.sock = websocket(address, PATH)
        self._buffer = b""
        self.sock.sendall(frame(json.dumps({"type": "hello", "processor": processor}).encode()))
        self.wait(1)

    def frames(self) -> list[bytes]:
        data = self.sock.recv(load.READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        found, self._buffer = unframe(self._buffer + data)
        return found

    def wait(self, count: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < count:
            found += self.frames()
        return found


class Streams(Side):
    """The load on Redis Streams."""

    def __init__(self, address: tuple[str, int], channels: int) -> None:
        super().__init__(channels)
        self._socks = [load.connect(*address) for _ in range(3)]
        self._by_file = {sock.fileno(): i for i, sock in enumerate(self._socks)}
        self._index = {name(i): i for i in range(channels)}
        self._buffers = [b"", b"", b""]
        self._trimming = 0
        self._acks = [0, 0]
        self._last: list[list[bytes]] = [[b""] * channels, [b""] * channels]
        keys = [name(i) for i in range(channels)]
        for group in (b"b", b"c"):
            made = [command(b"XGROUP", b"CREATE", key, group, b"$", b"MKSTREAM") for key in keys]
            self._socks[0].sendall(b"".join(made))
            if load.receive_exactly(self._socks[0], 5 * channels) != b"+OK\r\n" * channels:
                raise VerificationError("a group was not made")
        self._asks = [
            command(
                *(b"XREADGROUP", b"GROUP", group, group, b"COUNT", b"100", b"BLOCK", b"0"),
                *(b"STREAMS", *keys, *([b">"] * channels)),
            )
            for group in (b"b", b"c")
        ]
        for sock, ask in zip(self._socks[1:], self._asks, strict=True):
            sock.sendall(ask)

    def files(self) -> list[int]:
        return list(self._by_file)

    def send(self, first: int, last: int) -> None:
        count = self.channels
        parts = []
        for i in range(first, last):
            number = b"%d" % (i // count + 1)
            parts.append(command(b"XADD", name(i % count), b"*", b"n", number, b"d", PAYLOAD))
        self._socks[0].sendall(b"".join(parts))

    def readable(self, file: int) -> None:
        who = self._by_file[file]
        data = self._socks[who].recv(load.READ_BYTES)
        if not data:
            raise ConnectionError("Redis closed a connection")
        buffer = self._buffers[who] + data
        at = 0
        while (found := _parse(buffer, at)) is not None:
            reply, at = found
            if who == 0:
                # The reply is the id of an XADD or the count of an XTRIM.
                self.answered += isinstance(reply, bytes)
            elif isinstance(reply, int):
                self._acked(who - 1, reply)
            else:
                self._entries(who - 1, reply)
        self._buffers[who] = buffer[at:]

    def _acked(self, receiver: int, count: int) -> None:
        self.acknowledged[receiver] += count

    def _entries(self, receiver: int, reply: list) -> None:  # type: ignore[type-arg]
        now = time.perf_counter()
        group = b"bc"[receiver : receiver + 1]
        said, trims = [], []
        for key, entries in reply:
            channel = self._index[key]
            for _, fields in entries:
                self.got(receiver, channel, int(fields[1]), now)
            ids = [entry_id for entry_id, _ in entries]
            said.append(command(b"XACK", key, group, *ids))
            self._last[receiver][channel] = ids[-1]
            # Every TRIMMED_EVERY messages, trim the entries that both receivers have.
            number = self._next[receiver][channel] - 1
            other = self._last[1 - receiver][channel]
            if number // TRIMMED_EVERY > (number - len(ids)) // TRIMMED_EVERY and other:
                trims.append(command(b"XTRIM", key, b"MINID", min(ids[-1], other, key=_id)))
        self._socks[receiver + 1].sendall(b"".join(said) + self._asks[receiver])
        if trims:
            self._socks[0].sendall(b"".join(trims))

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def _id(text: bytes) -> tuple[int, int]:
    ms, _, number = text.partition(b"-")
    return int(ms), int(number)


def _parse(data: bytes, at: int) -> tuple[object, int] | None:
    """Parse a Redis reply and return it with its end position; None if it is incomplete."""
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, rest = data[at : at + 1], data[at + 1 : end]
    at = end + 2
    if kind == b":":
        return int(rest), at
    if kind == b"$":
        stop = at + int(rest)
        return (data[at:stop], stop + 2) if len(data) >= stop + 2 else None
    if kind != b"*":
        raise VerificationError(f"Redis says {rest!r}")
    items = []
    for _ in range(int(rest)):
        found = _parse(data, at)
        if found is None:
            return None
        item, at = found
        items.append(item)
    return items, at
