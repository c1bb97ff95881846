"""One server for all Spark tests, each with its own topics. The Spark session is shared with all tests."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess
from tests.spark.support import SMALL, with_options

Read = Callable[..., Any]
Start = Callable[..., ServerProcess]

_numbers = count()


@pytest.fixture
def spark(shared_spark: Any) -> Iterator[Any]:
    """The shared session. Queries that a test leaves running are stopped."""
    yield shared_spark
    for query in shared_spark.streams.active:
        query.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Server for tests that do no harm to it."""
    root = tmp_path_factory.mktemp("spark")
    (root / "config.toml").write_text(SMALL)
    # The tests' clients answer no pings while Spark works, which may take minutes on a busy machine.
    patience = "--set=logux.ping_s=3600"
    flags = (f"--config={root / 'config.toml'}", "--durability=written", patience)
    with ServerProcess(root / "data", *flags) as process:
        yield process
        assert process.running, process.stderr
        assert "Traceback" not in process.stderr, process.stderr


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server for this test alone; `config` is the text of its configuration file."""
    processes: list[ServerProcess] = []

    def make(*flags: str, config: str = SMALL) -> ServerProcess:
        number = len(processes)
        file = tmp_path / f"config{number}.toml"
        file.write_text(config)
        process = ServerProcess(
            tmp_path / f"data{number}", f"--config={file}", "--durability=written", *flags
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()
        print(f"--- {process.stderr_path}\n{process.stderr[-20000:]}")


@pytest.fixture
def topic() -> str:
    """A name, or a prefix of names, that no other test uses."""
    return f"topic{next(_numbers)}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@pytest.fixture
def read(spark: Any, server: ServerProcess) -> Read:
    """Read rows of the shared server, over `url` unless `path` is among the options."""

    def make(schema: str = "", **options: object) -> Any:
        place = {} if options.keys() & {"path", "url"} else {"url": server.http_url}
        reader = with_options(spark.read.format("headrace"), place | options)
        return (reader.schema(schema) if schema else reader).load()

    return make


@pytest.fixture
def read_stream(spark: Any, server: ServerProcess) -> Read:
    def make(schema: str = "", **options: object) -> Any:
        place = {} if options.keys() & {"path", "url"} else {"url": server.http_url}
        reader = with_options(spark.readStream.format("headrace"), place | options)
        return (reader.schema(schema) if schema else reader).load()

    return make
