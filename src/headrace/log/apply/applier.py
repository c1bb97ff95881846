"""The applier: turns journal entries into segments, index rows and catalogue rows. Recovery uses it too.

One call takes any part of the journal and leaves the directory as if nothing else had ever happened:

1. gather the entries by the things they change (`changes.py`);
2. truncate each touched file to its end in the catalogue, write the new bytes, then their index rows;
3. sync these files, and the directories of new files;
4. record all changes, and the last applied commit, in one transaction of the catalogue;
5. delete the files that the catalogue no longer names, and the staged files of appended batches.

A crash before step 4 leaves bytes past the catalogue's ends, which the next attempt truncates. A crash after
step 4 leaves files without a row, which the next start deletes. Entries hold absolute values: an entry that
is already applied is recognised by its offset and skipped.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headrace.config.settings import TopicRule
from headrace.errors import StoreFailedError
from headrace.log.apply.changes import Gathered, TopicChange
from headrace.log.catalogue.catalogue import TOMBSTONES_MAX, Catalogue
from headrace.log.catalogue.rows import (
    BatchRow,
    CursorRow,
    DirectoryMeta,
    NoteRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    row_key,
)
from headrace.log.commit import journal
from headrace.log.commit.journal import ClosedFile, Name, StagedFiles
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.read import index
from headrace.log.recovery.frames import Frame, Problem, quarantine, read_frames

SYNC_EACH_MAX = 64
"""Above this number of files, one sync of the whole file system is cheaper than one sync per file."""

SEGMENT_SHARE = 0.09
"""Largest share of a topic's retention that one segment may hold. Retention deletes whole segments, so no
record outlives its window, and no topic exceeds its size, by more than this share. Together with the time
between two checks it is a tenth."""

KNOWN_MAX = 50_000
"""Number of topics kept in memory from one journal file to the next."""

PRODUCER_LEASE_MS = 30 * 24 * 3600 * 1000
"""Time after which a producer that has appended nothing is forgotten."""

PRODUCERS_MAX = 1_000_000
"""Largest number of producers: above it, those that were silent for longest are forgotten."""


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
    """A topic's state after its last change. Only the applier writes, so the state need not be read again."""

    row: TopicRow
    segment: SegmentRow | None


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Known).decode


