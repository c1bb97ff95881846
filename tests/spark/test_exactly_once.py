"""Queries from topics into Parquet, a Delta table and topics, killed: no row is lost or duplicated.

The driver with all its processes, or the server, is killed at three named points of each sink or at random
moments, and restarted from the checkpoint with other splits. Each driver starts a JVM, so only `make torture`
runs these tests.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from headrace import connect_blocking
from headrace.testing import ServerProcess
from tests.spark.conftest import Start
from tests.spark.driver import SINKS, Queries
from tests.spark.lives import Driver
from tests.spark.support import expected_rows, finish, receive, require_java, topics_of
from tests.tools import TORTURE, takes_long

TOPICS = ("in/a", "in/b")
COLUMNS = ["topic", "offset", "next_offset", "ordinal", "payload"]
SOURCE = {"subscribePattern": "in/.*", "startingOffsets": "earliest", "maxRowsPerTrigger": 400}

KILLS = max(20, TORTURE // 10)


class Published:
    """Payloads that were published to the topics of the queries."""

    def __init__(self, server: ServerProcess, seed: int = 5) -> None:
        self._server = server
        self._chance = random.Random(seed)
        self.payloads: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}

    def more(self, count: int = 200) -> None:
        # All topics are published at once, so that batches have records of several topics.
        with connect_blocking(self._server.figg_url) as client:
            for _ in range(count):
                for topic, known in self.payloads.items():
                    filling = self._chance.randbytes(self._chance.randint(0, 400))
                    known.append(b"%d " % len(known) + filling)
                    client.window(30)
                    client.publish_nowait(topic, known[-1])
            client.flush(60)

    def check(self, root: Path, spark: Any) -> None:
        """Check that every sink has every row once."""
        rows = [row for topic in TOPICS for row in expected_rows(topic, self.payloads[topic])]
        # The folder of the Parquet sink is exact for readers that use its log, as Spark does.
        found = spark.read.parquet(str(root / "parquet")).select(*COLUMNS).collect()
        assert sorted(map(tuple, found)) == rows
        files = DeltaTable(str(root / "delta")).file_uris()
        table = pq.read_table(files, columns=COLUMNS).to_pylist()
        assert sorted(tuple(row.values()) for row in table) == rows
        for topic, payloads in self.payloads.items():
            got = receive(self._server.figg_url, f"copy/{topic}", len(payloads))
            assert [payload for _, payload in got] == payloads
        counts = {f"copy/{topic}": len(payloads) for topic, payloads in self.payloads.items()}
        assert topics_of(self._server, "copy/") == counts


@pytest.fixture
def driver(tmp_path: Path, start: Start) -> Iterator[tuple[Driver, ServerProcess]]:
    require_java()
    server = start()
    root = tmp_path / "queries"
    root.mkdir()
    made = Driver(root, server.http_url)
    yield made, server
    made.kill()


def wait_progress(driver: Driver, published: Published) -> None:
    """Wait until every query has done another batch."""
    before = {sink: driver.commits(sink) for sink in SINKS}
    published.more()
    for sink in SINKS:
        driver.wait(lambda s=sink: driver.commits(s) > before[s], f"a batch of {sink}")


def read_the_rest(queries: Driver, server: ServerProcess, spark: Any, size: int) -> None:
    """Continue in the session of the tests: it is yet another driver, with the same checkpoints."""
    queries.kill()
    options = {**SOURCE, "maxBytesPerPartition": size}
    last = Queries(spark, queries.root, server.http_url, options)
    for query in [last.start(sink, to_the_end=True) for sink in SINKS]:
        finish(query, 120)


def planned(root: Path, sink: str) -> dict[tuple[str, str], set[int]]:
    """Return the planned batches, and the numbers of parts that they were planned into."""
    found: dict[tuple[str, str], set[int]] = {}
    for line in (root / f"splits-{sink}").read_text().splitlines():
        start, end, parts = json.loads(line)
        found.setdefault((start, end), set()).add(parts)
    return found


DRIVER_POINTS = [
    # The offsets are in the checkpoint, and no task has ended.
    {"parquet": "reading", "delta": "reading", "topic": "uploading"},
    # Tasks have written or staged, and nothing is committed.
    {"parquet": "writing", "delta": "wrote", "topic": "staged"},
    # The sink has committed, and the checkpoint does not know it.
    {"parquet": "logged", "delta": "committed", "topic": "decided"},
]
PARTITION_BYTES = [25_000, 20_000, 1_000_000]
"""The `maxBytesPerPartition` with which each driver plans."""


@takes_long
@pytest.mark.timeout(600)
def test_a_driver_killed_at_any_point_loses_and_doubles_no_row(
    driver: tuple[Driver, ServerProcess], shared_spark: Any
) -> None:
    queries, server = driver
    published = Published(server)
    published.more()
    read_the_rest(queries, server, shared_spark, 60_000)
    # All of it is there before the next driver plans: this is one batch, of 40,000 bytes of each topic.
    published.more()
    for points, size in zip(DRIVER_POINTS, PARTITION_BYTES, strict=True):
        # The checkpoint's own log has no point to stop at (see below).
        places = points | ({"parquet": "reading"} if points["parquet"] == "logged" else {})
        for sink, point in places.items():
            queries.stop_at(sink, point)
        queries.start({**SOURCE, "maxBytesPerPartition": size})
        for sink, point in places.items():
            queries.wait_reached(sink, point)
        if points["parquet"] == "writing":
            queries.wait(lambda: uncommitted(queries.root / "parquet"), "files of tasks that ended")
        if points["parquet"] == "logged":
            end_without_checkpoint(queries)
        queries.kill()
        restore_checkpoint(queries)
    published.more()
    read_the_rest(queries, server, shared_spark, 1_000_000)
    for sink in SINKS:
        _, repeated, _ = planned(queries.root, sink).values()
        # A part for each topic or more, and later one part for both.
        assert max(repeated) >= len(TOPICS) and min(repeated) == 1, sink
    published.check(queries.root, shared_spark)
    assert "Traceback" not in server.stderr


def uncommitted(folder: Path) -> bool:
    """True if a file of the Parquet sink is complete and not in the sink's log."""
    logged = "".join(path.read_text() for path in (folder / "_spark_metadata").glob("[0-9]*"))
    return any(
        path.name not in logged and path.read_bytes()[-4:] == b"PAR1"
        for path in folder.glob("part-*.parquet")
    )


