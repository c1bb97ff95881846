"""What a task of a compaction does: small files → one, sorted, with every checksum looked at on the way."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headrace.lake.checksums import joined_ranges
from headrace.lake.format import LakeError, Range, Shape
from headrace.lake.reading import Checked, are_names_old, read_checked, read_ranges
from headrace.lake.writing import Layout, Rows, Writer, Written
from headrace.pipeline.compact_plan import Bin, name_after
from headrace.pipeline.points import Points


class CompactWork(NamedTuple):
    lake: str
    bin: Bin
    shape: Shape
    layout: Layout
    points: Points


def merge(work: CompactWork) -> Written:
    """A file that nobody names yet: its rows are those of the bin's files, each as the log had it."""
    lake = Path(work.lake)
    # A task that Spark repeats writes a file of its own: only the one that the driver is told of counts.
    name = name_after(work.bin.files[0], uuid.uuid4().hex[:12])
    # All of a bin are alike: rows and footers keep the names that they were written with.
    old_names = are_names_old(lake / work.bin.files[0])
    writer = Writer(lake, name, work.shape, work.layout, old_names=old_names)
    with ExitStack() as stack:
        inputs = [
            stack.enter_context(closing(_Input(lake / path, work.shape.columns)))
            for path in work.bin.files
        ]
        # Each range lies in one file and is contiguous, so the order of rows is that of ranges.
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


def _together(lake: Path, ranges: list[Range]) -> list[Range]:
    try:
        return joined_ranges(ranges)
    except ValueError as error:
        raise LakeError(f"{lake}: {error}") from None


class _Input:
    """A file whose ranges are taken one after the other."""

    def __init__(self, path: Path, columns: pa.Schema) -> None:
        self.ranges = read_ranges(path, as_stored=True)
        if self.ranges != sorted(self.ranges):
            raise LakeError(f"{path} is not sorted by topic and offset")
        self._rows = read_checked(path, self.ranges, columns.names)
        self._ranges_left = len(self.ranges)

    def take(self, wanted: Range) -> Iterator[Checked]:
        left = wanted.rows
        while left:
            found = next(self._rows)
            assert found.range == wanted
            left -= found.rows.num_rows
            yield found
        self._ranges_left -= 1
        if not self._ranges_left:
            self.close()  # what was read of it last is let go

    def close(self) -> None:
        self._rows.close()


def _rows(found: Checked, schema: pa.Schema) -> Rows:
    one, columns = found.range, found.rows
    offsets = columns["offset"].to_numpy()
    boundaries = np.append(offsets, offsets[0] + len(found.records))
    ms = columns["timestamp"].cast(pa.int64()).to_numpy() // 1000
    names = columns.schema.names
    typed = pa.RecordBatch.from_arrays(
        [columns[name] for name in names], schema=pa.schema([schema.field(name) for name in names])
    )
    ordinal = columns["ordinal"][0].as_py()
    return Rows(one.topic, one.epoch, ordinal, boundaries, ms, found.records, typed)
