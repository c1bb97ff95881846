"""Export of a topic to a Delta table, against Spark writing the same rows from Parquet to Parquet.

Both are timed completely, in one Spark session and in turns, with warm files. The job also reads back and
fsyncs what it has written, and informs the server; Spark's copy does none of that.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load.load import TOPIC, VerificationError
from bench.measure import Part, in_turns, warm_up
from bench.options import Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM_UPS = 2

EXPORT, COPY = "export to Delta", "Spark: Parquet to Parquet"
OF_COPY = 0.8


def measure(
    part: Part, options: Options, say: Callable[[str], None], url: str, records: int
) -> None:
    from headrace.spark import session

    root = options.dir / "export"
    shutil.rmtree(root, ignore_errors=True)
    spark = session("headrace-bench", master="local[2]")
    try:
        say(f"making Parquet files of {records:,} records")
        _make_parquet(spark, root, url)
        actions = {COPY: lambda: _copy(spark, root), EXPORT: lambda: _export(root, url)}
        warm_up(EXPORT, WARM_UPS, actions.values(), say)
        for run in in_turns(options.repeat, records, actions, say):
            part.add(run)
            _verify(root, records)
    finally:
        spark.stop()
        shutil.rmtree(root, ignore_errors=True)
    claim = f"{EXPORT}: {records:,} records of a topic, against Parquet to Parquet"
    part.compare(claim, EXPORT, COPY, lambda run: run.rate, OF_COPY, at_least=True)


def _make_parquet(spark: SparkSession, root: Path, url: str) -> None:
    topic = spark.read.format("headrace").option("url", url).option("subscribe", TOPIC.decode())
    types = (
        "topic string, epoch long, offset long, ordinal long, timestamp timestamp, payload binary"
    )
    topic.schema(types).load().write.parquet(str(root / "rows"))


def _copy(spark: SparkSession, root: Path) -> None:
    spark.read.parquet(str(root / "rows")).write.mode("overwrite").parquet(str(root / "copy"))


def _export(root: Path, url: str) -> None:
    from headrace.pipeline.export.job import export

    shutil.rmtree(root / "lake", ignore_errors=True)
    export(root / "lake", [TOPIC.decode()], url=url, take_over=True)


def _verify(root: Path, records: int) -> None:
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    lake = DeltaTable(str(root / "lake")).to_pyarrow_dataset()
    copies = ds.dataset(root / "copy", format="parquet")
    for what, found in ((EXPORT, lake.count_rows()), (COPY, copies.count_rows())):
        if found != records:
            raise VerificationError(f"{what}: {found:,} rows instead of {records:,}")
