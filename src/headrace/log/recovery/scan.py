"""Search of the journal for commits that are not in segments yet, and for damage. Applies nothing.

A commit begins only after the one before it is written, and numbers have no gaps. So, unless the machine
crashed, every commit before the last must be present, and the last one too if its foot is intact: the system
copies a write in its order. After a crash of the machine, only commits that a later frame reports as synced
must be present. A missing or bad frame that must be present is damage. Any other bad frame is an unfinished
write: its valid entries are taken, as long as each topic continues without a gap. So a damaged last frame
costs only the damaged entries. Only the changes of a commit are taken together or not at all.

A last frame with an intact foot and bad entries is in doubt if the machine crashed: the disk may have written
the foot before the entries, or the entries of an acknowledged commit are damaged. Such a frame is taken like
an unfinished one, and reported like damage. So is a last frame with parts of a batch: its staged files are
still there, so the batch continues from them and nothing is lost.

The catalogue names the journal files and their generation. A file may have held the newest commits of any
topic if it is missing, or if it has lost both copies of its header and has no frame of that generation. A
file has a header before the catalogue names it, so a file of zeros has lost both copies.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from headrace.log.apply.changes import names_in
from headrace.log.catalogue.rows import DirectoryMeta
from headrace.log.commit import journal
from headrace.log.commit.journal import CursorEntry, Name, Producer
from headrace.log.disk import load
from headrace.log.layout import Layout
from headrace.log.recovery.frames import CUT, Frame, Problem, read_frames, read_header

_NOTES = (journal.NOTE, journal.LOST_NOTE)


class JournalScan:
    """A first pass over the files with commits that are not applied; does not keep their data."""

    def __init__(
        self, layout: Layout, meta: DirectoryMeta, boot_id: bytes, *, rebuilt: bool = False
    ) -> None:
        self._meta = meta
        self.reports: list[str] = []
        """Descriptions of the findings, for an operator."""
        self.damages: list[Problem] = []
        self.harmless: list[Problem] = []
        """Damage that loses nothing."""
        self.doubtful: list[Problem] = []
        """Bad entries of a last frame that may have been acknowledged, and are taken like unfinished ones."""
        self.unfinished: list[Problem] = []
        """Bad frames and entries that need not be present."""
        self.proven: set[int] = set()
        """Topics whose end is known whatever was lost; complete once all entries were read."""
        self._lost_through = 0
        """Last commit with lost entries whose topics are unknown."""
        found = {path: read_header(path, meta.generation) for path in layout.journal_files()}
        named = meta.journal_files if not meta.clean and not rebuilt else {}
        self.missing_files = sorted(named.keys() - {path.name for path in found})
        """Missing files that may have held commits that are not applied."""
        files = _unapplied(found, meta)
        self.untrusted = [file.path for file in files if file.is_untrusted]
        """Files that hold data of unknown origin."""
        self._files = [file for file in files if not file.is_untrusted]
        self.spent = [file.path for file in self._files if file.is_spent]
        """Files that are not used again: the disk cannot read parts of them, or they have no header."""
        numbers = {number for file in self._files for number in file.sequences}
        self.last = max(numbers, default=0)
        headers = [header for header in found.values() if header is not None and header.first]
        # The catalogue knows the boot of its last server, unless the catalogue had to be rebuilt.
        boots = {meta.boot_id} if meta.boot_id else {header.boot_id for header in headers}
        clean = meta.clean and self.last <= meta.applied
        self.machine_crashed = not clean and boots != {boot_id}
        synced = max((file.synced for file in self._files), default=0)
        is_ended = any(self.last in file.ended for file in self._files)
        is_batch = any(self.last in file.batched for file in self._files)
        self._vouched = self.last if is_ended and not is_batch else self.last - 1
        if self.machine_crashed:
            self._vouched = synced
        # Before a later frame, a bad frame is known not to have been acknowledged as synced.
        self._in_doubt = self.last if is_ended and self.last > self._vouched else 0
        # A rebuilt catalogue does not know the last applied commit: all of the journal is read.
        first = min(numbers, default=1) if rebuilt else meta.applied + 1
        missing = self.missing = list(_gaps(numbers, first, self._vouched))
        """Numbers of commits that must be present and are not."""
        known = meta.rebuilt_from
        self._outdated = max((min(gap[-1], known) for gap in missing if gap[0] <= known), default=0)
        """Notes of commits before this number are older than the notes of the rebuilt catalogue."""
        self.is_ahead = bool(missing) and missing[0][0] == first and self._is_ahead(headers, first)
        """True if the catalogue is older than the journal, and the journal begins after its end."""
        for file in self._files:
            self._judge(file, numbers)
        self._judge_ends()
        self._judge_whole()

    def _is_ahead(self, headers: list[journal.JournalHeader], first: int) -> bool:
        """True if the missing frames were applied: the header of a recycled file shows that."""
        if any((header.applied or 0) > self._meta.applied for header in headers):
            return True
        # Files of format 1 have no such field.
        old = not self._meta.generation
        return old and not any(file.first <= first <= file.last for file in self._files)

    @property
    def missing_count(self) -> int:
        return sum(map(len, self.missing))

    def names(self) -> dict[int, Name]:
        """Return names of topics created in the journal, by number; empty unless something is damaged."""
        if not self.damages and not self.unfinished and not self.lost_unknown:
            return {}
        entries = (entry for path in self.paths for entry in self.entries(path))
        return {name.topic_id: name for entry in entries for name in names_in(entry)}

    @property
    def lost_unknown(self) -> bool:
        """True if acknowledged records of unknown topics were lost."""
        return self._lost_through > 0

    @property
    def paths(self) -> dict[Path, int]:
        """Files with commits to apply, in order, with the number of the last commit in each."""
        return {file.path: file.last for file in self._files if file.last > self._meta.applied}

    def entries(self, path: Path) -> Iterator[journal.Entry]:
        """Yield everything to apply: valid entries, and markers for entries that are known to be lost."""
        for item in read_frames(path, generation=self._meta.generation):
            if isinstance(item, Frame) and item.sequence > self._meta.applied:
                losses = any(not problem.harmless for problem in item.problems)
                entries = item.entries
                if losses and item.sequence > self._vouched:
                    entries = list(_without_gaps(item, self._meta.next_topic_id))
                elif item.sequence < self._outdated:
                    entries = [entry for entry in entries if entry.kind not in _NOTES]
                if self._lost_through and item.sequence > self._lost_through:
                    appends = (journal.APPEND, journal.LOST)
                    self.proven |= {entry.topic_id for entry in entries if entry.kind in appends}
                yield from entries

    def _judge(self, file: "_File", numbers: set[int]) -> None:
        applied = self._meta.applied
        for problem in file.header_problems if file.last > applied else ():
            self._harmless(problem, file.first)
        for before, problem in file.bad_frames:
            number = before + 1
            # A commit that another file holds was not here: only leftovers of an earlier use look like it.
            if number > applied and number not in numbers:
                self._bad(number, problem)
        for number, problem in file.bad_entries:
            if number > applied:
                self._bad(number, problem)

    def _judge_ends(self) -> None:
        """Keep the remains of frames at the end of a file that have no valid part."""
        for file, after in pairwise(file for file in self._files if file.first):
            if any(gap[0] < after.first and file.last < gap[-1] for gap in self.missing):
                rest = load(file.path).data[file.end :]
                length = max(len(bytes(rest).rstrip(b"\0")), journal.BLOCK_BYTES)
                self.damages.append(Problem(file.path.name, file.end, length, "frames are damaged"))

    def _judge_whole(self) -> None:
        if self.missing:
            first, last = self.missing[0][0], self.missing[-1][-1]
            self._lost_through = max(self._lost_through, last)
            self.reports.append(
                f"journal: {self.missing_count} commits from number {first} on are missing: damage"
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

    def _bad(self, number: int, problem: Problem) -> None:
        if problem.harmless:
            self._harmless(problem, number)
        elif number <= self._vouched or problem.reason == CUT:
            self.damages.append(problem)
            if problem.entry is None:
                self._lost_through = max(self._lost_through, number)
            self._report(problem, "damage: kept in quarantine")
        elif number == self._in_doubt:
            self.doubtful.append(problem)
            self._lost_through = max(self._lost_through, number)
            verdict = "damage to a commit that may have been acknowledged: kept in quarantine"
            self._report(problem, verdict)
        else:
            self.unfinished.append(problem)
            self._report(problem, "never acknowledged: dropped")

    def _harmless(self, problem: Problem, number: int) -> None:
        if self.machine_crashed and number > self._vouched:
            self.unfinished.append(problem)
            self._report(problem, "never acknowledged: its valid parts are kept")
        else:
            self.harmless.append(problem)
            self._report(problem, "damage: nothing is lost")

    def _report(self, problem: Problem, verdict: str) -> None:
        where = f"journal {problem.file} at byte {problem.position}"
        self.reports.append(f"{where}: {problem.reason}, {verdict}")


class _File:
    """The numbers of the commits in one file, and the file's problems."""

    def __init__(
        self, path: Path, header: journal.JournalHeader | None, meta: DirectoryMeta
    ) -> None:
        self.path = path
        self.sequences: list[int] = []
        self.synced = 0
        self.header_problems: list[Problem] = []
        self.bad_frames: list[tuple[int, Problem]] = []
        """Bad frames, each with the number of the commit before it."""
        self.bad_entries: list[tuple[int, Problem]] = []
        """Bad entries, each with the number of its commit."""
        self.ended: set[int] = set()
        """Numbers of commits with bad entries whose frame was written to its end."""
        self.batched: set[int] = set()
        """Entries among them that hold parts of a batch."""
        self.end = 0
        """Place in the file where the last frame ends."""
        first = header.first if header is not None else 0
        before = max(first - 1, 0)
        loaded = load(path)
        self.is_spent = loaded.unreadable or header is None
        for item in read_frames(path, entries=False, generation=meta.generation, loaded=loaded):
            if isinstance(item, Frame):
                self.sequences.append(item.sequence)
                self.synced = max(self.synced, item.synced)
                self.bad_entries += [(item.sequence, problem) for problem in item.problems]
                if item.is_ended and any(not one.harmless for one in item.problems):
                    self.ended.add(item.sequence)
                    if any(map(_batch, item.entries)):
                        self.batched.add(item.sequence)
                before, self.end = item.sequence, item.end
            elif item.harmless:
                self.header_problems.append(item)
            else:
                self.bad_frames.append((before, item))
        self.last = max(self.sequences, default=0)
        self.first = first or min(self.sequences, default=0)
        if not first:
            # Bad frames before the first valid frame belong to the commits just before that frame's commit.
            self.bad_frames = [(before or self.first - 2, one) for before, one in self.bad_frames]
        self.is_untrusted = header is None and self.last <= meta.applied


