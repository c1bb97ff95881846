"""A server whose wall clock jumps: nothing is deleted before the jump is confirmed, not even by a restart.

The machine's clock stays as it is: only the server's Python sees another one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import SMALL
from tests.system.figg.foreign import Client
from tests.system.support import get_json, metrics
from tests.tools import takes_long

DAYS_S = 3 * 86_400
CONFIG = f"""{SMALL}
[retention]
age_s = 3600
check_s = 0.1
[[topics]]
prefix = "short/"
retention_age_s = 0.2
"""


PATCH = """
import os, time
real_ns = time.time_ns
def time_ns():
    with open(os.environ["WALL_CLOCK_AHEAD_S"]) as file:
        return real_ns() + int(file.read()) * 1_000_000_000
time.time_ns = time_ns
time.time = lambda: time_ns() / 1e9
"""
"""Code that Python runs in the server's processes before anything else (`sitecustomize`)."""


class ClockedServer(ServerProcess):
    """A server with its own wall clock."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._file = directory / "ahead"
        self.set_clock(0)
        patch = directory / "patch"
        patch.mkdir()
        (patch / "sitecustomize.py").write_text(PATCH)
        paths = filter(None, (str(patch), os.environ.get("PYTHONPATH")))
        env = {"WALL_CLOCK_AHEAD_S": str(self._file), "PYTHONPATH": os.pathsep.join(paths)}
        super().__init__(directory / "data", *flags, env=env)

    def set_clock(self, ahead_s: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.replace(self._file)

    def command_line(self, *args: str) -> str:
        host, port = self.http
        command = [sys.executable, "-m", "headrace", *args, f"--http={host}:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout + done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ClockedServer]:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    with ClockedServer(tmp_path, f"--config={config}") as made:
        yield made


def publish(server: ServerProcess, topic: bytes) -> None:
    with Client(server.figg) as client:
        client.publish(topic, b"x", 10)
        client.flush(10)


def is_kept(server: ServerProcess, topic: str) -> bool:
    told = get_json(server, f"/v1/topic?name={topic}")
    return bool(told["start"]["offset"] < told["end"]["offset"])


def wait_retention(server: ServerProcess, number: int) -> None:
    """Wait until a check has deleted something that really is too old."""
    topic = f"short/{number}"
    publish(server, topic.encode())
    wait_until(lambda: not is_kept(server, topic), 20, "retention")


@pytest.mark.parametrize("by_s", [DAYS_S, pytest.param(-DAYS_S, marks=takes_long)])
def test_a_jump_is_followed_when_an_operator_says_so(server: ClockedServer, by_s: int) -> None:
    publish(server, b"before")
    wait_retention(server, 1)
    server.set_clock(by_s)
    wait_until(lambda: "clock" in get_json(server, "/healthz"), 10, "the jump")
    told = get_json(server, "/healthz")
    assert told["status"] == "ok"
    assert f"3.0 days {'ahead' if by_s > 0 else 'behind'}" in told["clock"]
    assert abs(metrics(server)["headrace_clock_jump_seconds"] - by_s) <= 3600
    publish(server, b"after")
    wait_retention(server, 2)
    assert is_kept(server, "before")
    assert is_kept(server, "after")
    server.restart()
    assert "clock" in get_json(server, "/healthz"), "a restart confirms nothing"
    wait_retention(server, 3)
    assert is_kept(server, "before")
    assert is_kept(server, "after")
    assert "moved its time by" in server.command_line("clock", "confirm")
    assert get_json(server, "/healthz") == {"status": "ok"}
    assert server.command_line("clock").startswith("20")
    if by_s > 0:
        wait_until(lambda: not is_kept(server, "before"), 20, "what is too old now")
    else:
        wait_retention(server, 4)
        assert is_kept(server, "before")
    assert server.terminate() == 0
    assert server.stderr.count("the wall clock jumped") == 2
