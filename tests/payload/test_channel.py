"""Encoding of channel messages in their topic: only one form, beginning with the sender."""

import json

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.channel import (
    NUMBER_MAX,
    PROCESSOR_BYTES_MAX,
    BadMessageError,
    Content,
    MessageTooLargeError,
    StoredMessage,
    check_json,
    check_processor,
    decode_message,
    encode_message,
    prefix_of,
)
from headrace.payload.json_limits import DEPTH_MAX

names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)
numbers = st.integers(1, NUMBER_MAX)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abé"), inner),
    max_leaves=10,
)  # fmt: skip
contents = st.builds(Content, st.binary(max_size=300), st.just(False)) | st.builds(
    lambda value: Content(json.dumps(value, ensure_ascii=False).encode(), True), values
)
messages = st.builds(StoredMessage, names, numbers, contents)


def json_of(text: str) -> Content:
    return Content(text.encode(), is_json=True)


def test_a_message_is_messagepack_that_anyone_reads():
    payload = encode_message(StoredMessage("a", 300, json_of('{ "é": 1.50 }')))
    assert payload == b'\x93\xa1a\xcd\x01\x2c\xae{ "\xc3\xa9": 1.50 }'
    assert msgpack.unpackb(payload) == ["a", 300, '{ "é": 1.50 }']
    payload = encode_message(StoredMessage("a" * 32, 1, Content(b"\xff", is_json=False)))
    assert payload == b"\x93\xd9\x20" + b"a" * 32 + b"\x01\xc4\x01\xff"


@given(messages)
@example(StoredMessage("a", 1, Content(b"", is_json=False)))
@example(StoredMessage("é" * 127 + "a", NUMBER_MAX, Content(bytes(70_000), is_json=False)))
@example(StoredMessage("a b", 1 << 32, json_of(f'"{"x" * 70_000}"')))
def test_what_is_encoded_is_decoded(message):
    payload = encode_message(message)
    found = decode_message(payload)
    assert found == message
    assert (type(found), type(found.content)) == (StoredMessage, Content)
    assert payload == msgpack.packb(msgpack.unpackb(payload))


@given(messages, names)
def test_it_is_seen_who_has_sent_a_message(message, other):
    payload = encode_message(message)
    assert payload.startswith(prefix_of(message.processor.encode()))
    assert payload.startswith(prefix_of(other.encode())) == (other == message.processor)


@pytest.mark.parametrize("size", [1, 30, 31, 32, 33, 254])
def test_a_name_that_begins_with_another_is_not_the_other(size):
    shorter, longer = (
        encode_message(StoredMessage("a" * n, 1, json_of("0"))) for n in (size, size + 1)
    )
    assert shorter.startswith(prefix_of(b"a" * size))
    assert not shorter.startswith(prefix_of(b"a" * (size + 1)))
    assert not longer.startswith(prefix_of(b"a" * size))
    assert longer.startswith(prefix_of(b"a" * (size + 1)))


@pytest.mark.parametrize("payload", [b"", b"\x93", b"\x93\xa2a", b"\x00" * 9])
def test_what_is_cut_off_is_from_no_one(payload):
    assert not payload.startswith(prefix_of(b"aa"))


# Refused messages


@given(st.binary(max_size=40) | st.binary(max_size=20).map(b"\x93\xa1a\x01".__add__))
def test_random_bytes_are_refused_or_are_a_message(data):
    try:
        message = decode_message(data)
    except BadMessageError:
        return
    assert encode_message(message) == data


