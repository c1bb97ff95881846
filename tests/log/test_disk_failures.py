"""A disk that fails at any point of a run: everything acknowledged is durable, and nothing else is.

A usual run fails at a sample of the points, `make torture` at all of them.
"""

import errno
import random
import shutil
from pathlib import Path

import pytest

from headrace.errors import DataDirectoryError, StoreFailedError
from headrace.log.disk import DISK_FULL
from headrace.log.records import pack_record
from tests.fakes.disk import DiskModel, FailingDisk, MarkOp, Operation, SyncOp, Write
from tests.fakes.store import StepStore
from tests.log.conftest import tiny
from tests.log.crashes import OTHER_BOOT
from tests.log.expected import Expected
from tests.log.test_crash import TopicRun, check_all, everything
from tests.tools import TORTURE

EVERY = 1 if TORTURE else 3


class FailingRun(TopicRun):
    """A run in which one disk operation fails."""

    def __init__(self, path: Path, number: int, error: int) -> None:
        self.failed: Operation | None = None
        left = number

        def fail(operation: Operation) -> OSError | None:
            nonlocal left
            left -= 1
            if left != -1:
                return None
            self.failed = operation
            return OSError(error, "injected")

        self.stopped: Exception | None = None
        self.store: StepStore | None = None
        try:
            super().__init__(path, disk=FailingDisk(fail))
            everything(self)
        except (OSError, StoreFailedError, DataDirectoryError) as stopped:
            self.stopped = stopped

    def expected(self) -> Expected:
        expected = Expected()
        for operation in self.disk.operations:
            if isinstance(operation, MarkOp):
                what, facts = operation.what
                getattr(expected, what)(*facts)
        return expected

    def _run(self) -> None:
        super()._run()
        with self.disk.record_catalogue():
            self.store.store.write_again()  # the clock does this in a server
            self.store.runner.run()

    def crash(self, target: Path, seed: int) -> None:
        model = DiskModel(self.path)
        for operation in self.disk.operations:
            model.do(operation)
        model.crashed(target, None, random.Random(seed))


def runs(tmp_path: Path, error: int):
    """Yield a run for each operation that can fail, or for one of `EVERY` operations."""
    number = 0
    while True:
        run = FailingRun(tmp_path / f"{number}", number, error)
        if run.failed is None:
            assert number > 80
            return
        yield number, run
        shutil.rmtree(run.path, ignore_errors=True)
        number += EVERY


def test_an_error_stops_the_service_or_is_made_good_by_the_next_start(tmp_path):
    for number, run in runs(tmp_path, errno.EIO):
        assert run.stopped is not None, f"nobody noticed that {run.failed} failed"
        if run.store is not None:
            run.store.crash()
        if number % 2:
            check_all(run.path, run.expected(), machine=False)
            continue
        crashed = tmp_path / f"{number}-crashed"
        run.crash(crashed, number)
        check_all(crashed, run.expected(), machine=True)
        shutil.rmtree(crashed, ignore_errors=True)


def test_a_full_disk_stops_nothing_but_an_fsync_of_the_journal(tmp_path):
    went_on = 0
    for _, run in runs(tmp_path, errno.ENOSPC):
        if run.store is None:
            check_all(run.path, run.expected(), machine=False)  # there was no room to start
            continue
        if run.stopped is None:
            # The failure hit a commit or the applier, which continued as soon as there was room.
            went_on += 1
            assert run.store.store.held_back == ""
        else:
            assert not isinstance(run.failed, Write)
        run.store.crash()
        check_all(run.path, run.expected(), machine=False)
    assert went_on > 30 / EVERY


@pytest.fixture
def failing(tmp_path):
    """A store on a disk that fails when a test says so."""

    class Failing:
        def __init__(self) -> None:
            self.fail = lambda _: None
            self.disk = FailingDisk(lambda operation: self.fail(operation))
            with self.disk.record_catalogue():
                self.store = StepStore(tiny(tmp_path / "data"), disk=self.disk)

        def fail_at(self, kind: type, error: int = errno.EIO) -> None:
            self.fail = lambda operation: (
                OSError(error, "injected") if isinstance(operation, kind) else None
            )

    made = Failing()
    yield made
    if made.store is not None:
        made.store.crash()


