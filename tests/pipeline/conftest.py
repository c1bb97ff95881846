"""Fixtures for tests of jobs: their own servers. The Spark session is shared with all tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from headrace.testing import ServerProcess
from tests.spark.support import SMALL
from tests.tools import EXAMPLES

# The machine that runs the tests is shared, so the duration of an example means nothing.
settings.register_profile("pipeline", deadline=None, max_examples=EXAMPLES)
settings.load_profile("pipeline")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Server for tests that do no harm to it; each test has its own topics. Its files are soon full."""
    with _server(tmp_path_factory.mktemp("pipeline")) as process:
        yield process
        assert process.running, process.stderr


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Server for tests that stop it, damage its data, or look at all its topics."""
    with _server(tmp_path) as process:
        yield process


@contextmanager
def _server(root: Path) -> Iterator[ServerProcess]:
    (root / "config.toml").write_text(SMALL)
    flags = (f"--config={root / 'config.toml'}", "--durability=written")
    with ServerProcess(root / "data", *flags) as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr
