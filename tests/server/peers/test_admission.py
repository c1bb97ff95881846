"""New connections are accepted a few at a time, over real sockets."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator

import pytest

from headrace.server.peers import admission
from headrace.server.peers.admission import Admission

WAIT_S = 10.0
PEERS = 300
AT_ONCE = 7


class Counted(asyncio.Protocol):
    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=4096)) as sock:
        sock.setblocking(False)
        yield sock


@pytest.fixture
def peers(listening: socket.socket) -> Iterator[list[socket.socket]]:
    """Yield peers that the kernel has connected already."""
    with contextlib.ExitStack() as stack:
        address = listening.getsockname()
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(PEERS)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


async def test_one_iteration_accepts_a_bounded_number(
    listening: socket.socket, peers: list[socket.socket]
) -> None:
    made: list[asyncio.BaseTransport] = []
    accepted = 0
    most = 0

    class Counting(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal accepted
            found = super().accept()
            accepted += 1
            return found

    counting = Counting(fileno=listening.detach())
    counting.setblocking(False)
    admitting = Admission(
        asyncio.get_running_loop(), counting, lambda: Counted(made), lambda: AT_ONCE
    )
    before = 0
    async with asyncio.timeout(WAIT_S):
        while len(made) < PEERS:
            await asyncio.sleep(0)  # one iteration of the loop
            most, before = max(most, accepted - before), accepted
    admitting.close()
    assert accepted == PEERS
    assert 0 < most <= AT_ONCE
    for transport in made:
        transport.close()  # type: ignore[attr-defined]


async def test_without_free_descriptors_those_that_wait_are_accepted_later(
    listening: socket.socket,
    peers: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(admission, "RETRY_S", 0.001)
    failures = 3

    class Failing(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    failing = Failing(fileno=listening.detach())
    failing.setblocking(False)
    made: list[asyncio.BaseTransport] = []
    admitting = Admission(asyncio.get_running_loop(), failing, lambda: Counted(made), lambda: 1000)
    await until(lambda: len(made) == PEERS)
    admitting.close()
    assert caplog.messages == ["no new connection can be accepted: Too many open files"]
    for transport in made:
        transport.close()  # type: ignore[attr-defined]


async def test_nothing_is_accepted_after_the_end(
    listening: socket.socket, peers: list[socket.socket]
) -> None:
    made: list[asyncio.BaseTransport] = []
    admitting = Admission(
        asyncio.get_running_loop(), listening, lambda: Counted(made), lambda: AT_ONCE
    )
    admitting.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not made
    for peer in peers:
        peer.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""


async def test_a_pause_lets_peers_wait(
    listening: socket.socket, peers: list[socket.socket]
) -> None:
    made: list[asyncio.BaseTransport] = []
    admitting = Admission(
        asyncio.get_running_loop(), listening, lambda: Counted(made), lambda: AT_ONCE
    )
    admitting.pause()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not made
    admitting.resume()
    admitting.resume()
    await until(lambda: len(made) == PEERS)
    admitting.close()
    admitting.resume()
    for transport in made:
        transport.close()  # type: ignore[attr-defined]


async def test_a_peer_that_has_left_already_does_no_harm(listening: socket.socket) -> None:
    made: list[asyncio.BaseTransport] = []
    for _ in range(20):
        peer = socket.create_connection(listening.getsockname())
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.close()
    admitting = Admission(
        asyncio.get_running_loop(), listening, lambda: Counted(made), lambda: AT_ONCE
    )
    with contextlib.closing(socket.create_connection(listening.getsockname())):
        await until(lambda: made and not made[-1].is_closing())
    admitting.close()
    for transport in made:
        transport.close()  # type: ignore[attr-defined]
