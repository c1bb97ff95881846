"""The interface of a place that keeps a lake's files, and the function that finds the place for an address.

The interface has only what both a directory and object storage can promise. A name is used once and its
content never changes: files are neither renamed nor appended to nor overwritten. A listing may lack the
newest files, so it only finds leftovers. Whatever counts is named by something that counts already.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import pyarrow as pa

from headrace.lake.format import LakeError, StorageError

HIDDEN = "_headrace"
"""Directory name. Table readers and sweepers ignore names with this first character."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://?")
"""First part of an address. A `Path` joins its two slashes."""

OBJECT_SCHEMES = ("s3", "s3a", "gs", "abfs", "abfss", "az", "hdfs")


class StoredFile(NamedTuple):
    """An entry of a listing."""

    path: str
    bytes: int
    modified_s: float


class NewFile(Protocol):
    """A file that is being written and has no name yet. It vanishes unless it is kept."""

    @property
    def content(self) -> BinaryIO:
        """File object for writing and reading."""

    def keep(self, path: str) -> int:
        """Give the file its name, make it durable, check that it can be read back, and return its size."""

    def discard(self) -> None:
        """Remove the file. Does nothing after `keep`."""


class Storage(Protocol):
    """A place for the files of one table. Small, and can be sent to tasks."""

    @property
    def address(self) -> str:
        """Path of the directory, or URL: for messages and summaries."""

    @property
    def table_address(self) -> str:
        """Address of the place for libraries of tables."""

    @property
    def table_options(self) -> Mapping[str, str]:
        """Options with which libraries of tables open `table_address`."""

    @property
    def catalog(self) -> Mapping[str, str]:
        """Options of the Iceberg catalogue that has the table of this place. They are not sent to tasks."""

    def file(self, path: str) -> "LakeFile":
        """Return a file of this place."""

    def file_at(self, address: str) -> "LakeFile":
        """Return the file at a full address, which is outside of this place."""

    def exists(self) -> bool:
        """True if anything is there; raise LakeError if it cannot hold files."""

    def has(self, path: str) -> bool:
        """True if there is a file at `path`, or one below it."""

    def read(self, path: str) -> bytes:
        """Return the content of a small file; raise FileNotFoundError if it is missing."""

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading at any position; raise FileNotFoundError if it is missing."""

    def size(self, path: str) -> int:
        """Return the size of a file; raise FileNotFoundError if it is missing."""

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file, durable when this returns; return False if another file has the name.

        If the outcome of an attempt is unknown, the file is read back: True if it has this content.
        """

    def new_file(self, path: str) -> NewFile:
        """Begin a large file near `path`, which is similar to the name that it will get."""

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield files whose paths begin with `prefix`. The newest may be missing, and some may be gone."""

    def top(self) -> set[str]:
        """Return the first parts of all paths. The newest may be missing."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, and ignore those that are gone already."""

    def sync(self, paths: Collection[str]) -> None:
        """Make files durable that a library of tables has written, except those that it has deleted."""

    def lock(self, job: str) -> AbstractContextManager[object]:
        """Return a lock against another job of this kind; it ends with the process.

        Object storage has no locks: there the conditional commit of a numbered batch decides.
        """

    def prepare(self) -> None:
        """Create the place if it is missing; raise LakeError unless files can be written to it."""

    def failure(self, error: Exception, path: str) -> StorageError | None:
        """Return the error for the user if a library of tables failed because of this place.

        Return None if the error has another cause, such as damage. A directory has no such failures.
        """

    def check_apart(self, other: "Storage") -> None:
        """Raise LakeError if one of two places is inside the other."""


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
    from headrace.lake.storage.directory import DirectoryStorage

    if not isinstance(place, str | Path):
        return place
    scheme = _SCHEME.match(str(place))
    if scheme is None:
        return DirectoryStorage(Path(place).absolute(), catalog or {})
    if scheme[1] == "file":
        return DirectoryStorage(Path("/", str(place)[scheme.end() :]), catalog or {})
    if scheme[1] not in OBJECT_SCHEMES:
        raise LakeError(
            f"{place} has the unknown scheme {scheme[1]}: give a directory, or an address that begins with "
            f"{', '.join(f'{one}://' for one in ('file', *OBJECT_SCHEMES))}"
        )
    try:
        from headrace.lake.storage.objects import ObjectStorage
    except ModuleNotFoundError as error:
        extra = "s3" if scheme[1].startswith("s3") else "objects"
        raise LakeError(
            f"{place} needs: pip install 'headrace[{extra}]' ({error.name} is missing)"
        ) from None
    url = f"{scheme[1]}://{str(place)[scheme.end() :].lstrip('/')}"
    return ObjectStorage.at(url, options or {}, catalog or {})
