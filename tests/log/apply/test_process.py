"""The server's end of the pipe to the applier: order of work, and appliers that die or do not end."""

import asyncio
import os
import pickle
import select
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.errors import StoreFailedError
from headrace.log.apply import process as applier_process
from headrace.log.apply.process import STARTED_AGAIN, ApplierProcess
from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue, UnreadableCatalogueError
from headrace.log.commit.journal import ClosedFile
from headrace.log.disk import ATTEMPTS_MAX, RETRY_S, Disk
from headrace.log.layout import Layout
from tests.log.conftest import tiny
from tests.log.damage_matrix.unreadable import build
from tests.tools import tool

WAIT_S = 30


class Line:
    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        self.layout = Layout(path)
        if is_new:
            self.layout.make(Disk())
            Catalogue.create(path).close()
        self.prepared: list[Path] = []
        self.failures: list[str] = []
        self.waits: list[str] = []
        self._news = asyncio.Event()
        self.process = ApplierProcess(
            tiny(path),
            self.layout.lock(Disk()),
            applied=lambda _: None,
            prepared=self._heard(self.prepared),
            waiting=self._heard(self.waits),
            failed=self._heard(self.failures),
        )

    def _heard(self, what: list[object]) -> Callable[[object], None]:
        def heard(one: object) -> None:
            what.append(one)
            self._news.set()

        return heard

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    made = Line(tmp_path / "data")
    yield made
    if not made.process._closing:
        made.process.close()


async def test_journal_files_are_made_one_at_a_time(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    send = line.process._send
    monkeypatch.setattr(
        line.process, "_send", lambda message: (sent.append(message), send(message))
    )
    paths = [line.layout.journal_file(number) for number in range(4)]
    for path in paths:
        line.process.prepare(path)
    assert len(sent) == 1, "an apply would be second, not last"
    await line.until(lambda: len(line.prepared) == 4)
    assert line.prepared == paths
    assert len(sent) == 4
    assert all(path.exists() for path in paths)


async def test_an_applier_that_dies_is_a_failure(line: Line) -> None:
    os.kill(line.process.pid, signal.SIGKILL)
    await line.until(lambda: bool(line.failures))
    assert line.failures == ["the applier process was killed by signal 9"]


async def test_an_applier_without_room_for_shared_memory_is_started_again_with_its_orders(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_process, "_RETRY_S", 0.1)
    first = line.process.pid
    os.kill(first, signal.SIGSTOP)  # so that the order is unanswered
    line.process.prepare(line.layout.journal_file(0))
    os.kill(first, signal.SIGBUS)
    os.kill(first, signal.SIGCONT)
    await line.until(lambda: bool(line.waits))
    line.process.prepare(line.layout.journal_file(1))  # an order while no applier runs
    await line.until(lambda: len(line.prepared) == 2)
    assert line.prepared == [line.layout.journal_file(0), line.layout.journal_file(1)]
    assert line.waits == [STARTED_AGAIN]
    assert line.failures == []
    assert line.process.pid != first


async def test_an_order_that_was_answered_before_the_applier_died_is_not_sent_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_process, "_RETRY_S", 0.1)
    first, second = line.layout.journal_file(0), line.layout.journal_file(1)
    line.process.prepare(first)
    while not select.select([line.process._socket], [], [], WAIT_S)[0]:
        pytest.fail("the applier does not answer")
    os.kill(line.process.pid, signal.SIGBUS)
    os.waitid(os.P_PID, line.process.pid, os.WEXITED | os.WNOWAIT)
    line.process.prepare(second)
    line.process.apply(ClosedFile(second, 512, 1))  # written to a socket that nobody reads
    await line.until(lambda: bool(line.waits))
    assert line.prepared == [first]
    assert [order.path for order in line.process._unanswered] == [str(second), str(second)]


async def test_a_failed_applier_does_not_keep_the_loop_busy(line: Line) -> None:
    # A journal file that does not exist: the applier reports its failure, and ends.
    line.process._fail("made up")
    os.kill(line.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, line.process.pid, os.WEXITED | os.WNOWAIT)
    await asyncio.sleep(0.05)
    fd = line.process._socket.fileno()
    assert not asyncio.get_running_loop().remove_reader(fd), "it is still watched"
    assert line.failures == ["made up"]


