"""The job `compact`: merges small files of a lake, and deletes old files and manifests.

    bins ─▶ tasks merge ─▶ commit each bin ─▶ delete old files

A commit replaces the small files of a bin in the table by the new file in one step, and only if all of them
are still in the table. So every reader sees every row once at every moment, even if other jobs write. A run
that was killed before its commit leaves a file that the table does not name. Old files stay for a while,
because they may still be read. A task checks every checksum while it merges.
"""

import heapq
import re
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, repeat
from typing import NamedTuple

import pyarrow as pa

from headrace.config.pipeline import CompactOptions
from headrace.lake.files.reading import Checked, are_names_old, read_checked, read_ranges
from headrace.lake.files.writing import NAME, FileLayout, RecordRows, Writer, WrittenFile
from headrace.lake.format import LakeError, RecordRange, Shape, token_of
from headrace.lake.manifests import Manifests, joined_ranges
from headrace.lake.storage.storage import LakeFile, Storage, storage_of
from headrace.lake.table import Table, open_table
from headrace.pipeline.job import EXPORT_APP, JobArguments, Points, job, part_of
from headrace.pipeline.tasks import TaskRunner
from headrace.reader.planning import groups

APP = "headrace-compact"
"""Application ID in the table's commits, which number the merges."""

_BINS_AT_ONCE = 64
"""Number of bins that are merged before they are committed; limits what is repeated after a kill."""

FILES_MAX = 500
"""Maximum number of files that one task reads: all of them are open at the same time."""

_NAME = re.compile(NAME)


class CompactSummary(NamedTuple):
    """Result of a compaction, or of a dry run."""

    lake: str
    merged: int = 0
    """Number of files that were removed from the table."""
    made: int = 0
    """Number of files that replaced them."""
    records: int = 0
    bytes: int = 0
    """Size of the files that were merged."""
    left: int = 0
    """Number of files that another job has merged meanwhile."""
    swept: int = 0
    """Number of deleted files, which neither the table nor the last manifest named."""
    dry_run: bool = False


@dataclass(frozen=True)
class CompactArguments(CompactOptions, JobArguments):
    pass


@job(CompactArguments)
def compact(given: CompactArguments) -> CompactSummary:
    """Merge files smaller than half of `file_bytes`, and delete old files.

    Old files are those that the table has not named for `sweep_after_s` seconds. Exports may run meanwhile.
    With `dry_run`, nothing is changed.
    """
    storage = storage_of(given.lake, given.storage_options, given.catalog_options)
    table = open_table(storage)
    if given.dry_run:
        planned = _plan(storage, table, given.file_bytes)
        return CompactSummary(
            storage.address,
            merged=sum(len(one.files) for one in planned),
            made=len(planned),
            bytes=sum(one.bytes for one in planned),
            swept=_sweep(storage, table, given),
            dry_run=True,
        )
    storage.prepare()
    with storage.lock("compact"):
        table.sync()  # completes what a killed run has left
        with closing(given.task_runner("compact")) as runner:
            done = _merge_all(storage, table, given, runner)
        swept = _sweep(storage, table, given)
        given.points.here("swept")
        return done._replace(swept=swept)


def _plan(storage: Storage, table: Table, file_bytes: int) -> "list[Bin]":
    """Return the bins to merge.

    Files with old topic names are never merged with others: the same name could stand for two topics.
    """
    files = table.files()
    if not Manifests(storage).have_old_names(table.last(EXPORT_APP)):
        return bins(files, file_bytes)
    small = {path: size for path, size in files.items() if 2 * size < file_bytes}
    old = {path: size for path, size in small.items() if are_names_old(storage.file(path))}
    new = {path: size for path, size in small.items() if path not in old}
    return [*bins(old, file_bytes), *bins(new, file_bytes)]


def _merge_all(
    storage: Storage, table: Table, given: CompactArguments, runner: TaskRunner
) -> CompactSummary:
    planned = _plan(storage, table, given.file_bytes)
    total = sum(one.bytes for one in planned)
    read = 0
    done = CompactSummary(storage.address)
    task = partial(
        merge, storage=storage, shape=table.shape, layout=table.layout, points=given.points
    )
    for first in range(0, len(planned), _BINS_AT_ONCE):
        some = planned[first : first + _BINS_AT_ONCE]
        size = sum(one.bytes for one in some)
        told = part_of(given.progress, done=read, size=size, total=total)
        results = runner.run(some, task, told)
        given.points.here("merged")
        for one, written in zip(some, results, strict=True):
            if not _commit(table, one, written):
                done = done._replace(left=done.left + len(one.files))
                continue
            given.points.here("committed")
            done = done._replace(
                merged=done.merged + len(one.files),
                made=done.made + 1,
                records=done.records + written.rows,
                bytes=done.bytes + one.bytes,
            )
        read += size
    return done


