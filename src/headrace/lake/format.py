"""Contents of a lake: the columns of its rows, the manifest of each batch, and its errors. Opens nothing.

Libraries of tables trust what they read: a single wrong bit in one of their files may raise any error,
anywhere. `reads` and `writes` translate each error into one plain sentence.
"""

import errno
import functools
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
)

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.errors import HeadraceError
from headrace.lake.columns import columns_text, parse_columns
from headrace.model import ENVELOPE_PREFIXES, Position, legacy_name, present_name

if TYPE_CHECKING:
    from headrace.lake.storage.storage import Storage

FORMAT = 3
"""Format of the metadata beside the table. A lake with a newer format is refused."""

RENAMED_FORMAT = 2
"""From this format on, reserved topics are named `$channel/…` and `$logux/…`; before, they had no `$`.

Rows and footers keep the names they were written with. The functions here return the present names.
"""

FORMAT_KEY = "headrace.format"
DECODE_KEY = "headrace.decode"
DECODED_KEY = "headrace.decoded"
"""Properties of a lake's table, if its library has properties."""

Positions = dict[str, Position]


class LakeError(HeadraceError):
    """The lake cannot be used as it is. The message says why and what to change."""


class StorageError(LakeError):
    """Object storage or HDFS has failed or refused a request. That says nothing about the lake's files."""


class DamagedTableError(LakeError):
    """The metadata that names the lake's files cannot be read.

    `file` is the damaged file or a directory above it, relative to the lake.
    """

    def __init__(self, storage: "Storage", file: str, reason: object) -> None:
        self.file, self.reason = file, plain(reason)
        super().__init__(f"{storage.file(file)} cannot be read: {self.reason}")


def not_ours(address: str, found: str, what: str = "a lake of Headrace") -> LakeError:
    """Return the error for a place that holds `found` instead of `what`."""
    return LakeError(
        f"{address} holds something else than {what} ({found}): name a new or an empty directory"
    )


class Oddity(NamedTuple):
    """A problem of a table that is not in its data files."""

    kind: Literal["damaged", "missing", "note"]
    """`missing`: a job may be about to repair it. `note`: no data is lost."""
    file: str
    """Path below the lake."""
    reason: str


_WORDS_MAX = 300
_NOT_PLAIN = re.compile(r"\x1b\[[0-9;]*m|↳|\n *0: .*", re.DOTALL)
"""Terminal colours, arrows, and the stack trace of a library."""


def plain(reason: object) -> str:
    """Return a library's message as one line of limited length."""
    said = " ".join(_NOT_PLAIN.sub("", str(reason)).split())
    if isinstance(reason, LookupError) or not said:
        said = f"{type(reason).__name__} {said}".strip()  # its text is only the key
    return said if len(said) <= _WORDS_MAX else f"{said[:_WORDS_MAX]} …"


SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), False),
        pa.field("epoch", pa.int64(), False),
        pa.field("offset", pa.int64(), False),
        pa.field("ordinal", pa.int64(), False),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), False),
        pa.field("payload", pa.binary(), False),
    ]
)
"""Columns of every lake. Rows are sorted by topic and offset within a file.

A record ends at its offset + 4 + the length of its payload.
"""


class Shape(NamedTuple):
    """Properties of a lake that are fixed when it is created."""

    by_topic: bool = False
    """True if the lake is partitioned by topic and date, False if by date alone."""
    decode: str = ""
    """Kind of the payloads, if parts of their content have columns; otherwise empty."""
    decoded: pa.Schema = pa.schema([])
    """The decoded columns, which follow the common ones.

    A decoded column is null if the payload does not contain its value.
    """

    @classmethod
    def stored(cls, by_topic: bool, decode: str | None, decoded: str | None) -> Self:
        """Return the shape of a table that stores the decoded columns as text."""
        return cls(by_topic, decode or "", parse_columns(decoded) if decoded else pa.schema([]))

    @property
    def columns(self) -> pa.Schema:
        return pa.schema([*SCHEMA, *self.decoded])

    @property
    def properties(self) -> dict[str, str]:
        """Properties of a table of this shape, without its partition."""
        return {
            FORMAT_KEY: str(FORMAT),
            DECODE_KEY: self.decode,
            DECODED_KEY: columns_text(self.decoded),
        }


