"""A histogram of plain integers. Elsewhere: what is observed, and how it is shown."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, repeat


class Histogram:
    """Counts of values by size."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.count((value,))

    def count(self, values: Sequence[float]) -> None:
        """Count many values. All work per value happens in C loops."""
        for bucket, count in Counter(map(bisect_left, repeat(self._bounds), values)).items():
            self._counts[bucket] += count
        self.sum += sum(values)

    def cumulative(self) -> list[int]:
        """Return for each bound, and then without a bound, how many values are not above it."""
        return list(accumulate(self._counts))
