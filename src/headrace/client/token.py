"""The token that a client shows to its server: a text, or a function that is asked for one.

A token is sent only where nobody else can read it: over TLS, or to an address of this machine. Elsewhere: how
each protocol sends it (its session), and when it is asked for (`link.py`).
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

from headrace.errors import ConfigError
from headrace.printing import described
from headrace.wire.tokens import TOKEN_BYTES_MAX

Token = str | Callable[[], str | Awaitable[str]]
"""A token, or a function without arguments that returns one and may be asynchronous. The function is called
for each connection, and again before the token expires."""


class NoTokenError(Exception):
    """The application's function has given no token."""


class TokenSource:
    """The token of a client. `None` stands for a client without one."""

    def __init__(self, token: Token | None) -> None:
        self._token = token

    @property
    def changes(self) -> bool:
        """True if the application may give another token the next time."""
        return callable(self._token)

    async def get(self) -> str | None:
        """Return the token to show now. Raises NoTokenError if the function fails."""
        if not callable(self._token):
            return self._token
        try:
            found = self._token()
            if isawaitable(found):
                found = await found
        except Exception as error:  # of the application's function: it may succeed the next time
            raise NoTokenError(f"the function for the token failed: {described(error)}") from error
        reason = fault_of(found)
        if reason:
            raise NoTokenError(f"the function for the token returned a wrong one: {reason}")
        return found


def fault_of(token: object) -> str:
    """Return why this cannot be a token, without showing it; empty if it can."""
    if not isinstance(token, str):
        return f"a token is str, not {type(token).__name__}"
    if not 0 < len(token) <= TOKEN_BYTES_MAX:
        return f"a token has 1 to {TOKEN_BYTES_MAX} characters, not {len(token)}"
    if not (token.isascii() and token.isprintable() and " " not in token):
        return "a token consists of printable ASCII characters without spaces"
    return ""


def check_token(token: object) -> None:
    """Raise ConfigError unless this is a token, a function for tokens, or None."""
    if token is None or callable(token):
        return
    if reason := fault_of(token):
        raise ConfigError(f"token: {reason}")


def exposure(transport: asyncio.BaseTransport) -> str:
    """Return why others could read a token on this connection; empty if they could not."""
    if transport.get_extra_info("ssl_object") is not None:
        return ""
    return exposure_of(transport.get_extra_info("peername"))


def exposure_of(peer: Any) -> str:
    """Return why others could read a token that is sent to this peer without TLS; empty if they could not."""
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    if _is_loopback(str(host)):
        return ""
    return (
        f"the token is not sent to {host or 'this address'} without TLS, because others could read it: use "
        "TLS, or allow it with insecure_token=True (on the command line, --insecure-token)"
    )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