def _unapplied(
    headers: dict[Path, journal.JournalHeader | None], meta: DirectoryMeta
) -> list[_File]:
    """Return the files that may hold commits that are not applied, in order.

    A file is left out if a later file shows that it is applied. After a clean stop, only files whose header
    claims a later commit are returned.
    """
    firsts = sorted(header.first for header in headers.values() if header is not None)
    files = []
    for path, header in headers.items():
        if header is not None and header.first:
            later = [first for first in firsts if first > header.first]
            if later and later[0] <= meta.applied + 1:
                continue
            if not meta.clean or header.first > meta.applied:
                files.append(_File(path, header, meta))
        elif not meta.clean and (header is not None or not _is_unused(path, meta)):
            files.append(_File(path, header, meta))
    return sorted(files, key=lambda file: file.first)


def _is_unused(path: Path, meta: DirectoryMeta) -> bool:
    """True if a file without a header holds no commits of the last server."""
    if meta.generation and path.name not in meta.journal_files:
        return True  # the file is no longer in use
    if meta.journal_headers:
        return False
    loaded = load(path)
    return loaded.is_blank and len(loaded.data) >= meta.journal_files.get(path.name, 0)


def _gaps(numbers: set[int], first: int, last: int) -> Iterator[range]:
    """Yield the ranges of missing numbers from `first` to `last`."""
    for number in [*sorted(number for number in numbers if first <= number <= last), last + 1]:
        if number > first:
            yield range(first, number)
        first = number + 1


