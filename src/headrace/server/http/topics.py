"""The endpoints of topics, of positions in them, and of cursors, in which named readers store positions."""

import asyncio
import datetime
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.access.operations import Operation
from headrace.broker.broker import Broker, SubscriptionState
from headrace.broker.readers import Readers
from headrace.log.store import CURSORS_SET_MAX, Cursor, Lag, Store, Topic
from headrace.model import (
    AUDIT_TOPIC,
    CHANNEL_PREFIX,
    Position,
    check_reader_name,
    check_topic_name,
)
from headrace.server.http.gate import check, may, record, rights
from headrace.server.http.limits import HttpLimits
from headrace.server.http.requests import body, existing, limit, number, place, warmed
from headrace.server.http.streams.streams import Streams

TOPICS_LISTED_MAX = 1000
"""Topics in one answer. The next page starts `after` the last name."""

SUMMED_AT_ONCE = 100
"""Topics whose segments are summed up before other tasks have their turn: about 50 µs each."""

WAIT_MS_MAX = 10_000
"""Longest time that an answer waits for a change."""

CURSORS_LISTED_MAX = 1000
"""Cursors in one answer. The next page starts after the last cursor."""

CHANGES_MAX = 100
"""Requests that wait until their change is on disk, also while the log accepts no changes."""

_BODY_BYTES_MAX = 2 * 1024 * 1024


class TopicsApi:
    def __init__(
        self,
        store: Store,
        broker: Broker,
        waiting: "LongPolls",
        limits: HttpLimits,
        streams: Streams,
    ) -> None:
        self._store = store
        self._streams = streams
        self._limits = limits
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
        most = limit(request, TOPICS_LISTED_MAX)
        prefix, after = query.get("prefix", ""), query.get("after", "")
        names = query.getlist("name")
        if len(names) > TOPICS_LISTED_MAX:
            raise HTTPException(400, f"at most {TOPICS_LISTED_MAX} names may be given")
        rights(request).is_asked = True  # every topic of the answer is asked for
        unchanged = not await self._changed(request)
        version = self._store.version
        if unchanged:
            found = []
        elif names:
            found = self._named(names, prefix, after, ended=query.get("ended") == "true")
            found = [topic for topic in found if may(request, Operation.INSPECT, topic.name)]
        else:
            found = await self._page(request, prefix, after, most + 1)
        return JSONResponse(
            {
                "topics": await self._summaries(found[:most]),
                "more": len(found) > most,
                "version": version,
                "unchanged": unchanged,
            }
        )

    async def _page(self, request: Request, prefix: str, after: str, most: int) -> list[Topic]:
        """Return the first topics behind `after` that the request may inspect."""
        found: list[Topic] = []
        while len(found) < most and (page := self._store.topics(prefix, after, TOPICS_LISTED_MAX)):
            found += [topic for topic in page if may(request, Operation.INSPECT, topic.name)]
            after = page[-1].name
            if len(page) < TOPICS_LISTED_MAX:
                break
            await asyncio.sleep(0)
        return found[:most]

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

    async def _changed(self, request: Request) -> bool:
        """Return True if there may be changes, after waiting for them as long as the request says."""
        since = request.query_params.get("since")
        wait_ms = request.query_params.get("wait_ms")
        if since is None:
            if wait_ms is not None:
                raise HTTPException(400, "wait_ms needs since: the version of an earlier answer")
            return True
        wait = min(number(wait_ms or "0", "wait_ms"), WAIT_MS_MAX)
        asked = number(since, "since")
        if not self._waiting.must_wait(asked, wait / 1000):
            return self._store.version != asked
        with self._limits.waiting(request):
            return await self._waiting.change(asked, wait / 1000)

    async def topic(self, request: Request) -> Response:
        topic = self._existing(request, Operation.INSPECT, "name")
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
        topic = self._existing(request, Operation.DELETE, "name")
        if topic.name.startswith(CHANNEL_PREFIX):
            raise HTTPException(
                409, "this is the log of a channel: use `headrace channels destroy`"
            )
        if topic.name == AUDIT_TOPIC:
            raise HTTPException(409, "this is the audit trail: only retention deletes its records")
        epoch, kept = topic.epoch, self._store.kept(topic)
        facts = {"topic": topic.name, "epoch": epoch} | kept._asdict()
        record(request, "topic.delete", **facts)
        await self._streams.delete(topic)
        return JSONResponse({"name": topic.name, "epoch": epoch, "end": place(topic.end)})

    async def position(self, request: Request) -> Response:
        query = request.query_params
        topic = self._existing(request, Operation.INSPECT, "topic")
        locate = {
            "offset": self._store.locate_offset,
            "ordinal": self._store.locate_ordinal,
            "time": self._store.locate_time,
            "last": self._store.locate_last,
        }
        asked = [key for key in locate if key in query]
        if len(asked) != 1:
            raise HTTPException(400, "give one of offset, ordinal, time or last")
        [key] = asked
        value = _time_ms(query[key]) if key == "time" else number(query[key], key)
        found = await warmed(partial(locate[key], topic, value))
        return JSONResponse({"topic": topic.name, "epoch": found.epoch} | place(found))

    def _existing(self, request: Request, operation: Operation, parameter: str) -> Topic:
        name = request.query_params.get(parameter)
        return existing(request, operation, self._store, self._broker, name)

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


