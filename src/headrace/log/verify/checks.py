"""Checks of the parts of a log, and their findings: segments, the unapplied journal, staged files.

Changes nothing. Each segment is first checked alone against its row of the catalogue: every byte, checksum,
ordinal, time and boundary. Then all segments of a topic are checked against each other and against the
topic's row. So if segments vanish meanwhile, the others need not be read again.

The check of the journal follows each topic from its end in the catalogue through every entry that a start of
the server would apply. `log/recovery/scan.py` finds the frames that must be present, also for recovery.

The staged files of batches that are decided and not completely appended are checked too. Files that wait for
a batch are not part of the log yet: the producer that uploaded them has the records.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from crc32c import crc32c
from msgspec import Struct

from headrace.log.apply.changes import Gathered, nameless, names_in
from headrace.log.batch.blocks import Damaged, read_staged
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.catalogue.rows import BatchRow, SegmentRow, TopicRow
from headrace.log.commit import journal
from headrace.log.commit.journal import Name, NoteEntry, StagedFiles
from headrace.log.layout import Layout
from headrace.log.read.index import (
    HEADER_BYTES,
    ROW_BYTES,
    Row,
    decode_header,
    decode_rows,
    distrust_first_block,
    restore_rows,
    row_position,
)
from headrace.log.records import boundary, holds
from headrace.log.recovery.frames import Problem
from headrace.log.recovery.scan import JournalScan
from headrace.model import JUMP


class VerifiedRange(Struct, frozen=True):
    """Consecutive records without a gap."""

    offset: int
    end: int
    ordinal: int
    end_ordinal: int

    def __str__(self) -> str:
        return f"offsets {self.offset} to {self.end}, ordinals {self.ordinal} to {self.end_ordinal}"


class Damage(Struct, frozen=True):
    """A place on disk whose content differs from what was written."""

    file: str
    """Path relative to the data directory."""
    reason: str
    topic: str | None = None
    """None if the damage does not belong to one topic."""
    range: VerifiedRange | None = None
    """Records that cannot be read or trusted because of the damage; None if no records are lost."""

    def __str__(self) -> str:
        lost = f"{self.range}: " if self.range is not None else ""
        return f"{self.file}: {lost}{self.reason}"


class Findings:
    """Collects ranges and damage, and joins neighbours of the same kind."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.ranges: list[VerifiedRange] = []
        self.damages: list[Damage] = []

    @property
    def records(self) -> int:
        return sum(part.end_ordinal - part.ordinal for part in self.ranges)

    @property
    def bytes(self) -> int:
        return sum(part.end - part.offset for part in self.ranges)

    def good(self, part: VerifiedRange) -> None:
        if self.ranges and (joined := _join(self.ranges[-1], part)):
            self.ranges[-1] = joined
        elif part.end > part.offset:
            self.ranges.append(part)

    def bad(self, file: str, reason: str, part: VerifiedRange | None = None) -> None:
        last = self.damages[-1] if self.damages else None
        if last and part and last.range and (last.file, last.reason) == (file, reason):
            joined = _join(last.range, part)
            if joined is not None:
                self.damages[-1] = Damage(file, reason, self.topic, joined)
                return
        self.damages.append(Damage(file, reason, self.topic, part))


def _join(first: VerifiedRange, second: VerifiedRange) -> VerifiedRange | None:
    if (first.end, first.end_ordinal) != (second.offset, second.ordinal):
        return None
    return VerifiedRange(first.offset, second.end, first.ordinal, second.end_ordinal)


Advance = Callable[[int], None]
"""Called with the number of bytes checked since the last call."""


class SegmentWork(NamedTuple):
    topic: TopicRow
    segment: SegmentRow


CheckSegments = Callable[[Sequence[SegmentWork]], Iterable["SegmentCheck"]]
"""Function that checks segments of any topics, as `SegmentCheck` does."""

_BLOCK_BYTES = 4 << 20
_ROWS_AT_ONCE = 1024
_STAGED_BYTES = 16 << 20


