"""What a server does with its data directory before it serves: check, repair, replay the journal.

The replay is the applier's own function. Time taken is proportional to the journal that was not applied and
to the number of segments, never to their size; segments that lost their index are the exception.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config import TopicRule
from headrace.errors import DataDirectoryError
from headrace.log import journal
from headrace.log.applier import Applier, Damage
from headrace.log.catalogue import Catalogue, DamagedCatalogueError, Meta, TopicRow
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.rebuild import rebuild_catalogue, repair_segments
from headrace.model import Durability

JUMP = 1 << 32
"""How far offsets and ordinals skip ahead when records that clients may have seen are lost."""


class Recovered(NamedTuple):
    next_sequence: int
    """Greater than any the journal holds."""
    reports: list[str]
    """What was found damaged, in words for an operator."""


def recover(
    layout: Layout, disk: Disk, rule: Callable[[str], TopicRule], *, boot_id: bytes
) -> Recovered:
    """Leave every acknowledged record in the segments and the catalogue in step with them."""
    reports: list[str] = []
    catalogue = _open(layout, disk, reports)
    try:
        reports += repair_segments(layout, disk, catalogue)
        meta = catalogue.meta()
        journal_state = _replay(layout, Applier(disk, layout, catalogue, rule), meta, boot_id, reports)
        if not meta.clean:
            if journal_state.entries_unknown:
                _jump(catalogue, "damage to the journal", None, reports)
            elif journal_state.machine_crashed:
                _jump(catalogue, "a crash of the machine", Durability.WRITTEN, reports)
        with catalogue.transaction():
            catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), clean=False))
        return Recovered(max(journal_state.last, catalogue.meta().applied) + 1, reports)
    finally:
        catalogue.close()


def _open(layout: Layout, disk: Disk, reports: list[str]) -> Catalogue:
    path = layout.root / "catalogue.sqlite"
    if not path.exists():
        if next(layout.files(".idx"), None) is None and next(layout.files(".log"), None) is None:
            return Catalogue.create(layout.root)
        reason = f"{path} is missing"
    else:
        try:
            catalogue = Catalogue.open(layout.root)
            try:
                catalogue.check()
                return catalogue
            except DamagedCatalogueError:
                catalogue.close()
                raise
        except DamagedCatalogueError as error:
            reason = str(error)
    reports.append(f"the catalogue is rebuilt: {reason}")
    catalogue, losses = rebuild_catalogue(layout, disk)
    reports += losses
    return catalogue


class _JournalState(NamedTuple):
    last: int
    machine_crashed: bool
    entries_unknown: bool
    """Whether something acknowledged was lost and nothing says of which topics."""


class _Scan(NamedTuple):
    """A first look at a journal file, its data already forgotten."""

    path: Path
    sequences: list[int]
    synced: int
    bad: list[tuple[int, journal.Problem]]
    """Each with the number of the commit it belongs to."""


def _replay(
    layout: Layout, applier: Applier, meta: Meta, boot_id: bytes, reports: list[str]
) -> _JournalState:
    if meta.clean:
        return _JournalState(0, False, False)
    headers = [(path, journal.read_header(path)) for path in layout.journal_files()]
    crashed = any(header is not None and header.boot_id != boot_id for _, header in headers)
    scans = [_scan(path) for path in _unapplied(headers, meta.applied)]
    scans.sort(key=lambda scan: scan.sequences[0] if scan.sequences else 0)
    last = max((scan.sequences[-1] for scan in scans if scan.sequences), default=0)
    # A commit began only after the one before it was written: with the machine still up, a bad frame
    # before a good one is damage. After a crash of the machine only what was synced must be there.
    vouched = max((scan.synced for scan in scans), default=0) if crashed else last - 1
    unknown = False
    for scan in scans:
        for sequence, problem in scan.bad:
            if sequence <= meta.applied:
                continue
            damage = sequence <= vouched
            unknown |= damage and problem.entry is None
            reports.append(
                f"journal {problem.file} at byte {problem.position}: {problem.reason}, "
                + ("damage: kept in quarantine" if damage else "never acknowledged: dropped")
            )
            if damage:
                _quarantine(layout, scan.path, problem)
        entries = _entries(scan.path, meta.applied, vouched)
        if scan.sequences:
            damages = applier.apply(entries, scan.sequences[-1])
            reports += map(str, damages)
    return _JournalState(last, crashed, unknown)


def _unapplied(
    headers: list[tuple[Path, journal.JournalHeader | None]], applied: int
) -> Iterator[Path]:
    """The files that may hold commits after `applied`: all but those a later file shows to be done."""
    firsts = sorted(header.first for _, header in headers if header is not None)
    for path, header in headers:
        if header is not None:
            later = [first for first in firsts if first > header.first]
            if later and later[0] <= applied + 1:
                continue
        yield path


def _scan(path: Path) -> _Scan:
    sequences: list[int] = []
    bad: list[tuple[int, journal.Problem]] = []
    synced = 0
    header = journal.read_header(path)
    for item in journal.read_frames(path):
        if isinstance(item, journal.Frame):
            sequences.append(item.sequence)
            synced = max(synced, item.synced)
            bad += [(item.sequence, problem) for problem in item.problems]
        else:
            before = sequences[-1] if sequences else header.first - 1 if header else 0
            bad.append((before + 1, item))
    return _Scan(path, sequences, synced, bad)


def _entries(path: Path, applied: int, vouched: int) -> Iterator[journal.Entry]:
    """Everything to apply: what holds, and markers for what is known to be lost."""
    for item in journal.read_frames(path):
        if not isinstance(item, journal.Frame) or item.sequence <= applied:
            continue
        if item.sequence > vouched and item.problems:
            # Possibly a write the machine did not finish. What holds is kept, so that a damaged last
            # frame takes nothing with it but what is damaged, as long as each topic goes on without gap.
            yield from _without_gaps(item)
            continue
        yield from item.entries
        for problem in item.problems:
            if problem.entry is not None and problem.entry.kind == journal.LOST:
                yield problem.entry


def _without_gaps(frame: journal.Frame) -> Iterator[journal.Entry]:
    broken = {p.entry.topic_id: p.entry.offset for p in frame.problems if p.entry is not None}
    for entry in frame.entries:
        if entry.offset < broken.get(entry.topic_id, 1 << 63):
            yield entry


def _quarantine(layout: Layout, path: Path, problem: journal.Problem) -> None:
    layout.quarantine.mkdir(exist_ok=True)
    with path.open("rb") as file:
        file.seek(problem.position)
        damaged = file.read(problem.length)
    name = f"journal-{int(time.time() * 1000)}-{path.stem}-{problem.position}.bin"
    (layout.quarantine / name).write_bytes(damaged)


def _jump(
    catalogue: Catalogue, why: str, durability: Durability | None, reports: list[str]
) -> None:
    """Give topics a new life far ahead, so that no position a client holds means other bytes."""
    now_ms = int(time.time() * 1000)
    rows: list[TopicRow] = []
    for row in catalogue.topics():
        if durability is None or row.durability == durability.value.encode():
            rows.append(
                row._replace(
                    epoch=max(row.epoch + 1, now_ms),
                    end_offset=row.end_offset + JUMP,
                    end_ordinal=row.end_ordinal + JUMP,
                )
            )
    with catalogue.transaction():
        catalogue.put(rows)
    if rows:
        reports.append(f"{len(rows)} topics go on with a new epoch after {why}")


def mark_clean(layout: Layout) -> None:
    """Say that everything is applied, so that the next start need not look at the journal."""
    catalogue = Catalogue.open(layout.root)
    try:
        with catalogue.transaction():
            catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), clean=True))
    finally:
        catalogue.close()


def check_usable(layout: Layout) -> None:
    """Raise DataDirectoryError, in words, when the directory cannot be written to."""
    probe = layout.root / ".probe"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise DataDirectoryError(
            f"the data directory {layout.root} cannot be written to: {error.strerror}"
        ) from error
