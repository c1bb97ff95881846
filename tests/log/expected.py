"""What may and what must be in a log, kept from what was asked of it and what it answered. Knows no files."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.log.records import pack_record
from headrace.log.store import Appended, Topic
from headrace.model import Position
from headrace.testing.store import RecordingListener, StepStore


@dataclass
class ExpectedTopic:
    published: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """By offset, the ordinal and payload of everything that was ever being written."""
    acknowledged: set[int] = field(default_factory=set)
    """Offsets of what must be there, unless it was trimmed."""
    end: tuple[int, int] = (0, 0)
    """Up to where clients were told of records: nothing new may be stored before it."""
    epoch: int = 0
    start_asked: int = 0
    start_answered: int = 0
    """What lies before the first may be gone; what lies before the second must be."""
    start_destroyed: int = 0
    """Where the last life ended that was destroyed: that is synced in every durability."""
    numbered: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """Of producers: number and payload of what was ever being written."""
    numbered_answered: set[tuple[str, int]] = field(default_factory=set)


class Expected:
    """A simple model of a log. Each method says that something has happened."""

    def __init__(self) -> None:
        self.topics: dict[str, ExpectedTopic] = defaultdict(ExpectedTopic)
        self.cursors: dict[tuple[str, str], list[Position | None]] = {}
        """By topic and reader, what was answered last and whatever was asked since; None is dropped."""

    def copy(self) -> "Expected":
        return copy.deepcopy(self)

    def begun(self, name: str, offset: int, ordinal: int, records: Sequence[bytes]) -> None:
        """It is being written: it may be there after a crash, or not."""
        topic = self.topics[name]
        for record in records:
            topic.published[offset] = ordinal, record[4:]
            # What was at this place was never acknowledged, or this one could not be here.
            assert offset not in topic.acknowledged, f"{name}: offset {offset} is used twice"
            offset, ordinal = offset + len(record), ordinal + 1

    def acknowledged(
        self, name: str, offset: int, ordinal: int, records: Sequence[bytes], epoch: int
    ) -> None:
        topic = self.topics[name]
        assert (offset, ordinal) >= topic.end, f"{name}: {offset} is before {topic.end}"
        for record in records:
            topic.acknowledged.add(offset)
            offset, ordinal = offset + len(record), ordinal + 1
        topic.end = offset, ordinal
        topic.epoch = max(epoch, topic.epoch)

    def trim_asked(self, name: str, offset: int) -> None:
        topic = self.topics[name]
        topic.start_asked = max(offset, topic.start_asked)

    def trim_answered(self, name: str, offset: int) -> None:
        topic = self.topics[name]
        topic.start_answered = max(offset, topic.start_answered)

    def destroy_answered(self, name: str, offset: int) -> None:
        self.trim_answered(name, offset)
        self.topics[name].start_destroyed = offset

    def number_asked(self, name: str, producer: str, number: int, payload: bytes) -> None:
        self.topics[name].numbered[producer, number] = payload

    def number_answered(self, name: str, producer: str, number: int) -> None:
        self.topics[name].numbered_answered.add((producer, number))

    def cursor_asked(self, name: str, reader: str, at: Position | None) -> None:
        self.cursors.setdefault((name, reader), [None]).append(at)

    def cursors_answered(
        self, reader: str, positions: Iterable[tuple[str, Position | None]]
    ) -> None:
        """Cursors are synced, whatever the durability of their topics."""
        for name, at in positions:
            self.cursors[name, reader] = [at]

    def machine_crashed(self, prefix: str) -> None:
        """What was not synced may be lost, for all topics with this prefix."""
        for name, topic in self.topics.items():
            if name.startswith(prefix):
                topic.acknowledged.clear()
                topic.numbered_answered.clear()
                topic.start_answered = topic.start_destroyed

    def forget(self, prefix: str) -> None:
        """These topics do not outlive the process."""
        for name in [name for name in self.topics if name.startswith(prefix)]:
            del self.topics[name]

    # Checking

    def check(self, store: StepStore) -> None:
        """Everything that must be there is, in order, at its offsets, and nothing else."""
        for name, expected in self.topics.items():
            topic = store.store.topic(name)
            found = read(store, topic)
            check_order(name, topic, found)
            for offset, (ordinal, payload) in found.items():
                assert offset in expected.published, f"{name}: {offset} was never published"
                assert expected.published[offset] == (ordinal, payload)
                assert offset >= expected.start_answered, f"{name}: {offset} was forgotten"
            must = {offset for offset in expected.acknowledged if offset >= expected.start_asked}
            lost = must - set(found)
            assert not lost, f"{name}: lost {len(lost)} of {len(must)} records from {min(lost)} on"
            assert topic.end[1:] >= expected.end, f"{name}: the end went back"
            assert topic.epoch >= expected.epoch
        self.check_cursors(store)

    def check_cursors(self, store: StepStore) -> None:
        found = {(one.topic, one.reader): one.position for one in store.store.cursors(limit=1000)}
        assert set(found) <= set(self.cursors)
        for key, allowed in self.cursors.items():
            assert found.get(key) in allowed, f"cursor {key}: {found.get(key)} of {allowed}"

    def go_on(self, store: StepStore, payload: bytes) -> None:
        """Append to every topic, and say again everything that carries a number."""
        for name, expected in list(self.topics.items()):
            end = store.store.topic(name).end
            store.append(name, payload)
            self.begun(name, end.offset, end.ordinal, [pack_record(payload)])
            topic = store.store.topic(name)
            self.acknowledged(name, end.offset, end.ordinal, [pack_record(payload)], topic.epoch)
            for (producer, number), numbered in sorted(expected.numbered.items()):
                self.say_again(store, name, producer, number, numbered)

    def say_again(
        self, store: StepStore, name: str, producer: str, number: int, payload: bytes
    ) -> None:
        before = store.store.topic(name).end
        answer = store.append_once(name, producer, number, payload)
        if (producer, number) in self.topics[name].numbered_answered:
            assert answer.duplicate, f"{name}: {producer} {number} was stored twice"
        if not answer.duplicate:
            # It was not stored the first time: then none of it was.
            stored = [one for _, one in read(store, store.store.topic(name)).values()]
            assert stored.count(payload) == 1
            records = [pack_record(payload)]
            self.begun(name, before.offset, before.ordinal, records)
            epoch = store.store.topic(name).epoch
            self.acknowledged(name, before.offset, before.ordinal, records, epoch)
        self.number_answered(name, producer, number)


class ExpectingListener(RecordingListener):
    """Tells what a store does to whoever keeps the expectation."""

    def __init__(self, tell) -> None:
        super().__init__()
        self._tell = tell

    def prepare(self, appended: Iterable[Appended]) -> None:
        for one in appended:
            self._tell("begun", one.topic.name, one.offset, one.ordinal, tuple(one.records))

    def committed(self, appended: Sequence[Appended]) -> None:
        super().committed(appended)
        for one in appended:
            records = tuple(one.records)
            epoch = one.topic.epoch
            self._tell("acknowledged", one.topic.name, one.offset, one.ordinal, records, epoch)


def read(store: StepStore, topic: Topic) -> dict[int, tuple[int, bytes]]:
    """By offset, ordinal and payload of everything that can be read."""
    reader = store.store.reader(topic)
    found: dict[int, tuple[int, bytes]] = {}
    at = topic.start_offset
    while at < topic.end_offset:
        chunk = reader.read(at, 4096)
        assert chunk.next_offset > at
        for run in chunk.runs:
            position, ordinal = 0, run.ordinal
            while position < len(run.data):
                stop = position + 4 + int.from_bytes(run.data[position : position + 4])
                found[run.offset + position] = ordinal, run.data[position + 4 : stop]
                position, ordinal = stop, ordinal + 1
            assert ordinal == run.ordinal + run.record_count
        at = chunk.next_offset
    return found


def check_order(name: str, topic: Topic, found: dict[int, tuple[int, bytes]]) -> None:
    assert list(found) == sorted(found), f"{name}: not in order"
    ordinals = [ordinal for ordinal, _ in found.values()]
    assert ordinals == sorted(set(ordinals)), f"{name}: ordinals go back"
    if found:
        assert topic.start_offset <= min(found)
        assert max(found) < topic.end_offset
        assert topic.start_ordinal <= ordinals[0]
        assert ordinals[-1] < topic.end_ordinal
    assert topic.start <= topic.end