def _commit(table: Table, one: "Bin", written: WrittenFile) -> bool:
    """Replace the bin's files by the merged file; return False if another job has merged some of them."""
    while True:
        last = table.last(APP)
        number = 0 if last is None else last.number + 1
        token = token_of([written.path])
        if table.commit(APP, number, [written], token, replaced=one.files):
            return True
        if not table.files().keys() >= set(one.files):
            return False
        # Another compaction has used the number for other files.


def _sweep(storage: Storage, table: Table, given: CompactArguments) -> int:
    """Delete old files and manifests, or only count them."""
    manifests = Manifests(storage).leftovers(table.last(EXPORT_APP))
    if not given.dry_run:
        storage.delete(manifests)
    return len(manifests) + table.sweep(given.sweep_after_s, dry_run=given.dry_run)


# Plan: which files become one


class Bin(NamedTuple):
    """Files of one partition that become one, in the order in which they were exported."""

    files: tuple[str, ...]
    bytes: int


def bins(files: Mapping[str, int], file_bytes: int) -> list[Bin]:
    """Return the bins for `files`, which maps paths to sizes.

    Files of half the size or more are left out, and so is a single small file. Files are taken in order, so
    that neighbours in the log are in the same file.
    """
    small = sorted((path for path, size in files.items() if 2 * size < file_bytes), key=_place)
    return [
        Bin(tuple(some), sum(files[path] for path in some))
        for _, paths in groupby(small, key=_directory)
        for some in groups(paths, files.__getitem__, file_bytes, FILES_MAX)
        if len(some) > 1
    ]


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def name_after(path: str, unique: str) -> str:
    """Return the name of a merged file with `path` as its first part: it takes that place in the order."""
    _, number, task, _ = _place(path)
    return f"c{number:08}-{unique}-{task:04}"


def _place(path: str) -> tuple[str, int, int, str]:
    """Return the sort key of a file: partition, batch and task."""
    directory, _, name = path.rpartition("/")
    found = _NAME.fullmatch(name)
    number, task = (int(found[1]), int(found[2])) if found else (0, 0)
    return directory, number, task, name


# The task: merge the files of a bin


def merge(
    small: Bin, *, storage: Storage, shape: Shape, layout: FileLayout, points: Points
) -> WrittenFile:
    """Write a file with the rows of the bin's files, each as in the log. The table does not name it yet."""
    # A task that Spark repeats writes its own file: only the file that the driver learns of counts.
    name = name_after(small.files[0], uuid.uuid4().hex[:12])
    files = [storage.file(path) for path in small.files]
    # All files of a bin are alike, so rows and footers keep the topic names that they were written with.
    writer = Writer(storage, name, shape, layout, old_names=are_names_old(files[0]))
    ranges = [_sorted_ranges(file) for file in files]
    try:
        expected = joined_ranges(chain.from_iterable(ranges))
    except ValueError as error:
        raise LakeError(f"{storage.address}: {error}") from None
    inputs = map(read_checked, files, ranges, repeat(shape.columns.names))
    # A range is contiguous in one file, so the rows of all files are merged in the order of their ranges.
    for some in heapq.merge(*inputs, key=lambda found: found.range):
        writer.add(_rows(some, shape.columns))
        points.here("merging")
    written = writer.finish()
    directory = _directory(small.files[0])
    if len(written) != 1 or _directory(written[0].path) != directory:
        raise LakeError(f"{storage.file(directory)} has rows of another date than its partition")
    if list(written[0].ranges) != expected:
        raise LakeError(
            f"{storage.file(written[0].path)} has other records than the files it replaces"
        )
    return written[0]


def _sorted_ranges(file: LakeFile) -> list[RecordRange]:
    ranges = read_ranges(file, as_stored=True)
    if ranges != sorted(ranges):
        raise LakeError(f"{file} is not sorted by topic and offset")
    return ranges


def _rows(found: Checked, schema: pa.Schema) -> RecordRows:
    columns = dict(zip(found.rows.schema.names, found.rows.columns, strict=True))
    if "topic" not in columns:  # the table is partitioned by it
        columns["topic"] = pa.repeat(found.range.topic, found.rows.num_rows)
    arrays = [columns[name] for name in schema.names]
    return RecordRows(pa.RecordBatch.from_arrays(arrays, schema=schema), found.records)
