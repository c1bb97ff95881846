"""Crashes of the process and of the machine at any point of a recorded run: nothing acknowledged is lost.

The disk is a model (`tests.fakes.disk`): after a crash of the machine, bytes that were not synced may be
missing, torn or zeros. Another model (`expected.py`) knows what must be there then. A usual run crashes at a
sample of the points, `make torture` at all of them.
"""

import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.config.settings import Config, Journal, Segment
from headrace.log.records import pack_record
from tests.fakes.disk import DiskModel, MarkOp, Operation, RecordingDisk
from tests.fakes.store import BOOT_ID, StepClock, StepStore
from tests.log.conftest import tiny
from tests.log.expected import Expected, ExpectingListener
from tests.tools import sampled

OTHER_BOOT = b"the second boot."


class Run:
    """A recorded run of a store, with marks for every request and answer."""

    def __init__(self, path: Path, disk: RecordingDisk | None = None) -> None:
        self.path = path
        self.disk = disk or RecordingDisk()
        with self.disk.record_catalogue():
            self.store = StepStore(
                small(path), disk=self.disk, listener=ExpectingListener(self.tell)
            )

    def tell(self, what: str, *facts: object) -> None:
        self.disk.mark((what, facts))

    def append(self, *names: str, size: int = 20) -> None:
        """Append a record to each topic, in one commit."""
        for name in names:
            payload = random.Random(len(self.disk.operations)).randbytes(size)
            store = self.store.store
            store.append({store.topic(name): [pack_record(payload)]}, lambda: None)
        self._run()

    def append_many(self, name: str, count: int) -> None:
        store = self.store.store
        records = [pack_record(b"%d" % number) for number in range(count)]
        store.append({store.topic(name): records}, lambda: None)
        self._run()

    def append_once(self, name: str, number: int, size: int = 20) -> None:
        payload = b"%d numbered" % number + bytes(size)
        self.tell("number_asked", name, "p", number, payload)
        store = self.store.store
        store.append_once(
            store.topic(name),
            [pack_record(payload)],
            "p",
            number,
            lambda _: self.tell("number_answered", name, "p", number),
        )
        self._run()

    def trim(self, name: str) -> None:
        """Trim the first half."""
        topic = self.store.store.topic(name)
        middle = self.store.store.locate_ordinal(
            topic, (topic.start_ordinal + topic.end_ordinal) // 2
        )
        self.tell("trim_asked", name, middle.offset)
        self.store.store.trim(
            topic, middle, lambda: self.tell("trim_answered", name, middle.offset)
        )
        self._run()

    def destroy(self, name: str) -> None:
        topic = self.store.store.topic(name)
        end = topic.end_offset
        self.tell("trim_asked", name, end)
        self.store.store.destroy(topic, lambda: self.tell("destroy_answered", name, end))
        self._run()

    def set_cursors(self, reader: str, *names: str) -> None:
        """Move a reader's cursors to the end of each topic, in one commit."""
        store = self.store.store
        positions = {name: store.topic(name).end for name in names}
        for name, at in positions.items():
            self.tell("cursor_asked", name, reader, at)
        told = tuple(positions.items())
        store.set_cursors(reader, positions, lambda: self.tell("cursors_answered", reader, told))
        self._run()

    def drop_cursors(self, reader: str, *names: str) -> None:
        for name in names:
            self.tell("cursor_asked", name, reader, None)
        told = tuple((name, None) for name in names)
        self.store.store.drop_cursors(
            reader, names, lambda: self.tell("cursors_answered", reader, told)
        )
        self._run()

    def rotate(self) -> None:
        with self.disk.record_catalogue():
            self.store.rotate()

    def sync_written(self) -> None:
        self.store.store.sync_written()
        self._run()

    def close(self) -> None:
        with self.disk.record_catalogue():
            self.store.close()

    def _run(self) -> None:
        self.store.clock.ms += 60
        with self.disk.record_catalogue():
            self.store.runner.run()


def small(path: Path) -> Config:
    return tiny(
        path,
        journal=Journal(file_bytes=65_536, files=2, commit_bytes_max=4096),
        segment=Segment(bytes=100, open_files_max=4),
    )


def everything(run: Run) -> None:
    """Do every kind of operation once."""
    run.append("a")
    run.append("a", "written/w")
    run.append_once("a", 1)
    run.append("written/w", size=700)
    run.set_cursors("r", "a", "written/w")
    run.rotate()
    run.append("a", "b", size=300)
    run.append("written/w")
    run.append_once("written/w", 1)
    run.set_cursors("r", "a")
    run.set_cursors("s", "b")
    run.drop_cursors("r", "written/w")
    run.rotate()
    run.append("written/w")
    run.trim("a")
    run.append_once("a", 2, size=600)
    run.destroy("b")
    run.set_cursors("r", "written/w", "b")
    run.rotate()
    run.append("b", "a")
    run.sync_written()
    run.append("written/w")
    run.close()


