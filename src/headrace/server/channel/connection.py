"""Channels over WebSocket: the requests of peers, messages to peers, and peers that read or say nothing."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET

from headrace.access.operations import Member as MemberName
from headrace.access.operations import Operation
from headrace.broker.channel.channel import Accepted, Channel, Done, Joined, Refuse
from headrace.broker.channel.hub import Channels, check_channel_name
from headrace.broker.channel.member import Batch, Member, Receive
from headrace.broker.channel.notes import StoredSnapshot
from headrace.config.protocols import ChannelSettings
from headrace.errors import ChannelError
from headrace.model import CHANNEL_PREFIX
from headrace.server.access import Refused, token_in
from headrace.server.peers.connection import COMMAND_OVERHEAD_BYTES
from headrace.server.peers.connections import Connections
from headrace.server.peers.pause import Pause
from headrace.server.peers.rights import PUBLISHABLE_MAX
from headrace.server.peers.throttle import Cost
from headrace.server.websocket import PingedConnection, PingedConnections
from headrace.session.channel.server import AuthenticateProcessor, ChannelServerSession, Request
from headrace.session.server import Close
from headrace.wire import channel as wire
from headrace.wire import websocket

FETCH_MESSAGES_MAX = 500

LARGE_REQUESTS_MAX = 32
"""Pending requests of one connection that have a few bytes, but whose answers may have a megabyte."""

_MEMORY_PER_BYTE = 4
_PUSHED_BYTES_MAX = 1 << 16
"""Bytes of messages that are pushed before the transport is asked if it has room for more."""

_LARGE = wire.Join | wire.Fetch | wire.SnapshotRequest
Say = Callable[[dict[str, Any]], None]


class ChannelConnections(PingedConnections):
    """State that the channel connections of one server share."""

    def __init__(
        self,
        shared: Connections,
        channels: Channels,
        settings: ChannelSettings,
    ) -> None:
        super().__init__(shared, ping_s=settings.ping_s, timeout_s=settings.ping_s)
        self.channels = channels


class ChannelConnection(PingedConnection):
    """A connection of channel clients. Implements `MemberConnection` of the broker."""

    __slots__ = (
        "_joinable",
        "_joined",
        "_joining",
        "_large",
        "_pushed_bytes",
        "_sated",
        "_stalled",
    )
    protocol = "channel"
    message_bytes_max = wire.MESSAGE_BYTES_MAX
    takes_text = True
    hub: ChannelConnections
    _session: ChannelServerSession

    def __init__(self, hub: ChannelConnections) -> None:
        self._joinable: dict[str, bool] = {}
        """Channels that the processor may join, or may not."""
        self._joined: dict[str, Channel] = {}
        self._joining: dict[str, list[tuple[Request, int]]] = {}
        """Channels whose `join` is not answered, each with the requests that came after it."""
        self._stalled: dict[str, None] = {}
        """Channels with messages for this processor for which there was no room."""
        self._large = 0
        """Number of pending requests with large answers."""
        self._sated = False
        """True while requests wait until answers have been sent."""
        self._pushed_bytes = 0
        """Bytes of messages that were pushed since the transport was last asked for room."""
        super().__init__(hub, ChannelServerSession(hub.ping_s))

    @property
    def names(self) -> tuple[str, ...]:
        return *super().names, self._session.processor

    def messages_received(self, messages: Sequence[bytes | str]) -> None:
        self._was_heard()
        commands = self._session.receive_messages(messages)
        if commands:
            self.handle(commands, sum(map(len, messages)) // len(commands))
        else:
            self._answer()

    def _do(self, command: object, size: int) -> None:
        if isinstance(command, AuthenticateProcessor):
            self._authenticate(command)
            return
        assert isinstance(command, Request)
        if self._owes_much:
            assert self._commands is not None
            self._commands.appendleft((command, size))
            if self._held_bytes:
                self._hold(self._weight(command, size))
            return
        message = command.message
        self._session.unanswered += 1
        self._under_way(size)
        if self._joining:
            assert not isinstance(message, wire.Hello | wire.Ping)
            waiting = self._joining.get(message.channel)
            if waiting is not None:
                waiting.append((command, size))
                return
        try:
            # Requests that come with every message take the shortest path.
            if type(message) is wire.Ack:
                channel, member = self._member(message.channel)
                acked = partial(self._acked, message, size)
                refuse = partial(self._refuse_request, message, size)
                channel.ack(member, message.offset, acked, refuse)
            elif type(message) is wire.Send:
                channel, member = self._member(message.channel)
                assert command.content is not None
                self._check_creation(message.channel)
                accepted = partial(self._accepted, message, size)
                channel.send(member, message.number, command.content, accepted)
            else:
                self._carry(command, size)
        except ChannelError as error:
            self._refuse_request(message, size, error)

    def _cost(self, command: object, size: int) -> Cost | None:
        if not isinstance(command, Request) or type(command.message) is not wire.Send:
            return None
        name = command.message.channel
        if name in self._joining or self._owes_much:
            return None  # it is not carried out yet
        assert command.content is not None
        return Cost(1, len(command.content.data), (CHANNEL_PREFIX + name,))

    def _weight(self, command: object, size: int) -> int:
        return _MEMORY_PER_BYTE * size + COMMAND_OVERHEAD_BYTES

    @property
    def _subscription_count(self) -> int:
        return len(self._joined)

    def _joining_over(self, name: str) -> None:
        waiting = self._joining.pop(name, ())
        if not waiting:
            return
        for _, size in waiting:
            self._session.unanswered -= 1
            self._unacknowledged_bytes -= size
        if self._commands is None:
            self._commands = deque(waiting)
            self._carry_out()
        else:
            # Later requests for the same channel must come after these.
            self._commands.extendleft(reversed(waiting))
            if self._held_bytes:
                self._hold(sum(self._weight(*one) for one in waiting))

    def _authenticate(self, command: AuthenticateProcessor) -> None:
        access, token = self._shared.access, token_in(command.token)
        if token is not None:
            now_s = self._shared.loop.time()
            found = access.identify(token, self.address, now_s, self.protocol)
            if isinstance(found, Refused):
                self.pause(Pause.CHECKING)
                self._shared.loop.call_later(found.delay_s, self._turn_away)
                return
            self.identified(found)
        if access.may_join_as(self.rights.principal, command.processor):
            self.handle(self._session.let_in(), 0)
        else:
            self._turn_away()

    def _turn_away(self) -> None:
        if not self.is_gone:
            self._resume(Pause.CHECKING)
            self.handle([self._session.turn_away()], 0)

    def _turned_away(self, reason: str) -> Close:
        return self._session.turn_away()

    def _done(self, size: int) -> None:
        self._session.unanswered -= 1
        self._unacknowledged_bytes -= size
        # One write answers everything that one commit made durable.
        self._answer_soon()
        if self._sated:
            self._shared.loop.call_soon(self._carry_on)
        if self._paused & Pause.PUBLISHES:
            self.read_again()

    def _refuse_request(self, message: wire.Message, size: int, error: ChannelError) -> None:
        self._session.refuse_request(error.code, error.retry, str(error), message)
        self._done(size)

    # Requests

    def _carry(self, request: Request, size: int) -> None:
        """Execute any request except `send` and `ack`."""
        message, session = request.message, self._session
        assert not isinstance(message, wire.Hello | wire.Ping | wire.Send | wire.Ack)
        name = message.channel
        self._check(name, reads_state=isinstance(message, wire.SnapshotRequest))
        is_large = isinstance(message, _LARGE)
        self._large += is_large
        is_done = False

        def done() -> None:
            nonlocal is_done
            if not is_done:  # a request is answered once, whatever happens
                is_done = True
                self._large -= is_large
                self._done(size)

        def say(fields: dict[str, Any]) -> None:
            session.say(fields)
            done()

        def refuse(error: ChannelError) -> None:
            session.refuse_request(error.code, error.retry, str(error), message)
            done()

        try:
            if isinstance(message, wire.Join):
                self._join(message, say, refuse)
            elif isinstance(message, wire.Leave):
                self._leave(message, say)
            elif isinstance(message, wire.SnapshotRequest):
                self._load_snapshot(name, say, refuse)
            elif isinstance(message, wire.Fetch):
                self._fetch(message, refuse, done)
            else:
                assert request.content is not None
                self._member(name)[0].upload(
                    message.offset,
                    request.content,
                    lambda kept: say({"type": "uploaded", "channel": name, "offset": kept}),
                    refuse,
                )
        except ChannelError as error:
            refuse(error)
        if is_large:
            self._answer()  # write now, to know how much the peer leaves unread

    def _load_snapshot(self, name: str, say: Say, refuse: Refuse) -> None:
        def found(snapshot: StoredSnapshot | None) -> None:
            binary = self._session.binary
            fields = None if snapshot is None else snapshot_fields(snapshot, binary=binary)
            say({"type": "snapshot", "channel": name, "snapshot": fields})

        self.hub.channels.load_snapshot(
            name, found, lambda reason: refuse(ChannelError("unavailable", reason))
        )

    def _check(self, name: str, *, reads_state: bool = False) -> None:
        if name in self._joined:
            return
        check_channel_name(name)
        may_join = self._joinable.get(name)
        if may_join is None:
            if len(self._joinable) >= PUBLISHABLE_MAX:
                self._joinable.clear()
            member = MemberName(name, self._session.processor)
            may_join = self._joinable[name] = self.rights.is_granted(Operation.JOIN, member)
        if not may_join and not (
            reads_state and self.rights.is_granted(Operation.SUBSCRIBE, CHANNEL_PREFIX + name)
        ):
            raise ChannelError("forbidden", f"the credentials are not for channel {name!r}")

    def _leave(self, message: wire.Leave, say: Say) -> None:
        name, processor = message.channel, self._session.processor
        self._joined.pop(name, None)
        self._count_subscriptions()
        self._stalled.pop(name, None)
        channel = self.hub.channels.get(name)
        left = {"type": "left", "channel": name}
        channel.leave(processor, lambda: say(left), self, forget=message.forget is True)
        self.hub.channels.rest(channel)

    def _member(self, name: str) -> tuple[Channel, Member]:
        channel = self._joined.get(name)
        member = channel.members.get(self._session.processor) if channel is not None else None
        # The processor may not have joined yet, or may have left over HTTP.
        if channel is None or member is None or member.subscriber is not self:
            self._check(name)
            raise ChannelError("not-joined", f"join channel {name!r} first, on this connection")
        return channel, member

    def _check_creation(self, name: str) -> None:
        """Raise ChannelError if the channel has no log, and no further one may be created."""
        if why := self._shared.why_not_created((CHANNEL_PREFIX + name,)):
            raise ChannelError("too-many", why)

    def _join(self, message: wire.Join, say: Say, refuse: Refuse) -> None:
        name = message.channel
        limit = self._shared.limits.topics_attached_max
        is_new = name not in self._joined
        if is_new and len(self._joined) >= limit:
            self._shared.metrics.count_limit("topics_attached_max")
            raise ChannelError("too-many", f"a connection may join {limit} channels")
        if is_new and (why := self._why_not_subscribed()):
            raise ChannelError("too-many", why)
        self._check_creation(name)
        channel = self.hub.channels.get(name)
        self._joined[channel.name] = channel  # the channel's own string, to save memory
        self._count_subscriptions()
        self._joining[channel.name] = []

        def refused(error: ChannelError) -> None:
            if is_new:
                self._joined.pop(name, None)
                self._count_subscriptions()
                self.hub.channels.rest(channel)
            refuse(error)
            self._joining_over(name)

        def answered(joined: Joined) -> None:
            say({"type": "joined"} | joined_fields(name, joined, binary=self._session.binary))
            self._joining_over(name)

        channel.join(
            self._session.processor,
            self,
            Receive(message.receive),
            answered,
            refused,
            origin=None if message.origin is UNSET else message.origin,
            lease_ms=int((message.lease_s or 0) * 1000),
        )

    def _accepted(self, message: wire.Send, size: int, accepted: Accepted) -> None:
        session = self._session
        offset, is_duplicate = accepted
        if is_duplicate or session.binary or offset is None:
            session.say({"type": "sent"} | sent_fields(message.channel, message.number, accepted))
        else:
            session.say_encoded(wire.encode_sent(message.channel, message.number, offset))
        self._done(size)

    def _acked(self, message: wire.Ack, size: int, offset: int) -> None:
        session = self._session
        if session.binary:
            session.say({"type": "acked", "channel": message.channel, "offset": offset})
        else:
            session.say_encoded(wire.encode_acked(message.channel, offset))
        self._done(size)

    def _fetch(self, message: wire.Fetch, refuse: Refuse, done: Done) -> None:
        channel, member = self._member(message.channel)
        limit = min(message.messages_max or FETCH_MESSAGES_MAX, FETCH_MESSAGES_MAX)

        def answer(batch: Batch) -> None:
            self._session.say_encoded(self._encoded(batch))
            done()

        if message.ack is None:
            channel.fetch(member, limit, answer)
        else:
            channel.ack(member, message.ack, lambda _: channel.fetch(member, limit, answer), refuse)

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
        if not self._output.is_writable:
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
        self._count_subscriptions()
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

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_heard()  # the peer has read something
        self._carry_on()
        while self._stalled and self._output.is_writable:
            name = next(iter(self._stalled))
            del self._stalled[name]
            channel = self._joined.get(name)
            member = channel.members.get(self._session.processor) if channel is not None else None
            if channel is not None and member is not None and member.subscriber is self:
                channel.go_on(member)

    def lost(self) -> None:
        joined, self._joined = self._joined, {}
        self.hub.channels.lost(self, self._session.processor, joined)
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

    @property
    def _is_unread(self) -> bool:
        return super()._is_unread and not self._sated

    def _ping(self) -> None:
        self._write_answer(websocket.frame(b"", websocket.PING))


def joined_fields(name: str, joined: Joined, *, binary: bool) -> dict[str, Any]:
    """Return the fields of the answer to a `join`."""
    fields: dict[str, Any] = {"channel": name, "epoch": joined.epoch}
    fields |= {"start": joined.start, "end": joined.end}
    fields |= {"cursor": joined.cursor, "number": joined.number}
    if joined.lease_ms:
        fields["lease_s"] = joined.lease_ms / 1000
    if joined.missed is not None:
        fields["missed"] = joined.missed._asdict()
    if joined.snapshot is not None:
        fields["snapshot"] = snapshot_fields(joined.snapshot, binary=binary)
    return fields


def sent_fields(name: str, number: int, accepted: Accepted) -> dict[str, Any]:
    """Return the fields of the answer to a `send`."""
    fields: dict[str, Any] = {"channel": name, "number": number}
    if accepted.offset is not None:
        fields["offset"] = accepted.offset
    if accepted.is_duplicate:
        fields["duplicate"] = True
    return fields


def snapshot_fields(snapshot: StoredSnapshot, *, binary: bool) -> dict[str, Any]:
    content = wire.content(snapshot.content, binary=binary)
    return {"offset": snapshot.offset, "epoch": snapshot.epoch} | content
