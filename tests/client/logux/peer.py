"""A Logux server on loopback that sends exactly what a test tells it to send.

It uses `websockets` and `msgpack`, so that the client is tested against code that is not ours.
"""

import asyncio
import time
import weakref
from types import TracebackType
from typing import Any, Self

import msgpack
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from headrace.testing import hold_port

WAIT_S = 30


class LoguxPeer:
    def __init__(self) -> None:
        held = hold_port()
        weakref.finalize(self, held.close)
        self.port: int = held.getsockname()[1]
        self.paths: list[str] = []
        self._server: Server | None = None
        self._accepted: asyncio.Queue[LoguxConnection] = asyncio.Queue()

    @property
    def url(self) -> str:
        return f"logux://127.0.0.1:{self.port}"

    @property
    def waiting(self) -> int:
        """Number of connections that no test has accepted yet."""
        return self._accepted.qsize()

    async def accept(self) -> "LoguxConnection":
        """Wait for the next connection and return it."""
        async with asyncio.timeout(WAIT_S):
            return await self._accepted.get()

    async def greet(self, *answer: Any) -> "LoguxConnection":
        """Wait for the next connection, answer its `connect`, and return it."""
        connection = await self.accept()
        await connection.hear()
        await connection.greet(*answer)
        return connection

    async def start(self) -> None:
        # The server sends no pings, and hardly waits for the other side to close.
        self._server = await serve(
            self._handle, "127.0.0.1", self.port, ping_interval=None, close_timeout=0.1
        )

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _handle(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.paths.append(socket.request.path)
        self._accepted.put_nowait(LoguxConnection(socket))
        await socket.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


class LoguxConnection:
    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket

    async def hear(self, *types: str) -> Any:
        """Return the next message; if `types` are given, the next message of one of these types."""
        async with asyncio.timeout(WAIT_S):
            while True:
                data = await self.socket.recv()
                assert isinstance(data, bytes)
                message = msgpack.unpackb(data)
                if not types or message[0] in types:
                    return message

    async def say(self, *message: Any) -> None:
        await self.socket.send(msgpack.packb(message))

    async def greet(self, *answer: Any) -> None:
        now = int(time.time() * 1000)
        await self.say(*(answer or ("connected", [0, 0], "server", [now, now])))

    async def cut(self) -> None:
        """Cut the connection as a network failure does."""
        self.socket.transport.abort()
        await self.socket.wait_closed()

    async def closed(self) -> None:
        """Receive until the connection is closed."""
        async with asyncio.timeout(WAIT_S):
            try:
                while True:
                    await self.socket.recv()
            except ConnectionClosed:
                pass
