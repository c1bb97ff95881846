"""The job `aggregate`: what a reducer makes of all records of each topic in lake and log, as a Delta table.

    plan ─▶ tasks stage pieces by topic ─▶ tasks fold them ─▶ one commit ─▶ published

Until the commit nothing has changed: what a killed run has staged is removed by the next one. The states are
those that the server itself would come to, to the byte.
"""

import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headrace.lake.format import LakeError, Positions
from headrace.lake.lock import Lock
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.states import StatesFile, StatesTable
from headrace.lake.syncing import make_directory
from headrace.lake.table import open_table
from headrace.pipeline import export_plan
from headrace.pipeline.aggregate_publish import Published, PublishWork, publish
from headrace.pipeline.aggregate_tasks import (
    Folded,
    FoldWork,
    Staged,
    StageWork,
    fold_bucket,
    stage,
)
from headrace.pipeline.export import APP as EXPORT
from headrace.pipeline.fold import here, load_reducer
from headrace.pipeline.points import Points
from headrace.pipeline.tasks import JobError, Runner, SparkRunner
from headrace.spark.log_view import LogView, Range, TopicState
from headrace.spark.open_log import open_log
from headrace.spark.options import (
    OptionError,
    Place,
    SourceOptions,
    Topics,
    parse_place,
    parse_source,
)
from headrace.spark.planning import find_topics, parts_of

APP = "headrace-aggregate"
"""The application whose numbers are those of runs."""

_STAGING = "staging"
_TASK_BYTES = 64 << 20
_BUCKETS_MIN, _BUCKETS_MAX = 4, 256

Progress = Callable[[int, int], None]
"""Told how many bytes of log and lake are done, of how many."""


class Summary(NamedTuple):
    """What an aggregation has done."""

    into: str
    reducer: str
    topics: int
    messages: int
    incomplete: int
    """States that lack records which neither lake nor log has any more."""
    failed: int
    """States that end before a message that the reducer could not fold."""
    first_failure: str
    published: int
    refused: int
    """States of channels that were not published."""
    first_refusal: str


def aggregate(
    lake: str | Path,
    into: str | Path,
    topics: Iterable[str] = (),
    *,
    reducer: str,
    pattern: str = "",
    url: str = "",
    token: str = "",
    data_dir: str = "",
    publish: bool = False,
    master: str = "local[*]",
    task_bytes: int = _TASK_BYTES,
    progress: Progress | None = None,
    runner: Runner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> Summary:
    """Replace the table in `into` by the states that a reducer makes of topics, or of all.

    What the log has behind the lake's end is asked at `url`, or read in `data_dir`; without either only the
    lake is read. With `publish`, states of channels go to the server at `url` as snapshots.
    """
    load_reducer(reducer, here())
    wanted = _topics(tuple(dict.fromkeys(topics)), pattern)
    if publish and not url:
        raise OptionError("say where states are published: give a server's address")
    log = _source(wanted, url, token, data_dir, task_bytes) if url or data_dir else None
    told = parse_place(url, token) if publish else None
    directory = Path(into).absolute()
    StatesTable.open(directory)
    plan = _plan(Path(lake).absolute(), wanted, log, task_bytes)
    for name in wanted.names or ():
        if name not in plan.topics:
            raise JobError(f"there is no topic {name!r} to aggregate")
    _make_writable(directory)
    with Lock(directory / HIDDEN, "aggregate"):
        job = _Aggregate(directory, plan, wanted, reducer, points, progress)
        with closing(runner or SparkRunner("headrace aggregate", master)) as by:
            return job.run(by, told)


def _topics(names: tuple[str, ...], pattern: str) -> Topics:
    if names and pattern:
        raise OptionError("topics and a pattern exclude each other: give one of them")
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"the pattern is no regular expression: {error}") from None
    return Topics(names) if names else Topics(pattern=pattern or "(?s:.*)")


def _source(topics: Topics, url: str, token: str, data_dir: str, task_bytes: int) -> SourceOptions:
    place = {"path": str(Path(data_dir).absolute())} if data_dir else {"url": url, "token": token}
    given = {"maxBytesPerPartition": str(task_bytes), "failOnDataLoss": "false"}
    options = parse_source({**place, **given, "subscribePattern": ".*"}, streaming=False)
    return options._replace(topics=topics)


def _make_writable(directory: Path) -> None:
    try:
        make_directory(directory / HIDDEN / _STAGING)
        made = directory / HIDDEN / f"probe-{uuid.uuid4().hex}"
        made.touch()
        made.unlink()
    except OSError as error:
        raise LakeError(f"{directory} cannot be written to: {error.strerror}") from None


# What is read


class _Plan(NamedTuple):
    lake: str
    files: dict[str, int]
    place: Place
    parts: list[list[Range]]
    """Of the log."""
    topics: set[str]
    task_bytes: int

    @property
    def bytes(self) -> int:
        return sum(self.files.values()) + sum(one.bytes for part in self.parts for one in part)


