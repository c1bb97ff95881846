"""Source and sink on a real standalone cluster, and over Spark Connect; both from the pip package."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess
from tests.spark.cluster import EXECUTORS, Daemon, daemons, start_cluster, start_connect
from tests.spark.lives import REPOSITORY, environment
from tests.spark.support import (
    ask,
    expected_rows,
    publish,
    receive,
)
from tests.tools import takes_long

pytestmark = takes_long


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def published(start: Callable[..., ServerProcess]) -> tuple[ServerProcess, dict[str, list[bytes]]]:
    server = start()
    chance = random.Random(11)
    topics = {
        f"in/{name}": [chance.randbytes(chance.randint(0, 2000)) for _ in range(500)]
        for name in "abc"
    }
    for name, payloads in topics.items():
        publish(server.figg_url, name, payloads)
    return server, topics


def run_job(
    kind: str, address: str, server: ServerProcess, topics: dict[str, list[bytes]], tmp_path: Path
) -> Any:
    """Run the job, check what it has written, and return its own report."""
    arguments = [kind, address, server.http_url, str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.copy_job", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    for topic, payloads in topics.items():
        copied = [(end, payload) for _, _, end, _, payload in expected_rows(topic, payloads)]
        for prefix, url in (("batch", server.figg_url), ("stream", server.wombat_url)):
            assert receive(url, f"{prefix}/{topic}", len(payloads)) == copied
    cursors = ask(server, "/v1/cursors", reader="group:copy")["cursors"]
    assert {one["topic"]: one["ordinal"] for one in cursors} == dict.fromkeys(topics, 500)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_a_standalone_cluster_reads_and_writes_over_url(
    daemon: Daemon, published: tuple[ServerProcess, dict[str, list[bytes]]], tmp_path: Path
) -> None:
    address = start_cluster(daemon, tmp_path)
    server, topics = published
    found = run_job("cluster", address, server, topics, tmp_path)
    assert found == {
        "rows": 1500,
        "class": "pyspark.sql.session",
        "executors": EXECUTORS,
        "ended": True,
    }


@pytest.mark.timeout(600)
def test_a_client_of_spark_connect_reads_and_writes(
    daemon: Daemon, published: tuple[ServerProcess, dict[str, list[bytes]]], tmp_path: Path
) -> None:
    address = start_connect(daemon, tmp_path)
    server, topics = published
    found = run_job("connect", address, server, topics, tmp_path)
    assert found == {"rows": 1500, "class": "pyspark.sql.connect.session", "ended": True}
