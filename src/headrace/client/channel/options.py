"""The options of a channel: every option with its meaning, unit and default."""

from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, Literal, Required, TypedDict

from headrace.client.backoff import Backoff
from headrace.client.channel.events import Snapshot
from headrace.client.topics.options import check_number
from headrace.errors import ConfigError
from headrace.payload.channel import BadMessageError, check_processor
from headrace.session.channel import client as channel_client
from headrace.session.channel import membership as client_sends
from headrace.wire.channel import LEASE_S_MAX, LEASE_S_MIN
from headrace.wire.logux import messages as logux

Receive = Literal["push", "signal", "poll"]
StartAt = Literal["cursor", "state"]
WAYS = ("push", "signal", "poll")

Restore = Callable[[Snapshot], object]
"""Function that takes over a state. An awaitable result is awaited; any other result is ignored."""

_NO_PROCESSOR = (
    "processor must be a name: under it the server remembers, over all connections and restarts, what "
    "this client has sent and what it has acknowledged. Choose one that no other client has, and keep it"
)


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """The options of `join` and `join_blocking`. Times are seconds."""

    processor: str | None = None
    """Name of this client. Required. It must be unique, and must always stay the same."""

    token: Any = None
    """Any JSON value that the client sends to the server with `hello`. None: nothing."""

    receive: Receive = "push"
    """`push`: the server sends messages. `signal`: the server announces messages and the client fetches them.
    `poll`: the client asks for messages every `poll_interval_s`."""

    start_at: StartAt = "cursor"
    """`state`: begin with the current state, then receive every later message, own messages included.
    `cursor`: begin after the last acknowledged message, without own messages."""

    lease_s: float | None = None
    """Seconds that the membership lasts without a connection, at least 1; None: the server's default."""

    restore: Restore | None = None
    """Called with the last known state if it replaces messages, before any later message is delivered. May be
    asynchronous."""

    auto_ack: bool = True
    """True: taking the next message acknowledges the one before it. False: the application acknowledges."""

    poll_interval_s: float = channel_client.POLL_INTERVAL_S
    """Seconds between requests for messages, with `receive="poll"`."""

    queue_max: int = client_sends.QUEUE_MAX
    """Largest number of messages that the server has not acknowledged. Beyond it, `send` waits and
    `send_nowait` raises QueueFullError."""

    queue_bytes_max: int = client_sends.QUEUE_BYTES_MAX
    """The same limit in bytes; the last message may exceed it."""

    connect_timeout_s: float | None = 10.0
    """Seconds that entering waits until the channel is joined. None: it does not wait, and messages are sent
    once a server is connected."""

    attempt_timeout_s: float = 5.0
    """Seconds that one attempt to connect may take."""

    backoff: Backoff | None = None
    """Function from an attempt's number to the seconds before the next attempt. None: exponential, 0.1 to
    10 s, of which a random part, at most half, is cut off."""

    ping_interval_s: float | None = None
    """Seconds without data from the server before it is pinged. None: the server's value, 15 by default."""

    pings_unanswered_max: int = channel_client.PINGS_UNANSWERED_MAX
    """If this many pings are unanswered when the next one is due, the client gives up the connection."""

    flush_timeout_s: float = 5.0
    """Seconds that closing waits for the server to have every message; 0: it does not wait."""

    ssl: SSLContext | None = None
    """TLS context that verifies a `channels://` server; None: its name and the system's authorities."""

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
        except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
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
    """The options that each channel of a shared connection may set for itself."""

    receive: Receive
    start_at: StartAt
    lease_s: float | None
    restore: Restore | None
    auto_ack: bool
