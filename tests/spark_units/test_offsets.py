"""The offset in a checkpoint: the same text for the same positions, and read again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model import Position
from headrace.spark.log_view import SourceError
from headrace.spark.offsets import decode_offset, encode_offset, group_of

numbers = st.integers(0, (1 << 63) - 1)
positions = st.dictionaries(st.text(min_size=1), st.builds(Position, numbers, numbers, numbers))


@given(positions, st.text(max_size=5))
def test_what_is_encoded_is_decoded(found, group):
    text = json.dumps(encode_offset(found, group))
    assert decode_offset(json.loads(text)) == found
    assert group_of(json.loads(text)) == group


@given(positions)
def test_the_text_does_not_depend_on_the_order_of_topics(found):
    turned = dict(reversed(found.items()))
    assert json.dumps(encode_offset(found, "")) == json.dumps(encode_offset(turned, ""))


def test_the_format_is_the_one_that_checkpoints_hold():
    found = {"b": Position(1, 2, 3), "a": Position(4, 5, 6)}
    assert json.dumps(encode_offset(found, "g")) == (
        '{"format": 1, "group": "g", "topics": {"a": [4, 5, 6], "b": [1, 2, 3]}}'
    )


@pytest.mark.parametrize("offset", [{}, {"format": 2, "topics": {}}, {"topics": {}}])
def test_another_format_is_refused_and_has_no_group(offset):
    with pytest.raises(SourceError, match="format"):
        decode_offset(offset)
    assert group_of(offset) == ""
