"""A real server process for tests: started, killed and restarted on one data directory with its addresses.

It knows the command line, the ready line and the inheritance of sockets, and nothing of the server's inside.
"""

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

# Timeouts that only a failure reaches: long enough for a machine that is busy with other work.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 30.0
POLL_S = 0.01

_BACKLOG = 128

PASS_DESCRIPTORS = """
import fcntl, os, sys
given, command = sys.argv[1].split(","), sys.argv[2:]
for number, one in enumerate([fcntl.fcntl(int(one), fcntl.F_DUPFD, 64) for one in given]):
    os.dup2(one, 3 + number)
    os.close(one)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(command[0], command)
"""
"""A program that moves descriptors to 3 and up, sets its own `LISTEN_PID`, and executes another program."""

READY = re.compile(r"headrace ready(?: (?:figg|ws|http|data)=.*)+\n")


class ServerFailedError(Exception):
    """The server ended, or wrote no ready line in time."""

    def __init__(self, reason: str, returncode: int | None, stderr: str) -> None:
        super().__init__(f"{reason} (exit code {returncode})\n{stderr}")
        self.returncode = returncode
        self.stderr = stderr


class ServerProcess:
    """`headrace serve` on a data directory, with free ports that stay the same over restarts.

    Starts at once and waits for the ready line, unless made with `start=False`. Leaving the context kills a
    server that still runs. Extra flags are passed to the server unchanged.

    This object holds the ports from the first start on: no other program, and no outgoing connection, can get
    one of them between two runs. Connections are refused while no server runs. With `inherit=True`, each run
    inherits listening sockets instead, as from systemd, and connections wait for the next run.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of every server; a server's own `env` overrides them."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *flags: str,
        figg: str = "127.0.0.1:0",
        ws: str = "127.0.0.1:0",
        http: str = "127.0.0.1:0",
        stderr_path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        inherit: bool = False,
        start: bool = True,
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.flags = flags
        self.stderr_path = Path(stderr_path or f"{self.data_dir}.stderr")
        self.ready_line = ""
        self.stdout = ""
        self._addresses = {"figg": figg, "ws": ws, "http": http}
        # Variables in the tester's environment must not change the tested server.
        left_out = ("HEADRACE_", "LISTEN_", "NOTIFY_SOCKET")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self._env = {**clean, **self.environment, **(env or {})}
        self._inherit = inherit
        self._held: dict[str, socket.socket] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    @property
    def figg(self) -> tuple[str, int]:
        return _split(self._addresses["figg"])

    @property
    def ws(self) -> tuple[str, int]:
        return _split(self._addresses["ws"])

    @property
    def http(self) -> tuple[str, int]:
        return _split(self._addresses["http"])

    @property
    def figg_url(self) -> str:
        return f"figg://{self._addresses['figg']}"

    @property
    def wombat_url(self) -> str:
        return f"wombat://{self._addresses['ws']}"

    @property
    def http_url(self) -> str:
        return f"http://{self._addresses['http']}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def stderr(self) -> str:
        """Standard error output of all runs of the server so far."""
        return self.stderr_path.read_text("utf-8", "replace") if self.stderr_path.exists() else ""

    @property
    def command(self) -> list[str]:
        serve = [sys.executable, "-m", "headrace", "serve", f"--data-dir={self.data_dir}"]
        addresses = [f"--{name}={address}" for name, address in self._addresses.items()]
        return [*serve, *addresses, *self.flags]

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start and wait for the ready line; raise ServerFailedError if it does not come."""
        self.spawn()
        self.wait_ready(timeout_s)
        return self

    def spawn(self) -> None:
        """Start without waiting, for tests that kill the server before it is ready."""
        assert not self.running, "the server is already running"
        self.ready_line = self.stdout = ""
        self._hold_ports()
        command, env = self.command, self._env
        passed: tuple[int, ...] = ()
        if self._inherit:
            passed = tuple(sock.fileno() for sock in self._held.values())
            descriptors = ",".join(map(str, passed))
            command = [sys.executable, "-I", "-S", "-c", PASS_DESCRIPTORS, descriptors, *command]
            names = ":".join(self._held)
            env = {**env, "LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": names}
        with self.stderr_path.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                pass_fds=passed,
            )
        weakref.finalize(self, _reap, self._process)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        line = self._read_line(timeout_s)
        if not READY.fullmatch(line):
            with suppress(subprocess.TimeoutExpired):
                self._running().wait(1.0)
            code = self.returncode
            self.kill()
            raise ServerFailedError(f"no ready line but {line!r}", code, self.stderr)
        self.ready_line = line
        for name in self._addresses:
            if found := re.search(rf" {name}=(\S+)", line):
                self._addresses[name] = found[1]

    def kill(self) -> None:
        """Send SIGKILL to the server process only; its children must notice that by themselves."""
        if self._process is not None:
            self._process.kill()
            self.wait()

    def signal(self, number: int) -> None:
        self._running().send_signal(number)

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the server to end by itself and return the exit code."""
        process = self._running()
        code = process.wait(timeout_s)
        if process.stdout is not None and not process.stdout.closed:
            # A child that outlives the server may hold the pipe open: never wait for the pipe's end.
            os.set_blocking(process.stdout.fileno(), False)
            self.stdout += (process.stdout.read() or b"").decode("utf-8", "replace")
            process.stdout.close()
        return code

    def restart(self) -> Self:
        """Start again on the same directory and ports; stop the server first if it still runs."""
        if self.running:
            self.terminate()
        return self.start()

    def wait_stderr(self, text: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Wait until the server has written `text` to standard error."""
        wait_until(lambda: text in self.stderr, timeout_s, f"{text!r} on standard error")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for sock in self._held.values():
            sock.close()
        self._held.clear()

    def _hold_ports(self) -> None:
        """Choose the requested free ports, once, and keep them bound."""
        for name, address in self._addresses.items():
            host, port = _split(address)
            if name not in self._held and (port == 0 or self._inherit):
                sock = self._held[name] = hold_port(host, port)
                weakref.finalize(self, sock.close)
                if self._inherit:
                    sock.listen(_BACKLOG)
                port = sock.getsockname()[1]
                self._addresses[name] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was never started"
        return self._process

    def _read_line(self, timeout_s: float) -> str:
        stdout = self._running().stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                chunk = os.read(stdout.fileno(), 4096)
                line += chunk
                if not chunk or line.endswith(b"\n"):
                    break
        self.stdout += line.decode("utf-8", "replace")
        return self.stdout


def hold_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a socket that holds `port`, or a free port if it is 0, until the socket is closed.

    The socket does not listen: connections are refused. Linux gives the port neither to an outgoing
    connection nor to a program that asks for a free port, but a server with SO_REUSEADDR may listen on it.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


def wait_until(
    condition: Callable[[], object], timeout_s: float = WAIT_TIMEOUT_S, what: str = ""
) -> None:
    """Poll until the condition is true; raise TimeoutError with `what` if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what or condition}")
        time.sleep(POLL_S)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait(STOP_TIMEOUT_S)
