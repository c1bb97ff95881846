"""Opens TCP sockets to a server, with the options that every protocol wants."""

import asyncio
import os
import socket

from headrace.printing import unreachable

_KEEPALIVE_IDLE_S = 15
_UNSENT_BYTES_MAX = 128 * 1024
"""What the kernel takes ahead of the wire: a ping must not wait behind a full socket buffer."""


async def open_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that answers; raises OSError, of the last tried, in words."""
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
            # The class follows from the number, whichever event loop it is; so do the words.
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
    # Not every system has these; pings find a dead peer without them.
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
