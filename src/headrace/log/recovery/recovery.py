"""Recovery: a server checks and repairs its data directory, and replays the journal, before it serves.

The applier's own function does the replay. Recovery takes time proportional to the unapplied journal and to
the number of segments, never to their size; segments that lost their index are the exception.
"""

import gc
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config.settings import TopicRule
from headrace.errors import DataDirectoryError
from headrace.log.apply.applier import Applier
from headrace.log.batch.staging import remove_unfinished
from headrace.log.catalogue.catalogue import (
    BACKUP_NAME,
    DATABASE_ERRORS,
    Catalogue,
    open_unchanged,
)
from headrace.log.catalogue.rows import RENAMED_FORMAT, SegmentRow, TopicRow
from headrace.log.commit import journal
from headrace.log.commit.journal import LOST, Entry
from headrace.log.disk import Disk, load, read_patiently
from headrace.log.layout import Layout
from headrace.log.read.index import (
    HEADER_BYTES,
    Header,
    Row,
    decode_rows,
    encode_header,
    encode_row,
    row_position,
    rows_of_records,
)
from headrace.log.recovery.frames import quarantine, read_header
from headrace.log.recovery.rebuild import open_catalogue, rebuild_catalogue
from headrace.log.recovery.scan import JournalScan
from headrace.model import JUMP, RECORD_HEADER_BYTES, Durability


class Recovered(NamedTuple):
    next_sequence: int
    """Number of the next commit, greater than any number in the journal."""
    generation: int
    """Generation of the journal files that the server will write."""
    reports: list[str]
    """Descriptions of the damage, for an operator."""
    notes: list[str]
    """Descriptions of other changes since the last server, such as a restore."""
    replayed_records: int
    """Records in the part of the journal that was replayed."""


def recover(
    layout: Layout, disk: Disk, rule: Callable[[str], TopicRule], *, boot_id: bytes
) -> Recovered:
    """Bring every acknowledged record into the segments, and make the catalogue match them."""
    reports: list[str] = []
    notes: list[str] = []
    catalogue, rebuilt = open_catalogue(layout, disk, reports)
    try:
        scan = JournalScan(layout, catalogue.meta(), boot_id, rebuilt=rebuilt)
        if scan.is_ahead and not rebuilt:
            # The catalogue was replaced by an older one: the segments are more up to date.
            reports.append("the catalogue is rebuilt: it is older than the journal")
            reports += scan.reports
            catalogue.close()
            catalogue, rebuilt = rebuild_catalogue(layout, disk, reports), True
            scan = JournalScan(layout, catalogue.meta(), boot_id, rebuilt=True)
        reports += scan.reports
        for problem in scan.damages + scan.doubtful:
            quarantine(layout, disk, layout.journal / problem.file, problem)
        if scan.lost_unknown:
            # This is recorded before anything is applied, so that an interrupted start does not forget it.
            with catalogue.transaction():
                catalogue.change_meta(jump_due=True)
        for path in scan.untrusted:
            _quarantine_journal(layout, disk, path)
        reports += _repair_segments(layout, disk, catalogue)
        applier = Applier(disk, layout, catalogue, rule)
        names = scan.names()
        replayed = _Counted()
        with _collector_paused():
            for path, last in scan.paths.items():
                reports += applier.apply(replayed.each(scan.entries(path)), last, names)
        applier.clear_batches()
        remove_unfinished(layout, disk)
        generation = secrets.randbits(63) | 1
        journal_files = _headed_files(layout, disk, generation, without=scan.spent)
        with catalogue.transaction():
            if catalogue.meta().jump_due:
                # Later entries cannot show which records of `written` topics a crash of the machine has lost.
                proven = () if scan.machine_crashed else scan.proven
                if jumps := catalogue.meta().restored_jumps:
                    # Clients may have seen more of every topic than the backup holds.
                    _jump(catalogue, "a restore", None, notes, by=jumps * JUMP)
                else:
                    _jump(catalogue, "damage", None, reports, proven=proven)
            elif scan.machine_crashed:
                _jump(catalogue, "a crash of the machine", Durability.WRITTEN, reports)
            _note_durabilities(catalogue, rule)
            meta = catalogue.change_meta(
                clean=False,
                boot_id=boot_id,
                jump_due=False,
                restored_jumps=0,
                rebuilt_from=0,
                generation=generation,
                journal_files=journal_files,
                journal_headers=True,
            )
        for path in scan.spent:
            _quarantine_journal(layout, disk, path)
        if not _backup_has_present_names(layout):
            catalogue.keep_backup(disk)
        next_sequence = max(scan.last, meta.applied) + 1
        return Recovered(next_sequence, meta.generation, reports, notes, replayed.records)
    finally:
        catalogue.close()


