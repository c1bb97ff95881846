"""A lake in object storage: every file is an object whose name begins with the path of the lake's address.

An object appears as a whole or not at all. It is durable as soon as the store has acknowledged it.
"""

import errno
import itertools
import mmap
import os
import random
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple, Self

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError

from headrace.lake.format import LakeError, StorageError, plain
from headrace.lake.storage.failures import Failure
from headrace.lake.storage.options import (
    BACKOFF_BASE,
    BACKOFF_S,
    BACKOFF_S_MAX,
    CREDENTIALS_S_MAX,
    RETRY_S_MAX,
    StoreOptions,
    complete,
)
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage, StoredFile, T, check_plain

PART_BYTES = 16 << 20
"""Size of the parts in which files are sent that are larger than one part."""

PIECE_BYTES = 1 << 20
"""Least size of the pieces in which a file is read back."""

TAIL_BYTES = 256 << 10
"""Size of the end of an object that is fetched when it is opened. Most footers are smaller."""

AHEAD_BYTES = 1 << 20
"""Least size of other requests. Small columns are near each other, so that one request fetches several."""

PARTS_AT_ONCE_MAX = 4
DELETE_AT_ONCE_MAX = 1000

CLIENTS_MAX = 8
"""Number of clients that a process keeps, with their connections."""

