"""A server under a service manager: inherited listening sockets, and notifications to the manager."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from headrace.testing import ServerProcess
from headrace.testing.server import PASS_DESCRIPTORS
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import DATA, Wire
from tests.system.support import get_json
from tests.system.wombat import foreign as wombat


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data", inherit=True) as process:
        yield process


def test_each_listener_answers_on_the_socket_it_inherits(server: ServerProcess) -> None:
    with Wire(server.figg) as wire, wombat.Wire(server.ws) as other:
        assert wire.alive()
        assert other.alive()
    assert get_json(server, "/healthz") == {"status": "ok"}
    assert server.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_connects_between_two_lives_is_served_and_not_refused(
    server: ServerProcess, number: signal.Signals
) -> None:
    with Wire(server.figg) as wire:
        wire.publish(b"t", b"foo")
    server.signal(number)
    server.wait()
    with Wire(server.figg) as early:
        early.send(figg.attach(b"t", 0))  # the server has not accepted the connection yet
        server.start()
        early.expect(figg.ATTACHED)
        assert early.expect(DATA).data == b"foo"


def test_a_request_over_a_restart_is_answered(server: ServerProcess) -> None:
    server.kill()
    answers: list[object] = []
    asking = threading.Thread(target=lambda: answers.append(get_json(server, "/healthz")))
    asking.start()
    server.start()
    asking.join(30)
    assert answers == [{"status": "ok"}]


def opened_by(pid: str) -> set[str]:
    """Return what a process has open, except for what it closes during the call."""
    opened = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.add(os.readlink(descriptor))
    return opened


def test_child_processes_inherit_nothing(server: ServerProcess) -> None:
    ours = {os.readlink(f"/proc/{server.pid}/fd/{number}") for number in (3, 4, 5)}
    assert all(name.startswith("socket:") for name in ours)
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert children, "the applier runs"
    for child in children:
        assert not opened_by(child) & ours
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        assert not [one for one in environ if one.startswith(b"LISTEN_")]


def refused(tmp_path: Path, *sockets: socket.socket, **environ: str) -> str:
    """Return the one line with which a server with these sockets ends."""
    passed = tuple(sock.fileno() for sock in sockets)
    server = ServerProcess(tmp_path / "data", start=False)
    command = [sys.executable, "-c", PASS_DESCRIPTORS, ",".join(map(str, passed)), *server.command]
    ended = subprocess.run(
        command,
        env={**os.environ, "LISTEN_FDS": str(len(sockets)), **environ},
        pass_fds=passed,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    line, rest = ended.stderr.split("\n", 1)
    assert rest == "", ended.stderr
    return line


def test_sockets_of_other_kinds_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with ExitStack() as stack:
        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        deaf = stack.enter_context(socket.socket())
        for sock, words in (
            (unix, "is a socket of AF_UNIX and SOCK_STREAM: listeners take TCP sockets only"),
            (udp, "is a socket of AF_INET and SOCK_DGRAM: listeners take TCP sockets only"),
            (deaf, "is not listening: pass the listening socket itself (Accept=no)"),
        ):
            line = refused(tmp_path, sock, LISTEN_FDNAMES="figg")
            assert line == f"headrace: inherited descriptor 3 (figg) {words}"


def test_more_sockets_announced_than_passed_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        line = refused(tmp_path, sock, LISTEN_FDS="3", LISTEN_FDNAMES="figg:ws:http")
        assert line.startswith("headrace: inherited descriptor 4 (ws) is ")


def test_a_socket_of_no_listener_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        assert refused(tmp_path, sock) == (
            f"headrace: inherited socket 3 (without a name, {address}) belongs to no listener: name it "
            f"figg, ws or http (FileDescriptorName=), or set a listener to its port"
        )


def test_the_service_manager_hears_of_readiness_and_of_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with ServerProcess(tmp_path / "data", env=environ) as server:
            assert manager.recv(100) == b"READY=1"
            server.terminate()
            assert manager.recv(100) == b"STOPPING=1"


def test_a_service_manager_that_is_gone_does_not_stop_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", env={"NOTIFY_SOCKET": "@gone"}) as server:
        server.wait_stderr("cannot notify the service manager of READY=1")
        assert server.terminate() == 0
