"""Crashes at any point of runs with changes: a change's records and notes appear together, and in order.

After a crash, a store must hold the result of a prefix of all changes. The prefix contains at least every
change that was answered.
"""

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.log.records import pack_record
from headrace.log.store import Note
from headrace.log.verify.verify import verify
from tests.fakes.store import StepStore
from tests.log.conftest import QUICK
from tests.log.crashes import CrashTests, Recorded, Run, reopen, states
from tests.tools import EXAMPLES

SYNCED = ("a", "b")
WRITTEN = "written/w"
KEYS = (b"k1", b"k2", b"k3")
CLOSURE = b"tc"
"""Begins the keys of the store's own notes."""


@dataclass
class Change:
    """A requested change. No two changes have equal payloads."""

    topic: str
    payloads: list[bytes]
    notes: dict[bytes, tuple[bytes | None, int]]
    trimmed: list[bytes] = field(default_factory=list)
    create: bool = False
    close: bool = False
    destroy: bool = False


@dataclass
class State:
    """Content of a store: payloads by topic, what exists and what is closed, and notes."""

    topics: dict[str, list[bytes]]
    existing: set[str]
    closed: set[str]
    notes: dict[bytes, tuple[bytes, int]]
    due: list[bytes]

    @classmethod
    def after(cls, changes: list[Change]) -> "State":
        state = cls({name: [] for name in (*SYNCED, WRITTEN)}, set(), set(), {}, [])
        for change in changes:
            payloads = state.topics[change.topic] + change.payloads
            payloads = [one for one in payloads if one not in change.trimmed]
            state.topics[change.topic] = [] if change.destroy else payloads
            if change.payloads or change.create:
                state.existing.add(change.topic)
            if change.close:
                state.closed.add(change.topic)
            if change.destroy:
                state.existing.discard(change.topic)
                state.closed.discard(change.topic)
            state.notes |= change.notes
        state.notes = {key: one for key, one in state.notes.items() if one[0] is not None}
        due = sorted((due_ms, key) for key, (_, due_ms) in state.notes.items() if due_ms)
        state.due = [key for _, key in due]
        return state

    @classmethod
    def of(cls, store: StepStore) -> "State":
        handles = [store.store.topic(name) for name in (*SYNCED, WRITTEN)]
        notes = [
            one for one in store.store.notes(b"", b"", 10**6) if not one.key.startswith(CLOSURE)
        ]
        return cls(
            {topic.name: store.payloads(topic.name) for topic in handles},
            {topic.name for topic in handles if topic.exists},
            {topic.name for topic in handles if topic.is_closed},
            {one.key: (one.value, one.due_ms) for one in notes},
            [one.key for one in store.store.due_notes(1 << 60, 10**6)],
        )


class ChangeRun(Run):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[Change] = []

    def ask(
        self,
        topic: str,
        sizes=(),
        keys=(),
        *,
        drop=False,
        trim=False,
        create=False,
        close=False,
        destroy=False,
        large=0,
    ) -> None:
        """Ask for a change, which joins the next commit."""
        store, number = self.store.store, len(self.asked)
        handle = store.topic(topic)
        payloads = [b"%d/%d " % (number, at) + bytes(size) for at, size in enumerate(sizes)]
        if handle.is_closed:
            payloads = []
        close = close and topic == "b" and bool(payloads or create or store.exists(topic))
        value = None if drop else b"%d" % number + bytes(large)
        notes = dict.fromkeys(keys, (value, number % 3 * (50 - number)))
        notes[b"of/%d" % number] = b"", 0
        destroy = destroy and handle.exists
        change = Change(topic, payloads, notes, create=create, close=close, destroy=destroy)
        place = None
        if trim and handle.exists:
            middle = (handle.start_ordinal + handle.end_ordinal) // 2
            place = store.locate_ordinal(handle, middle)
            kept = self.store.payloads(topic, place.offset)
            change.trimmed = [one for one in self.store.payloads(topic) if one not in kept]
        self.asked.append(change)
        self.tell("asked", change)
        store.change(
            handle,
            records=[pack_record(payload) for payload in payloads],
            notes=[Note(key, *one) for key, one in notes.items()],
            trim=place,
            create_above=0 if create else None,
            close=close,
            destroy=destroy,
            done=lambda: self.tell("answered"),
        )

    def commit(self) -> None:
        self._run()
        if self.store.store.held_back:
            self.store.applying = False
            self.apply_or_not()
        assert State.of(self.store) == State.after(self.asked)

    def apply_or_not(self) -> None:
        """Stop applying journal files, or start again and apply the waiting files together."""
        self.store.applying = not self.store.applying
        if self.store.applying:
            with self.disk.record_catalogue():
                self.store.apply_waiting()

    def publish(self, size: int) -> None:
        """Publish to a topic that has no changes, in the same commit as changes of others."""
        store, payload = self.store.store, b"%d " % len(self.disk.operations) + bytes(size)
        store.append(
            {store.topic("plain"): [pack_record(payload)]}, lambda: self.tell("published", payload)
        )


