"""Messages of batches on their way to channels: checked before the decision, then sent in their order.

Implements `Messages` of `log/batches.py`. What is to be found out about each message is found out in a
thread. One without a number cannot be known again by it: so the place in the batch up to which messages are
stored is noted in the same commit as the last of them. Batches are appended one after another, and commits
are made in the order of the calls: one note is enough for all channels.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec

from headrace.broker.channel_errors import ChannelError
from headrace.broker.channels import Channels
from headrace.channel_envelope import BadMessageError, Message
from headrace.errors import StoreFailedError
from headrace.log.batch_parts import BatchRefusedError, Part
from headrace.log.blocks import Block
from headrace.log.message_rows import UNNUMBERED, decode_row
from headrace.log.runner import Runner
from headrace.log.store import Note
from headrace.model import CHANNEL_PREFIX
from headrace.printing import quoted
from headrace.reducers import CannotFoldError

logger = logging.getLogger(__name__)

PORTION_MESSAGES_MAX = 1000
"""Messages that are given to channels at once: the loop looks at each of them, and others wait meanwhile."""

SENT_BYTES_MAX = 1 << 18
"""Of messages that are sent to a channel in one commit, where there is more than one."""

PLACE_KEY = b"cb"
"""Of the note: keys of channels' own notes are longer, and begin otherwise."""

_LOOKED_AT_ONCE = 100
"""Senders whose last numbers are looked up in one step."""

Done = Callable[[BaseException | None], None]


class _Place(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Up to here the messages of a batch are stored."""

    batch: bytes
    """The id of its first staged file."""
    file: int
    position: int
    """Just past a block, as in the batch's progress."""
    messages: int
    """Of this block."""

    def covers(self, other: "_Place") -> bool:
        return self.batch == other.batch and self >= other


class _Sending(NamedTuple):
    """Messages that are stored in one commit."""

    channel: str
    messages: list[Message]
    place: _Place


class _Sender(NamedTuple):
    channel: str
    processor: str


class BatchMessages:
    def __init__(self, channels: Channels, runner: Runner) -> None:
        self._channels = channels
        self._runner = runner

    # Before the decision

    def check(self, blocks: Callable[[], Iterator[Block]], done: Done) -> None:
        def checked(first: "dict[_Sender, int] | BatchRefusedError | BaseException") -> None:
            if isinstance(first, BaseException):
                done(first)
            else:
                self._check_numbers(iter(first.items()), done)

        self._runner.background(lambda: _attempt(self._first_numbers, blocks()), checked)

    def _first_numbers(self, blocks: Iterator[Block]) -> dict[_Sender, int]:
        """The first number of each sender whose messages have any. Raises BatchRefusedError."""
        first: dict[_Sender, int] = {}
        last: dict[_Sender, int] = {}
        for block in blocks:
            channel = _channel_of(block)
            reducer = self._channels.rule(channel).reducer
            for processor, number, content in map(decode_row, block.payloads()):
                try:
                    reducer.check(content)
                except CannotFoldError as error:
                    text = f"channel {channel!r} cannot take a message of {processor!r}: {error}"
                    raise BatchRefusedError(text) from None
                sender = _Sender(channel, processor)
                before = last.setdefault(sender, number)
                first.setdefault(sender, number)
                if (number == UNNUMBERED) != (before == UNNUMBERED):
                    raise BatchRefusedError(
                        f"some messages of {processor!r} to channel {channel!r} have a number and some "
                        "have none: give all of them one, or none"
                    )
                if number > before + 1:
                    raise BatchRefusedError(
                        f"message {number} of {processor!r} to channel {channel!r} comes behind its message "
                        f"{before}: numbers have no gaps, and come in their order"
                    )
                last[sender] = max(number, before)
        return {sender: number for sender, number in first.items() if number != UNNUMBERED}

    def _check_numbers(self, first: Iterator[tuple[_Sender, int]], done: Done) -> None:
        """Whether each goes on where its sender is; a few a step, so that nobody waits for thousands."""
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

    # Behind it

    def add(self, batch: bytes, parts: Sequence[Part], done: Done) -> None:
        portions = _portions(parts)

        def following() -> None:
            portion = next(portions, None)
            if portion is None:
                done(None)
            else:
                self._runner.background(partial(_sendings_of, batch, portion), decoded)

        def decoded(sendings: list[_Sending] | BaseException) -> None:
            if isinstance(sendings, BaseException):
                done(sendings)
            else:
                self._send(sendings, following)

        following()

    def _send(self, sendings: list[_Sending], done: Callable[[], None]) -> None:
        stored = self._stored()
        todo = [one for one in sendings if stored is None or not stored.covers(one.place)]
        waiting = len(todo) + 1

        def one_done() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                done()

        try:
            for channel, messages, place in todo:
                note = Note(PLACE_KEY, msgspec.msgpack.encode(place))
                self._channels.get(channel).send_batch(messages, note, one_done)
        except StoreFailedError:
            return  # nobody is answered
        one_done()

    def _stored(self) -> _Place | None:
        note = self._channels.store.note(PLACE_KEY)
        if note is None or note.value is None:
            return None
        return msgspec.msgpack.decode(note.value, type=_Place)


def _attempt(
    work: Callable[[Iterator[Block]], dict[_Sender, int]], blocks: Iterator[Block]
) -> dict[_Sender, int] | BatchRefusedError:
    try:
        return work(blocks)
    except BatchRefusedError as error:
        return error
    except (BadMessageError, ChannelError) as error:
        return BatchRefusedError(str(error))


def _channel_of(block: Block) -> str:
    return block.topic.removeprefix(CHANNEL_PREFIX)


def _portions(parts: Sequence[Part]) -> Iterator[list[Part]]:
    portion: list[Part] = []
    count = 0
    for part in parts:
        if portion and count + part.block.record_count > PORTION_MESSAGES_MAX:
            yield portion
            portion, count = [], 0
        portion.append(part)
        count += part.block.record_count
    if portion:
        yield portion


def _sendings_of(batch: bytes, parts: Sequence[Part]) -> list[_Sending]:
    return [sending for part in parts for sending in _cut(batch, part)]


def _cut(batch: bytes, part: Part) -> Iterator[_Sending]:
    """A block as it is stored: in pieces that are the same each time, so that their places are."""
    channel, progress = _channel_of(part.block), part.progress
    messages: list[Message] = []
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
            # It was checked when it was staged: the batch must not wait for it for ever.
            name = quoted(part.block.topic)
            logger.error("topic %s: a record of a batch is left out: %s", name, error)
        size += len(payload)
    yield sending()
