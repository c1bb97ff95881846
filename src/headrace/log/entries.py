"""What the `extra` of each kind of journal entry holds, as MessagePack arrays."""

import msgspec

RECENT_MAX = 8
"""How many of a producer's last numbers are kept with the offset they were stored at."""

Recent = list[tuple[int, int]]
"""(number, offset just past the record), oldest first."""


class Create(msgspec.Struct, frozen=True, array_like=True):
    name: bytes
    epoch: int
    durability: bytes


class Name(msgspec.Struct, frozen=True, array_like=True):
    """What the entry says that made a topic, once more."""

    topic_id: int
    name: bytes
    epoch: int
    durability: bytes
    offset: int
    ordinal: int


Names = list[Name]
"""The data of an entry that names topics."""


class Destroy(msgspec.Struct, frozen=True, array_like=True):
    epoch: int


class Progress(msgspec.Struct, frozen=True, array_like=True, order=True):
    """How far a batch is appended: up to this place of this one of its staged files."""

    file: int = 0
    position: int = 0


class Producer(msgspec.Struct, frozen=True, array_like=True):
    """Whose append it was, and its number: one that comes again is recognised by it."""

    name: bytes
    number: int
    pieces_left: int = 0
    """How many more entries of the same commit belong to this append."""
    progress: Progress | None = None
    """For records of a batch: how far it is appended with this entry."""


class StagedFile(msgspec.Struct, frozen=True, array_like=True):
    """One of a decision's staged files."""

    id: bytes
    size: int


StagedFiles = list[StagedFile]
"""The data of a decision."""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    topic: bytes
    reader: bytes
    epoch: int
    commit: int
    """The number of the commit: tells it from one that an earlier use of the journal file left."""
    dropped: bool = False


class Noted(msgspec.Struct, frozen=True, array_like=True):
    """Of a note; its value is the data."""

    key: bytes
    due_ms: int
    dropped: bool = False
