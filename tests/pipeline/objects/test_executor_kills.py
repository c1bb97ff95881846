"""Jobs on a real cluster, with a lake on a real S3 server, whose executors are killed at every point."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.testing import wait_until
from tests.pipeline.objects.executor_jobs import JOBS
from tests.pipeline.objects.stored import StoredLake
from tests.pipeline.replayed import payloads_of
from tests.spark.cluster import daemons, start_cluster
from tests.spark.lives import POINT_TIMEOUT_S, REPOSITORY, environment
from tests.tools import takes_long

pytestmark = takes_long


def executors(root: Path) -> list[int]:
    """Return the JVMs of the executors with their Python workers: they are in directories of the workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if root in path.readlink().parents:
                found.append(int(path.parent.name))
    return found


def kill_executors(root: Path) -> None:
    killed = executors(root)
    assert killed
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(1200)
def test_every_record_counts_once_whatever_executor_dies(server, bucket, tmp_path):
    lake = StoredLake(server, bucket)
    lake.publish(40)
    points, output = tmp_path / "points", tmp_path / "output"
    points.mkdir()
    rows, states = (f"s3://{bucket.name}/{name}" for name in ("rows", "states"))
    given = {
        "lake": bucket.url,
        "options": bucket.options,
        "points": str(points),
        "export": {"pattern": lake.pattern, "url": server.http_url, "part_bytes": 2000},
        "dedupe": {"into": rows},
        "aggregate": {"into": states},
        "replay": {"topic": lake.a, "to": f"{lake.prefix}-again", "url": server.http_url},
    }
    order = [point for _, reached, _ in JOBS for point in reached]
    for point in order:
        (points / f"stop-{point}").touch()
    with daemons(tmp_path) as daemon, output.open("wb") as errors:
        given["master"] = start_cluster(daemon, tmp_path)
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.objects.executor_jobs", json.dumps(given)],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            for number, point in enumerate(order):
                reached, stop = points / f"reached-{point}", points / f"stop-{point}"
                wait_until(
                    lambda path=reached: path.exists() or driver.poll() is not None,
                    POINT_TIMEOUT_S,
                    f"a task that is {point}",
                )
                assert reached.exists(), output.read_text()
                kill_executors(tmp_path)
                # A name may be that of another job's point too, whose tasks stop there as well.
                is_again = point in order[number + 1 :]
                stop.unlink()
                if is_again:
                    following = points / f"reached-{order[number + 1]}"
                    wait_until(following.exists, POINT_TIMEOUT_S, "the next point")
                    reached.unlink()
                    stop.touch()
            said, _ = driver.communicate(timeout=POINT_TIMEOUT_S)
        finally:
            driver.kill()
            driver.wait()
    assert driver.returncode == 0, output.read_text()
    found = json.loads(said.splitlines()[-1])
    assert (found["export"]["batches"], found["export"]["records"]) == (1, 80)
    assert found["compact"]["merged"] == found["export"]["files"] > 1
    lake.check()
    kept = lake.table_at("rows").to_pyarrow_table(columns=["topic", "payload"]).to_pylist()
    assert len(kept) == found["dedupe"]["kept"]
    assert {(row["topic"], row["payload"]) for row in kept} == {
        (topic, payload) for topic, known in lake.payloads.items() for payload in known
    }
    counted = lake.table_at("states").to_pyarrow_table(columns=["topic", "ordinal"]).to_pylist()
    assert {row["topic"]: row["ordinal"] for row in counted} == dict.fromkeys(lake.payloads, 40)
    assert found["replay"]["records"] == 40
    assert payloads_of(server, f"{lake.prefix}-again") == lake.payloads[lake.a]
