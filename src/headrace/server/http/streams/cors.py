"""Headers of all answers about streams, and what pages of other origins may do.

Writers choose the type of a stream, so a browser must neither run its content nor take it for a page of this
server. Pages of `listen.origins` may use streams; access tokens are needed all the same. Elsewhere: access
(`server/http/gate.py`).
"""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.config.values import Origins

PATH: Final = "/v1/stream/"
"""Begins the paths of all streams. The name follows."""

KNOWN_ORIGIN: Final = "headrace.known_origin"
"""Key in the ASGI scope of a request about a stream: True if it comes from a page that may send it."""

_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox",
    "Content-Disposition": "attachment",
    # Else any page could run a stream of JavaScript as its own script. Requests with CORS are not affected.
    "Cross-Origin-Resource-Policy": "same-origin",
}
_EXPOSED = ", ".join(
    (
        *("Stream-Next-Offset", "Stream-Cursor", "Stream-Up-To-Date", "Stream-Closed"),
        *("Stream-TTL", "Stream-Expires-At", "Stream-SSE-Data-Encoding", "Stream-Lost-Bytes"),
        *("Producer-Epoch", "Producer-Seq", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("ETag", "Location"),
    )
)
_ALLOWED = ", ".join(
    (
        *("Authorization", "Content-Type", "If-None-Match", "Stream-Seq", "Stream-TTL"),
        *("Stream-Expires-At", "Stream-Closed", "Producer-Id", "Producer-Epoch", "Producer-Seq"),
        *("Stream-Forked-From", "Stream-Fork-Offset", "Stream-Fork-Sub-Offset"),
    )
)
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, HEAD, OPTIONS",
    "Access-Control-Allow-Headers": _ALLOWED,
    "Access-Control-Max-Age": "600",
}


class StreamHeaders:
    """Middleware around everything that answers requests about streams."""

    def __init__(self, app: ASGIApp, origins: Callable[[], Origins]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        shown = asked.getlist("origin")
        # A host that a request names proves nothing: it is checked later.
        knows = len(shown) == 1 and self._origins().allow(shown[0], "")
        scope[KNOWN_ORIGIN] = knows
        more = dict(_SAFE)
        if knows:
            more |= {"Access-Control-Allow-Origin": shown[0], "Vary": "Origin"}
            more |= {"Access-Control-Expose-Headers": _EXPOSED}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(more)
            await send(message)

        if scope["method"] == "OPTIONS" and shown:
            # The answer says nothing about streams. Without an allowed origin, browsers send no request.
            await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)
