"""Slow, greedy or numerous peers: they cost themselves time, and nobody else anything."""

import contextlib
import os
import signal
import socket
import struct
import time
from contextlib import ExitStack

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import SMALL, Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import ACK, ATTACHED, DATA, PONG, Message, Wire
from tests.system.support import children, get_json, resident_bytes

MIB = 1024 * 1024
PAYLOAD = bytes(range(256)) * 64  # 16 KiB


def fill(server: ServerProcess, topic: bytes, size: int) -> int:
    """Publish about `size` bytes, and return the end of the topic."""
    count = size // len(PAYLOAD)
    with Wire(server.figg, timeout_s=60) as wire:
        for first in range(0, count, 64):
            wire.publish(topic, *[PAYLOAD] * min(64, count - first), first=first)
    return count * (4 + len(PAYLOAD))


def test_a_subscriber_that_never_reads_costs_bounded_memory_and_loses_nothing(start: Start) -> None:
    server = start(config=SMALL)
    fill(server, b"warm", 16 * MIB)
    before = resident_bytes(server.pid)
    with Wire(server.figg, receive_buffer_bytes=65536) as never, Wire(server.figg) as reader:
        never.attach(b"t")
        reader.attach(b"t")
        end = 0
        for _ in range(16):
            end += fill(server, b"t", 8 * MIB)
            while reader.expect(DATA).number < end:
                pass
            assert resident_bytes(server.pid) - before < 48 * MIB
        assert end > 120 * MIB
        position = 0
        while position < end:
            message = never.expect(DATA)
            assert message.number == position + 4 + len(PAYLOAD), "late, and whole"
            position = message.number


@pytest.mark.parametrize("live", [False, True])
def test_pong_and_ack_do_not_queue_behind_a_backlog(start: Start, live: bool) -> None:
    """A reader of some 6 MB/s has 64 MiB to read; the SDK waits 4 seconds for a PONG."""
    server = start()
    if not live:
        fill(server, b"t", 64 * MIB)
    with Wire(server.figg, receive_buffer_bytes=65536) as slow:
        slow.send(figg.attach(b"t", 0))
        if live:
            slow.expect(ATTACHED)
            fill(server, b"t", 64 * MIB)
        for stamp in range(5):
            slow.read_slowly(set(), 2 * MIB)
            slow.send(figg.ping(stamp), figg.publish(b"other", stamp, b"x"))
            ahead = slow.read_slowly({(PONG, stamp), (ACK, stamp)})
            assert ahead < 2 * MIB, "so much may be ahead of it in the buffers of both sides"


def test_the_existing_client_is_not_dropped_by_its_pings_during_a_long_backlog(
    start: Start,
) -> None:
    server = start()
    end = fill(server, b"t", 96 * MIB)
    # The client is busy in its callback, as an application would be, for longer than it waits for an answer
    # to its pings.
    client = figg.Client(
        server.figg, ping_s=0.5, on_data=lambda topic, offset, data: time.sleep(0.0007)
    )
    with client:
        client.attach(b"t", 0)
        client.wait_offset(b"t", end, 90)
        assert client.latencies_s, "it has pinged"
        assert (client.dropped_by_pings, client.connections) == (0, 1)


def test_a_connection_flood_leaves_existing_connections_served(start: Start) -> None:
    server = start("--set=limits.connections_max=50")
    with Wire(server.figg) as subscriber, Wire(server.figg) as publisher:
        subscriber.attach(b"t")
        flood = []
        for number in range(200):
            flood.append(_try_connect(server))
            if number % 50 == 0:
                assert publisher.alive()
        publisher.publish(b"t", b"foo")
        assert subscriber.expect(DATA).data == b"foo"
        refused = sum(connection is None or _is_closed(connection) for connection in flood)
        assert refused >= 150
        for connection in flood:
            if connection is not None:
                connection.close()
        wait_until(lambda: _served(server), 30, "room for a new connection")
        publisher.publish(b"t", b"bar", first=1)
        assert subscriber.expect(DATA).data == b"bar"


def _try_connect(server: ServerProcess) -> socket.socket | None:
    try:
        return socket.create_connection(server.figg, timeout=30)
    except OSError:
        return None


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        connection.sendall(figg.ping(1))
        return connection.recv(1) == b""
    except OSError:
        return True


