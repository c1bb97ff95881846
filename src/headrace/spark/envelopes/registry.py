"""What payloads are: the registry of envelopes for `decode` and `encode`.

A protocol whose records have an envelope registers it here, under its name; source and sink know no
other place.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import DataType

from headrace.spark.options import OptionError

_TASK_ROWS = 1_000_000_000
_TASKS = 9_000_000
"""Together they stay below what JavaScript counts exactly."""


class Stamps:
    """What tells the rows of one task from all others, for envelopes that have ids.

    `node` is of one write, or of one start of a query; Spark never gives an attempt's number twice in it.
    """

    def __init__(self, node: str, attempt: int) -> None:
        self.node = node
        self._next = attempt % _TASKS * _TASK_ROWS

    def take(self, count: int) -> int:
        """The first of so many numbers that no other row has."""
        first = self._next
        self._next += count
        return first


class Envelope(Protocol):
    """How columns lie in a payload."""

    prefix: str
    """The name space that rows of this envelope are written to; empty for ordinary topics."""

    own: Mapping[str, tuple[DataType, ...]]
    """Columns that every such payload has, with the types they may be read as: the first unless a schema says
    another. All other columns are named by users."""

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        """The columns of these fields; what a payload does not hold is null."""

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        """Which of these columns are written; raises OptionError when they make no payload."""

    def encode(self, columns: pa.RecordBatch, stamps: Stamps) -> pa.BinaryArray:
        """Payloads that hold these columns."""


_envelopes: dict[str, Envelope] = {}


def register_envelope(name: str, envelope: Envelope) -> None:
    _envelopes[name] = envelope


def envelope_of(name: str) -> Envelope:
    # Here, so that the registry itself needs none of them.
    from headrace.spark import channel_envelope, json_envelope, logux_envelope  # noqa: F401

    if name not in _envelopes:
        raise OptionError(f"decode and encode know {', '.join(sorted(_envelopes))}, not {name!r}")
    return _envelopes[name]