class SegmentCheck(Findings):
    """Check of one segment: the runs in its index against the catalogue's row for the segment."""

    def __init__(self, layout: Layout, topic: TopicRow, segment: SegmentRow) -> None:
        super().__init__(topic.name.decode())
        self.segment = segment
        self.epoch = topic.epoch
        self._row = topic
        self._path = layout.segment(segment.topic_id, segment.base)
        self._log = str(self._path.relative_to(layout.root))
        self._index = str(self._path.with_suffix(".idx").relative_to(layout.root))
        self._offset, self._ordinal = segment.base, segment.first_ordinal
        self._ms = segment.first_ms
        self._bad_rows = 0
        self._foreign = False
        """True if the index begins with a block of another index."""

    @classmethod
    def sound(cls, layout: Layout, topic: TopicRow, segment: SegmentRow, epoch: int) -> Self:
        """Return the check of a segment that is known to be sound."""
        check = cls(layout, topic, segment)
        check.epoch = epoch
        check.good(check._until(segment.end, segment.end_ordinal))
        return check

    def run(self, advance: Advance) -> None:
        segment = self.segment
        with (
            closing(_File(self._path.with_suffix(".idx"))) as index,
            closing(_File(self._path)) as log,
        ):
            if log.missing:
                rest = self._until(segment.end, segment.end_ordinal)
                self.bad(self._log, "the file is missing", rest)
                return
            if index.missing:
                self.bad(self._index, "the file is missing")
            else:
                self._check_header(index.read(0, HEADER_BYTES))
            for row in self._sound_rows(index, log):
                if row is None:
                    self._bad_rows += 1
                    continue
                self._check_place(row.offset, row.ordinal)
                self._check_run(row, log.read(row.offset - segment.base, row.length))
                advance(row.length)
        self._check_place(segment.end, segment.end_ordinal)
        if not self.damages and self._ms != segment.last_ms:
            self.bad(self._index, "the last row's time is not the catalogue's")

    def _sound_rows(self, index: "_File", log: "_File") -> Iterator[Row | None]:
        """Yield the rows of the index; from the first damaged row on, yield restored rows."""
        segment = self.segment
        end = segment.base
        for number, row in enumerate(_rows(index, segment.rows)):
            if row is None or row.offset != end or row.end > segment.end or self._foreign:
                self.bad(self._index, "the index rows are damaged")
                rows = list(_rows(index, segment.rows))
                restored = restore_rows(
                    distrust_first_block(rows) if self._foreign else rows,
                    segment,
                    lambda at, length: log.read(at - segment.base, length),
                )
                yield from restored[number:]
                return
            yield row
            end = row.end

    def _check_header(self, data: bytes) -> None:
        header = decode_header(data)
        if header is None:
            self.bad(self._index, "the header is damaged")
            return
        segment, topic = self.segment, self._row
        self.epoch = header.epoch
        said = header.topic_id, header.base, header.first_ordinal, header.name.encode()
        if said != (topic.id, segment.base, segment.first_ordinal, topic.name):
            self.bad(self._index, "the header does not agree with the catalogue")
            self._foreign = said[:2] != (topic.id, segment.base)
        elif header.epoch > topic.epoch:
            reason = f"the header's epoch {header.epoch} is after the catalogue's {topic.epoch}"
            self.bad(self._index, reason)

    def _check_place(self, offset: int, ordinal: int) -> None:
        """Check that the next run, or the segment's end, begins where the last run ended."""
        if self._bad_rows:
            self.bad(self._index, "the index rows are damaged", self._until(offset, ordinal))
            self._bad_rows = 0
        elif (offset, ordinal) != (self._offset, self._ordinal):
            self.bad(self._index, "no index row holds these", self._until(offset, ordinal))
        self._offset, self._ordinal = offset, ordinal

    def _check_run(self, row: Row, data: bytes) -> None:
        here = VerifiedRange(row.offset, row.end, row.ordinal, row.end_ordinal)
        if len(data) < row.length:
            self.bad(self._log, "the file ends before them, or the disk cannot read them", here)
        elif crc32c(data) != row.crc:
            self.bad(self._log, "the checksum is wrong", here)
        elif not holds(data, row.record_count):
            self.bad(self._log, "the records do not fill their run", here)
        elif not _starts_at_a_record(self._row, row, data):
            self.bad(self._log, "the topic does not start at a record", here)
        else:
            self.good(here)
        if row.ms < self._ms:
            self.bad(self._index, f"the time goes back from {self._ms} to {row.ms} ms", here)
        self._ms = max(self._ms, row.ms)
        self._offset, self._ordinal = here.end, here.end_ordinal

    def _until(self, offset: int, ordinal: int) -> VerifiedRange:
        return VerifiedRange(self._offset, offset, self._ordinal, ordinal)


def join_segments(topic: TopicRow, checks: Sequence[SegmentCheck]) -> Findings:
    """Check all segments of a topic together, from start to end: offsets, ordinals, times and epochs."""
    found = Findings(topic.name.decode())
    offset, ordinal = topic.start_offset, topic.start_ordinal
    ms = epoch = 0
    for number, check in enumerate(checks):
        segment = check.segment
        if number or segment.base > offset:
            _check_gap(found, offset, ordinal, segment.base, segment.first_ordinal)
        elif segment.base == offset and segment.first_ordinal != ordinal:
            found.bad("catalogue", "the topic's first ordinal is not its first segment's")
        if segment.first_ms < ms or check.epoch < epoch:
            reason = f"the segment at offset {segment.base} is older than the one before it"
            found.bad("catalogue", reason)
        found.damages += check.damages
        for part in check.ranges:
            found.good(part)
        offset, ordinal = segment.end, segment.end_ordinal
        ms, epoch = segment.last_ms, check.epoch
    _check_gap(found, offset, ordinal, topic.end_offset, topic.end_ordinal)
    if ms > topic.last_ms:
        found.bad("catalogue", "the topic's last time is before its last segment's")
    return found


