"""The HTTP side of the WebSocket listener: accepts handshakes, and answers other requests in plain HTTP.

Requests are read and checked here. Only an accepted WebSocket handshake reaches picows, and the server
rewrites it first: picows does not accept some headers in the form in which browsers send them.
"""

import asyncio
import base64
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs

import httptools

from headrace.access.principals import Principal
from headrace.config.values import Origins
from headrace.printing import quoted
from headrace.server.access import MISDIRECTED, bearer
from headrace.server.http.requests import RequestMeter, RequestRefusedError
from headrace.server.listeners import TLS_ON_PLAIN_PORT, http_answer
from headrace.server.peers.admission import Admission
from headrace.server.peers.connections import Connections
from headrace.server.peers.hangup import hang_up, host_of, peer_name
from headrace.server.peers.newcomers import GAVE_WAY
from headrace.server.peers.tally import Who
from headrace.server.websocket import WebSocketConnection, upgrade

HANDSHAKE_TIMEOUT_S = 5.0
"""Time in which a request must arrive."""
CROWDED_SHARE = 3 / 4
"""Share of `limits.handshakes_max` from which no further connections are accepted for a moment.

They wait in the kernel's queue, so a storm of peers whose requests arrive at once loses none. Of a storm
whose requests are slow, those that find no place are refused.
"""
EASED_SHARE = 1 / 2
"""Share of `limits.handshakes_max` below which further connections are accepted again."""
CROWDED_S_MAX = 0.25
"""Longest such moment. Peers that are not done by then may be silent for long, and others must not wait."""
URL_BYTES_MAX = 8 * 1024
"""Longest URL on this listener."""
ORIGIN_MAX = 300
"""Longest origin, in characters, that a log line contains in full."""
BODY_BYTES_MAX = 64 * 1024
"""Longest body that a request may announce, although no request here needs a body."""

QUERY_FIELDS_MAX = 100
"""Fields in the query of a URL. Only `ticket` counts."""
TOKEN_SUBPROTOCOL = "headrace.token."
"""Beginning of a subprotocol that holds a token in base64url: a page can set no header of a WebSocket."""

_VERSION = "13"
_BLANKS = " \t"
"""Characters around a header's value that do not belong to it (RFC 9110 section 5.6.3)."""


Route = Callable[[str], Callable[[], WebSocketConnection] | None]
"""Function of a path that returns a factory of connections; None if the path is not of this route."""


class Door:
    """State that the connections of the WebSocket listener share until their handshake is accepted."""

    def __init__(self, shared: Connections, routes: dict[str, Route], origins: Origins) -> None:
        self.shared = shared
        self.routes = routes
        """Route of each protocol, by its path in the form that people read in answers."""
        self.origins = origins
        self.newcomers = shared.newcomers("handshakes_max")
        """Connections without a complete request."""
        self.admission: Admission | None = None
        self._is_crowded = False
        self._pause: asyncio.TimerHandle | None = None
        """Timer that ends the pause of the admission; None outside a pause."""

    def began(self, handshake: "Handshake", address: str) -> bool:
        """Note a connection whose request has not arrived. Return False if there is no place for it."""
        if not self.newcomers.enter(handshake, address):
            return False
        crowded = CROWDED_SHARE * self.newcomers.places_max()
        if not self._is_crowded and len(self.newcomers) >= crowded:
            self._is_crowded = True
            if self.admission is not None:
                self.admission.pause()
                self._pause = self.shared.loop.call_later(CROWDED_S_MAX, self._end_pause)
        return True

    def ended(self, handshake: "Handshake") -> None:
        """Forget one of them: its request has arrived, or it is over."""
        self.newcomers.leave(handshake)
        eased = EASED_SHARE * self.newcomers.places_max()
        if self._is_crowded and len(self.newcomers) < eased:
            self._is_crowded = False
            self._end_pause()

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            assert self.admission is not None
            self.admission.resume()


