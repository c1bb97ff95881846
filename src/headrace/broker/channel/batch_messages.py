"""Checks the messages of a batch before the batch is decided, then sends them to channels in their order.

Implements `TopicOwner` of `log/store.py`. A thread decodes and checks the messages. An unnumbered
message that comes again cannot be recognised by its number. So each commit also writes a note with the place
in the batch up to which messages are stored. Batches are appended one after another, and commits are made in
the order of the calls, so one note is enough for all channels.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from headrace.broker.channel.hub import Channels
from headrace.errors import ChannelError, StoreFailedError
from headrace.log.store import (
    BatchPart,
    BatchRefusedError,
    Block,
    Note,
    Runner,
    add_in_portions,
    countdown,
)
from headrace.model import CHANNEL_PREFIX
from headrace.payload.channel import UNNUMBERED, BadMessageError, StoredMessage, decode_row
from headrace.payload.reducers import CannotFoldError
from headrace.printing import quoted

logger = logging.getLogger(__name__)

SENT_BYTES_MAX = 1 << 18
"""Bytes of messages that are sent to a channel in one commit. A single message may be larger."""

PLACE_KEY = b"cb"
"""Key of the note with the place. Keys of channels' own notes are longer and begin with other bytes."""

_LOOKED_AT_ONCE = 100
"""Senders whose last numbers are looked up in one step."""

Done = Callable[[BaseException | None], None]


class _Place(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Place in a batch up to which its messages are stored."""

    batch: bytes
    """Id of the batch's first staged file."""
    file: int
    position: int
    """Position just past a block, as in the batch's progress."""
    messages: int
    """Number of messages of this block that are stored."""

    def covers(self, other: "_Place") -> bool:
        return self.batch == other.batch and self >= other


class _Sending(NamedTuple):
    """Messages to store in one commit."""

    channel: str
    messages: list[StoredMessage]
    place: _Place


_Sender = tuple[str, str]
"""A channel, and the name of a processor that sends to it."""


class BatchMessages:
    def __init__(self, channels: Channels, runner: Runner) -> None:
        self._channels = channels
        self._runner = runner

    # Before the batch is decided

    def check(self, blocks: Callable[[], Iterator[Block]], done: Done) -> None:
        def work() -> dict[_Sender, int] | BatchRefusedError:
            try:
                return self._first_numbers(blocks())
            except BatchRefusedError as error:
                return error
            except (BadMessageError, ChannelError) as error:
                return BatchRefusedError(str(error))

        def checked(first: dict[_Sender, int] | BaseException) -> None:
            if isinstance(first, BaseException):
                done(first)
            else:
                self._check_numbers(iter(first.items()), done)

        self._runner.background(work, checked)

    def _first_numbers(self, blocks: Iterator[Block]) -> dict[_Sender, int]:
        """Return the first number of each sender whose messages are numbered. Raises BatchRefusedError."""
        first: dict[_Sender, int] = {}
        last: dict[_Sender, int] = {}
        for block in blocks:
            channel = block.topic.removeprefix(CHANNEL_PREFIX)
            reducer = self._channels.rule(channel).reducer
            for processor, number, content in map(decode_row, block.payloads()):
                try:
                    reducer.check(content)
                except CannotFoldError as error:
                    text = f"channel {channel!r} cannot take a message of {processor!r}: {error}"
                    raise BatchRefusedError(text) from None
                sender = channel, processor
                before = last.setdefault(sender, number)
                first.setdefault(sender, number)
                if (number == UNNUMBERED) != (before == UNNUMBERED):
                    raise BatchRefusedError(
                        f"some messages of {processor!r} to channel {channel!r} have a number and some "
                        "have none: number all of them, or none"
                    )
                if number > before + 1:
                    raise BatchRefusedError(
                        f"message {number} of {processor!r} to channel {channel!r} comes after its message "
                        f"{before}: send messages in the order of their numbers, without gaps"
                    )
                last[sender] = max(number, before)
        return {sender: number for sender, number in first.items() if number != UNNUMBERED}

    def _check_numbers(self, first: Iterator[tuple[_Sender, int]], done: Done) -> None:
        """Refuse the batch if a sender's numbers would leave a gap after its last number.

        Each step checks a few senders, so that other work does not wait for thousands.
        """
        some = list(islice(first, _LOOKED_AT_ONCE))
        for (name, processor), number in some:
            channel = self._channels.get(name)
            member = channel.members.get(processor)
            following = member.number + 1 if member is not None else 1
            self._channels.rest(channel)
            if number > following:
                text = f"the next number of {processor!r} in channel {name!r} is {following}, not {number}"
                done(BatchRefusedError(text))
                return
        if some:
            self._runner.soon(lambda: self._check_numbers(first, done))
        else:
            done(None)

    # After the batch is decided

    def add(self, batch: bytes, parts: Sequence[BatchPart], done: Done) -> None:
        def decode(portion: list[BatchPart]) -> list[_Sending]:
            return [sending for part in portion for sending in _cut(batch, part)]

        add_in_portions(self._runner, parts, decode, self._send, done)

    def _send(self, sendings: list[_Sending], done: Callable[[], None]) -> None:
        known = self._channels.store.note(PLACE_KEY)
        if known is not None and known.value is not None:
            stored = msgspec.msgpack.decode(known.value, type=_Place)
            sendings = [one for one in sendings if not stored.covers(one.place)]
        one_done = countdown(len(sendings) + 1, done)
        try:
            for name, messages, place in sendings:
                note = Note(PLACE_KEY, msgspec.msgpack.encode(place))
                channel = self._channels.get(name)
                self._channels.sending.send_batch(channel, messages, note, one_done)
        except StoreFailedError:
            return  # the server is stopping, and the batch is not answered
        one_done()


def _cut(batch: bytes, part: BatchPart) -> Iterator[_Sending]:
    """Cut a block into pieces to store. The cuts are the same every time, so that the places are the same."""
    channel, progress = part.block.topic.removeprefix(CHANNEL_PREFIX), part.progress
    messages: list[StoredMessage] = []
    size = count = 0

    def sending() -> _Sending:
        place = _Place(batch, progress.file, progress.position, count)
        return _Sending(channel, messages, place)

    for payload in part.block.payloads():
        if messages and size + len(payload) > SENT_BYTES_MAX:
            yield sending()
            messages, size = [], 0
        count += 1
        try:
            messages.append(decode_row(payload))
        except BadMessageError as error:
            # The message was checked when it was staged, so this should not happen. The batch must not wait
            # for the message for ever.
            name = quoted(part.block.topic)
            logger.error("topic %s: a record of a batch is left out: %s", name, error)
        size += len(payload)
    yield sending()
