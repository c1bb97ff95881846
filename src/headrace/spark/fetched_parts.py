"""Small parts of a server's log, fetched many at a time: a request for each takes longer than its bytes."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote_plus

from headrace.log.packed_ranges import RANGES_BYTES_MAX, RANGES_MAX, unpack
from headrace.spark.http_client import HttpClient, ServerError
from headrace.spark.index_rows import Index, Stretch, parse
from headrace.spark.log_view import Range

_SMALL_BYTES = 64 << 10
_TOTAL_BYTES = RANGES_BYTES_MAX // 2
"""Of all parts of a request: the server gives more than that, as it gives whole runs with their rows."""
_ADDRESS_BYTES = 32 << 10
"""Servers read addresses of up to 64 KiB."""
_NUMBERS_BYTES = 64
"""What the two offsets of a part take of that, at most."""


class Fetched(NamedTuple):
    """Rows of a part, and the bytes of their runs."""

    rows: Index
    data: memoryview
    offset: int

    def bytes(self, piece: Stretch) -> memoryview | None:
        """None where they are not all there, as rows were damaged."""
        first, last = piece.offset - self.offset, piece.end - self.offset
        return self.data[first:last] if 0 <= first < last <= len(self.data) else None


class FetchedParts:
    """What is there of the parts that were announced."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._expected: dict[Range, None] = {}
        """Small ones that are not fetched yet, in their order."""
        self._fetched: dict[Range, Fetched] = {}

    def expect(self, parts: Iterable[Range]) -> None:
        self._expected |= dict.fromkeys(one for one in parts if 0 < one.bytes <= _SMALL_BYTES)

    def take(self, part: Range) -> Fetched | None:
        """A part that was announced; None for any other, and for what the server does not give together."""
        if part in self._expected:
            self._fetch(part)
        return self._fetched.pop(part, None)

    def clear(self) -> None:
        self._expected.clear()
        self._fetched.clear()

    def _fetch(self, first: Range) -> None:
        parts = self._next(first)
        # One alone is no better off here.
        if len(parts) == 1:
            return
        query = {
            "topic": [one.topic for one in parts],
            "from": [one.start.offset for one in parts],
            "to": [one.end.offset for one in parts],
        }
        self._fetched.clear()
        try:
            answer = self._http.send("GET", "/v1/ranges", query)
        except ServerError as error:
            if error.is_away:
                raise
            # A proxy may not let this through: each is asked for alone, and says what is wrong with it.
            self._expected.clear()
            return
        for one, (rows, data, offset) in zip(parts, unpack(answer), strict=True):
            if rows:
                self._fetched[one] = Fetched(parse(bytes(rows)), data, offset)

    def _next(self, first: Range) -> list[Range]:
        """As many as fit in a request; whoever did not come for those before it will not come for them."""
        parts: list[Range] = []
        size = length = 0
        for one in list(self._expected):
            if not parts and one != first:
                del self._expected[one]
                continue
            size += one.bytes
            length += len(quote_plus(one.topic)) + _NUMBERS_BYTES
            if parts and (size > _TOTAL_BYTES or length > _ADDRESS_BYTES):
                break
            parts.append(one)
            del self._expected[one]
            if len(parts) == RANGES_MAX:
                break
        return parts
