"""Manifests: read as they were written, found through the last one, merged, and refused if damaged."""

import os
import random

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.format import (
    Committed,
    File,
    LakeError,
    LostRange,
    Manifest,
    MergedManifest,
    RecordRange,
    decode_manifest,
)
from headrace.lake.manifests import SINCE_MAX, Manifests, MissingManifestError, Reach
from headrace.lake.storage.storage import storage_of
from headrace.model import Position

number = st.integers(0, (1 << 62) - 1)
positions = st.dictionaries(st.text(max_size=5), st.builds(Position, number, number, number))


@given(positions, positions, st.lists(st.builds(LostRange, st.text(), number, number)))
def test_a_manifest_is_read_as_it_was_written(start, end, lost):
    one = Manifest(
        number=7,
        start=start,
        end=end,
        files=(File("date=2024-10-04/x.parquet", 100, 3),),
        ranges=(RecordRange("é", 1, 2, 3, 4, 5, 6, 0),),
        lost=tuple(lost),
        merged="merged/000000000002-0a0b0c0d.json",
        since=(1, 2**32 - 1),
    )
    assert decode_manifest(one.encode(), Manifest, "here") == one


class Lake:
    """Batches of one record each for topic `a`; every second batch also has its own topic."""

    def __init__(self, root):
        self.root, self.manifests = root, Manifests(storage_of(root))
        self.last: Committed | None = None
        self.made: list[Manifest] = []

    def batch(self) -> Manifest:
        which = len(self.made)
        names = ["a", f"b{which}"] if which % 2 else ["a"]
        at = {name: which if name == "a" else 0 for name in names}
        before = self.manifests.predecessors(self.last)
        one = Manifest(
            number=which,
            start={name: Position(1, 5 * n, n) for name, n in at.items()},
            end={name: Position(1, 5 * n + 5, n + 1) for name, n in at.items()},
            files=(File("x", 1, 1),),
            ranges=tuple(
                RecordRange(name, 1, 5 * n, 5 * n + 5, n, n + 1, 0) for name, n in at.items()
            ),
            lost=(LostRange("c", which, which + 1),),
            merged=before.merged,
            since=before.since,
        )
        self.last = self.manifests.write(one)
        self.made.append(one)
        return one

    def batches(self, count):
        for _ in range(count):
            self.batch()
        return self

    def reach(self) -> Reach:
        found = Reach({}, {})
        for one in self.made:
            found.ends.update(one.end)
            for name, at in one.start.items():
                found.starts.setdefault(name, at)
        return found

    def files(self):
        hidden = self.root / "_headrace"
        return {str(path.relative_to(hidden)) for path in hidden.rglob("*") if path.is_file()}

    def grow_old(self):
        for path in (self.root / "_headrace").rglob("*.*"):
            os.utime(path, (1, 1))


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path)


def test_the_last_one_finds_all_before_it(lake):
    assert lake.manifests.reach(None) == ({}, {})
    for count in range(1, 2 * SINCE_MAX + 10):
        one = lake.batch()
        assert len(one.since) <= SINCE_MAX
        merged = lake.manifests.read_merged(one.merged)
        assert merged.batches + len(one.since) == count - 1
        if count % 10 == 0 or len(one.since) in (0, SINCE_MAX):
            assert lake.manifests.reach(lake.last) == lake.reach()
    assert len([one for one in lake.files() if one.startswith("merged/")]) == 2


def test_a_merged_one_says_the_same_as_each_of_them(lake):
    lake.batches(SINCE_MAX + 2)
    merged = lake.manifests.read_merged(lake.made[-1].merged)
    before = lake.made[: merged.batches]
    assert merged.batches == SINCE_MAX + 1 == len(merged.lost)
    rows = sum(one.rows for which in before for one in which.ranges)
    assert sum(one.rows for one in merged.ranges) == rows
    assert len([one for one in merged.ranges if one.topic == "a"]) == 1
    assert decode_manifest(merged.encode(), MergedManifest, "here").encode() == merged.encode()


def test_what_was_never_committed_is_not_found_and_disturbs_nobody(tmp_path):
    one = Lake(tmp_path).batches(SINCE_MAX)
    other = Lake(tmp_path)
    other.made, other.last = list(one.made), one.last
    # Both write the next batches, and the merged manifest in between. The other one is never committed.
    chance = random.Random(3)
    for _ in range(3):
        both = [one, other]
        chance.shuffle(both)
        for lake in both:
            lake.batch()
        theirs = other.made[-1]
        lost = Manifest(**{**msgspec.structs.asdict(theirs), "files": (File("theirs", 1, 1),)})
        other.last = other.manifests.write(lost)
    assert one.manifests.reach(one.last) == one.reach()
    names = one.manifests.names(one.last)
    assert all(one.manifests.read(name).files == (File("x", 1, 1),) for name in names.single)


