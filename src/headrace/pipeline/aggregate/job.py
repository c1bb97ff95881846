"""The job `aggregate`: what a reducer makes of all records of each topic in lake and log, as a Delta table.

    plan ─▶ tasks stage pieces by topic ─▶ tasks fold them ─▶ one commit ─▶ published

Until the commit nothing has changed: what a killed run has staged is removed by the next one. The states are
those that the server itself would come to, to the byte.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headrace.lake.format import LakeError, Positions
from headrace.lake.lock import Lock
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.states import StatesFile, StatesTable
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
from headrace.pipeline.job_input import check_apart, make_writable, topics_of
from headrace.pipeline.points import Points
from headrace.pipeline.staging import by_number, staging, together
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

_TASK_BYTES = 64 << 20
BUCKETS_MIN, BUCKETS_MAX = 16, 256

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
    wanted = topics_of(topics, pattern)
    if publish and not url:
        raise OptionError("say where states are published: give a server's address")
    log = source_of(wanted, url, token, data_dir, task_bytes) if url or data_dir else None
    told = parse_place(url, token) if publish else None
    directory = Path(into).absolute()
    StatesTable.open(directory)
    check_apart(Path(lake), directory)
    plan = plan_of(Path(lake).absolute(), wanted, log, task_bytes)
    check_named(wanted, plan.topics)
    with closing(runner or SparkRunner("headrace aggregate", master)) as by:
        by.start()  # or nothing is written
        make_writable(directory)
        with Lock(directory / HIDDEN, "aggregate"):
            job = Aggregate(directory, plan, wanted, reducer, points, progress)
            return job.run(by, told)


def check_named(topics: Topics, known: Collection[str]) -> None:
    for name in topics.names or ():
        if name not in known:
            raise JobError(f"there is no topic {name!r} to aggregate")


def source_of(
    topics: Topics, url: str, token: str, data_dir: str, task_bytes: int
) -> SourceOptions:
    place = {"path": str(Path(data_dir).absolute())} if data_dir else {"url": url, "token": token}
    given = {"maxBytesPerPartition": str(task_bytes), "failOnDataLoss": "false"}
    options = parse_source({**place, **given, "subscribePattern": ".*"}, streaming=False)
    return options._replace(topics=topics)


# What is read


class Plan(NamedTuple):
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


def plan_of(
    lake: Path | None, topics: Topics, source: SourceOptions | None, task_bytes: int
) -> Plan:
    files, ends = list_lake(lake) if lake is not None else ({}, {})
    names = {name for name in ends if topics.matches(name)}
    if source is None:
        return Plan(str(lake), files, Place(), [], names, task_bytes)
    with closing(open_log(source.place)) as log:
        states = find_topics(log, topics)
        parts = parts_of(log, _behind(log, states, ends), source)
    return Plan(str(lake), files, source.place, parts, names | states.keys(), task_bytes)


def list_lake(lake: Path) -> tuple[dict[str, int], Positions]:
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


# What is done


class Aggregate:
    def __init__(
        self,
        into: Path,
        plan: Plan,
        topics: Topics,
        reducer: str,
        points: Points,
        progress: Progress | None,
    ) -> None:
        self._into, self._plan, self._topics = into, plan, topics
        self._reducer, self._points, self._progress = reducer, points, progress
        self._buckets = min(BUCKETS_MAX, max(BUCKETS_MIN, plan.bytes // plan.task_bytes))

    def run(self, runner: Runner, told: Place | None) -> Summary:
        table = StatesTable.open(self._into) or StatesTable.make(self._into)
        last = table.last(APP)
        number = 0 if last is None else last + 1
        with staging(self._into) as place:
            staged = self._stage(runner, place)
            self._points.here("staged")
            folded = self._fold(runner, staged, number)
            self._points.here("folded")
            files = [one.file for one in folded if one.file is not None]
            if not table.replace(APP, number, files):
                raise LakeError(
                    f"another aggregate writes to {self._into}: it has committed run {number}"
                )
            self._points.here("committed")
        table.sweep()
        return self._summary(folded, publish_all(runner, told, self._into, files))

    def _stage(self, runner: Runner, place: Path) -> list[Staged]:
        plan, size = self._plan, self._plan.task_bytes
        inputs: list[tuple[list[str], list[Range]]] = [
            *((files, []) for files in together(sorted(plan.files.items()), size)),
            *(([], part) for part in plan.parts),
        ]
        works = [
            StageWork(
                *(str(place), task, self._reducer, self._buckets, self._topics),
                *(plan.lake, files, plan.place, ranges, self._points),
            )
            for task, (files, ranges) in enumerate(inputs)
        ]
        return runner.run(works, stage, self._part(0.0, 0.5))

    def _fold(self, runner: Runner, staged: list[Staged], number: int) -> list[Folded]:
        works = [
            FoldWork(
                *(str(self._into), number, bucket, self._buckets, self._reducer, here()),
                *(found, self._points),
            )
            for bucket, found in by_number((one.path, one.batches) for one in staged).items()
        ]
        return runner.run(works, fold_bucket, self._part(0.5, 1.0))

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


def publish_all(
    runner: Runner, told: Place | None, into: Path, files: Iterable[StatesFile]
) -> list[Published]:
    if told is None:
        return []
    return runner.run([PublishWork(told, str(into), one.path, one.rows) for one in files], publish)
