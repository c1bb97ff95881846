"""The catalogue that names the newest state of an Iceberg table, and the library's access to its files.

A lake in a directory has a catalogue of its own, an SQLite database, unless the user names another one. A
lake of another catalogue has a small file that names its table there.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import msgspec
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    OAuthError,
    RESTError,
    UnauthorizedError,
)
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile
from pyiceberg.table import Table
from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError

from headrace.errors import HeadraceError
from headrace.lake.format import (
    FORMAT,
    DamagedTableError,
    LakeError,
    decode_versioned,
    in_a_sentence,
    plain,
)
from headrace.lake.storage.storage import HIDDEN, LakeFile, Storage, directory_of

OWN_CATALOG = f"{HIDDEN}/catalog.db"
"""Database of a lake that has its own catalogue."""

MARK = f"{HIDDEN}/iceberg.json"
"""File of a lake whose table is in another catalogue."""

CATALOG = "headrace"
TABLE = "headrace.records"
LAKE_KEY = "headrace.lake"
"""Property of a table in another catalogue: the address of its lake."""

NAME_OPTION, TABLE_OPTION, LOCATION_OPTION = "name", "table", "location"
"""Options of ours. All others are properties of the library."""

_STORAGE = "headrace.storage"
_OPEN_OPTIONS = (NAME_OPTION, TABLE_OPTION, LOCATION_OPTION, "type", "uri", "warehouse")
"""Options that may be in error messages."""

_LIBRARIES = ("botocore", "google", "requests", "sqlalchemy", "thrift", "urllib3")
"""Libraries by which catalogues are reached."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `MARK`."""

    format: int = FORMAT
    table: str
    uuid: str
    location: str
    """Address of the lake."""


@dataclass(frozen=True)
class LakeCatalog:
    """Catalogue of a lake's table."""

    storage: Storage
    catalog: Catalog
    table: str
    is_own: bool = False
    """True if the catalogue is the lake's own database."""
    mark: Mark | None = None
    """None if the catalogue is the lake's own, or if the lake is new."""

    @classmethod
    def find(cls, storage: Storage) -> Self | None:
        """Return the catalogue of an existing lake; None if it has none."""
        if storage.has(OWN_CATALOG):
            return cls.own(storage)
        try:
            data = storage.read(MARK)
        except FileNotFoundError:
            return None
        with in_a_sentence(storage, MARK, ValueError):
            mark = decode_versioned(data, Mark, str(storage.file(MARK)))
        if mark.location != location_of(storage):
            raise moved(storage, mark.location)
        if not storage.catalog:
            raise LakeError(
                f"{storage.address} is the table {mark.table} of an Iceberg catalogue: give the "
                "catalogue's properties with --catalog-option, such as uri=https://host"
            )
        return cls(storage, _load(storage), mark.table, mark=mark)

    @classmethod
    def own(cls, storage: Storage) -> Self:
        path = directory_of(storage, "an Iceberg table without a catalogue") / OWN_CATALOG
        with in_a_sentence(storage, OWN_CATALOG, SQLAlchemyError):
            found = SqlCatalog(CATALOG, uri=f"sqlite:///{path}", warehouse=location_of(storage))
        return cls(storage, _with_files(found, storage), TABLE, is_own=True)

    @classmethod
    def given(cls, storage: Storage) -> Self:
        """Return the catalogue that the user names, for a new lake."""
        return cls(storage, _load(storage), storage.catalog.get(TABLE_OPTION, TABLE))

    @property
    def location(self) -> str:
        """Address of the metadata of a new table."""
        own = location_of(self.storage)
        return own if self.is_own else self.storage.catalog.get(LOCATION_OPTION, own)

    def load(self) -> Table | None:
        """Return the newest state of the table; None if there is none."""
        try:
            with self.errors():
                found = self.catalog.load_table(self.table)
        except (NoSuchTableError, NoSuchNamespaceError):
            if self.mark is not None:
                raise self._is_gone() from None
            return None
        except FileNotFoundError as error:
            reason = f"{error}; a table that was moved must be moved back to its first location"
            raise DamagedTableError(self.storage, "metadata", reason) from None
        if self.mark is not None and str(found.metadata.table_uuid) != self.mark.uuid:
            raise self._is_gone()
        if self.is_own and found.location() != location_of(self.storage):
            raise moved(self.storage, found.location())
        return found

    def make_mark(self, table: Table | None) -> None:
        """Leave the table's name in its lake; raise LakeError if the table is of another lake."""
        if table is None:
            raise LakeError(
                f"the catalogue of {self.storage.address} has not created the table {self.table}: run this "
                "again"
            )
        if table.properties.get(LAKE_KEY) != location_of(self.storage):
            raise LakeError(
                f"the catalogue of {self.storage.address} has another table {self.table}: give another name "
                "with --catalog-option table=NAMESPACE.NAME"
            )
        mark = Mark(
            table=self.table,
            uuid=str(table.metadata.table_uuid),
            location=location_of(self.storage),
        )
        self.storage.create(MARK, msgspec.json.encode(mark))

    def errors(self) -> AbstractContextManager[None]:
        """Translate errors of the catalogue, except a refused commit."""
        if self.is_own:
            return in_a_sentence(self.storage, OWN_CATALOG, SQLAlchemyError)
        return _sentences(self.storage)

    def _is_gone(self) -> LakeError:
        return LakeError(
            f"{self.storage.address} is no longer a lake of Headrace: its catalogue does not have its table "
            f"{self.table}"
        )


