"""A member of a channel: its cursor, the number of its last message, and the messages transmitted to it.

The **cursor** is the position that is noted on disk. A member that is present may have received a snapshot in
place of the messages that it missed. Then the member is ahead of its cursor, which stays where it is until
the member acknowledges something. A member that is disconnected before that gets the same answer again.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, NamedTuple, Protocol

from headrace.model import Position

WINDOW_MESSAGES_MAX = 1000
WINDOW_BYTES_MAX = 1 << 20
"""Limits of the unacknowledged messages that are pushed to a member; the last batch may exceed the bytes."""


class Standing(IntEnum):
    LEFT = 0
    """No longer a member: only the number of its last message is remembered."""
    NEW = 1
    """Has never acknowledged anything. It gets a snapshot in place of the messages before its join."""
    MEMBER = 2


Origin = Literal["state"] | int | None
"""Start of a connection: the present state, an offset that the client has messages up to, or the cursor."""


class Receive(StrEnum):
    PUSH = "push"
    SIGNAL = "signal"
    POLL = "poll"


class Transmitted(NamedTuple):
    """A message that was sent to a member, and the cursor after the member has acknowledged it."""

    offset: int
    """Offset just past the message."""
    step_offset: int
    """Offset just past the member's own messages that directly follow."""
    step_ordinal: int


