"""Crashes at any point of a run with batches: decided batches are there exactly once, and nothing else is."""

from collections import Counter
from pathlib import Path

import pytest

from headrace.log.records import pack_record
from headrace.log.verify.verify import verify
from tests.fakes.store import StepStore
from tests.log.crashes import CrashTests, Recorded, Run, reopen

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


class Known:
    """Batches that were asked for and answered so far."""

    def __init__(self) -> None:
        self.batches: dict[int, Rows] = {}
        self.appended: set[int] = set()
        self.records: list[tuple[str, bytes]] = []

    def asked(self, number: int, wanted: Rows) -> None:
        self.batches[number] = wanted

    def answered(self, number: int) -> None:
        self.appended.add(number)

    def published(self, topic: str, payload: bytes) -> None:
        self.records.append((topic, payload))


def check(store: StepStore, known: Known, must: set[int], *, written: bool) -> None:
    """Check that each batch in `must` is there once and in order, any other one entirely or not at all."""
    topics = TOPICS if written else TOPICS[:2]
    found = {topic: store.payloads(topic) for topic in TOPICS}
    for topic, payloads in found.items():
        doubled = [one for one, count in Counter(payloads).items() if count > 1]
        assert not doubled, f"{topic}: doubled {doubled[:3]}"
    for number, wanted in known.batches.items():
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
    for topic, payload in known.records:
        assert payload in found[topic]
    numbers = [int(one.split()[1]) for one in found["a"] if one.startswith(b"batch")]
    assert numbers == sorted(numbers), "batches are not in order"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    run = BatchRun(tmp_path_factory.mktemp("batches") / "data")
    everything(run)
    return Recorded.of(run)


class TestBatchesAreAppendedOnce(CrashTests):
    known = Known

    def check(self, path: Path, known: Known, *, machine: bool) -> None:
        written = not machine
        store = reopen(path, machine=machine)
        check(store, known, known.appended, written=written)
        store.crash()
        store = reopen(path, machine=machine)
        check(store, known, known.appended, written=written)
        for number, wanted in known.batches.items():
            ids = [store.stage(*blocks) for blocks in files(wanted, 11, 4, 17)]
            answer = store.batch("p", number, *ids)
            assert answer.duplicate or number not in known.appended
        check(store, known, set(known.batches), written=written)
        store.close()
        store = reopen(path, machine=machine)
        check(store, known, set(known.batches), written=written)
        assert store.store.staging.bytes == sum(
            one.stat().st_size for one in store.layout.staged.iterdir()
        )
        store.close()
        assert not verify(path).damaged