def _without_gaps(frame: Frame, next_topic_id: int) -> Iterator[journal.Entry]:
    """Yield the usable entries of a frame that may not be completely written.

    After the place where the write ended, the file holds entries of an earlier use. They were applied long
    ago and so are harmless, with two exceptions: they may create topics that were destroyed since, and they
    may set cursors and notes back.
    """
    changed, whole = _changes(frame)
    kept, broken = _unbroken(frame, next_topic_id, changed, whole=whole)
    if whole and broken & changed:
        # The break is due to a batch that has a gap in another topic: a batch is appended in its order.
        kept, _ = _unbroken(frame, next_topic_id, changed, whole=False)
    producers = [_producer(entry) for entry in kept]
    complete = {
        (entry.topic_id, producer.name, producer.number)
        for entry, producer in zip(kept, producers, strict=True)
        if producer is not None and not producer.pieces_left
    }
    for entry, producer in zip(kept, producers, strict=True):
        # An append with a number is stored whole or not at all: its producer will repeat it.
        if producer is None or (entry.topic_id, producer.name, producer.number) in complete:
            yield entry


def _changes(frame: Frame) -> tuple[set[int], bool]:
    """Return the topics with changes in a commit, and True if the changes are complete."""
    marks = [
        entry
        for entry in frame.entries
        if entry.kind == journal.CHANGE and entry.ordinal == frame.sequence
    ]
    topics = {entry.topic_id for entry in marks}
    if not marks:
        return topics, False
    if len(topics) < marks[0].record_count:
        # Some of the changed topics are unknown: all topics of the commit count as changed.
        return {entry.topic_id for entry in frame.entries} - {0}, False
    encoded = (journal.encode_entry(*entry, seed=frame.seed) for entry in frame.entries)
    return topics - {0}, journal.changes_crc(encoded, topics) == marks[0].offset


