"""One channel that a processor has joined, over all connections: what it says about it, and what it hears.

    out ──take: join──▶ joining ──joined──▶ joined        refused for now: out again

What is to be said is kept as state and never as bytes: a connection that is lost takes nothing with it. A
`join` goes out when everything before it is answered, so every answer belongs to one request.

`received` is how far messages have come, or a snapshot in their place. A connection begins with what is
not acknowledged; what of that came before is not told again. From a state on, the first connection begins
with that, and every other behind what has come.
"""

from collections import deque
from math import inf
from typing import Any, NamedTuple

from headrace.errors import LocalProtocolError
from headrace.session.client_sends import ITEM_OVERHEAD_BYTES, Refusal, Sends
from headrace.wire import channel as wire
from headrace.wire import channel_answers as answers
from headrace.wire.channel_answers import Delivered, Fields, Missed, State

RETRY_S = 1.0
"""How long to wait after a refusal that may be over later."""

REPLACED, ELSEWHERE, DESTROYED = "replaced", "left", "destroyed"
"""Why the server says `left` of itself."""

_ENDS = {
    REPLACED: "another connection of the same processor has joined channel",
    ELSEWHERE: "over HTTP or on another connection, the processor has left channel",
    DESTROYED: "an operator has destroyed channel",
}


class Joined(NamedTuple):
    """Sends go out, messages come."""

    channel: str


class Restored(NamedTuple):
    """In place of all messages up to here there is a snapshot, or nothing."""

    channel: str
    snapshot: State | None
    missed: Missed | None
    offset: int
    """To be acknowledged when the state is taken over."""


class Received(NamedTuple):
    """New messages of others, in order."""

    channel: str
    messages: list[Delivered]


class Lost(NamedTuple):
    """Messages that should come now cannot be read any more."""

    channel: str
    missed: Missed


class Accepted(NamedTuple):
    """A message is stored; where, is not known when the answer got lost."""

    channel: str
    ticket: int
    offset: int | None


class Answered(NamedTuple):
    """An upload, with the offset of what is kept; or the last known state."""

    channel: str
    ticket: int
    answer: int | State | None


class Rejected(NamedTuple):
    """A message, an upload or a question will never be carried out."""

    channel: str
    ticket: int
    code: str
    text: str


class Acknowledged(NamedTuple):
    """The server has noted that everything up to here is acknowledged."""

    channel: str
    offset: int


class Left(NamedTuple):
    """The processor is a member no more, as it wished."""

    channel: str


class Ended(NamedTuple):
    """Nothing will come of this channel any more."""

    channel: str
    code: str
    """The reason of `left`, or the code of the error that `join` was answered with."""
    text: str


ChannelEvent = (
    Joined
    | Restored
    | Received
    | Lost
    | Accepted
    | Answered
    | Rejected
    | Acknowledged
    | Left
    | Ended
)


class _Question(NamedTuple):
    """An upload, or without fields the question for the state. One of each is under way at a time."""

    ticket: int
    offset: int = 0
    fields: Fields | None = None


