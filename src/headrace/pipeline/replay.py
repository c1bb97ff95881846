"""The job `replay`: publishes a lake's records to a topic in the original order, and only once if repeated.

    look ─▶ note the course ─▶ tasks upload cuts ─▶ decide each cut, in order

The course of a replay, a range of offsets and the size of its cuts, is stored in the lake when it begins. Its
cuts follow from the course alone, and never from files, because a compaction changes files. A record belongs
to the cut in which it begins. Each cut is a batch with a number, which the server appends once. So a repeat,
a concurrent run, and a run after a compaction find the finished batches and continue after them. Readers do
not see uploads that are not decided, and the server deletes these uploads.
"""

import datetime
import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.pipeline import Moment, ReplayOptions
from headrace.errors import BadTopicNameError, OptionError
from headrace.lake.files.reading import StoredRange, files_of, pieces_of, read_piece
from headrace.lake.format import FORMAT, LakeError, RecordRange, decode_versioned
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage, storage_of
from headrace.lake.table import open_table
from headrace.model import (
    RECORD_HEADER_BYTES,
    check_publish_topic,
    check_topic_name,
    is_reserved,
    legacy_name,
)
from headrace.pipeline.job import JobArguments, Points, job, part_of, place_of
from headrace.pipeline.tasks import JobError, TaskRunner
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.upload import EncodedBlock, decide, encode_batch, upload
from headrace.reader.view import LogLocation

CUT_BYTES = 64 << 20
_CUT_S = 1.0
"""Duration of one cut at the requested rate."""

_FILES_AT_ONCE = 16
"""Number of files that one task looks at."""

_CUTS_AT_ONCE = 8
"""Number of cuts that are uploaded before they are decided; limits what the server stages for a replay."""

_NOBODYS = "0" * 32
"""ID of a staged file that does not exist: the server says if a batch was decided, but cannot decide it."""


class ReplaySummary(NamedTuple):
    lake: str
    topic: str
    to: str
    start: int
    """Offset in the topic where the replay begins; `end` is where it ends."""
    end: int
    resumed: int
    """Offset where this run continued; an earlier run replayed the records before it."""
    batches: int
    records: int
    bytes: int


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


class TopicFile(NamedTuple):
    """File with records of the topic."""

    name: str
    ranges: list[RecordRange]
    since: int | None
    """Smallest offset of a record at or after the time; None without such a record or without a time."""
    until: int | None


class UploadedCut(NamedTuple):
    ids: list[str]
    records: int
    bytes: int


@dataclass(frozen=True)
class ReplayArguments(ReplayOptions, JobArguments):
    pass


@job(ReplayArguments)
def replay(given: ReplayArguments) -> ReplaySummary:
    """Publish a lake's records of a topic to another topic, at `rate` records per second or at full speed.

    A repeat with the same arguments does the same replay, so it does nothing if the replay is complete.
    Another `name` makes it another replay. Starts are inclusive and ends are exclusive: records from
    `from_offset` to before `to_offset`, or from `since` to before `until`.
    """
    wanted = Wanted(
        topic=given.topic,
        target=given.to,
        name=given.name,
        from_offset=given.from_offset,
        to_offset=given.to_offset,
        since_ms=_ms(given.since),
        until_ms=_ms(given.until),
    )
    _check(wanted)
    place = place_of(given)
    storage = storage_of(given.lake, given.storage_options, given.catalog_options)
    table = open_table(storage)
    with closing(given.task_runner("replay")) as runner, closing(HttpClient(place)) as http:
        seen = _look(runner, files_of(table, given.topic, 0), storage, wanted)
        found = stored_course(storage, wanted)
        if found is None:
            found = course(wanted, seen, given.rate)
            if found.start < found.end:
                # First check that the server answers: a replay that could not begin leaves nothing behind.
                _is_decided(http, producer_of(table.id, wanted, found), 0)
                storage.prepare()
                found = store_course(storage, wanted, found)
        producer = producer_of(table.id, wanted, found)
        first = first_open(found, partial(_is_decided, http, producer))
        task = partial(
            upload_cut,
            storage=storage,
            topic=given.topic,
            place=place,
            target=given.to,
            points=given.points,
        )
        batches = records = size = 0
        left = cuts({one.name: one.ranges for one in seen}, found, first)
        for cut, uploaded in _uploaded(given, runner, left, found, task):
            if not uploaded.ids:
                continue  # one record covers the whole cut and begins before it
            if not decide(place, producer, cut.number, uploaded.ids):
                batches += 1
                records += uploaded.records
                size += uploaded.bytes
            given.points.here("decided")
    return ReplaySummary(
        lake=storage.address,
        topic=given.topic,
        to=given.to,
        start=found.start,
        end=found.end,
        resumed=min(found.end, found.start + first * found.cut_bytes),
        batches=batches,
        records=records,
        bytes=size,
    )


def _ms(moment: Moment | None) -> int | None:
    if moment is None or isinstance(moment, int):
        return moment
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return int(zoned.timestamp() * 1000)


