"""The demo's stream, against a real server that is killed during the stream; `make demo` runs the rest."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from headrace.lake.files.reading import read_topic
from headrace.lake.formats.delta import DeltaLake
from headrace.pipeline.export.job import export
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_everything_that_was_acknowledged_is_in_the_lake(
    demo: ModuleType, tmp_path: Path
) -> None:
    root = demo.made_anew(tmp_path / "demo")
    (root / "headrace.toml").write_text(demo.CONFIG)
    with ServerProcess(root / "data", f"--config={root / 'headrace.toml'}") as server:
        records = await demo.stream(server, root, 40)
        done = export(root / "lake", url=server.http_url, runner=LocalRunner())
        # Publishes that were on their way when the server was killed may be there twice.
        assert done.records >= records
        assert "Traceback" not in server.stderr
    table = DeltaLake.open(root / "lake")
    assert table is not None
    for name in demo.DOCUMENTS:
        batches = read_topic(root / "lake", table, f"$channel/{name}")
        assert sum(map(len, batches)) == 2 * 40


def test_a_directory_of_others_is_left_alone(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="has something in it that this demo has not made"):
        demo.made_anew(tmp_path)
    assert (tmp_path / "notes.txt").exists()
