"""Manifests on disk: read as they were written, folded, and refused if they are newer or damaged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.lake.format import (
    File,
    LakeError,
    LostRange,
    Manifest,
    MergedManifest,
    RecordRange,
    decode_folded,
    decode_manifest,
)
from headrace.lake.manifests import Manifests
from headrace.model import Position

number = st.integers(0, (1 << 62) - 1)
positions = st.dictionaries(st.text(max_size=5), st.builds(Position, number, number, number))


def manifest(which: int, start: dict, end: dict) -> Manifest:
    return Manifest(number=which, start=start, end=end, files=(), ranges=())


@given(positions, positions, st.lists(st.builds(LostRange, st.text(), number, number)))
def test_a_manifest_is_read_as_it_was_written(start, end, lost):
    one = Manifest(
        number=7,
        start=start,
        end=end,
        files=(File("date=2024-10-04/x.parquet", 100, 3),),
        ranges=(RecordRange("é", 1, 2, 3, 4, 5, 6, 0),),
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
    path.write_text('{"format": 3, "something": "else"}')
    with pytest.raises(
        LakeError, match=r"was written by a newer version \(format 3, this one writes 2\)"
    ):
        found.read(0)
    path.write_text('{"format": 1, "number": 0')
    with pytest.raises(LakeError, match="is damaged"):
        found.read(0)
    path.unlink()
    with pytest.raises(LakeError, match="is missing"):
        found.read(0)


def batches(found: Manifests, count: int) -> list[Manifest]:
    """Make batches of one record each for topic `a`; every second batch also has its own topic."""
    made = []
    for which in range(count):
        names = ["a", f"b{which}"] if which % 2 else ["a"]
        at = {name: which if name == "a" else 0 for name in names}
        made.append(
            Manifest(
                number=which,
                start={name: Position(1, 5 * n, n) for name, n in at.items()},
                end={name: Position(1, 5 * n + 5, n + 1) for name, n in at.items()},
                files=(File("x", 1, 1),),
                ranges=tuple(
                    RecordRange(name, 1, 5 * n, 5 * n + 5, n, n + 1, 0) for name, n in at.items()
                ),
                lost=(LostRange("c", which, which + 1),),
            )
        )
        found.write(made[-1])
    return made


def nothing(one: Manifest) -> None: ...


def files_of(root):
    return sorted(str(path.relative_to(root / "_headrace")) for path in root.rglob("*.json"))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 5), max_size=3))
def test_folded_ones_say_the_same_as_each_of_them(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("lake")
    found = Manifests(root)
    made = batches(found, 6)
    before = [found.reach(last) for last in range(6)]
    for until in steps:
        found.fold(until, nothing)
    count = max(steps, default=0)
    assert [found.reach(last) for last in range(count, 6)] == before[count:]
    folded = found.folded()
    assert (folded.batches, len(folded.lost)) == (count, count)
    assert sum(one.rows for one in folded.ranges) == sum(
        one.rows for which in made[:count] for one in which.ranges
    )
    assert len([one for one in folded.ranges if one.topic == "a"]) == (1 if count else 0)
    assert decode_folded(folded.encode(), "here").encode() == folded.encode()
    whole = [f"folded/{count:012}.json"] if count else []
    assert files_of(root) == [f"batches/{n:012}.json" for n in range(count, 6)] + whole


def test_one_that_was_killed_while_it_folded_is_finished_and_a_shorter_one_never_counts(tmp_path):
    found = Manifests(tmp_path)
    batches(found, 6)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    found.fold(2, nothing)
    shorter = found.folded_path(2).read_bytes()
    assert found.fold(5, nothing) == 3
    # All deleted files are there again, and so is a file that another process has made meanwhile.
    for path, data in kept.items():
        path.write_bytes(data)
    found.folded_path(2).write_bytes(shorter)
    assert found.folded().batches == 5
    assert found.fold(5, nothing) == 0
    assert files_of(tmp_path) == ["batches/000000000005.json", "folded/000000000005.json"]


def test_one_that_must_stay_keeps_all(tmp_path):
    found = Manifests(tmp_path)
    batches(found, 3)
    before = files_of(tmp_path)

    def refuse(one: Manifest) -> None:
        raise LakeError(f"not {one.number}")

    with pytest.raises(LakeError, match="not 0"):
        found.fold(3, refuse)
    assert files_of(tmp_path) == before


def test_folded_ones_that_are_damaged_or_newer_are_refused(tmp_path):
    found = Manifests(tmp_path)
    batches(found, 3)
    found.fold(2, nothing)
    path = found.folded_path(2)
    path.write_bytes(path.read_bytes().replace(b'"batches":2', b'"batches":1'))
    with pytest.raises(LakeError, match="is damaged"):
        found.reach(2)
    path.write_bytes(MergedManifest(batches=2, format=3).encode())
    with pytest.raises(LakeError, match="newer version"):
        found.reach(2)


def test_a_fold_between_two_reads_does_no_harm(tmp_path, monkeypatch):
    found = Manifests(tmp_path)
    batches(found, 4)
    expected = found.reach(3)
    folding = [lambda: Manifests(tmp_path).fold(3, nothing)]
    read = Manifests.read

    def meddled(self, number):
        if number == 1 and folding:
            folding.pop()()
        return read(self, number)

    monkeypatch.setattr(Manifests, "read", meddled)
    assert found.reach(3) == expected
    assert not folding
