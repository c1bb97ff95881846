"""Payloads that are JSON objects: their members as columns, and columns as their members."""

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from headrace.spark.envelopes import register_envelope

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class JsonEnvelope:
    prefix = ""

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        objects = [_object(payload) for payload in payloads.to_pylist()]
        return [_column(objects, field) for field in fields]

    def encode(self, columns: pa.RecordBatch) -> pa.BinaryArray:
        return pa.array([_encode(row) for row in columns.to_pylist()], pa.binary())


def _object(payload: bytes) -> dict[str, Any]:
    """The object, or an empty one for what is none: a payload of another kind has no such columns."""
    try:
        value = _decode(payload)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _column(objects: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [value.get(field.name) for value in objects]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # Some value is of another type: it alone becomes null.
        return pa.array([_fitting(value, field.type) for value in values], field.type)


def _fitting(value: object, kind: pa.DataType) -> object:
    if pa.types.is_string(kind) and value is not None and not isinstance(value, str):
        return _encode(value).decode()  # as Spark's own reader of JSON gives it
    if pa.types.is_timestamp(kind) and isinstance(value, str):
        try:
            return msgspec.convert(value, datetime.datetime)
        except msgspec.ValidationError:
            return None
    try:
        pa.scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return value


register_envelope("json", JsonEnvelope())