def _plan(lake: Path, topics: Topics, source: SourceOptions | None, task_bytes: int) -> _Plan:
    files, ends = _list_lake(lake)
    names = {name for name in ends if topics.matches(name)}
    if source is None:
        return _Plan(str(lake), files, Place(), [], names, task_bytes)
    with closing(open_log(source.place)) as log:
        states = find_topics(log, topics)
        parts = parts_of(log, _behind(log, states, ends), source)
    return _Plan(str(lake), files, source.place, parts, names | states.keys(), task_bytes)


def _list_lake(lake: Path) -> tuple[dict[str, int], Positions]:
    """Its files, and how far it has each topic: files may have more than that, never less."""
    table = open_table(lake)
    ends = Manifests(lake).reach(table.last(EXPORT)).ends
    return table.files(), ends


def _behind(log: LogView, states: dict[str, TopicState], ends: Positions) -> list[Range]:
    """What the log has behind the lake's end."""
    found = export_plan.begin(log, states, ends, ())
    return [
        Range(name, found.at[name], state.end)
        for name, state in states.items()
        if found.at[name].ordinal < state.end.ordinal
    ]


def _together(files: dict[str, int], bytes_max: int) -> Iterator[list[str]]:
    """Small files in one task."""
    some: list[str] = []
    size = 0
    for name, length in sorted(files.items()):
        if some and size + length > bytes_max:
            yield some
            some, size = [], 0
        some.append(name)
        size += length
    if some:
        yield some


# What is done


class _Aggregate:
    def __init__(
        self,
        into: Path,
        plan: _Plan,
        topics: Topics,
        reducer: str,
        points: Points,
        progress: Progress | None,
    ) -> None:
        self._into, self._plan, self._topics = into, plan, topics
        self._reducer, self._points, self._progress = reducer, points, progress

    def run(self, runner: Runner, told: Place | None) -> Summary:
        table = StatesTable.open(self._into) or StatesTable.make(self._into)
        last = table.last(APP)
        number = 0 if last is None else last + 1
        staging = self._into / HIDDEN / _STAGING
        _empty(staging)  # of runs that were killed: nobody else is here
        try:
            staged = self._stage(runner, staging)
            self._points.here("staged")
            folded = self._fold(runner, staged, number)
            self._points.here("folded")
            files = [one.file for one in folded if one.file is not None]
            if not table.replace(APP, number, files):
                raise LakeError(
                    f"another aggregate writes to {self._into}: it has committed run {number}"
                )
            self._points.here("committed")
        finally:
            _empty(staging)
        table.sweep()
        return self._summary(folded, self._publish(runner, told, files))

    def _stage(self, runner: Runner, staging: Path) -> list[Staged]:
        plan, size = self._plan, self._plan.task_bytes
        buckets = min(_BUCKETS_MAX, max(_BUCKETS_MIN, plan.bytes // size))
        inputs: list[tuple[list[str], list[Range]]] = [
            *((files, []) for files in _together(plan.files, size)),
            *(([], part) for part in plan.parts),
        ]
        works = [
            StageWork(
                *(str(staging), task, self._reducer, buckets, self._topics),
                *(plan.lake, files, plan.place, ranges, self._points),
            )
            for task, (files, ranges) in enumerate(inputs)
        ]
        return runner.run(works, stage, self._part(0.0, 0.5))

    def _fold(self, runner: Runner, staged: list[Staged], number: int) -> list[Folded]:
        by_bucket: dict[int, list[tuple[str, list[int]]]] = {}
        for one in staged:
            for bucket, batches in one.batches.items():
                by_bucket.setdefault(bucket, []).append((one.path, batches))
        works = [
            FoldWork(
                *(str(self._into), f"{number:08}-{bucket:04}", self._reducer, here()),
                *(found, self._points),
            )
            for bucket, found in sorted(by_bucket.items())
        ]
        return runner.run(works, fold_bucket, self._part(0.5, 1.0))

    def _publish(
        self, runner: Runner, told: Place | None, files: list[StatesFile]
    ) -> list[Published]:
        if told is None:
            return []
        works = [PublishWork(told, str(self._into), one.path) for one in files]
        return runner.run(works, publish)

    def _part(self, first: float, last: float) -> Callable[[float], None] | None:
        progress, total = self._progress, self._plan.bytes
        if progress is None:
            return None
        return lambda part: progress(int(total * (first + (last - first) * part)), total)

    def _summary(self, folded: list[Folded], published: list[Published]) -> Summary:
        return Summary(
            str(self._into),
            self._reducer,
            sum(one.topics for one in folded),
            sum(one.messages for one in folded),
            sum(one.incomplete for one in folded),
            sum(one.failed for one in folded),
            next((one.first_failure for one in folded if one.first_failure), ""),
            sum(one.published for one in published),
            sum(one.refused for one in published),
            next((one.first_refusal for one in published if one.first_refusal), ""),
        )


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
