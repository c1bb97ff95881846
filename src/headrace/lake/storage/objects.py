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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache, partial
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

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
from headrace.lake.storage.ranged import TAIL_BYTES, Fetch, RangedFile
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage, StoredFile

T = TypeVar("T")

PART_BYTES = 16 << 20
"""Size of the parts in which files are sent that are larger than one part."""

PIECE_BYTES = 1 << 20
"""Least size of the pieces in which a file is read back."""

PARTS_AT_ONCE_MAX = 4
DELETE_AT_ONCE_MAX = 1000

CLIENTS_MAX = 8
"""Number of clients that a process keeps, with their connections."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._=-]")
"""Characters that libraries of tables encode in different ways."""

_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_OF_STORES = ("AWS_", "AZURE_", "GOOGLE_")
_SAME = {"s3a": "s3", "abfs": "abfss"}
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class ObjectStorage:
    """Implementation of `storage.Storage` for object storage."""

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

    @property
    def address(self) -> str:
        return self.url

    @property
    def table_address(self) -> str:
        return self.url

    @property
    def table_options(self) -> Mapping[str, str]:
        return self._client.options.for_tables()

    def file(self, path: str) -> LakeFile:
        return LakeFile(self, path)

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
        return self._ask(path, lambda: bytes(obstore.get(self._client.store, path).bytes()))

    def open(self, path: str) -> pa.NativeFile:
        size, tail = self._tail(path)
        return pa.PythonFile(RangedFile(self._fetcher(path), size, tail), mode="r")

    def size(self, path: str) -> int:
        return self._ask(path, lambda: obstore.head(self._client.store, path)["size"])

    def create(self, path: str, data: bytes) -> bool:
        is_known = True
        for pause_s in _pauses(self._client.options.retries_max):
            try:
                obstore.put(self._client.store_without_retries, path, data, mode="create")
                return True
            except AlreadyExistsError as error:
                failure = Failure.of(error)
                if not failure.is_conflict:
                    # Another attempt of ours may have put it there.
                    return not is_known and self.read(path) == data
            except (BaseError, FileNotFoundError) as error:
                failure = Failure.of(error)
                if not failure.is_transient:
                    raise self._error(failure, path) from None
                is_known = False
            if pause_s is None:
                break
            time.sleep(pause_s)
        raise self._error(failure, path)

    def new_file(self, path: str) -> "NewObjectFile":
        return NewObjectFile(self)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        folder = prefix.rpartition("/")[0] or None
        pages: Any = None
        last: str | None = None

        def next_page() -> Any:
            nonlocal pages
            pages = pages or obstore.list(self._client.store, folder, offset=last)
            try:
                return next(pages, ())
            except BaseError:
                pages = None  # it has ended: the next one begins after the last path
                raise

        while some := self._ask(folder or "", next_page):
            for one in some:
                last = one["path"]
                if last.startswith(prefix):
                    yield StoredFile(last, one["size"], one["last_modified"].timestamp())

    def top(self) -> set[str]:
        found = self._ask("", lambda: obstore.list_with_delimiter(self._client.store))
        return {*found["common_prefixes"], *(one["path"] for one in found["objects"])}

    def delete(self, paths: Iterable[str]) -> None:
        left = iter(paths)
        while some := list(itertools.islice(left, DELETE_AT_ONCE_MAX)):
            with self._sentences():
                try:
                    obstore.delete(self._client.store, some)
                except FileNotFoundError as error:
                    if not Failure.of(error).is_missing_file:
                        raise
                    # Some stores say so of a single object, and may have left out others.
                    for path in some:
                        with suppress(FileNotFoundError):
                            obstore.delete(self._client.store, path)

    def sync(self, paths: Collection[str]) -> None:
        pass

    def lock(self, job: str) -> AbstractContextManager[object]:
        return nullcontext()

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

    def check_apart(self, other: Storage) -> None:
        if not isinstance(other, ObjectStorage):
            return
        if self._client.options.endpoint != other._client.options.endpoint:
            return
        one, another = f"{self.url}/", f"{other.url}/"
        if one == another:
            raise LakeError(f"{other.url} is the lake itself: name another address")
        if one.startswith(another) or another.startswith(one):
            raise LakeError(
                f"of {other.url} and the lake {self.url}, one is inside the other: name another address"
            )

    def send(self, path: str, content: mmap.mmap) -> None:
        """Send a file in parts. No part is visible before all are there, and none stays if one fails."""
        with self._sentences(path):
            obstore.put(
                self._client.store,
                path,
                content,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE_MAX,
            )

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file."""
        with self._sentences(path):
            yield from obstore.get(self._client.store, path).stream(PIECE_BYTES)

    def failure(self, error: Exception, path: str) -> StorageError | None:
        found = Failure.of_table(error)
        return found and found.sentence(f"{self.url}/{path}")

    @cached_property
    def _client(self) -> "_Client":
        return self._connect()

    def _connect(self) -> "_Client":
        """Return the client for these options and this environment, which other storages share."""
        environment = (pair for pair in os.environ.items() if pair[0].startswith(_OF_STORES))
        return _client(self.url, self.given, tuple(sorted(environment)))

    def _tail(self, path: str) -> tuple[int, memoryview]:
        """Return the size of a file and its last bytes."""
        if self.url.startswith(("az:", "abfss:")):  # they cannot be asked for the end of an object
            size = self.size(path)
            start = max(0, size - TAIL_BYTES)
            return size, self._fetcher(path)(start, size) if size else memoryview(b"")

        def fetch_tail() -> tuple[int, memoryview]:
            asked: Any = {"range": {"suffix": TAIL_BYTES}}
            try:
                found = obstore.get(self._client.store, path, options=asked)
                return found.meta["size"], memoryview(found.bytes())
            except BaseError as error:
                if Failure.of(error).status != _RANGE_NOT_SATISFIABLE:
                    raise
                return 0, memoryview(b"")

        return self._ask(path, fetch_tail)

    def _fetcher(self, path: str) -> Fetch:
        def fetch(start: int, end: int) -> memoryview:
            return self._ask(
                path,
                lambda: memoryview(
                    obstore.get_range(self._client.store, path, start=start, end=end)
                ),
            )

        return fetch

    def _ask(self, path: str, request: Callable[[], T]) -> T:
        """Return the answer to a request, and translate its errors.

        obstore repeats a request that fails, but not always one whose answer ends too early.
        """
        for pause_s in _pauses(self._client.options.retries_max):
            try:
                with self._sentences(path):
                    return request()
            except StorageError as error:
                if pause_s is None or not error.is_cut:
                    raise
                time.sleep(pause_s)
        raise AssertionError("the last pause is None")

    @contextmanager
    def _sentences(self, path: str = "") -> Iterator[None]:
        """Translate the errors of requests for a file."""
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._error(Failure.of(error), path) from None

    def _error(self, failure: Failure, path: str) -> StorageError | FileNotFoundError:
        place = f"{self.url}/{path}" if path else self.url
        if failure.is_missing_file:
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        return failure.sentence(place)


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
        mapped = mmap.mmap(self.content.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._storage.send(path, mapped)
        except (LakeError, FileNotFoundError):
            # The answer may have been lost. The name is ours alone, so the bytes tell.
            with suppress(LakeError, FileNotFoundError):
                if self._is_kept(path):
                    return
            raise

    def _is_kept(self, path: str) -> bool:
        """True if the store has exactly the bytes of this file."""
        self.content.seek(0)
        for some in self._storage.pieces(path):
            if self.content.read(len(some)) != some:
                return False
        return not self.content.read(1)


class _Client(NamedTuple):
    options: StoreOptions
    store: Any
    store_without_retries: Any
    """Store for conditional puts: only the first attempt can tell that another file has a name."""


@lru_cache(maxsize=CLIENTS_MAX)
def _client(url: str, given: tuple[tuple[str, str], ...], environment: object) -> _Client:
    options = complete(url, dict(given))
    return _Client(
        options, _store(url, options, options.retries_max), _store(url, options, retries_max=0)
    )


def _store(url: str, options: StoreOptions, retries_max: int) -> Any:
    backoff = {
        "init_backoff": timedelta(seconds=BACKOFF_S),
        "max_backoff": timedelta(seconds=BACKOFF_S_MAX),
        "base": BACKOFF_BASE,
    }
    more = {} if options.profile is None else {"credential_provider": _Provider(options)}
    # Their types know options by short names only. `from_url` does not know all options of S3.
    make: Any = partial(obstore.store.from_url, url)
    if url.startswith("s3:"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        make = partial(obstore.store.S3Store, bucket, prefix=prefix or None)
    try:
        return make(
            config=options.of_store,
            client_options=options.of_client,
            retry_config={
                "max_retries": retries_max,
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


class _Provider:
    """Credentials of a profile for obstore, which asks again when they expire."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options

    def __call__(self) -> dict[str, object]:
        found = self._options.credentials()
        if found is None:
            raise LakeError(f"the AWS profile {self._options.profile!r} has lost its credentials")
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S_MAX),
        }


def _normal(url: str) -> str:
    """Return the usual form of an address; raise LakeError for one that cannot be used."""
    scheme, _, rest = url.partition("://")
    scheme = _SAME.get(scheme, scheme)
    bucket, *parts = [part for part in rest.split("/") if part] or [""]
    if scheme == "hdfs":
        raise LakeError(
            f"{url} is in HDFS, which is reached only as a directory: mount it, and name the directory"
        )
    if not bucket:
        raise LakeError(f"{url} does not name a bucket")
    if "@" in bucket and scheme != "abfss":
        # Not repeated here: it may be a password.
        raise LakeError(f"the {scheme}:// address has something before an @: give keys as options")
    for part in parts:
        found = _NOT_PLAIN.search(part)
        if found or part in (".", ".."):
            raise LakeError(
                f"{url} has {found[0] if found else part!r} in it, which libraries of tables misread: use "
                "letters, digits, dots, hyphens, underscores and equals signs"
            )
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
