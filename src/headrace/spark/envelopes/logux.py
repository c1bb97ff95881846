"""Envelope of Logux events: the event, its time and its origin as columns, and back.

`payload/logux.py` defines the format of an event in its topic. `json.py` reads and writes the event's
members. Rows without an id get one.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Raw
from pyspark.sql.types import (
    DataType,
    DoubleType,
    LongType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from headrace.errors import OptionError, SinkError
from headrace.model import LOGUX_PREFIX
from headrace.payload.logux import (
    BadEnvelopeError,
    Created,
    Envelope,
    Number,
    check_created,
    check_event,
    created_of,
    created_of_id,
    id_of,
    key_of,
    plain,
)
from headrace.spark.columns import Stamps, check_known, members_beside
from headrace.spark.envelopes.json import JSON, decode_content, given

_OF_ENVELOPE = ("created", "id", "time", "origin")

_WHOLE_MAX = float(1 << 63)
_YEAR_1_MS, _YEAR_10000_MS = -62_135_596_800_000, 253_402_300_800_000
"""Range of Python's timestamps. A value outside it would raise when the rows are collected."""

_encode = msgspec.json.Encoder().encode


class LoguxEnvelope:
    prefix = LOGUX_PREFIX
    own: Mapping[str, tuple[DataType, ...]] = {
        "event": (StringType(),),
        "type": (StringType(),),
        "created": (StringType(),),
        "id": (StringType(),),
        "time": (TimestampType(), TimestampNTZType(), LongType(), DoubleType()),
        "origin": (StringType(),),
    }

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        found = [_read(payload) for payload in payloads.to_pylist()]

        def own(field: pa.Field) -> pa.Array:
            if field.name == "time":
                return _times(found, field.type)
            text = _TEXTS[field.name]
            return pa.array([text(one) if one is not None else None for one in found], pa.string())

        events = (bytes(one.event) if one is not None else b"" for one in found)
        return decode_content(events, fields, self.own, own)

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        check_known(fields, self.own)
        if "event" not in fields and "type" not in fields:
            raise OptionError(
                "encode = logux needs a column event with the event as JSON, or a column type and one for "
                "each of the event's other members"
            )
        return members_beside(fields, self.own, "event")

    def encode(self, columns: pa.RecordBatch, stamps: Stamps) -> pa.BinaryArray:
        events = self._events(columns)
        first, now_ms = stamps.take(len(events)), time.time_ns() // 1_000_000
        payloads = []
        rows = zip(
            events,
            given(columns, "created"),
            given(columns, "id"),
            given(columns, "time", _milliseconds),
            given(columns, "origin"),
            strict=True,
        )
        for number, (event, created, id_, ms, origin) in enumerate(rows):
            envelope = Envelope(Raw(event), origin=origin)
            try:
                if created is None and id_ is None:
                    made = ms if ms is not None else now_ms
                    envelope.created = [made, stamps.node, first + number]
                else:
                    _name(envelope, created, id_, ms)
            except BadEnvelopeError as error:
                raise SinkError(f"a row cannot be written: {error}") from None
            payloads.append(_encode(envelope))
        return pa.array(payloads, pa.binary())

    def _events(self, columns: pa.RecordBatch) -> list[bytes]:
        names: list[str] = columns.schema.names
        if "event" not in names:
            if columns.column("type").null_count:
                raise SinkError("a row has no type: null cannot be written")
            inner = [name for name in names if name not in _OF_ENVELOPE]
            found: list[bytes] = JSON.encode(columns.select(inner)).to_pylist()
            return found
        column = columns.column("event")
        if column.null_count:
            raise SinkError("a row has no event: null cannot be written")
        events: list[bytes] = column.cast(pa.binary()).to_pylist()
        for event, kind in zip(events, given(columns, "type"), strict=True):
            try:
                check_event(event)
            except BadEnvelopeError as error:
                raise SinkError(f"a row cannot be written: {error}: {_shown(event)}") from None
            if kind is not None and kind != _type_of(event):
                raise SinkError(
                    f"a row's type is {kind!r}, and its event says another: {_shown(event)}"
                )
        return events


# Payloads → columns


