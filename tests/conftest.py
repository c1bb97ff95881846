"""Fixtures and hooks for tests of every layer: commands as processes. Servers start where they are used."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from hypothesis import settings

from headrace.testing import ServerProcess
from tests import forked, temporary
from tests.tools import EXAMPLES, TORTURE

if not TORTURE:
    forked.install()

executed = forked.executed
pytest_sessionfinish = temporary.pytest_sessionfinish

settings.register_profile("tests", deadline=None, max_examples=EXAMPLES)
settings.load_profile("tests")

# Most servers live for a second. Without their own configuration file, they create a journal of a quarter of
# the usual size.
# Raw Wombat clients send no PINGs. The limit on silence is long so that a busy machine does not lose them in
# the middle of a test.
# Servers without access control answer to the names by which tests call them.
# The wall clock of a virtual machine that was paused steps by minutes. Only larger steps are jumps in tests.
ServerProcess.environment = {
    "HEADRACE_CONFIG": str(Path(__file__).with_name("server.toml")),
    "HEADRACE_LIMITS_SILENCE_S": "60",
    "HEADRACE_CLOCK_JUMP_S": "3600",
    "HEADRACE_LISTEN_HOSTS": "headrace.example,other.example",
}

# Requests of tests may take longer than the 5 s of httpx, and httpx offers no other global setting.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 30.0)

SPARK_TIMEOUT_S = 600
"""Timeout of a Spark test. It is long because aborting a call to the JVM breaks the whole session."""


REASON_CHARACTERS_MAX = 120
"""Length to which the summary of a run cuts the reason of a skipped test."""

OF_SPARK = ("spark", "pipeline")
"""Test directories in which most tests share one Spark session."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        of_spark = any(Path(__file__).parent / name in item.path.parents for name in OF_SPARK)
        if of_spark and config.getoption("timeout", None) is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print at the end what was not tested and why, one line for each reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        _, _, reason = report.longrepr
        reasons[reason.removeprefix("Skipped: ").partition("\n")[0][:REASON_CHARACTERS_MAX]] += 1
    if reasons:
        terminalreporter.section("skipped tests")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:6} {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file in one process, and all tests that share a Spark session or an S3 server too.

    Tests of a file share servers. A JVM and its tasks fill a machine, and an S3 server is busy even without
    requests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _shared_by(nodeid.partition("::")[0])

    return Scheduling(config, log)


@cache
def _shared_by(file: str) -> str:
    """Return a name that is the same for all files whose tests run in one process."""
    if file.startswith("tests/spark/") and file != "tests/spark/test_cluster.py":  # starts its own
        return "spark"
    if file.startswith("tests/pipeline/") and "shared_spark" in Path(file).read_text():
        return "spark"
    return "s3" if file.startswith(("tests/pipeline/objects/", "tests/lake/")) else file


@pytest.fixture(scope="session")
def shared_spark() -> Iterator[Any]:
    from tests.spark.support import SETTINGS, require_java

    require_java()
    from headrace.spark import session

    made = session("tests", master="local[2]", settings=SETTINGS)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """Return the S3 server that all tests of this process share; a test that kills one makes its own."""
    from tests.fakes.s3_server import S3Server

    with (
        TemporaryDirectory(prefix="headrace-s3-") as directory,
        S3Server(Path(directory, "server")) as server,
    ):
        yield server


@pytest.fixture
def bucket(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a new, empty bucket of the S3 server."""
    from tests.fakes.s3_server import forget_credentials

    forget_credentials(monkeypatch)
    made = s3_server.bucket()
    yield made
    s3_server.remove(made)


@pytest.fixture
def s3_proxy(s3_server: Any) -> Iterator[Any]:
    from tests.fakes.s3_proxy import S3Proxy

    with S3Proxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def environment():
    """Return the environment of a child process without the settings of the user who runs the tests."""

    def make(**extra: str) -> dict[str, str]:
        kept = {name: v for name, v in os.environ.items() if not name.startswith("HEADRACE_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        return kept | {"PATH": path} | extra

    return make


@pytest.fixture
def headrace(tmp_path, environment):
    """Run a command to its end in its own directory; with `text=False`, input and output are bytes."""

    def run(*args, stdin=None, text=True, environ=None, timeout_s=90):
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "headrace",
                *(arg if isinstance(arg, bytes) else str(arg) for arg in args),
            ],
            input=("" if text else b"") if stdin is None else stdin,
            capture_output=True,
            text=text,
            cwd=tmp_path,
            env=environment(**(environ or {})),
            timeout=timeout_s,
            check=False,
        )

    return run
