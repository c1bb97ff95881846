"""Channels over WebSocket: the connections of one server, and the requests of their peers.

Elsewhere: messages from channels to a connection (`subscriber.py`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET

from headrace.broker.channel.channel import Channel
from headrace.broker.channel.errors import ChannelError
from headrace.broker.channel.hub import Channels, check_channel_name
from headrace.broker.channel.joining import Joined
from headrace.broker.channel.member import Batch, Member, Receive
from headrace.broker.channel.notes import StoredSnapshot
from headrace.broker.channel.sending import Accepted
from headrace.broker.channel.uploads import upload
from headrace.config.protocols import ChannelSettings
from headrace.model import CHANNEL_PREFIX
from headrace.server.channel.subscriber import ChannelSubscriber
from headrace.server.connection import Connections, Pause
from headrace.server.credentials import Credentials, Grant
from headrace.session.channel.server import AuthenticateProcessor, Request
from headrace.wire import channel as wire

FETCH_MESSAGES_MAX = 500

_LARGE = wire.Join | wire.Fetch | wire.SnapshotRequest


class ChannelConnections:
    """State that the channel connections of one server share."""

    def __init__(
        self,
        shared: Connections,
        channels: Channels,
        settings: ChannelSettings,
        credentials: Credentials,
    ) -> None:
        self.shared = shared
        self.channels = channels
        self.settings = settings
        self.credentials = credentials
        self.open: dict[ChannelSubscriber, None] = {}
        """Connections in the order in which they were last heard."""

    def __call__(self) -> "ChannelConnection":
        return ChannelConnection(self)

    def tick(self, now: float) -> None:
        for connection in list(self.open):
            if not connection.tick(now):
                break


class ChannelConnection(ChannelSubscriber):
    __slots__ = ("_grant", "_joining")

    def __init__(self, hub: ChannelConnections) -> None:
        self._grant: Grant | None = None
        self._joining: dict[str, list[tuple[Request, int]]] = {}
        """Channels whose `join` is not answered, each with the requests that came after it."""
        super().__init__(hub)
        hub.open[self] = None

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
            return
        message = command.message
        self._session.unanswered += 1
        self._under_way(size)
        if self._joining and self._waits(command, size):
            return
        try:
            # Requests that come with every message take the shortest path.
            if type(message) is wire.Ack:
                channel, member = self._member(message.channel)
                channel.ack(
                    member,
                    message.offset,
                    partial(self._acked, message, size),
                    partial(self._refuse_request, message, size),
                )
            elif type(message) is wire.Send:
                channel, member = self._member(message.channel)
                assert command.content is not None
                channel.send(
                    member,
                    message.number,
                    command.content,
                    partial(self._accepted, message, size),
                )
            else:
                self._carry(command, size)
        except ChannelError as error:
            self._refuse_request(message, size, error)

    def _waits(self, request: Request, size: int) -> bool:
        """Return True if the channel is being joined: the request is then executed after the `join`."""
        assert not isinstance(request.message, wire.Hello | wire.Ping)
        waiting = self._joining.get(request.message.channel)
        if waiting is None:
            return False
        waiting.append((request, size))
        return True

    def _joining_over(self, name: str) -> None:
        waiting = self._joining.pop(name, ())
        if not waiting:
            return
        for _, size in waiting:
            self._session.unanswered -= 1
            self._unacknowledged_bytes -= size
        is_carrying = self._commands is not None
        if self._commands is None:
            self._commands = deque()
        # Later requests for the same channel must come after these.
        self._commands.extendleft(reversed(waiting))
        if not is_carrying:
            self._carry_out()

    def _authenticate(self, command: AuthenticateProcessor) -> None:
        address = self.peer.rpartition(":")[0]
        self._grant = self._hub.credentials.grant(command.processor, command.token, address)
        if self._grant is None:
            self.handle([self._session.turn_away()], 0)
        else:
            self.handle(self._session.let_in(), 0)

    def _done(self, size: int) -> None:
        self._session.unanswered -= 1
        self._unacknowledged_bytes -= size
        # One write answers everything that one commit made durable.
        self._answer_soon()
        if self._sated:
            self._shared.loop.call_soon(self._carry_on)
        if self._paused & Pause.PUBLISHES:
            self.read_again()

    def _large_done(self, size: int) -> None:
        self._large -= 1
        self._done(size)

    def _refuse_request(self, message: wire.Message, size: int, error: ChannelError) -> None:
        self._session.refuse_request(error.code, error.retry, str(error), message)
        self._done(size)

    # Requests

    def _carry(self, request: Request, size: int) -> None:
        """Execute any request except `send` and `ack`."""
        message, session = request.message, self._session
        assert not isinstance(message, wire.Hello | wire.Ping | wire.Send | wire.Ack)
        name = message.channel
        self._check(name)
        is_large = isinstance(message, _LARGE)
        self._large += is_large
        done = _Once(partial(self._large_done if is_large else self._done, size))

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
                self._hub.channels.load_snapshot(
                    name,
                    lambda found: say(
                        {"type": "snapshot", "channel": name, "snapshot": self._snapshot(found)}
                    ),
                    lambda reason: refuse(ChannelError("unavailable", reason)),
                )
            elif isinstance(message, wire.Fetch):
                self._fetch(*self._member(name), message, refuse, done)
            else:
                assert request.content is not None
                upload(
                    self._member(name)[0],
                    message.offset,
                    request.content,
                    lambda kept: say({"type": "uploaded", "channel": name, "offset": kept}),
                    refuse,
                )
        except ChannelError as error:
            refuse(error)
        if is_large:
            self._answer()  # write now, to know how much the peer leaves unread

    def _check(self, name: str) -> None:
        if name in self._joined:
            return
        check_channel_name(name)
        assert self._grant is not None
        if not self._grant.covers(CHANNEL_PREFIX + name):
            raise ChannelError("forbidden", f"the token is not for channel {name!r}")

    def _leave(self, message: wire.Leave, say: Callable[[dict[str, Any]], None]) -> None:
        name = message.channel
        self._joined.pop(name, None)
        self._stalled.pop(name, None)
        channel = self._hub.channels.get(name)
        left = {"type": "left", "channel": name}
        channel.leave(
            self._session.processor, lambda: say(left), self, forget=message.forget is True
        )
        self._hub.channels.rest(channel)

    def _member(self, name: str) -> tuple[Channel, Member]:
        channel = self._joined.get(name)
        member = channel.members.get(self._session.processor) if channel is not None else None
        # The processor may not have joined yet, or may have left over HTTP.
        if channel is None or member is None or member.subscriber is not self:
            self._check(name)
            raise ChannelError("not-joined", f"join channel {name!r} first, on this connection")
        return channel, member

    def _join(
        self,
        message: wire.Join,
        say: Callable[[dict[str, Any]], None],
        refuse: Callable[[ChannelError], None],
    ) -> None:
        name = message.channel
        limit = self._shared.limits.topics_attached_max
        is_new = name not in self._joined
        if is_new and len(self._joined) >= limit:
            raise ChannelError("too-many", f"a connection may join {limit} channels")
        channel = self._hub.channels.get(name)
        self._joined[channel.name] = channel  # the channel's own string, to save memory
        self._joining[channel.name] = []

        def refused(error: ChannelError) -> None:
            if is_new:
                self._joined.pop(name, None)
                self._hub.channels.rest(channel)
            refuse(error)
            self._joining_over(name)

        def answered(joined: Joined) -> None:
            say(self._told(name, joined))
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

    def _told(self, name: str, joined: Joined) -> dict[str, Any]:
        told: dict[str, Any] = {"type": "joined", "channel": name}
        told |= {"epoch": joined.epoch, "start": joined.start, "end": joined.end}
        told |= {"cursor": joined.cursor, "number": joined.number}
        if joined.lease_ms:
            told["lease_s"] = joined.lease_ms / 1000
        if joined.missed is not None:
            told["missed"] = joined.missed._asdict()
        if joined.snapshot is not None:
            told["snapshot"] = self._snapshot(joined.snapshot)
        return told

    def _snapshot(self, snapshot: StoredSnapshot | None) -> dict[str, Any] | None:
        if snapshot is None:
            return None
        content = wire.content(snapshot.content, binary=self._session.binary)
        return {"offset": snapshot.offset, "epoch": snapshot.epoch} | content

    def _accepted(self, message: wire.Send, size: int, accepted: Accepted) -> None:
        session = self._session
        offset, is_duplicate = accepted
        if is_duplicate or session.binary or offset is None:
            told: dict[str, Any] = {"type": "sent", "channel": message.channel}
            told["number"] = message.number
            if offset is not None:
                told["offset"] = offset
            if is_duplicate:
                told["duplicate"] = True
            session.say(told)
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

    def _fetch(
        self,
        channel: Channel,
        member: Member,
        message: wire.Fetch,
        refuse: Callable[[ChannelError], None],
        done: Callable[[], None],
    ) -> None:
        limit = min(message.messages_max or FETCH_MESSAGES_MAX, FETCH_MESSAGES_MAX)

        def answer(batch: Batch) -> None:
            self._session.say_encoded(self._encoded(batch))
            done()

        if message.ack is None:
            channel.fetch(member, limit, answer)
        else:
            channel.ack(member, message.ack, lambda _: channel.fetch(member, limit, answer), refuse)


class _Once:
    """A function that has an effect only the first time: a request is answered once, whatever happens."""

    __slots__ = ("_do",)

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

    def __call__(self) -> None:
        if self._do is not None:
            do, self._do = self._do, None
            do()
