"""The paths in a data directory. Opens no files except the lock."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import DataDirectoryError, DataDirectoryLockedError

SEGMENT_DIRECTORIES = 256
"""Number of directories that all topics share: creating one per topic costs about a millisecond."""

_NAME = re.compile(r"([0-9a-f]+)-(\d{20})\.(?:log|idx)")

LOCK_NAME = "lock"

UNFINISHED_NAME = "headrace-unfinished"
"""Name of a file that marks a directory in which a backup or restore is running or was interrupted."""

_LOCK_WAIT_S = 2.0
"""Seconds to wait for the lock: a killed server's applier releases it a moment after the server."""


class SegmentFile(NamedTuple):
    topic_id: int
    base: int
    path: Path
    size: int


class Layout:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal = root / "journal"
        self.segments = root / "segments"
        self.quarantine = root / "quarantine"
        self.staged = root / "staged"

    def journal_file(self, number: int) -> Path:
        return self.journal / f"{number}.journal"

    def journal_files(self) -> list[Path]:
        # Files with other names are not Headrace's, and are left alone.
        found = [path for path in self.journal.glob("*.journal") if path.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem))

    def segment(self, topic_id: int, base: int) -> Path:
        directory = f"{topic_id % SEGMENT_DIRECTORIES:02x}"
        return self.segments / directory / f"{topic_id:x}-{base:020d}.log"

    def index(self, topic_id: int, base: int) -> Path:
        return self.segment(topic_id, base).with_suffix(".idx")

    def staged_file(self, staged_id: str) -> Path:
        return self.staged / staged_id

    def files(self, suffix: str) -> Iterator[SegmentFile]:
        """Yield every segment (`.log`) or index (`.idx`) file, whether or not the catalogue knows it."""
        for number in range(SEGMENT_DIRECTORIES):
            with os.scandir(self.segments / f"{number:02x}") as found:
                for entry in found:
                    # Files with other names are not Headrace's, and are left alone.
                    if entry.name.endswith(suffix) and (named := segment_of(entry.name)):
                        yield SegmentFile(*named, Path(entry.path), entry.stat().st_size)

    def make(self) -> None:
        """Create the directories that are missing."""
        try:
            self.root.mkdir(mode=0o750, parents=True, exist_ok=True)
            self.journal.mkdir(exist_ok=True)
            self.segments.mkdir(exist_ok=True)
            if not self.staged.exists():
                self.staged.mkdir()
                _sync_directory(self.root)
            there = set(os.listdir(self.segments))
            missing = {f"{number:02x}" for number in range(SEGMENT_DIRECTORIES)} - there
            if missing:
                for name in missing:
                    (self.segments / name).mkdir()
                for directory in (self.segments, self.root):
                    _sync_directory(directory)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {self.root} cannot be used: {error.strerror}"
            ) from error

    def lock(self) -> int:
        """Lock the directory for this process and the processes that inherit the returned file descriptor."""
        if (self.root / UNFINISHED_NAME).exists():
            raise DataDirectoryError(
                f"{self.root} is unfinished: a backup or restore was interrupted there; run it again"
            )
        path = self.root / LOCK_NAME
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {self.root} cannot be written to: {error.strerror}"
            ) from error
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
                    os.close(fd)
                    raise DataDirectoryLockedError(
                        f"another server (process {holder}) uses the data directory {self.root}: "
                        "stop it, or choose another with --data-dir"
                    ) from None
                time.sleep(0.02)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd


def segment_of(name: str) -> tuple[int, int] | None:
    """Return the topic's number and the base offset in the name of a segment or index file; else None."""
    named = _NAME.fullmatch(name)
    return (int(named[1], 16), int(named[2])) if named else None


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