class _Counted:
    """Counts the records of journal entries on their way to the applier."""

    def __init__(self) -> None:
        self.records = 0

    def each(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for entry in entries:
            if entry.kind != LOST:
                self.records += entry.record_count
            yield entry


def mark_clean(layout: Layout, disk: Disk) -> None:
    """Record that everything is applied, so that the next start need not read the journal."""
    with closing(Catalogue.open(layout.root)) as catalogue:
        with catalogue.transaction():
            catalogue.change_meta(clean=True)
        catalogue.keep_backup(disk)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a journal file has hundreds of thousands of objects without cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _backup_has_present_names(layout: Layout) -> bool:
    """True if the backup is distinguishable from one of an earlier version, before new topics are made."""
    if not (layout.root / BACKUP_NAME).exists():
        return True
    try:
        with open_unchanged(layout.root, BACKUP_NAME) as backup:
            return backup.meta().format >= RENAMED_FORMAT
    except (DataDirectoryError, *DATABASE_ERRORS, msgspec.MsgspecError):
        return False


def _quarantine_journal(layout: Layout, disk: Disk, path: Path) -> None:
    """Move a journal file to the quarantine: a new file is made in its place."""
    disk.make_directory(layout.quarantine)
    disk.rename(path, layout.quarantine / f"journal-{int(time.time() * 1000)}-{path.name}")
    disk.sync_directory(layout.quarantine)
    disk.sync_directory(layout.journal)


def _headed_files(
    layout: Layout, disk: Disk, generation: int, *, without: Collection[Path]
) -> dict[str, int]:
    """Return the sizes of the journal files to use, by name, after all of them have a header.

    A file without one was prepared by an earlier version and never used.
    """
    sizes: dict[str, int] = {}
    for path in layout.journal_files():
        size = path.stat().st_size
        # A file too short for its headers will be replaced, and the catalogue names it then.
        if path not in without and size >= journal.FRAMES_POSITION:
            if read_header(path) is None:
                journal.write_unused_headers(disk, path, generation)
            sizes[path.name] = size
    return sizes


def _repair_segments(layout: Layout, disk: Disk, catalogue: Catalogue) -> list[str]:
    """Make files and catalogue consistent; return reports for an operator."""
    reports: list[str] = []
    sizes = {file.path: file.size for file in layout.files()}
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
                fixed, lost = _rebuild_index(layout, disk, row, segment)
                repaired.append(fixed)
                reports.append(
                    f"index {index.name}: damage: it was incomplete and is rebuilt, "
                    f"{lost} records could not be found again"
                )
    # A file that the catalogue does not name was deleted, or is unfinished and still in the journal.
    for orphan in sizes:
        disk.unlink(orphan)
    with catalogue.transaction():
        catalogue.put(repaired)
    return reports


def _rebuild_index(
    layout: Layout, disk: Disk, topic: TopicRow, segment: SegmentRow
) -> tuple[SegmentRow, int]:
    """Write a new index: keep the first rows while they are valid, make the others from the records.

    Return the segment's new row, and the number of records that no row holds.
    """
    path = layout.index(segment.topic_id, segment.base)
    rows: list[Row] = []
    offset, ordinal = segment.base, segment.first_ordinal
    if path.exists():
        for row in decode_rows(bytes(load(path).data)[HEADER_BYTES:]):
            if row is None or row.offset != offset:
                break
            rows.append(row)
            offset, ordinal = row.end, row.end_ordinal
    rest = segment._replace(base=offset, first_ordinal=ordinal)
    rows += _rows_from_records(layout.segment(segment.topic_id, segment.base), rest, segment.base)
    header = Header(topic.id, topic.epoch, segment.base, segment.first_ordinal, topic.name.decode())
    made = path.with_suffix(".new")
    disk.write_file(made, [encode_header(header), *map(encode_row, rows)], synced=True)
    disk.rename(made, path)
    disk.sync_directory(path.parent)
    found = rows[-1].end_ordinal if rows else segment.first_ordinal
    return segment._replace(rows=len(rows)), segment.end_ordinal - found


def _rows_from_records(path: Path, rest: SegmentRow, base: int) -> list[Row]:
    """Return rows for the rest of a segment that begins at `base`.

    The sizes of records are trusted if following them leads to exactly the segment's end and number of
    records. Otherwise some of the bytes are damaged, and runs that could be zeros are not taken for records.
    """
    with FileIO(path) as file:
        fd = file.fileno()
        found = rows_of_records(rest, lambda at, size: read_patiently(fd, size, at - base)[0])
        rows = list(found)
    if rows and (rows[-1].end, rows[-1].end_ordinal) != (rest.end, rest.end_ordinal):
        while rows and rows[-1].length == rows[-1].record_count * RECORD_HEADER_BYTES:
            rows.pop()
    return rows


def _jump(
    catalogue: Catalogue,
    why: str,
    durability: Durability | None,
    reports: list[str],
    *,
    proven: Collection[int] = (),
    by: int = JUMP,
) -> None:
    """Start a new life of topics far ahead, so that no position of a client gets to mean other bytes.

    Without a durability, the lost records are unknown: names that are unknown now may also have been used.
    `proven` topics are not affected: an entry after the damage shows where they end.
    """
    now_ms = int(time.time() * 1000)
    topics: list[TopicRow] = []
    epochs: dict[tuple[bytes, int], int] = {}
    for row in catalogue.topics():
        if row.id in proven or (durability and row.durability != durability.value.encode()):
            continue
        epoch, end, ordinal = max(row.epoch + 1, now_ms), row.end_offset + by, row.end_ordinal + by
        jumped = row._replace(epoch=epoch, end_offset=end, end_ordinal=ordinal)
        if catalogue.last_segment(row.id) is None:
            jumped = jumped._replace(start_offset=end, start_ordinal=ordinal)
        topics.append(jumped)
        epochs[row.name, row.epoch] = epoch
    catalogue.put(topics)
    # The cursors of these topics get the new epoch: their offsets still mean the same records.
    cursors = [row for row in catalogue.cursors() if (row.name, row.epoch) in epochs]
    catalogue.put([row._replace(epoch=epochs[row.name, row.epoch]) for row in cursors])
    if durability is None:
        meta = catalogue.meta()
        catalogue.put(
            [
                row._replace(end_offset=row.end_offset + by, end_ordinal=row.end_ordinal + by)
                for row in catalogue.tombstones()
            ]
        )
        floor = max([meta.floor_offset, *(row.end_offset for row in topics)]) + by
        floor_ordinal = max([meta.floor_ordinal, *(row.end_ordinal for row in topics)]) + by
        catalogue.change_meta(
            floor_offset=floor,
            floor_ordinal=floor_ordinal,
            floor_epoch=max(meta.floor_epoch, now_ms),
        )
        reports.append(f"topics with unknown names start at offset {floor} after {why}")
    if topics:
        reports.append(f"{len(topics)} topics continue with a new epoch after {why}")


def _note_durabilities(catalogue: Catalogue, rule: Callable[[str], TopicRule]) -> None:
    """Record the present durabilities in the catalogue: after a crash the configuration may be different."""
    changed = []
    for row in catalogue.topics():
        durability = rule(row.name.decode()).durability
        if durability is Durability.MEMORY:
            durability = Durability.WRITTEN  # records on disk stay there
        if row.durability != durability.value.encode():
            changed.append(row._replace(durability=durability.value.encode()))
    catalogue.put(changed)
