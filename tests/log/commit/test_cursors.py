"""Cursors: durable before they are answered, limited in number, never moved back by old journal content."""

import pytest

from headrace.errors import TooManyCursorsError
from headrace.log.catalogue.catalogue import BACKUP_NAME, FILE_NAME
from headrace.log.commit import journal, tables
from headrace.log.commit.journal import ENTRY_HEADER_BYTES, FRAME_HEAD_BYTES, encode_entry
from headrace.log.disk import Disk
from headrace.log.records import pack_record
from headrace.log.store import CURSORS_SET_MAX, Lag
from headrace.log.verify.verify import verify
from headrace.model import JUMP, Position, Span
from tests.fakes.disk import flip
from tests.log.recovery.test_recovery import Journal


def put(store, reader, *names, at=None):
    positions = {name: at or store.store.topic(name).end for name in names}
    store.store.set_cursors(reader, positions, lambda: None)
    store.runner.run()


def drop(store, reader, *names):
    store.store.drop_cursors(reader, names, lambda: None)
    store.runner.run()


def listed(store):
    return {(one.topic, one.reader): one.position for one in store.store.cursors(limit=10**6)}


def test_a_commit_with_cursors_is_synced_and_takes_what_was_written_before_with_it(open_store):
    store = open_store()
    store.append("written/w", b"x")
    store.append("written/w", b"y")
    assert store.store._ring.unsynced()
    put(store, "a", "written/w")
    assert not store.store._ring.unsynced()
    after = open_store(boot_id=b"after the crash.")
    assert after.payloads("written/w") == [b"x", b"y"]
    assert [at.offset for at in listed(after).values()] == [10]


def test_as_many_as_go_at_once_also_go_with_the_longest_names(open_store):
    store = open_store()
    names = [f"{number:04}".ljust(255, "x") for number in range(CURSORS_SET_MAX)]
    put(store, "r" * 255, *names)
    assert len(listed(store)) == CURSORS_SET_MAX
    store = open_store()
    assert len(listed(store)) == CURSORS_SET_MAX
    drop(store, "r" * 255, *names)
    assert listed(store) == {}
    assert listed(open_store()) == {}


def test_a_look_at_names_without_topics_leaves_nothing_in_memory(store):
    before = len(store.store._handles._known)
    put(store, "a", "not", "known", at=Position(0, 0, 0))
    assert len(store.store._handles._known) == before


@pytest.fixture
def few(monkeypatch):
    """Stores that keep at most three cursors."""
    monkeypatch.setattr(tables, "CURSORS_MAX", 3)


def test_of_too_many_cursors_new_ones_are_refused_and_old_ones_go_on(open_store, few):
    store = open_store()
    for name in ("1", "2", "3", "4"):
        store.append(name, b"x")
    put(store, "a", "1", "2")
    with pytest.raises(TooManyCursorsError, match="drop those of readers"):
        put(store, "b", "1", "2")
    assert len(listed(store)) == 2, "none of those that were refused"
    put(store, "b", "1")
    store.append("1", b"more")
    put(store, "a", "1", "2")
    assert listed(store)["1", "a"] == store.store.topic("1").end
    drop(store, "a", "2")
    put(store, "b", "2")
    store = open_store()
    with pytest.raises(TooManyCursorsError):
        put(store, "c", "1")


def test_cursors_that_wait_for_their_commit_count(open_store, few):
    store = open_store()
    start = Position(0, 0, 0)
    for _ in range(2):
        store.store.set_cursors("a", {"1": start, "2": start}, lambda: None)
    store.store.set_cursors("b", {"1": start}, lambda: None)
    with pytest.raises(TooManyCursorsError):
        store.store.set_cursors("b", {"2": start}, lambda: None)
    store.runner.run()
    assert len(listed(store)) == 3


def test_what_an_earlier_use_left_in_a_torn_frame_moves_no_cursor(open_store):
    store = open_store()
    store.append("topic", b"x")
    put(store, "a", "topic")
    drop(store, "b", "topic")
    store.crash()
    old = [frame.entries for _, _, frame in Journal(store).frames() if _is_of_cursors(frame)]
    stale = b"".join(encode_entry(*entry, seed=0) for entries in old for entry in entries)
    store = open_store()
    store.append("topic", b"y")
    put(store, "a", "topic")
    put(store, "b", "topic")
    expected = listed(store)
    store.settle()
    store.append(
        "topic", b"z" * 400
    )  # torn: its header is there, and behind it the bytes of an earlier use
    store.crash()
    path, position, frame = Journal(store).frames()[-1]
    at = position + FRAME_HEAD_BYTES
    data = path.read_bytes()
    path.write_bytes(data[:at] + stale.ljust(frame.end - at, b"\0") + data[frame.end :])
    store = open_store()
    assert any("never acknowledged" in report for report in store.reports)
    assert listed(store) == expected


