"""The options of a Logux client: every option with its meaning, unit and default."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, TypedDict

from headrace.client.backoff import Backoff
from headrace.client.topics.options import check_number
from headrace.errors import ConfigError
from headrace.payload.logux import Number
from headrace.session.logux import client as logux_client
from headrace.wire.logux import messages as logux

Verifier = Callable[[str | Number, Any], bool | Awaitable[bool]]
"""Function of a server's host and credentials (None: it sent none) that returns True if it is trusted."""


@dataclass(frozen=True, kw_only=True)
class LoguxOptions:
    """The options of `connect` for `logux://` and `loguxs://`. Times are seconds."""

    store: str | os.PathLike[str] | None = None
    """File that holds the log, created if it does not exist. None: the log is in memory and is lost with the
    client."""

    host: str | None = None
    """Name of this client, which must be unique. None: a UUID, kept in the store."""

    credentials: Any = None
    """Any JSON value that the client sends to the server with `connect`. None: nothing."""

    verify: Verifier | None = None
    """Called with the server's host and credentials, also if it sends none. If the result is false, the
    server is refused for good."""

    connect_timeout_s: float | None = None
    """Seconds that entering the client waits for its first connection; None: it does not wait."""

    attempt_timeout_s: float = 5.0
    """Seconds that one attempt to connect may take."""

    backoff: Backoff | None = None
    """Function from an attempt's number to the seconds before the next attempt. None: exponential, 0.1 to
    10 s, of which a random part, at most half, is cut off."""

    ping_interval_s: float = logux_client.PING_INTERVAL_S
    """Seconds without data from the server before it is pinged."""

    pings_unanswered_max: int = logux_client.PINGS_UNANSWERED_MAX
    """If this many pings are unanswered when the next one is due, the client gives up the connection. It also
    does so if `connect` is not answered in that time."""

    flush_timeout_s: float = 5.0
    """Seconds that closing waits for the server to have every event; 0: it does not wait."""

    ssl: SSLContext | None = None
    """TLS context that verifies a `loguxs://` server; None: its name and the system's authorities."""

    def __post_init__(self) -> None:
        if not (self.host is None or (isinstance(self.host, str) and self.host)):
            raise ConfigError(f"host must be a name, not {self.host!r}")
        if self.host is not None and len(self.host.encode(errors="replace")) > logux.HOST_BYTES_MAX:
            raise ConfigError(f"host may have {logux.HOST_BYTES_MAX} bytes")
        for name in ("backoff", "verify"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be a function, not {value!r}")
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise ConfigError(f"ssl must be an ssl.SSLContext, not {self.ssl!r}")
        for name in ("attempt_timeout_s", "ping_interval_s", "pings_unanswered_max"):
            check_number(name, getattr(self, name))
        check_number("flush_timeout_s", self.flush_timeout_s, may_be_zero=True)
        if self.connect_timeout_s is not None:
            check_number("connect_timeout_s", self.connect_timeout_s)
        said = [self.host, self.credentials]
        try:
            heard = logux.unpack(logux.pack(said, binary=True), binary=True)
        except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"host and credentials must be what JSON has: {error}") from None
        if heard != said:
            raise ConfigError(f"credentials must be what JSON has, not {self.credentials!r}")


class LoguxOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments, except `store`."""

    host: str | None
    credentials: Any
    verify: Verifier | None
    connect_timeout_s: float | None
    attempt_timeout_s: float
    backoff: Backoff | None
    ping_interval_s: float
    pings_unanswered_max: int
    flush_timeout_s: float
    ssl: SSLContext | None
