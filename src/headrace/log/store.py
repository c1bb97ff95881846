"""The interface of a store of topics, and the handles and batches that cross it.

The broker knows this file only. Calls come from one thread, the event loop's; an append completes later, by
its callback. Offsets are byte positions in every store.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.model import Durability, Position, Span

CURSORS_SET_MAX = 1000
"""Cursors that may be set or dropped at once."""

NOTE_KEY_BYTES_MAX = 1024
"""Of the key of a note."""


class Run(NamedTuple):
    """Whole records, checked."""

    offset: int
    ordinal: int
    record_count: int
    ms: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class ColdError(HeadraceError):
    """What was asked for is not in memory: call `warm` in a thread, then ask again."""

    def warm(self) -> None:
        raise NotImplementedError


class Topic:
    """A topic as the store knows it. The same object for as long as anyone holds it."""

    __slots__ = (
        "__weakref__",
        "durability",
        "end_offset",
        "end_ordinal",
        "epoch",
        "id",
        "last_ms",
        "name",
        "segments",
        "start_offset",
        "start_ordinal",
        "tail",
    )

    def __init__(self, name: str, durability: Durability) -> None:
        self.name = name
        self.durability = durability
        self.id = 0
        """0 while there is nothing on disk: the topic is made by its first append."""
        self.epoch = 0
        self.start_offset = self.start_ordinal = 0
        self.end_offset = self.end_ordinal = 0
        """The end of what is committed: nothing past it is shown to anyone."""
        self.last_ms = 0
        self.tail: list[bytes] = []
        """Journal entries that are committed and not yet in segments."""
        self.segments: list[object] | None = None
        """The store's own memory of where the rest lies."""

    @property
    def start(self) -> Position:
        return Position(self.epoch, self.start_offset, self.start_ordinal)

    @property
    def end(self) -> Position:
        return Position(self.epoch, self.end_offset, self.end_ordinal)

    @property
    def exists(self) -> bool:
        return self.id != 0


class Appended(NamedTuple):
    """What one commit added to one topic."""

    topic: Topic
    offset: int
    end: int
    ordinal: int
    ms: int
    records: Sequence[bytes]
    """Those of a batch are split when someone asks for them."""
    entries: Sequence[bytes]
    """The same as journal entries."""


class Stored(NamedTuple):
    """The answer to an idempotent append."""

    offset: int | None
    """Just past the last record; None for a duplicate whose place is no longer known."""
    duplicate: bool


class Cursor(NamedTuple):
    """Where a reader goes on in a topic: the durable note of how far it has come."""

    topic: str
    """The name: it may have no topic any more, or not yet."""
    reader: str
    position: Position
    ms: int
    """When it was noted."""


class Note(NamedTuple):
    """A small durable value by key, kept beside the log and changed together with a topic."""

    key: bytes
    value: bytes | None
    """None: there is none, or none any more."""
    due_ms: int = 0
    """When someone wants to be reminded of it; 0: never."""


class Chunk(NamedTuple):
    """What a read found."""

    runs: list[Run]
    next_offset: int
    """Where to read on. Past the last run's end when something behind it is damaged."""
    lost: int
    """How many records between the offset asked for and `next_offset` cannot be read any more."""


class SegmentInfo(NamedTuple):
    base: int
    end: int
    first_ordinal: int
    records: int
    bytes: int
    first_ms: int
    last_ms: int


class Listener(Protocol):
    """Who hears of commits."""

    def prepare(self, appended: Sequence[Appended]) -> None:
        """These are being written: work that needs no commit can be done meanwhile."""

    def committed(self, appended: Sequence[Appended]) -> None:
        """These are durable and may be shown."""

    def failed(self, reason: str) -> None:
        """The store takes nothing more."""


class Reader(Protocol):
    """Reads one topic forwards. Remembers where it was, so that going on is cheap."""

    def read(self, offset: int, bytes_max: int) -> Chunk:
        """Whole runs from a record boundary on; may raise `ColdError`."""


class Store(Protocol):
    listener: Listener
    version: int
    """Another number whenever a topic is made or destroyed, or its start or end moves; never one that
    was before, also of an earlier process."""
    note_bytes_max: int
    """Of key and value of one note together."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call this whenever `version` has changed, for as long as the store is."""

    def topic(self, name: str) -> Topic:
        """The topic of this name, whether or not it exists yet."""

    def look(self, name: str) -> Topic:
        """The same for a glance: nobody holds it afterwards."""

    def forget(self, topic: Topic) -> None:
        """Nobody holds this handle any more."""

    def topics(self, prefix: str, after: str, limit: int) -> list[Topic]:
        """Existing topics in the order of their names' bytes."""

    def append(self, batches: dict[Topic, list[bytes]], done: Callable[[], None]) -> None:
        """Append whole records; `done` is called when all are as durable as their topics ask."""

    def append_once(
        self,
        topic: Topic,
        records: list[bytes],
        producer: str,
        number: int,
        done: Callable[[Stored], None],
    ) -> None:
        """Append unless this producer's number, or a later one, was stored before."""

    def reader(self, topic: Topic) -> Reader: ...

    def locate_offset(self, topic: Topic, offset: int) -> Position:
        """The nearest record boundary at or after `offset` that is kept; may raise `ColdError`."""

    def locate_ordinal(self, topic: Topic, ordinal: int) -> Position: ...

    def locate_time(self, topic: Topic, ms: int) -> Position:
        """Where the first record at or after this time begins."""

    def locate_last(self, topic: Topic, records: int) -> Position:
        """Where the last so many kept records begin; may raise `ColdError`."""

    def kept(self, topic: Topic, after: Position | None = None) -> Span:
        """The records that are stored, or those of them behind a position: nothing that was skipped."""

    def segments(self, topic: Topic) -> list[SegmentInfo]: ...

    def trim(self, topic: Topic, position: Position, done: Callable[[], None]) -> None:
        """Forget what lies before a record boundary."""

    def destroy(self, topic: Topic, done: Callable[[], None]) -> None:
        """End this life of the topic. A new one starts where it ended."""

    def change(
        self,
        topic: Topic,
        *,
        records: Sequence[bytes] = (),
        notes: Sequence[Note] = (),
        trim: Position | None = None,
        destroy: bool = False,
        done: Callable[[], None],
    ) -> None:
        """Append, note, trim or destroy: all of it or, after a crash, nothing of it.

        `done` is called when it is as durable as the topic asks. Only records make a topic that does not
        exist, and it must exist to be trimmed or destroyed. Not for topics in memory. A key has 1 to
        `NOTE_KEY_BYTES_MAX` bytes.
        """

    def note(self, key: bytes) -> Note | None:
        """What was given to `change` last, also before it is durable."""

    def notes(self, prefix: bytes, after: bytes, limit: int) -> list[Note]:
        """The same for all keys with this prefix that come after a key, in the order of their bytes."""

    def due_notes(self, until_ms: int, limit: int) -> list[Note]:
        """Those that are due by then, the earliest first."""

    def set_cursors(
        self, reader: str, positions: Mapping[str, Position], done: Callable[[], None]
    ) -> None:
        """Note where a reader goes on in each of these topics; `done` is called when all is on disk.

        At most `CURSORS_SET_MAX` at once. Raises `BadCursorError` for a place that a topic cannot have
        given, and `TooManyCursorsError`; then none of them is noted.
        """

    def drop_cursors(self, reader: str, topics: Collection[str], done: Callable[[], None]) -> None:
        """Forget where a reader was in these topics."""

    def cursors(
        self,
        topic: str | None = None,
        reader: str | None = None,
        *,
        after: tuple[str, str] = ("", ""),
        limit: int,
    ) -> list[Cursor]:
        """Of a topic, of a reader or all, in the order of their names' bytes after (topic, reader)."""

    @property
    def pending_bytes(self) -> int:
        """How much has been given to `append` and is not committed."""

    @property
    def held_back(self) -> str:
        """Why commits are waiting, in words; empty when they are not."""
