"""Logux clients from npm, whose packages are installed once for all tests."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from headrace.testing import ServerProcess
from tests.system.logux.raw import Client, Open
from tests.system.logux.support import Host, install

_logs = count()


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("npm"))


@pytest.fixture
def npm01(packages: Path) -> Iterator[Host]:
    """Clients of the 0.1 packages."""
    with Host(packages, "npm01_host.cjs") as host:
        yield host


@pytest.fixture
def logux5(packages: Path) -> Iterator[Host]:
    """Clients of `@logux/client`."""
    with Host(packages, "logux5_host.mjs") as host:
        yield host


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests. Each has its own log, and a test that kills the server starts it again."""
    with ServerProcess(tmp_path_factory.mktemp("logux") / "data") as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


@pytest.fixture
def url(server: ServerProcess) -> str:
    return logux_url(server, f"log-{next(_logs)}")


@pytest.fixture
def open_(url: str) -> Iterator[Open]:
    with ExitStack() as stack:

        def make(binary: bool = False, at: str = "") -> Client:
            return Client(stack, at or url, binary)

        yield make


def logux_url(server: ServerProcess, log: str = "") -> str:
    base = server.wombat_url.replace("wombat://", "ws://")
    return f"{base}/v1/logux/{log}" if log else f"{base}/v1/logux"
