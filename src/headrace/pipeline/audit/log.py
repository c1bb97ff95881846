"""The log's side of an audit: tasks check a data directory or a server. Results are joined by topic.

A task checks segments with few calls per megabyte. Only if it finds anything, the check of `headrace verify`
reads the segment again. So both commands describe damage in the same words.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headrace.errors import UnknownTopicError
from headrace.lake.format import RecordRange as LakeRange
from headrace.log.catalogue.rows import SegmentRow, TopicRow
from headrace.log.layout import Layout
from headrace.log.read.index import (
    HEADER_BYTES,
    ROW_BYTES,
    RUN_BYTES_MAX,
    decode_header,
    row_position,
)
from headrace.log.records import holds
from headrace.log.verify.checks import (
    Damage,
    Findings,
    SegmentCheck,
    SegmentWork,
    VerifiedRange,
)
from headrace.log.verify.verify import verify
from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES
from headrace.pipeline.audit.files import Kept
from headrace.pipeline.audit.plan import Finding, Kind
from headrace.pipeline.tasks import NotSharedError, Progress, TaskRunner
from headrace.reader.decode import boundaries, is_gap, parse
from headrace.reader.planning import groups
from headrace.reader.server import ServerLog
from headrace.reader.view import DamagedRange, DataLossError, LogBlock, LogLocation, Rows
from headrace.reader.view import LogRange as Part

TASK_BYTES_MAX = 256 << 20
TASK_BYTES_MIN = 8 << 20
"""Limits of the bytes per task: a task reads much longer than it takes to start, and all cores have tasks."""
TASK_WORKS_MAX = 1000
_TASKS = 32

_BLOCK_BYTES = 16 << 20
"""Size of a block that is read at once: record sizes are followed in all runs of a block together."""
_EVEN_BLOCK_BYTES = 2 << 20
"""Block size if all records have the same size: they are checked while still in the processor's cache."""
_READ_BYTES = RUN_BYTES_MAX
_ROWS_AT_ONCE = 65_536

T = TypeVar("T")

_Numbers = npt.NDArray[np.int64]

Phase = Callable[[int], Progress | None]
"""Called with the number of bytes that follow; returns the callback for their progress."""


class LogTopic(NamedTuple):
    epoch: int
    sound: list[VerifiedRange]
    """Ranges that were read and are sound."""
    whole: list[VerifiedRange]
    """Ranges that the topic has, damaged or not; for an empty topic, an empty range at its end."""
    findings: list[Finding]


class LogAccount(NamedTuple):
    name: str | None = None
    """Directory or address of the log; None if no log was checked."""
    place: LogLocation = LogLocation()
    kept: Mapping[str, Sequence[Kept]] = {}
    """Ranges of each topic in the log, for comparing their bytes with the lake."""
    topics: Mapping[str, LogTopic] = {}
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    segments: int = 0

    def kept_of(self, ranges: Iterable[LakeRange]) -> dict[str, dict[Kept, None]]:
        """Return the ranges in the log that have some of these records, by topic."""
        found: dict[str, dict[Kept, None]] = {}
        for one in ranges:
            for part in self.kept.get(one.topic, ()):
                if part.offset < one.end and one.offset < part.end:
                    found.setdefault(one.topic, {})[part] = None
        return found


def task_groups(works: Iterable[T], size: Callable[[T], int], total: int) -> list[list[T]]:
    """Return groups of works, in order; one task does each group."""
    most = min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, total // _TASKS))
    return list(groups(works, size, most, TASK_WORKS_MAX))


# A data directory


