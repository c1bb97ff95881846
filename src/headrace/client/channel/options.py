"""What an application can set on a channel: every option with its meaning, unit and default."""

from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, Literal, Required, TypedDict

from headrace.channel_envelope import BadMessageError, check_processor
from headrace.client.backoff import Backoff
from headrace.client.channel_events import Snapshot
from headrace.client.options import check_number
from headrace.errors import ConfigError
from headrace.session import channel_client, client_sends
from headrace.wire import logux
from headrace.wire.channel import LEASE_S_MAX, LEASE_S_MIN

Receive = Literal["push", "signal", "poll"]
StartAt = Literal["cursor", "state"]
WAYS = ("push", "signal", "poll")

Restore = Callable[[Snapshot], object]
"""Takes over a state. What it returns is awaited if it can be, and else ignored."""

_NO_PROCESSOR = (
    "processor must be a name: under it the server remembers, over all connections and restarts, what "
    "this client has sent and what it has acknowledged. Choose one that no other client has, and keep it"
)


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """The options of `join` and `join_blocking`. Times are seconds."""

    processor: str | None = None
    """The name of this client, which no other may have; always the same. It has to be given."""

    token: Any = None
    """What the server is shown with `hello`. None: nothing."""

    receive: Receive = "push"
    """`push`: messages come of themselves; `signal`: they are announced, and fetched; `poll`: they are asked
    for every `poll_interval_s`."""

    start_at: StartAt = "cursor"
    """`state`: begin with the state as of now, then get every message behind it, the own ones included;
    `cursor`: begin behind what was acknowledged last, without own messages."""

    lease_s: float | None = None
    """How long the membership lasts without a connection, from 1 on; None: as long as the server says."""

    restore: Restore | None = None
    """Called with the last known state when there is one in place of messages, before any message behind it
    is given out; may be asynchronous."""

    auto_ack: bool = True
    """Whether a message is acknowledged when the next one is asked for; else the application does it."""

    poll_interval_s: float = channel_client.POLL_INTERVAL_S
    """How long to wait before asking again, with `receive="poll"`."""

    queue_max: int = client_sends.QUEUE_MAX
    """Messages kept that the server is not known to have; more wait (`send`) or are refused
    (`send_nowait`)."""

    queue_bytes_max: int = client_sends.QUEUE_BYTES_MAX
    """The same in bytes; the last message taken may go beyond it."""

    connect_timeout_s: float | None = 10.0
    """How long entering waits until the channel is joined; None: not at all, and what is sent meanwhile goes
    out when a server is there."""

    attempt_timeout_s: float = 5.0
    """How long one attempt to connect may take."""

    backoff: Backoff | None = None
    """The wait before the next attempt, from its number. None: exponential, 0.1 to 10 s, up to half of
    it cut off at random."""

    ping_interval_s: float | None = None
    """After so long without a word of the server it is pinged. None: what the server says, 15 by default."""

    pings_unanswered_max: int = channel_client.PINGS_UNANSWERED_MAX
    """With so many unanswered when the next is due, the connection is given up."""

    flush_timeout_s: float = 5.0
    """How long closing waits for the server to have every message; 0: it does not wait."""

    ssl: SSLContext | None = None
    """How a `channels://` server is checked; None: by its name and the system's authorities."""

    def __post_init__(self) -> None:
        if not isinstance(self.processor, str):
            raise ConfigError(_NO_PROCESSOR)
        try:
            check_processor(self.processor)
        except BadMessageError as error:
            raise ConfigError(f"{error}; {_NO_PROCESSOR}") from None
        if self.receive not in WAYS:
            raise ConfigError(f"receive must be push, signal or poll, not {self.receive!r}")
        if self.start_at not in ("cursor", "state"):
            raise ConfigError(f"start_at must be cursor or state, not {self.start_at!r}")
        for name in ("backoff", "restore"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be a function, not {value!r}")
        if not isinstance(self.auto_ack, bool):
            raise ConfigError(f"auto_ack must be True or False, not {self.auto_ack!r}")
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise ConfigError(f"ssl must be an ssl.SSLContext, not {self.ssl!r}")
        self._check_numbers()
        try:
            heard = logux.unpack(logux.pack([self.token], binary=True), binary=True)
        except (logux.BadMessageError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"token must be what JSON has: {error}") from None
        if heard != [self.token]:
            raise ConfigError(f"token must be what JSON has, not {self.token!r}")

    def _check_numbers(self) -> None:
        for name in ("poll_interval_s", "queue_max", "queue_bytes_max", "attempt_timeout_s"):
            check_number(name, getattr(self, name))
        check_number("pings_unanswered_max", self.pings_unanswered_max)
        check_number("flush_timeout_s", self.flush_timeout_s, may_be_zero=True)
        if self.lease_s is not None:
            check_number("lease_s", self.lease_s)
            if not LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX:
                bounds = f"{LEASE_S_MIN:g} to {LEASE_S_MAX:.0f}"
                raise ConfigError(f"lease_s must be {bounds}, not {self.lease_s!r}")
        for name in ("connect_timeout_s", "ping_interval_s"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))


class ChannelOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments."""

    processor: Required[str]
    token: Any
    receive: Receive
    start_at: StartAt
    lease_s: float | None
    restore: Restore | None
    auto_ack: bool
    poll_interval_s: float
    queue_max: int
    queue_bytes_max: int
    connect_timeout_s: float | None
    attempt_timeout_s: float
    backoff: Backoff | None
    ping_interval_s: float | None
    pings_unanswered_max: int
    flush_timeout_s: float
    ssl: SSLContext | None


class JoinOptionsDict(TypedDict, total=False):
    """The options that each channel of a connection may have for itself."""

    receive: Receive
    start_at: StartAt
    lease_s: float | None
    restore: Restore | None
    auto_ack: bool
