"""Keys of rows, as hashes of 16 bytes; and the decision which rows are the first of their key. Pure.

A key is a column, a value in JSON payloads, or the payload. A place in JSON payloads is a singular path of
RFC 9535, such as `$.order.lines[0]['unit price']`. A hash covers topic and key, so equal keys of two topics
have different hashes. It has 128 bits: among a trillion rows, no two keys have the same hash by chance. Each
table has a secret, so nobody can publish a message that hides another one.

A window begins with a row that is kept. The first row after the window is kept too, and begins the next
window. Rows count in the order of their offsets, so the result does not depend on the number of runs.
"""

import re
import secrets
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import OptionError
from headrace.lake.format import LakeError, Shape
from headrace.lake.storage.storage import Storage
from headrace.model import legacy_name
from headrace.payload.json_limits import BadJSONError, decode_json

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]
"""Array of `ROW` or `KEY`."""

_BUCKETS_MIN, _BUCKETS_MAX = 4, 1024
_BUCKET_ROWS = 1 << 20
"""Approximate number of rows in memory at a time, including the known keys."""

_SECRET_DIGITS = 16
"""Number of hexadecimal digits that a hash of 64 bits takes as its secret."""


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


def key_of(column: str, json_path: str, *, payload: bool) -> Key:
    given = [
        *([Key(KeyKind.COLUMN, column)] if column else []),
        *([Key(KeyKind.JSON, json_path)] if json_path else []),
        *([Key(KeyKind.PAYLOAD)] if payload else []),
    ]
    if len(given) != 1:
        raise OptionError("say what identifies a row: a column, a JSON path, or the payload")
    if json_path:
        try:
            parse_path(json_path)
        except ValueError as error:
            raise OptionError(str(error)) from None
    return given[0]


def check_column(key: Key, shape: Shape, lake: Storage) -> None:
    if key.kind is not KeyKind.COLUMN or key.name == "payload":
        return
    if key.name not in shape.decoded.names:
        names = ", ".join(["payload", *shape.decoded.names])
        raise LakeError(
            f"{lake.address} has no column {key.name!r} that could identify rows: use one of {names}"
        )
    kind = shape.decoded.field(key.name).type
    if pa.types.is_nested(kind):
        raise LakeError(f"column {key.name!r} holds nested values: name one of a plain type")


def identities(key: Key, column: pa.Array) -> pa.BinaryArray:
    """Return the bytes that are hashed for each row; null for a row without a key."""
    if key.kind is KeyKind.JSON:
        path = parse_path(key.name)
        return pa.array([_in_json(payload, path) for payload in column.to_pylist()], pa.binary())
    is_bytes = pa.types.is_binary(column.type) or pa.types.is_string(column.type)
    return (column if is_bytes else column.cast(pa.string())).cast(pa.binary())


def _in_json(payload: bytes, path: "JsonPath") -> bytes | None:
    """Return a value as JSON that is the same for equal values: members sorted, 1.0 as 1; or None."""
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
    """Length and name of the topic."""
    word: int
    """Hash that distinguishes topics."""


def topic_hash(name: str) -> TopicHash:
    encoded = legacy_name(name).encode()
    prefix = len(encoded).to_bytes(2) + encoded
    return TopicHash(prefix, int.from_bytes(sha256(prefix).digest()[:8], "little"))


def new_secret() -> str:
    """Return a secret for the two words of a hash."""
    return secrets.token_hex(_SECRET_DIGITS)  # two digits for each byte


