"""Repair of damage by a disk or a person: index files, missing segments, the whole catalogue.

Runs before the server serves. Reports as text what was repaired and what is lost.

Damaged index rows are restored from the segment, which holds the same facts. Rows follow each other without a
gap, from the segment's first record to its last. So the valid rows are those that continue from the
beginning, and those that lead to the end. Between these two, the sizes of the records tell where each record
begins. The sizes are trusted if following them leads exactly to the next valid row.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from crc32c import crc32c

from headrace.log.catalogue.catalogue import (
    BACKUP_NAME,
    FILE_NAME,
    Catalogue,
    DamagedCatalogueError,
)
from headrace.log.catalogue.pages import Pages, row_key
from headrace.log.catalogue.rows import (
    RENAMED_FORMAT,
    BatchRow,
    CursorRow,
    DirectoryMeta,
    MetaRow,
    NoteRow,
    ProducerRow,
    R,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    present,
)
from headrace.log.commit.journal import StagedFiles
from headrace.log.disk import Disk, load, read_patiently
from headrace.log.layout import Layout, SegmentFile
from headrace.log.read.index import (
    HEADER_BYTES,
    ROW_BYTES,
    RUN_BYTES_MAX,
    RUN_RECORDS_MAX,
    Header,
    Row,
    decode_header,
    decode_rows,
    encode_header,
    encode_row,
    is_old_header,
    name_in_header,
    row_position,
)
from headrace.log.records import walk
from headrace.log.recovery.reserved_names import check_unreserved, is_reserved, log_renamed
from headrace.model import RECORD_HEADER_BYTES, Durability
from headrace.printing import quoted

_BLOCK_BYTES = 4096

Read = Callable[[int, int], bytes]
"""Function that reads a number of bytes of the segment from an offset on; fewer at the segment's end."""


def distrust_first_block(rows: Sequence[Row | None]) -> list[Row | None]:
    """Return the rows, with None for those in the header's block, which belongs to another segment."""
    shared = (_BLOCK_BYTES - HEADER_BYTES) // ROW_BYTES + 1
    return [*[None] * min(shared, len(rows)), *rows[shared:]]


def restore_rows(rows: Sequence[Row | None], segment: SegmentRow, read: Read) -> list[Row | None]:
    """Return the rows of a whole index; None for each row that cannot be restored."""
    first = _lead_on(rows, segment)
    last = _lead_back(rows, segment, first)
    gap = _gap(rows, segment, first, last)
    if first == last and (gap.base, gap.first_ordinal) == (gap.end, gap.end_ordinal):
        return list(rows)
    # A misplaced row may fit on one side. If the records do not fit, its neighbours are not trusted either.
    for before, after in ((first, last), (max(0, first - 1), min(len(rows), last + 1))):
        made = _rows_of(_gap(rows, segment, before, after), read)
        if made is not None:
            return [*rows[:before], *made, *rows[after:]]
    # The segment is damaged there too: only the rows that are valid by themselves remain.
    return [
        *rows[:first],
        *(_if_inside(row, gap) for row in rows[first:last]),
        *rows[last:],
    ]


def _gap(rows: Sequence[Row | None], segment: SegmentRow, first: int, last: int) -> SegmentRow:
    """Describe the records between two rows, as if they were a segment."""
    before = rows[first - 1] if first else None
    after = rows[last] if last < len(rows) else None
    return SegmentRow(
        segment.topic_id,
        before.end if before else segment.base,
        after.offset if after else segment.end,
        last - first,
        before.ordinal + before.record_count if before else segment.first_ordinal,
        after.ordinal if after else segment.end_ordinal,
        before.ms if before else segment.first_ms,
        # The time is never too early: a reader that asks for a time gets some extra records, and misses none.
        after.ms if after else segment.last_ms,
    )


def _if_inside(row: Row | None, gap: SegmentRow) -> Row | None:
    return row if row is not None and gap.base <= row.offset < row.end <= gap.end else None


def _lead_on(rows: Sequence[Row | None], segment: SegmentRow) -> int:
    """Return the number of the first row that does not continue from the beginning."""
    offset, ordinal = segment.base, segment.first_ordinal
    for number, row in enumerate(rows):
        if row is None or (row.offset, row.ordinal) != (offset, ordinal) or row.end > segment.end:
            return number
        offset, ordinal = row.end, row.ordinal + row.record_count
    return len(rows)


