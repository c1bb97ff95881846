"""A Figg connection in this process, over a real socket and a store that commits when a test says so."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker, BrokerSubscription, Sink
from headrace.config.settings import Config, Journal, Limits
from headrace.server.loop import TURN_PIECES_MAX
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers import connection
from headrace.server.peers.connection import COMMANDS_AT_ONCE_MAX
from headrace.server.peers.connections import Connections
from headrace.server.topic_connection import FiggConnection
from tests.fakes.store import StepStore
from tests.server.step_server import open_to_all
from tests.system.figg import foreign as figg

WAIT_S = 10.0


class Figg:
    """A listener whose publishes become durable when `commit` is called."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        journal = Journal(file_bytes=1 << 20, files=2)
        config = Config(data_dir=directory, journal=journal, limits=limits or Limits())
        self.store = StepStore(config)
        broker = Broker(self.store.store, self.store.runner, lambda reason: None)
        self.attached: list[str] = []
        subscribe = broker.subscribe

        def record(sink: Sink, name: str, *others: Any) -> BrokerSubscription:
            self.attached.append(name)
            return subscribe(sink, name, *others)

        broker.subscribe = record  # type: ignore[method-assign]
        self.connections = Connections(
            broker, config.limits, Metrics(), *open_to_all(self.store.store)
        )

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: FiggConnection(self.connections), "127.0.0.1", 0
        )
        self.address = self._server.sockets[0].getsockname()

    def commit(self) -> None:
        self.store.runner.run()

    async def close(self) -> None:
        self._server.close()
        await self.connections.close()
        self.store.crash()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Figg]:
    figg_server = Figg(tmp_path)
    await figg_server.listen()
    yield figg_server
    await figg_server.close()


async def half_closed_sender(server: Figg) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(figg.publish(b"t", 0, b"foo"))
    writer.write_eof()
    return reader, writer


async def test_a_half_closed_sender_is_kept_until_its_commit(server: Figg) -> None:
    reader, writer = await half_closed_sender(server)
    while not server.store.store.pending_bytes:
        await asyncio.sleep(0)
    server.commit()
    received = await asyncio.wait_for(reader.read(), WAIT_S)
    assert figg.Decoder().feed(received) == [figg.Message(figg.ACK, number=0)]
    writer.close()


async def test_a_half_closed_sender_is_given_up_when_no_commit_comes(
    server: Figg, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GOODBYE_TIMEOUT_S", 0.05)
    reader, writer = await half_closed_sender(server)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    assert not server.connections.open
    server.commit()  # the publish is stored anyway, but not acknowledged
    assert server.store.payloads("t") == [b"foo"]
    writer.close()


FLOODERS = 40
FLOOD = [figg.attach(b"flood") + figg.detach(b"flood")] * 500


async def flood(server: Figg, stack: contextlib.ExitStack) -> None:
    """Let 40 peers attach and detach in a tight loop; wait until the server has begun with all of them."""
    others = len(server.connections.open)
    peers = [stack.enter_context(socket.create_connection(server.address)) for _ in range(FLOODERS)]
    while len(server.connections.open) < others + FLOODERS:
        await asyncio.sleep(0)
    for number, peer in enumerate(peers):
        peer.sendall(figg.attach(b"own/%d" % number) + b"".join(FLOOD))
    while sum(name.startswith("own/") for name in server.attached) < FLOODERS:
        await asyncio.sleep(0)


async def test_a_flood_of_attaches_keeps_a_publish_waiting_for_a_bounded_number_of_them(
    server: Figg,
) -> None:
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(socket.create_connection(server.address))
        while not server.connections.open:
            await asyncio.sleep(0)
        await flood(server, stack)
        before = len(server.attached)
        publisher.sendall(figg.publish(b"t", 0, b"foo"))
        while not server.store.store.pending_bytes:
            await asyncio.sleep(0)
        in_between = len(server.attached) - before
        assert in_between <= 3 * TURN_PIECES_MAX * COMMANDS_AT_ONCE_MAX, (
            "a few turns, not all peers"
        )


async def test_a_flood_is_answered_in_the_end(server: Figg) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"".join(FLOOD) + figg.ping(1) * 500 + figg.publish(b"t", 0, b"foo"))
    writer.write_eof()
    while not server.store.store.pending_bytes:
        await asyncio.sleep(0)
    server.commit()
    received = figg.Decoder().feed(await asyncio.wait_for(reader.read(), WAIT_S))
    kinds = Counter(message.type for message in received)
    assert kinds == {figg.ATTACHED: 500, figg.DETACHED: 500, figg.PONG: 500, figg.ACK: 1}
    writer.close()
