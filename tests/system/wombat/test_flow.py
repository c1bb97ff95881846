"""Slow, greedy or numerous Wombat peers: they cost themselves time, and nobody else anything."""

import contextlib
import socket
import struct
import time
from contextlib import ExitStack

import pytest
from websockets.frames import Opcode

from headrace.testing import ServerProcess
from tests.system.checked import offset_of
from tests.system.conftest import SMALL, Start
from tests.system.support import get_json, held_back, resident_bytes
from tests.system.wombat.foreign import (
    ACK,
    ATTACHED,
    PAYLOAD,
    PONG,
    Client,
    Message,
    WebSocket,
    Wire,
    attach,
    frame,
    ping,
    publish,
)

MIB = 1024 * 1024
CONTENT = bytes(range(256)) * 64  # 16 KiB


def fill(server: ServerProcess, topic: str, size: int) -> int:
    """Publish about `size` bytes, and return the end of the topic."""
    count = size // len(CONTENT)
    with Wire(server.ws, timeout_s=60) as wire:
        for first in range(0, count, 64):
            wire.publish(topic, *[CONTENT] * min(64, count - first))
    return count * (4 + len(CONTENT))


def test_a_subscriber_that_never_reads_costs_bounded_memory_and_loses_nothing(start: Start) -> None:
    server = start(config=SMALL)
    fill(server, "warm", 16 * MIB)
    before = resident_bytes(server.pid)
    with Wire(server.ws, receive_buffer_bytes=65536) as never, Wire(server.ws) as reader:
        serial = never.attach("t")
        reader.attach("t")
        end = 0
        received: list[str] = []
        while end < 60 * MIB:
            end += fill(server, "t", 8 * MIB)
            while not received or offset_of(received[-1]) < end:
                received.append(reader.expect(PAYLOAD).serial)
            # Both clients are alive, but only one of them reads.
            never.send(ping(1))
            assert reader.alive()
            assert resident_bytes(server.pid) - before < 48 * MIB
        late: list[str] = []
        while len(late) < len(received):
            found = never.receive()
            if found.type == PAYLOAD:
                assert found.data == CONTENT
                late.append(found.serial)
        assert late == received, "late, whole and in order"
    with Wire(server.ws) as again:
        assert again.attach("t", serial) == serial


@pytest.mark.parametrize("live", [False, True])
def test_pong_and_ack_do_not_queue_behind_a_backlog(start: Start, live: bool) -> None:
    """A reader of some 6 MB/s has 20 MiB to read; an SDK waits 5 seconds for a PONG."""
    server = start()
    if not live:
        fill(server, "t", 20 * MIB)
    with Wire(server.ws, receive_buffer_bytes=65536) as slow:
        slow.send(attach("t", "@0"))
        if live:
            slow.expect(ATTACHED)
            fill(server, "t", 20 * MIB)
        for stamp in range(3):
            slow.read_slowly(set(), 2 * MIB)
            slow.send(ping(stamp), publish("other", stamp, b"x"))
            ahead = slow.read_slowly({(PONG, stamp), (ACK, stamp)})
            assert ahead < 2 * MIB, "so much may be ahead of it in the buffers of both sides"


def test_a_client_is_not_dropped_by_its_pings_during_a_long_backlog(start: Start) -> None:
    server = start()
    fill(server, "t", 16 * MIB)
    with Wire(server.ws) as wire:
        end = wire.attach("t")
    # The client is busy in its callback, as an application would be, for longer than it waits for a PONG.
    # The buffer is small: bytes in the kernel's buffer, which could be megabytes, also precede a PONG.
    client = Client(
        server.ws,
        ping_s=2.0,
        on_data=lambda *_: time.sleep(0.004),
        receive_buffer_bytes=65536,
    )
    with client:
        client.attach("t", "@0")
        client.wait_serial("t", end, 90)
        assert client.latencies_s, "it has pinged"
        assert (client.dropped_by_pings, client.connections) == (0, 1)


