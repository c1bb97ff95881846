"""Rows with duplicates removed: the job against Spark's `dropDuplicates` over the same Parquet files.

Both are timed completely, in one Spark session and in turns, with warm files. Spark writes Parquet files. The
job also keeps the keys for its next run, fsyncs and reads back what it has written, and commits its table.
"""

from __future__ import annotations

import binascii
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load.lake import make_lake
from bench.load.load import VerificationError
from bench.measure import Part, in_turns, warm_up
from bench.options import Options
from bench.parts.pipeline_growth import check_growth

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from pyspark.sql import Row, SparkSession

    from headrace.lake.files.writing import RecordRows

FILES, FILES_QUICK = 20, 4
FEWER = 2
"""Files of the lake that shows how the cost of a row grows."""
TOPICS = 10
EACH = 50_000
"""Rows of a topic in a file."""
AGAIN = 0.1
"""Share of the rows that repeat an earlier row of their topic."""
WORDS = 7
WARM_UPS = 2
EPOCH = 1_794_782_595_071

DEDUPE, DROP = "dedupe --payload", "Spark: dropDuplicates"
SMALL = "dedupe --payload of fewer rows"
OF_DROP = 0.7


def measure(part: Part, options: Options, say: Callable[[str], None]) -> None:
    from headrace.spark import session

    files = FILES_QUICK if options.quick else FILES
    rows = files * TOPICS * EACH
    root = options.dir / "dedupe"
    shutil.rmtree(root, ignore_errors=True)
    try:
        say(f"making a lake of {rows:,} rows")
        make_lake(root / "lake", _files(files))
        make_lake(root / "small", _files(FEWER))
        spark = session("headrace-bench", master="local[2]")
        try:
            actions = {DROP: lambda: _drop(spark, root), DEDUPE: lambda: _dedupe(root)}
            warm_up(DEDUPE, WARM_UPS, actions.values(), say)
            for run in in_turns(options.repeat, rows, actions, say):
                part.add(run)
            fewer = {SMALL: lambda: _dedupe(root, "small", "few")}
            for run in in_turns(options.repeat, FEWER * TOPICS * EACH, fewer, say):
                part.add(run)
            _verify(spark, root, rows)
        finally:
            spark.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    claim = f"{DEDUPE}: {rows:,} rows, {AGAIN:.0%} duplicates, against dropDuplicates"
    part.compare(claim, DEDUPE, DROP, lambda run: run.rate, OF_DROP, at_least=True)
    claim = f"{files // FEWER} × as many rows"
    check_growth(part, claim, DEDUPE, SMALL, "dedupe", "row")


def _dedupe(root: Path, lake: str = "lake", into: str = "rows") -> None:
    from headrace.pipeline.dedupe.job import dedupe

    shutil.rmtree(root / into, ignore_errors=True)
    dedupe(root / lake, root / into, payload=True, window_s=None)


def _drop(spark: SparkSession, root: Path) -> None:
    rows = spark.read.parquet(*_paths(root / "lake"))
    rows.dropDuplicates(["topic", "payload"]).write.mode("overwrite").parquet(str(root / "dropped"))


def _paths(lake: Path) -> list[str]:
    return [str(path) for path in lake.glob("date=*/*.parquet")]


def _verify(spark: SparkSession, root: Path, rows: int) -> None:
    from deltalake import DeltaTable

    ours = _sums(spark, DeltaTable(str(root / "rows")).file_uris())
    theirs = _sums(spark, [str(root / "dropped")])
    if ours != theirs or ours[0] != _firsts(rows):
        raise VerificationError(f"rows and their checksum are {ours}, and {theirs} with Spark")


def _sums(spark: SparkSession, paths: list[str]) -> Row:
    from pyspark.sql import functions as f

    # Spark keeps any of equal rows, so offsets differ.
    number = f.xxhash64("topic", "payload").cast("decimal(38, 0)")
    found = spark.read.parquet(*paths).agg(f.count("*"), f.sum(number)).first()
    assert found is not None
    return found


# Making of the lake


def _firsts(rows: int) -> int:
    return rows - int(EACH * AGAIN) * (rows // EACH)


def _files(count: int) -> Iterator[Iterator[RecordRows]]:
    """Yield files that have rows of all topics, with some rows of all earlier files again."""
    import numpy as np

    chance = np.random.default_rng(7)
    again = int(EACH * AGAIN)
    for number in range(count):
        first = number * (EACH - again)
        some = []
        for topic in range(TOPICS):
            new = np.arange(first, first + EACH - again)
            ids = np.concatenate((new, chance.integers(0, first + EACH - again, again)))
            # A row that comes before the row that it repeats is the first one instead.
            chance.shuffle(ids)
            some.append(_rows(f"orders/{topic:02}", ids, number * EACH))
        yield iter(some)


def _rows(topic: str, ids: npt.NDArray[np.int64], ordinal: int) -> RecordRows:
    import numpy as np
    import pyarrow as pa

    from headrace.lake.files.writing import RecordRows
    from headrace.lake.format import SCHEMA
    from headrace.model import RECORD_HEADER_BYTES

    payloads = _payloads(ids)
    count, size = payloads.shape
    record = RECORD_HEADER_BYTES + size
    records = np.empty((count, record), np.uint8)
    records[:, :RECORD_HEADER_BYTES] = np.frombuffer(size.to_bytes(RECORD_HEADER_BYTES), np.uint8)
    records[:, RECORD_HEADER_BYTES:] = payloads
    boundaries = np.arange(ordinal, ordinal + count + 1, dtype=np.int64) * record
    ms = np.full(count, EPOCH, np.int64)
    buffers = [None, pa.py_buffer(np.arange(0, (count + 1) * size, size, dtype=np.int32))]
    columns = [
        pa.array([topic]).take(pa.array(np.zeros(count, np.int64))),
        pa.array(np.full(count, EPOCH, np.int64)),
        pa.array(boundaries[:-1]),
        pa.array(np.arange(ordinal, ordinal + count, dtype=np.int64)),
        pa.array(ms * 1000, SCHEMA.field("timestamp").type),
        pa.BinaryArray.from_buffers(pa.binary(), count, [*buffers, pa.py_buffer(payloads)]),
    ]
    return RecordRows(
        columns=pa.RecordBatch.from_arrays(columns, schema=SCHEMA),
        data=memoryview(records.tobytes()),
    )


def _payloads(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return one row of bytes for each id: JSON with digits that do not compress well."""
    import numpy as np

    odd = np.arange(1, 2 * WORDS, 2).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (ids.astype(np.uint64)[:, None] + np.uint64(1)) * odd
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    digits = np.frombuffer(binascii.hexlify(words.tobytes()), np.uint8).reshape(len(ids), -1)
    before, after = (np.frombuffer(text, np.uint8) for text in (b'{"order":"', b'"}'))
    found = [np.broadcast_to(text, (len(ids), len(text))) for text in (before, after)]
    return np.ascontiguousarray(np.hstack([found[0], digits, found[1]]))