def _check_gap(
    found: Findings, offset: int, ordinal: int, next_offset: int, next_ordinal: int
) -> None:
    skipped, records = next_offset - offset, next_ordinal - ordinal
    if (skipped or records) and not is_jump(skipped, records):
        here = VerifiedRange(offset, next_offset, ordinal, next_ordinal)
        found.bad("catalogue", "no segment holds these", here)


def is_jump(skipped: int, records: int) -> bool:
    """True if a topic skipped these offsets and ordinals after a crash that may have lost records.

    It continues a multiple of JUMP ahead: no offset that a reader has seen is given to another record.
    """
    return skipped == records and skipped > 0 and skipped % JUMP == 0


def _starts_at_a_record(topic: TopicRow, row: Row, data: bytes) -> bool:
    if not row.offset < topic.start_offset < row.end:
        return True
    at, passed = boundary(data, topic.start_offset - row.offset)
    return (row.offset + at, row.ordinal + passed) == (topic.start_offset, topic.start_ordinal)


def _rows(index: "_File", count: int) -> Iterator[Row | None]:
    """Yield as many rows as the catalogue counts; None for a row that is damaged or cut off."""
    for first in range(0, count, _ROWS_AT_ONCE):
        wanted = min(_ROWS_AT_ONCE, count - first)
        rows = list(decode_rows(index.read(row_position(first), wanted * ROW_BYTES)))
        yield from rows
        yield from [None] * (wanted - len(rows))


