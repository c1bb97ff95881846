"""Events on their way to peers of the 0.x protocols: taken out of their envelopes and framed once for all."""

from collections.abc import Iterator, Sequence

import msgspec

from headrace.logux_envelope import (
    BadEnvelopeError,
    Created,
    Envelope,
    Event,
    Number,
    created_of,
    decode_envelope,
)
from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.wire import logux, websocket

_json = msgspec.json.Encoder().encode


class Outgoing:
    """One event, and its frames when someone has asked for them."""

    __slots__ = ("_binary", "_text", "envelope", "ordinal")

    def __init__(self, ordinal: int, envelope: Envelope) -> None:
        self.ordinal = ordinal
        self.envelope = envelope
        self._text: bytes | None = None
        self._binary: bytes | None = None

    @property
    def added(self) -> int:
        """Its number in the log, counted from 1."""
        return self.ordinal + 1

    @property
    def origin(self) -> str | Number | None:
        return self.envelope.origin

    @property
    def event(self) -> Event:
        event: Event = msgspec.json.decode(self.envelope.event)
        return event

    @property
    def created(self) -> Created:
        return created_of(self.envelope)

    def sync(self, *, binary: bool) -> bytes:
        """The message that brings it to a client."""
        if binary:
            if self._binary is None:
                message = ["sync", self.added, self.event, self.created]
                self._binary = logux.encode(message, binary=True)
            return self._binary
        if self._text is None:
            # The event is JSON already.
            parts = (self.added, bytes(self.envelope.event), _json(self.created))
            self._text = websocket.frame(b'["sync",%d,%b,%b]' % parts, websocket.TEXT)
        return self._text


def outgoing(at: Position, records: Sequence[bytes]) -> Iterator[Outgoing]:
    """The events of records that follow each other; what is no event is passed over."""
    for number, record in enumerate(records):
        try:
            envelope = decode_envelope(record[RECORD_HEADER_BYTES:])
        except BadEnvelopeError:
            continue
        yield Outgoing(at.ordinal + number, envelope)
