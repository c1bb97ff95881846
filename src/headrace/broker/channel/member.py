"""A member of a channel: how far it has acknowledged, what it has sent, and what was transmitted to it.

Its **cursor** is what is noted on disk. While it is there, it may have been given a snapshot in place of what
it missed: then it is further than its cursor, which stays where it is until it acknowledges something. Who is
cut off before that is told the same again.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import Literal, NamedTuple, Protocol

from headrace.model import Position

WINDOW_MESSAGES_MAX = 1000
WINDOW_BYTES_MAX = 1 << 20
"""What is pushed to a member that has not acknowledged it; the last batch may go beyond the bytes."""


class Standing(IntEnum):
    LEFT = 0
    """Only its number is remembered."""
    NEW = 1
    """It has never acknowledged anything: what was before its time it gets as a snapshot."""
    MEMBER = 2


Origin = Literal["state"] | int | None
"""Where a connection begins: at the state as of now, just past an offset that it has, or at its cursor."""


class Receive(StrEnum):
    PUSH = "push"
    SIGNAL = "signal"
    POLL = "poll"


class Transmitted(NamedTuple):
    """A message that a member was sent, and where its cursor is when it has acknowledged it."""

    offset: int
    """Just past the message."""
    step_offset: int
    """Just past those of its own that follow."""
    step_ordinal: int


class Outgoing(NamedTuple):
    """A message on its way to members."""

    offset: int
    ms: int
    payload: bytes
    """In its envelope."""


class Batch:
    """Messages that are transmitted together, to one member or to many."""

    __slots__ = ("channel", "encoded", "lost", "messages", "more")

    def __init__(
        self, channel: str, messages: Sequence[Outgoing], *, more: bool, lost: int = 0
    ) -> None:
        self.channel = channel
        self.messages = messages
        self.more = more
        """Whether more are pending by now."""
        self.lost = lost
        """How many that should be among them cannot be read any more."""
        self.encoded: dict[object, bytes] = {}
        """For whoever encodes it: once for all who get the same."""


class Subscriber(Protocol):
    """The connection that a member has joined on."""

    @property
    def is_gone(self) -> bool: ...

    @property
    def instance(self) -> str:
        """The client that has made the connection; empty when it does not say."""

    @property
    def attempt(self) -> int:
        """Which of the connections of that client it is."""

    def messages(self, channel: str, batch: Batch) -> bool:
        """Take them; False when there is no room, and then `Channel.go_on` is called when there is."""

    def signal(self, channel: str) -> None: ...

    def ended(self, channel: str, reason: str) -> None:
        """The processor has joined on another connection ("replaced"), or left on one ("left")."""


class Member:
    __slots__ = (
        *("acked", "gets_own", "is_polling", "is_signalled", "lease_ms", "name", "next_offset"),
        *("next_ordinal", "number"),
        *("offset", "offsets", "ordinal", "receive", "seen_ms", "sent", "sent_again", "standing"),
        *("subscriber",),
    )

    def __init__(
        self,
        name: str,
        offset: int,
        ordinal: int,
        number: int,
        seen_ms: int,
        standing: Standing,
        lease_ms: int = 0,
    ) -> None:
        self.name = name
        self.number = number
        """Of the last message that was accepted of it."""
        self.seen_ms = seen_ms
        """When it was last heard of, as far as it is noted."""
        self.standing = standing
        self.lease_ms = lease_ms
        """The lease that it chose when it joined; 0: the channel's."""
        self.gets_own = False
        """True while its connection gets the log as it is, from a state on, with its own messages."""
        self.offset, self.ordinal = offset, ordinal
        """Up to here nothing is pending for it."""
        self.acked: tuple[int, int] | None = None
        """Its cursor, where its connection is elsewhere: it was given a state, or has asked for a place."""
        self.subscriber: Subscriber | None = None
        self.receive = Receive.POLL
        self.is_polling = False
        """Whether it is there by its requests."""
        self.is_signalled = False
        self.next_offset = self.next_ordinal = -1
        """Where the next message for it is looked for; -1 before it has joined, or been answered."""
        self.sent: list[Transmitted] | None = None
        """What it has not acknowledged, oldest first."""
        self.offsets: dict[int, int] | None = None
        """Where its last messages lie that are kept, by number; looked up when one has come again."""
        self.sent_again: list[tuple[int | None, Callable[[int | None], None]]] | None = None
        """Numbers that have come again and are being looked up, and who is told where they lie; or None,
        and who only waits for his turn."""

    @property
    def is_present(self) -> bool:
        return self.subscriber is not None or self.is_polling

    @property
    def is_joining(self) -> bool:
        """Whether it is there, and its join is not on disk yet."""
        return self.next_offset < 0 and self.subscriber is not None

    @property
    def is_member(self) -> bool:
        return self.standing is not Standing.LEFT

    @property
    def confirmed(self) -> tuple[int, int]:
        """Its cursor."""
        return self.acked or (self.offset, self.ordinal)

    @property
    def room(self) -> int:
        """How many more messages may be pushed to it."""
        if not self.sent:
            return WINDOW_MESSAGES_MAX
        if self.next_offset - self.offset >= WINDOW_BYTES_MAX:
            return 0
        return WINDOW_MESSAGES_MAX - len(self.sent)

    def begin_at(self, at: Position) -> None:
        """Let its connection have all messages behind a place, and its cursor stay where it is."""
        self.gets_own = True
        if self.acked is None and self.offset != at.offset:
            self.acked = (self.offset, self.ordinal)
        self.offset, self.ordinal = at.offset, at.ordinal

    def enter(self, at: Position, *, is_told: bool) -> None:
        """It is answered: this is where it goes on. `is_told`: by way of a snapshot."""
        if is_told and self.offset < at.offset and self.acked is None:
            self.acked = (self.offset, self.ordinal)
        self.offset, self.ordinal = at.offset, at.ordinal
        self.next_offset, self.next_ordinal = at.offset, at.ordinal
        self.sent = None
        self.is_signalled = False

    def depart(self) -> None:
        """It is not there any more."""
        self.subscriber = None
        self.is_polling = self.is_signalled = self.gets_own = False
        self.next_offset = self.next_ordinal = -1
        self.sent = self.offsets = None
        if self.acked is not None:
            self.offset, self.ordinal = self.acked
            self.acked = None

    def sent_itself(self, begin: int, end: int, end_ordinal: int) -> None:
        """A message of its own lies there: it is not pending, and stepped over where nothing else is."""
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
        # Else only messages of its own were there.
        elif self.sent and self.sent[-1].step_offset == self.next_offset:
            self.sent[-1] = Transmitted(self.sent[-1].offset, next_offset, next_ordinal)
        elif not self.sent and self.offset == self.next_offset:
            self.offset, self.ordinal = next_offset, next_ordinal
        self.next_offset, self.next_ordinal = next_offset, next_ordinal

    def fetched(self, sent: list[Transmitted], next_offset: int, next_ordinal: int) -> None:
        """It has asked itself, and got everything from its cursor on."""
        if sent:
            self.sent = sent
        elif not self.sent:
            self.offset, self.ordinal = next_offset, next_ordinal
        if self.next_offset < next_offset:
            self.next_offset, self.next_ordinal = next_offset, next_ordinal

    def find_sent(self, offset: int) -> Transmitted | None:
        """What it was sent that ends there."""
        if not self.sent:
            return None
        found = bisect_left(self.sent, (offset,))
        one = self.sent[found] if found < len(self.sent) else None
        return one if one is not None and one.offset == offset else None

    def acknowledge(self, offset: int, ordinal: int) -> None:
        """Everything up to here."""
        if offset == self.next_offset:
            offset = self.next_offset  # the same object: of many idle members, one number each
        cursor = self.confirmed
        self.offset, self.ordinal = offset, ordinal
        # A connection that began before the cursor catches up with it, and does not move it back.
        self.acked = cursor if self.gets_own and cursor[0] > offset else None
        self.standing = Standing.MEMBER
        if self.sent:
            self.sent = [one for one in self.sent if one.offset > offset] or None
        if 0 <= self.next_offset < offset:
            self.next_offset, self.next_ordinal = offset, ordinal