@given(messages, st.data())
def test_a_changed_byte_is_noticed_or_makes_another_message(message, data):
    payload = bytearray(encode_message(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_message(bytes(payload))
    except BadMessageError:
        return
    assert found != message
    assert encode_message(found) == payload


@given(messages, st.data())
def test_a_message_that_is_cut_off_or_goes_on_is_refused(message, data):
    payload = encode_message(message)
    for wrong in (payload[: data.draw(st.integers(0, len(payload) - 1))], payload + b"\x00"):
        with pytest.raises(BadMessageError):
            decode_message(wrong)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (msgpack.packb({"a": 1}), "Expected `array`"),
        (msgpack.packb(["a", 1]), "length 3"),
        (msgpack.packb(["a", 1, "0", None]), "length 3"),
        (msgpack.packb([b"a", 1, "0"]), "Expected `str`"),
        (msgpack.packb(["a", "1", "0"]), "Expected `int`"),
        (msgpack.packb(["a", 1.0, "0"]), "."),
        (msgpack.packb(["a", True, "0"]), "Expected `int`"),
        (msgpack.packb(["a", 0, "0"]), "its number is 0"),
        (msgpack.packb(["a", -1, "0"]), "its number is -1"),
        (msgpack.packb(["a", NUMBER_MAX + 1, "0"]), f"its number is {NUMBER_MAX + 1}"),
        (msgpack.packb(["a", 1, 0]), "its content is neither a string nor bytes"),
        (msgpack.packb(["a", 1, None]), "its content is neither a string nor bytes"),
        (msgpack.packb(["a", 1, {"x": [1]}]), "its content is neither a string nor bytes"),
        (
            msgpack.packb(["a", 1, msgpack.ExtType(5, b"0")]),
            "its content is neither a string nor bytes",
        ),
        (msgpack.packb(["", 1, "0"]), "a processor's name must not be empty"),
        (msgpack.packb(["a\n", 1, "0"]), "a processor's name has no control characters"),
        (msgpack.packb(["a" * 256, 1, "0"]), "may have 255 bytes of UTF-8, this one has 256"),
        (b"\x93\xa1\xff\x01\xa10", "utf-8"),
        (b"\x93\xa1a\x01\xa1\xff", "utf-8"),
        (b"\xdc\x00\x03\xa1a\x01\xa10", "its headers are not the shortest"),
        (b"\x93\xd9\x01a\x01\xa10", "its headers are not the shortest"),
        (b"\x93\xa1a\xcc\x01\xa10", "its headers are not the shortest"),
        (b"\x93\xa1a\xd1\x01\x2c\xa10", "its headers are not the shortest"),
        (b"\x93\xa1a\x01\xda\x00\x010", "its headers are not the shortest"),
        (b"\x93\xa1a\x01\xc5\x00\x010", "its headers are not the shortest"),
        (b"\x93\xa1a\x01" + b"\x91" * 99_999, "recursion"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(payload, reason):
    with pytest.raises(BadMessageError, match=reason):
        decode_message(payload)


@pytest.mark.parametrize("is_json", [True, False])
def test_a_message_has_a_largest_size_with_all_that_is_around_it(is_json):
    around = len(encode_message(StoredMessage("a", 1, Content(bytes(100_000), is_json)))) - 100_000
    most = PAYLOAD_BYTES_MAX - around
    payload = encode_message(StoredMessage("a", 1, Content(b"x" * most, is_json)))
    assert len(payload) == PAYLOAD_BYTES_MAX
    with pytest.raises(MessageTooLargeError, match=f"{PAYLOAD_BYTES_MAX} bytes, this one has"):
        encode_message(StoredMessage("a", 1, Content(b"x" * (most + 1), is_json)))


@pytest.mark.parametrize("number", [0, -1, NUMBER_MAX + 1, 1 << 64])
def test_a_number_out_of_its_range_is_refused(number):
    with pytest.raises(BadMessageError, match=f"1 to {NUMBER_MAX}, this one is {number}"):
        encode_message(StoredMessage("a", number, json_of("0")))


def test_json_that_is_not_utf8_is_never_stored():
    with pytest.raises(BadMessageError, match="its content is not JSON"):
        encode_message(StoredMessage("a", 1, Content(b'"\xff"', is_json=True)))


@pytest.mark.parametrize("name", ["a", "é" * 127, "a b", "a/b:c", "😀", "x" * PROCESSOR_BYTES_MAX])
def test_a_processor_may_be_called(name):
    check_processor(name)
    assert decode_message(encode_message(StoredMessage(name, 1, json_of("0")))).processor == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "must not be empty"),
        ("é" * 128, "may have 255 bytes of UTF-8, this one has 256"),
        ("\ud800", "must be valid UTF-8"),
        ("a\x00", "has no control characters"),
        ("\x7f", "has no control characters"),
        ("\x85", "has no control characters"),
    ],
)
def test_a_processor_may_not_be_called(name, reason):
    for _ in range(2):
        with pytest.raises(BadMessageError, match=f"a processor's name {reason}"):
            check_processor(name)
        with pytest.raises(BadMessageError, match=f"a processor's name {reason}"):
            encode_message(StoredMessage(name, 1, json_of("0")))


# JSON


@given(values)
def test_json_is_taken(value):
    check_json(json.dumps(value).encode())
    check_json(json.dumps(value, ensure_ascii=False, indent=1).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nul", b"NaN", b"01", b"1 2", b"'a'", b"[1,]", b"\xef\xbb\xbf1", b'"\xff"', b'"\x01"',
     b'"\\ud800"', b"1e999", b'{"a":1,}', b"\x00", b"-", b"9" * 5000],
)  # fmt: skip
def test_what_is_no_json_is_refused(data):
    with pytest.raises(BadMessageError, match="its content is not JSON: "):
        check_json(data)


def test_half_of_a_surrogate_pair_is_told_as_what_it_is():
    with pytest.raises(
        BadMessageError, match=r"is not JSON: \\ud800 is one half of a surrogate pair"
    ):
        check_json(b'{"\\ud83d\\ude00": "\\ud800"}')


@pytest.mark.parametrize(("open_", "close"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_json_may_lie_so_deep_and_no_deeper(open_, close):
    check_json(open_ * DEPTH_MAX + b"0" + close * DEPTH_MAX)
    check_json(b"[" + b"[0]," * 1000 + b"0]")
    for depth in (DEPTH_MAX + 1, 99_999):
        with pytest.raises(BadMessageError, match=f"lie more than {DEPTH_MAX} deep in each other"):
            check_json(open_ * depth + b"0" + close * depth)


def test_an_integer_is_refused_when_no_float_can_hold_it():
    check_json(b'[{"a":%d}]' % (10**308))
    check_json(b"0." + b"1" * 400)
    for number in (10**309, -(10**309)):
        with pytest.raises(BadMessageError, match="integer that is too large for a float"):
            check_json(b'[{"a":%d}]' % number)