class OutgoingMessage(NamedTuple):
    """A message on its way to members."""

    offset: int
    ms: int
    payload: bytes
    """The message in its envelope."""


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Messages that are transmitted together to one or more members."""

    channel: str
    messages: Sequence[OutgoingMessage]
    more: bool
    """True if more messages were pending when the batch was made."""
    lost: int = 0
    """Number of messages that belong to the batch but can no longer be read."""
    encoded: dict[object, bytes] = field(default_factory=dict)
    """Encoded forms of the batch, each made once for all members that get the same form."""


class MemberConnection(Protocol):
    """The connection that a member has joined on."""

    @property
    def is_gone(self) -> bool: ...

    @property
    def instance(self) -> str:
        """Id of the client that made the connection; empty if the client does not send one."""

    @property
    def attempt(self) -> int:
        """Number of this connection among the connections of the same client."""

    def messages(self, channel: str, batch: Batch) -> bool:
        """Take a batch. Return False without room; then call `Channel.go_on` when there is room again."""

    def signal(self, channel: str) -> None: ...

    def ended(self, channel: str, reason: str) -> None:
        """Called when the processor has joined ("replaced") or left ("left") on another connection.

        Also called when the channel was destroyed by hand ("destroyed").
        """


@dataclass(slots=True, eq=False, repr=False)
class Member:
    name: str
    offset: int = 0
    ordinal: int = 0
    """Offset and ordinal of the position up to which nothing is pending for the member."""
    number: int = 0
    """Number of the last message that was accepted from the member."""
    seen_ms: int = 0
    """Time when the member was last seen, as far as it was noted."""
    standing: Standing = Standing.LEFT
    lease_ms: int = 0
    """Lease that the member chose when it joined; 0: the channel's lease."""
    gets_own: bool = False
    """True while the connection gets all messages after its origin, the member's own included."""
    acked: tuple[int, int] | None = None
    """The cursor, if the connection is at another position: it got a state, or asked for an offset."""
    subscriber: MemberConnection | None = None
    receive: Receive = Receive.POLL
    is_polling: bool = False
    """True while the member is present because of its requests."""
    is_signalled: bool = False
    next_offset: int = -1
    next_ordinal: int = -1
    """Position where the member's next message is looked for; -1 until the join is answered."""
    sent: list[Transmitted] | None = None
    """Messages that the member has not acknowledged, oldest first."""
    offsets: dict[int, int] | None = None
    """End offsets of the member's last kept messages by number, looked up when it sends one again."""
    sent_again: list[tuple[int | None, Callable[[int | None], None]]] | None = None
    """Answers that wait for the lookup of messages that were sent again, in their order.

    Each has the message's number, and a callback that gets its end offset. The number is None if the callback
    only waits for its turn.
    """

    @property
    def is_present(self) -> bool:
        return self.subscriber is not None or self.is_polling

    @property
    def is_joining(self) -> bool:
        """True if the member is present on a connection and its join is not durable yet."""
        return self.next_offset < 0 and self.subscriber is not None

    @property
    def is_member(self) -> bool:
        return self.standing is not Standing.LEFT

    @property
    def confirmed(self) -> tuple[int, int]:
        """Offset and ordinal of the cursor."""
        return self.acked or (self.offset, self.ordinal)

    @property
    def room(self) -> int:
        """Number of messages that may be pushed to the member now."""
        if not self.sent:
            return WINDOW_MESSAGES_MAX
        if self.next_offset - self.offset >= WINDOW_BYTES_MAX:
            return 0
        return WINDOW_MESSAGES_MAX - len(self.sent)

    def begin_at(self, at: Position) -> None:
        """Let the connection get all messages after a position. The cursor stays where it is."""
        self.gets_own = True
        if self.acked is None and self.offset != at.offset:
            self.acked = (self.offset, self.ordinal)
        self.offset, self.ordinal = at.offset, at.ordinal

    def enter(self, offset: int, ordinal: int, *, is_told: bool = False) -> None:
        """Continue at a position, now that the join is answered. `is_told`: a snapshot led there."""
        if is_told and self.offset < offset and self.acked is None:
            self.acked = (self.offset, self.ordinal)
        self.offset = self.next_offset = offset
        self.ordinal = self.next_ordinal = ordinal
        self.sent = None
        self.is_signalled = False

    def depart(self) -> None:
        """End the member's presence, and go back to the cursor."""
        self.subscriber = None
        self.is_polling = self.is_signalled = self.gets_own = False
        self.next_offset = self.next_ordinal = -1
        self.sent = self.offsets = None
        if self.acked is not None:
            self.offset, self.ordinal = self.acked
            self.acked = None

    def sent_itself(self, begin: int, end: int, end_ordinal: int) -> None:
        """Step over the member's own message, which is not pending, unless others are pending before it."""
        if self.gets_own:
            return
        if self.sent and self.sent[-1].step_offset == begin:
            self.sent[-1] = self.sent[-1]._replace(step_offset=end, step_ordinal=end_ordinal)
        elif not self.sent and self.offset == begin:
            self.offset, self.ordinal = end, end_ordinal
        if self.next_offset == begin:
            self.next_offset, self.next_ordinal = end, end_ordinal

    def transmitted(self, sent: list[Transmitted], next_offset: int, next_ordinal: int) -> None:
        if sent:
            self.sent = [*self.sent, *sent] if self.sent else sent
        # Otherwise only the member's own messages were there.
        elif self.sent and self.sent[-1].step_offset == self.next_offset:
            self.sent[-1] = Transmitted(self.sent[-1].offset, next_offset, next_ordinal)
        elif not self.sent and self.offset == self.next_offset:
            self.offset, self.ordinal = next_offset, next_ordinal
        self.next_offset, self.next_ordinal = next_offset, next_ordinal

    def fetched(self, sent: list[Transmitted], next_offset: int, next_ordinal: int) -> None:
        """Record the result of a fetch, which has returned everything from the member's position on."""
        if sent:
            self.sent = sent
        elif not self.sent:
            self.offset, self.ordinal = next_offset, next_ordinal
        if self.next_offset < next_offset:
            self.next_offset, self.next_ordinal = next_offset, next_ordinal

    def find_sent(self, offset: int) -> Transmitted | None:
        """Return the message that was sent to the member and ends at `offset`, if there is one."""
        sent = self.sent or ()
        found = bisect_left(sent, (offset,))
        return sent[found] if found < len(sent) and sent[found].offset == offset else None

    def acknowledge(self, offset: int, ordinal: int) -> None:
        """Acknowledge everything up to a position."""
        # An equal int object is used again, which saves one for each idle member.
        offset = self.next_offset if offset == self.next_offset else offset
        cursor = self.confirmed
        self.offset, self.ordinal = offset, ordinal
        # A connection that began before the cursor must not move the cursor back.
        self.acked = cursor if self.gets_own and cursor[0] > offset else None
        self.standing = Standing.MEMBER
        if self.sent:
            self.sent = [one for one in self.sent if one.offset > offset] or None
        if 0 <= self.next_offset < offset:
            self.next_offset, self.next_ordinal = offset, ordinal
