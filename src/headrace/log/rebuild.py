"""Repairs of what a disk or a person spoiled: index files, missing segments, the whole catalogue.

Runs before the server serves. Says in words what was repaired and what is lost.
"""

import os
import time
from collections import defaultdict
from pathlib import Path

from crc32c import crc32c

from headrace.log.catalogue import (
    BACKUP_NAME,
    FILE_NAME,
    Catalogue,
    CursorRow,
    DamagedCatalogueError,
    Meta,
    MetaRow,
    ProducerRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
)
from headrace.log.disk import Disk
from headrace.log.index import (
    HEADER_BYTES,
    RUN_RECORDS_MAX,
    Header,
    Row,
    decode_header,
    decode_rows,
    encode_header,
    encode_row,
    row_position,
)
from headrace.log.layout import Layout, SegmentFile
from headrace.log.records import walk
from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES, Durability

_JUMP = 1 << 32


def repair_segments(layout: Layout, disk: Disk, catalogue: Catalogue) -> list[str]:
    """Bring files and catalogue into step; returns what an operator should know."""
    reports: list[str] = []
    sizes = {
        file.path: file.size
        for suffix in (".log", ".idx")
        for file in layout.files(suffix)
    }
    repaired: list[SegmentRow] = []
    for segment in catalogue.all_segments():
        path = layout.segment(segment.topic_id, segment.base)
        size = sizes.pop(path, None)
        if size is None or size < segment.end - segment.base:
            lost = segment.end - segment.base - (size or 0)
            reports.append(f"segment {path.name} lost its last {lost} bytes")
            if size is None:
                disk.close(disk.open(path, create=True))
        index = path.with_suffix(".idx")
        index_size = sizes.pop(index, None)
        if index_size is None or index_size < row_position(segment.rows):
            row = catalogue.topic_by_id(segment.topic_id)
            if row is not None:
                repaired.append(_rebuild_index(layout, disk, row, segment))
                reports.append(f"index {index.name} was incomplete and is rebuilt")
    # What the catalogue does not name was deleted, or never finished and is still in the journal.
    for orphan in sizes:
        disk.unlink(orphan)
    with catalogue.transaction():
        catalogue.put(repaired)
    return reports


def _rebuild_index(layout: Layout, disk: Disk, topic: TopicRow, segment: SegmentRow) -> SegmentRow:
    """Write the index anew: its first rows as far as they hold, the rest from the records themselves."""
    path = layout.index(segment.topic_id, segment.base)
    rows: list[Row] = []
    if path.exists():
        for row in decode_rows(path.read_bytes()[HEADER_BYTES:]):
            if row is None or (rows and row.offset < rows[-1].end):
                break
            rows.append(row)
    rows += _rows_from_records(layout, segment, rows[-1] if rows else None)
    header = Header(topic.id, topic.epoch, segment.base, segment.first_ordinal, topic.name.decode())
    made = path.with_suffix(".new")
    fd = disk.open(made, create=True)
    disk.cut(fd, 0)
    disk.write(fd, [encode_header(header), *map(encode_row, rows)], 0)
    disk.sync(fd)
    disk.close(fd)
    disk.rename(made, path)
    disk.sync_directory(path.parent)
    return segment._replace(rows=len(rows))


def _rows_from_records(layout: Layout, segment: SegmentRow, last: Row | None) -> list[Row]:
    """Rows for the records behind `last`: sizes are believed, since nothing else is left to check them."""
    offset = last.end if last else segment.base
    ordinal = last.ordinal + last.record_count if last else segment.first_ordinal
    ms = last.ms if last else segment.first_ms
    rows: list[Row] = []
    with layout.segment(segment.topic_id, segment.base).open("rb") as file:
        while offset < segment.end:
            file.seek(offset - segment.base)
            room = min(segment.end - offset, 4 * (PAYLOAD_BYTES_MAX + RECORD_HEADER_BYTES))
            block = file.read(room)
            length, count = walk(block, RUN_RECORDS_MAX)
            if not count or not any(block[:length]):
                break
            rows.append(Row(offset, length, ordinal, count, ms, crc32c(block[:length])))
            offset += length
            ordinal += count
    return rows


