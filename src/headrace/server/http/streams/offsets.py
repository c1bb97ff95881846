"""Offset tokens of Durable Streams, which are positions of topics in a form that sorts as text.

A token is `EPOCH_OFFSET`, padded with zeros. Serials of Wombat (`EPOCH@OFFSET`) and offsets of Figg, as
`@OFFSET`, are accepted too. Elsewhere: what a token means for a topic (`reading.py`).
"""

import re
from enum import Enum
from typing import NamedTuple

from headrace.model import Position
from headrace.server.http.streams.refusals import RefusedError

_TOKEN = re.compile(r"(\d{0,19})[_@](\d{1,20})", re.ASCII)
_VALUE_MAX = (1 << 63) - 1


class From(Enum):
    START = "-1"
    NOW = "now"


class Place(NamedTuple):
    """A place that a client was told earlier, perhaps over another protocol."""

    epoch: int | None
    """Life of the topic that the offset belongs to; None if the client does not know it."""
    offset: int


def encode(position: Position) -> str:
    return f"{position.epoch:016d}_{position.offset:020d}"


def parse(texts: list[str]) -> From | Place:
    """Return the place that a request reads from, given the values of its parameter `offset`."""
    if not texts:
        return From.START
    if len(texts) > 1:
        raise RefusedError(400, "offset is given twice")
    [text] = texts
    if text in (From.START.value, From.NOW.value):
        return From(text)
    found = _TOKEN.fullmatch(text)
    if found is None:
        raise RefusedError(
            400, f"offset must be -1, now or an offset that was given, not {text[:60]!r}"
        )
    epoch = int(found[1]) if found[1] else None
    offset = int(found[2])
    if (epoch or 0) > _VALUE_MAX or offset > _VALUE_MAX:
        raise RefusedError(400, "this offset was never given: it is too large")
    if epoch == offset == 0:
        return (
            From.START
        )  # no topic has this epoch; clients use this token for the start of any stream
    return Place(epoch, offset)
