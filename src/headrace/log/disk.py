"""All changes that the log makes to files, in one place, so that tests can record them and make them fail.

Knows no file formats. Only SQLite, which writes the catalogue, and the lock of a backup go around this file.
Also here: reads of files on a disk that may fail. A read error is retried, and then costs no more than its
page. Such a page is replaced by zeros, which do not match the checksum of the original content.
"""

import ctypes
import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_IOV_MAX = 1024
"""Largest number of buffers that Linux accepts in one system call."""

_SYNC_FILE_RANGE_WRITE = 2
"""Flag from Linux's fcntl.h: start writing without waiting."""

_libc = ctypes.CDLL(None, use_errno=True)

PAGE_BYTES = 4096
"""Unit in which the system reads, and so the cost of one bad sector."""

ATTEMPTS_MAX = 3
RETRY_S = 0.1
"""Seconds between attempts. A path or link that fails briefly is back after two such delays."""

DISK_FULL = "no space left on the disk: publishes are held back until there is room"
"""Message for operators, whichever write found the disk full."""


def is_full(error: object) -> bool:
    """True if freeing disk space ends the error. Data that was stored before is not in doubt."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def explained(error: BaseException) -> str:
    """Return the error of a write or fsync that is not repeated, with what an operator can do about it."""
    if is_full(error):
        return (
            f"{error}: the disk had no room at an fsync, which is not repeated because earlier commits may "
            "be lost; free some space, and start the server again"
        )
    return str(error)


class Disk:
    """The real file system."""

    def open(self, path: Path, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o640)

    def close(self, fd: int) -> None:
        os.close(fd)

    @contextmanager
    def opened(self, path: Path, *, create: bool = False, sync: bool = False) -> Iterator[int]:
        """Open a file for a `with` statement; with `sync`, fsync it at the end unless there was an error."""
        fd = self.open(path, create=create)
        try:
            yield fd
            if sync:
                self.sync(fd)
        finally:
            self.close(fd)

    def write(
        self, fd: int, parts: Sequence[bytes | memoryview], position: int, *, synced: bool = False
    ) -> None:
        """Write everything at `position`; with `synced`, the data is on disk when this returns."""
        flags = os.RWF_DSYNC if synced else 0
        if synced and len(parts) > _IOV_MAX:
            parts = [b"".join(parts)]
        for first in range(0, len(parts), _IOV_MAX):
            buffers = parts[first : first + _IOV_MAX]
            total = sum(map(len, buffers))
            done = os.pwritev(fd, buffers, position, flags)
            if done < total:
                # A signal or a nearly full disk cut the write short: the next call continues or raises.
                rest = memoryview(b"".join(buffers))
                while done < total:
                    done += os.pwritev(fd, [rest[done:]], position + done, flags)
            position += total

    def write_file(
        self, path: Path, parts: Sequence[bytes | memoryview], *, synced: bool = False
    ) -> None:
        """Create a file, or replace its content; with `synced`, the content is on disk afterwards."""
        with self.opened(path, create=True, sync=synced) as fd:
            self.cut(fd, 0)
            self.write(fd, parts, 0)

    def date(self, fd: int, ms: int) -> None:
        """Set the time of the file's last change, which is otherwise the wall clock's."""
        os.utime(fd, ns=(ms * 1_000_000, ms * 1_000_000))

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def start_sync(self, fd: int, position: int, size: int) -> None:
        """Make the system start writing this range, so that a later `sync` need not wait for all of it."""
        # This call is only a hint: if it fails, `sync` reports the error.
        _libc.sync_file_range(
            fd, ctypes.c_int64(position), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE
        )

    def sync_file_system(self, fd: int) -> None:
        """Sync everything on the file system of `fd`: cheaper than one sync per file for very many files."""
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def cut(self, fd: int, size: int) -> None:
        """Truncate the file to `size`; leave a shorter file as it is."""
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path, mode: int = 0o777) -> None:
        """Create a directory and its parents, unless it exists."""
        path.mkdir(mode, parents=True, exist_ok=True)


class LoadedBytes(NamedTuple):
    data: memoryview
    """Content of a file. Pages that the disk could not read are zeros."""
    unreadable: bool
    """True if the disk could not read some pages."""

    @property
    def is_blank(self) -> bool:
        """True if the file was readable and holds only zeros."""
        whole: bytes = self.data.obj  # type: ignore[assignment]
        return not self.unreadable and 0 < len(whole) == whole.count(0)


def load(path: Path, until: int | None = None) -> LoadedBytes:
    """Read a file as far as the disk can, and at most up to `until`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        data, bad = read_patiently(fd, size if until is None else min(size, until), 0)
        return LoadedBytes(memoryview(data), bool(bad))
    finally:
        os.close(fd)


def read_patiently(fd: int, length: int, position: int) -> tuple[bytes, list[int]]:
    """Return up to `length` bytes, fewer at the end of the file, and the numbers of unreadable pages.

    Call this in a thread only, since it may sleep.
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
    """Read like `read_patiently` without retries; raise OSError."""
    data = os.pread(fd, length, position)
    # A short read may have stopped just before an error, which the next read reports.
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
