"""Folds pieces of topics into the state of each topic, with the server's reducers. Opens and writes nothing.

A piece is a sequence of adjacent records, with the payloads that the reducer needs: `last` needs only the
last payload, `count` needs none, all other reducers need all. Pieces may overlap, because a lake may grow
while it is listed. Records that are already covered are not folded again.
"""

import sys
from collections.abc import Iterable
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


class Piece(NamedTuple):
    """Adjacent records of a topic."""

    topic: str
    epoch: int
    offset: int
    end: int
    ordinal: int
    end_ordinal: int
    records: bytes
    """Records that the reducer needs, as in the log: all, the last one that is a message, or none."""

    def payloads(self) -> list[bytes]:
        found = []
        at = 0
        while at < len(self.records):
            begin = at + RECORD_HEADER_BYTES
            at = begin + int.from_bytes(self.records[at:begin])
            found.append(self.records[begin:at])
        return found


class FoldedState(NamedTuple):
    """State of a topic, and the position that it covers: a row of a table of states."""

    topic: str
    epoch: int
    offset: int
    ordinal: int
    messages: int
    reducer: str
    state: bytes
    is_json: bool
    complete: bool
    """True if no record is missing since the topic's first record."""
    error: str | None
    """Reason why the next message could not be folded; None without an error."""

    @property
    def content(self) -> Content:
        return Content(self.state, self.is_json)


def fold(
    topic: str, pieces: Iterable[Piece], wanted: Reducer, before: FoldedState | None = None
) -> FoldedState:
    """Return a topic's state after `before` and the pieces, which are in the order of epochs and offsets.

    The state does not depend on how the pieces are divided among calls. A state that ended with an error
    stays as it is.
    """
    if before is not None and before.error is not None:
        return before
    epoch = offset = messages = 0
    ordinal: int | None = None
    complete, state, last = True, None, None
    if before is not None:
        epoch, offset, ordinal = before.epoch, before.offset, before.ordinal
        messages, complete = before.messages, before.complete
        # The content of a state without messages is only a placeholder, so folding begins without a state.
        state = before.content if messages else None
    needs = needs_of(wanted.name)
    error = None
    for piece in pieces:
        if ordinal is None:
            ordinal, complete = piece.ordinal, piece.ordinal == 0
        if piece.end_ordinal <= ordinal:
            continue
        covered = max(0, ordinal - piece.ordinal)
        if piece.ordinal > ordinal and (piece.ordinal - ordinal) % JUMP:
            complete = False
        epoch, offset, ordinal = piece.epoch, piece.end, piece.end_ordinal
        if needs is not Needs.ALL:
            messages += piece.end_ordinal - piece.ordinal - covered
            last = piece if piece.records else last
            continue
        done = _fold_piece(piece, covered, wanted, state)
        messages, state, error = messages + done.messages, done.state, done.error
        if error is not None:
            offset, ordinal = done.offset, done.ordinal
            break
    if needs is Needs.NONE and messages:
        # Records are counted without reading them: the log of a channel contains only messages.
        state = Content(b"%d" % messages, is_json=True)
    elif last is not None:
        state = wanted.fold(state, filter(None, _messages(last)))
    return FoldedState(
        topic=topic,
        epoch=epoch,
        offset=offset,
        ordinal=ordinal or 0,
        messages=messages,
        reducer=wanted.name,
        state=(state or NOTHING).data,
        is_json=(state or NOTHING).is_json,
        complete=complete,
        error=error,
    )


class _Done(NamedTuple):
    """State after a piece, or before the first message of the piece that cannot be folded."""

    state: Content | None
    messages: int
    offset: int
    ordinal: int
    error: str | None


def _fold_piece(piece: Piece, covered: int, wanted: Reducer, state: Content | None) -> _Done:
    """Fold the messages of a piece after its first `covered` records."""
    # Payloads that are not messages are skipped, but keep their place in `found`.
    found = _messages(piece)
    messages = [message for message in found[covered:] if message is not None]
    try:
        state = wanted.fold(state, messages)
    except CannotFoldError as failure:
        error = str(failure)
    else:
        return _Done(state, len(messages), piece.end, piece.end_ordinal, None)
    # The messages before the one that fails are folded.
    good, bad = 0, len(messages)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            state = wanted.fold(state, messages[good:middle])
            good = middle
        except CannotFoldError as failure:
            bad, error = middle, str(failure)
    count = next(i for i, message in enumerate(found) if message is messages[good])
    size = sum(RECORD_HEADER_BYTES + len(payload) for payload in piece.payloads()[:count])
    return _Done(state, good, piece.offset + size, piece.ordinal + count, error)


def _messages(piece: Piece) -> list[StoredMessage | None]:
    return [
        message_of(piece.topic, payload, ordinal)
        for ordinal, payload in enumerate(piece.payloads(), piece.ordinal)
    ]


def message_of(topic: str, payload: bytes, ordinal: int) -> StoredMessage | None:
    """Return the message in a payload, or None if a payload of a channel is not a message."""
    if topic.startswith(CHANNEL_PREFIX):
        try:
            return decode_message(payload)
        except BadMessageError:
            return None
    try:
        decode_json(payload)
        is_json = True
    except BadJSONError:
        is_json = False
    return StoredMessage(topic, ordinal + 1, Content(payload, is_json))
