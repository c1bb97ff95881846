"""Reads of files on a disk that may fail: an error is retried, and then costs no more than its page.

A page that cannot be read is zeros, which no checksum takes for what was there. Who remembers such pages is
not decided here.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4096
"""The unit that the system reads at once, and so the cost of one bad sector."""

ATTEMPTS_MAX = 3
RETRY_S = 0.1
"""A path or a link that fails for a moment is there again after two of them."""


class Loaded(NamedTuple):
    """The bytes of a file."""

    data: memoryview
    """Pages that the disk could not read are zeros."""
    unreadable: bool
    """True when there are such pages."""

    @property
    def is_blank(self) -> bool:
        """True when there are zeros only."""
        whole: bytes = self.data.obj  # type: ignore[assignment]
        return not self.unreadable and 0 < len(whole) == whole.count(0)


def load(path: Path, until: int | None = None) -> Loaded:
    """Read a file as far as the disk can, and at most up to `until`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        data, bad = read_patiently(fd, size if until is None else min(size, until), 0)
        return Loaded(memoryview(data), bool(bad))
    finally:
        os.close(fd)


def read_patiently(fd: int, length: int, position: int) -> tuple[bytes, list[int]]:
    """Up to `length` bytes, fewer where the file ends; and the numbers of the pages that cannot be read.

    For threads, since it may wait.
    """
    for attempt in range(ATTEMPTS_MAX):
        if attempt:
            time.sleep(RETRY_S)
        try:
            return read_once(fd, length, position), []
        except OSError:
            continue
    return _read_pages(fd, length, position)


def read_once(fd: int, length: int, position: int) -> bytes:
    """The same without retries: raises OSError."""
    data = os.pread(fd, length, position)
    # A read that is cut short may have met an error behind it, which the next one tells.
    while 0 < len(data) < length:
        more = os.pread(fd, length - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


def _read_pages(fd: int, length: int, position: int) -> tuple[bytes, list[int]]:
    data = bytearray()
    bad: list[int] = []
    end = position + length
    while position < end:
        stop = min(end, (position // PAGE_BYTES + 1) * PAGE_BYTES)
        try:
            piece = read_once(fd, stop - position, position)
        except OSError:
            bad.append(position // PAGE_BYTES)
            piece = bytes(stop - position)
        data += piece
        if len(piece) < stop - position:
            break
        position = stop
    return bytes(data), bad
