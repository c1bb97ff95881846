"""The job `export`: copies topics into a lake table exactly once, in a loop of batches.

    plan ─▶ tasks write files ─▶ manifest ─▶ commit ─▶ verify ─▶ cursor

A batch that was killed before its commit does not count. A batch that was killed after its commit is verified
and reported to the server again. So the next start finds the last committed batch in the table, checks it
again, and continues after it. The table never names files of attempts that were not committed.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from headrace.config.pipeline import ExportOptions
from headrace.lake.files.writing import WrittenFile
from headrace.lake.format import Committed, File, LakeError, LostRange, Manifest, Positions
from headrace.lake.manifests import Manifests, Reach
from headrace.lake.storage.storage import LakeFile, Storage, storage_of
from headrace.lake.table import Table, find_table, make_table
from headrace.model import LAKE_READER, LAKE_START_READER, Position, Span
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.export.plan import Begin, ExportPlan
from headrace.pipeline.export.task import ExportWork, check_shared, shape_of, write_part
from headrace.pipeline.job import (
    EXPORT_APP,
    JobArguments,
    job,
    part_of,
    place_of,
    source_of,
    topics_of,
)
from headrace.pipeline.tasks import JobError, ServerAwayError, TaskRunner
from headrace.printing import quoted
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.planning import SourceOptions, TopicSelection, find_topics
from headrace.reader.view import LogLocation, LogView, TopicState, open_log

logger = logging.getLogger(__name__)

_WAIT_S = 0.5
_POLL_S = 0.1
_SAID_EVERY_S = 60.0


class ExportSummary(NamedTuple):
    """Result of an export."""

    lake: str
    batches: int
    records: int
    bytes: int
    topics: int
    files: int
    lost: int
    """Number of records lost before they could be exported: of ended topics, or with `skip_lost`."""
    told: bool
    """True if the server knows how far the lake is."""


@dataclass(frozen=True)
class ExportArguments(ExportOptions, JobArguments):
    stop: Callable[[], bool] = field(default=lambda: False, kw_only=True)


@job(ExportArguments)
def export(given: ExportArguments) -> ExportSummary:
    """Bring a lake up to date with topics; without `once`, keep it up to date until `stop` returns True.

    The log is read from the server at `url` or in `data_dir`. With both, it is read in `data_dir`, and the
    server at `url` is told how far the lake is. Without topics and a pattern, all topics are exported.
    `decode` names the kind of payloads (json, logux, channel); the columns of `schema` are then decoded from
    them. An existing lake keeps its decoded columns, its `format` and its partitions. The server knows one
    lake for each topic: `take_over` makes it this one.
    """
    wanted = topics_of(given.topics, given.pattern)
    source = source_of(
        wanted,
        given,
        data_dir=given.data_dir,
        task_bytes=given.part_bytes,
        batch_bytes=given.batch_bytes,
    )._replace(verify=not given.skip_lost)
    shape = shape_of(given.decode, given.schema, by_topic=bool(given.by_topic))
    told = place_of(given) if given.url else None
    storage = storage_of(given.lake, given.storage_options, given.catalog_options)
    find = partial(find_table, storage, given.format, shape, any_partition=given.by_topic is None)
    table = find()
    manifests = Manifests(storage)
    with closing(open_log(source.place)) as log:
        states = export_plan.find_kept(log, wanted)
        last = table.last(EXPORT_APP) if table is not None else None
        reach = manifests.reach(last)
        for name in wanted.names or ():
            if name not in states and name not in reach.ends:
                raise JobError(f"there is no topic {name!r} to export")
        if given.once and given.pattern and not (states or any(map(wanted.matches, reach.ends))):
            raise JobError(f"no topic matches {given.pattern!r}")
        check = partial(
            _check_cursors, None if given.take_over else told, storage.address, states.keys()
        )
        with closing(given.task_runner("export")) as runner:
            if table is None:
                check(reach.ends)  # before anything is written
                runner.start()
                # Starting Spark takes time, and short-lived topics may have come and gone meanwhile.
                states |= export_plan.find_kept(log, wanted)
            storage.prepare()
            with storage.lock("export"):
                # The previous holder of the lock may have committed more batches.
                table = find() or make_table(storage, given.format, shape)
                if (now := table.last(EXPORT_APP)) != last:
                    last, reach = now, manifests.reach(now)
                cursors = JobCursors(told) if told is not None else None
                with closing(cursors) if cursors is not None else nullcontext():
                    batches = _Export(
                        given=given,
                        storage=storage,
                        source=source,
                        log=log,
                        table=table,
                        manifests=manifests,
                        reach=reach,
                        cursors=cursors,
                        runner=runner,
                    )
                    batches.check_last(last)
                    check(reach.ends)
                    if given.once:
                        batches.run_once(states)
                    else:
                        batches.run_on(given.every_s)
                    return batches.summary


def _check_cursors(
    told: LogLocation | None, lake: str, names: Collection[str], ends: Positions
) -> None:
    """Raise LakeError if the server's cursors are those of another lake.

    Two lakes would move the same cursor, and the log would delete records that only one of them has.
    """
    if told is None:
        return
    with closing(JobCursors(told)) as cursors:
        starts = cursors.read(LAKE_START_READER)
        for name, at in cursors.read(LAKE_READER).items():
            known = ends.get(name, starts.get(name, at))
            if at.offset > known.offset and name in names:
                has = f"up to {known.offset}" if name in ends else "not at all"
                raise LakeError(
                    f"the server knows a lake that has topic {name!r} up to offset {at.offset}, but {lake} "
                    f"has it {has}: this is another lake, or an older copy. Use one lake per topic, or make "
                    "this the lake that retention waits for with --take-over"
                )


class _Export:
    def __init__(
        self,
        given: ExportArguments,
        storage: Storage,
        source: SourceOptions,
        log: LogView,
        table: Table,
        manifests: Manifests,
        reach: Reach,
        cursors: "JobCursors | None",
        runner: TaskRunner,
    ) -> None:
        self._storage, self._source, self._log = storage, source, log
        self._table, self._manifests, self._cursors = table, manifests, cursors
        self._runner, self._progress, self._points = runner, given.progress, given.points
        self._stop, self._skip_lost = given.stop, given.skip_lost
        self._starts, self._ends = reach
        self._over: set[str] = set()
        """Topics that are gone and need nothing more."""
        self._gone: set[str] = set()
        """Topics that were found gone in this round."""
        self._ended_meanwhile: set[str] = set()
        """Topics that ended while this batch was written; they may have lost more records than planned."""
        self._warned_s = -_SAID_EVERY_S
        self._probed = False
        self._last: Committed | None = None
        """The last batch."""
        self._total = 0
        """Number of the log's bytes that are exported or known to follow."""
        self._batches = self._records = self._bytes = self._files = self._lost = 0
        self._topics: set[str] = set()

    @property
    def summary(self) -> ExportSummary:
        return ExportSummary(
            lake=self._storage.address,
            batches=self._batches,
            records=self._records,
            bytes=self._bytes,
            topics=len(self._topics),
            files=self._files,
            lost=self._lost,
            told=self._cursors is not None,
        )

    # The loop

    def run_once(self, until: dict[str, TopicState]) -> None:
        """Export up to the ends in `until`, in as many batches as needed."""
        while not self._stop() and self._round(until):
            pass

    def run_on(self, every_s: float) -> None:
        """Export until `stop` returns True. If the server is away, for example to restart, wait for it."""
        logger.info(
            "keeping %s up to date, with a batch every %g s", self._storage.address, every_s
        )
        is_away, said_s = False, time.monotonic()
        while not self._stop():
            begun_s = time.monotonic()
            try:
                has_more = self._round()
                if is_away:
                    logger.warning("the server is back")
                is_away = False
                if begun_s > said_s + _SAID_EVERY_S:
                    logger.info("%d records in %d batches so far", self._records, self._batches)
                    said_s = begun_s
                if not has_more:
                    self._log.wait(_WAIT_S)
                    continue
            except (ServerError, ServerAwayError) as error:
                if isinstance(error, ServerError) and not error.is_away:
                    raise
                if not is_away:
                    logger.warning(
                        "the server does not answer, retrying until it answers: %s", error
                    )
                is_away = True
            while time.monotonic() < begun_s + every_s and not self._stop():
                time.sleep(_POLL_S)

    def _round(self, until: dict[str, TopicState] | None = None) -> bool:
        """Export the next batch; return False if there is nothing to export."""
        now = export_plan.find_kept(self._log, self._source.topics)
        self._count_ended(until or {}, now)
        states = export_plan.until(now, until, self._ends) if until is not None else now
        found = self._begin(states, now)
        left = sum(Span.between(found.at[name], state.end).bytes for name, state in states.items())
        self._total = max(self._total, self._bytes + left)
        plan = export_plan.plan_batch(
            log=self._log, states=states, found=found, known=self._ends, options=self._source
        )
        if plan.end:
            self._batch(plan)
        self._over |= self._gone
        return bool(plan.end)

    def _count_ended(self, until: dict[str, TopicState], now: dict[str, TopicState]) -> None:
        """Count topics as lost that ended before any of their records was exported."""
        ended = until.keys() - now.keys() - self._ends.keys() - self._over
        lost = [one for name in sorted(ended) for one in export_plan.whole(until[name])]
        self._over |= ended
        if lost:
            self._lost += sum(one.end_ordinal - one.ordinal for one in lost)
            self._warn(lost[0].topic)

    def _begin(self, states: dict[str, TopicState], now: dict[str, TopicState]) -> Begin:
        self._over -= states.keys()
        gone = [
            name
            for name in self._ends
            if name not in now and name not in self._over and self._source.topics.matches(name)
        ]
        found = export_plan.begin(self._log, states, self._ends, gone)
        self._gone = set(gone)
        ended = export_plan.made_anew(now, self._ends) | found.over.keys()
        lost = export_plan.not_over(found.lost, ended)
        if lost and not self._skip_lost:
            raise LakeError(export_plan.lost_sentence(lost))
        if any(found.at[name].ordinal < state.end.ordinal for name, state in states.items()):
            self._runner.start()  # a failure here happens before the server's cursors move
        # Move the cursors first: from now on, retention waits for topics that are new to the lake. Such a
        # topic may also have ended before any of its records was exported, and begun again since.
        self._starts |= {name: at for name, at in found.at.items() if name not in self._ends}
        self._tell({name: self._ends.get(name, at) for name, at in found.at.items()})
        return found

    def _tell(self, ends: Positions) -> None:
        if self._cursors is not None:
            self._cursors.tell(LAKE_START_READER, {name: self._starts[name] for name in ends})
            self._cursors.tell(LAKE_READER, ends)

    # One batch

    def _batch(self, plan: ExportPlan) -> None:
        number = 0 if self._last is None else self._last.number + 1
        self._points.here("planned")
        self._probe()
        works = [
            ExportWork(
                place=self._source.place,
                storage=self._storage,
                number=number,
                task=task,
                ranges=part,
                shape=self._table.shape,
                layout=self._table.layout,
                verify=self._source.verify,
                points=self._points,
            )
            for task, part in enumerate(plan.parts)
        ]
        progress = part_of(self._progress, done=self._bytes, size=plan.bytes, total=self._total)
        results = self._runner.run(works, write_part, progress)
        files = [one for some in results for one in some]
        self._points.here("written")
        manifest = self._manifest(number, plan, files)
        written = self._manifests.write(manifest)
        self._points.here("noted")
        if not self._table.commit(EXPORT_APP, number, files, manifest.crc):
            raise LakeError(
                f"another export writes to {self._storage.address}: it has committed batch {number}"
            )
        self._points.here("committed")
        self._verify(written, files)
        self._points.here("verified")
        # From here on the batch counts, even if the server cannot be told now.
        self._last = written
        self._ends |= plan.end
        self._count(plan, manifest)
        gone = self._over | self._gone | self._ended_meanwhile
        self._tell({name: at for name, at in plan.end.items() if name not in gone})
        self._points.here("moved")

    def _probe(self) -> None:
        """Check that executors see the lake before anything is written: they may be on other machines."""
        if self._probed:
            return
        check_shared(self._storage, self._runner)
        self._probed = True

    def _manifest(self, number: int, plan: ExportPlan, files: list[WrittenFile]) -> Manifest:
        ranges = [
            one._replace(file=place) for place, file in enumerate(files) for one in file.ranges
        ]
        in_order = sorted(ranges, key=lambda one: (one.topic, one.offset))
        lost = export_plan.missing(plan.ranges, in_order)
        self._ended_meanwhile.clear()
        if lost:
            self._check_missing(plan, lost)
        before = self._manifests.predecessors(self._last)
        return Manifest(
            number=number,
            start=plan.start,
            end=plan.end,
            files=tuple(File(one.path, one.bytes, one.rows) for one in files),
            ranges=tuple(ranges),
            lost=(*plan.lost, *lost),
            merged=before.merged,
            since=before.since,
        )

    def _check_missing(self, plan: ExportPlan, lost: Sequence[LostRange]) -> None:
        """Raise if records are missing, except of ended topics, of channels, or with `skip_lost`."""
        now = find_topics(self._log, TopicSelection(tuple({one.topic for one in lost})))
        self._ended_meanwhile = {one.topic for one in lost if one.topic not in now}
        kept = export_plan.not_over(lost, export_plan.ended_since(lost, plan.end, now))
        if not kept or self._skip_lost:
            return
        gone = [one for one in kept if one.ordinal < now[one.topic].start.ordinal]
        if gone:
            raise LakeError(export_plan.lost_sentence(gone))
        raise JobError(f"tasks have not written all planned records: {kept[0]}")

    def _verify(self, written: Committed, files: list[WrittenFile]) -> None:
        """Check that the commit is what was written and is on disk: only then may the log delete it."""
        last = self._table.last(EXPORT_APP)
        if last is None or last.number < written.number:
            raise LakeError(
                f"{self._storage.address} no longer has batch {written.number}, which was just committed"
            )
        live = self._table.files()
        for one in files:
            # A file that is not live was already compacted, and the compaction has checked it.
            if live.get(one.path, one.bytes) != one.bytes:
                raise LakeError(
                    f"{self._storage.file(one.path)} has another size on disk than in the table"
                )
            if one.path in live:
                _check_size(self._storage.file(one.path), one.bytes)

    def check_last(self, last: Committed | None) -> None:
        """Check the last batch again: its export may have been killed between commit and check."""
        self._last = last
        if last is None:
            return
        live = self._table.files()
        for one in self._manifests.read(last).files:
            if one.path in live:
                _check_size(self._storage.file(one.path), one.bytes)
        self._table.sync()

    def _count(self, plan: ExportPlan, manifest: Manifest) -> None:
        self._batches += 1
        self._records += sum(one.rows for one in manifest.ranges)
        self._bytes += plan.bytes
        self._files += len(manifest.files)
        self._topics |= plan.end.keys()
        lost = sum(one.end_ordinal - one.ordinal for one in manifest.lost)
        if lost:
            self._lost += lost
            self._warn(manifest.lost[0].topic)

    def _warn(self, topic: str) -> None:
        """Warn of lost records, but not for every batch: with short-lived topics, each may lose some."""
        now_s = time.monotonic()
        if now_s < self._warned_s + _SAID_EVERY_S:
            return
        self._warned_s = now_s
        logger.warning(
            "%d records so far were deleted before they could be exported, for example of topic %s: "
            'with retention.wait_for = ["lake"] the log keeps records until the lake has them',
            self._lost,
            quoted(topic),
        )


