"""Raw ranges of a topic: answers are limited, and a reader that continues misses nothing."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.commit.journal import APPEND, encode_entry
from headrace.log.layout import Layout
from headrace.log.read.index import decode_rows
from headrace.log.read.raw import RawTopic
from headrace.log.records import pack_record
from headrace.model import Position


def tail_of(sizes: list[int]) -> tuple[RawTopic, bytes]:
    """Make a topic whose records are all in the tail. Each record has its own time and so its own run."""
    tail, log = [], b""
    for number, size in enumerate(sizes):
        record = pack_record(bytes([number % 256]) * size)
        tail.append(encode_entry(APPEND, 1, len(log), number, 1, 200 * number, b"", record, seed=0))
        log += record
    end = Position(1, len(log), len(sizes))
    return RawTopic(Layout(Path("/nowhere")), end, [], tail), log


sizes = st.lists(st.integers(0, 30), min_size=1, max_size=30)


@given(sizes, st.integers(1, 8))
def test_rows_are_found_in_as_many_answers_as_it_takes(sizes, rows_max):
    raw, log = tail_of(sizes)
    rows, at = [], 0
    while packed := raw.rows(at, len(log), rows_max):
        found = [row for row in decode_rows(packed) if row is not None]
        assert len(found) <= rows_max
        rows += found
        at = rows[-1].end
    assert at == len(log)
    assert [row.ordinal for row in rows] == list(range(len(sizes)))


@given(sizes, st.data())
def test_bytes_are_those_of_the_range(sizes, data):
    raw, log = tail_of(sizes)
    start = data.draw(st.integers(0, len(log)))
    end = data.draw(st.integers(start, len(log)))
    assert b"".join(raw.pieces(start, end)) == log[start:end]


@given(sizes, st.integers(1, 60), st.integers(1, 10))
def test_splits_are_so_far_apart_and_not_more_than_allowed(sizes, step, splits_max):
    raw, log = tail_of(sizes)
    found = raw.splits(0, len(log), step, splits_max)
    assert len(found) <= splits_max
    assert all(0 < at.offset < len(log) for at in found)
    for one, two in pairwise([Position(1, 0, 0), *found]):
        assert two.offset - one.offset >= step


@pytest.mark.parametrize("at", [0, 5, 1000])
def test_an_empty_range_has_no_rows_and_no_bytes(at):
    raw, _ = tail_of([3, 3])
    assert raw.rows(at, at, 10) == b""
    assert list(raw.pieces(at, at)) == []