class LongPolls:
    """Requests that wait until a topic changes. A change wakes them; none of them polls the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0
        self._changed = asyncio.Event()
        self._closed = False
        store.watch(self._wake)

    def must_wait(self, since: int, timeout_s: float) -> bool:
        """True if `change` does not return at once."""
        return self._store.version == since and not self._closed and bool(timeout_s)

    async def change(self, since: int, timeout_s: float) -> bool:
        """Return True if the store's version differs from `since`, now or within `timeout_s`."""
        if not self.must_wait(since, timeout_s):
            return self._store.version != since
        self._count += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._count -= 1
        return self._store.version != since

    def close(self) -> None:
        """Wake all requests: the server stops."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._count:
            self._changed.set()
            self._changed = asyncio.Event()


# Cursors

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
            raise HTTPException(400, f"the body is not valid: {error}") from None
        check_reader_name(asked.reader)
        check(request, Operation.CURSORS, asked.reader)
        positions: dict[str, Position] = {}
        for one in asked.positions:
            check_topic_name(one.topic)
            if one.topic in positions:
                raise HTTPException(400, f"topic {one.topic!r} has two positions")
            check(request, Operation.SUBSCRIBE, one.topic)
            positions[one.topic] = Position(one.epoch, one.offset, one.ordinal)
        back = [
            topic for topic in positions if self._is_back(asked.reader, topic, positions[topic])
        ]
        if back:
            record(request, "cursors.back", reader=asked.reader, topics=back)
        with self._readers.held(asked.reader, positions):
            await self._durable(partial(self._store.set_cursors, asked.reader, positions))
        self._moved(positions)
        return JSONResponse({"reader": asked.reader, "set": len(positions)})

    def _is_back(self, reader: str, topic: str, position: Position) -> bool:
        """True if the position is before the reader's cursor: the reader gets records again."""
        found = self._store.cursors(topic, reader, limit=1)
        return any(position < one.position for one in found)

    async def list(self, request: Request) -> Response:
        query = request.query_params
        topic, reader = query.get("topic"), query.get("reader")
        most = limit(request, CURSORS_LISTED_MAX)
        after = query.get("after", "")
        if topic is not None:
            start = (topic, after or query.get("after_reader", ""))
        elif reader is not None:
            # The reader has no other cursor in the topic `after` itself.
            start = (after, reader)
        else:
            start = (after, query.get("after_reader", ""))
        found = await self._page(request, topic, reader, start, most + 1)
        return JSONResponse(
            {
                "cursors": [
                    {"topic": one.topic, **in_topic(self._store, one)} for one in found[:most]
                ],
                "more": len(found) > most,
            }
        )

    async def _page(
        self,
        request: Request,
        topic: str | None,
        reader: str | None,
        after: tuple[str, str],
        most: int,
    ) -> Sequence[Cursor]:
        """Return the first cursors behind `after` whose topics the request may inspect."""
        rights(request).is_asked = True  # every topic of the answer is asked for
        found: list[Cursor] = []
        while len(found) < most:
            page = self._store.cursors(topic, reader, after=after, limit=CURSORS_LISTED_MAX)
            found += [one for one in page if may(request, Operation.INSPECT, one.topic)]
            if len(page) < CURSORS_LISTED_MAX:
                break
            after = page[-1].topic, page[-1].reader
            await asyncio.sleep(0)
        return found[:most]

    async def drop(self, request: Request) -> Response:
        reader, topic = request.query_params.get("reader"), request.query_params.get("topic")
        if reader is None:
            raise HTTPException(400, "name the reader: ?reader=NAME")
        check_reader_name(reader)
        check(request, Operation.CURSORS, reader)
        if topic is not None:
            check(request, Operation.SUBSCRIBE, topic)
        dropped = 0
        # An active reader gets a new cursor at once, so topics that were passed are not looked at again.
        start = ("", "")
        while found := self._store.cursors(topic, reader, after=start, limit=CURSORS_SET_MAX):
            start = (found[-1].topic, reader)
            names = [one.topic for one in found]
            for name in names:
                check(request, Operation.SUBSCRIBE, name)
            record(request, "cursors.delete", reader=reader, topics=names)
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
