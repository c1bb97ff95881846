"""The HTTP API: all endpoints together, and those of the server's state. Documented in `docs/http.md`.

Elsewhere: the other endpoints, in files of this folder. Each has a class with the handlers and `routes()`.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__, errors
from headrace.access.operations import Operation
from headrace.broker.channel.hub import Channels
from headrace.config.settings import Config
from headrace.log.embedded import EmbeddedStore
from headrace.log.layout import Layout
from headrace.log.store import BatchRefusedError
from headrace.server.access import Access
from headrace.server.audit import Audit
from headrace.server.clock import SteadyClock
from headrace.server.http.batches import BatchesApi
from headrace.server.http.channels import ChannelsApi
from headrace.server.http.gate import CHANNELS, AccessGate, check_server, record, refused
from headrace.server.http.limits import HttpLimits, OverLimitError
from headrace.server.http.openapi import PATH, STATUSES, description
from headrace.server.http.ranges import RangesApi
from headrace.server.http.requests import RefusalWithFacts
from headrace.server.http.streams.api import StreamsApi
from headrace.server.http.streams.cors import StreamHeaders
from headrace.server.http.streams.streams import Streams
from headrace.server.http.tickets import TicketsApi
from headrace.server.http.topics import CursorsApi, LongPolls, TopicsApi
from headrace.server.http.trace import TraceApi
from headrace.server.metrics.declarations import PROTOCOLS
from headrace.server.metrics.scrape import Scrapes
from headrace.server.peers.connections import Connections
from headrace.server.trace.tracing import Tracing


class ServerFacts(NamedTuple):
    """Facts about the server that are known when it starts."""

    started_s: float
    """Start of the server, by the monotonic clock."""
    listeners: dict[str, str]
    data_dir: str
    config: Callable[[], Config]
    """The settings in force, which a reload changes."""


def make_app(
    connections: Connections,
    store: EmbeddedStore,
    layout: Layout,
    waiting: LongPolls,
    channels: Channels,
    clock: SteadyClock,
    facts: ServerFacts,
    access: Access,
    audit: Audit,
    scrapes: Scrapes,
    tracing: Tracing,
    streams: Streams,
) -> Starlette:
    broker, limits = connections.broker, HttpLimits(connections)
    return Starlette(
        routes=[
            *_StateApi(connections, clock, facts, scrapes).routes(),
            *TopicsApi(store, broker, waiting, limits, streams).routes(),
            *CursorsApi(store, connections.readers, channels.readers_moved).routes(),
            *BatchesApi(store, connections.metrics, limits).routes(),
            *RangesApi(store, broker, layout).routes(),
            *ChannelsApi(channels, limits).routes(),
            *TicketsApi(access).routes(),
            *TraceApi(tracing).routes(),
            *StreamsApi(
                store,
                connections,
                streams,
                limits,
                lambda: facts.config().streams,
                clock.now_ms,
            ).routes(),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        middleware=[
            Middleware(StreamHeaders, origins=lambda: facts.config().listen.origins),
            Middleware(AccessGate, access=access, audit=audit),
        ],
    )


@dataclass
class _StateApi:
    """Endpoints for the server's state: health, metrics, status, clock and the API's description."""

    _connections: Connections
    _clock: SteadyClock
    _facts: ServerFacts
    _scrapes: Scrapes

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
            Route("/metrics", self.metrics),
            Route("/v1/status", self.status, methods=["GET"]),
            Route("/v1/clock", self.clock, methods=["GET"]),
            Route("/v1/clock/confirm", self.confirm, methods=["POST"]),
            Route(PATH, self.description),
        ]

    async def health(self, request: Request) -> Response:
        status, body = self._connections.health.answer()
        return JSONResponse(body, status)

    async def ready(self, request: Request) -> Response:
        status, body = self._connections.health.readiness()
        return JSONResponse(body, status)

    async def status(self, request: Request) -> Response:
        check_server(request)
        connections = self._connections
        counts = Counter(connection.protocol for connection in connections.open)
        retention = self._facts.config().retention
        return JSONResponse(
            {
                "version": __version__,
                "uptime_s": round(time.monotonic() - self._facts.started_s, 3),
                "health": connections.health.answer()[1],
                "listeners": self._facts.listeners,
                "data_dir": self._facts.data_dir,
                "connections": {name: counts[name] for name in PROTOCOLS},
                "retention": {"age_s": retention.age_s, "bytes": retention.bytes},
            }
        )

    async def clock(self, request: Request) -> Response:
        check_server(request)
        clock = self._clock
        return JSONResponse(
            {
                "now_ms": clock.now_ms(),
                "ahead_ms": clock.ahead_ms,
                "followed_in_ms": clock.followed_in_ms,
                "trouble": clock.trouble,
            }
        )

    async def confirm(self, request: Request) -> Response:
        check_server(request, Operation.ADMIN)
        self._clock.tick()
        record(request, "clock.confirm", ahead_ms=self._clock.ahead_ms)
        return JSONResponse({"followed_ms": self._clock.confirm()})

    async def description(self, request: Request) -> Response:
        return JSONResponse(description())

    async def metrics(self, request: Request) -> Response:
        check_server(request)
        body, media_type = await self._scrapes.answer(request.headers.get("accept", ""))
        return Response(body, media_type=media_type)


_ERRORS: dict[type[Exception], int] = {
    errors.BadBlockError: 400,
    errors.BadCursorError: 400,
    errors.BadReaderNameError: 400,
    errors.BadTopicNameError: 400,
    ClientDisconnect: 400,  # the client is gone, and sees no answer
    errors.UnknownStagedError: 404,
    errors.BatchNumberError: 409,
    BatchRefusedError: 409,
    errors.StagedClaimedError: 409,
    errors.TooManyCursorsError: 409,
    errors.StoreFailedError: 503,
    errors.StagingFullError: 507,
}
"""Status of the answer to a request that an endpoint ends with this error."""


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, OverLimitError):
        facts: dict[str, object] = {"error": error.detail}
        if request.url.path.startswith(CHANNELS):
            facts |= {"code": "over-rate", "retry": True}
        return JSONResponse(facts, error.status_code, error.headers)
    if isinstance(error, RefusalWithFacts):
        return JSONResponse({"error": error.detail} | error.facts, error.status_code)
    if isinstance(error, errors.ChannelError):
        facts = {"error": str(error), "code": error.code, "retry": error.retry}
        return JSONResponse(facts, STATUSES[error.code])
    if isinstance(error, HTTPException):
        answer = refused(request.scope, error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer
    status = next(_ERRORS[kind] for kind in type(error).__mro__ if kind in _ERRORS)
    return refused(request.scope, status, str(error))


EXCEPTION_HANDLERS = dict.fromkeys((HTTPException, errors.ChannelError, *_ERRORS), _answer)
