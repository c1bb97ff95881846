"""One channel that a processor has joined, over all its connections: requests out, answers in.

    out ──take: join──▶ joining ──joined──▶ joined        refused for now: out again

Pending requests are kept as state and never as bytes, so a lost connection loses none of them. A `join` is
sent when everything before it is answered, so every answer belongs to one request.

`received` is the offset up to which messages, or a snapshot in their place, have come. A connection begins
with the messages that are not acknowledged; those that have come before are not reported again. With
`from_state`, the first connection begins with the state, and every later one behind `received`.
"""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, UnsetType

from headrace.errors import LocalProtocolError, QueueFullError
from headrace.wire import channel as wire
from headrace.wire.channel import Delivered, Fields, MissedMessages, SnapshotBody

QUEUE_MAX = 10_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024

ITEM_OVERHEAD_BYTES = 64
"""Approximate size of a message in its frame, without its content."""

RETRY_S = 1.0
"""Retry delay after a temporary refusal."""

REPLACED, ELSEWHERE, DESTROYED = "replaced", "left", "destroyed"
"""Reasons of a `left` that the client did not ask for."""

_ENDS = {
    REPLACED: "another connection of the same processor has joined channel",
    ELSEWHERE: "over HTTP or on another connection, the processor has left channel",
    DESTROYED: "an operator has destroyed channel",
}


class JoinedChannel(NamedTuple):
    """The channel is joined: messages can be sent and received."""

    channel: str


class Restored(NamedTuple):
    """A snapshot, or nothing, takes the place of all messages up to `offset`."""

    channel: str
    snapshot: SnapshotBody | None
    missed: MissedMessages | None
    offset: int
    """Offset to acknowledge when the application has taken over the state."""


class ReceivedMessages(NamedTuple):
    """New messages of other processors, in order; with `from_state`, also the processor's own."""

    channel: str
    messages: list[Delivered]


class LostMessages(NamedTuple):
    """The next messages cannot be delivered, because the server cannot read them any more."""

    channel: str
    missed: MissedMessages


class SendAccepted(NamedTuple):
    """A message is stored. The offset is None if the answer was lost."""

    channel: str
    ticket: int
    offset: int | None


class Answered(NamedTuple):
    """Answer to an upload (the offset of the state that is kept) or to a question (the last known state)."""

    channel: str
    ticket: int
    answer: int | SnapshotBody | None


class Rejected(NamedTuple):
    """A message, an upload or a question is refused for good."""

    channel: str
    ticket: int
    code: str
    text: str


class CursorMoved(NamedTuple):
    """The server has confirmed that everything up to `offset` is acknowledged."""

    channel: str
    offset: int


class LeftChannel(NamedTuple):
    """The membership has ended, as the application asked."""

    channel: str


class Ended(NamedTuple):
    """The channel has ended for this session: nothing more will come."""

    channel: str
    code: str
    """Reason of `left`, or code of the error answer."""
    text: str


ChannelEvent = (
    JoinedChannel
    | Restored
    | ReceivedMessages
    | LostMessages
    | SendAccepted
    | Answered
    | Rejected
    | CursorMoved
    | LeftChannel
    | Ended
)


