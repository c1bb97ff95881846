"""What a task of an export does: a part of the log → files of the lake, on disk and read back."""

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.lake.format import Shape
from headrace.lake.manifests import HIDDEN
from headrace.lake.writing import Layout, Rows, Writer, Written
from headrace.pipeline.decoding import Decoding
from headrace.pipeline.points import Points
from headrace.spark.decode import DamageError, Records, decode, to_batch
from headrace.spark.log_view import DataLossError, LogView, Range
from headrace.spark.open_log import open_log
from headrace.spark.options import Place


class ExportWork(NamedTuple):
    place: Place
    lake: str
    number: int
    """Of the batch."""
    task: int
    ranges: list[Range]
    shape: Shape
    layout: Layout
    verify: bool
    """Whether damage is an error; else it is left out, and the driver finds out what is missing."""
    points: Points


def write_part(work: ExportWork) -> list[Written]:
    # A task that Spark repeats writes files of its own: only those that the driver is told of count.
    name = f"{work.number:08}-{uuid.uuid4().hex[:12]}-{work.task:04}"
    writer = Writer(Path(work.lake), name, work.shape, work.layout)
    decoding = Decoding(work.shape)
    with closing(open_log(work.place)) as log:
        log.expect(work.ranges)
        for part in work.ranges:
            for records in _records(log, part, verify=work.verify):
                writer.add(_rows(records, work.shape, decoding))
                work.points.here("writing")
    return writer.finish()


def _records(log: LogView, wanted: Range, *, verify: bool) -> Iterator[Records]:
    rest: Range | None = wanted
    while rest is not None:
        try:
            yield from decode(rest, log.read(rest), verify=verify)
            return
        except DataLossError as loss:
            # The topic has ended, or retention was faster: the driver sees what is missing, and decides.
            rest = loss.rest
        except DamageError as error:
            # What the source advises is not for those who export.
            raise DamageError(
                f"{str(error).partition(';')[0]}; run `headrace verify` for the whole picture; --skip-lost "
                "goes on without these records"
            ) from None


def _rows(records: Records, shape: Shape, decoding: Decoding) -> Rows:
    first, last = int(records.boundaries[0]), int(records.boundaries[-1])
    data = memoryview(records.data)[first - records.data_offset : last - records.data_offset]
    schema = shape.columns
    columns = to_batch(records, schema.names, decoding.columns(records), schema)
    return Rows(
        *(records.topic, records.epoch, records.ordinal, records.boundaries, records.ms, data),
        columns,
    )


class Probe(NamedTuple):
    lake: str
    name: str
    """Of a file that the driver has made there."""


class NotTheSameError(HeadraceError):
    """Executors see another directory than the driver: name one on storage that all of them share."""


def probe(work: Probe) -> None:
    """Whether a task can write to the same directory as the driver."""
    hidden = Path(work.lake) / HIDDEN
    if not (hidden / work.name).exists():
        raise NotTheSameError(
            f"{work.lake} is another directory for Spark's executors than here: name one that all share"
        )
    made = hidden / f"{work.name}-task"
    try:
        made.touch()
        made.unlink()
    except OSError as error:
        raise NotTheSameError(
            f"{work.lake} cannot be written to by Spark's executors: {error.strerror}"
        ) from None
