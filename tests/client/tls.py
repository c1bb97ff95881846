"""TLS as a load balancer offers it: a self-signed certificate, and a proxy to a plain-text server."""

import asyncio
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self


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


class TlsProxy:
    """Proxy that listens with TLS on its own port and forwards to `host` and `port`."""

    def __init__(self, certificate: Certificate, host: str, port: int) -> None:
        self._behind = host, port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.certificate, certificate.key)
        self._passing: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        behind_reader, behind_writer = await asyncio.open_connection(*self._behind)
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(_copy(reader, behind_writer)),
                    asyncio.ensure_future(_copy(behind_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for end in (writer, behind_writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()
            self._passing.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
