"""A small file of the data directory that several processes change, one after another. Knows no formats.

A change holds a lock beside the file from reading to renaming, so that no change is lost, and a reader always
finds one whole version. The lock is a file of its own, because the file itself is replaced.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.log.disk import Disk


class Stamp(NamedTuple):
    """Identity of one version of a file. Each change makes a new file."""

    inode: int
    size: int
    modified_ns: int


class Version(NamedTuple):
    stamp: Stamp
    data: bytes


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of the file; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def read(path: Path, bytes_max: int) -> Version | None:
    """Return the file's content, and at most one byte more than `bytes_max`; None if there is no file."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    return Version(Stamp(found.st_ino, found.st_size, found.st_mtime_ns), data)


def change(path: Path, disk: Disk, bytes_max: int, edit: Callable[[bytes | None], bytes]) -> None:
    """Replace the file's content with what `edit` makes of it, durably. `edit` gets None without a file."""
    with _locked(path.with_name(f"{path.name}.lock"), disk):
        known = read(path, bytes_max)
        made = edit(None if known is None else known.data)
        draft = path.with_name(f"{path.name}.new")
        disk.unlink(draft)
        with disk.opened(draft, create=True, sync=True) as fd:
            os.fchmod(fd, 0o640 if known is None else path.stat().st_mode & 0o777)
            if os.geteuid() == 0:
                # The server has another user, which must be able to read what root has changed.
                owner = (path if known is not None else path.parent).stat()
                os.fchown(fd, owner.st_uid, owner.st_gid)
            disk.write(fd, [made], 0)
        disk.rename(draft, path)
        disk.sync_directory(path.parent)


@contextmanager
def _locked(path: Path, disk: Disk) -> Iterator[None]:
    fd = disk.open(path, create=True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        disk.close(fd)
