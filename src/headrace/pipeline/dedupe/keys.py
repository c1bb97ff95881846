"""Keys of rows: a column, a value in JSON payloads, or the payload; as hashes of 16 bytes. Pure.

A hash covers topic and key, so equal keys of two topics have different hashes. It has 128 bits of SHA-256:
among a trillion rows, no two keys have the same hash by chance.
"""

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
from headrace.pipeline.json_path import Path, find, parse_path

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


def _in_json(payload: bytes, path: Path) -> Identity:
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