def _check_size(file: LakeFile, size: int) -> None:
    try:
        found = file.size()
    except FileNotFoundError:
        raise LakeError(f"{file} is missing, but the table names it: restore it") from None
    if found != size:
        raise LakeError(f"{file} has {found} bytes instead of {size}: restore it")


_POSITIONS_AT_ONCE = 1000


class JobCursors:
    """Cursors of the lake on the server, which tell its retention how far the lake has come.

    Sends only positions that have changed since it sent them last.
    """

    def __init__(self, place: LogLocation) -> None:
        self._http = HttpClient(place)
        self._told: dict[str, Positions] = {}

    def tell(self, reader: str, positions: Positions) -> None:
        """Move a reader's cursors. They are durable on the server when this returns."""
        told = self._told.setdefault(reader, {})
        new = [(name, at) for name, at in positions.items() if told.get(name) != at]
        for first in range(0, len(new), _POSITIONS_AT_ONCE):
            some = new[first : first + _POSITIONS_AT_ONCE]
            places = [{"topic": name, **at._asdict()} for name, at in some]
            self._http.json("POST", "/v1/cursors", {}, {"reader": reader, "positions": places})
            told.update(some)

    def read(self, reader: str) -> Positions:
        """Return a reader's cursors on the server, whoever moved them."""
        found: Positions = {}
        after = ""
        while True:
            asked = {"reader": reader, "after": after, "limit": _POSITIONS_AT_ONCE}
            page = self._http.json("GET", "/v1/cursors", asked)
            for one in page["cursors"]:
                found[one["topic"]] = Position(one["epoch"], one["offset"], one["ordinal"])
                after = one["topic"]
            if not page["more"]:
                return found

    def close(self) -> None:
        self._http.close()