_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_OF_STORES = ("AWS_", "AZURE_", "GOOGLE_")
_SAME = {"s3a": "s3", "abfs": "abfss"}
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class ObjectStorage(Storage):
    """A bucket, or the objects in it whose names begin with a path."""

    url: str
    given: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Options as the user gave them. They may hold secrets."""
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def at(
        cls, url: str, options: Mapping[str, str], catalog: Mapping[str, str] | None = None
    ) -> Self:
        """Return the storage at an address; raise LakeError if the address or an option is wrong."""
        made = cls(_normal(url), tuple(sorted(options.items())), catalog or {})
        made._connect()
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self.url, self.given)

    def _connect(self) -> "_Client":
        """Return the client for these options and this environment, which other storages share."""
        environment = (pair for pair in os.environ.items() if pair[0].startswith(_OF_STORES))
        return _client(self.url, self.given, tuple(sorted(environment)))

    @property
    def address(self) -> str:
        return self.url

    @property
    def table_options(self) -> Mapping[str, str]:
        return self._connect().options.for_tables()

    def file_at(self, address: str) -> LakeFile:
        scheme, _, rest = address.partition("://")
        bucket, _, path = rest.partition("/")
        return LakeFile(ObjectStorage.at(f"{scheme}://{bucket}", dict(self.given)), path)

    def exists(self) -> bool:
        return next(self.list(), None) is not None

    def has(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return next(self.list(f"{path}/"), None) is not None
        return True

    def read(self, path: str) -> bytes:
        return self._ask(path, lambda: bytes(obstore.get(self._connect().store, path).bytes()))

    def open(self, path: str) -> pa.NativeFile:
        size, tail = self._tail(path)
        return pa.PythonFile(RangedFile(self, path, size, tail), mode="r")

    def size(self, path: str) -> int:
        return self._ask(path, lambda: obstore.head(self._connect().store, path)["size"])

    def create(self, path: str, data: bytes) -> bool:
        def put() -> bool:
            try:
                obstore.put(self._connect().store, path, data, mode="create")
            except AlreadyExistsError as error:
                if Failure.of(error).is_conflict:
                    raise
                return False
            return True

        # An attempt whose answer was lost may have put it there.
        return self._ask(path, put) or self.read(path) == data

    def new_file(self, path: str) -> "NewObjectFile":
        return NewObjectFile(self)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        folder = prefix.rpartition("/")[0] or None
        pages: Any = None
        last: str | None = None

        def next_page() -> Any:
            nonlocal pages
            pages = pages or obstore.list(self._connect().store, folder, offset=last)
            try:
                return next(pages, ())
            except BaseError:
                pages = None  # it has ended: the next one begins after the last path
                raise

        while some := self._ask(folder or "", next_page):
            for one in some:
                last = one["path"]
                if last.startswith(prefix):
                    yield StoredFile(last, one["last_modified"].timestamp())

    def top(self) -> set[str]:
        found = self._ask("", lambda: obstore.list_with_delimiter(self._connect().store))
        return {*found["common_prefixes"], *(one["path"] for one in found["objects"])}

    def delete(self, paths: Iterable[str]) -> None:
        left = iter(paths)
        while some := list(itertools.islice(left, DELETE_AT_ONCE_MAX)):
            with self._sentences():
                try:
                    obstore.delete(self._connect().store, some)
                except FileNotFoundError as error:
                    if not Failure.of(error).is_missing_file:
                        raise
                    # Some stores say so of a single object, and may have left out others.
                    for path in some:
                        with suppress(FileNotFoundError):
                            obstore.delete(self._connect().store, path)

    def sync(self, paths: Collection[str]) -> None:
        pass  # an object is durable when its store has acknowledged it

    def prepare(self) -> None:
        """Raise LakeError unless objects can be written, and the second of two with one name is refused."""
        path = f"{HIDDEN}/probe-{uuid.uuid4().hex}"
        self.create(path, b"first")
        is_replaced = self.create(path, b"second") or self.read(path) != b"first"
        self.delete([path])
        if is_replaced:
            raise LakeError(
                f"{self.url} is in a store that replaces objects although it is told not to, so two jobs "
                "could overwrite each other's commits: use a store with conditional writes (If-None-Match)"
            )

    def parts(self) -> tuple[str, ...]:
        return self._connect().options.endpoint, *self.url.split("/")

    def repeat(self, request: Callable[[], T]) -> T:
        # Libraries repeat a request that fails, but not always one whose answer is lost or ends too early.
        for pause_s in _pauses(self._connect().options.retries_max):
            try:
                return request()
            except Exception as error:
                failure = Failure.of_table(error)
                if pause_s is None or failure is None or not failure.is_transient:
                    raise
                time.sleep(pause_s)
        raise AssertionError("the last pause is None")

    def failure(self, error: Exception, path: str) -> StorageError | None:
        found = Failure.of_table(error)
        return found and found.sentence(f"{self.url}/{path}")

    def _tail(self, path: str) -> tuple[int, memoryview]:
        """Return the size of a file and its last bytes."""
        if self.url.startswith(("az:", "abfss:")):  # they cannot be asked for the end of an object
            size = self.size(path)
            start = max(0, size - TAIL_BYTES)
            return size, self.fetch(path, start, size) if size else memoryview(b"")

        def fetch_tail() -> tuple[int, memoryview]:
            asked: Any = {"range": {"suffix": TAIL_BYTES}}
            try:
                found = obstore.get(self._connect().store, path, options=asked)
                return found.meta["size"], memoryview(found.bytes())
            except BaseError as error:
                if Failure.of(error).status != _RANGE_NOT_SATISFIABLE:
                    raise
                return 0, memoryview(b"")

        return self._ask(path, fetch_tail)

    def fetch(self, path: str, start: int, end: int) -> memoryview:
        """Return the bytes of a file between two positions."""
        return self._ask(
            path,
            lambda: memoryview(
                obstore.get_range(self._connect().store, path, start=start, end=end)
            ),
        )

    def _ask(self, path: str, request: Callable[[], T]) -> T:
        """Return the answer to a request, and translate its errors."""
        with self._sentences(path):
            return self.repeat(request)

    @contextmanager
    def _sentences(self, path: str = "") -> Iterator[None]:
        """Translate the errors of requests for a file."""
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            failure = Failure.of(error)
            place = f"{self.url}/{path}" if path else self.url
            if failure.is_missing_file:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place) from None
            raise failure.sentence(place) from None


class RangedFile:
    """An object as a file for Arrow, with few requests for the footer and the columns of a Parquet file.

    It has the part of a Python file that `pyarrow.PythonFile` uses. Arrow copies nothing that `read` returns.
    """

    closed = False

    def __init__(self, storage: ObjectStorage, path: str, size: int, tail: memoryview) -> None:
        self._fetch, self._size, self._position = partial(storage.fetch, path), size, 0
        self._tail_start, self._tail = size - len(tail), tail
        self._ahead_start, self._ahead = 0, memoryview(b"")

    def read(self, size: int = -1) -> memoryview:
        start = min(self._position, self._size)
        end = self._size if size < 0 else min(start + size, self._size)
        self._position = end
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        if end - start >= AHEAD_BYTES:
            return self._fetch(start, end)
        if not self._ahead_start <= start <= end <= self._ahead_start + len(self._ahead):
            self._ahead_start = start
            self._ahead = self._fetch(start, min(start + AHEAD_BYTES, self._size))
        return self._ahead[start - self._ahead_start : end - self._ahead_start]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self.closed = True


class NewObjectFile:
    """Implementation of `storage.NewFile` for object storage: a nameless file on the task's own disk."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self.content: BinaryIO = tempfile.TemporaryFile(prefix="headrace-")  # noqa: SIM115

    def keep(self, path: str) -> int:
        size = self.content.seek(0, os.SEEK_END)
        self.content.seek(0)
        if size <= PART_BYTES:
            if not self._storage.create(path, self.content.read()):
                raise LakeError(f"{self._storage.url}/{path} exists already: run this again")
        else:
            self._send(path)
        if not self._is_kept(path):
            raise LakeError(
                f"{self._storage.url}/{path} does not have the bytes that were sent: check the store, and "
                "run this again"
            )
        self.content.close()
        return size

    def discard(self) -> None:
        self.content.close()

    def _send(self, path: str) -> None:
        """Send a file in parts. No part is visible before all are there, and none stays if one fails."""
        try:
            with self._storage._sentences(path):
                obstore.put(
                    self._storage._connect().store,
                    path,
                    mmap.mmap(self.content.fileno(), 0, access=mmap.ACCESS_READ),
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE_MAX,
                )
        except (LakeError, FileNotFoundError):
            # The answer may have been lost. The name is ours alone, so the bytes tell.
            with suppress(LakeError, FileNotFoundError):
                if self._is_kept(path):
                    return
            raise

    def _is_kept(self, path: str) -> bool:
        """True if the store has exactly the bytes of this file."""
        self.content.seek(0)
        with self._storage._sentences(path):
            for some in obstore.get(self._storage._connect().store, path).stream(PIECE_BYTES):
                if self.content.read(len(some)) != some:
                    return False
        return not self.content.read(1)


