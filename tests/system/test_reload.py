"""SIGHUP: a running server reads its settings again. Elsewhere: `tests/server` tests which may change."""

import fcntl
import hashlib
import os
import pty
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from headrace.testing import ServerProcess, wait_until
from headrace.testing.server import STOP_TIMEOUT_S
from tests.system.conftest import Start
from tests.system.figg.foreign import Wire
from tests.system.support import get, get_json

BEFORE = """
[journal]
file_bytes = "1MiB"
rotate = "50ms"
[[topics]]
prefix = "kept"
retention_age = "0s"
"""

AFTER = f"""
log_level = "debug"
[journal]
file_bytes = "1MiB"
files = 8
rotate = "50ms"
[retention]
age = "10ms"
[[topics]]
prefix = "kept"
retention_age = "0s"
[[access.token]]
name = "me"
sha256 = "{hashlib.sha256(b"secret").hexdigest()}"
"""


def wait_for_line(server: ServerProcess, text: str) -> None:
    wait_until(lambda: text in server.stderr, what=text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "headrace.toml"
    file.write_text(BEFORE)
    return file


def test_sighup_takes_over_what_may_change_and_names_what_needs_a_restart(
    start: Start, file: Path
) -> None:
    server = start(f"--config={file}")
    with Wire(server.figg) as wire:
        wire.publish(b"kept", b"foo")
        wire.publish(b"old\n", b"foo")
        file.write_text(BEFORE + "nonsense = 1\n")
        server.signal(signal.SIGHUP)
        wait_for_line(server, "SIGHUP: no setting was changed: there is no setting nonsense")
        assert get_json(server, "/v1/topic?name=kept")["records"] == 1
        file.write_text(AFTER)
        server.signal(signal.SIGHUP)
        wait_for_line(server, "SIGHUP: changed: log_level, retention.age_s, access.token\n")
        wait_for_line(server, "these settings keep their values until a restart: journal.files\n")
        assert get(server, "/v1/topics")[0] == 401
        wait_for_line(server, 'retention: deleting old records of 1 topic: "old\\n"')
        while wire.socket.recv(4096):
            pass  # a peer without a token may stay no longer
    assert server.terminate() == 0
    assert "secret" not in server.stderr
    assert "Traceback" not in server.stderr


def _take_terminal() -> None:
    # These tests may run under nohup, whose children ignore the signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_ends_the_server_that_was_started_in_it(start: Start) -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        start(start=False).command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | ServerProcess.environment,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        output = b""
        while b"headrace ready" not in output:
            output += os.read(terminal, 4096)
        process.send_signal(signal.SIGHUP)  # with a terminal, the signal means a reload
        while b"SIGHUP: changed: nothing" not in output:
            output += os.read(terminal, 4096)
        os.close(terminal)
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
