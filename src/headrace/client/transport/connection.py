"""One connection to a server, from the attempt to its end: the parts that TCP and WebSocket share.

It makes no decisions: it passes received data to its owner (`client/link.py`) and sends the owner's frames.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

WRITE_BYTES_MAX = 256 * 1024
"""Bytes handed to the transport at once. A ping can overtake frames that are still in the session."""

CLOSED_BY_SERVER = "the server closed the connection"


class Owner(Protocol):
    """The object that a connection reports to."""

    def opened(self, connection: "Transport") -> None:
        """Called when the connection is established and can be written to."""

    def received(self, chunks: Sequence[bytes]) -> None:
        """Called with the data of one read."""

    def writable(self) -> None:
        """Called when writing is no longer paused."""

    def closed(self, reason: str) -> None:
        """Called when the connection has ended. Nothing is reported after it."""


class Transport(ABC):
    """A connection that reports `opened` when it is established and later, once, `closed`.

    `lost` is resolved in any case, also if the connection is never established.
    """

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
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
        if self._open:
            self._leave(reason)
            self.transport.abort()
        self._settle(reason)

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
            self._owner.writable()

    def _opened(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        if self._dropped:  # `drop` was called while the connection was being made
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BYTES_MAX // 4)
        self._open = True
        self._owner.opened(self)

    def _lost(self, reason: str) -> None:
        self._leave(reason)
        self._settle(reason)

    def _settle(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def _leave(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._owner.closed(reason)


MakeConnection = Callable[[Owner], Transport]
