"""Keys of rows: a column, a value in JSON payloads, or the payload; as hashes of 16 bytes. Pure.

A hash covers topic and key, so equal keys of two topics have different hashes. It has 128 bits of SHA-256:
among a trillion rows, no two keys have the same hash by chance. A place in JSON payloads is a singular path
of RFC 9535, such as `$.order.lines[0]['unit price']`.
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

Words = npt.NDArray[np.uint64]

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
