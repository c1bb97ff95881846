"""The reference log: the union of the records that all subscribers of one topic received. Judges nothing.

It consists of stretches of consecutive records without a gap, with 16 bytes per record.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class ReferenceReader:
    """One subscriber's place in one topic: its next offset, and the place of that offset in the reference."""

    position: int
    resumed: bool = False
    stretch: "ReferenceStretch | None" = None
    row: int = 0

    def walk(self, log: "ReferenceLog", begin: int, end: int, digest: int) -> int | None:
        """Compare a record with the reference or add it; return the known digest if they differ."""
        if self.stretch is None or self.stretch.begin_of(self.row) != begin:
            self.stretch, self.row = log.locate(begin)
        if self.row == len(self.stretch):
            # This stretch ends here: another one may continue.
            following = log.at(begin)
            if following is not None and following is not self.stretch:
                self.stretch, self.row = following, 0
        if self.row == len(self.stretch):
            self.stretch.append(end, digest)
            self.row += 1
            return None
        known = self.stretch.digests[self.row]
        agrees = known == digest and self.stretch.ends[self.row] == end
        # After a disagreement, the reader's own offset decides where it continues.
        self.row += 1
        if agrees:
            return None
        self.stretch = None
        return known


class ReferenceStretch:
    """Consecutive records without a gap."""

    __slots__ = ("begin", "digests", "ends")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.ends: array[int] = array("Q")
        self.digests: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else self.begin

    def begin_of(self, row: int) -> int:
        return self.ends[row - 1] if row else self.begin

    def append(self, end: int, digest: int) -> None:
        self.ends.append(end)
        self.digests.append(digest)


class ReferenceLog:
    """The stretches of one topic, by first offset."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._by_begin: dict[int, ReferenceStretch] = {}

    def stretches(self) -> Iterator[ReferenceStretch]:
        return (self._by_begin[begin] for begin in self._begins)

    def at(self, begin: int) -> ReferenceStretch | None:
        return self._by_begin.get(begin)

    def locate(self, begin: int) -> tuple[ReferenceStretch, int]:
        """Return the stretch and row of the record that begins here; make an empty stretch if none does."""
        index = bisect_right(self._begins, begin) - 1
        if index >= 0:
            stretch = self._by_begin[self._begins[index]]
            if begin == stretch.begin:
                return stretch, 0
            row = bisect_right(stretch.ends, begin)
            if row and stretch.ends[row - 1] == begin:
                return stretch, row
        stretch = self._by_begin[begin] = ReferenceStretch(begin)
        insort(self._begins, begin)
        return stretch, 0

    def find(self, digest: int) -> int | None:
        for stretch in self.stretches():
            if digest in stretch.digests:
                return stretch.ends[stretch.digests.index(digest)]
        return None

    def occurrences(self, tickets: dict[int, int]) -> "array[int]":
        """Return the number of times that each ticket's bytes are in the log."""
        seen = array("I", bytes(4 * len(tickets)))
        for stretch in self.stretches():
            for digest in stretch.digests:
                ticket = tickets.get(digest)
                if ticket is not None:
                    seen[ticket] += 1
        return seen

    def overlaps(self, attachments: set[int]) -> Iterator[tuple[int, int]]:
        """Yield each beginning of a record, or attachment, inside another record, and where that begins."""
        suspects = sorted(attachments.union(self._begins))
        for stretch in self.stretches():
            low = bisect_right(suspects, stretch.begin)
            while low < len(suspects) and suspects[low] < stretch.end:
                row = bisect_right(stretch.ends, suspects[low])
                if row == 0 or stretch.ends[row - 1] != suspects[low]:
                    yield suspects[low], stretch.begin_of(row)
                low += 1
