"""The endpoint of streams, `/v1/stream/NAME`. Documented in `docs/protocols/streams.md`.

Every handler reads a request (`messages.py`), asks for access, lets `Streams` carry it out, and writes the
answer. Elsewhere: headers that all answers have (`cors.py`).
"""

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.access.operations import Operation
from headrace.config.protocols import StreamSettings
from headrace.log.store import Store, Topic
from headrace.model import Position, check_publish_topic, check_topic_name
from headrace.printing import quoted
from headrace.server.http.gate import CUT_SHORT, check, record
from headrace.server.http.limits import HttpLimits
from headrace.server.http.requests import body_is_taken, check_length, too_long
from headrace.server.http.streams import events, forks, messages, offsets, reading
from headrace.server.http.streams.content import is_text, joined, media_type, records_of
from headrace.server.http.streams.cors import PATH
from headrace.server.http.streams.following import Follower, nothing
from headrace.server.http.streams.messages import Live, Read
from headrace.server.http.streams.offsets import From
from headrace.server.http.streams.reading import Chunk, located
from headrace.server.http.streams.refusals import CLOSED, LOST_BYTES, NEXT_OFFSET, RefusedError
from headrace.server.http.streams.streams import Found, Streams
from headrace.server.peers.connections import Connections

BODY_BYTES_MAX = 8 << 20
"""Longest body. All of it is one commit."""
DISCARDED_BODY_BYTES_MAX = 16 << 20
"""Bytes of a longer body that are read before the refusal: some clients miss an earlier answer."""
BODY_TIMEOUT_S = 30.0
"""Time in which the body of a request must arrive."""
EVENTS_TIMEOUT_S = 60.0
"""Time in which a reader must take the events that it was sent."""
FORKS_AT_ONCE_MAX = 2
"""Number of forks that are made at the same time. Each holds all of its records in memory."""

UP_TO_DATE = "Stream-Up-To-Date"
CURSOR = "Stream-Cursor"

_CACHED = "private, max-age=60, stale-while-revalidate=300"
"""For full chunks, which never change."""
_CHECKED = "private, no-cache"
"""For chunks at the end, which grow: caches may keep them, and have to ask before they use them."""


