"""What the journal still holds for the segments, and what of it is damaged. Reads only; applies nothing.

A commit began only after the one before it was written, and numbers are given without gaps. So, with the
machine still up, everything before the last commit must be there. After a crash of the machine only what a
later frame says was synced must be. What must be there and is not is damage; any other bad frame is a
write that was not finished: what holds of it is taken, as long as each topic goes on without a gap, so
that a damaged last frame takes nothing with it but what is damaged. Only the changes of a commit are taken
together or not at all.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.log import journal
from headrace.log.catalogue_rows import Meta
from headrace.log.entries import Cursor, Producer
from headrace.log.layout import Layout

_NOTES = (journal.NOTE, journal.LOST_NOTE)


class JournalScan:
    """A first look at the files with commits that are not applied; their data is not kept."""

    def __init__(
        self, layout: Layout, meta: Meta, boot_id: bytes, *, rebuilt: bool = False
    ) -> None:
        self._meta = meta
        self.reports: list[str] = []
        """What was found, in words for an operator."""
        self.damages: list[tuple[Path, journal.Problem]] = []
        self.unfinished: list[journal.Problem] = []
        """Bad frames and entries that need not be there."""
        self.headless: list[Path] = []
        """Files that hold commits and have lost their header."""
        self.lost_unknown = False
        """Whether something acknowledged was lost and nothing says of which topics."""
        headers = {path: journal.read_header(path) for path in layout.journal_files()}
        self._files = _unapplied(headers, meta)
        numbers = {number for file in self._files for number in file.sequences}
        self.last = max(numbers, default=0)
        # The catalogue says on which boot its last server ran, unless it had to be rebuilt.
        boots = {meta.boot_id} if meta.boot_id else {h.boot_id for h in headers.values() if h}
        clean = meta.clean and self.last <= meta.applied
        self.machine_crashed = not clean and boots != {boot_id}
        synced = max((file.synced for file in self._files), default=0)
        self._vouched = synced if self.machine_crashed else self.last - 1
        # A rebuilt catalogue does not know what is applied: the journal is read as far back as it goes.
        first = min(numbers, default=1) if rebuilt else meta.applied + 1
        missing = [number for number in range(first, self._vouched + 1) if number not in numbers]
        self.missing = missing
        """The numbers of commits that must be there and are not."""
        self._outdated = max((one for one in missing if one <= meta.rebuilt_from), default=0)
        """What commits before this one have noted is older than what the catalogue was rebuilt from."""
        self.is_ahead = first in missing and not any(file.covers(first) for file in self._files)
        """Whether the journal begins later than the catalogue ends."""
        for file in self._files:
            self._judge(file, numbers)
        if missing:
            self.lost_unknown = True
            self.reports.append(
                f"journal: {len(missing)} commits from number {missing[0]} on are missing: damage"
            )

    @property
    def paths(self) -> list[Path]:
        """The files with something to apply, in order."""
        return [file.path for file in self._files if file.last > self._meta.applied]

    def last_of(self, path: Path) -> int:
        return next(file.last for file in self._files if file.path == path)

    def entries(self, path: Path) -> Iterator[journal.Entry]:
        """Everything to apply: what holds, and markers for what is known to be lost."""
        for item in journal.read_frames(path):
            if isinstance(item, journal.Frame) and item.sequence > self._meta.applied:
                if item.problems and item.sequence > self._vouched:
                    yield from _without_gaps(item, self._meta.next_topic_id)
                elif item.sequence < self._outdated:
                    yield from (entry for entry in item.entries if entry.kind not in _NOTES)
                else:
                    yield from item.entries

    def _judge(self, file: "_File", numbers: set[int]) -> None:
        applied = self._meta.applied
        if file.header is None and file.last > applied:
            self.headless.append(file.path)
            self.reports.append(f"journal {file.path.name}: damage: its header cannot be read")
        for before, problem in file.bad_frames:
            number = before + 1
            # One that another file holds was not here: only something left from earlier looks so.
            if number > applied and number not in numbers:
                self._bad(file, number, problem)
        for number, problem in file.bad_entries:
            if number > applied:
                self._bad(file, number, problem)

    def _bad(self, file: "_File", number: int, problem: journal.Problem) -> None:
        damage = number <= self._vouched or problem.reason == journal.CUT
        if damage:
            self.damages.append((file.path, problem))
            self.lost_unknown |= problem.entry is None
        else:
            self.unfinished.append(problem)
        self.reports.append(
            f"journal {problem.file} at byte {problem.position}: {problem.reason}, "
            + ("damage: kept in quarantine" if damage else "never acknowledged: dropped")
        )


class _File:
    """What one file holds, by the numbers of its commits."""

    def __init__(self, path: Path, header: journal.JournalHeader | None) -> None:
        self.path = path
        self.header = header
        self.sequences: list[int] = []
        self.synced = 0
        self.bad_frames: list[tuple[int, journal.Problem]] = []
        """Each with the number of the commit before it."""
        self.bad_entries: list[tuple[int, journal.Problem]] = []
        """Each with the number of the commit it is part of."""
        # Without a header it may have been the newest, of which nothing is applied.
        before = header.first - 1 if header is not None else sys.maxsize
        for item in journal.read_frames(path, entries=False):
            if isinstance(item, journal.Frame):
                self.sequences.append(item.sequence)
                self.synced = max(self.synced, item.synced)
                self.bad_entries += [(item.sequence, problem) for problem in item.problems]
                before = item.sequence
            elif item.position or item.reason == journal.CUT:
                self.bad_frames.append((before, item))
        self.last = max(self.sequences, default=0)
        self.first = header.first if header is not None else min(self.sequences, default=0)

    def covers(self, number: int) -> bool:
        """Whether this commit, though missing, was in this file."""
        return self.first <= number <= self.last


def _unapplied(headers: dict[Path, journal.JournalHeader | None], meta: Meta) -> list[_File]:
    """The files that may hold commits which are not applied, in order.

    All but those that a later file shows to be done; after a clean stop, only those that claim otherwise.
    """
    firsts = sorted(header.first for header in headers.values() if header is not None)
    files = []
    for path, header in headers.items():
        if header is not None:
            later = [first for first in firsts if first > header.first]
            if later and later[0] <= meta.applied + 1:
                continue
        if not meta.clean or (header is not None and header.first > meta.applied):
            files.append(_File(path, header))
    return sorted(files, key=lambda file: file.first)


def _without_gaps(frame: journal.Frame, next_topic_id: int) -> Iterator[journal.Entry]:
    """What to take of a frame that may not have been written to its end.

    Behind the place where the write ended lies what an earlier use of the file left: applied long ago, so
    harmless but for the making of topics that were destroyed since, and for cursors and notes, which may go
    back.
    """
    changed, whole = _changes(frame)
    kept, broken = _unbroken(frame, next_topic_id, changed, whole=whole)
    if whole and broken & changed:
        # By a batch that is broken elsewhere, and is appended in its order.
        kept, _ = _unbroken(frame, next_topic_id, changed, whole=False)
    producers = [_producer(entry) for entry in kept]
    complete = {
        (entry.topic_id, producer.name, producer.number)
        for entry, producer in zip(kept, producers, strict=True)
        if producer is not None and not producer.pieces_left
    }
    for entry, producer in zip(kept, producers, strict=True):
        # An append that carries a number is stored whole or not at all: it will come again.
        if producer is None or (entry.topic_id, producer.name, producer.number) in complete:
            yield entry


def _changes(frame: journal.Frame) -> tuple[set[int], bool]:
    """The topics that have changes in a commit, and whether all that belongs to the changes is there."""
    marks = [
        entry
        for entry in frame.entries
        if entry.kind == journal.CHANGE and entry.ordinal == frame.sequence
    ]
    topics = {entry.topic_id for entry in marks}
    if not marks:
        return topics, False
    if len(topics) < marks[0].record_count:
        # Which they are is not known: all topics go with them.
        return {entry.topic_id for entry in frame.entries} - {0}, False
    encoded = (journal.encode_entry(*entry) for entry in frame.entries)
    return topics - {0}, journal.changes_crc(encoded, topics) == marks[0].offset


def _unbroken(
    frame: journal.Frame, next_topic_id: int, changed: set[int], *, whole: bool
) -> tuple[list[journal.Entry], set[int]]:
    """Entries that go on without a gap in their topics, and the topics that do not.

    Of topics with changes, and of notes, there is nothing among them unless these are `whole`.
    """
    broken: set[int] = set() if whole else set(changed)
    broken_batches: set[bytes] = set()
    kept: list[journal.Entry] = []
    for entry in frame.entries:
        batch = _batch(entry)
        if batch is not None and (entry.kind == journal.LOST or entry.topic_id in broken):
            broken_batches.add(batch)
        if entry.kind == journal.LOST or batch in broken_batches:
            # A batch is appended in its order: what follows what is missing comes again with it.
            broken.add(entry.topic_id)
        elif entry.kind == journal.CURSOR:
            if msgspec.msgpack.decode(entry.extra, type=Cursor).commit == frame.sequence:
                kept.append(entry)
        elif entry.kind in _NOTES:
            if whole:
                kept.append(entry)
        elif entry.topic_id not in broken and not (
            entry.kind == journal.CREATE and entry.topic_id < next_topic_id
        ):
            kept.append(entry)
    return kept, broken


def _producer(entry: journal.Entry) -> Producer | None:
    """For an append that carries a number."""
    if entry.kind == journal.APPEND and entry.extra:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        return producer if producer.progress is None else None
    return None


def _batch(entry: journal.Entry) -> bytes | None:
    """Which producer's batch an entry is a part of: one batch of each is appended at a time."""
    if entry.extra and entry.kind in (journal.APPEND, journal.LOST, journal.ADVANCE):
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        return producer.name if producer.progress is not None else None
    return None
