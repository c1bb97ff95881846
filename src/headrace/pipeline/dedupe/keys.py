"""Keys of rows, as hashes of 16 bytes; and the decision which rows are the first of their key. Pure.

A key is a column, a value in JSON payloads, or the payload. A place in JSON payloads is a singular path of
RFC 9535, such as `$.order.lines[0]['unit price']`. A hash covers topic and key, so equal keys of two topics
have different hashes. It has 128 bits of SHA-256: among a trillion rows, no two keys have the same hash by
chance.

A window begins with a row that is kept. The first row after the window is kept too, and begins the next
window. Rows count in the order of their offsets, so the result does not depend on the number of runs.
"""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.model import legacy_name
from headrace.payload.json_limits import BadJSONError, decode_json
from headrace.pipeline.tasks import Batches

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_BUCKETS_MIN, BUCKETS_MAX = 4, 1024
_BUCKET_ROWS = 1 << 20
"""Approximate number of rows in memory at a time, including the known keys."""

Identity = bytes | None
"""Bytes that are hashed; None for a row without a key."""


class KeyKind(StrEnum):
    COLUMN = "column"
    JSON = "json"
    PAYLOAD = "payload"


class Key(NamedTuple):
    kind: KeyKind
    name: str = ""
    """Name of the column, or the JSON path."""

    @property
    def column(self) -> str:
        """Column of the lake that contains the key."""
        return self.name if self.kind is KeyKind.COLUMN else "payload"

    @property
    def text(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


def identities(key: Key, column: pa.Array) -> Sequence[Identity]:
    found: Sequence[Identity]
    if key.kind is KeyKind.JSON:
        path = parse_path(key.name)
        found = [_in_json(payload, path) for payload in column.to_pylist()]
    else:
        is_bytes = pa.types.is_binary(column.type) or pa.types.is_string(column.type)
        found = (column if is_bytes else column.cast(pa.string())).cast(pa.binary()).to_pylist()
    return found


def _in_json(payload: bytes, path: "JsonPath") -> Identity:
    """Return the value as JSON that is the same for equal values: members sorted, 1.0 as 1."""
    try:
        value = find(decode_json(payload), path)
    except BadJSONError:
        return None
    if value is None:
        return None
    if not isinstance(value, str):
        value = _plain(value)
    return msgspec.json.encode(value, order="deterministic")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


class TopicHash(NamedTuple):
    prefix: bytes
    """Bytes that are hashed before the identity of each row of the topic."""
    word: int
    """Hash that distinguishes topics."""


def topic_hash(name: str) -> TopicHash:
    encoded = legacy_name(name).encode()
    prefix = len(encoded).to_bytes(2) + encoded
    return TopicHash(prefix, int.from_bytes(sha256(prefix).digest()[:8], "little"))


def hashes(prefixes: Iterable[bytes], found: Sequence[Identity]) -> tuple[Words, Words]:
    """Return two words of the hash for each row that has a key."""
    digests = [
        sha256(prefix + one).digest()
        for prefix, one in zip(prefixes, found, strict=True)
        if one is not None
    ]
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 4)
    return words[:, 0], words[:, 1]


# The first row of each key


class Keys(NamedTuple):
    """Known keys, each with the time of its last kept row."""

    high: Words
    low: Words
    topic: Words
    ms: Numbers

    def at(self, places: Any) -> "Keys":
        return Keys(self.high[places], self.low[places], self.topic[places], self.ms[places])


class KeyRows(NamedTuple):
    """Rows of some keys, in any order."""

    high: Words
    low: Words
    topic: Words
    ms: Numbers
    offset: Numbers


class DedupeDecision(NamedTuple):
    dropped: Numbers
    """Places of rows that are duplicates."""
    keys: Keys
    """Keys that the next rows are compared with."""


