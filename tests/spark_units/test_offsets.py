"""The offset in a checkpoint: equal positions give equal texts, and it can be read back."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX, Position
from headrace.reader.view import SourceError
from headrace.spark.progress import decode_offset, encode_offset, group_of, joined_in
from headrace.spark.source import HeadraceSource
from tests.archives import extract

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
        '{"format": 2, "group": "g", "topics": {"a": [4, 5, 6], "b": [1, 2, 3]}}'
    )


@pytest.mark.parametrize("offset", [{}, {"format": 3, "topics": {}}, {"topics": {}}])
def test_another_format_is_refused_and_has_no_group(offset):
    with pytest.raises(SourceError, match="format"):
        decode_offset(offset)
    assert group_of(offset) == ""


def test_a_checkpoint_of_an_earlier_version_has_the_present_names():
    place = [1, 2, 3]
    names = {"channel/room": place, "logux/main": place, "apple": place}
    offset = {"format": 1, "group": "g", "topics": names, "joined": {"channel/room": place}}
    renamed = {CHANNEL_PREFIX + "room", LOGUX_PREFIX + "main", "apple"}
    assert decode_offset(offset).keys() == renamed
    assert joined_in(offset).keys() == {CHANNEL_PREFIX + "room"}
    assert group_of(offset) == "g"
    present = encode_offset({"channel/room": Position(1, 2, 3)}, "")
    assert decode_offset(present).keys() == {"channel/room"}


def test_a_query_goes_on_from_a_checkpoint_of_an_earlier_version(tmp_path):
    archive = Path(__file__).parent.parent / "pipeline" / "old_names.tar.xz"
    extract(archive, tmp_path)
    room = CHANNEL_PREFIX + "room"
    source = HeadraceSource({"path": str(tmp_path / "data"), "subscribe": room})
    reader = source.streamReader(source.schema())
    ends = decode_offset(reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit()))
    epoch, end, _ = ends[room]
    start = {"format": 1, "group": "", "topics": {"channel/room": [epoch, end // 6 * 4, 4]}}
    latest = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert decode_offset(latest) == ends
    rows = [
        row
        for part in reader.partitions(start, latest)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert [(row["topic"], row["ordinal"]) for row in rows] == [(room, 4), (room, 5)]