def audit_directory(
    directory: Path,
    topics: Sequence[str],
    in_lake: frozenset[str],
    runner: TaskRunner,
    phase: Phase,
) -> LogAccount:
    """Check everything that `headrace verify` checks, with tasks for the segments."""
    layout = Layout(directory)
    kept: dict[str, list[Kept]] = {}

    def check(works: Sequence[SegmentWork]) -> Iterator[SegmentCheck]:
        total = sum(map(_bytes, works))
        pieces = [piece for work in works for piece in _pieces(work)]
        tasks = task_groups(pieces, _piece_bytes, total)
        results = runner.run(tasks, partial(check_pieces, root=directory), phase(total))
        epochs = (epoch for some in results for epoch in some)
        unsound = []
        for work in works:
            name, segment = work.topic.name.decode(), work.segment
            path = str(layout.segment(segment.topic_id, segment.base))
            kept.setdefault(name, []).append(Kept(segment.base, segment.end, path))
            found = {next(epochs) for _ in _pieces(work)}
            epoch = found.pop() if len(found) == 1 else None
            if epoch is None:
                unsound.append(work)
            else:
                yield SegmentCheck.sound(layout, *work, epoch)
        again = task_groups(unsound, _bytes, total)
        for some in runner.run(again, partial(check_segments, root=directory)):
            yield from some

    report = verify(directory, topics, check=check, may_lack=in_lake)
    found = {}
    for topic in report.topics:
        damaged = [one.range for one in topic.damages if one.range is not None]
        found[topic.name] = LogTopic(
            topic.epoch,
            topic.ranges,
            [*topic.ranges, *damaged] or [_nothing_at(topic.end, topic.end_ordinal)],
            [_finding(one, topic.epoch) for one in topic.damages],
        )
    return LogAccount(
        str(directory),
        LogLocation(str(directory)),
        kept,
        found,
        findings=[_finding(one) for one in report.damages],
        notes=report.notes,
        segments=sum(topic.segments for topic in report.topics),
    )


def _nothing_at(offset: int, ordinal: int) -> VerifiedRange:
    return VerifiedRange(offset, offset, ordinal, ordinal)


def _finding(damage: Damage, epoch: int | None = None) -> Finding:
    reason = damage.reason
    gone = reason.endswith("missing") or reason.startswith(("no segment", "no entry"))
    kind: Kind = "missing" if gone else "damaged"
    return Finding(kind, reason, damage.file, damage.topic, epoch, damage.range)


class AuditPiece(NamedTuple):
    """Some rows of a segment's index, and the records that they cover."""

    topic: TopicRow
    segment: SegmentRow
    first: int
    last: int


def _bytes(work: SegmentWork) -> int:
    return work.segment.end - work.segment.base


