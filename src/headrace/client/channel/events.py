"""Messages and snapshots that a channel passes to the application, and the inbox in which they wait."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from headrace.session.channel.membership import LostMessages, ReceivedMessages, Restored
from headrace.wire.channel import Delivered, SnapshotBody
from headrace.wire.channel import MissedMessages as MissedMessages


class Acknowledges(Protocol):
    async def ack(self, upto: "ChannelMessage") -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    content: Any
    """The JSON value, or the bytes."""
    is_json: bool

    @property
    def payload(self) -> Any:
        """The JSON value; None if the content is bytes (or JSON null)."""
        return self.content if self.is_json else None

    @property
    def bytes(self) -> bytes | None:
        """The bytes; None if the content is JSON."""
        return None if self.is_json else self.content


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelMessage(_Held):
    """A message of another processor, or after a start from the state also an own one."""

    processor: str
    number: int
    """Number of the message, counted per processor."""
    next_offset: int
    """Offset just past this message in the log."""
    ms: int
    """Time at which the message was stored, in milliseconds since 1970."""
    _channel: Acknowledges = field(repr=False, compare=False)

    async def ack(self) -> None:
        """Acknowledge this message and all before it; return when the server has recorded it."""
        await self._channel.ack(self)

    @classmethod
    def of(cls, told: Delivered, channel: Acknowledges) -> Self:
        return cls(
            content=told.content,
            is_json=told.is_json,
            processor=told.processor,
            number=told.number,
            next_offset=told.offset,
            ms=told.ms,
            _channel=channel,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot(_Held):
    """The last known state: the result of all messages up to an offset."""

    offset: int
    """Offset just past the last message that the state covers."""
    epoch: int
    missed: MissedMessages | None = None
    """Messages that the snapshot replaces and that this processor will never see; None: there are none."""

    @classmethod
    def of(cls, told: SnapshotBody, missed: MissedMessages | None = None) -> Self:
        return cls(
            content=told.content,
            is_json=told.is_json,
            offset=told.offset,
            epoch=told.epoch,
            missed=missed,
        )


Entry = Delivered | Restored | LostMessages
Received = ReceivedMessages | Restored | LostMessages


class Inbox(deque[Entry]):
    """Received entries that are not taken yet.

    The server's window limits their number: it sends no more until messages are acknowledged.
    """

    @property
    def first(self) -> Entry | None:
        return self[0] if self else None

    def put(self, event: Received) -> None:
        if isinstance(event, ReceivedMessages):
            self.extend(event.messages)
        else:
            if isinstance(event, Restored):
                self.clear()  # the restored state covers all earlier entries
            self.append(event)

    def take(self, entry: Entry) -> None:
        """Remove the first entry if it is still `entry`; a restored state may have replaced it."""
        if self.first is entry:
            self.popleft()