class ClientChannel:
    def __init__(
        self,
        name: str,
        receive: str,
        poll_interval_s: float,
        sends: "Sends",
        *,
        from_state: bool,
        lease_s: float | None,
    ) -> None:
        self.name = name
        self._from_state = from_state
        self._lease_s = UNSET if lease_s is None else lease_s
        self.sends = sends
        self.acked = -1
        """Offset up to which the server has confirmed acknowledgements."""
        self.is_hungry = True
        """True while the application has room for messages that have to be asked for."""
        self.is_leaving = False
        """True if the application has asked to end the membership."""
        self._receive = receive
        self._poll_interval_s = poll_interval_s
        self._received = self._ack_wanted = self._ack_sent = -1
        self._questions: dict[str, deque[tuple[int, wire.Message]]] = {
            "snapshot": deque(),
            "upload": deque(),
        }
        """By type: the ticket of each request that waits for its own answer, and the request."""
        self._under_way: set[str] = set()
        """Types of requests, other than `send`, that are not answered: one of each is sent at a time."""
        self.disconnected()

    @property
    def tick_at(self) -> float:
        """Time of the next request that waits for nothing but its time."""
        if self.is_leaving:
            return inf
        if not self._is_joined:
            return inf if self._under_way or self.sends.is_under_way else self._join_at
        return self._fetch_at if self.is_hungry and "fetch" not in self._under_way else inf

    # Calls of the application

    def ack(self, offset: int) -> None:
        if offset > self._received:
            raise LocalProtocolError(
                f"channel {self.name!r} has not delivered anything up to {offset}"
            )
        self._ack_wanted = max(self._ack_wanted, offset)

    @property
    def is_acknowledged(self) -> bool:
        return self.acked >= self._ack_wanted

    def upload(self, ticket: int, offset: int, fields: Fields) -> None:
        request = wire.UploadRequest(self.name, offset, fields.payload, fields.data)
        self._questions["upload"].append((ticket, request))

    def snapshot(self, ticket: int) -> None:
        self._questions["snapshot"].append((ticket, wire.SnapshotRequest(self.name)))

    # Outgoing messages

    def opened(self) -> None:
        self._join_at = -inf

    def disconnected(self) -> None:
        self.sends.disconnected()
        self._is_joined = False
        self._join_at = self._fetch_at = inf
        self._under_way.clear()

    def take(self, bytes_max: int, now: float) -> list[wire.Message]:
        """Return the requests to send, with about `bytes_max` bytes of sends at most."""
        name, under_way = self.name, self._under_way
        if self.is_leaving:
            if "leave" in under_way or self._join_at == inf:
                return []
            under_way.add("leave")
            return [wire.Leave(name)]
        if not self._is_joined:
            if now < self.tick_at:
                return []
            under_way.add("join")
            return [self._join()]
        said: list[wire.Message] = []
        if "ack" not in under_way and not self.is_acknowledged:
            under_way.add("ack")
            self._ack_sent = self._ack_wanted
            said.append(wire.Ack(name, self._ack_sent))
        if now >= self.tick_at:
            under_way.add("fetch")
            self._fetch_at = inf
            said.append(wire.Fetch(name))
        for kind, questions in self._questions.items():
            if questions and kind not in under_way:
                under_way.add(kind)
                said.append(questions[0][1])
        while bytes_max > 0 and (taken := self.sends.take()) is not None:
            number, content = taken
            said.append(wire.Send(name, number, content.payload, content.data))
            bytes_max -= len(content) + ITEM_OVERHEAD_BYTES
        return said

    def _join(self) -> wire.Join:
        origin: Literal["state"] | int | UnsetType = UNSET
        if self._from_state:
            origin = self._received if self._received >= 0 else "state"
        return wire.Join(self.name, self._receive, origin, self._lease_s)  # type: ignore[arg-type]

    def join_to_part(self) -> wire.Join:
        """Return a `join` that stops the delivery of messages and keeps the membership as it is."""
        return wire.Join(self.name, "poll", lease_s=self._lease_s)

    # Incoming messages

    def hear(self, answer: Any, now: float, events: list[Any]) -> None:
        if self.is_leaving and not isinstance(answer, wire.LeftAnswer | wire.ErrorAnswer):
            if isinstance(answer, wire.SentAnswer):
                self._sent(answer, events)
            return
        if isinstance(answer, wire.MessagesAnswer):
            self._messages(answer, now, events)
        elif isinstance(answer, wire.SentAnswer):
            self._sent(answer, events)
            self._go_on(now)
        elif isinstance(answer, wire.Acked):
            self._acked(answer.offset, events)
        elif isinstance(answer, wire.Signal):
            self._fetch_at = now
        elif isinstance(answer, wire.JoinedAnswer):
            self._joined(answer, now, events)
        elif isinstance(answer, wire.LeftAnswer):
            self._left(answer, events)
        elif isinstance(answer, wire.ErrorAnswer):
            self._error(answer, now, events)
        elif isinstance(answer, wire.SnapshotAnswer):
            self._answered("snapshot", answer.snapshot, events)
        elif isinstance(answer, wire.UploadedAnswer):
            self._answered("upload", answer.offset, events)

    def _joined(self, answer: wire.JoinedAnswer, now: float, events: list[Any]) -> None:
        if "join" not in self._under_way:
            return
        self._is_joined = True
        self._under_way.clear()
        self._fetch_at = inf
        events.append(JoinedChannel(self.name))
        stored = self.sends.joined(answer.number)
        events += [SendAccepted(self.name, ticket, None) for ticket in stored]
        missed, cursor = answer.missed, answer.cursor
        if answer.end < self._received:
            # The log is a new one, or has lost its end: the server's positions replace ours.
            self._received = self._ack_wanted = self.acked = -1
            missed = missed or MissedMessages(None, "lost")
        is_state = self._from_state and answer.snapshot is not None
        if cursor > self._received or is_state:
            self._received = cursor
            if missed is not None or answer.snapshot is not None:
                events.append(Restored(self.name, answer.snapshot, missed, cursor))
        if self._receive == "poll":
            self._fetch_at = now

    def _messages(self, answer: wire.MessagesAnswer, now: float, events: list[Any]) -> None:
        is_fetched = "fetch" in self._under_way
        self._under_way.discard("fetch")
        if not self._is_joined:
            return  # the messages will come again
        fresh = [one for one in answer.messages if one.offset > self._received]
        if answer.lost and (fresh or not answer.messages):
            events.append(LostMessages(self.name, MissedMessages(answer.lost, "lost")))
        if fresh:
            self._received = fresh[-1].offset
            events.append(ReceivedMessages(self.name, fresh))
        if is_fetched:
            self.is_hungry = not fresh
        if self._receive == "poll":
            self._fetch_at = now if fresh else now + self._poll_interval_s

    def _sent(self, answer: wire.SentAnswer, events: list[Any]) -> None:
        ticket = self.sends.sent(answer.number)
        if ticket is not None:
            events.append(SendAccepted(self.name, ticket, answer.offset))

    def _acked(self, offset: int, events: list[Any]) -> None:
        if "ack" in self._under_way:
            self._under_way.remove("ack")
            # This counts even if the server's cursor is lower: it is, until a snapshot is acknowledged.
            self.acked = max(self.acked, self._ack_sent, offset)
            events.append(CursorMoved(self.name, self.acked))

    def _answered(self, kind: str, value: int | SnapshotBody | None, events: list[Any]) -> None:
        if kind in self._under_way:
            self._under_way.remove(kind)
            ticket, _ = self._questions[kind].popleft()
            events.append(Answered(self.name, ticket, value))

    def _left(self, answer: wire.LeftAnswer, events: list[Any]) -> None:
        is_done_elsewhere = self.is_leaving and answer.reason == ELSEWHERE
        if is_done_elsewhere or ("leave" in self._under_way and not answer.reason):
            events.append(LeftChannel(self.name))
        elif answer.reason:
            text = _ENDS.get(answer.reason, "the server has ended the membership in channel")
            events.append(Ended(self.name, answer.reason, f"{text} {self.name!r}"))

    def _error(self, error: wire.ErrorAnswer, now: float, events: list[Any]) -> None:
        retry_s = RETRY_S if error.retry else None
        if error.code == "not-joined":
            retry_s = 0.0
        if error.of == "send" and error.number is not None:
            ticket = self.sends.refused(error.number, retry_s)
            if ticket is not None:
                events.append(Rejected(self.name, ticket, error.code, error.text))
            self._go_on(now)
            return
        if error.of in self._questions and error.of in self._under_way:
            if retry_s is None:
                ticket, _ = self._questions[error.of].popleft()
                events.append(Rejected(self.name, ticket, error.code, error.text))
        elif retry_s is None or error.of == "leave":
            events.append(Ended(self.name, error.code, error.text))
        self._under_way.discard(error.of)
        if retry_s is not None:
            self._join_again(now + retry_s)

    def _go_on(self, now: float) -> None:
        retry_s = self.sends.go_on()
        if retry_s is not None:
            self._join_again(now + retry_s)

    def _join_again(self, at: float) -> None:
        """Recover from any error with a new `join`: `joined` tells the positions from which to continue."""
        if "join" not in self._under_way:
            self._is_joined = False
            self._join_at = at


