"""Manifests of a lake on disk: write, read and merge them, and find how far each topic is exported.

Many manifests are merged into one file, which is named after their number. Therefore a slower compaction on
another machine never overwrites a merged manifest with more batches. The merged file is on disk before the
single ones are deleted, and takes precedence over them.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from headrace.lake.files.writing import make_directory, replace, sync
from headrace.lake.format import (
    RENAMED_FORMAT,
    LakeError,
    Manifest,
    MergedManifest,
    Positions,
    RecordRange,
    decode_folded,
    decode_manifest,
)

HIDDEN = "_headrace"
"""Directory name. Table readers and sweepers ignore names with this first character."""

_POLYNOMIAL = 0x82F63B78
"""Polynomial of CRC-32C, lowest bit first."""


class Reach(NamedTuple):
    """Start and end of the lake in each topic."""

    starts: Positions
    ends: Positions


class Manifests:
    def __init__(self, lake: Path) -> None:
        self._directory = lake / HIDDEN / "batches"
        self._folded = lake / HIDDEN / "folded"

    def write(self, manifest: Manifest) -> None:
        """Write a manifest; it is durable when this returns. Overwrites one that was never committed."""
        make_directory(self._directory)
        replace(self.path(manifest.number), manifest.encode())

    def read(self, number: int) -> Manifest:
        path = self.path(number)
        try:
            return decode_manifest(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise LakeError(
                f"{path} is missing, the manifest of a batch of the table: restore it, or export "
                "to a new directory"
            ) from None

    def reach(self, last: int | None) -> Reach:
        """Return the reach after batch `last`, the last committed one. Later manifests do not count."""
        while True:
            folded = self.folded()
            reach = Reach(dict(folded.start), dict(folded.end))
            try:
                for number in range(folded.batches, 0 if last is None else last + 1):
                    _add(reach, self.read(number))
            except LakeError:
                if self.folded().batches == folded.batches:
                    raise
                continue  # a compaction has merged it meanwhile
            return reach

    def folded(self) -> MergedManifest:
        """Return the merged manifest of the first batches; one of zero batches if nothing was merged yet."""
        while True:
            found = max(self._folded.glob("*.json"), default=None)
            if found is None:
                return MergedManifest()
            try:
                return decode_folded(found.read_bytes(), str(found))
            except FileNotFoundError:
                continue  # another compaction has written a longer one

    def have_old_names(self, last: int | None) -> bool:
        """True if batches up to `last` name reserved topics as earlier versions did."""
        folded = self.folded()
        if folded.batches:
            return folded.format < RENAMED_FORMAT or folded.has_old_names is True
        return last is not None and self.read(0).format < RENAMED_FORMAT

    def fold(self, until: int, check: Callable[[Manifest], None]) -> int:
        """Merge the manifests of all batches below `until`; return the number of newly merged ones.

        `check` raises for a manifest that must stay as it is. Then nothing is merged.
        """
        before = self.folded()
        try:
            new = [self.read(number) for number in range(before.batches, until)]
        except LakeError:
            if self.folded().batches == before.batches:
                raise
            return 0  # another compaction has merged them
        if new:
            for manifest in new:
                check(manifest)
            self._write_folded(_fold(before, new))
        # Also delete the leftovers of a compaction that was killed at this point.
        count = self.folded().batches
        for path in self._directory.glob("*.json"):
            if path.stem.isdigit() and int(path.stem) < count:
                path.unlink(missing_ok=True)
        for path in self._folded.glob("*.json"):
            if int(path.stem) < count:
                path.unlink(missing_ok=True)
        return len(new)

    def folded_path(self, batches: int) -> Path:
        return self._folded / f"{batches:012}.json"

    def _write_folded(self, folded: MergedManifest) -> None:
        make_directory(self._folded)
        path = self.folded_path(folded.batches)
        replace(path, folded.encode())
        if decode_folded(path.read_bytes(), str(path)).encode() != folded.encode():
            raise LakeError(
                f"{path} does not have the content that was written to it: nothing was deleted"
            )
        sync(self._folded)

    def path(self, number: int) -> Path:
        return self._directory / f"{number:012}.json"


def _add(reach: Reach, manifest: Manifest) -> None:
    reach.starts.update(
        (name, at) for name, at in manifest.start.items() if name not in reach.starts
    )
    reach.ends.update(manifest.end)


def _fold(before: MergedManifest, new: list[Manifest]) -> MergedManifest:
    reach = Reach(dict(before.start), dict(before.end))
    for manifest in new:
        _add(reach, manifest)
    ranges = [*before.ranges, *(one for manifest in new for one in manifest.ranges)]
    lost = [*before.lost, *(one for manifest in new for one in manifest.lost)]
    try:
        return MergedManifest(
            batches=before.batches + len(new),
            start=reach.starts,
            end=reach.ends,
            ranges=tuple(joined_ranges(ranges)),
            lost=tuple(lost),
            has_old_names=(
                before.has_old_names is True
                or (before.batches > 0 and before.format < RENAMED_FORMAT)
                or any(one.format < RENAMED_FORMAT for one in new)
            ),
        )
    except ValueError as error:
        raise LakeError(f"the manifests contradict each other: {error}") from None


def joined_ranges(ranges: Iterable[RecordRange]) -> list[RecordRange]:
    """Join consecutive ranges, sorted by topic and offset; their file numbers are dropped.

    The joined checksums are those of the log's bytes, although no record is read. Raise ValueError if two
    ranges contain the same records.
    """
    found: list[RecordRange] = []
    for one in sorted(ranges):
        last = found[-1] if found else None
        if last is None or last.topic != one.topic:
            found.append(one._replace(file=0))
        elif (last.epoch, last.end, last.end_ordinal) == (one.epoch, one.offset, one.ordinal):
            crc = joined(last.crc, one.crc, one.end - one.offset)
            found[-1] = last._replace(end=one.end, end_ordinal=one.end_ordinal, crc=crc)
        elif one.offset < last.end:
            raise ValueError(
                f"offsets {one.offset} to {one.end} of topic {one.topic!r} appear twice"
            )
        else:
            found.append(one._replace(file=0))
    return found


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of two adjacent stretches, computed from their two checksums.

    It is the first checksum, advanced by as many zeros as the second stretch is long, XORed with the second.
    Appending one zero bit is a linear map of 32 bits. Applying the map to itself gives the map for twice as
    many bits.
    """
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    # Go from one zero bit to eight, which are a byte.
    for _ in range(3):
        matrix = [_times(matrix, row) for row in matrix]
    while second_bytes:
        if second_bytes & 1:
            first = _times(matrix, first)
        matrix = [_times(matrix, row) for row in matrix]
        second_bytes >>= 1
    return first ^ second


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total
