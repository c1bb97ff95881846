"""Heartbeats: the server drops a client that sends no PING, unless the server itself is not reading."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from websockets.frames import Opcode

from headrace.testing import ServerProcess
from tests.system.conftest import SMALL, Start
from tests.system.support import get_json, held_back
from tests.system.wombat.foreign import (
    ACK,
    PONG,
    Client,
    Closed,
    Message,
    Wire,
    attach,
    frame,
    ping,
    publish,
)

SILENCE_S = 4.0
"""Silence limit. It is long enough for a busy machine to receive the pings of clients that send in time."""
LONGER_S = 1.5 * SILENCE_S
SHORT = f"--set=limits.silence_s={SILENCE_S}"
SOON_S = 30.0


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("impatient") / "data", SHORT) as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def test_a_client_that_never_pings_is_told_why_it_is_closed(impatient: ServerProcess) -> None:
    begun = time.monotonic()
    with Wire(impatient.ws) as wire:
        messages, closed = wire.until_closed()
    assert messages == []
    assert closed.code == 1008
    assert "PING" in closed.reason
    assert SILENCE_S <= time.monotonic() - begun < SOON_S


def test_a_ping_gives_another_while_and_no_more(impatient: ServerProcess) -> None:
    with Wire(impatient.ws) as wire:
        begun = time.monotonic()
        while time.monotonic() - begun < LONGER_S:
            assert wire.alive()
            time.sleep(SILENCE_S / 5)
        last = time.monotonic()
        assert wire.alive()
        messages, closed = wire.until_closed()
        assert messages == []
        assert closed.code == 1008
        assert SILENCE_S <= time.monotonic() - last < SOON_S


def test_nothing_but_ping_counts(impatient: ServerProcess) -> None:
    """Publishes, attaches, received payloads and WebSocket pings do not count."""
    with Wire(impatient.ws) as wire:
        wire.attach("t")

        def do_everything_else() -> None:
            for number in range(1000):
                wire.send_bytes(
                    frame(publish("t", number, b"x")),
                    frame(attach("other")),
                    frame(b"", Opcode.PING),
                )
                while wire.receive() != Message(ACK, "t", number=number):
                    pass
                time.sleep(SILENCE_S / 20)

        with pytest.raises(Closed) as closed:
            do_everything_else()
        assert closed.value.code == 1008


def test_each_connection_is_judged_for_itself(impatient: ServerProcess) -> None:
    with Wire(impatient.ws) as lively, Wire(impatient.ws) as silent, Wire(impatient.ws) as later:
        closed: list[Closed] = []
        silent.socket.settimeout(SILENCE_S / 10)
        until = time.monotonic() + SOON_S
        while not closed and time.monotonic() < until:
            assert lively.alive()
            assert later.alive()
            try:
                silent.receive()
            except Closed as found:
                closed.append(found)
            except TimeoutError:
                pass
        assert [one.code for one in closed] == [1008]
        assert lively.alive()
        assert later.alive()


def test_a_silent_client_leaves_no_subscription_behind(impatient: ServerProcess) -> None:
    with Wire(impatient.ws) as publisher:
        publisher.publish("t", b"foo")
    with Wire(impatient.ws) as wire:
        wire.attach("t")
        assert len(get_json(impatient, "/v1/topic?name=t")["subscriptions"]) == 1
        wire.until_closed()
    assert get_json(impatient, "/v1/topic?name=t")["subscriptions"] == []


def test_a_client_that_pings_every_while_is_never_dropped(impatient: ServerProcess) -> None:
    with Client(impatient.ws, ping_s=SILENCE_S / 2) as client:
        client.attach("t")
        until = time.monotonic() + LONGER_S
        while time.monotonic() < until:
            client.publish("t", b"x")
            time.sleep(0.01)
        client.flush()
        assert (client.connections, client.dropped_by_pings, client.closed) == (1, 0, [])
        assert len(client.latencies_s) >= 2


def test_a_publisher_that_the_server_does_not_read_is_not_silent(start: Start) -> None:
    server = start(SHORT, config=SMALL + "[limits]\npublish_bytes_max = 65536\n")
    publishes = [publish("t", number, bytes(100_000)) for number in range(80)]
    much = framed([*publishes, ping(42)])
    with Wire(server.ws, timeout_s=30) as publisher, Wire(server.ws) as other:
        with sending(publisher, much) as go, held_back(server, go):
            until = time.monotonic() + LONGER_S
            while time.monotonic() < until:
                assert other.alive(), "who is read must ping, and is answered"
                time.sleep(SILENCE_S / 5)
        received = [publisher.receive()]
        while not {Message(PONG, number=42), Message(ACK, "t", number=79)} <= set(received):
            received.append(publisher.receive())
        messages, closed = publisher.until_closed()
        assert messages == []
        assert closed.code == 1008, "being read again, it must ping again"


def test_a_publisher_that_was_not_read_has_time_to_be_heard_again(start: Start) -> None:
    """The publisher's PING comes after everything that it could not send."""
    server = start(SHORT, config=SMALL + "[limits]\npublish_bytes_max = 8388608\n")
    crowd = framed(publish("crowd", number, bytes(200_000)) for number in range(80))
    # Arrays take a while to decode, so that the server is mostly reading when it checks its clock.
    arrays = [publish("t", number, [255] * 200_000) for number in range(40)]
    much = framed([*arrays, ping(42)])
    with ExitStack() as stack:
        first = stack.enter_context(Wire(server.ws, timeout_s=30))
        with held_back(server, stack.enter_context(sending(first, crowd))):
            publisher = stack.enter_context(Wire(server.ws, timeout_s=30))
            stack.enter_context(sending(publisher, much))()
            time.sleep(1.15 * SILENCE_S)
        while publisher.receive() != Message(PONG, number=42):
            pass


def framed(messages: Iterable[bytes]) -> bytes:
    return b"".join(map(frame, messages))


@contextmanager
def sending(wire: Wire, data: bytes) -> Iterator[Callable[[], None]]:
    """Yield a function that begins to send in a thread beside the block; wait for the thread at the end."""
    thread = threading.Thread(target=lambda: wire.send_bytes(data), daemon=True)
    yield thread.start
    thread.join(30)
    assert not thread.is_alive()
