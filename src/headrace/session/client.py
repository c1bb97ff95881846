"""Base of all client sessions, regardless of their protocol: connection states, greetings and pings.

The link (`headrace.client.link`) drives any session through `LinkedSession`, so a new protocol needs only a
new session and a way to dial. `GreetingSession` is for protocols that begin with a greeting: Logux and
channels. Figg and Wombat have none; their sessions share `session/topics/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, StrEnum
from math import inf
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar


class ConnectionState(StrEnum):
    """State of a client's connection to its server."""

    DISCONNECTED = "disconnected"
    """No connection; the client waits for the next attempt."""
    CONNECTING = "connecting"
    CONNECTED = "connected"
    REFUSED = "refused"
    """Server and client do not accept each other: there will be no further attempt. Logux and
    channels only."""
    CLOSED = "closed"
    """The application closed the client for good."""


class Broken(NamedTuple):
    """The connection is broken: close it and connect again."""

    reason: str


class Finished(NamedTuple):
    """The exchange is complete: send the remaining data, and close the connection."""

    reason: str


class ConnectionRefused(NamedTuple):
    """No connection can succeed: the server refuses this client, or this client refuses the server."""

    kind: str
    """`AUTH` or `PROTOCOL`."""
    reason: str


AUTH = "auth"
PROTOCOL = "protocol"

TOKENS_REFUSED_MAX = 3
"""Different tokens in a row that a server may refuse before the client gives up."""

E = TypeVar("E")
"""Type of a session's events."""


