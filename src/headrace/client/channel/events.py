"""What a channel hands to the application: messages and snapshots, and the order they wait in."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from headrace.session.client_channel import Lost, Received, Restored
from headrace.wire.channel_answers import Delivered, Missed, State

__all__ = ["Inbox", "Message", "Missed", "Snapshot"]


class Acknowledges(Protocol):
    async def ack(self, upto: "Message") -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    content: Any
    """The JSON value, or the bytes."""
    is_json: bool

    @property
    def payload(self) -> Any:
        """The JSON value; None also when there are bytes instead."""
        return self.content if self.is_json else None

    @property
    def bytes(self) -> bytes | None:
        """The bytes; None when there is JSON instead."""
        return None if self.is_json else self.content


@dataclass(frozen=True, kw_only=True, slots=True)
class Message(_Held):
    """What another processor has sent."""

    processor: str
    number: int
    """Which of the messages of its processor it is."""
    offset: int
    """Just past this message in the log."""
    ms: int
    """When it was stored, in milliseconds since 1970."""
    _channel: Acknowledges = field(repr=False, compare=False)

    async def ack(self) -> None:
        """This message, and all before it, are done with; returns when the server has noted that."""
        await self._channel.ack(self)

    @classmethod
    def of(cls, told: Delivered, channel: Acknowledges) -> Self:
        return cls(
            content=told.content,
            is_json=told.is_json,
            processor=told.processor,
            number=told.number,
            offset=told.offset,
            ms=told.ms,
            _channel=channel,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot(_Held):
    """The last known state: what all messages up to an offset have been folded into."""

    offset: int
    epoch: int
    missed: Missed | None = None
    """What it stands in for that this processor will never see, if there is any."""

    @classmethod
    def of(cls, told: State, missed: Missed | None = None) -> Self:
        return cls(
            content=told.content,
            is_json=told.is_json,
            offset=told.offset,
            epoch=told.epoch,
            missed=missed,
        )


Entry = Delivered | Restored | Lost


class Inbox:
    """What came and is not taken. A server sends no more than its window before it is acknowledged."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    @property
    def first(self) -> Entry | None:
        return self._entries[0] if self._entries else None

    def put(self, event: Received | Restored | Lost) -> None:
        if isinstance(event, Received):
            self._entries.extend(event.messages)
        else:
            if isinstance(event, Restored):
                # What came before it is in it.
                self._entries.clear()
            self._entries.append(event)

    def take(self, entry: Entry) -> None:
        """The first one is done, unless something else has come in its place."""
        if self._entries and self._entries[0] is entry:
            self._entries.popleft()

    def clear(self) -> None:
        self._entries.clear()
