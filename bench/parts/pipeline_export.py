"""Export of a topic to a Delta table, against Spark writing the same rows from Parquet to Parquet.

All are timed completely, in one Spark session and in turns, with warm files. The job also reads back and
fsyncs what it has written, and informs the server; Spark's copy does none of that. The S3 server of the third
measurement runs on the same cores.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load.load import TOPIC, VerificationError
from bench.measure import Part, in_turns, warm_up
from bench.options import Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.fakes.s3_server import S3Server

WARM_UPS = 2

EXPORT, COPY = "export to Delta", "Spark: Parquet to Parquet"
TO_S3 = "export to Delta in S3"
OF_COPY = 1.0
OF_DIRECTORY = 0.5


def measure(
    part: Part, options: Options, say: Callable[[str], None], url: str, records: int
) -> None:
    from headrace.spark import session
    from tests.fakes.s3_server import S3Server

    root = options.dir / "export"
    shutil.rmtree(root, ignore_errors=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        s3 = stack.enter_context(S3Server(root / "s3"))
        spark = session("headrace-bench", master="local[2]")
        stack.callback(spark.stop)
        say(f"making Parquet files of {records:,} records")
        _make_parquet(spark, root, url)
        actions = {
            COPY: lambda: _copy(spark, root),
            EXPORT: lambda: _export(root, url),
            TO_S3: lambda: _export_to_s3(s3, url, records),
        }
        warm_up(EXPORT, WARM_UPS, actions.values(), say)
        for run in in_turns(options.repeat, records, actions, say):
            part.add(run)
            _verify(root, records)
    claim = f"{EXPORT}: {records:,} records of a topic, against Parquet to Parquet"
    part.compare(claim, EXPORT, COPY, lambda run: run.rate, OF_COPY, at_least=True)
    claim = f"{TO_S3}: the same records, against the directory"
    part.compare(claim, TO_S3, EXPORT, lambda run: run.rate, OF_DIRECTORY, at_least=True)


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


def _export_to_s3(server: S3Server, url: str, records: int) -> None:
    from headrace.pipeline.export.job import export

    bucket = server.bucket()
    options = bucket.options
    done = export(bucket.url, [TOPIC.decode()], url=url, storage_options=options, take_over=True)
    if done.records != records:
        raise VerificationError(f"{TO_S3}: {done.records:,} rows instead of {records:,}")
    server.remove(bucket)


def _verify(root: Path, records: int) -> None:
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    lake = DeltaTable(str(root / "lake")).to_pyarrow_dataset()
    copies = ds.dataset(root / "copy", format="parquet")
    for what, found in ((EXPORT, lake.count_rows()), (COPY, copies.count_rows())):
        if found != records:
            raise VerificationError(f"{what}: {found:,} rows instead of {records:,}")
