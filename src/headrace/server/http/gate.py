"""The gate of the HTTP API: who a request is from, and what its endpoint asks before it does something.

The gate lets only requests with sound credentials, or none, reach the application. Every endpoint asks for
the operation that it performs (`check`, `may`); an answer of an endpoint that has asked nothing is withheld.
Elsewhere: the decisions (`server/access.py`).
"""

import asyncio
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.access.operations import SERVER_NAME, Name, Operation
from headrace.access.principals import Kind, Principal
from headrace.errors import ChannelError
from headrace.server.access import MISDIRECTED, Access, Refused, asked_for, bearer
from headrace.server.audit import Actor, Audit
from headrace.server.http.connections import RETRY_S, CountedConnection, turned_away
from headrace.server.http.streams.cors import KNOWN_ORIGIN

CHANNELS = "/v1/channel"
"""Prefix of all paths of channels. In paths for processors, a slash follows."""

CHANNEL_CODES = {
    400: "bad-message",
    401: "wrong-credentials",
    403: "forbidden",
    413: "too-large",
}
"""Codes of such refusals in the answers of channels, where errors have a code."""

CHANGING_PATHS = frozenset({"/v1/channel/messages"})
"""Paths where a GET changes something: it may acknowledge, and makes its processor a subscriber."""

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Paths that need no credentials, because load balancers have none."""

CERTIFICATE: Final = "headrace.certificate"
"""Key of the peer's certificate in the ASGI scope of a request; its value is None without one."""

COUNTED: Final = "headrace.connection"
"""Key of the `CountedConnection` in the ASGI scope of a request."""

CUT_SHORT: Final = "headrace.cut_short"
"""Key of the function that ends the connection of a request whose answer will never be complete."""

_RIGHTS = "headrace.rights"
"""Key of the `Rights` in the ASGI scope of a request."""


class Rights:
    """The principal of a request, and whether its endpoint has asked for anything yet."""

    __slots__ = ("_access", "audit", "is_asked", "principal")

    def __init__(self, access: Access, principal: Principal, audit: Audit) -> None:
        self._access = access
        self.audit = audit
        self.principal = principal
        self.is_asked = False

    def may(self, operation: Operation, name: Name) -> bool:
        self.is_asked = True
        return self._access.decide(self.principal, operation, name)

    def themselves(self) -> Principal:
        """Return the principal, for an endpoint that gives everyone access to their own things."""
        self.is_asked = True
        return self.principal

    def has(self, operation: Operation) -> bool:
        self.is_asked = True
        return self._access.has(self.principal, operation)


def rights(request: Request) -> Rights:
    found: Rights = request.scope[_RIGHTS]
    return found


def may(request: Request, operation: Operation, name: Name) -> bool:
    """Return True if the request's principal may perform the operation on this name."""
    return rights(request).may(operation, name)


def check(request: Request, operation: Operation, name: Name) -> None:
    """Raise an error, which becomes the answer, unless the principal may perform the operation."""
    if may(request, operation, name):
        return
    reason = asked_for(operation, name)
    if rights(request).principal.kind is Kind.ANONYMOUS:
        raise HTTPException(401, f"a token is needed: peers without one have no grant for {reason}")
    reason = f"the credentials have no grant for {reason}"
    if request.url.path.startswith(CHANNELS):
        raise ChannelError("forbidden", reason)
    raise HTTPException(403, reason)


def record(request: Request, action: str, **facts: object) -> None:
    """Append an administrative action of a request, which begins in this step, to the audit trail."""
    given, client = rights(request), request.client
    address = f"{client.host}:{client.port}" if client is not None else ""
    given.audit.record(action, Actor(str(given.principal), address), **facts)


def check_server(request: Request, operation: Operation = Operation.INSPECT) -> None:
    """Raise an error unless the principal may inspect or administer the server itself."""
    check(request, operation, SERVER_NAME)


