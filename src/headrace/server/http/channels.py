"""The endpoints of channels, for processors that poll and for operators. Described in `/openapi.json`."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.access.operations import Member as MemberName
from headrace.access.operations import Operation
from headrace.broker.channel.channel import Accepted, Channel, Joined
from headrace.broker.channel.hub import Channels, check_channel_name
from headrace.broker.channel.member import Batch, Origin, Receive
from headrace.broker.channel.notes import StoredSnapshot
from headrace.errors import ChannelError, StoreFailedError
from headrace.model import CHANNEL_PREFIX, PAYLOAD_BYTES_MAX
from headrace.payload.channel import (
    NUMBER_MAX,
    BadMessageError,
    Content,
    check_json,
    check_processor,
    decode_message,
)
from headrace.payload.reducers import STATE_BYTES_MAX
from headrace.printing import quoted
from headrace.server.channel.connection import joined_fields, sent_fields, snapshot_fields
from headrace.server.http.gate import check, may, record, rights
from headrace.server.http.limits import HttpLimits
from headrace.server.http.openapi import (
    CHANNELS_LISTED_MAX,
    JSON,
    MESSAGES_MAX,
    PATHS,
    RAW,
    WAIT_S_MAX,
)
from headrace.server.http.requests import body, limit, number
from headrace.wire import channel as wire

RENEWAL_S_MIN = 0.1
"""Shortest interval at which a waiting request renews the presence of its processor."""

T = TypeVar("T")

_Refuse = Callable[[ChannelError], None]
_Ask = Callable[[Channel, Callable[[T], None], _Refuse], None]


class _Poll(NamedTuple):
    """A request for messages. They start at `origin`; None means the processor's cursor."""

    channel: str
    processor: str
    limit: int
    origin: int | None


