"""Access to the HTTP API: requests need a token of the configuration, unless it has no tokens."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config.protocols import AccessToken
from headrace.server.access import HTTP, find_token, is_granted

CHANNELS = "/v1/channel"
"""Prefix of all paths of channels. In paths for processors, a slash follows."""

CHANGING_PATHS = frozenset({"/v1/channel/messages"})
"""Paths where a GET changes something: it may acknowledge, and makes its processor a subscriber."""

OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
"""Paths that need no token, because load balancers have none."""


class AccessGate:
    """Middleware that answers requests that may not reach the application."""

    def __init__(self, app: ASGIApp, tokens: Sequence[AccessToken]) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if _is_change(scope) and _is_from_page(headers):
            # For any page it shows, a browser sends some such requests to any host the machine can reach.
            return _refused(scope, 403, "pages in a browser may not change anything here")
        if scope["path"] in OPEN_PATHS or not self._tokens:
            return None
        token = _bearer(headers.getlist("authorization"))
        if token is None:
            return _refused(scope, 401, "a token is needed: Authorization: Bearer TOKEN")
        # Headers were decoded as Latin-1, whatever their encoding is.
        known = find_token(self._tokens, token.encode("latin-1").decode(errors="replace"))
        if known is None:
            return _refused(scope, 401, "the token is not known here")
        scope["headrace.token"] = known
        # The endpoints of channels check the token again, for their channel.
        if is_granted(known, HTTP) or scope["path"].startswith(f"{CHANNELS}/"):
            return None
        return _refused(scope, 403, "the token is not for the HTTP API")


def _is_change(scope: Scope) -> bool:
    return scope["method"] not in ("GET", "HEAD") or scope["path"] in CHANGING_PATHS


def _is_from_page(headers: Headers) -> bool:
    # For parts of a page, such as images, browsers send no `Origin`, but they send `Sec-Fetch-Site`.
    return "origin" in headers or headers.get("sec-fetch-site", "none") not in (
        "none",
        "same-origin",
    )


def _bearer(headers: list[str]) -> str | None:
    """Return the token of a request; None if it has none or several."""
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _refused(scope: Scope, status: int, error: str) -> JSONResponse:
    told: dict[str, object] = {"error": error}
    if scope["path"].startswith(CHANNELS):
        # Every error of the channel endpoints has a code.
        told |= {"code": "wrong-credentials" if status == 401 else "forbidden", "retry": False}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(told, status, headers)
