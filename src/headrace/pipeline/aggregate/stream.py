"""The job `aggregate` that goes on: a stateful streaming query, which keeps a table of states up to date.

    table ─▶ states of the query ─▶ micro-batch ─▶ files of changed buckets ─▶ one commit ─▶ published
                                        ╰──────────────────◀─────────────────────────────────╯

The table is all that counts. Every start takes the states from it and reads the log from where they end, with
a checkpoint that is thrown away: what was killed before its commit is read again, what was committed is not.
Where there is no table yet, or the log has forgotten what the lake has, the batch job runs first.
"""

import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.lake.format import LakeError, Positions
from headrace.lake.lock import Lock
from headrace.lake.manifests import HIDDEN
from headrace.lake.states import Covered, StatesFile, StatesTable, Totals
from headrace.pipeline import export_plan
from headrace.pipeline.aggregate import (
    APP,
    BUCKETS_MIN,
    Aggregate,
    Summary,
    check_named,
    list_lake,
    plan_of,
    publish_all,
    source_of,
)
from headrace.pipeline.aggregate_publish import Published
from headrace.pipeline.aggregate_stream_tasks import (
    MERGED_COLUMNS,
    PIECE_COLUMNS,
    RECORD_COLUMNS,
    STATE_COLUMNS,
    Folding,
    merging,
    pieces,
    states_of,
)
from headrace.pipeline.export_task import NotTheSameError
from headrace.pipeline.fold import Needs, here, load_reducer, needs_of
from headrace.pipeline.job_input import check_apart, make_writable, topics_of
from headrace.pipeline.points import Points
from headrace.pipeline.tasks import ServerAwayError, SparkRunner
from headrace.spark.http_client import ServerError
from headrace.spark.log_view import LogView
from headrace.spark.open_log import open_log
from headrace.spark.options import EARLIEST, OptionError, Place, SourceOptions, Topics, parse_place
from headrace.spark.planning import find_topics
from headrace.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint"
_POLL_S = 0.2
_READABLE_S = 600.0
"""How long files stay that are in the table no more: someone may be reading them."""

_ROWS_MAX = 20_000_000
"""Of a micro-batch. Spark gives 10,000 rows of a topic at once to a processor, and each is a piece of
thousands of records: so all of them are given at once, and can be put into order."""

_SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Else every micro-batch writes files of all that it has.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.minBatchesToRetain": "2",
}