class _Answer(RequestRefusedError):  # noqa: N818
    """Raised to answer in plain HTTP a request that breaks no limit."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(status, text)
        self.headers = headers
        self.delay_s = 0.0


class Handshake(asyncio.Protocol):
    """One request: it becomes a WebSocket, or it gets a plain answer and the connection ends."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._method = ""
        self._version = ""
        self._headers: dict[str, list[str]] = {}
        self._meter = RequestMeter(URL_BYTES_MAX)
        self._connection: WebSocketConnection | None = None
        """The connection that the request opens, once it is complete."""
        self._answered = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._door.began(self, host_of(transport)):
            self._refused("limits.handshakes_max is reached: too many handshakes at once")
            self._transport.abort()
            return
        self._timer = self._door.shared.loop.call_later(HANDSHAKE_TIMEOUT_S, self._give_up)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_wait()

    def data_received(self, data: bytes) -> None:
        if self._timer is None or self._answered:
            return
        try:
            end = self._meter.feed(self._parser, data)
            if self._connection is not None:
                if end is None:
                    raise _Answer(400, "the headers do not ask for an upgrade")
                self._upgrade(self._connection, data[end:])
        except RequestRefusedError as refusal:
            self._answer(refusal)

    def give_way(self) -> None:
        """Give the place to a peer of another address: this request is not complete."""
        self._refused(f"the request is not complete: {GAVE_WAY}")
        self._transport.abort()

    def _give_up(self) -> None:
        if self._answered:
            return  # `hang_up` ends the connection
        if self._url:
            why = f"a request must come within {HANDSHAKE_TIMEOUT_S:g} s"
            self._answer(RequestRefusedError(408, why))
        else:
            self._transport.abort()

    # Callbacks of the parser. The parser stops after the first head: it is refused, answered or an upgrade.

    def on_url(self, url: bytes) -> None:
        self._meter.url(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._meter.header(len(name) + len(value))
        key = name.decode("latin-1").lower()
        self._headers.setdefault(key, []).append(value.decode("latin-1").strip(_BLANKS))

    def on_headers_complete(self) -> None:
        self._method = self._parser.get_method().decode("latin-1")
        self._version = self._parser.get_http_version()
        self._connection = self._judge()

    # Outcome of the request

    def _judge(self) -> WebSocketConnection:
        """Return the connection that this request opens. Raise the answer if it opens none."""
        if int(self._header("content-length") or 0) > BODY_BYTES_MAX:
            raise RequestRefusedError(
                413, f"a body may have {BODY_BYTES_MAX} bytes, and needs none"
            )
        path = self._url.partition(b"?")[0].decode("latin-1")
        shared = self._door.shared
        if path in ("/healthz", "/readyz"):
            if self._method not in ("GET", "HEAD"):
                raise _Answer(405, "ask with GET", Allow="GET, HEAD")
            health = shared.health
            status, body = health.answer() if path == "/healthz" else health.readiness()
            raise _Answer(status, json.dumps(body), Content_Type="application/json")
        if not shared.access.is_on and not self._knows_host():
            raise _Answer(421, MISDIRECTED)
        routes = self._door.routes
        make = next((make for route in routes.values() if (make := route(path))), None)
        if make is None:
            known = ", ".join(routes)
            raise _Answer(404, f"there is nothing here: WebSocket clients connect at {known}")
        if self._method != "GET":
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
        if why := self._why_page_is_refused():
            # Browsers show this answer to nobody, so the operator must find the reason in the server's log.
            self._refused(why)
            raise _Answer(403, "pages of this origin may not connect (see listen.origins)")
        address = host_of(self._transport)
        principal = self._principal()
        if why := shared.why_refused(Who.of(address, principal)):
            self._refused(why)
            raise _Answer(503, why)
        connection = make()
        connection.rights.identify(principal)
        return connection

    def _principal(self) -> Principal:
        """Return who the peer is by the credentials of its request. Without any, a message may tell."""
        access, now_s = self._door.shared.access, self._door.shared.loop.time()
        address = host_of(self._transport)
        tickets, given = self._tickets(), self._shown_tokens()
        if not access.is_on or not (tickets or given):
            return access.anonymous
        if len(tickets) + len(given) > 1:
            raise _Answer(400, "show one token or ticket, and in one way")
        if tickets:
            found = access.redeem(tickets[0], address, now_s, "http")
        else:
            found = access.identify(given[0], address, now_s, "http")
        if isinstance(found, Principal):
            return found
        self._refused(found.reason)
        refusal = _Answer(401, found.reason, WWW_Authenticate="Bearer")
        refusal.delay_s = found.delay_s
        raise refusal

    def _shown_tokens(self) -> list[str]:
        """Return the tokens in the header `Authorization` and in subprotocols; "" for an unreadable one."""
        shown = self._headers.get("authorization")
        found = [] if shown is None else [bearer(shown) or ""]
        return found + [
            _token_in(name.removeprefix(TOKEN_SUBPROTOCOL))
            for name in self._subprotocols()
            if name.startswith(TOKEN_SUBPROTOCOL)
        ]

    def _tickets(self) -> list[str]:
        query = self._url.partition(b"?")[2].decode("latin-1")
        try:
            fields = parse_qs(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
        except ValueError:
            raise _Answer(400, f"a query may have {QUERY_FIELDS_MAX} fields") from None
        return fields.get("ticket", [])

    def _subprotocols(self) -> list[str]:
        listed = ",".join(self._headers.get("sec-websocket-protocol", [])).split(",")
        return [name.strip(_BLANKS) for name in listed]

    def _knows_host(self) -> bool:
        has_credentials = bool(self._tickets() or self._shown_tokens())
        hosts = self._headers.get("host", ())
        return self._door.shared.access.knows_host(hosts, has_credentials=has_credentials)

    def _refused(self, why: str) -> None:
        self._door.shared.refused(peer_name(self._transport), why)

    def _asks_for_websocket(self) -> bool:
        # A proxy that speaks HTTP/1.0 does not forward frames (RFC 6455 section 4.2.1).
        return (
            self._version != "1.0"
            and "websocket" in self._tokens("upgrade")
            and "upgrade" in self._tokens("connection")
        )

    def _why_page_is_refused(self) -> str:
        """Return the reason, with the exact setting that would allow the page; empty if it is allowed."""
        origins, known = self._headers.get("origin"), self._door.origins
        # A page that points its own name at this machine does not belong to this server.
        host = self._header("host") if self._knows_host() else ""
        # Only browsers send an Origin, and they always do. Other clients could send any value.
        if not origins or (len(origins) == 1 and known.allow(origins[0], host)):
            return ""
        origin = origins[0]
        why = f"a page of origin {quoted(origin)} may not connect"
        wanted = known.with_page(origin) if len(origin) <= ORIGIN_MAX else None
        if wanted is None:
            return f"{why}: the origin is not valid"
        return f"{why}; to allow it, set listen.origins = [{', '.join(map(quoted, wanted))}]"

    def _upgrade(self, connection: WebSocketConnection, rest: bytes) -> None:
        self._end_wait()
        request = (
            "GET / HTTP/1.1\r\nHost: headrace\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: {_VERSION}\r\n"
            f"Sec-WebSocket-Key: {self._header('sec-websocket-key')}\r\n\r\n"
        )
        # A browser fails a handshake whose answer names none of the subprotocols that it has offered. The
        # one that holds a token is never repeated.
        own = connection.protocol
        chosen = own if own in self._subprotocols() else ""
        upgrade(connection, self._transport, request.encode() + rest, chosen)

    def _answer(self, refusal: RequestRefusedError) -> None:
        headers = {}
        if self._transport.is_closing():
            return  # the peer has left while the answer waited
        if isinstance(refusal, _Answer) and refusal.delay_s:
            self._answered = True  # nothing more is read
            delay_s, refusal.delay_s = refusal.delay_s, 0.0
            self._door.shared.loop.call_later(delay_s, self._answer, refusal)
            return
        if isinstance(refusal, _Answer):
            headers = refusal.headers
        elif str(refusal) == TLS_ON_PLAIN_PORT:
            self._refused(str(refusal))
        else:
            self._door.shared.request_refused(peer_name(self._transport), str(refusal))
        self._answered = True
        self._headers = {}  # a slow peer must not keep the request in memory
        body = f"{refusal}\n".encode()
        with_body = self._method != "HEAD"
        data = http_answer(HTTPStatus(refusal.status), body, with_body=with_body, **headers)
        self._transport.write(data)
        hang_up(self._transport, self._end_wait)

    def _header(self, name: str) -> str:
        return self._headers.get(name, [""])[0]

    def _tokens(self, name: str) -> set[str]:
        return {
            token.strip(_BLANKS).lower()
            for token in ",".join(self._headers.get(name, [])).split(",")
        }

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._door.ended(self)


def _token_in(text: str) -> str:
    """Return a token from its base64url, with or without padding; "" if it is none."""
    try:
        data = base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), b"-_", True)
        return data.decode()
    except ValueError:
        return ""


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == 16
    except ValueError:
        return False
