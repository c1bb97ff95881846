"""The server as a process: its ready line, its signals, its data directory, its refusals."""

import json
import os
import random
import re
import signal
import socket
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from headrace.testing import ServerFailedError, ServerProcess, wait_until
from tests.system.checked import in_threads
from tests.system.conftest import SMALL, Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import ACK, DATA, Wire
from tests.system.support import FailingServer, children, get_json
from tests.tools import TORTURE, takes_long


def read_all(server: ServerProcess, topic: bytes) -> list[tuple[int, bytes]]:
    with Wire(server.figg) as wire:
        end = wire.attach(topic)
        records: list[tuple[int, bytes]] = []
        wire.send(figg.attach(topic, 0))
        wire.expect(figg.ATTACHED)
        while (records[-1][0] if records else 0) < end:
            message = wire.expect(DATA)
            records.append((message.number, message.data))
        return records


@pytest.mark.usefixtures("executed")
def test_one_line_on_standard_output_says_what_is_open(start: Start, tmp_path: Path) -> None:
    server = start("--ws=127.0.0.1:0")
    address = r"127\.0\.0\.1:\d+"
    wanted = rf"headrace ready figg={address} ws={address} http={address} data={tmp_path}/data\n"
    assert re.fullmatch(wanted, server.ready_line)
    assert server.terminate() == 0
    assert server.stdout == server.ready_line, "exactly one line"


def test_port_0_takes_free_ports_that_answer(start: Start, tmp_path: Path) -> None:
    free = [f"--{name}=127.0.0.1:0" for name in ("figg", "ws", "http")]
    one, two = start(*free), start(*free, data_dir=tmp_path / "other")
    ports = {one.figg[1], one.http[1], two.figg[1], two.http[1]}
    assert len(ports) == 4
    assert 0 not in ports
    for server in (one, two):
        with Wire(server.figg) as wire:
            assert wire.alive()
        assert get_json(server, "/healthz") == {"status": "ok"}


@pytest.mark.usefixtures("executed")
def test_sigterm_ends_an_idle_server_with_exit_code_0(start: Start) -> None:
    server = start()
    with Wire(server.figg) as wire:
        wire.publish(b"t", b"foo")
        wire.attach(b"t", 7)
        assert server.terminate() == 0
        assert wire.until_closed() == [], "connections are closed"
    assert "Traceback" not in server.stderr


@pytest.mark.usefixtures("executed")
def test_sigint_ends_it_as_well(start: Start) -> None:
    server = start()
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("durability", ["synced", "written"])
def test_sigterm_under_load_loses_nothing_it_acknowledged(start: Start, durability: str) -> None:
    server = start(f"--durability={durability}", config=SMALL)
    acked: dict[bytes, int] = {}

    def load(topic: bytes) -> None:
        number, acked[topic] = 0, -1
        with Wire(server.figg, timeout_s=30) as wire, suppress(EOFError, OSError):
            while True:
                while number - acked[topic] <= 256:
                    wire.send(figg.publish(topic, number, b"%d" % number))
                    number += 1
                acked[topic] = max(acked[topic], wire.expect(ACK).number)

    with in_threads(*(partial(load, b"t%d" % index) for index in range(4))):
        wait_until(lambda: sum(acked.values()) > 1000, what="acknowledgements")
        assert server.terminate() == 0
    server.start()
    for topic, last in acked.items():
        stored = [data for _, data in read_all(server, topic)]
        assert stored == [b"%d" % number for number in range(len(stored))]
        assert len(stored) >= last + 1, "an acknowledged record is lost"


def test_sigterm_after_a_burst_acknowledges_exactly_what_it_stored(start: Start) -> None:
    server = start()
    with Wire(server.figg) as wire:
        wire.send(*(figg.publish(b"t", number, b"%d" % number) for number in range(5000)))
        first = wire.expect(ACK).number
        assert server.terminate() == 0
        acks = [first, *(message.number for message in wire.until_closed())]
    server.start()
    assert len(read_all(server, b"t")) == acks[-1] + 1


def test_a_second_server_on_the_same_directory_is_refused(start: Start) -> None:
    first = start()
    second = start(start=False)
    with pytest.raises(ServerFailedError) as refused:
        second.start()
    assert refused.value.returncode not in (0, None)
    lines = refused.value.stderr.strip().splitlines()
    assert len(lines) == 1, refused.value.stderr
    assert str(first.data_dir) in lines[0]
    with Wire(first.figg) as wire:
        wire.publish(b"t", b"foo")
    first.terminate()
    second.start()
    assert read_all(second, b"t") == [(7, b"foo")]


@pytest.mark.parametrize(("durability", "end"), [("synced", "kill"), ("written", "terminate")])
def test_a_restart_keeps_the_log_and_offsets_continue(
    start: Start, durability: str, end: str
) -> None:
    server = start(f"--durability={durability}", config=SMALL)
    ports = server.figg, server.http
    known = []
    for life in range(4):
        records = [b"%d/%d" % (life, number) for number in range(100)]
        with Wire(server.figg) as wire:
            assert wire.attach(b"t") == (known[-1][0] if known else 0)
        with Wire(server.figg) as wire:
            wire.publish(b"t", *records)
        offset = known[-1][0] if known else 0
        for record in records:
            offset += 4 + len(record)
            known.append((offset, record))
        assert read_all(server, b"t") == known
        getattr(server, end)()
        server.start()
        assert (server.figg, server.http) == ports, "on the same ports"
        assert read_all(server, b"t") == known


