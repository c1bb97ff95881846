"""The job `export`: copies topics into a lake table exactly once, in a loop of batches.

    plan ─▶ tasks write files ─▶ manifest ─▶ commit ─▶ verify ─▶ cursor

A batch that was killed before its commit does not count. A batch that was killed after its commit is verified
and reported to the server again. So the next start finds the last committed batch in the table, checks it
again, and continues after it. The table never names files of attempts that were not committed.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.lake.files.writing import WrittenFile
from headrace.lake.format import CRC_KEY, File, LakeError, LostRange, Manifest, Positions
from headrace.lake.manifests import HIDDEN, Manifests, Reach
from headrace.lake.table import AUTO, Lock, Table, find_table, make_table
from headrace.model import Span
from headrace.pipeline import tasks
from headrace.pipeline.cursors import LAKE, LAKE_START, JobCursors
from headrace.pipeline.decoding import shape_of
from headrace.pipeline.export import plan as export_plan
from headrace.pipeline.export.input import source_options
from headrace.pipeline.export.plan import Begin, ExportPlan
from headrace.pipeline.export.task import ExportWork, Probe, probe, write_part
from headrace.pipeline.job_input import make_writable
from headrace.pipeline.kill_points import Points
from headrace.pipeline.tasks import JobError, ServerAwayError, SparkRunner, TaskRunner
from headrace.printing import quoted
from headrace.reader.http_client import ServerError
from headrace.reader.planning import SourceOptions, TopicSelection, find_topics
from headrace.reader.view import LogLocation, LogView, TopicState, open_log, parse_place

APP = "headrace-export"
"""Application ID in the table's commits, which number the batches."""

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


Progress = Callable[[int, int], None]
"""Called with the number of bytes of the log that are done, and with their total."""


