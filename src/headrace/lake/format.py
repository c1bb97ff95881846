"""What a lake holds: the columns of its rows, and what each batch notes of itself. Opens nothing."""

from typing import NamedTuple

import msgspec
import pyarrow as pa
from crc32c import crc32c

from headrace.errors import HeadraceError
from headrace.model import Position

FORMAT = 1
"""Of what is noted beside the table. A lake of a newer one is left alone."""

Positions = dict[str, Position]


class LakeError(HeadraceError):
    """The lake cannot be used as it is: the message says why and what to change."""


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
        return msgspec.json.encode(self)

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
    crc: int = 0
    """crc32c of the same with 0 in its place."""

    def encode(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, crc=self._sum()))

    def _sum(self) -> int:
        return crc32c(msgspec.json.encode(msgspec.structs.replace(self, crc=0)))

    def is_sound(self) -> bool:
        return self.crc == self._sum()


class _Versioned(msgspec.Struct):
    format: int


def decode_manifest(data: bytes, place: str) -> Manifest:
    """`place` says in errors what was read."""
    try:
        check_format(msgspec.json.decode(data, type=_Versioned).format, place)
        return msgspec.json.decode(data, type=Manifest)
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
            return found
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
    return [Range(*one) for one in msgspec.json.decode(text)]
