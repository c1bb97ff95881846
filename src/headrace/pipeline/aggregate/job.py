"""The job `aggregate`: folds all records of each topic in lake and log with a reducer, into a Delta table.

    plan ─▶ tasks stage pieces by topic ─▶ tasks fold them ─▶ one commit ─▶ publish

Nothing changes before the commit. The next run removes the files that a killed run has staged. The states are
equal to the server's own states, byte for byte.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headrace.errors import OptionError
from headrace.lake.format import LakeError, Positions
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.states import StatesFile, StatesTable
from headrace.lake.table import Lock, open_table
from headrace.pipeline.aggregate.fold import here, load_reducer
from headrace.pipeline.aggregate.publish import Published, PublishWork, publish
from headrace.pipeline.aggregate.tasks import (
    AggregateStaged,
    AggregateStageWork,
    FoldedTopics,
    FoldWork,
    fold_bucket,
    stage,
)
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.export.job import APP as EXPORT
from headrace.pipeline.job_input import check_apart, make_writable, topics_of
from headrace.pipeline.kill_points import Points
from headrace.pipeline.staging import by_number, staging, together
from headrace.pipeline.tasks import JobError, SparkRunner, TaskRunner
from headrace.reader.planning import SourceOptions, TopicSelection, find_topics, parts_of
from headrace.reader.view import LogLocation, LogRange, LogView, TopicState, open_log, parse_place
from headrace.spark.options import parse_source

APP = "headrace-aggregate"
"""Application ID in the table's commits, which number the runs."""

_TASK_BYTES = 64 << 20
BUCKETS_MIN, BUCKETS_MAX = 16, 256

Progress = Callable[[int, int], None]
"""Called with the number of bytes of log and lake that are done, and with their total."""


class AggregateSummary(NamedTuple):
    """Result of an aggregation."""

    into: str
    reducer: str
    topics: int
    messages: int
    incomplete: int
    """Number of states that lack records which neither lake nor log has any more."""
    failed: int
    """Number of states that end before a message that the reducer could not fold."""
    first_failure: str
    published: int
    refused: int
    """Number of channel states that were not published."""
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
    runner: TaskRunner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> AggregateSummary:
    """Replace the table in `into` by the states that a reducer makes of the given topics, or of all topics.

    Records after the lake's end are read from the server at `url` or from the log in `data_dir`. Without
    either, only the lake is read. With `publish`, states of channels are sent to the server at `url` as
    snapshots.
    """
    load_reducer(reducer, here())
    wanted = topics_of(topics, pattern)
    if publish and not url:
        raise OptionError("say where states are published: give a server's address")
    log = (
        source_of(topics=wanted, url=url, token=token, data_dir=data_dir, task_bytes=task_bytes)
        if url or data_dir
        else None
    )
    told = parse_place(url, token) if publish else None
    directory = Path(into).absolute()
    StatesTable.open(directory)
    check_apart(Path(lake), directory)
    plan = plan_of(Path(lake).absolute(), wanted, log, task_bytes)
    check_named(wanted, plan.topics)
    with closing(runner or SparkRunner("headrace aggregate", master)) as by:
        by.start()  # a failure here happens before anything is written
        make_writable(directory)
        with Lock(directory / HIDDEN, "aggregate"):
            job = Aggregate(
                into=directory,
                plan=plan,
                topics=wanted,
                reducer=reducer,
                points=points,
                progress=progress,
            )
            return job.run(by, told)


def check_named(topics: TopicSelection, known: Collection[str]) -> None:
    for name in topics.names or ():
        if name not in known:
            raise JobError(f"there is no topic {name!r} to aggregate")


def source_of(
    topics: TopicSelection, url: str, token: str, data_dir: str, task_bytes: int
) -> SourceOptions:
    place = {"path": str(Path(data_dir).absolute())} if data_dir else {"url": url, "token": token}
    given = {"maxBytesPerPartition": str(task_bytes), "failOnDataLoss": "false"}
    options = parse_source({**place, **given, "subscribePattern": ".*"}, streaming=False)
    return options._replace(topics=topics)


# Input


class AggregatePlan(NamedTuple):
    lake: str
    files: dict[str, int]
    place: LogLocation
    parts: list[list[LogRange]]
    """Ranges of the log, by task."""
    topics: set[str]
    task_bytes: int

    @property
    def bytes(self) -> int:
        return sum(self.files.values()) + sum(one.bytes for part in self.parts for one in part)


