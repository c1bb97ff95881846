"""A forked command behaves like an executed one: see `tests/forked.py`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import COMMAND, ForkedPopen


def run(*args: str, **options: object) -> tuple[int, bytes, bytes]:
    with ForkedPopen(
        [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


@pytest.mark.parametrize(
    "args",
    [
        ["--version"],
        ["help", "publish"],
        ["nope"],
        ["topics", "--http", "127.0.0.1:1"],
        ["publish", "t", "\udcff", "--url", "figg://127.0.0.1:1", "--timeout", "0.1"],
        ["config", "--config", "here.toml"],
    ],
)
def test_output_and_exit_code_are_the_same(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.toml").write_text('log_level = "debug"\n')
    env = {**os.environ, "HEADRACE_DURABILITY": "written"}
    forked = run(*args, cwd=tmp_path, env=env)
    monkeypatch.setattr(ForkedPopen, "is_on", False)
    assert run(*args, cwd=tmp_path, env=env) == forked


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_signal_that_ended_a_command_is_told(number: signal.Signals) -> None:
    with ForkedPopen(
        [*COMMAND, "publish", "t", "--url", "figg://127.0.0.1:1"], stdin=subprocess.PIPE
    ) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        assert process.wait(30) == -number
        assert process.poll() == -number


def test_a_later_command_does_not_hold_the_output_of_an_earlier_one_open() -> None:
    command = [*COMMAND, "publish", "t", "--url", "figg://127.0.0.1:1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ForkedPopen(command, **pipes) as first, ForkedPopen(command, **pipes) as second:
        first.kill()
        assert first.communicate(timeout=30) == (b"", None)
        assert second.poll() is None
        second.kill()


@pytest.mark.parametrize(
    "options", [{"env": {**os.environ, "PYTHONUTF8": "0"}}, {"start_new_session": True}]
)
def test_a_command_that_needs_a_new_interpreter_is_executed(options: dict[str, object]) -> None:
    with ForkedPopen([*COMMAND, "--version"], stdout=subprocess.PIPE, **options) as process:
        assert process._status is None
        assert process.communicate(timeout=60)[0].startswith(b"headrace ")


def test_other_programs_are_executed() -> None:
    with ForkedPopen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        assert process._status is None
        assert process.wait(30) == 3