class Applier:
    def __init__(
        self, disk: Disk, layout: Layout, catalogue: Catalogue, rule: Callable[[str], TopicRule]
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._catalogue = catalogue
        self._rule = rule
        self._known: dict[int, bytes] = {}
        """Known topics by number, packed because there may be very many of them."""

    def prepare(self, path: Path, size: int) -> None:
        """Create a journal file; the catalogue names the file before it is put to use."""
        if size < self._catalogue.meta().journal_files.get(path.name, 0):
            self._name_journal_file(path, size)  # or the shorter file would seem to be truncated
        journal.prepare_file(self._disk, path, size, self._catalogue.meta().generation)
        self._name_journal_file(path, size)

    def _name_journal_file(self, path: Path, size: int) -> None:
        meta = self._catalogue.meta()
        files = {**meta.journal_files, path.name: size}
        with self._catalogue.transaction():
            self._catalogue.put_meta(msgspec.structs.replace(meta, journal_files=files))

    def apply_file(self, closed: ClosedFile) -> list[str]:
        """Apply one closed journal file; return descriptions of the damage found."""
        reports: list[str] = []
        entries: list[journal.Entry] = []
        generation = self._catalogue.meta().generation
        for item in read_frames(closed.path, closed.until, generation=generation):
            for problem in [item] if isinstance(item, Problem) else item.problems:
                report = (
                    f"journal {problem.file} at byte {problem.position}: damage: {problem.reason}"
                )
                if problem.entry is None and not problem.harmless:
                    # Nobody knows what is lost: the next start quarantines it, and topics jump ahead.
                    raise StoreFailedError(report)
                quarantine(self._layout, self._disk, closed.path, problem)
                reports.append(report)
            if isinstance(item, Frame):
                entries += item.entries
        return reports + self.apply(entries, closed.last)

    def apply(
        self,
        entries: Iterable[journal.Entry],
        applied: int,
        names: Mapping[int, Name] = MappingProxyType({}),
    ) -> list[str]:
        """Apply the entries to the log, and return descriptions of what they show to be lost.

        `applied` is the last commit that the entries belong to. `names` holds the names of topics whose
        create entry may be lost.
        """
        gathered = Gathered(self._catalogue, self._topic_row, names)
        for entry in entries:
            gathered.add(entry)
        self._write(gathered.plans.values())
        for topic_id in gathered.plans:
            # An error may come after the commit: the next attempt must ask the catalogue, and not truncate
            # files to their ends before the commit.
            self._known.pop(topic_id, None)
        dropped = self._record(gathered, applied)
        self._remember(gathered.plans.values())
        for segment in dropped:
            path = self._path(segment)
            self._disk.unlink(path)
            self._disk.unlink(path.with_suffix(".idx"))
        if gathered.batches:
            self.clear_batches()
        return gathered.losses

    def clear_batches(self) -> None:
        """Delete the staged files of batches that are appended, and then forget those batches.

        The files must be deleted first, on disk too: another batch could name a staged file that came back.
        """
        rows = self._catalogue.appended_batches()
        if not rows:
            return
        for row in rows:
            for file in msgspec.msgpack.decode(row.staged, type=StagedFiles):
                self._disk.unlink(self._layout.staged_file(file.id.hex()))
        self._disk.sync_directory(self._layout.staged)
        with self._catalogue.transaction():
            self._catalogue.drop(BatchRow, map(row_key, rows))

    def _topic_row(self, topic_id: int) -> TopicRow | None:
        known = self._known.get(topic_id)
        return _unpack(known).row if known else self._catalogue.topic_by_id(topic_id)

    def _write(self, plans: Iterable[TopicChange]) -> None:
        """Do steps 2 and 3."""
        writes: list[tuple[TopicRow, _Writes]] = []
        for plan in plans:
            if plan.destroyed:
                continue
            # Records that are trimmed already need not be written to a file: most of a channel's messages.
            start = plan.row.start_offset
            appends = [entry for entry in plan.appends if entry.end > start]
            if appends:
                writes.extend((plan.row, one) for one in self._layout_runs(plan, appends))
        if 2 * len(writes) <= SYNC_EACH_MAX:
            for topic, one in writes:
                self._write_segment(topic, one, sync=True)
            for directory in {self._path(one.segment).parent for _, one in writes if one.new}:
                self._disk.sync_directory(directory)
        else:
            # The file is opened before anything is written, so that the sync reports every write error.
            first = writes[0][1]
            with self._disk.opened(self._path(first.segment), create=first.new) as whole:
                for topic, one in writes:
                    self._write_segment(topic, one, sync=False)
                self._disk.sync_file_system(whole)

    def _remember(self, plans: Iterable[TopicChange]) -> None:
        """Keep the topics' states that the transaction has recorded."""
        for plan in plans:
            if plan.changed and not plan.destroyed and not plan.trimmed:
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[plan.row.id] = _pack(_Known(plan.final_row(), plan.changed[-1]))

    def _layout_runs(self, plan: TopicChange, appends: list[journal.Entry]) -> list[_Writes]:
        """Distribute a topic's new records over segments."""
        rule = self._rule(plan.row.name.decode())
        known = self._known.get(plan.row.id)
        current = _unpack(known).segment if known else self._catalogue.last_segment(plan.row.id)
        age_ms_max = rule.retention_age_s * 1000 * SEGMENT_SHARE
        bytes_max = rule.segment_bytes
        if rule.retention_bytes:
            bytes_max = min(bytes_max, int(rule.retention_bytes * SEGMENT_SHARE))
        writes: list[_Writes] = []
        for row, parts in index.join_runs(appends):
            # A gap starts a new segment: without an index, bytes that have no row could be taken for records.
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
            if new or not writes:
                writes.append(_Writes(current, new, current.end - current.base, current.rows))
            one = writes[-1]
            one.parts += parts
            one.rows.append(index.encode_row(row))
            current = one.segment = current._replace(
                end=row.end,
                rows=current.rows + 1,
                end_ordinal=row.ordinal + row.record_count,
                last_ms=row.ms,
            )
        plan.changed = [one.segment for one in writes]
        return writes

    def _write_segment(self, topic: TopicRow, one: _Writes, *, sync: bool) -> None:
        path, segment = self._path(one.segment), one.segment
        rows, rows_at = one.rows, index.row_position(one.rows_before)
        if one.new:
            name = topic.name.decode()
            header = index.Header(topic.id, topic.epoch, segment.base, segment.first_ordinal, name)
            rows, rows_at = [index.encode_header(header), *rows], 0
        for file, parts, at in (
            (path, one.parts, one.cut_to),
            (path.with_suffix(".idx"), rows, rows_at),
        ):
            with self._disk.opened(file, create=one.new, sync=sync) as fd:
                self._disk.cut(fd, at)
                self._disk.write(fd, parts, at)

    def _record(self, gathered: Gathered, applied: int) -> list[SegmentRow]:
        """Do step 4; return the segments that the catalogue no longer names."""
        catalogue = self._catalogue
        meta = catalogue.meta()
        plans = gathered.plans.values()
        dropped: list[SegmentRow] = []
        with catalogue.transaction():
            catalogue.put([row for plan in plans for row in plan.changed])
            for plan in plans:
                if plan.destroyed:
                    dropped += catalogue.segments(plan.row.id)
                    catalogue.drop_topic(plan.row.id)
                elif plan.trimmed:
                    start = plan.row.start_offset
                    dropped += [one for one in catalogue.segments(plan.row.id) if one.end <= start]
            catalogue.drop(SegmentRow, map(row_key, dropped))
            live = [plan for plan in plans if not plan.destroyed]
            catalogue.put([plan.final_row() for plan in live])
            catalogue.drop(TombstoneRow, [(plan.row.name,) for plan in live if plan.created])
            catalogue.put(gathered.tombstones.values())
            catalogue.put([row for row in gathered.cursors.values() if row is not None])
            catalogue.drop(CursorRow, [key for key, row in gathered.cursors.items() if row is None])
            catalogue.put(gathered.producers.values())
            catalogue.put(gathered.batches.values())
            catalogue.put([row for row in gathered.notes.values() if row is not None])
            catalogue.drop(NoteRow, [(key,) for key, row in gathered.notes.items() if row is None])
            if gathered.producers:
                newest_ms = max(row.ms for row in gathered.producers.values())
                catalogue.drop_producers(newest_ms - PRODUCER_LEASE_MS, PRODUCERS_MAX)
            if gathered.tombstones:
                meta = self._fold_tombstones(meta)
            next_id = max([meta.next_topic_id, *(topic_id + 1 for topic_id in gathered.plans)])
            applied = max(applied, meta.applied)
            catalogue.put_meta(
                msgspec.structs.replace(meta, applied=applied, next_topic_id=next_id)
            )
        return dropped

    def _fold_tombstones(self, meta: DirectoryMeta) -> DirectoryMeta:
        """Forget the oldest tombstones, and raise the floor above each of them."""
        oldest = list(self._catalogue.tombstones())[:-TOMBSTONES_MAX]
        self._catalogue.drop(TombstoneRow, map(row_key, oldest))
        for row in oldest:
            meta = msgspec.structs.replace(
                meta,
                floor_offset=max(meta.floor_offset, row.end_offset),
                floor_ordinal=max(meta.floor_ordinal, row.end_ordinal),
                floor_epoch=max(meta.floor_epoch, row.epoch),
            )
        return meta

    def _path(self, segment: SegmentRow) -> Path:
        return self._layout.segment(segment.topic_id, segment.base)
