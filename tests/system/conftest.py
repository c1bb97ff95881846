"""Real servers for the system tests: one that tests of the wire share, and others that tests may harm."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from headrace.testing import ServerProcess
from tests.system.figg.foreign import Wire
from tests.system.wombat import foreign as foreign_wombat

Start = Callable[..., ServerProcess]
Connect = Callable[..., Wire]
Dial = Callable[..., foreign_wombat.Wire]

SMALL = """
[journal]
file_bytes = 1048576
files = 4
rotate_s = 0.2
[segment]
bytes = 262144
"""

KEEP_LITTLE = (
    SMALL.replace("262144", "4096") + "[retention]\nbytes = 65536\nage_s = 0\ncheck_s = 0.1\n"
)

_topics = count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that do no harm to it; each test has its own topics."""
    with ServerProcess(tmp_path_factory.mktemp("shared") / "data") as process:
        yield process
        assert process.running, process.stderr
        assert "Traceback" not in process.stderr, process.stderr


@pytest.fixture
def topic() -> bytes:
    return b"topic/%d" % next(_topics)


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Connect]:
    """Connections to the shared server, closed after the test."""
    wires: list[Wire] = []

    def make(**options: object) -> Wire:
        wires.append(Wire(server.figg, **options))  # type: ignore[arg-type]
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()


@pytest.fixture
def wire(connect: Connect) -> Wire:
    return connect()


@pytest.fixture
def name(topic: bytes) -> str:
    """Return the topic's name as Wombat writes it."""
    return topic.decode()


@pytest.fixture
def dial(server: ServerProcess) -> Iterator[Dial]:
    """Wombat connections to the shared server, closed after the test."""
    wires: list[foreign_wombat.Wire] = []

    def make(**options: object) -> foreign_wombat.Wire:
        wires.append(foreign_wombat.Wire(server.ws, **options))  # type: ignore[arg-type]
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()


@pytest.fixture
def wombat(dial: Dial) -> foreign_wombat.Wire:
    return dial()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server for this test alone; `config` is the text of its configuration file."""
    processes: list[ServerProcess] = []

    def make(
        *flags: str, config: str = "", data_dir: Path | None = None, start: bool = True
    ) -> ServerProcess:
        number = len(processes)
        if config:
            file = tmp_path / f"config{number}.toml"
            file.write_text(config)
            flags = (f"--config={file}", *flags)
        process = ServerProcess(
            data_dir or tmp_path / "data",
            *flags,
            stderr_path=tmp_path / f"stderr{number}",
            start=False,
        )
        processes.append(process)
        return process.start() if start else process

    yield make
    for process in processes:
        process.kill()
        print(f"--- {process.stderr_path}\n{process.stderr[-20000:]}")
