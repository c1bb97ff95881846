"""The door of the WebSocket listener: places of requests that are not complete, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from headrace.config.settings import Limits
from headrace.config.values import Origins
from headrace.server import handshake
from headrace.server.handshake import Door, Handshake
from headrace.server.peers.admission import Admission
from tests.server.test_figg_connection import WAIT_S, Figg

HALF = b"GET /healthz HTTP/1.1\r\nHost: loc"
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
PLACES = 32


class Server(Figg):
    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        self.address = sock.getsockname()
        self.door = Door(self.connections, {}, Origins(()))
        self.door.admission = self._admission = Admission(
            loop, sock, partial(Handshake, self.door), lambda: 1
        )
        self._writers: list[asyncio.StreamWriter] = []

    async def dial(
        self, data: bytes = b"", source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(source, 0))
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        self._admission.close()
        for writer in self._writers:
            writer.close()
        await self.until(lambda: not self.door.newcomers)
        await self.connections.close()
        self.store.crash()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path, Limits(handshakes_max=PLACES))
    await made.listen()
    yield made
    await made.close()


async def test_half_requests_of_one_address_delay_nobody_else(server: Server) -> None:
    idle = [await server.dial(HALF) for _ in range(3 * PLACES)]
    for _ in range(PLACES):
        reader, writer = await server.dial(WHOLE, "127.0.0.2")
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 ")
        writer.close()
    assert len(server.door.newcomers) <= PLACES
    applied = server.connections.metrics.labelled["limits_applied_total"]
    assert applied["handshakes_max", "address"] > 0
    assert len(idle) == 3 * PLACES


async def test_a_crowd_that_completes_its_requests_loses_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "CROWDED_S_MAX", WAIT_S)
    peers = [await server.dial() for _ in range(3 * PLACES)]
    await server.until(lambda: len(server.door.newcomers) >= 24)
    for reader, writer in peers:
        writer.write(WHOLE)
        assert (await asyncio.wait_for(reader.read(), WAIT_S)).startswith(b"HTTP/1.1 ")
        writer.close()
