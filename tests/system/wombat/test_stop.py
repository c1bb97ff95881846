"""A clean stop: every peer is told, and accepted publishes are acknowledged before."""

import socket
import threading
import time
from contextlib import ExitStack

from headrace.testing import LogChecker, wait_until
from tests.system.checked import (
    assert_sound,
    in_threads,
    offset_of,
    serial_at_end,
    wombat_publisher,
    wombat_subscriber,
)
from tests.system.conftest import SMALL, Start
from tests.system.wombat.foreign import ACK, Wire, publish

SOON_S = 25.0
"""Time limit that is shorter than the server's own limit for its remaining work."""
STOPPING = (1001, "the server is stopping")


def test_everyone_is_told_that_the_server_stops(start: Start) -> None:
    server = start()
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.ws)) for _ in range(20)]
        for wire in wires[:10]:
            wire.attach("t")
        wires[15].publish("t", b"foo")
        for wire in wires[:10]:
            wire.expect_payloads(1)
        begun = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begun < SOON_S
        for wire in wires:
            messages, closed = wire.until_closed()
            assert messages == []
            assert (closed.code, closed.reason) == STOPPING
    assert "Traceback" not in server.stderr


def test_exactly_what_is_stored_is_acknowledged_before_the_goodbye(start: Start) -> None:
    server = start()
    with Wire(server.ws) as wire:
        wire.send(*(publish("t", number, b"%04d" % number) for number in range(5000)))
        acks = [wire.expect(ACK).number]
        assert server.terminate() == 0
        messages, closed = wire.until_closed()
        assert (closed.code, closed.reason) == STOPPING
        acks += [found.number for found in messages]
    assert acks == sorted(acks)
    server.start()
    assert offset_of(serial_at_end(server, "t")) == 8 * (acks[-1] + 1)


def test_peers_that_do_not_care_do_not_keep_it_from_stopping(start: Start) -> None:
    server = start()
    with ExitStack() as stack:
        stack.enter_context(socket.create_connection(server.ws, timeout=30))
        halfway = stack.enter_context(socket.create_connection(server.ws, timeout=30))
        halfway.sendall(b"GET /v1/ws HTTP/1.1\r\nHost:")
        deaf = stack.enter_context(Wire(server.ws, receive_buffer_bytes=65536))
        deaf.attach("t")
        with Wire(server.ws, timeout_s=60) as publisher:
            publisher.publish("t", *[bytes(100_000)] * 100)
            assert publisher.alive()
        middle = stack.enter_context(Wire(server.ws))
        middle.send_bytes(b"\x82\xff\0\0\0\0\0\1\0\0half a frame")
        begun = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begun < SOON_S
    assert "Traceback" not in server.stderr


def test_clients_go_on_where_they_were_after_any_number_of_stops(start: Start) -> None:
    server = start(config=SMALL)
    checker = LogChecker()
    stop = threading.Event()
    with (
        wombat_publisher(server, checker, "p", window=64) as writer,
        wombat_subscriber(server, checker, "s") as reader,
    ):
        reader.attach("t", "@0")

        def publish_all() -> None:
            number = 0
            while not stop.is_set():
                writer.publish("t", b"%d" % number)
                number += 1
            writer.flush()

        with in_threads(publish_all):
            try:
                for _ in range(3):
                    before = checker.records("t")
                    wait_until(lambda: checker.records("t") > before + 100, 30, "records")  # noqa: B023
                    server.restart()
            finally:
                stop.set()
        reader.wait_serial("t", serial_at_end(server, "t"))
        for client in (writer, reader):
            assert [(one.code, one.reason) for one in client.closed] == [STOPPING] * 3
    assert_sound(checker)