async def test_a_server_may_stop_while_no_applier_runs(line: Line) -> None:
    os.kill(line.process.pid, signal.SIGBUS)
    await line.until(lambda: bool(line.waits))
    line.process.close()
    assert line.failures == []


async def test_an_order_to_an_applier_that_has_just_died_is_a_failure_and_no_error(
    line: Line,
) -> None:
    line.process.prepare(line.layout.journal_file(0))
    await line.until(lambda: bool(line.prepared))
    os.kill(line.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, line.process.pid, os.WEXITED | os.WNOWAIT)
    closed = ClosedFile(line.layout.journal_file(0), 512, 1)
    line.process.apply(closed)  # the loop has had no chance to notice the end
    line.process.apply(closed)
    await line.until(lambda: bool(line.failures))
    assert line.failures == ["the applier process was killed by signal 9"]


@pytest.mark.parametrize("times", [1, ATTEMPTS_MAX - 1])
@pytest.mark.parametrize(
    "error",
    [
        sqlite3.DatabaseError("database disk image is malformed"),
        UnreadableCatalogueError("catalogue.sqlite: disk I/O error"),
    ],
)
def test_a_catalogue_that_cannot_be_read_for_a_moment_is_read_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(applier_process.time, "sleep", pauses.append)
    errors = [error] * times

    def work() -> str:
        if errors:
            raise errors.pop()
        return "applied"

    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert applier_process._retried(ours, work) == "applied"
    assert pauses == [RETRY_S] * times


def test_a_catalogue_that_stays_unreadable_is_a_failure_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applier_process.time, "sleep", lambda _: None)

    def work() -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(StoreFailedError, match="the next start rebuilds"):
        applier_process._retried(ours, work)


@pytest.fixture(scope="module")
def unreadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tool("gcc", "cc"), tmp_path_factory.mktemp("library") / "unreadable.so")


@pytest.mark.parametrize("times", [1, 2, -1])
@pytest.mark.parametrize("page", [0, 1])
async def test_a_read_of_the_catalogue_that_fails_for_a_moment_stops_nothing(
    tmp_path: Path,
    unreadable: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    times: int,
    page: int,
) -> None:
    Layout(tmp_path / "data").make(Disk())
    Catalogue.create(tmp_path / "data").close()
    inode = (tmp_path / "data" / FILE_NAME).stat().st_ino
    place = page * 4096
    monkeypatch.setenv("LD_PRELOAD", str(unreadable))
    monkeypatch.setenv("UNREADABLE", f"{inode} {place} {place + 4096} {times}")
    line = Line(tmp_path / "data", is_new=False)
    monkeypatch.delenv("LD_PRELOAD")
    line.process.prepare(line.layout.journal_file(0))
    await line.until(lambda: bool(line.prepared or line.failures))
    if times >= 0:
        assert line.prepared == [line.layout.journal_file(0)]
        assert line.failures == []
    else:
        assert line.prepared == []
        (failure,) = line.failures
        assert "the catalogue cannot be read" in failure
        assert line.process._process.wait() == 1
    line.process.close()
    assert "Traceback" not in capfd.readouterr().err


async def test_an_applier_that_does_not_end_is_killed(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_process, "_END_TIMEOUT_S", 0.1)
    line.process.prepare(line.layout.journal_file(0))
    await line.until(lambda: bool(line.prepared))
    os.kill(line.process.pid, signal.SIGSTOP)
    line.process.close()
    assert line.process._process.returncode == -signal.SIGKILL
    assert line.failures == []


@pytest.mark.parametrize(
    "sent", [b"", pickle.dumps((tiny(Path("data")), 1))[:-10]], ids=["none", "some"]
)
def test_a_server_that_is_killed_while_it_sends_its_settings_leaves_no_traceback(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        done = subprocess.run(
            [sys.executable, "-m", "headrace.log.apply.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
