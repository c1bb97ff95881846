"""A server that all tests of bad input share: it must stay healthy for the others whatever a test does."""

from collections.abc import Iterator

import pytest

from headrace.testing import ServerProcess

CONFIG = """
[[topics]]
prefix = "$channel/uploaded/"
reducer = "uploaded"
[[topics]]
prefix = "$channel/map/"
reducer = "map"
"""


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("abused")
    (directory / "config.toml").write_text(CONFIG)
    with ServerProcess(directory / "data", f"--config={directory / 'config.toml'}") as process:
        yield process
        assert process.running, process.stderr
        assert "Traceback" not in process.stderr, process.stderr
        assert "internal error" not in process.stderr, process.stderr