class _File:
    """A file that is read forwards in blocks. Treats an unreadable place as the end of the file."""

    def __init__(self, path: Path) -> None:
        self._fd, self._size = -1, 0
        with suppress(FileNotFoundError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._size = os.fstat(self._fd).st_size
        self.missing = self._fd < 0
        self._at = 0
        self._block = b""

    def close(self) -> None:
        if not self.missing:
            os.close(self._fd)

    def read(self, position: int, length: int) -> bytes:
        begin = position - self._at
        if not 0 <= begin <= begin + length <= len(self._block):
            self._at, begin = position, 0
            ahead = min(_BLOCK_BYTES, self._size - position)
            self._block = self._pread(position, max(length, ahead))
            if len(self._block) < length:
                self._block = self._pread(position, length)
        return self._block[begin : begin + length]

    def _pread(self, position: int, length: int) -> bytes:
        try:
            return os.pread(self._fd, length, position)
        except OSError:
            # The disk cannot read a sector: the run with this sector is reported, and the next run is tried.
            return b""


def check_staged(
    layout: Layout, rows: Iterable[BatchRow], now: Callable[[BatchRow], BatchRow | None]
) -> Iterator[Damage]:
    """Yield the damage in these batches; `now` returns the present row of a batch, with its progress."""
    for row in rows:
        files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
        for number, file in enumerate(files[row.file :], row.file):
            name = file.id.hex()
            position = row.position if number == row.file else 0
            while position < file.size:
                path = layout.staged_file(name)
                blocks = read_staged(path, position, file.size, _STAGED_BYTES)
                for what, _ in blocks:
                    if isinstance(what, Damaged):
                        present = now(row)
                        # A server may have appended and deleted the file meanwhile.
                        if present is not None and present.file <= number:
                            yield Damage(f"staged/{name}", what.reason)
                position = blocks[-1].next


class Life(Findings):
    """A topic's state: the catalogue's row, updated by the journal entries read so far."""

    def __init__(self, topic: str, epoch: int, offset: int, ordinal: int, ms: int) -> None:
        super().__init__(topic)
        self.epoch = epoch
        self.offset, self.ordinal, self.ms = offset, ordinal, ms
        self.destroyed = False


class JournalCheck:
    """One reading of the journal.

    While a server writes to the journal, an undamaged frame can look damaged: it is half written, or gone
    because its file is used again. A second reading, with the catalogue of that time, does not find the same
    damage.
    """

    def __init__(self, layout: Layout, catalogue: Catalogue) -> None:
        self.lives: dict[int, Life] = {}
        """Topics that the journal mentions, by number."""
        self._nameless: dict[int, Damage] = {}
        self._catalogue = catalogue
        self._gathered = Gathered(catalogue, catalogue.topic_by_id)
        scan = JournalScan(layout, catalogue.meta(), journal.boot_id())
        self.unfinished = [_damage(problem) for problem in scan.unfinished]
        """Writes that were not finished, and so were never acknowledged."""
        unknown = "neither copy of the file's header can be read"
        self.damages = [
            *(_damage(problem) for problem in scan.damages if not problem.entry),
            *map(_damage, scan.doubtful),
            *map(_damage, scan.harmless),
            *(Damage(f"journal/{name}", "the file is missing") for name in scan.missing_files),
            *(Damage(f"journal/{path.name}", unknown) for path in scan.untrusted),
        ]
        """Damage that belongs to no known topic; the damage of topics is in `lives`."""
        if scan.missing:
            count, first, last = scan.missing_count, scan.missing[0][0], scan.missing[-1][-1]
            reason = f"{count} commits from {first} to {last} are missing"
            self.damages.append(Damage("journal", reason))
        names = scan.names()
        for path in scan.paths:
            for entry in scan.entries(path):
                self._follow(path, entry, names)
        self.damages += self._nameless.values()

    @property
    def batches(self) -> dict[tuple[bytes, int], BatchRow]:
        """Batches that the journal mentions, with their progress."""
        return self._gathered.batches

    @property
    def all_damages(self) -> list[Damage]:
        return [*self.damages, *(one for life in self.lives.values() for one in life.damages)]

    def _follow(self, path: Path, entry: journal.Entry, names: Mapping[int, Name]) -> None:
        life = self._life(entry.topic_id)
        file = f"journal/{path.name}"
        if entry.kind == journal.DECIDE:
            self._gathered.add(entry)
        elif entry.extra and entry.kind in (journal.APPEND, journal.LOST, journal.ADVANCE):
            self._gathered.add(entry._replace(kind=journal.ADVANCE))
        for made in names_in(entry):
            self._name(made)
        if entry.kind == journal.LOST_NAMES:
            self.damages.append(Damage(file, "names of topics are damaged"))
        elif entry.kind in (journal.APPEND, journal.LOST):
            if not entry.topic_id:
                self.damages.append(Damage(file, "the decision of a batch is damaged"))
                return
            if life is None and entry.topic_id in names:
                self._name(names[entry.topic_id])
                life = self._life(entry.topic_id)
            if life is None:
                name = nameless(entry.topic_id).decode()
                life = Life(name, entry.ms, entry.offset, entry.ordinal, 0)
                self.lives[entry.topic_id] = life
                reason = f"the name of topic number {entry.topic_id} is lost"
                self._nameless[entry.topic_id] = Damage(file, reason)
            _follow_append(file, life, entry)
        elif entry.kind == journal.LOST_NOTE:
            key = msgspec.msgpack.decode(entry.extra, type=NoteEntry).key
            self.damages.append(Damage(file, f"the note {key!r} is damaged"))
        elif entry.kind == journal.DESTROY and life is not None:
            life.destroyed = True

    def _name(self, made: Name) -> None:
        life = self._life(made.topic_id)
        if life is None:
            # The first records of a topic may still have the time of its previous life, so the time is 0.
            life = Life(made.name.decode(), made.epoch, made.offset, made.ordinal, 0)
            self.lives[made.topic_id] = life
        elif self._nameless.pop(made.topic_id, None):
            life.topic, life.epoch = made.name.decode(), made.epoch

    def _life(self, topic_id: int) -> Life | None:
        life = self.lives.get(topic_id)
        if life is None:
            row = self._catalogue.topic_by_id(topic_id)
            if row is not None:
                life = self.lives[topic_id] = Life(
                    row.name.decode(), row.epoch, row.end_offset, row.end_ordinal, row.last_ms
                )
        return life


def _follow_append(file: str, life: Life, entry: journal.Entry) -> None:
    if entry.end <= life.offset:
        return  # applied already: entries hold absolute values, so applying one twice is harmless
    here = VerifiedRange(entry.offset, entry.end, entry.ordinal, entry.ordinal + entry.record_count)
    if (entry.offset, entry.ordinal) != (life.offset, life.ordinal):
        gap = VerifiedRange(life.offset, entry.offset, life.ordinal, entry.ordinal)
        life.bad(file, "no entry holds these", gap)
    if entry.kind == journal.LOST:
        life.bad(file, "the checksum is wrong", here)
    elif not holds(bytes(entry.data), entry.record_count):
        life.bad(file, "the records do not fill their entry", here)
    elif entry.ms < life.ms:
        life.bad(file, f"the time goes back from {life.ms} to {entry.ms} ms", here)
    else:
        life.good(here)
    life.offset, life.ordinal, life.ms = here.end, here.end_ordinal, max(entry.ms, life.ms)


def _damage(problem: Problem) -> Damage:
    return Damage(f"journal/{problem.file} at byte {problem.position}", problem.reason)
