"""What a lake holds: the columns of its rows, and what each batch notes of itself. Opens nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.errors import HeadraceError
from headrace.model import ENVELOPE_PREFIXES, Position, legacy_name, present_name

FORMAT = 2
"""Of what is noted beside the table. A lake of a newer one is left alone."""

RENAMED_FORMAT = 2
"""From this format on, reserved topics are named `$channel/…` and `$logux/…`; before, they had no `$`.

Rows and footers keep the names they were written with. Whatever is read of them here has the present names.
"""

Positions = dict[str, Position]


class LakeError(HeadraceError):
    """The lake cannot be used as it is: the message says why and what to change."""


class DamagedTableError(LakeError):
    """What says which files of a lake count cannot be read: `file` has it, or is above it, below the lake."""

    def __init__(self, lake: Path, file: str, reason: object) -> None:
        self.file, self.reason = file, plain(reason)
        super().__init__(f"{lake / file} cannot be read: {self.reason}")


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
"""With which an address begins: its slashes are one when it is taken for a path."""


def check_path(path: Path) -> None:
    """Libraries of tables take addresses of files, and would take such a path for another one."""
    if any(map(_SCHEME.fullmatch, path.parts)):
        raise LakeError(
            f"{path} is an address: a lake is a directory, where an object store is mounted"
        )
    found = _NO_PATH.search(str(path.absolute()))
    if found:
        raise LakeError(
            f"{str(path)!r} has {found[0]!r} in it, which means something else in addresses of tables: name "
            "another directory"
        )


class Oddity(NamedTuple):
    """What is wrong with a table beside its files."""

    kind: Literal["damaged", "missing", "note"]
    """`missing` is what a job may be about to put right, `note` what is no loss."""
    file: str
    """Below the lake."""
    reason: str


_WORDS_MAX = 300
_NOT_PLAIN = re.compile(r"\x1b\[[0-9;]*m|↳|\n *0: .*", re.DOTALL)
"""Colours and arrows for a terminal, and where a library was when it failed."""


def plain(reason: object) -> str:
    """What a library has said, in one line of bearable length."""
    said = " ".join(_NOT_PLAIN.sub("", str(reason)).split())
    if isinstance(reason, LookupError) or not said:
        said = f"{type(reason).__name__} {said}".strip()  # a mere name says nothing
    return said if len(said) <= _WORDS_MAX else f"{said[:_WORDS_MAX]} …"


_NO_PATH = re.compile(r"[%#?\\\x00-\x1f\x7f\ud800-\udfff]")

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
"""Rows are sorted by topic and offset within a file. Where a record ends is its offset + 4 + its length."""


class Shape(NamedTuple):
    """What is decided of a lake when it is made."""

    by_topic: bool = False
    """Partitioned by topic and date, not by date alone."""
    decode: str = ""
    """What payloads are, if some of their content has columns of its own."""
    decoded: pa.Schema = pa.schema([])
    """These columns. They lie behind those of every lake, and are null where a payload has no such thing."""

    @property
    def columns(self) -> pa.Schema:
        return pa.schema([*SCHEMA, *self.decoded])


DATE = pa.field("date", pa.date32(), False)
"""The day of the timestamp in UTC: what tables are partitioned by, and in no file."""


class Range(NamedTuple):
    """Records that follow each other in a topic, and lie in one file in that order."""

    topic: str
    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    crc: int
    """crc32c of the log's bytes between the offsets, sizes included."""
    file: int = 0
    """Its place in the files of its manifest."""

    @property
    def rows(self) -> int:
        return self.end_ordinal - self.ordinal


class Lost(NamedTuple):
    """Records that were gone or damaged before they could be exported."""

    topic: str
    ordinal: int
    end_ordinal: int


class File(msgspec.Struct, frozen=True):
    path: str
    """Below the lake."""
    bytes: int
    rows: int


