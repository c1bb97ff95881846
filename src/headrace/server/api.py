"""The endpoints of the HTTP API: what the wires have no message for. Documented in `docs/http.md`."""

import asyncio
import datetime
from collections.abc import Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from headrace.broker.subscription import State
from headrace.errors import BadTopicNameError
from headrace.log.embedded import EmbeddedStore
from headrace.log.store import ColdError, Topic
from headrace.model import Position, check_topic_name
from headrace.server.api_batches import batch_routes
from headrace.server.connection import Connections
from headrace.server.health import health

T = TypeVar("T")

TOPICS_LISTED_MAX = 1000
"""Topics in one answer; the next page starts `after` the last name."""


def make_app(connections: Connections, store: EmbeddedStore) -> Starlette:
    api = _Api(connections, store)
    return Starlette(
        routes=[
            Route("/healthz", api.health),
            Route("/metrics", api.metrics_text),
            Route("/v1/topics", api.topics),
            Route("/v1/topic", api.topic, methods=["GET"]),
            Route("/v1/topic", api.delete, methods=["DELETE"]),
            Route("/v1/position", api.position),
            *batch_routes(store),
        ],
        exception_handlers={HTTPException: _error},
    )


class _Api:
    def __init__(self, connections: Connections, store: EmbeddedStore) -> None:
        self._broker = connections.broker
        self._connections = connections
        self._store = store

    async def health(self, request: Request) -> Response:
        status, body = health(self._store)
        return JSONResponse(body, status)

    async def metrics_text(self, request: Request) -> Response:
        return PlainTextResponse(
            self._connections.metrics.text(
                {
                    "connections": len(self._connections.open),
                    "pending_bytes": self._store.pending_bytes,
                    "held_back": int(bool(self._store.held_back)),
                    "damaged_runs": self._store.damage_count,
                    "staged_bytes": self._store.staging.bytes,
                    "batches_pending": self._store.batches.pending,
                    "damaged_blocks": self._store.batches.damage_count,
                }
            ),
            media_type="text/plain; version=0.0.4",
        )

    async def topics(self, request: Request) -> Response:
        query = request.query_params
        limit = min(_number(query.get("limit", str(TOPICS_LISTED_MAX)), "limit"), TOPICS_LISTED_MAX)
        if not limit:
            raise HTTPException(400, "limit must be at least 1")
        found = self._store.topics(query.get("prefix", ""), query.get("after", ""), limit + 1)
        return JSONResponse(
            {
                "topics": [self._summary(topic) for topic in found[:limit]],
                "more": len(found) > limit,
            }
        )

    async def topic(self, request: Request) -> Response:
        topic = self._existing(request.query_params.get("name"))
        answer = self._summary(topic)
        answer["segments"] = [segment._asdict() for segment in self._store.segments(topic)]
        answer["subscriptions"] = [
            {
                "peer": subscription.sink.peer,
                "protocol": subscription.sink.protocol,
                "offset": subscription.offset,
                "live": subscription.state is State.LIVE,
                "lag_bytes": max(0, topic.end_offset - subscription.offset),
            }
            for subscription in self._broker.subscriptions(topic)
        ]
        return JSONResponse(answer)

    async def delete(self, request: Request) -> Response:
        topic = self._existing(request.query_params.get("name"))
        epoch = topic.epoch
        destroyed = asyncio.Event()
        self._store.destroy(topic, destroyed.set)
        await destroyed.wait()
        return JSONResponse({"name": topic.name, "epoch": epoch, "end": _place(topic.end)})

    async def position(self, request: Request) -> Response:
        query = request.query_params
        topic = self._existing(query.get("topic"))
        asked = [key for key in ("offset", "ordinal", "time", "last") if key in query]
        if len(asked) != 1:
            raise HTTPException(400, "give one of offset, ordinal, time or last")
        value = query[asked[0]]
        store = self._store
        if asked[0] == "offset":
            offset = _number(value, "offset")
            found = await _warmed(lambda: store.locate_offset(topic, offset))
        elif asked[0] == "ordinal":
            ordinal = _number(value, "ordinal")
            found = await _warmed(lambda: store.locate_ordinal(topic, ordinal))
        elif asked[0] == "last":
            before = topic.end_ordinal - _number(value, "last")
            found = await _warmed(lambda: store.locate_ordinal(topic, before))
        else:
            ms = _time_ms(value)
            found = await _warmed(lambda: store.locate_time(topic, ms))
        return JSONResponse({"topic": topic.name, "epoch": found.epoch} | _place(found))

    def _existing(self, name: str | None) -> Topic:
        if name is None:
            raise HTTPException(400, "name the topic")
        try:
            check_topic_name(name)
        except BadTopicNameError as error:
            raise HTTPException(400, str(error)) from None
        topic = self._store.topic(name)
        if not topic.exists:
            if not self._broker.subscriptions(topic):
                self._store.forget(topic)
            raise HTTPException(404, f"there is no topic {name!r}")
        return topic

    def _summary(self, topic: Topic) -> dict[str, object]:
        return {
            "name": topic.name,
            "epoch": topic.epoch,
            "durability": topic.durability.value,
            "start": _place(topic.start),
            "end": _place(topic.end),
            "records": topic.end_ordinal - topic.start_ordinal,
            "bytes": topic.end_offset - topic.start_offset,
            "last_ms": topic.last_ms,
            "subscribers": len(self._broker.subscriptions(topic)),
        }


async def _warmed(look_up: Callable[[], T]) -> T:
    """The answer, after bringing into memory whatever it needs from the disk."""
    while True:
        try:
            return look_up()
        except ColdError as cold:
            await asyncio.to_thread(cold.warm)


def _place(position: Position) -> dict[str, int]:
    return {"offset": position.offset, "ordinal": position.ordinal}


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64):
        raise HTTPException(400, f"{name} must be a whole number below 2^64, not {text[:40]!r}")
    return int(text)


def _time_ms(text: str) -> int:
    if text.isascii() and text.isdigit():
        return _number(text, "time")
    try:
        moment = datetime.datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.astimezone()
        return max(0, int(moment.timestamp() * 1000))
    except (ValueError, OverflowError):
        raise HTTPException(
            400, f"time must be milliseconds since 1970 or ISO 8601, not {text[:40]!r}"
        ) from None


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)
