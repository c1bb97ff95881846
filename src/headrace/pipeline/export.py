"""Topics → a lake table, exactly once: the loop of batches, and what happens to each in which order.

    plan ─▶ tasks write files ─▶ manifest ─▶ commit ─▶ verify ─▶ cursor

What was killed before its commit does not count; what was killed behind it is verified and told again. So the
next start finds the last committed batch in the table, looks at it once more, and goes on behind it. Files of
attempts that were not committed are named by nobody.
"""

import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.lake.format import File, LakeError, Manifest, Positions
from headrace.lake.lock import Lock
from headrace.lake.manifests import HIDDEN, Manifests, Reach
from headrace.lake.table import Table, find_table, make_table
from headrace.lake.writing import Written
from headrace.pipeline import export_plan
from headrace.pipeline.cursors import LAKE, LAKE_START, Cursors
from headrace.pipeline.export_input import make_writable, source_options
from headrace.pipeline.export_plan import Begin, Plan
from headrace.pipeline.export_task import ExportWork, Probe, probe, write_part
from headrace.pipeline.points import Points
from headrace.pipeline.tasks import JobError, Runner, SparkRunner
from headrace.spark.log_view import LogView, TopicState
from headrace.spark.open_log import open_log
from headrace.spark.options import Place, SourceOptions, parse_place
from headrace.spark.planning import find_topics

APP = "headrace-export"
"""The application whose numbers are those of batches."""

_CRC_KEY = "headrace.manifest"
_WAIT_S = 0.5
_POLL_S = 0.1


class Summary(NamedTuple):
    """What an export has done."""

    lake: str
    batches: int
    records: int
    bytes: int
    topics: int
    files: int
    lost: int
    """Records that were gone before they could be exported; only with `skip_lost`."""
    told: bool
    """Whether the server knows how far the lake is."""


Progress = Callable[[int, int], None]
"""Told how many bytes of the log are done, of how many."""


