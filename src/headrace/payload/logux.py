"""Format of a Logux event in its topic: a JSON object with the event, its time and its origin.

Events of the 0.x protocols have a `created`; events of protocol 5 have an `id`, a `time` and a `meta`. Every
event can be shown in both forms: `[1475316540687, "a:1", 0]` and `"1475316540687 a:1 0"` are the same time.
"""

import hashlib
import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from headrace.errors import HeadraceError
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.json_limits import BadJSONError, decode_json

KEY_BYTES = 16

NUMBER_MAX = 1 << 63
"""Exclusive limit of the numbers in times and ids: the table of event ids cannot hold larger ones."""

Number = int | float
Event = dict[str, Any]
Created = list[Any]
"""Time of an event: numbers and strings, as the client's timer makes them."""

_STRANGE = "created-"
"""Prefix of the node id that protocol 5 shows for an event whose time cannot be written as an id."""

_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,19})(?:\.\d{1,20})?", re.ASCII)


class BadEnvelopeError(HeadraceError, ValueError):
    """A payload is not a Logux event, or an event cannot be stored as a payload."""


class Envelope(msgspec.Struct, omit_defaults=True):
    """An event in its stored form. The event itself stays JSON text, because most readers only pass it on."""

    event: Raw
    created: Created | None = None
    id: str | None = None
    time: Number | None = None
    meta: dict[str, Any] | None = None
    origin: str | Number | None = None
    """The host that brought the event."""
    batch: bool = False
    """True if the event came in a batch. Then the host in `origin` has not sent it, and may not have it."""


class Stamp(NamedTuple):
    """A time as the standard timer makes it. The times of one host only increase."""

    ms: Number
    host: str | Number
    number: Number


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Envelope).decode


def encode_envelope(envelope: Envelope) -> bytes:
    payload = _encode(envelope)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadEnvelopeError(
            f"an event with its time and origin may have {PAYLOAD_BYTES_MAX} bytes of JSON, "
            f"this one has {len(payload)}"
        )
    return payload


def decode_envelope(payload: bytes) -> Envelope:
    try:
        envelope = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadEnvelopeError(f"this is not a Logux event: {error}") from None
    if envelope.created is None and envelope.id is None:
        raise BadEnvelopeError("this is not a Logux event: it has neither `created` nor `id`")
    return envelope


def raw_event(event: Event) -> Raw:
    return Raw(_encode(event))


# Events from outside a client's own session


def check_envelope(payload: bytes) -> None:
    """Raise BadEnvelopeError for a payload that no client could have brought."""
    envelope = decode_envelope(payload)
    if envelope.created is None:
        check_created(created_of(envelope))
    elif envelope.id is None:
        check_created(envelope.created)
    else:
        raise BadEnvelopeError("it has both `created` and `id`: leave out one")
    if envelope.time is not None and not abs(envelope.time) < NUMBER_MAX:
        raise BadEnvelopeError(f"its `time` is {envelope.time}")
    check_event(envelope.event)


def check_event(data: bytes | Raw) -> None:
    """Raise BadEnvelopeError unless `data` is a JSON object with a string `type`."""
    try:
        event = decode_json(data, around=1)
    except BadJSONError as error:
        raise BadEnvelopeError(f"its event {error}") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadEnvelopeError("its event is not an object with a string `type`")


def check_created(created: Any) -> Created:
    """Return `created`, or raise BadEnvelopeError unless it is a valid time of an event."""
    if not isinstance(created, list) or not created or not all(map(_is_of_time, created)):
        raise BadEnvelopeError("its `created` is not an array of numbers and strings")
    return created


def _is_of_time(value: Any) -> bool:
    # `isinstance(…, int)` would accept true and false, because bool is a subclass of int.
    return isinstance(value, str) or (type(value) in (int, float) and abs(value) < NUMBER_MAX)


# Times and ids


def created_of(envelope: Envelope) -> Created:
    """Return the time of an event in the form of the 0.x protocols."""
    if envelope.created is not None:
        return envelope.created
    assert envelope.id is not None
    return created_of_id(envelope.id)


def created_of_id(text: str) -> Created:
    try:
        ms, node, number = text.split(" ")
        return [_number(ms), node, _number(number)]
    except ValueError:
        raise BadEnvelopeError(
            f"{text[:80]!r} is not an id: write `MILLISECONDS NODE NUMBER`"
        ) from None


def id_of(envelope: Envelope) -> str:
    """Return the id of an event in the form of protocol 5."""
    if envelope.id is not None:
        return envelope.id
    assert envelope.created is not None
    stamp = stamp_of(envelope.created)
    if (
        stamp is None
        or " " in str(stamp.host)
        or not (is_of_id(stamp.ms) and is_of_id(stamp.number))
    ):
        # Another timer has made this time. The node id is derived from the time, so it is always the same.
        first = envelope.created[0]
        ms = plain(first) if not isinstance(first, str) and is_of_id(first) else 0
        return f"{ms} {_STRANGE}{key_of(envelope.created).hex()} 0"
    return f"{plain(stamp.ms)} {stamp.host} {plain(stamp.number)}"


def is_of_id(number: Number) -> bool:
    """Return True if an id can contain the number; ids cannot contain exponents."""
    return _NUMBER.fullmatch(str(plain(number))) is not None


def keys_of_id(text: str) -> list[bytes]:
    """Return the keys of all events that protocol 5 may show with this id. Raises BadEnvelopeError."""
    ms, node, number = created_of_id(text)
    keys = [key_of([ms, node, number])]
    if _NUMBER.fullmatch(node):
        # Hosts of the 0.x protocols may be numbers.
        keys.append(key_of([ms, _number(node), number]))
    if re.fullmatch(_STRANGE + r"[0-9a-f]{32}", node):
        keys.append(bytes.fromhex(node.removeprefix(_STRANGE)))
    return keys


def stamp_of(created: Created) -> Stamp | None:
    """Return the parts of a time that the standard timer made; None for a time of another timer."""
    if len(created) != 3 or isinstance(created[0], str) or isinstance(created[2], str):
        return None
    if not (abs(created[0]) < NUMBER_MAX and abs(created[2]) < NUMBER_MAX):
        return None
    return Stamp(*created)


def key_of(created: Created) -> bytes:
    """Return a hash that is the same for equal times only. 1 and 1.0 are equal numbers."""
    told = [one if isinstance(one, str) else plain(one) for one in created]
    return hashlib.blake2b(_encode(told), digest_size=KEY_BYTES).digest()


def plain(number: Number) -> Number:
    """Return a float with a whole value as an int, and any other number unchanged."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _number(text: str) -> Number:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return float(text) if "." in text else int(text)
