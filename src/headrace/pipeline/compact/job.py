"""Small files of a lake → larger ones with the same rows; notes of batches → one; old files are swept.

    bins ─▶ tasks merge ─▶ commit, one for each bin ─▶ notes folded ─▶ old files swept

A commit takes the small files out of the table and puts the new one in, in one step, and only if all of them
are still in it: whoever else writes, every row is there once, for every reader and at every moment. What was
killed before its commit has left a file that nobody names. Old files stay for a while, for those who read
them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.lake.format import CRC_KEY, LakeError, Manifest
from headrace.lake.lock import Lock
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.reading import are_names_old
from headrace.lake.table import Table, open_table
from headrace.lake.writing import Written
from headrace.pipeline.compact_plan import Bin, bins
from headrace.pipeline.compact_task import CompactWork, merge
from headrace.pipeline.export import APP as EXPORT
from headrace.pipeline.points import Points
from headrace.pipeline.tasks import Runner, SparkRunner
from headrace.spark.options import OptionError

APP = "headrace-compact"
"""The application whose numbers are those of merges."""

FILE_BYTES = 128 << 20
SWEEP_AFTER_S = 7 * 86_400.0

SWEEP_AFTER_S_MIN = 3600.0
"""What an export has written and not yet committed is a file that nobody names, too."""

_BINS_AT_ONCE = 64
"""Merged before they are committed: what a kill makes be done again."""


class Summary(NamedTuple):
    """What a compaction has done, or would do."""

    lake: str
    merged: int
    """Files that are not in the table any more."""
    made: int
    """Files that are, in their place."""
    records: int
    bytes: int
    """Of the files that were merged."""
    left: int
    """Files that someone else has merged meanwhile."""
    folded: int
    """Batches whose notes were put together with others."""
    swept: int
    """Files that nobody names, and that were deleted."""
    dry_run: bool


Progress = Callable[[int, int], None]
"""Told how many bytes of files are merged, of how many."""


def compact(
    lake: str | Path,
    *,
    file_bytes: int = FILE_BYTES,
    sweep_after_s: float = SWEEP_AFTER_S,
    dry_run: bool = False,
    master: str = "local[*]",
    progress: Progress | None = None,
    runner: Runner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> Summary:
    """Merge files that are smaller than half of `file_bytes`, and delete what has been unnamed for so long.

    Exports may go on meanwhile. With `dry_run` nothing is changed.
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
        return Summary(str(directory), merged, len(planned), 0, size, 0, 0, swept, True)
    with _alone(directory):
        table.sync()  # what a killed one has left
        job = _Compact(directory, table, points, runner or SparkRunner("headrace compact", master))
        with closing(job.runner):
            job.merge(_plan(directory, table, file_bytes), progress)
        job.fold()
        job.sweep(sweep_after_s)
        return job.summary


def _plan(lake: Path, table: Table, file_bytes: int) -> list[Bin]:
    """What to merge: never files in which one name stands for two topics, as versions name them."""
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
    def __init__(self, lake: Path, table: Table, points: Points, runner: Runner) -> None:
        self._lake, self._table, self._points = lake, table, points
        self.runner = runner
        self._merged = self._made = self._records = self._bytes = self._left = 0
        self._folded = self._swept = 0

    @property
    def summary(self) -> Summary:
        return Summary(
            *(str(self._lake), self._merged, self._made, self._records, self._bytes, self._left),
            *(self._folded, self._swept, False),
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
                    str(self._lake), one, self._table.shape, self._table.layout, self._points
                )
                for one in some
            ]
            results = self.runner.run(works, merge, told)
            self._points.here("merged")
            for one, written in zip(some, results, strict=True):
                self._commit(one, written)
            done += size

    def _commit(self, one: Bin, written: Written) -> None:
        while True:
            last = self._table.last(APP)
            number = 0 if last is None else last + 1
            if self._table.commit(APP, number, [written], {}, replaced=one.files):
                break
            if not self._table.files().keys() >= set(one.files):
                self._left += len(one.files)
                return
            # Another compaction has taken the number, for other files.
        self._points.here("committed")
        self._merged += len(one.files)
        self._made += 1
        self._records += written.rows
        self._bytes += one.bytes

    def fold(self) -> None:
        """All but the last batch: an export looks at that one when it starts."""
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
