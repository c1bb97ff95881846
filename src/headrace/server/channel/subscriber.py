"""A channel connection as its channels see it: what they say to the peer, how much, and whether it is there.

What the peer asks for is in `channels.py`.
"""

from typing import TYPE_CHECKING

from headrace.broker.channel import Channel
from headrace.broker.channel_member import Batch
from headrace.server.connection import Pause
from headrace.server.websocket import WebSocketConnection
from headrace.session.channel_server import ChannelServerSession
from headrace.wire import channel as wire
from headrace.wire import websocket

if TYPE_CHECKING:
    from headrace.server.channels import ChannelConnections

LARGE_REQUESTS_MAX = 32
"""Requests of one connection under way that a few bytes ask for, and whose answers may have a megabyte."""

_PUSHED_BYTES_MAX = 1 << 16
"""Of messages that are pushed before the transport is asked whether there is room for more."""


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
        """Channels that have something for this processor, for which there was no room."""
        self._large = 0
        """How many requests with large answers are under way."""
        self._sated = False
        """Whether requests wait until answers have gone out."""
        self._pushed_bytes = 0
        """Of messages, since the transport was last asked for room."""
        super().__init__(hub.shared, ChannelServerSession(hub.settings.ping_s))

    # What channels ask and say

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
        # Behind `joined` and whatever else was said before, and together with what comes of one commit.
        frame = self._encoded(batch)
        self._session.say_encoded(frame)
        self._pushed_bytes += len(frame)
        if self._pushed_bytes < _PUSHED_BYTES_MAX:
            self._answer_soon()
        else:
            self._pushed_bytes = 0
            self._answer()  # so that it is known whether there is room for more
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
        self._was_heard()  # it has read something
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
        """Unless the peer lets so much lie unread: what waits here is small, its answers are not."""
        self._sated = self._owes_much and not self.is_gone and self._goodbye is None
        if self._sated:
            self.pause(Pause.COMMANDS)
        else:
            super()._carry_out()

    def _carry_on(self) -> None:
        if self._sated:
            self._carry_out()

    # Silence

    def ponged(self) -> None:
        self._was_heard()

    def answer(self, data: bytes) -> None:
        self._was_heard()  # it has sent pings of its own
        super().answer(data)

    def _was_heard(self) -> None:
        self._heard = self._shared.loop.time()
        self._pinged = False
        self._move_to_end()

    def tick(self, now: float) -> bool:
        """Ask a silent peer whether it is there, give up one that is not; False when it was heard lately."""
        settings = self._hub.settings
        if now < self._heard + settings.ping_s:
            return False
        if self._paused & ~Pause.ANSWERS and not self._sated:
            self._heard = now  # we do not read, so we cannot have heard it
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
