"""The embedded store between journal, tails and segments: what callers see during background work."""

import os
from pathlib import Path

import pytest

from headrace.config.settings import Journal, Limits
from headrace.errors import StoreFailedError
from headrace.log import embedded
from headrace.log.apply import applier as applier_module
from headrace.log.commit import journal
from headrace.log.records import pack_record
from headrace.log.recovery import frames as journal_reading
from headrace.model import Position
from tests.fakes.disk import flip
from tests.log.conftest import tiny


def append(store, name, *payloads, done=lambda: None):
    """Ask for an append without letting the store work yet."""
    records = [pack_record(payload) for payload in payloads]
    store.store.append({store.store.topic(name): records}, done)


def frames(store):
    """Return the entries of every commit in the journal."""
    found = []
    for path in store.layout.journal_files():
        found += [
            item
            for item in journal_reading.read_frames(path)
            if isinstance(item, journal_reading.Frame)
        ]
    return [frame.entries for frame in sorted(found)]


# Commits


def test_everything_that_waits_goes_into_one_commit(store):
    for number in range(20):
        append(store, f"topic {number % 10}", b"x")
    store.runner.run()
    # The first commit began at once, with the appends that were there by then.
    assert len(frames(store)) == 1
    assert sum(entry.kind == journal.APPEND for entry in frames(store)[0]) == 10


def test_a_commit_has_a_largest_size(store):
    for _ in range(10):
        append(store, "topic", b"x" * 1000)
    store.runner.run()
    sizes = [
        sum(len(entry.data) for entry in entries if entry.kind == journal.APPEND)
        for entries in frames(store)
    ]
    assert max(sizes) <= store.config.journal.commit_bytes_max
    assert sum(sizes) == 10 * 1004
    assert store.store.pending_bytes == 0


def test_one_commit_is_written_at_a_time_and_acknowledged_in_order(store):
    order = []
    for number in range(6):
        append(store, "topic", b"x" * 3000, done=lambda number=number: order.append(number))
    seen = []
    while store.runner.step():
        seen.append(len(order))
    assert order == list(range(6))
    assert sorted(set(seen)) == list(range(7)), "one by one"


def test_a_commit_larger_than_a_journal_file_is_taken_whole(open_store):
    store = open_store()
    append(store, "topic", b"a" * 20_000)
    append(store, "other", b"b" * 30_000)
    store.runner.run()
    store.append("topic", b"c")
    store = open_store()
    assert store.payloads("topic") == [b"a" * 20_000, b"c"]
    assert store.payloads("other") == [b"b" * 30_000]


def test_making_a_topic_is_synced_and_what_is_written_is_not(store):
    synced = []
    disk = store.store._ring._disk
    write = disk.write
    disk.write = lambda *args, synced=False, record=synced.append: (
        record(synced),
        write(*args, synced=synced),
    )
    store.append("written/topic", b"makes it")
    store.append("written/topic", b"only written")
    store.append("topic", b"synced")
    assert synced[0] is True
    assert synced[1] is False


def test_a_synced_commit_vouches_for_the_written_ones_before_it(open_store):
    store = open_store()
    store.append("written/topic", b"makes it")
    store.append("written/topic", b"only written")
    assert store.store._ring.unsynced()
    store.append("topic", b"synced")
    assert not store.store._ring.unsynced()
    store.append("written/topic", b"only written")
    assert store.store._ring.unsynced()
    store.store.sync_written()
    store.runner.run()
    assert not store.store._ring.unsynced()
    store.append("topic", b"last")
    store.crash()
    numbers = [
        (item.sequence, item.synced)
        for path in store.layout.journal_files()
        for item in journal_reading.read_frames(path)
    ]
    assert numbers == [(1, 0), (2, 1), (3, 1), (4, 3), (5, 4)]


def test_a_file_that_was_written_to_during_a_sync_is_synced_again(open_store):
    store = open_store()
    store.append("written/topic", b"makes it")
    store.append("written/topic", b"one")
    store.store.sync_written()
    append(store, "written/topic", b"two")
    # The sync starts before the commit but ends after it.
    steps = store.runner._steps
    steps.rotate(-1)
    store.runner.run()
    assert store.payloads("written/topic") == [b"makes it", b"one", b"two"]
    assert store.store._ring.unsynced()


