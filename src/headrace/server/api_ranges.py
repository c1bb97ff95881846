"""Endpoints for readers that decode the log themselves: index rows, raw bytes, places to split at."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.broker.broker import Broker
from headrace.log.embedded import EmbeddedStore
from headrace.log.layout import Layout
from headrace.log.raw import GoneError, RawTopic
from headrace.log.store import Topic
from headrace.server.api_shared import RefusalWithFacts, existing, number, place

T = TypeVar("T")

INDEX_ROWS_MAX = 65_536
"""Rows in one answer; whoever wants more goes on behind the last one."""

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
            Route("/v1/splits", self.splits),
        ]

    async def index(self, request: Request) -> Response:
        topic, raw, start, end = self._asked(request)
        rows = await self._read(topic, lambda: raw.rows(start, end, INDEX_ROWS_MAX))
        return Response(rows, media_type=_BINARY)

    async def range(self, request: Request) -> Response:
        topic, raw, start, end = self._asked(request)
        pieces = _Pieces(raw.pieces(start, end))
        # The first piece before the status, which says whether it is gone.
        first = await self._read(topic, pieces.next)
        return StreamingResponse(_sent(first, pieces), media_type=_BINARY)

    async def splits(self, request: Request) -> Response:
        topic, raw, start, end = self._asked(request)
        step = number(request.query_params.get("bytes", ""), "bytes")
        if not step:
            raise HTTPException(400, "bytes must be at least 1")
        found = await self._read(topic, lambda: raw.splits(start, end, step, SPLITS_MAX))
        return JSONResponse({"splits": [place(one) for one in found]})

    def _asked(self, request: Request) -> tuple[Topic, RawTopic, int, int]:
        query = request.query_params
        topic = existing(self._store, self._broker, query.get("topic"))
        start = number(query.get("from", ""), "from")
        end = number(query.get("to", ""), "to")
        if end < start:
            raise HTTPException(
                400, f"to must not be less than from, and {end} is less than {start}"
            )
        if start < topic.start_offset:
            raise _gone(topic)
        end = min(end, topic.end_offset)
        return topic, RawTopic.of(self._layout, self._store, topic), start, end

    async def _read(self, topic: Topic, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except GoneError:
            raise _gone(topic) from None


class _Pieces:
    """Pieces that threads read one after another, until the loop has had enough.

    A client may hang up while a thread is reading. To close a generator that another thread runs crashes
    Python 3.11, so whoever is the last to need it closes it.
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
        pass  # the answer ends here: whoever asks for what follows is told why
    finally:
        rest.close()


def _gone(topic: Topic) -> RefusalWithFacts:
    return RefusalWithFacts(
        410,
        f"topic {topic.name!r} is kept from offset {topic.start_offset} on, "
        f"ordinal {topic.start_ordinal}",
        {"start": place(topic.start)},
    )
