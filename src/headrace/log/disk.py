"""Every change the log makes to files, in one place, so that tests can record and break them.

Knows nothing of formats. Reading is not here: a crash cannot spoil a read.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

_IOV_MAX = 1024
"""More buffers than this in one system call are refused by Linux."""

_SYNC_FILE_RANGE_WRITE = 2
"""From Linux's fcntl.h: begin, and wait for nothing."""


DISK_FULL = "no space left on the disk: publishes are held back until there is room"
"""What operators are told, whichever write found the disk full."""


def is_full(error: object) -> bool:
    """True for an error that ends when someone makes room. Nothing that was stored before is in doubt."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The real file system."""

    def open(self, path: Path, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o640)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(
        self, fd: int, parts: Sequence[bytes | memoryview], position: int, *, synced: bool = False
    ) -> None:
        """Write everything at `position`; with `synced` it is on disk when this returns."""
        flags = os.RWF_DSYNC if synced else 0
        if synced and len(parts) > _IOV_MAX:
            parts = [b"".join(parts)]
        for first in range(0, len(parts), _IOV_MAX):
            buffers = parts[first : first + _IOV_MAX]
            total = sum(map(len, buffers))
            done = os.pwritev(fd, buffers, position, flags)
            if done < total:
                # A signal or a nearly full disk cut it short: the next call goes on or says why not.
                rest = memoryview(b"".join(buffers))
                while done < total:
                    done += os.pwritev(fd, [rest[done:]], position + done, flags)
            position += total

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def start_sync(self, fd: int, position: int, size: int) -> None:
        """Have the system begin to write this out, so that a later `sync` need not wait for all of it."""
        # Only a hint: where it fails, `sync` says so.
        _libc.sync_file_range(
            fd, ctypes.c_int64(position), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE
        )

    def sync_file_system(self, fd: int) -> None:
        """Everything on the file system of `fd`: cheaper than one sync each for very many files."""
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
        """Drop what lies past `size`; a shorter file stays as it is."""
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


_libc = ctypes.CDLL(None, use_errno=True)
