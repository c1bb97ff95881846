"""The channels of one processor over all its connections, without I/O and clocks.

    closed ──opened(): hello, joins──▶ greeting ──welcome──▶ open        any ──▶ over, closed

`hello` and every `join` are said at once, without waiting for `welcome`. What a channel says and hears is in
`client_channel.py`. Wrong credentials, and a server that does not take what we say for its protocol, are
the end of all connections; so is the end of the last channel, unless there may be others later.
"""

from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from headrace.channel_envelope import check_processor
from headrace.errors import LocalProtocolError
from headrace.session.client import Broken, ConnectionState, Finished
from headrace.session.client_channel import ChannelEvent, ClientChannel, Ended, Left
from headrace.session.client_sends import QUEUE_BYTES_MAX, QUEUE_MAX, Sends
from headrace.wire import channel as wire
from headrace.wire import channel_answers as answers

PING_INTERVAL_S = 15.0
"""As long as a server has not said how often."""
PINGS_UNANSWERED_MAX = 1

POLL_INTERVAL_S = 1.0

AUTH = "auth"
PROTOCOL = "protocol"


class Refused(NamedTuple):
    """No connection will be of use: the server does not take us, or we do not take it."""

    kind: str
    """`auth` or `protocol`."""
    reason: str


ChannelClientEvent = ChannelEvent | Refused | Broken | Finished


class _Stage(Enum):
    CLOSED = "closed"
    GREETING = "greeting"
    OPEN = "open"
    OVER = "over"
    """The last word is said; the connection is about to close."""


