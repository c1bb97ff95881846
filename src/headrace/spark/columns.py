"""The columns of the source: which there are, of which types, and which a user's schema asks for."""

from typing import NamedTuple

from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.spark.envelopes import envelope_of
from headrace.spark.options import OptionError

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
"""What is read when the user says nothing else."""

_TYPES = {field.name: field.dataType for field in SCHEMA.fields}


class Columns(NamedTuple):
    """What a read has to build."""

    names: tuple[str, ...]
    """All of them, in their order."""
    decoded: tuple[StructField, ...]
    """Those that come out of payloads."""


def columns_of(schema: StructType, *, decode: str) -> Columns:
    """What a schema asks for. Without `decode` it can only be a choice of the source's own columns."""
    if decode:
        envelope_of(decode)
    decoded = tuple(field for field in schema.fields if field.name not in _TYPES)
    if decoded and not decode:
        raise OptionError(
            f"the schema has a column {decoded[0].name!r} that the source does not: it has "
            f"{', '.join(_TYPES)}; give decode = json to read others from payloads"
        )
    for field in schema.fields:
        expected = _TYPES.get(field.name)
        if expected is not None and field.dataType != expected:
            raise OptionError(
                f"the column {field.name!r} is {expected.simpleString()}, "
                f"the schema says {field.dataType.simpleString()}"
            )
    return Columns(tuple(schema.fieldNames()), decoded)
