"""A log behind the HTTP listener of a running server: rows and raw bytes are fetched, and decoded here."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote_plus

import numpy as np

from headrace.model import Durability, Position
from headrace.spark.fetched_parts import Fetched, FetchedParts
from headrace.spark.http_client import HttpClient, ServerError
from headrace.spark.index_rows import Gap, Rows, Stretch, parse, stretches
from headrace.spark.log_view import Block, Damage, DataLossError, Range, TopicState
from headrace.spark.options import Place

_PAGE = 1000
_BLOCK_BYTES = 16 << 20
_NOT_FOUND, _GONE = 404, 410
_NAMES_BYTES = 16 << 10
"""How many bytes of names one request holds: servers read addresses of up to 64 KiB."""


class ServerLog:
    """Implements `log_view.LogView`."""

    def __init__(self, place: Place) -> None:
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
        for some in _pages_of(tuple(names)):
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
            # Later pages are asked for whether or not anything has changed meanwhile.
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
            # The topic has ended since it was listed: whoever reads up to there finds out, and knows what
            # to do then.
            return topic.end
        at = Position(found["epoch"], found["offset"], found["ordinal"])
        # The topic may have grown since: what is planned ends where it ended then.
        return at if at.ordinal < topic.end.ordinal else topic.end

    # Parts

    def split(self, whole: Range, bytes_max: int) -> Sequence[Range]:
        if whole.bytes <= bytes_max:
            return [whole]
        query = _query(whole) | {"bytes": bytes_max}
        found = self._kept(whole, "/v1/splits", query)["splits"]
        places = [Position(whole.end.epoch, one["offset"], one["ordinal"]) for one in found]
        return [
            Range(whole.topic, start, end)
            for start, end in zip([whole.start, *places], [*places, whole.end], strict=True)
        ]

    def _kept(self, part: Range, path: str, query: dict[str, object]) -> Any:
        try:
            return self._http.json("GET", path, query)
        except ServerError as error:
            raise _loss(part, error) from None

    def expect(self, parts: Iterable[Range]) -> None:
        self._fetched.expect(parts)

    def read(self, part: Range) -> Iterator[Block | Damage]:
        place = _place(part)
        try:
            fetched = self._fetched.take(part)
            for piece in self._pieces(part, _BLOCK_BYTES, fetched):
                if isinstance(piece, Gap):
                    yield Damage(piece.offset, piece.end, place)
                else:
                    data = fetched.bytes(piece) if fetched else None
                    yield Block(piece.rows, data or self._bytes(part.topic, piece), place)
        except ServerError as error:
            raise _loss(part, error) from None

    def rows(self, part: Range) -> Iterator[Rows | Damage]:
        try:
            fetched = self._fetched.take(part)
            for piece in self._pieces(part, max(1, part.bytes), fetched):
                if isinstance(piece, Gap):
                    yield Damage(piece.offset, piece.end, _place(part))
                else:
                    yield piece.rows
        except ServerError as error:
            raise _loss(part, error) from None

    def _pieces(
        self, part: Range, bytes_max: int, fetched: Fetched | None
    ) -> Iterator[Stretch | Gap]:
        start = part.start.offset
        if fetched is not None:
            yield from stretches(fetched.rows, start, part.end.offset, bytes_max)
            return
        while start < part.end.offset:
            asked = {"topic": part.topic, "from": start, "to": part.end.offset}
            index = parse(self._http.send("GET", "/v1/index", asked))
            end = index.end_offset if len(index.rows) else part.end.offset
            yield from stretches(index, start, min(end, part.end.offset), bytes_max)
            start = end

    def close(self) -> None:
        self._fetched.clear()
        self._http.close()

    def _bytes(self, topic: str, piece: Stretch) -> bytes:
        found, at = [], piece.offset
        while at < piece.end:
            asked = {"topic": topic, "from": at, "to": piece.end}
            data = self._http.send("GET", "/v1/range", asked)
            if not data:
                # The file was cut. Zeros fail the run's checksum; what lies behind it may be sound.
                ends = piece.rows["offset"].astype(np.int64) + piece.rows["length"]
                data = bytes(int(ends[np.searchsorted(ends, at, "right")]) - at)
            found.append(data)
            at += len(data)
        return b"".join(found)


def _place(part: Range) -> str:
    return f"topic {part.topic!r} on the server"


def _query(part: Range) -> dict[str, object]:
    return {"topic": part.topic, "from": part.start.offset, "to": part.end.offset}


def _pages_of(names: Sequence[str]) -> Iterator[list[str]]:
    page: list[str] = []
    size = 0
    for name in names:
        length = len(quote_plus(name))
        if page and (len(page) == _PAGE or size + length > _NAMES_BYTES):
            yield page
            page, size = [], 0
        page.append(name)
        size += length
    if page:
        yield page


def _loss(part: Range, error: ServerError) -> Exception:
    if error.status == _NOT_FOUND:
        return DataLossError(f"topic {part.topic!r} was destroyed while it was to be read: {error}")
    if error.status != _GONE:
        return error
    start = error.start
    rest = None
    if start is not None and part.start.offset < start[0] < part.end.offset:
        rest = part._replace(start=Position(part.end.epoch, *start))
    return DataLossError(f"topic {part.topic!r}: retention has overtaken the read: {error}", rest)


def _state(one: dict[str, Any]) -> TopicState:
    start, end = one["start"], one["end"]
    return TopicState(
        one["name"],
        Position(one["epoch"], start["offset"], start["ordinal"]),
        Position(one["epoch"], end["offset"], end["ordinal"]),
        one.get("durability") != Durability.MEMORY,
    )
