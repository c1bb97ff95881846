"""The HTTP listener: uvicorn in the server's own event loop. Its connections limit what a peer may send.

Uvicorn collects a head of any size, takes any number of requests at once, and after an early answer keeps
reading the body for ever. Here a request that breaks a limit is answered at once, after all earlier requests
of its connection. Then the connection ends, and further data is read and discarded (`hang_up`), so that the
peer sees the answer. Elsewhere: the handling of requests by the application.
"""

import asyncio
import contextlib
import json
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.server.http.connections import (
    RETRY_S,
    CountedConnection,
    HttpConnections,
    turned_away,
)
from headrace.server.http.gate import CERTIFICATE, COUNTED, CUT_SHORT, OPEN_PATHS
from headrace.server.http.requests import (
    HEADER_OVERHEAD_BYTES,
    HELD,
    HeldRequest,
    RequestMemory,
    RequestMeter,
    RequestRefusedError,
)
from headrace.server.listeners import http_answer
from headrace.server.peers.admission import Admission
from headrace.server.peers.hangup import DISCARDED_BYTES_MAX, hang_up, peer_name
from headrace.server.tls.transport import TlsGate, TlsTransport, peer_certificate

REQUEST_TIMEOUT_S = 10.0
"""Time in which a request's head must arrive, counted from the connection or from its first byte."""
IDLE_TIMEOUT_S = 10
"""Time after an answer in which the next request must begin. Longer than common clients keep a connection."""
PIPELINED_MAX = 16
"""Requests of one connection that wait for the answer to an earlier one."""

_COUNTED = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})
"""Statuses of the application's answers that mean a broken limit."""


@dataclass
class HttpShared:
    """State that the connections of the HTTP listener share."""

    connections: HttpConnections
    body_bytes_max: int
    """Longest body that any endpoint accepts."""
    memory: RequestMemory
    refused: Callable[[str, str], None]
    """Called with the name of a peer, and with the reason why its request was refused."""


