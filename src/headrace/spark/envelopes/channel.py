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
from headrace.spark.columns import Stamps, check_known, members_beside
from headrace.spark.envelopes.json import JSON, decode_content, given

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

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        found = [_read(payload) for payload in payloads.to_pylist()]
        contents = (_text(one) or "" for one in found)
        return decode_content(
            contents, fields, self.own, lambda field: pa.array(_values(field, found), field.type)
        )

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        check_known(fields, _WRITTEN)
        if "processor" not in fields:
            raise OptionError(
                "encode = channel needs to know who sends: give the option processor, or a column processor"
            )
        if all(name in _OF_ENVELOPE for name in fields):
            raise OptionError(
                "encode = channel needs a column payload with the content, or columns for the members of a "
                "JSON object"
            )
        return members_beside(fields, _WRITTEN, "payload")

    def encode(self, columns: pa.RecordBatch, stamps: Stamps) -> pa.BinaryArray:
        processors = columns.column("processor")
        if processors.null_count:
            raise SinkError("a row has no processor: null cannot be written")
        payloads = []
        for processor, number, content in zip(
            processors.to_pylist(), given(columns, "number"), _contents(columns), strict=True
        ):
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


def _contents(columns: pa.RecordBatch) -> Iterable[Content]:
    names: list[str] = columns.schema.names
    if "payload" not in names:
        inner = [name for name in names if name not in _OF_ENVELOPE]
        for data in JSON.encode(columns.select(inner)).to_pylist():
            yield _checked(Content(data, is_json=True))
        return
    column = columns.column("payload")
    if column.null_count:
        raise SinkError("a row has no payload: null cannot be written")
    # A text payload is JSON and a binary one is bytes, unless the row's `is_json` says otherwise.
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    rows = zip(column.cast(pa.binary()).to_pylist(), given(columns, "is_json"), strict=True)
    for data, flag in rows:
        yield _checked(Content(data, is_text if flag is None else flag))


def _checked(content: Content) -> Content:
    if content.is_json:
        try:
            check_json(content.data)
        except BadMessageError as error:
            shown = content.data[:80].decode(errors="replace")
            raise SinkError(f"a row cannot be written: {error}: {shown}") from None
    return content
