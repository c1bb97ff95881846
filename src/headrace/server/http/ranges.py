"""Endpoints for readers that decode the log themselves: index rows, raw bytes, positions to split at."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.access.operations import Operation
from headrace.broker.broker import Broker
from headrace.log.embedded import EmbeddedStore
from headrace.log.layout import Layout
from headrace.log.read.index import ROW_BYTES, decode_row
from headrace.log.read.raw import NOTHING, RANGES_BYTES_MAX, RANGES_MAX, GoneError, RawTopic, pack
from headrace.log.store import Topic
from headrace.server.http.requests import RefusalWithFacts, existing, number, place

T = TypeVar("T")

INDEX_ROWS_MAX = 65_536
"""Rows in one answer. A client that wants more asks again for what follows the last row."""

SPLITS_MAX = 100_000

_BINARY = "application/octet-stream"


class RangesApi:
    def __init__(self, store: EmbeddedStore, broker: Broker, layout: Layout) -> None:
        self._store = store
        self._broker = broker
        self._layout = layout

    def routes(self) -> list[Route]:
        return [
            Route("/v1/index", self.index),
            Route("/v1/range", self.range),
            Route("/v1/ranges", self.ranges),
            Route("/v1/splits", self.splits),
        ]

    async def index(self, request: Request) -> Response:
        topic, raw, start, end = self._one(request)
        rows = await self._read(topic, lambda: raw.rows(start, end, INDEX_ROWS_MAX))
        return Response(rows, media_type=_BINARY)

    async def range(self, request: Request) -> Response:
        topic, raw, start, end = self._one(request)
        pieces = _Pieces(raw.pieces(start, end))
        # Read the first piece before the status is sent, because the status says if the range is gone.
        first = await self._read(topic, pieces.next)
        return StreamingResponse(_sent(first, pieces), media_type=_BINARY)

    async def ranges(self, request: Request) -> Response:
        query = request.query_params
        names, starts, ends = (query.getlist(name) for name in ("topic", "from", "to"))
        if not len(names) == len(starts) == len(ends):
            raise HTTPException(400, "every range has a topic, a from and a to")
        if not 1 <= len(names) <= RANGES_MAX:
            raise HTTPException(400, f"a request has 1 to {RANGES_MAX} ranges, not {len(names)}")
        # The current state of each topic is copied here, in the event loop: once, however often it is named.
        known: dict[str, RawTopic] = {}
        asked = [
            self._if_kept(request, *one, known) for one in zip(names, starts, ends, strict=True)
        ]
        found = await asyncio.to_thread(_small_ranges, asked)
        return Response(found, media_type=_BINARY)

    async def splits(self, request: Request) -> Response:
        topic, raw, start, end = self._one(request)
        step = number(request.query_params.get("bytes", ""), "bytes")
        if not step:
            raise HTTPException(400, "bytes must be at least 1")
        found = await self._read(topic, lambda: raw.splits(start, end, step, SPLITS_MAX))
        return JSONResponse({"splits": [place(one) for one in found]})

    def _one(self, request: Request) -> tuple[Topic, RawTopic, int, int]:
        query = request.query_params
        topic, start, end = self._asked(
            request, query.get("topic"), query.get("from", ""), query.get("to", "")
        )
        return topic, RawTopic.of(self._layout, self._store, topic), start, end

    def _if_kept(
        self, request: Request, name: str, first: str, last: str, known: dict[str, RawTopic]
    ) -> tuple[RawTopic, int, int] | None:
        try:
            topic, start, end = self._asked(request, name, first, last)
        except HTTPException as error:
            if error.status_code in (404, 410):
                return None
            raise
        if name not in known:
            known[name] = RawTopic.of(self._layout, self._store, topic)
        return known[name], start, end

    def _asked(
        self, request: Request, name: str | None, first: str, last: str
    ) -> tuple[Topic, int, int]:
        topic = existing(request, Operation.SUBSCRIBE, self._store, self._broker, name)
        start, end = number(first, "from"), number(last, "to")
        if end < start:
            raise HTTPException(
                400, f"to must not be less than from, and {end} is less than {start}"
            )
        if start < topic.start_offset:
            raise _gone(topic)
        return topic, start, min(end, topic.end_offset)

    async def _read(self, topic: Topic, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except GoneError:
            raise _gone(topic) from None


def _small_ranges(asked: list[tuple[RawTopic, int, int] | None]) -> bytes:
    """Return each range with its rows, or `NOTHING` for a range that is gone, damaged or too long.

    A request for such a range alone gets the reason.
    """
    found = bytearray()
    left = RANGES_BYTES_MAX
    for one in asked:
        length = one[2] - one[1] if one else 0
        if one is None or not 0 < length <= left:
            found += NOTHING
            continue
        piece = _small_range(*one, left)
        # Ranges that were read in vain count too: a request reads no more than its answer may contain.
        left -= max(len(piece), length)
        found += piece
    return bytes(found)


def _small_range(raw: RawTopic, start: int, end: int, bytes_max: int) -> bytes:
    rows_max = bytes_max // ROW_BYTES
    try:
        rows = raw.rows(start, end, rows_max)
        if not ROW_BYTES <= len(rows) < rows_max * ROW_BYTES:
            return NOTHING
        first, last = decode_row(rows), decode_row(rows, len(rows) - ROW_BYTES)
        if first is None or last is None or len(rows) + last.end - first.offset > bytes_max:
            return NOTHING
        data = b"".join(raw.pieces(first.offset, last.end))
    except GoneError:
        return NOTHING
    if len(data) < last.end - first.offset:
        return NOTHING  # its offsets have a gap, or the file was cut
    return pack(rows, data, first.offset)


class _Pieces:
    """Pieces that threads read one after another, until the loop closes them.

    A client may hang up while a thread is reading. Closing a generator that another thread runs crashes
    Python 3.11, so the last user closes it.
    """

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._reading = self._closed = False

    def next(self) -> bytes:
        with self._lock:
            if self._closed:
                return b""
            self._reading = True
        try:
            return next(self._pieces, b"")
        finally:
            if self._is_last():
                self._pieces.close()

    def _is_last(self) -> bool:
        with self._lock:
            self._reading = False
            return self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            reading = self._reading
        if not reading:
            self._pieces.close()


async def _sent(first: bytes, rest: _Pieces) -> AsyncIterator[bytes]:
    try:
        yield first
        while piece := await asyncio.to_thread(rest.next):
            yield piece
    except GoneError:
        pass  # the answer ends here; a request for the rest gets the reason
    finally:
        rest.close()


def _gone(topic: Topic) -> RefusalWithFacts:
    return RefusalWithFacts(
        410,
        f"topic {topic.name!r} is kept from offset {topic.start_offset} on, "
        f"ordinal {topic.start_ordinal}",
        {"start": place(topic.start)},
    )
