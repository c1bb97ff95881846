"""Recovery: a server checks and repairs its data directory, and replays the journal, before it serves.

The applier's own function does the replay. Recovery takes time proportional to the unapplied journal and to
the number of segments, never to their size; segments that lost their index are the exception.
"""

import gc
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from headrace.config.settings import TopicRule
from headrace.errors import DataDirectoryError
from headrace.log.apply.applier import Applier
from headrace.log.batch.staging import remove_unfinished
from headrace.log.catalogue.catalogue import (
    BACKUP_NAME,
    FILE_NAME,
    Catalogue,
    DamagedCatalogueError,
    UnreadableCatalogueError,
)
from headrace.log.catalogue.rows import RENAMED_FORMAT, TopicRow
from headrace.log.disk import ATTEMPTS_MAX, RETRY_S, Disk
from headrace.log.layout import Layout
from headrace.log.recovery.frames import read_header
from headrace.log.recovery.quarantine import quarantine, quarantine_journal
from headrace.log.recovery.rebuild import rebuild_catalogue, repair_segments
from headrace.log.recovery.reserved_names import check_unreserved, log_renamed
from headrace.log.recovery.scan import JournalScan
from headrace.log.verify.inspect import open_unchanged
from headrace.model import JUMP, Durability


class Recovered(NamedTuple):
    next_sequence: int
    """Number of the next commit, greater than any number in the journal."""
    generation: int
    """Generation of the journal files that the server will write."""
    reports: list[str]
    """Descriptions of the damage, for an operator."""
    notes: list[str]
    """Descriptions of other changes since the last server, such as a restore."""


def recover(
    layout: Layout, disk: Disk, rule: Callable[[str], TopicRule], *, boot_id: bytes
) -> Recovered:
    """Bring every acknowledged record into the segments, and make the catalogue match them."""
    reports: list[str] = []
    notes: list[str] = []
    catalogue, rebuilt = _open(layout, disk, reports)
    try:
        scan = JournalScan(layout, catalogue.meta(), boot_id, rebuilt=rebuilt)
        if scan.is_ahead and not rebuilt:
            # The catalogue was replaced by an older one: the segments are more up to date.
            reports.append("the catalogue is rebuilt: the journal says that more was applied")
            reports += scan.reports
            catalogue.close()
            catalogue, rebuilt = rebuild_catalogue(layout, disk, reports), True
            scan = JournalScan(layout, catalogue.meta(), boot_id, rebuilt=True)
        reports += scan.reports
        for path, problem in scan.damages:
            quarantine(layout, path, problem)
        if scan.lost_unknown:
            # This is recorded before anything is applied, so that an interrupted start does not forget it.
            with catalogue.transaction():
                catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), jump_due=True))
        for path in scan.untrusted:
            quarantine_journal(layout, disk, path)
        reports += repair_segments(layout, disk, catalogue)
        applier = Applier(disk, layout, catalogue, rule)
        names = scan.names()
        with _collector_paused():
            for path in scan.paths:
                reports += applier.apply(scan.entries(path), scan.last_of(path), names)
        applier.clear_batches()
        remove_unfinished(layout, disk)
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
            meta = msgspec.structs.replace(
                catalogue.meta(),
                clean=False,
                boot_id=boot_id,
                jump_due=False,
                restored_jumps=0,
                rebuilt_from=0,
                generation=secrets.randbits(63) | 1,
                journal_files={
                    path.name: path.stat().st_size
                    for path in layout.journal_files()
                    if path not in scan.spent
                },
            )
            catalogue.put_meta(meta)
        for path in scan.spent:
            quarantine_journal(layout, disk, path)
        if not _backup_has_present_names(layout):
            catalogue.keep_backup(disk)
        return Recovered(max(scan.last, meta.applied) + 1, meta.generation, reports, notes)
    finally:
        catalogue.close()