class StreamsApi:
    def __init__(
        self,
        store: Store,
        connections: Connections,
        streams: Streams,
        limits: HttpLimits,
        settings: Callable[[], StreamSettings],
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._connections = connections
        self._streams = streams
        self._limits = limits
        self._settings = settings
        self._now_ms = now_ms
        self._forking = asyncio.Semaphore(FORKS_AT_ONCE_MAX)
        self._encodings: WeakValueDictionary[tuple[str, str], events.Encoding] = (
            WeakValueDictionary()
        )

    def routes(self) -> list[Route]:
        path = f"{PATH}{{name:path}}"
        return [
            Route(path, self.create, methods=["PUT"]),
            Route(path, self.append, methods=["POST"]),
            Route(path, self.delete, methods=["DELETE"]),
            Route(path, self.read, methods=["GET"]),
        ]

    # Writing

    async def create(self, request: Request) -> Response:
        name = _written(request, Operation.PUBLISH)
        wanted = messages.create(request.headers)
        if wanted.fork is not None:
            check_topic_name(wanted.fork.source)
            check(request, Operation.SUBSCRIBE, wanted.fork.source)
        data = await _body(request)
        await self._streams.settled(name)
        found = self._found_or_conflict(name)
        if found is None and (topic := self._store.look(name)).exists:
            # The stream has expired, unless other protocols have given appends to the store before.
            await self._streams.durable(topic)
            await self._streams.settled(name)
            found = self._found_or_conflict(name)
        if found is not None:
            return self._existing(found, wanted)
        if not self._store.look(name).exists:
            check(request, Operation.CREATE, name)
        if wanted.fork is None:
            return await self._create(request, name, wanted, data)
        async with self._forking:
            return await self._create(request, name, wanted, data)

    async def _create(
        self, request: Request, name: str, wanted: messages.Create, data: bytes
    ) -> Response:
        source, inherited = None, None
        if (fork := wanted.fork) is not None:
            source = self._source(fork.source, wanted.content_type)
            wanted = wanted._replace(content_type=wanted.content_type or source.stream.content_type)
            inherited = await forks.inherited(self._store, source.topic, source.stream, fork)
            await self._streams.settled(name)
            if (found := self._found_or_conflict(name)) is not None:
                return self._existing(found, wanted)
        records = records_of(data, wanted.content_type)
        if why := self._limits.why_not_created((name,)):
            raise HTTPException(429, why)
        copied = inherited.records if inherited is not None else []
        size = _size(records) + _size(copied)
        self._limits.charge(request, max(1, len(records) + len(copied)), size, (name,))
        end = await self._streams.create(name, wanted, records, source, inherited)
        self._published(len(records))
        made = self._streams.find(name) if self._streams.exists(name) else None
        headers = {"Location": _location(request)}
        headers |= _described(made) if made is not None else {"Content-Type": wanted.content_type}
        return _answer(201, headers | _place(end, is_closed=wanted.closes))

    def _found_or_conflict(self, name: str) -> Found | None:
        """Return the stream; refuse the name of a stream that was deleted and has forks."""
        try:
            return self._streams.find(name)
        except RefusedError as refused:
            raise RefusedError(409, refused.detail) from None

    def _source(self, name: str, content_type: str) -> Found:
        """Return the stream that a new one, perhaps of a given type, is to be a fork of."""
        found = self._found_or_conflict(name)
        if found is None:
            raise _unknown(name)
        own = found.stream.content_type
        if content_type and media_type(content_type) != media_type(own):
            raise RefusedError(409, f"the source has the type {own}")
        return found

    def _existing(self, found: Found, wanted: messages.Create) -> Response:
        topic, stream, is_closed = found
        if not stream.is_like(wanted, is_closed=is_closed):
            name = quoted(topic.name)
            raise HTTPException(
                409, f"the stream {name} exists with another type, end or time to live"
            )
        return _answer(200, _described(found) | _place(topic.end, is_closed=is_closed))

    async def append(self, request: Request) -> Response:
        name = _written(request, Operation.PUBLISH)
        data = await _body(request)
        asked = messages.append(request.headers, has_body=bool(data))
        found = self._existing_stream(name)
        records = records_of(data, found.stream.content_type if data else "")
        if data and not records:
            raise HTTPException(400, "the array is empty: there is nothing to append")
        self._limits.charge(request, max(1, len(records)), _size(records), (name,))
        stored = await self._streams.append(found, asked, records)
        if not stored.is_duplicate:
            self._published(len(records))
        headers = _place(stored.end, is_closed=stored.is_closed)
        if stored.highest is not None:
            epoch, number = stored.highest
            headers |= {"Producer-Epoch": str(epoch), "Producer-Seq": str(number)}
        is_new = asked.claim is not None and bool(data) and not stored.is_duplicate
        return _answer(200 if is_new else 204, headers)

    async def delete(self, request: Request) -> Response:
        name = _written(request, Operation.DELETE)
        found = self._existing_stream(name)
        facts = {"epoch": found.topic.epoch} | self._store.kept(found.topic)._asdict()
        record(request, "topic.delete", topic=name, **facts)
        await self._streams.delete(found.topic)
        return _answer(204, {})

    # Reading

    async def read(self, request: Request) -> Response:
        name = _name(request)
        check_topic_name(name)
        check(request, Operation.SUBSCRIBE, name)
        if request.method == "HEAD":
            found = self._existing_stream(name)
            headers = _described(found) | _place(found.topic.end, is_closed=found.is_closed)
            return _answer(200, headers | {"Cache-Control": "no-store"})
        query = request.query_params
        asked = messages.read(
            query.getlist("offset"), query.getlist("live"), query.getlist("cursor")
        )
        found = self._existing_stream(name)
        self._streams.used(found)
        start = located(found.topic, found.stream, asked.start)
        if asked.live is Live.SSE:
            return EventStream(self, request, found, start, asked.cursor)
        if asked.live is Live.LONG_POLL:
            return await self._long_poll(request, found, start, asked)
        if asked.start is From.NOW:
            return self._now(found)
        chunk = await reading.read(self._store, found.topic, start)
        return self._chunk(request, found, chunk, {})

    def _now(self, found: Found) -> Response:
        """Return an answer without records, from the end of the stream."""
        content_type = found.stream.content_type
        headers = _place(found.topic.end, is_closed=found.is_closed) | {UP_TO_DATE: "true"}
        headers |= {"Content-Type": content_type, "Cache-Control": "no-store"}
        return _answer(200, headers, joined([], content_type))

    async def _long_poll(self, request: Request, found: Found, start: int, asked: Read) -> Response:
        topic, name, epoch = found.topic, found.topic.name, found.topic.epoch
        if start >= topic.end_offset and not found.is_closed:
            follower = Follower(self._connections, _peer(request))
            with self._limits.waiting(request), follower.following(topic, start, nothing):
                self._streams.follow(topic, follower.told)
                try:
                    until_s = asyncio.get_running_loop().time() + self._settings().long_poll_s
                    await self._news(follower, topic, start, until_s)
                finally:
                    self._streams.leave(topic, follower.told)
            found = self._existing_stream(name)
            self._streams.used(found)
        if topic.epoch != epoch:
            raise _unknown(name)
        cursor = {CURSOR: str(events.cursor(self._now_ms(), asked.cursor))}
        if start < topic.end_offset:
            chunk = await reading.read(self._store, topic, start)
            return self._chunk(request, found, chunk, cursor)
        headers = _place(topic.end, is_closed=found.is_closed) | cursor
        return _answer(204, headers | {UP_TO_DATE: "true", "Cache-Control": "no-store"})

    async def _news(self, follower: Follower, topic: Topic, start: int, until_s: float) -> None:
        """Wait until there are records behind `start`, or there is another reason to answer."""
        while topic.end_offset <= start and not (follower.is_told or follower.is_over):
            if not await follower.news(until_s):
                return

    def _chunk(
        self, request: Request, found: Found, chunk: Chunk, more: dict[str, str]
    ) -> Response:
        topic, stream, _ = found
        is_closed = chunk.is_last and self._streams.is_closed(topic)
        headers = _place(chunk.end, is_closed=is_closed) | more
        mark = ":closed" if is_closed else ""
        etag = f'"{chunk.end.epoch}:{chunk.start.offset}:{chunk.end.offset}{mark}"'
        headers["ETag"] = etag
        headers["Cache-Control"] = _CHECKED if chunk.is_last else _CACHED
        if chunk.is_last:
            headers[UP_TO_DATE] = "true"
        if chunk.lost_bytes:
            headers[LOST_BYTES] = str(chunk.lost_bytes)
        if etag in map(str.strip, request.headers.get("if-none-match", "").split(",")):
            return _answer(304, headers)
        headers["Content-Type"] = stream.content_type
        return _answer(200, headers, joined(chunk.payloads, stream.content_type))

    # Server-sent events

    async def send_events(
        self, found: Found, start: int, shown: int, follower: Follower, send: "SendBytes"
    ) -> None:
        """Send events until the stream ends, the reader has to ask again, or the time is over."""
        topic, epoch = found.topic, found.topic.epoch
        until_s = asyncio.get_running_loop().time() + self._settings().sse_s
        self._streams.follow(topic, follower.told)
        try:
            with follower.following(topic, start, self._encoding(found, shown)):
                if start >= topic.end_offset and not self._streams.is_closed(topic):
                    now = events.cursor(self._now_ms(), shown)
                    place = Position(epoch, start, 0)
                    await send(events.control(place, now, is_last=True, is_closed=False))
                while topic.epoch == epoch and not follower.is_over:
                    piece = follower.take()
                    at_end = follower.offset >= topic.end_offset
                    is_closed = at_end and self._streams.is_closed(topic)
                    if is_closed:
                        place = Position(epoch, follower.offset, 0)
                        end = events.control(place, 0, is_last=True, is_closed=True)
                        await send(piece[: piece.rfind(events.CONTROL)] + end if piece else end)
                        return
                    if piece:
                        await send(piece)
                    elif self._is_over(follower, topic) or not await follower.news(until_s):
                        return
        finally:
            self._streams.leave(topic, follower.told)
            self._streams.used(found)

    def _is_over(self, follower: Follower, topic: Topic) -> bool:
        """Return True if the stream is gone or the server stops."""
        if not follower.is_told:
            return False
        return self._connections.draining or not self._streams.exists(topic.name)

    def _encoding(self, found: Found, shown: int) -> events.Encoding:
        """Return the encoding that all readers of the stream share, if this one needs no other cursor."""
        topic, content_type = found.topic, found.stream.content_type
        if events.cursor(self._now_ms(), shown) > events.cursor(self._now_ms()):
            return events.Encoding(topic, content_type, self._now_ms, shown)
        key = topic.name, content_type
        shared = self._encodings.get(key)
        if shared is None:
            shared = self._encodings[key] = events.Encoding(topic, content_type, self._now_ms)
        return shared

    # Shared parts

    def _existing_stream(self, name: str) -> Found:
        found = self._streams.find(name)
        if found is None:
            raise _unknown(name)
        return found

    def _published(self, records: int) -> None:
        self._connections.metrics.count("records_published_total", records)

    def follower(self, request: Request) -> Follower:
        return Follower(self._connections, _peer(request))

    def waiting(self, request: Request) -> AbstractContextManager[None]:
        return self._limits.waiting(request)


SendBytes = Callable[[bytes], Awaitable[None]]


class EventStream(Response):
    """The answer with server-sent events. Ends when the client is gone."""

    def __init__(
        self, api: StreamsApi, request: Request, found: Found, start: int, cursor: int
    ) -> None:
        super().__init__()
        self._api = api
        self._request = request
        self._asked = found, start, cursor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found, start, cursor = self._asked
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        if not is_text(found.stream.content_type):
            headers.append((b"stream-sse-data-encoding", b"base64"))

        async def send_bytes(data: bytes) -> None:
            async with asyncio.timeout(EVENTS_TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})

        with self._api.waiting(self._request):
            follower = self._api.follower(self._request)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            watching = asyncio.ensure_future(_watch(receive, follower))
            try:
                await self._api.send_events(found, start, cursor, follower, send_bytes)
            except TimeoutError:
                if CUT_SHORT in scope:
                    scope[CUT_SHORT](at_once=True)
                return
            finally:
                watching.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _watch(receive: Receive, follower: Follower) -> None:
    """End the follower when its client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    follower.end()


def _name(request: Request) -> str:
    """Return the stream's name. It is part of the path, percent-encoded; slashes may be as they are."""
    return messages.name_in(_path(request))


