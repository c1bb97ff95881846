"""The token that a client shows to its server: a text, or a function that is asked for one.

A token is sent only where nobody else can read it: over TLS, or to an address of this machine. Elsewhere: how
each protocol sends it (its session), and when it is asked for (`link.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable

from headrace.errors import ConfigError
from headrace.printing import described
from headrace.tokens import exposure_of, fault_of

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
