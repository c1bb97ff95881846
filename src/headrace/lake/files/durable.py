"""File operations that survive a crash of the machine: table libraries do not fsync. Checksums of files."""

import errno
import os
import uuid
from pathlib import Path

from crc32c import crc32c

_READ_BYTES = 1 << 20


def sync(path: Path) -> None:
    """Fsync a file's content, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: after a crash it has either the whole old or the whole new content."""
    made = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")  # unique per writer
    try:
        made.write_bytes(data)
        sync(made)
        made.rename(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_older(path: Path, moment: float) -> bool:
    """True if the file has not changed since `moment`; False if it was deleted meanwhile."""
    try:
        return path.stat().st_mtime < moment
    except FileNotFoundError:
        return False


def make_directory(path: Path) -> None:
    """Create the directory and its parents, and fsync each parent."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def crc_of_file(path: Path) -> int:
    """Return the checksum of a file's bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while some := file.read(_READ_BYTES):
            crc = crc32c(some, crc)
    return crc
