"""The endpoints of cursors: readers store their positions, and anyone can see how far behind they are."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.broker.readers import Readers
from headrace.errors import (
    BadCursorError,
    BadReaderNameError,
    StoreFailedError,
    TooManyCursorsError,
)
from headrace.log.store import CURSORS_SET_MAX, Cursor, Lag, Store
from headrace.model import Position, check_reader_name
from headrace.server.http.shared import body, checked_name, number

CURSORS_LISTED_MAX = 1000
"""Cursors in one answer. The next page starts after the last cursor."""

CHANGES_MAX = 100
"""Requests that wait until their change is on disk, also while the log accepts no changes."""

_BODY_BYTES_MAX = 2 * 1024 * 1024

_Number = Annotated[int, Meta(ge=0)]


class _Place(Struct, forbid_unknown_fields=True):
    topic: str
    epoch: _Number
    offset: _Number
    ordinal: _Number


class _Places(Struct, forbid_unknown_fields=True):
    reader: str
    positions: Annotated[list[_Place], Meta(max_length=CURSORS_SET_MAX)]


class CursorsApi:
    def __init__(
        self, store: Store, readers: Readers, moved: Callable[[Collection[str]], None]
    ) -> None:
        """`moved` is called with the topics in which cursors have moved."""
        self._store = store
        self._readers = readers
        self._moved = moved
        self._changing = 0

    def routes(self) -> list[Route]:
        return [
            Route("/v1/cursors", self.list, methods=["GET"]),
            Route("/v1/cursors", self.set, methods=["POST"]),
            Route("/v1/cursors", self.drop, methods=["DELETE"]),
        ]

    async def set(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await body(request, _BODY_BYTES_MAX), type=_Places)
        except ValueError as error:  # also from msgspec and UTF-8
            raise HTTPException(400, f"the body makes no sense: {error}") from None
        positions: dict[str, Position] = {}
        for one in asked.positions:
            checked_name(one.topic)
            if one.topic in positions:
                raise HTTPException(400, f"topic {one.topic!r} has two positions")
            positions[one.topic] = Position(one.epoch, one.offset, one.ordinal)
        try:
            with self._readers.held(asked.reader, positions):
                await self._durable(partial(self._store.set_cursors, asked.reader, positions))
        except (BadReaderNameError, BadCursorError) as error:
            raise HTTPException(400, str(error)) from None
        except TooManyCursorsError as error:
            raise HTTPException(409, str(error)) from None
        self._moved(positions)
        return JSONResponse({"reader": asked.reader, "set": len(positions)})

    async def list(self, request: Request) -> Response:
        query = request.query_params
        topic, reader = query.get("topic"), query.get("reader")
        limit = min(
            number(query.get("limit", str(CURSORS_LISTED_MAX)), "limit"), CURSORS_LISTED_MAX
        )
        if not limit:
            raise HTTPException(400, "limit must be at least 1")
        after = query.get("after", "")
        if topic is not None:
            place = (topic, after or query.get("after_reader", ""))
        elif reader is not None:
            # The reader has no other cursor in the topic `after` itself.
            place = (after, reader)
        else:
            place = (after, query.get("after_reader", ""))
        found = self._store.cursors(topic, reader, after=place, limit=limit + 1)
        return JSONResponse(
            {
                "cursors": [
                    {"topic": one.topic, **in_topic(self._store, one)} for one in found[:limit]
                ],
                "more": len(found) > limit,
            }
        )

    async def drop(self, request: Request) -> Response:
        reader, topic = request.query_params.get("reader"), request.query_params.get("topic")
        if reader is None:
            raise HTTPException(400, "name the reader: ?reader=NAME")
        try:
            check_reader_name(reader)
        except BadReaderNameError as error:
            raise HTTPException(400, str(error)) from None
        dropped = 0
        # An active reader gets a new cursor at once, so topics that were passed are not looked at again.
        place = ("", "")
        while found := self._store.cursors(topic, reader, after=place, limit=CURSORS_SET_MAX):
            place = (found[-1].topic, reader)
            names = [one.topic for one in found]
            with self._readers.held(reader, names):
                await self._durable(partial(self._store.drop_cursors, reader, names))
            self._moved(names)
            dropped += len(found)
        return JSONResponse({"reader": reader, "dropped": dropped})

    async def _durable(self, change: Callable[[Callable[[], None]], None]) -> None:
        """Start a change, and wait until it is on disk."""
        if self._changing >= CHANGES_MAX:
            reason = self._store.held_back or "the disk is slow"
            raise HTTPException(503, f"{CHANGES_MAX} changes of cursors wait already: {reason}")
        durable = asyncio.Event()
        self._changing += 1
        try:
            change(durable.set)
            await durable.wait()
        except StoreFailedError as error:
            raise HTTPException(503, str(error)) from None
        finally:
            self._changing -= 1


def in_topic(store: Store, cursor: Cursor) -> dict[str, object]:
    """Return the fields of a cursor that are shown beside its topic."""
    topic = store.look(cursor.topic)
    lag = Lag.of(cursor.position, topic.start, store.kept(topic, cursor.position))
    return {
        "reader": cursor.reader,
        **cursor.position._asdict(),
        "ms": cursor.ms,
        "lag_records": lag.records,
        "lag_bytes": lag.bytes,
        "gone_records": lag.gone_records,
    }
