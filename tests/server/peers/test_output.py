"""Output that waits for slow subscribers, over real sockets and a store that commits on request."""

from pathlib import Path

from headrace.broker.broker import SubscriptionState
from headrace.config.settings import Limits
from headrace.server.topic_connection import FiggConnection
from tests.server.peers.test_held_back import Peer, Server, serving
from tests.system.figg import foreign as figg

LIMIT = 1 << 16
SUBSCRIBERS = 3
RECORDS = 10


async def test_output_of_all_connections_is_limited_and_slow_subscribers_lose_nothing(
    tmp_path: Path,
) -> None:
    payload = bytes(LIMIT // 4)
    async with serving(tmp_path, Limits(output_total_bytes_max=LIMIT)) as server:
        publisher = await server.dial()
        publisher.send(figg.publish(b"t", 0, b""))
        await server.committed(lambda: server.store.payloads("t"))
        subscribers = [await server.dial() for _ in range(SUBSCRIBERS)]
        for peer in subscribers:
            peer.send(figg.attach(b"t"))
        await server.committed(lambda: len(live(server)) == SUBSCRIBERS)
        connections = live(server)
        for one in connections:
            one.pause_writing()
        for number in range(1, RECORDS + 1):
            publisher.send(figg.publish(b"t", number, payload))
            await server.committed(lambda: len(server.store.payloads("t")) > number)  # noqa: B023
        assert server.applied("output_total_bytes_max") == SUBSCRIBERS
        assert server.applied("output_bytes_max") == 0
        a_piece = len(figg.publish(b"t", 0, payload))
        assert LIMIT <= server.connections.output_bytes <= LIMIT + a_piece
        assert not live(server)
        for one in connections:
            one.resume_writing()
        for peer in subscribers:
            await hears(peer, RECORDS, payload)


def live(server: Server) -> list[FiggConnection]:
    """Return the connections whose subscription is live."""
    return [
        one
        for one in server.connections.open
        if isinstance(one, FiggConnection)
        and any(
            subscription.state is SubscriptionState.LIVE
            for subscription in (one._subscriptions or {}).values()
        )
    ]


async def hears(peer: Peer, records: int, payload: bytes) -> None:
    """Receive until the peer has all these records once and in their order."""
    found: list[bytes] = []
    while len(found) < records:
        message = await peer.next()
        assert message is not None
        if message.type == figg.DATA:
            found.append(message.data)
    assert found == [payload] * records
