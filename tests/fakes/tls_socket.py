"""A blocking TLS connection that can end its side and still receive, which sockets of Python cannot."""

import contextlib
import socket
import ssl
from typing import Self


class TlsSocket:
    """The methods of a socket that tests use, over a connected socket."""

    def __init__(
        self, plain: socket.socket, context: ssl.SSLContext, host: str = "localhost"
    ) -> None:
        self.plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                self._flush()  # the alert, without which the server does not learn the reason
                raise
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.tls.write(view) :]
            self._flush()

    def recv(self, size: int) -> bytes:
        """Return decrypted bytes; empty once the server has ended its side properly.

        Raises `ConnectionResetError` if the stream ends without the message of TLS for it.
        """
        while True:
            try:
                return self.tls.read(size)
            except ssl.SSLWantReadError:
                self._fill()
            except ssl.SSLZeroReturnError:
                return b""

    def end(self) -> None:
        """End this side; the server may still send."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self._flush()

    def settimeout(self, seconds: float) -> None:
        self.plain.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self.plain.shutdown(how)

    def close(self) -> None:
        self.plain.close()

    def _fill(self) -> None:
        data = self.plain.recv(65536)
        if not data:
            raise ConnectionResetError("the stream ended without the end of TLS")
        self._incoming.write(data)

    def _flush(self) -> None:
        if self._outgoing.pending:
            self.plain.sendall(self._outgoing.read())
