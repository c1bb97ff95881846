"""Rows made by hand: payloads of a topic, as a reader of the log passes them to a writer."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.lake.files.writing import FileLayout, RecordRows, Writer, WrittenFile
from headrace.lake.format import SCHEMA, Shape
from headrace.lake.storage.storage import Storage, storage_of
from headrace.log.records import pack_record

DAY_MS = 86_400_000
NOON_MS = 20_000 * DAY_MS + DAY_MS // 2  # 2024-10-04
_numbers = itertools.count()
_tokens = itertools.count(1)


def rows(
    topic: str,
    payloads: Sequence[bytes],
    *,
    offset: int = 0,
    ordinal: int = 0,
    epoch: int = 1,
    ms: Sequence[int] | None = None,
) -> RecordRows:
    data = b"".join(map(pack_record, payloads))
    ends = np.cumsum([len(payload) + 4 for payload in payloads], dtype=np.int64)
    boundaries = offset + np.concatenate([[0], ends]).astype(np.int64)
    times = np.array(ms or [NOON_MS] * len(payloads), np.int64)
    count = len(payloads)
    columns = pa.RecordBatch.from_arrays(
        [
            pa.array([topic] * count),
            pa.array([epoch] * count, pa.int64()),
            pa.array(boundaries[:-1]),
            pa.array(range(ordinal, ordinal + count), pa.int64()),
            pa.array(times * 1000, pa.timestamp("us", tz="UTC")),
            pa.array(payloads, pa.binary()),
        ],
        schema=SCHEMA,
    )
    return RecordRows(columns, memoryview(data))


def token() -> int:
    """Return the token of another commit."""
    return next(_tokens)


def write(
    lake: Path | Storage,
    *some: RecordRows,
    by_topic: bool = False,
    layout: FileLayout | None = None,
) -> list[WrittenFile]:
    name = f"{next(_numbers):08}-{0:012x}-0000"
    writer = Writer(storage_of(lake), name, Shape(by_topic), layout or FileLayout())
    for one in some:
        writer.add(one)
    return writer.finish()
