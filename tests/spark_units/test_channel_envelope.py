"""Payloads that are channel messages: into columns and back, as processors could have sent them."""

import json
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import SinkError
from headrace.payload.channel import Content, StoredMessage, check_row, decode_row, encode_message
from headrace.spark.columns import Stamps
from headrace.spark.envelopes.channel import ChannelEnvelope

STAMPS = Stamps("spark", 0)
OWN = {
    "processor": pa.string(),
    "number": pa.int64(),
    "payload": pa.binary(),
    "is_json": pa.bool_(),
}


def json_message(processor: str, number: int, value: Any) -> bytes:
    return encode_message(
        StoredMessage(processor, number, Content(json.dumps(value).encode(), True))
    )


def decode(payloads: list[bytes], **kinds: pa.DataType) -> dict[str, list[Any]]:
    fields = [pa.field(name, kind) for name, kind in kinds.items()]
    arrays = ChannelEnvelope().decode(pa.array(payloads, pa.binary()), fields)
    for field, array in zip(fields, arrays, strict=True):
        array.validate(full=True)
        assert array.type == field.type
    return {name: array.to_pylist() for name, array in zip(kinds, arrays, strict=True)}


def encode(**columns: Any) -> list[StoredMessage]:
    batch = pa.RecordBatch.from_pydict(columns)
    payloads = ChannelEnvelope().encode(batch, STAMPS).to_pylist()
    for payload in payloads:
        check_row(payload)
    return [decode_row(payload) for payload in payloads]


def test_messages_have_their_own_columns():
    raw = encode_message(StoredMessage("b", 1 << 40, Content(b"\xff\x00", False)))
    found = decode([json_message("ä", 1, {"n": 5}), raw, json_message("a", 2, None)], **OWN)
    assert found == {
        "processor": ["ä", "b", "a"],
        "number": [1, 1 << 40, 2],
        "payload": [b'{"n": 5}', b"\xff\x00", b"null"],
        "is_json": [True, False, True],
    }


@pytest.mark.parametrize(
    "payload",
    [b"", b"x", b"\x93", b"\x92\xa1a\x01", b"\x93\xa1a\x00\xa1x", b"\x93\xa1\xff\x01\xa1x"],
)
def test_what_is_no_message_is_null(payload):
    found = decode([payload, json_message("a", 1, 2)], **OWN, n=pa.int64())
    assert [column[0] for column in found.values()] == [None] * 5
    assert found["number"][1] == 1


def test_members_of_json_contents_are_columns():
    raw = encode_message(StoredMessage("b", 1, Content(b'{"n": 1}', False)))
    found = decode(
        [json_message("a", 1, {"n": 5, "s": "x"}), json_message("a", 2, [5]), raw],
        n=pa.int64(),
        s=pa.string(),
        payload=pa.string(),
    )
    assert found["n"] == [5, None, None]
    assert found["s"] == ["x", None, None]
    assert found["payload"] == ['{"n": 5, "s": "x"}', "[5]", None]


def test_text_is_json_and_bytes_are_bytes_unless_a_row_says_otherwise():
    [text] = encode(processor=["p"], payload=['{"n": 1}'])
    assert text == StoredMessage("p", 0, Content(b'{"n": 1}', True))
    flags = [None, False, True]
    contents = encode(processor=["p"] * 3, payload=[b"[1]"] * 3, is_json=flags)
    assert [one.content.is_json for one in contents] == [False, False, True]


def test_what_was_read_is_written_as_it_was():
    raw = encode_message(StoredMessage("b", 7, Content(b"\xff", False)))
    payloads = [json_message("a", 1, {"n": [1, 2]}), raw]
    arrays = ChannelEnvelope().decode(
        pa.array(payloads, pa.binary()), [pa.field(*one) for one in OWN.items()]
    )
    batch = pa.RecordBatch.from_arrays(arrays, names=list(OWN))
    assert ChannelEnvelope().encode(batch, STAMPS).to_pylist() == payloads


def test_other_columns_are_members_and_rows_without_a_number_get_one_later():
    found = encode(processor=["p", "q"], number=[3, None], n=[1, 2], s=["x", None])
    assert found == [
        StoredMessage("p", 3, Content(b'{"n":1,"s":"x"}', True)),
        StoredMessage("q", 0, Content(b'{"n":2,"s":null}', True)),
    ]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"processor": [None], "payload": ["1"]}, "a row has no processor: null"),
        ({"processor": ["p"], "payload": [None]}, "a row has no payload: null"),
        ({"processor": [""], "payload": ["1"]}, "a processor's name must not be empty"),
        ({"processor": ["p"], "payload": ["{"]}, "its content is not JSON"),
        ({"processor": ["p"], "payload": [b"\xff"], "is_json": [True]}, "its content is not JSON"),
        ({"processor": ["p"], "payload": ["1"], "number": [0]}, "is 1 to 9007199254740991, not 0"),
        ({"processor": ["p"], "payload": ["1"], "number": [-1]}, "this one is -1"),
        ({"processor": ["p"], "payload": [bytes(262144)]}, "may have 262144 bytes"),
    ],
)
def test_what_no_processor_could_send_is_refused(columns, said):
    kinds = {"processor": pa.string()}
    if columns["payload"] == [None]:
        kinds["payload"] = pa.string()
    arrays = {name: pa.array(values, kinds.get(name)) for name, values in columns.items()}
    with pytest.raises(SinkError, match=said):
        encode(**arrays)
