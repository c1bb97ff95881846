"""A real server for each file of tests of the HTTP API, and its clients. Every test has its own topics."""

from collections.abc import Iterator
from itertools import count

import httpx
import pytest

from headrace import connect_blocking
from headrace.client import BlockingClient
from headrace.testing import ServerProcess

_topics = count()


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Start a server with the settings that a file has in `SETTINGS`."""
    settings = ("journal.rotate_s=0.1", *getattr(request.module, "SETTINGS", ()))
    directory = tmp_path_factory.mktemp("http") / "data"
    with ServerProcess(directory, *(f"--set={setting}" for setting in settings)) as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[BlockingClient]:
    with connect_blocking(server.figg_url) as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"topic/{next(_topics)}"