@dataclass(slots=True)
class _Item:
    ticket: int
    fields: Fields
    number: int = 0
    """Number with which the message was last sent; 0 if it was never sent."""


class Sends:
    """Messages to a channel that are not settled: which to send next, and with which number.

    A message gets its number when it is sent. On each connection, a message is in one of three places:

        waiting ──take──▶ under way ──sent──▶ settled
                              └──refused──▶ returned, or settled for good

    A refusal makes the higher numbers void, and the server refuses them as well. So nothing more is sent
    until everything under way is answered: no answer is ever mistaken for that of another message with the
    same number. A new connection begins behind the last accepted number, which `joined` tells: messages with
    a number up to there are stored.
    """

    def __init__(self, queue_max: int, bytes_max: int) -> None:
        self._queue_max = queue_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._waiting: deque[_Item] = deque()
        self._under_way: dict[int, _Item] = {}
        self._returned: list[_Item] = []
        self._accepted = 0
        """Last number that the server is known to have accepted."""
        self._next: int | None = None
        """Number of the next message to send; None while it is unknown, and then nothing is sent."""
        self._refused: tuple[int, float | None] | None = None
        """Smallest number that was refused, the cause of the refusals of higher numbers, and its retry delay
        in seconds; None if it is refused for good."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way) + len(self._returned)

    @property
    def has_room(self) -> bool:
        return len(self) < self._queue_max and self._bytes < self._bytes_max

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    def add(self, ticket: int, fields: Fields) -> None:
        if not self.has_room:
            raise QueueFullError(
                f"the queue is full: {len(self)} messages ({self._bytes} bytes) wait for the server to "
                "accept them; send more when it has"
            )
        self._waiting.append(_Item(ticket, fields))
        self._bytes += len(fields)

    def take(self) -> tuple[int, Fields] | None:
        """Return the next message to send, with its number; None if nothing can be sent."""
        if self._next is None or not self._waiting:
            return None
        item = self._waiting.popleft()
        item.number = self._next
        self._under_way[item.number] = item
        self._next += 1
        return item.number, item.fields

    def sent(self, number: int) -> int | None:
        """Settle a message that the server has stored. Returns its ticket."""
        item = self._under_way.pop(number, None)
        if item is None:
            return None
        self._accepted = max(self._accepted, number)
        return self._settle(item)

    def refused(self, number: int, retry_s: float | None) -> int | None:
        """Note that the server refuses a message. Return its ticket if it is given up.

        Then its number is free for another message.
        """
        item = self._under_way.pop(number, None)
        if item is None:
            return None
        self._next = None
        if self._refused is None or number < self._refused[0]:
            self._refused = number, retry_s
        if retry_s is None:
            return self._settle(item)
        self._returned.append(item)
        return None

    def go_on(self) -> float | None:
        """Continue after a refusal when all is answered. Returns the delay of a necessary new `join`.

        Then only the answer to `join` can tell the next number.
        """
        if self._refused is None or self._under_way:
            return None
        number, retry_s = self._refused
        self._gather()
        if retry_s is None:
            self._next = number
        return retry_s

    def joined(self, number: int) -> list[int]:
        """Continue behind the last accepted number. Returns tickets of stored messages with lost answers."""
        assert not self._under_way
        stored: list[int] = []
        # A server that has forgotten this processor starts over, and knows none of its numbers.
        if number >= self._accepted:
            while self._waiting and 0 < self._waiting[0].number <= number:
                stored.append(self._settle(self._waiting.popleft()))
        self._accepted = number
        self._next = number + 1
        return stored

    def disconnected(self) -> None:
        self._gather()
        self._next = None

    def _gather(self) -> None:
        """Let all messages wait again, in their order."""
        self._returned += self._under_way.values()
        self._returned.sort(key=lambda item: item.number)
        self._waiting.extendleft(reversed(self._returned))
        self._returned.clear()
        self._under_way.clear()
        self._refused = None

    def _settle(self, item: _Item) -> int:
        self._bytes -= len(item.fields)
        return item.ticket
