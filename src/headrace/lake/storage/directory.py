"""A lake in a directory: every file is fsynced together with the directory that names it."""

import errno
import fcntl
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import pyarrow as pa

from headrace.lake.format import LakeError
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage, StoredFile

_NO_PATH = re.compile(r"[%#?\\\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that libraries of tables misread in a path, because they expect addresses."""

_BUFFER_BYTES = 1 << 20


def sync(path: Path) -> None:
    """Fsync a file's content, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create the directory and its parents, and fsync the parent of each new one.

    Another task may create the same directory at the same time.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    sync(path.parent)


def _sync_names(root: Path, path: Path) -> None:
    """Fsync all directories from `root` down to a file: another task may have made them a moment ago."""
    for directory in path.parents:
        sync(directory)
        if directory == root:
            return


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


def directory_of(storage: Storage, what: str) -> Path:
    """Return the directory of a storage; raise LakeError for another one, which `what` cannot use."""
    if not isinstance(storage, DirectoryStorage):
        raise LakeError(
            f"{storage.address} is not a directory, but {what} needs one: name a directory"
        )
    return storage.root


def _name(made: Path, target: Path) -> None:
    """Give a file its final name; raise FileExistsError if another file has it."""
    try:
        # Unlike a rename, a link never replaces another file.
        os.link(made, target)
    except FileExistsError:
        raise
    except OSError:
        # Some mounted object stores have no links.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        made.rename(target)


@dataclass(frozen=True)
class DirectoryStorage:
    """Implementation of `storage.Storage` for a directory, which all machines must share."""

    root: Path
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self.root,)

    def __post_init__(self) -> None:
        found = _NO_PATH.search(str(self.root))
        if found:
            raise LakeError(
                f"{str(self.root)!r} has {found[0]!r} in it, which means something else in addresses of "
                "tables: name another directory"
            )

    @property
    def address(self) -> str:
        return str(self.root)

    @property
    def table_address(self) -> str:
        return str(self.root)

    @property
    def table_options(self) -> Mapping[str, str]:
        return {}

    def file(self, path: str) -> LakeFile:
        return LakeFile(self, path)

    def file_at(self, address: str) -> LakeFile:
        path = Path(address.removeprefix("file://"))
        return LakeFile(DirectoryStorage(path.parent), path.name)

    def exists(self) -> bool:
        if self.root.exists() and not self.root.is_dir():
            raise LakeError(f"{self.root} is not a directory: name a new or an empty one")
        return self.root.exists()

    def has(self, path: str) -> bool:
        return (self.root / path).exists()

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(str(self.root / path))

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def create(self, path: str, data: bytes) -> bool:
        target = self.root / path
        make_directory(target.parent)
        made = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            made.write_bytes(data)
            sync(made)
            _name(made, target)
        except FileExistsError:
            return False
        finally:
            made.unlink(missing_ok=True)
        _sync_names(self.root, target)
        return True

    def new_file(self, path: str) -> "NewDirectoryFile":
        return NewDirectoryFile(self.root, self.root / path)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        top = self.root / prefix.rpartition("/")[0]
        for path in top.rglob("*"):
            name = str(path.relative_to(self.root))
            if name.startswith(prefix):
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                if path.is_file():
                    yield StoredFile(name, found.st_size, found.st_mtime)

    def top(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            (self.root / path).unlink(missing_ok=True)

    def sync(self, paths: Collection[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                sync(self.root / path)
        for parent in {(self.root / path).parent for path in paths}:
            sync(parent)
        sync(self.root)

    def lock(self, job: str) -> "Lock":
        return Lock(self.root, job)

    def prepare(self) -> None:
        try:
            make_directory(self.root / HIDDEN)
            made = self.root / HIDDEN / f"probe-{uuid.uuid4().hex}"
            made.touch()
            made.unlink()
        except OSError as error:
            raise LakeError(f"{self.root} cannot be written to: {error.strerror}") from None

    def failure(self, error: Exception, path: str) -> None:
        return None

    def check_apart(self, other: Storage) -> None:
        if not isinstance(other, DirectoryStorage):
            return
        one, another = self.root.resolve(), other.root.resolve()
        if one == another:
            raise LakeError(f"{other.root} is the lake itself: name another directory")
        if one in another.parents or another in one.parents:
            raise LakeError(
                f"of {other.root} and the lake {self.root}, one is inside the other: name another directory"
            )


class NewDirectoryFile:
    """Implementation of `storage.NewFile` for a directory."""

    def __init__(self, root: Path, made: Path) -> None:
        self._root = root
        self._made: Path | None = made
        make_directory(made.parent)
        self.content: BinaryIO = made.open("w+b", buffering=_BUFFER_BYTES)

    def keep(self, path: str) -> int:
        assert self._made is not None
        self.content.flush()
        os.fsync(self.content.fileno())
        size = os.fstat(self.content.fileno()).st_size
        self.content.close()
        target = self._root / path
        self._made.rename(target)
        self._made = None
        _sync_names(self._root, target)
        return size

    def discard(self) -> None:
        if self._made is not None:
            with suppress(OSError):  # the disk may be full
                self.content.close()
            self._made.unlink(missing_ok=True)
            self._made = None


class Lock:
    """Lock that is held until the `with` block ends, or until the process ends in any way."""

    def __init__(self, root: Path, job: str) -> None:
        self._root, self._job = root, job
        path = root / HIDDEN / f"lock-{job}"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LakeError(f"{root} cannot be written to: {error.strerror}") from None

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise LakeError(
                f"another {self._job} writes to {self._root} (process {holder or 'unknown'})"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