def _unbroken(
    frame: Frame, next_topic_id: int, changed: set[int], *, whole: bool
) -> tuple[list[journal.Entry], set[int]]:
    """Return the entries that continue their topics without a gap, and the topics with a gap.

    Unless the changes are `whole`, the entries of `changed` topics and all notes are left out.
    """
    broken: set[int] = set() if whole else set(changed)
    broken_batches: set[bytes] = set()
    if any(problem.entry is None and not problem.harmless for problem in frame.problems):
        # A part of any batch may be among the lost entries: the parts of this frame are appended again.
        broken_batches = {batch for batch in map(_batch, frame.entries) if batch is not None}
    kept: list[journal.Entry] = []
    for entry in frame.entries:
        batch = _batch(entry)
        if batch is not None and (entry.kind == journal.LOST or entry.topic_id in broken):
            broken_batches.add(batch)
        if entry.kind == journal.LOST or batch in broken_batches:
            # A batch is appended in its order: the parts after a missing part are appended again with it.
            broken.add(entry.topic_id)
        elif entry.kind in (journal.CURSOR, journal.OLD_CURSOR):
            if msgspec.msgpack.decode(entry.extra, type=CursorEntry).commit == frame.sequence:
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
    """Return the producer of an append that has a number; else None."""
    if entry.kind == journal.APPEND and entry.extra:
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        return producer if producer.progress is None else None
    return None


def _batch(entry: journal.Entry) -> bytes | None:
    """Return the producer of an entry's batch, or None: a producer has one batch at a time."""
    if entry.extra and entry.kind in (journal.APPEND, journal.LOST, journal.ADVANCE):
        producer = msgspec.msgpack.decode(entry.extra, type=Producer)
        return producer.name if producer.progress is not None else None
    return None
