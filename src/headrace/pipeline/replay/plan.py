"""What a replay does in which order: a range of offsets, cut into batches that a repeat cuts the same. Pure.

Cuts are made by offsets and never by files, which a compaction changes. A record is in the cut in which it
begins.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from headrace.lake.format import Range
from headrace.model import legacy_name
from headrace.pipeline.tasks import JobError

CUT_BYTES = 64 << 20
_CUT_S = 1.0
"""How much of a rate is one cut."""


class Wanted(NamedTuple):
    """What was asked for."""

    topic: str
    target: str
    name: str
    from_offset: int | None
    to_offset: int | None
    since_ms: int | None
    until_ms: int | None

    @property
    def key(self) -> str:
        """By which a repeat is known."""
        asked = self._replace(topic=legacy_name(self.topic))
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:32]


class Course(msgspec.Struct, frozen=True):
    """What a replay and all its repeats do: decided once, when it begins."""

    start: int
    end: int
    cut_bytes: int


class Cut(NamedTuple):
    number: int
    offset: int
    end: int
    files: tuple[str, ...]


def course(
    wanted: Wanted,
    ranges: Iterable[Range],
    since: int | None,
    until: int | None,
    rate: float | None,
) -> Course:
    """`since` and `until` are the first offsets at or behind these times; None where there are none."""
    found = list(ranges)
    start, end = min(one.offset for one in found), max(one.end for one in found)
    begin = start if wanted.from_offset is None else wanted.from_offset
    stop = end if wanted.to_offset is None else wanted.to_offset
    if begin < start or stop > end:
        # Else a repeat would do another thing when the lake has grown.
        raise JobError(
            f"the lake has topic {wanted.topic!r} from offset {start} to {end}, which is not all of "
            f"{begin} to {stop}"
        )
    if wanted.since_ms is not None:
        begin = max(begin, end if since is None else since)
    if wanted.until_ms is not None and until is not None:
        stop = min(stop, until)
    cut_bytes = CUT_BYTES
    if rate is not None:
        records = sum(one.rows for one in found)
        size = sum(one.end - one.offset for one in found)
        cut_bytes = max(1, min(CUT_BYTES, int(rate * _CUT_S * size / max(1, records))))
    return Course(begin, max(begin, stop), cut_bytes)


def cuts(files: Mapping[str, Sequence[Range]], course: Course, first: int = 0) -> Iterator[Cut]:
    """Those from a number on that may hold records, each with the files to look into."""
    ranges = sorted((one.offset, one, path) for path, some in files.items() for one in some)
    # They do not overlap, so their numbers never go back.
    touched = ((number, path) for _, one, path in ranges for number in _numbers(one, course, first))
    for number, group in groupby(touched, key=lambda pair: pair[0]):
        offset = course.start + number * course.cut_bytes
        end = min(course.end, offset + course.cut_bytes)
        yield Cut(number, offset, end, tuple(dict.fromkeys(path for _, path in group)))


def _numbers(one: Range, course: Course, first: int) -> range:
    begin, stop = max(one.offset, course.start), min(one.end, course.end)
    if begin >= stop:
        return range(0)
    size = course.cut_bytes
    return range(max(first, (begin - course.start) // size), (stop - 1 - course.start) // size + 1)


def first_open(course: Course, is_decided: Callable[[int], bool]) -> int:
    """The number behind the last that was decided: numbers are decided in their order."""
    low, high = 0, -(-(course.end - course.start) // course.cut_bytes)
    while low < high:
        middle = (low + high) // 2
        if is_decided(middle):
            low = middle + 1
        else:
            high = middle
    return low


def producer_of(lake_id: str, wanted: Wanted, course: Course) -> str:
    """Who the server takes the replay for: a repeat is the same, any other is not."""
    parts = [lake_id, wanted.topic, course.start, course.end, course.cut_bytes]
    text = msgspec.json.encode([*parts, wanted.target, wanted.name])
    return f"replay-{hashlib.sha256(text).hexdigest()[:32]}"