class Known:
    """Changes and publishes that were asked for and answered so far."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.done = 0
        """Number of changes that were answered."""
        self.payloads: list[bytes] = []

    def asked(self, change: Change) -> None:
        self.changes.append(change)

    def answered(self) -> None:
        self.done += 1

    def published(self, payload: bytes) -> None:
        self.payloads.append(payload)


def check(store: StepStore, known: Known) -> State:
    """Check that all answered changes are there, followed by a prefix of the others."""
    found = State.of(store)
    possible = [
        State.after(known.changes[:count]) for count in range(known.done, len(known.changes) + 1)
    ]
    assert found in possible, f"{found} is none of {possible}"
    assert not set(known.payloads) - set(store.payloads("plain"))
    return found


def check_written(store: StepStore, known: Known) -> State:
    """Check after a machine crash that every change, synced or not, is there entirely or not at all."""
    found = State.of(store)
    for number, change in enumerate(known.changes):
        there = b"of/%d" % number in found.notes
        if change.topic == WRITTEN:
            stored = [one for one in change.payloads if one in found.topics[WRITTEN]]
            assert stored == (change.payloads if there else []), f"{number} is not whole"
        elif number < known.done:
            assert there, f"{number} is lost"
    assert not set(known.payloads) - set(store.payloads("plain"))
    return found


def everything(run: ChangeRun, *written: str) -> None:
    """Run every kind of change once."""
    for _ in range(3):
        run.ask("a", keys=KEYS)
        run.commit()
    run.ask("b", keys=KEYS[:1], create=True)
    run.commit()
    run.ask("b", [9], close=True)
    run.commit()
    run.ask("b", destroy=True)
    run.ask("b", create=True)
    run.commit()
    run.ask("a", [10], KEYS[:1])
    run.publish(30)
    run.ask("b", [10, 500], KEYS[1:], large=300)
    run.commit()
    for topic in written:
        run.ask(topic, [20], KEYS[:1])
        run.commit()
        run.ask(topic, [20, 700], KEYS[:2])
        run.commit()
    run.rotate()
    run.ask("b", [3], KEYS[:1], drop=True)
    run.publish(900)
    run.ask("a", [3], KEYS[:2], trim=True)
    run.ask("b", [400], KEYS, large=900)
    run.commit()
    for topic in written:
        run.ask(topic, [20], KEYS[2:], drop=True)
        run.commit()
    run.rotate()
    run.apply_or_not()
    run.ask("b", [5], KEYS[1:], destroy=True)
    run.ask("b", [6], KEYS[:1])
    run.commit()
    run.rotate()
    run.ask("a", [40] * 120, KEYS, large=2000)
    run.publish(10)
    run.ask("b", trim=True)
    run.commit()
    run.apply_or_not()
    run.sync_written()
    for topic in written:
        run.ask(topic, [900, 20], KEYS)
        run.commit()
    run.ask("a", destroy=True)
    run.commit()
    run.ask("a", [8], KEYS[1:])
    run.close()


sizes = st.lists(st.sampled_from([0, 5, 60, 450, 1500]), max_size=3)
keys = st.lists(st.sampled_from(KEYS), max_size=3, unique=True)
changes = st.tuples(
    st.just("ask"),
    st.sampled_from(SYNCED),
    sizes,
    keys,
    st.fixed_dictionaries(
        {
            "drop": st.booleans(),
            "trim": st.booleans(),
            "create": st.booleans(),
            "close": st.sampled_from([False, False, True]),
            "destroy": st.sampled_from([False, False, False, True]),
            "large": st.sampled_from([0, 0, 100, 2500]),
        }
    ),
)
written_changes = st.tuples(st.just("ask"), st.just(WRITTEN), sizes, keys, st.just({}))
others = st.sampled_from(
    [("commit",), ("commit",), ("rotate",), ("apply_or_not",), ("sync_written",), ("publish", 40)]
)


@pytest.fixture(scope="module", params=[(), (WRITTEN,)], ids=["synced", "written"])
def recorded(request, tmp_path_factory) -> Recorded:
    run = ChangeRun(tmp_path_factory.mktemp("changes") / "data")
    everything(run, *request.param)
    return Recorded.of(run)


class TestChangesAreWhole(CrashTests):
    known = Known

    def check(self, path: Path, known: Known, *, machine: bool) -> None:
        written = machine and any(change.topic == WRITTEN for change in known.changes)
        store = reopen(path, machine=machine)
        found = (check_written if written else check)(store, known)
        for number in range(3):
            # The store continues from there, and further crashes do not change its content.
            store.crash()
            store = reopen(path, machine=machine)
            assert State.of(store) == found
            store.change("a", b"after %d" % number, notes=[Note(b"k1", b"after %d" % number)])
            found.topics["a"].append(b"after %d" % number)
            found.existing.add("a")
            found.notes[b"k1"] = b"after %d" % number, 0
            found.due = [key for key in found.due if key != b"k1"]
            assert State.of(store) == found
            if number == 1:
                store.settle()
                assert State.of(store) == found
        store.close()
        if not written:
            assert not verify(path).damaged

    @settings(max_examples=EXAMPLES)
    @given(
        steps=st.lists(
            st.one_of(changes, changes, written_changes, others), min_size=1, max_size=25
        ),
        places=st.lists(st.floats(0, 1), min_size=4, max_size=4),
        machine=st.booleans(),
    )
    def test_any_run_survives_a_crash_anywhere(self, steps, places, machine):
        with tempfile.TemporaryDirectory(prefix="headrace-", dir=QUICK) as directory:
            path = Path(directory)
            run = ChangeRun(path / "data")
            for name, *facts in steps:
                options = facts.pop() if name == "ask" else {}
                getattr(run, name)(*facts, **options)
            run.commit()
            recorded = Recorded.of(run)
            possible = recorded.prefixes()
            chosen = [possible[int(share * (len(possible) - 1))] for share in places]
            for state in states(recorded, chosen, Known()):
                chance = random.Random(f"{state.done} {len(steps)}")
                self.crash(state, path, chance, machine=machine)