def _served(server: ServerProcess) -> bool:
    try:
        with Wire(server.figg, timeout_s=30) as wire:
            return wire.alive()
    except (OSError, EOFError):
        return False


def test_a_publisher_faster_than_the_disk_costs_bounded_memory(start: Start) -> None:
    server = start(config=SMALL + "[limits]\npublish_bytes_max = 1048576\n")
    fill(server, b"warm", 8 * MIB)
    before = resident_bytes(server.pid)
    blocks = 16
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.figg, timeout_s=60)) for _ in range(4)]
        for block in range(blocks):
            for wire in wires:
                wire.send(*(figg.publish(b"t", block * 64 + i, PAYLOAD) for i in range(64)))
            assert resident_bytes(server.pid) - before < 48 * MIB
        for wire in wires:
            wire.wait_ack(blocks * 64 - 1)


def test_very_many_attachments_of_one_connection_are_served_and_forgotten(start: Start) -> None:
    server = start()
    topics = [b"t%d" % number for number in range(500)]
    with Wire(server.figg) as wire, Wire(server.figg) as publisher:
        wire.send(*(figg.attach(topic) for topic in topics))
        assert {wire.expect(ATTACHED).topic for _ in topics} == set(topics)
        publisher.send(*(figg.publish(topic, i, b"x") for i, topic in enumerate(topics)))
        publisher.wait_ack(499)
        assert {wire.expect(DATA).topic for _ in topics} == set(topics)


def test_publishers_that_vanish_before_their_ack_keep_nobody_else_waiting(start: Start) -> None:
    server = start()
    with Wire(server.figg) as reader, Wire(server.figg) as publisher:
        reader.attach(b"t")
        for number in range(200):
            with socket.create_connection(server.figg) as gone:
                gone.sendall(figg.publish(b"t", 0, PAYLOAD) * 8)
                # A reset instead of an orderly close: the server learns of it while the commit is being
                # written.
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 20 == 0:
                publisher.publish(b"t", b"still served", first=number)
        publisher.publish(b"t", b"the last", first=200)
        while reader.expect(DATA).data != b"the last":
            pass
    assert "fault" not in server.stderr


def test_a_peer_that_asks_and_never_reads_costs_bounded_memory(start: Start) -> None:
    server = start()
    before = resident_bytes(server.pid)
    with Wire(server.figg, receive_buffer_bytes=65536) as deaf, Wire(server.figg) as other:
        deaf.socket.settimeout(1)
        pings = figg.ping(1) * 4096
        # Either the server stops reading from it, or it answers everything in bounded memory.
        with contextlib.suppress(TimeoutError):
            for _ in range(1000):
                deaf.socket.sendall(pings)
        assert resident_bytes(server.pid) - before < 32 * MIB
        assert other.alive()


def test_attaching_again_and_again_behind_a_full_connection_stalls_nobody(start: Start) -> None:
    server = start()
    topics = [b"t%03d" % number for number in range(300)]
    with Wire(server.figg, receive_buffer_bytes=65536) as deaf, Wire(server.figg) as publisher:
        deaf.send(*(figg.attach(topic) for topic in topics))
        for topic in topics:
            assert deaf.expect(ATTACHED).topic == topic
        fill(server, topics[0], 8 * MIB)
        for block in range(20):
            first = block * len(topics)
            publisher.send(*(figg.publish(t, first + i, b"") for i, t in enumerate(topics)))
            publisher.wait_ack(first + len(topics) - 1)
        deaf.send(*(figg.attach(topics[1]) for _ in range(3000)))
        assert publisher.alive()


def test_ping_is_answered_to_a_publisher_that_is_held_back(start: Start) -> None:
    server = start(config=SMALL)
    with Wire(server.figg, timeout_s=60) as publisher:
        publisher.publish(b"t", PAYLOAD)
        (applier,) = children(server.pid)
        os.kill(applier, signal.SIGSTOP)
        try:
            # The window of the existing client exceeds the room in the journal by far.
            window = [figg.publish(b"t", number, PAYLOAD * 4) for number in range(1, 257)]
            publisher.send(*window, figg.ping(42))
            while publisher.receive() != Message(PONG, number=42):
                pass
            assert "journal" in get_json(server, "/healthz", status=503)["status"]
            # Subscribers are served meanwhile.
            assert get_json(server, "/readyz") == {"status": "ready"}
        finally:
            os.kill(applier, signal.SIGCONT)
        publisher.wait_ack(256)
