"""Joining and leaving of members, and the planned destruction of a log without members present."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.broker.channel import notes as notes
from headrace.broker.channel.core import Done, nothing
from headrace.broker.channel.member import (
    Member,
    MemberConnection,
    Origin,
    Receive,
    Standing,
)
from headrace.broker.channel.notes import StoredSnapshot
from headrace.broker.channel.receiving import Receiving
from headrace.broker.channel.state import load_state
from headrace.errors import ChannelError
from headrace.log.store import ColdError
from headrace.model import JUMP, Position


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


class _Asked(NamedTuple):
    """A request to join: the processor, its options, and the callbacks for the answer."""

    processor: str
    subscriber: MemberConnection | None
    receive: Receive
    answer: Callable[[Joined], None]
    refuse: Callable[[ChannelError], None]
    origin: Origin
    lease_ms: int

    @property
    def is_over(self) -> bool:
        """True if the connection ended while the request waited."""
        return self.subscriber is not None and self.subscriber.is_gone


class Joining(Receiving):
    __slots__ = ()

    def join(
        self,
        processor: str,
        subscriber: MemberConnection | None,
        receive: Receive,
        answer: Callable[[Joined], None],
        refuse: Callable[[ChannelError], None],
        *,
        origin: Origin = None,
        lease_ms: int = 0,
    ) -> None:
        """Make a processor a member. Without a subscriber, a request makes it present for a while.

        With an `origin`, the connection gets the present state and then every message after it, its own
        included. If the origin is an offset that the log still has, the connection gets every message after
        that offset instead. No cursor is moved. `lease_ms` shortens the channel's lease.
        """
        self._ask_to_join(_Asked(processor, subscriber, receive, answer, refuse, origin, lease_ms))

    def _ask_to_join(self, asked: _Asked) -> None:
        processor, subscriber, refuse = asked.processor, asked.subscriber, asked.refuse
        if asked.is_over or self.hold(lambda: self._ask_to_join(asked)):
            return
        member = self.members.get(processor)
        if member is not None and subscriber is not None and _is_late(subscriber, member):
            text = f"{processor!r} has joined on a later connection"
            refuse(ChannelError("not-joined", text))
            return
        is_known = member is not None and member.is_member
        if not is_known and sum(one.is_member for one in self.members.values()) >= (
            self.hub.members_max
        ):
            refuse(
                ChannelError(
                    "too-many", f"channel {self.name!r} has {self.hub.members_max} members"
                )
            )
            return
        start = self.topic.start_offset
        if (
            member is not None
            and member.standing is Standing.MEMBER
            and member.confirmed[0] >= start
            and asked.origin is None
        ):
            self._join(member, asked, None)
            return
        # The log must not be trimmed until the snapshot is loaded.
        self.is_busy = True
        if asked.origin is None:
            self.load_snapshot(partial(self._found, asked, None), partial(self._not_found, asked))
        else:
            self._find_origin(asked)

    def _find_origin(self, asked: _Asked) -> None:
        offset, topic = asked.origin, self.topic
        if not isinstance(offset, int) or not topic.start_offset <= offset <= topic.end_offset:
            self._make_state(asked)
        elif offset == topic.start_offset:
            self._find_start(asked)
        else:
            try:
                at = self.hub.store.locate_offset(topic, offset)
            except ColdError as cold:
                self.hub.warm(cold, lambda: self._find_origin(asked))
                return
            if at.offset == offset:
                self._found(asked, at, None)
            else:
                self._make_state(asked)

    def _find_start(self, asked: _Asked) -> None:
        """Let the connection continue at the start of the log, or give it a new state.

        Messages before the start may have been destroyed by hand, or have expired. Then the state that the
        client made of them is no longer valid.
        """
        start = self.topic.start

        def loaded(snapshot: StoredSnapshot | None) -> None:
            if start.offset == 0 or (snapshot is not None and snapshot.offset == start.offset):
                self._found(asked, start, None)
            else:
                self._make_state(asked)

        self.load_snapshot(loaded, partial(self._not_found, asked))

    def _make_state(self, asked: _Asked) -> None:
        def made(state: StoredSnapshot) -> None:
            self._found(asked, Position(self.topic.epoch, state.offset, state.ordinal), state)

        load_state(self, made, partial(self._not_found, asked))

    def _found(self, asked: _Asked, at: Position | None, snapshot: StoredSnapshot | None) -> None:
        self.is_busy = False
        if not asked.is_over:
            name = asked.processor
            member = self.members.get(name) or Member(name, 0, 0, 0, 0, Standing.LEFT)
            self.members[name] = member
            self._join(member, asked, snapshot, at)
        self.job_done()

    def _not_found(self, asked: _Asked, reason: str) -> None:
        asked.refuse(ChannelError("unavailable", f"the state cannot be read: {reason}"))
        self.job_done()

    def _join(
        self,
        member: Member,
        asked: _Asked,
        snapshot: StoredSnapshot | None,
        origin: Position | None = None,
    ) -> None:
        topic, subscriber = self.topic, asked.subscriber
        is_behind = member.is_member and member.confirmed[0] < topic.start_offset
        is_told = member.standing is not Standing.MEMBER or is_behind
        if origin is not None:
            at = origin
        elif snapshot is not None and snapshot.offset >= topic.start_offset:
            at = Position(topic.epoch, snapshot.offset, snapshot.ordinal)
        elif is_told:
            at = topic.start
        else:
            at = Position(topic.epoch, *member.confirmed)
        # A processor that asks for a state gets all of it, so it misses nothing.
        missed = self._missed(member, at) if is_behind and origin is None else None
        if is_told and not is_behind and (origin is None or not member.is_member):
            # From now on the log is kept from this position, even before the join is committed.
            member.standing = Standing.NEW
            member.offset, member.ordinal = at.offset, at.ordinal
            member.acked = None
        member.lease_ms = asked.lease_ms
        self._arrive(member, subscriber)
        # If the same processor is present on a connection, a request changes nothing for the connection.
        is_beside = subscriber is None and member.subscriber is not None
        if not is_beside:
            member.receive = asked.receive
            member.next_offset = -1
            member.sent = None  # these messages were sent on another connection
            member.gets_own = False
            if origin is not None and subscriber is not None:
                member.begin_at(origin)
        if origin is not None and subscriber is None and not is_behind:
            # Requests continue at the cursor. Messages after the state are requested by their offset.
            at = Position(topic.epoch, *member.confirmed)
        member.seen_ms = self.hub.now_ms
        if not is_told and origin is None:
            snapshot = None
        joined = Joined(
            topic.epoch,
            topic.start_offset,
            topic.end_offset,
            at.offset,
            member.number,
            missed,
            snapshot,
            self.lease_ms(member) if member.lease_ms else 0,
        )

        def done() -> None:
            # A request is answered even if the member's presence ended before the join was durable.
            was_asked = subscriber is None and member.is_member and not member.is_present
            if is_beside or was_asked:
                asked.answer(joined)
            elif member.subscriber is not subscriber or not member.is_present:
                text = f"{member.name!r} has left, or joined on another connection, meanwhile"
                asked.refuse(ChannelError("not-joined", text))
            else:
                member.enter(at, is_told=is_told)
                asked.answer(joined)
                self.go_on(member)

        self.write([self.note(member)], done)

    def _missed(self, member: Member, at: Position) -> MissedByMember | None:
        """Return the unacknowledged messages that a member will never get if it continues at a position."""
        offset, ordinal = member.confirmed
        gone = at.ordinal - ordinal
        if gone <= 0:
            return None
        if gone >= JUMP:
            return MissedByMember(None, "lost")
        end = notes.read_end(self.hub.store, self.name)
        return MissedByMember(
            gone, "destroyed" if end is not None and offset < end.offset else "trimmed"
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
        member = self.members.get(processor)
        if member is None or not member.is_member:
            self.after_changes(answer)
            return
        subscriber = member.subscriber
        self._depart(member)
        if subscriber is not None and subscriber is not by:
            subscriber.ended(self.name, "left")
        member.seen_ms = self.hub.now_ms
        if forget:
            member.number = 0
        self._end_membership(member, answer)

    def _end_membership(self, member: Member, done: Done) -> None:
        """End a membership. Only the member's last number is kept, if it has sent a message."""
        self.write([self.left(member)], done)
        self.hub.look_later(self)

    def gone(self, processor: str, subscriber: MemberConnection) -> None:
        """Handle the end of a member's connection."""
        member = self.members.get(processor)
        if member is None or member.subscriber is not subscriber:
            return
        if not member.is_polling:
            self._depart(member)
            return
        # The member is still present because of its requests. They did not get what the connection was told,
        # so they continue at the cursor.
        member.depart()
        member.is_polling = True
        if member.offset >= self.topic.start_offset:
            member.enter(Position(self.topic.epoch, member.offset, member.ordinal), is_told=False)

    def request(self, processor: str, *, at_cursor: bool = True) -> Member:
        """Return the member that makes a request. Raises ChannelError if it must join first.

        `at_cursor`: the request needs the messages after the member's cursor.
        """
        member = self.members.get(processor)
        if member is None or not member.is_member:
            raise ChannelError(
                "not-joined", f"{processor!r} is no member of channel {self.name!r}: join first"
            )
        if at_cursor and member.offset < self.topic.start_offset:
            raise ChannelError(
                "not-joined",
                f"{processor!r} was away from channel {self.name!r} for so long that messages are gone: "
                "join again",
            )
        if not member.is_present:
            self._arrive(member, None)
            member.enter(Position(self.topic.epoch, member.offset, member.ordinal), is_told=False)
        self.hub.polled(self, member)
        if self.hub.now_ms - member.seen_ms >= self.renewed_after_ms(member):
            member.seen_ms = self.hub.now_ms
            self.write([self.note(member)], nothing)
        return member

    def stopped_polling(self, processor: str) -> None:
        member = self.members.get(processor)
        if member is None or not member.is_polling:
            return
        if member.subscriber is None:
            self._depart(member)
        else:
            member.is_polling = False

    def _arrive(self, member: Member, subscriber: MemberConnection | None) -> None:
        old = member.subscriber
        if not member.is_present:
            self.present += 1
        if subscriber is not None:
            member.subscriber = subscriber
            if old is not None and old is not subscriber:
                old.ended(self.name, "replaced")
        else:
            self.hub.polled(self, member)
        if self.schedule is not None:
            self.schedule = None
            self.write([notes.no_schedule(self.name)], nothing)

    def _depart(self, member: Member) -> None:
        if not member.is_present:
            return
        member.depart()
        self.present -= 1
        if member.lease_ms:
            # A short lease counts from now, not from the last note of the member.
            member.seen_ms = self.hub.clock_ms()
            self.write([self.note(member)], nothing)
        if not self.present and self.schedule is None:
            self.plan_destruction(self.hub.clock_ms() + self.rule.grace_ms)
        self.hub.look_later(self)

    def keep(self, answer: Callable[[bool], None]) -> None:
        """Cancel the destruction of the log for an operator; `answer` gets True if one was planned."""
        was_planned = self.schedule is not None and self.schedule.due_ms > 0
        if not self.present:
            self.schedule = notes.kept_note(self.name)
            self.write([self.schedule], lambda: answer(was_planned))
        else:
            self.after_changes(lambda: answer(False))

    def renew(self, member: Member, now_ms: int) -> None:
        """Update a member whose note is due: renew its presence, end its short lease, or forget it."""
        if member.is_present:
            member.seen_ms = now_ms
        elif member.is_member and member.lease_ms and now_ms >= self.lease_end_ms(member):
            self._end_membership(member, nothing)
            return
        elif now_ms >= self.forgotten_ms(member):
            del self.members[member.name]
            self.write([notes.no_member(self.name, member.name)], nothing)
            return
        self.write([self.note(member)], nothing)
        self.hub.look_later(self)

    def forget_future(self, now_ms: int) -> None:
        """Correct times that were noted with a clock that was ahead: they count as noted now."""
        future = [member for member in self.members.values() if member.seen_ms > now_ms]
        for member in future:
            member.seen_ms = now_ms
        if future:
            self.write([self.note(member) for member in future], nothing)
        due_ms = now_ms + self.rule.grace_ms
        if self.schedule is not None and self.schedule.due_ms > due_ms and not self.is_busy:
            self.plan_destruction(due_ms)


def _is_late(subscriber: MemberConnection, member: Member) -> bool:
    """Return True if a join of an old connection arrives after its client joined on a later connection."""
    other = member.subscriber
    if other is None or not subscriber.instance:
        return False
    return other.instance == subscriber.instance and other.attempt > subscriber.attempt
