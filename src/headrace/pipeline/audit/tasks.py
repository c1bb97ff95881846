"""Tasks of an audit that check the log: segments in a directory, or the records that a server returns.

A task checks a segment with few calls per megabyte. Only if it finds anything, the check of `headrace verify`
reads the segment again. So both commands describe damage in the same words.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

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
from headrace.log.verify.checks import Findings, SegmentCheck, SegmentWork, VerifiedRange
from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES
from headrace.pipeline.tasks import NotSharedError
from headrace.reader.decode import boundaries, is_gap, parse
from headrace.reader.server import ServerLog
from headrace.reader.view import DamagedRange, DataLossError, LogBlock, LogLocation, Rows
from headrace.reader.view import LogRange as Part

_BLOCK_BYTES = 16 << 20
"""Size of a block that is read at once: record sizes are followed in all runs of a block together."""
_EVEN_BLOCK_BYTES = 2 << 20
"""Block size if all records have the same size: they are checked while still in the processor's cache."""
_READ_BYTES = RUN_BYTES_MAX
_ROWS_AT_ONCE = 65_536

_Numbers = npt.NDArray[np.int64]


# Segments


class AuditPiece(NamedTuple):
    """Some rows of a segment's index, and the records that they cover."""

    topic: TopicRow
    segment: SegmentRow
    first: int
    last: int


class _Place(NamedTuple):
    offset: int
    ordinal: int
    ms: int


class Chain(NamedTuple):
    """Start and end of a piece that is completely sound."""

    epoch: int
    start: _Place
    end: _Place


def check_pieces(pieces: Sequence[AuditPiece], *, root: Path) -> list[Chain | None]:
    """Check pieces of segments; the result is None for each piece that may be damaged."""
    layout = _layout(root)
    # All pieces share one buffer: memory that is new to the process would cost a third of the reading time.
    largest = max((one.segment.end - one.segment.base for one in pieces), default=0)
    space = memoryview(bytearray(min(_BLOCK_BYTES, largest)))
    return [_chain(layout, piece, space) for piece in pieces]


def check_segments(works: Sequence[SegmentWork], *, root: Path) -> list[SegmentCheck]:
    """Check segments in the way of `headrace verify`, with the same words for damage."""
    layout = _layout(root)
    checks = [SegmentCheck(layout, *one) for one in works]
    for check in checks:
        check.run(lambda _: None)
    return checks


def sound_segment(
    layout: Layout, work: SegmentWork, found: Sequence[Chain | None]
) -> SegmentCheck | None:
    """Return the check of a whole segment if its pieces are sound and adjacent; otherwise None."""
    topic, segment = work
    chains = [one for one in found if one is not None]
    if not chains or len(chains) < len(found):
        return None
    for one, other in pairwise(chains):
        if one.end[:2] != other.start[:2] or one.end.ms > other.start.ms:
            return None
    start, end = chains[0].start, chains[-1].end
    begins = start[:2] == (segment.base, segment.first_ordinal)
    ends = end == (segment.end, segment.end_ordinal, segment.last_ms)
    if not begins or not ends or start.ms < segment.first_ms:
        return None
    check = SegmentCheck(layout, topic, segment)
    check.epoch = chains[0].epoch
    check.good(VerifiedRange(segment.base, segment.end, segment.first_ordinal, segment.end_ordinal))
    return check


def _layout(root: Path) -> Layout:
    layout = Layout(root)
    if not layout.segments.is_dir():
        raise NotSharedError(
            f"{root} is not a data directory for Spark's executors: mount it at the same path there, or give "
            "the server's address"
        )
    return layout


def _chain(layout: Layout, piece: AuditPiece, space: memoryview) -> Chain | None:
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
            return _Rows(index.fileno(), log.fileno(), piece, space).chain(header.epoch)
    except (OSError, ValueError):
        return None  # `check_segments` reads the segment again and names the damage


class _Rows:
    """The same checks as `SegmentCheck` makes row by row, for many rows and records at once."""

    def __init__(self, index: int, log: int, piece: AuditPiece, space: memoryview) -> None:
        self._index, self._log, self._space = index, log, space
        self._piece = piece

    def chain(self, epoch: int) -> Chain | None:
        first: _Place | None = None
        at: _Place | None = None
        for number in range(self._piece.first, self._piece.last, _ROWS_AT_ONCE):
            wanted = min(_ROWS_AT_ONCE, self._piece.last - number) * ROW_BYTES
            data = os.pread(self._index, wanted, row_position(number))
            if len(data) < wanted:
                return None
            index = parse(data)
            if index.gaps:
                return None
            rows = index.rows
            if at is None:
                at = first = _Place(*(int(rows[name][0]) for name in ("offset", "ordinal", "ms")))
            at = self._followed(rows, at)
            if at is None or not all(map(self._holds, _blocks(rows))):
                return None
        return Chain(epoch, first, at) if first is not None and at is not None else None

    def _followed(self, rows: Rows, at: _Place) -> _Place | None:
        """Return the end of the rows if each begins where the previous one ends; otherwise None."""
        lengths, counts = rows["length"].astype(np.int64), rows["count"].astype(np.int64)
        offsets, ordinals = _sums(at.offset, lengths), _sums(at.ordinal, counts)
        ms = rows["ms"].astype(np.int64)
        sound = (
            bool(lengths.all() and counts.all())
            and np.array_equal(rows["offset"], offsets[:-1])
            and np.array_equal(rows["ordinal"], ordinals[:-1])
            and int(ms[0]) >= at.ms
            and bool((np.diff(ms) >= 0).all())
            and self._piece.segment.base <= at.offset
            and int(offsets[-1]) <= self._piece.segment.end
        )
        return _Place(int(offsets[-1]), int(ordinals[-1]), int(ms[-1])) if sound else None

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


# A server's log


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
        self._offset, self._ordinal = part.start.offset, part.start.ordinal
        self._damaged_rows = False

    def check(self, log: ServerLog) -> Findings:
        end = self._part.end
        try:
            for block in log.read(self._part):
                if isinstance(block, DamagedRange):
                    self._damaged_rows = True
                else:
                    self._check_block(block)
        except DataLossError:
            pass  # retention has deleted the records meanwhile: they are neither sound nor damaged
        else:
            self._go_on_at(end.offset, end.ordinal)
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
