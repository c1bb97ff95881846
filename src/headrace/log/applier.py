"""Turns entries of the journal into segments, index rows and catalogue. Recovery is the same function.

One call takes any stretch of the journal and leaves the directory as if nothing else had ever happened:

1. gather the entries by topic;
2. cut each touched file to where the catalogue says it ends, write the new bytes, then their index rows;
3. sync them, and the directories of new files;
4. one transaction of the catalogue says all of it is so, and up to which commit;
5. delete the files that no longer have a name in it, and the staged files of batches that are in it.

A crash before 4 leaves bytes past the catalogue's ends, which the next attempt cuts off; a crash after it
leaves files nobody names, which the next start sweeps. Entries hold absolute values: what is already
applied is recognised by its offset and skipped.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from headrace.config import TopicRule
from headrace.log import journal
from headrace.log.catalogue import (
    BATCHES_NAME,
    TOMBSTONES_MAX,
    BatchRow,
    Catalogue,
    CursorRow,
    Meta,
    ProducerRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
)
from headrace.log.disk import Disk
from headrace.log.entries import (
    RECENT_MAX,
    Create,
    Cursor,
    Destroy,
    Producer,
    Progress,
    Recent,
    StagedFiles,
)
from headrace.log.index import (
    Header,
    Piece,
    encode_header,
    encode_row,
    join_runs,
    row_position,
)
from headrace.log.layout import Layout
from headrace.log.quarantine import quarantine

SYNC_EACH_MAX = 64
"""With more files than this, one sync of the whole file system is cheaper than one for each."""

SEGMENT_SHARE = 0.09
"""How much of a topic's retention one segment may hold: whole segments are forgotten, so no record
outlives its window, and no topic its size, by more. With the time between two checks it is a tenth."""

KNOWN_MAX = 50_000
"""Topics remembered from one journal file to the next."""

PRODUCER_LEASE_MS = 30 * 24 * 3600 * 1000
"""A producer that has appended nothing for so long is forgotten."""

PRODUCERS_MAX = 1_000_000
"""Of more, those that were silent for longest are forgotten."""


class Damage(NamedTuple):
    """Records that were stored and cannot be read any more."""

    topic: str
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    reason: str

    def __str__(self) -> str:
        records = self.end_ordinal - self.ordinal
        return (
            f"topic {self.topic!r}: {records} records from offset {self.offset} to {self.end} "
            f"are lost: {self.reason}"
        )


class LostDecision(NamedTuple):
    """A batch whose staged files nobody can name any more."""

    producer: str
    number: int

    def __str__(self) -> str:
        return (
            f"batch {self.number} of producer {self.producer!r}: what of it was not appended is lost: "
            "the journal is damaged there"
        )


@dataclass(slots=True)
class _Plan:
    """What will become of one topic."""

    row: TopicRow
    """As it was, but for its start; what changes with every entry is beside it."""
    end_offset: int
    end_ordinal: int
    last_ms: int
    pieces: list[Piece] = field(default_factory=list)
    changed: list[SegmentRow] = field(default_factory=list)
    created: bool = False
    destroyed: bool = False
    trimmed: bool = False

    @classmethod
    def of(cls, row: TopicRow, *, created: bool = False) -> Self:
        return cls(row, row.end_offset, row.end_ordinal, row.last_ms, created=created)

    def final_row(self) -> TopicRow:
        return self.row._replace(
            end_offset=self.end_offset, end_ordinal=self.end_ordinal, last_ms=self.last_ms
        )


@dataclass(slots=True)
class _Writes:
    """The bytes for one segment and its index."""

    segment: SegmentRow
    new: bool
    cut_to: int
    rows_before: int
    parts: list[bytes | memoryview] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)


class _Known(NamedTuple):
    """A topic as it was left: nobody else writes, so it need not be looked up again."""

    row: TopicRow
    segment: SegmentRow | None


class _Memory:
    """Known topics, packed: very many of them should cost little."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def get(self, topic_id: int) -> _Known | None:
        packed = self._packed.get(topic_id)
        return _unpack(packed) if packed is not None else None

    def put(self, known: _Known) -> None:
        if len(self._packed) >= KNOWN_MAX:
            self._packed.clear()
        self._packed[known.row.id] = _pack(known)

    def drop(self, topic_id: int) -> None:
        self._packed.pop(topic_id, None)


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Known).decode