def _lead_back(rows: Sequence[Row | None], segment: SegmentRow, first: int) -> int:
    """Return the number of the first row from which rows lead to the end, at least `first`."""
    offset, ordinal = segment.end, segment.end_ordinal
    for number in range(len(rows), first, -1):
        row = rows[number - 1]
        if row is None or (row.end, row.ordinal + row.record_count) != (offset, ordinal):
            return number
        offset, ordinal = row.offset, row.ordinal
    return first


def _rows_of(gap: SegmentRow, read: Read) -> list[Row | None] | None:
    """Build the missing rows from the records in the gap; return None if the records do not fit."""
    rows: list[Row | None] = []
    offset, ordinal = gap.base, gap.first_ordinal
    for left in range(gap.rows, 0, -1):
        # Each further row needs at least one record.
        count_max = min(RUN_RECORDS_MAX, gap.end_ordinal - ordinal - (left - 1))
        block = read(offset, min(gap.end - offset, RUN_BYTES_MAX))
        length, count = walk(block, count_max)
        if not count:
            return None
        rows.append(Row(offset, length, ordinal, count, gap.last_ms, crc32c(block[:length])))
        offset += length
        ordinal += count
    return rows if rows and (offset, ordinal) == (gap.end, gap.end_ordinal) else None


_NEW_NAME = "catalogue.rebuilt.sqlite"


def repair_segments(layout: Layout, disk: Disk, catalogue: Catalogue) -> list[str]:
    """Make files and catalogue consistent; return reports for an operator."""
    reports: list[str] = []
    sizes = {file.path: file.size for suffix in (".log", ".idx") for file in layout.files(suffix)}
    repaired: list[SegmentRow] = []
    for segment in catalogue.all_segments():
        path = layout.segment(segment.topic_id, segment.base)
        size = sizes.pop(path, None)
        if size is None or size < segment.end - segment.base:
            lost = segment.end - segment.base - (size or 0)
            reports.append(f"segment {path.name}: damage: its last {lost} bytes are lost")
            if size is None:
                disk.close(disk.open(path, create=True))
        index = path.with_suffix(".idx")
        index_size = sizes.pop(index, None)
        if index_size is None or index_size < row_position(segment.rows):
            row = catalogue.topic_by_id(segment.topic_id)
            if row is not None:
                fixed = _rebuild_index(layout, disk, row, segment)
                repaired.append(fixed.segment)
                reports.append(
                    f"index {index.name}: damage: it was incomplete and is rebuilt, "
                    f"{fixed.lost} records could not be found again"
                )
    # A file that the catalogue does not name was deleted, or is unfinished and still in the journal.
    for orphan in sizes:
        disk.unlink(orphan)
    with catalogue.transaction():
        catalogue.put(repaired)
    return reports


class _Fixed(NamedTuple):
    segment: SegmentRow
    lost: int


