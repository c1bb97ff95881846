"""Encoding of Logux events in their topic: nothing is lost, and both ways to name an event are equivalent."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.logux import (
    BadEnvelopeError,
    Envelope,
    created_of,
    created_of_id,
    decode_envelope,
    encode_envelope,
    id_of,
    key_of,
    raw_event,
    stamp_of,
)

EVENT = {"type": "a", "é": [1, 2.5, None, {"x": True}]}

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
times = st.lists(numbers | st.text(max_size=5), min_size=1, max_size=4)


def test_an_envelope_is_json_that_anyone_reads():
    made = encode_envelope(
        Envelope(raw_event(EVENT), created=[1475316540687.5, "client2", 0], origin="client2")
    )
    expected = (
        '{"event":{"type":"a","é":[1,2.5,null,{"x":true}]},"created":[1475316540687.5,"client2",0]'
    )
    assert made.decode() == expected + ',"origin":"client2"}'


@given(times, st.text(max_size=5) | numbers)
def test_what_is_encoded_is_decoded(created, origin):
    found = decode_envelope(
        encode_envelope(Envelope(raw_event(EVENT), created=created, origin=origin))
    )
    assert (found.created, found.origin) == (created, origin)
    assert bytes(found.event) == bytes(raw_event(EVENT))


@pytest.mark.parametrize(
    "payload",
    [b"", b"{}", b"[]", b'{"event":{}}', b'{"created":[1]}', b"\xff", b'{"event":{},"created":5}',
     b"[" * 9999],
)  # fmt: skip
def test_what_is_no_event_is_refused(payload):
    with pytest.raises(BadEnvelopeError):
        decode_envelope(payload)


def test_an_event_that_is_too_large_is_refused_with_the_limit():
    envelope = Envelope(raw_event({"type": "x" * PAYLOAD_BYTES_MAX}), created=[1], origin="a")
    with pytest.raises(BadEnvelopeError, match=f"may have {PAYLOAD_BYTES_MAX} bytes"):
        encode_envelope(envelope)


@given(times, times)
def test_times_are_one_when_their_numbers_and_strings_are(one, other):
    assert (key_of(one) == key_of(other)) == (one == other)


def test_numbers_are_compared_as_numbers():
    assert key_of([1.0, "a", 0]) == key_of([1, "a", 0.0])
    assert key_of([1, "a", 0]) != key_of(["1", "a", 0])
    assert key_of([1.5, "a", 0]) != key_of([1, "a", 0])


@pytest.mark.parametrize(
    ("created", "text"),
    [
        ([1475316540687, "a:b:c", 2], "1475316540687 a:b:c 2"),
        ([1475316540687.5, "a", 0], "1475316540687.5 a 0"),
        ([1.0, "a", 0], "1 a 0"),
    ],
)
def test_a_standard_time_and_an_id_are_the_same(created, text):
    assert id_of(Envelope(raw_event(EVENT), created=created)) == text
    assert key_of(created_of_id(text)) == key_of(created)
    assert created_of(Envelope(raw_event(EVENT), id=text)) == created_of_id(text)


@pytest.mark.parametrize(
    "created", [["x"], [1], [1, "a b", 0], [1, 2], ["a", 1, 2], [1, "a", 0, 0]]
)
def test_other_times_have_an_id_of_their_own(created: list[Any]):
    text = id_of(Envelope(raw_event(EVENT), created=created))
    assert len(text.split(" ")) == 3
    assert text == id_of(Envelope(raw_event(EVENT), created=created))
    assert text != id_of(Envelope(raw_event(EVENT), created=[*created, 1]))


@pytest.mark.parametrize(
    "text", ["", "1", "1 a", "x a 0", "1 a x", "1 a 0 0", "1e5 a 0", "nan a 0", "١ a 0"]
)
def test_what_is_no_id_is_refused(text):
    with pytest.raises(BadEnvelopeError, match="is not an id"):
        created_of_id(text)


def test_only_the_standard_timer_makes_stamps():
    assert stamp_of([1, "a", 2]) == (1, "a", 2)
    assert stamp_of([1, 5, 2]) == (1, 5, 2)
    for created in ([1], ["1", "a", 2], [1, "a", "2"], [1, "a", 2, 3]):
        assert stamp_of(created) is None
