"""Every example runs against a real server and does what its text says."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.testing import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("examples") / "data") as server:
        yield server


@pytest.fixture(params=["figg", "wombat"])
def url(server: ServerProcess, request: pytest.FixtureRequest) -> str:
    return {"figg": server.figg_url, "wombat": server.wombat_url}[request.param]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_publish(url: str, topic: str) -> None:
    output = run("publish.py", url, topic)
    assert output.startswith("published hello\npublished again\npublished 10000 more")


def test_subscribe(url: str, topic: str) -> None:
    run("publish.py", url, topic)
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "subscribe.py"), url, topic],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_interruptible,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(10_002)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        said = process.stderr.read()
    assert lines[0] == "0 hello\n"
    assert lines[-1].endswith(" message 9999\n")
    assert "(connected)" in said
    assert "Traceback" not in said


def test_resume(url: str, topic: str, tmp_path: Path) -> None:
    arguments = (url, topic, tmp_path / "offset")
    run("publish.py", *arguments[:2])
    assert run("resume.py", *arguments).startswith("processed 10002 messages")
    assert run("resume.py", *arguments).startswith("processed 0 messages")
    run("publish.py", *arguments[:2])
    assert run("resume.py", *arguments).startswith("processed 10002 messages")


def test_blocking(url: str, topic: str) -> None:
    assert run("blocking.py", url, topic) == (f"the sum of what came back is {sum(range(1000))}\n")


def test_handler(url: str, topic: str) -> None:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "handler.py"), url, topic],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_interruptible,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == f"answering {topic}\n"
        with headrace.connect_blocking(url) as client:
            answers = client.subscribe(f"{topic}-answers", offset=0)
            client.publish(topic, b"hello")
            assert next(answers).payload == b"HELLO"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_every_example_is_run_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    # The demo takes minutes. tests/pipeline/test_demo.py runs its own part.
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"demo"} <= tested


def _interruptible() -> None:
    """Restore SIGINT: tests that run in the background ignore it, and child processes would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
