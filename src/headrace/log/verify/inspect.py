"""Inspection of one topic and the catalogue in a data directory, without a server and without any change.

Takes no lock, so a server may be running on the directory. Journal contents that are not in the catalogue yet
are not shown.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import DataDirectoryError, UnknownTopicError
from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue, unreadable
from headrace.log.catalogue.rows import CursorRow, SegmentRow, TopicRow
from headrace.log.layout import Layout
from headrace.log.read.index import HEADER_BYTES, Header, decode_header
from headrace.log.store import Lag
from headrace.model import Position, Span, check_topic_name


def inspect_topic(data_dir: Path, name: str) -> dict[str, Any]:
    """Return the topic's state on disk, in the shape of the HTTP API's answer for the topic."""
    encoded = check_topic_name(name)
    layout = Layout(data_dir)
    with open_unchanged(data_dir) as view, view.snapshot():
        row = view.topic(encoded)
        if row is None:
            raise UnknownTopicError(f"there is no topic {name!r} in the segments of {data_dir}")
        segments = view.segments(row.id)
        kept = _kept(view, row)
        cursors = [
            _cursor(row, cursor, _kept(view, row, cursor))
            for cursor in sorted(view.cursors(encoded))
        ]
    return {
        "name": name,
        "epoch": row.epoch,
        "durability": row.durability.decode(),
        "start": {"offset": row.start_offset, "ordinal": row.start_ordinal},
        "end": {"offset": row.end_offset, "ordinal": row.end_ordinal},
        "records": kept.records,
        "bytes": kept.bytes,
        "last_ms": row.last_ms,
        "segments": [_segment(layout, segment) for segment in segments],
        "cursors": cursors,
    }


def read_index_header(layout: Layout, segment: SegmentRow) -> Header | None:
    """Return the header of a segment's index; None if the header is missing, cut off or damaged."""
    try:
        with layout.index(segment.topic_id, segment.base).open("rb") as file:
            return decode_header(file.read(HEADER_BYTES))
    except FileNotFoundError:
        return None


def _segment(layout: Layout, segment: SegmentRow) -> dict[str, Any]:
    header = read_index_header(layout, segment)
    return {
        "base": segment.base,
        "end": segment.end,
        "first_ordinal": segment.first_ordinal,
        "records": segment.end_ordinal - segment.first_ordinal,
        "bytes": segment.end - segment.base,
        "first_ms": segment.first_ms,
        "last_ms": segment.last_ms,
        # The topic's epoch when the segment was begun. The catalogue has only the topic's present epoch.
        "epoch": header.epoch if header is not None else None,
    }


def _kept(view: Catalogue, topic: TopicRow, after: CursorRow | None = None) -> Span:
    offset, ordinal = topic.start_offset, topic.start_ordinal
    if after is not None:
        offset, ordinal = max(offset, after.offset), max(ordinal, after.ordinal)
    end = Position(topic.epoch, topic.end_offset, topic.end_ordinal)
    return view.stored(topic.id, Position(topic.epoch, offset, ordinal), end)


def _cursor(topic: TopicRow, cursor: CursorRow, behind: Span) -> dict[str, Any]:
    at = Position(cursor.epoch, cursor.offset, cursor.ordinal)
    lag = Lag.of(at, Position(topic.epoch, topic.start_offset, topic.start_ordinal), behind)
    return {
        "reader": cursor.reader.decode(),
        **at._asdict(),
        "ms": cursor.ms,
        "lag_records": lag.records,
        "lag_bytes": lag.bytes,
        "gone_records": lag.gone_records,
    }


class CatalogueView(Catalogue):
    """The catalogue for reading, with snapshots that several reads can share."""

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def segment_bytes(self, topic_ids: Sequence[int] | None) -> int:
        """Return the size in bytes of all segments of these topics, or of all topics if None."""
        if topic_ids is not None:
            rows = (row for topic_id in topic_ids for row in self.segments(topic_id))
            return sum(row.end - row.base for row in rows)
        (total,) = self._db.execute("SELECT total(end - base) FROM segments").fetchone()
        return int(total)


@contextmanager
def open_unchanged(data_dir: Path, name: str = FILE_NAME) -> Iterator[CatalogueView]:
    """Open the catalogue of a directory that may be read-only, in use, or copied from elsewhere.

    SQLite's own read-only mode would leave its log and shared memory files behind.
    """
    path = data_dir / name
    if not path.exists():
        what = "there is no such directory" if not data_dir.exists() else f"there is no {name}"
        raise DataDirectoryError(f"{data_dir} holds no Headrace log: {what}")
    with ExitStack() as stack:
        try:
            if path.with_name(f"{name}-shm").exists():
                query = "mode=ro"  # a server runs, or was killed: the shared memory file is there
            elif path.with_name(f"{name}-wal").exists():
                path = _copy(path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
                query = "mode=ro"
            else:
                query = "immutable=1"
            uri = f"{path.resolve().as_uri()}?{query}"
            db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
            stack.callback(db.close)
            db.execute("SELECT 1 FROM meta").fetchone()
        except sqlite3.DatabaseError as error:
            raise unreadable(data_dir / name, error) from error
        yield CatalogueView(db, data_dir / name)


def _copy(path: Path, directory: Path) -> Path:
    """Copy the catalogue together with its write-ahead log, which may hold the latest changes."""
    for file in (path, path.with_name(f"{path.name}-wal")):
        shutil.copyfile(file, directory / file.name)
    return directory / path.name
