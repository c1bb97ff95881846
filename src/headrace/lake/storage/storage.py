"""The places that keep a lake's files: their interface, and a directory. Others are in modules of their own.

The interface has only what a directory, object storage and HDFS can all promise. A name is used once and its
content never changes: files are neither renamed nor appended to nor overwritten. A listing may lack the
newest files, so it only finds leftovers. Whatever counts is named by something that counts already.
"""

import errno
import fcntl
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self, TypeVar

import pyarrow as pa

from headrace.lake.format import LakeError, StorageError

HIDDEN = "_headrace"
"""Directory name. Table readers and sweepers ignore names with this first character."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://?")
"""First part of an address. A `Path` joins its two slashes."""

LIBRARIES = {
    **dict.fromkeys(("s3", "s3a"), ("obstore", "s3")),
    **dict.fromkeys(("gs", "abfs", "abfss", "az"), ("obstore", "objects")),
    "hdfs": ("hdfs_native", "hdfs"),
}
"""Schemes of addresses, and for each the module that serves it and the extra that installs the module."""

_NO_PATH = re.compile(r"[%#?\\\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that libraries of tables misread in a path, because they expect addresses."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._=-]")
"""Characters of an address that libraries of tables encode in different ways."""

_BUFFER_BYTES = 1 << 20

T = TypeVar("T")


class StoredFile(NamedTuple):
    """An entry of a listing."""

    path: str
    modified_s: float


class NewFile(Protocol):
    """A file that is being written and has no name yet. It vanishes unless it is kept."""

    content: BinaryIO
    """File object for writing and reading."""

    def keep(self, path: str) -> int:
        """Give the file its name, make it durable, and return its size. Object storage is read back."""

    def discard(self) -> None:
        """Remove the file. Does nothing after `keep`."""


class Storage(ABC):
    """A place for the files of one table. Small, and can be sent to tasks."""

    catalog: Mapping[str, str]
    """Options of the Iceberg catalogue that has the table of this place. They are not sent to tasks."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Path of the directory, or URL: for libraries of tables, messages and summaries."""

    @property
    def table_options(self) -> Mapping[str, str]:
        """Options with which libraries of tables open `address`."""
        return {}

    def file(self, path: str) -> "LakeFile":
        """Return a file of this place."""
        return LakeFile(self, path)

    @abstractmethod
    def file_at(self, address: str) -> "LakeFile":
        """Return the file at a full address, which is outside of this place."""

    @abstractmethod
    def exists(self) -> bool:
        """True if anything is there; raise LakeError if it cannot hold files."""

    @abstractmethod
    def has(self, path: str) -> bool:
        """True if there is a file at `path`, or one below it."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a small file; raise FileNotFoundError if it is missing."""

    @abstractmethod
    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading at any position; raise FileNotFoundError if it is missing."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file; raise FileNotFoundError if it is missing."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Create a small file, durable when this returns; return False if the name has another content.

        So a repeat after an unknown outcome has the same answer.
        """

    @abstractmethod
    def new_file(self, path: str) -> NewFile:
        """Begin a large file near `path`, which is similar to the name that it will get."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield files whose paths begin with `prefix`. The newest may be missing, and some may be gone."""

    @abstractmethod
    def top(self) -> set[str]:
        """Return the first parts of all paths. The newest may be missing."""

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, and ignore those that are gone already."""

    @abstractmethod
    def sync(self, paths: Collection[str]) -> None:
        """Make files durable that a library of tables has written, except those that it has deleted."""

    def lock(self, job: str) -> AbstractContextManager[object]:
        """Return a lock against another job of this kind; it ends with the process.

        Object storage has no locks: there the conditional commit of a numbered batch decides.
        """
        return nullcontext()

    @abstractmethod
    def prepare(self) -> None:
        """Create the place if it is missing; raise LakeError unless files can be written to it."""

    def repeat(self, request: Callable[[], T]) -> T:
        """Return the answer to a request that may be repeated; repeat it while the store fails."""
        return request()

    def failure(self, error: Exception, path: str) -> StorageError | None:
        """Return the error for the user if a library of tables failed because of this place.

        Return None if the error has another cause, such as damage. A directory has no such failures.
        """
        return None

    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """Return the address in parts, from the top down: the same for the same place."""

    def check_apart(self, other: "Storage") -> None:
        """Raise LakeError if one of two places is inside the other."""
        one, another = self.parts(), other.parts()
        advice = f"name another {'address' if '://' in other.address else 'directory'}"
        if one == another:
            raise LakeError(f"{other.address} is the lake itself: {advice}")
        if one == another[: len(one)] or another == one[: len(another)]:
            raise LakeError(
                f"of {other.address} and the lake {self.address}, one is inside the other: {advice}"
            )


class LakeFile(NamedTuple):
    """A file of a place."""

    storage: Storage
    path: str

    def open(self) -> pa.NativeFile:
        return self.storage.open(self.path)

    def size(self) -> int:
        return self.storage.size(self.path)

    def __str__(self) -> str:
        return f"{self.storage.address}/{self.path}"


def storage_of(
    place: "str | Path | Storage",
    options: Mapping[str, str] | None = None,
    catalog: Mapping[str, str] | None = None,
) -> Storage:
    """Return the storage of an address, such as `lake`, `file:///data/lake` or `s3://bucket/lake`."""
    if not isinstance(place, str | Path):
        return place
    scheme = _SCHEME.match(str(place))
    if scheme is None:
        return DirectoryStorage(Path(place).absolute(), catalog or {})
    if scheme[1] == "file":
        return DirectoryStorage(Path("/", str(place)[scheme.end() :]), catalog or {})
    if scheme[1] not in LIBRARIES:
        raise LakeError(
            f"{place} has the unknown scheme {scheme[1]}: give a directory, or an address that begins with "
            f"{', '.join(f'{one}://' for one in ('file', *LIBRARIES))}"
        )
    url = f"{scheme[1]}://{str(place)[scheme.end() :].lstrip('/')}"
    try:
        if scheme[1] == "hdfs":
            from headrace.lake.storage.hdfs import HdfsStorage

            return HdfsStorage.at(url, options or {}, catalog or {})
        from headrace.lake.storage.objects import ObjectStorage

        return ObjectStorage.at(url, options or {}, catalog or {})
    except ModuleNotFoundError as error:
        raise LakeError(
            f"{place} needs: pip install 'headrace[{LIBRARIES[scheme[1]][1]}]' ({error.name} is missing)"
        ) from None


def check_plain(url: str, parts: Iterable[str]) -> None:
    """Raise LakeError unless libraries of tables understand the parts of an address after its first."""
    for part in parts:
        found = _NOT_PLAIN.search(part)
        if found or part in (".", ".."):
            raise LakeError(
                f"{url} has {found[0] if found else part!r} in it, which libraries of tables misread: use "
                "letters, digits, dots, hyphens, underscores and equals signs"
            )


# A directory


@dataclass(frozen=True)
class DirectoryStorage(Storage):
    """A directory, which all machines must share. Every file is fsynced with the directory that names it."""

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
        try:
            with _written(target, data) as made:
                _name(made, target)
        except FileExistsError:
            if target.read_bytes() != data:
                return False
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
                    yield StoredFile(name, found.st_mtime)

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

    @contextmanager
    def lock(self, job: str) -> Iterator[None]:
        try:
            path = self.root / HIDDEN / f"lock-{job}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LakeError(f"{self.root} cannot be written to: {error.strerror}") from None
        with os.fdopen(fd, "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read(20).decode("ascii", "replace").strip() or "unknown"
                raise LakeError(f"another {job} writes to {self.root} (process {holder})") from None
            file.truncate(0)
            file.write(b"%d\n" % os.getpid())
            yield

    def prepare(self) -> None:
        try:
            make_directory(self.root / HIDDEN)
            made = self.root / HIDDEN / f"probe-{uuid.uuid4().hex}"
            made.touch()
            made.unlink()
        except OSError as error:
            raise LakeError(f"{self.root} cannot be written to: {error.strerror}") from None

    def parts(self) -> tuple[str, ...]:
        return self.root.resolve().parts


class NewDirectoryFile:
    """Implementation of `NewFile` for a directory."""

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
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync(path.parent)


def _sync_names(root: Path, path: Path) -> None:
    """Fsync all directories from `root` down to a file: another task may have made them a moment ago."""
    for directory in path.parents:
        sync(directory)
        if directory == root:
            return


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: after a crash it has either the whole old or the whole new content."""
    with _written(path, data) as made:
        made.rename(path)
    sync(path.parent)


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """Write a durable file beside `path`, which the caller gives this name, and makes the name durable."""
    made = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")  # unique per writer
    try:
        made.write_bytes(data)
        sync(made)
        yield made
    finally:
        made.unlink(missing_ok=True)


def directory_of(storage: Storage, what: str) -> Path:
    """Return the directory of a storage; raise LakeError for another one, which `what` cannot use."""
    if not isinstance(storage, DirectoryStorage):
        raise LakeError(
            f"{storage.address} is not a directory, but {what} needs one: name a directory"
        )
    return storage.root


def check_links(storage: Storage, kind: str) -> None:
    """Raise LakeError unless a file in a directory can have two names. Other places do not need that."""
    if not isinstance(storage, DirectoryStorage):
        return
    one, other = (storage.root / HIDDEN / f"probe-{uuid.uuid4().hex}" for _ in range(2))
    one.touch()
    try:
        other.hardlink_to(one)
    except OSError:
        raise LakeError(
            f"{storage.root} is on a file system without hard links, which tables of the format {kind} need: "
            "name a directory on another one, or give --format iceberg for a new lake"
        ) from None
    finally:
        one.unlink()
        other.unlink(missing_ok=True)


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