def rebuild_catalogue(layout: Layout, disk: Disk) -> tuple[Catalogue, list[str]]:
    """A new catalogue from index files, from what can be read of the old one, and from its backup."""
    salvage = _Salvage(layout)
    _set_aside(layout.root / FILE_NAME)
    now_ms = int(time.time() * 1000)
    segments: dict[int, list[SegmentRow]] = defaultdict(list)
    names: dict[int, Header] = {}
    losses: list[str] = []
    for file in layout.files(".idx"):
        header, segment = _read_index(file)
        if header is not None:
            names[file.topic_id] = header
        if segment is not None:
            segments[file.topic_id].append(segment)
    topics: list[TopicRow] = []
    for topic_id in {*segments, *salvage.topics}:
        found = sorted(segments.get(topic_id, []), key=lambda segment: segment.base)
        row = _topic_row(salvage.topics.get(topic_id), names.get(topic_id), found)
        if row is None:
            losses.append(f"topic number {topic_id} has lost its name: its segments are set aside")
            _set_aside_segments(layout, topic_id)
            segments.pop(topic_id, None)
        else:
            topics.append(row)
    catalogue = Catalogue.create(layout.root)
    floor_offset = max([row.end_offset for row in topics], default=0) + _JUMP
    floor_ordinal = max([row.end_ordinal for row in topics], default=0) + _JUMP
    with catalogue.transaction():
        catalogue.put(topics)
        for of_topic in segments.values():
            catalogue.put(of_topic)
        catalogue.put(salvage.tombstones)
        catalogue.put(salvage.cursors)
        catalogue.put(salvage.producers)
        catalogue.put_meta(
            Meta(
                applied=0,
                next_topic_id=max([row.id for row in topics], default=0) + 1,
                floor_offset=floor_offset,
                floor_ordinal=floor_ordinal,
                floor_epoch=now_ms,
                clean=False,
            )
        )
    losses.append(
        f"{len(topics)} topics were found again; {salvage.origin}; "
        f"names not found start at offset {floor_offset}"
    )
    return catalogue, losses


class _Salvage:
    """Rows that still hold, from the damaged catalogue where it can be read, else from its backup."""

    def __init__(self, layout: Layout) -> None:
        self.topics: dict[int, TopicRow] = {}
        self.tombstones: list[TombstoneRow] = []
        self.cursors: list[CursorRow] = []
        self.producers: list[ProducerRow] = []
        self.origin = "cursors, producers and tombstones are lost"
        for name, origin in ((FILE_NAME, "the damaged file"), (BACKUP_NAME, "the backup")):
            try:
                old = Catalogue.open(layout.root, name=name)
            except DamagedCatalogueError:
                continue
            try:
                if not old.salvage(MetaRow) and name == FILE_NAME:
                    continue
                self.topics = {row.id: row for row in old.salvage(TopicRow)} | self.topics
                self.tombstones = self.tombstones or old.salvage(TombstoneRow)
                self.cursors = self.cursors or old.salvage(CursorRow)
                self.producers = self.producers or old.salvage(ProducerRow)
                self.origin = f"cursors, producers and tombstones are from {origin}"
                if self.cursors or self.producers:
                    return
            finally:
                old.close()


def _set_aside(path: Path) -> None:
    stamp = int(time.time() * 1000)
    for suffix in ("", "-wal", "-shm"):
        old = path.with_name(path.name + suffix)
        if old.exists():
            os.replace(old, path.with_name(f"damaged-{stamp}-{old.name}"))


def _set_aside_segments(layout: Layout, topic_id: int) -> None:
    layout.quarantine.mkdir(exist_ok=True)
    for suffix in (".log", ".idx"):
        for file in layout.files(suffix):
            if file.topic_id == topic_id:
                os.replace(file.path, layout.quarantine / file.path.name)


def _read_index(file: SegmentFile) -> tuple[Header | None, SegmentRow | None]:
    data = file.path.read_bytes()
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
        file.seek(row.offset - base)
        return crc32c(file.read(row.length)) == row.crc


def _topic_row(
    salvaged: TopicRow | None, header: Header | None, segments: list[SegmentRow]
) -> TopicRow | None:
    if salvaged is None and header is None:
        return None
    if not segments:
        return salvaged
    first, last = segments[0], segments[-1]
    if salvaged is None:
        assert header is not None
        return TopicRow(
            header.topic_id,
            header.name.encode(),
            header.epoch,
            Durability.SYNCED.value.encode(),
            first.base,
            first.first_ordinal,
            last.end,
            last.end_ordinal,
            last.last_ms,
        )
    ends = max((salvaged.end_offset, salvaged.end_ordinal), (last.end, last.end_ordinal))
    starts = max(
        (salvaged.start_offset, salvaged.start_ordinal), (first.base, first.first_ordinal)
    )
    return salvaged._replace(
        start_offset=starts[0],
        start_ordinal=starts[1],
        end_offset=ends[0],
        end_ordinal=ends[1],
    )

