"""The job `aggregate`: folds all records of each topic in lake and log with a reducer, into a Delta table.

    plan ─▶ tasks read pieces ─▶ shuffle by bucket ─▶ tasks fold them ─▶ one commit ─▶ publish

One Spark job does all from plan to commit. Nothing changes before the commit. The states are equal to the
server's own states, byte for byte. Elsewhere: the same in rounds (`stream.py`).
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from headrace.config.pipeline import AggregateOptions, AggregateStreamOptions
from headrace.errors import OptionError
from headrace.lake.format import LakeError
from headrace.lake.states import Buckets, StatesFile, StatesTable, Totals, read_states
from headrace.lake.storage.storage import Storage, storage_of
from headrace.model import CHANNEL_PREFIX
from headrace.pipeline import tasks
from headrace.pipeline.aggregate.fold import load_reducer
from headrace.pipeline.aggregate.tasks import FoldedBucket, FoldInput, FoldRun, fold_buckets
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.job import (
    JobArguments,
    groups,
    job,
    list_lake,
    part_of,
    place_of,
    source_of,
    topics_of,
)
from headrace.pipeline.tasks import JobError, TaskRunner
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.planning import (
    SourceOptions,
    TopicSelection,
    find_topics,
    parts_of,
    ranges_between,
)
from headrace.reader.view import LogLocation, open_log

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


@dataclass(frozen=True)
class AggregateStreamArguments(AggregateStreamOptions, JobArguments):
    stop: Callable[[], bool] = field(default=lambda: False, kw_only=True)


@job(AggregateArguments)
def aggregate(given: AggregateArguments) -> AggregateSummary:
    """Replace the table in `into` by the states that a reducer makes of the given topics, or of all topics.

    Records after the lake's end are read from the server at `url` or from the log in `data_dir`. Without
    either, only the lake is read. With `publish`, states of channels are sent to the server at `url` as
    snapshots.
    """
    log = log_of(given) if given.url or given.data_dir else None
    whole = Aggregation(given, lake_of(given), log)
    plan = whole.plan()
    check_named(whole.topics, plan.topics)
    with whole.writing() as runner:
        return whole.summary(whole.replace(runner, plan))


def lake_of(given: AggregateArguments | AggregateStreamArguments) -> Storage:
    return storage_of(given.lake, given.storage_options, given.catalog_options)


def log_of(given: AggregateArguments | AggregateStreamArguments) -> SourceOptions:
    return source_of(
        topics_of(given.topics, given.pattern),
        given,
        data_dir=given.data_dir,
        task_bytes=given.task_bytes,
    )


def check_named(topics: TopicSelection, known: Collection[str]) -> None:
    for name in topics.names or ():
        if name not in known:
            raise JobError(f"there is no topic {name!r} to aggregate")


class AggregatePlan(NamedTuple):
    """Input of a run over everything."""

    inputs: list[FoldInput]
    topics: set[str]
    bytes: int


class Aggregation:
    """A job with its arguments, which runs over everything or, with `stream.py`, in rounds."""

    def __init__(
        self,
        given: AggregateArguments | AggregateStreamArguments,
        lake: Storage | None,
        source: SourceOptions | None,
    ) -> None:
        load_reducer(given.reducer, os.getcwd())
        if given.publish and not given.url:
            raise OptionError("say where states are published: give a server's address")
        self._told = place_of(given) if given.publish else None
        self._given, self.lake, self.source = given, lake, source
        self.topics = topics_of(given.topics, given.pattern)
        self.into = storage_of(given.into, given.storage_options)
        StatesTable.open(self.into)  # raises unless states can be written there
        if lake is not None:
            lake.check_apart(self.into)
        self._published = Published()

    @contextmanager
    def writing(self) -> Iterator[TaskRunner]:
        """Start Spark and lock the table. A failure to start happens before anything is written."""
        with closing(self._given.task_runner("aggregate")) as runner:
            runner.start()
            self.into.prepare()
            with self.into.lock("aggregate"):
                yield runner

    def plan(self) -> AggregatePlan:
        files, ends = list_lake(self.lake) if self.lake is not None else ({}, {})
        size = max(_TASK_BYTES_MIN, sum(files.values()) // _TASKS)
        size = min(self._given.task_bytes, size)
        inputs = [FoldInput(files=some) for some in groups(sorted(files), files.__getitem__, size)]
        names = {name for name in ends if self.topics.matches(name)}
        if self.source is not None:
            with closing(open_log(self.source.place)) as log:
                states = find_topics(log, self.topics)
                behind = export_plan.begin(log, states, ends, ()).at
                last = {name: state.end for name, state in states.items()}
                parts = parts_of(log, ranges_between(behind, last), self.source)
            inputs += [FoldInput(ranges=part) for part in parts]
            names |= states.keys()
        ranges = (part for one in inputs for part in one.ranges)
        return AggregatePlan(inputs, names, sum(files.values()) + sum(one.bytes for one in ranges))

    def replace(self, runner: TaskRunner, plan: AggregatePlan) -> Totals:
        """Replace the whole table, and return the statistics of its states."""
        points = self._given.points
        table = StatesTable.open(self.into) or StatesTable.make(self.into)
        last = table.last(APP)
        number = 0 if last is None else last + 1
        count = min(BUCKETS_MAX, max(BUCKETS_MIN, plan.bytes // self._given.task_bytes))
        progress = part_of(self._given.progress, done=0, size=plan.bytes, total=plan.bytes)
        buckets = Buckets.of(count, plan.topics)
        folded = self.fold(runner, plan.inputs, buckets, number, {}, progress)
        points.here("folded")
        files = [one.file for one in folded]
        if not table.replace(APP, number, files):
            raise self.already_committed(number)
        points.here("committed")
        table.sweep()
        self.publish(runner, files)
        return together(Totals(), *(one.changed for one in folded))

    def fold(
        self,
        runner: TaskRunner,
        inputs: Sequence[FoldInput],
        buckets: Buckets,
        number: int,
        old: Mapping[int, Sequence[str]],
        progress: tasks.Progress | None = None,
    ) -> list[FoldedBucket]:
        """Fold the inputs onto the states in `old`; return the files of the buckets that have changed."""
        run = FoldRun(
            lake=self.lake,
            source=self.source,
            topics=self.topics,
            reducer=self._given.reducer,
            directory=os.getcwd(),
            into=self.into,
            number=number,
            buckets=buckets,
            old=old,
            points=self._given.points,
        )
        return fold_buckets(runner, run, inputs, progress)

    def already_committed(self, number: int) -> LakeError:
        return LakeError(
            f"another aggregate writes to {self.into.address}: it has committed run {number}"
        )

    def publish(self, runner: TaskRunner, files: Sequence[StatesFile]) -> None:
        """Publish the states of channels in the first rows of these files, if the job was asked to."""
        if self._told is not None:
            found = runner.run(files, partial(publish, self._told, self.into))
            self._published = together(self._published, *found)

    def summary(self, totals: Totals) -> AggregateSummary:
        return AggregateSummary(
            into=self.into.address,
            reducer=self._given.reducer,
            **totals._asdict(),
            **self._published._asdict(),
        )


# Snapshots of channels, with the offset that they cover

_COLUMNS = ("topic", "offset", "state", "is_json", "complete", "error")
_OF_A_CHANNEL = frozenset({400, 404, 409, 413})
"""Statuses that refuse one channel; the server may accept the others."""


class Published(NamedTuple):
    published: int = 0
    refused: int = 0
    first_refusal: str = ""


Counts = TypeVar("Counts", Totals, Published)


def together(*some: Counts) -> Counts:
    """Return the sum of each number, and the first of each text that is not empty."""
    columns = zip(*some, strict=True)
    return type(some[0])._make(
        next(filter(None, one), "") if isinstance(one[0], str) else sum(one) for one in columns
    )


def publish(place: LogLocation, into: Storage, file: StatesFile) -> Published:
    """Publish states. Repeating it does no harm: a snapshot never replaces one with a later offset."""
    with closing(HttpClient(place)) as http:
        rows = islice(read_states(into.file(file.path), _COLUMNS), file.rows)
        refusals = [_publish(http, row) for row in rows if row["topic"].startswith(CHANNEL_PREFIX)]
    refused = list(filter(None, refusals))
    return Published(len(refusals) - len(refused), len(refused), next(iter(refused), ""))


def _publish(http: HttpClient, row: Mapping[str, Any]) -> str:
    """Publish a state; return the reason if it is refused, or an empty string."""
    name = row["topic"].removeprefix(CHANNEL_PREFIX)
    reason = row["error"]
    # The server deletes messages that a snapshot covers, so the snapshot must include all of them.
    if reason is None and not row["complete"]:
        reason = "its first records are in neither lake nor log"
    if reason is None:
        kind = "application/json" if row["is_json"] else "application/octet-stream"
        query = {"name": name, "offset": row["offset"]}
        try:
            http.send("PUT", "/v1/channel/snapshot", query, row["state"], kind)
            return ""
        except ServerError as error:
            if error.status not in _OF_A_CHANNEL:
                raise
            reason = str(error)
    return f"channel {name!r}: {reason}"