class ChannelClientSession:
    """Times are seconds of one clock."""

    def __init__(
        self,
        processor: str,
        token: Any = None,
        *,
        instance: str = "",
        ping_interval_s: float | None = None,
        pings_unanswered_max: int = PINGS_UNANSWERED_MAX,
        queue_max: int = QUEUE_MAX,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        poll_interval_s: float = POLL_INTERVAL_S,
        is_shared: bool = False,
    ) -> None:
        """Without a `ping_interval_s`: as often as the server says. The queue is that of each channel.

        `is_shared`: channels come and go, and the session stays without any.

        With an `instance`, which no other client has, late words of a dead connection do no harm.
        """
        check_processor(processor)
        self.state = ConnectionState.DISCONNECTED
        self.latency_s: float | None = None
        self._processor = processor
        self._token = token
        self._instance = instance
        self._attempts = 0
        self._ping_given_s = ping_interval_s
        self._ping_s = ping_interval_s or PING_INTERVAL_S
        self._pings_unanswered_max = pings_unanswered_max
        self._queue_max = queue_max
        self._queue_bytes_max = queue_bytes_max
        self._poll_interval_s = poll_interval_s
        self._is_shared = is_shared
        self._channels: dict[str, ClientChannel] = {}
        self._parting: dict[str, int] = {}
        """Answers to come that are about channels of which nothing is wanted any more."""
        self._tickets = 0
        self._stage = _Stage.CLOSED
        self._refused = False
        self._out: list[wire.Message] = []
        self._ping_at = inf
        self._pinged_at: float | None = None
        self._pings_unanswered = 0

    # What the application does

    def join(
        self,
        name: str,
        receive: str = "push",
        *,
        from_state: bool = False,
        lease_s: float | None = None,
    ) -> None:
        """Be a member of a channel, on this connection and all others.

        `from_state`: begin with the state as of now, and have own messages too. `lease_s`: how long the
        membership lasts without a connection.
        """
        if name in self._channels:
            raise LocalProtocolError(f"channel {name!r} is joined already")
        sends = Sends(self._queue_max, self._queue_bytes_max)
        channel = ClientChannel(
            name,
            receive,
            self._poll_interval_s,
            sends,
            from_state=from_state,
            lease_s=lease_s,
        )
        self._channels[name] = channel
        if self._is_open:
            channel.opened()

    def leave(self, name: str) -> None:
        """Be a member no more; `Left` says when that is so."""
        self._channel(name).leave()

    def part(self, name: str) -> None:
        """Want nothing more of a channel, and stay a member: its messages are kept.

        The server stops to send them when they have to be asked for.
        """
        channel = self._channels.pop(name, None)
        if channel is not None and self._is_open:
            self._parting[name] = self._parting.get(name, 0) + 1
            self._out.append(channel.join_to_part())

    def send(self, name: str, content: Any) -> int:
        """Take a message, also without a connection. Returns a ticket, which `Accepted` or `Rejected` has.

        Raises BadMessageError, PayloadTooLargeError or QueueFullError; nothing is sent then.
        """
        sends = self._channel(name).sends
        sends.add(self._tickets + 1, answers.message_fields(content, self._processor))
        return self._ticket()

    def upload(self, name: str, offset: int, content: Any) -> int:
        """A state that covers everything up to an offset. Returns a ticket."""
        fields = answers.state_fields(content)
        self._channel(name).upload(self._tickets + 1, offset, fields)
        return self._ticket()

    def snapshot(self, name: str) -> int:
        """Ask for the last known state. Returns a ticket."""
        self._channel(name).snapshot(self._tickets + 1)
        return self._ticket()

    def ack(self, name: str, offset: int) -> None:
        """Everything up to an offset is done with. One acknowledgement is under way at a time."""
        self._channel(name).ack(offset)

    def more(self, name: str) -> None:
        """All that was received is taken: where messages have to be asked for, ask."""
        self._channel(name).more()

    def unsettled(self, name: str) -> int:
        """How many messages the server is not known to have."""
        return len(self._channel(name).sends)

    def has_room(self, name: str) -> bool:
        """Whether `send` would be taken now."""
        return self._channel(name).sends.has_room

    def is_acknowledged(self, name: str) -> bool:
        """Whether the server has noted every acknowledgement."""
        return self._channel(name).is_acknowledged

    def acked(self, name: str) -> int:
        """How far the server is known to have noted it; -1 before the first."""
        return self._channel(name).acked

    # What a link asks of any session

    @property
    def tick_at(self) -> float:
        if not self._is_open:
            return inf
        return min([self._ping_at, *(channel.tick_at for channel in self._channels.values())])

    def connecting(self) -> None:
        assert self.state is ConnectionState.DISCONNECTED, self.state
        self.state = ConnectionState.CONNECTING

    def opened(self, now: float) -> None:
        assert self.state is ConnectionState.CONNECTING and self._stage is _Stage.CLOSED
        self._stage = _Stage.GREETING
        self._ping_at = now + self._ping_s
        self._attempts += 1
        self._out.append(wire.Hello(self._processor, self._token, self._instance, self._attempts))
        for channel in self._channels.values():
            channel.opened()

    def hung_up(self, reason: str, now: float) -> list[ChannelClientEvent]:
        return []  # this protocol has words for what it does not take

    def disconnected(self) -> None:
        assert self.state is not ConnectionState.CLOSED
        refused = ConnectionState.REFUSED
        self.state = refused if self._refused else ConnectionState.DISCONNECTED
        self._forget_connection()

    def close(self) -> None:
        self.state = ConnectionState.CLOSED
        self._forget_connection()

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[ChannelClientEvent]:
        """Each chunk is a message in MessagePack."""
        events: list[ChannelClientEvent] = []
        for chunk in chunks:
            if not self._is_open:
                break
            self._heard(now)
            try:
                self._take(answers.decode_answer(chunk), now, events)
            except wire.BadChannelMessageError as error:
                self._stage = _Stage.OVER
                events.append(Finished(f"the server broke the protocol: {error}"))
        return events

    def tick(self, now: float, reading: bool = True) -> list[ChannelClientEvent]:
        if now < self._ping_at:
            return []
        if not reading:
            # What it says is not heard, so silence proves nothing. It is to hear of us, though.
            self._ping_at = now + self._ping_s
            if self._stage is _Stage.OPEN:
                self._out.append(wire.Ping())
            return []
        if self._stage is not _Stage.OPEN:
            self._ping_at = inf
            return [Broken("the server does not answer `hello`")]
        if self._pings_unanswered >= self._pings_unanswered_max:
            self._ping_at = inf
            return [Broken(f"nothing was heard after {self._pings_unanswered} pings")]
        self._pings_unanswered += 1
        self._pinged_at = now
        self._ping_at = now + self._ping_s
        self._out.append(wire.Ping())
        return []

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        if not self._is_open:
            return []
        said, self._out = self._out, []
        for channel in self._channels.values():
            said += channel.take(bytes_max, now)
        return [answers.encode_request(one) for one in said]

    # Messages

    def _take(self, answer: answers.Answer, now: float, events: list[ChannelClientEvent]) -> None:
        if isinstance(answer, answers.Welcome):
            self._welcome(answer, now, events)
        elif isinstance(answer, answers.Pong):
            if self._pinged_at is not None:
                self.latency_s = now - self._pinged_at
                self._pinged_at = None
        elif isinstance(answer, answers.Error) and not answer.channel:
            kind = AUTH if answer.code == "wrong-credentials" else PROTOCOL
            self._refuse(kind, f"the server refuses this client: {answer.text}", events)
        elif self._stage is _Stage.GREETING:
            raise wire.BadChannelMessageError("something came before `welcome`")
        elif self._is_parting(answer):
            pass
        elif (channel := self._channels.get(answer.channel)) is not None:
            channel.hear(answer, now, events)
            if events and isinstance(events[-1], Left | Ended):
                self._over(events[-1], events)

    def _is_parting(self, answer: Any) -> bool:
        """Whether this is the answer of a `join` that `part` has said."""
        count = self._parting.get(answer.channel, 0)
        is_of_join = isinstance(answer, answers.Joined) or (
            isinstance(answer, answers.Error) and answer.of == "join"
        )
        if not (count and is_of_join):
            return False
        self._parting[answer.channel] = count - 1
        return True

    def _welcome(
        self, answer: answers.Welcome, now: float, events: list[ChannelClientEvent]
    ) -> None:
        if answer.version != wire.VERSION:
            text = f"the server speaks version {answer.version}, not {wire.VERSION}"
            self._refuse(PROTOCOL, text, events)
            return
        self._stage = _Stage.OPEN
        self._ping_s = self._ping_given_s or answer.ping_s
        self._ping_at = now + self._ping_s
        self.state = ConnectionState.CONNECTED

    def _over(self, last: Left | Ended, events: list[ChannelClientEvent]) -> None:
        """Of a channel there is nothing more."""
        del self._channels[last.channel]
        if not self._channels and not self._is_shared:
            self._refused = True
            self._stage = _Stage.OVER
            self._ping_at = inf
            text = last.text if isinstance(last, Ended) else f"channel {last.channel!r} is left"
            events.append(Finished(text))

    def _refuse(self, kind: str, reason: str, events: list[ChannelClientEvent]) -> None:
        self._refused = True
        self._stage = _Stage.OVER
        self._ping_at = inf
        events += (Refused(kind, reason), Finished(reason))

    def _forget_connection(self) -> None:
        self._stage = _Stage.CLOSED
        self._ping_at = inf
        self._pinged_at = None
        self._pings_unanswered = 0
        self._out.clear()
        self._parting.clear()
        for channel in self._channels.values():
            channel.disconnected()

    @property
    def _is_open(self) -> bool:
        return self._stage in (_Stage.GREETING, _Stage.OPEN)

    def _heard(self, now: float) -> None:
        """Whatever the server says, it is there; before `welcome` only that counts."""
        self._pings_unanswered = 0
        if self._stage is _Stage.OPEN:
            self._ping_at = now + self._ping_s

    def _channel(self, name: str) -> ClientChannel:
        channel = self._channels.get(name)
        if channel is None:
            raise LocalProtocolError(f"channel {name!r} is not joined")
        return channel

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets
