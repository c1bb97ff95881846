"""A store in memory with one channel, which commits on demand and can crash; a slow database of snapshots."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.broker.channel.notes import StoredSnapshot, no_snapshot
from headrace.broker.channel.snapshots import Older
from headrace.log.store import Appended, Chunk, Cursor, Note, Run, Topic
from headrace.model import Durability, Position
from headrace.payload.channel import decode_message

NAME = "c"
TOPIC = "$channel/c"

NOWHERE = Position(0, 0, 0)
NO_SNAPSHOT = no_snapshot(NAME)

Id = tuple[str, int]
"""A message: its processor and number."""


@dataclass
class Disk:
    """State that survives a crash."""

    notes: dict[bytes, Note] = field(default_factory=dict)
    records: list[tuple[int, bytes]] = field(default_factory=list)
    """Start offset and bytes of every record that was ever committed to the topic."""
    ids: list[Id] = field(default_factory=list)
    start: Position = NOWHERE
    end: Position = NOWHERE
    exists: bool = False
    base: int = 0
    """Ordinal before which everything was destroyed by hand and is in no state."""


@dataclass
class Change:
    records: list[bytes]
    notes: list[Note]
    trim: Position | None
    destroy: bool
    done: Callable[[], None]


class ModelStore:
    """Store with one topic and notes. A change is committed only when a test calls `commit`."""

    note_bytes_max = 1 << 20

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.handle = Topic(TOPIC, Durability.SYNCED)
        self.pending: deque[Change] = deque()
        self._given = dict(disk.notes)
        self.committed: Callable[[Appended], None] = lambda one: None
        self.reader_cursors: dict[str, Position] = {}
        self._show()

    def topic(self, name: str) -> Topic:
        assert name == TOPIC
        return self.handle

    def forget(self, topic: Topic) -> None: ...

    def topics(self, prefix: str, after: str, limit: int) -> list[Topic]:
        return [self.handle] if self.disk.exists and after < TOPIC else []

    def cursors(self, topic: str, reader: str, *, limit: int) -> list[Cursor]:
        at = self.reader_cursors.get(reader)
        return [Cursor(topic, reader, at, 0)] if at is not None else []

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
        for note in notes:
            self._given[note.key] = note
        self.pending.append(Change(list(records), list(notes), trim, destroy, done))

    def note(self, key: bytes) -> Note | None:
        note = self._given.get(key)
        return note if note is not None and note.value is not None else None

    def notes(self, prefix: bytes, after: bytes, limit: int) -> list[Note]:
        keys = sorted(k for k in self._given if k.startswith(prefix) and k > after)
        return [note for key in keys if (note := self.note(key)) is not None][:limit]

    def due_notes(self, until_ms: int, limit: int) -> list[Note]:
        found = [
            n for n in self._given.values() if n.value is not None and 0 < n.due_ms <= until_ms
        ]
        return sorted(found, key=lambda note: note.due_ms)[:limit]

    def reader(self, topic: Topic) -> "ModelStore":
        return self

    def read(self, offset: int, bytes_max: int) -> Chunk:
        offset = max(offset, self.handle.start_offset)
        ordinal = self._ordinal(offset)
        data = [r for at, r in self.disk.records if offset <= at < self.handle.end_offset]
        if not data:
            return Chunk([], self.handle.end_offset, 0)
        return Chunk(
            [Run(offset, ordinal, len(data), 7, b"".join(data))], self.handle.end_offset, 0
        )

    def locate_offset(self, topic: Topic, offset: int) -> Position:
        offset = max(offset, topic.start_offset)
        if offset >= topic.end_offset:
            return topic.end
        at = next((at for at, _ in self.disk.records if at >= offset), topic.end_offset)
        return Position(topic.epoch, at, self._ordinal(at))

    def _ordinal(self, offset: int) -> int:
        return sum(at < offset for at, _ in self.disk.records)

    def commit(self, *, silently: bool = False) -> None:
        """Make the oldest change durable. With `silently`, the process ends before it learns of that."""
        change = self.pending.popleft()
        disk = self.disk
        begin = disk.end
        if change.records and not disk.exists:
            disk.exists = True
            disk.start = disk.end = begin = disk.end._replace(epoch=disk.end.epoch + 1)
        for record in change.records:
            disk.records.append((disk.end.offset, record))
            message = decode_message(record[4:])
            disk.ids.append((message.processor, message.number))
            epoch, offset, ordinal = disk.end
            disk.end = Position(epoch, offset + len(record), ordinal + 1)
        if change.trim is not None:
            assert disk.exists and change.trim.offset <= disk.end.offset
            disk.start = max(disk.start, change.trim._replace(epoch=disk.start.epoch))
        if change.destroy:
            assert disk.exists
            disk.exists = False
            disk.start = disk.end
        for note in change.notes:
            if note.key == NO_SNAPSHOT.key and note.value is None:
                disk.base = disk.end.ordinal
            if note.value is None:
                disk.notes.pop(note.key, None)
            else:
                disk.notes[note.key] = note
        if silently:
            return
        self._show()
        change.done()
        if change.records:
            place = (begin.offset, disk.end.offset, begin.ordinal, 7)
            self.committed(Appended(self.handle, *place, change.records, ()))

    def _show(self) -> None:
        handle, disk = self.handle, self.disk
        handle.id = 1 if disk.exists else 0
        handle.epoch = disk.start.epoch
        handle.start_offset, handle.start_ordinal = disk.start.offset, disk.start.ordinal
        handle.end_offset, handle.end_ordinal = disk.end.offset, disk.end.ordinal


class SlowSnapshots:
    """Snapshots in a separate database that answers only when a test tells it to."""

    are_notes = False

    def __init__(self, kept: dict[str, StoredSnapshot]) -> None:
        self._kept = kept
        self.asked: deque[Callable[[], None]] = deque()

    def load(
        self,
        channel: str,
        done: Callable[[StoredSnapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        self.asked.append(lambda: done(self._kept.get(channel)))

    def save(
        self,
        channel: str,
        snapshot: StoredSnapshot,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        def save() -> None:
            known = self._kept.get(channel)
            if known is None or known.offset <= snapshot.offset:
                self._kept[channel] = snapshot
            done()

        self.asked.append(save)

    def remove(self, channel: str, done: Callable[[], None], failed: Callable[[str], None]) -> None:
        def remove() -> None:
            self._kept.pop(channel, None)
            done()

        self.asked.append(remove)

    def older(
        self,
        before_ms: int,
        after: str,
        done: Callable[[Older], None],
        failed: Callable[[str], None],
    ) -> None:
        old = [name for name, one in self._kept.items() if one.ms < before_ms]
        self.asked.append(lambda: done(Older(old, None)))