def test_a_file_that_was_recycled_during_a_sync_is_synced_again(open_store, tmp_path):
    store = open_store(tiny(tmp_path / "data", journal=Journal(file_bytes=65_536, files=2)))
    store.append("written/topic", b"makes it")
    store.applying = False
    for payload in (b"in the first file", b"in the second file"):
        store.append("written/topic", payload)
        store.rotate()
    store.append("written/topic", b"in the second file too")
    store.store.sync_written()
    sync = store.runner._steps.pop()
    store.apply_waiting()
    store.rotate()
    store.append("written/topic", b"in the first file again")
    sync()
    current = store.store._ring.current
    assert current is not None and store.store._ring.unsynced() == [current.path]


# Holding back


@pytest.fixture
def full(open_store, tmp_path):
    """A store whose journal is full because nothing is applied, and the numbers of answered appends."""
    store = open_store(tiny(tmp_path / "data", journal=Journal(file_bytes=65_536, files=2)))
    store.applying = False
    done = []
    for number in range(40):
        append(store, "topic", b"%02d" % number * 1000, done=lambda n=number: done.append(n))
        store.runner.run()
    return store, done


def test_without_a_free_journal_file_commits_wait(full):
    store, done = full
    assert 20 < len(done) < 40
    assert done == list(range(len(done)))
    assert "journal is full" in store.store.held_back
    size = 2004 + journal.ENTRY_HEADER_BYTES
    assert store.store.pending_bytes == (40 - len(done)) * size
    assert len(store.payloads("topic")) == len(done)
    store.applying = True
    store.apply_waiting()
    assert done == list(range(40))
    assert store.store.held_back == ""
    assert len(store.payloads("topic")) == 40


def test_what_was_held_back_is_lost_with_the_process_and_nothing_else(full, open_store):
    store, done = full
    store = open_store()
    assert [payload[:2] for payload in store.payloads("topic")] == [b"%02d" % n for n in done]


def test_topics_in_memory_go_on_while_the_journal_is_full(full):
    store, _ = full
    store.append("memory/topic", b"x")
    assert store.payloads("memory/topic") == [b"x"]


def test_a_reason_of_the_applier_is_passed_on(full):
    store, _ = full
    store.store.applier_waits("no space left on the disk")
    assert store.store.held_back == "no space left on the disk"
    store.apply_waiting()
    assert store.store.held_back == ""


def test_an_old_journal_file_is_handed_to_the_applier(store):
    opened = store.store._ring.opened_s
    store.append("topic", b"x")
    opened = store.store._ring.opened_s
    rotate_s = store.config.journal.rotate_s
    store.store.tick(opened + rotate_s - 0.1)
    store.runner.run()
    assert store.store.segments(store.store.topic("topic")) == []
    store.store.tick(opened + rotate_s)
    store.runner.run()
    assert len(store.store.segments(store.store.topic("topic"))) == 1
    store.store.tick(opened + 100 * rotate_s)  # an unused file is not closed
    assert len(store.store.segments(store.store.topic("topic"))) == 1


# Tails and segments


def test_readers_see_everything_once_while_it_is_applied(store, monkeypatch):
    monkeypatch.setattr(embedded, "_TAILS_DROPPED_AT_ONCE", 2)
    names = [f"topic {number}" for number in range(9)]
    for _ in range(3):
        for name in names:
            store.append(name, b"one", b"two")
    before = {name: store.content(name) for name in names}
    store.store._close_file()
    while store.runner.step():
        assert {name: store.content(name) for name in names} == before
    assert not any(store.store.topic(name).tail for name in names)


def test_readers_see_everything_between_applying_and_being_told_of_it(store):
    store.applying = False
    store.append("topic", b"one", b"two")
    store.rotate()
    store.append("topic", b"three")
    before = store.content("topic")
    (closed,) = store._waiting
    store._applier.apply_file(closed)
    assert store.content("topic") == before
    store.store.applied(closed.path)
    assert store.content("topic") == before


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_new_life_is_not_mistaken_for_the_one_that_is_applied(store, forgotten):
    store.applying = False
    store.append("topic", b"old")
    store.rotate()
    store.destroy("topic")
    if forgotten:
        store.store.forget(store.store.topic("topic"))
    store.append("topic", b"new")
    store.apply_waiting()  # applies the first file, which contains only the old life
    assert store.payloads("topic") == [b"new"]
    store.applying = True
    store.settle()
    assert store.payloads("topic") == [b"new"]