def _rebuild_index(layout: Layout, disk: Disk, topic: TopicRow, segment: SegmentRow) -> _Fixed:
    """Write a new index: keep the first rows while they are valid, make the others from the records."""
    path = layout.index(segment.topic_id, segment.base)
    rows: list[Row] = []
    if path.exists():
        for row in decode_rows(bytes(load(path).data)[HEADER_BYTES:]):
            if row is None or row.offset != (rows[-1].end if rows else segment.base):
                break
            rows.append(row)
    rows += _rows_from_records(layout, segment, rows[-1] if rows else None)
    header = Header(topic.id, topic.epoch, segment.base, segment.first_ordinal, topic.name.decode())
    made = path.with_suffix(".new")
    fd = disk.open(made, create=True)
    try:
        disk.cut(fd, 0)
        disk.write(fd, [encode_header(header), *map(encode_row, rows)], 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(made, path)
    disk.sync_directory(path.parent)
    found = rows[-1].ordinal + rows[-1].record_count if rows else segment.first_ordinal
    return _Fixed(segment._replace(rows=len(rows)), segment.end_ordinal - found)


def _rows_from_records(layout: Layout, segment: SegmentRow, last: Row | None) -> list[Row]:
    """Return rows for the records after `last`.

    The sizes of records are trusted if following them leads to exactly the segment's end and number of
    records. Otherwise some of the bytes are damaged, and runs that could be zeros are not taken for records.
    """
    offset = last.end if last else segment.base
    ordinal = last.ordinal + last.record_count if last else segment.first_ordinal
    # The time is never too early: a reader that asks for a time gets some extra records, and misses none.
    ms = segment.last_ms
    rows: list[Row] = []
    with layout.segment(segment.topic_id, segment.base).open("rb") as file:
        while offset < segment.end and ordinal < segment.end_ordinal:
            wanted = min(segment.end - offset, RUN_BYTES_MAX)
            block, _ = read_patiently(file.fileno(), wanted, offset - segment.base)
            length, count = walk(block, min(RUN_RECORDS_MAX, segment.end_ordinal - ordinal))
            if not count:
                break
            rows.append(Row(offset, length, ordinal, count, ms, crc32c(block[:length])))
            offset += length
            ordinal += count
    if (offset, ordinal) != (segment.end, segment.end_ordinal):
        while rows and rows[-1].length == rows[-1].record_count * RECORD_HEADER_BYTES:
            rows.pop()
    return rows


def rebuild_catalogue(layout: Layout, disk: Disk, reports: list[str]) -> Catalogue:
    """Build a new catalogue from index files, from the readable rows of the old one, and from its backup.

    The new catalogue says that topics must jump ahead: the real ends of topics are unknown, and names that
    are not found again may have been used. The whole journal, as far back as it goes, is applied to it.
    """
    found = _Found(layout)
    old = _Salvage(layout, renamed=found.renamed)
    topics = [
        row for topic_id in {*found.segments, *old.topics} if (row := _topic(topic_id, found, old))
    ]
    ordinary = found.ordinary | old.ordinary
    if not old.renamed:
        # The other topics have their present names already.
        renamed = {row.id: row.name for row in topics if row.id not in ordinary}
        named = {row.id: row.name for row in topics if row.id in ordinary}
        check_unreserved(layout, named, 0, old.meta.generation)
        log_renamed(sum(map(is_reserved, renamed.values())))
    topics = [row for row in topics if row.id not in ordinary]
    kept: dict[bytes, TopicRow] = {}
    for row in sorted(topics):
        # If a name has two lives, the earlier one was destroyed, and its files were not deleted in time.
        kept[row.name] = row
    ids = {row.id for row in kept.values()}
    segments = [row for topic_id in ids for row in found.segments.get(topic_id, ())]
    _set_aside_segments(layout, {(row.topic_id, row.base) for row in segments}, reports)
    ends = [(row.end_offset, row.end_ordinal, row.epoch) for row in kept.values()]
    ends += [(row.end_offset, row.end_ordinal, row.epoch) for row in old.tombstones]
    ends += [(old.meta.floor_offset, old.meta.floor_ordinal, old.meta.floor_epoch)]
    floor_offset, floor_ordinal, floor_epoch = map(max, zip(*ends, strict=True))
    for suffix in ("", "-wal", "-shm"):
        disk.unlink(layout.root / f"{_NEW_NAME}{suffix}")
    catalogue = Catalogue.create(layout.root, name=_NEW_NAME)
    with catalogue.transaction():
        catalogue.put(kept.values())
        catalogue.put(segments)
        catalogue.put(old.cursors.values())
        catalogue.put(old.producers.values())
        catalogue.put(old.batches.values())
        catalogue.put(old.notes.values())
        catalogue.put_meta(
            DirectoryMeta(
                next_topic_id=max(
                    [old.meta.next_topic_id, *(number + 1 for number in found.ids | ids)]
                ),
                floor_offset=floor_offset,
                floor_ordinal=floor_ordinal,
                floor_epoch=floor_epoch,
                clean=False,
                jump_due=True,
                rebuilt_from=max(old.meta.applied, old.meta.rebuilt_from),
                generation=old.meta.generation,
            )
        )
    catalogue.close()
    _set_aside(layout.root / FILE_NAME)
    disk.rename(layout.root / _NEW_NAME, layout.root / FILE_NAME)
    disk.sync_directory(layout.root)
    reports.append(
        f"{len(kept)} topics were found again; cursors, producers, batches and notes are {old.origin}"
    )
    reports += [
        f"batch {row.number} of producer {quoted(row.producer.decode())} goes on from where the backup says: "
        "some of its records may be appended twice"
        for row in old.stale_batches
    ]
    return Catalogue.open(layout.root)


class _Salvage:
    """Valid rows of the damaged catalogue, and rows of its backup that the damaged catalogue lacks."""

    def __init__(self, layout: Layout, *, renamed: bool) -> None:
        self.renamed = renamed
        """True if the directory holds files from after the renaming of reserved topics."""
        self.ordinary: set[int] = set()
        """Topics to which an earlier version gave a now reserved name: since destroyed, or a conflict."""
        self.meta = DirectoryMeta()
        self.topics: dict[int, TopicRow] = {}
        """Topics of the damaged catalogue, by number."""
        self.backed_up: dict[int, TopicRow] = {}
        self.tombstones: list[TombstoneRow] = []
        self.cursors: dict[tuple[bytes, bytes], CursorRow] = {}
        self.producers: dict[tuple[bytes, bytes], ProducerRow] = {}
        self.notes: dict[bytes, NoteRow] = {}
        self.batches: dict[tuple[bytes, int], BatchRow] = {}
        self.stale_batches: list[BatchRow] = []
        """Batches that only the backup has, and that were not completely appended when it was made."""
        origins = []
        files = ((FILE_NAME, "the damaged file"), (BACKUP_NAME, "the backup"))
        formats = [_format(layout, name) for name, _ in files]
        self.renamed |= any(format_ >= RENAMED_FORMAT for format_ in formats if format_)
        for (name, origin), format_ in reversed(list(zip(files, formats, strict=True))):
            if not (layout.root / name).exists():
                continue
            # If a file does not tell its format, the other file does: the backup is replaced before new
            # topics are made.
            is_old = (format_ or max(filter(None, formats), default=0)) < RENAMED_FORMAT
            is_old &= format_ is not None or not self.renamed
            with _Old(layout.root, name, is_old=is_old) as old:
                rows = {row.id: row for row in old.rows(TopicRow)}
                self.ordinary |= old.ordinary
                if name == BACKUP_NAME:
                    self.backed_up = rows
                else:
                    self.topics = rows
                self.tombstones += old.rows(TombstoneRow)
                self.cursors |= {(row.name, row.reader): row for row in old.rows(CursorRow)}
                self.producers |= {(row.name, row.producer): row for row in old.rows(ProducerRow)}
                self.notes |= {row.key: row for row in old.rows(NoteRow)}
                batches = {(row.producer, row.number): row for row in old.rows(BatchRow)}
                self._take_batches(layout, batches, backup=name == BACKUP_NAME)
                self._take_meta(old.rows(MetaRow))
                if old.has_rows:
                    origins.append(origin)
        self.origin = "from " + " and ".join(origins) if origins else "lost"

    def _take_batches(
        self, layout: Layout, found: dict[tuple[bytes, int], BatchRow], *, backup: bool
    ) -> None:
        if backup:
            # A batch without staged files was appended since the backup was made.
            self.batches = {key: row for key, row in found.items() if _is_staged(layout, row)}
            self.stale_batches = [row for row in self.batches.values() if row.file < row.files]
            return
        self.batches |= found
        self.stale_batches = [
            row for row in self.stale_batches if (row.producer, row.number) not in found
        ]

    def _take_meta(self, rows: list[MetaRow]) -> None:
        with suppress(msgspec.MsgspecError):
            for row in rows:
                self.meta = msgspec.msgpack.decode(row.value, type=DirectoryMeta)

    def destroyed(self, name: bytes, epoch: int) -> bool:
        return any(row.name == name and row.epoch >= epoch for row in self.tombstones)


def _format(layout: Layout, name: str) -> int | None:
    """Return the format of a catalogue that may be damaged; None if the format is not known."""
    if not (layout.root / name).exists():
        return None
    with suppress(msgspec.MsgspecError), _Old(layout.root, name, is_old=False) as old:
        for row in old.rows(MetaRow):
            return msgspec.msgpack.decode(row.value, type=DirectoryMeta).format
    return None


class _Old:
    """A catalogue that may be damaged anywhere: read by SQLite, and page by page if that fails."""

    def __init__(self, root: Path, name: str, *, is_old: bool) -> None:
        self.has_rows = False
        self.ordinary: set[int] = set()
        self._is_old = is_old
        self._path = root / name
        self._pages: Pages | None = None
        self._catalogue: Catalogue | None = None
        with suppress(DamagedCatalogueError):
            self._catalogue = Catalogue.open(root, name=name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._catalogue is not None:
            self._catalogue.close()

    def rows(self, kind: type[R]) -> list[R]:
        """Return the rows of a kind with a correct checksum."""
        found: list[R] = []
        whole = False
        if self._catalogue is not None:
            found, whole = self._catalogue.salvage_all(kind)
        if not whole:
            if self._pages is None:
                self._pages = Pages(self._path)
            known = {row_key(row) for row in found}
            found += [row for row in self._pages.rows(kind) if row_key(row) not in known]
        self.has_rows |= bool(found)
        if self._is_old:
            if kind is TopicRow:
                self.ordinary |= {row[0] for row in found if is_reserved(row[1])}
            found = [present(row) for row in found]
        return found


def _is_staged(layout: Layout, row: BatchRow) -> bool:
    files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
    return any(layout.staged_file(file.id.hex()).exists() for file in files)


class _Found:
    """The contents of the index files."""

    def __init__(self, layout: Layout) -> None:
        self.segments: dict[int, list[SegmentRow]] = defaultdict(list)
        self.headers: dict[int, Header] = {}
        self.ids: set[int] = set()
        self.renamed = False
        """True if an index file was written after reserved topics were renamed."""
        self.ordinary: set[int] = set()
        """Topics to which an earlier version gave a name that is reserved now."""
        for file in layout.files(".idx"):
            self.ids.add(file.topic_id)
            data = bytes(load(file.path).data)
            header, segment = _read_index(file, data)
            self._look_at_name(file, header, data)
            known = self.headers.get(file.topic_id)
            if header is not None and (known is None or known.base < header.base):
                self.headers[file.topic_id] = header
            if segment is not None:
                self.segments[file.topic_id].append(segment)
        for rows in self.segments.values():
            rows.sort()

    def _look_at_name(self, file: SegmentFile, header: Header | None, data: bytes) -> None:
        if header is None:
            return
        if not is_old_header(data):
            self.renamed = True
        elif is_reserved(name_in_header(data)):
            self.ordinary.add(file.topic_id)


def _topic(topic_id: int, found: _Found, old: _Salvage) -> TopicRow | None:
    """Return the row of a topic, or None if its name is lost or the topic was destroyed."""
    segments = found.segments.get(topic_id, [])
    salvaged = old.topics.get(topic_id)
    header = found.headers.get(topic_id)
    if salvaged is None and segments:
        salvaged = old.backed_up.get(topic_id)
    if salvaged is None:
        if header is None or not segments or old.destroyed(header.name.encode(), header.epoch):
            return None
        salvaged = TopicRow(
            topic_id,
            header.name.encode(),
            header.epoch,
            Durability.SYNCED.value.encode(),
            segments[0].base,
            segments[0].first_ordinal,
            segments[0].base,
            segments[0].first_ordinal,
            segments[0].first_ms,
        )
    if not segments:
        return salvaged
    first, last = segments[0], segments[-1]
    start = max((salvaged.start_offset, salvaged.start_ordinal), (first.base, first.first_ordinal))
    end = max((salvaged.end_offset, salvaged.end_ordinal), (last.end, last.end_ordinal))
    return salvaged._replace(
        epoch=max(salvaged.epoch, header.epoch if header is not None else 0),
        start_offset=start[0],
        start_ordinal=start[1],
        end_offset=end[0],
        end_ordinal=end[1],
        last_ms=max(salvaged.last_ms, last.last_ms),
    )


def _set_aside(path: Path) -> None:
    stamp = int(time.time() * 1000)
    for suffix in ("-wal", "-shm", ""):
        old = path.with_name(path.name + suffix)
        if old.exists():
            os.replace(old, path.with_name(f"damaged-{stamp}-{old.name}"))


def _set_aside_segments(layout: Layout, known: set[tuple[int, int]], reports: list[str]) -> None:
    """Move unknown files to the quarantine: they may hold records that are not in the journal."""
    for suffix in (".log", ".idx"):
        for file in layout.files(suffix):
            if (file.topic_id, file.base) not in known and file.size:
                layout.quarantine.mkdir(exist_ok=True)
                os.replace(file.path, layout.quarantine / file.path.name)
                reports.append(f"{file.path.name} has lost its place: kept in quarantine")


def _read_index(file: SegmentFile, data: bytes) -> tuple[Header | None, SegmentRow | None]:
    header = decode_header(data)
    rows = list(decode_rows(data[HEADER_BYTES:]))
    # The last rows may have been written before their records when the machine stopped.
    while rows and not _row_holds(file.path.with_suffix(".log"), file.base, rows[-1]):
        rows.pop()
    good = [row for row in rows if row is not None]
    if not good:
        return header, None
    first, last = good[0], good[-1]
    first_ordinal = header.first_ordinal if header else first.ordinal
    return header, SegmentRow(
        file.topic_id,
        file.base,
        last.end,
        len(rows),
        first_ordinal,
        last.ordinal + last.record_count,
        first.ms,
        last.ms,
    )


def _row_holds(path: Path, base: int, row: Row | None) -> bool:
    if row is None or not path.exists():
        return False
    with path.open("rb") as file:
        data, _ = read_patiently(file.fileno(), row.length, row.offset - base)
        return crc32c(data) == row.crc
