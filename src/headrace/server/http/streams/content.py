"""Bodies of Durable Streams ↔ payloads of records.

A body of bytes is one record, or several if it is long: only the bytes count. A JSON body has one record per
message, and an array is a list of messages. Elsewhere: server-sent events (`events.py`).
"""

import base64
from collections.abc import Sequence
from math import inf

import msgspec

from headrace.log.records import pack_record
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.server.http.streams.refusals import RefusedError

BYTES = "application/octet-stream"
JSON = "application/json"

MESSAGES_MAX = 100_000
"""Most messages in one body: each takes time and memory, however short it is."""

_elements = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder(msgspec.Raw)
_SPACE = b" \t\r\n"


def media_type(content_type: str) -> str:
    """Return the type without its parameters, for comparisons."""
    return content_type.partition(";")[0].strip().lower()


def is_text(content_type: str) -> bool:
    """Return True for types that server-sent events carry as text."""
    media = media_type(content_type)
    return media == JSON or media.startswith("text/")


def records_of(body: bytes, content_type: str) -> list[bytes]:
    """Return the records that a body consists of; none for an empty body, or an empty array of JSON."""
    if not body:
        return []
    if media_type(content_type) == JSON:
        return [pack_record(message) for message in _messages(body)]
    starts = range(0, len(body), PAYLOAD_BYTES_MAX)
    return [pack_record(body[at : at + PAYLOAD_BYTES_MAX]) for at in starts]


def joined(payloads: Sequence[bytes], content_type: str) -> bytes:
    """Return the body with these payloads."""
    if media_type(content_type) != JSON:
        return b"".join(payloads)
    body = b"[%b]" % b",".join(payloads)
    # Other protocols may store anything in the topic. Payloads such as `1],[2` must not change the array.
    found = _decoded(body)
    if found is not None and found == [payload.strip(_SPACE) for payload in payloads]:
        return body
    return b"[%b]" % b",".join(map(_as_json, payloads))


def _messages(body: bytes) -> list[bytes]:
    text = body.strip(_SPACE)
    is_array = text.startswith(b"[")
    found = _decoded(text if is_array else b"[%b]" % text, MESSAGES_MAX)
    if found is None or (not is_array and len(found) != 1):
        raise RefusedError(400, "the body is not valid JSON")
    for message in found:
        if len(message) > PAYLOAD_BYTES_MAX:
            reason = f"a message may have {PAYLOAD_BYTES_MAX} bytes, this one has {len(message)}"
            raise RefusedError(413, reason)
    return found


def _decoded(array: bytes, messages_max: float = inf) -> list[bytes] | None:
    """Return the elements of a JSON array as they stand there; None if it is not valid."""
    try:
        array.decode()  # the decoder does not look into strings
        found = _elements.decode(array)
        if len(found) > messages_max:
            raise RefusedError(413, f"a body may have {MESSAGES_MAX} messages")
        return list(map(bytes, found))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _as_json(payload: bytes) -> bytes:
    """Return a payload that is JSON, or an object with its bytes: none is dropped."""
    try:
        payload.decode()
        _any.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return b'{"$base64":"%b"}' % base64.b64encode(payload)
    return payload
