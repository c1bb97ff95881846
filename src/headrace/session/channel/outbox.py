"""What a processor has sent to a channel and is not settled: which goes out next, and with which number.

A message has its number from when it first goes out. On each connection each is in one of three places:

    waiting ──take──▶ under way ──sent──▶ settled
                          └──refused──▶ returned, or settled for good

A refusal makes the numbers behind it void, and those are refused as well. So nothing more goes out until
everything under way is answered: no answer is ever taken for that of another message with the same number.
A new connection begins behind the number that `joined` says was accepted last: what has one up to there is
stored.
"""

from collections import deque
from enum import IntEnum

from headrace.errors import QueueFullError
from headrace.wire.channel_answers import Fields

QUEUE_MAX = 10_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024

ITEM_OVERHEAD_BYTES = 64
"""What a message takes in a frame beside its content, about."""


class Refusal(IntEnum):
    FOR_GOOD = 0
    """The message cannot be sent; its number is free for another."""
    LATER = 1
    """The same again may succeed."""
    NOT_JOINED = 2


class _Item:
    __slots__ = ("fields", "number", "ticket")

    def __init__(self, ticket: int, fields: Fields) -> None:
        self.ticket = ticket
        self.fields = fields
        self.number = 0
        """What it was last sent with; 0: never sent."""


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
        """The last number that the server is known to have accepted."""
        self._next: int | None = None
        """The number of the next to go out; None when it is not known, and nothing goes out."""
        self._refused: tuple[int, Refusal] | None = None
        """The smallest number that was refused, and why: it is the reason for those behind it."""

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
        """The next to go out, with its number."""
        if self._next is None or not self._waiting:
            return None
        item = self._waiting.popleft()
        item.number = self._next
        self._under_way[item.number] = item
        self._next += 1
        return item.number, item.fields

    def sent(self, number: int) -> int | None:
        """The server has it; returns whose it is."""
        item = self._under_way.pop(number, None)
        if item is None:
            return None
        self._accepted = max(self._accepted, number)
        return self._settle(item)

    def refused(self, number: int, refusal: Refusal) -> int | None:
        """The server does not take it; for good, returns whose it is."""
        item = self._under_way.pop(number, None)
        if item is None:
            return None
        self._next = None
        if self._refused is None or number < self._refused[0]:
            self._refused = number, refusal
        if refusal is Refusal.FOR_GOOD:
            return self._settle(item)
        self._returned.append(item)
        return None

    def go_on(self) -> Refusal | None:
        """Behind a refusal, when all is answered: begin again, or say why a `join` has to tell the number."""
        if self._refused is None or self._under_way:
            return None
        number, refusal = self._refused
        self._gather()
        if refusal is Refusal.FOR_GOOD:
            self._next = number
            return None
        return refusal

    def joined(self, number: int) -> list[int]:
        """The last number that was accepted; returns whose messages are stored without our knowing."""
        assert not self._under_way
        stored: list[int] = []
        # A server that has forgotten this processor begins anew, and knows none of its numbers.
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
        """Everything waits again, in its order."""
        self._returned += self._under_way.values()
        self._returned.sort(key=lambda item: item.number)
        self._waiting.extendleft(reversed(self._returned))
        self._returned.clear()
        self._under_way.clear()
        self._refused = None

    def _settle(self, item: _Item) -> int:
        self._bytes -= len(item.fields)
        return item.ticket
