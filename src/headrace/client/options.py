"""What an application can set on a client: every option with its meaning, unit and default."""

from dataclasses import dataclass, field, fields
from typing import TypedDict

from headrace.client.backoff import Backoff, exponential
from headrace.errors import ConfigError
from headrace.session import figg_client


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `connect` and `connect_blocking`. Times are seconds."""

    connect_timeout_s: float | None = 10.0
    """How long entering the client waits for its first connection; None: it does not wait at all,
    and what is published or subscribed meanwhile is sent when a server is there."""

    attempt_timeout_s: float = 5.0
    """How long one attempt to connect may take."""

    backoff: Backoff = field(default_factory=exponential)
    """The wait before the next attempt, from its number."""

    window_max: int = figg_client.WINDOW_MAX
    """Unacknowledged publishes kept; more wait (`publish`) or are refused (`publish_nowait`)."""

    window_bytes_max: int = figg_client.WINDOW_BYTES_MAX
    """The same in bytes; the last publish taken may go beyond it."""

    receive_bytes_max: int = 8 * 1024 * 1024
    """Received for one subscription and not yet taken by the application. Above it the client stops
    reading; nothing is lost."""

    receive_pause_s: float = 1.0
    """How long a slow subscription may keep the client from reading. After that only its own topic
    waits: it is detached, and attached again where it stopped once the application caught up."""

    ping_interval_s: float = figg_client.PING_INTERVAL_S
    """How often the server is pinged."""

    pings_unanswered_max: int = figg_client.PINGS_UNANSWERED_MAX
    """With so many unanswered when the next is due, the connection is given up."""

    flush_timeout_s: float = 5.0
    """How long closing waits for acknowledgements; 0: it does not wait."""

    def __post_init__(self) -> None:
        may_be_zero = ("receive_pause_s", "flush_timeout_s")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "backoff":
                if not callable(value):
                    raise ConfigError(f"backoff must be a function of the attempt, not {value!r}")
                continue
            if value is None and option.name == "connect_timeout_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{option.name} must be a number, not {value!r}")
            if not (value > 0 or (value == 0 and option.name in may_be_zero)):
                raise ConfigError(f"{option.name} must be above 0, not {value!r}")


class OptionsDict(TypedDict, total=False):
    """The same options as keyword arguments."""

    connect_timeout_s: float | None
    attempt_timeout_s: float
    backoff: Backoff
    window_max: int
    window_bytes_max: int
    receive_bytes_max: int
    receive_pause_s: float
    ping_interval_s: float
    pings_unanswered_max: int
    flush_timeout_s: float
