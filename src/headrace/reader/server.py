"""A log behind the HTTP listener of a running server: fetches index rows and raw bytes, decodes locally.

Small parts are fetched together, because one request per part would cost more than its bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote_plus

import numpy as np

from headrace.log.read.raw import RANGES_BYTES_MAX, RANGES_MAX, unpack
from headrace.model import Durability, Position
from headrace.reader.decode import Index, Stretch, parse, stretches
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.planning import groups
from headrace.reader.view import (
    DamagedRange,
    DataLossError,
    LogBlock,
    LogLocation,
    LogRange,
    Rows,
    TopicState,
)

_TOTAL_BYTES = RANGES_BYTES_MAX // 2
"""Maximum total size of the parts in a request.

The server's answer is larger than the parts, because it contains whole runs and their rows.
"""
_SMALL_BYTES = _TOTAL_BYTES // 2
"""Maximum size of a part that shares a request. A larger part takes two requests of its own, or more."""
_ADDRESS_BYTES = 32 << 10
"""Maximum length of a request's address. Servers accept addresses of up to 64 KiB."""
_NUMBERS_BYTES = 64
"""Upper bound of what the two offsets of a part add to the address."""


class Fetched(NamedTuple):
    """Index rows of a part, and the bytes of their runs."""

    rows: Index
    data: memoryview
    offset: int

    def bytes(self, piece: Stretch) -> memoryview | None:
        """Return the bytes of a stretch; None if some are missing because rows were damaged."""
        first, last = piece.offset - self.offset, piece.end - self.offset
        return self.data[first:last] if 0 <= first < last <= len(self.data) else None


