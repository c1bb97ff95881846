"""Sending to a channel. The messages of a processor are stored once, in the order of their numbers."""

from collections.abc import Sequence
from functools import partial

from headrace.broker.channel import notes
from headrace.broker.channel.channel import Accepted, Channel, Done, Part, TakeAccepted
from headrace.broker.channel.member import Member
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


class Sending(Part):
    def send(
        self, channel: Channel, member: Member, number: int, content: Content, answer: TakeAccepted
    ) -> None:
        if number <= member.number:
            self._hub.count("duplicates_refused_total")
            self._send_again(channel, member, number, answer)
            return
        if number > member.number + 1:
            text = f"the next number of {member.name!r} in channel {channel.name!r}"
            raise ChannelError("gap", f"{text} is {member.number + 1}, not {number}")
        try:
            channel.rule.reducer.check(content)
            record = pack_record(encode_message(StoredMessage(member.name, number, content)))
        except CannotFoldError as error:
            raise ChannelError("cannot-fold", str(error)) from None
        except MessageTooLargeError as error:
            raise ChannelError("too-large", str(error)) from None
        except BadMessageError as error:
            raise ChannelError("bad-content", str(error)) from None
        begin, end = channel.end_offset, channel.end_offset + len(record)
        channel.end_offset, channel.end_ordinal = end, channel.end_ordinal + 1
        member.number = number
        member.seen_ms = self._hub.now_ms
        member.sent_itself(begin, end, channel.end_ordinal)
        if member.offsets is not None:
            member.offsets[number] = end
            if len(member.offsets) > _OFFSETS_MAX:
                member.offsets = None
        stored = partial(self._stored, member, answer, Accepted(end, False))
        channel.write([self._hub.leases.note(channel, member)], stored, records=[record])

    @staticmethod
    def _stored(member: Member, answer: TakeAccepted, accepted: Accepted) -> None:
        if member.sent_again is None:
            answer(accepted)
        else:  # the answer waits for messages that were sent again before this one
            member.sent_again.append((None, lambda _: answer(accepted)))

    def send_batch(
        self, channel: Channel, messages: Sequence[StoredMessage], note: Note, done: Done
    ) -> None:
        """Store the new messages in one commit with a note. An unnumbered message gets the next number.

        The messages were checked before. A gap can only mean that the numbers before it are forgotten, so it
        is ignored. A sender that is not a member does not become one, and no lease is renewed.
        """
        now_ms = self._hub.now_ms
        records: list[bytes] = []
        senders: dict[str, Member] = {}
        for message in messages:
            name, number, _ = message
            member = channel.members.get(name)
            if member is None:
                member = channel.members[name] = Member(name)
            number = number or member.number + 1
            if number <= member.number:
                self._hub.count("duplicates_refused_total")
                continue
            record = pack_record(encode_message(message._replace(number=number)))
            records.append(record)
            begin, channel.end_offset = channel.end_offset, channel.end_offset + len(record)
            channel.end_ordinal += 1
            member.number = number
            if member.is_member:
                member.sent_itself(begin, channel.end_offset, channel.end_ordinal)
            member.offsets = None
            # The number is remembered from now on, but the cursor is not kept longer than before.
            held_ms = self._hub.leases.lease_ms(channel, member) if member.is_member else 0
            member.seen_ms = max(member.seen_ms, now_ms - held_ms)
            senders[name] = member
        changed = [note, *(self._hub.leases.note(channel, member) for member in senders.values())]
        if records and not channel.present and channel.schedule is None:
            # No member was present whose departure would have planned the destruction.
            due_ms = self._hub.clock_ms() + channel.rule.grace_ms
            channel.schedule = notes.schedule_note(channel.name, due_ms)
            changed.append(channel.schedule)
        channel.write(changed, done, records=records)

    def _send_again(
        self, channel: Channel, member: Member, number: int, answer: TakeAccepted
    ) -> None:
        """Answer a message that was sent again, after the first one is committed."""

        def tell(offset: int | None) -> None:
            kept = offset is not None and offset > channel.topic.start_offset
            answer(Accepted(offset if kept else None, True))

        def look() -> None:
            if member.sent_again is not None:
                member.sent_again.append((number, tell))
            elif member.offsets is not None and number in member.offsets:
                tell(member.offsets[number])
            else:
                member.sent_again = [(number, tell)]
                self._look_back(channel, member, number, {}, channel.topic.start_offset)

        channel.after_changes(look)

    def _look_back(
        self,
        channel: Channel,
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
        again = partial(self._look_back, channel, member, wanted)
        if offset < channel.topic.end_offset:
            try:
                chunk = self._store.reader(channel.topic).read(offset, _READ_BYTES)
            except ColdError as cold:
                self._warm(cold, partial(again, found, offset, is_all=is_all))
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
        if offset < channel.topic.end_offset:
            self._runner.soon(partial(again, found, offset, is_all=is_all))
            return
        member.offsets = found
        asked, member.sent_again = member.sent_again or [], None
        for place, (number, tell) in enumerate(asked):
            if number is None or number in found or is_all or number == wanted:
                tell(found.get(number or 0))
                continue
            # This number came during the lookup, and its offset was not kept: look it up again.
            member.sent_again = asked[place:]
            start = channel.topic.start_offset
            self._runner.soon(partial(self._look_back, channel, member, number, {}, start))
            return