class _Read(Envelope, gc=False):
    """An envelope whose `created` is validated while it is decoded."""

    created: Annotated[list[int | float | str], msgspec.Meta(min_length=1)] | None = None


class _Typed(msgspec.Struct):
    type: str | None = None


_decode = msgspec.json.Decoder(_Read).decode
_typed = msgspec.json.Decoder(_Typed).decode
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _read(payload: bytes) -> Envelope | None:
    """Decode a payload; None if it is not an event, so that its columns are null."""
    try:
        envelope = _decode(payload)
        if envelope.created is None:
            created_of_id(envelope.id or "")
    except (*_NOT_JSON, BadEnvelopeError):
        return None
    return envelope


def _type_of(event: bytes | Raw) -> str | None:
    try:
        return _typed(event).type
    except _NOT_JSON:
        return None


def _event(envelope: Envelope) -> str | None:
    try:
        return bytes(envelope.event).decode()
    except UnicodeDecodeError:
        return None


def _origin(envelope: Envelope) -> str | None:
    origin = envelope.origin
    return origin if origin is None or isinstance(origin, str) else str(plain(origin))


_TEXTS: dict[str, Callable[[Envelope], str | None]] = {
    "event": _event,
    "type": lambda one: _type_of(one.event),
    "created": lambda one: _encode(created_of(one)).decode(),
    "id": id_of,
    "origin": _origin,
}


def _times(found: Iterable[Envelope | None], kind: pa.DataType) -> pa.Array:
    ms = np.array([_ms(one) for one in found], np.float64)
    if pa.types.is_floating(kind):
        return pa.array(ms, kind, mask=np.isnan(ms))
    whole = np.floor(ms)
    if pa.types.is_timestamp(kind):
        bad = ~((whole >= _YEAR_1_MS) & (whole < _YEAR_10000_MS))
        whole, ms = np.where(bad, 0, whole), np.where(bad, 0, ms)
        us = whole.astype(np.int64) * 1000 + np.rint((ms - whole) * 1000).astype(np.int64)
        return pa.array(us, pa.int64(), mask=bad).cast(kind)
    bad = ~(np.abs(whole) < _WHOLE_MAX)
    return pa.array(np.where(bad, 0, whole).astype(np.int64), kind, mask=bad)


def _ms(envelope: Envelope | None) -> Number | None:
    """Return when the event happened, in milliseconds: its own time, or else the time in its id."""
    if envelope is None:
        return None
    ms: Any = envelope.time if envelope.time is not None else created_of(envelope)[0]
    return ms if not isinstance(ms, str) and abs(ms) < _WHOLE_MAX else None


# Columns → payloads


def _milliseconds(times: pa.Array) -> list[Number | None]:
    if pa.types.is_timestamp(times.type):
        us = times.cast(pa.timestamp("us", tz=times.type.tz)).cast(pa.int64()).to_pylist()
        return [plain(one / 1000) if one is not None else None for one in us]
    found: list[Number | None] = times.to_pylist()
    if any(one is not None and not abs(one) < _WHOLE_MAX for one in found):
        raise SinkError("a row's time is not a number of milliseconds since 1970")
    return [plain(one) if one is not None else None for one in found]


def _name(envelope: Envelope, created: str | None, id_: str | None, ms: Number | None) -> None:
    """Set the event's `created` or id, and its time, from its row; raise BadEnvelopeError."""
    if created is not None:
        envelope.created = _created(created)
        if id_ is not None and not _is_same(envelope, id_):
            raise BadEnvelopeError(f"its created {created[:80]} and its id {id_[:80]!r} differ")
    else:
        envelope.id = id_
        check_created(created_of(envelope))
    first = created_of(envelope)[0]
    if ms is not None and (isinstance(first, str) or ms not in (first, math.floor(first))):
        envelope.time = ms


def _created(text: str) -> Created:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadEnvelopeError(f"its created {text[:80]!r} is not JSON: {error}") from None
    return check_created(value)


def _is_same(envelope: Envelope, id_: str) -> bool:
    if id_of(envelope) == id_:
        return True
    return key_of(created_of_id(id_)) == key_of(created_of(envelope))


def _shown(event: bytes) -> str:
    return event[:80].decode(errors="replace")