def _check(wanted: Wanted) -> None:
    check_topic_name(wanted.topic)
    if is_reserved(wanted.target):
        raise BadTopicNameError(
            f"replay writes records unchanged, but only its own protocol publishes to {wanted.target!r}: "
            "name another topic"
        )
    check_publish_topic(wanted.target)
    offsets, times = (wanted.from_offset, wanted.to_offset), (wanted.since_ms, wanted.until_ms)
    if offsets != (None, None) and times != (None, None):
        raise OptionError("offsets and times exclude each other: give one of them")
    for begin, end in (offsets, times):
        if begin is not None and begin < 0:
            raise OptionError(f"offsets and times begin at 0, not at {begin}")
        if end is not None and end <= (begin or 0):
            raise OptionError(f"the range ends at {end}, where it begins or before: it is empty")
    if len(wanted.name.encode()) > 255:
        raise OptionError("the name must have 255 bytes at most")


def _is_decided(http: HttpClient, producer: str, number: int) -> bool:
    """True if this batch or a later one was decided."""
    body = {"producer": producer, "number": number, "staged": [_NOBODYS]}
    try:
        http.json("POST", "/v1/batches", {}, body)
    except ServerError as error:
        if error.status == 404 and "staged file" in str(error):
            return False
        if error.status == 409:
            return True  # the batch was skipped, because no record begins in its cut
        raise
    return True


def _look(
    runner: TaskRunner, files: Sequence[str], storage: Storage, wanted: Wanted
) -> list[TopicFile]:
    """Return the files that have records of the topic; raise `JobError` if none has."""
    works = [
        files[first : first + _FILES_AT_ONCE] for first in range(0, len(files), _FILES_AT_ONCE)
    ]
    looks = runner.run(works, partial(look, storage=storage, wanted=wanted))
    found = [one for some in looks for one in some]
    if not found:
        raise JobError(f"there is no topic {wanted.topic!r} in {storage.address}")
    return found


def _uploaded(
    given: ReplayArguments,
    runner: TaskRunner,
    left: Iterator[Cut],
    course: Course,
    task: Callable[[Cut], UploadedCut],
) -> Iterator[tuple[Cut, UploadedCut]]:
    """Upload the cuts and yield each with its upload, a few at a time and not faster than the rate."""
    begun_s, passed, total = time.monotonic(), 0, course.end - course.start
    while some := list(islice(left, 1 if given.rate is not None else _CUTS_AT_ONCE)):
        if given.rate is not None:
            # Wait before the upload: the server deletes uploads that are not decided in time.
            time.sleep(max(0.0, begun_s + passed / given.rate - time.monotonic()))
        done, end = some[0].offset - course.start, some[-1].end - course.start
        progress = part_of(given.progress, done=done, size=end - done, total=total)
        uploads = runner.run(some, task, progress)
        given.points.here("uploaded")
        passed += sum(one.records for one in uploads)
        yield from zip(some, uploads, strict=True)


# The course and its cuts


def course(wanted: Wanted, files: Sequence[TopicFile], rate: float | None) -> Course:
    """Return the course of a replay of these files."""
    found = [one for file in files for one in file.ranges]
    since = min((file.since for file in files if file.since is not None), default=None)
    until = min((file.until for file in files if file.until is not None), default=None)
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


# Tasks: find a topic in files, and upload its records between two offsets


def look(names: list[str], *, storage: Storage, wanted: Wanted) -> list[TopicFile]:
    found = []
    for name in names:
        pieces = pieces_of([storage.file(name)], wanted.topic)
        if pieces:
            since = _from_time(pieces, wanted.since_ms)
            until = _from_time(pieces, wanted.until_ms)
            found.append(TopicFile(name, [piece.range for piece in pieces], since, until))
    return found


def _from_time(pieces: list[StoredRange], ms: int | None) -> int | None:
    """Return the first offset at or after a time, if there is one. Times never decrease."""
    if ms is None:
        return None
    moment = pa.scalar(ms * 1000, pa.timestamp("us", tz="UTC"))
    for piece in pieces:
        for rows in read_piece(piece, column="timestamp"):
            late = rows["offset"].filter(pc.greater_equal(rows["timestamp"], moment))
            if len(late):
                return int(late[0].as_py())
    return None


def upload_cut(
    cut: Cut, *, storage: Storage, topic: str, place: LogLocation, target: str, points: Points
) -> UploadedCut:
    """Upload the records that begin between two offsets, as staged files that no reader sees yet."""
    records = size = 0

    def blocks() -> Iterator[EncodedBlock]:
        nonlocal records, size
        files = map(storage.file, cut.files)
        for piece in pieces_of(files, topic, cut.offset, cut.end):
            for payloads in _payloads(piece, cut.offset, cut.end):
                for block in encode_batch(target, payloads):
                    size += len(block.records)
                    yield block
                records += len(payloads)
                points.here("uploading")

    ids = upload(place, blocks())
    return UploadedCut(ids, records, size)


def _payloads(piece: StoredRange, offset: int, end: int) -> Iterator[pa.BinaryArray]:
    """Yield the payloads; raise LakeError unless they are all that the piece should contain."""
    at: int | None = piece.range.offset if piece.range.offset >= offset else None
    for rows in read_piece(piece, offset, end):
        payloads, offsets = rows["payload"], rows["offset"].to_numpy()
        lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = offsets + lengths + RECORD_HEADER_BYTES
        if (at is not None and offsets[0] != at) or not np.array_equal(offsets[1:], ends[:-1]):
            break
        at = int(ends[-1])
        yield payloads
    else:
        if at is None or at >= min(end, piece.range.end):
            return
    raise LakeError(
        f"{piece.file}, topic {piece.range.topic!r}, offsets {piece.range.offset} to {piece.range.end}: rows "
        "are missing or out of order; run `headrace pipeline audit` to find all damage"
    )
