"""Crashes of the process and of the machine at any point of a run: nothing acknowledged is lost.

`expected.py` knows what must be there.
"""

import os
import random
from pathlib import Path

import pytest

from headrace.log.records import pack_record
from tests.fakes.store import RecordingListener, StepStore
from tests.log.crashes import CrashTests, Recorded, Run, reopen, states
from tests.log.expected import Expected, ExpectingListener

NAMES = ["a", "b", "written/w", "written/v"]
RANDOM_RUNS = int(os.environ.get("HEADRACE_TORTURE", "4"))
PLACES = 8
"""Number of crash points in each random run; every run has different ones."""


class TopicRun(Run):
    """A run with every kind of request about topics and cursors."""

    def listener(self) -> RecordingListener:
        return ExpectingListener(self.tell)

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


def everything(run: TopicRun) -> None:
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


def recycling(run: TopicRun) -> None:
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


def lives(run: TopicRun) -> None:
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


def check_all(path: Path, expected: Expected, *, machine: bool) -> None:
    """Recover, check, append and crash, twice."""
    if machine:
        expected.machine_crashed("written/")
    for payload in (b"after the first crash", b"after the second"):
        store = reopen(path, machine=machine)
        expected.check(store)
        expected.go_on(store, payload)
        expected.check(store)
        store.settle()
        expected.check(store)
        store.append(next(iter(expected.topics), "a"), b"not settled")
        store.crash()
        _took(expected, store)


def _took(expected: Expected, store: StepStore) -> None:
    """Expect the record that `check_all` leaves in the journal."""
    one = store.listener.appended[-1]
    expected.begun(one.topic.name, one.offset, one.ordinal, one.records)
    expected.acknowledged(one.topic.name, one.offset, one.ordinal, one.records, one.topic.epoch)


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory) -> Recorded:
    run = TopicRun(tmp_path_factory.mktemp(request.param) / "data")
    RUNS[request.param](run)
    return Recorded.of(run)


class TestCrashes(CrashTests):
    known = Expected

    def check(self, path: Path, known: Expected, *, machine: bool) -> None:
        check_all(path, known, machine=machine)

    @pytest.mark.parametrize("seed", range(RANDOM_RUNS))
    def test_a_random_run_survives_crashes_at_random_places(self, tmp_path, seed):
        chance = random.Random(seed)
        run = TopicRun(tmp_path / "data")
        do_anything(run, chance)
        recorded = Recorded.of(run)
        places = recorded.prefixes()
        chosen = chance.sample(places, min(PLACES, len(places)))
        for check in (self.crash, self.crash_twice):
            for machine in (False, True):
                for state in states(recorded, chosen, Expected()):
                    crash = random.Random(f"{seed} {state.done} {machine} {check.__name__}")
                    check(state, tmp_path, crash, machine=machine)


def do_anything(run: TopicRun, chance: random.Random) -> None:
    numbered = 0
    for _ in range(chance.randrange(5, 30)):
        what = chance.choices(
            ["append", "many", "once", "trim", "destroy", "rotate", "sync", "apply", "set", "drop"],
            [10, 1, 3, 1, 1, 4, 1, 2, 3, 1],
        )[0]
        name = chance.choice(NAMES)
        existing = [known for known in NAMES if run.store.store.topic(known).exists]
        if what == "append":
            names = chance.sample(NAMES, chance.randrange(1, 4))
            run.append(*names, size=chance.choice([0, 5, 50, 400, 1500]))
        elif what == "many":
            run.append_many(name, chance.choice([3, 40, 300]))
        elif what == "once":
            numbered += 1
            run.append_once(name, numbered, size=chance.choice([0, 60, 900]))
        elif what == "trim" and existing:
            run.trim(chance.choice(existing))
        elif what == "destroy" and existing:
            run.destroy(chance.choice(existing))
        elif what == "set":
            run.set_cursors(chance.choice("rs"), *chance.sample(NAMES, chance.randrange(1, 4)))
        elif what == "drop":
            run.drop_cursors(chance.choice("rs"), name)
        elif what == "rotate":
            run.rotate()
        elif what == "sync":
            run.sync_written()
        elif what == "apply":
            # Journal files wait for a while, and are then applied together.
            run.store.applying = not run.store.applying
            if run.store.applying:
                with run.disk.record_catalogue():
                    run.store.apply_waiting()
    if chance.random() < 0.3:
        run.close()
