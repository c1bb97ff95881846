"""A connection over plain TCP, for protocols that frame their own messages; TCP sockets for the others."""

import asyncio
import os
import socket
from typing import cast

from headrace.client.transport.connection import CLOSED_BY_SERVER, Owner, Transport
from headrace.printing import unreachable

_KEEPALIVE_IDLE_S = 15
_UNSENT_BYTES_MAX = 128 * 1024
"""Unsent bytes that the kernel may hold: a ping must not wait behind a full socket buffer."""


async def open_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that answers.

    Raises an OSError with a readable message if none answers: the error of the last address tried.
    """
    loop = asyncio.get_running_loop()
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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
        _set_options(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_options(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Some systems lack these options. There, only pings detect a dead peer.
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)


class TcpConnection(Transport, asyncio.Protocol):
    def __init__(self, owner: Owner, host: str, port: int) -> None:
        super().__init__(owner)
        self._host = host
        self._port = port

    async def dial(self) -> None:
        sock = await open_socket(self._host, self._port)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def write(self, frames: list[bytes]) -> None:
        self.transport.write(b"".join(frames))

    def close(self) -> None:
        self.transport.close()

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._owner.received((data,))

    def eof_received(self) -> None:
        self.was_hung_up = True  # asyncio closes the transport after this

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(str(error or "") or CLOSED_BY_SERVER)