def hashes(
    secret: str | msgspec.UnsetType,
    topics: Sequence[TopicHash],
    which: Numbers,
    found: pa.BinaryArray,
) -> tuple[Words, Words]:
    """Return two words of the hash for each identity, whose topic is at `which` in `topics`.

    Each is SipHash with one half of the secret. Earlier versions had no secret, and used SHA-256.
    """
    values = found.to_numpy(zero_copy_only=False)
    if secret is msgspec.UNSET:
        prefixes = [topics[place].prefix for place in which.tolist()]
        digests = [
            sha256(prefix + one).digest() for prefix, one in zip(prefixes, values, strict=True)
        ]
        words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 4)
        return words[:, 0], words[:, 1]
    # The import takes half a second.
    from pandas.util import hash_array

    words = np.array([one.word for one in topics], np.uint64)[which]
    halves = secret[:_SECRET_DIGITS], secret[_SECRET_DIGITS:]
    high, low = (hash_array(values, hash_key=half, categorize=False) ^ words for half in halves)
    return high, low


# The first row of each key

KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("topic", "<u8"), ("ms", "<i8")])
"""A known key: two words of its hash, one of its topic's, and the time of its last kept row."""

ROW = np.dtype([*KEY.descr, ("offset", "<i8"), ("place", "<i8")])
"""A row with its key. The place identifies the row within a run."""


class DedupeDecision(NamedTuple):
    dropped: Numbers
    """Places of rows that are duplicates, sorted."""
    keys: Rows
    """Keys that the next rows are compared with, as `KEY`."""


def decide(known: Rows, rows: Rows, window_ms: int | None) -> DedupeDecision:
    """Decide which rows, in any order, are dropped. Without a window, keys are known for ever."""
    both = np.empty(len(known) + len(rows), KEY)
    for name in KEY.names or ():
        both[name] = np.concatenate((known[name], rows[name]))
    # The known entry of a key comes before all its rows.
    offsets = np.concatenate((np.full(len(known), -1, np.int64), rows["offset"]))
    order = _order(both["high"], both["low"], offsets)
    found = both.take(order)  # some times faster than an index
    begins = np.ones(len(order) + 1, bool)
    begins[1:-1] = _differ(found["high"]) | _differ(found["low"])
    stays = begins[:-1].copy()
    if window_ms is not None:
        _begin_windows(found["ms"], begins, stays, window_ms)
    dropped = np.sort(rows["place"][order[~stays] - len(known)])
    # Keep the last kept row of each key.
    kept = np.flatnonzero(stays)
    is_last = np.append(_differ(np.cumsum(begins[:-1])[kept]), True)[: len(kept)]
    keys = found.take(kept[is_last])
    if window_ms is not None:
        keys = _open_ones(found, keys, window_ms)
    return DedupeDecision(dropped, keys)


def _order(high: Words, low: Words, offsets: Numbers) -> Numbers:
    """Return the order of rows by key and offset."""
    order = np.argsort(high)
    is_last = np.append(_differ(high[order]), True)[: len(order)]
    # Most keys have only one row, so only the others are sorted by more than one word.
    several = np.flatnonzero(~(is_last & np.roll(is_last, 1)))
    some = order[several]
    order[several] = some[np.lexsort((offsets[some], low[some], high[some]))]
    return order


def _differ(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each value but the last if the next one is different."""
    found: npt.NDArray[np.bool_] = values[1:] != values[:-1]
    return found


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


def _open_ones(found: Rows, keys: Rows, window_ms: int) -> Rows:
    """Return the keys whose window has not ended yet. Times never decrease within a topic."""
    topics, which = np.unique(found["topic"], return_inverse=True)
    latest = np.zeros(len(topics), np.int64)
    np.maximum.at(latest, which, found["ms"])
    is_open = keys["ms"] + window_ms > latest[np.searchsorted(topics, keys["topic"])]
    return keys.compress(is_open)


def bucket_count(rows: int, before: int) -> int:
    """Return the number of buckets for these rows and keys: a power of two, never smaller than before.

    So each bucket is a part of one earlier bucket.
    """
    wanted = max(rows // _BUCKET_ROWS, before, _BUCKETS_MIN)
    return min(1 << (wanted - 1).bit_length(), _BUCKETS_MAX)


def buckets_of(rows: Rows, count: int) -> npt.NDArray[np.uint16]:
    """Return the bucket of each row or key. Small numbers are sorted faster."""
    return (rows["low"] % np.uint64(count)).astype(np.uint16)


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