class ChannelsApi:
    """Each endpoint is the method with the name of its operation in `PATHS`."""

    def __init__(self, channels: Channels, limits: HttpLimits) -> None:
        self._channels = channels
        self._limits = limits

    def routes(self) -> list[Route]:
        return [
            Route(path, getattr(self, operation["operationId"]), methods=[method.upper()])
            for path, operations in PATHS.items()
            for method, operation in operations.items()
        ]

    # Endpoints for processors

    async def join(self, request: Request) -> Response:
        name, processor = self._asked(request)
        origin, lease_ms = _origin(request), _lease_ms(request)
        self._check_creation(name)
        joined: Joined = await self._ask(
            name,
            lambda channel, done, refuse: channel.join(
                processor, None, Receive.POLL, done, refuse, origin=origin, lease_ms=lease_ms
            ),
        )
        fields = joined_fields(name, joined, binary=False)
        return _json(fields | {"was_member": joined.was_member})

    async def leave(self, request: Request) -> Response:
        name, processor = self._asked(request)

        def leave(channel: Channel, done: Callable[[None], None], _: _Refuse) -> None:
            channel.leave(processor, partial(done, None))

        await self._ask(name, leave)
        return _json({"channel": name})

    async def send(self, request: Request) -> Response:
        name, processor = self._asked(request)
        sent = number(request.query_params.get("number"), "number")
        if not 1 <= sent <= NUMBER_MAX:
            raise HTTPException(400, f"number must be 1 to {NUMBER_MAX}")
        content = await _content(request, PAYLOAD_BYTES_MAX)
        self._check_creation(name)
        self._limits.charge(request, 1, len(content.data), (CHANNEL_PREFIX + name,))
        accepted: Accepted = await self._ask(
            name,
            lambda channel, done, _: channel.send(channel.request(processor), sent, content, done),
        )
        status = 200 if accepted.is_duplicate else 201
        return _json(sent_fields(name, sent, accepted), status)

    async def poll(self, request: Request) -> Response:
        name, processor = self._asked(request)
        query = request.query_params
        is_raw = RAW in request.headers.get("accept", "")
        most = limit(request, 1 if is_raw else MESSAGES_MAX, "max")
        wait_s = min(number(query.get("wait_s", "0"), "wait_s"), WAIT_S_MAX)
        if "ack" in query:
            await self._ack(name, processor, _offset(request, "ack"))
        asked = _Poll(name, processor, most, _offset(request, "from") if "from" in query else None)
        batch = await self._fetch(asked)
        if wait_s and not _is_news(batch):
            with self._limits.waiting(request):
                batch = await self._wait(request, asked, wait_s)
        if not is_raw:
            return Response(
                wire.messages_json(name, batch.messages, batch.more, batch.lost),
                media_type=JSON,
            )
        lost = {"Headrace-Lost": str(batch.lost)} if batch.lost else {}
        if not batch.messages:
            return Response(status_code=204, headers=lost)
        [(offset, _, payload)] = batch.messages
        message = decode_message(payload)
        headers = lost | {
            "Headrace-Offset": str(offset),
            # A header holds Latin-1, but a name may be any text. So it is percent-encoded, as in a URL.
            "Headrace-Processor": quote(message.processor),
            "Headrace-Number": str(message.number),
            "Headrace-More": "true" if batch.more else "false",
        }
        kind = JSON if message.content.is_json else RAW
        return Response(message.content.data, media_type=kind, headers=headers)

    async def ack(self, request: Request) -> Response:
        name, processor = self._asked(request)
        at = await self._ack(name, processor, _offset(request, "offset"))
        return _json({"channel": name, "offset": at})

    async def upload(self, request: Request) -> Response:
        processor = None
        if "processor" in request.query_params:
            name, processor = self._asked(request)
        else:
            name = await self._existing_named(request, Operation.DELETE)
        offset = _offset(request, "offset")
        content = await _content(request, STATE_BYTES_MAX)

        def upload(channel: Channel, done: Callable[[int], None], refuse: _Refuse) -> None:
            if processor is not None:
                channel.request(processor)
            channel.upload(offset, content, done, refuse)

        return _json({"channel": name, "offset": await self._ask(name, upload)})

    async def snapshot(self, request: Request) -> Response:
        name = self._named(request, Operation.SUBSCRIBE)
        snapshot: StoredSnapshot | None = await _answer(
            lambda done, refuse: self._channels.load_snapshot(name, done, _unavailable(refuse))
        )
        if snapshot is None:
            raise ChannelError("not-found", f"channel {name!r} has no snapshot")
        if RAW not in request.headers.get("accept", ""):
            return _json({"channel": name, "snapshot": snapshot_fields(snapshot, binary=False)})
        kind = JSON if snapshot.content.is_json else RAW
        headers = {"Headrace-Offset": str(snapshot.offset), "Headrace-Epoch": str(snapshot.epoch)}
        return Response(snapshot.content.data, media_type=kind, headers=headers)

    # Endpoints for operators

    async def list(self, request: Request) -> Response:
        query = request.query_params
        most = limit(request, CHANNELS_LISTED_MAX)
        found = await self._page(request, query.get("prefix", ""), query.get("after", ""), most + 1)
        described = [await self._describe(name) for name in found[:most]]
        return _json({"channels": described, "more": len(found) > most})

    async def _page(self, request: Request, prefix: str, after: str, most: int) -> Sequence[str]:
        """Return the first channels behind `after` that the request may inspect."""
        rights(request).is_asked = True  # every channel of the answer is asked for
        found: list[str] = []
        while len(found) < most:
            page = self._channels.report.names(prefix, after, CHANNELS_LISTED_MAX)
            found += [one for one in page if may(request, Operation.INSPECT, CHANNEL_PREFIX + one)]
            if len(page) < CHANNELS_LISTED_MAX:
                break
            after = page[-1]
            await asyncio.sleep(0)
        return found[:most]

    async def describe(self, request: Request) -> Response:
        return _json(await self._existing(self._named(request, Operation.INSPECT)))

    async def keep(self, request: Request) -> Response:
        name = await self._existing_named(request, Operation.DELETE)
        record(request, "channel.keep", channel=name)
        was_planned: bool = await self._ask(name, lambda channel, done, _: channel.keep(done))
        return _json({"channel": name, "cancelled": was_planned})

    async def destroy(self, request: Request) -> Response:
        name = await self._existing_named(request, Operation.DELETE)
        described = await self._describe(name)
        members = len(described["members"])
        facts = {"messages": described["messages"], "members": members}
        record(request, "channel.destroy", channel=name, **facts)

        def destroy(channel: Channel, done: Callable[[None], None], refuse: _Refuse) -> None:
            channel.destroy(partial(done, None), _unavailable(refuse))

        await self._ask(name, destroy)
        return _json({"channel": name, **facts})

    # Helpers

    def _check_creation(self, name: str) -> None:
        """Raise ChannelError if the channel has no log, and no further one may be created."""
        if why := self._limits.why_not_created((CHANNEL_PREFIX + name,)):
            raise ChannelError("too-many", why)

    def _named(self, request: Request, operation: Operation) -> str:
        """Return the name of a channel, if the request may perform the operation on its log."""
        name = _channel(request)
        check(request, operation, CHANNEL_PREFIX + name)
        return name

    def _asked(self, request: Request) -> tuple[str, str]:
        processor = request.query_params.get("processor")
        if processor is None:
            raise HTTPException(400, "name the processor")
        try:
            check_processor(processor)
        except BadMessageError as error:
            raise HTTPException(400, str(error)) from None
        name = _channel(request)
        check(request, Operation.JOIN, MemberName(name, processor))
        return name, processor

    async def _existing_named(self, request: Request, operation: Operation) -> str:
        name = self._named(request, operation)
        await self._existing(name)
        return name

    async def _ask(self, name: str, ask: _Ask[T]) -> T:
        """Ask a channel. It is looked up here, because another object may replace it during an `await`."""
        channel = self._channels.get(name)
        try:
            return await _answer(partial(ask, channel))
        finally:
            self._channels.rest(channel)

    async def _ack(self, name: str, processor: str, offset: int) -> int:
        def ack(channel: Channel, done: Callable[[int], None], refuse: _Refuse) -> None:
            channel.ack(channel.request(processor), offset, done, refuse)

        return await self._ask(name, ack)

    async def _fetch(self, asked: _Poll) -> Batch:
        def fetch(channel: Channel, done: Callable[[Batch], None], refuse: _Refuse) -> None:
            if asked.origin is None:
                channel.fetch(channel.request(asked.processor), asked.limit, done)
            else:
                channel.request(asked.processor, at_cursor=False)
                channel.fetch_from(asked.origin, asked.limit, done, refuse)

        return await self._ask(asked.channel, fetch)

    async def _wait(self, request: Request, asked: _Poll, wait_s: int) -> Batch:
        """Wait for pending messages and return them; none if the time is over, or the client is gone."""
        woken = asyncio.Event()
        gone = asyncio.create_task(_hung_up(request))
        gone.add_done_callback(lambda _: woken.set())
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        batch = Batch(asked.channel, [], more=False)
        try:
            while not (_is_news(batch) or gone.done()) and (left_s := until - loop.time()) > 0:
                woken.clear()
                batch = await self._fetch_or_wait(asked, woken, left_s)
        finally:
            gone.cancel()
        return batch

    async def _fetch_or_wait(self, asked: _Poll, woken: asyncio.Event, wait_s: float) -> Batch:
        """Fetch messages. If there are none, wait until woken, or until the presence has to be renewed."""
        channel = self._channels.get(asked.channel)
        channel.wait(woken.set)  # before the fetch: later messages wake it too
        try:
            batch = await self._fetch(asked)
            if not _is_news(batch):
                renewal_s = max(RENEWAL_S_MIN, channel.rule.presence_ms / 2000)
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_s, renewal_s)):
                        await woken.wait()
            return batch
        finally:
            channel.wait_no_more(woken.set)
            self._channels.rest(channel)

    async def _existing(self, name: str) -> dict[str, Any]:
        described = await self._describe(name)
        if not (described["exists"] or described["members"] or described["snapshot"]):
            raise ChannelError("not-found", f"there is no channel {quoted(name)}")
        return described

    async def _describe(self, name: str) -> dict[str, Any]:
        snapshot: StoredSnapshot | None = await self._ask(
            name, lambda channel, done, refuse: channel.load_snapshot(done, _unavailable(refuse))
        )
        channel = self._channels.get(name)
        described = self._channels.report.describe(channel, snapshot, self._channels.clock_ms())
        self._channels.rest(channel)
        return described