DATE = pa.field("date", pa.date32(), False)
"""Day of the timestamp in UTC. Tables are partitioned by it, and files do not contain it."""


class RecordRange(NamedTuple):
    """Consecutive records of a topic that lie in one file in the same order."""

    topic: str
    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    crc: int
    """crc32c of the log's bytes between the offsets, sizes included."""
    file: int = 0
    """Index of the file in its manifest's `files`."""

    @property
    def rows(self) -> int:
        return self.end_ordinal - self.ordinal


class LostRange(NamedTuple):
    """Records that were lost or damaged before they could be exported."""

    topic: str
    ordinal: int
    end_ordinal: int


class File(msgspec.Struct, frozen=True):
    path: str
    """Path below the lake."""
    bytes: int
    rows: int


_TOKEN_BITS = 32


class Committed(NamedTuple):
    """The last commit of an application."""

    number: int
    token: int | None
    """Number of 32 bits by which an application recognises its own commit. A batch has the checksum of its
    manifest. None if an earlier version made the commit."""

    @classmethod
    def find(cls, app: str, last: Callable[[str], int | str | None]) -> Self | None:
        """Find the commit by a function that returns the last number of an application."""
        number, joined = last(app), last(f"{app}.token")
        if number is None:
            return None
        if joined is None or int(joined) >> _TOKEN_BITS != int(number):
            return cls(int(number), None)
        return cls(int(number), int(joined) & ((1 << _TOKEN_BITS) - 1))

    def numbers(self, app: str) -> dict[str, int]:
        """Return the numbers that a commit stores, by application."""
        assert self.token is not None
        # The second number grows with the first, as some tables demand.
        return {app: self.number, f"{app}.token": self.number << _TOKEN_BITS | self.token}


def token_of(paths: Iterable[str]) -> int:
    """Return a token for a commit of new files, whose names are unique."""
    return crc32c("\n".join(paths).encode())


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a batch. They count once the table has committed its number and checksum."""

    format: int = FORMAT
    number: int
    start: Positions
    """Start position of each topic that the batch changes."""
    end: Positions
    files: tuple[File, ...]
    ranges: tuple[RecordRange, ...]
    lost: tuple[LostRange, ...] = ()
    merged: str = ""
    """Path below `_headrace` of the merged manifest of the first batches; empty if there is none."""
    since: tuple[int, ...] = ()
    """Checksums of the manifests of the batches after the merged ones, up to the batch before this one."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def crc(self) -> int:
        return crc32c(self.encode())


class MergedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the first batches together, which replace a manifest for each."""

    format: int = FORMAT
    batches: int = 0
    """Number of merged batches, which are the first ones."""
    start: Positions = {}
    end: Positions = {}
    ranges: tuple[RecordRange, ...] = ()
    """Ranges, with consecutive ones joined and without the number of their file."""
    lost: tuple[LostRange, ...] = ()
    has_old_names: bool | msgspec.UnsetType = msgspec.UNSET
    """True if some of the batches name reserved topics as earlier versions did.

    Earlier versions did not store this field, so it is left out of their checksums.
    """
    crc: int = 0
    """crc32c of this manifest, encoded with 0 in this field."""

    def encode(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, crc=self._sum()))

    def _sum(self) -> int:
        return crc32c(msgspec.json.encode(msgspec.structs.replace(self, crc=0)))

    def is_sound(self) -> bool:
        return self.crc == self._sum()


AnyManifest = TypeVar("AnyManifest", Manifest, MergedManifest)
S = TypeVar("S", bound=msgspec.Struct)


def present_topic(name: str) -> str:
    return present_name(name.encode()).decode()


class _Versioned(msgspec.Struct):
    format: int


def decode_versioned(data: bytes, kind: type[S], place: str) -> S:
    """Decode a file that has a format; error messages call it `place`.

    Raise LakeError if a newer version wrote it, and ValueError if it is damaged.
    """
    check_format(msgspec.json.decode(data, type=_Versioned).format, place)
    return msgspec.json.decode(data, type=kind)


def decode_manifest(
    data: bytes, kind: type[AnyManifest], place: str, crc: int | None = None
) -> AnyManifest:
    """Decode a manifest, with present topic names also if an earlier version wrote it."""
    try:
        if crc not in (None, crc32c(data)):
            raise ValueError("its checksum fails")
        found = decode_versioned(data, kind, place)
        if isinstance(found, MergedManifest) and not found.is_sound():
            raise ValueError("its checksum fails")
    except ValueError as error:  # includes the decoding errors of msgspec and UTF-8
        raise LakeError(
            f"{place} is damaged ({error}): restore it, or export to a new directory"
        ) from None
    if found.format >= RENAMED_FORMAT:
        return found
    return msgspec.structs.replace(
        found,
        start={present_topic(topic): at for topic, at in found.start.items()},
        end={present_topic(topic): at for topic, at in found.end.items()},
        ranges=tuple(one._replace(topic=present_topic(one.topic)) for one in found.ranges),
        lost=tuple(one._replace(topic=present_topic(one.topic)) for one in found.lost),
    )


def check_format(number: int, place: str) -> None:
    if number > FORMAT:
        raise LakeError(
            f"{place} was written by a newer version (format {number}, this one writes {FORMAT}): "
            "use that one"
        )


def encode_ranges(ranges: list[RecordRange]) -> str:
    """Encode ranges for the footer of their file, so that the file can be checked on its own."""
    return msgspec.json.encode([one[:-1] for one in ranges]).decode()


def decode_ranges(text: bytes | str) -> list[RecordRange]:
    """Decode the ranges of a footer, with topic names as stored."""
    return [RecordRange(*one) for one in msgspec.json.decode(text)]


RANGES_KEY = "headrace.ranges"
NAMES_KEY = "headrace.names"
"""Footer key for the format of the file's topic names. Earlier files do not have the key."""


