"""Members of channels: joining and leaving, presence, leases, and notes about all of these.

When the last member departs, the destruction of the log is planned. Elsewhere: the destruction itself
(`trimming.py`), and what one member has received (`member.py`).
"""

from functools import partial

from headrace.broker.channel import notes
from headrace.broker.channel.channel import Channel, Done, Joined, JoinRequest, MissedByMember, Part
from headrace.broker.channel.member import Member, MemberConnection, Standing
from headrace.broker.channel.notes import StoredSnapshot
from headrace.errors import ChannelError
from headrace.log.store import ColdError, Note
from headrace.model import JUMP, Position

_RENEWED_MS_MIN = 60_000
"""Minimum time between two notes that record the presence of a member with a short lease."""


class Leases(Part):
    """Times until which members are kept and remembered, and the notes in which these times are due."""

    def holds(self, channel: Channel, member: Member, now_ms: int) -> bool:
        """Return True if the log is kept for this member."""
        return member.is_member and (member.is_present or now_ms < self.end_ms(channel, member))

    def lease_ms(self, channel: Channel, member: Member) -> int:
        """Return a member's lease: the one that it chose, if that is shorter than the channel's."""
        lease_ms = channel.rule.lease_ms
        return min(lease_ms, member.lease_ms) if member.lease_ms else lease_ms

    def end_ms(self, channel: Channel, member: Member) -> int:
        """Return the time when the lease of an absent member ends.

        The presence of members with short leases is not noted all the time. So after a start of the server,
        these leases count from the start.
        """
        seen_ms = member.seen_ms
        if member.lease_ms:
            seen_ms = max(seen_ms, self._hub.started_ms)
        return seen_ms + self.lease_ms(channel, member)

    def renewed_after_ms(self, channel: Channel, member: Member) -> int:
        """Return the time after which a member's presence is noted again."""
        whole_ms = channel.rule.lease_ms // 8
        if member.lease_ms:
            whole_ms = min(whole_ms, max(self.lease_ms(channel, member) // 8, _RENEWED_MS_MIN))
        return max(1, whole_ms)

    def forgotten_ms(self, channel: Channel, member: Member) -> int:
        """Return the time when even the number of an absent member's last message is forgotten."""
        last_ms = self.end_ms(channel, member) if member.is_member else member.seen_ms
        return last_ms + self._hub.remember_ms

    def note(self, channel: Channel, member: Member) -> Note:
        if member.is_present:
            # The lease counts from the last note. Notes are frequent, so a lease is shortened only a little.
            due_ms = self._hub.now_ms + self.renewed_after_ms(channel, member)
        elif member.is_member and self._hub.clock_ms() < self.end_ms(channel, member):
            due_ms = self.end_ms(channel, member)
        elif member.is_member and member.lease_ms:
            due_ms = self._hub.clock_ms()
        else:
            due_ms = self.forgotten_ms(channel, member)
        return notes.member_note(channel.name, member, due_ms)

    def end(self, channel: Channel, member: Member) -> Note:
        """End a membership, and return the note to write. Only the number of a sender is kept."""
        member.standing = Standing.LEFT
        member.offset = member.ordinal = member.lease_ms = 0
        if member.number:
            return self.note(channel, member)
        del channel.members[member.name]
        return notes.no_member(channel.name, member.name)


class Membership(Part):
    # Joining

    def join(self, asked: JoinRequest) -> None:
        channel, processor, subscriber = asked.channel, asked.processor, asked.subscriber
        if asked.is_over or channel.postpone_if_busy(lambda: self.join(asked)):
            return
        member = channel.members.get(processor)
        if member is not None and subscriber is not None and _is_late(subscriber, member):
            text = f"{processor!r} has joined on a later connection"
            asked.refuse(ChannelError("not-joined", text))
            return
        is_known, limit = member is not None and member.is_member, self._hub.members_max
        if not is_known and sum(one.is_member for one in channel.members.values()) >= limit:
            text = f"channel {channel.name!r} has {limit} members"
            asked.refuse(ChannelError("too-many", text))
            return
        if (
            asked.origin is None
            and member is not None
            and member.standing is Standing.MEMBER
            and member.confirmed[0] >= channel.topic.start_offset
        ):
            self._join(member, asked, None)
            return
        # The log must not be trimmed until the snapshot is loaded.
        channel.is_busy = True
        if asked.origin is None:
            found, not_found = partial(self._found, asked, None), partial(self._not_found, asked)
            self._hub.states.load(channel, found, not_found)
        else:
            self._find_origin(asked)

    def _find_origin(self, asked: JoinRequest) -> None:
        offset, topic = asked.origin, asked.channel.topic
        if not isinstance(offset, int) or not topic.start_offset <= offset <= topic.end_offset:
            self._make_state(asked)
        elif offset == topic.start_offset:
            self._find_start(asked)
        else:
            try:
                at = self._store.locate_offset(topic, offset)
            except ColdError as cold:
                self._warm(cold, lambda: self._find_origin(asked))
                return
            if at.offset == offset:
                self._found(asked, at, None)
            else:
                self._make_state(asked)

    def _find_start(self, asked: JoinRequest) -> None:
        """Let the connection continue at the start of the log, or give it a new state.

        Messages before the start may have been destroyed by hand, or have expired. Then the state that the
        client made of them is no longer valid.
        """
        start = asked.channel.topic.start

        def loaded(snapshot: StoredSnapshot | None) -> None:
            if start.offset == 0 or (snapshot is not None and snapshot.offset == start.offset):
                self._found(asked, start, None)
            else:
                self._make_state(asked)

        self._hub.states.load(asked.channel, loaded, partial(self._not_found, asked))

    def _make_state(self, asked: JoinRequest) -> None:
        channel = asked.channel

        def made(state: StoredSnapshot) -> None:
            self._found(asked, Position(channel.topic.epoch, state.offset, state.ordinal), state)

        self._hub.states.compute(channel, made, partial(self._not_found, asked))

    def _found(
        self, asked: JoinRequest, at: Position | None, snapshot: StoredSnapshot | None
    ) -> None:
        channel = asked.channel
        channel.is_busy = False
        if not asked.is_over:
            member = channel.members.setdefault(asked.processor, Member(asked.processor))
            self._join(member, asked, snapshot, at)
        channel.job_done()

    def _not_found(self, asked: JoinRequest, reason: str) -> None:
        asked.refuse(ChannelError("unavailable", f"the state cannot be read: {reason}"))
        asked.channel.job_done()

    def _join(
        self,
        member: Member,
        asked: JoinRequest,
        snapshot: StoredSnapshot | None,
        origin: Position | None = None,
    ) -> None:
        channel, subscriber = asked.channel, asked.subscriber
        topic = channel.topic
        was_member = member.is_member
        is_behind = was_member and member.confirmed[0] < topic.start_offset
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
        missed = self._missed(channel, member, at) if is_behind and origin is None else None
        if is_told and not is_behind and (origin is None or not member.is_member):
            # From now on the log is kept from this position, even before the join is committed.
            member.standing = Standing.NEW
            member.offset, member.ordinal = at.offset, at.ordinal
            member.acked = None
        member.lease_ms = asked.lease_ms
        self._arrive(channel, member, subscriber)
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
        member.seen_ms = self._hub.now_ms
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
            self._hub.leases.lease_ms(channel, member) if member.lease_ms else 0,
            was_member,
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
                member.enter(at.offset, at.ordinal, is_told=is_told)
                asked.answer(joined)
                channel.go_on(member)

        channel.write([self._hub.leases.note(channel, member)], done)

    def _missed(self, channel: Channel, member: Member, at: Position) -> MissedByMember | None:
        """Return the unacknowledged messages that a member will never get if it continues at a position."""
        offset, ordinal = member.confirmed
        gone = at.ordinal - ordinal
        if gone <= 0:
            return None
        if gone >= JUMP:
            return MissedByMember(None, "lost")
        is_destroyed = offset < notes.read_end(self._store, channel.name)
        return MissedByMember(gone, "destroyed" if is_destroyed else "trimmed")

    # Leaving

    def leave(
        self,
        channel: Channel,
        processor: str,
        answer: Done,
        by: MemberConnection | None,
        *,
        forget: bool,
    ) -> None:
        member = channel.members.get(processor)
        if member is None or not member.is_member:
            channel.after_changes(answer)
            return
        subscriber = member.subscriber
        self._depart(channel, member)
        if subscriber is not None and subscriber is not by:
            subscriber.ended(channel.name, "left")
        member.seen_ms = self._hub.now_ms
        if forget:
            member.number = 0
        self._end(channel, member, answer)

    def _end(self, channel: Channel, member: Member, done: Done = lambda: None) -> None:
        channel.write([self._hub.leases.end(channel, member)], done)
        self._hub.trim_soon(channel)

    # Presence

    def gone(self, channel: Channel, processor: str, subscriber: MemberConnection) -> None:
        """Handle the end of a member's connection."""
        member = channel.members.get(processor)
        if member is None or member.subscriber is not subscriber:
            return
        if not member.is_polling:
            self._depart(channel, member)
            return
        # The member is still present because of its requests. They did not get what the connection was told,
        # so they continue at the cursor.
        member.depart()
        member.is_polling = True
        if member.offset >= channel.topic.start_offset:
            member.enter(member.offset, member.ordinal)

    def request(self, channel: Channel, processor: str, *, at_cursor: bool) -> Member:
        member = channel.members.get(processor)
        if member is None or not member.is_member:
            text = f"{processor!r} is no member of channel {channel.name!r}: join first"
            raise ChannelError("not-joined", text)
        if at_cursor and member.offset < channel.topic.start_offset:
            text = f"{processor!r} was away from channel {channel.name!r} for so long"
            raise ChannelError("not-joined", f"{text} that messages are gone: join again")
        if not member.is_present:
            self._arrive(channel, member, None)
            member.enter(member.offset, member.ordinal)
        self._hub.polled(channel, member)
        if self._hub.now_ms - member.seen_ms >= self._hub.leases.renewed_after_ms(channel, member):
            member.seen_ms = self._hub.now_ms
            channel.write([self._hub.leases.note(channel, member)])
        return member

    def stopped_polling(self, channel: Channel, processor: str) -> None:
        member = channel.members.get(processor)
        if member is not None and member.is_polling:
            if member.subscriber is None:
                self._depart(channel, member)
            else:
                member.is_polling = False

    def _arrive(
        self, channel: Channel, member: Member, subscriber: MemberConnection | None
    ) -> None:
        old = member.subscriber
        if not member.is_present:
            channel.present += 1
        if subscriber is not None:
            member.subscriber = subscriber
            if old is not None and old is not subscriber:
                old.ended(channel.name, "replaced")
        else:
            self._hub.polled(channel, member)
        if channel.schedule is not None:
            channel.schedule = None
            channel.write([notes.no_schedule(channel.name)])

    def _depart(self, channel: Channel, member: Member) -> None:
        if not member.is_present:
            return
        member.depart()
        channel.present -= 1
        if member.lease_ms:
            # A short lease counts from now, not from the last note of the member.
            member.seen_ms = self._hub.clock_ms()
            channel.write([self._hub.leases.note(channel, member)])
        if not channel.present and channel.schedule is None:
            channel.plan_destruction(self._hub.clock_ms() + channel.rule.grace_ms)
        self._hub.trim_soon(channel)

    # Work that is due by the clock

    def renew(self, channel: Channel, member: Member, now_ms: int) -> None:
        """Update a member whose note is due: renew its presence, end its short lease, or forget it."""
        leases = self._hub.leases
        if member.is_present:
            member.seen_ms = now_ms
        elif member.is_member and member.lease_ms and now_ms >= leases.end_ms(channel, member):
            self._end(channel, member)
            return
        elif now_ms >= leases.forgotten_ms(channel, member):
            del channel.members[member.name]
            channel.write([notes.no_member(channel.name, member.name)])
            return
        channel.write([leases.note(channel, member)])
        self._hub.trim_soon(channel)

    def forget_future(self, channel: Channel, now_ms: int) -> None:
        """Correct times that were noted with a clock that was ahead: they count as noted now."""
        future = [member for member in channel.members.values() if member.seen_ms > now_ms]
        for member in future:
            member.seen_ms = now_ms
        if future:
            channel.write([self._hub.leases.note(channel, member) for member in future])
        due_ms, schedule = now_ms + channel.rule.grace_ms, channel.schedule
        if schedule is not None and schedule.due_ms > due_ms and not channel.is_busy:
            channel.plan_destruction(due_ms)


def _is_late(subscriber: MemberConnection, member: Member) -> bool:
    """Return True if a join of an old connection arrives after its client joined on a later connection."""
    other = member.subscriber
    if other is None or not subscriber.instance:
        return False
    return other.instance == subscriber.instance and other.attempt > subscriber.attempt
