"""Inspection of one topic and the catalogue in a data directory, without a server and without any change.

Takes no lock, so a server may be running on the directory. Journal contents that are not in the catalogue yet
are not shown.
"""

from pathlib import Path
from typing import Any

from headrace.errors import UnknownTopicError
from headrace.log.catalogue.catalogue import Catalogue, open_unchanged
from headrace.log.catalogue.rows import CursorRow, SegmentRow, TopicRow
from headrace.log.layout import Layout
from headrace.log.read.index import HEADER_BYTES, decode_header
from headrace.log.read.reader import segment_info
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


def _segment(layout: Layout, segment: SegmentRow) -> dict[str, Any]:
    try:
        with layout.index(segment.topic_id, segment.base).open("rb") as file:
            header = decode_header(file.read(HEADER_BYTES))
    except FileNotFoundError:
        header = None
    # The topic's epoch when the segment was begun. The catalogue has only the topic's present epoch.
    epoch = header.epoch if header is not None else None
    return {**segment_info(segment)._asdict(), "epoch": epoch}


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