def _closing_early(app: ASGIApp, refused: Callable[[str, str], None]) -> ASGIApp:
    """Return an application that ends the connection after an answer to a request that is not complete."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        request: HeldRequest = scope[HELD]

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] in _COUNTED:
                    host, port = scope["client"] or ("unknown", 0)
                    refused(f"{host}:{port}", HTTPStatus(message["status"]).phrase)
                if not request.is_whole:
                    headers = [*message.get("headers", ()), (b"connection", b"close")]
                    message = {**message, "headers": headers}
            await send(message)

        try:
            await app(scope, receive, send_and_close)
        except asyncio.CancelledError:
            # The server stops, and waits no longer for this answer or for its peer to read it.
            scope[CUT_SHORT](at_once=True)

    return run


class _TurnedAwayError(RequestRefusedError):
    """A request on a connection that is above a limit of connections."""


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, shared: HttpShared, **options: Any) -> None:
        super().__init__(**options)
        self._shared = shared
        self._meter = RequestMeter()
        self._request = HeldRequest(shared.memory)
        """The request that is arriving, or that came last."""
        self._unanswered: deque[HeldRequest] = deque()
        """Unanswered requests with a complete head, in their order."""
        self._refusal: RequestRefusedError | None = None
        self._discarded_bytes = 0
        self._asked = True
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._peer = peer_name(transport)
        self._certificate = peer_certificate(transport)
        self._ending = _Transport(transport, self)
        super().connection_made(self._ending)  # type: ignore[arg-type]
        self._counted = CountedConnection(self._shared.connections, self._peer, transport.abort)
        if self._counted.has_no_room:
            transport.abort()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._counted.end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request in (*self._unanswered, self._request):
            request.release()
        self._unanswered.clear()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > DISCARDED_BYTES_MAX:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        try:
            if self._meter.feed(self.parser, data) is not None:
                # The listener speaks only HTTP: the request is answered, and nothing after it is read.
                self.cycle.keep_alive = False
        except RequestRefusedError as refusal:
            self._refuse(refusal)

    # Callbacks of the parser. An exception here ends the parser's work, and comes out of `feed_data`.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            raise RequestRefusedError(429, f"{PIPELINED_MAX} requests may wait for their answers")
        super().on_message_begin()
        self._request = self.scope[HELD] = HeldRequest(self._shared.memory)  # type: ignore[typeddict-unknown-key]
        self.scope[CERTIFICATE] = self._certificate  # type: ignore[typeddict-unknown-key]
        self.scope[COUNTED] = self._counted  # type: ignore[typeddict-unknown-key]
        self._meter.begin()
        self._expect_request()

    def on_url(self, url: bytes) -> None:
        self._meter.url(len(url))
        self._request.hold_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name) + len(value)
        self._meter.header(size)
        # Trailers are counted and dropped: they come too late for the application.
        if self._meter.in_head:
            self._request.hold_head(size + HEADER_OVERHEAD_BYTES)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._asked = True
        bytes_max = self._shared.body_bytes_max
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(length) > bytes_max:
            raise RequestRefusedError(413, f"a body may have {bytes_max} bytes")
        why = self._counted.why_refused
        if why and self.url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            raise _TurnedAwayError(503, turned_away(why))
        super().on_headers_complete()
        if why:
            self.cycle.keep_alive = False
        self.scope[CUT_SHORT] = partial(self._cut_short, self.cycle)  # type: ignore[typeddict-unknown-key]
        self._meter.head_is_complete()
        self._unanswered.append(self._request)

    def on_body(self, body: bytes) -> None:
        self._meter.body()
        if self.cycle.response_complete:
            return
        self._request.hold_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._meter.begin()
        self._request.is_whole = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._unanswered:  # empty if the connection is lost
            self._unanswered.popleft().release()
        super().on_response_complete()
        if self._unanswered:
            return
        if not self.transport.is_closing():
            self._counted.answered()
        if self._refusal is not None:
            self._answer(self._refusal)

    # Refusals

    @property
    def is_whole(self) -> bool:
        """True if no request has arrived only in part."""
        return not self.scope or self._request.is_whole

    def _refuse(self, refusal: RequestRefusedError) -> None:
        """Refuse a request. The answer follows those to all earlier requests of this connection."""
        self._refusal = refusal
        if not isinstance(refusal, _TurnedAwayError):  # its connection is counted already
            self._shared.refused(self._peer, str(refusal))
        if not self._meter.in_head and self._unanswered:
            self._withdraw()
        if not self._unanswered:
            self._answer(refusal)

    def _withdraw(self) -> None:
        """Take the last request away from the application, because the request will never be complete."""
        cycle = self.cycle
        if cycle.response_complete:
            return  # the answer is complete already
        self._unanswered.pop().release()
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        elif cycle.response_started:
            self.transport.abort()  # a partly sent answer cannot be withdrawn
        else:
            cycle.disconnected = True
            cycle.message_event.set()

    def _answer(self, refusal: RequestRefusedError) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps({"error": str(refusal)}).encode()
        status = HTTPStatus(refusal.status)
        headers: dict[str, Any] = {"Content_Type": "application/json"}
        if isinstance(refusal, _TurnedAwayError):
            headers["Retry_After"] = str(RETRY_S)
        self.transport.write(http_answer(status, body, **headers))
        self._ending.hang_up()

    def _cut_short(self, cycle: RequestResponseCycle, *, at_once: bool = False) -> None:
        """End the connection, because the application gives up an answer that it has begun."""
        if cycle.response_complete:
            return  # the connection belongs to the next request already
        # Otherwise uvicorn would log the missing rest as an error of the application.
        cycle.disconnected = True
        if at_once:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._ending.hang_up()

    def send_400_response(self, msg: str) -> None:
        raise AssertionError("requests are refused by `_refuse`")

    # Slow peers

    def _expect_request(self) -> None:
        if self._asked:
            self._asked = False
            self._until_s = self.loop.time() + REQUEST_TIMEOUT_S
            if self._timer is None:
                self._timer = self.loop.call_at(self._until_s, self._look_for_request)

    def _look_for_request(self) -> None:
        self._timer = None
        if self._asked or self._refusal is not None or self.transport.is_closing():
            return
        if self.loop.time() < self._until_s:
            self._timer = self.loop.call_at(self._until_s, self._look_for_request)
        elif self._request.head_bytes:
            why = f"the head of a request must come within {REQUEST_TIMEOUT_S:g} seconds"
            self._refuse(RequestRefusedError(408, why))
        else:
            self.transport.abort()  # the peer has sent nothing of a request


class _Transport:
    """Transport for uvicorn: the real one, except that closing it early loses no answer."""

    __slots__ = ("_is_ending", "_protocol", "_transport")

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._is_ending = False

    def close(self) -> None:
        if self._is_ending:
            self._transport.abort()  # the server stops, and does not wait for the peer
        elif self._protocol.is_whole or self._transport.is_closing():
            self._transport.close()
        else:
            self.hang_up()

    def hang_up(self) -> None:
        self._is_ending = True
        hang_up(self._transport, lambda: self._protocol.connection_lost(None))

    def write(self, data: bytes) -> None:
        # With pipelined requests, uvicorn answers the earlier ones also when the peer has left.
        if not self._transport.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._is_ending or self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self._is_ending:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_ending:
            self._transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_STOP_TIMEOUT_S = 2


class HttpListener:
    """An application on one socket, with TLS if there is a gate."""

    def __init__(
        self, app: Starlette, shared: HttpShared, sock: socket.socket, gate: TlsGate | None = None
    ) -> None:
        def protocol(**options: Any) -> asyncio.BaseProtocol:
            make = partial(BoundedProtocol, shared, **options)
            return make() if gate is None else TlsTransport(gate, make)

        config = uvicorn.Config(
            _closing_early(app, shared.refused),
            http=protocol,  # type: ignore[arg-type]
            ws="none",  # WebSocket clients have their own listener
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # a peer's address is that of its connection, whatever it says
            timeout_keep_alive=IDLE_TIMEOUT_S,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        self._server = _Uvicorn(config, shared.connections.at_once_max)
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        await self._server.is_open.wait()

    @property
    def connection_count(self) -> int:
        return len(self._server.server_state.connections)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, at_once_max: Callable[[], int]) -> None:
        super().__init__(config)
        self._at_once_max = at_once_max
        self._admissions: list[Admission] = []
        self.is_open = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections as the other listeners do, instead of as uvicorn does."""
        protocol: Any = self.config.http_protocol_class
        make = partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        loop = asyncio.get_running_loop()
        self.servers = []
        self._admissions = [
            Admission(loop, sock, make, self._at_once_max) for sock in sockets or ()
        ]
        self.started = True
        self.is_open.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for admission in self._admissions:
            admission.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: `server.py` handles them."""
        yield
