"""The state of one stream, which a note keeps, and the decision about an append.

Elsewhere: the requests (`messages.py`), and carrying out decisions (`streams.py`).
"""

from typing import NamedTuple

import msgspec

from headrace.log.store import Note
from headrace.server.http.streams.content import BYTES, media_type
from headrace.server.http.streams.messages import Append, Claim, Create, ForkRequest
from headrace.server.http.streams.refusals import RefusedError

STREAM = b"st"
"""Begins the key of a stream's note. The topic's name follows."""
PRODUCER = b"sp"
"""Begins the key of the note about a producer. The stream's life and the producer's id follow."""

PRODUCER_LEASE_MS = 30 * 86_400_000
"""Time after its last request for which a producer's number is kept."""


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """State of a stream besides its records. The topic knows if it is closed."""

    content_type: str = BYTES
    is_made: bool = False
    """True if a PUT created the stream. Other topics have no state before they need some."""
    life: bytes = b""
    """Random bytes, which tell the producers of this life of the name from those of others."""
    ttl_s: int | None = None
    expires_ms: int | None = None
    sequence: str | None = None
    """The last `Stream-Seq`."""
    closer: Claim | None = None
    """The producer's request that closed the stream."""
    fork: ForkRequest | None = None
    """The request that made the stream as a fork of another one."""
    source_life: bytes = b""
    """Life of the stream that this one is a fork of."""
    inherited: tuple[tuple[int, int], ...] = ()
    """Epochs of the streams that this one is a fork of, each with the offset up to which it is the same."""
    forks: int = 0
    """Number of streams that are forks of this one."""
    is_gone: bool = False
    """True if the stream was deleted, and its forks were not."""

    def is_like(self, wanted: Create, *, is_closed: bool) -> bool:
        """Return True if a stream that is created like this would be the same."""
        times = wanted.ttl_s, wanted.expires_ms
        content_type = wanted.content_type
        if wanted.fork is not None:
            # A fork inherits what its request leaves out.
            times = (self.ttl_s, self.expires_ms) if times == (None, None) else times
            content_type = content_type or self.content_type
        return (
            media_type(self.content_type) == media_type(content_type or BYTES)
            and (self.ttl_s, self.expires_ms) == times
            and is_closed == wanted.closes
            and wanted.fork in (None, self.fork)
        )

    def has_inherited(self, epoch: int, offset: int) -> bool:
        """Return True if this place in a stream that this one is a fork of is the same place here."""
        return any(epoch == one and offset <= end for one, end in self.inherited)

    def deadline_ms(self, used_ms: int) -> int:
        """Return the time at which the stream expires if it is not used any more; 0 for never."""
        if self.expires_ms is not None:
            return self.expires_ms
        return used_ms + self.ttl_s * 1000 if self.ttl_s is not None else 0


PLAIN = Stream()
"""State of a topic that was not created by PUT."""


class Produced(NamedTuple):
    """The last accepted request of a producer."""

    epoch: int
    number: int


_encode = msgspec.msgpack.Encoder().encode
_decode_stream = msgspec.msgpack.Decoder(Stream).decode
_decode_produced = msgspec.msgpack.Decoder(Produced).decode


def stream_key(name: str) -> bytes:
    return STREAM + name.encode()


def stream_note(name: str, stream: Stream, due_ms: int) -> Note:
    return Note(stream_key(name), _encode(stream), due_ms)


def decode_stream(note: Note | None) -> Stream:
    return PLAIN if note is None or note.value is None else _decode_stream(note.value)


def producer_key(stream: Stream, producer: str) -> bytes:
    return PRODUCER + stream.life + producer.encode()


def producer_note(stream: Stream, claim: Claim, now_ms: int) -> Note:
    value = _encode(Produced(claim.epoch, claim.number))
    return Note(producer_key(stream, claim.producer), value, now_ms + PRODUCER_LEASE_MS)


def decode_produced(note: Note | None) -> Produced | None:
    return None if note is None or note.value is None else _decode_produced(note.value)


def is_new(request: Append, stream: Stream, known: Produced | None, *, is_closed: bool) -> bool:
    """Return True if the request is to be stored, and False if it was stored before.

    `known` is about the request's producer. Raises RefusedError. The order of the checks is part of the
    protocol.
    """
    claim = request.claim
    if is_closed and request.closes:
        if claim is not None and claim == stream.closer:
            return False
        if claim is None and not request.content_type:
            return False
    if claim is not None and known is not None and claim.epoch < known.epoch:
        headers = {"Producer-Epoch": str(known.epoch)}
        raise RefusedError(403, f"the producer has a later epoch: {known.epoch}", headers)
    if is_closed:
        raise RefusedError(409, "the stream is closed")
    if request.closes and not stream.is_made:
        raise RefusedError(409, "only a stream that was created by PUT can be closed")
    given = request.content_type
    if given and media_type(given) != media_type(stream.content_type):
        raise RefusedError(409, f"the stream has the type {stream.content_type}")
    if claim is not None and not _is_next(claim, known):
        return False
    last = stream.sequence
    if request.sequence is not None and last is not None and request.sequence <= last:
        raise RefusedError(409, f"Stream-Seq must be greater than the last one, {last!r}")
    return True


def _is_next(claim: Claim, known: Produced | None) -> bool:
    """Return False for a number that was accepted before; raise RefusedError for a gap."""
    if known is not None and claim.epoch > known.epoch:
        if claim.number:
            raise RefusedError(400, "a new Producer-Epoch begins with Producer-Seq 0")
        return True
    expected = known.number + 1 if known is not None else 0
    if claim.number > expected:
        headers = {
            "Producer-Expected-Seq": str(expected),
            "Producer-Received-Seq": str(claim.number),
        }
        raise RefusedError(409, f"Producer-Seq {expected} has not come yet", headers)
    return claim.number == expected
