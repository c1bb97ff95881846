"""One connection to a server, from the attempt to its end: over TCP, and the base for WebSocket.

A connection makes no decisions: it passes received data to its link (`client/link.py`) and sends the link's
frames.
"""

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Any, cast

from headrace.printing import unreachable
from headrace.tls import failure, unanswered

if TYPE_CHECKING:
    from headrace.client.link import Link

WRITE_BYTES_MAX = 256 * 1024
"""Bytes handed to the transport at once. A ping can overtake frames that are still in the session."""

CLOSED_BY_SERVER = "the server closed the connection"

_KEEPALIVE_IDLE_S = 15
_UNSENT_BYTES_MAX = 128 * 1024
"""Unsent bytes that the kernel may hold: a ping must not wait behind a full socket buffer."""


class Transport(ABC):
    """A connection that reports `opened` when it is established and later, once, `closed`.

    `lost` is resolved in any case, also if the connection is never established.
    """

    transport: asyncio.Transport

    def __init__(self, link: "Link[Any]") -> None:
        self._link = link
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.writing_paused = False
        self.was_hung_up = False
        """True if the server ended the connection; over WebSocket, only with a close code that blames us."""
        self._open = False
        self._dropped = False

    @abstractmethod
    async def dial(self) -> None:
        """Connect to the server; raise OSError if that fails."""

    @abstractmethod
    def write(self, frames: list[bytes]) -> None:
        """Send several frames of the protocol together."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection properly, after everything written has been sent."""

    @property
    def closing(self) -> bool:
        """True if nothing more can be written."""
        return self.transport.is_closing()

    def drop(self, reason: str = "") -> None:
        """Close at once, without sending buffered bytes."""
        self._dropped = True
        was_open = self._open
        self._lost(reason)
        if was_open:
            self.transport.abort()

    def read(self, reading: bool) -> None:
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._open:
            self._link.send()

    def _opened(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        if self._dropped:  # `drop` was called while the connection was being made
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BYTES_MAX // 4)
        self._open = True
        self._link.opened(self)

    def _lost(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._link.closed(reason)
        if not self.lost.done():
            self.lost.set_result(reason)


MakeConnection = Callable[["Link[Any]"], Transport]


class TcpConnection(Transport, asyncio.Protocol):
    """A connection over TCP, plain or with TLS, for protocols that frame their own messages."""

    def __init__(
        self, link: "Link[Any]", host: str, port: int, ssl: SSLContext | None = None
    ) -> None:
        super().__init__(link)
        self._host = host
        self._port = port
        self._ssl = ssl

    async def dial(self) -> None:
        sock = await open_socket(self._host, self._port)
        connect = asyncio.get_running_loop().create_connection
        if self._ssl is None:
            await connect(lambda: self, sock=sock)
            return
        with told_of_tls(self._host, self._port):
            await connect(lambda: self, sock=sock, ssl=self._ssl, server_hostname=self._host)

    def write(self, frames: list[bytes]) -> None:
        self.transport.write(b"".join(frames))

    def close(self) -> None:
        self.transport.close()

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._link.received((data,))

    def eof_received(self) -> None:
        self.was_hung_up = True  # asyncio closes the transport after this

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, SSLError):
            self._lost(failure(error, place_of(self._host, self._port)))
        else:
            self._lost(str(error or "") or CLOSED_BY_SERVER)


@contextmanager
def told_of_tls(host: str, port: int) -> Iterator[None]:
    """Raise a ConnectionError that says in words why the TLS handshake in the block has failed."""
    try:
        yield
    except SSLError as error:
        raise ConnectionError(failure(error, place_of(host, port))) from None
    except ConnectionError:
        raise ConnectionError(unanswered(place_of(host, port))) from None


def place_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def open_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that answers.

    Raises an OSError with a readable message if none answers: the error of the last address tried.
    """
    loop = asyncio.get_running_loop()
    place = place_of(host, port)
    error: OSError | None = None
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as failure:
        raise OSError(unreachable(failure, place)) from failure
    for family, kind, protocol, _, address in found:
        try:
            return await _connect(socket.socket(family, kind, protocol), address)
        except OSError as failure:
            # Class and text are derived from the errno, so that they are the same with every event loop.
            known = OSError(failure.errno, os.strerror(failure.errno or 0))
            error = type(known)(unreachable(known, place))
    raise error or OSError(f"{host} has no address")


async def _connect(sock: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Some systems lack these options. There, only pings detect a dead peer.
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
