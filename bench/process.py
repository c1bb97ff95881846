"""Start of the servers that are measured, and CPU and memory of their process trees. No load.

CPU time includes every process of a server. For live processes it comes from their CPU clock (nanoseconds),
for processes that have ended from what their parent inherited (`cutime`, `cstime`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from headrace.testing import hold_port

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
QUIET_S, QUIET_TICK_S, QUIET_SHARE = 1.0, 0.25, 0.02  # when a server counts as idle
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)

PACKAGES = {"redis-server": "redis-server", "nats-server": "nats-server"}


class ServerError(Exception):
    """A server did not start, or ended while it was being measured."""


class Server:
    """One server process in a directory of its own. `kill` and `remove` are safe to repeat."""

    name = "server"
    settle_s_min = 1.0  # time after the last record in which background work may still begin

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.dir = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-", dir=root))
        self.host = "127.0.0.1"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        _running.append(self)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        raise NotImplementedError

    def spawn(self, command: list[str], *, pipe_stdout: bool = False) -> None:
        with open(self.dir / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe_stdout else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def alive(self) -> None:
        if self.process is None or self.process.poll() is not None:
            code = None if self.process is None else self.process.returncode
            raise ServerError(f"{self.name} ended with {code}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return (self.dir / "server.log").read_text(errors="replace")[-2000:]
        return ""

    def take_port(self) -> None:
        """Take a free port and hold it, so that no other process gets it before the server listens."""
        held = hold_port(self.host)
        weakref.finalize(self, held.close)
        self.port = held.getsockname()[1]

    def wait_for_port(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.alive()
            with contextlib.suppress(OSError):
                socket.create_connection((self.host, self.port), timeout=1).close()
                return
            time.sleep(0.02)
        raise ServerError(f"{self.name} does not listen on {self.port}:\n{self.log_tail()}")

    def terminate(self) -> float:
        """Send SIGTERM, wait for the end and return the seconds it took. Kill a server that does not end."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"{self.name} ignored SIGTERM:\n{self.log_tail()}") from None
        self.kill()
        return time.monotonic() - began

    def pause_children(self) -> None:
        """Send SIGSTOP to the child processes, so that background work stays undone."""
        for pid in process_tree(self.pid)[1:]:
            os.kill(pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Send SIGKILL to the process, its descendants, and the process group that `spawn` made."""
        if self.process is None:
            return
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        if self.process.stdout:
            self.process.stdout.close()
        self.process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)
        if self in _running:
            _running.remove(self)

    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in process_tree(self.pid))

    def cpu_main_s(self) -> float:
        """Return the CPU time of the started process, without its live children."""
        return cpu_s(self.pid)

    def memory_peak(self) -> int:
        return sum(_status_bytes(pid, "VmHWM") for pid in process_tree(self.pid))

    def memory_now(self) -> list[int]:
        """Return the memory of each process; the first is the process that was started."""
        return [_status_bytes(pid, "VmRSS") for pid in process_tree(self.pid)]

    def settle(self, timeout_s: float = 60.0) -> float:
        """Wait until the background work for published records is done; return the seconds it took."""
        began = quiet_since = now = time.monotonic()
        last = self.cpu_s()
        while now - began < timeout_s:
            time.sleep(QUIET_TICK_S)
            now, used = time.monotonic(), self.cpu_s()
            if used - last > QUIET_SHARE * QUIET_TICK_S:
                quiet_since = now
            last = used
            if now - quiet_since >= QUIET_S and now - began >= self.settle_s_min:
                break
        return now - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Headrace(Server):
    name = "headrace"
    # By default the server closes a journal file when it is 2 s old, and applies it only then.
    settle_s_min = 4.0

    def __init__(
        self, root: Path, durability: str = "synced", settings: Sequence[str] = ()
    ) -> None:
        super().__init__(root)
        self.durability = durability
        self.settings = settings
        self.ws_port = 0
        self.http_port = 0
        self.start_s = 0.0

    def start(self) -> None:
        """Start the server and wait for its ready line; `start_s` is the time it took."""
        began = time.monotonic()
        local = f"{self.host}:0"
        command = [sys.executable, "-m", "headrace", "serve", "--data-dir", str(self.dir / "data")]
        command += ["--figg", local, "--ws", local, "--http", local]
        command += ["--durability", self.durability]
        # The WebSockets of the load send no PING while they are measured.
        for setting in ("limits.silence_s=3600", *self.settings):
            command += ["--set", setting]
        self.spawn(command, pipe_stdout=True)
        line = self._ready_line(began + START_TIMEOUT_S)
        self.start_s = time.monotonic() - began
        listeners = dict(re.findall(r"(figg|ws|http)=\S+:(\d+)", line))
        if not line.startswith("headrace ready ") or "figg" not in listeners:
            raise ServerError(f"not a ready line: {line!r}\n{self.log_tail()}")
        self.port = int(listeners["figg"])
        self.ws_port = int(listeners["ws"])
        self.http_port = int(listeners.get("http", 0))

    def _ready_line(self, deadline: float) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            wait_s = deadline - time.monotonic()
            if wait_s <= 0 or not select.select([self.process.stdout], [], [], wait_s)[0]:
                raise ServerError(f"no ready line after {START_TIMEOUT_S} s:\n{self.log_tail()}")
            more = os.read(self.process.stdout.fileno(), 4096)
            if not more:
                self.process.wait(STOP_TIMEOUT_S)
                self.alive()
            line += more
        return line.decode()


class Redis(Server):
    name = "Redis Streams"

    def __init__(self, root: Path, fsync: str) -> None:
        super().__init__(root)
        self.fsync = fsync

    def start(self) -> None:
        self.take_port()
        # Without snapshots and rewrites of the append-only file, Redis does only the work of the load.
        command = [
            find("redis-server") or "",
            "--bind",
            self.host,
            "--port",
            str(self.port),
            "--save",
            "",
        ]
        command += ["--appendonly", "yes", "--appendfsync", self.fsync]
        command += ["--auto-aof-rewrite-percentage", "0", "--dir", str(self.dir)]
        self.spawn(command)
        self.wait_for_port()


class Nats(Server):
    name = "NATS"

    def start(self) -> None:
        self.take_port()
        config = self.dir / "nats.conf"
        config.write_text(
            f'listen: "{self.host}:{self.port}"\n'
            'ping_interval: "10m"\n'
            f'jetstream {{ store_dir: "{self.dir}/store", max_mem: 1G, max_file: 50G }}\n'
        )
        self.spawn([find("nats-server") or "", "-c", str(config)])
        self.wait_for_port()


class NpmLogux(Server):
    name = "@logux/server"

    def __init__(self, root: Path, modules: Path) -> None:
        super().__init__(root)
        self.modules = modules

    def start(self) -> None:
        self.take_port()
        self.spawn([find("node") or "", str(self.modules / "server.mjs"), str(self.port)])
        self.wait_for_port()


def missing(program: str) -> str | None:
    """Return None if the program is installed, otherwise a line that says what to install."""
    if find(program):
        return None
    return f"{program} is not installed: skipped (Debian: apt install {PACKAGES[program]})"


def find(program: str) -> str | None:
    """Return the program's path. Debian has nats-server in /usr/sbin, which may not be in the PATH."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin")


def process_tree(pid: int) -> list[int]:
    """Return the process and all its live descendants."""
    found = [pid]
    for parent in found:
        found.extend(_children(parent))
    return found


def remove_all() -> None:
    while _running:
        _running[-1].remove()


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{task}/children").read_text()
                yield from map(int, text.split())


def cpu_s(pid: int) -> float:
    """Return user and system time of the process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    utime, stime, cutime, cstime = (int(field) / TICKS_PER_S for field in fields[11:15])
    try:
        # clock_getcpuclockid(3): the same sum as utime + stime, but more precise than ticks.
        own = time.clock_gettime((~pid << 3) | 2)
    except OSError:
        own = utime + stime
    return own + cutime + cstime


def _status_bytes(pid: int, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_running: list[Server] = []
