"""Who may use the HTTP API: requests that carry a token of the configuration, or all where there is none."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config_protocols import AccessToken
from headrace.server.credentials import HTTP, find_token, is_granted

CHANNELS = "/v1/channel"
"""Where all paths of channels begin; those of processors go on with a slash."""

CHANGING_PATHS = frozenset({"/v1/channel/messages"})
"""Where a GET changes something: it may acknowledge, and makes its processor a subscriber."""

OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
"""Load balancers ask these, and have no token."""


class Access:
    """Stands before an application and answers for it where a request has no business there."""

    def __init__(self, app: ASGIApp, tokens: Sequence[AccessToken]) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if _is_change(scope) and _is_from_page(headers):
            # A browser sends some of these for any page it shows, to whatever the machine can reach.
            return _refused(scope, 403, "pages in a browser may not change anything here")
        if scope["path"] in OPEN_PATHS or not self._tokens:
            return None
        token = _bearer(headers.getlist("authorization"))
        if token is None:
            return _refused(scope, 401, "a token is needed: Authorization: Bearer TOKEN")
        # Headers are read as Latin-1, whatever they are.
        known = find_token(self._tokens, token.encode("latin-1").decode(errors="replace"))
        if known is None:
            return _refused(scope, 401, "the token is not known here")
        scope["headrace.token"] = known
        # Who may use which channel is seen where the channel is known.
        if is_granted(known, HTTP) or scope["path"].startswith(f"{CHANNELS}/"):
            return None
        return _refused(scope, 403, "the token is not for the HTTP API")


def _is_change(scope: Scope) -> bool:
    return scope["method"] not in ("GET", "HEAD") or scope["path"] in CHANGING_PATHS


def _is_from_page(headers: Headers) -> bool:
    # Without an `Origin` a browser sends what a page shows, such as images, and says so in the other.
    return "origin" in headers or headers.get("sec-fetch-site", "none") not in (
        "none",
        "same-origin",
    )


def _bearer(headers: list[str]) -> str | None:
    """The token of a request; None where it has none, or several."""
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _refused(scope: Scope, status: int, error: str) -> JSONResponse:
    told: dict[str, object] = {"error": error}
    if scope["path"].startswith(CHANNELS):
        # There every error has a code.
        told |= {"code": "wrong-credentials" if status == 401 else "forbidden", "retry": False}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(told, status, headers)
