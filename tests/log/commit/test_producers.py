"""Idempotence: a number is stored once, despite crashes, applying, trimming and a limited cache."""

import pytest

from headrace.log.apply.applier import PRODUCER_LEASE_MS
from headrace.log.commit import tables
from headrace.log.commit.journal import RECENT_MAX
from headrace.log.store import StoredAppend


@pytest.fixture
def forgetful(monkeypatch):
    """Stores that keep two producers in memory besides those that they must keep."""
    monkeypatch.setattr(tables, "PRODUCERS_CACHED_MAX", 2)


@pytest.mark.parametrize("settled", [False, True])
def test_a_producer_that_was_dropped_from_memory_is_not_forgotten(open_store, forgetful, settled):
    store = open_store()
    for number in range(10):
        store.append_once("topic", f"producer {number}", 1, b"%d" % number)
    if settled:
        store.settle()
    for number in range(10):
        answer = store.append_once("topic", f"producer {number}", 1, b"again")
        assert answer == StoredAppend(5 * (number + 1), duplicate=True)
    assert len(store.payloads("topic")) == 10


def test_numbers_are_remembered_while_some_are_applied_and_some_are_not(open_store, forgetful):
    store = open_store()
    for number in range(30):
        store.append_once("topic", f"producer {number % 5}", number, b"x")
        if number % 4 == 0:
            store.rotate()
        for earlier in range(5):
            last = max((n for n in range(number + 1) if n % 5 == earlier), default=None)
            if last is not None:
                assert store.append_once("topic", f"producer {earlier}", last, b"y").duplicate
    assert store.payloads("topic") == [b"x"] * 30


def test_memory_is_bounded_once_the_catalogue_knows(open_store, forgetful):
    store = open_store()
    for number in range(10):
        store.append_once("topic", f"producer {number}", 1, b"x")
    kept = store.store._producers
    assert len(kept._unapplied) == 10
    store.settle()
    assert len(kept._unapplied) == 0
    assert len(kept._cached) == 2


def test_topics_in_memory_do_not_keep_producers_for_ever(open_store, forgetful):
    store = open_store()
    for number in range(10):
        store.append_once("memory/topic", f"producer {number}", 1, b"x")
    assert len(store.store._producers._unapplied) == 0
    assert store.append_once("memory/topic", "producer 9", 1, b"x").duplicate


def test_an_old_number_is_a_duplicate_whose_place_is_no_longer_known(open_store):
    store = open_store()
    for number in range(1, 21):
        store.append_once("topic", "p", number, b"x")
    for _ in range(2):
        answers = [store.append_once("topic", "p", number, b"y") for number in range(1, 21)]
        assert all(answer.duplicate for answer in answers)
        known = [answer.offset for answer in answers]
        assert known == [None] * (20 - RECENT_MAX) + [5 * n for n in range(21 - RECENT_MAX, 21)]
        store = open_store()


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kill", [False, True])
def test_numbers_outlive_destruction_and_a_new_life(open_store, settled, kill):
    store = open_store()
    store.append_once("topic", "p", 4, b"x")
    store.destroy("topic")
    if settled:
        store.settle()
    if kill:
        store = open_store()
    assert store.append_once("topic", "p", 4, b"x").duplicate
    assert not store.store.topic("topic").exists
    assert not store.append_once("topic", "p", 5, b"y").duplicate
    store = open_store()
    assert store.append_once("topic", "p", 5, b"y").duplicate
    assert store.payloads("topic") == [b"y"]


def test_an_append_of_many_records_is_one_number(open_store):
    payloads = [b"%d" % number for number in range(1200)]
    store = open_store()
    stored = store.append_once("topic", "p", 1, *payloads)
    for _ in range(2):
        assert store.append_once("topic", "p", 1, *payloads) == StoredAppend(stored.offset, True)
        assert store.payloads("topic") == payloads
        store = open_store()


def test_numbers_that_wait_for_their_commit_count(store):
    answers = []
    topic = store.store.topic("topic")
    for number in (1, 2, 1, 2, 3):
        store.store.append_once(topic, [b"\0\0\0\1x"], "p", number, answers.append)
    store.runner.run()
    assert [answer.duplicate for answer in answers] == [False, True, False, True, False]
    assert store.payloads("topic") == [b"x"] * 3


def test_a_producer_that_was_silent_for_its_lease_may_begin_again(open_store):
    store = open_store()
    store.append_once("topic", "silent", 9, b"x")
    store.clock.ms += PRODUCER_LEASE_MS + 1
    store.append_once("topic", "lively", 1, b"y")
    store.close()
    store = open_store(clock=store.clock)
    assert not store.append_once("topic", "silent", 1, b"z").duplicate
