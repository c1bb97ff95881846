"""Options of the socket of a connection, and how much may be written ahead of its peer."""

import asyncio
import socket

UNSENT_BYTES_MAX = 1 << 18
"""High-water mark of the transport's write buffer, which bounds the data ahead of an answer."""
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_KERNEL_UNSENT_BYTES_MAX = 1 << 17


def tune(transport: asyncio.Transport) -> None:
    """Set the options of a new connection."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _KERNEL_UNSENT_BYTES_MAX)
    transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX, low=UNSENT_BYTES_MAX // 4)
