"""Event loops and peers for the client's tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
import uvloop

from tests.client.peer import Peer, PeerThread


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test here runs on both kinds of loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    async with Peer() as peer:
        yield peer


@pytest.fixture
def peer_thread() -> Iterator[PeerThread]:
    with PeerThread() as thread:
        yield thread


@pytest.fixture
def until() -> Callable[[Callable[[], object]], "asyncio.Future[None]"]:
    """Waits until something holds, looking again at every step of the loop."""

    def until(condition: Callable[[], object]) -> "asyncio.Future[None]":
        async def look() -> None:
            async with asyncio.timeout(10):
                while not condition():
                    await asyncio.sleep(0.001)

        return asyncio.ensure_future(look())

    return until