def _open(layout: Layout, disk: Disk, reports: list[str]) -> tuple[Catalogue, bool]:
    """Return the catalogue, and True if it had to be rebuilt."""
    path = layout.root / FILE_NAME
    reason = f"{path} is missing"
    if not path.exists():
        if _is_empty(layout):
            return Catalogue.create(layout.root), False
    else:
        for _ in range(ATTEMPTS_MAX):
            try:
                return _open_sound(layout), False
            except UnreadableCatalogueError as error:
                reason = str(error)
                time.sleep(RETRY_S)  # the disk may fail for a moment
            except DamagedCatalogueError as error:
                reason = str(error)
                break
    reports.append(f"the catalogue is rebuilt: {reason}")
    return rebuild_catalogue(layout, disk, reports), True


def _open_sound(layout: Layout) -> Catalogue:
    catalogue = Catalogue.open(layout.root)
    try:
        if catalogue.is_blank() and _is_empty(layout):
            catalogue.make()  # the very first start was interrupted before this
        catalogue.check()
        meta = catalogue.meta()
        renamed = 0
        if meta.format < RENAMED_FORMAT:
            names = catalogue.names_in_file()
            renamed = check_unreserved(layout, names, meta.applied, meta.generation)
        catalogue.migrate()
        log_renamed(renamed)
    except DataDirectoryError:
        catalogue.close()
        raise
    return catalogue


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
    except (DataDirectoryError, sqlite3.DatabaseError, msgspec.MsgspecError):
        return False


def _is_empty(layout: Layout) -> bool:
    return not any(map(read_header, layout.journal_files())) and not any(
        next(layout.files(suffix), None) for suffix in (".idx", ".log")
    )


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
    before = [
        row
        for row in catalogue.topics()
        if row.id not in proven
        and (durability is None or row.durability == durability.value.encode())
    ]
    topics = [
        _jumped(row, now_ms, by, empty=catalogue.last_segment(row.id) is None) for row in before
    ]
    catalogue.put(topics)
    _take_cursors_along(catalogue, before, topics)
    if durability is None:
        graves = list(catalogue.tombstones())
        meta = catalogue.meta()
        catalogue.put(
            [
                row._replace(end_offset=row.end_offset + by, end_ordinal=row.end_ordinal + by)
                for row in graves
            ]
        )
        floor = max([meta.floor_offset, *(row.end_offset for row in topics)]) + by
        floor_ordinal = max([meta.floor_ordinal, *(row.end_ordinal for row in topics)]) + by
        catalogue.put_meta(
            msgspec.structs.replace(
                meta,
                floor_offset=floor,
                floor_ordinal=floor_ordinal,
                floor_epoch=max(meta.floor_epoch, now_ms),
            )
        )
        reports.append(f"names not known start at offset {floor} after {why}")
    if topics:
        reports.append(f"{len(topics)} topics go on with a new epoch after {why}")


def _take_cursors_along(
    catalogue: Catalogue, before: list[TopicRow], topics: list[TopicRow]
) -> None:
    """Give the new epoch to cursors of the topics that jump: their offsets still mean the same records."""
    epochs = {(old.name, old.epoch): new.epoch for old, new in zip(before, topics, strict=True)}
    catalogue.put(
        [
            row._replace(epoch=epochs[row.name, row.epoch])
            for row in catalogue.cursors()
            if (row.name, row.epoch) in epochs
        ]
    )


def _jumped(row: TopicRow, now_ms: int, by: int, *, empty: bool) -> TopicRow:
    row = row._replace(
        epoch=max(row.epoch + 1, now_ms),
        end_offset=row.end_offset + by,
        end_ordinal=row.end_ordinal + by,
    )
    if empty:
        row = row._replace(start_offset=row.end_offset, start_ordinal=row.end_ordinal)
    return row


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


def mark_clean(layout: Layout, disk: Disk) -> None:
    """Record that everything is applied, so that the next start need not read the journal."""
    catalogue = Catalogue.open(layout.root)
    try:
        with catalogue.transaction():
            catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), clean=True))
        catalogue.keep_backup(disk)
    finally:
        catalogue.close()
