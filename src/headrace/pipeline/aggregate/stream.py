"""The job `aggregate` as a stateful streaming query, which keeps a table of states up to date.

    table ─▶ states of the query ─▶ micro-batch ─▶ files of changed buckets ─▶ one commit ─▶ publish
                                        ╰──────────────────◀────────────────────────────────────╯

Only the table counts. Every start loads the states from the table and reads the log from where they end, with
a new checkpoint. So records of a micro-batch that was killed before its commit are read again, and committed
records are not. The batch job runs first if the table does not exist yet, or if the log no longer has records
that the lake has.
"""

import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.config.pipeline import AggregateStreamOptions
from headrace.lake.format import LakeError, Positions
from headrace.lake.manifests import HIDDEN
from headrace.lake.states import Covered, StatesFile, StatesTable, Totals
from headrace.lake.table import Lock
from headrace.pipeline.aggregate.fold import Needs, here, load_reducer, needs_of
from headrace.pipeline.aggregate.job import (
    APP,
    BUCKETS_MIN,
    Aggregate,
    AggregateSummary,
    Published,
    check_named,
    log_of,
    plan_of,
    publish_all,
    publish_to,
)
from headrace.pipeline.aggregate.stream_tasks import (
    MERGED_COLUMNS,
    PIECE_COLUMNS,
    RECORD_COLUMNS,
    STATE_COLUMNS,
    Folding,
    merging,
    pieces,
    states_of,
)
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.job import (
    NO_POINTS,
    Points,
    check_apart,
    job,
    list_lake,
    make_writable,
    topics_of,
)
from headrace.pipeline.tasks import NotSharedError, ServerAwayError, SparkRunner
from headrace.reader.http_client import ServerError
from headrace.reader.planning import EARLIEST, SourceOptions, find_topics
from headrace.reader.view import LogLocation, LogView, open_log
from headrace.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint"
_POLL_S = 0.2
_READABLE_S = 600.0
"""Seconds before files that are no longer in the table are deleted, as they may still be read."""

_ROWS_MAX = 20_000_000
"""Maximum number of records in a micro-batch.

Spark passes 10,000 rows of a topic at once to a processor, and each row is a piece of thousands of records.
So a processor gets all pieces of a topic at once and can sort them.
"""

_SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Otherwise every micro-batch writes its complete state to files.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.minBatchesToRetain": "2",
}


@dataclass(frozen=True)
class AggregateStreamArguments(AggregateStreamOptions):
    stop: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    points: Points = field(default=NO_POINTS, kw_only=True)


@job(AggregateStreamArguments)
def aggregate_stream(given: AggregateStreamArguments) -> AggregateSummary:
    """Keep the table in `into` up to date with the states of topics, until `stop` returns True.

    The log is read from the server at `url` or in `data_dir`. Records that the log no longer has are read
    from `lake`, if it is given. With `publish`, states of channels are sent to the server at `url` as
    snapshots each time they change.
    """
    load_reducer(given.reducer, here())
    topics = topics_of(given.topics, given.pattern)
    source = log_of(given, topics)
    told = publish_to(given)
    with closing(open_log(source.place)) as log:
        stream = _Stream(given, log, source, told)
        if stream.lake is not None:
            check_apart(stream.lake, stream.into)
        stream.look()
        with closing(SparkRunner("headrace aggregate", given.master)) as runner:
            runner.start()  # a failure here happens before anything is written
            make_writable(stream.into)
            with Lock(stream.into / HIDDEN, "aggregate"):
                return stream.run(runner)


class _Found(NamedTuple):
    """Situation at a start of the query."""

    table: StatesTable | None
    at: Positions
    """Positions where topics continue after their states."""
    is_behind: bool
    """True if the lake may have records after the states that the log no longer has."""


