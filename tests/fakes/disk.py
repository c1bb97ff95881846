"""A model of the log's disk: records every change, and builds the directories that a crash may leave.

Theory of operation. A `RecordingDisk` does the same as the real disk and keeps a list of its operations. A
`DiskModel` gets that list from its beginning to any place. For every file it knows which bytes are surely on
disk and which were only handed to the operating system. From there, `killed` builds the directory as the
system has it, and `crashed` builds one of the many directories that a machine may have after a crash: writes
since the last fsync are missing, torn or zeros, and names since the last fsync of their directory are the old
ones.

The model treats a commit of SQLite as atomic and durable: `record_catalogue` keeps the whole file after each.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from unittest import mock

from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue
from headrace.log.disk import Disk

SECTOR_BYTES = 512


class ExistingFile(NamedTuple):
    """A file that existed before the recording began: all of its content counts as safe."""

    path: Path
    file: int
    data: bytes


class CreateOp(NamedTuple):
    path: Path
    file: int


class Write(NamedTuple):
    file: int
    position: int
    data: bytes
    synced: bool


class CutOp(NamedTuple):
    file: int
    size: int


class SyncOp(NamedTuple):
    file: int


class SyncAll(NamedTuple):
    pass


class SyncDirectory(NamedTuple):
    path: Path


class Rename(NamedTuple):
    old: Path
    new: Path


class Unlink(NamedTuple):
    path: Path


class CatalogueCommit(NamedTuple):
    data: bytes


class MarkOp(NamedTuple):
    """A mark that a test puts between two operations."""

    what: object


Naming = CreateOp | Rename | Unlink
Operation = (
    ExistingFile
    | Naming
    | Write
    | CutOp
    | SyncOp
    | SyncAll
    | SyncDirectory
    | CatalogueCommit
    | MarkOp
)


class RecordingDisk(Disk):
    """The real file system, with a list of all operations on it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._by_path: dict[Path, int] = {}
        self._by_fd: dict[int, int] = {}
        self._files = 0

    @property
    def open_files(self) -> int:
        return len(self._by_fd)

    def mark(self, what: object) -> None:
        self.operations.append(MarkOp(what))

    def open(self, path: Path, *, create: bool = False) -> int:
        if path not in self._by_path:
            if path.exists():
                self.operations.append(ExistingFile(path, self._files + 1, path.read_bytes()))
            elif create:
                self._note(CreateOp(path, self._files + 1))
            self._files += 1
            self._by_path[path] = self._files
        fd = super().open(path, create=create)
        self._by_fd[fd] = self._by_path[path]
        return fd

    def close(self, fd: int) -> None:
        del self._by_fd[fd]
        super().close(fd)

    def write(
        self, fd: int, parts: Sequence[bytes | memoryview], position: int, *, synced: bool = False
    ) -> None:
        data = b"".join(parts)
        self._note(Write(self._by_fd[fd], position, data, synced))
        super().write(fd, [data], position)

    def sync(self, fd: int) -> None:
        # The real file is not synced: a test that crashes only in the model need not wait for a disk.
        self._note(SyncOp(self._by_fd[fd]))

    def sync_file_system(self, fd: int) -> None:
        self._note(SyncAll())

    def sync_directory(self, path: Path) -> None:
        self._note(SyncDirectory(path))

    def cut(self, fd: int, size: int) -> None:
        self._note(CutOp(self._by_fd[fd], size))
        super().cut(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._note(Rename(old, new))
        super().rename(old, new)
        if old in self._by_path:
            self._by_path[new] = self._by_path.pop(old)

    def unlink(self, path: Path) -> None:
        if path.exists():
            self._note(Unlink(path))
            super().unlink(path)
            self._by_path.pop(path, None)

    @contextmanager
    def record_catalogue(self) -> Iterator[None]:
        """Record the commits of every catalogue that is used meanwhile."""
        begin = Catalogue.transaction

        def transaction(catalogue: Catalogue) -> "_Transaction":
            return _Transaction(begin(catalogue), lambda: self._committed(catalogue))

        with mock.patch.object(Catalogue, "transaction", transaction):
            yield

    def _committed(self, catalogue: Catalogue) -> None:
        if catalogue.path.name == FILE_NAME:
            self._note(CatalogueCommit(catalogue._db.serialize()))

    def _note(self, operation: Operation) -> None:
        self.operations.append(operation)


class FailingDisk(RecordingDisk):
    """A disk on which operations chosen by `fail` fail, writes after half of their bytes."""

    def __init__(self, fail: Callable[[Operation], OSError | None]) -> None:
        super().__init__()
        self._fail = fail

    def _note(self, operation: Operation) -> None:
        error = self._fail(operation)
        if error is None:
            super()._note(operation)
            return
        if isinstance(operation, Write):
            half = operation._replace(data=operation.data[: len(operation.data) // 2], synced=False)
            super()._note(half)
            path = next(path for path, file in self._by_path.items() if file == operation.file)
            with path.open("r+b") as file:
                file.seek(half.position)
                file.write(half.data)
        raise error


class _Transaction:
    """A transaction of the catalogue that calls `committed` after its commit."""

    def __init__(
        self, inner: AbstractContextManager[None, None], committed: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._committed = committed

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        if kind is None:
            self._committed()


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@dataclass(slots=True)
class _File:
    safe: bytes = b""
    pending: list[Write | CutOp] = field(default_factory=list)
    """Changes since the last fsync. A write that was synced by itself is included to keep the order."""

    def now(self) -> bytes:
        """Return the content as the operating system has it."""
        data = self.safe
        for change in self.pending:
            data = _changed(data, change)
        return data


class DiskModel:
    """The state of the disk after some of the recorded operations: the safe part and the pending part.

    `root` is the recorded directory. `before` is a copy of it from the beginning of the recording.
    """

    def __init__(self, root: Path, before: Path | None = None) -> None:
        self._root = root
        self._files: dict[int, _File] = defaultdict(_File)
        self._names: dict[Path, int] = {}
        self._pending_names: list[Naming] = []
        self._catalogue: bytes | None = None
        for path in before.rglob("*") if before is not None else ():
            if path.name == FILE_NAME:
                self._catalogue = path.read_bytes()
            elif path.is_file():
                assert before is not None
                number = -1 - len(self._files)
                self._names[root / path.relative_to(before)] = number
                self._files[number].safe = path.read_bytes()

    def do(self, operation: Operation) -> None:
        """Add one more operation to the model."""
        match operation:
            case ExistingFile():
                self._names[operation.path] = operation.file
                self._files[operation.file].safe = operation.data
            case CreateOp() | Rename() | Unlink():
                self._pending_names.append(operation)
            case Write() | CutOp():
                self._files[operation.file].pending.append(operation)
            case SyncOp():
                self._sync(self._files[operation.file])
            case SyncAll():
                for file in self._files.values():
                    self._sync(file)
                self._keep_names(self._pending_names)
                self._pending_names = []
            case SyncDirectory():
                here = [name for name in self._pending_names if _directory(name) == operation.path]
                self._keep_names(here)
                self._pending_names = [name for name in self._pending_names if name not in here]
            case CatalogueCommit():
                self._catalogue = operation.data

    @property
    def is_safe(self) -> bool:
        """True if a crash of the machine would change nothing."""
        return not self._pending_names and not any(file.pending for file in self._files.values())

    def killed(self, target: Path, running: Operation | None, chance: random.Random) -> None:
        """Build the directory as it is after the process was killed in the middle of an operation."""
        names = self._names.copy()
        for name in self._pending_names:
            _rename(names, name)
        files = {number: file.now() for number, file in self._files.items()}
        if isinstance(running, Write):
            done = running._replace(data=running.data[: chance.randrange(len(running.data) + 1)])
            files[running.file] = _changed(files.get(running.file, b""), done)
        self._write(target, names, files)

    def crashed(self, target: Path, running: Operation | None, chance: random.Random) -> None:
        """Build a directory that the machine may have after a crash in the middle of an operation."""
        names = self._names.copy()
        for name in self._pending_names:
            if chance.random() < 0.5:
                _rename(names, name)
        files = {}
        for number, file in self._files.items():
            data = file.safe
            for change in file.pending:
                data = _survived(data, change, chance)
            files[number] = data
        if isinstance(running, Write):
            running = running._replace(synced=False)
        if isinstance(running, Write | CutOp):
            files[running.file] = _survived(files.get(running.file, b""), running, chance)
        elif isinstance(running, Naming) and chance.random() < 0.5:
            _rename(names, running)
        self._write(target, names, files)

    def _sync(self, file: _File) -> None:
        file.safe = file.now()
        file.pending = []

    def _keep_names(self, names: Sequence[Naming]) -> None:
        for name in names:
            _rename(self._names, name)

    def _write(self, target: Path, names: dict[Path, int], files: dict[int, bytes]) -> None:
        for path, number in names.items():
            placed = target / path.relative_to(self._root)
            placed.parent.mkdir(parents=True, exist_ok=True)
            placed.write_bytes(files.get(number, b""))
        if self._catalogue is not None:
            target.mkdir(parents=True, exist_ok=True)
            (target / FILE_NAME).write_bytes(self._catalogue)


def _directory(name: Naming) -> Path:
    return (name.new if isinstance(name, Rename) else name.path).parent


def _rename(names: dict[Path, int], name: Naming) -> None:
    match name:
        case CreateOp():
            names[name.path] = name.file
        case Rename():
            if name.old in names:
                names[name.new] = names.pop(name.old)
        case Unlink():
            names.pop(name.path, None)


def _changed(data: bytes, change: Write | CutOp) -> bytes:
    if isinstance(change, CutOp):
        return data[: change.size]
    before = data[: change.position].ljust(change.position, b"\0")
    return before + change.data + data[change.position + len(change.data) :]


def _survived(data: bytes, change: Write | CutOp, chance: random.Random) -> bytes:
    """Apply the part of an unsynced change that survives a crash."""
    if isinstance(change, CutOp):
        return _changed(data, change) if chance.random() < 0.5 else data
    if change.synced:
        return _changed(data, change)
    fate = chance.choice(("kept", "missing", "torn", "sectors", "zeros"))
    if fate == "missing" or not change.data:
        return data
    if fate == "torn":
        change = change._replace(data=change.data[: chance.randrange(len(change.data))])
    elif fate == "zeros":
        change = change._replace(data=bytes(len(change.data)))
    elif fate == "sectors":
        return _some_sectors(data, change, chance)
    return _changed(data, change)


def _some_sectors(data: bytes, change: Write, chance: random.Random) -> bytes:
    """Apply some sectors of a write: a disk writes whole sectors, but in any order."""
    first = change.position
    end = first + len(change.data)
    while first < end:
        stop = min(end, (first // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if chance.random() < 0.5:
            part = change.data[first - change.position : stop - change.position]
            data = _changed(data, change._replace(position=first, data=part))
        first = stop
    return data