def test_a_publisher_faster_than_the_disk_costs_bounded_memory(start: Start) -> None:
    server = start(config=SMALL + "[limits]\npublish_bytes_max = 1048576\n")
    fill(server, "warm", 8 * MIB)
    before = resident_bytes(server.pid)
    blocks = 16
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.ws, timeout_s=60)) for _ in range(4)]
        for block in range(blocks):
            for wire in wires:
                wire.send(*(publish("t", block * 64 + i, CONTENT) for i in range(64)))
            assert resident_bytes(server.pid) - before < 48 * MIB
        for wire in wires:
            wire.wait_ack("t", blocks * 64 - 1)


def test_ping_is_answered_to_a_publisher_that_is_held_back(start: Start) -> None:
    server = start(config=SMALL)
    with Wire(server.ws, timeout_s=60) as publisher:
        large = [publish("t", number, CONTENT * 4) for number in range(256)]
        with held_back(server, lambda: publisher.send(*large, ping(42))):
            while publisher.receive() != Message(PONG, number=42):
                pass
            assert "journal" in get_json(server, "/healthz", status=503)["status"]
        publisher.wait_ack("t", 255)


def test_a_publisher_that_resends_while_it_is_held_back_is_stored_once(start: Start) -> None:
    server = start(config=SMALL)
    with Wire(server.ws, timeout_s=60) as publisher, Wire(server.ws, timeout_s=60) as reader:
        reader.attach("t")
        large = [publish("t", number, b"%03d" % number + CONTENT * 4) for number in range(100)]
        with held_back(server, lambda: publisher.send(*large)):
            publisher.send(*large[50:], ping(42))
            while publisher.receive() != Message(PONG, number=42):
                pass
        publisher.wait_ack("t", 99)
        publisher.send(publish("t", 100, b"end"))
        received = [found.data[:3] for found in reader.expect_payloads(101)]
        assert received == [*(b"%03d" % number for number in range(100)), b"end"]


def test_a_peer_that_asks_and_never_reads_costs_bounded_memory(start: Start) -> None:
    server = start()
    before = resident_bytes(server.pid)
    for questions in (
        frame(ping(1)) * 1000,
        frame(b"x" * 125, Opcode.PING) * 500,
        frame(attach("t")) * 1000,
        frame(publish("t", 0, b"")) * 1000,
    ):
        with Wire(server.ws, receive_buffer_bytes=65536) as deaf, Wire(server.ws) as other:
            deaf.socket.settimeout(0.3)
            # Either the server stops reading from it, or it answers everything in bounded memory.
            with contextlib.suppress(TimeoutError):
                for _ in range(300):
                    deaf.send_bytes(questions)
            assert resident_bytes(server.pid) - before < 32 * MIB
            assert other.alive()


def test_attaching_again_and_again_behind_a_full_connection_stalls_nobody(start: Start) -> None:
    server = start()
    topics = [f"t{number:03d}" for number in range(300)]
    with Wire(server.ws, receive_buffer_bytes=65536) as deaf, Wire(server.ws) as publisher:
        deaf.send(*(attach(topic) for topic in topics))
        for topic in topics:
            assert deaf.expect(ATTACHED).topic == topic
        fill(server, topics[0], 8 * MIB)
        for block in range(20):
            first = block * len(topics)
            publisher.send(*(publish(t, first + i, b"") for i, t in enumerate(topics)))
            acked: set[str] = set()
            while len(acked) < len(topics):
                found = publisher.expect(ACK)
                acked |= {found.topic} if found.number >= first else set()
        deaf.send(*(attach(topics[1]) for _ in range(3000)))
        assert publisher.alive()


def test_publishers_that_vanish_before_their_ack_keep_nobody_else_waiting(start: Start) -> None:
    server = start()
    with Wire(server.ws) as reader, Wire(server.ws) as publisher:
        reader.attach("t")
        publishes = b"".join(frame(publish("t", number, CONTENT)) for number in range(8))
        for number in range(200):
            with socket.create_connection(server.ws) as gone:
                gone.sendall(WebSocket(server.ws).to_send() + publishes)
                # A reset instead of an orderly close: the server learns of it while the commit is being
                # written.
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 20 == 0:
                publisher.publish("t", b"still served")
        publisher.publish("t", b"the last")
        while reader.expect(PAYLOAD).data != b"the last":
            pass
    assert "fault" not in server.stderr
    assert "Traceback" not in server.stderr
