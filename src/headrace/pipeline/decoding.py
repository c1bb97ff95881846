"""Columns of a lake that come out of payloads: which ones were asked for, and how a task makes them.

What payloads are is known to the same envelopes as in Spark's source. A payload of another kind has none of
the columns: they are null in its row, which still has the payload itself.
"""

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from headrace.lake.columns import parse_columns
from headrace.lake.format import DATE, SCHEMA, Shape
from headrace.spark.columns import columns_of
from headrace.spark.decode import Records
from headrace.spark.envelopes import envelope_of
from headrace.spark.options import OptionError

_RENAMED = {"channel": {"content": "payload"}}
"""Columns that are called otherwise in a lake, where `payload` is all of a record."""

_OWN = (*SCHEMA.names, DATE.name)


def shape_of(decode: str, schema: str, *, by_topic: bool) -> Shape:
    """Raises OptionError where the columns make no sense."""
    if not decode:
        if schema:
            raise OptionError("a schema names what is in payloads: say what they are with decode")
        return Shape(by_topic)
    decoded = _parsed(schema) if schema else _all_of(decode)
    for field in decoded:
        if field.name.lower() in _OWN:
            raise OptionError(f"every lake has a column {field.name.lower()!r}: name another one")
    renamed = _RENAMED.get(decode, {})
    inner = pa.schema([field.with_name(renamed.get(field.name, field.name)) for field in decoded])
    columns_of(from_arrow_schema(inner), decode=decode)
    return Shape(by_topic, decode, decoded)


def _parsed(schema: str) -> pa.Schema:
    try:
        return parse_columns(schema)
    except ValueError as error:
        raise OptionError(f"the schema is not understood: {error}") from None


def _all_of(decode: str) -> pa.Schema:
    own = envelope_of(decode).own
    if not own:
        raise OptionError(f"decode = {decode} needs a schema, such as 'id bigint, name string'")
    names = {inner: name for name, inner in _RENAMED.get(decode, {}).items()}
    fields = [StructField(names.get(name, name), kinds[0]) for name, kinds in own.items()]
    return to_arrow_schema(StructType(fields), timezone="UTC")


class Decoding:
    """For one task."""

    def __init__(self, shape: Shape) -> None:
        self._envelope = envelope_of(shape.decode) if shape.decode else None
        renamed = _RENAMED.get(shape.decode, {})
        self._fields = {
            field.name: field.with_name(renamed.get(field.name, field.name))
            for field in shape.decoded
        }

    def columns(self, records: Records) -> Mapping[str, pa.Array]:
        if self._envelope is None:
            return {}
        arrays = self._envelope.decode(records.payloads(), list(self._fields.values()))
        return dict(zip(self._fields, arrays, strict=True))
