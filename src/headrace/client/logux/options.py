"""The options of a Logux client. Options that all clients have are in `client/options.py`."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace.client.options import LinkOptions, LinkOptionsDict, check_json
from headrace.errors import ConfigError
from headrace.payload.logux import Number
from headrace.session.logux import client as logux_client
from headrace.wire.logux.messages import HOST_BYTES_MAX

Verifier = Callable[[str | Number, Any], bool | Awaitable[bool]]
"""Function of a server's host and credentials (None: it sent none) that returns True if it is trusted."""


@dataclass(frozen=True, kw_only=True)
class LoguxOptions(LinkOptions):
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

    ping_interval_s: float = logux_client.PING_INTERVAL_S
    """Seconds without data from the server before it is pinged."""

    pings_unanswered_max: int = logux_client.PINGS_UNANSWERED_MAX
    """If this many pings are unanswered when the next one is due, the client gives up the connection. It also
    does so if `connect` is not answered in that time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.host is None or (isinstance(self.host, str) and self.host)):
            raise ConfigError(f"host must be a name, not {self.host!r}")
        if self.host is not None and len(self.host.encode(errors="replace")) > HOST_BYTES_MAX:
            raise ConfigError(f"host may have at most {HOST_BYTES_MAX} bytes")
        self._check_functions("verify")
        self._check_numbers("ping_interval_s", "pings_unanswered_max")
        check_json("host", self.host)
        check_json("credentials", self.credentials)


class LoguxOptionsDict(LinkOptionsDict, total=False):
    """The same options as keyword arguments, except `store`."""

    host: str | None
    credentials: Any
    verify: Verifier | None
    ping_interval_s: float
    pings_unanswered_max: int
