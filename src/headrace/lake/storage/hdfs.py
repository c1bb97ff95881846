"""A lake in HDFS: every file is written under another name, and renamed when it is complete and synced.

The NameNode carries out a rename as a whole, and refuses one whose target exists.
"""

import errno
import io
import os
import re
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import BinaryIO, Self

import pyarrow as pa
from hdfs_native import Client, FileReader, WriteOptions

from headrace.lake.format import LakeError, StorageError, plain
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage, StoredFile, check_plain

PIECE_BYTES = 1 << 20
"""Size of the pieces in which files are sent and read back, and least size of other reads."""

CLIENTS_MAX = 8
"""Number of clients that a process keeps, with their connections."""

_ATTEMPTS = "dfs.client.failover.max.attempts"
_ATTEMPTS_MAX = 7
"""Number of times that a single NameNode is tried again, which takes a minute. Hadoop's 15 take three."""

_AUTHORITY = re.compile(r"[A-Za-z0-9._-]+(:[0-9]+)?")
_OF_TABLES = "HdfsObjectStore"
"""Word in errors of libraries of tables whose cause is HDFS."""

_TRACE = re.compile(r"\\n|\n\s*at ")
"""Begin of the NameNode's stack trace, in which a newline may be escaped."""

_WORDS = {
    "No NameNode hosts": "names neither HOST:PORT of a NameNode nor a configured nameservice: correct the "
    "address, set HADOOP_CONF_DIR, or give options such as dfs.ha.namenodes.NAME",
    "Connection refused": "cannot be reached, because nothing listens at its NameNode or at a DataNode: "
    "start it, or correct the address",
    "failed to lookup": "cannot be reached, because no host is called like its NameNode: correct the address",
    "SafeModeException": "cannot be written to, because its NameNode is in safe mode: run this again later",
    "StandbyException": "has no active NameNode: name the nameservice instead of a NameNode, or run this "
    "again later",
    "AccessControlException": "does not allow this: give the user permission to list, read, write and delete "
    "there",
    "SASL|Sasl|GSS|InvalidToken": "refuses the credentials: get a Kerberos ticket with kinit",
    "QuotaExceeded": "has no room left in its quota: raise the quota, or delete something",
    "IO error|os error|RPC listener": "lost the connection: see whether HDFS works, and run this again",
}
"""Words for the user, by a pattern in the text of an error. The first pattern that matches counts."""


