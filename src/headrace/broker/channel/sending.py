"""Sending to a channel. The messages of a processor are stored once, in the order of their numbers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from headrace.broker.channel import notes as notes
from headrace.broker.channel.core import ChannelState, Done
from headrace.broker.channel.member import (
    Member,
    Standing,
)
from headrace.errors import ChannelError
from headrace.log.records import pack_record, split_records
from headrace.log.store import ColdError, Note
from headrace.model import RECORD_HEADER_BYTES
from headrace.payload.channel import (
    BadMessageError,
    Content,
    MessageTooLargeError,
    StoredMessage,
    decode_message,
    encode_message,
    prefix_of,
)
from headrace.payload.reducers import CannotFoldError

_READ_BYTES = 1 << 18

_OFFSETS_MAX = 1000
"""Number of messages whose offsets are kept in memory for a member that has sent a message again."""


class Accepted(NamedTuple):
    """Answer to a message that is durable."""

    offset: int | None
    """Offset just past the message; None if the message is no longer kept."""
    is_duplicate: bool


class Sending(ChannelState):
    __slots__ = ()

    def send(
        self, member: Member, number: int, content: Content, answer: Callable[[Accepted], None]
    ) -> None:
        """Store a message unless its number is stored already. Raises ChannelError."""
        if number <= member.number:
            self.hub.count("duplicates_refused_total")
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
            record = pack_record(encode_message(StoredMessage(member.name, number, content)))
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
            if len(member.offsets) > _OFFSETS_MAX:
                member.offsets = None
        stored = partial(self._stored, member, answer, Accepted(end, False))
        self.write([self.note(member)], stored, records=[record])

    @staticmethod
    def _stored(member: Member, answer: Callable[[Accepted], None], accepted: Accepted) -> None:
        if member.sent_again is None:
            answer(accepted)
        else:  # the answer waits for messages that were sent again before this one
            member.sent_again.append((None, lambda _: answer(accepted)))

    def send_batch(self, messages: Sequence[StoredMessage], note: Note, done: Done) -> None:
        """Store the new messages in one commit with a note. An unnumbered message gets the next number.

        The messages were checked before. A gap can only mean that the numbers before it are forgotten, so it
        is ignored. A sender that is not a member does not become one, and no lease is renewed.
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
                self.hub.count("duplicates_refused_total")
                continue
            record = pack_record(encode_message(message._replace(number=number)))
            records.append(record)
            begin, self.end_offset = self.end_offset, self.end_offset + len(record)
            self.end_ordinal += 1
            member.number = number
            if member.is_member:
                member.sent_itself(begin, self.end_offset, self.end_ordinal)
            member.offsets = None
            # The number is remembered from now on, but the cursor is not kept longer than before.
            held_ms = self.lease_ms(member) if member.is_member else 0
            member.seen_ms = max(member.seen_ms, now_ms - held_ms)
            senders[name] = member
        changed = [note, *map(self.note, senders.values())]
        if records and not self.present and self.schedule is None:
            # No member was present whose departure would have planned the destruction.
            due_ms = self.hub.clock_ms() + self.rule.grace_ms
            self.schedule = notes.schedule_note(self.name, due_ms)
            changed.append(self.schedule)
        self.write(changed, done, records=records)

    def _send_again(self, member: Member, number: int, answer: Callable[[Accepted], None]) -> None:
        """Answer a message that was sent again, after the first one is committed."""

        def tell(offset: int | None) -> None:
            kept = offset is not None and offset > self.topic.start_offset
            answer(Accepted(offset if kept else None, True))

        def look() -> None:
            offset = member.offsets.get(number) if member.offsets is not None else None
            if member.sent_again is not None:
                member.sent_again.append((number, tell))
            elif offset is not None:
                tell(offset)
            else:
                member.sent_again = [(number, tell)]
                self._look_back(member, number, {}, self.topic.start_offset)

        self.after_changes(look)

    def _look_back(
        self,
        member: Member,
        wanted: int,
        found: dict[int, int],
        offset: int,
        *,
        is_all: bool = True,
    ) -> None:
        """Find the offsets of a member's messages.

        Each step reads one block, so that other work does not wait for a long log.
        """
        again = partial(self._look_back, member, wanted)
        if offset < self.topic.end_offset:
            try:
                chunk = self.hub.store.reader(self.topic).read(offset, _READ_BYTES)
            except ColdError as cold:
                self.hub.warm(cold, partial(again, found, offset, is_all=is_all))
                return
            prefix = prefix_of(member.name.encode())
            for run in chunk.runs:
                at = run.offset
                for record in split_records(run.data, run.record_count):
                    at += len(record)
                    if record.startswith(prefix, RECORD_HEADER_BYTES):
                        found[decode_message(record[RECORD_HEADER_BYTES:]).number] = at
            if len(found) > _OFFSETS_MAX:
                # Keep the wanted number and those after it, which the client will send again too.
                is_all = False
                numbers = [n for n in found if n >= wanted] or list(found)
                found = {number: found[number] for number in numbers[:_OFFSETS_MAX]}
            offset = max(chunk.next_offset, offset + 1)
        if offset < self.topic.end_offset:
            self.hub.runner.soon(partial(again, found, offset, is_all=is_all))
            return
        member.offsets = found
        asked, member.sent_again = member.sent_again or [], None
        for place, (number, tell) in enumerate(asked):
            if number is None or number in found or is_all or number == wanted:
                tell(found.get(number or 0))
                continue
            # This number came during the lookup, and its offset was not kept: look it up again.
            member.sent_again = asked[place:]
            start = self.topic.start_offset
            self.hub.runner.soon(partial(self._look_back, member, number, {}, start))
            return