def recycling(run: Run) -> None:
    """Use journal files again and again, with commits of other sizes than before."""
    for number in range(12):
        run.append("a", "written/w", size=(37 * number) % 500)
        run.append("written/w", size=(91 * number) % 900)
        if number % 3 == 0:
            run.append_once("a", number, size=40 * number)
        if number == 5:
            run.append_many("a", 120)
        if number % 2:
            run.set_cursors("r", "a", "written/w")
        if number % 4 == 3:
            run.drop_cursors("r", "a")
        run.rotate()


def lives(run: Run) -> None:
    """Create and destroy topics, some of them in the same commit."""
    for number in range(6):
        run.append("a", "b", "c", size=30)
        run.destroy("abc"[number % 3])
        if number % 2:
            run.rotate()
            run.append("abc"[number % 3], size=200)
            run.trim("abc"[(number + 1) % 3])
    run.close()


RUNS = {"everything": everything, "recycling": recycling, "lives": lives}


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory) -> tuple[Path, list[Operation]]:
    path = tmp_path_factory.mktemp(request.param) / "data"
    run = Run(path)
    RUNS[request.param](run)
    run.store.crash()
    return path, run.disk.operations


def prefixes(operations: list[Operation]) -> list[int]:
    """Return every point between two operations."""
    places = [at for at, done in enumerate(operations) if not isinstance(done, MarkOp)]
    return [*places, len(operations)]


def states(recorded, places: Iterable[int]):
    """Yield number of operations done, the disk, the expected content, and the operation in progress."""
    path, operations = recorded
    model, expected = DiskModel(path), Expected()
    wanted = set(places)
    for at in range(len(operations) + 1):
        if at in wanted:
            yield at, model, expected.copy(), operations[at] if at < len(operations) else None
        if at < len(operations):
            operation = operations[at]
            if isinstance(operation, MarkOp):
                what, facts = operation.what
                getattr(expected, what)(*facts)
            else:
                model.do(operation)


def reopen(path: Path, boot_id: bytes, **options: object) -> StepStore:
    return StepStore(small(path), boot_id=boot_id, clock=StepClock(1_700_000_100_000), **options)


def check_all(path: Path, expected: Expected, boot_id: bytes) -> None:
    """Recover, check, append and crash, twice."""
    for payload in (b"after the first crash", b"after the second"):
        store = reopen(path, boot_id)
        expected.check(store)
        expected.go_on(store, payload)
        expected.check(store)
        store.settle()
        expected.check(store)
        store.append(next(iter(expected.topics), "a"), b"not settled")
        store.crash()
        expected = expected.copy()
        _took(expected, store)


def _took(expected: Expected, store: StepStore) -> None:
    """Expect the record that `check_all` leaves in the journal."""
    one = store.listener.appended[-1]
    expected.begun(one.topic.name, one.offset, one.ordinal, one.records)
    expected.acknowledged(one.topic.name, one.offset, one.ordinal, one.records, one.topic.epoch)


def crash_and_check(state, tmp_path: Path, chance: random.Random, *, machine: bool) -> None:
    """Crash the process or the machine at one point, and check what must be there afterwards."""
    at, model, expected, running = state
    target = tmp_path / f"{at}"
    if machine:
        model.crashed(target, running, chance)
        expected.machine_crashed("written/")
    else:
        model.killed(target, running, chance)
    check_all(target, expected, OTHER_BOOT if machine else BOOT_ID)
    shutil.rmtree(target)


def crash_twice_and_check(state, tmp_path: Path, chance: random.Random, *, machine: bool) -> None:
    """Crash, and crash again at some point of the recovery."""
    at, model, expected, running = state
    boot_id = OTHER_BOOT if machine else BOOT_ID
    first, copy, second = (tmp_path / f"{at}-{part}" for part in ("first", "copy", "second"))
    if machine:
        model.crashed(first, running, chance)
        expected.machine_crashed("written/")
    else:
        model.killed(first, running, chance)
    if not first.exists():
        return  # nothing was on disk yet
    shutil.copytree(first, copy)
    disk = RecordingDisk()
    with disk.record_catalogue():
        reopen(copy, boot_id, disk=disk).crash()
    again = DiskModel(copy, first)
    done = chance.randrange(len(disk.operations))
    for operation in disk.operations[:done]:
        again.do(operation)
    (again.crashed if machine else again.killed)(second, disk.operations[done], chance)
    check_all(second, expected, boot_id)
    for path in (first, copy, second):
        shutil.rmtree(path)


def test_a_killed_process_loses_nothing(recorded, tmp_path):
    for state in states(recorded, sampled(prefixes(recorded[1]), 5)):
        crash_and_check(state, tmp_path, random.Random(state[0]), machine=False)


@pytest.mark.parametrize("seed", [1])
def test_a_crash_of_the_machine_loses_nothing_that_was_synced(recorded, tmp_path, seed):
    for state in states(recorded, sampled(prefixes(recorded[1]), 5, 2)):
        crash_and_check(state, tmp_path, random.Random(f"{seed} {state[0]}"), machine=True)


@pytest.mark.parametrize("machine", [False, True])
def test_a_crash_during_recovery_is_recovered_from(recorded, tmp_path, machine):
    for state in states(recorded, sampled(prefixes(recorded[1])[::4], 3, int(machine))):
        crash_twice_and_check(state, tmp_path, random.Random(state[0]), machine=machine)
