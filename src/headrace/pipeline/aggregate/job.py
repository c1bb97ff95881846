"""The job `aggregate`: folds all records of each topic in lake and log with a reducer, into a Delta table.

    plan ─▶ tasks read pieces ─▶ shuffle by bucket ─▶ tasks fold them ─▶ one commit ─▶ publish

One Spark job does all from plan to commit. Nothing changes before the commit. The states are equal to the
server's own states, byte for byte.
"""

import pickle
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from headrace.config.pipeline import AggregateOptions, StatesOptions
from headrace.errors import OptionError
from headrace.lake.format import LakeError, Positions
from headrace.lake.states import Buckets, StatesFile, StatesTable, read_states
from headrace.lake.storage.storage import LakeFile, Storage, storage_of
from headrace.model import CHANNEL_PREFIX
from headrace.pipeline import tasks
from headrace.pipeline.aggregate.bucket import BucketsWork, FoldedBucket, fold_bucket
from headrace.pipeline.aggregate.fold import here, load_reducer
from headrace.pipeline.aggregate.pieces import PiecesWork, send_pieces
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.job import (
    JobArguments,
    Points,
    Progress,
    groups,
    job,
    list_lake,
    share_of,
    source_of,
    topics_of,
)
from headrace.pipeline.tasks import JobError, NotSharedError, Step, TaskRunner
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.planning import SourceOptions, TopicSelection, find_topics, parts_of
from headrace.reader.view import LogLocation, LogRange, LogView, TopicState, open_log, parse_place

APP = "headrace-aggregate"
"""Application ID in the table's commits, which number the runs."""

BUCKETS_MIN, BUCKETS_MAX = 16, 256

_TASKS, _TASK_BYTES_MIN = 4, 4 << 20
"""A small lake is read by this number of tasks, unless each would have less than this to read."""


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


@dataclass(frozen=True)
class AggregateArguments(AggregateOptions, JobArguments):
    pass


@job(AggregateArguments)
def aggregate(given: AggregateArguments) -> AggregateSummary:
    """Replace the table in `into` by the states that a reducer makes of the given topics, or of all topics.

    Records after the lake's end are read from the server at `url` or from the log in `data_dir`. Without
    either, only the lake is read. With `publish`, states of channels are sent to the server at `url` as
    snapshots.
    """
    load_reducer(given.reducer, here())
    wanted = topics_of(given.topics, given.pattern)
    told = publish_to(given)
    log = log_of(given, wanted) if given.url or given.data_dir else None
    lake = storage_of(given.lake, given.storage_options, given.catalog_options)
    into = storage_of(given.into, given.storage_options)
    StatesTable.open(into)
    lake.check_apart(into)
    plan = plan_of(lake, wanted, log, given.task_bytes)
    check_named(wanted, plan.topics)
    with closing(given.task_runner("aggregate")) as runner:
        runner.start()  # a failure here happens before anything is written
        into.prepare()
        with into.lock("aggregate"):
            run = Aggregate(
                into=into,
                plan=plan,
                topics=wanted,
                reducer=given.reducer,
                points=given.points,
                progress=given.progress,
            )
            return run.run(runner, told)


def log_of(given: StatesOptions, topics: TopicSelection) -> SourceOptions:
    return source_of(
        topics,
        url=given.url,
        token=given.token,
        data_dir=given.data_dir,
        task_bytes=given.task_bytes,
    )


def publish_to(given: StatesOptions) -> LogLocation | None:
    """Return the server that gets the states, or None if they are not published."""
    if not given.publish:
        return None
    if not given.url:
        raise OptionError("say where states are published: give a server's address")
    return parse_place(given.url, given.token)


def check_named(topics: TopicSelection, known: Collection[str]) -> None:
    for name in topics.names or ():
        if name not in known:
            raise JobError(f"there is no topic {name!r} to aggregate")


# Input


