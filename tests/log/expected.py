"""Model of what may and must be in a log, built from requests and their answers. It knows no files."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.log.records import pack_record
from headrace.log.store import Appended, Topic
from headrace.model import Position
from tests.fakes.store import RecordingListener, StepStore


@dataclass
class ExpectedTopic:
    published: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Ordinal and payload of every record that was ever being written, by offset."""
    acknowledged: set[int] = field(default_factory=set)
    """Offsets of records that must exist, unless they were trimmed."""
    end: tuple[int, int] = (0, 0)
    """Offset and ordinal up to which clients know of records. Nothing new may be stored before it."""
    epoch: int = 0
    start_asked: int = 0
    start_answered: int = 0
    """Records before `start_asked` may be gone; records before `start_answered` must be gone."""
    start_destroyed: int = 0
    """End of the last destroyed life. A destruction is synced, whatever the durability."""
    numbered: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """Payload of every numbered record that was ever being written, by producer and number."""
    numbered_answered: set[tuple[str, int]] = field(default_factory=set)


class Expected:
    """A simple model of a log. Each method reports an event to it."""

    def __init__(self) -> None:
        self.topics: dict[str, ExpectedTopic] = defaultdict(ExpectedTopic)
        self.cursors: dict[tuple[str, str], list[Position | None]] = {}
        """Position answered last and all that were asked since, by topic and reader. None: dropped."""

    def begun(self, name: str, offset: int, ordinal: int, records: Sequence[bytes]) -> None:
        """Report that records are being written: after a crash they may be there or not."""
        topic = self.topics[name]
        for record in records:
            topic.published[offset] = ordinal, record[4:]
            # An earlier record at this offset cannot have been acknowledged, or its offset would not be used
            # again.
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
        """Report the answer. Cursors are synced, whatever the durability of their topics."""
        for name, at in positions:
            self.cursors[name, reader] = [at]

    def machine_crashed(self, prefix: str) -> None:
        """Report that records which were not synced may be lost, in all topics with this prefix."""
        for name, topic in self.topics.items():
            if name.startswith(prefix):
                topic.acknowledged.clear()
                topic.numbered_answered.clear()
                topic.start_answered = topic.start_destroyed

    def forget(self, prefix: str) -> None:
        """Forget topics that do not outlive the process."""
        for name in [name for name in self.topics if name.startswith(prefix)]:
            del self.topics[name]

    # Checking

    def check(self, store: StepStore) -> None:
        """Check that every record that must exist is there, in order, at its offset, and no other record."""
        for name, expected in self.topics.items():
            topic = store.store.topic(name)
            found = store.content(topic.name)
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
            epoch = store.store.look(key[0]).epoch
            assert any(_is_at(found.get(key), at, epoch) for at in allowed), (
                f"cursor {key}: {found.get(key)} of {allowed}"
            )

    def go_on(self, store: StepStore, payload: bytes) -> None:
        """Append to every topic, and send every numbered record again."""
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
            # The record was not stored the first time, so its payload may occur only once now.
            stored = [one for _, one in store.content(name).values()]
            assert stored.count(payload) == 1
            records = [pack_record(payload)]
            self.begun(name, before.offset, before.ordinal, records)
            epoch = store.store.topic(name).epoch
            self.acknowledged(name, before.offset, before.ordinal, records, epoch)
        self.number_answered(name, producer, number)


class ExpectingListener(RecordingListener):
    """Listener that reports what a store does to the `tell` callback."""

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


def _is_at(found: Position | None, at: Position | None, epoch: int) -> bool:
    """True if a cursor is where it was put, or has only got a later epoch because its topic jumped."""
    if found is None or at is None:
        return found is at
    return found[1:] == at[1:] and (found.epoch == at.epoch or at.epoch < found.epoch <= epoch)
