"""Chooses small files of a partition, from successive batches, and merges them into one sorted file.

A task checks every checksum while it merges.
"""

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headrace.lake.files.reading import Checked, are_names_old, read_checked, read_ranges
from headrace.lake.files.writing import NAME, FileLayout, RecordRows, Writer, WrittenFile
from headrace.lake.format import LakeError, RecordRange, Shape
from headrace.lake.manifests import joined_ranges
from headrace.pipeline.kill_points import Points

FILES_MAX = 500
"""Maximum number of files that one task reads: all of them are open at the same time."""

_NAME = re.compile(NAME)


class Bin(NamedTuple):
    """Files of one partition that become one, in the order in which they were exported."""

    files: tuple[str, ...]
    bytes: int

    @property
    def directory(self) -> str:
        return self.files[0].rpartition("/")[0]


def bins(files: Mapping[str, int], file_bytes: int) -> list[Bin]:
    """Return the bins for `files`, which maps paths to sizes.

    Files of half the size or more are left out, and so is a single small file. Files are taken in order, so
    that neighbours in the log are in the same file.
    """
    small = sorted((path for path, size in files.items() if 2 * size < file_bytes), key=_place)
    found: list[Bin] = []
    gathered: list[str] = []
    size = 0
    for path in [*small, ""]:
        is_full = size + files.get(path, 0) > file_bytes or len(gathered) == FILES_MAX
        if gathered and (is_full or path.rpartition("/")[0] != gathered[0].rpartition("/")[0]):
            if len(gathered) > 1:
                found.append(Bin(tuple(gathered), size))
            gathered, size = [], 0
        gathered.append(path)
        size += files.get(path, 0)
    return found


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


class CompactWork(NamedTuple):
    lake: str
    bin: Bin
    shape: Shape
    layout: FileLayout
    points: Points


def merge(work: CompactWork) -> WrittenFile:
    """Write a file with the rows of the bin's files, each as in the log. The table does not name it yet."""
    lake = Path(work.lake)
    # A task that Spark repeats writes its own file: only the file that the driver learns of counts.
    name = name_after(work.bin.files[0], uuid.uuid4().hex[:12])
    # All files of a bin are alike, so rows and footers keep the topic names that they were written with.
    old_names = are_names_old(lake / work.bin.files[0])
    writer = Writer(lake, name, work.shape, work.layout, old_names=old_names)
    with ExitStack() as stack:
        inputs = [
            stack.enter_context(closing(_Input(lake / path, work.shape.columns)))
            for path in work.bin.files
        ]
        # Each range is contiguous in one file, so the rows have the order of the ranges.
        order = sorted((one, place) for place, file in enumerate(inputs) for one in file.ranges)
        expected = _together(lake, [one for one, _ in order])
        for one, place in order:
            for some in inputs[place].take(one):
                writer.add(_rows(some, work.shape.columns))
                work.points.here("merging")
    written = writer.finish()
    if len(written) != 1 or Bin((written[0].path,), 0).directory != work.bin.directory:
        raise LakeError(f"{lake / work.bin.directory} has rows of another date")
    if list(written[0].ranges) != expected:
        raise LakeError(f"{lake / written[0].path} does not hold what its parts held")
    return written[0]


def _together(lake: Path, ranges: list[RecordRange]) -> list[RecordRange]:
    try:
        return joined_ranges(ranges)
    except ValueError as error:
        raise LakeError(f"{lake}: {error}") from None


class _Input:
    """File whose ranges are taken one after the other."""

    def __init__(self, path: Path, columns: pa.Schema) -> None:
        self.ranges = read_ranges(path, as_stored=True)
        if self.ranges != sorted(self.ranges):
            raise LakeError(f"{path} is not sorted by topic and offset")
        self._rows = read_checked(path, self.ranges, columns.names)
        self._ranges_left = len(self.ranges)

    def take(self, wanted: RecordRange) -> Iterator[Checked]:
        left = wanted.rows
        while left:
            found = next(self._rows)
            assert found.range == wanted
            left -= found.rows.num_rows
            yield found
        self._ranges_left -= 1
        if not self._ranges_left:
            self.close()  # frees the rows that were read last

    def close(self) -> None:
        self._rows.close()


def _rows(found: Checked, schema: pa.Schema) -> RecordRows:
    one, columns = found.range, found.rows
    offsets = columns["offset"].to_numpy()
    boundaries = np.append(offsets, offsets[0] + len(found.records))
    ms = columns["timestamp"].cast(pa.int64()).to_numpy() // 1000
    names = columns.schema.names
    typed = pa.RecordBatch.from_arrays(
        [columns[name] for name in names], schema=pa.schema([schema.field(name) for name in names])
    )
    ordinal = columns["ordinal"][0].as_py()
    return RecordRows(one.topic, one.epoch, ordinal, boundaries, ms, found.records, typed)
