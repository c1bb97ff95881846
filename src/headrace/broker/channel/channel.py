"""One channel: its members, the end of its log, its commits and its jobs. Elsewhere: connections and frames.

Requests come in here, and each is handled by one part. A message goes through the parts in one direction:

    Sending ──commit──▶ Receiving ──acknowledgement──▶ LogTrimming ──▶ States ──commit──▶ the log is shorter

A server has very many channels. So a channel is one small object, and the parts exist once for all channels:
they get the channel as an argument, and everything else that they need from the hub.

Data that must be durable is one change of the store, and the request is answered when the change is
committed. The state in memory is ahead of the commits; this is safe because commits are made in the order of
the calls. All records of the topic come through here, so the offset of a message is known before it is
written.

Only one **job** at a time works on the beginning of the log: a trim, a destruction, an upload, or the loading
of a state. A processor that joins meanwhile waits for the job, so that it is not told of a snapshot or a
start that is about to move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.broker.channel import notes
from headrace.broker.channel.member import Batch, Member, MemberConnection, Origin, Receive
from headrace.broker.channel.notes import StoredSnapshot
from headrace.errors import ChannelError
from headrace.log.store import ColdError, Note, Topic
from headrace.model import CHANNEL_PREFIX, Position
from headrace.payload.channel import Content
from headrace.payload.reducers import Reducer

if TYPE_CHECKING:
    from headrace.broker.channel.hub import Channels

Done = Callable[[], None]
Loaded = Callable[[StoredSnapshot | None], None]
TakeAccepted = Callable[["Accepted"], None]
TakeBatch = Callable[[Batch], None]
TakeOffset = Callable[[int], None]
Refuse = Callable[[ChannelError], None]
Failed = Callable[[str], None]
"""Callback that gets the reason why something could not be done."""


class ChannelRule(NamedTuple):
    """Configuration of one channel."""

    reducer: Reducer
    lease_ms: int
    grace_ms: int
    presence_ms: int
    wait_for: Sequence[str] = ()
    persist: bool = True
    """True if the last state outlives the log."""


class MissedByMember(NamedTuple):
    messages: int | None
    """Number of missed messages; None if it is unknown."""
    reason: str
    """`trimmed`, `destroyed` or `lost`."""


class Joined(NamedTuple):
    epoch: int
    start: int
    end: int
    cursor: int
    number: int
    missed: MissedByMember | None
    snapshot: StoredSnapshot | None
    lease_ms: int = 0
    """Lease of the membership if the processor chose one; otherwise 0."""
    was_member: bool = False
    """True if the processor was a member before."""


class Accepted(NamedTuple):
    """Answer to a message that is durable."""

    offset: int | None
    """Offset just past the message; None if the message is no longer kept."""
    is_duplicate: bool


class JoinRequest(NamedTuple):
    """A request to join: the channel, the processor, its options, and the callbacks for the answer."""

    channel: "Channel"
    processor: str
    subscriber: MemberConnection | None
    receive: Receive
    answer: Callable[[Joined], None]
    refuse: Refuse
    origin: Origin
    lease_ms: int

    @property
    def is_over(self) -> bool:
        """True if the connection ended while the request waited."""
        return self.subscriber is not None and self.subscriber.is_gone


@dataclass(slots=True, eq=False, repr=False)
class Channel:
    name: str
    rule: ChannelRule
    _hub: "Channels"
    topic: Topic = field(init=False)
    end_offset: int = field(init=False)
    end_ordinal: int = field(init=False)
    """End of the log once all messages sent so far are committed. Only `Sending` moves it."""
    members: dict[str, Member] = field(init=False)
    present: int = 0
    """Number of members that are present."""
    schedule: Note | None = field(init=False)
    """Note with the time when the log is destroyed; without a time, an operator keeps the log."""
    is_busy: bool = False
    """True while a job is running."""
    trouble: str = ""
    """Reason why the last trim failed."""
    _held: list[Done] | None = None
    """Calls that wait until the job is done."""
    _is_releasing: bool = False
    in_flight: int = 0
    """Number of changes that are not committed."""
    waiters: list[Done] | None = None
    """Callbacks of requests that wait for a message."""

    def __post_init__(self) -> None:
        store = self._hub.store
        self.topic = store.topic(CHANNEL_PREFIX + self.name)
        self.end_offset, self.end_ordinal = self.topic.end_offset, self.topic.end_ordinal
        self.members = {member.name: member for member in notes.read_members(store, self.name)}
        self.schedule = notes.read_schedule(store, self.name)

    @property
    def is_idle(self) -> bool:
        """True if everything about the channel is on disk, and no member is present and no call waits."""
        is_used = self.present or self.is_busy or self.in_flight or self._held or self.waiters
        return not (is_used or self.trouble)

    # Requests of members

    def join(
        self,
        processor: str,
        subscriber: MemberConnection | None,
        receive: Receive,
        answer: Callable[[Joined], None],
        refuse: Refuse,
        *,
        origin: Origin = None,
        lease_ms: int = 0,
    ) -> None:
        """Make a processor a member. Without a subscriber, a request makes it present for a while.

        With an `origin`, the connection gets the present state and then every message after it, its own
        included. If the origin is an offset that the log still has, the connection gets every message after
        that offset instead. No cursor is moved. `lease_ms` shortens the channel's lease.
        """
        self._hub.membership.join(
            JoinRequest(self, processor, subscriber, receive, answer, refuse, origin, lease_ms)
        )

    def leave(
        self,
        processor: str,
        answer: Done,
        by: MemberConnection | None = None,
        *,
        forget: bool = False,
    ) -> None:
        """End a membership. `by`: the connection that asks for it, if any. `forget`: drop the number too."""
        self._hub.membership.leave(self, processor, answer, by, forget=forget)

    def request(self, processor: str, *, at_cursor: bool = True) -> Member:
        """Return the member that makes a request without a connection. Raises ChannelError if it must join.

        `at_cursor`: the request needs the messages after the member's cursor.
        """
        return self._hub.membership.request(self, processor, at_cursor=at_cursor)

    def send(self, member: Member, number: int, content: Content, answer: TakeAccepted) -> None:
        """Store a message unless its number is stored already. Raises ChannelError."""
        self._hub.sending.send(self, member, number, content, answer)

    def fetch(self, member: Member, messages_max: int, answer: TakeBatch) -> None:
        """Answer with pending messages. They stay pending until they are acknowledged."""
        self._hub.receiving.fetch(self, member, messages_max, answer)

    def fetch_from(self, offset: int, messages_max: int, answer: TakeBatch, refuse: Refuse) -> None:
        """Answer with messages after an offset, from all senders. This moves no cursor."""
        self._hub.receiving.fetch_from(self, offset, messages_max, answer, refuse)

    def go_on(self, member: Member) -> None:
        """Push or signal pending messages to a member whose connection has room again."""
        self._hub.receiving.go_on(self, member)

    def ack(self, member: Member, offset: int, answer: TakeOffset, refuse: Refuse) -> None:
        """Move a member's cursor past the message that ends at `offset`; `answer` gets the durable cursor."""
        self._hub.receiving.ack(self, member, offset, answer, refuse)

    def upload(self, offset: int, content: Content, answer: TakeOffset, refuse: Refuse) -> None:
        """Store a state that a processor has computed. Raises ChannelError."""
        self._hub.states.upload(self, offset, content, answer, refuse)

    def wait(self, tell: Done) -> None:
        """Call `tell` when the next message has come."""
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(tell)

    def wait_no_more(self, tell: Done) -> None:
        if self.waiters and tell in self.waiters:
            self.waiters.remove(tell)

    def wake(self) -> None:
        """Let requests that wait for a message check again."""
        waiters, self.waiters = self.waiters or (), None
        for tell in waiters:
            tell()

    # Requests of operators

    def load_snapshot(self, done: Loaded, failed: Failed) -> None:
        """Load the stored snapshot, without the messages after it."""
        self._hub.states.load(self, done, failed)

    def keep(self, answer: Callable[[bool], None]) -> None:
        """Cancel the destruction of the log; `answer` gets True if one was planned."""
        was_planned = self.schedule is not None and self.schedule.due_ms > 0
        if not self.present:
            self.schedule = notes.kept_note(self.name)
            self.write([self.schedule], lambda: answer(was_planned))
        else:
            self.after_changes(lambda: answer(False))

    def destroy(self, answer: Done, refuse: Failed) -> None:
        """Destroy the log, the snapshot and every membership. Senders' numbers are kept."""
        self._hub.trimming.destroy(self, answer, refuse)

    # Planned destruction

    def plan_destruction(self, due_ms: int) -> None:
        self.schedule = notes.schedule_note(self.name, due_ms)
        self.write([self.schedule])

    def is_due(self, now_ms: int) -> bool:
        """Return True if it is time to destroy the log."""
        schedule = self.schedule
        return schedule is not None and 0 < schedule.due_ms <= now_ms and not self.present

    # Jobs

    def postpone_if_busy(self, do: Done) -> bool:
        """Return True if a job is running, and call `do` after it."""
        if not self.is_busy:
            return False
        if self._held is None:
            self._held = []
        self._held.append(do)
        return True

    def job_done(self) -> None:
        self.is_busy = False
        if self._is_releasing:
            return  # a held call was itself a job: the loop below continues, so jobs do not nest
        self._is_releasing = True
        try:
            while self._held and not self.is_busy:
                self._held.pop(0)()
        finally:
            self._is_releasing = False
        if not self._held:
            self._held = None
        self._hub.rest(self)

    # Commits

    def after_changes(self, do: Done) -> None:
        """Call `do` when all changes so far are durable."""
        if self.in_flight:
            self.write([], do)
        else:
            do()

    def write(
        self,
        changed: Sequence[Note],
        done: Done = lambda: None,
        *,
        records: Sequence[bytes] = (),
        trim: Position | None = None,
        destroy: bool = False,
    ) -> None:
        """Write notes and records, and trim or destroy the log, in one commit; `done`: it is durable."""
        self.in_flight += 1
        done = partial(self._changed, done)
        self._hub.store.change(
            self.topic, records=records, notes=changed, trim=trim, destroy=destroy, done=done
        )

    def _changed(self, done: Done) -> None:
        self.in_flight -= 1
        done()
        if not self.present:
            self._hub.rest(self)


class Part:
    """Base of the parts that handle the requests of all channels."""

    def __init__(self, hub: "Channels") -> None:
        self._hub = hub
        self._store = hub.store
        self._runner = hub.runner

    def _warm(self, cold: ColdError, then: Done) -> None:
        """Read from the disk in a thread, then try again."""
        self._runner.background(cold.warm, lambda _: then())
