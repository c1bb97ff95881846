"""A channel connection as its channels see it: messages to the peer, their limits, and silent peers.

Elsewhere: the peer's requests (`connection.py`).
"""

from typing import TYPE_CHECKING

from headrace.broker.channel.channel import Channel
from headrace.broker.channel.member import Batch
from headrace.server.connection import Pause
from headrace.server.websocket import WebSocketConnection
from headrace.session.channel.server import ChannelServerSession
from headrace.wire import channel as wire
from headrace.wire import websocket

if TYPE_CHECKING:
    from headrace.server.channel.connection import ChannelConnections

LARGE_REQUESTS_MAX = 32
"""Pending requests of one connection that have a few bytes, but whose answers may have a megabyte."""

_PUSHED_BYTES_MAX = 1 << 16
"""Bytes of messages that are pushed before the transport is asked if it has room for more."""


class ChannelSubscriber(WebSocketConnection):
    """Implements `Subscriber`."""

    __slots__ = (
        *("_heard", "_hub", "_joined", "_large", "_pinged", "_pushed_bytes", "_sated", "_stalled"),
    )
    protocol = "channel"
    message_bytes_max = wire.MESSAGE_BYTES_MAX
    takes_text = True
    _session: ChannelServerSession

    def __init__(self, hub: "ChannelConnections") -> None:
        self._hub = hub
        self._heard = hub.shared.loop.time()
        self._pinged = False
        self._joined: dict[str, Channel] = {}
        self._stalled: dict[str, None] = {}
        """Channels with messages for this processor for which there was no room."""
        self._large = 0
        """Number of pending requests with large answers."""
        self._sated = False
        """True while requests wait until answers have been sent."""
        self._pushed_bytes = 0
        """Bytes of messages that were pushed since the transport was last asked for room."""
        super().__init__(hub.shared, ChannelServerSession(hub.settings.ping_s))

    # Interface for channels

    @property
    def instance(self) -> str:
        return self._session.instance

    @property
    def attempt(self) -> int:
        return self._session.attempt

    def messages(self, channel: str, batch: Batch) -> bool:
        if self.is_gone:
            return False
        if not self._writable:
            self._stalled[channel] = None
            return False
        # The frame follows `joined` and all earlier answers, and is written with the others of one commit.
        frame = self._encoded(batch)
        self._session.say_encoded(frame)
        self._pushed_bytes += len(frame)
        if self._pushed_bytes < _PUSHED_BYTES_MAX:
            self._answer_soon()
        else:
            self._pushed_bytes = 0
            self._answer()  # write now, to know if there is room for more
        return True

    def signal(self, channel: str) -> None:
        self._session.say({"type": "signal", "channel": channel, "name": "pending"})
        self._answer_soon()

    def ended(self, channel: str, reason: str) -> None:
        self._joined.pop(channel, None)
        self._stalled.pop(channel, None)
        self._session.say({"type": "left", "channel": channel, "reason": reason})
        self._answer_soon()

    def _encoded(self, batch: Batch) -> bytes:
        binary = self._session.binary
        frame = batch.encoded.get(binary)
        if frame is None:
            frame = batch.encoded[binary] = wire.encode_messages(
                batch.channel, batch.messages, batch.more, batch.lost, binary=binary
            )
        return frame

    @property
    def is_gone(self) -> bool:
        return self._closed or self._transport.is_closing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_heard()  # the peer has read something
        self._carry_on()
        while self._stalled and self._writable:
            name = next(iter(self._stalled))
            del self._stalled[name]
            channel = self._joined.get(name)
            member = channel.members.get(self._session.processor) if channel is not None else None
            if channel is not None and member is not None and member.subscriber is self:
                channel.go_on(member)

    def lost(self) -> None:
        self._hub.open.pop(self, None)
        joined, self._joined = self._joined, {}
        self._hub.channels.lost(self, self._session.processor, joined)
        super().lost()

    # Peers that do not read

    @property
    def _owes_much(self) -> bool:
        return bool(self._paused & Pause.ANSWERS) or self._large >= LARGE_REQUESTS_MAX

    def _carry_out(self) -> None:
        """Execute commands unless the peer leaves too much unread. Requests are small, answers are not."""
        self._sated = self._owes_much and not self.is_gone and self._goodbye is None
        if self._sated:
            self.pause(Pause.COMMANDS)
        else:
            super()._carry_out()

    def _carry_on(self) -> None:
        if self._sated:
            self._carry_out()

    # Silent peers

    def ponged(self) -> None:
        self._was_heard()

    def answer(self, data: bytes) -> None:
        self._was_heard()  # the peer has sent pings
        super().answer(data)

    def _was_heard(self) -> None:
        self._heard = self._shared.loop.time()
        self._pinged = False
        self._move_to_end()

    def tick(self, now: float) -> bool:
        """Ping a silent peer, and close it if it stays silent. Return False if it was heard recently."""
        settings = self._hub.settings
        if now < self._heard + settings.ping_s:
            return False
        if self._paused & ~Pause.ANSWERS and not self._sated:
            self._heard = now  # the server does not read, so it could not hear the peer
            self._move_to_end()
        elif now >= self._heard + 2 * settings.ping_s:
            self._hub.open.pop(self, None)
            self.close(
                f"nothing was heard for {now - self._heard:.0f} s", websocket.POLICY_VIOLATION
            )
        elif not self._pinged:
            self._pinged = True
            self._write_answer(websocket.frame(b"", websocket.PING))
        return True

    def _move_to_end(self) -> None:
        if self._hub.open.pop(self, self) is None:
            self._hub.open[self] = None
