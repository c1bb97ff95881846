"""The endpoints of topics: the list, one topic in full, positions in a topic, and its destruction."""

import asyncio
import datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.broker.broker import Broker, SubscriptionState
from headrace.log.store import Store, Topic
from headrace.model import CHANNEL_PREFIX
from headrace.server.http.cursors import CURSORS_LISTED_MAX, in_topic
from headrace.server.http.shared import existing, number, place, warmed
from headrace.server.http.waiting import WAITING_MAX, LongPolls, TooManyWaitingError

TOPICS_LISTED_MAX = 1000
"""Topics in one answer. The next page starts `after` the last name."""

SUMMED_AT_ONCE = 100
"""Topics whose segments are summed up before other tasks have their turn: about 50 µs each."""

WAIT_MS_MAX = 10_000
"""Longest time that an answer waits for a change."""


class TopicsApi:
    def __init__(self, store: Store, broker: Broker, waiting: LongPolls) -> None:
        self._store = store
        self._broker = broker
        self._waiting = waiting

    def routes(self) -> list[Route]:
        return [
            Route("/v1/topics", self.topics),
            Route("/v1/topic", self.topic, methods=["GET"]),
            Route("/v1/topic", self.delete, methods=["DELETE"]),
            Route("/v1/position", self.position),
        ]

    async def topics(self, request: Request) -> Response:
        query = request.query_params
        limit = min(number(query.get("limit", str(TOPICS_LISTED_MAX)), "limit"), TOPICS_LISTED_MAX)
        if not limit:
            raise HTTPException(400, "limit must be at least 1")
        prefix, after, names = (
            query.get("prefix", ""),
            query.get("after", ""),
            query.getlist("name"),
        )
        if len(names) > TOPICS_LISTED_MAX:
            raise HTTPException(400, f"at most {TOPICS_LISTED_MAX} names may be given")
        unchanged = not await self._changed(query.get("since"), query.get("wait_ms"))
        version = self._store.version
        found = []
        if unchanged:
            pass
        elif names:
            found = self._named(names, prefix, after, ended=query.get("ended") == "true")
        else:
            found = self._store.topics(prefix, after, limit + 1)
        return JSONResponse(
            {
                "topics": await self._summaries(found[:limit]),
                "more": len(found) > limit,
                "version": version,
                "unchanged": unchanged,
            }
        )

    async def _summaries(self, topics: list[Topic]) -> list[dict[str, object]]:
        summaries = []
        for topic in topics:
            summaries.append(self._summary(topic))
            if len(summaries) % SUMMED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return summaries

    def _named(self, names: list[str], prefix: str, after: str, *, ended: bool) -> list[Topic]:
        wanted = {name for name in names if name.startswith(prefix) and name > after}
        found = (self._store.look(name) for name in sorted(wanted))
        # A topic that never existed has no epoch: only the position where it would begin is known.
        return [topic for topic in found if topic.exists or (ended and topic.epoch)]

    async def _changed(self, since: str | None, wait_ms: str | None) -> bool:
        """Return True if there may be changes, after waiting for them as long as the request says."""
        if since is None:
            if wait_ms is not None:
                raise HTTPException(400, "wait_ms needs since: the version of an earlier answer")
            return True
        wait = min(number(wait_ms or "0", "wait_ms"), WAIT_MS_MAX)
        try:
            return await self._waiting.change(number(since, "since"), wait / 1000)
        except TooManyWaitingError:
            raise HTTPException(
                503, f"{WAITING_MAX} requests are waiting already: ask again in a while"
            ) from None

    async def topic(self, request: Request) -> Response:
        topic = self._existing(request.query_params.get("name"))
        answer = self._summary(topic)
        answer["segments"] = [segment._asdict() for segment in self._store.segments(topic)]
        answer["subscriptions"] = [
            {
                "peer": subscription.sink.peer,
                "protocol": subscription.sink.protocol,
                "offset": subscription.offset,
                "live": subscription.state is SubscriptionState.LIVE,
                "lag_bytes": self._store.kept(topic, subscription.position).bytes,
            }
            for subscription in self._broker.subscriptions(topic)
        ]
        answer["cursors"] = [
            in_topic(self._store, cursor)
            for cursor in self._store.cursors(topic.name, limit=CURSORS_LISTED_MAX)
        ]
        return JSONResponse(answer)

    async def delete(self, request: Request) -> Response:
        topic = self._existing(request.query_params.get("name"))
        if topic.name.startswith(CHANNEL_PREFIX):
            raise HTTPException(
                409, "this is the log of a channel: use `headrace channels destroy`"
            )
        epoch = topic.epoch
        destroyed = asyncio.Event()
        self._store.destroy(topic, destroyed.set)
        await destroyed.wait()
        return JSONResponse({"name": topic.name, "epoch": epoch, "end": place(topic.end)})

    async def position(self, request: Request) -> Response:
        query = request.query_params
        topic = self._existing(query.get("topic"))
        asked = [key for key in ("offset", "ordinal", "time", "last") if key in query]
        if len(asked) != 1:
            raise HTTPException(400, "give one of offset, ordinal, time or last")
        value = query[asked[0]]
        store = self._store
        if asked[0] == "offset":
            offset = number(value, "offset")
            found = await warmed(lambda: store.locate_offset(topic, offset))
        elif asked[0] == "ordinal":
            ordinal = number(value, "ordinal")
            found = await warmed(lambda: store.locate_ordinal(topic, ordinal))
        elif asked[0] == "last":
            last = number(value, "last")
            found = await warmed(lambda: store.locate_last(topic, last))
        else:
            ms = _time_ms(value)
            found = await warmed(lambda: store.locate_time(topic, ms))
        return JSONResponse({"topic": topic.name, "epoch": found.epoch} | place(found))

    def _existing(self, name: str | None) -> Topic:
        return existing(self._store, self._broker, name)

    def _summary(self, topic: Topic) -> dict[str, object]:
        kept = self._store.kept(topic)
        return {
            "name": topic.name,
            "exists": topic.exists,
            "epoch": topic.epoch,
            "durability": topic.durability.value,
            "start": place(topic.start),
            "end": place(topic.end),
            "records": kept.records,
            "bytes": kept.bytes,
            "last_ms": topic.last_ms,
            "subscribers": len(self._broker.subscriptions(topic)),
        }


def _time_ms(text: str) -> int:
    if text.isascii() and text.isdigit():
        return number(text, "time")
    try:
        moment = datetime.datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.astimezone()
        return max(0, int(moment.timestamp() * 1000))
    except (ValueError, OverflowError):
        raise HTTPException(
            400, f"time must be milliseconds since 1970 or ISO 8601, not {text[:40]!r}"
        ) from None
