"""How an event of Logux lies in its topic: a JSON object with the event, its time, and where it came from.

Events of the 0.x protocols have a `created`, those of protocol 5 an `id`, a `time` and a `meta`. Every event
can be shown in both ways: `[1475316540687, "a:1", 0]` and `"1475316540687 a:1 0"` are the same.
"""

import hashlib
import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from headrace.errors import HeadraceError
from headrace.model import PAYLOAD_BYTES_MAX

KEY_BYTES = 16

Number = int | float
Event = dict[str, Any]
Created = list[Any]
"""The time of an event: numbers and strings, as its timer makes them."""

_NUMBER = re.compile(r"-?\d{1,20}(?:\.\d{1,20})?", re.ASCII)


class BadEnvelopeError(HeadraceError):
    """A payload is no event of Logux, or an event makes none."""


class Envelope(msgspec.Struct, omit_defaults=True):
    """An event as it is stored. The event itself stays JSON: most who read it only pass it on."""

    event: Raw
    created: Created | None = None
    id: str | None = None
    time: Number | None = None
    meta: dict[str, Any] | None = None
    origin: str | Number | None = None
    """The host that brought it."""


class Stamp(NamedTuple):
    """A time as the standard timer makes it: it only grows for each host."""

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
        raise BadEnvelopeError(f"this is no event of Logux: {error}") from None
    if envelope.created is None and envelope.id is None:
        raise BadEnvelopeError("this is no event of Logux: it has neither `created` nor `id`")
    return envelope


def raw_event(event: Event) -> Raw:
    return Raw(_encode(event))


# Times and ids


def created_of(envelope: Envelope) -> Created:
    """The time of any event as the 0.x protocols write it."""
    if envelope.created is not None:
        return envelope.created
    assert envelope.id is not None
    return created_of_id(envelope.id)


def created_of_id(text: str) -> Created:
    parts = text.split(" ")
    try:
        ms, node, number = parts
        return [_number(ms), node, _number(number)]
    except ValueError:
        raise BadEnvelopeError(
            f"{text[:80]!r} is no id: it is `MILLISECONDS NODE NUMBER`"
        ) from None


def id_of(envelope: Envelope) -> str:
    """The id of any event as protocol 5 writes it."""
    if envelope.id is not None:
        return envelope.id
    assert envelope.created is not None
    stamp = stamp_of(envelope.created)
    if stamp is None or " " in str(stamp.host):
        # Of another timer: a name of its own, that is the same every time.
        first = envelope.created[0]
        ms = first if not isinstance(first, str) else 0
        return f"{plain(ms)} created-{key_of(envelope.created).hex()} 0"
    return f"{plain(stamp.ms)} {stamp.host} {plain(stamp.number)}"


def stamp_of(created: Created) -> Stamp | None:
    """The time when the standard timer made it."""
    if len(created) != 3 or isinstance(created[0], str) or isinstance(created[2], str):
        return None
    return Stamp(*created)


def key_of(created: Created) -> bytes:
    """The same for equal times only: numbers are compared as numbers."""
    told = [one if isinstance(one, str) else plain(one) for one in created]
    return hashlib.blake2b(_encode(told), digest_size=KEY_BYTES).digest()


def plain(number: Number) -> Number:
    """Without a fraction that is none."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _number(text: str) -> Number:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return float(text) if "." in text else int(text)