class _Client(NamedTuple):
    options: StoreOptions
    store: Any


@lru_cache(maxsize=CLIENTS_MAX)
def _client(url: str, given: tuple[tuple[str, str], ...], environment: object) -> _Client:
    options = complete(url, dict(given))
    return _Client(options, _store(url, options))


def _store(url: str, options: StoreOptions) -> Any:
    backoff = {
        "init_backoff": timedelta(seconds=BACKOFF_S),
        "max_backoff": timedelta(seconds=BACKOFF_S_MAX),
        "base": BACKOFF_BASE,
    }
    more = {} if options.profile is None else {"credential_provider": partial(_asked, options)}
    # Their types know options by short names only. `from_url` does not know all options of S3.
    make: Any = partial(obstore.store.from_url, url)
    if url.startswith("s3:"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        make = partial(obstore.store.S3Store, bucket, prefix=prefix or None)
    try:
        return make(
            **options.for_obstore(),
            retry_config={
                "max_retries": options.retries_max,
                "retry_timeout": timedelta(seconds=RETRY_S_MAX),
                "backoff": backoff,
            },
            **more,
        )
    except UnknownConfigurationKeyError as error:
        name = _QUOTED.findall(str(error))
        raise LakeError(
            f"{url} has no option {name[0] if name else ''}: correct its name"
        ) from None
    except (BaseError, ValueError) as error:
        # A value may be a secret.
        said = _QUOTED.sub("…", str(error).partition("\n")[0])
        raise LakeError(f"{url} cannot be opened with these options: {plain(said)}") from None


def _asked(options: StoreOptions) -> dict[str, object]:
    """Return the credentials of a profile for obstore, which asks again when they expire."""
    found = options.credentials()
    if not found:
        raise LakeError(f"the AWS profile {options.profile!r} has lost its credentials")
    return {
        "access_key_id": found["AWS_ACCESS_KEY_ID"],
        "secret_access_key": found["AWS_SECRET_ACCESS_KEY"],
        "token": found.get("AWS_SESSION_TOKEN"),
        "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S_MAX),
    }


def _normal(url: str) -> str:
    """Return the usual form of an address; raise LakeError for one that cannot be used."""
    scheme, _, rest = url.partition("://")
    scheme = _SAME.get(scheme, scheme)
    bucket, *parts = [part for part in rest.split("/") if part] or [""]
    if not bucket:
        raise LakeError(f"{url} does not name a bucket")
    if "@" in bucket and scheme != "abfss":
        # Not repeated here: it may be a password.
        raise LakeError(f"the {scheme}:// address has something before an @: give keys as options")
    check_plain(url, parts)
    return "/".join([f"{scheme}://{bucket}", *parts])


def _pauses(retries_max: int) -> Iterator[float | None]:
    """Yield the pause after each attempt of a request; None after the last."""
    deadline, pause_s = time.monotonic() + RETRY_S_MAX, BACKOFF_S
    for _ in range(retries_max):
        if time.monotonic() > deadline:
            break
        pause_s = min(random.uniform(BACKOFF_S, BACKOFF_BASE * pause_s), BACKOFF_S_MAX)
        yield pause_s
    yield None
