"""Spark: topics read and written as tables, against Spark's own Parquet, in one session and in turns.

The time is that of the whole query, as its user waits for it, including planning and starting tasks. Files
and the JVM are warm: the JVM compiles code that runs often, and the first few runs make a query up to twice
as fast.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bench.load import figg as load_figg
from bench.load import load
from bench.load.load import BLOCK, TOPIC, VerificationError
from bench.measure import Check, Part, Run, wait_for_quiet
from bench.options import Options
from bench.process import Headrace, cpu_s, process_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

NAME = "spark"
RECORDS, RECORDS_QUICK = 2_000_000, 400_000
FEW, SOME, MANY = 100_000, 1_000_000, 10_000_000
MANY_QUICK = 3_000_000
WARM_UPS = 16
IDLE_TOPICS, IDLE_S, IDLE_WARM_S = 1000, 20.0, 10.0

COUNT = "topic: count()"
LENGTH, LENGTH_PARQUET = "topic: sum(length(payload))", "Parquet: sum(length(payload))"
LENGTH_ALL = "topic: sum(length(payload)), reading all columns"
LENGTH_URL = "topic over url: sum(length(payload))"
COPY, COPY_PARQUET = "topic → Parquet", "Parquet → Parquet"
WRITE = "Parquet → topic, through the server"


def run(options: Options, say: Callable[[str], None]) -> Part:
    # Only this part needs these packages.
    from pyspark.sql import functions as f

    from headrace.spark import session

    records = RECORDS_QUICK if options.quick else RECORDS
    records = records // BLOCK * BLOCK
    part = Part(NAME, f"Spark: {records:,} records of 128 B, local[2], warm files")
    with Headrace(options.dir, "written") as server:
        say("publishing")
        server.start()
        _publish(server, TOPIC, records)
        server.settle()
        spark = session("headrace-bench", master="local[2]")
        try:
            bench = _Bench(spark, server, records)
            say("preparing")
            bench.frame().write.mode("overwrite").parquet(bench.parquet)
            bench.verify(bench.frame())
            total = f.sum(f.length("payload"))
            queries: dict[str, Callable[[], object]] = {
                COUNT: lambda: bench.frame().count(),
                LENGTH: lambda: bench.payloads().agg(total).collect(),
                LENGTH_ALL: lambda: bench.frame().agg(total).collect(),
                LENGTH_PARQUET: lambda: bench.parquet_frame().agg(total).collect(),
                LENGTH_URL: lambda: bench.payloads(over_url=True).agg(total).collect(),
                COPY: lambda: bench.copy(bench.frame()),
                COPY_PARQUET: lambda: bench.copy(bench.parquet_frame()),
                WRITE: bench.write,
            }
            for turn in range(WARM_UPS):
                say(f"warming up, {turn + 1} of {WARM_UPS}")
                for query in queries.values():
                    query()
            for turn in range(options.repeat):
                for label, query in queries.items():
                    say(f"{label}, {turn + 1} of {options.repeat}")
                    # The server moves written records to segments for a while, which must not affect the next
                    # query.
                    server.settle()
                    part.add(_timed(label, records, query))
            bench.verify_written()
            _flat(part, bench, options, say)
            bench.write_topics(IDLE_TOPICS)
            _idle(part, bench, "url", bench.url, say)
            _idle(part, bench, "path", bench.path, say)
        finally:
            spark.stop()
    _check(part)
    return part


class _Bench:
    def __init__(self, spark: SparkSession, server: Headrace, records: int) -> None:
        self.spark = spark
        self.server = server
        self.records = records
        self.url = f"http://{server.host}:{server.http_port}"
        self.path = str(server.dir / "data")
        self.parquet = str(server.dir / "parquet")
        self._written = 0

    def frame(self, topic: str = TOPIC.decode(), *, over_url: bool = False) -> DataFrame:
        return self._reader(topic, over_url).load()

    def payloads(self, *, over_url: bool = False) -> DataFrame:
        """Return a frame with only the payload. For Parquet, Spark omits unneeded columns by itself."""
        return self._reader(TOPIC.decode(), over_url).schema("payload binary").load()

    def _reader(self, topic: str, over_url: bool) -> DataFrameReader:
        reader = self.spark.read.format("headrace").option("subscribe", topic)
        return reader.option("url", self.url) if over_url else reader.option("path", self.path)

    def parquet_frame(self) -> DataFrame:
        return self.spark.read.parquet(self.parquet)

    def copy(self, frame: DataFrame) -> None:
        frame.write.mode("overwrite").parquet(str(self.server.dir / "copy"))

    def write(self) -> None:
        self._written += 1
        writer = self.parquet_frame().select("payload").write.format("headrace").mode("append")
        writer.option("url", self.url).option("topic", f"written-{self._written}").save()

    def write_topics(self, count: int) -> None:
        rows = self.spark.range(count).selectExpr("concat('idle/', id) as topic", "'x' as payload")
        rows.write.format("headrace").mode("append").option("url", self.url).save()
        self.server.settle()

    def verify(self, frame: DataFrame) -> None:
        """Raise VerificationError unless every payload was read once and the last offset matches."""
        from pyspark.sql import functions as f

        crcs = f.expr("cast(crc32(payload) as bigint)")
        [found] = frame.agg(f.count("*"), f.sum(crcs), f.max("next_offset")).collect()
        expected = _expected(self.records)
        if tuple(found) != expected:
            raise VerificationError(f"Spark read {tuple(found)}, published was {expected}")

    def verify_written(self) -> None:
        self.verify(self.frame(f"written-{self._written}", over_url=True))


def _expected(records: int) -> tuple[int, int, int]:
    import zlib

    made = load.payloads(records, False)
    return records, sum(map(zlib.crc32, made)), sum(4 + len(payload) for payload in made)


def _publish(server: Headrace, topic: bytes, records: int) -> None:
    assert topic == TOPIC
    publisher = load_figg.publisher((server.host, server.port), load_figg.publish_stream(records))
    load.pump(publisher, None, records // BLOCK)
    publisher.sock.close()


def _timed(label: str, records: int, query: Callable[[], object]) -> Run:
    result = Run(label, records)
    result.waited_s = wait_for_quiet()
    cpu, began = _Cpu(), time.perf_counter()
    query()
    result.seconds = time.perf_counter() - began
    result.cpu_us = result.cpu_during_us = cpu.spent_s() / records * 1e6
    return result


class _Cpu:
    """CPU time from now on of this process and all it has started: Spark's JVM and workers, the server."""

    def __init__(self) -> None:
        self._before = self._now()

    def spent_s(self) -> float:
        # Spark ends idle workers, and no process inherits their CPU times.
        return sum(used - self._before.get(pid, 0.0) for pid, used in self._now().items())

    @staticmethod
    def _now() -> dict[int, float]:
        return {pid: cpu_s(pid) for pid in process_tree(os.getpid())}


