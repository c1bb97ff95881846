"""TLS as a load balancer offers it: a proxy to a plain-text server."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.certificates import Certificate
from tests.fakes.raw_server import raw_server


@asynccontextmanager
async def tls_proxy(certificate: Certificate, host: str, port: int) -> AsyncIterator[int]:
    """Listen with TLS on a port of its own, forward to `host` and `port`, and yield the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(host, port)
        copying = [
            asyncio.ensure_future(_copy(reader, behind_writer)),
            asyncio.ensure_future(_copy(behind_reader, writer)),
        ]
        try:
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in copying:
                one.cancel()
            behind_writer.close()
            with suppress(OSError):
                await behind_writer.wait_closed()

    async with raw_server(pass_on, context) as own_port:
        yield own_port


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