def test_a_handle_that_someone_holds_is_the_only_one_also_when_others_forget_it(store):
    held = store.store.topic("topic")
    store.store.forget(held)  # another user looked the topic up and is done with it
    assert store.store.look("topic") is held
    assert store.store.topic("topic") is held
    store.store.forget(held)
    store.store.append({held: [pack_record(b"one")]}, lambda: None)
    store.append("topic", b"two")
    assert store.payloads("topic") == [b"one", b"two"]


def test_files_of_deleted_segments_are_let_go(store):
    for _ in range(20):
        store.clock.ms += 200
        store.append("topic", b"x" * 100)
    store.settle()
    store.payloads("topic")
    store.trim("topic", store.store.topic("topic").end)
    store.settle()
    open_ = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    held = [os.readlink(path) for path in open_ if os.path.lexists(path)]
    assert not [path for path in held if "(deleted)" in path and str(store.layout.root) in path]


def test_the_floor_rises_for_names_that_are_folded_into_it(open_store, monkeypatch):
    monkeypatch.setattr(applier_module, "TOMBSTONES_MAX", 2)
    store = open_store()
    ends = {}
    for number in range(5):
        name = f"topic {number}"
        store.append(name, b"x" * 100 * (5 - number))
        store.destroy(name)
        ends[name] = store.store.topic(name).end
        store.settle()
        store.clock.ms += 10
    for _ in range(2):
        for name, end in ends.items():
            assert store.store.topic(name).end[1:] >= end[1:]
        assert store.store.topic("never known").end_offset == ends["topic 0"].offset
        store = open_store()
    store.append("topic 1", b"new")
    assert store.store.topic("topic 1").epoch > ends["topic 1"].epoch


def test_epochs_grow_even_when_the_clock_does_not(store):
    epochs = []
    for _ in range(5):
        store.clock.ms -= 1000
        store.append("topic", b"x")
        epochs.append(store.store.topic("topic").epoch)
        store.destroy("topic")
    assert epochs == sorted(set(epochs))


# Damage found while reading


def test_a_reader_says_how_much_is_lost_and_goes_on(store, caplog):
    for number in range(10):
        store.clock.ms += 200
        store.append("topic", b"%d" % number * 3, b"%d" % number * 50)
    store.settle()
    topic = store.store.topic("topic")
    segment = store.store.segments(topic)[1]
    flip(store.layout.segment(topic.id, segment.base), 5)
    reader, at, lost, found = store.store.reader(topic), 0, 0, []
    while at < topic.end_offset:
        chunk = reader.read(at, 1)
        lost += chunk.lost
        found += chunk.runs
        at = chunk.next_offset
    assert lost == 2
    assert sum(run.record_count for run in found) == 18
    assert caplog.text.count("damage skipped") == 1
    store.payloads("topic")
    assert caplog.text.count("damage skipped") == 1, "it is said once"
    assert "Path(" not in caplog.text
    first = store.store.reader(topic).read(segment.base, 1)
    assert (first.lost, first.runs[0].offset) == (2, segment.base + 61)
    inside = store.store.locate_offset(topic, segment.base)
    assert inside.offset == segment.base + 61
    assert store.store.locate_ordinal(topic, segment.first_ordinal) == inside


# Topics in memory


def test_the_oldest_records_of_a_topic_in_memory_give_way(open_store, tmp_path):
    store = open_store(tiny(tmp_path / "data", limits=Limits(memory_topic_bytes_max=100)))
    for number in range(20):
        store.append("memory/topic", b"%02d" % number * 5)
    topic = store.store.topic("memory/topic")
    found = store.payloads("memory/topic")
    assert found == [b"%02d" % number * 5 for number in range(20 - len(found), 20)]
    assert 100 >= topic.end_offset - topic.start_offset >= 80
    assert topic.start_ordinal == 20 - len(found)
    assert store.store.locate_offset(topic, 0) == topic.start
    store.append("memory/topic", b"x" * 500)
    assert store.payloads("memory/topic") == [b"x" * 500]


