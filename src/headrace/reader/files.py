"""A log in a data directory, read through its index files only.

It works while a server writes to the directory, and on shared storage. It sees the records that are applied
to segments, a few seconds behind the server. It never opens the catalogue, takes no lock and changes nothing.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c

from headrace.log.layout import Layout, segment_of
from headrace.log.read.index import HEADER_BYTES, ROW_BYTES, decode_header
from headrace.log.records import boundary, nth
from headrace.model import Position
from headrace.reader.decode import Index, Stretch, parse, stretches
from headrace.reader.view import (
    DamagedRange,
    DataLossError,
    LogBlock,
    LogRange,
    Rows,
    SourceError,
    TopicState,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SCAN_S = 2.0
"""Seconds between scans for new files. The server applies records about as often."""

_STAMP_NS = 5_000_000_000
"""A directory that changed more recently than this is listed again.

Two changes within the clock's resolution may have the same modification time.
"""

_BLOCK_BYTES = 16 << 20

_INDEXES_MAX = 64
"""Number of indexes kept in memory, because planning reads the same ones several times."""


class _Segment(NamedTuple):
    topic_id: int
    base: int
    first_ordinal: int
    epoch: int
    name: str


class FileLog:
    """Implementation of `view.LogView` for a data directory."""

    def __init__(self, root: str) -> None:
        self._layout = Layout(Path(root))
        if not self._layout.segments.is_dir():
            there = Path(root).is_dir()
            what = "there is no `segments` in it" if there else "there is no such directory"
            raise SourceError(f"path {root!r} is not a data directory of Headrace: {what}")
        self._directories: dict[str, tuple[int, dict[str, _Segment]]] = {}
        self._topics: dict[str, list[_Segment]] = {}
        self._states: dict[str, tuple[int, TopicState]] = {}
        """State of each topic, with the size of its last index when the state was computed."""
        self._indexes: dict[tuple[int, int], tuple[int, Index]] = {}
        self._scanned_s = 0.0
        self._buffer = bytearray()

    # Topics

    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        self._scan()
        wanted = self._topics if names is None else [n for n in names if n in self._topics]
        states = {}
        for name in wanted:
            try:
                states[name] = self._state(name)
            except FileNotFoundError:
                # The index was deleted since the last scan. A new scan shows the topic's present files.
                self._scanned_s = 0.0
                self._directories.clear()
                return self.topics(names)
        return states

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        return {}  # a destroyed topic leaves no files

    def wait(self, timeout_s: float) -> None:
        # Appends by another process cannot be subscribed to, and checking file sizes is cheap.
        time.sleep(timeout_s)

    def _scan(self) -> None:
        """Find index files that were added or deleted, in directories that have changed."""
        if self._scanned_s and time.monotonic() - self._scanned_s < _SCAN_S:
            return
        self._scanned_s = time.monotonic()
        changed = False
        with os.scandir(self._layout.segments) as found:
            for directory in found:
                if not directory.is_dir():
                    continue
                stamp = directory.stat().st_mtime_ns
                known = self._directories.get(directory.name)
                if known is None or known[0] != stamp or time.time_ns() - stamp < _STAMP_NS:
                    files = _list(directory.path, known[1] if known else {})
                    changed |= known is None or files != known[1]
                    self._directories[directory.name] = stamp, files
        if changed:
            self._group()

    def _group(self) -> None:
        topics: dict[str, list[_Segment]] = {}
        for _, files in self._directories.values():
            names = {one.topic_id: one for one in files.values() if one.name}
            for segment in files.values():
                # If the header is damaged, another segment of the topic still has the name.
                other = segment if segment.name else names.get(segment.topic_id)
                if other is not None:
                    found = segment._replace(name=other.name, epoch=other.epoch)
                    topics.setdefault(other.name, []).append(found)
        for name, segments in topics.items():
            # If a topic was destroyed and made again, files of its earlier epoch may still exist.
            life = max(segment.topic_id for segment in segments)
            topics[name] = sorted(s for s in segments if s.topic_id == life)
        self._topics = dict(sorted(topics.items()))
        self._states.clear()

    def _state(self, name: str) -> TopicState:
        segments = self._topics[name]
        last = segments[-1]
        size = os.stat(self._layout.index(last.topic_id, last.base)).st_size
        known = self._states.get(name)
        if known is not None and known[0] == size:
            return known[1]
        start = end = Position(last.epoch, segments[0].base, segments[0].first_ordinal)
        for segment in reversed(segments):
            index = self._read_index(segment.topic_id, segment.base)
            if len(index.rows):
                end = Position(last.epoch, index.end_offset, index.end_ordinal)
                break
        state = TopicState(name, start, end)
        self._states[name] = size, state
        return state

    # Positions

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        if offset <= topic.start.offset:
            return topic.start
        if offset >= topic.end.offset:
            return topic.end
        return self._at(topic, "offset", "length", offset, boundary)

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        if ordinal <= topic.start.ordinal:
            return topic.start
        return self._at(topic, "ordinal", "count", ordinal, lambda data, n: (nth(data, n), n))

    def at_time(self, topic: TopicState, ms: int) -> Position:
        for segment, index in self._kept_indexes(self._topics.get(topic.name, ())):
            number = int(np.searchsorted(index.rows["ms"], ms, "left"))
            if number < len(index.rows):
                row = index.rows[number]
                if segment.base <= topic.start.offset and not number:
                    return topic.start
                return _within(topic, int(row["offset"]), int(row["ordinal"]))
        return topic.end

    def _at(
        self,
        topic: TopicState,
        key: str,
        width: str,
        value: int,
        inside: Callable[[bytes, int], tuple[int, int]],
    ) -> Position:
        """Return the position of `value` in the column `key`, in the run that contains it or in the next.

        `inside` returns the offset and the ordinal in a run, both relative to its start.
        """
        for segment, (rows, _) in self._kept_indexes(self._topics.get(topic.name, ())):
            ends = rows[key].astype(np.int64) + rows[width]
            number = int(np.searchsorted(ends, value, "right"))
            if number == len(rows):
                continue
            row = rows[number]
            offset = ordinal = 0
            if value > int(row[key]):
                data = self._sound_bytes(segment, row)
                # Positions inside of a damaged run cannot be found: take its end.
                end = int(row["length"]), int(row["count"])
                offset, ordinal = inside(data, value - int(row[key])) if data is not None else end
            return _within(topic, int(row["offset"]) + offset, int(row["ordinal"]) + ordinal)
        return topic.end

    def _kept_indexes(self, segments: Iterable[_Segment]) -> Iterator[tuple[_Segment, Index]]:
        """Yield the segments with their indexes, without those that were deleted since the last scan."""
        for segment in segments:
            with contextlib.suppress(FileNotFoundError):
                yield segment, self._read_index(segment.topic_id, segment.base)

    # Parts

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        parts: list[LogRange] = []
        start, files = whole.start, list[int]()
        segments = self._holding(whole)
        for number, segment in enumerate(segments):
            if number + 1 < len(segments) and segments[number + 1].base <= start.offset:
                continue
            try:
                rows = self._read_index(segment.topic_id, segment.base).rows
            except FileNotFoundError:
                files.append(segment.base)  # the task that reads it gets and handles the data loss
                continue
            for row in _rows_apart(rows, start.offset, whole.end.offset, bytes_max):
                at = Position(whole.end.epoch, int(row["offset"]), int(row["ordinal"]))
                if at.offset > segment.base:
                    files.append(segment.base)
                parts.append(LogRange(whole.topic, start, at, (segment.topic_id, *files)))
                start, files = at, []
            files.append(segment.base)
        if files:
            parts.append(LogRange(whole.topic, start, whole.end, (segments[0].topic_id, *files)))
        return parts

    def _holding(self, whole: LogRange) -> list[_Segment]:
        """Return the segments that hold a range; raise `DataLossError` if its beginning is gone."""
        segments = self._topics.get(whole.topic, [])
        found = [one for one in segments if one.base < whole.end.offset]
        if not found:
            raise DataLossError(
                f"topic {whole.topic!r} has no files any more that hold its records"
            )
        oldest = found[0]
        if oldest.base > whole.start.offset:
            start = Position(whole.end.epoch, oldest.base, oldest.first_ordinal)
            raise DataLossError(
                f"topic {whole.topic!r}: retention has overtaken the read: its records before offset "
                f"{oldest.base} are gone",
                whole._replace(start=start) if start.ordinal < whole.end.ordinal else None,
            )
        # A last segment whose rows are all damaged lies after the topic's known end. Report its damage too.
        later = self._kept_indexes(segments[len(found) :])
        return found + [one for one, index in later if not len(index.rows) and index.gaps]

    def expect(self, parts: Iterable[LogRange]) -> None:
        """Do nothing: local files need no prefetching."""

    def read(self, part: LogRange) -> Iterator[LogBlock | DamagedRange]:
        return self._each_file(part, self._blocks)

    def rows(self, part: LogRange) -> Iterator[Rows | DamagedRange]:
        return self._each_file(part, self._rows)

    def _each_file(
        self, part: LogRange, read: Callable[[Path, int, Index, int, int], Iterator[T]]
    ) -> Iterator[T]:
        topic_id, *bases = part.files
        for number, base in enumerate(bases):
            later = bases[number + 1 :]
            start, end = max(part.start.offset, base), min([part.end.offset, *later[:1]])
            path = self._layout.segment(topic_id, base)
            try:
                yield from read(path, base, self._read_index(topic_id, base), start, end)
            except FileNotFoundError:
                raise DataLossError(
                    f"topic {part.topic!r}: its segment {path.name} was deleted before it was read",
                    part._replace(files=(topic_id, *later)) if later else None,
                ) from None

    def _blocks(
        self, path: Path, base: int, index: Index, start: int, end: int
    ) -> Iterator[LogBlock | DamagedRange]:
        place = f"segment {path.name}"
        with path.open("rb") as file:
            for piece in stretches(index, start, end, _BLOCK_BYTES, place):
                if isinstance(piece, DamagedRange):
                    yield piece
                else:
                    wanted = self._space(piece.end - piece.offset)
                    found = os.preadv(file.fileno(), [wanted], piece.offset - base)
                    yield LogBlock(piece.rows, wanted[:found], place)
            # A topic ends at its last sound row, so no part includes the damage after it. Report it here.
            known = index.end_offset if len(index.rows) else base
            written = base + os.fstat(file.fileno()).st_size
            if len(index.rows) in index.gaps and end <= known < written:
                yield DamagedRange(known, written, place)

    def _rows(
        self, path: Path, base: int, index: Index, start: int, end: int
    ) -> Iterator[Rows | DamagedRange]:
        for piece in stretches(index, start, end, end - base, f"segment {path.name}"):
            yield piece.rows if isinstance(piece, Stretch) else piece

    def _space(self, length: int) -> memoryview:
        """Return a buffer that every block reuses: new memory would cost a third of the read time."""
        if len(self._buffer) < length:
            self._buffer = bytearray(max(length, _BLOCK_BYTES))
        return memoryview(self._buffer)[:length]

    def close(self) -> None:
        """Do nothing: no file stays open between two calls."""

    # Files

    def _read_index(self, topic_id: int, base: int) -> Index:
        with self._layout.index(topic_id, base).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            key = (topic_id, base)
            known = self._indexes.get(key)
            if known is None or known[0] != size:
                file.seek(HEADER_BYTES)
                known = size, parse(file.read(max(0, size - HEADER_BYTES)))
                if len(self._indexes) >= _INDEXES_MAX:
                    self._indexes.pop(next(iter(self._indexes)))
                self._indexes[key] = known
        return known[1]

    def _sound_bytes(self, segment: _Segment, row: np.void) -> bytes | None:
        """Return the bytes of a run; None if they are damaged or deleted."""
        try:
            with self._layout.segment(segment.topic_id, segment.base).open("rb") as file:
                position = int(row["offset"]) - segment.base
                data = os.pread(file.fileno(), int(row["length"]), position)
        except FileNotFoundError:
            return None
        return data if crc32c(data) == int(row["crc"]) else None


def _within(topic: TopicState, offset: int, ordinal: int) -> Position:
    """Return the position, capped at the topic's known end: files may have grown since then."""
    if ordinal >= topic.end.ordinal:
        return topic.end
    return Position(topic.end.epoch, offset, ordinal)