class _Stream:
    def __init__(
        self,
        given: AggregateStreamArguments,
        log: LogView,
        source: SourceOptions,
        told: LogLocation | None,
    ) -> None:
        self._given, self._log, self._source, self._told = given, log, source, told
        self._topics, self._stop = source.topics, given.stop
        self.into = Path(given.into).absolute()
        self.lake = Path(given.lake).absolute() if given.lake else None
        self._number = 0
        self._buckets, self._files = 0, dict[int, list[str]]()
        self._over: deque[tuple[float, list[str]]] = deque()
        """Files that are no longer in the table, and the time of their removal."""
        self._published: list[Published] = []
        self._busy = threading.Lock()
        self._ended = False
        self._failure: BaseException | None = None

    def run(self, runner: SparkRunner) -> AggregateSummary:
        """Run until `stop` returns True. If the server is away, wait for it and start a new query."""
        while not self._stop():
            try:
                self._round(runner)
                break
            except (ServerError, ServerAwayError) as error:
                if isinstance(error, ServerError) and not error.is_away:
                    raise
                logger.warning("%s; retrying until the server answers", error)
                self._wait()
        table = StatesTable.open(self.into)
        totals = (
            table.totals()
            if table is not None
            else Totals(topics=0, messages=0, incomplete=0, failed=0, first_failure="")
        )
        return AggregateSummary(
            str(self.into),
            self._given.reducer,
            *totals,
            sum(one.published for one in self._published),
            sum(one.refused for one in self._published),
            next((one.first_refusal for one in self._published if one.first_refusal), ""),
        )

    def _wait(self) -> None:
        while not self._stop():
            time.sleep(_POLL_S)
            try:
                find_topics(self._log, self._topics)
                return
            except ServerError as error:
                if not error.is_away:
                    raise

    def _round(self, runner: SparkRunner) -> None:
        """Run one query, starting from the table."""
        table, starts = self._begin(runner)
        self._buckets, self._files = table.buckets()
        self._buckets = self._buckets or BUCKETS_MIN
        self._number = (table.last(APP) or 0) + 1
        self._ended, self._failure = False, None
        checkpoint = self.into / HIDDEN / _CHECKPOINT
        shutil.rmtree(checkpoint, ignore_errors=True)
        with runner.sentences():
            query = self._start(runner, table, starts, checkpoint)
        try:
            with runner.sentences():
                while not self._stop() and query.isActive and self._failure is None:
                    time.sleep(_POLL_S)
                if failure := query.exception():
                    raise failure
        finally:
            with self._busy:  # a running micro-batch finishes first
                self._ended = True
            try:
                with runner.sentences():
                    query.stop()
            finally:
                shutil.rmtree(checkpoint, ignore_errors=True)
        if self._failure is not None:
            raise self._failure

    # Start

    def look(self) -> _Found:
        """Return the situation; raise if this job cannot continue from it. Changes nothing."""
        into, topics = self.into, self._topics
        table = StatesTable.open(into)
        covered = table.covered() if table is not None else Covered(set(), {})
        ends = list_lake(self.lake)[1] if self.lake is not None else {}
        states = find_topics(self._log, topics)
        check_named(topics, states.keys() | ends.keys() | covered.ends.keys())
        anew = "name another directory, or run it without --stream first, which replaces them"
        for name in covered.reducers - {self._given.reducer}:
            raise LakeError(f"{into} has states of the reducer {name!r}: {anew}")
        for name in covered.ends:
            if not topics.matches(name):
                raise LakeError(f"{into} has states of other topics too, such as {name!r}: {anew}")
        known = {
            name: at
            for name, at in covered.ends.items()
            # Topics of durability memory begin anew when their server restarts, with a new epoch.
            if name not in states or states[name].is_kept or states[name].end.epoch == at.epoch
        }
        gone = [name for name in known if name not in states]
        begin = export_plan.begin(
            log=self._log, states=states, known=known, gone=gone, table=str(into)
        )
        new = any(name not in covered.ends and topics.matches(name) for name in ends)
        return _Found(table, begin.at, bool(ends) and (bool(begin.lost) or new))

    def _begin(self, runner: SparkRunner) -> tuple[StatesTable, Positions]:
        """Return the table and the positions where the log continues after it."""
        given, found = self._given, self.look()
        if found.table is None or found.is_behind:
            whole = Aggregate(
                into=self.into,
                plan=plan_of(self.lake, self._topics, self._source, given.task_bytes),
                topics=self._topics,
                reducer=given.reducer,
                points=given.points,
                progress=None,
            )
            done = whole.run(runner, self._told)
            self._published.append(Published(done.published, done.refused, done.first_refusal))
            found = self.look()
            assert found.table is not None
        else:
            found.table.sweep()
            # An earlier run may have been killed after its commit and before it published.
            self._publish(runner, [StatesFile(path, 0, rows) for path, rows in found.table.rows()])
        return found.table, found.at

    # The query

    def _start(
        self, runner: SparkRunner, table: StatesTable, starts: Positions, checkpoint: Path
    ) -> "StreamingQuery":
        session = runner.session().newSession()  # other queries need their own settings
        parallel = session.sparkContext.defaultParallelism
        settings = {**_SETTINGS, "spark.sql.shuffle.partitions": str(parallel)}
        for key, value in settings.items():
            session.conf.set(key, value)
        register(session)
        folding = Folding(self._given.reducer, here(), self._buckets)
        return (
            self._records(session, starts, parallel)
            .mapInArrow(pieces(needs_of(self._given.reducer)), PIECE_COLUMNS)
            .groupBy("topic")
            .transformWithState(
                folding,
                f"bucket int, {STATE_COLUMNS}",
                "Update",
                "None",
                self._states(session, table.files()).groupBy("topic"),
            )
            .writeStream.foreachBatch(partial(self._batch, runner, table))
            .outputMode("update")
            .option("checkpointLocation", str(checkpoint))
            .trigger(processingTime=f"{int(self._given.every_s * 1000)} milliseconds")
            .start()
        )

    def _records(self, session: "SparkSession", starts: Positions, parallel: int) -> "DataFrame":
        topics, place = self._topics, self._source.place
        offsets = {"": EARLIEST} | {name: at.offset for name, at in starts.items()}
        options = {
            **({"path": place.path} if place.path else {"url": ",".join(place.urls)}),
            **({"token": place.token} if place.token else {}),
            "startingOffsets": json.dumps(offsets),
            "maxRowsPerTrigger": str(_ROWS_MAX),
            "maxBytesPerTrigger": str(self._given.batch_bytes),
            "maxBytesPerPartition": str(self._given.task_bytes),
            "minPartitions": str(parallel),  # many topics take time, even with few records
            # The server folds in the same way: it skips lost or damaged records, and the ordinals show the
            # gap.
            "failOnDataLoss": "false",
            "verifyChecksums": "false",
        }
        if topics.names is not None:
            options["subscribe"] = json.dumps(topics.names)
        else:
            options["subscribePattern"] = topics.pattern
        payload = "" if needs_of(self._given.reducer) is Needs.NONE else ", payload binary"
        reader = session.readStream.format("headrace").schema(RECORD_COLUMNS + payload)
        return reader.options(**options).load()

    def _states(self, session: "SparkSession", files: list[str]) -> "DataFrame":
        numbers = session.range(0, len(files), 1, max(1, len(files)))
        return numbers.mapInArrow(states_of(str(self.into), files), STATE_COLUMNS)

    # One micro-batch

    def _batch(
        self, runner: SparkRunner, table: StatesTable, changed: "DataFrame", number: int
    ) -> None:
        with self._busy:
            if self._ended:
                return
            try:
                self._commit(runner, table, changed)
            except BaseException as error:
                # Spark would turn the error into a page of text.
                self._failure = error
                self._ended = True

    def _commit(self, runner: SparkRunner, table: StatesTable, changed: "DataFrame") -> None:
        into, points = self.into, self._given.points
        merge = merging(str(into), self._number, self._buckets, self._files)
        with runner.sentences():
            made = changed.groupBy("bucket").applyInArrow(merge, MERGED_COLUMNS).collect()
        if not made:
            return
        for one in made:
            _check_is_here(into / one.path, one.bytes)
        points.here("merged")
        replaced = [path for one in made for path in self._files.get(one.bucket, ())]
        files = [StatesFile(one.path, one.bytes, one.rows) for one in made]
        if not table.update(APP, self._number, files, replaced):
            raise LakeError(
                f"another aggregate writes to {into}: it has committed run {self._number}"
            )
        points.here("committed")
        self._number += 1
        self._files |= {one.bucket: [one.path] for one in made}
        self._publish(runner, [StatesFile(one.path, one.bytes, one.changed) for one in made])
        self._forget(replaced)
        points.here("done")

    def _publish(self, runner: SparkRunner, files: list[StatesFile]) -> None:
        self._published += publish_all(runner, self._told, self.into, files)

    def _forget(self, paths: list[str]) -> None:
        """Delete replaced files after a delay.

        Every micro-batch replaces as many files as it writes: within a week they would fill the disk.
        """
        now = time.monotonic()
        self._over.append((now, paths))
        while self._over[0][0] < now - _READABLE_S:
            for path in self._over.popleft()[1]:
                (self.into / path).unlink(missing_ok=True)


def _check_is_here(path: Path, size: int) -> None:
    if not path.exists() or path.stat().st_size != size:
        raise NotSharedError(
            f"{path.parent} is another directory for Spark's executors: name one that all machines share"
        )