def aggregate_stream(
    into: str | Path,
    topics: Iterable[str] = (),
    *,
    reducer: str,
    lake: str | Path = "",
    pattern: str = "",
    url: str = "",
    token: str = "",
    data_dir: str = "",
    publish: bool = False,
    every_s: float = 5.0,
    batch_bytes: int = 1 << 30,
    task_bytes: int = 64 << 20,
    master: str = "local[*]",
    stop: Callable[[], bool] = lambda: False,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> Summary:
    """Keep the table in `into` up to date with the states of topics, until `stop` says that it is enough.

    The log is asked at `url`, or read in `data_dir`; what it has forgotten is read in `lake`, where one is
    given. With `publish`, states of channels go to the server at `url` as snapshots, each time they change.
    """
    load_reducer(reducer, here())
    wanted = topics_of(topics, pattern)
    if not url and not data_dir:
        raise OptionError("say where the log is: give a server's address or a data directory")
    if publish and not url:
        raise OptionError("say where states are published: give a server's address")
    source = source_of(wanted, url, token, data_dir, task_bytes)
    told = parse_place(url, token) if publish else None
    directory = Path(into).absolute()
    given = _Given(
        *(directory, Path(lake).absolute() if lake else None, wanted, reducer, source, told),
        *(every_s, batch_bytes, points),
    )
    if given.lake is not None:
        check_apart(given.lake, directory)
    with closing(open_log(source.place)) as log:
        job = _Stream(given, log)
        job.look()
        with closing(SparkRunner("headrace aggregate", master)) as runner:
            runner.start()  # or nothing is written
            make_writable(directory)
            with Lock(directory / HIDDEN, "aggregate"):
                return job.run(runner, stop)


class _Given(NamedTuple):
    into: Path
    lake: Path | None
    topics: Topics
    reducer: str
    source: SourceOptions
    told: Place | None
    every_s: float
    batch_bytes: int
    points: Points


class _Found(NamedTuple):
    """What a start finds."""

    table: StatesTable | None
    at: Positions
    """Where topics go on behind their states."""
    is_behind: bool
    """Whether the lake may have something behind the states that the log has no more."""


class _Stream:
    def __init__(self, given: _Given, log: LogView) -> None:
        self._given, self._log = given, log
        self._number = 0
        self._buckets, self._files = 0, dict[int, list[str]]()
        self._over: deque[tuple[float, list[str]]] = deque()
        """Files that are in the table no more, and since when."""
        self._published: list[Published] = []
        self._busy = threading.Lock()
        self._ended = False
        self._failure: BaseException | None = None

    def run(self, runner: SparkRunner, stop: Callable[[], bool]) -> Summary:
        """Until it is enough. A server that is away is waited for, and then it begins anew."""
        while not stop():
            try:
                self._round(runner, stop)
                break
            except (ServerError, ServerAwayError) as error:
                if isinstance(error, ServerError) and not error.is_away:
                    raise
                logger.warning("%s; it is tried again until it answers", error)
                self._wait(stop)
        table = StatesTable.open(self._given.into)
        totals = table.totals() if table is not None else Totals(0, 0, 0, 0, "")
        return Summary(
            *(str(self._given.into), self._given.reducer, *totals),
            sum(one.published for one in self._published),
            sum(one.refused for one in self._published),
            next((one.first_refusal for one in self._published if one.first_refusal), ""),
        )

    def _wait(self, stop: Callable[[], bool]) -> None:
        while not stop():
            time.sleep(_POLL_S)
            try:
                find_topics(self._log, self._given.topics)
                return
            except ServerError as error:
                if not error.is_away:
                    raise

    def _round(self, runner: SparkRunner, stop: Callable[[], bool]) -> None:
        """A query, from the table on."""
        table, starts = self._begin(runner)
        self._buckets, self._files = table.buckets()
        self._buckets = self._buckets or BUCKETS_MIN
        self._number = (table.last(APP) or 0) + 1
        self._ended, self._failure = False, None
        checkpoint = self._given.into / HIDDEN / _CHECKPOINT
        shutil.rmtree(checkpoint, ignore_errors=True)
        with runner.sentences():
            query = self._start(runner, table, starts, checkpoint)
        try:
            with runner.sentences():
                while not stop() and query.isActive and self._failure is None:
                    time.sleep(_POLL_S)
                if failure := query.exception():
                    raise failure
        finally:
            with self._busy:  # what a micro-batch is doing is done first
                self._ended = True
            try:
                with runner.sentences():
                    query.stop()
            finally:
                shutil.rmtree(checkpoint, ignore_errors=True)
        if self._failure is not None:
            raise self._failure

    # How it begins

    def look(self) -> _Found:
        """What there is; raises for what this job cannot go on with. Changes nothing."""
        into, topics = self._given.into, self._given.topics
        table = StatesTable.open(into)
        covered = table.covered() if table is not None else Covered(set(), {})
        ends = list_lake(self._given.lake)[1] if self._given.lake is not None else {}
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
            # Those that are kept in memory only begin anew with their server.
            if name not in states or states[name].is_kept or states[name].end.epoch == at.epoch
        }
        gone = [name for name in known if name not in states]
        begin = export_plan.begin(self._log, states, known, gone, str(into))
        new = any(name not in covered.ends and topics.matches(name) for name in ends)
        return _Found(table, begin.at, bool(ends) and (bool(begin.lost) or new))

    def _begin(self, runner: SparkRunner) -> tuple[StatesTable, Positions]:
        """The table, and where the log goes on behind it."""
        given, found = self._given, self.look()
        if found.table is None or found.is_behind:
            plan = plan_of(given.lake, given.topics, given.source, given.source.partition_bytes)
            job = Aggregate(given.into, plan, given.topics, given.reducer, given.points, None)
            done = job.run(runner, given.told)
            self._published.append(Published(done.published, done.refused, done.first_refusal))
            found = self.look()
            assert found.table is not None
        else:
            found.table.sweep()
            # Whoever committed may have been killed before it published.
            self._publish(runner, [StatesFile(path, 0, rows) for path, rows in found.table.rows()])
        return found.table, found.at

    # The query

    def _start(
        self, runner: SparkRunner, table: StatesTable, starts: Positions, checkpoint: Path
    ) -> "StreamingQuery":
        session = runner.session().newSession()  # others may rely on the settings of theirs
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
                *(folding, f"bucket int, {STATE_COLUMNS}", "Update", "None"),
                self._states(session, table.files()).groupBy("topic"),
            )
            .writeStream.foreachBatch(partial(self._batch, runner, table))
            .outputMode("update")
            .option("checkpointLocation", str(checkpoint))
            .trigger(processingTime=f"{int(self._given.every_s * 1000)} milliseconds")
            .start()
        )

    def _records(self, session: "SparkSession", starts: Positions, parallel: int) -> "DataFrame":
        source, topics = self._given.source, self._given.topics
        place = source.place
        offsets = {"": EARLIEST} | {name: at.offset for name, at in starts.items()}
        options = {
            **({"path": place.path} if place.path else {"url": ",".join(place.urls)}),
            **({"token": place.token} if place.token else {}),
            "startingOffsets": json.dumps(offsets),
            "maxRowsPerTrigger": str(_ROWS_MAX),
            "maxBytesPerTrigger": str(self._given.batch_bytes),
            "maxBytesPerPartition": str(source.partition_bytes),
            "minPartitions": str(parallel),  # many topics take their time, however little they have
            # As the server folds: what is gone or damaged is left out, and seen by its ordinals.
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
        return numbers.mapInArrow(states_of(str(self._given.into), files), STATE_COLUMNS)

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
                # On its way through Spark it would become a page of text.
                self._failure = error
                self._ended = True

    def _commit(self, runner: SparkRunner, table: StatesTable, changed: "DataFrame") -> None:
        into, points = self._given.into, self._given.points
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
        self._published += publish_all(runner, self._given.told, self._given.into, files)

    def _forget(self, paths: list[str]) -> None:
        """Every micro-batch leaves as many files behind as it makes: a week of them would fill the disk."""
        now = time.monotonic()
        self._over.append((now, paths))
        while self._over[0][0] < now - _READABLE_S:
            for path in self._over.popleft()[1]:
                (self._given.into / path).unlink(missing_ok=True)


def _check_is_here(path: Path, size: int) -> None:
    if not path.exists() or path.stat().st_size != size:
        raise NotTheSameError(
            f"{path.parent} is another directory for Spark's executors than here: name one that all share"
        )