def test_what_an_earlier_use_left_at_the_very_places_of_a_torn_frame_moves_no_cursor(open_store):
    store = open_store()
    store.append("topic", b"x")
    for _ in range(3):
        store.append("topic", b"y")
        put(store, "a", "topic")
    expected = {("topic", "a"): Position(store.store.topic("topic").epoch, 15, 3)}
    store.crash()
    of_cursors = [one for one in Journal(store).frames() if _is_of_cursors(one[2])]
    path, position, last = of_cursors[-1]
    seed = last.seed
    stale = b"".join(encode_entry(*entry, seed=seed) for entry in of_cursors[0][2].entries)
    at = position + FRAME_HEAD_BYTES
    data = path.read_bytes()
    # Every entry is valid by itself; only the frame is not.
    path.write_bytes(data[:at] + stale.ljust(last.end - at, b"\0") + data[last.end :])
    assert data[at : at + len(stale)] != stale
    store = open_store()
    assert any("never acknowledged" in report for report in store.reports)
    assert listed(store) == expected


def test_cursors_of_a_last_frame_that_is_damaged_elsewhere_count(open_store):
    store = open_store()
    store.append("topic", b"x")
    topic = store.store.topic("topic")
    end = topic.end
    store.store.append({topic: [pack_record(b"y" * 50)]}, lambda: None)
    store.store.set_cursors("a", {"topic": end}, lambda: None)
    store.runner.run()
    store.crash()
    path, position, frame = Journal(store).frames()[-1]
    kinds = [entry.kind for entry in frame.entries]
    assert kinds == [journal.NAMES, journal.APPEND, journal.CURSOR]
    names = len(encode_entry(*frame.entries[0], seed=0))
    flip(path, position + FRAME_HEAD_BYTES + names + ENTRY_HEADER_BYTES + 5)
    store = open_store()
    assert listed(store) == {("topic", "a"): end}


def _is_of_cursors(frame):
    return all(entry.kind == journal.CURSOR for entry in frame.entries)


def test_cursors_come_back_from_the_backup_and_from_the_journal(open_store):
    store = open_store()
    store.append("topic", b"x")
    put(store, "early", "topic")
    put(store, "dropped", "topic")
    store.settle()
    store._catalogue.keep_backup(Disk())
    drop(store, "dropped", "topic")
    put(store, "late", "topic")
    before = listed(store)
    assert sorted(reader for _, reader in before) == ["early", "late"]
    store.settle()
    store.crash()
    (store.layout.root / FILE_NAME).write_bytes(b"")
    store = open_store()
    assert (store.layout.root / BACKUP_NAME).exists()
    epoch = store.store.topic("topic").epoch
    assert listed(store) == {key: at._replace(epoch=epoch) for key, at in before.items()}
    assert store.store.topic("topic").end_offset > JUMP


@pytest.mark.parametrize(
    ("at", "start", "gone"),
    [
        ((1, 40, 4), (1, 0, 0), 0),
        ((1, 40, 4), (1, 70, 7), 3),
        ((1, 40, 4), (2, 100, 10), 6),
        ((1, 400, 40), (2, 0, 0), 0),
        ((1, 40, 4), (2, 100 + JUMP, 10 + JUMP), 6),
    ],
)
def test_lag_counts_what_is_kept_and_what_is_gone(at, start, gone):
    assert Lag.of(Position(*at), Position(*start), Span(3, 30)) == (3, 30, gone)


def test_verify_finds_nothing_wrong_with_cursors(open_store):
    store = open_store()
    store.append("topic", b"x")
    put(store, "a", "topic", "not there")
    store.settle()
    put(store, "b", "topic", "not there")
    drop(store, "a", "topic")
    report = verify(store.layout.root)
    assert report.damages == []
    store.close()
    assert verify(store.layout.root).damages == []
