"""The paths in a data directory, its directories and its lock. Opens no other files."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import DataDirectoryError, DataDirectoryLockedError
from headrace.log.disk import Disk

SEGMENT_DIRECTORIES = 256
"""Number of directories that all topics share: creating one per topic costs about a millisecond."""

_NAME = re.compile(r"([0-9a-f]+)-(\d{20})\.(?:log|idx)")

LOCK_NAME = "lock"

TOKENS_NAME = "tokens.json"
"""Name of the file with the tokens of clients. Its content belongs to access control."""

UNFINISHED_NAME = "headrace-unfinished"
"""Name of a file that marks a directory in which a backup or restore is running or was interrupted."""

_LOCK_RETRY_S = 0.02
_LOCK_ATTEMPTS = 100
"""Attempts while the server that has the lock lives: it may be about to end."""
_ORPHAN_ATTEMPTS = 3000
"""Attempts after its end: on a busy machine, the applier of a killed server may need seconds to notice."""


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
        self.tokens = root / TOKENS_NAME

    def journal_file(self, number: int) -> Path:
        return self.journal / f"{number}.journal"

    def journal_files(self) -> list[Path]:
        # Files with other names are not Headrace's, and are left alone.
        found = [path for path in self.journal.glob("*.journal") if path.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem))

    def segment(self, topic_id: int, base: int) -> Path:
        return self._file(topic_id, base, "log")

    def index(self, topic_id: int, base: int) -> Path:
        return self._file(topic_id, base, "idx")

    def _file(self, topic_id: int, base: int, suffix: str) -> Path:
        directory = f"{topic_id % SEGMENT_DIRECTORIES:02x}"
        return self.segments / f"{directory}/{topic_id:x}-{base:020d}.{suffix}"

    def staged_file(self, staged_id: str) -> Path:
        return self.staged / staged_id

    def files(self, suffix: str = "") -> Iterator[SegmentFile]:
        """Yield every segment (`.log`) and index (`.idx`) file, whether or not the catalogue knows it."""
        for number in range(SEGMENT_DIRECTORIES):
            with os.scandir(self.segments / f"{number:02x}") as found:
                for entry in found:
                    # Files with other names are not Headrace's, and are left alone.
                    if entry.name.endswith(suffix) and (named := segment_of(entry.name)):
                        yield SegmentFile(*named, Path(entry.path), entry.stat().st_size)

    def make(self, disk: Disk) -> None:
        """Create the directories that are missing, on disk too."""
        try:
            new = [path for path in (self.root, *self.root.parents) if not path.exists()]
            disk.make_directory(self.root, 0o750)
            for path in new:
                disk.sync_directory(path.parent)
            shared = (self.segments / f"{number:02x}" for number in range(SEGMENT_DIRECTORIES))
            wanted = (self.journal, self.staged, *shared)
            missing = [path for path in wanted if not path.is_dir()]
            for path in missing:
                disk.make_directory(path)
            if missing:
                disk.sync_directory(self.segments)
                disk.sync_directory(self.root)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {self.root} cannot be used: {error.strerror}"
            ) from error

    def lock(self, disk: Disk) -> int:
        """Lock the directory for this process and the processes that inherit the returned file descriptor."""
        if (self.root / UNFINISHED_NAME).exists():
            raise DataDirectoryError(
                f"{self.root} is unfinished: a backup or restore was interrupted there; run it again"
            )
        try:
            fd = disk.open(self.root / LOCK_NAME, create=True)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {self.root} cannot be written to: {error.strerror}"
            ) from error
        attempts = 0
        while not _locked(fd):
            attempts += 1
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            if attempts >= (_LOCK_ATTEMPTS if Path("/proc", holder).exists() else _ORPHAN_ATTEMPTS):
                disk.close(fd)
                raise DataDirectoryLockedError(
                    f"another server (process {holder}) uses the data directory {self.root}: "
                    "stop it, or choose another with --data-dir"
                )
            time.sleep(_LOCK_RETRY_S)
        disk.cut(fd, 0)
        disk.write(fd, [f"{os.getpid()}\n".encode()], 0)
        return fd


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def segment_of(name: str) -> tuple[int, int] | None:
    """Return the topic's number and the base offset in the name of a segment or index file; else None."""
    named = _NAME.fullmatch(name)
    return (int(named[1], 16), int(named[2])) if named else None
