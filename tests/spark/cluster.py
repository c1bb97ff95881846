"""A standalone Spark cluster and a Spark Connect server: real processes on loopback, of the pip package."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pytest

import headrace
from headrace.testing import wait_until
from tests.spark.lives import environment, session_members
from tests.spark.support import JAVA_OPTIONS, require_java
from tests.tools import without

EXECUTORS = 2
START_TIMEOUT_S = 180.0

Daemon = Callable[..., Path]


@contextmanager
def daemons(root: Path) -> Iterator[Daemon]:
    """Start a Spark class as a process with a file for its output; kill it with its children at the end."""
    import pyspark

    require_java()
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: object, environ: Mapping[str, str] | None = None) -> Path:
        output = root / f"daemon{len(processes)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [Path(pyspark.__file__).parent / "bin" / "spark-class", *map(str, command)],
                cwd=root,
                env=environment()
                | {"SPARK_DAEMON_MEMORY": "512m", "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS}
                | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        processes.append(process)
        return output

    try:
        yield start
    finally:
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


def start_cluster(daemon: Daemon, root: Path) -> str:
    """Start a master and two workers, and return the master's address."""
    deploy = "org.apache.spark.deploy"
    master = daemon(
        f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", 0, "--webui-port", 0
    )
    address = wait_said(master, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")[1]
    workers = [
        daemon(
            *(f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", 1, "--memory", "1g"),
            *("--webui-port", 0, "--work-dir", root / f"work{number}", address),
        )
        for number in range(EXECUTORS)
    ]
    for worker in workers:
        wait_said(worker, "Successfully registered with master")
    return address


def start_connect(daemon: Daemon, root: Path, environ: Mapping[str, str] | None = None) -> str:
    """Start a Spark Connect server with Spark inside it, and return its address."""
    if importlib.util.find_spec("grpc") is None:
        without("grpcio is not installed")
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": 0,
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    }
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    output = daemon(
        *("org.apache.spark.deploy.SparkSubmit", "--class", server_class, "--master", "local[2]"),
        *(flag for item in settings.items() for flag in ("--conf", "{}={}".format(*item))),
        "spark-internal",
        environ=environ,
    )
    port = wait_said(output, r"Spark Connect server started at: \S*127\.0\.0\.1:(\d+)")[1]
    return f"sc://127.0.0.1:{port}"


CLUSTER = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    # Both executors are required. Otherwise one could finish all the work before the other has started.
    "spark.cores.max": str(EXECUTORS),
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
}
"""Settings of a session on the cluster."""


# Workers that lack Headrace


def workers_without_headrace(directory: Path) -> dict[str, str]:
    """Make a Python with all packages of this one except Headrace, and return the variables that choose it.

    Headrace is installed here as a link, which `-S` does not follow.
    """
    python = directory / "python"
    packages = Path(pyarrow.__file__).parent.parent
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    # The directory of the tests in PYTHONPATH would show Headrace to the workers, which inherit this.
    return {"PYSPARK_PYTHON": str(python), "PYTHONPATH": ""}


def archive_of_headrace(directory: Path) -> str:
    """Make a zip file of the package, as docs/spark.md describes."""
    source = Path(headrace.__file__).parent
    return shutil.make_archive(str(directory / "headrace"), "zip", source.parent, source.name)
