"""Journal entries grouped by the things they change: topics, tombstones, cursors, producers and so on.

This is the first step of applying. It reads the catalogue and writes nothing. Entries hold absolute values,
so entries that are applied already are recognised and change nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import msgspec

from headrace.log.catalogue.catalogue import BATCHES_NAME, Catalogue
from headrace.log.catalogue.rows import (
    BatchRow,
    CursorRow,
    NoteRow,
    ProducerRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
)
from headrace.log.commit import journal
from headrace.log.commit.journal import RECENT_MAX, Name, Producer
from headrace.log.store import Progress
from headrace.model import Durability, present_name
from headrace.printing import quoted

_DAMAGED = "the journal is damaged there"


def names_in(entry: journal.Entry) -> list[Name]:
    """Return the names and positions in an entry that creates a topic or repeats topic names."""
    kind = journal.PRESENT_KINDS.get(entry.kind, entry.kind)
    if kind == journal.CREATE:
        made = msgspec.msgpack.decode(entry.extra, type=journal.CreateEntry)
        found = [Name.of(entry.topic_id, made, entry.offset, entry.ordinal)]
    elif kind == journal.NAMES:
        found = msgspec.msgpack.decode(entry.data, type=journal.Names)
    else:
        return []
    if kind != entry.kind:
        found = [msgspec.structs.replace(one, name=present_name(one.name)) for one in found]
    return found


_NAMING = (journal.CREATE, journal.NAMES, journal.OLD_CREATE, journal.OLD_NAMES)
_NAMELESS = b"$lost/"


def nameless(topic_id: int) -> bytes:
    """Return the name for a topic of which only the number is known."""
    return b"%s%x" % (_NAMELESS, topic_id)


@dataclass(slots=True)
class TopicChange:
    """The change of one topic that is to be applied."""

    row: TopicRow
    """The topic's old row with its new start. The values that every entry changes are in the next fields."""
    end_offset: int
    end_ordinal: int
    last_ms: int
    appends: list[journal.Entry] = field(default_factory=list)
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