def plan_of(
    lake: Path | None, topics: TopicSelection, source: SourceOptions | None, task_bytes: int
) -> AggregatePlan:
    files, ends = list_lake(lake) if lake is not None else ({}, {})
    names = {name for name in ends if topics.matches(name)}
    if source is None:
        return AggregatePlan(
            lake=str(lake),
            files=files,
            place=LogLocation(),
            parts=[],
            topics=names,
            task_bytes=task_bytes,
        )
    with closing(open_log(source.place)) as log:
        states = find_topics(log, topics)
        parts = parts_of(log, _behind(log, states, ends), source)
    return AggregatePlan(
        lake=str(lake),
        files=files,
        place=source.place,
        parts=parts,
        topics=names | states.keys(),
        task_bytes=task_bytes,
    )


def list_lake(lake: Path) -> tuple[dict[str, int], Positions]:
    """Return the lake's files and the end of each topic. Files may have more than that, never less."""
    table = open_table(lake)
    ends = Manifests(lake).reach(table.last(EXPORT)).ends
    return table.files(), ends


def _behind(log: LogView, states: dict[str, TopicState], ends: Positions) -> list[LogRange]:
    """Return the ranges of the log after the lake's end."""
    found = export_plan.begin(log, states, ends, ())
    return [
        LogRange(name, found.at[name], state.end)
        for name, state in states.items()
        if found.at[name].ordinal < state.end.ordinal
    ]


# The job


class Aggregate:
    def __init__(
        self,
        into: Path,
        plan: AggregatePlan,
        topics: TopicSelection,
        reducer: str,
        points: Points,
        progress: Progress | None,
    ) -> None:
        self._into, self._plan, self._topics = into, plan, topics
        self._reducer, self._points, self._progress = reducer, points, progress
        self._buckets = min(BUCKETS_MAX, max(BUCKETS_MIN, plan.bytes // plan.task_bytes))

    def run(self, runner: TaskRunner, told: LogLocation | None) -> AggregateSummary:
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

    def _stage(self, runner: TaskRunner, place: Path) -> list[AggregateStaged]:
        plan, size = self._plan, self._plan.task_bytes
        inputs: list[tuple[list[str], list[LogRange]]] = [
            *((files, []) for files in together(sorted(plan.files.items()), size)),
            *(([], part) for part in plan.parts),
        ]
        works = [
            AggregateStageWork(
                staging=str(place),
                task=task,
                reducer=self._reducer,
                buckets=self._buckets,
                topics=self._topics,
                lake=plan.lake,
                files=files,
                place=plan.place,
                ranges=ranges,
                points=self._points,
            )
            for task, (files, ranges) in enumerate(inputs)
        ]
        return runner.run(works, stage, self._part(0.0, 0.5))

    def _fold(
        self, runner: TaskRunner, staged: list[AggregateStaged], number: int
    ) -> list[FoldedTopics]:
        works = [
            FoldWork(
                into=str(self._into),
                number=number,
                bucket=bucket,
                buckets=self._buckets,
                reducer=self._reducer,
                directory=here(),
                staged=found,
                points=self._points,
            )
            for bucket, found in by_number((one.path, one.batches) for one in staged).items()
        ]
        return runner.run(works, fold_bucket, self._part(0.5, 1.0))

    def _part(self, first: float, last: float) -> Callable[[float], None] | None:
        progress, total = self._progress, self._plan.bytes
        if progress is None:
            return None
        return lambda part: progress(int(total * (first + (last - first) * part)), total)

    def _summary(self, folded: list[FoldedTopics], published: list[Published]) -> AggregateSummary:
        return AggregateSummary(
            into=str(self._into),
            reducer=self._reducer,
            topics=sum(one.topics for one in folded),
            messages=sum(one.messages for one in folded),
            incomplete=sum(one.incomplete for one in folded),
            failed=sum(one.failed for one in folded),
            first_failure=next((one.first_failure for one in folded if one.first_failure), ""),
            published=sum(one.published for one in published),
            refused=sum(one.refused for one in published),
            first_refusal=next((one.first_refusal for one in published if one.first_refusal), ""),
        )


def publish_all(
    runner: TaskRunner, told: LogLocation | None, into: Path, files: Iterable[StatesFile]
) -> list[Published]:
    if told is None:
        return []
    return runner.run([PublishWork(told, str(into), one.path, one.rows) for one in files], publish)
