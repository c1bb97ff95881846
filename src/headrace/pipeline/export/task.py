"""The task of an export: writes a part of the log to files of the lake, fsyncs them and reads them back.

A lake may have columns that are decoded from payloads, by the envelopes of the Spark source. For a payload of
another kind, the decoded columns are null. Its row still has the payload itself.
"""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from headrace.errors import OptionError
from headrace.lake.columns import parse_columns
from headrace.lake.files.writing import FileLayout, RecordRows, Writer, WrittenFile
from headrace.lake.format import DATE, SCHEMA, Shape
from headrace.lake.storage.storage import HIDDEN, Storage
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import NotSharedError, TaskRunner
from headrace.reader.decode import DamageError, DecodedRecords, read_records, to_batch
from headrace.reader.view import LogLocation, LogRange, open_log
from headrace.spark.columns import columns_of, envelope_of


class ExportWork(NamedTuple):
    place: LogLocation
    storage: Storage
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
    writer = Writer(work.storage, name, work.shape, work.layout)
    decoding = Decoding(work.shape)
    schema = work.shape.columns
    with closing(open_log(work.place)) as log, _advice():
        # The topic has ended, or retention has deleted records: the driver finds them missing and decides.
        for records in read_records(log, work.ranges, lambda loss: None, verify=work.verify):
            columns = to_batch(records, schema.names, decoding.columns(records), schema)
            writer.add(RecordRows(columns, records.bytes))
            work.points.here("writing")
    return writer.finish()


@contextmanager
def _advice() -> Iterator[None]:
    """Replace the source's advice in an error about damage, because it does not apply to an export."""
    try:
        yield
    except DamageError as error:
        raise DamageError(
            f"{str(error).partition(';')[0]}; run `headrace verify` to find all damage, or give "
            "--skip-lost to continue without these records"
        ) from None


# Shared storage

_ASKED, _ANSWERED = b"asked", b"answered"


class Probe(NamedTuple):
    storage: Storage
    path: str
    """Path of a file that the driver has created."""

    @property
    def answer(self) -> str:
        return f"{self.path}-task"


def check_shared(storage: Storage, runner: TaskRunner) -> None:
    """Raise NotSharedError unless driver and tasks see each other's files."""
    work = Probe(storage, f"{HIDDEN}/probe-{uuid.uuid4().hex}")
    try:
        storage.create(work.path, _ASKED)
        runner.run([work], probe)
        if _read(storage, work.answer) != _ANSWERED:
            raise _not_shared(storage)
    finally:
        storage.delete([work.path, work.answer])


def probe(work: Probe) -> None:
    if _read(work.storage, work.path) != _ASKED:
        raise _not_shared(work.storage)
    try:
        work.storage.create(work.answer, _ANSWERED)
    except OSError as error:
        raise NotSharedError(
            f"{work.storage.address} cannot be written to by Spark's executors: {error.strerror}"
        ) from None


def _read(storage: Storage, path: str) -> bytes:
    with suppress(FileNotFoundError):
        return storage.read(path)
    return b""


def _not_shared(storage: Storage) -> NotSharedError:
    return NotSharedError(
        f"{storage.address} is another directory for Spark's executors than here: name one on shared storage"
    )


# Decoded columns

_RENAMED = {"channel": {"content": "payload"}}
"""Columns with another name in a lake, by kind of payload: a lake's `payload` is the whole record."""

_OWN = (*SCHEMA.names, DATE.name)


def shape_of(decode: str, schema: str, *, by_topic: bool) -> Shape:
    """Return the shape of a lake; raise OptionError if the columns are invalid."""
    if not decode:
        if schema:
            raise OptionError(
                "a schema names columns in payloads: also give their kind with decode"
            )
        return Shape(by_topic)
    decoded = _parsed(schema) if schema else _all_of(decode)
    for field in decoded:
        if field.name.lower() in _OWN:
            raise OptionError(
                f"every lake has a column {field.name.lower()!r}: choose another name"
            )
    renamed = _RENAMED.get(decode, {})
    inner = pa.schema([field.with_name(renamed.get(field.name, field.name)) for field in decoded])
    columns_of(from_arrow_schema(inner), decode=decode)
    return Shape(by_topic, decode, decoded)


def _parsed(schema: str) -> pa.Schema:
    try:
        return parse_columns(schema)
    except ValueError as error:
        raise OptionError(f"the schema is invalid: {error}") from None


def _all_of(decode: str) -> pa.Schema:
    own = envelope_of(decode).own
    if not own:
        raise OptionError(f"decode = {decode} needs a schema, such as 'id bigint, name string'")
    names = {inner: name for name, inner in _RENAMED.get(decode, {}).items()}
    fields = [StructField(names.get(name, name), kinds[0]) for name, kinds in own.items()]
    return to_arrow_schema(StructType(fields), timezone="UTC")


class Decoding:
    """Decoder of payloads, for one task."""

    def __init__(self, shape: Shape) -> None:
        self._envelope = envelope_of(shape.decode) if shape.decode else None
        renamed = _RENAMED.get(shape.decode, {})
        self._fields = {
            field.name: field.with_name(renamed.get(field.name, field.name))
            for field in shape.decoded
        }

    def columns(self, records: DecodedRecords) -> Mapping[str, pa.Array]:
        if self._envelope is None:
            return {}
        arrays = self._envelope.decode(records.payloads(), list(self._fields.values()))
        return dict(zip(self._fields, arrays, strict=True))
