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

_OFFSETS_MAX = 1000
"""Of the last messages of a member, of which one has come again, it is remembered where they lie."""


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
            if len(member.offsets) > _OFFSETS_MAX:
                member.offsets = None
        stored = partial(self._stored, member, answer, Accepted(end, False))
        self.write([self.note(member)], stored, records=[record])

    @staticmethod
    def _stored(member: Member, answer: Callable[[Accepted], None], accepted: Accepted) -> None:
        if member.sent_again is None:
            answer(accepted)
        else:  # behind those that came again before it
            member.sent_again.append((None, lambda _: answer(accepted)))

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
            # Its number is remembered from now on, its cursor no longer than before.
            held_ms = self.lease_ms(member) if member.is_member else 0
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
        """Find where messages of a member lie; a block a step, so that nobody waits for a long log."""
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
                # From the one that is wanted on: those behind it come again too.
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
            # It came meanwhile, and its place is not among those that are remembered.
            member.sent_again = asked[place:]
            start = self.topic.start_offset
            self.hub.runner.soon(partial(self._look_back, member, number, {}, start))
            return
