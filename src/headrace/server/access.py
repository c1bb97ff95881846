"""Who may use the HTTP API: requests that carry a token of the configuration, or all where there is none."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config import AccessToken

OPEN_PATHS = frozenset({"/healthz"})
"""Load balancers ask these, and have no token."""


class Access:
    """Stands before an application and answers for it where a request has no business there."""

    def __init__(self, app: ASGIApp, tokens: Sequence[AccessToken]) -> None:
        self._app = app
        self._digests = [token.sha256.lower() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD") and "origin" in headers:
            # A browser sends some of these for any page it shows, to whatever the machine can reach.
            return _refused(403, "pages in a browser may not change anything here")
        if scope["path"] in OPEN_PATHS or not self._digests:
            return None
        token = _bearer(headers.getlist("authorization"))
        if token is None:
            return _refused(401, "a token is needed: Authorization: Bearer TOKEN")
        return None if self._knows(token) else _refused(401, "the token is not known here")

    def _knows(self, token: str) -> bool:
        # All are compared, in constant time: how long it takes says nothing about any of them.
        digest = hashlib.sha256(token.encode("latin-1")).hexdigest()
        known = False
        for one in self._digests:
            known |= hmac.compare_digest(digest, one)
        return known


def _bearer(headers: list[str]) -> str | None:
    """The token of a request; None where it has none, or several."""
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _refused(status: int, error: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)
