"""Events on their way to peers: each envelope is decoded once, and peers share frames where they can."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.payload.logux import (
    BadEnvelopeError,
    Created,
    Envelope,
    Event,
    Number,
    created_of,
    decode_envelope,
    id_of,
    stamp_of,
)
from headrace.wire import websocket
from headrace.wire.logux import messages as logux

_json = msgspec.json.Encoder().encode


def outgoing(at: Position, records: Sequence[bytes]) -> Iterator["OutgoingEvent"]:
    """Yield the events of consecutive records. Records that are not events are skipped."""
    for number, record in enumerate(records):
        try:
            envelope = decode_envelope(record[RECORD_HEADER_BYTES:])
            created_of(envelope)
        except BadEnvelopeError:
            continue
        yield OutgoingEvent(at.ordinal + number, envelope)


def outgoing_of(channel: str, at: Position, records: Sequence[bytes]) -> Iterator["OutgoingEvent"]:
    """Yield the events for one channel, from records that mostly belong to others."""
    name = _json(channel)[1:-1]
    for number, record in enumerate(records):
        # Without escapes, a string has one form in JSON: a record without it need not be decoded.
        if name in record or b"\\" in record:
            for one in outgoing(at._replace(ordinal=at.ordinal + number), [record]):
                if one.channel == channel:
                    yield one


class OutgoingEvent:
    """One event. The frames that peers can share are made on demand and kept."""

    __slots__ = ("_binary", "_shown", "_text", "channel", "envelope", "ordinal")

    def __init__(self, ordinal: int, envelope: Envelope) -> None:
        self.ordinal = ordinal
        self.envelope = envelope
        self.channel = _channel_of(envelope)
        """The channel to which protocol 5 sends the event."""
        self._shown: Shown | None = None
        self._text: bytes | None = None
        self._binary: bytes | None = None

    @property
    def added(self) -> int:
        """Number of the event in the log, counted from 1."""
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

    @property
    def shown(self) -> "Shown":
        """The event as protocol 5 sends it."""
        if self._shown is None:
            self._shown = Shown(self.added, self.envelope, self.channel or "")
        return self._shown

    def sync5(self, base: int, *, binary: bool) -> bytes:
        """Return the framed `sync` with this event for a client of protocol 5; `base` is the client's."""
        message = self.shown.sync(base)
        if binary:
            return logux.encode(msgspec.json.decode(message), binary=True)
        return websocket.frame(message, websocket.TEXT)

    def sync(self, *, binary: bool) -> bytes:
        """Return the framed `sync` with this event for a client of the 0.x protocols."""
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


class ChannelEvents:
    """Events of one commit for one channel. For most peers, one operation fills in the times of all."""

    __slots__ = ("_filled", "_frames", "added", "clients", "events")

    def __init__(self) -> None:
        self.events: list[OutgoingEvent] = []
        self.added: list[int] = []
        self.clients: set[str] = set()
        """Clients that made the events."""
        self._frames: bytes | None = None
        self._filled: list[int] | None = None

    def add(self, one: OutgoingEvent) -> None:
        self.events.append(one)
        self.added.append(one.added)
        self.clients.add(one.shown.client)

    def syncs(self, base: int) -> bytes:
        """Return the framed `sync` messages with all events for a client with this base, in JSON."""
        if self._filled is None:
            self._make()
        if self._frames is None:
            return b"".join([one.sync5(base, binary=False) for one in self.events])
        assert self._filled is not None
        return self._frames % tuple([number - base for number in self._filled])

    def _make(self) -> None:
        self._filled = []
        frames: list[bytes] = []
        for one in self.events:
            template = one.shown.template
            if template is None:
                return
            head = websocket.head(_filled_length(template), websocket.TEXT)
            frames += (head.replace(b"%", b"%%"), template)
            self._filled += (int(one.shown.ms), int(one.shown.time))
        self._frames = b"".join(frames)


class _Addressed(msgspec.Struct):
    type: Any = None
    channel: Any = None


_addressed = msgspec.json.Decoder(_Addressed).decode


def _channel_of(envelope: Envelope) -> str | None:
    try:
        event = _addressed(envelope.event)
    except msgspec.DecodeError:
        return None  # the event is not an object
    if not isinstance(event.channel, str) or str(event.type).startswith(logux.RESERVED):
        return None
    return event.channel


_BLANK_WIDTH = 15
_BLANK = b"%%%dd" % _BLANK_WIDTH
"""Blank for a number. Spaces pad the number on the left, which JSON allows."""
_BLANK_MAX = 10**13
"""Limit of times in a template: minus a base below the same limit, a time fits into a blank with its sign."""


class Shown:
    """An event as protocol 5 sends it, without its times, which are different for each peer."""

    __slots__ = ("_parts", "client", "ms", "node", "time")

    def __init__(self, added: int, envelope: Envelope, channel: str) -> None:
        ms, self.node, counter = id_of(envelope).split(" ")
        self.client = logux.client_of(self.node)
        self.ms = _number(ms)
        if envelope.time is not None:
            self.time = envelope.time
        else:
            stamp = stamp_of(created_of(envelope))
            self.time = stamp.ms if stamp is not None else self.ms
        tail = b',"channels":%b' % _json([channel])
        subprotocol = (envelope.meta or {}).get("subprotocol")
        if subprotocol is not None:
            tail += b',"subprotocol":%b' % _json(subprotocol)
        self._parts = (
            b'["sync",%d,%b,{"id":[' % (added, bytes(envelope.event)),
            b',%b,%b],"time":' % (_json(self.node), counter.encode()),
            tail + b"}]",
        )

    def sync(self, base: int) -> bytes:
        """Return the `sync` with this event for a peer with this base, in JSON."""
        head, middle, tail = self._parts
        ms, time = self.ms - base, self.time - base
        if type(ms) is int and type(time) is int:
            return b"%b%d%b%d%b" % (head, ms, middle, time, tail)
        return b"".join((head, _json(ms), middle, _json(time), tail))

    @property
    def template(self) -> bytes | None:
        """The `sync` for any peer, with blanks for both times: its length is the same for all peers.

        None if a time is not an integer, or does not fit into a blank.
        """
        if not all(type(one) is int and abs(one) < _BLANK_MAX for one in (self.ms, self.time)):
            return None
        head, middle, tail = (part.replace(b"%", b"%%") for part in self._parts)
        return b"".join((head, _BLANK, middle, _BLANK, tail))


def _filled_length(template: bytes) -> int:
    """Return the length of a template when its blanks are filled."""
    return len(template) - template.count(b"%%") + 2 * (_BLANK_WIDTH - len(_BLANK))


def _number(text: str) -> Number:
    return float(text) if "." in text else int(text)
