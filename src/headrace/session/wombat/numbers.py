"""Publishes that a Wombat connection has received, to find repeats. Elsewhere: storing and acknowledging.

Two publishes are the same only if topic, sequence number and payload are the same, because a client may have
one counter for all topics or one for each. Numbers are `uint32`, and 0 follows the last. Here the numbers are
*unwrapped*, as if they had any size, so that they can be compared: with the highest number of their topic,
and also with the highest number of all topics.

The records are kept in the batches in which they came, and the oldest are forgotten: a publish that a client
repeats after that is stored again. A number above the highest of its topic is new without a search, and
nearly every number is.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

from headrace.wire.wombat.messages import SEQUENCE_NUMBERS

RECORD_OVERHEAD_BYTES = 64
"""Memory for a remembered record besides its bytes."""

_HALF = SEQUENCE_NUMBERS // 2


class Numbers:
    __slots__ = ("_highest", "_order", "_topics", "bytes")

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._highest = -1
        """Highest unwrapped number of all topics."""
        self._order: deque[tuple[str, int, float]] = deque()
        """Topic, size and time of each batch, the oldest first."""
        self.bytes = 0
        """Memory for all remembered records."""

    def unwrap(self, number: int) -> int:
        """Unwrap a number from the wire: return the candidate nearest to the highest of all topics."""
        return _unwrap(self._highest, number)

    def unwrap_of(self, topic: str, number: int) -> int:
        """Unwrap a number from the wire: return the candidate nearest to the highest of the topic.

        For an unknown topic, the highest of all topics counts.
        """
        known = self._topics.get(topic)
        return _unwrap(self._highest if known is None else known.highest, number)

    def is_ahead(self, topic: str, number: int) -> bool:
        """True if an unwrapped number is above all received numbers of the topic."""
        known = self._topics.get(topic)
        return known is None or number > known.highest

    def add_ahead(
        self, topic: str, numbers: Sequence[int], first: int, records: Sequence[bytes], now: float
    ) -> int:
        """Add publishes whose numbers rise. The first number is ahead, and `first` is its unwrapped form.

        Returns the last number, unwrapped.
        """
        known = self._topic(topic)
        last = first + (numbers[-1] - numbers[0]) % SEQUENCE_NUMBERS
        shift = first - numbers[0]
        if last - first == len(numbers) - 1:
            numbers, shift = range(first, last + 1), 0
        elif numbers[-1] < numbers[0]:
            numbers, shift = [first + (n - numbers[0]) % SEQUENCE_NUMBERS for n in numbers], 0
        known.starts.append(first)
        known.batches.append((numbers, shift, tuple(records), True))
        known.highest = last
        self._came(topic, records, now)
        return last

    def add(self, topic: str, number: int, record: bytes, now: float) -> bool:
        """Add one publish with an unwrapped number. Returns False if it is a repeat."""
        known = self._topic(topic)
        if known.has(number, record):
            return False
        place = bisect_right(known.starts, number)
        known.starts.insert(place, number)
        known.batches.insert(place, ((number,), 0, (record,), False))
        known.highest = max(known.highest, number)
        self._came(topic, (record,), now)
        return True

    def heard(self, number: int) -> None:
        """Note an unwrapped number, which may be the highest of all topics."""
        self._highest = max(self._highest, number)

    def forget(self, bytes_max: int, before: float) -> None:
        """Forget the oldest batches while all take more than `bytes_max`, or if they came before a time."""
        order = self._order
        while order and (self.bytes > bytes_max or order[0][2] < before):
            topic, size, _ = order.popleft()
            self.bytes -= size
            known = self._topics[topic]
            del known.starts[0], known.batches[0]
            if not known.starts:
                del self._topics[topic]

    def _topic(self, name: str) -> "_Topic":
        known = self._topics.get(name)
        if known is None:
            known = self._topics[name] = _Topic()
        return known

    def _came(self, topic: str, records: Sequence[bytes], now: float) -> None:
        size = RECORD_OVERHEAD_BYTES * len(records) + sum(map(len, records))
        self._order.append((topic, size, now))
        self.bytes += size


_Batch = tuple[Sequence[int], int, Sequence[bytes], bool]
"""Numbers, the shift that unwraps them, records, and whether they were ahead: such batches do not overlap."""


class _Topic:
    __slots__ = ("batches", "highest", "starts")

    def __init__(self) -> None:
        self.highest = -1
        self.starts: list[int] = []
        """First number of each batch."""
        self.batches: list[_Batch] = []
        """Batches in the order of their first numbers."""

    def has(self, number: int, record: bytes) -> bool:
        for place in range(bisect_right(self.starts, number) - 1, -1, -1):
            numbers, shift, records, was_ahead = self.batches[place]
            at = bisect_left(numbers, number - shift)
            if at < len(numbers) and numbers[at] == number - shift and records[at] == record:
                return True
            if was_ahead:
                break
        return False


def _unwrap(highest: int, number: int) -> int:
    if highest < 0:
        # This leaves room below: the first number that comes need not be the lowest.
        return number + SEQUENCE_NUMBERS
    return highest + (number - highest + _HALF) % SEQUENCE_NUMBERS - _HALF