class AggregatePlan(NamedTuple):
    lake: Storage | None
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
    lake: Storage | None, topics: TopicSelection, source: SourceOptions | None, task_bytes: int
) -> AggregatePlan:
    files, ends = list_lake(lake) if lake is not None else ({}, {})
    names = {name for name in ends if topics.matches(name)}
    place, parts = LogLocation(), list[list[LogRange]]()
    if source is not None:
        with closing(open_log(source.place)) as log:
            states = find_topics(log, topics)
            place, parts = source.place, parts_of(log, _behind(log, states, ends), source)
        names |= states.keys()
    return AggregatePlan(
        lake=lake,
        files=files,
        place=place,
        parts=parts,
        topics=names,
        task_bytes=task_bytes,
    )


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
    """One run, which replaces the whole table."""

    def __init__(
        self,
        into: Storage,
        plan: AggregatePlan,
        topics: TopicSelection,
        reducer: str,
        points: Points,
        progress: Progress | None,
    ) -> None:
        self._into, self._plan, self._topics = into, plan, topics
        self._reducer, self._points, self._progress = reducer, points, progress
        count = min(BUCKETS_MAX, max(BUCKETS_MIN, plan.bytes // plan.task_bytes))
        self._buckets = Buckets.of(count, plan.topics)

    def run(self, runner: TaskRunner, told: LogLocation | None) -> AggregateSummary:
        table = StatesTable.open(self._into) or StatesTable.make(self._into)
        last = table.last(APP)
        number = 0 if last is None else last + 1
        folded = self._fold(runner, number)
        self._points.here("folded")
        files = [one.file for one in folded]
        if not table.replace(APP, number, files):
            raise already_committed(self._into, number)
        self._points.here("committed")
        table.sweep()
        return self._summary(folded, publish_all(runner, told, self._into, files))

    def _fold(self, runner: TaskRunner, number: int) -> list[FoldedBucket]:
        plan = self._plan
        size = max(_TASK_BYTES_MIN, sum(plan.files.values()) // _TASKS)
        size = min(plan.task_bytes, size)
        inputs: list[tuple[list[str], list[LogRange]]] = [
            *((some, []) for some in groups(sorted(plan.files), plan.files.__getitem__, size)),
            *(([], part) for part in plan.parts),
        ]
        works = [
            PiecesWork(
                reducer=self._reducer,
                buckets=self._buckets,
                topics=self._topics,
                lake=plan.lake,
                files=files,
                place=plan.place,
                ranges=ranges,
                points=self._points,
            )
            for files, ranges in inputs
        ]
        work = BucketsWork(
            into=self._into,
            number=number,
            buckets=self._buckets,
            old={},
            reducer=self._reducer,
            directory=here(),
            points=self._points,
        )
        return fold_buckets(runner, works, work, share_of(self._progress, plan.bytes, 0.0, 1.0))

    def _summary(self, folded: list[FoldedBucket], published: "Published") -> AggregateSummary:
        return AggregateSummary(
            into=self._into.address,
            reducer=self._reducer,
            topics=sum(one.topics for one in folded),
            messages=sum(one.messages for one in folded),
            incomplete=sum(one.incomplete for one in folded),
            failed=sum(one.failed for one in folded),
            first_failure=next((one.first_failure for one in folded if one.first_failure), ""),
            **published._asdict(),
        )


def fold_buckets(
    runner: TaskRunner,
    works: Sequence[PiecesWork],
    work: BucketsWork,
    progress: tasks.Progress | None = None,
) -> list[FoldedBucket]:
    """Read pieces and fold them in one job; return the new files of the buckets that have changed."""
    if not works:
        return []
    step = Step(len(work.buckets.changed), partial(fold_bucket, work))
    letters = runner.exchange(works, send_pieces, [step], progress)
    folded: list[FoldedBucket] = [pickle.loads(letter.data) for letter in letters]
    for one in folded:
        _check_is_here(work.into.file(one.file.path), one.file.bytes)
    return sorted(folded)


def _check_is_here(file: LakeFile, size: int) -> None:
    try:
        if file.size() == size:
            return
    except FileNotFoundError:
        pass
    raise NotSharedError(
        f"{file.storage.address} is another directory for Spark's executors: name one that all machines "
        "share"
    )


def already_committed(into: Storage, number: int) -> LakeError:
    return LakeError(f"another aggregate writes to {into.address}: it has committed run {number}")


# Snapshots of channels, with the offset that they cover

_COLUMNS = ("topic", "offset", "state", "is_json", "complete", "error")
_OF_A_CHANNEL = frozenset({400, 404, 409, 413})
"""Statuses that refuse one channel; the server may accept the others."""


class PublishWork(NamedTuple):
    place: LogLocation
    file: LakeFile
    rows: int
    """Number of states to publish, from the start of the file."""


class Published(NamedTuple):
    published: int = 0
    refused: int = 0
    first_refusal: str = ""

    @classmethod
    def together(cls, *some: "Published") -> "Published":
        return cls(
            published=sum(one.published for one in some),
            refused=sum(one.refused for one in some),
            first_refusal=next((one.first_refusal for one in some if one.first_refusal), ""),
        )


def publish(work: PublishWork) -> Published:
    """Publish states. Repeating it does no harm: a snapshot never replaces one with a later offset."""
    published = refused = 0
    first = ""
    with closing(HttpClient(work.place)) as http:
        for row in islice(read_states(work.file, _COLUMNS), work.rows):
            if not row["topic"].startswith(CHANNEL_PREFIX):
                continue
            name = row["topic"].removeprefix(CHANNEL_PREFIX)
            reason = _unfit(row["complete"], row["error"])
            if not reason:
                reason = _upload(http, name, row["offset"], row["state"], row["is_json"])
            if reason:
                refused += 1
                first = first or f"channel {name!r}: {reason}"
            else:
                published += 1
    return Published(published, refused, first)


def _unfit(complete: bool, error: str | None) -> str:
    """Return the reason why a state must not be published, or an empty string.

    The server deletes messages that a snapshot covers, so the snapshot must include all of them.
    """
    if error is not None:
        return error
    return "" if complete else "its first records are in neither lake nor log"


def _upload(http: HttpClient, name: str, offset: int, state: bytes, is_json: bool) -> str:
    kind = "application/json" if is_json else "application/octet-stream"
    try:
        http.send("PUT", "/v1/channel/snapshot", {"name": name, "offset": offset}, state, kind)
    except ServerError as error:
        if error.status not in _OF_A_CHANNEL:
            raise
        return str(error)
    return ""


def publish_all(
    runner: TaskRunner, told: LogLocation | None, into: Storage, files: Iterable[StatesFile]
) -> Published:
    if told is None:
        return Published()
    works = [PublishWork(told, into.file(one.path), one.rows) for one in files]
    return Published.together(*runner.run(works, publish))
