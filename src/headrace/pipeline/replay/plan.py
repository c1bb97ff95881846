"""The plan of a replay: a range of offsets, cut into batches that are the same in a repeat.

Cuts depend on offsets and never on files, because a compaction changes files. A record belongs to the cut in
which it begins.

The course of a replay is stored in the lake when it begins: a repeat does the same, whatever has changed.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from headrace.lake.format import FORMAT, LakeError, RecordRange, decode_versioned
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage
from headrace.model import legacy_name
from headrace.pipeline.tasks import JobError

CUT_BYTES = 64 << 20
_CUT_S = 1.0
"""Duration of one cut at the requested rate."""


class Wanted(NamedTuple):
    topic: str
    target: str
    name: str
    from_offset: int | None
    to_offset: int | None
    since_ms: int | None
    until_ms: int | None

    @property
    def key(self) -> str:
        """Key that identifies a replay and its repeats."""
        asked = self._replace(topic=legacy_name(self.topic))
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:32]


class Course(msgspec.Struct, frozen=True):
    """Range and cut size of a replay and all its repeats; decided once, when the replay begins."""

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
    ranges: Iterable[RecordRange],
    since: int | None,
    until: int | None,
    rate: float | None,
) -> Course:
    """Return the course. `since` and `until` are the first offsets at or after these times, or None."""
    found = list(ranges)
    start, end = min(one.offset for one in found), max(one.end for one in found)
    begin = start if wanted.from_offset is None else wanted.from_offset
    stop = end if wanted.to_offset is None else wanted.to_offset
    if begin < start or stop > end:
        # Otherwise a repeat would replay other records after the lake has grown.
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


def cuts(
    files: Mapping[str, Sequence[RecordRange]], course: Course, first: int = 0
) -> Iterator[Cut]:
    """Yield the cuts from number `first` on that may contain records, each with the files to read."""
    ranges = sorted((one.offset, one, path) for path, some in files.items() for one in some)
    # The ranges do not overlap, so the numbers never decrease.
    touched = ((number, path) for _, one, path in ranges for number in _numbers(one, course, first))
    for number, group in groupby(touched, key=lambda pair: pair[0]):
        offset = course.start + number * course.cut_bytes
        end = min(course.end, offset + course.cut_bytes)
        yield Cut(number, offset, end, tuple(dict.fromkeys(path for _, path in group)))


def _numbers(one: RecordRange, course: Course, first: int) -> range:
    begin, stop = max(one.offset, course.start), min(one.end, course.end)
    if begin >= stop:
        return range(0)
    size = course.cut_bytes
    return range(max(first, (begin - course.start) // size), (stop - 1 - course.start) // size + 1)


def first_open(course: Course, is_decided: Callable[[int], bool]) -> int:
    """Return the number after the last decided one. Numbers are decided in order."""
    count = -(-(course.end - course.start) // course.cut_bytes)
    return bisect_left(range(count), True, key=lambda number: not is_decided(number))


def producer_of(lake_id: str, wanted: Wanted, course: Course) -> str:
    """Return the name of the producer: the same for a repeat, another one for any other replay."""
    parts = [lake_id, wanted.topic, course.start, course.end, course.cut_bytes]
    text = msgspec.json.encode([*parts, wanted.target, wanted.name])
    return f"replay-{hashlib.sha256(text).hexdigest()[:32]}"


class _Note(msgspec.Struct):
    format: int
    wanted: Wanted
    course: Course


def stored_course(storage: Storage, wanted: Wanted) -> Course | None:
    note = _note(storage, wanted)
    try:
        return decode_versioned(storage.read(note.path), _Note, str(note)).course
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LakeError(
            f"{note} is damaged ({error}): it is the note of this replay. Restore it, or replay under "
            "another name"
        ) from None


def store_course(storage: Storage, wanted: Wanted, course: Course) -> Course:
    """Store the course durably, unless there is one already; return the stored course."""
    data = msgspec.json.encode(_Note(FORMAT, wanted, course))
    try:
        # If another run stored its course at the same time, that one counts.
        storage.create(_note(storage, wanted).path, data)
    except OSError as error:
        raise LakeError(f"{storage.address} cannot be written to: {error.strerror}") from None
    found = stored_course(storage, wanted)
    assert found is not None
    return found


def _note(storage: Storage, wanted: Wanted) -> LakeFile:
    return storage.file(f"{HIDDEN}/replays/{wanted.key}.json")