def test_a_restart_on_memory_topics_forgets_them_and_does_no_harm(start: Start) -> None:
    server = start("--durability=memory")
    with Wire(server.figg) as wire:
        wire.publish(b"t", b"foo")
    server.restart()
    with Wire(server.figg) as wire:
        wire.publish(b"t", b"bar")


def test_topic_names_make_nothing_outside_the_data_directory(start: Start, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    server = start(data_dir=outer / "deep" / "data", config=SMALL)
    names = [b"../escape", b"../../escape", b"/" + bytes(outer) + b"/escape", b"a/../../../escape"]
    with Wire(server.figg) as wire:
        for name in names:
            wire.publish(name, b"foo")
    server.terminate()
    assert [path.name for path in outer.iterdir()] == ["deep"]
    assert [path.name for path in (outer / "deep").iterdir()] == ["data"]
    assert not list(tmp_path.rglob("*escape*"))


def refused(server: ServerProcess, *mentions: str) -> None:
    """Check that the server says in one line why it does not start, and ends."""
    with pytest.raises(ServerFailedError) as error:
        server.start()
    assert error.value.returncode not in (0, None)
    lines = error.value.stderr.strip().splitlines()
    assert len(lines) == 1, error.value.stderr
    for text in mentions:
        assert text in lines[0]


def test_a_data_directory_that_is_a_file_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    refused(start(data_dir=tmp_path / "file", start=False), str(tmp_path / "file"))


def test_a_data_directory_below_a_file_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    refused(start(data_dir=tmp_path / "file" / "data", start=False), str(tmp_path / "file"))


def test_a_data_directory_that_cannot_be_made_is_refused(start: Start) -> None:
    refused(start(data_dir=Path("/proc/headrace"), start=False), "/proc/headrace")


@pytest.mark.parametrize("used", [False, True])
def test_a_read_only_data_directory_is_refused(start: Start, tmp_path: Path, used: bool) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    if used:
        start(data_dir=data_dir).terminate()
    with read_only(data_dir):
        refused(start(data_dir=data_dir, start=False), str(data_dir))
    start(data_dir=data_dir)


class read_only:  # noqa: N801 - used as a statement
    """A directory to which nobody can write; for root, who ignores modes, it is mounted read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        if os.getuid():
            self._chmod(0o500)
            return
        bound = subprocess.run(["mount", "--bind", self.path, self.path], capture_output=True)
        if bound.returncode:
            pytest.skip("root, and mounting is not allowed: modes bind nobody here")
        subprocess.run(["mount", "-o", "remount,ro,bind", self.path], check=True)

    def __exit__(self, *_: object) -> None:
        if os.getuid():
            self._chmod(0o700)
        else:
            subprocess.run(["umount", self.path], check=True)

    def _chmod(self, mode: int) -> None:
        for directory, _, files in os.walk(self.path):
            for name in files:
                os.chmod(os.path.join(directory, name), mode & 0o600)
            os.chmod(directory, mode)


def test_a_missing_data_directory_is_made(start: Start, tmp_path: Path) -> None:
    start(data_dir=tmp_path / "new" / "data")
    assert (tmp_path / "new" / "data").is_dir()


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(ServerProcess(tmp_path / "data", figg=address, start=False), address)


def test_json_diagnostics_are_one_object_per_line(start: Start) -> None:
    server = start("--log-format=json", "--log-level=debug")
    with Wire(server.figg) as wire:
        wire.send(figg.frame(0, b""))
        wire.until_closed()
    server.terminate()
    lines = server.stderr.splitlines()
    assert lines
    for line in lines:
        assert isinstance(json.loads(line), dict), line


def test_an_applier_that_is_killed_during_a_commit_ends_the_server_in_one_sentence(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(SMALL)
    # The second commit takes so long that it is still being written when the server has stopped.
    inject = "pwritev2:delay_enter=700000:when=2+"
    with FailingServer(tmp_path / "data", f"--config={config}", inject=inject) as server:
        (applier,) = children(server.pid)
        with Wire(server.figg) as wire:
            wire.publish(b"t", b"acknowledged")
            wire.send(figg.publish(b"t", 1, b"being written"), figg.ping(0))
            wire.expect(figg.PONG)
        os.kill(applier, signal.SIGKILL)
        assert server.wait(20) == 1
        lines = server.stderr.splitlines()
        assert "Traceback" not in server.stderr
        assert [line for line in lines if "CRITICAL" in line] == lines[-1:]
        assert "the applier process was killed by signal 9" in lines[-1]


@takes_long
def test_an_applier_may_be_killed_at_any_moment(start: Start) -> None:
    chance = random.Random(1)
    config = SMALL.replace("1048576", "65536").replace("262144", "16384")
    server = start(config=config, start=False)
    for _ in range(1 + TORTURE // 20):
        server.start()
        before = len(server.stderr)
        (applier,) = children(server.pid)
        with figg.Client(server.figg) as client:
            with suppress(TimeoutError, RuntimeError):
                for number in range(chance.randrange(500)):
                    client.publish(b"t%d" % (number % 20), bytes(3000), 1)
            os.kill(applier, signal.SIGKILL)
            assert server.wait(20) == 1
        said = server.stderr[before:].splitlines()
        assert [line for line in said if "INFO" not in line] == said[-1:], said
        assert "the applier process was killed by signal 9" in said[-1]
