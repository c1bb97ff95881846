"""TLS as a load balancer offers it: a self-signed certificate, and a proxy to a plain-text server."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from tests.fakes.raw_server import raw_server


class Certificate(NamedTuple):
    """Self-signed certificate for localhost."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        made = cls(directory / "certificate.pem", directory / "key.pem")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-addext", "subjectAltName=DNS:localhost"),
                *("-keyout", str(made.key), "-out", str(made.certificate)),
            ],
            check=True,
            capture_output=True,
        )
        return made

    def trusted(self) -> ssl.SSLContext:
        """Context of a client that trusts the certificate."""
        return ssl.create_default_context(cafile=self.certificate)


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
