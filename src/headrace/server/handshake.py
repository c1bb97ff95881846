"""The HTTP side of the WebSocket listener: who is let in, and plain answers to everyone else.

A request is read and judged here, and only a WebSocket handshake that we accept gets as far as picows, in a
form of our own: browsers write some headers in ways it does not take.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools

from headrace.config_values import Origins
from headrace.printing import quoted
from headrace.server.connection import Connections, hang_up, peer_name
from headrace.server.request_limits import RequestMeter, RequestRefusedError
from headrace.server.strangers import TLS_HELLO, TLS_ON_PLAIN_PORT
from headrace.server.websocket import WebSocketConnection, upgrade

HANDSHAKE_TIMEOUT_S = 5.0
"""How long a request may take to arrive."""
HANDSHAKES_MAX = 1024
"""Connections without a complete request; further ones are closed at once: so their memory is bounded."""
URL_BYTES_MAX = 8 * 1024
"""The longest URL here."""
ORIGIN_MAX = 300
"""The longest origin, in characters, that a log line has in full."""
BODY_BYTES_MAX = 64 * 1024
"""The longest body that is announced by a request which needs none."""

_VERSION = "13"


class Route(NamedTuple):
    """Where clients of a protocol connect."""

    name: str
    """Its path, for people."""
    find: Callable[[str], Callable[[], WebSocketConnection] | None]
    """What a WebSocket to a path becomes; None when it is not this one's."""


class Door:
    """What the connections of the WebSocket listener share until they are let in."""

    def __init__(
        self,
        shared: Connections,
        routes: Sequence[Route],
        origins: Origins,
    ) -> None:
        self.shared = shared
        self.routes = routes
        self.origins = origins
        self.waiting = 0

    def __call__(self) -> "Handshake":
        return Handshake(self)


