"""Source, sink and jobs on a real standalone cluster, and over Spark Connect; both from the pip package."""

import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.pipeline.lakes import expected, rows_of
from tests.spark.copy_job import EXECUTORS
from tests.spark.lives import REPOSITORY, environment, session_members
from tests.spark.support import (
    JAVA_OPTIONS,
    ask,
    expected_rows,
    publish,
    receive,
    require_java,
)
from tests.tools import without

pytestmark = pytest.mark.skipif(
    "HEADRACE_TORTURE" not in os.environ, reason="takes long: see `make torture`"
)

START_TIMEOUT_S = 90.0

Daemon = Callable[..., Path]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Start a class of Spark as a process with a file for its output; killed with its children at the end."""
    import pyspark

    require_java()
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: object) -> Path:
        output = tmp_path / f"daemon{len(processes)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [Path(pyspark.__file__).parent / "bin" / "spark-class", *map(str, command)],
                cwd=tmp_path,
                env=environment()
                | {"SPARK_DAEMON_MEMORY": "512m", "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        processes.append(process)
        return output

    yield start
    for process in reversed(processes):
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(30)


def wait_said(output: Path, pattern: str) -> re.Match[str]:
    def found() -> re.Match[str] | None:
        return re.search(pattern, output.read_text(errors="replace"))

    try:
        wait_until(found, START_TIMEOUT_S, pattern)
    except TimeoutError:
        pytest.fail(f"no {pattern!r} in\n{output.read_text(errors='replace')[-5000:]}")
    matched = found()
    assert matched is not None
    return matched


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
    """Run the job and check what it has written; returns what it says of itself."""
    arguments = [kind, address, server.http_url, str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.copy_job", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
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


@pytest.mark.timeout(300)
def test_a_standalone_cluster_reads_and_writes_over_url(
    daemon: Daemon, published: tuple[ServerProcess, dict[str, list[bytes]]], tmp_path: Path
) -> None:
    deploy = "org.apache.spark.deploy"
    master = daemon(
        f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", 0, "--webui-port", 0
    )
    address = wait_said(master, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")[1]
    workers = [
        daemon(
            *(f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", 1, "--memory", "1g"),
            *("--webui-port", 0, "--work-dir", tmp_path / f"work{number}", address),
        )
        for number in range(EXECUTORS)
    ]
    for worker in workers:
        wait_said(worker, "Successfully registered with master")
    server, topics = published
    found = run_job("cluster", address, server, topics, tmp_path)
    assert found == {
        "rows": 1500,
        "class": "pyspark.sql.session",
        "executors": EXECUTORS,
        "exported": 1500,
        "merged": True,
        "replayed": 500,
        "ended": True,
    }
    assert rows_of(tmp_path / "lake") == expected(server, topics)
    replayed = [(row[2], row[4]) for row in expected_rows("replayed/a", topics["in/a"])]
    assert receive(server.figg_url, "replayed/a", 500) == replayed


@pytest.mark.timeout(300)
def test_a_client_of_spark_connect_reads_and_writes(
    daemon: Daemon, published: tuple[ServerProcess, dict[str, list[bytes]]], tmp_path: Path
) -> None:
    if importlib.util.find_spec("grpc") is None:
        without("grpcio is not installed")
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    }
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    output = daemon(
        *("org.apache.spark.deploy.SparkSubmit", "--class", server_class, "--master", "local[2]"),
        *(flag for item in settings.items() for flag in ("--conf", "{}={}".format(*item))),
        "spark-internal",
    )
    wait_said(output, "Spark Connect server started")
    server, topics = published
    found = run_job("connect", f"sc://127.0.0.1:{port}", server, topics, tmp_path)
    assert found == {"rows": 1500, "class": "pyspark.sql.connect.session", "ended": True}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
