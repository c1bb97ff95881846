"""Every job on a real standalone cluster with two workers, and over Spark Connect."""

import json
import random
import subprocess
import sys

import pytest
from deltalake import DeltaTable

from tests.pipeline.cluster_jobs import FORMATS
from tests.pipeline.lakes import expected, rows_of
from tests.pipeline.replayed import payloads_of
from tests.spark.cluster import EXECUTORS, daemons, start_cluster, start_connect
from tests.spark.lives import REPOSITORY, environment
from tests.spark.support import publish
from tests.tools import takes_long

pytestmark = takes_long


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("start", "executors"),
    [(start_cluster, EXECUTORS), (start_connect, 1)],
    ids=["cluster", "connect"],
)
def test_every_job_runs_elsewhere(own_server, tmp_path, start, executors):
    chance = random.Random(11)
    topics = {
        f"in/{name}": [
            json.dumps({"i": i, "text": chance.randbytes(chance.randint(0, 999)).hex()}).encode()
            for i in range(500)
        ]
        for name in "abc"
    }
    for name, payloads in topics.items():
        payloads.append(payloads[-1])  # a duplicate, as after a lost answer
        publish(own_server.figg_url, name, payloads)
    with daemons(tmp_path) as daemon:
        master = start(daemon, tmp_path)
        places = [master, own_server.http_url, str(own_server.data_dir), str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.pipeline.cluster_jobs", *places],
            cwd=REPOSITORY,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-10_000:]
    exported = {"exported": 1503, "merged": True, "lost": False}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "executors": executors,
        **dict.fromkeys(FORMATS, exported),
        "replayed": 501,
        "last": [3, 1503, 0],
        "merge": [3, 1503, 0],
        "streamed": [4, 2004, 0],
        "deduped": [1503, 1500, 3],
        "reported": 2004,
        "audited": [False, 2004],
    }
    assert rows_of(tmp_path / "delta") == expected(own_server, topics)
    assert payloads_of(own_server, "replayed/a") == topics["in/a"]
    states = DeltaTable(str(tmp_path / "last")).to_pyarrow_table().to_pylist()
    assert {row["topic"]: row["state"] for row in states} == {
        name: payloads[-1] for name, payloads in [*topics.items(), ("replayed/a", topics["in/a"])]
    }
    kept = DeltaTable(str(tmp_path / "deduped")).to_pyarrow_table().to_pylist()
    assert {row["payload"] for row in kept} == {one for some in topics.values() for one in some}
    assert "<svg" in (tmp_path / "report.html").read_text()
