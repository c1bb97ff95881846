"""The job `compact`: merges small files of a lake and the manifests of batches, and deletes old files.

    bins ─▶ tasks merge ─▶ commit each bin ─▶ merge manifests ─▶ delete old files

A commit replaces the small files of a bin in the table by the new file in one step, and only if all of them
are still in the table. So every reader sees every row once at every moment, even if other jobs write. A run
that was killed before its commit leaves a file that the table does not name. Old files stay for a while,
because they may still be read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.errors import OptionError
from headrace.lake.files.reading import are_names_old
from headrace.lake.files.writing import WrittenFile
from headrace.lake.format import CRC_KEY, LakeError, Manifest
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.table import Lock, Table, open_table
from headrace.pipeline.compact.plan import Bin, CompactWork, bins, merge
from headrace.pipeline.export.job import APP as EXPORT
from headrace.pipeline.kill_points import Points
from headrace.pipeline.tasks import SparkRunner, TaskRunner

APP = "headrace-compact"
"""Application ID in the table's commits, which number the merges."""

FILE_BYTES = 128 << 20
SWEEP_AFTER_S = 7 * 86_400.0

SWEEP_AFTER_S_MIN = 3600.0
"""Minimum for `sweep_after_s`: files that an export has not committed yet are not in the table either."""

_BINS_AT_ONCE = 64
"""Number of bins that are merged before they are committed; limits what is repeated after a kill."""


class CompactSummary(NamedTuple):
    """Result of a compaction, or of a dry run."""

    lake: str
    merged: int
    """Number of files that were removed from the table."""
    made: int
    """Number of files that replaced them."""
    records: int
    bytes: int
    """Size of the files that were merged."""
    left: int
    """Number of files that another job has merged meanwhile."""
    folded: int
    """Number of batches whose manifests were merged with others."""
    swept: int
    """Number of deleted files, which the table did not name."""
    dry_run: bool


Progress = Callable[[int, int], None]
"""Called with the number of bytes of files that are merged, and with their total."""


def compact(
    lake: str | Path,
    *,
    file_bytes: int = FILE_BYTES,
    sweep_after_s: float = SWEEP_AFTER_S,
    dry_run: bool = False,
    master: str = "local[*]",
    progress: Progress | None = None,
    runner: TaskRunner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> CompactSummary:
    """Merge files smaller than half of `file_bytes`, and delete old files.

    Old files are those that the table has not named for `sweep_after_s` seconds. Exports may run meanwhile.
    With `dry_run`, nothing is changed.
    """
    if file_bytes < 1:
        raise OptionError(f"files have at least 1 byte, not {file_bytes}")
    if sweep_after_s < SWEEP_AFTER_S_MIN:
        raise OptionError(
            f"files are kept for {SWEEP_AFTER_S_MIN:g} seconds at least, not {sweep_after_s:g}: an export "
            "may be about to name them"
        )
    directory = Path(lake).absolute()
    table = open_table(directory)
    if dry_run:
        planned = _plan(directory, table, file_bytes)
        merged, size = sum(len(one.files) for one in planned), sum(one.bytes for one in planned)
        swept = table.sweep(sweep_after_s, dry_run=True)
        return CompactSummary(
            lake=str(directory),
            merged=merged,
            made=len(planned),
            records=0,
            bytes=size,
            left=0,
            folded=0,
            swept=swept,
            dry_run=True,
        )
    with _alone(directory):
        table.sync()  # completes what a killed run has left
        job = _Compact(directory, table, points, runner or SparkRunner("headrace compact", master))
        with closing(job.runner):
            job.merge(_plan(directory, table, file_bytes), progress)
        job.fold()
        job.sweep(sweep_after_s)
        return job.summary


def _plan(lake: Path, table: Table, file_bytes: int) -> list[Bin]:
    """Return the bins to merge.

    Files with old topic names are never merged with others: the same name could stand for two topics.
    """
    files = table.files()
    if not Manifests(lake).have_old_names(table.last(EXPORT)):
        return bins(files, file_bytes)
    small = [path for path, size in files.items() if 2 * size < file_bytes]
    old = {path for path in small if are_names_old(lake / path)}
    return [
        *bins({path: size for path, size in files.items() if path in old}, file_bytes),
        *bins({path: size for path, size in files.items() if path not in old}, file_bytes),
    ]


@contextmanager
def _alone(lake: Path) -> Iterator[None]:
    try:
        lock = Lock(lake / HIDDEN, "compact")
    except OSError as error:
        raise LakeError(f"{lake} cannot be written to: {error.strerror}") from None
    with lock:
        yield


class _Compact:
    def __init__(self, lake: Path, table: Table, points: Points, runner: TaskRunner) -> None:
        self._lake, self._table, self._points = lake, table, points
        self.runner = runner
        self._merged = self._made = self._records = self._bytes = self._left = 0
        self._folded = self._swept = 0

    @property
    def summary(self) -> CompactSummary:
        return CompactSummary(
            lake=str(self._lake),
            merged=self._merged,
            made=self._made,
            records=self._records,
            bytes=self._bytes,
            left=self._left,
            folded=self._folded,
            swept=self._swept,
            dry_run=False,
        )

    def merge(self, planned: Sequence[Bin], progress: Progress | None) -> None:
        total = sum(one.bytes for one in planned)
        done = 0
        for first in range(0, len(planned), _BINS_AT_ONCE):
            some = planned[first : first + _BINS_AT_ONCE]
            size = sum(one.bytes for one in some)
            told = partial(_tell, progress, done, size, total) if progress is not None else None
            works = [
                CompactWork(
                    lake=str(self._lake),
                    bin=one,
                    shape=self._table.shape,
                    layout=self._table.layout,
                    points=self._points,
                )
                for one in some
            ]
            results = self.runner.run(works, merge, told)
            self._points.here("merged")
            for one, written in zip(some, results, strict=True):
                self._commit(one, written)
            done += size

    def _commit(self, one: Bin, written: WrittenFile) -> None:
        while True:
            last = self._table.last(APP)
            number = 0 if last is None else last + 1
            if self._table.commit(APP, number, [written], {}, replaced=one.files):
                break
            if not self._table.files().keys() >= set(one.files):
                self._left += len(one.files)
                return
            # Another compaction has used the number for other files.
        self._points.here("committed")
        self._merged += len(one.files)
        self._made += 1
        self._records += written.rows
        self._bytes += one.bytes

    def fold(self) -> None:
        """Merge the manifests of all batches but the last, which an export checks when it starts."""
        last = self._table.last(EXPORT)
        if last is None:
            return
        commits = dict(self._table.all_notes())

        def check(manifest: Manifest) -> None:
            noted = commits.get(manifest.number, {}).get(CRC_KEY)
            if noted is not None and noted != str(manifest.crc):
                raise LakeError(
                    f"{self._lake}: what is noted of batch {manifest.number} is not what was committed; "
                    "run `headrace pipeline audit` for the whole picture"
                )

        self._folded = Manifests(self._lake).fold(last, check)

    def sweep(self, after_s: float) -> None:
        self._swept = self._table.sweep(after_s, dry_run=False)
        self._points.here("swept")


def _tell(progress: Progress, done: int, size: int, total: int, part: float) -> None:
    progress(done + int(size * part), total)
