"""The ring of journal files: the current file, the files that wait for the applier, and the free files."""

from collections import deque
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.log.commit.journal import JournalFile
from headrace.log.disk import Disk
from headrace.log.store import Appended, Topic


class ApplierLink(Protocol):
    """Connection to the applier, which applies closed journal files and prepares new ones."""

    def apply(self, closed: "ClosedFile") -> None: ...


class ClosedFile(NamedTuple):
    path: Path
    until: int
    """End of the file's last frame, in bytes."""
    last: int
    """Number of the file's last commit."""


class Ring:
    def __init__(self, disk: Disk, file_bytes: int, generation: int, boot_id: bytes) -> None:
        self._disk = disk
        self._generation = generation
        self._file_bytes = file_bytes
        self._boot_id = boot_id
        self._free: deque[Path] = deque()
        self._unsynced: set[Path] = set()
        self._touched: dict[Path, dict[Topic, int]] = {}
        self.current: JournalFile | None = None
        self.first = 0
        self.opened_s = 0.0
        self.last = 0

    @property
    def used(self) -> bool:
        """True if the current file holds any commit."""
        return self.current is not None and self.last >= self.first

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def has_unsynced(self) -> bool:
        return bool(self._unsynced)

    def add_free(self, path: Path) -> None:
        self._free.append(path)

    def open_next(self, first: int, applied: int, now_s: float) -> bool:
        """Open the next free file for commits; return False if no file is free."""
        if not self._free:
            return False
        path = self._free.popleft()
        self.current = JournalFile(
            self._disk,
            path,
            generation=self._generation,
            first=first,
            applied=applied,
            size=self._file_bytes,
            boot_id=self._boot_id,
        )
        self._touched[path] = {}
        self.first, self.last, self.opened_s = first, first - 1, now_s
        return True

    def close_current(self) -> ClosedFile:
        file = self.current
        assert file is not None and self.used
        self.current = None
        file.close()
        return ClosedFile(file.path, file.position, self.last)

    def wrote(self, sequence: int, appended: list[Appended], *, synced: bool) -> None:
        """Record a commit that was written to the current file."""
        file = self.current
        assert file is not None
        self.last = sequence
        touched = self._touched[file.path]
        for one in appended:
            touched[one.topic] = one.end
        if not synced:
            self._unsynced.add(file.path)

    def unsynced(self) -> list[Path]:
        """Return the files with commits that are written and not synced."""
        return list(self._unsynced)

    def sync(self, paths: list[Path]) -> None:
        """Fsync files, in any thread. Opens each file anew, since a recycled file may be closed meanwhile."""
        for path in paths:
            fd = self._disk.open(path)
            try:
                self._disk.sync(fd)
            finally:
                self._disk.close(fd)

    def synced(self, paths: list[Path]) -> None:
        """Record that `sync` finished for these files and that none was written to since `sync` began."""
        self._unsynced.difference_update(paths)

    def touched(self, path: Path) -> dict[Topic, int]:
        """Return the topics with commits in the file, each with the end offset of its last append there."""
        return self._touched[path]

    def free(self, path: Path) -> None:
        """Recycle a file that is applied: its commits are synced as segments, and the file takes new ones."""
        del self._touched[path]
        self._unsynced.discard(path)
        self._free.append(path)

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
        self.current = None
