"""Envelope of channel messages: processor, number and content as columns, and back.

`payload/channel.py` defines the format of a message in its topic and in an upload. `json.py` reads and writes
the members of a JSON content. The server numbers the messages of rows without a number.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
)

from headrace.errors import OptionError, SinkError
from headrace.model import CHANNEL_PREFIX
from headrace.payload.channel import (
    NUMBER_MAX,
    UNNUMBERED,
    BadMessageError,
    Content,
    StoredMessage,
    check_json,
    encode_row,
)
from headrace.spark.columns import POSITIONS, Stamps, register_envelope
from headrace.spark.envelopes.json import JsonEnvelope

_OF_ENVELOPE = ("processor", "number", "is_json")

_WRITTEN: Mapping[str, tuple[DataType, ...]] = {
    "processor": (StringType(),),
    "number": (LongType(), IntegerType()),
    "payload": (BinaryType(), StringType()),
    "is_json": (BooleanType(),),
}

_Number = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
_Read = tuple[str, int, str | bytes]
_decode = msgspec.msgpack.Decoder(tuple[str, _Number, Any]).decode


class ChannelEnvelope:
    prefix = CHANNEL_PREFIX
    own: Mapping[str, tuple[DataType, ...]] = {
        "processor": (StringType(),),
        "number": (LongType(),),
        "payload": (BinaryType(), StringType()),
        "is_json": (BooleanType(),),
    }

    def __init__(self) -> None:
        self._json = JsonEnvelope()

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        found = [_read(payload) for payload in payloads.to_pylist()]
        members = [field for field in fields if field.name not in self.own]
        columns: dict[str, pa.Array] = {}
        if members:
            texts = [_text(one) or "" for one in found]
            arrays = self._json.decode(pa.array(texts, pa.binary()), members)
            columns = {field.name: array for field, array in zip(members, arrays, strict=True)}
        for field in fields:
            if field.name in self.own:
                columns[field.name] = pa.array(_values(field, found), field.type)
        return [columns[field.name] for field in fields]

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        for name, kind in fields.items():
            kinds = _WRITTEN.get(name)
            if kinds is None and name.lower() in _WRITTEN:
                raise OptionError(f"write the column {name!r} as {name.lower()!r}")
            if kinds is not None and not isinstance(kind, tuple(map(type, kinds))):
                wanted = " or ".join(one.simpleString() for one in kinds)
                raise OptionError(f"the column {name} must be {wanted}, not {kind.simpleString()}")
        if "processor" not in fields:
            raise OptionError(
                "encode = channel needs to know who sends: give the option processor, or a column processor"
            )
        if all(name in _OF_ENVELOPE for name in fields):
            raise OptionError(
                "encode = channel needs a column payload with the content, or columns for the members of a "
                "JSON object"
            )
        names = tuple(fields)
        if "payload" not in fields:
            return names
        names = tuple(name for name in names if name not in POSITIONS)
        others = [name for name in names if name not in _WRITTEN]
        if others:
            raise OptionError(
                f"the column {others[0]!r} would not be written: the column payload is the whole content; "
                "leave out one of them"
            )
        return names

    def encode(self, columns: pa.RecordBatch, stamps: Stamps) -> pa.BinaryArray:
        names: list[str] = columns.schema.names
        processors = columns.column("processor")
        if processors.null_count:
            raise SinkError("a row has no processor: null cannot be written")
        numbers = columns.column("number").to_pylist() if "number" in names else None
        payloads = []
        for place, (processor, content) in enumerate(
            zip(processors.to_pylist(), self._contents(columns), strict=True)
        ):
            number = numbers[place] if numbers is not None else None
            try:
                if number == UNNUMBERED:
                    raise BadMessageError(f"the number of a message is 1 to {NUMBER_MAX}, not 0")
                message = StoredMessage(
                    processor, number if number is not None else UNNUMBERED, content
                )
                payloads.append(encode_row(message))
            except BadMessageError as error:
                raise SinkError(f"a row cannot be written: {error}") from None
        return pa.array(payloads, pa.binary())

    def _contents(self, columns: pa.RecordBatch) -> Iterable[Content]:
        names: list[str] = columns.schema.names
        if "payload" not in names:
            inner = [name for name in names if name not in _OF_ENVELOPE]
            for data in self._json.encode(columns.select(inner)).to_pylist():
                yield _checked(Content(data, is_json=True))
            return
        column = columns.column("payload")
        if column.null_count:
            raise SinkError("a row has no payload: null cannot be written")
        # A text payload is JSON and a binary one is bytes, unless the row's `is_json` says otherwise.
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        flags = (
            columns.column("is_json").to_pylist() if "is_json" in names else [None] * len(column)
        )
        for data, flag in zip(column.cast(pa.binary()).to_pylist(), flags, strict=True):
            yield _checked(Content(data, is_text if flag is None else flag))


# Payloads → columns


def _read(payload: bytes) -> _Read | None:
    """Decode a payload; None if it is not a message, so that its columns are null."""
    try:
        found = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if type(found[2]) in (str, bytes) else None


def _text(message: _Read | None) -> str | None:
    """Return the message's content if it is JSON, otherwise None."""
    return message[2] if message is not None and isinstance(message[2], str) else None


def _values(field: pa.Field, found: Sequence[_Read | None]) -> list[Any]:
    if field.name == "processor":
        return [one and one[0] for one in found]
    if field.name == "number":
        return [one and one[1] for one in found]
    if field.name == "is_json":
        return [one and isinstance(one[2], str) for one in found]
    if pa.types.is_binary(field.type):
        return [one and one[2] for one in found]
    return [_text(one) for one in found]


# Columns → payloads


def _checked(content: Content) -> Content:
    if content.is_json:
        try:
            check_json(content.data)
        except BadMessageError as error:
            shown = content.data[:80].decode(errors="replace")
            raise SinkError(f"a row cannot be written: {error}: {shown}") from None
    return content


register_envelope("channel", ChannelEnvelope())
