"""TLS for the load: a certificate of a server on this machine, and sockets that speak TLS as plain ones do.

The load's own encryption runs in the process of the load, and not in that of the server that is measured.
"""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.load import load


class Certificate(NamedTuple):
    certificate: Path
    key: Path

    @property
    def settings(self) -> Sequence[str]:
        """Settings of a server with this certificate."""
        return (f"listen.tls.cert={self.certificate}", f"listen.tls.key={self.key}")


def make_certificate(directory: Path) -> Certificate:
    """Make a self-signed certificate with a key on P-256, as most authorities issue them today."""
    made = Certificate(directory / "bench-cert.pem", directory / "bench-key.pem")
    command = [
        *("openssl", "req", "-x509", "-nodes", "-days", "30", "-subj", "/CN=localhost"),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-addext", "subjectAltName=DNS:localhost"),
        *("-keyout", str(made.key), "-out", str(made.certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return made


class _TlsSocket(ssl.SSLSocket):
    """A socket that says in the same way as a plain one that it has to wait."""

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Read all records that have arrived: epoll does not see those that OpenSSL holds."""
        view, got = memoryview(buffer), 0
        try:
            while got < len(view):
                more = super().recv_into(view[got:])
                got += more
                if not more or self.getblocking():
                    break
        except ssl.SSLWantReadError:
            if not got:
                raise BlockingIOError from None
        return got


def connect(certificate: Certificate, host: str, port: int) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=certificate.certificate)
    context.sslsocket_class = _TlsSocket
    plain = load.connect(host, port)
    with contextlib.ExitStack() as stack:
        stack.callback(plain.close)
        made = context.wrap_socket(plain, server_hostname="localhost")
        stack.pop_all()
        return made