def test_a_start_that_was_trimmed_does_not_go_back_in_memory(open_store, tmp_path):
    store = open_store(tiny(tmp_path / "data", limits=Limits(memory_topic_bytes_max=100)))
    for number in range(9):
        store.append("memory/topic", b"%d" % number * 6)
    topic = store.store.topic("memory/topic")
    store.trim("memory/topic", Position(topic.epoch, 70, 7))
    store.append("memory/topic", b"9" * 6)
    assert store.payloads("memory/topic") == [b"7" * 6, b"8" * 6, b"9" * 6]
    store.append("memory/topic", b"x" * 80)
    assert topic.start_offset == 90
    assert store.payloads("memory/topic") == [b"9" * 6, b"x" * 80]


def test_topics_in_memory_leave_nothing_on_disk(store):
    before = store.store.last_sequence
    store.append("memory/topic", b"x")
    store.append_once("memory/topic", "p", 1, b"y")
    store.trim("memory/topic", store.store.topic("memory/topic").end)
    store.destroy("memory/topic")
    assert store.store.last_sequence == before
    assert frames(store) == []


# The end


def test_settling_waits_for_everything(store):
    settled = []
    append(store, "topic", b"x")
    store.store.settle(
        lambda: settled.append(len(store.store.segments(store.store.topic("topic"))))
    )
    store.runner.run()
    assert settled == [1]


def test_a_store_with_nothing_to_do_settles_at_once(store):
    settled = []
    store.store.settle(lambda: settled.append(True))
    store.runner.run()
    assert settled == [True]


def test_damage_in_a_closed_journal_file_stops_the_applier(store):
    """The store still has the records in memory, so only the next start can find out what is lost."""
    store.applying = False
    store.append("topic", b"one")
    store.append("topic", b"two")
    store.rotate()
    (closed,) = store._waiting
    at = journal.FRAMES_POSITION + journal.FRAME_HEAD_BYTES
    flip(closed.path, at + 3)  # a byte in the header of an entry
    with pytest.raises(StoreFailedError, match="damage"):
        store._applier.apply_file(closed)


def test_a_fault_in_one_caller_does_not_keep_a_commit_from_the_others(store):
    heard = []

    def faulty():
        raise RuntimeError("a connection that is gone")

    append(store, "t", b"a", done=faulty)
    append(store, "t", b"b", done=lambda: heard.append(1))
    store.runner.run()
    assert heard == [1]
    assert store.payloads("t") == [b"a", b"b"]


def test_a_fault_in_a_numbered_append_does_not_keep_a_commit_from_the_others(store):
    answers = []

    def faulty(stored):
        raise RuntimeError("a connection that is gone")

    topic = store.store.topic("t")
    for number, done in ((1, faulty), (1, answers.append), (2, answers.append)):
        store.store.append_once(topic, [pack_record(b"%d" % number)], "p", number, done)
    store.runner.run()
    assert [answer.duplicate for answer in answers] == [True, False]
    assert [one.records for one in store.listener.appended] != []
    assert store.payloads("t") == [b"1", b"2"]


def test_a_topic_that_was_made_again_is_listed_while_its_first_life_is_applied(open_store):
    store = open_store()
    store.applying = False
    store.append("topic", b"first life")
    store.destroy("topic")
    store.rotate()
    store.append("topic", b"second life")
    store.apply_waiting()
    assert [one.name for one in store.store.topics("", "", 10)] == ["topic"]
    store.applying = True
    store.settle()
    assert [one.name for one in store.store.topics("", "", 10)] == ["topic"]
    assert not store.store._handles._unlisted
    store.destroy("topic")
    assert store.store.topics("", "", 10) == []


# Times


@pytest.mark.parametrize("set_back_ms", [(0, 40), (40, 0), (40, 40), (0, 5000)])
def test_times_continue_in_the_next_life_of_a_topic_although_the_clock_was_set_back(
    open_store, set_back_ms
):
    store = open_store()
    store.append("t", b"first")
    first_ms = store.listener.appended[-1].ms
    before, after = set_back_ms
    store.clock.ms -= before
    store.destroy("t")
    store.clock.ms -= after
    clock = store.clock
    store = open_store(clock=clock)
    store.append("t", b"second")
    assert store.listener.appended[-1].ms >= first_ms


def test_a_destroyed_topic_that_was_only_looked_at_after_a_restart_is_forgotten(open_store):
    store = open_store()
    store.append("t", b"x")
    store.destroy("t")
    store.settle()
    handles = open_store().store._handles
    topic = handles.get("t")
    handles.drop(topic)
    assert "t" not in handles._known