def _path(request: Request) -> bytes:
    """Return the path as it was sent, percent-encoded."""
    raw: bytes = request.scope["raw_path"]
    return raw.partition(b"?")[0]


def _location(request: Request) -> str:
    path, host = _path(request).decode("latin-1"), request.headers.get("host", "")
    return f"{request.scope['scheme']}://{host}{path}" if host else path


def _written(request: Request, operation: Operation) -> str:
    """Return the name of a stream that a request may change. Raises an error for another one."""
    name = _name(request)
    check_topic_name(name)
    check(request, operation, name)
    check_publish_topic(name)  # last: only those with a grant learn which names are reserved
    return name


async def _body(request: Request) -> bytes:
    """Return the body. A body that is too long is read to its end before it is refused."""
    check_length(request, BODY_BYTES_MAX + DISCARDED_BODY_BYTES_MAX)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size <= BODY_BYTES_MAX:
                    parts.append(part)
                    continue
                parts.clear()
                body_is_taken(request.scope)
                if size > BODY_BYTES_MAX + DISCARDED_BODY_BYTES_MAX:
                    break
    except TimeoutError:
        raise HTTPException(408, f"the body must come within {BODY_TIMEOUT_S:g} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    if size > BODY_BYTES_MAX:
        raise too_long(BODY_BYTES_MAX)
    return b"".join(parts)


def _described(found: Found) -> dict[str, str]:
    """Return the headers that describe a stream."""
    stream = found.stream
    headers = {"Content-Type": stream.content_type}
    if stream.ttl_s is not None:
        headers["Stream-TTL"] = str(stream.ttl_s)
    if stream.expires_ms is not None:
        moment = datetime.datetime.fromtimestamp(stream.expires_ms / 1000, datetime.UTC)
        headers["Stream-Expires-At"] = moment.isoformat(timespec="milliseconds").replace(
            "+00:00", "Z"
        )
    return headers


def _place(end: Position, *, is_closed: bool) -> dict[str, str]:
    headers = {NEXT_OFFSET: offsets.encode(end)}
    return headers | {CLOSED: "true"} if is_closed else headers


def _answer(status: int, headers: dict[str, str], content: bytes = b"") -> Response:
    return Response(content, status, headers)


def _unknown(name: str) -> HTTPException:
    return HTTPException(404, f"there is no stream {quoted(name)}")


def _size(records: list[bytes]) -> int:
    return sum(map(len, records))


def _peer(request: Request) -> str:
    return f"{request.client.host}:{request.client.port}" if request.client else "unknown"
