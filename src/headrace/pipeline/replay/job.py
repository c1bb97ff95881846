"""The job `replay`: publishes a lake's records to a topic in the original order, and only once if repeated.

    look ─▶ note the course ─▶ tasks upload cuts ─▶ decide each cut, in order

A replay stores its course in the lake when it begins, and its cuts follow from the course alone. Each cut is
a batch with a number, which the server appends once. So a repeat, a concurrent run, and a run after a
compaction find the finished batches and continue after them. Readers do not see uploads that are not decided,
and the server deletes these uploads.
"""

import datetime
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.pipeline import Moment, ReplayOptions
from headrace.errors import BadTopicNameError, OptionError
from headrace.lake.files.reading import StoredRange, files_of, pieces_of, read_piece
from headrace.lake.format import LakeError, RecordRange
from headrace.lake.storage.storage import Storage, storage_of
from headrace.lake.table import open_table
from headrace.model import RECORD_HEADER_BYTES, check_publish_topic, check_topic_name, is_reserved
from headrace.pipeline.job import JobArguments, job, part_of
from headrace.pipeline.replay.plan import (
    Course,
    Cut,
    Wanted,
    course,
    cuts,
    first_open,
    producer_of,
    store_course,
    stored_course,
)
from headrace.pipeline.tasks import JobError, Progress, TaskRunner
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.upload import EncodedBlock, decide, encode_batch, upload
from headrace.reader.view import LogLocation, parse_place

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
    place = parse_place(given.url, given.token)
    storage = storage_of(given.lake, given.storage_options, given.catalog_options)
    table = open_table(storage)
    with closing(given.task_runner("replay")) as runner, closing(HttpClient(place)) as http:
        files = files_of(table, given.topic, 0)
        works = [
            files[first : first + _FILES_AT_ONCE] for first in range(0, len(files), _FILES_AT_ONCE)
        ]
        looks = runner.run(works, partial(look, storage=storage, wanted=wanted))
        seen = [one for some in looks for one in some]
        if not seen:
            raise JobError(f"there is no topic {given.topic!r} in {storage.address}")
        found = stored_course(storage, wanted)
        if found is None:
            found = course(
                wanted=wanted,
                ranges=[one for file in seen for one in file.ranges],
                since=min((one.since for one in seen if one.since is not None), default=None),
                until=min((one.until for one in seen if one.until is not None), default=None),
                rate=given.rate,
            )
            if found.start < found.end:
                # First check that the server answers: a replay that could not begin leaves nothing behind.
                _is_decided(http, producer_of(table.id, wanted, found), 0)
                found = store_course(storage, wanted, found)
        producer = producer_of(table.id, wanted, found)
        replaying = _Replay(
            given=given,
            storage=storage,
            place=place,
            runner=runner,
            course=found,
            producer=producer,
        )
        return replaying.run(seen, http)


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


@dataclass
class _Replay:
    given: ReplayArguments
    storage: Storage
    place: LogLocation
    runner: TaskRunner
    course: Course
    producer: str
    batches: int = 0
    records: int = 0
    bytes: int = 0
    passed: int = 0
    """Number of records that count for the rate."""

    def run(self, seen: "list[TopicFile]", http: HttpClient) -> ReplaySummary:
        rate, found = self.given.rate, self.course
        first = first_open(found, partial(_is_decided, http, self.producer))
        begun_s = time.monotonic()
        left = cuts({one.name: one.ranges for one in seen}, found, first)
        while some := list(islice(left, 1 if rate is not None else _CUTS_AT_ONCE)):
            if rate is not None:
                # Wait before the upload: the server deletes uploads that are not decided in time.
                time.sleep(max(0.0, begun_s + self.passed / rate - time.monotonic()))
            done, end = some[0].offset - found.start, some[-1].end - found.start
            total = found.end - found.start
            self._replay(
                some, part_of(self.given.progress, done=done, size=end - done, total=total)
            )
        return ReplaySummary(
            lake=self.storage.address,
            topic=self.given.topic,
            to=self.given.to,
            start=found.start,
            end=found.end,
            resumed=min(found.end, found.start + first * found.cut_bytes),
            batches=self.batches,
            records=self.records,
            bytes=self.bytes,
        )

    def _replay(self, some: list[Cut], progress: Progress | None) -> None:
        topic, target = self.given.topic, self.given.to
        task = partial(
            upload_cut, storage=self.storage, topic=topic, place=self.place, target=target
        )
        results = self.runner.run(some, task, progress)
        self.given.points.here("uploaded")
        for cut, uploaded in zip(some, results, strict=True):
            self.passed += uploaded.records
            if not uploaded.ids:
                continue  # one record covers the whole cut and begins before it
            if not decide(self.place, self.producer, cut.number, uploaded.ids).duplicate:
                self.batches += 1
                self.records += uploaded.records
                self.bytes += uploaded.bytes
            self.given.points.here("decided")


# Tasks: find a topic in files, and upload its records between two offsets


class TopicFile(NamedTuple):
    """File with records of the topic."""

    name: str
    ranges: list[RecordRange]
    since: int | None
    """Smallest offset of a record at or after the time; None without such a record or without a time."""
    until: int | None


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


class UploadedCut(NamedTuple):
    ids: list[str]
    records: int
    bytes: int


def upload_cut(
    cut: Cut, *, storage: Storage, topic: str, place: LogLocation, target: str
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
