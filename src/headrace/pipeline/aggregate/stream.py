"""The job `aggregate` as a loop of rounds, which keeps a table of states up to date.

    table ─▶ new records of the log ─▶ files of changed buckets ─▶ one commit ─▶ publish
                      ╰──────────────────────◀────────────────────────────────────╯

Every round is one Spark job: tasks read the new records, and fold them onto the states in the table's files.
This is not a streaming query of Spark, because only the table counts: a query's checkpoint and state store
would be thrown away at every start. They need a directory that all machines share and that Spark itself can
reach, which a lake in object storage does not offer. And over Spark Connect, a query would commit in another
process than this one.

Every start takes the positions from the table and reads the log from there. So records of a round that was
killed before its commit are read again, and committed records are not. The batch job runs first if the table
does not exist yet, or if the log no longer has records that the lake has.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

from headrace.lake.format import LakeError, LostRange, Positions
from headrace.lake.states import Buckets, Covered, StatesFile, StatesTable, Totals
from headrace.pipeline.aggregate.job import (
    APP,
    BUCKETS_MIN,
    AggregateStreamArguments,
    AggregateSummary,
    Aggregation,
    check_named,
    lake_of,
    log_of,
)
from headrace.pipeline.aggregate.tasks import FoldInput
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.export.plan import States
from headrace.pipeline.job import job, list_lake
from headrace.pipeline.tasks import ServerAwayError, TaskRunner
from headrace.reader.http_client import ServerError
from headrace.reader.planning import (
    SourceOptions,
    find_topics,
    limit_bytes,
    parts_of,
    ranges_between,
)
from headrace.reader.view import LogRange, LogView, open_log

logger = logging.getLogger(__name__)

_WAIT_S = 0.5
_POLL_S = 0.1

_READABLE_S = 600.0
"""Seconds before files that are no longer in the table are deleted, as they may still be read."""


@job(AggregateStreamArguments)
def aggregate_stream(given: AggregateStreamArguments) -> AggregateSummary:
    """Keep the table in `into` up to date with the states of topics, until `stop` returns True.

    The log is read from the server at `url` or in `data_dir`. Records that the log no longer has are read
    from `lake`, if it is given. With `publish`, states of channels are sent to the server at `url` as
    snapshots each time they change.
    """
    source = log_of(given)
    whole = Aggregation(given, lake_of(given) if given.lake else None, source)
    with closing(open_log(source.place)) as log:
        stream = _Stream(given, whole, source, log)
        stream.look()
        with whole.writing() as runner:
            return stream.run(runner)


class _Found(NamedTuple):
    """Situation at a start."""

    table: StatesTable | None
    at: Positions
    """Positions where topics continue after their states."""
    is_behind: bool
    """True if the lake has records after the states that the log no longer has."""


class _Stream:
    def __init__(
        self,
        given: AggregateStreamArguments,
        whole: Aggregation,
        source: SourceOptions,
        log: LogView,
    ) -> None:
        self._given, self._whole, self._source, self._log = given, whole, source, log
        self._topics, self._into = whole.topics, whole.into
        self._table: StatesTable | None = None
        """The table, if the fields below are valid; None before a start."""
        self._at: Positions = {}
        self._number = 0
        self._buckets, self._files = 0, dict[int, list[str]]()
        self._over: deque[tuple[float, list[str]]] = deque()
        """Files that are no longer in the table, and the time of their removal."""

    def run(self, runner: TaskRunner) -> AggregateSummary:
        """Run until `stop` returns True. If the server is away, wait for it and start again."""
        is_away = False
        while not self._given.stop():
            begun_s = time.monotonic()
            pause_s = self._given.every_s
            try:
                table = self._table or self._begin(runner)
                has_more = self._round(runner, table)
                is_away = False
                if not has_more:
                    self._log.wait(_WAIT_S)
                    continue
            except (ServerError, ServerAwayError) as error:
                if isinstance(error, ServerError) and not error.is_away:
                    raise
                if not is_away:
                    logger.warning("%s; retrying until the server answers", error)
                is_away, self._table = True, None
                pause_s = max(pause_s, _WAIT_S)
            while time.monotonic() < begun_s + pause_s and not self._given.stop():
                time.sleep(_POLL_S)
        left = StatesTable.open(self._into)
        return self._whole.summary(left.totals() if left is not None else Totals())

    # Start

    def look(self) -> _Found:
        """Return the situation; raise if this job cannot continue from it. Changes nothing."""
        into, topics = self._into.address, self._topics
        table = StatesTable.open(self._into)
        covered = table.covered() if table is not None else Covered(set(), {})
        ends = self._lake_ends()
        states = find_topics(self._log, topics)
        check_named(topics, states.keys() | ends.keys() | covered.ends.keys())
        anew = "name another directory, or run it without --stream first, which replaces them"
        for name in covered.reducers - {self._given.reducer}:
            raise LakeError(f"{into} has states of the reducer {name!r}: {anew}")
        for name in covered.ends:
            if not topics.matches(name):
                raise LakeError(f"{into} has states of other topics too, such as {name!r}: {anew}")
        known = _continued(covered.ends, states)
        gone = [name for name in known if name not in states]
        begin = export_plan.begin(log=self._log, states=states, known=known, gone=gone, table=into)
        new = any(name not in covered.ends and topics.matches(name) for name in ends)
        return _Found(table, covered.ends | begin.at, new or _has_lost(ends, begin.lost))

    def _lake_ends(self) -> Positions:
        return list_lake(self._whole.lake)[1] if self._whole.lake is not None else {}

    def _begin(self, runner: TaskRunner) -> StatesTable:
        """Take everything from the table, which is first made if it is missing or behind the lake."""
        found = self.look()
        if found.table is None or found.is_behind:
            self._whole.replace(runner, self._whole.plan())
            found = self.look()
            assert found.table is not None
        else:
            found.table.sweep()
            # An earlier run may have been killed after its commit and before it published.
            files = [StatesFile(path, 0, rows) for path, rows in found.table.rows()]
            self._whole.publish(runner, files)
        self._at = found.at
        self._buckets, self._files = found.table.buckets()
        self._buckets = self._buckets or BUCKETS_MIN
        self._number = (found.table.last(APP) or 0) + 1
        self._table = found.table
        return found.table

    # One round

    def _round(self, runner: TaskRunner, table: StatesTable) -> bool:
        """Fold the next records of the log; return False if there are none."""
        states = find_topics(self._log, self._topics)
        known = _continued(self._at, states)
        begin = export_plan.begin(self._log, states, known, (), table=self._into.address)
        if begin.lost and _has_lost(self._lake_ends(), begin.lost):
            self._table = None  # the next start reads the lake first
            return True
        self._at |= begin.at
        ends = limit_bytes(self._log, begin.at, states, self._given.batch_bytes)
        ranges = ranges_between(begin.at, ends)
        if ranges:
            self._fold(runner, table, states, ranges)
            self._at |= {one.topic: one.end for one in ranges}
        return bool(ranges)

    def _fold(
        self, runner: TaskRunner, table: StatesTable, states: States, ranges: Sequence[LogRange]
    ) -> None:
        here = self._given.points.here
        inputs = [
            FoldInput(
                ranges=part, memory={one.topic for one in part if not states[one.topic].is_kept}
            )
            for part in parts_of(self._log, ranges, self._source)
        ]
        buckets = Buckets.of(self._buckets, (one.topic for one in ranges))
        old = {one: self._files[one] for one in buckets.changed if one in self._files}
        folded = self._whole.fold(runner, inputs, buckets, self._number, old)
        if not folded:
            return
        here("merged")
        replaced = [path for one in folded for path in old.get(one.bucket, ())]
        if not table.update(APP, self._number, [one.file for one in folded], replaced):
            raise self._whole.already_committed(self._number)
        here("committed")
        self._number += 1
        self._files |= {one.bucket: [one.file.path] for one in folded}
        self._forget(replaced)
        changed = [one.file._replace(rows=one.changed.topics) for one in folded]
        self._whole.publish(runner, changed)
        here("done")

    def _forget(self, paths: list[str]) -> None:
        """Delete replaced files after a delay.

        Every round replaces as many files as it writes: within a week they would fill the disk.
        """
        now = time.monotonic()
        self._over.append((now, paths))
        while self._over[0][0] < now - _READABLE_S:
            self._into.delete(self._over.popleft()[1])


def _continued(known: Positions, states: States) -> Positions:
    """Return the positions without topics of durability memory that have begun anew, with a new epoch."""
    return {
        name: at
        for name, at in known.items()
        if name not in states or states[name].is_kept or states[name].end.epoch == at.epoch
    }


def _has_lost(ends: Positions, lost: Iterable[LostRange]) -> bool:
    """True if a lake with these ends has records of what the log has lost."""
    return any(one.topic in ends and ends[one.topic].ordinal > one.ordinal for one in lost)