def location_of(storage: Storage) -> str:
    """Return the address of a lake as Iceberg writes it."""
    place = storage.address
    return place if "://" in place else f"file://{place}"


def moved(storage: Storage, location: str) -> LakeError:
    return LakeError(
        f"{storage.address} is a copy of an Iceberg table, or was moved: its metadata names files in "
        f"{location.removeprefix('file://')}; use that, or move it back there"
    )


def _with_files(catalog: Catalog, storage: Storage) -> Catalog:
    """Make a catalogue use the files of a storage, and close each connection to its database after use."""
    access = {"py-io-impl": f"{__name__}.{StorageIO.__name__}", _STORAGE: storage}
    catalog.properties.update(access)
    if isinstance(catalog, SqlCatalog):
        catalog.engine.dispose()
        catalog.engine = create_engine(catalog.engine.url, poolclass=NullPool)
    return catalog


def _load(storage: Storage) -> Catalog:
    given = dict(storage.catalog)
    for name in (TABLE_OPTION, LOCATION_OPTION):
        given.pop(name, None)
    with _sentences(storage, Exception):
        return _with_files(load_catalog(given.pop(NAME_OPTION, CATALOG), **given), storage)


# Errors of a catalogue


@contextmanager
def _sentences(storage: Storage, kinds: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Translate errors of a catalogue that the user names, and those of other `kinds`."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        if library in _LIBRARIES or isinstance(error, (RESTError, kinds)):
            words = _words(error, storage.catalog)
            raise LakeError(f"the catalogue of {storage.address} {words}") from None
        raise


def _words(error: Exception, options: Mapping[str, str]) -> str:
    said = _without_secrets(getattr(error, "orig", None) or error, options)
    uri = options.get("uri", "")
    host = urlsplit(uri).netloc.rpartition("@")[2] or uri.partition("?")[0]
    if "authentication failed" in said or isinstance(
        error, UnauthorizedError | ForbiddenError | OAuthError | AuthorizationExpiredError
    ):
        return f"refuses the credentials ({said}): correct them with --catalog-option"
    if type(error).__name__ in ("ConnectionError", "ConnectTimeout", "OperationalError"):
        if "refused" in said:
            said = "nothing listens there"
        return f"cannot be reached at {host or 'its address'} ({said}): start it, or correct the option uri"
    if "Could not initialize catalog" in said or "URI missing" in said:
        return "is not known: give its type and uri with --catalog-option"
    return f"cannot be used: {said}"


def _without_secrets(reason: object, options: Mapping[str, str]) -> str:
    said = str(reason)
    secrets = [value for name, value in options.items() if name not in _OPEN_OPTIONS]
    secrets.append(urlsplit(options.get("uri", "")).password or "")
    for secret in filter(None, secrets):
        said = said.replace(secret, "…")
    return plain(said).rstrip(".")


# Access to files


class StorageIO(FileIO):
    """File access of the library through the storage of a lake. The library loads this class by its name."""

    def new_input(self, location: str) -> "_File":
        storage: Storage = self.properties[_STORAGE]
        inside = f"{location_of(storage)}/"
        if location.startswith(inside):
            return _File(location, storage.file(location.removeprefix(inside)))
        return _File(location, storage.file_at(location))

    new_output = new_input

    def delete(self, location: str | InputFile | OutputFile) -> None:
        address = location if isinstance(location, str) else location.location
        place = self.new_input(address).place
        place.storage.delete([place.path])


class _File(InputFile, OutputFile):
    """A file that the library reads or writes."""

    def __init__(self, location: str, place: LakeFile) -> None:
        super().__init__(location)
        self.place = place

    def __len__(self) -> int:
        return self.place.size()

    def exists(self) -> bool:
        return self.place.storage.has(self.place.path)

    def open(self, seekable: bool = True) -> InputStream:
        stream: InputStream = self.place.open()
        return stream

    def to_input_file(self) -> InputFile:
        return self

    def create(self, overwrite: bool = False) -> "_Stream":
        # The names of all files are new, so that none is ever overwritten.
        return _Stream(self.place)


class _Stream(io.BytesIO):
    """Content of a new file, which is durable once this is closed."""

    def __init__(self, place: LakeFile) -> None:
        super().__init__()
        self._place = place

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            if not self._place.storage.create(self._place.path, data):
                raise LakeError(f"{self._place} exists already: run this again")
