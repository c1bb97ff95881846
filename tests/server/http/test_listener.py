"""The HTTP listener's limits on connections, in this process: silent peers, and too many peers."""

from collections.abc import AsyncIterator

import pytest

from headrace.server.http import listener as http_protocol
from tests.server.listener import Listener, Peer

CONNECTIONS_MAX = 3
REQUEST = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 0.2)
    async with Listener(CONNECTIONS_MAX) as made:
        yield made


async def answered(peer: Peer) -> None:
    peer.send(REQUEST)
    answer = await peer.answer()
    assert (answer.status, answer.body) == (200, b"hello")


async def test_a_peer_that_asks_nothing_is_dropped(listener: Listener) -> None:
    peer = await listener.connect()
    assert await peer.ended()
    peer.close()


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_request_that_does_not_arrive_whole_is_given_up(
    listener: Listener, earlier: int
) -> None:
    peer = await listener.connect()
    for _ in range(earlier):
        await answered(peer)
    peer.send(REQUEST[:-2])
    assert (await peer.answer()).status == 408
    assert await peer.ended()
    peer.close()


async def test_connections_beyond_the_bound_are_closed_at_once(listener: Listener) -> None:
    kept = [await listener.connect() for _ in range(CONNECTIONS_MAX)]
    for peer in kept:
        await answered(peer)
    late = await listener.connect()
    assert await late.ended()
    late.close()
    kept.pop().close()
    for peer in kept:
        await answered(peer)
        peer.close()
