"""A disk that fails to read a segment: a passing error is not damage, a lasting one costs one place."""

import errno
import os

import pytest

from headrace.config.settings import Segment
from headrace.log import disk as file_reads
from headrace.log.read import segment
from headrace.log.read.raw import RawTopic
from tests.fakes.store import StepStore
from tests.log.conftest import tiny

RECORDS = 120


@pytest.fixture
def store(open_store, tmp_path) -> StepStore:
    """A store with a topic whose records are all in segments, in runs of one record each."""
    made = open_store(tiny(tmp_path / "data", segment=Segment(bytes=4000)))
    for number in range(RECORDS):
        made.clock.ms += 1000
        made.append("topic", payload(number))
    made.settle()
    assert not made.store.topic("topic").tail
    return made


def payload(number: int) -> bytes:
    return b"%d" % number * (1 + number % 40)


class Failing:
    """Makes some reads of segments and indexes fail."""

    def __init__(self, monkeypatch, fails) -> None:
        self.count = 0
        pread = os.pread

        def read(fd, length, position):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.endswith((".log", ".idx")):
                self.count += 1
                if fails(self.count, name, position, length):
                    raise OSError(errno.EIO, "injected")
            return pread(fd, length, position)

        monkeypatch.setattr(os, "pread", read)
        monkeypatch.setattr(file_reads.time, "sleep", lambda _: None)


def everything(store: StepStore) -> list[object]:
    """Return the results of all ways of reading."""
    topic = store.store.topic("topic")
    starts = range(0, topic.end_offset, 977)
    return [
        *(store.read("topic", offset, 500) for offset in starts),
        *(store.store.locate_offset(topic, offset) for offset in starts),
        *(store.store.locate_ordinal(topic, ordinal) for ordinal in range(0, RECORDS, 7)),
        *(store.store.locate_time(topic, store.clock.ms - ago * 1000) for ago in range(0, 120, 9)),
        b"".join(RawTopic.of(store.layout, store.store, topic).pieces(0, topic.end_offset)),
        RawTopic.of(store.layout, store.store, topic).rows(0, topic.end_offset, 1000),
    ]


def test_an_error_at_any_read_that_passes_changes_nothing(store, monkeypatch):
    expected = everything(store)
    with monkeypatch.context() as patch:
        reads = Failing(patch, lambda *_: False)
        everything(store)
    for wanted in range(1, reads.count + 1, 23):
        for fails in (1, 2):
            with monkeypatch.context() as patch:
                Failing(patch, lambda count, *_, w=wanted, f=fails: w <= count < w + f)
                assert everything(store) == expected
    assert store.store.damage_count == 0


def test_an_index_that_cannot_be_read_costs_no_record(store, monkeypatch):
    bad = sorted(store.layout.segments.glob("*/*.idx"))[1]
    Failing(monkeypatch, lambda _, name, *__: name == str(bad))
    assert store.payloads("topic") == [payload(number) for number in range(RECORDS)]
    assert store.store.damage_count > 0
    everything(store)  # none of these calls fails


def test_rows_that_were_restored_meanwhile_are_asked_for_again(store, monkeypatch):
    bad = sorted(store.layout.segments.glob("*/*"))[:2]
    with monkeypatch.context() as patch:
        Failing(patch, lambda _, name, *__: name in map(str, bad))
        assert len(store.payloads("topic")) < RECORDS
    monkeypatch.setattr(segment, "UNREADABLE_S", 0.0)
    assert store.payloads("topic") == [payload(number) for number in range(RECORDS)]


def test_an_error_that_stays_is_damage_and_everything_else_is_served(store, monkeypatch):
    bad = sorted(store.layout.segments.glob("*/*.log"))[1]
    Failing(monkeypatch, lambda _, name, *__: name == str(bad))
    found = store.payloads("topic")
    assert 0 < len(found) < RECORDS
    lost = [number for number in range(RECORDS) if payload(number) not in found]
    assert found == [payload(number) for number in range(RECORDS) if number not in lost]
    assert lost == list(range(lost[0], lost[-1] + 1)), "the records of one segment"
    assert store.store.damage_count > 0
    everything(store)  # none of these calls fails
