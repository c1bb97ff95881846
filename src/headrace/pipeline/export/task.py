"""The task of an export: writes a part of the log to files of the lake, fsyncs them and reads them back."""

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.lake.files.writing import FileLayout, RecordRows, Writer, WrittenFile
from headrace.lake.format import Shape
from headrace.lake.manifests import HIDDEN
from headrace.pipeline.decoding import Decoding
from headrace.pipeline.kill_points import Points
from headrace.reader.decode import DamageError, DecodedRecords, decode, to_batch
from headrace.reader.view import DataLossError, LogLocation, LogRange, LogView, open_log


class ExportWork(NamedTuple):
    place: LogLocation
    lake: str
    number: int
    """Number of the batch."""
    task: int
    ranges: list[LogRange]
    shape: Shape
    layout: FileLayout
    verify: bool
    """True if damage is an error; otherwise a task skips damage, and the driver finds it missing."""
    points: Points


def write_part(work: ExportWork) -> list[WrittenFile]:
    # A task that Spark repeats writes its own files: only files that the driver learns of count.
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


def _records(log: LogView, wanted: LogRange, *, verify: bool) -> Iterator[DecodedRecords]:
    rest: LogRange | None = wanted
    while rest is not None:
        try:
            yield from decode(rest, log.read(rest), verify=verify)
            return
        except DataLossError as loss:
            # The topic has ended, or retention has deleted records. The driver finds them missing and
            # decides.
            rest = loss.rest
        except DamageError as error:
            # The source's advice in this error does not apply to an export.
            raise DamageError(
                f"{str(error).partition(';')[0]}; run `headrace verify` for the whole picture; --skip-lost "
                "goes on without these records"
            ) from None


def _rows(records: DecodedRecords, shape: Shape, decoding: Decoding) -> RecordRows:
    first, last = int(records.boundaries[0]), int(records.boundaries[-1])
    data = memoryview(records.data)[first - records.data_offset : last - records.data_offset]
    schema = shape.columns
    columns = to_batch(records, schema.names, decoding.columns(records), schema)
    return RecordRows(
        topic=records.topic,
        epoch=records.epoch,
        ordinal=records.ordinal,
        boundaries=records.boundaries,
        ms=records.ms,
        data=data,
        columns=columns,
    )


class Probe(NamedTuple):
    lake: str
    name: str
    """Name of a file that the driver has made in the lake's hidden directory."""


class NotTheSameError(HeadraceError):
    """The executors see another directory than the driver: name one on storage that all of them share."""


def probe(work: Probe) -> None:
    """Raise NotTheSameError unless a task can write to the same directory as the driver."""
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
