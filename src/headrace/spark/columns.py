"""Columns of the source: those of every record, and those that an envelope has inside of payloads.

An envelope is a kind of payloads, for the options `decode` and `encode`. Source and sink find envelopes by
name, with `envelope_of`. `PartReader` reads a part of the log into these columns, for batch and streaming
reads.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    FractionalType,
    IntegralType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from headrace.errors import OptionError
from headrace.reader.decode import DecodedRecords, read_records, to_batch
from headrace.reader.planning import SourceOptions
from headrace.reader.view import LogRange, open_log

SCHEMA = StructType(
    [
        StructField("topic", StringType(), False),
        StructField("offset", LongType(), False),
        StructField("next_offset", LongType(), False),
        StructField("ordinal", LongType(), False),
        StructField("timestamp", TimestampType(), False),
        StructField("payload", BinaryType(), False),
    ]
)
"""Default schema for raw payloads, if the user gives none."""

TYPES = {field.name: field.dataType for field in SCHEMA.fields} | {"epoch": LongType()}
"""All columns of the source.

`epoch` is read only if a schema asks for it: few users need it, and many rely on the default columns.
"""

POSITIONS = frozenset(TYPES) - {"topic", "payload"}
"""Columns of the source that hold a record's old position. They are not written: a new record gets a new one.
"""

_IN_PAYLOADS = (
    StringType,
    BinaryType,
    BooleanType,
    IntegralType,
    FractionalType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


Known = Mapping[str, tuple[DataType, ...]]
"""Columns with the types that they may have."""


def check_type(name: str, kind: DataType) -> None:
    """Raise `OptionError` if payloads cannot hold a column of this type."""
    if isinstance(kind, ArrayType):
        check_type(name, kind.elementType)
    elif isinstance(kind, StructType):
        for field in kind.fields:
            check_type(f"{name}.{field.name}", field.dataType)
    elif isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        check_type(name, kind.valueType)
    elif isinstance(kind, MapType):
        raise OptionError(f"the column {name!r} is a map: its keys must be strings")
    elif not isinstance(kind, _IN_PAYLOADS):
        raise OptionError(
            f"the column {name!r} is {kind.simpleString()}, which payloads cannot hold"
        )


def default_schema(decode: str) -> StructType:
    """Return the schema that is used if the user gives none.

    The envelope's own columns replace the payload column.
    """
    own = envelope_of(decode).own if decode else {}
    if not own:
        return SCHEMA
    places = [field for field in SCHEMA.fields if field.name != "payload"]
    return StructType([*places, *(StructField(name, kinds[0]) for name, kinds in own.items())])


def columns_of(schema: StructType, *, decode: str) -> list[StructField]:
    """Check a schema, and return its columns that are decoded from payloads.

    Without `decode`, the schema may only name columns of the source.
    """
    if not schema.fields:
        raise OptionError("the schema has no columns")
    names = [field.name.lower() for field in schema.fields]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise OptionError(f"the schema has the column {name!r} twice")
    own = envelope_of(decode).own if decode else {}
    # An envelope's own column takes precedence over a column of the source with the same name.
    known: Known = {**{name: (kind,) for name, kind in TYPES.items()}, **own}
    decoded = [field for field in schema.fields if field.name in own or field.name not in known]
    if decoded and not decode:
        raise OptionError(
            f"the schema has a column {decoded[0].name!r} that the source does not: it has "
            f"{', '.join(TYPES)}; give decode = json to read others from payloads"
        )
    if decode and not decoded:
        raise OptionError(
            f"decode = {decode} needs a schema that names columns of the payloads: give it with "
            ".schema(…)"
        )
    check_known({field.name: field.dataType for field in schema.fields}, known)
    for field in decoded:
        check_type(field.name, field.dataType)
        if not field.nullable:
            raise OptionError(
                f"the column {field.name!r} comes out of payloads, where it may be missing: it cannot be "
                "not null"
            )
    return decoded


def check_known(fields: Mapping[str, DataType], known: Known) -> None:
    """Raise OptionError if a column has the name of a known one, but not its type."""
    for name, kind in fields.items():
        kinds = known.get(name)
        if kinds is None and name.lower() in known:
            raise OptionError(f"write the column {name!r} as {name.lower()!r}")
        if kinds is not None and not isinstance(kind, tuple(map(type, kinds))):
            wanted = " or ".join(one.simpleString() for one in kinds)
            raise OptionError(f"the column {name!r} must be {wanted}, not {kind.simpleString()}")


# Envelopes

_TASK_ROWS = 1_000_000_000
_TASKS = 9_000_000
"""The product of the two stays below the largest integer that JavaScript represents exactly."""


class Stamps:
    """Numbers that are unique to each row of a task, for envelopes with ids.

    `node` is unique to one write, or to one start of a query. Within it, Spark never uses an attempt id
    twice.
    """

    def __init__(self, node: str, attempt: int) -> None:
        self.node = node
        self._next = attempt % _TASKS * _TASK_ROWS

    def take(self, count: int) -> int:
        """Reserve `count` numbers that no other row has, and return the first."""
        first = self._next
        self._next += count
        return first


class PayloadColumns(Protocol):
    """The conversion between columns and payloads for one kind of envelope."""

    prefix: str
    """Name space that rows of this envelope are written to; empty for ordinary topics."""

    own: Known
    """Columns that every such payload has, with the types they may be read as.

    The first type is the default, unless a schema says otherwise. Users name all other columns.
    """

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        """Decode these fields from payloads; a value that a payload does not hold is null."""

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        """Return the columns that are written; raise OptionError if they do not make a payload."""

    def encode(self, columns: pa.RecordBatch, stamps: Stamps) -> pa.BinaryArray:
        """Encode these columns as payloads."""


def members_beside(fields: Iterable[str], own: Collection[str], content: str) -> tuple[str, ...]:
    """Return the columns to write; raise OptionError for a member beside the whole content.

    The column `content`, if there is one, has the whole content of an envelope. Otherwise all columns that
    are not in `own` are its members.
    """
    if content not in fields:
        return tuple(fields)
    names = tuple(name for name in fields if name not in POSITIONS)
    others = [name for name in names if name not in own]
    if others:
        raise OptionError(
            f"the column {others[0]!r} would not be written: the column {content} is the whole content; "
            "leave out one of them"
        )
    return names


def envelope_of(name: str) -> PayloadColumns:
    # Imported here, because the envelopes import this module.
    from headrace.spark.envelopes.channel import ChannelEnvelope
    from headrace.spark.envelopes.json import JSON
    from headrace.spark.envelopes.logux import LoguxEnvelope

    known: dict[str, PayloadColumns] = {
        "channel": ChannelEnvelope(),
        "json": JSON,
        "logux": LoguxEnvelope(),
    }
    if name not in known:
        raise OptionError(f"decode and encode know {', '.join(known)}, not {name!r}")
    return known[name]


# Reads


class ReadPartition(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: list[LogRange]) -> None:
        super().__init__(None)
        self.ranges = ranges


class PartReader:
    """Reader of parts in a task."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self._decoded = columns_of(schema, decode=options.decode)
        self._schema = to_arrow_schema(schema, timezone="UTC")

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(part, ReadPartition):
            return  # Spark passes another kind if the list of partitions is empty
        with closing(open_log(self.options.place)) as log:
            for records in read_records(
                log, part.ranges, self.options.leave_out, verify=self.options.verify
            ):
                yield self._batch(records)

    def _batch(self, records: DecodedRecords) -> pa.RecordBatch:
        decoded: dict[str, pa.Array] = {}
        if self._decoded:
            fields = [self._schema.field(field.name) for field in self._decoded]
            arrays = envelope_of(self.options.decode).decode(records.payloads(), fields)
            decoded = {field.name: array for field, array in zip(fields, arrays, strict=True)}
        return to_batch(records, self._schema.names, decoded, self._schema)
