"""The Figg client: its session and a TCP connection. What applications see is `client.py`."""

import asyncio
import socket
from collections.abc import Callable

from headrace.client.client import Client
from headrace.client.options import Options
from headrace.session.figg_client import FiggClientSession

DEFAULT_PORT = 8119

_KEEPALIVE_IDLE_S = 15
_UNSENT_BYTES_MAX = 128 * 1024
"""What the kernel takes ahead of the wire: a ping must not wait behind a full socket buffer."""


def figg_client(url: str, host: str, port: int, options: Options) -> Client:
    session = FiggClientSession(
        window_max=options.window_max,
        window_bytes_max=options.window_bytes_max,
        ping_interval_s=options.ping_interval_s,
        pings_unanswered_max=options.pings_unanswered_max,
    )

    async def dial(protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(protocol, host, port)
        sock = transport.get_extra_info("socket")
        if sock is not None:  # None when it is closed again already
            _set_socket_options(sock)

    return Client(url, session, dial, options)


def _set_socket_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has these; pings find a dead peer without them.
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
