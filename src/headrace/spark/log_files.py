"""A log in a data directory, read by its index files alone: also while a server writes, or on shared storage.

What it sees is what is applied: a few seconds behind the server. It never opens the catalogue, takes no
lock and changes nothing.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.log.index import HEADER_BYTES, decode_header
from headrace.log.layout import Layout
from headrace.log.records import boundary, nth
from headrace.model import Position
from headrace.spark.index_rows import Gap, Index, Rows, parse, stretches
from headrace.spark.log_view import Block, Damage, DataLossError, Range, SourceError, TopicState

_SCAN_S = 2.0
"""How often directories are looked at for new files: what is applied comes in steps of about that time."""

_STAMP_NS = 5_000_000_000
"""A directory that changed so recently is listed again: two changes may bear the same time."""

_BLOCK_BYTES = 16 << 20

_INDEXES_MAX = 64
"""Indexes kept in memory: planning asks for the same ones several times."""


class _Segment(NamedTuple):
    topic_id: int
    base: int
    first_ordinal: int
    epoch: int
    name: str


class FileLog:
    """Implements `log_view.LogView`."""

    def __init__(self, root: str) -> None:
        self._layout = Layout(Path(root))
        if not self._layout.segments.is_dir():
            there = Path(root).is_dir()
            what = "there is no `segments` in it" if there else "there is no such directory"
            raise SourceError(f"path {root!r} is no data directory of Headrace: {what}")
        self._directories: dict[str, tuple[int, dict[str, _Segment]]] = {}
        self._topics: dict[str, list[_Segment]] = {}
        self._states: dict[str, tuple[int, TopicState]] = {}
        """With the size that the last index had then."""
        self._indexes: dict[tuple[int, int], tuple[int, Index]] = {}
        self._scanned_s = 0.0

    # Topics

    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        self._scan()
        wanted = self._topics if names is None else [n for n in names if n in self._topics]
        states = {}
        for name in wanted:
            try:
                states[name] = self._state(name)
            except FileNotFoundError:
                # Deleted since the last look: the next one sees what has become of the topic.
                self._scanned_s = 0.0
                self._directories.clear()
                return self.topics(names)
        return states

    def wait(self, timeout_s: float) -> None:
        # Nothing tells when files of others grow, and looking at their sizes costs little.
        time.sleep(timeout_s)

    def _scan(self) -> None:
        """Find index files that have come or gone, in directories that have changed."""
        if self._scanned_s and time.monotonic() - self._scanned_s < _SCAN_S:
            return
        self._scanned_s = time.monotonic()
        changed = False
        with os.scandir(self._layout.segments) as found:
            for directory in found:
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
            for segment in files.values():
                topics.setdefault(segment.name, []).append(segment)
        for name, segments in topics.items():
            # Of a topic made anew, files of its earlier life may not be swept yet.
            life = max(segment.topic_id for segment in segments)
            topics[name] = sorted(s for s in segments if s.topic_id == life)
        self._topics = dict(sorted(topics.items()))
        self._states.clear()

    def _state(self, name: str) -> TopicState:
        segments = self._topics[name]
        last = segments[-1]
        size = os.stat(self._index_path(last)).st_size
        known = self._states.get(name)
        if known is not None and known[0] == size:
            return known[1]
        start = Position(last.epoch, segments[0].base, segments[0].first_ordinal)
        state = TopicState(name, start, self._end(segments))
        self._states[name] = size, state
        return state

    def _end(self, segments: Sequence[_Segment]) -> Position:
        epoch = segments[-1].epoch
        for segment in reversed(segments):
            rows = self._rows(segment)
            if len(rows):
                end = int(rows["offset"][-1]) + int(rows["length"][-1])
                return Position(epoch, end, int(rows["ordinal"][-1]) + int(rows["count"][-1]))
        return Position(epoch, segments[0].base, segments[0].first_ordinal)

    # Positions

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        if offset <= topic.start.offset:
            return topic.start
        found = self._run(topic, "offset", "length", offset)
        if found is None:
            return topic.end
        segment, row = found
        start = int(row["offset"])
        inside = max(0, offset - start)
        data = self._bytes(segment, start, int(row["length"])) if inside else b""
        at, passed = boundary(data, inside)
        return Position(topic.end.epoch, start + at, int(row["ordinal"]) + passed)

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        if ordinal <= topic.start.ordinal:
            return topic.start
        found = self._run(topic, "ordinal", "count", ordinal)
        if found is None:
            return topic.end
        segment, row = found
        start, first = int(row["offset"]), int(row["ordinal"])
        inside = max(0, ordinal - first)
        data = self._bytes(segment, start, int(row["length"])) if inside else b""
        return Position(topic.end.epoch, start + nth(data, inside), first + inside)

    def at_time(self, topic: TopicState, ms: int) -> Position:
        for segment in self._topics.get(topic.name, ()):
            rows = self._rows(segment)
            number = int(np.searchsorted(rows["ms"], ms, "left"))
            if number < len(rows):
                row = rows[number]
                return Position(topic.end.epoch, int(row["offset"]), int(row["ordinal"]))
        return topic.end

    def _run(
        self, topic: TopicState, key: str, width: str, value: int
    ) -> tuple[_Segment, np.void] | None:
        """The row of the run that contains a value, or of the next one."""
        for segment in self._topics.get(topic.name, ()):
            rows = self._rows(segment)
            ends = rows[key].astype(np.int64) + rows[width]
            number = int(np.searchsorted(ends, value, "right"))
            if number < len(rows):
                return segment, rows[number]
        return None

    # Parts

    def split(self, whole: Range, bytes_max: int) -> Sequence[Range]:
        parts: list[Range] = []
        start, files = whole.start, list[int]()
        segments = self._topics.get(whole.topic, [])
        for segment in segments:
            rows = self._rows(segment)
            if not len(rows) or segment.base >= whole.end.offset:
                continue
            if int(rows["offset"][-1]) + int(rows["length"][-1]) <= start.offset:
                continue
            files.append(segment.base)
            while True:
                # The next row that lies far enough behind the start of this part.
                number = int(np.searchsorted(rows["offset"], start.offset + bytes_max, "left"))
                if number == len(rows) or int(rows["offset"][number]) >= whole.end.offset:
                    break
                row = rows[number]
                at = Position(whole.end.epoch, int(row["offset"]), int(row["ordinal"]))
                parts.append(Range(whole.topic, start, at, (segment.topic_id, *files)))
                start, files = at, [segment.base]
        if files:
            parts.append(Range(whole.topic, start, whole.end, (segments[0].topic_id, *files)))
        return parts

    def read(self, part: Range) -> Iterator[Block | Damage]:
        topic_id, *bases = part.files
        for base in bases:
            try:
                yield from self._blocks(_Segment(topic_id, base, 0, 0, part.topic), part)
            except FileNotFoundError:
                name = self._layout.segment(topic_id, base).name
                raise DataLossError(
                    f"topic {part.topic!r}: its segment {name} was deleted while it was to be read"
                ) from None

    def _blocks(self, segment: _Segment, part: Range) -> Iterator[Block | Damage]:
        path = self._layout.segment(segment.topic_id, segment.base)
        place = f"segment {path.name}"
        index = self._read_index(segment)
        start = max(part.start.offset, segment.base)
        with path.open("rb") as file:
            for piece in stretches(index, start, part.end.offset, _BLOCK_BYTES):
                if isinstance(piece, Gap):
                    yield Damage(piece.offset, piece.end, place)
                    continue
                length, position = piece.end - piece.offset, piece.offset - segment.base
                yield Block(piece.rows, os.pread(file.fileno(), length, position), place)

    # Files

    def _index_path(self, segment: _Segment) -> Path:
        return self._layout.index(segment.topic_id, segment.base)

    def _rows(self, segment: _Segment) -> Rows:
        return self._read_index(segment).rows

    def _read_index(self, segment: _Segment) -> Index:
        with self._index_path(segment).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            key = (segment.topic_id, segment.base)
            known = self._indexes.get(key)
            if known is None or known[0] != size:
                file.seek(HEADER_BYTES)
                known = size, parse(file.read(max(0, size - HEADER_BYTES)))
                if len(self._indexes) >= _INDEXES_MAX:
                    self._indexes.pop(next(iter(self._indexes)))
                self._indexes[key] = known
        return known[1]

    def _bytes(self, segment: _Segment, offset: int, length: int) -> bytes:
        with self._layout.segment(segment.topic_id, segment.base).open("rb") as file:
            return os.pread(file.fileno(), length, offset - segment.base)


def _list(directory: str, known: dict[str, _Segment]) -> dict[str, _Segment]:
    files = {}
    for name in os.listdir(directory):
        if name.endswith(".idx"):
            segment = known.get(name) or _read_header(os.path.join(directory, name))
            if segment is not None:
                files[name] = segment
    return files


def _read_header(path: str) -> _Segment | None:
    """What an index says of itself; None when it is just being made, or gone, or damaged."""
    try:
        with open(path, "rb") as file:
            header = decode_header(file.read(HEADER_BYTES))
    except FileNotFoundError:
        return None
    if header is None:
        return None
    return _Segment(header.topic_id, header.base, header.first_ordinal, header.epoch, header.name)
