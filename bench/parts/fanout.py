"""Fan-out: cost of a delivered record with 1,000 live subscribers, against one, and over WebSocket.

A live subscriber keeps up, so the load waits for it: two blocks are in flight, and the next is published when
every subscriber has the block before completely. All sides get the same load. Most subscribers count bytes
and let the kernel discard them (MSG_TRUNC); a few store everything.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.load import figg as load_figg
from bench.load import load
from bench.load import wombat as load_wombat
from bench.load.load import BLOCK, STALL_TIMEOUT_S, TOPIC, StallError, Stream, VerificationError
from bench.measure import Part, Run, measured, undisturbed
from bench.options import Options
from bench.process import Headrace

NAME = "fanout"
MANY = 1000
IN_FLIGHT = 2
Kept = load_figg.FiggSubscriber | load_wombat.WombatSubscriber
KEPT = 4  # number of subscribers whose whole stream is verified
BLOCKS_MANY, BLOCKS_ONE, WARM = 200, 4000, 20


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(NAME, f"fan-out: {MANY:,} live subscribers on one topic, blocks of 256")
    many, one = f"headrace, {MANY:,} subscribers", "headrace, 1 subscriber"
    websockets = f"headrace, {MANY:,} WebSocket subscribers"
    shrink = 4 if options.quick else 1
    runs = (
        (one, FIGG, 1, BLOCKS_ONE),
        (many, FIGG, MANY, BLOCKS_MANY),
        (websockets, WOMBAT, MANY, BLOCKS_MANY),
    )
    for turn in range(options.repeat):
        for label, protocol, subscribers, blocks in runs:
            say(f"{label}, {turn + 1} of {options.repeat}")
            measure = partial(_fan_out, label, options, protocol, subscribers, blocks // shrink)
            part.add(undisturbed(measure, options.retries))
    part.compare(
        "CPU per delivered record against one subscriber",
        many,
        one,
        lambda run: run.cpu_us,
        0.08,
        at_least=False,
    )
    part.compare(
        "WebSocket: CPU per delivered record against Figg",
        websockets,
        many,
        lambda run: run.cpu_us,
        2,
        at_least=False,
    )
    part.notes.append("rate, CPU and load CPU are per delivered record here")
    return part


@dataclass(frozen=True)
class Subscribers:
    """Functions that create the subscribers of a protocol."""

    expected: Callable[[int], Stream]
    kept: Callable[[tuple[str, int], Stream], Kept]
    """Creates a subscriber that stores what it receives."""
    attached: Callable[[tuple[str, int]], socket.socket]
    """Creates a subscriber that stores nothing."""
    port: Callable[[Headrace], int]


def _figg_attached(address: tuple[str, int]) -> socket.socket:
    sock = load.connect(*address)
    sock.sendall(load_figg.attach(TOPIC, None))
    answer = load_figg.attached(TOPIC, 0)
    if load.receive_exactly(sock, len(answer)) != answer:
        raise VerificationError("not the ATTACHED of an empty topic")
    return sock


FIGG = Subscribers(
    load_figg.data_stream,
    load_figg.FiggSubscriber,
    _figg_attached,
    lambda server: server.port,
)
WOMBAT = Subscribers(
    load_wombat.payload_stream,
    load_wombat.WombatSubscriber,
    load_wombat.attached,
    lambda server: server.ws_port,
)


def _fan_out(
    label: str, options: Options, protocol: Subscribers, subscribers: int, blocks: int
) -> Run:
    total = (WARM + blocks) * BLOCK
    with Headrace(options.dir) as server:
        server.start()
        address = (server.host, protocol.port(server))
        audience = Audience(address, protocol, subscribers, protocol.expected(total))
        publisher = load.connect(server.host, server.port)
        stream = load_figg.publish_stream(total)
        acks = load_figg.FiggAcks()
        audience.publish(publisher, stream, acks, WARM)
        server.settle()
        deliveries = blocks * BLOCK * subscribers
        result = Run(label, deliveries, extra={"subscribers": subscribers, "blocks": blocks})
        with measured(server, result):
            result.seconds = audience.publish(publisher, stream, acks, WARM + blocks)
        audience.verify(acks, total)
        publisher.close()
        audience.close()
        return result


class Audience:
    """Connections of the subscribers, and the number of bytes that each has read."""

    def __init__(
        self, address: tuple[str, int], protocol: Subscribers, size: int, expected: Stream
    ) -> None:
        self.expected = expected
        self.scratch = bytearray(load.READ_BYTES)
        self.kept: dict[int, Kept] = {}
        self.socks: dict[int, socket.socket] = {}
        self.received: dict[int, int] = {}
        self.done = [0] * (len(expected.ends) + 1)  # number of subscribers that have all of block i
        for index in range(size):
            if index < KEPT:
                subscriber = protocol.kept(address, expected)
                subscriber.attach()
                sock = subscriber.sock
                self.kept[sock.fileno()] = subscriber
            else:
                sock = protocol.attached(address)
            sock.setblocking(False)
            self.socks[sock.fileno()] = sock
            self.received[sock.fileno()] = 0
        self.complete = 0
        self.sent = 0

    def publish(
        self, publisher: socket.socket, stream: Stream, acks: load_figg.FiggAcks, blocks: int
    ) -> float:
        """Publish up to block `blocks`; return the seconds until the last subscriber has all of it."""
        gc.disable()
        poll = select.epoll()
        for sock in self.socks.values():
            poll.register(sock, select.EPOLLIN)
        poll.register(publisher, select.EPOLLIN)
        began = time.perf_counter()
        try:
            while self.complete < blocks or acks.acked < blocks * BLOCK:
                limit = min(self.complete + IN_FLIGHT, blocks)
                while self.sent < limit:
                    start = stream.ends[self.sent - 1] if self.sent else 0
                    publisher.sendall(stream.data[start : stream.ends[self.sent]])
                    self.sent += 1
                events = poll.poll(STALL_TIMEOUT_S)
                if not events:
                    raise StallError(f"{self.complete} of {blocks} blocks delivered, then nothing")
                for fd, _ in events:
                    if fd in self.socks:
                        self._read(fd)
                    else:
                        acks.feed(publisher.recv(load.READ_BYTES))
                while self.done[self.complete] == len(self.socks):
                    self.complete += 1
            return time.perf_counter() - began
        finally:
            poll.close()
            gc.enable()

    def _read(self, fd: int) -> None:
        before = self.received[fd]
        if fd in self.kept:
            self.kept[fd].readable()
            after = self.kept[fd].received
        else:
            got = self.socks[fd].recv_into(self.scratch, load.READ_BYTES, socket.MSG_TRUNC)
            if not got:
                raise ConnectionError("the server closed a subscriber's connection")
            after = before + got
        self.received[fd] = after
        ends = self.expected.ends
        for block in range(bisect_right(ends, before), bisect_right(ends, after)):
            self.done[block] += 1

    def verify(self, acks: load_figg.FiggAcks, total: int) -> None:
        end = self.expected.ends[total // BLOCK - 1]
        wrong = [received for received in self.received.values() if received != end]
        if wrong or acks.acked != total:
            raise VerificationError(f"{len(wrong)} subscribers did not receive {end} bytes")
        for subscriber in self.kept.values():
            subscriber.verify(total // BLOCK)

    def close(self) -> None:
        for sock in self.socks.values():
            sock.close()
