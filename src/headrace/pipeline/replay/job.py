"""The job `replay`: publishes a lake's records to a topic in the original order, and only once if repeated.

    look ─▶ note the course ─▶ tasks upload cuts ─▶ decide each cut, in order

A replay stores its course in the lake when it begins, and its cuts follow from the course alone. Each cut is
a batch with a number, which the server appends once. So a repeat, a concurrent run, and a run after a
compaction find the finished batches and continue after them. Readers do not see uploads that are not decided,
and the server deletes these uploads.
"""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headrace.errors import BadTopicNameError, OptionError
from headrace.lake.files.reading import files_of
from headrace.lake.format import RecordRange
from headrace.lake.table import open_table
from headrace.model import check_publish_topic, check_topic_name, is_reserved
from headrace.pipeline.kill_points import Points
from headrace.pipeline.replay.plan import (
    Course,
    Cut,
    ReplayNotes,
    Wanted,
    course,
    cuts,
    first_open,
    producer_of,
)
from headrace.pipeline.replay.task import Look, ReplayWork, TopicFiles, look, upload_part
from headrace.pipeline.tasks import JobError, SparkRunner, TaskRunner
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.upload import decide
from headrace.reader.view import LogLocation, parse_place

_FILES_AT_ONCE = 16
"""Number of files that one task looks at."""

_CUTS_AT_ONCE = 8
"""Number of cuts that are uploaded before they are decided; limits what the server stages for a replay."""

_NOBODYS = "0" * 32
"""ID of a staged file that does not exist: the server says if a batch was decided, but cannot decide it."""


class ReplaySummary(NamedTuple):
    """Result of a replay."""

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


Progress = Callable[[int, int], None]
"""Called with the number of bytes that are replayed, and with their total."""
Time = datetime.datetime | int
"""Time with a zone or in UTC, or milliseconds since 1970."""