class Gathered:
    """The changes of all entries, grouped by the changed thing."""

    def __init__(
        self,
        catalogue: Catalogue,
        topic_row: Callable[[int], TopicRow | None],
        names: Mapping[int, Name] = MappingProxyType({}),
    ) -> None:
        self._catalogue = catalogue
        self._names = names
        """Topic names anywhere in the journal, by topic number: a topic's create entry may be lost."""
        self._over: set[int] = set()
        """Numbers of topics that were destroyed although none of these entries says so."""
        self._topic_row = topic_row
        self.plans: dict[int, TopicChange] = {}
        self.tombstones: dict[bytes, TombstoneRow] = {}
        self.cursors: dict[tuple[bytes, bytes], CursorRow | None] = {}
        """Cursors by topic and reader; None for a dropped cursor."""
        self.producers: dict[tuple[bytes, bytes], ProducerRow] = {}
        self.batches: dict[tuple[bytes, int], BatchRow] = {}
        self.notes: dict[bytes, NoteRow | None] = {}
        """Notes by key; None for a dropped note."""
        self._nameless: dict[int, str] = {}
        """Reports of topics whose records were found and whose names were not, by topic number."""
        self._losses: list[str] = []

    @property
    def losses(self) -> list[str]:
        """Descriptions of what the journal has lost."""
        return [*self._losses, *self._nameless.values()]

    def add(self, entry: journal.Entry) -> None:
        if entry.kind == journal.APPEND:
            plan = self.plans.get(entry.topic_id) or self._plan(entry.topic_id)
            if plan is None:
                plan = self._unnamed(entry)
            if plan is not None and not plan.destroyed:
                self._append(plan, entry)
            if entry.extra:
                self._produced(plan, entry)
        elif entry.kind in _NAMING:
            for name in names_in(entry):
                self._create(name, entry.ms)
        elif entry.kind == journal.LOST:
            self._lost(entry)
        elif entry.kind == journal.TRIM:
            self._trim(entry)
        elif entry.kind == journal.DESTROY:
            self._destroy(entry)
        elif entry.kind in (journal.CURSOR, journal.OLD_CURSOR):
            cursor = msgspec.msgpack.decode(entry.extra, type=journal.CursorEntry)
            is_old = entry.kind == journal.OLD_CURSOR
            key = (present_name(cursor.topic) if is_old else cursor.topic, cursor.reader)
            row = CursorRow(*key, cursor.epoch, entry.offset, entry.ordinal, entry.ms)
            self.cursors[key] = row if not cursor.dropped else None
        elif entry.kind == journal.DECIDE:
            self._decide(entry)
        elif entry.kind == journal.ADVANCE:
            self._produced(None, entry)
        elif entry.kind in (journal.NOTE, journal.LOST_NOTE):
            self._note(entry)

    def _plan(self, topic_id: int) -> TopicChange | None:
        plan = self.plans.get(topic_id)
        if plan is None:
            row = self._topic_row(topic_id)
            if row is None:
                return None
            plan = self.plans[topic_id] = TopicChange.of(row)
        return None if plan.destroyed else plan

    def _create(self, create: Name, ms: int) -> None:
        plan = self._plan(create.topic_id)
        if plan is not None:
            self._name(plan, create)
            return
        if not self._is_newest(create):
            self._over.add(create.topic_id)
            return
        self._begin(create, ms)
        self.tombstones.pop(create.name, None)

    def _begin(self, create: Name, ms: int) -> TopicChange:
        at = (create.offset, create.ordinal)
        row = TopicRow(create.topic_id, create.name, create.epoch, create.durability, *at, *at, ms)
        plan = self.plans[create.topic_id] = TopicChange.of(row, created=True)
        return plan

    def _name(self, plan: TopicChange, create: Name) -> None:
        """Use a repeated name of a topic, of which only the number may have been known."""
        row = plan.row._replace(durability=create.durability)
        is_nameless = row.name.startswith(_NAMELESS) and row.name != create.name
        if is_nameless and self._is_newest(create):
            row = row._replace(name=create.name, epoch=create.epoch)
            plan.created = True
            self.tombstones.pop(create.name, None)
        plan.row = row
        self._nameless.pop(row.id, None)

    def _is_newest(self, create: Name) -> bool:
        """True if a topic is the newest life of its name; the earlier lives were destroyed then."""
        other = self._catalogue.topic(create.name)
        if other is None or other.id == create.topic_id:
            return True
        if other.id > create.topic_id:
            return False  # the catalogue was rebuilt, and has a later life
        old = self._plan(other.id)
        if old is not None:
            old.destroyed = True  # its destruction is in a part of the journal that is lost
        return True

    def _unnamed(self, entry: journal.Entry) -> TopicChange | None:
        """Create a topic whose create entry is lost; without a name, it is named after its number."""
        if entry.topic_id in self._over:
            return None
        made = self._names.get(entry.topic_id)
        if made is not None:
            self._create(made, entry.ms)
            return self._plan(entry.topic_id)
        name = nameless(entry.topic_id)
        taken = {plan.row.name for plan in self.plans.values()}
        while name in taken or self._catalogue.topic(name) is not None:
            name += b"+"
        durability = Durability.SYNCED.value.encode()
        made = Name(entry.topic_id, name, entry.ms, durability, entry.offset, entry.ordinal)
        plan = self._begin(made, entry.ms)
        self._nameless[entry.topic_id] = (
            f"topic number {entry.topic_id}: its name is lost, its records are kept in "
            f"{quoted(name.decode())}: {_DAMAGED}"
        )
        return plan

    def _append(self, plan: TopicChange, entry: journal.Entry) -> None:
        _, _, offset, ordinal, count, ms, _, data = entry
        end = offset + len(data)
        if end <= plan.end_offset:
            return
        if offset > plan.end_offset:
            self._lose(plan, offset, ordinal)
        plan.appends.append(entry)
        plan.end_offset = end
        plan.end_ordinal = ordinal + count
        plan.last_ms = ms

    def _lost(self, entry: journal.Entry) -> None:
        """Continue the topic after lost records: their offsets are used up and must not get other records."""
        if not entry.topic_id:
            self._lost_decision(entry)
            return
        plan = self._plan(entry.topic_id)
        if plan is None and entry.topic_id not in self.plans:
            plan = self._unnamed(entry)
        if entry.extra:
            self._produced(plan, entry)  # the append was stored once, and must not be stored again
        if plan is None or entry.end <= plan.end_offset:
            return
        end_ordinal = entry.ordinal + entry.record_count
        self._lose(plan, entry.end, end_ordinal)
        plan.end_offset, plan.end_ordinal = entry.end, end_ordinal

    def _lose(self, plan: TopicChange, end: int, end_ordinal: int) -> None:
        self._losses.append(
            f"topic {quoted(plan.row.name.decode())}: {end_ordinal - plan.end_ordinal} records from "
            f"offset {plan.end_offset} to {end} are lost: {_DAMAGED}"
        )

    def _produced(self, plan: TopicChange | None, entry: journal.Entry) -> None:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        progress, key = producer.progress, (producer.name, producer.number)
        if progress is not None:
            # Progress counts even if the records are dropped because their topic was destroyed.
            row = self.batches.get(key) or self._catalogue.batch(*key)
            if row is not None and progress > Progress(row.file, row.position):
                self.batches[key] = row._replace(file=progress.file, position=progress.position)
        elif plan is not None and not plan.destroyed and not producer.pieces_left:
            self._number((plan.row.name, producer.name), producer.number, entry)

    def _number(self, key: tuple[bytes, bytes], number: int, entry: journal.Entry) -> bool:
        """Record a producer's number; return True if the number is new."""
        known = self.producers.get(key) or self._catalogue.producer(*key)
        if known is not None and number <= known.last:
            return False
        recent = msgspec.msgpack.decode(known.recent, type=journal.Recent) if known else []
        recent = [*recent, (number, entry.end)][-RECENT_MAX:]
        self.producers[key] = ProducerRow(*key, number, msgspec.msgpack.encode(recent), entry.ms)
        return True

    def _decide(self, entry: journal.Entry) -> None:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        if self._number((BATCHES_NAME, producer.name), producer.number, entry):
            staged = bytes(entry.data)
            files = len(msgspec.msgpack.decode(staged, type=journal.StagedFiles))
            key = (producer.name, producer.number)
            self.batches[key] = BatchRow(*key, staged, files, 0, 0, entry.ms)

    def _lost_decision(self, entry: journal.Entry) -> None:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        # Some of the batch's records may be appended: they must not be appended a second time.
        if self._number((BATCHES_NAME, producer.name), producer.number, entry):
            name = quoted(producer.name.decode())
            self._losses.append(
                f"batch {producer.number} of producer {name}: its records that were not appended yet are "
                f"lost: {_DAMAGED}"
            )

    def _note(self, entry: journal.Entry) -> None:
        note = msgspec.msgpack.decode(entry.extra, type=journal.NoteEntry)
        if entry.kind == journal.LOST_NOTE:
            # The value before it is valid again.
            name = quoted(note.key.decode(errors="replace"))
            self._losses.append(f"note {name}: its last value is lost: {_DAMAGED}")
        else:
            row = NoteRow(note.key, bytes(entry.data), note.due_ms, entry.ms)
            self.notes[note.key] = row if not note.dropped else None

    def _trim(self, entry: journal.Entry) -> None:
        plan = self._plan(entry.topic_id)
        if plan is not None and entry.offset > plan.row.start_offset:
            plan.row = plan.row._replace(start_offset=entry.offset, start_ordinal=entry.ordinal)
            if plan.end_offset < entry.offset:
                # The trimmed records did not survive a crash of the machine.
                plan.end_offset, plan.end_ordinal = entry.offset, entry.ordinal
            plan.trimmed = True

    def _destroy(self, entry: journal.Entry) -> None:
        plan = self._plan(entry.topic_id)
        if plan is None:
            return
        plan.destroyed = True
        if self._nameless.pop(plan.row.id, None):
            return
        destroy = msgspec.msgpack.decode(entry.extra, type=journal.Destroy)
        # The clock may have gone back since the last record. The next life continues the topic's times.
        self.tombstones[plan.row.name] = TombstoneRow(
            plan.row.name, destroy.epoch, entry.offset, entry.ordinal, max(entry.ms, plan.last_ms)
        )
