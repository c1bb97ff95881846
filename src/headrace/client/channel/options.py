"""The options of a channel. Options that all clients have are in `client/options.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

from headrace.client.channel.events import Snapshot
from headrace.client.options import LinkOptions, LinkOptionsDict, check_json
from headrace.errors import ConfigError
from headrace.payload.channel import BadMessageError, check_processor
from headrace.session.channel import client as channel_client
from headrace.session.channel import membership as client_sends
from headrace.wire.channel import LEASE_S_MAX, LEASE_S_MIN

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
class ChannelOptions(LinkOptions):
    """The options of `join` and `join_blocking`. Times are seconds."""

    connect_timeout_s: float | None = 10.0
    """Seconds that entering the client waits until the channel is joined. None: it does not wait, and
    messages are sent once it is."""

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

    ping_interval_s: float | None = None
    """Seconds without data from the server before it is pinged. None: the server's value, 15 by default."""

    pings_unanswered_max: int = channel_client.PINGS_UNANSWERED_MAX
    """If this many pings are unanswered when the next one is due, the client gives up the connection."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self._check_functions("restore")
        if not isinstance(self.auto_ack, bool):
            raise ConfigError(f"auto_ack must be True or False, not {self.auto_ack!r}")
        self._check_numbers(
            "poll_interval_s", "queue_max", "queue_bytes_max", "pings_unanswered_max"
        )
        self._check_numbers("ping_interval_s", "lease_s", may_be_none=True)
        if self.lease_s is not None and not LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX:
            bounds = f"{LEASE_S_MIN:g} to {LEASE_S_MAX:.0f}"
            raise ConfigError(f"lease_s must be {bounds}, not {self.lease_s!r}")
        check_json("token", self.token)


class ChannelOptionsDict(LinkOptionsDict, total=False):
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
    ping_interval_s: float | None
    pings_unanswered_max: int


class JoinOptionsDict(TypedDict, total=False):
    """The options that each channel of a shared connection may set for itself."""

    receive: Receive
    start_at: StartAt
    lease_s: float | None
    restore: Restore | None
    auto_ack: bool