@dataclass(frozen=True)
class HdfsStorage(Storage):
    """A directory of HDFS."""

    url: str
    given: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Options as the user gave them."""
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def at(
        cls, url: str, options: Mapping[str, str], catalog: Mapping[str, str] | None = None
    ) -> Self:
        """Return the storage at an address; raise LakeError if the address or an option is wrong."""
        made = cls(_normal(url), tuple(sorted(options.items())), catalog or {})
        with made._sentences():
            made._connect()
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self.url, self.given)

    def _connect(self) -> Client:
        """Return the client for these options, which other storages share."""
        return _client("/".join(self.parts()[:3]), tuple(self.table_options.items()))

    def _path(self, path: str) -> str:
        """Return the full path of a file."""
        return "/" + "/".join(filter(None, [*self.parts()[3:], path]))

    @property
    def address(self) -> str:
        return self.url

    @property
    def table_options(self) -> Mapping[str, str]:
        is_single = ":" in self.parts()[2]
        return {**({_ATTEMPTS: str(_ATTEMPTS_MAX)} if is_single else {}), **dict(self.given)}

    def file_at(self, address: str) -> LakeFile:
        authority, _, path = address.removeprefix("hdfs://").partition("/")
        return LakeFile(HdfsStorage.at(f"hdfs://{authority}", dict(self.given)), path)

    def exists(self) -> bool:
        with suppress(FileNotFoundError), self._sentences():
            if not self._connect().get_file_info(self._path("")).isdir:
                raise LakeError(f"{self.url} is not a directory: name a new or an empty one")
            return True
        return False

    def has(self, path: str) -> bool:
        with suppress(FileNotFoundError), self._sentences(path):
            self._connect().get_file_info(self._path(path))
            return True
        return False

    def read(self, path: str) -> bytes:
        with self._sentences(path):
            return self._connect().read(self._path(path)).read()

    def open(self, path: str) -> pa.NativeFile:
        with self._sentences(path):
            source = _Source(self, path, self._connect().read(self._path(path)))
        return pa.PythonFile(io.BufferedReader(source, PIECE_BYTES), mode="r")

    def size(self, path: str) -> int:
        with self._sentences(path):
            return self._connect().get_file_info(self._path(path)).length

    def create(self, path: str, data: bytes) -> bool:
        made = f"{path}.{uuid.uuid4().hex[:12]}.tmp"  # unique per writer
        try:
            self._put(made, io.BytesIO(data))
            self._rename(made, path)
        except (OSError, StorageError) as error:
            # Without its source, a rename whose answer was lost cannot happen later.
            self.delete([made])
            try:
                return self.read(path) == data
            except FileNotFoundError:
                raise error from None
        return True

    def new_file(self, path: str) -> "NewHdfsFile":
        return NewHdfsFile(self, path)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        folder, root = prefix.rpartition("/")[0], self._path("").rstrip("/")
        with suppress(FileNotFoundError), self._sentences(folder):
            for one in self._connect().list_status(self._path(folder), recursive=True):
                path = one.path.removeprefix(f"{root}/")
                if not one.isdir and path.startswith(prefix):
                    yield StoredFile(path, one.modification_time / 1000)

    def top(self) -> set[str]:
        with self._sentences():
            found = self._connect().list_status(self._path(""))
            return {one.path.rpartition("/")[2] for one in found}

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError), self._sentences(path):
                self._connect().delete(self._path(path))

    def sync(self, paths: Collection[str]) -> None:
        pass  # a closed file cannot be synced: DataNodes do that themselves, if they are told to

    def prepare(self) -> None:
        """Raise LakeError unless files can be written, and the second of two with one name is refused."""
        path = f"{HIDDEN}/probe-{uuid.uuid4().hex}"
        self.create(path, b"first")
        is_replaced = self.create(path, b"second") or self.read(path) != b"first"
        self.delete([path])
        if is_replaced:
            raise LakeError(
                f"{self.url} replaces files although it is told not to, so two jobs could overwrite each "
                "other's commits: use an HDFS whose renames are refused if the target exists"
            )

    def parts(self) -> tuple[str, ...]:
        return tuple(self.url.split("/"))

    def failure(self, error: Exception, path: str) -> StorageError | None:
        return _sentence(error, f"{self.url}/{path}") if _OF_TABLES in str(error) else None

    def _put(self, path: str, content: BinaryIO) -> None:
        """Write a new file, and make it durable."""
        with self._sentences(path):
            file = self._connect().create(self._path(path), WriteOptions(create_parent=True))
            while some := content.read(PIECE_BYTES):
                file.write(some)
            if content.tell():
                file.hsync()
            file.close()

    def _rename(self, path: str, target: str) -> None:
        """Rename a file; raise FileExistsError if another one has the name."""
        with self._sentences(target):
            self._connect().rename(self._path(path), self._path(target))

    @contextmanager
    def _sentences(self, path: str = "") -> Iterator[None]:
        """Translate the errors of requests for a file."""
        place = f"{self.url}/{path}" if path else self.url
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place) from None
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place) from None
        except (OSError, RuntimeError) as error:
            raise _sentence(error, place) from None


class NewHdfsFile:
    """Implementation of `storage.NewFile` for HDFS: a nameless file on the task's own disk."""

    def __init__(self, storage: HdfsStorage, made: str) -> None:
        self._storage, self._made = storage, made
        self.content: BinaryIO = tempfile.TemporaryFile(prefix="headrace-")  # noqa: SIM115

    def keep(self, path: str) -> int:
        size = self.content.seek(0, os.SEEK_END)
        self.content.seek(0)
        try:
            # Like the new name, the first one belongs to this file alone, and leftovers with it are swept.
            self._storage._put(self._made, self.content)
            if self._made != path:
                self._storage._rename(self._made, path)
        except (OSError, StorageError) as error:
            # The answer may have been lost. The name is ours alone, so the bytes tell.
            with suppress(LakeError, FileNotFoundError):
                if self._is_kept(path):
                    return size
            if isinstance(error, OSError):
                reason = f"{error.strerror}: run this again"
                raise LakeError(f"{error.filename} cannot be written to: {reason}") from None
            raise
        if not self._is_kept(path):
            raise LakeError(
                f"{self._storage.url}/{path} does not have the bytes that were sent: check HDFS, and run "
                "this again"
            )
        self.content.close()
        return size

    def discard(self) -> None:
        self.content.close()

    def _is_kept(self, path: str) -> bool:
        """True if HDFS has exactly the bytes of this file."""
        self.content.seek(0)
        with self._storage.open(path) as file:
            while some := file.read(PIECE_BYTES):
                if self.content.read(len(some)) != some:
                    return False
        return not self.content.read(1)


class _Source(io.RawIOBase):
    """A file of HDFS for reading. The library's own panics when it is read past the end."""

    def __init__(self, storage: HdfsStorage, path: str, reader: FileReader) -> None:
        self._storage, self._name, self._reader, self._at = storage, path, reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._reader))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = max(0, min(len(buffer), len(self._reader) - self._at))
        if size:
            with self._storage._sentences(self._name):
                buffer[:size] = self._reader.read_range(self._at, size)
        self._at += size
        return size


@lru_cache(maxsize=CLIENTS_MAX)
def _client(url: str, options: tuple[tuple[str, str], ...]) -> Client:
    return Client(url, dict(options))


def _sentence(error: Exception, place: str) -> StorageError:
    """Return the error for the user; `place` is the address of the storage or of a file in it."""
    text = str(error)
    for pattern, words in _WORDS.items():
        if re.search(pattern, text):
            return StorageError(f"{place} {words}")
    return StorageError(f"{place} cannot be used: {plain(_TRACE.split(text)[0])}")


def _normal(url: str) -> str:
    """Return the usual form of an address; raise LakeError for one that cannot be used."""
    authority, *parts = [part for part in url.removeprefix("hdfs://").split("/") if part] or [""]
    if not _AUTHORITY.fullmatch(authority):
        # Not repeated here: it may have a password.
        raise LakeError(
            "the hdfs:// address does not begin with a NameNode: give hdfs://HOST:PORT/PATH, or the name of "
            "a nameservice instead of HOST:PORT"
        )
    check_plain(url, parts)
    return "/".join([f"hdfs://{authority}", *parts])
