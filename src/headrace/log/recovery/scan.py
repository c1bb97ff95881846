"""Finds the commits that the journal still holds for the segments, and the damage. Applies nothing.

A commit began only after the one before it was written, and numbers are given without gaps. So, with the
machine still up, everything before the last commit must be there. After a crash of the machine only what a
later frame says was synced must be. What must be there and is not is damage; any other bad frame is a
write that was not finished: what holds of it is taken, as long as each topic goes on without a gap, so
that a damaged last frame takes nothing with it but what is damaged. Only the changes of a commit are taken
together or not at all.

The catalogue names the journal files and their generation. A file that is missing, or that has lost both
copies of its header and has no frame of that generation, may have held the newest commits of any topic.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from headrace.log import journal
from headrace.log.catalogue_rows import Meta
from headrace.log.entries import Cursor, Name, Producer
from headrace.log.file_reads import load
from headrace.log.gathered import names_in
from headrace.log.journal_reading import CUT, Frame, Problem, read_frames, read_header
from headrace.log.layout import Layout

_NOTES = (journal.NOTE, journal.LOST_NOTE)


class JournalScan:
    """A first look at the files with commits that are not applied; their data is not kept."""

    def __init__(
        self, layout: Layout, meta: Meta, boot_id: bytes, *, rebuilt: bool = False
    ) -> None:
        self._meta = meta
        self.reports: list[str] = []
        """The findings, in words for an operator."""
        self.damages: list[tuple[Path, Problem]] = []
        self.harmless: list[Problem] = []
        """Damage by which nothing is lost."""
        self.unfinished: list[Problem] = []
        """Bad frames and entries that need not be there."""
        self.proven: set[int] = set()
        """Topics whose end is known whatever was lost; complete when all entries were taken."""
        self._lost_through = 0
        """The last commit of which something is lost that nothing names."""
        found = {path: read_header(path, meta.generation) for path in layout.journal_files()}
        self.missing_files = sorted(
            set(meta.journal_files) - {path.name for path in found}
            if not meta.clean and not rebuilt
            else ()
        )
        """Files that may have held commits which are not applied."""
        self._files = _unapplied(found, meta)
        self.untrusted = [file.path for file in self._files if file.is_untrusted]
        """Files that hold something, and nothing says what."""
        self._files = [file for file in self._files if not file.is_untrusted]
        self.spent = [file.path for file in self._files if file.unreadable or not file.has_header]
        """Files that are not used again: parts that the disk cannot read, or no header."""
        numbers = {number for file in self._files for number in file.sequences}
        self.last = max(numbers, default=0)
        headers = [header for header in found.values() if header is not None]
        # The catalogue says on which boot its last server ran, unless it had to be rebuilt.
        boots = {meta.boot_id} if meta.boot_id else {header.boot_id for header in headers}
        clean = meta.clean and self.last <= meta.applied
        self.machine_crashed = not clean and boots != {boot_id}
        synced = max((file.synced for file in self._files), default=0)
        self._vouched = synced if self.machine_crashed else self.last - 1
        # A rebuilt catalogue does not know what is applied: the journal is read as far back as it goes.
        first = min(numbers, default=1) if rebuilt else meta.applied + 1
        missing = self.missing = list(_gaps(numbers, first, self._vouched))
        """The numbers of commits that must be there and are not."""
        known = meta.rebuilt_from
        self._outdated = max((min(gap[-1], known) for gap in missing if gap[0] <= known), default=0)
        """What commits before this one have noted is older than what the catalogue was rebuilt from."""
        self.is_ahead = bool(missing) and missing[0][0] == first and self._is_ahead(headers, first)
        """True if the catalogue is older than the journal, and the journal begins later than it ends."""
        for file in self._files:
            self._judge(file, numbers)
        self._judge_ends(missing)
        self._judge_whole(missing)

    def _is_ahead(self, headers: list[journal.JournalHeader], first: int) -> bool:
        """Frames vanish only when their file is used again: its header says that they were applied."""
        if any((header.applied or 0) > self._meta.applied for header in headers):
            return True
        # Files of format 1 do not say it.
        old = not self._meta.generation
        return old and not any(file.covers(first) for file in self._files)

    @property
    def missing_count(self) -> int:
        return sum(map(len, self.missing))

    def names(self) -> dict[int, Name]:
        """By number, what topics are called that were made in the journal; only where some of it is lost."""
        found: dict[int, Name] = {}
        if not self.damages and not self.unfinished and not self.lost_unknown:
            return found
        for path in self.paths:
            for entry in self.entries(path):
                found |= {name.topic_id: name for name in names_in(entry)}
        return found

    @property
    def lost_unknown(self) -> bool:
        """Return whether something acknowledged was lost and nothing says of which topics."""
        return self._lost_through > 0

    @property
    def paths(self) -> list[Path]:
        """The files with something to apply, in order."""
        return [file.path for file in self._files if file.last > self._meta.applied]

    def last_of(self, path: Path) -> int:
        return next(file.last for file in self._files if file.path == path)

    def entries(self, path: Path) -> Iterator[journal.Entry]:
        """Everything to apply: what holds, and markers for what is known to be lost."""
        for item in read_frames(path, generation=self._meta.generation):
            if isinstance(item, Frame) and item.sequence > self._meta.applied:
                losses = any(not problem.harmless for problem in item.problems)
                entries: Iterator[journal.Entry] = iter(item.entries)
                if losses and item.sequence > self._vouched:
                    entries = _without_gaps(item, self._meta.next_topic_id)
                elif item.sequence < self._outdated:
                    entries = (entry for entry in item.entries if entry.kind not in _NOTES)
                if self._lost_through and item.sequence > self._lost_through:
                    entries = self._proving(entries)
                yield from entries

    def _proving(self, entries: Iterator[journal.Entry]) -> Iterator[journal.Entry]:
        for entry in entries:
            if entry.kind in (journal.APPEND, journal.LOST):
                self.proven.add(entry.topic_id)
            yield entry

    def _judge(self, file: "_File", numbers: set[int]) -> None:
        applied = self._meta.applied
        for problem in file.header_problems if file.last > applied else ():
            self._harmless(problem, file.first)
        for before, problem in file.bad_frames:
            number = before + 1
            # One that another file holds was not here: only something left from earlier looks so.
            if number > applied and number not in numbers:
                self._bad(file, number, problem)
        for number, problem in file.bad_entries:
            if number > applied:
                self._bad(file, number, problem)

    def _judge_ends(self, missing: list[range]) -> None:
        """Keep what is left of frames that were the last of their file, and of which nothing holds."""
        for file, after in pairwise(self._files):
            if any(gap[0] < after.first and file.last < gap[-1] for gap in missing):
                rest = load(file.path).data[file.end :]
                length = max(len(bytes(rest).rstrip(b"\0")), journal.BLOCK_BYTES)
                problem = Problem(file.path.name, file.end, length, "frames are damaged")
                self.damages.append((file.path, problem))

    def _judge_whole(self, missing: list[range]) -> None:
        if missing:
            self._lost_through = max(self._lost_through, missing[-1][-1])
            self.reports.append(
                f"journal: {self.missing_count} commits from number {missing[0][0]} on are missing: "
                "damage"
            )
        if self.missing_files or self.untrusted:
            self._lost_through = sys.maxsize
        for name in self.missing_files:
            self.reports.append(f"journal {name}: damage: the file is missing")
        for path in self.untrusted:
            self.reports.append(
                f"journal {path.name}: damage: neither copy of its header can be read, "
                "the file is kept in quarantine"
            )

    def _bad(self, file: "_File", number: int, problem: Problem) -> None:
        if problem.harmless:
            self._harmless(problem, number)
            return
        damage = number <= self._vouched or problem.reason == CUT
        if damage:
            self.damages.append((file.path, problem))
            if problem.entry is None:
                self._lost_through = max(self._lost_through, number)
        else:
            self.unfinished.append(problem)
        self.reports.append(
            f"journal {problem.file} at byte {problem.position}: {problem.reason}, "
            + ("damage: kept in quarantine" if damage else "never acknowledged: dropped")
        )

    def _harmless(self, problem: Problem, number: int) -> None:
        if self.machine_crashed and number > self._vouched:
            self.unfinished.append(problem)
            self.reports.append(
                f"journal {problem.file} at byte {problem.position}: {problem.reason}, "
                "never acknowledged: what holds of it is kept"
            )
            return
        self.harmless.append(problem)
        self.reports.append(
            f"journal {problem.file} at byte {problem.position}: {problem.reason}, "
            "damage: nothing is lost by it"
        )


class _File:
    """The commits of one file, by their numbers."""

    def __init__(self, path: Path, header: journal.JournalHeader | None, meta: Meta) -> None:
        self.path = path
        self.sequences: list[int] = []
        self.synced = 0
        self.header_problems: list[Problem] = []
        self.bad_frames: list[tuple[int, Problem]] = []
        """Each with the number of the commit before it."""
        self.bad_entries: list[tuple[int, Problem]] = []
        """Each with the number of the commit it is part of."""
        self.end = 0
        """The place in the file where the last frame ends."""
        self.has_header = header is not None
        before = header.first - 1 if header is not None else 0
        loaded = load(path)
        self.unreadable = loaded.unreadable
        for item in read_frames(path, entries=False, generation=meta.generation, loaded=loaded):
            if isinstance(item, Frame):
                self.sequences.append(item.sequence)
                self.synced = max(self.synced, item.synced)
                self.bad_entries += [(item.sequence, problem) for problem in item.problems]
                before = item.sequence
            elif item.harmless:
                self.header_problems.append(item)
            else:
                self.bad_frames.append((before, item))
            if isinstance(item, Frame):
                self.end = item.end
        self.last = max(self.sequences, default=0)
        self.first = header.first if header is not None else min(self.sequences, default=0)
        if header is None:
            # Frames before the first one that is found belong to commits just before its own.
            first = self.first - 1
            self.bad_frames = [(before or first - 1, one) for before, one in self.bad_frames]
        self.is_untrusted = header is None and self.last <= meta.applied

    def covers(self, number: int) -> bool:
        """Return whether this commit, though missing, was in this file."""
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
            if not meta.clean or header.first > meta.applied:
                files.append(_File(path, header, meta))
        elif not meta.clean and not _is_unused(path, meta):
            files.append(_File(path, None, meta))
    return sorted(files, key=lambda file: file.first)


def _is_unused(path: Path, meta: Meta) -> bool:
    """Return whether a file without a header holds nothing of the last server."""
    if meta.generation and path.name not in meta.journal_files:
        return True  # it was given up
    loaded = load(path)
    return loaded.is_blank and len(loaded.data) >= meta.journal_files.get(path.name, 0)


def _gaps(numbers: set[int], first: int, last: int) -> Iterator[range]:
    """The stretches of numbers from `first` to `last` that are not there."""
    for number in [*sorted(number for number in numbers if first <= number <= last), last + 1]:
        if number > first:
            yield range(first, number)
        first = number + 1


def _without_gaps(frame: Frame, next_topic_id: int) -> Iterator[journal.Entry]:
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


def _changes(frame: Frame) -> tuple[set[int], bool]:
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
    encoded = (journal.encode_entry(*entry, seed=frame.seed) for entry in frame.entries)
    return topics - {0}, journal.changes_crc(encoded, topics) == marks[0].offset


def _unbroken(
    frame: Frame, next_topic_id: int, changed: set[int], *, whole: bool
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
        elif entry.kind in (journal.CURSOR, journal.OLD_CURSOR):
            if msgspec.msgpack.decode(entry.extra, type=Cursor).commit == frame.sequence:
                kept.append(entry)
        elif entry.kind in _NOTES:
            if whole:
                kept.append(entry)
        elif entry.topic_id not in broken and not (
            entry.kind in (journal.CREATE, journal.OLD_CREATE) and entry.topic_id < next_topic_id
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