class Applier:
    def __init__(
        self,
        disk: Disk,
        layout: Layout,
        catalogue: Catalogue,
        rule: Callable[[str], TopicRule],
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._catalogue = catalogue
        self._rule = rule
        self._known = _Memory()

    def quarantine(self, path: Path, problem: journal.Problem) -> None:
        """Keep a damaged part of a journal file."""
        quarantine(self._layout, path, problem)

    def apply(self, entries: Iterable[journal.Entry], applied: int) -> list[Damage | LostDecision]:
        """Make the entries part of the log; `applied` is the last commit they belong to."""
        meta = self._catalogue.meta()
        batch = _Batch(self._catalogue, self._known)
        for entry in entries:
            batch.add(entry)
        self._write(batch.plans.values())
        dropped = self._record(batch, meta, applied)
        self._remember(batch.plans.values())
        for path in dropped:
            self._disk.unlink(path)
        if batch.batches:
            self.clear_batches()
        return batch.damages

    def clear_batches(self) -> None:
        """Delete the staged files of batches that are appended, and then forget those batches.

        In this order, and on disk: a staged file that came back could be named by another batch.
        """
        rows = self._catalogue.appended_batches()
        if not rows:
            return
        for row in rows:
            for file in msgspec.msgpack.decode(row.staged, type=StagedFiles):
                self._disk.unlink(self._layout.staged_file(file.id.hex()))
        self._disk.sync_directory(self._layout.staged)
        with self._catalogue.transaction():
            self._catalogue.drop_batches(rows)

    def _write(self, plans: Iterable[_Plan]) -> None:
        """Steps 2 and 3."""
        writes: list[tuple[TopicRow, _Writes]] = []
        for plan in plans:
            if plan.pieces and not plan.destroyed:
                writes.extend((plan.row, one) for one in self._layout_runs(plan))
        if 2 * len(writes) <= SYNC_EACH_MAX:
            for topic, one in writes:
                self._write_segment(topic, one, sync=True)
            for directory in {self._path(one.segment).parent for _, one in writes if one.new}:
                self._disk.sync_directory(directory)
        else:
            # Opened before anything is written, so that an error in any of it is reported here.
            first = writes[0][1]
            whole = self._disk.open(self._path(first.segment), create=first.new)
            try:
                for topic, one in writes:
                    self._write_segment(topic, one, sync=False)
                self._disk.sync_file_system(whole)
            finally:
                self._disk.close(whole)

    def _remember(self, plans: Iterable[_Plan]) -> None:
        """What the transaction said is so."""
        for plan in plans:
            if plan.changed and not plan.destroyed and not plan.trimmed:
                self._known.put(_Known(plan.final_row(), plan.changed[-1]))
            else:
                self._known.drop(plan.row.id)

    def _layout_runs(self, plan: _Plan) -> list[_Writes]:
        """Divide a topic's new records over segments."""
        rule = self._rule(plan.row.name.decode())
        known = self._known.get(plan.row.id)
        current = known.segment if known else self._catalogue.last_segment(plan.row.id)
        age_ms_max = rule.retention_age_s * 1000 * SEGMENT_SHARE
        bytes_max = rule.segment_bytes
        if rule.retention_bytes:
            bytes_max = min(bytes_max, int(rule.retention_bytes * SEGMENT_SHARE))
        writes: list[_Writes] = []
        one: _Writes | None = None
        for row, parts in join_runs(plan.pieces):
            # Bytes without a row in the middle of a file could be taken for records if the index is lost.
            new = (
                current is None
                or current.end - current.base >= bytes_max
                or current.end != row.offset
                or (age_ms_max > 0 and row.ms - current.first_ms > age_ms_max)
            )
            if new or current is None:
                current = SegmentRow(
                    plan.row.id, row.offset, row.offset, 0, row.ordinal, row.ordinal, row.ms, row.ms
                )
                one = None
            if one is None:
                one = _Writes(current, new, current.end - current.base, current.rows)
                writes.append(one)
            one.parts += parts
            one.rows.append(encode_row(row))
            current = one.segment = current._replace(
                end=row.end,
                rows=current.rows + 1,
                end_ordinal=row.ordinal + row.record_count,
                last_ms=row.ms,
            )
        plan.changed = [one.segment for one in writes]
        return writes

    def _write_segment(self, topic: TopicRow, one: _Writes, *, sync: bool) -> None:
        path = self._path(one.segment)
        with self._opened(path, create=one.new, sync=sync) as file:
            self._disk.cut(file, one.cut_to)
            self._disk.write(file, one.parts, one.cut_to)
        with self._opened(path.with_suffix(".idx"), create=one.new, sync=sync) as file:
            if one.new:
                header = Header(
                    topic.id,
                    topic.epoch,
                    one.segment.base,
                    one.segment.first_ordinal,
                    topic.name.decode(),
                )
                self._disk.cut(file, 0)
                self._disk.write(file, [encode_header(header), *one.rows], 0)
            else:
                self._disk.cut(file, row_position(one.rows_before))
                self._disk.write(file, one.rows, row_position(one.rows_before))

    @contextmanager
    def _opened(self, path: Path, *, create: bool, sync: bool) -> Iterator[int]:
        fd = self._disk.open(path, create=create)
        try:
            yield fd
            if sync:
                self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def _record(self, batch: "_Batch", meta: Meta, applied: int) -> list[Path]:
        """Step 4; returns the files that have lost their names."""
        catalogue = self._catalogue
        dropped: list[Path] = []
        with catalogue.transaction():
            catalogue.put([row for plan in batch.plans.values() for row in plan.changed])
            for plan in batch.plans.values():
                if plan.destroyed:
                    for segment in catalogue.segments(plan.row.id):
                        dropped += self._paths(segment)
                    catalogue.drop_topic(plan.row.id)
                    continue
                if plan.trimmed:
                    for segment in catalogue.segments(plan.row.id):
                        if segment.end <= plan.row.start_offset:
                            catalogue.drop_segment(plan.row.id, segment.base)
                            dropped += self._paths(segment)
            live = [plan.final_row() for plan in batch.plans.values() if not plan.destroyed]
            catalogue.put(live)
            for plan in batch.plans.values():
                if plan.created and not plan.destroyed:
                    catalogue.drop_tombstone(plan.row.name)
            catalogue.put(batch.tombstones.values())
            catalogue.put([row for row in batch.cursors.values() if row is not None])
            catalogue.drop_cursors([key for key, row in batch.cursors.items() if row is None])
            catalogue.put(batch.producers.values())
            catalogue.put(batch.batches.values())
            if batch.producers:
                newest_ms = max(row.ms for row in batch.producers.values())
                catalogue.drop_producers(newest_ms - PRODUCER_LEASE_MS, PRODUCERS_MAX)
            if batch.tombstones:
                meta = self._fold_tombstones(meta)
            next_id = max([meta.next_topic_id, *(topic_id + 1 for topic_id in batch.plans)])
            catalogue.put_meta(
                msgspec.structs.replace(
                    meta, applied=max(applied, meta.applied), next_topic_id=next_id
                )
            )
        return dropped

    def _fold_tombstones(self, meta: Meta) -> Meta:
        """Keep the floor above every tombstone that is forgotten."""
        tombstones = list(self._catalogue.tombstones())
        for row in tombstones[: max(0, len(tombstones) - TOMBSTONES_MAX)]:
            self._catalogue.drop_tombstone(row.name)
            meta = msgspec.structs.replace(
                meta,
                floor_offset=max(meta.floor_offset, row.end_offset),
                floor_ordinal=max(meta.floor_ordinal, row.end_ordinal),
                floor_epoch=max(meta.floor_epoch, row.epoch),
            )
        return meta

    def _path(self, segment: SegmentRow) -> Path:
        return self._layout.segment(segment.topic_id, segment.base)

    def _paths(self, segment: SegmentRow) -> tuple[Path, Path]:
        path = self._path(segment)
        return path, path.with_suffix(".idx")


class _Batch:
    """Entries gathered by topic: step 1."""

    def __init__(self, catalogue: Catalogue, known: _Memory) -> None:
        self._catalogue = catalogue
        self._known = known
        self.plans: dict[int, _Plan] = {}
        self.tombstones: dict[bytes, TombstoneRow] = {}
        self.cursors: dict[tuple[bytes, bytes], CursorRow | None] = {}
        """None for one that was dropped."""
        self.producers: dict[tuple[bytes, bytes], ProducerRow] = {}
        self.batches: dict[tuple[bytes, int], BatchRow] = {}
        self.damages: list[Damage | LostDecision] = []

    def add(self, entry: journal.Entry) -> None:
        if entry.kind == journal.APPEND:
            plan = self.plans.get(entry.topic_id) or self._plan(entry.topic_id)
            if plan is not None and not plan.destroyed:
                self._append(plan, entry)
            if entry.extra:
                self._produced(plan, entry)
        elif entry.kind == journal.CREATE:
            self._create(entry)
        elif entry.kind == journal.LOST:
            self._lost(entry)
        elif entry.kind == journal.TRIM:
            self._trim(entry)
        elif entry.kind == journal.DESTROY:
            self._destroy(entry)
        elif entry.kind == journal.CURSOR:
            cursor = msgspec.msgpack.decode(entry.extra, type=Cursor)
            key = (cursor.topic, cursor.reader)
            self.cursors[key] = (
                CursorRow(*key, cursor.epoch, entry.offset, entry.ordinal, entry.ms)
                if not cursor.dropped
                else None
            )
        elif entry.kind == journal.DECIDE:
            self._decide(entry)
        elif entry.kind == journal.ADVANCE:
            self._produced(None, entry)

    def _plan(self, topic_id: int) -> _Plan | None:
        plan = self.plans.get(topic_id)
        if plan is None:
            known = self._known.get(topic_id)
            row = known.row if known is not None else self._catalogue.topic_by_id(topic_id)
            if row is None:
                return None
            plan = self.plans[topic_id] = _Plan.of(row)
        return None if plan.destroyed else plan

    def _create(self, entry: journal.Entry) -> None:
        create = msgspec.msgpack.decode(entry.extra, type=Create)
        plan = self._plan(entry.topic_id)
        if plan is not None:
            plan.row = plan.row._replace(durability=create.durability)
            return
        other = self._catalogue.topic(create.name)
        if other is not None:
            if other.id > entry.topic_id:
                return  # the catalogue was rebuilt, and knows a later life: this one was destroyed
            old = self._plan(other.id)
            if old is not None:
                old.destroyed = True  # in a part of the journal that is lost
        row = TopicRow(
            entry.topic_id,
            create.name,
            create.epoch,
            create.durability,
            entry.offset,
            entry.ordinal,
            entry.offset,
            entry.ordinal,
            entry.ms,
        )
        self.plans[entry.topic_id] = _Plan.of(row, created=True)
        self.tombstones.pop(create.name, None)

    def _append(self, plan: _Plan, entry: journal.Entry) -> None:
        _, _, offset, ordinal, count, ms, _, data = entry
        end = offset + len(data)
        if end <= plan.end_offset:
            return
        if offset > plan.end_offset:
            self._damage(plan, offset, ordinal)
        plan.pieces.append(tuple.__new__(Piece, (offset, ordinal, count, ms, data)))
        plan.end_offset = end
        plan.end_ordinal = ordinal + count
        plan.last_ms = ms

    def _lost(self, entry: journal.Entry) -> None:
        """Go on behind what is lost: its offsets were given out and must not come to mean other bytes."""
        if not entry.topic_id:
            self._lost_decision(entry)
            return
        plan = self._plan(entry.topic_id)
        if entry.extra:
            self._produced(plan, entry)  # it was stored once, and must not be again
        if plan is None or entry.end <= plan.end_offset:
            return
        end_ordinal = entry.ordinal + entry.record_count
        self._damage(plan, entry.end, end_ordinal)
        plan.end_offset, plan.end_ordinal = entry.end, end_ordinal

    def _damage(self, plan: _Plan, end: int, end_ordinal: int) -> None:
        self.damages.append(
            Damage(
                plan.row.name.decode(),
                plan.end_offset,
                end,
                plan.end_ordinal,
                end_ordinal,
                "the journal is damaged there",
            )
        )

    def _produced(self, plan: _Plan | None, entry: journal.Entry) -> None:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        if producer.progress is not None:
            self._advance(producer.name, producer.number, producer.progress)
        elif plan is not None and not plan.destroyed and not producer.pieces_left:
            self._number((plan.row.name, producer.name), producer.number, entry)

    def _number(self, key: tuple[bytes, bytes], number: int, entry: journal.Entry) -> bool:
        """Note a producer's number; returns whether it is new."""
        known = self.producers.get(key) or self._catalogue.producer(*key)
        if known is not None and number <= known.last:
            return False
        recent = msgspec.msgpack.decode(known.recent, type=Recent) if known else []
        recent = [*recent, (number, entry.end)][-RECENT_MAX:]
        self.producers[key] = ProducerRow(*key, number, msgspec.msgpack.encode(recent), entry.ms)
        return True

    def _decide(self, entry: journal.Entry) -> None:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        entry = entry._replace(data=bytes(entry.data))
        if not self._number((BATCHES_NAME, producer.name), producer.number, entry):
            return
        files = len(msgspec.msgpack.decode(entry.data, type=StagedFiles))
        key = (producer.name, producer.number)
        self.batches[key] = BatchRow(*key, bytes(entry.data), files, 0, 0, entry.ms)

    def _advance(self, producer: bytes, number: int, progress: Progress) -> None:
        """Whatever becomes of the records: a topic may be destroyed, the batch goes on behind them."""
        row = self.batches.get((producer, number)) or self._catalogue.batch(producer, number)
        if row is not None and progress > Progress(row.file, row.position):
            self.batches[producer, number] = row._replace(
                file=progress.file, position=progress.position
            )

    def _lost_decision(self, entry: journal.Entry) -> None:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        # Some of it may be appended: it must not be a second time.
        if self._number((BATCHES_NAME, producer.name), producer.number, entry):
            self.damages.append(LostDecision(producer.name.decode(), producer.number))

    def _trim(self, entry: journal.Entry) -> None:
        plan = self._plan(entry.topic_id)
        if plan is not None and entry.offset > plan.row.start_offset:
            plan.row = plan.row._replace(start_offset=entry.offset, start_ordinal=entry.ordinal)
            if plan.end_offset < entry.offset:
                # What was trimmed did not survive a crash of the machine.
                plan.end_offset, plan.end_ordinal = entry.offset, entry.ordinal
            plan.trimmed = True

    def _destroy(self, entry: journal.Entry) -> None:
        plan = self._plan(entry.topic_id)
        if plan is None:
            return
        plan.destroyed = True
        destroy = msgspec.msgpack.decode(entry.extra, type=Destroy)
        self.tombstones[plan.row.name] = TombstoneRow(
            plan.row.name, destroy.epoch, entry.offset, entry.ordinal, entry.ms
        )
