"""What an application can set on a Logux client: every option with its meaning, unit and default."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, TypedDict

from headrace.client.backoff import Backoff
from headrace.client.options import check_number
from headrace.errors import ConfigError
from headrace.logux_envelope import Number
from headrace.session import logux_client
from headrace.wire import logux

Verifier = Callable[[str | Number, Any], bool | Awaitable[bool]]
"""Given a server's host and its credentials (None: it sent none), whether it is the one that is meant."""


@dataclass(frozen=True, kw_only=True)
class LoguxOptions:
    """The options of `connect` for `logux://` and `loguxs://`. Times are seconds."""

    store: str | os.PathLike[str] | None = None
    """The file that the log is kept in, made when it is not there. None: in memory, and gone with the
    client."""

    host: str | None = None
    """The name of this client, which no other may have. None: a UUID, kept in the store."""

    credentials: Any = None
    """What the server is told with `connect`: anything that JSON has. None: nothing."""

    verify: Verifier | None = None
    """Called with the server's host and credentials, also when it sends none: false ends it all."""

    connect_timeout_s: float | None = None
    """How long entering the client waits for its first connection; None: not at all."""

    attempt_timeout_s: float = 5.0
    """How long one attempt to connect may take."""

    backoff: Backoff | None = None
    """The wait before the next attempt, from its number. None: exponential, 0.1 to 10 s, up to half of
    it cut off at random."""

    ping_interval_s: float = logux_client.PING_INTERVAL_S
    """After so long without a word of the server it is pinged."""

    pings_unanswered_max: int = logux_client.PINGS_UNANSWERED_MAX
    """With so many unanswered when the next is due, the connection is given up; so is one on which
    `connect` is not answered in that time."""

    flush_timeout_s: float = 5.0
    """How long closing waits for the server to have every event; 0: it does not wait."""

    ssl: SSLContext | None = None
    """How a `loguxs://` server is checked; None: by its name and the system's authorities."""

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
        except (logux.BadMessageError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"host and credentials must be what JSON has: {error}") from None
        if heard != said:
            raise ConfigError(f"credentials must be what JSON has, not {self.credentials!r}")


class LoguxOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments, but for `store`."""

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
