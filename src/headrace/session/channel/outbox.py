"""Messages of a processor to a channel that are not settled: which to send next, and with which number.

A message gets its number when it is sent. On each connection, a message is in one of three places:

    waiting ──take──▶ under way ──sent──▶ settled
                          └──refused──▶ returned, or settled for good

A refusal makes the higher numbers void, and the server refuses them as well. So nothing more is sent until
everything under way is answered: no answer is ever mistaken for that of another message with the same number.
A new connection begins behind the last accepted number, which `joined` tells: messages with a number up to
there are stored.
"""

from collections import deque
from enum import IntEnum

from headrace.errors import QueueFullError
from headrace.wire.channel.answers import Fields

QUEUE_MAX = 10_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024

ITEM_OVERHEAD_BYTES = 64
"""Approximate size of a message in its frame, without its content."""


class SendRefusal(IntEnum):
    FOR_GOOD = 0
    """The message cannot be sent; its number is free for another."""
    LATER = 1
    """A retry may succeed."""
    NOT_JOINED = 2


class _Item:
    __slots__ = ("fields", "number", "ticket")

    def __init__(self, ticket: int, fields: Fields) -> None:
        self.ticket = ticket
        self.fields = fields
        self.number = 0
        """Number with which the message was last sent; 0 if it was never sent."""


class Sends:
    __slots__ = (
        *("_accepted", "_bytes", "_bytes_max", "_next", "_queue_max", "_refused", "_returned"),
        *("_under_way", "_waiting"),
    )

    def __init__(self, queue_max: int = QUEUE_MAX, bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self._queue_max = queue_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._waiting: deque[_Item] = deque()
        self._under_way: dict[int, _Item] = {}
        self._returned: list[_Item] = []
        self._accepted = 0
        """Last number that the server is known to have accepted."""
        self._next: int | None = None
        """Number of the next message to send; None while it is unknown, and then nothing is sent."""
        self._refused: tuple[int, SendRefusal] | None = None
        """Smallest number that was refused, and why: this is the cause of the refusals of higher numbers."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way) + len(self._returned)

    @property
    def has_room(self) -> bool:
        return len(self) < self._queue_max and self._bytes < self._bytes_max

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    def add(self, ticket: int, fields: Fields) -> None:
        if not self.has_room:
            raise QueueFullError(
                f"{len(self)} messages with {self._bytes} bytes wait to be accepted, and no more are kept"
            )
        self._waiting.append(_Item(ticket, fields))
        self._bytes += len(fields)

    def take(self) -> tuple[int, Fields] | None:
        """Return the next message to send, with its number; None if nothing can be sent."""
        if self._next is None or not self._waiting:
            return None
        item = self._waiting.popleft()
        item.number = self._next
        self._under_way[item.number] = item
        self._next += 1
        return item.number, item.fields

    def sent(self, number: int) -> int | None:
        """Settle a message that the server has stored. Returns its ticket."""
        item = self._under_way.pop(number, None)
        if item is None:
            return None
        self._accepted = max(self._accepted, number)
        return self._settle(item)

    def refused(self, number: int, refusal: SendRefusal) -> int | None:
        """Note that the server refuses a message. Returns its ticket if the refusal is for good."""
        item = self._under_way.pop(number, None)
        if item is None:
            return None
        self._next = None
        if self._refused is None or number < self._refused[0]:
            self._refused = number, refusal
        if refusal is SendRefusal.FOR_GOOD:
            return self._settle(item)
        self._returned.append(item)
        return None

    def go_on(self) -> SendRefusal | None:
        """Continue after a refusal when all is answered. Returns the reason if a new `join` is necessary.

        Then only the answer to `join` can tell the next number.
        """
        if self._refused is None or self._under_way:
            return None
        number, refusal = self._refused
        self._gather()
        if refusal is SendRefusal.FOR_GOOD:
            self._next = number
            return None
        return refusal

    def joined(self, number: int) -> list[int]:
        """Continue behind the last accepted number. Returns tickets of stored messages with lost answers."""
        assert not self._under_way
        stored: list[int] = []
        # A server that has forgotten this processor starts over, and knows none of its numbers.
        if number >= self._accepted:
            while self._waiting and 0 < self._waiting[0].number <= number:
                stored.append(self._settle(self._waiting.popleft()))
        self._accepted = number
        self._next = number + 1
        return stored

    def disconnected(self) -> None:
        self._gather()
        self._next = None

    def _gather(self) -> None:
        """Let all messages wait again, in their order."""
        self._returned += self._under_way.values()
        self._returned.sort(key=lambda item: item.number)
        self._waiting.extendleft(reversed(self._returned))
        self._returned.clear()
        self._under_way.clear()
        self._refused = None

    def _settle(self, item: _Item) -> int:
        self._bytes -= len(item.fields)
        return item.ticket
