"""The options that all clients share: how they connect, reconnect and close."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, TypedDict

from headrace.errors import ConfigError

Backoff = Callable[[int], float]
"""Return the seconds to wait after the failed attempt with this number. Attempts count from 0. They start
over once a server has answered, unless the client had to leave that server at once. An application may pass
its own function."""

_DOUBLINGS_MAX = 32


def exponential(first_s: float = 0.1, max_s: float = 10.0, jitter: float = 0.5) -> Backoff:
    """Return a backoff that doubles from `first_s` to `max_s`.

    A random part of each wait, at most the share `jitter`, is cut off, so that the clients of a restarted
    server do not all reconnect at the same time.
    """

    def backoff(attempt: int) -> float:
        wait_s = min(first_s * 2.0 ** min(attempt, _DOUBLINGS_MAX), max_s)
        return wait_s * (1.0 - jitter * random.random())  # not a secret: it only spreads load

    return backoff


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The options of every client. Times are seconds."""

    connect_timeout_s: float | None = 10.0
    """Seconds that entering the client waits for its first connection. None: it does not wait, and everything
    is sent once a server is connected."""

    attempt_timeout_s: float = 5.0
    """Seconds that one attempt to connect may take."""

    backoff: Backoff | None = None
    """Function from an attempt's number to the seconds before the next attempt. None: exponential, 0.1 to
    10 s, of which a random part, at most half, is cut off; with Wombat, nothing is cut off."""

    flush_timeout_s: float = 5.0
    """Seconds that closing waits for the server to have everything; 0: it does not wait."""

    ssl: SSLContext | None = None
    """TLS context that verifies a server whose URL begins with `wombats`, `loguxs` or `channels`; None: its
    name and the system's authorities."""

    def __post_init__(self) -> None:
        self._check_functions("backoff")
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise ConfigError(f"ssl must be an ssl.SSLContext, not {self.ssl!r}")
        self._check_numbers("attempt_timeout_s")
        self._check_numbers("connect_timeout_s", may_be_none=True)
        self._check_numbers("flush_timeout_s", may_be_zero=True)

    def _check_functions(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be a function, not {value!r}")

    def _check_numbers(
        self, *names: str, may_be_none: bool = False, may_be_zero: bool = False
    ) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} must be a number, not {value!r}")
            if not (value > 0 or (value == 0 and may_be_zero)):
                raise ConfigError(f"{name} must be above 0, not {value!r}")


def check_json(name: str, value: Any) -> None:
    """Raise ConfigError unless the value reaches a server unchanged."""
    # Imported on first use: most clients do not need the codec of Logux.
    from headrace.wire.logux import messages as logux

    try:
        received = logux.unpack(logux.pack([value], binary=True), binary=True)
    except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be a JSON value: {error}") from None
    if received != [value]:
        raise ConfigError(f"{name} must be a JSON value, not {value!r}")


class LinkOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments."""

    connect_timeout_s: float | None
    attempt_timeout_s: float
    backoff: Backoff | None
    flush_timeout_s: float
    ssl: SSLContext | None