def _pieces(work: SegmentWork) -> list[AuditPiece]:
    """Split a large segment into pieces, for several tasks."""
    rows = work.segment.rows
    count = max(1, -(-_bytes(work) // TASK_BYTES_MAX))
    step = max(1, -(-rows // count))
    return [AuditPiece(*work, first, min(first + step, rows)) for first in range(0, rows, step)]


def _piece_bytes(piece: AuditPiece) -> int:
    size = piece.segment.end - piece.segment.base
    return size * (piece.last - piece.first) // max(1, piece.segment.rows)


def check_pieces(pieces: Sequence[AuditPiece], *, root: Path) -> list[int | None]:
    """Check pieces of segments; return the epoch of each, or None for a piece that may be damaged.

    A segment is sound if all of its pieces are: each must begin where the one before it ends.
    """
    layout = _layout(root)
    # All pieces share one buffer: memory that is new to the process would cost a third of the reading time.
    largest = max((one.segment.end - one.segment.base for one in pieces), default=0)
    space = memoryview(bytearray(min(_BLOCK_BYTES, largest)))
    return [_check_piece(layout, piece, space) for piece in pieces]


def check_segments(works: Sequence[SegmentWork], *, root: Path) -> list[SegmentCheck]:
    """Check segments in the way of `headrace verify`, with the same words for damage."""
    layout = _layout(root)
    checks = [SegmentCheck(layout, *one) for one in works]
    for check in checks:
        check.run(lambda _: None)
    return checks


def _layout(root: Path) -> Layout:
    layout = Layout(root)
    if not layout.segments.is_dir():
        raise NotSharedError(
            f"{root} is not a data directory for Spark's executors: mount it at the same path there, or give "
            "the server's address"
        )
    return layout


def _check_piece(layout: Layout, piece: AuditPiece, space: memoryview) -> int | None:
    topic, segment = piece.topic, piece.segment
    try:
        with (
            FileIO(layout.index(segment.topic_id, segment.base)) as index,
            FileIO(layout.segment(segment.topic_id, segment.base)) as log,
        ):
            header = decode_header(os.pread(index.fileno(), HEADER_BYTES, 0))
            if header is None or header.epoch > topic.epoch:
                return None
            said = header.topic_id, header.base, header.first_ordinal, header.name.encode()
            if said != (topic.id, segment.base, segment.first_ordinal, topic.name):
                return None
            rows = _Rows(index.fileno(), log.fileno(), piece, space)
            return header.epoch if rows.are_sound() else None
    except (OSError, ValueError):
        return None  # `check_segments` reads the segment again and names the damage


class _Rows:
    """The same checks as `SegmentCheck` makes row by row, for many rows and records at once."""

    def __init__(self, index: int, log: int, piece: AuditPiece, space: memoryview) -> None:
        self._index, self._log, self._space = index, log, space
        self._piece = piece

    def are_sound(self) -> bool:
        _, segment, first, last = self._piece
        at = (segment.base, segment.first_ordinal, segment.first_ms)
        if first:
            at = _end(self._read(first - 1, first))
        for number in range(first, last, _ROWS_AT_ONCE):
            rows = self._read(number, min(number + _ROWS_AT_ONCE, last))
            if not self._follow(rows, *at) or not all(map(self._holds, _blocks(rows))):
                return False
            at = _end(rows)
        return last < segment.rows or at == (segment.end, segment.end_ordinal, segment.last_ms)

    def _read(self, first: int, last: int) -> Rows:
        """Return these rows of the index; raise ValueError if one is damaged or cut off."""
        data = os.pread(self._index, (last - first) * ROW_BYTES, row_position(first))
        rows = parse(data).rows
        if len(rows) < last - first:
            raise ValueError("rows are damaged")
        return rows

    def _follow(self, rows: Rows, offset: int, ordinal: int, ms: int) -> bool:
        """True if the first row begins here, and each other row where the previous one ends."""
        lengths, counts = rows["length"].astype(np.int64), rows["count"].astype(np.int64)
        offsets, times = _sums(offset, lengths), rows["ms"].astype(np.int64)
        return (
            bool(lengths.all() and counts.all())
            and np.array_equal(rows["offset"], offsets[:-1])
            and np.array_equal(rows["ordinal"], _sums(ordinal, counts)[:-1])
            and int(times[0]) >= ms
            and bool((np.diff(times) >= 0).all())
            and int(offsets[-1]) <= self._piece.segment.end
        )

    def _holds(self, rows: Rows) -> bool:
        """True if a block of runs contains the records that its rows describe."""
        lengths = rows["length"].astype(np.int64)
        offset = int(rows["offset"][0])
        size = int(lengths.sum())
        data = self._space[:size] if size <= len(self._space) else memoryview(bytearray(size))
        position = filled = 0
        for end, crc in zip(np.cumsum(lengths).tolist(), rows["crc"].tolist(), strict=True):
            if end > filled:
                wanted = data[filled : max(end, filled + _READ_BYTES)]
                at = offset - self._piece.segment.base + filled
                if os.preadv(self._log, [wanted], at) < len(wanted):
                    return False
                filled += len(wanted)
            if crc32c(data[position:end]) != crc:
                return False
            position = end
        found = boundaries(data, lengths, rows["count"].astype(np.int64))
        if found is None:
            return False
        most = PAYLOAD_BYTES_MAX + RECORD_HEADER_BYTES
        if int(lengths.max()) > most and int(np.diff(found).max()) > most:
            return False
        return self._starts_at_a_record(found, offset, int(rows["ordinal"][0]))

    def _starts_at_a_record(self, places: _Numbers, offset: int, ordinal: int) -> bool:
        topic = self._piece.topic
        start = topic.start_offset - offset
        if not 0 < start < int(places[-1]):
            return True
        number = int(np.searchsorted(places, start))
        return (int(places[number]), ordinal + number) == (start, topic.start_ordinal)


def _end(rows: Rows) -> tuple[int, int, int]:
    """Return the offset and ordinal after the last row, and its time."""
    offset, length, ordinal, count, ms, *_ = rows[-1].tolist()
    return offset + length, ordinal + count, ms


def _sums(first: int, lengths: _Numbers) -> _Numbers:
    return np.concatenate(([first], first + np.cumsum(lengths)))


def _blocks(rows: Rows) -> Iterator[Rows]:
    """Yield blocks: rows whose runs are read together."""
    lengths, counts = rows["length"].astype(np.int64), rows["count"].astype(np.int64)
    is_even = np.array_equal(lengths * counts[0], counts * lengths[0])
    size = _EVEN_BLOCK_BYTES if is_even else _BLOCK_BYTES
    ends = np.cumsum(lengths)
    first = done = 0
    while first < len(rows):
        last = max(first + 1, int(np.searchsorted(ends, done + size, "right")))
        yield rows[first:last]
        first, done = last, int(ends[last - 1])


# A server


def audit_server(
    place: LogLocation,
    topics: Sequence[str],
    in_lake: frozenset[str],
    runner: TaskRunner,
    phase: Phase,
) -> LogAccount:
    """Check the log that a server serves.

    The server's API does not give access to its catalogue, its journal and its index files, so these are not
    checked.
    """
    with closing(ServerLog(place)) as log:
        states = log.topics(topics or None)
        for name in topics:
            if name not in states and name not in in_lake:
                raise UnknownTopicError(
                    f"there is no topic {name!r} on the server at {place.urls[0]}"
                )
        parts: list[Part] = []
        for name, state in sorted(states.items()):
            if state.start.offset < state.end.offset:
                parts += _split(log, Part(name, state.start, state.end))
    total = sum(part.bytes for part in parts)
    tasks = task_groups(parts, lambda part: part.bytes, total)
    results = runner.run(tasks, partial(check_served, place=place), phase(total))
    found = {name: LogTopic(state.end.epoch, [], [], []) for name, state in sorted(states.items())}
    for part, one in zip(parts, (one for some in results for one in some), strict=True):
        topic = found[part.topic]
        topic.sound.extend(one.ranges)
        topic.findings.extend(_finding(damage, topic.epoch) for damage in one.damages)
        start, end = part.start, part.end
        topic.whole.append(VerifiedRange(start.offset, end.offset, start.ordinal, end.ordinal))
    for name, topic in found.items():
        if not topic.whole:
            end = states[name].end
            topic.whole.append(_nothing_at(end.offset, end.ordinal))
    kept = {name: [Kept(state.start.offset, state.end.offset)] for name, state in states.items()}
    note = (
        "the log was read as the server gives it: its catalogue and its journal were not looked at"
    )
    return LogAccount(place.urls[0], place, kept, found, notes=[note])


def _split(log: ServerLog, whole: Part) -> Sequence[Part]:
    rest: Part | None = whole
    while rest is not None:
        try:
            return log.split(rest, TASK_BYTES_MAX // 4)
        except DataLossError as loss:
            rest = loss.rest  # retention has deleted the start meanwhile
    return ()


def check_served(parts: Sequence[Part], *, place: LogLocation) -> list[Findings]:
    """Check the rows and bytes that a server returns for each part.

    The server returns segments and journal as one log.
    """
    with closing(ServerLog(place)) as log:
        log.expect(parts)
        return [_Served(part).check(log) for part in parts]


class _Served(Findings):
    """Check of one part of a topic."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.topic)
        self._part = part
        self._offset = self._ordinal = 0
        self._damaged_rows = False

    def check(self, log: ServerLog) -> Findings:
        rest: Part | None = self._part
        while rest is not None:
            self._offset, self._ordinal = rest.start.offset, rest.start.ordinal
            try:
                for block in log.read(rest):
                    if isinstance(block, DamagedRange):
                        self._damaged_rows = True
                    else:
                        self._check_block(block)
                self._go_on_at(rest.end.offset, rest.end.ordinal)
                break
            except DataLossError as loss:
                # Retention has deleted records meanwhile: they are neither sound nor damaged.
                rest, self._damaged_rows = loss.rest, False
        return self

    def _check_block(self, block: LogBlock) -> None:
        start, end = self._part.start, self._part.end
        begin, view = int(block.rows["offset"][0]), memoryview(block.data)
        for row in block.rows:
            offset, ordinal, count = int(row["offset"]), int(row["ordinal"]), int(row["count"])
            stop = offset + int(row["length"])
            # The first and last rows may reach over a part's ends. Rows overlap where a tail was applied.
            here = VerifiedRange(
                max(offset, start.offset),
                min(stop, end.offset),
                max(ordinal, start.ordinal),
                min(ordinal + count, end.ordinal),
            )
            if here.end <= self._offset:
                continue
            if here.offset > self._offset:
                self._go_on_at(here.offset, here.ordinal)
            else:
                here = VerifiedRange(self._offset, here.end, self._ordinal, here.end_ordinal)
            data = bytes(view[offset - begin : stop - begin])
            if len(data) < stop - offset or crc32c(data) != int(row["crc"]):
                self.bad(_SERVED, "the checksum is wrong", here)
            elif not holds(data, count):
                self.bad(_SERVED, "the records do not fill their run", here)
            else:
                self.good(here)
            self._offset, self._ordinal = here.end, here.end_ordinal

    def _go_on_at(self, offset: int, ordinal: int) -> None:
        if self._damaged_rows or is_gap(self._offset, offset):
            gap = VerifiedRange(self._offset, offset, self._ordinal, ordinal)
            self.bad(_SERVED, "the index rows are damaged or missing", gap)
        self._damaged_rows = False
        self._offset, self._ordinal = offset, ordinal


_SERVED = "the server's log"
