"""Access checks: tokens of the configuration, a function of the application, or everyone on this machine.

The configuration names functions of the application as `module:function`.
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
from typing import Any

from headrace.config.protocols import AccessToken
from headrace.config.settings import Config
from headrace.errors import ConfigError
from headrace.model import ENVELOPE_PREFIXES, legacy_name
from headrace.printing import quoted


def load_hook(key: str, name: str) -> Callable[..., Any] | None:
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
    return found  # type: ignore[no-any-return]


logger = logging.getLogger(__name__)

Verify = Callable[[str | int | float, Any], bool | Awaitable[bool]]
"""Function of a peer's node id and credentials that returns True if the peer is accepted."""

HTTP = "http"
"""The grant for the HTTP API."""


def warn_of_open_listeners(config: Config, listeners: Mapping[str, str]) -> None:
    """Warn of listeners that tokens do not protect: an operator who sets a token may think that all are."""
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
        """Return True if a peer at this address may use a topic."""
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
        """Return the grant of a peer at this address, by tokens alone; None if the peer is not accepted."""
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
    """Topics that an accepted peer may use."""

    __slots__ = ("_token",)

    def __init__(self, token: AccessToken | None) -> None:
        self._token = token

    def covers(self, topic: str) -> bool:
        return self._token is None or is_granted(self._token, topic)


def find_token(tokens: Sequence[AccessToken], token: str) -> AccessToken | None:
    # All tokens are compared in constant time, so that the duration says nothing about any of them.
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
    """Return the user in a node id, `user:client:tab`."""
    return str(node).partition(":")[0]
