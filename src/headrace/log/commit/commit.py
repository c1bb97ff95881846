"""Group commit: the requests gathered for one write, and their encoding as journal entries.

Elsewhere: writing the entries (`journal.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

import msgspec

from headrace.log.batch.batches import BatchPart, Decision
from headrace.log.batch.blocks import Block
from headrace.log.commit import journal
from headrace.log.commit.journal import CreateEntry, CursorEntry, Destroy, Name, NoteEntry, Producer
from headrace.log.read.index import RUN_BYTES_MAX, RUN_MS_MAX, RUN_RECORDS_MAX
from headrace.log.records import split_records
from headrace.log.store import Appended, Note, Topic
from headrace.model import Durability, Position

_pack = msgspec.msgpack.encode

_NAME_BYTES = 48
"""Bytes per topic, besides the topic's name, in an entry that repeats topic names."""

_NAMES_IN_FILE_MAX = 100_000
"""Largest number of topics created in one journal file whose names the next file repeats."""


class Once(NamedTuple):
    """An append with its producer's number, which makes the append idempotent."""

    topic: Topic
    records: list[bytes]
    producer: str
    number: int


class Trim(NamedTuple):
    topic: Topic
    position: Position


class CursorChange(NamedTuple):
    topic: str
    reader: str
    position: Position | None
    """None if the cursor is dropped."""


