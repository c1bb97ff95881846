"""A lake → a topic, in the original order and once, however often it is repeated.

    look ─▶ course noted ─▶ tasks upload cuts ─▶ each is decided, in order

What a replay does is noted in the lake when it begins, and its cuts follow from that alone. Each is a batch
with a number, which the server appends once: so a repeat, one at the same time, and one after a compaction
find what is done and go on behind it. What was uploaded and not decided is seen by nobody, and swept by the
server.
"""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headrace.errors import BadTopicNameError
from headrace.lake.format import Range
from headrace.lake.reading import files_of
from headrace.lake.table import open_table
from headrace.model import check_publish_topic, check_topic_name, is_reserved
from headrace.pipeline.points import Points
from headrace.pipeline.replay_note import Notes
from headrace.pipeline.replay_plan import (
    Course,
    Cut,
    Wanted,
    course,
    cuts,
    first_open,
    producer_of,
)
from headrace.pipeline.replay_task import Look, ReplayWork, Seen, look, upload_part
from headrace.pipeline.tasks import JobError, Runner, SparkRunner
from headrace.spark.http_client import HttpClient, ServerError
from headrace.spark.options import OptionError, Place, parse_place
from headrace.spark.uploading import decide

_FILES_AT_ONCE = 16
"""That one task looks at."""

_CUTS_AT_ONCE = 8
"""Uploaded before they are decided: what the server has staged of us at a time."""

_NOBODYS = "0" * 32
"""A staged file that is not there: the server says whether a batch was decided, and decides none."""


class Summary(NamedTuple):
    """What a replay has done."""

    lake: str
    topic: str
    to: str
    start: int
    """Where it begins in the topic, and where it ends."""
    end: int
    resumed: int
    """Where this run went on: what lies before that was replayed by an earlier one."""
    batches: int
    records: int
    bytes: int


Progress = Callable[[int, int], None]
"""Told how many bytes are replayed, of how many."""
Time = datetime.datetime | int
"""A moment, with its zone or in UTC, or milliseconds since 1970."""


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
    runner: Runner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> Summary:
    """Publish what a lake has of a topic to another one, at `rate` records per second or as fast as it goes.

    Asked for again with the same arguments it does the same, which is nothing where it is done; under another
    `name` it is another one. Beginnings count, ends do not: records from `from_offset` to before `to_offset`,
    or from `since` to before `until`.
    """
    wanted = Wanted(topic, to, name, from_offset, to_offset, _ms(since), _ms(until))
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
        notes = Notes(directory)
        found = notes.find(wanted)
        if found is None:
            ranges = [one for some in seen.ranges.values() for one in some]
            found = course(wanted, ranges, seen.since, seen.until, rate)
            if found.start < found.end:
                # Only when the server is there: nothing is left of a replay that could not begin.
                _is_decided(http, producer_of(table.id, wanted, found), 0)
                found = notes.begin(wanted, found)
        job = _Replay(str(directory), wanted, found, table.id, place, http, runner, points)
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


def _together(found: list[Seen]) -> Seen:
    ranges: dict[str, list[Range]] = {}
    for one in found:
        ranges |= one.ranges
    since = [one.since for one in found if one.since is not None]
    until = [one.until for one in found if one.until is not None]
    return Seen(ranges, min(since, default=None), min(until, default=None))


def _is_decided(http: HttpClient, producer: str, number: int) -> bool:
    """Whether a batch was decided, or one behind it."""
    body = {"producer": producer, "number": number, "staged": [_NOBODYS]}
    try:
        http.json("POST", "/v1/batches", {}, body)
    except ServerError as error:
        if error.status == 404 and "staged file" in str(error):
            return False
        if error.status == 409:
            return True  # it was passed over: no record begins in that cut
        raise
    return True


class _Replay:
    def __init__(
        self,
        lake: str,
        wanted: Wanted,
        found: Course,
        lake_id: str,
        place: Place,
        http: HttpClient,
        runner: Runner,
        points: Points,
    ) -> None:
        self._lake, self._wanted, self._course = lake, wanted, found
        self._place, self._runner, self._points = place, runner, points
        self._producer = producer_of(lake_id, wanted, found)
        self._is_decided = partial(_is_decided, http, self._producer)
        self._batches = self._records = self._bytes = 0
        self._passed = 0
        """Records that count for the rate."""

    def run(
        self, files: dict[str, list[Range]], rate: float | None, progress: Progress | None
    ) -> Summary:
        found = self._course
        first = first_open(found, self._is_decided)
        resumed = min(found.end, found.start + first * found.cut_bytes)
        begun_s = time.monotonic()
        at_once = 1 if rate is not None else _CUTS_AT_ONCE
        for some in _chunks(cuts(files, found, first), at_once):
            if rate is not None:
                # Before the upload: the server does not keep for ever what nobody decides.
                time.sleep(max(0.0, begun_s + self._passed / rate - time.monotonic()))
            told = None
            if progress is not None:
                done = some[0].offset - found.start
                told = partial(_tell, progress, done, some[-1].end - found.start, found)
            self._replay(some, told)
        return Summary(
            *(self._lake, self._wanted.topic, self._wanted.target, found.start, found.end),
            *(resumed, self._batches, self._records, self._bytes),
        )

    def _replay(self, some: list[Cut], progress: Callable[[float], None] | None) -> None:
        works = [
            ReplayWork(
                *(self._place, self._lake, cut.files, self._wanted.topic, self._wanted.target),
                *(cut.offset, cut.end),
            )
            for cut in some
        ]
        results = self._runner.run(works, upload_part, progress)
        self._points.here("uploaded")
        for cut, uploaded in zip(some, results, strict=True):
            self._passed += uploaded.records
            if not uploaded.ids:
                continue  # a record reaches over the whole of it
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
