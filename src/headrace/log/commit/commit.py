"""One commit: the requests for one write, and their encoding as journal entries.

Elsewhere: gathering requests into commits (`queue.py`), and writing the entries (`journal.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.log.commit import journal
from headrace.log.commit.journal import (
    CreateEntry,
    CursorEntry,
    JournalFile,
    Name,
    Producer,
    StagedFiles,
)
from headrace.log.read.index import RUN_BYTES_MAX, RUN_MS_MAX, RUN_RECORDS_MAX
from headrace.log.records import split_records
from headrace.log.store import Appended, BatchPart, Block, Note, Topic
from headrace.model import Durability, Position

_pack = msgspec.msgpack.encode

_NOWHERE = Position(0, 0, 0)

_NAME_BYTES = 48
"""Bytes per topic, besides the topic's name, in an entry that repeats topic names."""

_NAMES_IN_FILE_MAX = 100_000
"""Largest number of topics created in one journal file whose names the next file repeats."""


class NumberedAppend(NamedTuple):
    """An append with its producer's number, which makes the append idempotent."""

    topic: Topic
    records: list[bytes]
    producer: str
    number: int


class Decision(NamedTuple):
    producer: str
    number: int
    files: StagedFiles


class Trim(NamedTuple):
    topic: Topic
    position: Position


class Change(NamedTuple):
    """A change as `Store.change` describes it."""

    topic: Topic
    records: list[bytes]
    notes: Sequence[Note]
    trim: Position | None
    create_above: int | None
    close: bool
    destroy: bool
    ends_at: Callable[[Position], None] | None


class EndReport(NamedTuple):
    """A request that wants to know where its own records end."""

    topic: Topic
    records: int
    """Number of records that this commit's plain appends to the topic have, up to the request's own."""
    ends_at: Callable[[Position], None]


class CursorChange(NamedTuple):
    topic: str
    reader: str
    position: Position | None
    """None if the cursor is dropped."""


class BlockRecords(Sequence[bytes]):
    """The records of blocks, split lazily because most callers never read them."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._count = sum(block.record_count for block in blocks)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[bytes]:
        for block in self._blocks:
            yield from split_records(bytes(block.data), block.record_count)


class Commit:
    """The requests that wait for the same write."""

    def __init__(self) -> None:
        self.appends: dict[Topic, list[bytes]] = {}
        self.numbered: list[NumberedAppend] = []
        self.decisions: list[Decision] = []
        self.parts: list[tuple[Topic, BatchPart]] = []
        """Parts of batches, in the order of each batch."""
        self.ends: list[Producer] = []
        """Progress of batches whose last part is not in the journal."""
        self.trims: list[Trim] = []
        self.destroyed: list[Topic] = []
        self.cursors: list[CursorChange] = []
        self.notes: list[tuple[Topic, Note]] = []
        self.creates: dict[Topic, int] = {}
        """Topics that are created even if they get no records, with an epoch that theirs is greater than."""
        self.reports: list[EndReport] = []
        self.changed: dict[Topic, None] = {}
        """Topics whose changes in this commit, together with the notes, take effect all or not at all."""
        self.waiters: list[Callable[[], None]] = []
        self.size = 0
        """Number of bytes that the requests take in the journal."""
        self.asked_s = 0.0
        """Time of the oldest request."""

    def add(self, batches: dict[Topic, list[bytes]]) -> None:
        appends = self.appends
        for topic, records in batches.items():
            known = appends.get(topic)
            if known is None:
                appends[topic] = records
            else:
                known += records

    def has_later_records(self, topic: Topic) -> bool:
        """True if records of the topic come behind those of all plain appends and changes."""
        return any(once.topic is topic for once in self.numbered) or any(
            other is topic for other, _ in self.parts
        )

    def mentions(self, topic: Topic) -> bool:
        return (
            topic in self.appends
            or topic in self.changed
            or topic in self.destroyed
            or any(once.topic is topic for once in self.numbered)
            or any(trim.topic is topic for trim in self.trims)
            or any(other is topic for other, _ in self.parts)
        )


class Encoded(NamedTuple):
    """A commit that is ready to be written."""

    commit: Commit
    entries: list[bytes]
    """Journal entries, in the order in which they must be applied."""
    appended: list[Appended]
    created: list[Topic]
    ends: list[Position]
    """Answers to the commit's `reports`, in their order."""
    sync: bool
    ms: int