def decide(known: Keys, rows: KeyRows, window_ms: int | None) -> DedupeDecision:
    """Decide which rows are dropped. Without a window, keys are known for ever."""
    count = len(known.ms)
    both = Keys(
        np.concatenate((known.high, rows.high)),
        np.concatenate((known.low, rows.low)),
        np.concatenate((known.topic, rows.topic)),
        np.concatenate((known.ms, rows.ms)),
    )
    # The known entry of a key comes before all its rows.
    offsets = np.concatenate((np.full(count, -1, np.int64), rows.offset))
    order = np.lexsort((offsets, both.low, both.high))
    found = both.at(order)
    begins = np.ones(len(order) + 1, bool)
    begins[1:-1] = (found.high[1:] != found.high[:-1]) | (found.low[1:] != found.low[:-1])
    stays = begins[:-1].copy()
    if window_ms is not None:
        _begin_windows(found.ms, begins, stays, window_ms)
    dropped = order[~stays] - count
    # Keep the last kept row of each key.
    kept = np.flatnonzero(stays)
    group = np.cumsum(begins[:-1])[kept]
    last = kept[np.append(group[1:] != group[:-1], True)] if len(kept) else kept
    keys = found.at(last)
    if window_ms is not None:
        keys = _open_ones(found, keys, window_ms)
    return DedupeDecision(dropped, keys)


def _begin_windows(
    ms: Numbers, begins: npt.NDArray[np.bool_], stays: npt.NDArray[np.bool_], window_ms: int
) -> None:
    """Keep also the rows that come after the window of their key has ended."""
    # Most keys have only one row. The loop is only for the others.
    several = np.flatnonzero(~(begins[:-1] & begins[1:]))
    over = 0
    for place, at, is_first in zip(
        several.tolist(), ms[several].tolist(), begins[several].tolist(), strict=True
    ):
        if is_first or at >= over:
            over = at + window_ms
            stays[place] = True


def _open_ones(found: Keys, keys: Keys, window_ms: int) -> Keys:
    """Return the keys whose window has not ended yet. Times never decrease within a topic."""
    topics, which = np.unique(found.topic, return_inverse=True)
    latest = np.zeros(len(topics), np.int64)
    np.maximum.at(latest, which, found.ms)
    is_open = keys.ms + window_ms > latest[np.searchsorted(topics, keys.topic)]
    return keys.at(is_open)


def bucket_count(rows: int, before: int) -> int:
    """Return the number of buckets for these rows and keys: a power of two, never smaller than before.

    So each bucket is a part of one earlier bucket, and consists of whole staged buckets.
    """
    wanted = max(rows // _BUCKET_ROWS, before, _BUCKETS_MIN)
    return min(1 << (wanted - 1).bit_length(), BUCKETS_MAX)


def joined_buckets(staged: Batches, count: int) -> Batches:
    """Join batches that were staged in the maximum number of buckets into `count` buckets."""
    found: Batches = {}
    for bucket, batches in staged.items():
        found.setdefault(bucket % count, []).extend(batches)
    return found


# Paths into JSON values

JsonPath = tuple[str | int, ...]
"""Steps of a path: names of members, numbers of elements."""

_STEP = re.compile(
    r"""\.([^\W\d]\w*) | \[(0|[1-9][0-9]{0,8})\] | \[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""",
    re.VERBOSE | re.DOTALL,
)
_IN_SINGLE_QUOTES = re.compile(r'\\.|"', re.DOTALL)
_AS_IN_DOUBLE = {"\\'": "'", '"': '\\"'}


def parse_path(text: str) -> JsonPath:
    """Parse a path; raise ValueError with a sentence about the part that is not understood."""
    if not text.startswith("$"):
        raise ValueError(f"a path begins with $, such as $.id; {text[:40]!r} does not")
    found: list[str | int] = []
    at = 1
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None:
            raise ValueError(
                f"{text[at : at + 40]!r} is not a step of a path: use .name, ['any name'] or [0]; a path "
                "names one place, not several"
            )
        name, number, in_quotes = step.groups()
        if number is not None:
            found.append(int(number))
        else:
            found.append(_unquoted(in_quotes) if in_quotes is not None else name)
        at = step.end()
    return tuple(found)


def find(value: Any, path: JsonPath) -> Any:
    """Return the value at the path, or None if there is none."""
    for step in path:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
    return value


def _unquoted(text: str) -> str:
    inner = text[1:-1]
    if text[0] == "'":
        inner = _IN_SINGLE_QUOTES.sub(lambda one: _AS_IN_DOUBLE.get(one[0], one[0]), inner)
    try:
        return msgspec.json.decode(f'"{inner}"', type=str)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(f"{text[:40]} in a path is not a string: {error}") from None