class LinkedSession(ABC, Generic[E]):
    """A session that a link keeps connected. It serves one client over many connections, without I/O.

    Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self.state = ConnectionState.DISCONNECTED
        self.latency_s: float | None = None
        """Round trip of the last answered ping, None before the first."""
        self.is_refused = False
        """True if no further connection can succeed."""
        self.token: str | None = None
        """Token to show to the server. The caller sets it before `opened`."""
        self.token_changes = False
        """True if the next connection may have another token."""
        self._refused_token: str | None = None
        self._tokens_refused = 0
        self.renew_at = inf
        """Time to call `renew` with a new token, if the application can provide one."""

    @property
    @abstractmethod
    def tick_at(self) -> float:
        """Time when `tick` is due. Everything that is sent may make it earlier."""

    def connecting(self) -> None:
        """Note that an attempt to connect begins."""
        assert self.state is ConnectionState.DISCONNECTED, self.state
        self.state = ConnectionState.CONNECTING

    @abstractmethod
    def opened(self, now: float) -> None:
        """Note a new open connection: everything that the server must be told again becomes data to send.

        `state` stays CONNECTING until the server has proved that it speaks the protocol.
        """

    def refuse(self, reason: str) -> list[Any]:
        """Refuse the server, on this connection and every later one."""
        self.is_refused = True
        return [ConnectionRefused(AUTH, reason), Finished(reason)]

    def renew(self, token: str, now: float) -> None:
        """Show a new token on the open connection, if the protocol can. Nothing else is interrupted."""
        self.token = token

    def explain(self, reason: str) -> str:
        """Return the reason for the end of a connection, with what the session knows about its cause."""
        return reason

    def hung_up(self, reason: str, now: float) -> list[E]:
        """Note that the server itself has ended the connection; `disconnected` follows."""
        return []

    def disconnected(self) -> None:
        """Note that the attempt failed or the connection ended."""
        assert self.state is not ConnectionState.CLOSED
        refused = ConnectionState.REFUSED
        self.state = refused if self.is_refused else ConnectionState.DISCONNECTED
        self._forget_connection()

    def close(self) -> None:
        """Close the session for good."""
        self.state = ConnectionState.CLOSED
        self._forget_connection()

    def _token_accepted(self) -> None:
        self._refused_token = None
        self._tokens_refused = 0

    def _may_try_again(self) -> bool:
        """True if the application may provide a better token than the one that the server has refused."""
        is_same = self.token == self._refused_token
        self._refused_token = self.token
        self._tokens_refused += 1
        return self.token_changes and not is_same and self._tokens_refused < TOKENS_REFUSED_MAX

    @abstractmethod
    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[E]:
        """Handle the data of one read, and return the resulting events.

        Chunks are pieces of the stream, or whole messages if the transport has messages. No event
        follows a `Broken` or `Finished`.
        """

    @abstractmethod
    def tick(self, now: float, reading: bool = True) -> list[E]:
        """Send a ping or repeat a publish if it is due, or give up on a peer that does not answer.

        While the client does not read (`reading` is False), a missing answer proves nothing.
        """

    @abstractmethod
    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        """Return the next frames for the connection, about `bytes_max` at most; empty if there are none.

        Control messages come first and are never held back because of their size. Returned frames count
        as sent: they are returned again only if they must be sent again.
        """

    @abstractmethod
    def _forget_connection(self) -> None: ...


class Stage(Enum):
    """Progress of a connection that begins with a greeting."""

    CLOSED = "closed"
    GREETING = "greeting"
    VERIFYING = "verifying"
    """The server has answered, and the application checks whether it is the intended one. Logux only."""
    OPEN = "open"
    OVER = "over"
    """All messages are exchanged; the connection is about to close."""


class GreetingSession(LinkedSession[E]):
    """A session that greets its server first, and learns from messages if the server refuses it.

        closed ──opened()──▶ greeting ──answered──▶ open        any ──▶ over, closed

    Any message of the server is a sign of life. When none has come for `_ping_s`, the session sends a ping.
    """

    GREETING: ClassVar[str]
    """Name of the first message."""

    def __init__(self, ping_s: float, pings_unanswered_max: int) -> None:
        super().__init__()
        self._ping_s = ping_s
        self._pings_unanswered_max = pings_unanswered_max
        self._stage = Stage.CLOSED
        self._ping_at = inf
        """Time of the next ping; before the server has answered the greeting, the time limit for this."""
        self._pinged_at: float | None = None
        self._pings_unanswered = 0

    def tick(self, now: float, reading: bool = True) -> list[Any]:
        if now < self._ping_at:
            return []
        is_open = self._stage is Stage.OPEN
        if reading:
            if not is_open:
                self._ping_at = inf
                return [Broken(f"the server does not answer `{self.GREETING}`")]
            if self._pings_unanswered >= self._pings_unanswered_max:
                self._ping_at = inf
                return [Broken(unanswered(self._pings_unanswered))]
            self._pings_unanswered += 1
            self._pinged_at = now
        # If we do not read, the server's silence proves nothing. Our ping still tells it that we live.
        self._ping_at = now + self._ping_s
        if is_open:
            self._send_ping()
        return []

    @abstractmethod
    def _send_ping(self) -> None: ...

    def _begin_greeting(self, answer_until: float) -> None:
        assert self.state is ConnectionState.CONNECTING and self._stage is Stage.CLOSED
        self._stage = Stage.GREETING
        self._ping_at = answer_until

    def _begin_exchange(self, now: float) -> None:
        self._stage = Stage.OPEN
        self._ping_at = now + self._ping_s
        self._token_accepted()
        self.state = ConnectionState.CONNECTED

    def _heard(self, now: float) -> None:
        """Note a sign of life. Before the greeting is answered, it does not put off the time limit."""
        self._pings_unanswered = 0
        if self._stage is Stage.OPEN:
            self._ping_at = now + self._ping_s

    def _pong(self, now: float) -> None:
        if self._pinged_at is not None:
            self.latency_s = now - self._pinged_at
            self._pinged_at = None

    def _finish(self, reason: str, events: list[Any]) -> None:
        self._stage = Stage.OVER
        self._ping_at = inf
        events.append(Finished(reason))

    def _refuse(self, kind: str, reason: str, events: list[Any]) -> None:
        if kind == AUTH and self._may_try_again():
            self._finish(reason, events)
            return
        self.is_refused = True
        events.append(ConnectionRefused(kind, reason))
        self._finish(reason, events)

    def _forget_connection(self) -> None:
        self._stage = Stage.CLOSED
        self._ping_at = inf
        self._pinged_at = None
        self._pings_unanswered = 0


def unanswered(pings: int) -> str:
    return "the last ping is unanswered" if pings == 1 else f"{pings} pings are unanswered"
