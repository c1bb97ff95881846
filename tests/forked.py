"""Commands of `headrace` that start quickly: forked from a process that has already imported their modules.

`python -m headrace` spends a second with imports. `ForkedPopen` takes the place of `subprocess.Popen` and has
such commands forked instead. A forked command is a process of its own, with the arguments, environment,
directory, standard streams, signals and exit code of an executed one. Other programs are executed as usual,
and so are commands with options or variables that only a new interpreter can honour.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, Never

import pytest

COMMAND = [sys.executable, "-m", "headrace"]

IMPORTED = (
    "encodings.idna",
    "headrace.cli.main",
    "headrace.client.channel.client",
    "headrace.client.connect",
    "headrace.client.logux.client",
    "headrace.log.backup",
    "headrace.log.verify.verify",
    "headrace.server.channel.postgres",
    "headrace.server.server",
    "uvicorn.lifespan.off",
)
"""Modules to import before the first fork, some of them imported late otherwise. They start no threads."""

ENVIRONMENT = {name: v for name, v in os.environ.items() if not name.startswith("HEADRACE_")}
"""Environment of the process that forks."""

READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG")
"""Prefixes of variables that count only when a program is executed."""

USUAL = {
    "executable": None,
    "preexec_fn": None,
    "pass_fds": (),
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "start_new_session": False,
    "process_group": -1,
}
"""Options of `Popen` with which a command can be forked."""

REQUEST_BYTES_MAX = 100_000

_NUMBER = struct.Struct("<q")
_PARAMETERS = subprocess.Popen._execute_child.__code__.co_varnames[1:]  # type: ignore[attr-defined]


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A `Popen` that has commands of `headrace` forked."""

    is_on = True
    """False while every command is executed."""

    _status: int | None = None
    """Descriptor that delivers the exit status of a forked command; None for a child of this process."""

    def _execute_child(self, *args: Any) -> None:
        given = dict(zip(_PARAMETERS, args, strict=False))
        request = _request(given) if self.is_on else None
        if request is None:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if passed == -1 else passed for own, passed in enumerate(streams)]
        self._status, theirs = os.pipe()
        try:
            socket.send_fds(_source(), [request], [*streams, theirs])
        finally:
            os.close(theirs)
        self.pid = _read_number(self._status)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._status is None:
            super()._internal_poll(*args, **options)  # type: ignore[misc]
        elif self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            found: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return found
        if self.returncode is not None:
            return 0, 0
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = _read_number(self._status)
        os.close(self._status)
        return self.pid, status


def install() -> None:
    """Have every command forked that a test of this process starts from now on."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands executed, for tests of the start of a process."""
    monkeypatch.setattr(ForkedPopen, "is_on", False)


def _request(given: dict[str, Any]) -> bytes | None:
    """Return what to fork, or None if the program must be executed."""
    words = list(given["args"]) if isinstance(given["args"], list | tuple) else []
    if words[: len(COMMAND)] != COMMAND:
        return None
    if any(given[name] != usual for name, usual in USUAL.items()):
        return None
    env = os.environ if given["env"] is None else given["env"]
    if _read_at_start(env) != _read_at_start(ENVIRONMENT):
        return None
    arguments = [os.fsdecode(word) for word in words[len(COMMAND) :]]
    directory = os.path.abspath(os.fsdecode(given["cwd"] or "."))
    request = json.dumps([arguments, directory, dict(env)]).encode()
    return request if len(request) <= REQUEST_BYTES_MAX else None


def _read_at_start(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


@cache
def _source() -> socket.socket:
    """Start the process that forks, and return a socket to it. The process ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * REQUEST_BYTES_MAX)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=Path(__file__).parent.parent,
            env=ENVIRONMENT,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
    atexit.register(_end, ours, process)
    return ours


def _end(requests: socket.socket, process: Any) -> None:
    requests.close()
    process.wait()


def _read_number(descriptor: int) -> int:
    data = b""
    while len(data) < _NUMBER.size:
        part = os.read(descriptor, _NUMBER.size - len(data))
        assert part, "the process that forks has ended"
        data += part
    number: int = _NUMBER.unpack(data)[0]
    return number


# The process that forks


def serve_forks(descriptor: int) -> list[str]:
    """Fork for each request until the tests end; return the arguments of the command in each child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end this process
    for name in IMPORTED:
        importlib.import_module(name)
    _run_a_command()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=descriptor)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    running: dict[
        int, tuple[int, int]
    ] = {}  # descriptor of a process -> pid, where to send its status
    while True:
        for ready, _ in waiting.poll():
            if ready != descriptor:
                pid, status = running.pop(ready)
                waiting.unregister(ready)
                os.close(ready)
                _send_number(status, os.waitpid(pid, 0)[1])
                os.close(status)
                continue
            data, passed, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                requests.detach()
                return _become(data, passed)
            *streams, status = passed
            for stream in streams:
                os.close(stream)
            _send_number(status, pid)
            process = os.pidfd_open(pid)
            waiting.register(process, select.POLLIN)
            running[process] = pid, status


def _run_a_command() -> None:
    """Have typer import what it imports with the first command."""
    from headrace.cli.main import app

    with contextlib.redirect_stdout(io.StringIO()):
        app(["help", "config"], prog_name="headrace", standalone_mode=False)


def _send_number(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test has forgotten the process
        os.write(descriptor, _NUMBER.pack(number))


def _become(request: bytes, passed: list[int]) -> list[str]:
    """Take over a command's streams, directory and environment; return its arguments."""
    arguments, directory, env = json.loads(request)
    for own, stream in enumerate(passed[:3]):
        os.dup2(stream, own)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    old = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(
            number,
            "w" if number else "r",
            1 if number == 2 else -1,
            encoding=stream.encoding,
            errors=stream.errors,
            closefd=False,
        )
        for number, stream in enumerate(old)
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(directory)
    sys.path[0] = directory
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return arguments


def main() -> Never:
    arguments = serve_forks(int(sys.argv[1]))
    sys.argv = ["headrace", *arguments]
    from headrace.cli.main import main as run

    run()
    raise AssertionError("a command exits")


if __name__ == "__main__":
    main()