class Write(NamedTuple):
    """A commit on its way to the journal. Every attempt writes the same bytes."""

    encoded: Encoded
    file: JournalFile
    sequence: int
    synced: int
    older: list[Path]
    """Files with earlier commits that are written and not synced: they are synced with this commit."""
    begun_s: float


class Encoder:
    """Encodes commits and assigns offsets, ordinals, times and topic numbers."""

    def __init__(self, next_topic_id: int, generation: int, names_bytes_max: int) -> None:
        self._next_topic_id = next_topic_id
        self._names_bytes_max = names_bytes_max
        self._generation = generation
        self._seed = self._ms = 0
        """Checksum seed and time of the commit that is being encoded."""
        self._created: list[Topic] = []
        self._made: dict[int, Name] = {}
        """Topics that this commit creates and does not destroy."""
        self._names: dict[int, Name] = {}
        """Topics created by the last commit: the next commit repeats their names."""
        self._in_file: dict[int, Name] = {}
        """Topics created in this journal file: the next file repeats their names."""

    def encode(self, commit: Commit, now_ms: int, number: int) -> Encoded:
        """Encode a commit; `number` is its future number in the journal."""
        appended: list[Appended] = []
        seed = self._seed = journal.entry_seed(self._generation, number)
        self._ms = now_ms
        entries: list[bytes] = [self._names_entry()] if number and self._names else []
        self._created, self._made = [], {}
        creates = commit.creates.items()
        entries += [self._create(topic, above) for topic, above in creates if topic.id == 0]
        encode_single, new = journal.encode_single, tuple.__new__
        for topic, records in commit.appends.items():
            if topic.id == 0:
                entries.append(self._create(topic))
            last_ms = topic.last_ms
            # All records of a run get the same time, so that the index, which has one time per run, never
            # changes a time that was given to a reader before.
            ms = last_ms if now_ms - last_ms < RUN_MS_MAX else now_ms
            offset, ordinal = topic.end_offset, topic.end_ordinal
            if len(records) == 1:
                # Fast path for commits with many topics and one record per topic.
                data = records[0]
                end = offset + len(data)
                made: Sequence[bytes] = (encode_single(topic.id, offset, ordinal, ms, data, seed),)
            else:
                made, end = self._append_entries(topic, offset, ordinal, ms, records)
            entries += made
            # Same as `Appended(…)` but without its Python-level constructor: this runs for every topic.
            appended.append(new(Appended, (topic, offset, end, ordinal, ms, records, made)))
        ends = _reported_ends(commit, appended) if commit.reports else []
        if commit.parts:
            self._parts(commit.parts, entries, appended)
        for once in commit.numbered:
            self._append_numbered(once, entries, appended)
        self._controls(commit, number, entries, appended)
        if number:
            self._note_names(commit, entries)
        sync = bool(number) and self._needs_sync(commit, appended)
        return Encoded(commit, entries, appended, self._created, ends, sync, now_ms)

    def _needs_sync(self, commit: Commit, appended: list[Appended]) -> bool:
        if self._created or commit.destroyed or commit.decisions or commit.cursors:
            return True
        synced = Durability.SYNCED
        return (
            any(one.topic.durability is synced for one in appended)
            or any(one.topic.durability is synced for one in commit.trims)
            or any(topic.durability is synced for topic in commit.changed)
        )

    def _controls(
        self, commit: Commit, number: int, entries: list[bytes], appended: list[Appended]
    ) -> None:
        """Encode everything that is not an append."""
        extra: msgspec.Struct
        for topic, position in commit.trims:
            entries.append(self._entry(journal.TRIM, topic_id=topic.id, at=position))
        for topic in commit.destroyed:
            # Appends of the same commit come first, so the topic ends after them.
            at = Position(topic.epoch, *_end(topic, appended))
            extra = journal.Destroy(topic.epoch)
            entries.append(self._entry(journal.DESTROY, extra, topic_id=topic.id, at=at))
        for producer, decided, files in commit.decisions:
            extra = Producer(producer.encode(), decided)
            entries.append(self._entry(journal.DECIDE, extra, data=_pack(files)))
        entries += [self._entry(journal.ADVANCE, end) for end in commit.ends]
        for name, reader, cursor in commit.cursors:
            at = cursor or _NOWHERE
            extra = CursorEntry(name.encode(), reader.encode(), at.epoch, number, cursor is None)
            entries.append(self._entry(journal.CURSOR, extra, at=at))
        if commit.changed:
            encode, ms, seed = journal.encode_entry, self._ms, self._seed
            for topic, (key, value, due_ms) in commit.notes:
                packed = _pack(journal.NoteEntry(key, due_ms, value is None))
                entries.append(
                    encode(journal.NOTE, topic.id, 0, 0, 0, ms, packed, value or b"", seed=seed)
                )
            ids = {topic.id for topic in commit.changed}
            entries[:0] = journal.encode_changes(entries, ids, ms, number, seed)

    def _note_names(self, commit: Commit, entries: list[bytes]) -> None:
        """Make the next commit repeat the names of topics created here.

        A commit that is longer than one block repeats the names itself.
        """
        made = self._made
        for topic in commit.destroyed:
            for names in (made, self._names, self._in_file):
                names.pop(topic.id, None)
        if not made:
            return
        self._names |= made
        if len(self._in_file) < _NAMES_IN_FILE_MAX:
            self._in_file |= made
        if journal.frame_bytes(sum(map(len, entries))) > journal.BLOCK_BYTES:
            # The block with the create entries must not hold the only copy of the topics' names.
            entries.append(self._names_entry())
            self._names |= made

    def begin_file(self) -> None:
        """Make the next commits repeat the names of topics created in the journal file that is now closed."""
        self._names, self._in_file = {**self._in_file, **self._names}, {}

    def repeat_names_in(self, encoded: Encoded) -> None:
        """Repeat topic names in the commit that was encoded last and becomes the first of a journal file."""
        for topic_id in self._made:
            self._names.pop(topic_id, None)
        if self._names:
            encoded.entries.insert(0, self._names_entry())
        self._names |= self._made
        self._in_file |= self._made

    def _names_entry(self) -> bytes:
        """Return an entry that repeats topic names.

        Otherwise only create entries have them, and a damaged block would take the names along.
        """
        names: list[Name] = []
        room = self._names_bytes_max
        for name in self._names.values():
            room -= len(name.name) + _NAME_BYTES
            if room < 0 and names:
                break
            names.append(name)
        for name in names:
            del self._names[name.topic_id]
        return self._entry(journal.NAMES, data=_pack(names))

    def _create(self, topic: Topic, above: int = 0) -> bytes:
        """Assign the topic its number and epoch, and return the entry that creates it."""
        self._created.append(topic)
        topic.id = self._next_topic_id
        self._next_topic_id += 1
        topic.epoch = max(topic.epoch + 1, self._ms, above + 1)
        extra = CreateEntry(topic.name.encode(), topic.epoch, topic.durability.value.encode())
        self._made[topic.id] = Name.of(topic.id, extra, topic.end_offset, topic.end_ordinal)
        return self._entry(journal.CREATE, extra, topic_id=topic.id, at=topic.end)

    def _entry(
        self,
        kind: int,
        extra: msgspec.Struct | None = None,
        *,
        topic_id: int = 0,
        at: Position = _NOWHERE,
        data: bytes = b"",
    ) -> bytes:
        """Encode an entry without records."""
        packed = _pack(extra) if extra is not None else b""
        return journal.encode_entry(
            kind, topic_id, at.offset, at.ordinal, 0, self._ms, packed, data, seed=self._seed
        )

    def _time(self, topic: Topic) -> int:
        """Return the time of new records: that of the run which they continue, or the commit's."""
        return topic.last_ms if self._ms - topic.last_ms < RUN_MS_MAX else self._ms

    def _parts(
        self, parts: list[tuple[Topic, BatchPart]], entries: list[bytes], appended: list[Appended]
    ) -> None:
        """Encode blocks of batches, one entry per block, in batch order."""
        ends = {one.topic: (one.end, one.ordinal + len(one.records)) for one in appended}
        added: dict[Topic, list[tuple[int, int, Block, bytes]]] = defaultdict(list)
        for topic, (block, producer, number, progress) in parts:
            if topic.id == 0:
                entries.append(self._create(topic))
            offset, ordinal = ends.get(topic, (topic.end_offset, topic.end_ordinal))
            entry = journal.encode_entry(
                journal.APPEND,
                topic.id,
                offset,
                ordinal,
                block.record_count,
                self._time(topic),
                _pack(Producer(producer.encode(), number, progress=progress)),
                block.data,
                seed=self._seed,
            )
            entries.append(entry)
            added[topic].append((offset, ordinal, block, entry))
            ends[topic] = (offset + len(block.data), ordinal + block.record_count)
        for topic, made in added.items():
            offsets, ordinals, blocks, encoded = zip(*made, strict=True)
            end, _ = ends[topic]
            ms, records = self._time(topic), BlockRecords(blocks)
            appended.append(Appended(topic, offsets[0], end, ordinals[0], ms, records, encoded))

    def _append_numbered(
        self, once: NumberedAppend, entries: list[bytes], appended: list[Appended]
    ) -> None:
        topic, records, name, number = once
        if topic.id == 0:
            entries.append(self._create(topic))
        offset, ordinal = _end(topic, appended)
        ms = self._time(topic)
        producer = Producer(name.encode(), number)
        made, end = self._append_entries(topic, offset, ordinal, ms, records, producer)
        entries += made
        appended.append(Appended(topic, offset, end, ordinal, ms, records, made))

    def _append_entries(
        self,
        topic: Topic,
        offset: int,
        ordinal: int,
        ms: int,
        records: list[bytes],
        producer: Producer | None = None,
    ) -> tuple[list[bytes], int]:
        """Encode the records as entries, none longer than a run may be; also return the end offset."""
        pieces = list(_pieces(records))
        entries: list[bytes] = []
        extra = b""
        for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
            data = b"".join(piece)
            if producer is not None:
                extra = _pack(Producer(producer.name, producer.number, left))
            count, seed = len(piece), self._seed
            entries.append(
                journal.encode_entry(
                    journal.APPEND, topic.id, offset, ordinal, count, ms, extra, data, seed=seed
                )
            )
            offset += len(data)
            ordinal += count
        return entries, offset


