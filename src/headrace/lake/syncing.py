"""What must survive a crash of the machine, written so: libraries for tables leave it to the system."""

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file's content, or a directory's names, are on disk when this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes) -> None:
    """The whole new content or the whole old one, whatever happens."""
    made = path.with_suffix(".tmp")
    made.write_bytes(data)
    sync(made)
    made.rename(path)
    sync(path.parent)


def make_directory(path: Path) -> None:
    """With those above it, each known to the one above it for good."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
