"""Which publishes a Wombat connection has brought. Knows neither what is stored nor what is acknowledged.

Two publishes are the same only if topic, sequence number and payload are the same: a client may count over
all its topics or for each of them. Numbers are `uint32`, and behind the last comes 0 again. Here they are
*unwrapped*, as if they had any size, so that they can be compared: those of a topic against the highest of
that topic, and once more those of all topics together.

The records themselves are kept, in the batches in which they came, and the oldest are forgotten: what a
client sends again after that is stored again. A number above the highest of its topic is new without a
search, which is nearly every one.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

from headrace.wire.wombat import SEQUENCE_NUMBERS

RECORD_OVERHEAD_BYTES = 64
"""What a remembered record costs besides its bytes."""

_HALF = SEQUENCE_NUMBERS // 2


class Numbers:
    __slots__ = ("_highest", "_order", "_topics", "bytes")

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._highest = -1
        """Of all topics."""
        self._order: deque[tuple[str, int, float]] = deque()
        """The batches, the oldest first: topic, size and time of each."""
        self.bytes = 0
        """What all that is remembered costs."""

    def unwrap(self, number: int) -> int:
        """The number nearest to the highest of all topics that is `number` on the wire."""
        return _unwrap(self._highest, number)

    def unwrap_of(self, topic: str, number: int) -> int:
        """The number nearest to the highest of the topic that is `number` on the wire."""
        known = self._topics.get(topic)
        return _unwrap(self._highest if known is None else known.highest, number)

    def is_ahead(self, topic: str, number: int) -> bool:
        """Whether an unwrapped number of the topic is above all that came."""
        known = self._topics.get(topic)
        return known is None or number > known.highest

    def add_ahead(
        self, topic: str, numbers: Sequence[int], first: int, records: Sequence[bytes], now: float
    ) -> int:
        """Take publishes whose numbers rise, the first being ahead, which is also given unwrapped.

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
        """Take one publish with an unwrapped number; False if it was there already."""
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
        """Note the highest unwrapped number of all topics."""
        self._highest = max(self._highest, number)

    def forget(self, bytes_max: int, before: float) -> None:
        """Forget the oldest, as far as they cost more than `bytes_max` or came before a time."""
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
"""Numbers, what to add to unwrap them, records, and whether they were ahead: no two of those overlap."""


class _Topic:
    __slots__ = ("batches", "highest", "starts")

    def __init__(self) -> None:
        self.highest = -1
        self.starts: list[int] = []
        """The first number of each batch."""
        self.batches: list[_Batch] = []
        """By their first numbers."""

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
        # Room below: the first number that comes need not be the lowest.
        return number + SEQUENCE_NUMBERS
    return highest + (number - highest + _HALF) % SEQUENCE_NUMBERS - _HALF
