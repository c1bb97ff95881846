"""Counts and sizes of a topic: they count kept records, not the offsets and ordinals that were skipped."""

from random import Random

import pytest

from headrace.log.catalogue.catalogue import FILE_NAME
from headrace.log.verify.verify import inspect_topic
from headrace.model import JUMP, Position, Span

RECORDS = 40
PAYLOAD = b"0123456789abcdef"
SIZE = 4 + len(PAYLOAD)


def fill(store, count=RECORDS):
    for number in range(count):
        store.append("topic", PAYLOAD)
        if number % 8 == 7:
            store.settle()
    store.settle()


@pytest.fixture
def restored(open_store):
    """A store whose catalogue was deleted before the start: its topics have jumped ahead."""
    store = open_store()
    fill(store)
    store.close()
    (store.layout.root / FILE_NAME).unlink()
    return open_store()


def topic_of(store):
    return store.store.topic("topic")


def last(store, records):
    """Return the payloads of the last `records` records."""
    at = store.store.locate_last(topic_of(store), records)
    return store.payloads("topic", at.offset)


def test_a_jump_is_not_counted(restored):
    topic = topic_of(restored)
    assert topic.end_ordinal == RECORDS + JUMP
    assert restored.store.kept(topic) == Span(RECORDS, RECORDS * SIZE)
    restored.append("topic", PAYLOAD)
    assert topic.tail
    assert restored.store.kept(topic) == Span(RECORDS + 1, (RECORDS + 1) * SIZE)
    restored.settle()
    assert not topic.tail
    assert restored.store.kept(topic) == Span(RECORDS + 1, (RECORDS + 1) * SIZE)


def test_what_is_applied_and_still_in_the_tail_counts_once(open_store):
    store = open_store()
    fill(store)
    topic = topic_of(store)
    store.append("topic", PAYLOAD)
    tail = list(topic.tail)
    store.settle()
    topic.tail = tail  # the applier has not reported its work yet
    assert store.store.kept(topic) == Span(RECORDS + 1, (RECORDS + 1) * SIZE)


def test_what_is_forgotten_is_not_counted(restored):
    topic = topic_of(restored)
    restored.append("topic", PAYLOAD)
    for ordinal in (3, 17, RECORDS - 1):
        at = restored.store.locate_ordinal(topic, ordinal)
        restored.trim("topic", at)
        kept = RECORDS + 1 - ordinal
        assert restored.store.kept(topic) == Span(kept, kept * SIZE)
    restored.trim("topic", topic.end)
    assert restored.store.kept(topic) == Span(0, 0)


@pytest.mark.parametrize("ordinal", [0, 5, RECORDS, RECORDS + JUMP, RECORDS + JUMP + 1])
def test_the_lag_of_a_reader_leaves_jumps_out(restored, ordinal):
    restored.append("topic", PAYLOAD, PAYLOAD)
    jumped = ordinal > RECORDS
    read_records = ordinal - JUMP if jumped else ordinal
    at = Position(topic_of(restored).epoch, read_records * SIZE + JUMP * jumped, ordinal)
    left = RECORDS + 2 - read_records
    assert restored.store.kept(topic_of(restored), at) == Span(left, left * SIZE)


def test_the_last_records_are_found_across_jumps(restored, open_store):
    restored.append("topic", b"after")
    assert last(restored, 1) == [b"after"]
    assert last(restored, 2) == [PAYLOAD, b"after"]
    assert last(restored, 0) == []
    restored.settle()
    assert last(restored, 2) == [PAYLOAD, b"after"]
    assert last(restored, RECORDS + 1) == [PAYLOAD] * RECORDS + [b"after"]
    assert last(restored, 10 * RECORDS) == [PAYLOAD] * RECORDS + [b"after"]
    restored.close()
    (restored.layout.root / FILE_NAME).unlink()
    again = open_store()
    assert last(again, 2) == [PAYLOAD, b"after"]
    again.append("topic", b"again")
    assert last(again, 3) == [PAYLOAD, b"after", b"again"]
    assert again.store.kept(topic_of(again)).records == RECORDS + 2


def test_a_reader_that_passes_a_jump_is_not_told_of_lost_records(restored):
    restored.append("topic", b"after")
    topic = topic_of(restored)
    reader = restored.store.reader(topic)
    offset, lost = 0, 0
    while offset < topic.end_offset:
        chunk = reader.read(offset, 64)
        offset, lost = chunk.next_offset, lost + chunk.lost
    assert lost == 0
    assert len(restored.content(topic.name)) == RECORDS + 1


def test_a_directory_without_a_server_counts_the_same(restored):
    restored.append("topic", PAYLOAD)
    done = []
    at = restored.store.locate_ordinal(topic_of(restored), RECORDS - 2)
    restored.store.set_cursors("reader", {"topic": at}, lambda: done.append(True))
    restored.settle()
    assert done
    restored.close()
    found = inspect_topic(restored.layout.root, "topic")
    assert (found["records"], found["bytes"]) == (RECORDS + 1, (RECORDS + 1) * SIZE)
    (cursor,) = found["cursors"]
    assert (cursor["lag_records"], cursor["lag_bytes"]) == (3, 3 * SIZE)
    assert cursor["gone_records"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happened_what_is_counted_is_what_can_be_read(open_store, seed):
    random = Random(seed)
    store = open_store()
    for _ in range(60):
        step = random.choice(("append", "append", "append", "settle", "trim", "restart", "restore"))
        topic = topic_of(store)
        if step == "append":
            store.append("topic", *(bytes(random.randrange(40)) for _ in range(9)))
        elif step == "settle":
            store.settle()
        elif step == "trim" and topic.exists:
            records = random.randrange(1 + store.store.kept(topic).records)
            store.trim("topic", store.store.locate_last(topic, records))
            assert store.store.kept(topic).records == records
        elif step in ("restart", "restore"):
            store.close()
            if step == "restore":
                (store.layout.root / FILE_NAME).unlink()
            store = open_store()
        topic = topic_of(store)
        payloads = store.payloads("topic", topic.start_offset)
        size = sum(4 + len(payload) for payload in payloads)
        assert store.store.kept(topic) == (len(payloads), size)
        some = random.randrange(len(payloads) + 3)
        assert last(store, some) == payloads[max(0, len(payloads) - some) :]


@pytest.mark.parametrize(
    ("first", "second", "span"),
    [
        ((0, 0), (100, 10), (10, 100)),
        ((0, 0), (100 + JUMP, 10 + JUMP), (10, 100)),
        ((50, 5), (100 + 3 * JUMP, 10 + 3 * JUMP), (5, 50)),
        ((0, 0), (20 * JUMP, 10), (10, 20 * JUMP)),  # a large topic that never jumped
        ((100, 10), (0, 0), (0, 0)),
    ],
)
def test_what_lies_between_two_positions(first, second, span):
    assert Span.between(Position(1, *first), Position(1, *second)) == span