def _flat(part: Part, bench: _Bench, options: Options, say: Callable[[str], None]) -> None:
    """Measure the cost of further rows, from few to many, without the fixed cost of a query."""
    many = MANY_QUICK if options.quick else MANY
    missing = many - bench.records
    for _ in range(-(-missing // bench.records)):
        _publish(bench.server, TOPIC, bench.records)
    bench.server.settle()
    seconds: dict[int, float] = {}
    for rows in (FEW, SOME, many):
        end = rows * (4 + 128)
        frame = (
            bench.spark.read.format("headrace")
            .option("path", bench.path)
            .option("subscribe", TOPIC.decode())
            .option("endingOffsets", f'{{"{TOPIC.decode()}": {end}}}')
        )
        query = partial(lambda reader: reader.load().count(), frame)
        query()
        runs = []
        for turn in range(options.repeat):
            say(f"count() of {rows:,} rows, {turn + 1} of {options.repeat}")
            run = _timed(f"topic: count(), {rows:,} rows", rows, query)
            part.add(run)
            runs.append(run.seconds)
        seconds[rows] = min(runs)
    first = (seconds[SOME] - seconds[FEW]) / (SOME - FEW)
    last = (seconds[many] - seconds[SOME]) / (many - SOME)
    claim = f"a further row costs at {many:,} what it does at {SOME:,}"
    part.checks.append(Check(NAME, claim, last / first, 1.25, at_least=False))
    part.facts["fixed_s"] = seconds[FEW] - first * FEW


def _idle(part: Part, bench: _Bench, option: str, place: str, say: Callable[[str], None]) -> None:
    """Measure the CPU use of a streaming query that has nothing to do."""
    say(f"an idle query over {IDLE_TOPICS} topics by {option}")
    checkpoint = bench.server.dir / "checkpoint"
    query = (
        bench.spark.readStream.format("headrace")
        .option(option, place)
        .option("subscribePattern", "idle/.*")
        .option("startingOffsets", "earliest")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .start()
    )
    try:
        query.processAllAvailable()
        time.sleep(IDLE_WARM_S)
        wait_for_quiet()
        cpu, began = _Cpu(), time.monotonic()
        time.sleep(IDLE_S)
        share = cpu.spent_s() / (time.monotonic() - began)
        rows = sum(progress.numInputRows for progress in query.recentProgress)
        if rows != IDLE_TOPICS:
            raise VerificationError(f"the idle query read {rows} records, there are {IDLE_TOPICS}")
    finally:
        query.stop()
        shutil.rmtree(checkpoint, ignore_errors=True)
    claim = f"an idle query over {IDLE_TOPICS:,} topics by {option}, Spark and server together"
    part.checks.append(Check(NAME, claim, share, 0.1, at_least=False, unit="of a core"))


def _check(part: Part) -> None:
    def rate(run: Run) -> float:
        return run.rate

    for claim, label, limit in (
        ("count()", COUNT, 2.0),
        (WRITE, WRITE, 0.8),
    ):
        rates = sorted(run.rate / 1e6 for run in part.runs[label])
        value, spread = rates[len(rates) // 2], (rates[0], rates[-1])
        part.checks.append(
            Check(NAME, claim, value, limit, at_least=True, unit="M rows/s", spread=spread)
        )
    part.compare("sum(length) against Parquet", LENGTH, LENGTH_PARQUET, rate, 0.6, at_least=True)
    part.compare("copy against Parquet", COPY, COPY_PARQUET, rate, 0.85, at_least=True)
    part.compare("url against path", LENGTH_URL, LENGTH, rate, 0.5, at_least=True)