class _Answer(Exception):  # noqa: N818
    """This request is answered in plain HTTP."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = HTTPStatus(status)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Handshake(asyncio.Protocol):
    """One request: either it becomes a WebSocket, or it is answered and the connection ends."""

    __slots__ = (
        "_answered",
        "_complete",
        "_door",
        "_headers",
        "_meter",
        "_method",
        "_parser",
        "_timer",
        "_transport",
        "_url",
        "_version",
    )

    def __init__(self, door: Door) -> None:
        self._door = door
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._method = ""
        self._version = ""
        self._headers: dict[str, list[str]] = {}
        self._meter = RequestMeter(URL_BYTES_MAX)
        self._complete = self._answered = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        shared = self._door.shared
        if self._door.waiting >= HANDSHAKES_MAX:
            shared.refused(peer_name(transport), "too many handshakes at once")
            self._transport.abort()
            return
        self._door.waiting += 1
        self._timer = shared.loop.call_later(HANDSHAKE_TIMEOUT_S, self._give_up)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_wait()

    def data_received(self, data: bytes) -> None:
        if self._timer is None or self._answered:
            return
        try:
            rest = self._feed(data)
            if self._complete:
                self._upgrade(self._judge(), rest)
        except RequestRefusedError as refusal:
            self._refuse_request(refusal)
        except _Answer as answer:
            self._answer(answer)

    def _feed(self, data: bytes) -> bytes:
        """Give the parser what has come of the request; returns what lies behind it."""
        at = 0
        for piece in self._meter.pieces(memoryview(data)):
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as found:
                return data[at + found.args[0] :]
            except httptools.HttpParserError as error:
                if data.startswith(TLS_HELLO):
                    self._refused(TLS_ON_PLAIN_PORT)
                raise _refusal_for(error) from None
            if self._complete:
                break  # whatever comes behind it
            at += len(piece)
        return b""

    def _refuse_request(self, refusal: RequestRefusedError) -> None:
        self._door.shared.request_refused(peer_name(self._transport), str(refusal))
        self._answer(_Answer(refusal.status, str(refusal)))

    def _give_up(self) -> None:
        if self._answered:
            return  # it ends by itself
        if self._method or self._url:
            self._refuse_request(
                RequestRefusedError(408, f"a request must come within {HANDSHAKE_TIMEOUT_S:g} s")
            )
        else:
            self._transport.abort()

    # What the parser finds; only the first request counts

    def on_url(self, url: bytes) -> None:
        if not self._complete:
            self._meter.url(len(url))
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self._meter.header(len(name) + len(value))
            key = name.decode("latin-1").lower()
            self._headers.setdefault(key, []).append(value.decode("latin-1").strip())

    def on_headers_complete(self) -> None:
        if not self._complete:
            self._complete = True
            self._method = self._parser.get_method().decode("latin-1")
            self._version = self._parser.get_http_version()

    # What becomes of it

    def _judge(self) -> WebSocketConnection:
        """The connection that this request opens; raises the answer when it opens none."""
        if int(self._header("content-length") or 0) > BODY_BYTES_MAX:
            raise RequestRefusedError(
                413, f"a body may have {BODY_BYTES_MAX} bytes, and needs none"
            )
        path = self._url.partition(b"?")[0].decode("latin-1")
        method = self._method
        if path == "/healthz":
            if method not in ("GET", "HEAD"):
                raise _Answer(405, "ask with GET", Allow="GET, HEAD")
            status, body = self._door.shared.health.answer()
            raise _Answer(status, json.dumps(body), Content_Type="application/json")
        make = next((make for route in self._door.routes if (make := route.find(path))), None)
        if make is None:
            known = ", ".join(route.name for route in self._door.routes)
            raise _Answer(404, f"there is nothing here: WebSocket clients connect at {known}")
        if method != "GET":
            raise _Answer(405, "a WebSocket is opened with GET", Allow="GET")
        if self._header("content-length") not in ("", "0") or "transfer-encoding" in self._headers:
            raise _Answer(400, "a WebSocket handshake has no body")
        if not self._asks_for_websocket():
            raise _Answer(426, "connect here with a WebSocket client", Upgrade="websocket")
        if self._header("sec-websocket-version") != _VERSION:
            raise _Answer(
                426,
                f"version {_VERSION} of WebSocket is spoken here",
                Sec_WebSocket_Version=_VERSION,
            )
        if not _is_key(self._header("sec-websocket-key")):
            raise _Answer(400, "Sec-WebSocket-Key must be 16 bytes in base64")
        if not self._comes_from_an_allowed_page():
            # A browser does not show the answer to anyone: whoever runs the server must find it here.
            self._refused(self._why_page_is_refused())
            raise _Answer(403, "pages of this origin may not connect (see listen.origins)")
        if self._door.shared.full:
            why = (
                "the server is stopping"
                if self._door.shared.draining
                else "connections_max is reached"
            )
            self._refused(why)
            raise _Answer(503, why)
        return make()

    def _refused(self, why: str) -> None:
        self._door.shared.refused(peer_name(self._transport), why)

    def _asks_for_websocket(self) -> bool:
        # A proxy that speaks HTTP/1.0 does not pass frames on, RFC 6455 section 4.2.1.
        return (
            self._version != "1.0"
            and "websocket" in self._tokens("upgrade")
            and "upgrade" in self._tokens("connection")
        )

    def _comes_from_an_allowed_page(self) -> bool:
        origins = self._headers.get("origin")
        # Only browsers send it, and they always do: others could send anything.
        return origins is None or (
            len(origins) == 1 and self._door.origins.allow(origins[0], self._header("host"))
        )

    def _why_page_is_refused(self) -> str:
        """The page, and the exact setting that would let it in."""
        origin = self._header("origin")
        known = self._door.origins
        why = f"a page of origin {quoted(origin)} may not connect"
        wanted = known.with_page(origin) if len(origin) <= ORIGIN_MAX else None
        if wanted is None:
            return f"{why}: that is no origin"
        return f"{why}; to let it in, set listen.origins = [{', '.join(map(quoted, wanted))}]"

    def _upgrade(self, connection: WebSocketConnection, rest: bytes) -> None:
        self._end_wait()
        request = (
            "GET / HTTP/1.1\r\nHost: headrace\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: {_VERSION}\r\n"
            f"Sec-WebSocket-Key: {self._header('sec-websocket-key')}\r\n\r\n"
        )
        upgrade(connection, self._transport, request.encode() + rest)

    def _answer(self, answer: _Answer) -> None:
        self._answered = True
        self._headers = {}  # nothing of the request is kept while the peer takes its time
        body = f"{answer}\n".encode()
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **answer.headers,
        }
        lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        self._transport.write(head if self._method == "HEAD" else head + body)
        hang_up(self._transport, self._end_wait)

    def _header(self, name: str) -> str:
        return self._headers.get(name, [""])[0]

    def _tokens(self, name: str) -> set[str]:
        return {token.strip().lower() for token in ",".join(self._headers.get(name, [])).split(",")}

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._door.waiting -= 1


def _refusal_for(error: httptools.HttpParserError) -> RequestRefusedError | _Answer:
    if isinstance(error.__context__, RequestRefusedError):
        return error.__context__
    if "overflow" in str(error):
        return RequestRefusedError(413, f"a body may have {BODY_BYTES_MAX} bytes, and needs none")
    return _Answer(400, "this is not an HTTP request")


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False
