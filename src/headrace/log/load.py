"""Reads whole files as far as the disk can, so that an unreadable sector costs no more than itself."""

import os
from pathlib import Path
from typing import NamedTuple

READ_ATTEMPTS = 3
"""A read that fails so often is damage: disks fail for a moment too."""

_READ_BYTES = 16 << 20
_SECTOR_BYTES = 512


class Loaded(NamedTuple):
    """The bytes of a file."""

    data: memoryview
    """Of a bytearray. Sectors that the disk could not read are zeros."""
    unreadable: bool
    """True when there are such sectors."""

    @property
    def is_blank(self) -> bool:
        """True when there are zeros only."""
        whole: bytearray = self.data.obj  # type: ignore[assignment]
        return not self.unreadable and 0 < len(whole) == whole.count(0)


def load(path: Path, until: int | None = None) -> Loaded:
    """Read a file as far as the disk can, and at most up to `until`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        data = memoryview(bytearray(size if until is None else min(size, until)))
        unreadable = False
        at = 0
        while at < len(data):
            part = data[at : at + _READ_BYTES]
            read = _read(fd, part, at)
            if read is None:
                unreadable = _read_sectors(fd, part, at) or unreadable
                read = len(part)
            if not read:
                break
            at += read
        return Loaded(data, unreadable)
    finally:
        os.close(fd)


def _read(fd: int, into: memoryview, at: int) -> int | None:
    """Read once more where the disk fails; None when it fails each time."""
    for _ in range(READ_ATTEMPTS):
        try:
            return os.preadv(fd, [into], at)
        except OSError:
            continue
    return None


def _read_sectors(fd: int, into: memoryview, at: int) -> bool:
    """Fill in what can be read, a sector at a time; returns whether something could not."""
    failed = False
    for first in range(0, len(into), _SECTOR_BYTES):
        failed |= _read(fd, into[first : first + _SECTOR_BYTES], at + first) is None
    return failed
