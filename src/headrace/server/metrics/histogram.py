"""A histogram of plain integers. Elsewhere: what is observed, and how it is shown."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by size. An observation takes about a third of a microsecond: too much per record."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Return for each bound, and then without a bound, how many values are not above it."""
        return list(accumulate(self._counts))
