"""The last message of each channel: the job against `groupBy.agg(max_by)` over the same Parquet files.

Both are timed completely, in one Spark session and in turns, with warm files. The job writes and commits its
table; the query discards its rows. The lake is made here, as an export would make it: sending this number of
messages through a server and its processors would take longer than all the rest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load.lake import make_lake
from bench.load.load import VerificationError
from bench.measure import Part, in_turns, warm_up
from bench.options import Options
from bench.parts.pipeline_growth import check_growth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.lake.files.writing import RecordRows

CHANNELS, CHANNELS_QUICK = 10_000, 2_000
FEWER = 1_000
"""Channels of the lake that shows how the cost of a message grows."""
EACH = 1000
CONTENT_BYTES = 100
FILES = 20
WARM_UPS = 3
EPOCH = 1_794_782_595_071

LAST, MAX_BY = "aggregate --reducer last", "Spark: groupBy.agg(max_by)"
SMALL = "aggregate of fewer channels"
OF_MAX_BY = 1.5


def measure(part: Part, options: Options, say: Callable[[str], None]) -> None:
    from headrace.spark import session

    channels = CHANNELS_QUICK if options.quick else CHANNELS
    messages = channels * EACH
    root = options.dir / "aggregate"
    shutil.rmtree(root, ignore_errors=True)
    try:
        say(f"making a lake of {messages:,} messages of {channels:,} channels")
        make_lake(root / "lake", _files(channels))
        make_lake(root / "small", _files(FEWER))
        spark = session("headrace-bench", master="local[2]")
        try:
            actions = {MAX_BY: lambda: _max_by(spark, root), LAST: lambda: _last(root)}
            warm_up(LAST, WARM_UPS, actions.values(), say)
            for run in in_turns(options.repeat, messages, actions, say):
                part.add(run)
            fewer = {SMALL: lambda: _last(root, "small", "few")}
            for run in in_turns(options.repeat, FEWER * EACH, fewer, say):
                part.add(run)
            _verify(root, channels)
        finally:
            spark.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    claim = f"{LAST}: {messages:,} channel messages over the lake, against max_by"
    part.compare(claim, LAST, MAX_BY, lambda run: run.rate, OF_MAX_BY, at_least=True)
    claim = f"{channels // FEWER} × as many channels"
    check_growth(part, claim, LAST, SMALL, "aggregate", "message")


def _last(root: Path, lake: str = "lake", into: str = "states") -> None:
    from headrace.pipeline.aggregate.job import aggregate

    shutil.rmtree(root / into, ignore_errors=True)
    aggregate(root / lake, root / into, reducer="last")


def _max_by(spark: SparkSession, root: Path) -> None:
    from pyspark.sql import functions as f

    files = [str(path) for path in (root / "lake").glob("date=*/*.parquet")]
    rows = spark.read.parquet(*files).groupBy("topic").agg(f.max_by("payload", "offset"))
    rows.write.format("noop").mode("overwrite").save()


def _verify(root: Path, channels: int) -> None:
    import pyarrow.parquet as pq

    from headrace.lake.states import StatesTable
    from headrace.lake.storage.storage import storage_of

    table = StatesTable.open(storage_of(root / "states"))
    assert table is not None
    found = [pq.read_table(root / "states" / name) for name in table.files()]
    states = {state for one in found for state in one["state"].to_pylist()}
    count = sum(one.num_rows for one in found)
    if (count, states) != (channels, {_content(EACH)}):
        raise VerificationError(f"{count} states of {channels} channels, {len(states)} different")


# Making of the lake


def _content(number: int) -> bytes:
    return json.dumps({"insert": f"{number:0{CONTENT_BYTES - 14}}"}).encode()


def _files(channels: int) -> Iterator[Iterator[RecordRows]]:
    rows = _rows(channels)
    for _ in range(FILES):
        yield islice(rows, channels // FILES)


def _rows(channels: int) -> Iterator[RecordRows]:
    """Yield the rows of each channel, with the same messages in all."""
    import numpy as np
    import pyarrow as pa

    from headrace.lake.files.writing import RecordRows
    from headrace.lake.format import SCHEMA
    from headrace.payload.channel import Content, StoredMessage, encode_message

    payloads = [
        encode_message(StoredMessage("bench", number, Content(_content(number), is_json=True)))
        for number in range(1, EACH + 1)
    ]
    data = memoryview(b"".join(len(one).to_bytes(4, "big") + one for one in payloads))
    boundaries = np.cumsum([0, *(4 + len(one) for one in payloads)], dtype=np.int64)
    ms = np.full(EACH, EPOCH, np.int64)
    columns = [
        pa.array(np.full(EACH, EPOCH, np.int64)),
        pa.array(boundaries[:-1]),
        pa.array(np.arange(EACH, dtype=np.int64)),
        pa.array(ms * 1000, SCHEMA.field("timestamp").type),
        pa.array(payloads, pa.binary()),
    ]
    for number in range(channels):
        topic = f"$channel/doc/{number:08}"
        arrays = [pa.array([topic] * EACH), *columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
        yield RecordRows(batch, data)