class BlockRecords(Sequence[bytes]):
    """The records of blocks, split lazily because most callers never read them."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._count = sum(block.record_count for block in blocks)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return list(self)[index]

    def __iter__(self) -> Iterator[bytes]:
        for block in self._blocks:
            yield from split_records(bytes(block.data), block.record_count)


class Commit:
    """The requests that wait for the same write."""

    __slots__ = (
        *("appends", "bytes", "changed", "cursors", "decisions", "destroyed", "ends", "noted"),
        *("notes", "onces", "parts", "trims", "waiters"),
    )

    def __init__(self) -> None:
        self.appends: dict[Topic, list[bytes]] = {}
        self.onces: list[Once] = []
        self.decisions: list[Decision] = []
        self.parts: list[tuple[Topic, BatchPart]] = []
        """Parts of batches, in the order of each batch."""
        self.ends: list[Producer] = []
        """Progress of batches whose last part is not in the journal."""
        self.trims: list[Trim] = []
        self.destroyed: list[Topic] = []
        self.cursors: list[CursorChange] = []
        self.notes: list[Note] = []
        self.noted: list[Topic] = []
        """Parallel to `notes`: the topic of each note."""
        self.changed: dict[Topic, None] = {}
        """Topics whose changes in this commit, together with the notes, take effect all or not at all."""
        self.waiters: list[Callable[[], None]] = []
        self.bytes = 0

    def add(self, batches: dict[Topic, list[bytes]], done: Callable[[], None]) -> None:
        appends = self.appends
        for topic, records in batches.items():
            known = appends.get(topic)
            if known is None:
                appends[topic] = records
            else:
                known += records
        self.waiters.append(done)

    def mentions(self, topic: Topic) -> bool:
        return (
            topic in self.appends
            or topic in self.changed
            or topic in self.destroyed
            or any(once.topic is topic for once in self.onces)
            or any(trim.topic is topic for trim in self.trims)
            or any(other is topic for other, _ in self.parts)
        )


class Encoded(NamedTuple):
    """A commit that is ready to be written."""

    commit: Commit
    entries: list[bytes]
    """Journal entries, in the order in which they must be applied."""
    body_bytes: int
    appended: list[Appended]
    created: list[Topic]
    sync: bool
    ms: int


class Encoder:
    """Encodes commits and assigns offsets, ordinals, times and topic numbers."""

    def __init__(self, next_topic_id: int, generation: int, names_bytes_max: int = 1 << 16) -> None:
        self._next_topic_id = next_topic_id
        self._names_bytes_max = names_bytes_max
        self._generation = generation
        self._seed = 0
        """Checksum seed of the commit that is being encoded."""
        self._created: list[Topic] = []
        self._names: dict[int, Name] = {}
        """Topics created by the last commit: the next commit repeats their names."""
        self._in_file: dict[int, Name] = {}
        """Topics created in this journal file: the next file repeats their names."""

    def encode(self, commit: Commit, now_ms: int, number: int) -> Encoded:
        """Encode a commit; `number` is its future number in the journal."""
        appended: list[Appended] = []
        seed = self._seed = journal.entry_seed(self._generation, number)
        entries: list[bytes] = [self._name_again(now_ms)] if number and self._names else []
        self._created = []
        sync = False
        encode_single, new = journal.encode_single, tuple.__new__
        for topic, records in commit.appends.items():
            if topic.id == 0:
                entries.append(self.create(topic, now_ms))
                sync = True
            elif topic.durability is Durability.SYNCED:
                sync = True
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
                end = offset + sum(map(len, records))
                made = _append_entries(topic.id, offset, ordinal, ms, records, None, seed)
            entries += made
            # Same as `Appended(…)` but without its Python-level constructor: this runs for every topic.
            appended.append(new(Appended, (topic, offset, end, ordinal, ms, records, made)))
        if commit.parts:
            sync |= self._parts(commit.parts, now_ms, entries, appended)
        for once in commit.onces:
            sync |= self._once(once, now_ms, entries, appended)
        for topic, position in commit.trims:
            entries.append(_control(journal.TRIM, topic, position, now_ms, b"", seed))
            sync |= topic.durability is Durability.SYNCED
        for topic in commit.destroyed:
            extra = _pack(Destroy(topic.epoch))
            # Appends of the same commit come first, so the topic ends after them.
            offset, ordinal = _end(topic, appended)
            at = Position(topic.epoch, offset, ordinal)
            entries.append(_control(journal.DESTROY, topic, at, now_ms, extra, seed))
            sync = True
        for decision in commit.decisions:
            entries.append(_decision(decision, now_ms, seed))
            sync = True
        for producer in commit.ends:
            extra = _pack(producer)
            entries.append(
                journal.encode_entry(journal.ADVANCE, 0, 0, 0, 0, now_ms, extra, b"", seed=seed)
            )
        for change in commit.cursors:
            entries.append(_cursor(change, now_ms, number, seed))
            sync = True
        if commit.changed:
            entries += [
                _note(topic, note, now_ms, seed)
                for topic, note in zip(commit.noted, commit.notes, strict=True)
            ]
            ids = {topic.id for topic in commit.changed}
            entries[:0] = journal.encode_changes(entries, ids, now_ms, number, seed)
            sync |= any(topic.durability is Durability.SYNCED for topic in commit.changed)
        body_bytes = sum(map(len, entries))
        if number:
            body_bytes += self._note_names(commit, entries, body_bytes, now_ms)
        return Encoded(commit, entries, body_bytes, appended, self._created, sync, now_ms)

    def _note_names(
        self, commit: Commit, entries: list[bytes], body_bytes: int, now_ms: int
    ) -> int:
        """Make the next commit repeat the names of topics created here; return the bytes added to this one.

        Only a commit that is longer than one block gets longer: it repeats the names itself.
        """
        for topic in commit.destroyed:
            self._names.pop(topic.id, None)
            self._in_file.pop(topic.id, None)
        made = self._made(commit)
        if not made:
            return 0
        self._names |= made
        if len(self._in_file) < _NAMES_IN_FILE_MAX:
            self._in_file |= made
        if journal.frame_bytes(body_bytes) <= journal.BLOCK_BYTES:
            return 0
        # The block with the create entries must not hold the only copy of the topics' names.
        entries.append(self._name_again(now_ms))
        self._names |= made
        return len(entries[-1])

    def begin_file(self) -> None:
        """Make the next commits repeat the names of topics created in the journal file that is now closed."""
        self._names, self._in_file = {**self._in_file, **self._names}, {}

    def name_in(self, encoded: Encoded, number: int) -> Encoded:
        """Repeat topic names in an already encoded commit that becomes the first of a journal file."""
        made = {
            topic.id: self._names.pop(topic.id)
            for topic in encoded.created
            if topic.id in self._names
        }
        if self._names:
            self._seed = journal.entry_seed(self._generation, number)
            names = self._name_again(encoded.ms)
            encoded = encoded._replace(
                entries=[names, *encoded.entries], body_bytes=encoded.body_bytes + len(names)
            )
        self._names |= made
        self._in_file |= made
        return encoded

    def _made(self, commit: Commit) -> dict[int, Name]:
        """Return the topics that a commit creates and does not destroy."""
        return {
            topic.id: Name(
                topic.id,
                topic.name.encode(),
                topic.epoch,
                topic.durability.value.encode(),
                topic.end_offset,
                topic.end_ordinal,
            )
            for topic in self._created
            if topic not in commit.destroyed
        }

    def _name_again(self, now_ms: int) -> bytes:
        """Return an entry that repeats topic names, for another block than that of the create entries."""
        names: list[Name] = []
        room = self._names_bytes_max
        for name in self._names.values():
            room -= len(name.name) + _NAME_BYTES
            if room < 0 and names:
                break
            names.append(name)
        for name in names:
            del self._names[name.topic_id]
        data = _pack(names)
        return journal.encode_entry(journal.NAMES, 0, 0, 0, 0, now_ms, b"", data, seed=self._seed)

    def create(self, topic: Topic, now_ms: int) -> bytes:
        """Assign the topic its number and epoch, and return the entry that creates it."""
        self._created.append(topic)
        topic.id = self._next_topic_id
        self._next_topic_id += 1
        topic.epoch = max(topic.epoch + 1, now_ms)
        extra = _pack(
            CreateEntry(topic.name.encode(), topic.epoch, topic.durability.value.encode())
        )
        return _control(journal.CREATE, topic, topic.end, now_ms, extra, self._seed)

    def _parts(
        self,
        parts: list[tuple[Topic, BatchPart]],
        now_ms: int,
        entries: list[bytes],
        appended: list[Appended],
    ) -> bool:
        """Encode blocks of batches, one entry per block, in batch order; return True if a sync is needed."""
        sync = False
        ends = {one.topic: (one.end, one.ordinal + len(one.records)) for one in appended}
        added: dict[Topic, _Added] = {}
        for topic, part in parts:
            block = part.block
            if topic.id == 0:
                entries.append(self.create(topic, now_ms))
                sync = True
            sync |= topic.durability is Durability.SYNCED
            one = added.get(topic)
            if one is None:
                ms = topic.last_ms if now_ms - topic.last_ms < RUN_MS_MAX else now_ms
                offset, ordinal = ends.get(topic, (topic.end_offset, topic.end_ordinal))
                one = added[topic] = _Added(offset, ordinal, ms)
            extra = _pack(part.extra())
            count, data = block.record_count, block.data
            entry = journal.encode_entry(
                journal.APPEND,
                topic.id,
                one.end,
                one.end_ordinal,
                count,
                one.ms,
                extra,
                data,
                seed=self._seed,
            )
            entries.append(entry)
            one.add(block, entry)
        appended += [
            Appended(
                topic,
                one.offset,
                one.end,
                one.ordinal,
                one.ms,
                BlockRecords(one.blocks),
                one.entries,
            )
            for topic, one in added.items()
        ]
        return sync

    def _once(
        self, once: Once, now_ms: int, entries: list[bytes], appended: list[Appended]
    ) -> bool:
        topic, records = once.topic, once.records
        created = topic.id == 0
        if created:
            entries.append(self.create(topic, now_ms))
        offset, ordinal = _end(topic, appended)
        ms = topic.last_ms if now_ms - topic.last_ms < RUN_MS_MAX else now_ms
        end = offset + sum(map(len, records))
        producer = Producer(once.producer.encode(), once.number)
        made = _append_entries(topic.id, offset, ordinal, ms, records, producer, self._seed)
        entries += made
        appended.append(Appended(topic, offset, end, ordinal, ms, records, made))
        return created or topic.durability is Durability.SYNCED


class _Added:
    """The blocks of batches that one commit appends to one topic."""

    def __init__(self, offset: int, ordinal: int, ms: int) -> None:
        self.offset = self.end = offset
        self.ordinal = self.end_ordinal = ordinal
        self.ms = ms
        self.blocks: list[Block] = []
        self.entries: list[bytes] = []

    def add(self, block: Block, entry: bytes) -> None:
        self.end += len(block.data)
        self.end_ordinal += block.record_count
        self.blocks.append(block)
        self.entries.append(entry)


def _append_entries(
    topic_id: int,
    offset: int,
    ordinal: int,
    ms: int,
    records: list[bytes],
    producer: Producer | None,
    seed: int,
) -> list[bytes]:
    """Encode the records as entries, none longer than a run may be."""
    pieces = list(_pieces(records))
    entries: list[bytes] = []
    extra = b""
    for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
        data = b"".join(piece)
        if producer is not None:
            extra = _pack(Producer(producer.name, producer.number, left))
        entries.append(
            journal.encode_entry(
                journal.APPEND, topic_id, offset, ordinal, len(piece), ms, extra, data, seed=seed
            )
        )
        offset += len(data)
        ordinal += len(piece)
    return entries


def _end(topic: Topic, appended: list[Appended]) -> tuple[int, int]:
    """Return offset and ordinal of the topic's end after the appends that this commit has so far."""
    for one in reversed(appended):
        if one.topic is topic:
            return one.end, one.ordinal + len(one.records)
    return topic.end_offset, topic.end_ordinal


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


