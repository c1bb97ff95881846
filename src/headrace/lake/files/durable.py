"""What must survive a crash of the machine, written so: libraries for tables leave it to the system."""

import errno
import os
import uuid
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
    made = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")  # others may do the same
    try:
        made.write_bytes(data)
        sync(made)
        made.rename(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_older(path: Path, moment: float) -> bool:
    """Whether it has not changed since; False for one that is gone meanwhile."""
    try:
        return path.stat().st_mtime < moment
    except FileNotFoundError:
        return False


def make_directory(path: Path) -> None:
    """With those above it, each known to the one above it for good."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
