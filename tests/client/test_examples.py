"""Every example runs against a real server and does what it says."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("examples") / "data") as server:
        yield server


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_publish(server: ServerProcess) -> None:
    output = run("publish.py", server.figg_url, "publish")
    assert output.startswith("published hello\npublished again\npublished 10000 more")


def test_subscribe(server: ServerProcess) -> None:
    run("publish.py", server.figg_url, "subscribe")
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "subscribe.py"), server.figg_url, "subscribe"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(10_002)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        said = process.stderr.read()
    assert lines[0] == "9 hello\n"
    assert lines[-1].endswith(" message 9999\n")
    assert "(connected)" in said
    assert "Traceback" not in said


def test_resume(server: ServerProcess, tmp_path: Path) -> None:
    arguments = (server.figg_url, "resume", tmp_path / "offset")
    run("publish.py", *arguments[:2])
    assert run("resume.py", *arguments).startswith("processed 10002 messages")
    assert run("resume.py", *arguments).startswith("processed 0 messages")
    run("publish.py", *arguments[:2])
    assert run("resume.py", *arguments).startswith("processed 10002 messages")


def test_blocking(server: ServerProcess) -> None:
    assert run("blocking.py", server.figg_url, "blocking") == (
        f"the sum of what came back is {sum(range(1000))}\n"
    )


def test_every_example_is_run_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
