"""What payloads are: the registry of envelopes for `decode` and `encode`, and the one for JSON.

A protocol whose records have an envelope registers it here, under its name; source and sink know no
other place.
"""

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from headrace.spark.options import OptionError


class Envelope(Protocol):
    """How columns lie in a payload."""

    prefix: str
    """The name space that rows of this envelope are written to; empty for ordinary topics."""

    def decode(self, payloads: pa.BinaryArray, fields: Sequence[pa.Field]) -> list[pa.Array]:
        """The columns of these fields; what a payload does not hold is null."""

    def encode(self, columns: pa.RecordBatch) -> pa.BinaryArray:
        """Payloads that hold these columns."""


_envelopes: dict[str, Envelope] = {}


def register_envelope(name: str, envelope: Envelope) -> None:
    _envelopes[name] = envelope


def envelope_of(name: str) -> Envelope:
    # Here, so that the registry itself needs none of them.
    from headrace.spark import json_envelope  # noqa: F401

    if name not in _envelopes:
        raise OptionError(f"decode and encode know {', '.join(sorted(_envelopes))}, not {name!r}")
    return _envelopes[name]
