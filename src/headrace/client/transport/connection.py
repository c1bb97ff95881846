"""One attempt to connect and the connection it may become, whatever carries it: what TCP and WebSocket share.

Decides nothing: what comes goes to the owner (`link.py`), what the owner gives goes out.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

WRITE_BYTES_MAX = 256 * 1024
"""Handed to the transport at once. What is still in the session can be overtaken by a ping."""

CLOSED_BY_SERVER = "the server closed the connection"


class Owner(Protocol):
    """Who a connection reports to."""

    def opened(self, connection: "Connection") -> None:
        """It stands, and can be written to."""

    def received(self, chunks: Sequence[bytes]) -> None:
        """What one read has brought."""

    def writable(self) -> None:
        """Writing is no longer paused."""

    def closed(self, reason: str) -> None:
        """It is gone. Nothing more is reported."""


class Connection(ABC):
    """Reports `opened` when it stands and then, once, `closed`; settles `lost` in any case."""

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.writing_paused = False
        self.was_hung_up = False
        """Whether it was the server that ended it, of its own will."""
        self._open = False
        self._dropped = False

    @abstractmethod
    async def dial(self) -> None:
        """Connect; raises OSError when that fails."""

    @abstractmethod
    def write(self, frames: list[bytes]) -> None:
        """Send frames of the protocol, together."""

    @abstractmethod
    def close(self) -> None:
        """Say good-bye, and end when what was written is out."""

    @property
    def closing(self) -> bool:
        """Whether nothing more can be written."""
        return self.transport.is_closing()

    def drop(self, reason: str = "") -> None:
        """Close without sending what is left."""
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
        if self._dropped:  # given up while the connection was being made
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


MakeConnection = Callable[[Owner], Connection]