class FetchedParts:
    """Parts that were announced with `expect`, fetched together on the first `take`."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._expected: dict[LogRange, None] = {}
        """Announced small parts that are not fetched yet, in reading order."""
        self._fetched: dict[LogRange, Fetched] = {}

    def expect(self, parts: Iterable[LogRange]) -> None:
        self._expected |= dict.fromkeys(one for one in parts if 0 < one.bytes <= _SMALL_BYTES)

    def take(self, part: LogRange) -> Fetched | None:
        """Return an announced part; None for any other part, and if the combined answer lacks it."""
        if part in self._expected:
            self._fetch(part)
        return self._fetched.pop(part, None)

    def clear(self) -> None:
        self._expected.clear()
        self._fetched.clear()

    def _fetch(self, first: LogRange) -> None:
        parts = self._next(first)
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
            # A proxy may reject this request. Each part is then requested alone, and shows its own error.
            self._expected.clear()
            return
        for one, (rows, data, offset) in zip(parts, unpack(answer), strict=True):
            if rows:
                self._fetched[one] = Fetched(parse(bytes(rows)), data, offset)

    def _next(self, first: LogRange) -> list[LogRange]:
        """Return as many expected parts as fit in a request, beginning with `first`.

        Parts before `first` are forgotten: the caller reads in order, so it has skipped them.
        """
        parts: list[LogRange] = []
        passed: list[LogRange] = []
        size = length = 0
        for one in self._expected:
            if not parts and one != first:
                passed.append(one)
                continue
            size += one.bytes
            length += len(quote_plus(one.topic)) + _NUMBERS_BYTES
            if parts and (size > _TOTAL_BYTES or length > _ADDRESS_BYTES):
                break
            parts.append(one)
            if len(parts) == RANGES_MAX:
                break
        for one in (*passed, *parts):
            del self._expected[one]
        return parts


_PAGE = 1000
_BLOCK_BYTES = 16 << 20
_NOT_FOUND, _GONE = 404, 410
_NAMES_BYTES = 16 << 10
"""Maximum bytes of topic names in one request. Servers accept addresses of up to 64 KiB."""


class ServerLog:
    """Implementation of `view.LogView` for a running server."""

    def __init__(self, place: LogLocation) -> None:
        self._http = HttpClient(place)
        self._fetched = FetchedParts(self._http)
        self._states: dict[str, TopicState] = {}
        self._names: tuple[str, ...] | None = None
        self._version: int | None = None

    # Topics

    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        names = tuple(names) if names is not None else None
        if names != self._names:
            self._names, self._version = names, None
        query: dict[str, object] = {"limit": _PAGE}
        if self._version is not None:
            query["since"] = self._version
            query["wait_ms"] = 0
        states: dict[str, TopicState] = {}
        version = None
        for page in self._pages(names, query):
            if page["unchanged"]:
                return self._states
            version = page["version"] if version is None else version
            for one in page["topics"]:
                states[one["name"]] = _state(one)
        self._states, self._version = states, version
        return states

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        found = {}
        for some in _pages_of(names):
            page = self._http.json("GET", "/v1/topics", {"name": some, "ended": "true"})
            for one in page["topics"]:
                if not one["exists"]:
                    found[one["name"]] = _state(one).end
        return found

    def wait(self, timeout_s: float) -> None:
        query = {"limit": 1, "since": self._version or 0, "wait_ms": int(timeout_s * 1000)}
        self._http.json("GET", "/v1/topics", query)

    def _pages(
        self, names: tuple[str, ...] | None, query: dict[str, object]
    ) -> Iterator[dict[str, Any]]:
        if names is not None:
            for some in _pages_of(names):
                yield self._http.json("GET", "/v1/topics", query | {"name": some})
            return
        after: str | None = None
        while True:
            page = self._http.json("GET", "/v1/topics", query | ({"after": after} if after else {}))
            yield page
            if not page["more"]:
                return
            # Fetch later pages even if nothing has changed since the first.
            query = {"limit": _PAGE}
            after = page["topics"][-1]["name"]

    # Positions

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        return self._position(topic, "offset", offset)

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        return self._position(topic, "ordinal", ordinal)

    def at_time(self, topic: TopicState, ms: int) -> Position:
        return self._position(topic, "time", ms)

    def _position(self, topic: TopicState, kind: str, value: int) -> Position:
        try:
            found = self._http.json("GET", "/v1/position", {"topic": topic.name, kind: value})
        except ServerError as error:
            if error.status != _NOT_FOUND:
                raise
            # The topic was destroyed after it was listed. The task that reads up to its end gets the error.
            return topic.end
        at = Position(found["epoch"], found["offset"], found["ordinal"])
        # The topic may have grown since it was listed, but a plan never extends past the listed end.
        return at if at.ordinal < topic.end.ordinal else topic.end

    # Parts

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        if whole.bytes <= bytes_max:
            return [whole]
        with _losses(whole):
            query = _between(whole.topic, whole.start.offset, whole.end.offset)
            found = self._http.json("GET", "/v1/splits", query | {"bytes": bytes_max})
        places = [
            Position(whole.end.epoch, one["offset"], one["ordinal"]) for one in found["splits"]
        ]
        return [
            LogRange(whole.topic, start, end)
            for start, end in zip([whole.start, *places], [*places, whole.end], strict=True)
        ]

    def expect(self, parts: Iterable[LogRange]) -> None:
        self._fetched.expect(parts)

    def read(self, part: LogRange) -> Iterator[LogBlock | DamagedRange]:
        with _losses(part):
            fetched = self._fetched.take(part)
            for piece in self._pieces(part, _BLOCK_BYTES, fetched):
                if isinstance(piece, DamagedRange):
                    yield piece
                else:
                    data = fetched.bytes(piece) if fetched else None
                    found = data or self._bytes(part.topic, piece)
                    yield LogBlock(piece.rows, found, _place(part))

    def rows(self, part: LogRange) -> Iterator[Rows | DamagedRange]:
        with _losses(part):
            fetched = self._fetched.take(part)
            for piece in self._pieces(part, max(1, part.bytes), fetched):
                yield piece.rows if isinstance(piece, Stretch) else piece

    def _pieces(
        self, part: LogRange, bytes_max: int, fetched: Fetched | None
    ) -> Iterator[Stretch | DamagedRange]:
        start, place = part.start.offset, _place(part)
        if fetched is not None:
            yield from stretches(fetched.rows, start, part.end.offset, bytes_max, place)
            return
        while start < part.end.offset:
            asked = _between(part.topic, start, part.end.offset)
            index = parse(self._http.send("GET", "/v1/index", asked))
            end = index.end_offset if len(index.rows) else part.end.offset
            yield from stretches(index, start, min(end, part.end.offset), bytes_max, place)
            start = end

    def close(self) -> None:
        self._fetched.clear()
        self._http.close()

    def _bytes(self, topic: str, piece: Stretch) -> bytes:
        found, at = [], piece.offset
        while at < piece.end:
            data = self._http.send("GET", "/v1/range", _between(topic, at, piece.end))
            if not data:
                # The file was truncated. Zeros fail the run's checksum; later runs may still be sound.
                ends = piece.rows["offset"].astype(np.int64) + piece.rows["length"]
                data = bytes(int(ends[np.searchsorted(ends, at, "right")]) - at)
            found.append(data)
            at += len(data)
        return b"".join(found)


def _place(part: LogRange) -> str:
    return f"topic {part.topic!r} on the server"


def _between(topic: str, start: int, end: int) -> dict[str, object]:
    """Return the query for what a topic has between two offsets."""
    return {"topic": topic, "from": start, "to": end}


def _pages_of(names: Iterable[str]) -> Iterator[list[str]]:
    return groups(names, lambda name: len(quote_plus(name)), _NAMES_BYTES, _PAGE)


@contextmanager
def _losses(part: LogRange) -> Iterator[None]:
    """Raise `DataLossError` if the server no longer has the records of a part."""
    try:
        yield
    except ServerError as error:
        if error.status == _NOT_FOUND:
            raise DataLossError(
                f"topic {part.topic!r} was destroyed before it was read to its end: {error}"
            ) from None
        if error.status != _GONE:
            raise
        start, rest = error.start, None
        if start is not None and part.start.offset < start[0] < part.end.offset:
            rest = part._replace(start=Position(part.end.epoch, *start))
        raise DataLossError(
            f"topic {part.topic!r}: retention has overtaken the read: {error}", rest
        ) from None


def _state(one: dict[str, Any]) -> TopicState:
    start, end = one["start"], one["end"]
    return TopicState(
        one["name"],
        Position(one["epoch"], start["offset"], start["ordinal"]),
        Position(one["epoch"], end["offset"], end["ordinal"]),
        one.get("durability") != Durability.MEMORY,
    )
