"""The channels of one processor over all its connections, without I/O and clocks.

    closed ──opened(): hello, joins──▶ greeting ──welcome──▶ open        any ──▶ over, closed

The session sends `hello` and every `join` at once, without waiting for `welcome`. The messages of one channel
are in `membership.py`. All connections end with wrong credentials, with a server that refuses our messages or
speaks another version, and with the end of the last channel, unless the session is shared.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from headrace.errors import LocalProtocolError
from headrace.payload.channel import check_processor
from headrace.session.channel.membership import (
    QUEUE_BYTES_MAX,
    QUEUE_MAX,
    ChannelEvent,
    ClientChannel,
    Ended,
    LeftChannel,
    Sends,
)
from headrace.session.client import (
    AUTH,
    PROTOCOL,
    Broken,
    ConnectionRefused,
    Finished,
    GreetingSession,
    Stage,
)
from headrace.wire import channel as wire

PING_INTERVAL_S = 15.0
"""Ping interval until the server has announced its own."""
PINGS_UNANSWERED_MAX = 1

POLL_INTERVAL_S = 1.0

ChannelClientEvent = ChannelEvent | ConnectionRefused | Broken | Finished


class ChannelClientSession(GreetingSession[ChannelClientEvent]):
    GREETING = "hello"

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
        """Create a session without channels. The limits of the queue apply to each channel.

        Without `ping_interval_s`, the server sets the interval. `is_shared`: channels come and go, and the
        session stays open without channels.

        `instance` is a name that no other client has: with it, late messages of a dead connection do no harm.
        """
        check_processor(processor)
        super().__init__(ping_interval_s or PING_INTERVAL_S, pings_unanswered_max)
        self._hello = wire.Hello(processor, token, instance)
        """First message of every connection; `attempt` counts the connections."""
        self._ping_given_s = ping_interval_s
        self._queue_max = queue_max
        self._queue_bytes_max = queue_bytes_max
        self._poll_interval_s = poll_interval_s
        self._is_shared = is_shared
        self._channels: dict[str, ClientChannel] = {}
        self._parting: dict[str, int] = {}
        """By channel: the number of answers that are still to come after `part`, and are ignored."""
        self._tickets = 0
        self._out: list[wire.Message] = []

    # Calls of the application

    def join(
        self,
        name: str,
        receive: str = "push",
        *,
        from_state: bool = False,
        lease_s: float | None = None,
    ) -> None:
        """Join a channel, on this connection and all later ones.

        `from_state`: begin with the present state, and receive the processor's own messages too. `lease_s`:
        seconds that the membership lasts without a connection.
        """
        if name in self._channels:
            raise LocalProtocolError(f"channel {name!r} is joined already")
        sends = Sends(self._queue_max, self._queue_bytes_max)
        channel = self._channels[name] = ClientChannel(
            name, receive, self._poll_interval_s, sends, from_state=from_state, lease_s=lease_s
        )
        if self._is_open:
            channel.opened()

    def leave(self, name: str) -> None:
        """End the membership; `LeftChannel` reports that it has ended."""
        self._channel(name).is_leaving = True

    def part(self, name: str) -> None:
        """Stop receiving from a channel, and stay a member: the server keeps the messages.

        For this, the client joins again in the mode `poll`, in which the server sends nothing unasked.
        """
        channel = self._channels.pop(name, None)
        if channel is not None and self._is_open:
            self._parting[name] = self._parting.get(name, 0) + 1
            self._out.append(channel.join_to_part())

    def send(self, name: str, content: Any) -> int:
        """Queue a message, also without a connection. Returns the ticket for `SendAccepted` or `Rejected`.

        Raises BadMessageError, PayloadTooLargeError or QueueFullError; in that case nothing is sent.
        """
        sends = self._channel(name).sends
        sends.add(self._tickets + 1, wire.message_fields(content, self._hello.processor))
        return self._ticket()

    def upload(self, name: str, offset: int, content: Any) -> int:
        """Queue the upload of a state that covers everything up to an offset. Returns a ticket."""
        fields = wire.state_fields(content)
        self._channel(name).upload(self._tickets + 1, offset, fields)
        return self._ticket()

    def snapshot(self, name: str) -> int:
        """Ask for the last known state. Returns a ticket."""
        self._channel(name).snapshot(self._tickets + 1)
        return self._ticket()

    def ack(self, name: str, offset: int) -> None:
        """Acknowledge everything up to an offset. One acknowledgement is under way at a time."""
        self._channel(name).ack(offset)

    def more(self, name: str) -> None:
        """Ask for more messages, if they have to be asked for: the application has taken all it received."""
        self._channel(name).is_hungry = True

    def has_room(self, name: str) -> bool:
        """True if `send` would accept a message now."""
        return self._channel(name).sends.has_room

    def is_acknowledged(self, name: str) -> bool:
        """True if the server has confirmed every acknowledgement."""
        return self._channel(name).is_acknowledged

    def acked(self, name: str) -> int:
        """Return the offset up to which the server has confirmed acknowledgements; -1 before the first."""
        return self._channel(name).acked

    # Interface of `LinkedSession`

    @property
    def tick_at(self) -> float:
        if not self._is_open:
            return inf
        return min([self._ping_at, *(channel.tick_at for channel in self._channels.values())])

    def opened(self, now: float) -> None:
        self._begin_greeting(now + self._ping_s)
        if self.token is not None:
            self._hello.token = self.token
        self._hello.attempt += 1
        self._out.append(self._hello)
        for channel in self._channels.values():
            channel.opened()

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[ChannelClientEvent]:
        """Each chunk is a message in MessagePack."""
        events: list[ChannelClientEvent] = []
        for chunk in chunks:
            if not self._is_open:
                break
            self._heard(now)
            try:
                self._take(wire.decode_answer(chunk), now, events)
            except wire.BadChannelMessageError as error:
                self._finish(f"the server broke the protocol: {error}", events)
        return events

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        if not self._is_open:
            return []
        said, self._out = self._out, []
        for channel in self._channels.values():
            said += channel.take(bytes_max, now)
        return [wire.encode_request(one) for one in said]

    # Messages

    def _take(self, answer: wire.Answer, now: float, events: list[ChannelClientEvent]) -> None:
        if isinstance(answer, wire.Welcome):
            self._welcome(answer, now, events)
        elif isinstance(answer, wire.Pong):
            self._pong(now)
        elif isinstance(answer, wire.ErrorAnswer) and not answer.channel:
            kind = AUTH if answer.code == "wrong-credentials" else PROTOCOL
            self._refuse(kind, f"the server refuses this client: {answer.text}", events)
        elif self._stage is Stage.GREETING:
            raise wire.BadChannelMessageError("something came before `welcome`")
        elif self._is_parting(answer):
            pass
        elif (channel := self._channels.get(answer.channel)) is not None:
            channel.hear(answer, now, events)
            if events and isinstance(events[-1], LeftChannel | Ended):
                self._over(events[-1], events)

    def _is_parting(self, answer: Any) -> bool:
        """Return True if this answers a `join` that `part` has sent, and count the answer."""
        count = self._parting.get(answer.channel, 0)
        is_of_join = isinstance(answer, wire.JoinedAnswer) or (
            isinstance(answer, wire.ErrorAnswer) and answer.of == "join"
        )
        if not (count and is_of_join):
            return False
        self._parting[answer.channel] = count - 1
        return True

    def _welcome(self, answer: wire.Welcome, now: float, events: list[ChannelClientEvent]) -> None:
        if answer.version != wire.VERSION:
            text = f"the server speaks version {answer.version}, not {wire.VERSION}"
            self._refuse(PROTOCOL, text, events)
            return
        self._ping_s = self._ping_given_s or answer.ping_s
        self._begin_exchange(now)

    def _over(self, last: LeftChannel | Ended, events: list[ChannelClientEvent]) -> None:
        """Remove a channel that has ended. Without channels, a session that is not shared ends too."""
        del self._channels[last.channel]
        if not self._channels and not self._is_shared:
            self.is_refused = True
            text = last.text if isinstance(last, Ended) else f"channel {last.channel!r} is left"
            self._finish(text, events)

    def _send_ping(self) -> None:
        self._out.append(wire.Ping())

    def _forget_connection(self) -> None:
        super()._forget_connection()
        self._out.clear()
        self._parting.clear()
        for channel in self._channels.values():
            channel.disconnected()

    @property
    def _is_open(self) -> bool:
        return self._stage in (Stage.GREETING, Stage.OPEN)

    def _channel(self, name: str) -> ClientChannel:
        channel = self._channels.get(name)
        if channel is None:
            raise LocalProtocolError(f"channel {name!r} is not joined: call `join` first")
        return channel

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets
