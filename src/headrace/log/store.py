"""The interface of a store of topics, and the handles and batches that cross it.

The broker knows only this file of the log, and the format of records (`records.py`). All calls come from one
thread, that of the event loop. An append completes later, with a call of its callback. Offsets are byte
positions in every store.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from headrace.errors import HeadraceError
from headrace.log.quota import Quotas
from headrace.log.records import split_records
from headrace.model import LAKE_READER, RECORD_HEADER_BYTES, Durability, Position, Span

T = TypeVar("T")

CURSORS_SET_MAX = 1000
"""Largest number of cursors that one call may set or drop."""

BATCH_FILES_MAX = 100_000
"""Largest number of staged files in one batch."""

PRODUCER_BYTES_MAX = 255
"""Size limit of a producer's name."""

STAGED_FILE_BYTES_MAX = 4 << 30
"""Largest size of an upload: the client must split longer ones."""

NOTE_KEY_BYTES_MAX = 1024
"""Size limit of a note's key."""

PORTION_RECORDS_MAX = 1000
"""Records of a batch that an owner stores at once. The loop handles each of them while other work waits."""


class Run(NamedTuple):
    """Consecutive whole records whose checksum was verified."""

    offset: int
    ordinal: int
    record_count: int
    ms: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class Clocks(NamedTuple):
    """The clocks that a store may ask. It has no other."""

    now_ms: Callable[[], int]
    """The server's time, which records get and ages are computed from."""
    elapsed_s: Callable[[], float]
    """Seconds since some moment, by a clock that nobody can set."""
    wall_s: Callable[[], float]
    """The system's time, which gives files their times."""


CommitFacts = tuple[float, float, float | None, float | None, int, int, bool]
"""Facts about one commit. A plain tuple: there may be thousands of them a second.

- the time when the store took the oldest request, by the store's monotonic clock
- the time when the commit was shown and its waiters and the listener had been called
- the seconds until it was in the journal, None if it is never written
- the part of them for which the disk wrote and flushed, None without a flush
- the number of records, and of bytes
- True if live subscriptions got records
"""


class ColdError(HeadraceError):
    """The requested data is not in memory: call `warm` in a thread, then repeat the request."""

    def warm(self) -> None:
        raise NotImplementedError


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Topic:
    """The store's handle of a topic. The object stays the same for as long as anyone holds it."""

    name: str
    durability: Durability
    id: int = 0
    """0 while the topic does not exist: its first append creates it."""
    epoch: int = 0
    start_offset: int = 0
    start_ordinal: int = 0
    end_offset: int = 0
    """End of the committed records: no reader sees anything past it."""
    end_ordinal: int = 0
    last_ms: int = 0
    is_closed: bool = False
    """True if the topic takes no more records: a change has closed it, durable or not yet."""
    tail: list[bytes] = field(default_factory=list)
    """Journal entries that are committed and not yet in segments."""
    segments: list[object] | None = None
    """The store's own cache of the topic's segments, which hold the other records."""

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
    """The records that one commit appended to one topic."""

    topic: Topic
    offset: int
    end: int
    ordinal: int
    ms: int
    records: Sequence[bytes]
    """The records. Those of a batch are split only when they are read."""
    entries: Sequence[bytes]
    """The same records as journal entries."""


class StoredAppend(NamedTuple):
    """The answer to an idempotent append."""

    offset: int | None
    """Offset just past the last record; None for a duplicate whose offset is no longer known."""
    duplicate: bool


class Cursor(NamedTuple):
    """The durable position of a reader in a topic, at which the reader continues."""

    topic: str
    """Name of the topic, which may not exist any more, or not yet."""
    reader: str
    position: Position
    ms: int
    """Time at which the cursor was set."""


class Lag(NamedTuple):
    """The distance between a cursor and the end of its topic."""

    records: int
    bytes: int
    gone_records: int
    """Number of unread records that the reader can never read because they precede the topic's start."""

    @classmethod
    def of(cls, at: Position, start: Position, behind: Span) -> "Lag":
        """Return the lag of a cursor at `at`; `behind` is the span of stored records after the cursor.

        The cursor's position may be from an earlier epoch of the topic.
        """
        return cls(behind.records, behind.bytes, Span.between(at, start).records)


class Note(NamedTuple):
    """A small durable value by key, kept beside the log and changed together with a topic."""

    key: bytes
    value: bytes | None
    """None if the note does not exist, or no longer exists."""
    due_ms: int = 0
    """Time at which the note is due; 0 for never."""


class Hold(NamedTuple):
    """A reader that needs all records from a position on."""

    reader: str
    position: Position


class Block(NamedTuple):
    """Whole records of one topic in an upload."""

    topic: str
    record_count: int
    data: bytes | memoryview

    def payloads(self) -> list[bytes]:
        records = split_records(bytes(self.data), self.record_count)
        return [record[RECORD_HEADER_BYTES:] for record in records]


class Progress(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Progress of a batch: all records before `position` in its staged file `file` are appended."""

    file: int = 0
    position: int = 0


class BatchPart(NamedTuple):
    """A block of a batch, and the batch's progress including this block."""

    block: Block
    producer: str
    number: int
    progress: Progress


class BatchAnswer(NamedTuple):
    duplicate: bool
    records: int
    """Number of appended records: 0 for a duplicate."""
    damaged: int = 0
    """Number of blocks and files that could not be read, or whose topic was closed meanwhile: their records
    are not appended."""


class BatchRefusedError(HeadraceError):
    """An owner would not store a record of the batch. Nothing is decided, and the uploads are kept."""


class Chunk(NamedTuple):
    runs: list[Run]
    next_offset: int
    """Offset for the next read. It is past the last run's end if records after that run are damaged."""
    lost: int
    """Number of records between the requested offset and `next_offset` that can no longer be read."""


class SegmentInfo(NamedTuple):
    base: int
    end: int
    first_ordinal: int
    records: int
    bytes: int
    first_ms: int
    last_ms: int


class TopicOwner(Protocol):
    """The component that stores the records of all topics under one prefix."""

    def check(
        self, blocks: Callable[[], Iterator[Block]], done: Callable[[BaseException | None], None]
    ) -> None:
        """Call `done` with None if the owner would store all records of a batch that is not decided yet.

        Call `done` with a BatchRefusedError if the owner would not, and with any other error to be asked
        again later. `blocks` reads files: call it in a thread.
        """

    def add(
        self, batch: bytes, parts: Sequence[BatchPart], done: Callable[[BaseException | None], None]
    ) -> None:
        """Store the records that are new, in the order of each topic; call `done` when all are durable.

        Call `done` with an error to get the records again later. Do not call it when the store fails. `batch`
        is the id of the batch's first staged file, which is unique: producers and numbers may be reused.
        """


class Listener(Protocol):
    """Receiver of a store's commits."""

    def prepare(self, appended: Sequence[Appended]) -> None:
        """Called while these are being written, for work that need not wait for the commit."""

    def committed(self, appended: Sequence[Appended]) -> bool:
        """Called when these are durable and may be shown. Returns True if live subscriptions got records."""

    def failed(self, reason: str) -> None:
        """Called when the store has failed and accepts no more requests."""


class Runner(Protocol):
    """Runs work later, on the event loop or in a thread. The server has one, and tests run steps by hand."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop, after the code that is running now."""

    def write(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run a commit's write in the one thread for such writes, then `done` on the loop."""

    def background(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Run other work that waits for the disk in any thread, then `done` on the loop."""


class Reader(Protocol):
    """Reads one topic forwards. Remembers its last place, so that continuing there is cheap."""

    def read(self, offset: int, bytes_max: int) -> Chunk:
        """Return whole runs, starting at the record boundary `offset`; may raise `ColdError`."""


class Store(Protocol):
    listener: Listener
    version: int
    """Number that changes whenever a topic is created or destroyed, or its start or end moves. A value is
    never used twice, not even by a later process."""
    note_bytes_max: int
    """Size limit of a note's key and value together."""

    quotas: Quotas

    def count_topics(self, prefix: str) -> int:
        """Return the number of topics: of all if the prefix is empty, or of channels."""

    def exists(self, name: str) -> bool:
        """True if a topic exists, or the first records for it wait for their commit."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever `version` has changed, for the lifetime of the store."""

    def topic(self, name: str) -> Topic:
        """Return the handle of the topic with this name, whether or not the topic exists yet."""

    def look(self, name: str) -> Topic:
        """Return the same as `topic`, for a caller that does not keep the handle."""

    def forget(self, topic: Topic) -> None:
        """Release a handle that no caller holds any more."""

    def topics(self, prefix: str, after: str, limit: int) -> list[Topic]:
        """Return existing topics in the order of their names' bytes."""

    def append(self, batches: dict[Topic, list[bytes]], done: Callable[[], None]) -> None:
        """Append whole records; call `done` when all are as durable as their topics require.

        This and all other requests with records raise `ClosedTopicError` if a topic is closed.
        """

    def append_once(
        self,
        topic: Topic,
        records: list[bytes],
        producer: str,
        number: int,
        done: Callable[[StoredAppend], None],
    ) -> None:
        """Append unless this number of the producer, or a later one, was stored before."""

    def reader(self, topic: Topic) -> Reader: ...

    def locate_offset(self, topic: Topic, offset: int) -> Position:
        """Return the first stored record boundary at or after `offset`; may raise `ColdError`."""

    def locate_ordinal(self, topic: Topic, ordinal: int) -> Position: ...

    def locate_time(self, topic: Topic, ms: int) -> Position:
        """Return the position of the first record at or after this time."""

    def locate_last(self, topic: Topic, records: int) -> Position:
        """Return the position of the first of the last `records` stored records; may raise `ColdError`."""

    def kept(self, topic: Topic, after: Position | None = None) -> Span:
        """Return the span of the stored records, or of those after a position, without skipped offsets."""

    def segments(self, topic: Topic) -> list[SegmentInfo]: ...

    def trim(self, topic: Topic, position: Position, done: Callable[[], None]) -> None:
        """Delete the records before `position`, which is a record boundary."""

    def destroy(self, topic: Topic, done: Callable[[], None]) -> None:
        """End this life of the topic. The next life starts at the offset where this one ended."""

    def change(
        self,
        topic: Topic,
        *,
        records: Sequence[bytes] = (),
        notes: Sequence[Note] = (),
        trim: Position | None = None,
        create_above: int | None = None,
        close: bool = False,
        destroy: bool = False,
        done: Callable[[], None],
        ends_at: Callable[[Position], None] | None = None,
    ) -> None:
        """Append records, put notes, trim, close and destroy: all of it or, after a crash, nothing of it.

        `done` is called when the change is as durable as the topic requires. Just before, `ends_at` is called
        with the end of the change's own records, however many more the same commit has. Without records, that
        is the end of the records that were given before. Notes alone do not create a topic that does not
        exist: records do, and so does `create_above`, which is an epoch that the new topic's is greater than.
        A topic must exist to be trimmed or destroyed. `memory` topics are not allowed. A note's key has 1 to
        `NOTE_KEY_BYTES_MAX` bytes.

        With `close`, the topic takes no more records from now on, until it is destroyed. No request that was
        given before puts its records behind those of this change.
        """

    def closed(self, names: Iterable[str]) -> str:
        """Return the name of a closed topic among these; empty if none of them is closed."""

    def note(self, key: bytes) -> Note | None:
        """Return the note that was last given to `change`, even if it is not durable yet."""

    def notes(self, prefix: bytes, after: bytes, limit: int) -> list[Note]:
        """Return the notes whose keys have this prefix and come after `after`, in the order of their keys."""

    def due_notes(self, until_ms: int, limit: int) -> list[Note]:
        """Return the notes that are due by `until_ms`, the earliest first."""

    def set_cursors(
        self, reader: str, positions: Mapping[str, Position], done: Callable[[], None]
    ) -> None:
        """Set the cursors of a reader in these topics; call `done` when all of them are on disk.

        Sets at most `CURSORS_SET_MAX` cursors. Raises `BadCursorError` for a position that a topic cannot
        have given to a reader, and `TooManyCursorsError`; then none of the cursors is set.
        """

    def drop_cursors(self, reader: str, topics: Collection[str], done: Callable[[], None]) -> None:
        """Drop the cursors of a reader in these topics; call `done` when that is on disk."""

    def cursors(
        self,
        topic: str | None = None,
        reader: str | None = None,
        *,
        after: tuple[str, str] = ("", ""),
        limit: int,
    ) -> list[Cursor]:
        """Return cursors of a topic, of a reader or all, after `after`, by the bytes of topic and reader."""

    @property
    def pending_bytes(self) -> int:
        """Bytes given to `append` that are not committed."""

    @property
    def held_back(self) -> str:
        """The reason why commits are waiting, as a sentence; empty if they are not waiting."""


def waited_for(store: Store, topic: Topic, readers: Iterable[str]) -> list[Hold]:
    """Return the holds of the readers in `wait_for`: each holds a topic from its cursor on.

    A reader without a cursor in the topic holds nothing, since it may never come. The lake is the exception:
    without a cursor, it holds the whole topic.
    """
    holds: list[Hold] = []
    for reader in readers:
        cursors = store.cursors(topic.name, reader, limit=1)
        if cursors:
            holds.append(Hold(reader, cursors[0].position))
        elif reader == LAKE_READER:
            holds.append(Hold(reader, topic.start))
    return holds


def add_in_portions(
    runner: Runner,
    parts: Iterable[BatchPart],
    decode: Callable[[list[BatchPart]], T],
    add: Callable[[T, Callable[[], None]], None],
    done: Callable[[BaseException | None], None],
) -> None:
    """Add the records of a batch, as `TopicOwner.add` does: `decode` each portion in a thread, then `add` it.

    The next portion follows when `add` calls back.
    """
    rest = deque(parts)

    def following() -> None:
        portion: list[BatchPart] = []
        count = 0
        while rest and (not portion or count + rest[0].block.record_count <= PORTION_RECORDS_MAX):
            count += rest[0].block.record_count
            portion.append(rest.popleft())
        if portion:
            runner.background(lambda: decode(portion), decoded)
        else:
            done(None)

    def decoded(result: T | BaseException) -> None:
        if isinstance(result, BaseException):
            rest.clear()
            done(result)
        else:
            add(result, following)

    following()


def countdown(count: int, done: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `done` when it has been called `count` times."""

    def one_done() -> None:
        nonlocal count
        count -= 1
        if not count:
            done()

    return one_done
