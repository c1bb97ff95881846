"""Event loops and peers for the client's tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
import uvloop

from tests.client.peer import Peer, PeerThread
from tests.client.topics.figg_peer import figg_peer
from tests.client.topics.wombat_peer import WombatPeer


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on both kinds of event loop.

    The tests in `channel/` run on uvloop only, because their code is the same on both.
    """
    if item.path.parent.name == "channel":
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=[figg_peer, WombatPeer], ids=["figg", "wombat"])
def idle_peer(request: pytest.FixtureRequest) -> Peer:
    """Return a peer of each protocol that does not listen yet."""
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
    """Wait until a condition holds, checking it every millisecond."""

    def until(condition: Callable[[], object]) -> "asyncio.Future[None]":
        async def look() -> None:
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.001)

        return asyncio.ensure_future(look())

    return until