def _channel(request: Request) -> str:
    name = request.query_params.get("name")
    if name is None:
        raise HTTPException(400, "name the channel: ?name=CHANNEL")
    check_channel_name(name)
    return name


def _is_news(batch: Batch) -> bool:
    return bool(batch.messages or batch.lost)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer(ask: Callable[[Callable[[T], None], _Refuse], None]) -> T:
    """Return the channel's answer to a request. Raise ChannelError if the channel refuses it."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def refuse(error: ChannelError) -> None:
        if not future.done():
            future.set_exception(error)

    try:
        ask(done, refuse)
        return await future
    except StoreFailedError as error:
        raise ChannelError("unavailable", str(error)) from None


def _unavailable(refuse: _Refuse) -> Callable[[str], None]:
    return lambda reason: refuse(ChannelError("unavailable", reason))


def _origin(request: Request) -> Origin:
    text = request.query_params.get("from")
    return "state" if text == "state" else None if text is None else _offset(request, "from")


def _lease_ms(request: Request) -> int:
    text = request.query_params.get("lease_s")
    if text is None:
        return 0
    try:
        lease_s = float(text)
    except ValueError:
        lease_s = 0.0
    if not wire.LEASE_S_MIN <= lease_s <= wire.LEASE_S_MAX:
        bounds = f"{wire.LEASE_S_MIN:g} to {wire.LEASE_S_MAX:.0f}"
        raise HTTPException(400, f"lease_s must be {bounds} seconds, not {text!r}")
    return int(lease_s * 1000)


def _offset(request: Request, name: str) -> int:
    offset = number(request.query_params.get(name), name)
    if offset > wire.OFFSET_MAX:
        raise HTTPException(400, f"{name} must be at most {wire.OFFSET_MAX}")
    return offset


async def _content(request: Request, bytes_max: int) -> Content:
    """Return the body: as JSON if its Content-Type says so, else as bytes."""
    data = await body(request, bytes_max)
    is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == JSON
    if is_json:
        try:
            check_json(data)
        except BadMessageError as error:
            raise ChannelError("bad-content", str(error)) from None
    return Content(data, is_json)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(wire.to_json(value), status, media_type=JSON)
