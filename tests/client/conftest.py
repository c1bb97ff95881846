"""Event loops and peers for the client's tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
import uvloop

from tests.client.figg_peer import figg_peer
from tests.client.peer import Peer, PeerThread
from tests.client.wombat_peer import WombatPeer


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Asynchronous tests here run on both kinds of loop; what is the same above them, on one."""
    if item.path.name.startswith("test_channels"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=[figg_peer, WombatPeer], ids=["figg", "wombat"])
def idle_peer(request: pytest.FixtureRequest) -> Peer:
    """A peer of each protocol that does not listen yet."""
    peer: Peer = request.param()
    return peer


@pytest_asyncio.fixture
async def peer(idle_peer: Peer) -> AsyncIterator[Peer]:
    async with idle_peer:
        yield idle_peer


@pytest_asyncio.fixture
async def wombat_peer() -> AsyncIterator[WombatPeer]:
    async with WombatPeer() as peer:
        yield peer


@pytest.fixture
def peer_thread(idle_peer: Peer) -> Iterator[PeerThread]:
    with PeerThread(idle_peer) as thread:
        yield thread


@pytest.fixture
def until() -> Callable[[Callable[[], object]], "asyncio.Future[None]"]:
    """Waits until something holds, looking again at every step of the loop."""

    def until(condition: Callable[[], object]) -> "asyncio.Future[None]":
        async def look() -> None:
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.001)

        return asyncio.ensure_future(look())

    return until
