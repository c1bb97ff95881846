"""Folds pieces of topics into the state of each topic, with the server's reducers. Opens and writes nothing.

A piece is a sequence of adjacent records, with the payloads that the reducer needs: `last` needs only the
last payload, `count` needs none, all other reducers need all. Pieces may overlap, because a lake may grow
while it is listed. Records that are already covered are not folded again.
"""

import os
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from headrace.errors import OptionError
from headrace.model import CHANNEL_PREFIX, JUMP, RECORD_HEADER_BYTES
from headrace.payload.channel import BadMessageError, Content, StoredMessage, decode_message
from headrace.payload.json_limits import BadJSONError, decode_json
from headrace.payload.reducers import CannotFoldError, Reducer, UnknownReducerError, reducer

NOTHING = Content(b"null", is_json=True)
"""State of a channel without messages; the server uses the same value."""


class Needs(Enum):
    """Payloads of a piece that a reducer reads."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


def needs_of(name: str) -> Needs:
    return {"count": Needs.NONE, "last": Needs.LAST}.get(name, Needs.ALL)


def load_reducer(name: str, directory: str) -> Reducer:
    """Return the reducer of this name; like the server, look for functions in `directory` too."""
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


class FoldPiece(NamedTuple):
    """Adjacent records of a topic."""

    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    payloads: list[bytes]
    """Payloads that the reducer needs: all, the last one that is a message, or none."""


class FoldedState(NamedTuple):
    """State of a topic, and the position that it covers."""

    topic: str
    epoch: int
    offset: int
    ordinal: int
    messages: int
    content: Content
    complete: bool
    """True if no record is missing since the topic's first record."""
    error: str | None
    """Reason why the next message could not be folded; None without an error."""


def fold(
    topic: str, pieces: Iterable[FoldPiece], wanted: Reducer, before: FoldedState | None = None
) -> FoldedState:
    """Return a topic's state after `before` and the pieces, which are in the order of epochs and offsets.

    The state does not depend on how the pieces are divided among calls. A state that ended with an error
    stays as it is.
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
            # A topic of durability memory begins anew when its server restarts. All other topics continue.
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
    return FoldedState(
        topic, epoch, offset, ordinal or 0, messages, content, complete, folding.error
    )


class _Done(NamedTuple):
    offset: int
    ordinal: int
    messages: int


class _Counting:
    """Counts records without reading them: the log of a channel contains only messages."""

    error = None

    def __init__(self, topic: str, wanted: Reducer, before: FoldedState | None) -> None:
        self._count = before.messages if before is not None else 0

    @property
    def state(self) -> Content | None:
        return Content(b"%d" % self._count, is_json=True) if self._count else None

    def add(self, piece: FoldPiece, skipped: int) -> _Done:
        messages = piece.end_ordinal - piece.ordinal - skipped
        self._count += messages
        return _Done(piece.end, piece.end_ordinal, messages)


class _KeepingLast:
    error = None

    def __init__(self, topic: str, wanted: Reducer, before: FoldedState | None) -> None:
        self._reads = reads(topic)
        self._before = before.content if before is not None else None
        self._last: bytes | None = None

    @property
    def state(self) -> Content | None:
        message = self._reads(self._last, 0) if self._last is not None else None
        return message.content if message is not None else self._before

    def add(self, piece: FoldPiece, skipped: int) -> _Done:
        if piece.payloads:
            self._last = piece.payloads[-1]
        return _Done(piece.end, piece.end_ordinal, piece.end_ordinal - piece.ordinal - skipped)


class _Folding:
    def __init__(self, topic: str, wanted: Reducer, before: FoldedState | None) -> None:
        self._reads, self._reducer = reads(topic), wanted
        # The content of a state without messages is only a placeholder, so folding begins without a state.
        self.state = before.content if before is not None and before.messages else None
        self.error: str | None = None

    def add(self, piece: FoldPiece, skipped: int) -> _Done:
        payloads = piece.payloads
        # Payloads that are not messages are skipped, but keep their place in `found`.
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

    def _fold_what_can_be(self, messages: list[StoredMessage], failure: CannotFoldError) -> int:
        """Fold the messages before the one that fails, and return their number."""
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


_Made = Callable[[str, Reducer, FoldedState | None], _Counting | _KeepingLast | _Folding]
_FOLDINGS: dict[Needs, _Made] = {
    Needs.NONE: _Counting,
    Needs.LAST: _KeepingLast,
    Needs.ALL: _Folding,
}


def reads(topic: str) -> Callable[[bytes, int], StoredMessage | None]:
    """Return a function of payload and ordinal that returns a message, or None if the payload is not one."""
    if topic.startswith(CHANNEL_PREFIX):
        return _of_channel
    return lambda payload, ordinal: _of_topic(topic, payload, ordinal)


def _of_channel(payload: bytes, ordinal: int) -> StoredMessage | None:
    try:
        return decode_message(payload)
    except BadMessageError:
        return None


def _of_topic(topic: str, payload: bytes, ordinal: int) -> StoredMessage:
    try:
        decode_json(payload)
        is_json = True
    except BadJSONError:
        is_json = False
    return StoredMessage(topic, ordinal + 1, Content(payload, is_json))
