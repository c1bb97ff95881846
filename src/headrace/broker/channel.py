"""One channel: who its members are, what they send, what they get and what they have acknowledged.

Knows no connection and no frame. Whatever must be durable is one change of the store, and answered when that
is committed; what is in memory runs ahead of it, because commits are made in the order of the calls. All
records of the topic come through here, so the offset of a message is known before it is written.

One **job** at a time looks at the beginning of the log (`channel_jobs.py`). Who joins meanwhile waits for it:
nobody is told of a snapshot or a start that is about to move.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.broker import channel_notes as notes
from headrace.broker.channel_errors import ChannelError
from headrace.broker.channel_member import (
    Batch,
    Member,
    Outgoing,
    Receive,
    Standing,
    Subscriber,
    Transmitted,
)
from headrace.broker.channel_notes import Snapshot
from headrace.channel_envelope import (
    BadMessageError,
    Content,
    Message,
    MessageTooLargeError,
    decode_message,
    encode_message,
    prefix_of,
)
from headrace.log.records import pack_record, split_records
from headrace.log.store import Appended, ColdError, Note
from headrace.model import JUMP, RECORD_HEADER_BYTES, Position
from headrace.reducers import CannotFoldError

if TYPE_CHECKING:
    from headrace.broker.channels import Channels

BATCH_MESSAGES_MAX = 500
BATCH_BYTES_MAX = 1 << 18
"""What is transmitted at once; the last message may go beyond it."""

Done = Callable[[], None]


class Missed(NamedTuple):
    messages: int | None
    """None when nobody can say how many."""
    reason: str
    """`trimmed`, `destroyed` or `lost`."""


class Joined(NamedTuple):
    epoch: int
    start: int
    end: int
    cursor: int
    number: int
    missed: Missed | None
    snapshot: Snapshot | None


class Accepted(NamedTuple):
    """A message is durable."""

    offset: int | None
    """None when it is no longer kept."""
    is_duplicate: bool


class _Scan(NamedTuple):
    """What lies behind a place for a member."""

    messages: list[Outgoing]
    sent: list[Transmitted]
    offset: int
    """Where it ends: nothing up to here is for the member but these."""
    ordinal: int
    lost: int


class Channel:
    __slots__ = (
        *("_held", "_in_flight", "_is_releasing", "end_offset", "end_ordinal", "hub", "is_busy"),
        *("members", "name", "present", "rule", "schedule", "topic", "trouble"),
        *("waiters",),
    )

    def __init__(self, name: str, hub: "Channels") -> None:
        self.name = name
        self.hub = hub
        self.rule = hub.rule(name)
        self.topic = hub.store.topic(hub.topic_name(name))
        self.end_offset, self.end_ordinal = self.topic.end_offset, self.topic.end_ordinal
        """Where the log ends when everything is committed that was sent."""
        self.members = {member.name: member for member in notes.read_members(hub.store, name)}
        self.present = 0
        """How many members are there."""
        self.schedule = notes.read_schedule(hub.store, name)
        """When the log is destroyed; or, without a time, that it is not."""
        self.is_busy = False
        """Whether a job is under way."""
        self.trouble = ""
        """Why the last job failed."""
        self._held: list[Done] | None = None
        """Who waits for the job."""
        self._is_releasing = False
        self._in_flight = 0
        """How many changes are not committed."""
        self.waiters: list[Done] | None = None
        """Requests that wait for a message."""

    @property
    def is_idle(self) -> bool:
        """Whether everything that is known of it is on disk, and nobody is there or waits."""
        is_used = self.present or self.is_busy or self._in_flight or self._held or self.waiters
        return not (is_used or self.trouble)

    @property
    def has_unwritten(self) -> bool:
        return self._in_flight > 0

    # Members come and go

    def join(
        self,
        processor: str,
        subscriber: Subscriber | None,
        receive: Receive,
        answer: Callable[[Joined], None],
        refuse: Callable[[ChannelError], None],
    ) -> None:
        """Without a subscriber: by a request, for a while."""
        if subscriber is not None and subscriber.is_gone:
            return  # it has waited, in vain
        if self.hold(lambda: self.join(processor, subscriber, receive, answer, refuse)):
            return
        member = self.members.get(processor)
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
            and (member.confirmed[0] >= start)
        ):
            self._join(member, subscriber, receive, None, answer, refuse)
            return
        # Until the snapshot is there, nothing may move.
        self.is_busy = True

        def loaded(snapshot: Snapshot | None) -> None:
            self.is_busy = False
            if subscriber is not None and subscriber.is_gone:
                self.job_done()
                return
            found = self.members.get(processor) or Member(processor, 0, 0, 0, 0, Standing.LEFT)
            self.members[processor] = found
            self._join(found, subscriber, receive, snapshot, answer, refuse)
            self.job_done()

        def failed(reason: str) -> None:
            refuse(ChannelError("unavailable", f"the snapshots cannot be read: {reason}"))
            self.job_done()

        self.hub.snapshots.load(self.name, loaded, failed)

    def _join(
        self,
        member: Member,
        subscriber: Subscriber | None,
        receive: Receive,
        snapshot: Snapshot | None,
        answer: Callable[[Joined], None],
        refuse: Callable[[ChannelError], None],
    ) -> None:
        topic = self.topic
        missed = self._missed(member)
        is_told = member.standing is not Standing.MEMBER or missed is not None
        if snapshot is not None and snapshot.offset >= topic.start_offset:
            at = Position(topic.epoch, snapshot.offset, snapshot.ordinal)
        elif is_told:
            at = topic.start
        else:
            at = Position(topic.epoch, *member.confirmed)
        if member.standing is not Standing.MEMBER:
            # From now on the log is kept from there, also before this is committed.
            member.standing = Standing.NEW
            member.offset, member.ordinal = at.offset, at.ordinal
        self._arrive(member, subscriber)
        # A request changes nothing for a connection on which the same processor is there.
        is_beside = subscriber is None and member.subscriber is not None
        if not is_beside:
            member.receive = receive
            member.next_offset = -1
        member.seen_ms = self.hub.now_ms
        if not is_told:
            snapshot = None
        joined = Joined(
            topic.epoch,
            topic.start_offset,
            topic.end_offset,
            at.offset,
            member.number,
            missed,
            snapshot,
        )

        def done() -> None:
            if is_beside:
                answer(joined)
            elif member.subscriber is not subscriber or not member.is_present:
                text = f"{member.name!r} has left, or joined on another connection, meanwhile"
                refuse(ChannelError("not-joined", text))
            else:
                member.enter(at, is_told=is_told)
                answer(joined)
                self.go_on(member)

        self._change([self._note(member)], done)

    def _missed(self, member: Member) -> Missed | None:
        """What a member will never see that it has not acknowledged."""
        start = self.topic.start
        offset, ordinal = member.confirmed
        if member.standing is not Standing.MEMBER or offset >= start.offset:
            return None
        gone = start.ordinal - ordinal
        if gone <= 0:
            return None
        if gone >= JUMP:
            return Missed(None, "lost")
        end = notes.read_end(self.hub.store, self.name)
        return Missed(gone, "destroyed" if end is not None and offset < end.offset else "trimmed")

    def leave(self, processor: str, answer: Done) -> None:
        member = self.members.get(processor)
        if member is None or not member.is_member:
            self._after_changes(answer)
            return
        self._depart(member)
        member.standing = Standing.LEFT
        member.offset = member.ordinal = 0
        member.seen_ms = self.hub.now_ms
        if member.number:
            self._change([self._note(member)], answer)
        else:
            del self.members[processor]
            self._change([notes.no_member(self.name, processor)], answer)
        self.hub.look_later(self)

    def gone(self, processor: str, subscriber: Subscriber) -> None:
        """A connection has ended."""
        member = self.members.get(processor)
        if member is not None and member.subscriber is subscriber:
            self._depart(member)

    def request(self, processor: str) -> Member:
        """A member that is there by a request; raises ChannelError where it must join first."""
        member = self.members.get(processor)
        if member is None or not member.is_member:
            raise ChannelError(
                "not-joined", f"{processor!r} is no member of channel {self.name!r}: join first"
            )
        if member.offset < self.topic.start_offset:
            raise ChannelError(
                "not-joined",
                f"{processor!r} was away from channel {self.name!r} for so long that messages are gone: "
                "join again",
            )
        if not member.is_present:
            self._arrive(member, None)
            member.enter(Position(self.topic.epoch, member.offset, member.ordinal), is_told=False)
        self.hub.polled(self, member)
        return member

    def stopped_polling(self, processor: str) -> None:
        member = self.members.get(processor)
        if member is None or not member.is_polling:
            return
        if member.subscriber is None:
            self._depart(member)
        else:
            member.is_polling = False

    def _arrive(self, member: Member, subscriber: Subscriber | None) -> None:
        old = member.subscriber
        if not member.is_present:
            self.present += 1
        if subscriber is not None:
            member.subscriber = subscriber
            if old is not None and old is not subscriber:
                old.replaced(self.name)
        else:
            self.hub.polled(self, member)
        if self.schedule is not None:
            self.schedule = None
            self._change([notes.no_schedule(self.name)], _nothing)

    def _depart(self, member: Member) -> None:
        if not member.is_present:
            return
        member.depart()
        self.present -= 1
        if not self.present and self.schedule is None:
            self.plan_destruction(self.hub.clock_ms() + self.rule.grace_ms)
        self.hub.look_later(self)

    def plan_destruction(self, due_ms: int) -> None:
        self.schedule = notes.schedule_note(self.name, due_ms)
        self._change([self.schedule], _nothing)

    def keep(self, answer: Callable[[bool], None]) -> None:
        """An operator cancels a destruction; the answer is whether there was one."""
        was_planned = self.schedule is not None and self.schedule.due_ms > 0
        if not self.present:
            self.schedule = notes.kept_note(self.name)
            self._change([self.schedule], lambda: answer(was_planned))
        else:
            self._after_changes(lambda: answer(False))

    # Sending

    def send(
        self, member: Member, number: int, content: Content, answer: Callable[[Accepted], None]
    ) -> None:
        """Raises ChannelError."""
        if number <= member.number:
            self._send_again(member, number, answer)
            return
        if number > member.number + 1:
            raise ChannelError(
                "gap",
                f"the next number of {member.name!r} in channel {self.name!r} is "
                f"{member.number + 1}, not {number}",
            )
        try:
            self.rule.reducer.check(content)
        except CannotFoldError as error:
            raise ChannelError("cannot-fold", str(error)) from None
        try:
            record = pack_record(encode_message(Message(member.name, number, content)))
        except MessageTooLargeError as error:
            raise ChannelError("too-large", str(error)) from None
        except BadMessageError as error:
            raise ChannelError("bad-content", str(error)) from None
        begin, end = self.end_offset, self.end_offset + len(record)
        self.end_offset, self.end_ordinal = end, self.end_ordinal + 1
        member.number = number
        member.seen_ms = self.hub.now_ms
        member.sent_itself(begin, end, self.end_ordinal)
        if member.offsets is not None:
            member.offsets[number] = end
        self._change([self._note(member)], lambda: answer(Accepted(end, False)), records=[record])

    def send_batch(self, messages: Sequence[Message], note: Note, done: Done) -> None:
        """Those that are new, in one commit with a note; without a number a message gets the next one.

        They were checked before. A gap can only mean that the numbers before it are forgotten: it is passed
        over. Who is not a member does not become one, and nobody's lease is renewed.
        """
        now_ms = self.hub.now_ms
        records: list[bytes] = []
        senders: dict[str, Member] = {}
        for message in messages:
            name, number, _ = message
            member = self.members.get(name)
            if member is None:
                member = self.members[name] = Member(name, 0, 0, 0, 0, Standing.LEFT)
            number = number or member.number + 1
            if number <= member.number:
                continue
            record = pack_record(encode_message(message._replace(number=number)))
            records.append(record)
            begin, self.end_offset = self.end_offset, self.end_offset + len(record)
            self.end_ordinal += 1
            member.number = number
            if member.is_member:
                member.sent_itself(begin, self.end_offset, self.end_ordinal)
            if member.offsets is not None:
                member.offsets[number] = self.end_offset
            # Its number is remembered from now on, its cursor no longer than before.
            held_ms = self.rule.lease_ms if member.is_member else 0
            member.seen_ms = max(member.seen_ms, now_ms - held_ms)
            senders[name] = member
        changed = [note, *map(self._note, senders.values())]
        if records and not self.present and self.schedule is None:
            # Nobody was ever there whose going would have planned it.
            due_ms = self.hub.clock_ms() + self.rule.grace_ms
            self.schedule = notes.schedule_note(self.name, due_ms)
            changed.append(self.schedule)
        self._change(changed, done, records=records)

    def _send_again(self, member: Member, number: int, answer: Callable[[Accepted], None]) -> None:
        """Behind the first: that may not be committed yet."""

        def look() -> None:
            try:
                if member.offsets is None:
                    member.offsets = self._own_offsets(member)
            except ColdError as cold:
                self.hub.warm(cold, look)
                return
            answer(Accepted(self.kept_offset(member.offsets.get(number)), True))

        self._after_changes(look)

    def kept_offset(self, offset: int | None) -> int | None:
        return offset if offset is not None and offset > self.topic.start_offset else None

    def _own_offsets(self, member: Member) -> dict[int, int]:
        found: dict[int, int] = {}
        prefix = prefix_of(member.name.encode())
        reader = self.hub.store.reader(self.topic)
        offset = self.topic.start_offset
        while offset < self.topic.end_offset:
            chunk = reader.read(offset, BATCH_BYTES_MAX)
            for run in chunk.runs:
                at = run.offset
                for record in split_records(run.data, run.record_count):
                    at += len(record)
                    if record.startswith(prefix, RECORD_HEADER_BYTES):
                        found[decode_message(record[RECORD_HEADER_BYTES:]).number] = at
            offset = max(chunk.next_offset, offset + 1)
        return found

    # Acknowledging

    def ack(
        self,
        member: Member,
        offset: int,
        answer: Callable[[int], None],
        refuse: Callable[[ChannelError], None],
    ) -> None:
        known = member.find_sent(offset)
        if known is not None:
            self._acknowledge(member, known.step_offset, known.step_ordinal, answer)
            return
        # Without that, it may be a snapshot that is acknowledged, behind which it has sent something itself.
        is_confirmed = member.acked is None and member.standing is Standing.MEMBER
        if offset <= member.offset and (is_confirmed or offset < self.topic.start_offset):
            self._after_changes(lambda: answer(member.confirmed[0]))
            return

        def look() -> None:
            if member.next_offset < 0:
                refuse(ChannelError("not-joined", f"{member.name!r} has left meanwhile"))
                return
            try:
                found = self._boundary(member, offset)
            except ColdError as cold:
                self.hub.warm(cold, look)
                return
            if found is None:
                refuse(
                    ChannelError(
                        "bad-offset",
                        f"no message that {member.name!r} may acknowledge ends at offset {offset} "
                        f"of channel {self.name!r}",
                    )
                )
            elif found.offset < member.offset:
                self._after_changes(lambda: answer(member.confirmed[0]))
            else:
                self._acknowledge(member, found.offset, found.ordinal, answer)

        look()

    def _boundary(self, member: Member, offset: int) -> Position | None:
        """Behind the message that ends at an offset, and those of the member that follow."""
        topic = self.topic
        if offset > topic.end_offset or offset < topic.start_offset:
            return None
        store = self.hub.store
        at = store.locate_offset(topic, offset)
        if at.offset != offset:
            return None
        prefix = prefix_of(member.name.encode())
        here, ordinal = at.offset, at.ordinal
        reader = store.reader(topic)
        while here < topic.end_offset:
            chunk = reader.read(here, BATCH_BYTES_MAX)
            for run in chunk.runs:
                if run.offset != here:
                    return Position(topic.epoch, here, ordinal)
                for record in split_records(run.data, run.record_count):
                    if not record.startswith(prefix, RECORD_HEADER_BYTES):
                        return Position(topic.epoch, here, ordinal)
                    here, ordinal = here + len(record), ordinal + 1
            if not chunk.runs:
                break
        return Position(topic.epoch, here, ordinal)

    def _acknowledge(
        self, member: Member, offset: int, ordinal: int, answer: Callable[[int], None]
    ) -> None:
        member.acknowledge(offset, ordinal)
        member.seen_ms = self.hub.now_ms

        def done() -> None:
            answer(offset)
            if member.receive is Receive.SIGNAL:
                member.is_signalled = False
            self.go_on(member)

        self._change([self._note(member)], done)
        self.hub.look_later(self)

    # Receiving

    def fetch(self, member: Member, messages_max: int, answer: Callable[[Batch], None]) -> None:
        """What is pending. It stays so until it is acknowledged."""
        try:
            scan = self._scan(member, member.offset, member.ordinal, messages_max)
        except ColdError as cold:
            self.hub.warm(cold, lambda: self.fetch(member, messages_max, answer))
            return
        member.fetched(scan.sent, scan.offset, scan.ordinal)
        answer(self._batch(scan))

    def wait(self, tell: Done) -> None:
        """Call this when the next message has come."""
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(tell)

    def wait_no_more(self, tell: Done) -> None:
        if self.waiters and tell in self.waiters:
            self.waiters.remove(tell)

    def is_pending(self, member: Member) -> bool:
        """Whether there may be something for it."""
        return member.offset < self.topic.end_offset

    def go_on(self, member: Member) -> None:
        """Give a member what is pending, in its way, as far as it has room."""
        subscriber = member.subscriber
        if subscriber is None or member.next_offset < 0:
            return
        if member.receive is Receive.SIGNAL:
            self._signal(member)
        elif member.receive is Receive.PUSH:
            while member.next_offset < self.topic.end_offset and member.has_room:
                try:
                    scan = self._scan(
                        member, member.next_offset, member.next_ordinal, BATCH_MESSAGES_MAX
                    )
                except ColdError as cold:
                    self.hub.warm(cold, lambda: self._go_on_with(member, subscriber))
                    return
                if (scan.messages or scan.lost) and not subscriber.messages(
                    self.name, self._batch(scan)
                ):
                    return
                member.transmitted(scan.sent, scan.offset, scan.ordinal)

    def _go_on_with(self, member: Member, subscriber: Subscriber) -> None:
        if member.subscriber is subscriber:
            self.go_on(member)

    def _signal(self, member: Member) -> None:
        if member.is_signalled or not self.is_pending(member):
            return
        try:
            scan = self._scan(member, member.offset, member.ordinal, 1)
        except ColdError as cold:
            subscriber = member.subscriber
            assert subscriber is not None
            self.hub.warm(cold, lambda: self._go_on_with(member, subscriber))
            return
        if scan.messages or scan.lost:
            member.is_signalled = True
            assert member.subscriber is not None
            member.subscriber.signal(self.name)
        else:
            member.fetched([], scan.offset, scan.ordinal)

    def _batch(self, scan: _Scan) -> Batch:
        more = scan.offset < self.topic.end_offset
        return Batch(self.name, scan.messages, more=more, lost=scan.lost)

    def _scan(self, member: Member, offset: int, ordinal: int, messages_max: int) -> _Scan:
        """The messages from a place on that are for a member; at least all of a block when none is."""
        topic = self.topic
        prefix = prefix_of(member.name.encode())
        reader = self.hub.store.reader(topic)
        messages: list[Outgoing] = []
        sent: list[Transmitted] = []
        size = lost = 0
        while offset < topic.end_offset:
            chunk = reader.read(offset, BATCH_BYTES_MAX)
            for run in chunk.runs:
                if run.offset > offset:
                    # Damage, or a jump that a crash has made.
                    gone = run.ordinal - ordinal
                    lost += gone if gone < JUMP else 0
                    offset, ordinal = run.offset, run.ordinal
                for record in split_records(run.data, run.record_count):
                    is_own = record.startswith(prefix, RECORD_HEADER_BYTES)
                    if not is_own and (len(messages) >= messages_max or size >= BATCH_BYTES_MAX):
                        return _Scan(messages, sent, offset, ordinal, lost)
                    offset, ordinal = offset + len(record), ordinal + 1
                    if is_own:
                        if sent:
                            sent[-1] = Transmitted(sent[-1].offset, offset, ordinal)
                    else:
                        messages.append(Outgoing(offset, run.ms, record[RECORD_HEADER_BYTES:]))
                        sent.append(Transmitted(offset, offset, ordinal))
                        size += len(record)
            if not chunk.runs:
                lost += max(0, topic.end_ordinal - ordinal)
                offset, ordinal = topic.end_offset, topic.end_ordinal
        return _Scan(messages, sent, offset, ordinal, lost)

    # What the store says

    def committed(self, one: Appended) -> None:
        """Give what is new to those who have everything before it."""
        records = list(one.records)
        shared: Batch | None = None
        for member in list(self.members.values()):
            if member.subscriber is None or member.next_offset < 0:
                continue
            if member.receive is Receive.SIGNAL:
                self._signal(member)
            elif member.receive is Receive.PUSH:
                if member.next_offset != one.offset or not member.has_room:
                    if member.next_offset < one.end:
                        self.go_on(member)
                    continue
                prefix = prefix_of(member.name.encode())
                if any(record.startswith(prefix, RECORD_HEADER_BYTES) for record in records):
                    self.go_on(member)
                    continue
                if shared is None:
                    shared = self._new_messages(one, records)
                if member.subscriber.messages(self.name, shared):
                    ordinals = range(one.ordinal + 1, one.ordinal + 1 + len(records))
                    member.transmitted(
                        [
                            Transmitted(message.offset, message.offset, ordinal)
                            for message, ordinal in zip(shared.messages, ordinals, strict=True)
                        ],
                        one.end,
                        one.ordinal + len(records),
                    )
        if self.waiters:
            waiters, self.waiters = self.waiters, None
            for tell in waiters:
                tell()

    def _new_messages(self, one: Appended, records: Sequence[bytes]) -> Batch:
        messages: list[Outgoing] = []
        offset = one.offset
        for record in records:
            offset += len(record)
            messages.append(Outgoing(offset, one.ms, record[RECORD_HEADER_BYTES:]))
        return Batch(self.name, messages, more=one.end < self.topic.end_offset)

    # Jobs and changes

    def hold(self, do: Done) -> bool:
        """Whether a job is under way: then this is done behind it."""
        if not self.is_busy:
            return False
        if self._held is None:
            self._held = []
        self._held.append(do)
        return True

    def job_done(self) -> None:
        self.is_busy = False
        if self._is_releasing:
            return  # what was held was a job of its own: the loop below goes on, however many there are
        self._is_releasing = True
        try:
            while self._held and not self.is_busy:
                self._held.pop(0)()
        finally:
            self._is_releasing = False
        if not self._held:
            self._held = None
        self.hub.rest(self)

    def renew(self, member: Member, now_ms: int) -> None:
        """Note that a member is there, or when its lease has ended; or forget it at last."""
        if member.is_present:
            member.seen_ms = now_ms
        elif now_ms >= self._forgotten_ms(member):
            del self.members[member.name]
            self._change([notes.no_member(self.name, member.name)], _nothing)
            return
        self._change([self._note(member)], _nothing)
        self.hub.look_later(self)

    def holds(self, member: Member, now_ms: int) -> bool:
        """Whether the log is kept for it."""
        is_leased = now_ms < member.seen_ms + self.rule.lease_ms
        return member.is_member and (member.is_present or is_leased)

    def _forgotten_ms(self, member: Member) -> int:
        held_ms = self.rule.lease_ms if member.is_member else 0
        return member.seen_ms + held_ms + self.hub.remember_ms

    def _note(self, member: Member) -> Note:
        now_ms = self.hub.clock_ms()
        if member.is_present:
            # Its lease is counted from when it was last noted: often enough that it is not short of much.
            due_ms = now_ms + max(1, self.rule.lease_ms // 8)
        elif member.is_member and now_ms < member.seen_ms + self.rule.lease_ms:
            due_ms = member.seen_ms + self.rule.lease_ms
        else:
            due_ms = self._forgotten_ms(member)
        return notes.member_note(self.name, member, due_ms)

    def _after_changes(self, do: Done) -> None:
        """When everything is durable that was changed so far."""
        if self._in_flight:
            self._change([], do)
        else:
            do()

    def _change(
        self, changed: Sequence[Note], done: Done, *, records: Sequence[bytes] = ()
    ) -> None:
        self.change(done, changed=changed, records=records)

    def change(
        self,
        done: Done,
        *,
        changed: Sequence[Note] = (),
        records: Sequence[bytes] = (),
        trim: Position | None = None,
        destroy: bool = False,
    ) -> None:
        """Something durable; `done` when it is."""

        def committed() -> None:
            self._in_flight -= 1
            done()
            self.hub.rest(self)

        self._in_flight += 1
        self.hub.store.change(
            self.topic,
            records=records,
            notes=changed,
            trim=trim,
            destroy=destroy,
            done=committed,
        )


def _nothing() -> None:
    pass
