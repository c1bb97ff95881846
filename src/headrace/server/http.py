"""The HTTP listener: uvicorn in the server's own event loop, with bounds. What it answers is in `api.py`."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_TIMEOUT_S = 10.0
"""How long a request may take to arrive, from the connection or from its first byte."""

_STOP_TIMEOUT_S = 2


class HttpListener:
    """An application on one socket."""

    def __init__(self, app: Starlette, connections_max: int, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_bounded_protocol(connections_max),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        self._server = _Uvicorn(config)
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        await self._server.is_open.wait()

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_open = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_open.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the whole server."""
        yield


def _bounded_protocol(connections_max: int) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol, for at most so many connections, none of which may dawdle."""

    class BoundedProtocol(HttpToolsProtocol):
        asked = True
        until_s = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > connections_max:
                transport.abort()
            else:
                self._expect_request()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._expect_request()

        def on_headers_complete(self) -> None:
            self.asked = True
            super().on_headers_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """No word about it: WebSocket clients have a listener of their own."""

        def _expect_request(self) -> None:
            if self.asked:
                self.asked = False
                self.until_s = self.loop.time() + REQUEST_TIMEOUT_S
                self.loop.call_at(self.until_s, self._close_if_silent)

        def _close_if_silent(self) -> None:
            late = not self.asked and self.loop.time() >= self.until_s
            if late and not self.transport.is_closing():
                self.transport.abort()

    return BoundedProtocol