CRC_KEY = "headrace.manifest"
"""Under which a commit notes the checksum of its manifest."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch holds. It counts when the table has committed a batch of that number."""

    format: int = FORMAT
    number: int
    start: Positions
    """Where it begins, of the topics that it changes."""
    end: Positions
    files: tuple[File, ...]
    ranges: tuple[Range, ...]
    lost: tuple[Lost, ...] = ()

    def encode(self) -> bytes:
        # An earlier one is what it was on disk: its commit knows it by its checksum.
        is_old = self.format < RENAMED_FORMAT
        return msgspec.json.encode(_renamed(self, legacy_name) if is_old else self)

    @property
    def crc(self) -> int:
        """By which a commit knows the manifest it was made with."""
        return crc32c(self.encode())


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """What the first batches hold together, in place of a manifest each."""

    format: int = FORMAT
    batches: int = 0
    """How many: the next one has its own."""
    start: Positions = {}
    end: Positions = {}
    ranges: tuple[Range, ...] = ()
    """Those that follow each other as one; which files they are in is left out."""
    lost: tuple[Lost, ...] = ()
    has_old_names: bool | msgspec.UnsetType = msgspec.UNSET
    """True if some of the batches name reserved topics as earlier versions did. Earlier versions did not note
    it, so it is left out of their checksums."""
    crc: int = 0
    """crc32c of the same with 0 in its place."""

    def encode(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, crc=self._sum()))

    def _sum(self) -> int:
        return crc32c(msgspec.json.encode(msgspec.structs.replace(self, crc=0)))

    def is_sound(self) -> bool:
        return self.crc == self._sum()


N = TypeVar("N", Manifest, Folded)


def _present(found: N) -> N:
    """With the present names of topics, whatever version has noted them."""
    is_old = found.format < RENAMED_FORMAT
    return _renamed(found, present_topic) if is_old else found


def present_topic(name: str) -> str:
    return present_name(name.encode()).decode()


def _renamed(found: N, name: Callable[[str], str]) -> N:
    return msgspec.structs.replace(
        found,
        start={name(topic): at for topic, at in found.start.items()},
        end={name(topic): at for topic, at in found.end.items()},
        ranges=tuple(one._replace(topic=name(one.topic)) for one in found.ranges),
        lost=tuple(one._replace(topic=name(one.topic)) for one in found.lost),
    )


class _Versioned(msgspec.Struct):
    format: int


def decode_manifest(data: bytes, place: str) -> Manifest:
    """`place` says in errors what was read."""
    try:
        check_format(msgspec.json.decode(data, type=_Versioned).format, place)
        return _present(msgspec.json.decode(data, type=Manifest))
    except ValueError as error:  # which errors of msgspec and of UTF-8 are
        raise LakeError(
            f"{place} is damaged ({error}): restore it, or export to a new directory"
        ) from None


def decode_folded(data: bytes, place: str) -> Folded:
    reason = "its checksum fails"
    try:
        check_format(msgspec.json.decode(data, type=_Versioned).format, place)
        found = msgspec.json.decode(data, type=Folded)
        if found.is_sound():
            return _present(found)
    except ValueError as error:
        reason = str(error)
    raise LakeError(f"{place} is damaged ({reason}): restore it, or export to a new directory")


def check_format(number: int, place: str) -> None:
    if number > FORMAT:
        raise LakeError(
            f"{place} was written by a newer version (format {number}, this one writes {FORMAT}): "
            "use that one"
        )


def encode_ranges(ranges: list[Range]) -> str:
    """As the footer of a file repeats its own: so it can be checked by itself."""
    return msgspec.json.encode([one[:-1] for one in ranges]).decode()


def decode_ranges(text: bytes | str) -> list[Range]:
    """As they stand there."""
    return [Range(*one) for one in msgspec.json.decode(text)]


RANGES_KEY = "headrace.ranges"
NAMES_KEY = "headrace.names"
"""In the footer of a file: the format that its topics are named by. Earlier files have no such key."""


def has_old_names(footer: pq.FileMetaData) -> bool:
    """Return whether an earlier version named the topics in a file."""
    return NAMES_KEY.encode() not in (footer.metadata or {})


def ranges_in(footer: pq.FileMetaData) -> list[Range]:
    """Return what a file holds, with the present names of topics; KeyError where its footer has no ranges."""
    found = decode_ranges((footer.metadata or {})[RANGES_KEY.encode()])
    if has_old_names(footer):
        found = [one._replace(topic=present_topic(one.topic)) for one in found]
    return found


def stored_names(topic: str) -> tuple[str, ...]:
    """Return the names under which a topic may stand in rows and in what tables say of files."""
    return (topic, legacy_name(topic)) if topic.startswith(ENVELOPE_PREFIXES) else (topic,)
