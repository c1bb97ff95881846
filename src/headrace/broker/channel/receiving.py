"""Receiving from a channel by push, signal or poll, and acknowledging. Each member has one cursor."""

from functools import partial
from typing import NamedTuple

from headrace.broker.channel.channel import Channel, Part, Refuse, TakeBatch, TakeOffset
from headrace.broker.channel.member import (
    Batch,
    Member,
    MemberConnection,
    OutgoingMessage,
    Receive,
    Standing,
    Transmitted,
)
from headrace.errors import ChannelError
from headrace.log.records import split_records
from headrace.log.store import Appended, ColdError
from headrace.model import JUMP, RECORD_HEADER_BYTES, Position
from headrace.payload.channel import prefix_of

BATCH_MESSAGES_MAX = 500
BATCH_BYTES_MAX = 1 << 18
"""Limits of the messages that are transmitted at once; the last message may exceed the bytes."""


class _Scan(NamedTuple):
    """Messages for a member after a position."""

    messages: list[OutgoingMessage]
    sent: list[Transmitted]
    offset: int
    """End of the scan: up to here, only these messages are for the member."""
    ordinal: int
    lost: int


class Receiving(Part):
    # Calls from the store

    def committed(self, channel: Channel, one: Appended) -> None:
        """Send new messages to members. Those that have everything before them share one batch."""
        shared: Batch | None = None
        count = len(one.records)
        is_long = count > BATCH_MESSAGES_MAX or one.end - one.offset > BATCH_BYTES_MAX
        for member in list(channel.members.values()):
            subscriber = member.subscriber
            if subscriber is None or member.next_offset < 0:
                continue
            if member.receive is Receive.SIGNAL:
                self.go_on(channel, member)
            elif member.receive is Receive.PUSH:
                if member.next_offset != one.offset or is_long or count > member.room:
                    if member.next_offset < one.end:
                        self.go_on(channel, member)
                    continue
                if shared is None:
                    shared = _new_messages(channel, one)
                if not member.gets_own and _has_own(shared, member):
                    self.go_on(channel, member)
                elif subscriber.messages(channel.name, shared):
                    sent = [
                        Transmitted(message.offset, message.offset, ordinal)
                        for ordinal, message in enumerate(shared.messages, one.ordinal + 1)
                    ]
                    member.transmitted(sent, one.end, one.ordinal + count)
        channel.wake()

    # Pushing and signalling

    def go_on(self, channel: Channel, member: Member) -> None:
        """Push or signal pending messages to a member, as far as it has room."""
        subscriber = member.subscriber
        if subscriber is None or member.next_offset < 0:
            return
        try:
            if member.receive is Receive.SIGNAL:
                self._signal(channel, member, subscriber)
            elif member.receive is Receive.PUSH:
                self._push(channel, member, subscriber)
        except ColdError as cold:

            def again() -> None:
                if member.subscriber is subscriber:
                    self.go_on(channel, member)

            self._warm(cold, again)

    def _push(self, channel: Channel, member: Member, subscriber: MemberConnection) -> None:
        while member.next_offset < channel.topic.end_offset and (room := member.room) > 0:
            offset, ordinal = member.next_offset, member.next_ordinal
            scan = self._scan(channel, member, offset, ordinal, min(room, BATCH_MESSAGES_MAX))
            is_empty = not (scan.messages or scan.lost)
            if is_empty or subscriber.messages(channel.name, _batch(channel, scan)):
                member.transmitted(scan.sent, scan.offset, scan.ordinal)
            else:
                return

    def _signal(self, channel: Channel, member: Member, subscriber: MemberConnection) -> None:
        if member.is_signalled or member.offset >= channel.topic.end_offset:
            return
        scan = self._scan(channel, member, member.offset, member.ordinal, 1)
        if scan.messages or scan.lost:
            member.is_signalled = True
            subscriber.signal(channel.name)
        else:
            member.fetched([], scan.offset, scan.ordinal)

    # Fetching

    def fetch(self, channel: Channel, member: Member, messages_max: int, answer: TakeBatch) -> None:
        again = partial(self.fetch, channel, member, messages_max, answer)
        if member.is_joining:
            channel.after_changes(again)
            return
        try:
            scan = self._scan(channel, member, member.offset, member.ordinal, messages_max)
        except ColdError as cold:
            self._warm(cold, again)
            return
        member.fetched(scan.sent, scan.offset, scan.ordinal)
        answer(_batch(channel, scan))

    def fetch_from(
        self, channel: Channel, offset: int, messages_max: int, answer: TakeBatch, refuse: Refuse
    ) -> None:
        topic = channel.topic
        if offset < topic.start_offset:
            text = f"messages behind offset {offset} of channel {channel.name!r} are gone"
            refuse(ChannelError("not-joined", f"{text}: join again"))
            return
        try:
            at = self._store.locate_offset(topic, offset) if topic.exists else topic.end
            if at.offset != offset:
                text = f"no message of channel {channel.name!r} ends at offset {offset}"
                refuse(ChannelError("bad-offset", text))
                return
            scan = self._scan(channel, None, offset, at.ordinal, messages_max)
        except ColdError as cold:
            again = partial(self.fetch_from, channel, offset, messages_max, answer, refuse)
            self._warm(cold, again)
            return
        answer(_batch(channel, scan))

    def _scan(
        self, channel: Channel, member: Member | None, offset: int, ordinal: int, messages_max: int
    ) -> _Scan:
        """Read the messages for a member from a position on, up to the limits of a batch.

        The member's own messages are skipped, unless it gets them; they do not count towards the limits.
        Without a member, all messages are read.
        """
        skipped = b"" if member is None or member.gets_own else prefix_of(member.name.encode())
        topic = channel.topic
        reader = self._store.reader(topic)
        messages: list[OutgoingMessage] = []
        sent: list[Transmitted] = []
        size = lost = 0
        while offset < topic.end_offset:
            chunk = reader.read(offset, BATCH_BYTES_MAX)
            for run in chunk.runs:
                if run.offset > offset:
                    # Records are missing here: they are damaged, or a crash has made offsets jump.
                    lost += max(0, run.ordinal - ordinal) % JUMP
                    offset, ordinal = run.offset, run.ordinal
                for record in split_records(run.data, run.record_count):
                    is_own = skipped and record.startswith(skipped, RECORD_HEADER_BYTES)
                    if not is_own and (len(messages) >= messages_max or size >= BATCH_BYTES_MAX):
                        return _Scan(messages, sent, offset, ordinal, lost)
                    offset, ordinal = offset + len(record), ordinal + 1
                    if is_own:
                        if sent:
                            sent[-1] = Transmitted(sent[-1].offset, offset, ordinal)
                    else:
                        payload = record[RECORD_HEADER_BYTES:]
                        messages.append(OutgoingMessage(offset, run.ms, payload))
                        sent.append(Transmitted(offset, offset, ordinal))
                        size += len(record)
            if not chunk.runs:
                lost += max(0, topic.end_ordinal - ordinal) % JUMP
                offset, ordinal = topic.end_offset, topic.end_ordinal
        return _Scan(messages, sent, offset, ordinal, lost)

    # Acknowledging

    def ack(
        self, channel: Channel, member: Member, offset: int, answer: TakeOffset, refuse: Refuse
    ) -> None:
        known = member.find_sent(offset)
        if known is not None:
            self._acknowledge(channel, member, known.step_offset, known.step_ordinal, answer)
            return
        if member.is_joining:
            channel.after_changes(partial(self.ack, channel, member, offset, answer, refuse))
            return
        # If this is False, the offset may acknowledge a snapshot after which the member has sent messages.
        is_confirmed = member.acked is None and member.standing is Standing.MEMBER
        if offset <= member.offset and (is_confirmed or offset < channel.topic.start_offset):
            _answer_with_cursor(channel, member, answer)
            self._hub.trim_soon(channel)  # the member's own messages may have moved its cursor
            return

        def look() -> None:
            if member.next_offset < 0:
                refuse(ChannelError("not-joined", f"{member.name!r} has left meanwhile"))
                return
            try:
                found = self._boundary(channel, member, offset)
            except ColdError as cold:
                self._warm(cold, look)
                return
            if found is None:
                text = f"no message that {member.name!r} may acknowledge ends at offset {offset}"
                refuse(ChannelError("bad-offset", f"{text} of channel {channel.name!r}"))
            elif found.offset < member.offset:
                if member.gets_own and found.offset > member.confirmed[0]:
                    # The connection began ahead of the cursor. Now the cursor follows.
                    member.acked = found.offset, found.ordinal
                    member.standing = Standing.MEMBER
                    note = self._hub.leases.note(channel, member)
                    channel.write([note], partial(answer, found.offset))
                    self._hub.trim_soon(channel)
                else:
                    _answer_with_cursor(channel, member, answer)
            else:
                self._acknowledge(channel, member, found.offset, found.ordinal, answer)

        look()

    def _boundary(self, channel: Channel, member: Member, offset: int) -> Position | None:
        """Return the position after the message that ends at `offset` and the member's own that follow."""
        topic = channel.topic
        if offset > topic.end_offset or offset < topic.start_offset:
            return None
        at = self._store.locate_offset(topic, offset)
        if at.offset != offset:
            return None
        if member.gets_own:
            return at  # the member gets its own messages like all others
        prefix = prefix_of(member.name.encode())
        here, ordinal = at.offset, at.ordinal
        reader = self._store.reader(topic)
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
        self, channel: Channel, member: Member, offset: int, ordinal: int, answer: TakeOffset
    ) -> None:
        def done() -> None:
            answer(offset)
            member.is_signalled = False
            self.go_on(channel, member)

        member.acknowledge(offset, ordinal)
        member.seen_ms = self._hub.now_ms
        channel.write([self._hub.leases.note(channel, member)], done)
        self._hub.trim_soon(channel)


def _new_messages(channel: Channel, one: Appended) -> Batch:
    messages: list[OutgoingMessage] = []
    offset = one.offset
    for record in one.records:
        offset += len(record)
        messages.append(OutgoingMessage(offset, one.ms, record[RECORD_HEADER_BYTES:]))
    return Batch(channel.name, messages, more=one.end < channel.topic.end_offset)


def _batch(channel: Channel, scan: _Scan) -> Batch:
    more = scan.offset < channel.topic.end_offset
    return Batch(channel.name, scan.messages, more=more, lost=scan.lost)


def _answer_with_cursor(channel: Channel, member: Member, answer: TakeOffset) -> None:
    """Answer a repeated acknowledgement when the cursor is durable."""
    # The answer is the cursor as it is now: later moves may not be durable when this is answered.
    cursor = member.confirmed[0]
    channel.after_changes(lambda: answer(cursor))


def _has_own(batch: Batch, member: Member) -> bool:
    prefix = prefix_of(member.name.encode())
    return any(message.payload.startswith(prefix) for message in batch.messages)