def test_a_journal_that_cannot_be_written_takes_nothing_more(failing):
    store = failing.store
    store.append("topic", b"stored")
    failing.fail_at(Write)
    done = []
    topic = store.store.topic("topic")
    store.store.append({topic: [b"\0\0\0\1x"]}, lambda: done.append("x"))
    store.runner.run()
    assert done == []
    assert "writing the journal failed" in store.listener.failure
    assert "injected" in store.store.held_back
    failing.fail = lambda _: None  # even a working disk has unknown content now
    with pytest.raises(StoreFailedError, match="writing the journal failed"):
        store.append("topic", b"refused")
    assert store.payloads("topic") == [b"stored"]


def test_what_waited_behind_a_failed_commit_is_not_acknowledged(failing):
    store = failing.store
    failing.fail_at(Write)
    done = []
    topic = store.store.topic("topic")
    for payload in (b"a" * 3000, b"b" * 3000, b"c" * 3000):
        record = len(payload).to_bytes(4) + payload
        store.store.append({topic: [record]}, lambda p=payload: done.append(p))
    store.runner.run()
    assert done == []


def test_an_fsync_of_written_topics_that_fails_stops_the_service(failing):
    store = failing.store
    store.append("written/a", b"made: synced")
    store.append("written/a", b"written")
    failing.fail_at(SyncOp)
    store.store.sync_written()
    store.runner.run()
    assert "syncing the journal failed" in store.listener.failure


def test_a_commit_that_ends_after_an_fsync_failed_is_not_acknowledged(failing):
    store = failing.store
    store.append("written/a", b"made: synced")
    store.append("written/a", b"written")
    done = []
    topic = store.store.topic("written/a")
    failing.fail_at(SyncOp)
    store.store.sync_written()
    store.store.append({topic: [b"\0\0\0\1x"]}, lambda: done.append("appended"))
    store.runner.run()
    assert done == []


class HeldBack:
    """Records of one topic; the disk has no room for the last ones."""

    def __init__(self, failing, error: int = errno.ENOSPC, before: int = 1) -> None:
        self.failing, self.store = failing, failing.store
        self.done: list[int] = []
        for number in range(before):
            self.append(number)
        failing.fail_at(Write, error)
        self.append(before)
        self.append(before + 1)

    def append(self, number: int, name: str = "topic") -> None:
        topic = self.store.store.topic(name)
        record = pack_record(b"%d" % number)
        self.store.store.append({topic: [record]}, lambda: self.done.append(number))
        self.store.runner.run()

    def tick(self) -> None:
        self.store.store.tick(0.0)
        self.store.runner.run()

    def make_room(self) -> None:
        self.failing.fail = lambda _: None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("before", [0, 1], ids=["first commit of a file", "later commit"])
def test_a_commit_without_room_is_written_again_to_the_same_place(failing, error, before, caplog):
    held = HeldBack(failing, error, before)
    store = failing.store.store
    for _ in range(3):
        held.tick()
    assert held.done == list(range(before))
    assert store.held_back == DISK_FULL
    assert store.pending_bytes > 0
    assert failing.store.listener.failure == ""
    assert len(failing.store.payloads("topic")) == before, "nothing is shown"
    held.make_room()
    held.tick()
    assert held.done == list(range(before + 2))
    assert store.held_back == ""
    assert store.pending_bytes == 0
    attempts = [one for one in failing.disk.operations if isinstance(one, Write) and one.data]
    *halves, whole, _ = attempts[-6:]
    assert {one.position for one in halves} == {whole.position}
    assert all(whole.data.startswith(one.data) for one in halves)
    assert [r.message for r in caplog.records] == [
        DISK_FULL,
        "the disk has room again: publishes are accepted",
    ]
    failing.store.crash()
    again = StepStore(failing.store.config)
    assert again.payloads("topic") == [b"%d" % number for number in range(before + 2)]
    assert again.reports == []
    again.crash()
    failing.store = None


def test_a_store_that_ends_on_a_full_disk_has_lost_nothing_acknowledged(failing):
    held = HeldBack(failing, before=5)
    with pytest.raises(StoreFailedError, match="no space left"):
        failing.store.close()
    assert held.done == [0, 1, 2, 3, 4]
    failing.store.crash()
    again = StepStore(failing.store.config)
    assert again.payloads("topic")[:5] == [b"0", b"1", b"2", b"3", b"4"]
    again.crash()
    failing.store = None


