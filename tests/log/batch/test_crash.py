"""Crashes at any point of a run with batches: decided batches are there exactly once, and nothing else is.

The disk is a model (`tests.fakes.disk`), as in `tests/log/test_crash.py`. A usual run crashes at a sample of
the points, `make torture` at all of them.
"""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from headrace.log.records import pack_record
from headrace.log.verify.verify import verify
from tests.fakes.disk import DiskModel, MarkOp, Operation, RecordingDisk
from tests.fakes.store import BOOT_ID, RecordingListener, StepStore
from tests.log.test_crash import OTHER_BOOT, Run, prefixes, reopen
from tests.tools import sampled

TOPICS = ("a", "b", "written/w")

Rows = list[tuple[str, bytes]]


def rows(number: int, count: int) -> Rows:
    """Return the rows of batch `number`, in order."""
    return [
        (TOPICS[index // 3 % 3], b"batch %d row %03d " % (number, index) + bytes(index % 90))
        for index in range(count)
    ]


def files(rows: Rows, *sizes: int) -> list[list[tuple[str, list[bytes]]]]:
    """Split rows into files of these sizes, as blocks. A block holds consecutive rows of one topic."""
    made, first = [], 0
    for size in (*sizes, len(rows)):
        blocks: list[tuple[str, list[bytes]]] = []
        for topic, payload in rows[first : first + size]:
            if not blocks or blocks[-1][0] != topic or len(blocks[-1][1]) == 4:
                blocks.append((topic, []))
            blocks[-1][1].append(payload)
        if blocks:
            made.append(blocks)
        first += size
    return made


class BatchRun(Run):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.store.store.listener = self.store.listener = RecordingListener()

    def batch(self, number: int, count: int, *sizes: int) -> None:
        wanted = rows(number, count)
        with self.disk.record_catalogue():
            ids = [self.store.stage(*blocks) for blocks in files(wanted, *sizes)]
            self.tell("asked", number, wanted)
            self.store.store.batches.decide(
                "p", number, ids, lambda _: self.tell("answered", number)
            )
        self._run()

    def publish(self, topic: str, payload: bytes) -> None:
        store = self.store.store
        store.append(
            {store.topic(topic): [pack_record(payload)]},
            lambda: self.tell("published", topic, payload),
        )


def everything(run: BatchRun) -> None:
    run.publish("a", b"before")
    run.batch(0, 40, 15, 7)
    run.publish("a", b"beside")
    run.batch(3, 60)
    run.rotate()
    run.batch(4, 3)
    run.publish("b", b"another")
    run.batch(9, 150, 60, 30)
    run.batch(10, 0)
    run.rotate()
    run.batch(11, 30, 1, 1, 1)
    run.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[Operation]]:
    path = tmp_path_factory.mktemp("batches") / "data"
    run = BatchRun(path)
    everything(run)
    run.store.crash()
    return path, run.disk.operations


class Known:
    """Batches that were asked for and answered so far."""

    def __init__(self) -> None:
        self.asked: dict[int, Rows] = {}
        self.answered: set[int] = set()
        self.published: list[tuple[str, bytes]] = []

    def tell(self, what: str, *facts) -> None:
        if what == "asked":
            self.asked[facts[0]] = facts[1]
        elif what == "answered":
            self.answered.add(*facts)
        elif what == "published":
            self.published.append(facts)


def states(recorded, places):
    path, operations = recorded
    model, known = DiskModel(path), Known()
    wanted = set(places)
    for at in range(len(operations) + 1):
        if at in wanted:
            yield at, model, known, operations[at] if at < len(operations) else None
        if at < len(operations):
            operation = operations[at]
            if isinstance(operation, MarkOp):
                what, facts = operation.what
                known.tell(what, *facts)
            else:
                model.do(operation)


def check(store: StepStore, known: Known, must: set[int], *, written: bool) -> None:
    """Check that each batch in `must` is there once and in order, any other one entirely or not at all."""
    topics = TOPICS if written else TOPICS[:2]
    found = {topic: store.payloads(topic) for topic in TOPICS}
    for topic, payloads in found.items():
        doubled = [one for one, count in Counter(payloads).items() if count > 1]
        assert not doubled, f"{topic}: doubled {doubled[:3]}"
    for number, wanted in known.asked.items():
        there = set()
        for topic in topics:
            expected = [payload for name, payload in wanted if name == topic]
            prefix = b"batch %d row" % number
            got = [payload for payload in found[topic] if payload.startswith(prefix)]
            assert got in ([], expected), f"{topic}: batch {number} is not whole"
            there |= {bool(got)} if expected else set()
        assert len(there) <= 1, f"batch {number} is in some topics only"
        if number in must and wanted:
            assert there == {True}, f"batch {number} is lost"
    for topic, payload in known.published:
        assert payload in found[topic]
    numbers = [int(one.split()[1]) for one in found["a"] if one.startswith(b"batch")]
    assert numbers == sorted(numbers), "batches are not in order"


def recover_and_check(path: Path, known: Known, boot_id: bytes, *, machine: bool) -> None:
    written = not machine
    store = reopen(path, boot_id)
    check(store, known, known.answered, written=written)
    store.crash()
    store = reopen(path, boot_id)
    check(store, known, known.answered, written=written)
    for number, wanted in known.asked.items():
        ids = [store.stage(*blocks) for blocks in files(wanted, 11, 4, 17)]
        answer = store.batch("p", number, *ids)
        assert answer.duplicate or number not in known.answered
    check(store, known, set(known.asked), written=written)
    store.close()
    store = reopen(path, boot_id)
    check(store, known, set(known.asked), written=written)
    assert store.store.staging.bytes == sum(
        one.stat().st_size for one in store.layout.staged.iterdir()
    )
    store.close()
    assert not verify(path).damaged


def crash_and_check(state, tmp_path: Path, chance: random.Random, *, machine: bool) -> None:
    at, model, known, running = state
    target = tmp_path / f"{at}"
    (model.crashed if machine else model.killed)(target, running, chance)
    boot_id = OTHER_BOOT if machine else BOOT_ID
    recover_and_check(target, known, boot_id, machine=machine)
    shutil.rmtree(target)


def test_a_killed_process_appends_each_batch_once(recorded, tmp_path):
    for state in states(recorded, sampled(prefixes(recorded[1]), 5)):
        crash_and_check(state, tmp_path, random.Random(state[0]), machine=False)


@pytest.mark.parametrize("seed", [1])
def test_a_crash_of_the_machine_appends_each_batch_once(recorded, tmp_path, seed):
    for state in states(recorded, sampled(prefixes(recorded[1]), 5, 2)):
        crash_and_check(state, tmp_path, random.Random(f"{seed} {state[0]}"), machine=True)


@pytest.mark.parametrize("machine", [False, True])
def test_a_crash_while_a_batch_goes_on_after_a_crash(recorded, tmp_path, machine):
    boot_id = OTHER_BOOT if machine else BOOT_ID
    places = sampled(prefixes(recorded[1])[::3], 3, int(machine))
    for at, model, known, running in states(recorded, places):
        chance = random.Random(at)
        first, copy, second = (tmp_path / f"{at}-{part}" for part in ("first", "copy", "second"))
        (model.crashed if machine else model.killed)(first, running, chance)
        if not first.exists():
            continue
        shutil.copytree(first, copy)
        disk = RecordingDisk()
        with disk.record_catalogue():
            reopen(copy, boot_id, disk=disk).crash()
        again = DiskModel(copy, first)
        done = chance.randrange(len(disk.operations))
        for operation in disk.operations[:done]:
            again.do(operation)
        (again.crashed if machine else again.killed)(second, disk.operations[done], chance)
        recover_and_check(second, known, boot_id, machine=machine)
        for path in (first, copy, second):
            shutil.rmtree(path)
