"""A server of raw connections on loopback, whose connections have all ended when its block ends."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

ACCEPT_TURNS = 10
"""Turns of the event loop within which a connection that it has accepted reaches its handler."""

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def last_accepted() -> None:
    """Wait until the connections that a closed listener had accepted are known to their protocol."""
    for _ in range(ACCEPT_TURNS):
        await asyncio.sleep(0)


@asynccontextmanager
async def raw_server(handle: Handle, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Yield the port, on which `handle` serves each connection; it is closed when `handle` returns.

    A handler that is cancelled before its first step can close nothing, so connections are closed here.
    """
    writers: list[asyncio.StreamWriter] = []
    handlers: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                await handle(reader, writer)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        handlers.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await last_accepted()
        for handler in handlers:
            handler.cancel()
        for handler in handlers:
            with suppress(asyncio.CancelledError):
                await handler
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
