"""Who is let in: tokens of the configuration, a function of the application, or everyone on this machine."""

import hashlib
import hmac
import inspect
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.config import Config
from headrace.config_protocols import AccessToken
from headrace.model import ENVELOPE_PREFIXES, legacy_name

logger = logging.getLogger(__name__)

Verify = Callable[[str | int | float, Any], bool | Awaitable[bool]]
"""Given the peer's node id and what it showed: whether it is let in."""

HTTP = "http"
"""The grant for the HTTP API."""


def warn_of_open_listeners(config: Config, listeners: Mapping[str, str]) -> None:
    """Say what tokens do not close: whoever sets one may believe that all is closed."""
    if config.access.token:
        logger.warning(
            "tokens ([[access.token]]) close the HTTP API, Logux and channels only: Figg at %s and Wombat at "
            "%s know no tokens, and whoever reaches them can read every topic and write all but those of "
            "Logux and channels",
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
        """Whether a peer at this address may use a topic."""
        if self._verify is not None:
            found = self._verify(node, shown)
            return bool(await found if inspect.isawaitable(found) else found)
        if not self._tokens:
            return self._is_near(address)
        token = shown.get("token") if isinstance(shown, dict) else shown
        known = find_token(self._tokens, token) if isinstance(token, str) else None
        if known is None or not is_granted(known, topic):
            return False
        return known.user is None or known.user == user_of(node)

    def grant(self, node: str, shown: Any, address: str) -> "Grant | None":
        """What a peer at this address may use, by tokens alone; None when it is not let in."""
        if not self._tokens:
            return Grant(None) if self._is_near(address) else None
        token = shown.get("token") if isinstance(shown, dict) else shown
        known = find_token(self._tokens, token) if isinstance(token, str) else None
        if known is None or known.user not in (None, user_of(node)):
            return None
        return Grant(known)

    def _is_near(self, address: str) -> bool:
        if not ipaddress.ip_address(address).is_loopback:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s let in everyone on this machine, and nobody else: there is no [[access.token]]%s",
                *self._warning,
            )
        return True


class Grant:
    """What someone may use who was let in."""

    __slots__ = ("_token",)

    def __init__(self, token: AccessToken | None) -> None:
        self._token = token

    def covers(self, topic: str) -> bool:
        return self._token is None or is_granted(self._token, topic)


def find_token(tokens: Sequence[AccessToken], token: str) -> AccessToken | None:
    # All are compared, in constant time: how long it takes says nothing about any of them.
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    found = None
    for one in tokens:
        if hmac.compare_digest(digest, one.sha256.lower()):
            found = one
    return found


def is_granted(token: AccessToken, what: str) -> bool:
    if token.grants is None:
        return True
    if what == HTTP:
        return HTTP in token.grants
    names = (what, legacy_name(what)) if what.startswith(ENVELOPE_PREFIXES) else (what,)
    return any(name.startswith(grant) for grant in token.grants if grant != HTTP for name in names)


def user_of(node: str | int | float) -> str:
    """The user in a node id, `user:client:tab`."""
    return str(node).partition(":")[0]
