"""Manifests on disk: read as they were written, folded, and refused when they are newer or damaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.format import File, LakeError, Lost, Manifest, Range, decode_manifest
from headrace.lake.manifests import Manifests
from headrace.model import Position

number = st.integers(0, (1 << 62) - 1)
positions = st.dictionaries(st.text(max_size=5), st.builds(Position, number, number, number))


def manifest(which: int, start: dict, end: dict) -> Manifest:
    return Manifest(number=which, start=start, end=end, files=(), ranges=())


@given(positions, positions, st.lists(st.builds(Lost, st.text(), number, number)))
def test_a_manifest_is_read_as_it_was_written(start, end, lost):
    one = Manifest(
        number=7,
        start=start,
        end=end,
        files=(File("date=2024-10-04/x.parquet", 100, 3),),
        ranges=(Range("é", 1, 2, 3, 4, 5, 6, 0),),
        lost=tuple(lost),
    )
    assert decode_manifest(one.encode(), "here") == one


def test_positions_are_those_of_the_last_batch_that_changed_a_topic(tmp_path):
    found = Manifests(tmp_path)
    a0, a1, a2 = (Position(1, 10 * n, n) for n in range(3))
    found.write(manifest(0, {"a": a0}, {"a": a1}))
    found.write(manifest(1, {"b": a0}, {"b": a2}))
    found.write(manifest(2, {"a": a1}, {"a": a2}))
    assert found.reach(None) == ({}, {})
    assert found.reach(1) == ({"a": a0, "b": a0}, {"a": a1, "b": a2})
    assert found.reach(2) == ({"a": a0, "b": a0}, {"a": a2, "b": a2})


def test_one_that_was_not_committed_is_written_over(tmp_path):
    found = Manifests(tmp_path)
    found.write(manifest(0, {"a": Position(1, 0, 0)}, {}))
    found.write(manifest(0, {}, {}))
    assert found.read(0) == manifest(0, {}, {})
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_newer_a_damaged_and_a_missing_one_are_refused(tmp_path):
    found = Manifests(tmp_path)
    found.write(manifest(0, {}, {}))
    (path,) = tmp_path.rglob("*.json")
    path.write_text('{"format": 2, "something": "else"}')
    with pytest.raises(
        LakeError, match=r"was written by a newer version \(format 2, this one writes 1\)"
    ):
        found.read(0)
    path.write_text('{"format": 1, "number": 0')
    with pytest.raises(LakeError, match="is damaged"):
        found.read(0)
    path.unlink()
    with pytest.raises(LakeError, match="is missing"):
        found.read(0)
