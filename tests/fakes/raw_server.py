"""A server of raw connections on loopback, whose connections have all ended when its block ends."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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
        for handler in handlers:
            handler.cancel()
        for handler in handlers:
            with suppress(asyncio.CancelledError):
                await handler
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
