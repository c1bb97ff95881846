"""Conversion of a frame's rows into topics and payloads, and the columns that the frame must have."""

from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructType

from headrace.errors import OptionError, SinkError
from headrace.reader.upload import check_written_topic
from headrace.spark.columns import TYPES, check_type
from headrace.spark.envelopes.registry import Stamps, envelope_of
from headrace.spark.options import SinkOptions

POSITIONS = frozenset(TYPES) - {"topic", "payload"}
"""Columns of the source that hold a record's old position. They are not written: a new record gets a new one.
"""


class WrittenColumns(NamedTuple):
    """The columns of a frame that are written."""

    topic: str
    """Topic of all rows; empty if each row names its own."""
    encode: str
    members: tuple[str, ...]
    """Columns that are encoded in the envelope."""
    processor: str = ""
    """Sender of all rows; empty if each row names its own, or if the envelope has no sender."""

    @property
    def prefix(self) -> str:
        """Name space of all topics that are written to; empty for ordinary topics."""
        return envelope_of(self.encode).prefix if self.encode else ""

    def rows(self, batch: pa.RecordBatch, stamps: Stamps) -> tuple[pa.Array | str, pa.Array]:
        """Return the topics and payloads of a batch."""
        if self.encode:
            if self.processor:
                names = pa.repeat(pa.scalar(self.processor), batch.num_rows)
                batch = batch.append_column("processor", names)
            payloads = envelope_of(self.encode).encode(batch.select(list(self.members)), stamps)
        else:
            payloads = batch.column("payload").cast(pa.binary())
        return self.topic or batch.column("topic").cast(pa.string()), payloads


def written_columns(schema: StructType, options: SinkOptions) -> WrittenColumns:
    fields = {field.name: field.dataType for field in schema.fields}
    if "topic" in fields and options.topic:
        raise OptionError(
            "the option topic and the column topic contradict each other: leave out one, for instance "
            "with .drop('topic')"
        )
    if "topic" not in fields and not options.topic:
        raise OptionError("say where to write: give the option topic, or a column topic")
    if "topic" in fields and not isinstance(fields["topic"], StringType):
        raise OptionError(f"the column topic must be string, not {fields['topic'].simpleString()}")
    if options.topic:
        _check_option(options)
    if options.encode:
        envelope = envelope_of(options.encode)
        others = {name: kind for name, kind in fields.items() if name != "topic"}
        for name, kind in others.items():
            check_type(name, kind)
        if not others:
            raise OptionError(f"encode = {options.encode} needs a column beside topic to encode")
        if options.processor and "processor" in others:
            raise OptionError(
                "the option processor and the column processor contradict each other: leave out one, for "
                "instance with .drop('processor')"
            )
        if options.processor:
            others["processor"] = StringType()
        members = envelope.members(others)
        return WrittenColumns(options.topic, options.encode, members, options.processor)
    if "payload" not in fields:
        raise OptionError(
            "there is no column payload to write; with encode = json all columns become one"
        )
    if not isinstance(fields["payload"], BinaryType | StringType):
        raise OptionError(
            f"the column payload must be binary or string, not {fields['payload'].simpleString()}"
        )
    unwritten = [name for name in fields if name not in POSITIONS | {"topic", "payload"}]
    if unwritten:
        raise OptionError(
            f"the column {unwritten[0]!r} would not be written: select topic and payload, or give "
            "encode = json to make payloads of all columns"
        )
    return WrittenColumns(options.topic, "", ())


def _check_option(options: SinkOptions) -> None:
    prefix = envelope_of(options.encode).prefix if options.encode else ""
    try:
        check_written_topic(options.topic, prefix)
    except SinkError as error:
        raise OptionError(f"topic makes no sense: {error}") from None