def has_old_names(footer: pq.FileMetaData) -> bool:
    """True if an earlier version wrote the topic names of the file."""
    return NAMES_KEY.encode() not in (footer.metadata or {})


def ranges_in(footer: pq.FileMetaData) -> list[RecordRange]:
    """Return a file's ranges with present topic names; raise KeyError if its footer has no ranges."""
    found = decode_ranges((footer.metadata or {})[RANGES_KEY.encode()])
    if has_old_names(footer):
        found = [one._replace(topic=present_topic(one.topic)) for one in found]
    return found


def stored_names(topic: str) -> tuple[str, ...]:
    """Return the names that a topic may have in rows and in a table's statistics."""
    return (topic, legacy_name(topic)) if topic.startswith(ENVELOPE_PREFIXES) else (topic,)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY)

_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")
"""Error number in messages of Rust libraries."""


@contextmanager
def in_a_sentence(
    storage: "Storage",
    file: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    *,
    writing: bool = False,
) -> Iterator[None]:
    """Translate errors raised while `file` of the lake, or a file below it, is used.

    Errors of other types than `kinds` pass unchanged.
    """
    try:
        yield
    except HeadraceError:
        raise
    except kinds as error:
        if (failure := storage.failure(error, file)) is not None:
            raise failure from None
        reason = getattr(error, "orig", None) or error  # SQLAlchemy wraps the SQLite error
        if _is_of_writing(reason, writing):
            raise LakeError(f"{storage.file(file)} cannot be written to: {plain(reason)}") from None
        raise DamagedTableError(storage, file, reason) from error


@contextmanager
def writing(file: object) -> Iterator[None]:
    """Add the file to errors of a library that writes one of our files and does not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = os.strerror(error.errno) if error.errno else plain(error)
        raise LakeError(f"{file} cannot be written to: {reason}") from None


class _Table(Protocol):
    _storage: "Storage"
    _where: str


_T = TypeVar("_T", bound=_Table)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate[_T, _P], _R]


def reads(method: _Method[_T, _P, _R]) -> _Method[_T, _P, _R]:
    """Translate the errors of a method that only reads files of its table."""
    return _told(method, writing=False)


def writes(method: _Method[_T, _P, _R]) -> _Method[_T, _P, _R]:
    return _told(method, writing=True)


def _told(method: _Method[_T, _P, _R], *, writing: bool) -> _Method[_T, _P, _R]:
    @functools.wraps(method)
    def call(self: _T, /, *args: _P.args, **given: _P.kwargs) -> _R:
        with in_a_sentence(self._storage, self._where, writing=writing):
            return method(self, *args, **given)

    return call


def _is_of_writing(error: Exception, writing: bool) -> bool:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None) or 0
        return code & 0xFF in _SQLITE_FULL
    said = _OS_ERROR.search(str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    return number in _FULL or (writing and number not in (None, errno.ENOENT))