def test_a_newer_a_damaged_and_a_missing_one_are_refused(lake):
    lake.batches(2)
    newer = Committed(2, crc32c(data := b'{"format": 4, "something": "else"}'))
    (lake.root / lake.manifests.path(newer)).write_bytes(data)
    with pytest.raises(
        LakeError, match=r"was written by a newer version \(format 4, this one writes 3\)"
    ):
        lake.manifests.read(newer)
    for name in lake.manifests.names(lake.last).single:
        path = lake.root / lake.manifests.path(name)
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"x"', b'"y"'))
        with pytest.raises(LakeError, match=r"is damaged [(]its checksum fails[)]: restore it"):
            lake.manifests.reach(lake.last)
        path.unlink()
        with pytest.raises(MissingManifestError, match="is missing, a manifest of the table"):
            lake.manifests.reach(lake.last)
        path.write_bytes(data)
    # Nobody but an export whose manifest has the same checksum writes this name.
    path.write_bytes(b"others")
    with pytest.raises(LakeError, match="does not have the content that was written to it"):
        lake.manifests.write(lake.made[-1])


def test_a_merged_one_that_is_damaged_or_newer_is_refused(lake):
    lake.batches(SINCE_MAX + 2)
    path = lake.root / "_headrace" / lake.made[-1].merged
    path.write_bytes(path.read_bytes().replace(b'"batches":65', b'"batches":64'))
    with pytest.raises(LakeError, match=r"is damaged [(]its checksum fails[)]"):
        lake.manifests.reach(lake.last)
    data = MergedManifest(batches=2, format=4).encode()
    name = f"merged/{2:012}-{crc32c(data):08x}.json"
    (lake.root / "_headrace" / name).write_bytes(data)
    with pytest.raises(LakeError, match="newer version"):
        lake.manifests.read_merged(name)


def test_those_that_no_longer_count_are_left_over_when_no_job_can_read_them(lake):
    lake.batches(SINCE_MAX + 1)
    unfinished = lake.root / "_headrace" / "batches" / "000000000099-0a0b0c0d.json.0123456789ab.tmp"
    foreign = lake.root / "_headrace" / "batches" / "mine.json"
    for path in (unfinished, foreign):
        path.touch()
    first = lake.files() - {"batches/mine.json"}
    lake.grow_old()
    lake.batch()
    # They count until the merged manifest was there for an hour.
    (left,) = lake.manifests.leftovers(lake.last)
    assert left.endswith(".tmp")
    lake.grow_old()
    lake.batch()
    assert {one.removeprefix("_headrace/") for one in lake.manifests.leftovers(lake.last)} == first
    storage_of(lake.root).delete(lake.manifests.leftovers(lake.last))
    assert lake.manifests.leftovers(lake.last) == []
    assert lake.manifests.reach(lake.last) == lake.reach()
    assert lake.files() == {
        "batches/mine.json",
        lake.made[-1].merged,
        *(f"batches/{one.number:012}-{one.crc:08x}.json" for one in lake.made[-2:]),
    }
    # A merged manifest is over when the next one has been there for an hour.
    lake.batches(SINCE_MAX)
    lake.grow_old()
    lake.batch()
    assert f"_headrace/{lake.made[-SINCE_MAX - 2].merged}" in lake.manifests.leftovers(lake.last)
    assert lake.manifests.reach(lake.last) == lake.reach()


def test_those_before_a_merged_one_are_read_until_it_has_counted_for_an_hour(lake):
    lake.batches(SINCE_MAX + 1)
    # An export was killed after it had merged them, and before it committed the next batch.
    assert lake.manifests.predecessors(lake.last).merged
    lake.grow_old()
    before = lake.last
    lake.batch()
    assert lake.manifests.leftovers(lake.last) == []
    assert lake.manifests.reach(before)


def test_those_of_an_earlier_version_are_merged_by_the_next_batch(lake):
    """Their files are named after numbers alone, and commits do not store their checksums."""
    old, folder = [lake.batch() for _ in range(5)], lake.root / "_headrace"
    merged = lake.manifests.read_merged(
        lake.manifests._merge(lake.manifests.names(Committed(1, old[1].crc)))
    )
    for path in [*folder.rglob("*.json")]:
        path.unlink()
    (folder / "folded").mkdir()
    (folder / "folded" / "000000000001.json").write_bytes(MergedManifest(batches=1).encode())
    (folder / "folded" / "000000000002.json").write_bytes(merged.encode())
    for one in old[2:]:
        (folder / "batches" / f"{one.number:012}.json").write_bytes(one.encode())
    lake.last = Committed(4, None)
    assert lake.manifests.reach(lake.last) == lake.reach()
    new = lake.batch()
    assert new.merged.startswith("merged/000000000005-")
    assert lake.manifests.reach(lake.last) == lake.reach()
    lake.grow_old()
    lake.batch()
    assert len(lake.manifests.leftovers(lake.last)) == 5