def export(
    lake: str | Path,
    topics: Iterable[str] = (),
    *,
    pattern: str = "",
    url: str = "",
    token: str = "",
    data_dir: str = "",
    by_topic: bool | None = None,
    decode: str = "",
    schema: str = "",
    format: str = AUTO,  # noqa: A002 - what users call it
    once: bool = True,
    every_s: float = 5.0,
    batch_bytes: int = 1 << 30,
    part_bytes: int = 64 << 20,
    skip_lost: bool = False,
    take_over: bool = False,
    master: str = "local[*]",
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    runner: TaskRunner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> ExportSummary:
    """Bring a lake up to date with topics; without `once`, keep it up to date until `stop` returns True.

    The log is read from the server at `url` or in `data_dir`. With both, it is read in `data_dir`, and the
    server at `url` is told how far the lake is. Without topics and a pattern, all topics are exported.
    `decode` names the kind of payloads (json, logux, channel); the columns of `schema` are then decoded from
    them. An existing lake keeps its decoded columns, its `format` and its partitions. The server knows one
    lake for each topic: `take_over` makes it this one.
    """
    wanted = tuple(topics)
    source = source_options(
        wanted,
        pattern,
        {"path": data_dir} if data_dir else {"url": url, "token": token},
        batch_bytes=batch_bytes,
        part_bytes=part_bytes,
        skip_lost=skip_lost,
    )
    shape = shape_of(decode, schema, by_topic=bool(by_topic))
    told = parse_place(url, token) if url else None
    directory = Path(lake).absolute()
    find = partial(find_table, directory, format, shape, any_partition=by_topic is None)
    table = find()
    manifests = Manifests(directory)
    with closing(open_log(source.place)) as log:
        states = export_plan.find_kept(log, source.topics)
        last = table.last(APP) if table is not None else None
        reach = manifests.reach(last)
        for name in wanted:
            if name not in states and name not in reach.ends:
                raise JobError(f"there is no topic {name!r} to export")
        if once and pattern and not states and not any(map(source.topics.matches, reach.ends)):
            raise JobError(f"no topic matches {pattern!r}")
        check = partial(_check_cursors, None if take_over else told, directory, states.keys())
        runner = runner or SparkRunner("headrace export", master)
        with closing(runner):
            if table is None:
                check(reach.ends)  # before anything is written
                runner.start()
                # Starting Spark takes time, and short-lived topics may have come and gone meanwhile.
                states |= export_plan.find_kept(log, source.topics)
            make_writable(directory)
            with Lock(directory / HIDDEN, "export"):
                # The previous holder of the lock may have committed more batches.
                table = find() or make_table(directory, format, shape)
                if (now := table.last(APP)) != last:
                    last, reach = now, manifests.reach(now)
                job = _Export(
                    lake=directory,
                    source=source,
                    log=log,
                    table=table,
                    manifests=manifests,
                    reach=reach,
                    told=told,
                    runner=runner,
                    progress=progress,
                    points=points,
                )
                with closing(job):
                    job.check_last(last)
                    check(reach.ends)
                    if once:
                        job.run_once(states, stop)
                    else:
                        job.run_on(every_s, stop)
                    return job.summary


def _check_cursors(
    told: LogLocation | None, lake: Path, names: Collection[str], ends: Positions
) -> None:
    """Raise LakeError if the server's cursors are those of another lake.

    Two lakes would move the same cursor, and the log would delete records that only one of them has.
    """
    if told is None:
        return
    with closing(JobCursors(told)) as cursors:
        starts = cursors.read(LAKE_START)
        for name, at in cursors.read(LAKE).items():
            known = ends.get(name, starts.get(name, at))
            if at.offset > known.offset and name in names:
                has = f"up to {known.offset}" if name in ends else "not at all"
                raise LakeError(
                    f"the server was told of a lake that has topic {name!r} up to offset {at.offset}; {lake} "
                    f"has it {has}: it is another one, or an older copy. Keep one lake for a topic, or let "
                    "retention wait for this one from now on with --take-over"
                )


class _Export:
    def __init__(
        self,
        lake: Path,
        source: SourceOptions,
        log: LogView,
        table: Table,
        manifests: Manifests,
        reach: Reach,
        told: LogLocation | None,
        runner: TaskRunner,
        progress: Progress | None,
        points: Points,
    ) -> None:
        self._lake, self._source, self._log = lake, source, log
        self._table, self._manifests = table, manifests
        self._runner, self._progress, self._points = runner, progress, points
        self._starts, self._ends = reach
        self._skip_lost = not source.verify
        self._cursors = JobCursors(told) if told is not None else None
        self._over: set[str] = set()
        """Topics that are gone and need nothing more."""
        self._gone: set[str] = set()
        """Topics that were found gone in this round."""
        self._ended_meanwhile: set[str] = set()
        """Topics that ended while this batch was written; they may have lost more records than planned."""
        self._warned_s = -_SAID_EVERY_S
        self._probed = False
        self._number = 0
        """Number of the next batch."""
        self._total = 0
        """Number of the log's bytes that are exported or known to follow."""
        self._batches = self._records = self._bytes = self._files = self._lost = 0
        self._topics: set[str] = set()

    @property
    def summary(self) -> ExportSummary:
        return ExportSummary(
            lake=str(self._lake),
            batches=self._batches,
            records=self._records,
            bytes=self._bytes,
            topics=len(self._topics),
            files=self._files,
            lost=self._lost,
            told=self._cursors is not None,
        )

    def close(self) -> None:
        if self._cursors is not None:
            self._cursors.close()

    # The loop

    def run_once(self, until: dict[str, TopicState], stop: Callable[[], bool]) -> None:
        """Export up to the ends in `until`, in as many batches as needed."""
        while not stop() and self._round(until):
            pass

    def run_on(self, every_s: float, stop: Callable[[], bool]) -> None:
        """Export until `stop` returns True. If the server is away, for example to restart, wait for it."""
        logger.info("keeping %s up to date, a batch every %g s", self._lake, every_s)
        is_away, said_s = False, time.monotonic()
        while not stop():
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
                    logger.warning("the server is tried again until it answers: %s", error)
                is_away = True
            while time.monotonic() < begun_s + every_s and not stop():
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
            self._cursors.tell(LAKE_START, {name: self._starts[name] for name in ends})
            self._cursors.tell(LAKE, ends)

    # One batch

    def _batch(self, plan: ExportPlan) -> None:
        number = self._number
        self._points.here("planned")
        self._probe()
        works = [
            ExportWork(
                place=self._source.place,
                lake=str(self._lake),
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
        results = self._runner.run(works, write_part, self._told(plan))
        files = [one for some in results for one in some]
        self._points.here("written")
        manifest = self._manifest(number, plan, files)
        self._manifests.write(manifest)
        self._points.here("noted")
        if not self._table.commit(APP, number, files, {CRC_KEY: str(manifest.crc)}):
            raise LakeError(
                f"another export writes to {self._lake}: it has committed batch {number}"
            )
        self._points.here("committed")
        self._verify(manifest, files)
        self._points.here("verified")
        # From here on the batch counts, even if the server cannot be told now.
        self._number += 1
        self._ends |= plan.end
        self._count(plan, manifest)
        gone = self._over | self._gone | self._ended_meanwhile
        self._tell({name: at for name, at in plan.end.items() if name not in gone})
        self._points.here("moved")

    def _told(self, plan: ExportPlan) -> tasks.Progress | None:
        if self._progress is None:
            return None
        return partial(_tell, self._progress, self._bytes, plan.bytes, self._total)

    def _probe(self) -> None:
        """Check that executors see the lake before anything is written: they may be on other machines."""
        if self._probed:
            return
        made = self._lake / HIDDEN / f"probe-{uuid.uuid4().hex}"
        made.touch()
        try:
            self._runner.run([Probe(str(self._lake), made.name)], probe)
        finally:
            made.unlink(missing_ok=True)
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
        return Manifest(
            number=number,
            start=plan.start,
            end=plan.end,
            files=tuple(File(one.path, one.bytes, one.rows) for one in files),
            ranges=tuple(ranges),
            lost=(*plan.lost, *lost),
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
        raise JobError(f"tasks have not written what was planned: {kept[0]}")

    def _verify(self, manifest: Manifest, files: list[WrittenFile]) -> None:
        """Check that the commit is what was written and is on disk: only then may the log delete it."""
        live = self._table.files()
        for one in files:
            # A file that is not live was already compacted, and the compaction has checked it.
            if live.get(one.path, one.bytes) != one.bytes:
                raise LakeError(
                    f"{self._lake / one.path} has another size in the table than on disk"
                )
            if one.path in live:
                _check_size(self._lake / one.path, one.bytes)
        noted = (self._table.notes(manifest.number) or {}).get(CRC_KEY)
        if noted != str(manifest.crc):
            raise LakeError(
                f"batch {manifest.number} of {self._lake} was committed by someone else"
            )
        if self._manifests.read(manifest.number) != manifest:
            # An export on another machine has overwritten our manifest, but lost the race for the commit.
            self._manifests.write(manifest)

    def check_last(self, last: int | None) -> None:
        """Check the last batch again: its export may have been killed between commit and check."""
        if last is None:
            return
        self._number = last + 1
        manifest = self._manifests.read(last)
        noted = (self._table.notes(last) or {}).get(CRC_KEY)
        if noted is not None and noted != str(manifest.crc):
            raise LakeError(
                f"{self._lake}: what is noted of batch {last} is not what was committed; two exports wrote "
                "to it at the same time: export to a new directory"
            )
        live = self._table.files()
        for one in manifest.files:
            if one.path in live:
                _check_size(self._lake / one.path, one.bytes)
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
            "%d records so far were gone before they could be exported, such as those of topic %s: "
            'with retention.wait_for = ["lake"] the log waits for the lake, also with topics that end',
            self._lost,
            quoted(topic),
        )


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise LakeError(f"{path} is missing, which the table names: restore it") from None
    if found != size:
        raise LakeError(f"{path} has {found} bytes instead of {size}: restore it")


def _tell(progress: Progress, done: int, batch: int, total: int, part: float) -> None:
    progress(min(total, done + int(batch * part)), total)
