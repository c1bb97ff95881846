"""Server-sent events of streams. The broker encodes a commit once for all readers of a topic.

Elsewhere: who reads, and for how long (`following.py`, `api.py`).
"""

import base64
from collections.abc import Callable, Sequence

import msgspec

from headrace.log.store import Topic
from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.server.http.streams import offsets
from headrace.server.http.streams.content import is_text, joined

CONTROL = b"event: control\ndata:"

CURSORS_BEGIN_MS = 1_728_432_000_000
"""2024-10-09. Cursors, which are keys for caches, number the intervals since then."""
CURSOR_INTERVAL_MS = 20_000


def cursor(now_ms: int, shown: int = -1) -> int:
    """Return the present cursor, which is greater than the one that a client has shown."""
    return max((now_ms - CURSORS_BEGIN_MS) // CURSOR_INTERVAL_MS, shown + 1)


def control(at: Position, cursor: int, *, is_last: bool, is_closed: bool) -> bytes:
    """Return the event that says how far a reader is."""
    fields: dict[str, object] = {"streamNextOffset": offsets.encode(at)}
    if not is_closed:
        fields["streamCursor"] = str(cursor)
    if is_last:
        fields["upToDate"] = True
    if is_closed:
        fields["streamClosed"] = True
    return CONTROL + msgspec.json.encode(fields) + b"\n\n"


def data(payloads: Sequence[bytes], content_type: str) -> bytes:
    """Return the event with these payloads."""
    body = joined(payloads, content_type)
    if not is_text(content_type):
        return b"event: data\ndata:" + base64.b64encode(body) + b"\n\n"
    text = body.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    # Parsers drop one space behind the colon.
    lines = [
        f"data: {line}" if line.startswith(" ") else f"data:{line}" for line in text.split("\n")
    ]
    return "\n".join(["event: data", *lines, "", ""]).encode()


class Encoding:
    """Encoding of a topic's records as events. All readers of the topic share it."""

    def __init__(self, topic: Topic, content_type: str, now_ms: Callable[[], int], shown: int = -1):
        self._topic = topic
        self._content_type = content_type
        self._now_ms = now_ms
        self._shown = shown
        self._commit_end = 0

    def takes(self, _: str, at: Position, records: Sequence[bytes]) -> bool:
        """Take all records of a commit, and note where it ends: a long one is encoded in several parts."""
        self._commit_end = at.offset + sum(map(len, records))
        return True

    def __call__(self, _: str, at: Position, records: Sequence[bytes], ms: int) -> bytes:
        end = at._replace(offset=at.offset + sum(map(len, records)))
        event = data([record[RECORD_HEADER_BYTES:] for record in records], self._content_type)
        # While a commit is written, the topic still ends before its records.
        is_last = end.offset >= max(self._topic.end_offset, self._commit_end)
        now = cursor(self._now_ms(), self._shown)
        return event + control(end, now, is_last=is_last, is_closed=False)