def replay(
    lake: str | Path,
    topic: str,
    to: str,
    *,
    url: str,
    token: str = "",
    from_offset: int | None = None,
    to_offset: int | None = None,
    since: Time | None = None,
    until: Time | None = None,
    rate: float | None = None,
    name: str = "",
    master: str = "local[*]",
    progress: Progress | None = None,
    runner: TaskRunner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> ReplaySummary:
    """Publish a lake's records of a topic to another topic, at `rate` records per second or at full speed.

    A repeat with the same arguments does the same replay, so it does nothing if the replay is complete.
    Another `name` makes it another replay. Starts are inclusive and ends are exclusive: records from
    `from_offset` to before `to_offset`, or from `since` to before `until`.
    """
    wanted = Wanted(
        topic=topic,
        target=to,
        name=name,
        from_offset=from_offset,
        to_offset=to_offset,
        since_ms=_ms(since),
        until_ms=_ms(until),
    )
    _check(wanted, rate)
    place = parse_place(url, token)
    directory = Path(lake).absolute()
    table = open_table(directory)
    runner = runner or SparkRunner("headrace replay", master)
    with closing(runner), closing(HttpClient(place)) as http:
        files = tuple(files_of(table, topic, 0))
        works = [
            Look(str(directory), files[first : first + _FILES_AT_ONCE], topic, *wanted[-2:])
            for first in range(0, len(files), _FILES_AT_ONCE)
        ]
        seen = _together(runner.run(works, look))
        if not seen.ranges:
            raise JobError(f"there is no topic {topic!r} in {directory}")
        notes = ReplayNotes(directory)
        found = notes.find(wanted)
        if found is None:
            ranges = [one for some in seen.ranges.values() for one in some]
            found = course(
                wanted=wanted, ranges=ranges, since=seen.since, until=seen.until, rate=rate
            )
            if found.start < found.end:
                # First check that the server answers: a replay that could not begin leaves nothing behind.
                _is_decided(http, producer_of(table.id, wanted, found), 0)
                found = notes.begin(wanted, found)
        job = _Replay(
            lake=str(directory),
            wanted=wanted,
            found=found,
            lake_id=table.id,
            place=place,
            http=http,
            runner=runner,
            points=points,
        )
        return job.run(seen.ranges, rate, progress)


def _ms(moment: Time | None) -> int | None:
    if moment is None or isinstance(moment, int):
        return moment
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return int(zoned.timestamp() * 1000)


def _check(wanted: Wanted, rate: float | None) -> None:
    check_topic_name(wanted.topic)
    if is_reserved(wanted.target):
        raise BadTopicNameError(
            f"replay writes records as they are, and {wanted.target!r} is published to by its own protocol "
            "only: name another topic"
        )
    check_publish_topic(wanted.target)
    offsets, times = (wanted.from_offset, wanted.to_offset), (wanted.since_ms, wanted.until_ms)
    if offsets != (None, None) and times != (None, None):
        raise OptionError("offsets and times exclude each other: give one of them")
    for begin, end in (offsets, times):
        if begin is not None and begin < 0:
            raise OptionError(f"offsets and times begin at 0, not at {begin}")
        if end is not None and end <= (begin or 0):
            raise OptionError(
                f"the range ends at {end}, where it begins or before: nothing is in it"
            )
    if rate is not None and not rate > 0:
        raise OptionError(f"the rate must be above 0, not {rate:g}")
    if len(wanted.name.encode()) > 255:
        raise OptionError("the name must have 255 bytes at most")


def _together(found: list[TopicFiles]) -> TopicFiles:
    ranges: dict[str, list[RecordRange]] = {}
    for one in found:
        ranges |= one.ranges
    since = [one.since for one in found if one.since is not None]
    until = [one.until for one in found if one.until is not None]
    return TopicFiles(ranges, min(since, default=None), min(until, default=None))


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


class _Replay:
    def __init__(
        self,
        lake: str,
        wanted: Wanted,
        found: Course,
        lake_id: str,
        place: LogLocation,
        http: HttpClient,
        runner: TaskRunner,
        points: Points,
    ) -> None:
        self._lake, self._wanted, self._course = lake, wanted, found
        self._place, self._runner, self._points = place, runner, points
        self._producer = producer_of(lake_id, wanted, found)
        self._is_decided = partial(_is_decided, http, self._producer)
        self._batches = self._records = self._bytes = 0
        self._passed = 0
        """Number of records that count for the rate."""

    def run(
        self, files: dict[str, list[RecordRange]], rate: float | None, progress: Progress | None
    ) -> ReplaySummary:
        found = self._course
        first = first_open(found, self._is_decided)
        resumed = min(found.end, found.start + first * found.cut_bytes)
        begun_s = time.monotonic()
        at_once = 1 if rate is not None else _CUTS_AT_ONCE
        for some in _chunks(cuts(files, found, first), at_once):
            if rate is not None:
                # Wait before the upload and not after it: the server deletes uploads that are not decided in
                # time.
                time.sleep(max(0.0, begun_s + self._passed / rate - time.monotonic()))
            told = None
            if progress is not None:
                done = some[0].offset - found.start
                told = partial(_tell, progress, done, some[-1].end - found.start, found)
            self._replay(some, told)
        return ReplaySummary(
            lake=self._lake,
            topic=self._wanted.topic,
            to=self._wanted.target,
            start=found.start,
            end=found.end,
            resumed=resumed,
            batches=self._batches,
            records=self._records,
            bytes=self._bytes,
        )

    def _replay(self, some: list[Cut], progress: Callable[[float], None] | None) -> None:
        works = [
            ReplayWork(
                place=self._place,
                lake=self._lake,
                files=cut.files,
                topic=self._wanted.topic,
                target=self._wanted.target,
                offset=cut.offset,
                end=cut.end,
            )
            for cut in some
        ]
        results = self._runner.run(works, upload_part, progress)
        self._points.here("uploaded")
        for cut, uploaded in zip(some, results, strict=True):
            self._passed += uploaded.records
            if not uploaded.ids:
                continue  # one record covers the whole cut and begins before it
            if not decide(self._place, self._producer, cut.number, uploaded.ids).duplicate:
                self._batches += 1
                self._records += uploaded.records
                self._bytes += uploaded.bytes
            self._points.here("decided")


def _chunks(found: Iterator[Cut], count: int) -> Iterator[list[Cut]]:
    while some := list(islice(found, count)):
        yield some


def _tell(progress: Progress, done: int, end: int, course: Course, part: float) -> None:
    progress(done + int((end - done) * part), course.end - course.start)
