"""The HTTP listener: uvicorn in the server's own event loop. For its limits see `http_protocol.py`."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from headrace.server.http_protocol import BoundedProtocol, EarlyAnswers, HttpShared

_STOP_TIMEOUT_S = 2


class HttpListener:
    """An application on one socket."""

    def __init__(self, app: Starlette, shared: HttpShared, sock: socket.socket) -> None:
        config = uvicorn.Config(
            EarlyAnswers(app, shared.refused),
            http=partial(BoundedProtocol, shared),  # type: ignore[arg-type]
            ws="none",  # WebSocket clients have a listener of their own
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