def _cursor(change: CursorChange, now_ms: int, number: int, seed: int) -> bytes:
    at = change.position or _NOWHERE
    dropped = change.position is None
    extra = _pack(
        CursorEntry(change.topic.encode(), change.reader.encode(), at.epoch, number, dropped)
    )
    return journal.encode_entry(
        journal.CURSOR, 0, at.offset, at.ordinal, 0, now_ms, extra, b"", seed=seed
    )


_NOWHERE = Position(0, 0, 0)


def _note(topic: Topic, note: Note, now_ms: int, seed: int) -> bytes:
    key, value, due_ms = note
    extra = _pack(NoteEntry(key, due_ms, value is None))
    return journal.encode_entry(
        journal.NOTE, topic.id, 0, 0, 0, now_ms, extra, value or b"", seed=seed
    )


def _decision(decision: Decision, now_ms: int, seed: int) -> bytes:
    extra = _pack(Producer(decision.producer.encode(), decision.number))
    data = _pack(decision.files)
    return journal.encode_entry(journal.DECIDE, 0, 0, 0, 0, now_ms, extra, data, seed=seed)


def _control(kind: int, topic: Topic, at: Position, now_ms: int, extra: bytes, seed: int) -> bytes:
    return journal.encode_entry(
        kind, topic.id, at.offset, at.ordinal, 0, now_ms, extra, b"", seed=seed
    )
