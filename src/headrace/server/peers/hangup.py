"""The end of a connection: what is buffered is still sent, and what the peer still sends is discarded."""

import asyncio
from collections.abc import Callable

_CLOSE_TIMEOUT_S = 5.0
DISCARDED_BYTES_MAX = 16 << 20
"""Limit of the bytes read and discarded from a peer that keeps sending after the server has hung up."""


def hang_up(transport: asyncio.Transport, lost: Callable[[], None]) -> None:
    """Send buffered data, then end the connection. `lost` is called when it has ended.

    Until the peer hangs up too, its data is read and discarded: the kernel resets a socket that is closed
    with unread data, and the peer would lose the last answers.
    """
    # Pausing and resuming makes the loop read for the new protocol.
    transport.pause_reading()
    transport.set_protocol(_Ending(transport, lost))
    transport.resume_reading()
    transport.write_eof()
    # A peer that never reads must not keep the connection open.
    asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, transport.abort)


class _Ending(asyncio.Protocol):
    __slots__ = ("_bytes", "_lost", "_transport")

    def __init__(self, transport: asyncio.Transport, lost: Callable[[], None]) -> None:
        self._transport = transport
        self._lost = lost
        self._bytes = 0

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes > DISCARDED_BYTES_MAX:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def host_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of a peer, without its port."""
    return peer_name(transport).rpartition(":")[0]


def peer_name(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "unknown"
