"""Registry of envelopes for the options `decode` and `encode`.

A protocol whose records have an envelope registers it here, under its name. Source and sink find envelopes
only here.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import DataType

from headrace.errors import OptionError

_TASK_ROWS = 1_000_000_000
_TASKS = 9_000_000
"""The product of the two stays below the largest integer that JavaScript represents exactly."""


class Stamps:
    """Numbers that are unique to each row of a task, for envelopes with ids.

    `node` is unique to one write, or to one start of a query. Within it, Spark never uses an attempt id
    twice.
    """

    def __init__(self, node: str, attempt: int) -> None:
        self.node = node
        self._next = attempt % _TASKS * _TASK_ROWS

    def take(self, count: int) -> int:
        """Reserve `count` numbers that no other row has, and return the first."""
        first = self._next
        self._next += count
        return first


class PayloadColumns(Protocol):
    """The conversion between columns and payloads for one kind of envelope."""

    prefix: str
    """Name space that rows of this envelope are written to; empty for ordinary topics."""

    own: Mapping[str, tuple[DataType, ...]]
    """Columns that every such payload has, with the types they may be read as.

    The first type is the default, unless a schema says otherwise. Users name all other columns.
    """

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        """Decode these fields from payloads; a value that a payload does not hold is null."""

    def members(self, fields: Mapping[str, DataType]) -> tuple[str, ...]:
        """Return the columns that are written; raise OptionError if they do not make a payload."""

    def encode(self, columns: pa.RecordBatch, stamps: Stamps) -> pa.BinaryArray:
        """Encode these columns as payloads."""


_envelopes: dict[str, PayloadColumns] = {}


def register_envelope(name: str, envelope: PayloadColumns) -> None:
    _envelopes[name] = envelope


def envelope_of(name: str) -> PayloadColumns:
    # Imported here, because the envelopes import the registry; importing one registers it.
    from headrace.spark.envelopes import channel, json, logux  # noqa: F401

    if name not in _envelopes:
        raise OptionError(f"decode and encode know {', '.join(sorted(_envelopes))}, not {name!r}")
    return _envelopes[name]
