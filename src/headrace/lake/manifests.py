"""Manifests of a lake: write, read and merge them, and find how far each topic is exported.

    commit ─▶ manifest of the last batch ─┬▶ merged manifest of the first batches
                                          ╰▶ manifests of the batches since

A manifest is named after its number and its checksum, and never changes. The commit of a batch stores both,
and each manifest names all manifests before it. So everything is found without a listing, and a manifest that
is written but not committed is never taken for another. When a manifest would name too many others, the
export merges them into one first.

Earlier versions (formats 1 and 2) named manifests after their number alone, and compactions merged them. The
first export of this version merges all of them.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from crc32c import crc32c

from headrace.lake.format import (
    RENAMED_FORMAT,
    AnyManifest,
    Committed,
    LakeError,
    Manifest,
    MergedManifest,
    Positions,
    RecordRange,
    decode_manifest,
)
from headrace.lake.storage.storage import HIDDEN, Storage

SINCE_MAX = 64
"""Maximum number of manifests that a manifest names besides the merged one."""

_READ_S = 3600.0
"""Time in which a job reads the manifests that the last one names, after it has found the last one."""

_NAME = re.compile(
    rf"{HIDDEN}/(?:batches|(merged|folded))/([0-9]{{12,}})(?:-[0-9a-f]{{8}})?\.json(\.[0-9a-f]{{12}}\.tmp)?"
)
_OLD_MERGED = re.compile(rf"{HIDDEN}/(folded/[0-9]{{12,}}\.json)")

_POLYNOMIAL = 0x82F63B78
"""Polynomial of CRC-32C, lowest bit first."""


class MissingManifestError(LakeError):
    """A manifest is gone: restore it."""


class Reach(NamedTuple):
    """Start and end of the lake in each topic."""

    starts: Positions
    ends: Positions


class Names(NamedTuple):
    """All manifests that count."""

    merged: str
    """Path below `_headrace`; empty if there is none."""
    single: list[Committed]
    """Number and checksum of each other one, in order."""

    @property
    def since(self) -> tuple[int, ...]:
        """Checksums of the others, as the next manifest names them."""
        return tuple(one.token or 0 for one in self.single)


class Manifests:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def write(self, manifest: Manifest) -> Committed:
        """Write a manifest, durable when this returns, and return what its commit has to store."""
        name = Committed(manifest.number, manifest.crc)
        self._create(self.path(name), manifest.encode())
        return name

    def read(self, name: Committed) -> Manifest:
        return self._read(self.path(name), name.token, Manifest)

    def read_merged(self, name: str) -> MergedManifest:
        """Read a merged manifest; an empty name stands for the one of no batches."""
        if not name:
            return MergedManifest()
        crc = re.search("-([0-9a-f]{8})[.]", name)
        return self._read(f"{HIDDEN}/{name}", int(crc[1], 16) if crc else None, MergedManifest)

    def path(self, name: Committed) -> str:
        crc = "" if name.token is None else f"-{name.token:08x}"
        return f"{HIDDEN}/batches/{name.number:012}{crc}.json"

    def names(self, last: Committed | None) -> Names:
        """Return the manifests of all batches up to the last committed one."""
        if last is None:
            return Names("", [])
        if last.token is None:
            return self._old_names(last)
        manifest = self.read(last)
        first = last.number - len(manifest.since)
        since = (Committed(first + place, crc) for place, crc in enumerate(manifest.since))
        return Names(manifest.merged, [*since, last])

    def _old_names(self, last: Committed) -> Names:
        """Return the manifests that an earlier version has written. Its lakes are directories."""
        found = (_OLD_MERGED.fullmatch(one.path) for one in self._storage.list(f"{HIDDEN}/folded/"))
        merged = max((one[1] for one in found if one), default="")
        first = self.read_merged(merged).batches
        return Names(merged, [Committed(one, None) for one in range(first, last.number + 1)])

    def reach(self, last: Committed | None) -> Reach:
        """Return the reach of all batches up to the last committed one."""
        names = self.names(last)
        merged = self.read_merged(names.merged)
        reach = Reach(dict(merged.start), dict(merged.end))
        for name in names.single:
            _add(reach, self.read(name))
        return reach

    def have_old_names(self, last: Committed | None) -> bool:
        """True if batches up to the last one name reserved topics as earlier versions did."""
        names = self.names(last)
        merged = self.read_merged(names.merged)
        if merged.batches:
            return _has_old_names(merged)
        return bool(names.single) and self.read(names.single[0]).format < RENAMED_FORMAT

    def predecessors(self, last: Committed | None) -> Names:
        """Return the manifests that the one after the last committed one has to name."""
        names = self.names(last)
        if (last is not None and last.token is None) or len(names.single) > SINCE_MAX:
            return Names(self._merge(names), [])
        return names

    def _merge(self, names: Names) -> str:
        """Write a merged manifest in the place of these, durable when this returns; return its name."""
        merged = _merged(self.read_merged(names.merged), [self.read(one) for one in names.single])
        data = merged.encode()
        name = f"merged/{merged.batches:012}-{crc32c(data):08x}.json"
        self._create(f"{HIDDEN}/{name}", data)
        return name

    def leftovers(self, last: Committed | None) -> list[str]:
        """Return files of manifests that no longer count, and that no job can be reading any more."""
        names = self.names(last)
        needed = {f"{HIDDEN}/{names.merged}", *map(self.path, names.single)}
        found = [
            (one, name)
            for folder in ("batches", "merged", "folded")
            for one in self._storage.list(f"{HIDDEN}/{folder}/")
            if (name := _NAME.fullmatch(one.path)) is not None
        ]
        # Times are compared with each other only, because they may come from the clock of another machine.
        until = max((one.modified_s for one, _ in found), default=0.0) - _READ_S
        # A manifest is read until a merged one contains its batch. The merged one counts only since the next
        # batch, which has the number of the merged one: a killed export may have left it long before.
        written: dict[int, float] = {}
        for one, name in found:
            if not name[1]:
                number = int(name[2])
                written[number] = max(one.modified_s, written.get(number, 0.0))
        counts = (int(name[2]) for _, name in found if name[1])
        merged = max((one for one in counts if written.get(one, until) < until), default=0)
        return [
            one.path
            for one, name in found
            if one.path not in needed
            and (one.modified_s < until if name[3] else int(name[2]) < merged)
        ]

    def _create(self, path: str, data: bytes) -> None:
        self._storage.create(path, data)
        # Another export may have written the same manifest.
        if self._storage.read(path) != data:
            raise LakeError(
                f"{self._storage.file(path)} does not have the content that was written to it: remove it"
            )

    def _read(self, path: str, crc: int | None, kind: type[AnyManifest]) -> AnyManifest:
        try:
            data = self._storage.read(path)
        except FileNotFoundError:
            raise MissingManifestError(
                f"{self._storage.file(path)} is missing, a manifest of the table: restore it, or export to a "
                "new directory"
            ) from None
        return decode_manifest(data, kind, str(self._storage.file(path)), crc)


def _has_old_names(merged: MergedManifest) -> bool:
    return merged.has_old_names is True or merged.format < RENAMED_FORMAT


def _add(reach: Reach, manifest: Manifest) -> None:
    reach.starts.update(
        (name, at) for name, at in manifest.start.items() if name not in reach.starts
    )
    reach.ends.update(manifest.end)


def _merged(before: MergedManifest, new: list[Manifest]) -> MergedManifest:
    reach = Reach(dict(before.start), dict(before.end))
    for manifest in new:
        _add(reach, manifest)
    ranges = [*before.ranges, *(one for manifest in new for one in manifest.ranges)]
    lost = [*before.lost, *(one for manifest in new for one in manifest.lost)]
    is_old = (before.batches > 0 and _has_old_names(before)) or any(
        one.format < RENAMED_FORMAT for one in new
    )
    try:
        return MergedManifest(
            batches=before.batches + len(new),
            start=reach.starts,
            end=reach.ends,
            ranges=tuple(joined_ranges(ranges)),
            lost=tuple(lost),
            has_old_names=is_old,
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
    """
    for power in range(second_bytes.bit_length()):
        if second_bytes >> power & 1:
            first = _times(_zeros(power + 3), first)  # a byte has 2**3 bits
    return first ^ second


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """Return the map of a checksum that 2**power zero bits make.

    Appending one zero bit is a linear map of 32 bits. Applying a map to itself gives the map for twice as
    many bits.
    """
    if not power:
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, row) for row in half)


def _times(matrix: Sequence[int], vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total
