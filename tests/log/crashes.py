"""Runs of a store that are recorded, and crashes of the process or of the machine at any of their points.

The disk is a model (`tests.fakes.disk`): after a crash of the machine, bytes that were not synced may be
missing, torn or zeros. Another model hears every request and answer, and knows what must be there then. A
usual run crashes at a sample of the points, `make torture` at all of them.
"""

import copy
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.config.settings import Config, Journal, Segment
from tests.fakes.disk import DiskModel, MarkOp, Operation, RecordingDisk
from tests.fakes.store import BOOT_ID, RecordingListener, StepClock, StepStore
from tests.log.conftest import tiny
from tests.tools import sampled

OTHER_BOOT = b"the second boot."


class Run:
    """A recorded run of a store, with marks for every request and answer."""

    def __init__(self, path: Path, disk: RecordingDisk | None = None) -> None:
        self.path = path
        self.disk = disk or RecordingDisk()
        with self.disk.record_catalogue():
            self.store = StepStore(small(path), disk=self.disk, listener=self.listener())

    def listener(self) -> RecordingListener:
        return RecordingListener()

    def tell(self, what: str, *facts: object) -> None:
        self.disk.mark((what, facts))

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


def reopen(path: Path, *, machine: bool, **options: object) -> StepStore:
    """Start a store after a crash of the process or of the machine."""
    boot_id = OTHER_BOOT if machine else BOOT_ID
    return StepStore(small(path), boot_id=boot_id, clock=StepClock(1_700_000_100_000), **options)


class Recorded(NamedTuple):
    path: Path
    operations: list[Operation]

    @classmethod
    def of(cls, run: Run) -> "Recorded":
        run.store.crash()
        return cls(run.path, run.disk.operations)

    def prefixes(self) -> list[int]:
        """Return every point between two operations."""
        places = [at for at, done in enumerate(self.operations) if not isinstance(done, MarkOp)]
        return [*places, len(self.operations)]


class CrashState(NamedTuple):
    """A moment of a recorded run."""

    done: int
    """Number of operations done."""
    disk: DiskModel
    known: Any
    """Model that has heard of every request and answer so far."""
    running: Operation | None
    """The operation in progress."""

    def crash(self, target: Path, chance: random.Random, *, machine: bool) -> None:
        """Make a directory as the crash leaves it."""
        (self.disk.crashed if machine else self.disk.killed)(target, self.running, chance)


def states(recorded: Recorded, places: Iterable[int], known: object) -> Iterator[CrashState]:
    """Yield the states after these numbers of operations. `known` is a model that knows nothing yet."""
    path, operations = recorded
    model, wanted = DiskModel(path), set(places)
    for at, operation in enumerate([*operations, None]):
        if at in wanted:
            yield CrashState(at, model, copy.deepcopy(known), operation)
        if isinstance(operation, MarkOp):
            what, facts = operation.what
            getattr(known, what)(*facts)
        elif operation is not None:
            model.do(operation)


class CrashTests(ABC):
    """Crashes at any point of a recorded run. A subclass provides the fixture `recorded`."""

    known: Callable[[], object]
    """The model of what was asked and answered. It has a method for each kind of mark."""

    @abstractmethod
    def check(self, path: Path, known: Any, *, machine: bool) -> None:
        """Recover a directory after a crash, and check everything that must be there."""

    def crash(
        self, state: CrashState, tmp_path: Path, chance: random.Random, *, machine: bool
    ) -> None:
        """Crash the process or the machine at one point, and check what must be there afterwards."""
        target = tmp_path / f"{state.done}"
        state.crash(target, chance, machine=machine)
        self.check(target, state.known, machine=machine)
        shutil.rmtree(target)

    def crash_twice(
        self, state: CrashState, tmp_path: Path, chance: random.Random, *, machine: bool
    ) -> None:
        """Crash, and crash again at some point of the recovery."""
        first, copied, second = (tmp_path / f"{state.done}-{part}" for part in range(3))
        state.crash(first, chance, machine=machine)
        if not first.exists():
            return  # nothing was on disk yet
        shutil.copytree(first, copied)
        disk = RecordingDisk()
        with disk.record_catalogue():
            reopen(copied, machine=machine, disk=disk).crash()
        again = DiskModel(copied, first)
        done = chance.randrange(len(disk.operations))
        for operation in disk.operations[:done]:
            again.do(operation)
        (again.crashed if machine else again.killed)(second, disk.operations[done], chance)
        self.check(second, state.known, machine=machine)
        for path in (first, copied, second):
            shutil.rmtree(path)

    def test_a_killed_process_loses_nothing(self, recorded, tmp_path):
        for state in states(recorded, sampled(recorded.prefixes(), 5), self.known()):
            self.crash(state, tmp_path, random.Random(state.done), machine=False)

    @pytest.mark.parametrize("seed", [1])
    def test_a_crash_of_the_machine_loses_nothing_that_was_synced(self, recorded, tmp_path, seed):
        for state in states(recorded, sampled(recorded.prefixes(), 5, 2), self.known()):
            self.crash(state, tmp_path, random.Random(f"{seed} {state.done}"), machine=True)

    @pytest.mark.parametrize("machine", [False, True])
    def test_a_crash_during_recovery_is_recovered_from(self, recorded, tmp_path, machine):
        places = sampled(recorded.prefixes()[::3], 3, int(machine))
        for state in states(recorded, places, self.known()):
            self.crash_twice(state, tmp_path, random.Random(state.done), machine=machine)