@pytest.mark.parametrize("before", [0, 5])
def test_a_machine_that_crashes_on_a_full_disk_has_lost_nothing_acknowledged(
    failing, tmp_path, before
):
    held = HeldBack(failing, before=before)
    held.tick()
    for seed in range(10):
        model = DiskModel(Path(failing.store.config.data_dir))
        for operation in failing.disk.operations:
            model.do(operation)
        crashed = tmp_path / f"crashed-{seed}"
        model.crashed(crashed, None, random.Random(seed))
        again = StepStore(tiny(crashed), boot_id=OTHER_BOOT)
        assert again.payloads("topic")[:before] == [b"%d" % number for number in held.done]
        # A crash that leaves zeros for headers that were being written again cannot be told from damage.
        if not any("neither copy of its header" in report for report in again.reports):
            assert all("never acknowledged" in report for report in again.reports)
        again.crash()


def test_a_disk_that_fails_after_it_was_full_stops_the_service(failing):
    held = HeldBack(failing)
    failing.fail_at(Write, errno.EIO)
    held.tick()
    assert "writing the journal failed" in failing.store.listener.failure
    held.make_room()
    held.tick()
    assert held.done == [0]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("what", ["a commit", "the periodic fsync"])
def test_an_fsync_without_room_stops_the_service_and_a_restart_goes_on(failing, what, error):
    store = failing.store
    store.append("written/a", b"made: synced")
    store.append("written/a", b"written")
    failing.fail_at(SyncOp, error)
    done = []
    if what == "a commit":
        topic = store.store.topic("synced")
        store.store.append({topic: [b"\0\0\0\1x"]}, lambda: done.append("x"))
    else:
        store.store.sync_written()
    store.runner.run()
    assert done == []
    assert "the journal failed" in store.listener.failure
    assert "free some space, and start the server again" in store.listener.failure
    assert store.store.held_back == store.listener.failure
    failing.fail = lambda _: None
    store.store.write_again()
    store.runner.run()
    assert done == [], "an fsync that failed is not repeated"
    store.crash()
    again = StepStore(store.config)
    assert again.payloads("written/a") == [b"made: synced", b"written"]
    again.append("synced", b"y")
    assert again.payloads("synced")[-1] == b"y"
    again.crash()
    failing.store = None


def test_publishers_are_held_back_while_the_disk_is_full_and_go_on_afterwards(failing):
    store = failing.store
    failing.fail = lambda operation: (
        OSError(errno.ENOSPC, "injected")
        if isinstance(operation, Write) and len(operation.data) < 512
        else None
    )
    done = []
    topic = store.store.topic("topic")
    for number in range(60):
        payload = b"%d" % number * 1000
        record = len(payload).to_bytes(4) + payload
        store.store.append({topic: [record]}, lambda number=number: done.append(number))
        store.runner.run()
    assert 0 < len(done) < 60, "the journal takes some, then no more"
    assert store.store.held_back == "the disk is full"
    assert store.store.pending_bytes > 0
    assert len(store.payloads("topic")) == len(done)
    for _ in range(5):
        store.apply_waiting()  # it retries every time, and leaves no file open
    assert failing.disk.open_files <= 1
    failing.fail = lambda _: None
    store.apply_waiting()
    assert done == list(range(60))
    assert store.store.held_back == ""
    assert store.store.pending_bytes == 0
    assert len(store.payloads("topic")) == 60


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOENT])
def test_a_journal_file_that_cannot_be_opened_is_opened_later(failing, monkeypatch, caplog, error):
    """It stays free, its commit waits, and operators are told once."""
    store = failing.store

    def fail(path: Path, **_: object) -> int:
        raise OSError(error, "injected", str(path))

    free = list(store.store._ring.free)
    with monkeypatch.context() as patched:
        patched.setattr(failing.disk, "open", fail)
        done = []
        topic = store.store.topic("topic")
        for number in range(3):
            record = pack_record(b"%d" % number)
            store.store.append({topic: [record]}, lambda number=number: done.append(number))
            store.runner.run()
            store.store.tick(0.0)
            store.runner.run()
        assert done == []
        assert "cannot be opened" in store.store.held_back
        assert "injected" in store.store.held_back
        assert list(store.store._ring.free) == free
        assert sum("cannot be opened" in line for line in caplog.messages) == 1
    store.store.tick(0.0)
    store.runner.run()
    assert done == [0, 1, 2]
    assert store.store.held_back == ""
    assert store.payloads("topic") == [b"0", b"1", b"2"]
    assert "the journal is open again: publishes are accepted" in caplog.messages
    store.append("topic", b"3")
    store.settle()
    assert store.store.held_back == ""
