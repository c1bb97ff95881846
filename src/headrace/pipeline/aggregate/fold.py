"""Pieces of topics → the state of each, as the server's reducers make it. Opens and writes nothing.

A piece is some records that follow each other, with as many of their payloads as the reducer needs: `last`
needs the last one, `count` none, all others every one. Pieces may overlap, as a lake may have got more while
it was listed: what is covered is not folded again.
"""

import os
import sys
import zlib
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from headrace.channel_envelope import BadMessageError, Content, Message, decode_message
from headrace.json_limits import BadJSONError, decode_json
from headrace.model import CHANNEL_PREFIX, JUMP, RECORD_HEADER_BYTES, legacy_name
from headrace.reducers import CannotFoldError, Reducer, UnknownReducerError, reducer
from headrace.spark.options import OptionError

NOTHING = Content(b"null", is_json=True)
"""The state without any message, as the server has it too."""


class Needs(Enum):
    """Which payloads of a piece a reducer looks at."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


def needs_of(name: str) -> Needs:
    return {"count": Needs.NONE, "last": Needs.LAST}.get(name, Needs.ALL)


def load_reducer(name: str, directory: str) -> Reducer:
    """The one of this name; functions are looked for in a directory too, as the server does."""
    if ":" in name and directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        found = reducer(name)
    except UnknownReducerError as error:
        raise OptionError(str(error)) from None
    if found.is_uploaded:
        raise OptionError(
            f"the reducer {name!r} folds nothing: name the one that makes the states to upload"
        )
    return found


def here() -> str:
    return os.getcwd()


def bucket_of(topic: str, count: int) -> int:
    return zlib.crc32(legacy_name(topic).encode()) % count


class Piece(NamedTuple):
    """Records of a topic that follow each other."""

    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    payloads: list[bytes]
    """Of all of them, of the last that is a message, or none: what the reducer needs."""


class State(NamedTuple):
    """What the records of a topic make, and up to where."""

    topic: str
    epoch: int
    offset: int
    ordinal: int
    messages: int
    content: Content
    complete: bool
    """Whether no record is missing from the topic's first on."""
    error: str | None
    """Why the message behind it could not be folded."""


def fold(
    topic: str, pieces: Iterable[Piece], wanted: Reducer, before: State | None = None
) -> State:
    """The state of a topic, from its pieces in the order of epochs and offsets, and from a state before them.

    However they are divided among calls, the state is the same: one that ended with an error stays.
    """
    if before is not None and before.error is not None:
        return before
    folding = _FOLDINGS[needs_of(wanted.name)](topic, wanted, before)
    epoch = offset = messages = 0
    ordinal: int | None = None
    complete = True
    if before is not None:
        epoch, offset, ordinal = before.epoch, before.offset, before.ordinal
        messages, complete = before.messages, before.complete
    for piece in pieces:
        skipped = 0
        if ordinal and piece.ordinal == 0 and piece.epoch > epoch:
            # Kept in memory only, it has begun anew with its server; all other topics go on.
            folding = _FOLDINGS[needs_of(wanted.name)](topic, wanted, None)
            messages, ordinal = 0, None
        if ordinal is None:
            complete = piece.ordinal == 0
            offset, ordinal = piece.offset, piece.ordinal
        elif piece.end_ordinal <= ordinal:
            continue
        elif piece.ordinal < ordinal:
            skipped = ordinal - piece.ordinal
        elif (piece.ordinal - ordinal) % JUMP:
            complete = False
        done = folding.add(piece, skipped)
        messages += done.messages
        epoch, offset, ordinal = piece.epoch, done.offset, done.ordinal
        if folding.error is not None:
            break
    content = folding.state if folding.state is not None else NOTHING
    return State(topic, epoch, offset, ordinal or 0, messages, content, complete, folding.error)


class _Done(NamedTuple):
    offset: int
    ordinal: int
    messages: int


class _Counting:
    """The records themselves are counted: nothing else than messages gets into the log of a channel."""

    error = None

    def __init__(self, topic: str, wanted: Reducer, before: State | None) -> None:
        self._count = before.messages if before is not None else 0

    @property
    def state(self) -> Content | None:
        return Content(b"%d" % self._count, is_json=True) if self._count else None

    def add(self, piece: Piece, skipped: int) -> _Done:
        messages = piece.end_ordinal - piece.ordinal - skipped
        self._count += messages
        return _Done(piece.end, piece.end_ordinal, messages)


class _KeepingLast:
    error = None

    def __init__(self, topic: str, wanted: Reducer, before: State | None) -> None:
        self._reads = reads(topic)
        self._before = before.content if before is not None else None
        self._last: bytes | None = None

    @property
    def state(self) -> Content | None:
        message = self._reads(self._last, 0) if self._last is not None else None
        return message.content if message is not None else self._before

    def add(self, piece: Piece, skipped: int) -> _Done:
        if piece.payloads:
            self._last = piece.payloads[-1]
        return _Done(piece.end, piece.end_ordinal, piece.end_ordinal - piece.ordinal - skipped)


class _Folding:
    def __init__(self, topic: str, wanted: Reducer, before: State | None) -> None:
        self._reads, self._reducer = reads(topic), wanted
        # What says that there was no message is no state to go on from.
        self.state = before.content if before is not None and before.messages else None
        self.error: str | None = None

    def add(self, piece: Piece, skipped: int) -> _Done:
        payloads = piece.payloads
        # What was no message is passed over, and its place kept.
        found = [self._reads(payload, piece.ordinal + i) for i, payload in enumerate(payloads)]
        messages = [message for message in found[skipped:] if message is not None]
        try:
            self.state = self._reducer.fold(self.state, messages)
        except CannotFoldError as error:
            good = self._fold_what_can_be(messages, error)
            left = messages[good:]
            count = next(i for i, message in enumerate(found) if message is left[0])
            size = sum(map(len, payloads[:count])) + count * RECORD_HEADER_BYTES
            return _Done(piece.offset + size, piece.ordinal + count, good)
        return _Done(piece.end, piece.end_ordinal, len(messages))

    def _fold_what_can_be(self, messages: list[Message], failure: CannotFoldError) -> int:
        """Up to the message that fails; how many are before it."""
        good, bad = 0, len(messages)
        self.error = str(failure)
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self.state = self._reducer.fold(self.state, messages[good:middle])
                good = middle
            except CannotFoldError as error:
                bad = middle
                self.error = str(error)
        return good


_Made = Callable[[str, Reducer, State | None], _Counting | _KeepingLast | _Folding]
_FOLDINGS: dict[Needs, _Made] = {
    Needs.NONE: _Counting,
    Needs.LAST: _KeepingLast,
    Needs.ALL: _Folding,
}


def reads(topic: str) -> Callable[[bytes, int], Message | None]:
    """What makes messages of the payloads of a topic and their ordinals; None of one that is no message."""
    if topic.startswith(CHANNEL_PREFIX):
        return _of_channel
    return lambda payload, ordinal: _of_topic(topic, payload, ordinal)


def _of_channel(payload: bytes, ordinal: int) -> Message | None:
    try:
        return decode_message(payload)
    except BadMessageError:
        return None


def _of_topic(topic: str, payload: bytes, ordinal: int) -> Message:
    try:
        decode_json(payload)
        is_json = True
    except BadJSONError:
        is_json = False
    return Message(topic, ordinal + 1, Content(payload, is_json))
