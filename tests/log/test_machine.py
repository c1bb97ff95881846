"""A store driven at random and compared with a list of records per topic."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.config.settings import Config, Journal, Limits, PrefixRule, Retention, Segment
from headrace.log import retention as retention_module
from headrace.log.records import pack_record
from headrace.log.retention import trimming
from headrace.log.store import Topic
from headrace.model import JUMP, Durability, Position
from tests.fakes.store import StepClock, StepStore
from tests.log.conftest import QUICK

NAMES = ["a", "b/2", "written/w", "memory/m", "aged/x", "sized/y"]
AGE_S = 50.0
KEPT_BYTES = 600

names = st.sampled_from(NAMES)
payloads = st.lists(
    st.sampled_from([b"", b"x", b"payload", b"\0" * 30, b"long" * 40, b"longest" * 300]),
    min_size=1,
    max_size=4,
)


def config(path: Path) -> Config:
    return Config(
        data_dir=path,
        journal=Journal(file_bytes=65_536, files=3, commit_bytes_max=4096),
        segment=Segment(bytes=200, open_files_max=3),
        limits=Limits(memory_topic_bytes_max=1 << 30),
        retention=Retention(age_s=0, check_s=1),
        topics=(
            PrefixRule(prefix="written/", durability=Durability.WRITTEN),
            PrefixRule(prefix="memory/", durability=Durability.MEMORY),
            PrefixRule(prefix="aged/", retention_age_s=AGE_S),
            PrefixRule(prefix="sized/", retention_bytes=KEPT_BYTES, durability=Durability.WRITTEN),
        ),
    )


@dataclass
class Record:
    offset: int
    ordinal: int
    ms: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + 4 + len(self.payload)


@dataclass
class Model:
    """Model of a topic: its records, and where the next one begins."""

    records: list[Record] = field(default_factory=list)
    end: tuple[int, int] = (0, 0)
    start: tuple[int, int] = (0, 0)
    epoch: int = 0
    ms: int = 0
    exists: bool = False
    numbers: dict[str, dict[int, int]] = field(default_factory=dict)

    def append(self, payloads: list[bytes], ms: int) -> None:
        assert ms >= self.ms, "times never decrease"
        self.exists, self.ms = True, ms
        for payload in payloads:
            record = Record(*self.end, ms, payload)
            self.records.append(record)
            self.end = record.end, record.ordinal + 1

    def trim(self, offset: int, ordinal: int) -> None:
        if offset > self.start[0]:
            self.start = offset, ordinal
            self.records = [record for record in self.records if record.offset >= offset]

    def destroy(self) -> None:
        self.trim(*self.end)
        self.start, self.exists = self.end, False

    def jump(self) -> None:
        if self.exists:
            self.end = self.end[0] + JUMP, self.end[1] + JUMP


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._path = Path(tempfile.mkdtemp(prefix="headrace-", dir=QUICK))
        self.clock = StepClock()
        self.boot = 0
        self.models: dict[str, Model] = {name: Model() for name in NAMES}

    @initialize()
    def begin(self) -> None:
        self._start()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.crash()
        shutil.rmtree(self._path)

    # Requests

    @rule(batches=st.dictionaries(names, payloads, min_size=1, max_size=4))
    def append(self, batches: dict[str, list[bytes]]) -> None:
        """Append to several topics at once."""
        store = self.store.store
        done: list[bool] = []
        records = {
            store.topic(name): [pack_record(payload) for payload in batch]
            for name, batch in batches.items()
        }
        seen = len(self.store.listener.appended)
        store.append(records, lambda: done.append(True))
        self.store.runner.run()
        self._unless_held_back(done)
        for one in self.store.listener.appended[seen:]:
            model = self.models[one.topic.name]
            assert (one.offset, one.ordinal) == model.end
            model.append(batches.pop(one.topic.name), one.ms)
        assert not batches

    @rule(name=names, payloads=payloads, producer=st.sampled_from("pq"), step=st.integers(-2, 3))
    def append_once(self, name: str, payloads: list[bytes], producer: str, step: int) -> None:
        model = self.models[name]
        known = model.numbers.setdefault(producer, {})
        number = max(0, max(known, default=0) + step)
        answers: list = []
        records = [pack_record(payload) for payload in payloads]
        store = self.store.store
        store.append_once(store.topic(name), records, producer, number, answers.append)
        self.store.runner.run()
        self._unless_held_back(answers)
        if known and number <= max(known):
            assert answers[0].duplicate
            assert answers[0].offset in (known.get(number), None)
            if number in sorted(known)[-8:]:
                assert answers[0].offset == known[number]
        else:
            assert not answers[0].duplicate
            model.append(payloads, self.store.listener.appended[-1].ms)
            known[number] = model.end[0]
            assert answers[0].offset == model.end[0]

    @rule(name=names, share=st.floats(0, 1))
    def trim(self, name: str, share: float) -> None:
        model, topic = self.models[name], self.store.store.topic(name)
        if model.exists:
            places = [(record.offset, record.ordinal) for record in model.records] + [model.end]
            offset, ordinal = places[int(share * (len(places) - 1))]
            done: list[bool] = []
            position = Position(topic.epoch, offset, ordinal)
            self.store.store.trim(topic, position, lambda: done.append(True))
            self.store.runner.run()
            self._unless_held_back(done)
            model.trim(offset, ordinal)

    @rule(name=names)
    def destroy(self, name: str) -> None:
        if self.models[name].exists:
            done: list[bool] = []
            topic = self.store.store.topic(name)
            self.store.store.destroy(topic, lambda: done.append(True))
            self.store.runner.run()
            self._unless_held_back(done)
            self.models[name].destroy()

    @rule(name=names)
    def forget(self, name: str) -> None:
        self.store.store.forget(self.store.store.topic(name))

    @rule(ms=st.sampled_from([0, 1, 99, 100, 2500, 20_000, -40]))
    def wait(self, ms: int) -> None:
        self.clock.ms += ms

    # Background work

    @rule()
    def rotate(self) -> None:
        self.store.rotate()

    @rule()
    def stop_applying(self) -> None:
        self.store.applying = False

    @rule()
    def apply(self) -> None:
        self.store.applying = True
        self.store.apply_waiting()

    @rule()
    def sync_written(self) -> None:
        self.store.store.sync_written()
        self.store.runner.run()

    @rule()
    def retain(self) -> None:
        self.apply()
        now_ms = self.clock.ms
        expired = retention_module.find_expired(self.store.config, self.store.layout, now_ms)
        for name, _, places in expired:
            position, _ = trimming(places, (), self.store.store.topic(name).start)
            model = self.models[name]
            for record in model.records:
                if record.offset < position.offset:
                    later = model.end[0] - record.end
                    too_old = name.startswith("aged/") and record.ms < now_ms - AGE_S * 1000
                    assert too_old or (name.startswith("sized/") and later >= KEPT_BYTES)
            self.store.trim(name, position)
            model.trim(position.offset, position.ordinal)
        applied = self.store.store.segments(self.store.store.topic("aged/x"))
        if applied:
            oldest = [info for info in applied if info.end > self.models["aged/x"].start[0]]
            for info in oldest:
                assert info.last_ms >= now_ms - AGE_S * 1000
                assert info.last_ms - info.first_ms <= AGE_S * 1000 * 0.1

    # Stops

    @rule()
    def kill(self) -> None:
        self.store.crash()
        self._start()

    @rule()
    def stop(self) -> None:
        self.store.close()
        self._start()

    @rule()
    def stop_and_boot(self) -> None:
        self.store.close()
        self.boot += 1
        self._start()

    @rule()
    def crash_machine(self) -> None:
        """Crash the machine; everything written is still there, but a start cannot know that."""
        self.store.crash()
        self.boot += 1
        for name in ("written/w", "sized/y"):
            self.models[name].jump()
        self._start()

    # Invariants

    @invariant()
    @precondition(lambda self: hasattr(self, "store"))
    def ends_agree(self) -> None:
        for name, model in self.models.items():
            topic = self.store.store.topic(name)
            assert topic.exists == model.exists
            assert topic.end[1:] == model.end
            if model.records:
                assert topic.start[1:] == model.start
            assert topic.epoch >= model.epoch
            model.epoch = topic.epoch

    @rule(name=names, share=st.floats(0, 1))
    def read(self, name: str, share: float) -> None:
        model = self.models[name]
        found = self.store.content(name)
        assert found == {
            record.offset: (record.ordinal, record.payload) for record in model.records
        }
        if model.records:
            first = int(share * (len(model.records) - 1))
            after = self.store.read(name, model.records[first].offset, bytes_max=64)
            assert after == [(record.end, record.payload) for record in model.records[first:]]
        listed = [one.name for one in self.store.store.topics("", "", 100)]
        assert listed == sorted(name for name in NAMES if self.models[name].exists)

    @rule(name=names, share=st.floats(0, 1))
    def locate(self, name: str, share: float) -> None:
        model, topic = self.models[name], self.store.store.topic(name)
        store = self.store.store
        places = [(record.offset, record.ordinal) for record in model.records] + [model.end]
        first = model.records[0].offset if model.records else topic.start_offset
        offset = first + int(share * (places[-1][0] - first)) - 2
        wanted = next((place for place in places if place[0] >= offset), places[-1])
        self._agree(topic, store.locate_offset(topic, offset), wanted, offset)
        for place in places:
            assert store.locate_ordinal(topic, place[1])[1:] == place
        ms = model.records[int(share * (len(model.records) - 1))].ms if model.records else 0
        for moment in (ms, ms + 1):
            at = next((r for r in model.records if r.ms >= moment), None)
            wanted = (at.offset, at.ordinal) if at is not None else places[-1]
            assert store.locate_time(topic, moment)[1:] == wanted

    def _agree(self, topic: Topic, found: Position, wanted: tuple[int, int], offset: int) -> None:
        """Accept two positions: between the last record before a jump and the end there is nothing."""
        if found[1:] != wanted:
            assert wanted[0] - found.offset >= JUMP - 5000
            assert found.offset >= offset

    def _unless_held_back(self, done: list) -> None:
        """Apply if nothing was answered: without a free journal file, answers wait for the applier."""
        if not done:
            assert not self.store.applying
            assert self.store.store.held_back
            self.apply()
        assert done

    def _start(self) -> None:
        self.store = StepStore(config(self._path), clock=self.clock, boot_id=b"%016d" % self.boot)
        assert not [report for report in self.store.reports if "epoch" not in report]
        self.models["memory/m"] = Model()


def test_a_store_is_a_list_of_records_per_topic():
    run_state_machine_as_test(
        LogMachine,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True),
    )
