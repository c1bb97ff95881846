"""What a frame must have to be written, and what its rows become: topics and payloads."""

from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructType

from headrace.errors import HeadraceError
from headrace.spark.columns import SCHEMA, check_type
from headrace.spark.envelopes import envelope_of
from headrace.spark.options import OptionError, SinkOptions

_POSITIONS = frozenset(SCHEMA.fieldNames()) - {"topic", "payload"}
"""Columns of the source that say where a record was: what is written gets places of its own."""


class SinkError(HeadraceError, ValueError):
    """A row cannot be written: the message says why."""


class Written(NamedTuple):
    """Which columns are written."""

    topic: str
    """The topic of all rows; empty when each names its own."""
    encode: str
    members: tuple[str, ...]
    """The columns that go into an envelope."""

    def rows(self, batch: pa.RecordBatch) -> tuple[pa.Array | str, pa.Array]:
        """Topics and payloads of a batch."""
        if self.encode:
            payloads = envelope_of(self.encode).encode(batch.select(list(self.members)))
        else:
            payloads = batch.column("payload").cast(pa.binary())
        return self.topic or batch.column("topic").cast(pa.string()), payloads


def written_columns(schema: StructType, options: SinkOptions) -> Written:
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
    if options.encode:
        prefix = envelope_of(options.encode).prefix
        if options.topic and not options.topic.startswith(prefix):
            raise OptionError(
                f"encode = {options.encode} writes to topics that begin with {prefix!r}"
            )
        members = tuple(name for name in fields if name != "topic")
        for name in members:
            check_type(name, fields[name])
        if not members:
            raise OptionError(f"encode = {options.encode} needs a column beside topic to encode")
        return Written(options.topic, options.encode, members)
    if "payload" not in fields:
        raise OptionError(
            "there is no column payload to write; with encode = json all columns become one"
        )
    if not isinstance(fields["payload"], BinaryType | StringType):
        raise OptionError(
            f"the column payload must be binary or string, not {fields['payload'].simpleString()}"
        )
    others = [name for name in fields if name not in _POSITIONS | {"topic", "payload"}]
    if others:
        raise OptionError(
            f"the column {others[0]!r} would not be written: select topic and payload, or give "
            "encode = json to make payloads of all columns"
        )
    return Written(options.topic, "", ())
