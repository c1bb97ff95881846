"""Repairs of what a disk or a person spoiled: index files, missing segments, the whole catalogue.

Runs before the server serves. Says in words what was repaired and what is lost.
"""

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from crc32c import crc32c

from headrace.log.catalogue import BACKUP_NAME, FILE_NAME, Catalogue, DamagedCatalogueError
from headrace.log.catalogue_pages import Pages, row_key
from headrace.log.catalogue_rows import (
    RENAMED_FORMAT,
    BatchRow,
    CursorRow,
    Meta,
    MetaRow,
    NoteRow,
    ProducerRow,
    R,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    present,
)
from headrace.log.disk import Disk
from headrace.log.entries import StagedFiles
from headrace.log.file_reads import load, read_patiently
from headrace.log.index import (
    HEADER_BYTES,
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
from headrace.log.layout import Layout, SegmentFile
from headrace.log.records import walk
from headrace.log.reserved_names import check_unreserved, is_reserved, log_renamed
from headrace.model import RECORD_HEADER_BYTES, Durability
from headrace.printing import quoted

_NEW_NAME = "catalogue.rebuilt.sqlite"


def repair_segments(layout: Layout, disk: Disk, catalogue: Catalogue) -> list[str]:
    """Bring files and catalogue into step; returns what an operator should know."""
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
    # What the catalogue does not name was deleted, or never finished and is still in the journal.
    for orphan in sizes:
        disk.unlink(orphan)
    with catalogue.transaction():
        catalogue.put(repaired)
    return reports


class _Fixed(NamedTuple):
    segment: SegmentRow
    lost: int


def _rebuild_index(layout: Layout, disk: Disk, topic: TopicRow, segment: SegmentRow) -> _Fixed:
    """Write the index anew: its first rows as far as they hold, the rest from the records themselves."""
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
    """Rows for the records behind `last`.

    Sizes are believed when following them leads to exactly the segment's end and number of records. When
    it does not, something among them is damaged, and nothing that could be zeros is taken for records.
    """
    offset = last.end if last else segment.base
    ordinal = last.ordinal + last.record_count if last else segment.first_ordinal
    # No earlier than they were: who asks for a time gets a few records more, and misses none.
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
    """A new catalogue from index files, from what can be read of the old one, and from its backup.

    Says that topics must jump ahead: where they really ended nobody knows, and names that are not found
    again may have been used. The journal is applied to it from as far back as it goes.
    """
    found = _Found(layout)
    old = _Salvage(layout, renamed=found.renamed)
    topics = [
        row for topic_id in {*found.segments, *old.topics} if (row := _topic(topic_id, found, old))
    ]
    ordinary = found.ordinary | old.ordinary
    if not old.renamed:
        # Names of all others are the present ones already.
        renamed = {row.id: row.name for row in topics if row.id not in ordinary}
        named = {row.id: row.name for row in topics if row.id in ordinary}
        check_unreserved(layout, named, 0, old.meta.generation)
        log_renamed(sum(map(is_reserved, renamed.values())))
    topics = [row for row in topics if row.id not in ordinary]
    kept: dict[bytes, TopicRow] = {}
    for row in sorted(topics):
        # Of two lives of a name the earlier was destroyed, and its files were not deleted any more.
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
            Meta(
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
    """Rows that still hold: from the damaged catalogue, and what it does not have from its backup."""

    def __init__(self, layout: Layout, *, renamed: bool) -> None:
        self.renamed = renamed
        """True if the directory holds something that was written after reserved topics were renamed."""
        self.ordinary: set[int] = set()
        """Topics that an earlier version gave a name that is reserved now: destroyed since, or in the way."""
        self.meta = Meta()
        self.topics: dict[int, TopicRow] = {}
        """Of the damaged catalogue."""
        self.backed_up: dict[int, TopicRow] = {}
        self.tombstones: list[TombstoneRow] = []
        self.cursors: dict[tuple[bytes, bytes], CursorRow] = {}
        self.producers: dict[tuple[bytes, bytes], ProducerRow] = {}
        self.notes: dict[bytes, NoteRow] = {}
        self.batches: dict[tuple[bytes, int], BatchRow] = {}
        self.stale_batches: list[BatchRow] = []
        """Those that only the backup knows, and that were not appended to their end when it was made."""
        origins = []
        files = ((FILE_NAME, "the damaged file"), (BACKUP_NAME, "the backup"))
        formats = [_format(layout, name) for name, _ in files]
        self.renamed |= any(format_ >= RENAMED_FORMAT for format_ in formats if format_)
        for (name, origin), format_ in reversed(list(zip(files, formats, strict=True))):
            if not (layout.root / name).exists():
                continue
            # Where nothing says it, the other one does: the backup is replaced before new topics are made.
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
            # One whose staged files are gone was appended since.
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
                self.meta = msgspec.msgpack.decode(row.value, type=Meta)

    def destroyed(self, name: bytes, epoch: int) -> bool:
        return any(row.name == name and row.epoch >= epoch for row in self.tombstones)


def _format(layout: Layout, name: str) -> int | None:
    """Return the format of a catalogue that may be damaged; None where nothing says it."""
    if not (layout.root / name).exists():
        return None
    with suppress(msgspec.MsgspecError), _Old(layout.root, name, is_old=False) as old:
        for row in old.rows(MetaRow):
            return msgspec.msgpack.decode(row.value, type=Meta).format
    return None


class _Old:
    """A catalogue that may be damaged anywhere: read by SQLite, and page by page where that fails."""

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
        """The rows of a kind whose checksum holds."""
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
    """What the index files say."""

    def __init__(self, layout: Layout) -> None:
        self.segments: dict[int, list[SegmentRow]] = defaultdict(list)
        self.headers: dict[int, Header] = {}
        self.ids: set[int] = set()
        self.renamed = False
        """True if one of them was written after reserved topics were renamed."""
        self.ordinary: set[int] = set()
        """Topics that an earlier version gave a name which is reserved now."""
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
    """The row of a topic, or None when it has no name any more, or no life."""
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
    """Keep files that nothing vouches for: what the journal does not hold, someone may want to see."""
    for suffix in (".log", ".idx"):
        for file in layout.files(suffix):
            if (file.topic_id, file.base) not in known and file.size:
                layout.quarantine.mkdir(exist_ok=True)
                os.replace(file.path, layout.quarantine / file.path.name)
                reports.append(f"{file.path.name} has lost its place: kept in quarantine")


def _read_index(file: SegmentFile, data: bytes) -> tuple[Header | None, SegmentRow | None]:
    header = decode_header(data)
    rows = list(decode_rows(data[HEADER_BYTES:]))
    # The last rows may be ahead of their records when the machine stopped in between.
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