def end_without_checkpoint(queries: Driver) -> None:
    """Let the stopped batch of the Parquet sink end, with a file in place of the checkpoint's directory."""
    log, commits = queries.root / "parquet" / "_spark_metadata", commits_of(queries)
    before = len(list(log.glob("[0-9]*")))
    commits.rename(commits.with_name("aside"))
    commits.touch()
    queries.go_on("parquet", "reading")
    queries.wait(lambda: len(list(log.glob("[0-9]*"))) > before, "the sink to commit")
    queries.wait((queries.root / "failed-parquet").exists, "the checkpoint to fail")


def restore_checkpoint(queries: Driver) -> None:
    commits = commits_of(queries)
    if commits.with_name("aside").exists():
        commits.unlink()
        commits.with_name("aside").rename(commits)


def commits_of(queries: Driver) -> Path:
    return queries.root / "checkpoint-parquet" / "commits"


SERVER_POINTS = [
    # The offsets are in the checkpoint, and nothing is planned or written.
    {"parquet": "planning", "delta": "planning", "topic": "uploading"},
    # Tasks are at work, or have written or staged; nothing is committed.
    {"parquet": "reading", "delta": "wrote", "topic": "staged"},
    # Some tasks have ended, or the sink has committed and the checkpoint does not know it.
    {"parquet": "writing", "delta": "committed", "topic": "decided"},
]


@takes_long
@pytest.mark.timeout(600)
def test_a_server_killed_at_any_point_loses_and_doubles_no_row(
    driver: tuple[Driver, ServerProcess], shared_spark: Any
) -> None:
    queries, server = driver
    published = Published(server)
    published.more()
    queries.start({**SOURCE, "maxBytesPerPartition": 30_000})
    wait_progress(queries, published)
    for points in SERVER_POINTS:
        for sink, point in points.items():
            queries.stop_at(sink, point)
        published.more()
        for sink, point in points.items():
            queries.wait_reached(sink, point)
        server.kill()
        for sink, point in points.items():
            queries.go_on(sink, point)
        server.start()
    published.more()
    read_the_rest(queries, server, shared_spark, 60_000)
    published.check(queries.root, shared_spark)
    assert "Traceback" not in server.stderr


@takes_long
@pytest.mark.timeout(600 + 60 * KILLS)
def test_queries_killed_again_and_again_lose_and_double_no_row(
    driver: tuple[Driver, ServerProcess], shared_spark: Any
) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", random.randrange(2**32)))
    print(f"HEADRACE_SEED={seed}")
    chance = random.Random(seed)
    queries, server = driver
    published = Published(server, seed)

    def start() -> None:
        size = chance.choice([5_000, 20_000, 60_000, 1_000_000])
        rows = chance.choice([200, 600, 2000])
        queries.start({**SOURCE, "maxRowsPerTrigger": rows, "maxBytesPerPartition": size})

    start()
    for _ in range(KILLS):
        if chance.random() < 0.5:
            wait_progress(queries, published)
        published.more(chance.randrange(1, 400))
        time.sleep(chance.uniform(0.0, 3.0))
        if chance.random() < 0.7:
            queries.kill()
            start()
        else:
            server.kill()
            time.sleep(chance.uniform(0.0, 1.0))
            server.start()
    read_the_rest(queries, server, shared_spark, 60_000)
    published.check(queries.root, shared_spark)
    assert "Traceback" not in server.stderr
