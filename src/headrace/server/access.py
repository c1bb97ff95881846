"""Access checks: tokens of the configuration, a function of the application, or everyone on this machine.

The configuration names functions of the application as `module:function`. Requests to the HTTP API need a
token, unless the configuration has no tokens.
"""

import hashlib
import hmac
import importlib
import inspect
import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config.protocols import AccessToken
from headrace.config.settings import Config
from headrace.errors import ConfigError
from headrace.model import ENVELOPE_PREFIXES, legacy_name
from headrace.printing import quoted

logger = logging.getLogger(__name__)


def load_hook(key: str, name: str) -> Any:
    """Return the function that `name` names; None if `name` is empty. Raises `ConfigError`."""
    if not name:
        return None
    module, _, function = name.partition(":")
    # As with `python -m`, the application's modules are in the directory where the server was started.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {quoted(name)} cannot be loaded: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key} = {quoted(name)} is not a function")
    return found


Verify = Callable[[str | int | float, Any], bool | Awaitable[bool]]
"""Function of a peer's node id and credentials that returns True if the peer is accepted."""

Grant = Callable[[str], bool]
"""Function that returns True for a topic that an accepted peer may use."""

HTTP = "http"
"""The grant for the HTTP API."""


def warn_of_open_listeners(config: Config, listeners: Mapping[str, str]) -> None:
    """Warn of listeners that tokens do not protect: an operator who sets a token may think that all are."""
    if config.access.token:
        logger.warning(
            "tokens ([[access.token]]) protect only the HTTP API, Logux and channels: Figg at %s and Wombat "
            "at %s check no tokens. Anyone who can reach them can read every topic, and can write to all "
            "topics except those of Logux and channels",
            listeners["figg"],
            listeners["ws"],
        )


class Credentials:
    def __init__(
        self, tokens: Sequence[AccessToken], verify: Verify | None = None, *, of: str = "Logux logs"
    ) -> None:
        self._tokens = tokens
        self._verify = verify
        self._warned = False
        self._warning = of, " and no logux.verify" if of == "Logux logs" else ""

    async def allow(self, topic: str, node: str | int | float, shown: Any, address: str) -> bool:
        """Return True if a peer at this address may use a topic."""
        if self._verify is not None:
            found = self._verify(node, shown)
            return bool(await found if inspect.isawaitable(found) else found)
        grant = self.grant(node, shown, address)
        return grant is not None and grant(topic)

    def grant(self, node: str | int | float, shown: Any, address: str) -> Grant | None:
        """Return the grant of a peer at this address, by tokens alone; None if the peer is not accepted."""
        if not self._tokens:
            return (lambda topic: True) if self._is_near(address) else None
        token = shown.get("token") if isinstance(shown, dict) else shown
        known = find_token(self._tokens, token) if isinstance(token, str) else None
        if known is None or known.user not in (None, user_of(node)):
            return None
        return partial(is_granted, known)

    def _is_near(self, address: str) -> bool:
        if not ipaddress.ip_address(address).is_loopback:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s accept every client on this machine and no other client: there is no [[access.token]]%s",
                *self._warning,
            )
        return True


def find_token(tokens: Sequence[AccessToken], token: str) -> AccessToken | None:
    # All tokens are compared in constant time, so that the duration says nothing about any of them.
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    found = [one for one in tokens if hmac.compare_digest(digest, one.sha256.lower())]
    return found[-1] if found else None


def is_granted(token: AccessToken, what: str) -> bool:
    if token.grants is None:
        return True
    if what == HTTP:
        return HTTP in token.grants
    names = (what, legacy_name(what)) if what.startswith(ENVELOPE_PREFIXES) else (what,)
    return any(name.startswith(grant) for grant in token.grants if grant != HTTP for name in names)


def user_of(node: str | int | float) -> str:
    """Return the user in a node id, `user:client:tab`."""
    return str(node).partition(":")[0]


# The HTTP API

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
        is_change = scope["method"] not in ("GET", "HEAD") or scope["path"] in CHANGING_PATHS
        if is_change and _is_from_page(headers):
            # For any page it shows, a browser sends some such requests to any host the machine can reach.
            return refused(scope, 403, "pages in a browser may not change anything here")
        if scope["path"] in OPEN_PATHS or not self._tokens:
            return None
        token = _bearer(headers.getlist("authorization"))
        if token is None:
            return refused(scope, 401, "a token is needed: Authorization: Bearer TOKEN")
        # Headers were decoded as Latin-1, whatever their encoding is.
        known = find_token(self._tokens, token.encode("latin-1").decode(errors="replace"))
        if known is None:
            return refused(scope, 401, "the token is not known here")
        scope["headrace.token"] = known
        # The endpoints of channels check the token again, for their channel.
        if is_granted(known, HTTP) or scope["path"].startswith(f"{CHANNELS}/"):
            return None
        return refused(scope, 403, "the token is not for the HTTP API")


def _is_from_page(headers: Headers) -> bool:
    # For parts of a page, such as images, browsers send no `Origin`, but they send `Sec-Fetch-Site`.
    site = headers.get("sec-fetch-site", "none")
    return "origin" in headers or site not in ("none", "same-origin")


def _bearer(headers: list[str]) -> str | None:
    """Return the token of a request; None if it has none or several."""
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def refused(scope: Scope, status: int, error: str) -> JSONResponse:
    """Return the answer to a request that was refused before a topic or a channel was asked."""
    body: dict[str, object] = {"error": error}
    if scope["path"].startswith(CHANNELS) and status in CHANNEL_CODES:
        body |= {"code": CHANNEL_CODES[status], "retry": False}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, headers)