class AccessGate:
    """Middleware that answers requests that may not reach the application."""

    def __init__(self, app: ASGIApp, access: Access, audit: Audit) -> None:
        self._app = app
        self._audit = audit
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is None:
            found = self._principal(scope, headers)
            if isinstance(found, Principal):
                refusal = _over_limit(scope, found)
                if refusal is None:
                    await self._run(scope, receive, send, Rights(self._access, found, self._audit))
                    return
            else:
                await asyncio.sleep(found.delay_s)
                refusal = refused(scope, 401, found.reason)
        await refusal(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        if scope["path"] not in OPEN_PATHS:
            # A wrong token is refused later.
            has_credentials = "authorization" in headers or scope.get(CERTIFICATE) is not None
            hosts = headers.getlist("host")
            if not self._access.knows_host(hosts, has_credentials=has_credentials):
                return refused(scope, 421, MISDIRECTED)
        is_change = scope["method"] not in ("GET", "HEAD") or scope["path"] in CHANGING_PATHS
        if is_change and _is_from_page(headers) and not scope.get(KNOWN_ORIGIN):
            # For any page it shows, a browser sends some such requests to any host the machine can reach.
            return refused(scope, 403, "pages in a browser may not change anything here")
        return None

    def _principal(self, scope: Scope, headers: Headers) -> Principal | Refused:
        anonymous = self._access.certified(scope.get(CERTIFICATE))
        shown = headers.getlist("authorization")
        if scope["path"] in OPEN_PATHS or not self._access.is_on:
            return anonymous
        if not shown and anonymous.grants:
            return anonymous
        token = bearer(shown)
        if token is None:
            return Refused("a token is needed: Authorization: Bearer TOKEN")
        host, _ = scope["client"] or ("unknown", 0)
        return self._access.identify(token, host, asyncio.get_running_loop().time(), "http")

    async def _run(self, scope: Scope, receive: Receive, send: Send, given: Rights) -> None:
        """Run the application until it has answered, or until the principal's credentials end."""
        scope[_RIGHTS] = given
        task = asyncio.current_task()
        assert task is not None
        is_started, ended = False, ""

        async def send_if_asked(message: Message) -> None:
            nonlocal is_started
            if ended and not is_started:
                return  # the answer says that the credentials have ended
            if message["type"] == "http.response.start":
                if (
                    message["status"] < 300
                    and not given.is_asked
                    and scope["path"] not in OPEN_PATHS
                ):
                    raise AssertionError(f"{scope['path']} answered without asking for access")
                is_started = True
            await send(message)

        def end(reason: str) -> None:
            nonlocal ended
            if not ended:
                ended = reason
                task.cancel()

        self._access.hold(given.principal, end)
        try:
            await self._app(scope, receive, send_if_asked)
        except asyncio.CancelledError:
            if not ended:
                raise
        finally:
            self._access.release(given.principal, end)
        if not ended:
            return
        task.uncancel()
        if is_started:
            if CUT_SHORT in scope:
                scope[CUT_SHORT]()
            return
        await refused(scope, 401, ended)(scope, receive, send)


def _over_limit(scope: Scope, principal: Principal) -> JSONResponse | None:
    """Count the connection of a request under its principal. Return the answer if there are too many."""
    counted: CountedConnection | None = scope.get(COUNTED)
    if counted is None or scope["path"] in OPEN_PATHS:
        return None
    if why := counted.identify(principal):
        answer = refused(scope, 503, turned_away(why))
        answer.headers.update({"Retry-After": str(RETRY_S), "Connection": "close"})
        return answer
    return None


def _is_from_page(headers: Headers) -> bool:
    # For parts of a page, such as images, browsers send no `Origin`, but they send `Sec-Fetch-Site`.
    site = headers.get("sec-fetch-site", "none")
    return "origin" in headers or site not in ("none", "same-origin")


def refused(scope: Scope, status: int, error: str) -> JSONResponse:
    """Return the answer to a request that was refused before a topic or a channel was asked."""
    body: dict[str, object] = {"error": error}
    if scope["path"].startswith(CHANNELS) and status in CHANNEL_CODES:
        body |= {"code": CHANNEL_CODES[status], "retry": False}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, headers)