def _end(topic: Topic, appended: list[Appended]) -> tuple[int, int]:
    """Return offset and ordinal of the topic's end after the appends that this commit has so far."""
    for one in reversed(appended):
        if one.topic is topic:
            return one.end, one.ordinal + len(one.records)
    return topic.end_offset, topic.end_ordinal


def _reported_ends(commit: Commit, appended: list[Appended]) -> list[Position]:
    """Return the positions that a commit's reports ask for; `appended` has its plain appends only."""
    by_topic = {one.topic: one for one in appended}
    starts: dict[Topic, list[int]] = {}
    ends: list[Position] = []
    for topic, count, _ in commit.reports:
        offset, ordinal = topic.end_offset, topic.end_ordinal
        if count:
            if topic not in starts:
                starts[topic] = list(accumulate(map(len, by_topic[topic].records), initial=offset))
            offset = starts[topic][count]
        ends.append(Position(topic.epoch, offset, ordinal + count))
    return ends


def _pieces(records: list[bytes]) -> Iterator[list[bytes]]:
    """Split the records into pieces that are no longer than a run may be."""
    for first in range(0, len(records), RUN_RECORDS_MAX):
        stretch = records[first : first + RUN_RECORDS_MAX]
        if sum(map(len, stretch)) <= RUN_BYTES_MAX:
            yield stretch
            continue
        piece: list[bytes] = []
        size = 0
        for record in stretch:
            if piece and size + len(record) > RUN_BYTES_MAX:
                yield piece
                piece, size = [], 0
            piece.append(record)
            size += len(record)
        yield piece
