"""Requests of Durable Streams as values: their headers and parameters, checked.

Elsewhere: offsets (`offsets.py`), bodies (`content.py`), decisions (`stream.py`).
"""

import datetime
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from headrace.server.http.streams import offsets
from headrace.server.http.streams.cors import PATH
from headrace.server.http.streams.offsets import From, Place
from headrace.server.http.streams.refusals import CLOSED, RefusedError

PRODUCER_ID_BYTES_MAX = 255
SEQUENCE_BYTES_MAX = 255
"""Longest `Stream-Seq`."""
CONTENT_TYPE_BYTES_MAX = 255
PRODUCER_NUMBER_MAX = (1 << 53) - 1
TTL_S_MAX = 10**10
"""Longest time to live, about 300 years."""

_WHOLE = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)
_DIGITS = re.compile(r"\d{1,16}", re.ASCII)
_TYPE = re.compile(
    r"[!#$%&'*+.^`|~\w-]+/[!#$%&'*+.^`|~\w-]+(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?", re.ASCII
)


class Live(StrEnum):
    LONG_POLL = "long-poll"
    SSE = "sse"


class Claim(NamedTuple):
    """A producer's number of a request, with which a repeated request is stored once."""

    producer: str
    epoch: int
    number: int


class ForkRequest(NamedTuple):
    """The place in another stream up to which a new stream has the same records."""

    source: str
    offset: str | None
    """The offset as it was given; None for the end."""
    more: int
    """Number of messages, or bytes, behind that offset."""


class Create(NamedTuple):
    content_type: str
    """Empty if it was not given."""
    ttl_s: int | None
    expires_ms: int | None
    closes: bool
    fork: ForkRequest | None = None


class Append(NamedTuple):
    content_type: str
    """Empty without a body."""
    sequence: str | None
    claim: Claim | None
    closes: bool


class Read(NamedTuple):
    start: From | Place
    live: Live | None
    cursor: int
    """Cursor that the client got last; -1 without one."""


def create(headers: Mapping[str, str]) -> Create:
    ttl, expires_at = headers.get("stream-ttl"), headers.get("stream-expires-at")
    if ttl is not None and expires_at is not None:
        raise RefusedError(400, "give Stream-TTL or Stream-Expires-At, not both")
    content_type = headers.get("content-type", "").strip()
    return Create(
        _content_type(content_type) if content_type else "",
        _ttl_s(ttl) if ttl is not None else None,
        _expires_ms(expires_at) if expires_at is not None else None,
        _closes(headers),
        _fork(headers),
    )


def append(headers: Mapping[str, str], *, has_body: bool) -> Append:
    closes = _closes(headers)
    content_type = ""
    if has_body:
        content_type = headers.get("content-type", "").strip()
        if not content_type:
            raise RefusedError(400, "Content-Type is missing")
    elif not closes:
        raise RefusedError(400, "the body is empty: there is nothing to append")
    sequence = headers.get("stream-seq")
    if sequence is not None and not 1 <= len(sequence) <= SEQUENCE_BYTES_MAX:
        raise RefusedError(400, f"Stream-Seq must have 1 to {SEQUENCE_BYTES_MAX} bytes")
    return Append(content_type, sequence, _claim(headers), closes)


def read(offset: list[str], live: list[str], cursor: list[str]) -> Read:
    """Return the request with these values of the parameters."""
    start = offsets.parse(offset)
    if not live:
        return Read(start, None, -1)
    try:
        [text] = live
        mode = Live(text)
    except ValueError:
        raise RefusedError(400, "live must be long-poll or sse") from None
    if not offset:
        raise RefusedError(400, "a live read needs an offset: -1 is the start, now is the end")
    [shown] = cursor[:1] or [""]
    return Read(start, mode, int(shown) if _WHOLE.fullmatch(shown) else -1)


def name_in(path: bytes) -> str:
    """Return the name of the stream at a percent-encoded path."""
    if not path.startswith(PATH.encode()):
        raise RefusedError(400, f"the path of a stream begins with {PATH}, not encoded")
    try:
        name = unquote_to_bytes(path[len(PATH) :]).decode()
    except UnicodeDecodeError:
        raise RefusedError(400, "a stream's name must be valid UTF-8") from None
    if name == "__ds" or name.startswith("__ds/"):
        raise RefusedError(400, "names under __ds are reserved by the protocol")
    return name


def _fork(headers: Mapping[str, str]) -> ForkRequest | None:
    path, offset, more = (
        headers.get(f"stream-fork{name}") for name in ("ed-from", "-offset", "-sub-offset")
    )
    if path is None:
        if offset is not None or more is not None:
            raise RefusedError(400, "Stream-Forked-From is missing")
        return None
    if not path.startswith(PATH):
        raise RefusedError(400, f"Stream-Forked-From must be the path of a stream, {PATH}NAME")
    if more is not None and not _WHOLE.fullmatch(more):
        raise RefusedError(400, "Stream-Fork-Sub-Offset must be a whole number")
    if offset is None and int(more or 0):
        raise RefusedError(400, "Stream-Fork-Sub-Offset needs a Stream-Fork-Offset")
    if offset is not None:
        offsets.parse([offset])
    return ForkRequest(name_in(path.encode("latin-1")), offset, int(more or 0))


def _closes(headers: Mapping[str, str]) -> bool:
    return headers.get(CLOSED.lower(), "").strip().lower() == "true"


def _content_type(text: str) -> str:
    if len(text) > CONTENT_TYPE_BYTES_MAX or not _TYPE.fullmatch(text):
        raise RefusedError(400, "Content-Type is not valid")
    return text


def _ttl_s(text: str) -> int:
    if not _WHOLE.fullmatch(text) or int(text) > TTL_S_MAX:
        raise RefusedError(
            400, "Stream-TTL must be a whole number of seconds, without leading zeros"
        )
    return int(text)


def _expires_ms(text: str) -> int:
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
        if moment.tzinfo is None or len(text) < len("2000-01-01T00:00:00Z"):
            raise ValueError
        # Answers show the time in UTC, where its year may be another one.
        return max(1, int(moment.astimezone(datetime.UTC).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise RefusedError(400, "Stream-Expires-At must be a time as in RFC 3339") from None


def _claim(headers: Mapping[str, str]) -> Claim | None:
    shown = [headers.get(f"producer-{name}") for name in ("id", "epoch", "seq")]
    if shown == [None, None, None]:
        return None
    producer, epoch, number = shown
    if producer is None or epoch is None or number is None:
        raise RefusedError(400, "give all of Producer-Id, Producer-Epoch and Producer-Seq, or none")
    if not 1 <= len(producer.encode()) <= PRODUCER_ID_BYTES_MAX:
        raise RefusedError(400, f"Producer-Id must have 1 to {PRODUCER_ID_BYTES_MAX} bytes")
    return Claim(producer, _number("Producer-Epoch", epoch), _number("Producer-Seq", number))


def _number(name: str, text: str) -> int:
    if not _DIGITS.fullmatch(text) or int(text) > PRODUCER_NUMBER_MAX:
        raise RefusedError(400, f"{name} must be a whole number below 2^53")
    return int(text)
