"""Sending to a channel: every number of a processor is stored once, and in its order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from headrace.broker import channel_notes as notes
from headrace.broker.channel_errors import ChannelError
from headrace.broker.channel_member import (
    Member,
    Standing,
)
from headrace.broker.channel_state import ChannelState, Done
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
from headrace.log.store import ColdError, Note
from headrace.model import RECORD_HEADER_BYTES
from headrace.reducers import CannotFoldError

_READ_BYTES = 1 << 18


class Accepted(NamedTuple):
    """A message is durable."""

    offset: int | None
    """None when it is no longer kept."""
    is_duplicate: bool


class Sending(ChannelState):
    __slots__ = ()

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
        self.write([self.note(member)], partial(answer, Accepted(end, False)), records=[record])

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
        changed = [note, *map(self.note, senders.values())]
        if records and not self.present and self.schedule is None:
            # Nobody was ever there whose going would have planned it.
            due_ms = self.hub.clock_ms() + self.rule.grace_ms
            self.schedule = notes.schedule_note(self.name, due_ms)
            changed.append(self.schedule)
        self.write(changed, done, records=records)

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

        self.after_changes(look)

    def kept_offset(self, offset: int | None) -> int | None:
        return offset if offset is not None and offset > self.topic.start_offset else None

    def _own_offsets(self, member: Member) -> dict[int, int]:
        found: dict[int, int] = {}
        prefix = prefix_of(member.name.encode())
        reader = self.hub.store.reader(self.topic)
        offset = self.topic.start_offset
        while offset < self.topic.end_offset:
            chunk = reader.read(offset, _READ_BYTES)
            for run in chunk.runs:
                at = run.offset
                for record in split_records(run.data, run.record_count):
                    at += len(record)
                    if record.startswith(prefix, RECORD_HEADER_BYTES):
                        found[decode_message(record[RECORD_HEADER_BYTES:]).number] = at
            offset = max(chunk.next_offset, offset + 1)
        return found
