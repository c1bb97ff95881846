"""Columns of a lake that are decoded from payloads: the check of requested columns, and the decoding.

Payloads are decoded by the envelopes of the Spark source. For a payload of another kind, the decoded columns
are null. Its row still has the payload itself.
"""

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from headrace.errors import OptionError
from headrace.lake.columns import parse_columns
from headrace.lake.format import DATE, SCHEMA, Shape
from headrace.reader.decode import DecodedRecords
from headrace.spark.columns import columns_of, envelope_of

_RENAMED = {"channel": {"content": "payload"}}
"""Columns with another name in a lake, by kind of payload: a lake's `payload` is the whole record."""

_OWN = (*SCHEMA.names, DATE.name)


def shape_of(decode: str, schema: str, *, by_topic: bool) -> Shape:
    """Return the shape of a lake; raise OptionError if the columns are invalid."""
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
