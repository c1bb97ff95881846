"""Envelope of JSON objects: members as columns, and columns as members.

The rules are those of Spark's own JSON reader. A value whose type does not match its column becomes null and
affects no other value. A string column accepts any value, as text. Numeric times are seconds. Bytes are
base64.
"""

import base64
import datetime
import decimal
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.types import DataType

from headrace.errors import SinkError
from headrace.spark.columns import Stamps

_decode = msgspec.json.Decoder().decode
_decode_exactly = msgspec.json.Decoder(float_hook=decimal.Decimal).decode
_DECIMALS = decimal.Context(prec=38)
"""Number of digits in a Spark decimal."""
_encode = msgspec.json.Encoder(decimal_format="number").encode

_NONE = type(None)
_1970 = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class JsonEnvelope:
    prefix = ""
    own: Mapping[str, tuple[DataType, ...]] = {}

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        exactly = any(_has_decimals(field.type) for field in fields)
        decode = _decode_exactly if exactly else _decode
        objects = [_object(payload, decode) for payload in payloads.to_pylist()]
        return [_column([one.get(field.name) for one in objects], field.type) for field in fields]

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        return tuple(fields)

    def encode(self, columns: pa.RecordBatch, stamps: Stamps | None = None) -> pa.BinaryArray:
        try:
            rows = columns.to_pylist(maps_as_pydicts="strict")
        except KeyError as error:
            raise SinkError(f"a row cannot be written: a map in it: {error.args[0]}") from None
        return pa.array([_encode(row) for row in rows], pa.binary())


def decode_content(
    contents: Iterable[bytes | str],
    fields: Sequence[pa.Field],
    own: Collection[str],
    decode: Callable[[pa.Field], pa.Array],
) -> list[pa.Array]:
    """Decode columns of an envelope around JSON: members of the contents, and the envelope's own columns."""
    members = [field for field in fields if field.name not in own]
    found = JSON.decode(pa.array(contents, pa.binary()), members) if members else []
    arrays = iter(found)
    return [decode(field) if field.name in own else next(arrays) for field in fields]


def given(
    columns: pa.RecordBatch, name: str, values: Callable[[pa.Array], list[Any]] = pa.Array.to_pylist
) -> list[Any]:
    """Return the values of a column; a list of None if the column is missing."""
    if name in columns.schema.names:
        return values(columns.column(name))
    return [None] * columns.num_rows


def _object(payload: bytes, decode: Callable[[bytes], Any]) -> dict[str, Any]:
    """Decode a JSON object; an empty one if the payload is anything else, so that its columns are null."""
    try:
        value = decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _leniently(payload)
    return value if isinstance(value, dict) else {}


def _leniently(payload: bytes) -> Any:
    """Decode such that one value that is too large, or not valid text, does not lose the others."""
    try:
        return json.loads(payload, parse_float=_finite, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _has_decimals(kind: pa.DataType) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return pa.types.is_decimal(kind) or any(map(_has_decimals, inner))


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if {type(value) for value in values} <= _taken(kind):
        try:
            return pa.array(values, kind)
        except (ValueError, OverflowError):
            pass  # one of the values is too large
    return pa.array([_fitting(value, kind) for value in values], kind)


def _taken(kind: pa.DataType) -> set[type]:
    """Return the types of values that Arrow converts correctly. With others it might drop a fraction."""
    if pa.types.is_integer(kind):
        return {int, _NONE}
    if pa.types.is_floating(kind):
        return {int, float, _NONE}
    if pa.types.is_boolean(kind):
        return {bool, _NONE}
    return {str, _NONE} if pa.types.is_string(kind) else set()


def _fitting(value: Any, kind: pa.DataType) -> Any:
    """Return the value as Arrow accepts it for a column of this type, or None."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return _members(value, kind) if isinstance(value, dict) else None
    if pa.types.is_map(kind):
        if not isinstance(value, dict):
            return None
        return [(key, _fitting(one, kind.item_type)) for key, one in value.items()]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (
            [_fitting(one, kind.value_type) for one in value] if isinstance(value, list) else None
        )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _text(value)
    try:
        found = _single(value, kind)
        pa.scalar(found, kind)
    except (ValueError, TypeError, OverflowError, decimal.InvalidOperation):
        return None
    return found


def _text(value: Any) -> str | None:
    try:
        text = value if isinstance(value, str) else _encode(value).decode()
        text.encode()
    except (UnicodeEncodeError, msgspec.MsgspecError):
        return None
    return text


def _members(value: dict[str, Any], kind: pa.StructType) -> dict[str, Any]:
    return {field.name: _fitting(value.get(field.name), field.type) for field in kind}


def _single(value: Any, kind: pa.DataType) -> Any:
    """Convert a single value; return None or raise if it does not fit the type."""
    is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
    if pa.types.is_integer(kind) and is_number:
        return int(value) if value == int(value) else None
    if pa.types.is_floating(kind) and is_number:
        return float(value)
    if pa.types.is_boolean(kind) and isinstance(value, bool):
        return value
    if pa.types.is_decimal(kind) and (is_number or isinstance(value, str)):
        unit = decimal.Decimal(1).scaleb(-kind.scale)
        return decimal.Decimal(str(value)).quantize(unit, context=_DECIMALS)
    if pa.types.is_timestamp(kind):
        return _moment(value, is_number, aware=kind.tz is not None)
    if pa.types.is_date(kind) and isinstance(value, str):
        return msgspec.convert(value, datetime.date)
    if pa.types.is_binary(kind) and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    return None


def _moment(value: Any, is_number: bool, *, aware: bool) -> datetime.datetime | None:
    if is_number:
        moment = _1970 + datetime.timedelta(seconds=float(value))
    elif isinstance(value, str):
        moment = msgspec.convert(value, datetime.datetime)
    else:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    moment = moment.astimezone(datetime.UTC)
    return moment if aware else moment.replace(tzinfo=None)


JSON = JsonEnvelope()