def _rows_apart(rows: Rows, start: int, end: int, bytes_max: int) -> Iterator[np.void]:
    """Yield rows before `end` that are at least `bytes_max` apart from each other and from `start`."""
    offsets = rows["offset"].astype(np.int64)
    while True:
        number = int(np.searchsorted(offsets, start + bytes_max, "left"))
        if number == len(rows) or offsets[number] >= end:
            return
        yield rows[number]
        start = int(offsets[number])


def _list(directory: str, known: dict[str, _Segment]) -> dict[str, _Segment]:
    files = {}
    for name in os.listdir(directory):
        # Files with other names do not belong to Headrace.
        if name.endswith(".idx") and (named := segment_of(name)) is not None:
            segment = known.get(name) or _read_header(os.path.join(directory, name), *named)
            if segment is not None:
                files[name] = segment
    return files


def _read_header(path: str, topic_id: int, base: int) -> _Segment | None:
    """Read the header of an index file.

    Return None if the file is deleted or just being created. The name is empty if the header is damaged.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES + ROW_BYTES)
    except FileNotFoundError:
        return None
    if len(data) < HEADER_BYTES:
        return None
    header = decode_header(data)
    if header is not None:
        return _Segment(topic_id, base, header.first_ordinal, header.epoch, header.name)
    logger.warning("%s: the header is damaged", path)
    rows = parse(data[HEADER_BYTES:]).rows
    return _Segment(topic_id, base, int(rows["ordinal"][0]) if len(rows) else 0, 0, "")