class ClientChannel:
    def __init__(
        self,
        name: str,
        receive: str,
        poll_interval_s: float,
        sends: Sends,
        *,
        from_state: bool = False,
        lease_s: float | None = None,
    ) -> None:
        self.name = name
        self._from_state = from_state
        self._lease_s = lease_s
        self.sends = sends
        self.acked = -1
        """Up to here the server has noted it."""
        self._receive = receive
        self._poll_interval_s = poll_interval_s
        self._received = -1
        self._ack_wanted = -1
        self._is_hungry = True
        """Whether messages that are asked for would be taken."""
        self._is_leaving = False
        self._uploads: deque[_Question] = deque()
        self._snapshots: deque[_Question] = deque()
        self.disconnected()

    @property
    def tick_at(self) -> float:
        """When there is something to say, for which nothing but the time was missing."""
        if self._is_leaving:
            return inf
        if not self._is_joined:
            return inf if self._is_joining or self._is_awaited else self._join_at
        can_fetch = self._is_hungry and not self._fetch_under_way
        return self._fetch_at if can_fetch else inf

    # What the application does

    def ack(self, offset: int) -> None:
        """Everything up to here is done with."""
        if offset > self._received:
            raise LocalProtocolError(f"nothing has come of {self.name!r} that ends at {offset}")
        self._ack_wanted = max(self._ack_wanted, offset)

    @property
    def is_acknowledged(self) -> bool:
        return self.acked >= self._ack_wanted

    def more(self) -> None:
        """There is room for messages: ask for some, where they have to be asked for."""
        self._is_hungry = True

    def upload(self, ticket: int, offset: int, fields: Fields) -> None:
        self._uploads.append(_Question(ticket, offset, fields))

    def snapshot(self, ticket: int) -> None:
        self._snapshots.append(_Question(ticket))

    def leave(self) -> None:
        self._is_leaving = True

    # What goes out

    def opened(self) -> None:
        self._join_at = -inf

    def disconnected(self) -> None:
        self.sends.disconnected()
        self._is_joining = self._is_joined = self._leave_under_way = False
        self._join_at = inf
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._ack_under_way: int | None = None
        self._fetch_under_way = self._upload_under_way = self._snapshot_under_way = False
        self._fetch_at = inf

    def take(self, bytes_max: int, now: float) -> list[wire.Message]:
        """What there is to say, with about so many bytes of sends."""
        name = self.name
        if self._is_leaving:
            if self._leave_under_way or not self._is_open:
                return []
            self._leave_under_way = True
            return [wire.Leave(name)]
        if not self._is_joined:
            if now < self.tick_at:
                return []
            self._is_joining = True
            return [self._join()]
        said: list[wire.Message] = []
        if self._ack_under_way is None and not self.is_acknowledged:
            self._ack_under_way = self._ack_wanted
            said.append(wire.Ack(name, self._ack_wanted))
        if now >= self.tick_at:
            self._fetch_under_way = True
            self._fetch_at = inf
            said.append(wire.Fetch(name))
        if self._snapshots and not self._snapshot_under_way:
            self._snapshot_under_way = True
            said.append(wire.Snapshot(name))
        if self._uploads and not self._upload_under_way:
            self._upload_under_way = True
            _, offset, fields = self._uploads[0]
            assert fields is not None
            said.append(wire.Upload(name, offset, fields.payload, fields.data))
        while bytes_max > 0 and (taken := self.sends.take()) is not None:
            number, content = taken
            said.append(wire.Send(name, number, content.payload, content.data))
            bytes_max -= len(content) + ITEM_OVERHEAD_BYTES
        return said

    def _join(self) -> wire.Join:
        join = wire.Join(self.name, self._receive)  # type: ignore[arg-type]
        if self._from_state:
            join.origin = self._received if self._received >= 0 else "state"
        if self._lease_s is not None:
            join.lease_s = self._lease_s
        return join

    def join_to_part(self) -> wire.Join:
        """What makes the server stop to send messages, and keep the membership as it is."""
        join = wire.Join(self.name, "poll")
        if self._lease_s is not None:
            join.lease_s = self._lease_s
        return join

    @property
    def _is_open(self) -> bool:
        return self._is_joined or self._join_at < inf

    @property
    def _is_awaited(self) -> bool:
        """Whether a request is not answered yet."""
        under_way = self._fetch_under_way or self._upload_under_way or self._snapshot_under_way
        return under_way or self._ack_under_way is not None or self.sends.is_under_way

    # What comes in

    def hear(self, answer: Any, now: float, events: list[Any]) -> None:
        if self._is_leaving and not isinstance(answer, answers.Left | answers.Error):
            if isinstance(answer, answers.Sent):
                self._sent(answer, events)
            return
        if isinstance(answer, answers.Messages):
            self._messages(answer, now, events)
        elif isinstance(answer, answers.Sent):
            self._sent(answer, events)
            self._go_on(now)
        elif isinstance(answer, answers.Acked):
            self._acked(answer.offset, events)
        elif isinstance(answer, answers.Signal):
            self._fetch_at = now
        elif isinstance(answer, answers.Joined):
            self._joined(answer, now, events)
        elif isinstance(answer, answers.Left):
            self._left(answer, events)
        elif isinstance(answer, answers.Error):
            self._error(answer, now, events)
        elif isinstance(answer, answers.Snapshot):
            if self._snapshot_under_way:
                self._snapshot_under_way = False
                ticket = self._snapshots.popleft().ticket
                events.append(Answered(self.name, ticket, answer.snapshot))
        elif isinstance(answer, answers.Uploaded) and self._upload_under_way:
            self._upload_under_way = False
            ticket = self._uploads.popleft().ticket
            events.append(Answered(self.name, ticket, answer.offset))

    def _joined(self, answer: answers.Joined, now: float, events: list[Any]) -> None:
        if not self._is_joining:
            return
        self._is_joining, self._is_joined = False, True
        self._forget_answers()
        events.append(Joined(self.name))
        stored = self.sends.joined(answer.number)
        events += [Accepted(self.name, ticket, None) for ticket in stored]
        missed, cursor = answer.missed, answer.cursor
        if answer.end < self._received:
            # Not the log that it was, or not all of it: what it says counts.
            self._received = self._ack_wanted = self.acked = -1
            missed = missed or Missed(None, "lost")
        is_state = self._from_state and answer.snapshot is not None
        if cursor > self._received or is_state:
            self._received = cursor
            if missed is not None or answer.snapshot is not None:
                events.append(Restored(self.name, answer.snapshot, missed, cursor))
        if self._receive == "poll":
            self._fetch_at = now

    def _messages(self, answer: answers.Messages, now: float, events: list[Any]) -> None:
        is_fetched, self._fetch_under_way = self._fetch_under_way, False
        if not self._is_joined:
            return  # they come again
        fresh = [one for one in answer.messages if one.offset > self._received]
        if answer.lost and (fresh or not answer.messages):
            events.append(Lost(self.name, Missed(answer.lost, "lost")))
        if fresh:
            self._received = fresh[-1].offset
            events.append(Received(self.name, fresh))
        if is_fetched:
            self._is_hungry = not fresh
        if self._receive == "poll":
            self._fetch_at = now if fresh else now + self._poll_interval_s

    def _sent(self, answer: answers.Sent, events: list[Any]) -> None:
        ticket = self.sends.sent(answer.number)
        if ticket is not None:
            events.append(Accepted(self.name, ticket, answer.offset))

    def _acked(self, offset: int, events: list[Any]) -> None:
        if self._ack_under_way is not None:
            # Also where the cursor is said to be behind: it is, until a snapshot is acknowledged.
            self.acked = max(self.acked, self._ack_under_way, offset)
            self._ack_under_way = None
            events.append(Acknowledged(self.name, self.acked))

    def _left(self, answer: answers.Left, events: list[Any]) -> None:
        is_done_elsewhere = self._is_leaving and answer.reason == ELSEWHERE
        if is_done_elsewhere or (self._leave_under_way and not answer.reason):
            events.append(Left(self.name))
        elif answer.reason:
            text = _ENDS.get(answer.reason, "the server has ended the membership in channel")
            events.append(Ended(self.name, answer.reason, f"{text} {self.name!r}"))

    def _error(self, error: answers.Error, now: float, events: list[Any]) -> None:
        is_for_good = not error.retry and error.code != "not-joined"
        if error.of == "send" and error.number is not None:
            self._send_refused(error, events)
            self._go_on(now)
            return
        if error.of == "upload" and self._upload_under_way:
            self._upload_under_way = False
            self._refused(self._uploads, is_for_good, error, events)
        elif error.of == "snapshot" and self._snapshot_under_way:
            self._snapshot_under_way = False
            self._refused(self._snapshots, is_for_good, error, events)
        elif is_for_good or error.of == "leave":
            events.append(Ended(self.name, error.code, error.text))
        elif error.of == "ack":
            self._ack_under_way = None
        elif error.of == "fetch":
            self._fetch_under_way = False
        self._is_joining = self._is_joining and error.of != "join"
        if not is_for_good:
            self._join_again(now if error.code == "not-joined" else now + RETRY_S)

    def _send_refused(self, error: answers.Error, events: list[Any]) -> None:
        refusal = Refusal.LATER if error.retry else Refusal.FOR_GOOD
        if error.code == "not-joined":
            refusal = Refusal.NOT_JOINED
        assert error.number is not None
        ticket = self.sends.refused(error.number, refusal)
        if ticket is not None:
            events.append(Rejected(self.name, ticket, error.code, error.text))

    def _refused(
        self,
        questions: deque[_Question],
        is_for_good: bool,
        error: answers.Error,
        events: list[Any],
    ) -> None:
        if is_for_good:
            ticket = questions.popleft().ticket
            events.append(Rejected(self.name, ticket, error.code, error.text))

    def _go_on(self, now: float) -> None:
        refusal = self.sends.go_on()
        if refusal is not None:
            self._join_again(now if refusal is Refusal.NOT_JOINED else now + RETRY_S)

    def _join_again(self, at: float) -> None:
        """Whatever is wrong, `joined` says from where on it is right again."""
        if not self._is_joining:
            self._is_joined = False
            self._join_at = at
