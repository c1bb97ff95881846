"""Which sequence numbers a connection has brought: `uint32`, counting on behind the last from 0 again.

Numbers are kept *unwrapped*, as if they had any size, so that they can be compared. What came is kept as
runs without gaps: nearly always one. Of a peer that leaves gap upon gap the oldest runs are forgotten: what
it sends again of those is stored again, which a client that was acknowledged does not do.
"""

from bisect import bisect_right

from headrace.wire.wombat import SEQUENCE_NUMBERS

RUNS_MAX = 1024

_HALF = SEQUENCE_NUMBERS // 2


class Numbers:
    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []
        """First and last of each, in order; no two touch."""

    def unwrap(self, number: int) -> int:
        """The number nearest to the highest received that is `number` on the wire."""
        if not self._runs:
            # Room below: the first number that comes need not be the lowest.
            return number + SEQUENCE_NUMBERS
        highest = self._runs[-1][1]
        return highest + (number - highest + _HALF) % SEQUENCE_NUMBERS - _HALF

    def add(self, number: int) -> bool:
        """Take an unwrapped number; False when it was there already."""
        return self.add_run(number, number)

    def add_run(self, first: int, last: int) -> bool:
        """Take all numbers of a range; False, and none is taken, when any was there already."""
        runs = self._runs
        if runs and runs[-1][1] == first - 1:
            runs[-1] = (runs[-1][0], last)
            return True
        at = bisect_right(runs, (first, first))
        if (at and runs[at - 1][1] >= first) or (at < len(runs) and runs[at][0] <= last):
            return False
        begin, end = at, at
        if at and runs[at - 1][1] == first - 1:
            begin, first = at - 1, runs[at - 1][0]
        if at < len(runs) and runs[at][0] == last + 1:
            end, last = at + 1, runs[at][1]
        runs[begin:end] = [(first, last)]
        if len(runs) > RUNS_MAX:
            del runs[0]
        return True