def export(
    lake: str | Path,
    topics: Iterable[str] = (),
    *,
    pattern: str = "",
    url: str = "",
    token: str = "",
    data_dir: str = "",
    by_topic: bool = False,
    format: str = "delta",  # noqa: A002 - what users call it
    once: bool = True,
    every_s: float = 5.0,
    batch_bytes: int = 1 << 30,
    part_bytes: int = 64 << 20,
    skip_lost: bool = False,
    master: str = "local[*]",
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    runner: Runner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> Summary:
    """Bring a lake up to date with topics, or keep it so: then until `stop` says that it is enough.

    The log is asked at `url`, or read in `data_dir`; with both it is read there, and the server at `url` is
    told how far the lake is. Without topics and a pattern it is all topics.
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
    told = parse_place(url, token) if url else None
    directory = Path(lake).absolute()
    table = find_table(directory, format, by_topic=by_topic)
    manifests = Manifests(directory)
    with closing(open_log(source.place)) as log:
        states = find_topics(log, source.topics)
        last = table.last(APP) if table is not None else None
        reach = manifests.reach(last)
        for name in wanted:
            if name not in states and name not in reach.ends:
                raise JobError(f"there is no topic {name!r} to export")
        make_writable(directory)
        with Lock(directory / HIDDEN, "export"):
            # Whoever held the lock until now may have gone on.
            table = find_table(directory, format, by_topic=by_topic)
            table = table or make_table(directory, format, by_topic=by_topic)
            if (now := table.last(APP)) != last:
                last, reach = now, manifests.reach(now)
            runner = runner or SparkRunner("headrace export", master)
            job = _Export(directory, source, log, table, manifests, reach, told, runner, points)
            with closing(job), closing(runner):
                job.check_last(last)
                number = 0 if last is None else last + 1
                job.run(number, states if once else None, every_s, progress, stop)
                return job.summary


class _Export:
    def __init__(
        self,
        lake: Path,
        source: SourceOptions,
        log: LogView,
        table: Table,
        manifests: Manifests,
        reach: Reach,
        told: Place | None,
        runner: Runner,
        points: Points,
    ) -> None:
        self._lake, self._source, self._log = lake, source, log
        self._table, self._manifests = table, manifests
        self._runner, self._points = runner, points
        self._starts, self._ends = reach
        self._skip_lost = not source.verify
        self._cursors = Cursors(told) if told is not None else None
        self._over: set[str] = set()
        """Topics that are gone, and about which there is nothing more to say."""
        self._probed = False
        self._batches = self._records = self._bytes = self._files = self._lost = 0
        self._topics: set[str] = set()

    @property
    def summary(self) -> Summary:
        return Summary(
            *(str(self._lake), self._batches, self._records, self._bytes, len(self._topics)),
            *(self._files, self._lost, self._cursors is not None),
        )

    def close(self) -> None:
        if self._cursors is not None:
            self._cursors.close()

    # The loop

    def run(
        self,
        number: int,
        until: dict[str, TopicState] | None,
        every_s: float,
        progress: Progress | None,
        stop: Callable[[], bool],
    ) -> None:
        total = 0
        while not stop():
            begun_s = time.monotonic()
            states = find_topics(self._log, self._source.topics)
            if until is not None:
                states = export_plan.until(states, until)
            found = self._begin(states)
            if until is not None and not total:
                left = (state.end.offset - found.at[name].offset for name, state in states.items())
                total = sum(max(0, one) for one in left)
            plan = export_plan.plan_batch(self._log, states, found, self._ends, self._source)
            if plan.end:
                told = (
                    partial(_tell, progress, self._bytes, plan.bytes, total) if progress else None
                )
                self._batch(number, plan, told)
                number += 1
            elif until is not None:
                return
            else:
                self._log.wait(_WAIT_S)
                continue
            while until is None and time.monotonic() < begun_s + every_s and not stop():
                time.sleep(_POLL_S)

    def _begin(self, states: dict[str, TopicState]) -> Begin:
        self._over -= states.keys()
        gone = [
            name
            for name in self._ends
            if name not in states and name not in self._over and self._source.topics.matches(name)
        ]
        found = export_plan.begin(self._log, states, self._ends, gone)
        self._over |= set(gone)
        if found.lost and not self._skip_lost:
            raise LakeError(export_plan.lost_sentence(found.lost))
        # Before anything else for a topic that is new to the lake: from now on retention waits for it.
        self._starts |= {name: at for name, at in found.at.items() if name not in self._starts}
        self._tell({name: self._ends.get(name, at) for name, at in found.at.items()})
        return found

    def _tell(self, ends: Positions) -> None:
        if self._cursors is not None:
            self._cursors.tell(LAKE_START, {name: self._starts[name] for name in ends})
            self._cursors.tell(LAKE, ends)

    # One batch

    def _batch(
        self, number: int, plan: Plan, progress: Callable[[float], None] | None = None
    ) -> None:
        self._points.here("planned")
        self._probe()
        works = [
            ExportWork(
                *(self._source.place, str(self._lake), number, task, part),
                *(self._table.by_topic, self._source.verify, self._points),
            )
            for task, part in enumerate(plan.parts)
        ]
        results = self._runner.run(works, write_part, progress)
        files = [one for some in results for one in some]
        self._points.here("written")
        manifest = self._manifest(number, plan, files)
        self._manifests.write(manifest)
        self._points.here("noted")
        if not self._table.commit(APP, number, files, {_CRC_KEY: str(manifest.crc)}):
            raise LakeError(
                f"another export writes to {self._lake}: it has committed batch {number}"
            )
        self._points.here("committed")
        self._verify(manifest, files)
        self._points.here("verified")
        self._ends |= plan.end
        self._tell({name: at for name, at in plan.end.items() if name not in self._over})
        self._points.here("moved")
        self._count(plan, manifest)

    def _probe(self) -> None:
        """Executors may be on other machines: they must see the lake before anything is written."""
        if self._probed:
            return
        made = self._lake / HIDDEN / f"probe-{uuid.uuid4().hex}"
        made.touch()
        try:
            self._runner.run([Probe(str(self._lake), made.name)], probe)
        finally:
            made.unlink(missing_ok=True)
        self._probed = True

    def _manifest(self, number: int, plan: Plan, files: list[Written]) -> Manifest:
        ranges = [
            one._replace(file=place) for place, file in enumerate(files) for one in file.ranges
        ]
        in_order = sorted(ranges, key=lambda one: (one.topic, one.offset))
        lost = export_plan.missing(plan.ranges, in_order)
        if lost and not self._skip_lost:
            raise JobError(f"tasks have not written what was planned: {lost[0]}")
        return Manifest(
            number=number,
            start=plan.start,
            end=plan.end,
            files=tuple(File(one.path, one.bytes, one.rows) for one in files),
            ranges=tuple(ranges),
            lost=(*plan.lost, *lost),
        )

    def _verify(self, manifest: Manifest, files: list[Written]) -> None:
        """What is committed is what was written, and on disk: only then may the log forget it."""
        live = self._table.files()
        for one in files:
            # One that is not live has been compacted already, and was checked for that.
            if live.get(one.path, one.bytes) != one.bytes:
                raise LakeError(
                    f"{self._lake / one.path} has another size in the table than on disk"
                )
            if one.path in live:
                _check_size(self._lake / one.path, one.bytes)
        noted = (self._table.notes(manifest.number) or {}).get(_CRC_KEY)
        if noted != str(manifest.crc):
            raise LakeError(
                f"batch {manifest.number} of {self._lake} was committed by someone else"
            )
        if self._manifests.read(manifest.number) != manifest:
            # An export on another machine, that lost at the commit, has written its own over ours.
            self._manifests.write(manifest)

    def check_last(self, last: int | None) -> None:
        """The last batch once more: whoever committed it may have been killed before it looked."""
        if last is None:
            return
        manifest = self._manifests.read(last)
        noted = (self._table.notes(last) or {}).get(_CRC_KEY)
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

    def _count(self, plan: Plan, manifest: Manifest) -> None:
        self._batches += 1
        self._records += sum(one.rows for one in manifest.ranges)
        self._bytes += plan.bytes
        self._files += len(manifest.files)
        self._lost += sum(one.end_ordinal - one.ordinal for one in manifest.lost)
        self._topics |= plan.end.keys()


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise LakeError(f"{path} is missing, which the table names: restore it") from None
    if found != size:
        raise LakeError(f"{path} has {found} bytes instead of {size}: restore it")


def _tell(progress: Progress, done: int, batch: int, total: int, part: float) -> None:
    progress(min(total, done + int(batch * part)), total)
