"""Notes in the embedded store: committed together with their topic, and visible before they are applied."""

from weakref import ref

import pytest

from headrace.config.settings import Journal as JournalConfig
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit import journal, tables
from headrace.log.commit.journal import ENTRY_HEADER_BYTES, encode_entry
from headrace.log.records import pack_record
from headrace.log.store import Note
from tests.log.conftest import tiny
from tests.log.test_embedded import append, frames

ALL = 10**6


def ask(store, name, *payloads, noted=None, **parts):
    """Ask for a change without letting the store work yet."""
    given = [Note(key, value) for key, value in (noted or {}).items()]
    parts = {"notes": given, "done": lambda: None} | parts
    records = [pack_record(payload) for payload in payloads]
    store.store.change(store.store.topic(name), records=records, **parts)


def put(store, name="topic", *payloads, **noted):
    """Commit a change."""
    ask(store, name, *payloads, noted={key.encode(): value for key, value in noted.items()})
    store.runner.run()


def listed(store):
    return {one.key.decode(): one.value for one in store.store.notes(b"", b"", ALL)}


# One commit


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("commit_bytes_max", [4096, 64])
def test_a_topic_may_be_destroyed_while_its_first_records_wait(
    open_store, tmp_path, is_restarted, commit_bytes_max
):
    """With small commits, the first records and the destruction are in two commits."""
    sizes = JournalConfig(file_bytes=65_536, files=3, commit_bytes_max=commit_bytes_max)
    config = tiny(tmp_path / "data", journal=sizes)
    store = open_store(config)
    append(store, "other", b"x")  # the commit that is being written
    ask(store, "topic", b"first", noted={b"k": b"v"})
    ask(store, "topic", noted={b"k": None, b"l": b"v"}, destroy=True)
    ask(store, "topic", b"next life", noted={b"m": b"v"})
    store.runner.run()
    if is_restarted:
        store = open_store(config)
    assert store.payloads("topic") == [b"next life"]
    topic = store.store.topic("topic")
    assert (topic.start_offset, topic.start_ordinal) == (9, 1)
    assert listed(store) == {"l": b"v", "m": b"v"}


def test_everything_of_a_change_lies_in_one_commit_and_in_order(store):
    store.append("topic", b"old")
    append(store, "other", b"x")
    ask(store, "topic", b"new", noted={b"k": b"v"}, trim=store.store.topic("topic").end)
    ask(store, "topic", b"last", noted={b"l": b"v", b"m": None}, destroy=True)
    append(store, "topic", b"the next life")
    store.runner.run()
    _, change, after = frames(store)
    assert [(entry.kind, entry.topic_id) for entry in change] == [
        (journal.CHANGE, 1),
        (journal.NAMES, 0),
        (journal.CREATE, 2),
        (journal.APPEND, 2),
        (journal.APPEND, 1),
        (journal.TRIM, 1),
        (journal.DESTROY, 1),
        (journal.NOTE, 1),
        (journal.NOTE, 1),
        (journal.NOTE, 1),
    ]
    assert [entry.kind for entry in after] == [journal.NAMES, journal.CREATE, journal.APPEND]
    assert [entry.data for entry in change[-3:]] == [b"v", b"v", b""]


def test_a_change_is_not_split_however_long_it_is(store):
    append(store, "topic", b"before it")
    values = {b"%d" % number: b"v" * 3000 for number in range(5)}
    ask(store, "topic", *[b"x" * 900] * 30, noted=values)
    ask(store, "topic", noted={b"small": b"v"})
    store.runner.run()
    kinds = [[entry.kind for entry in entries] for entries in frames(store)]
    assert [one.count(journal.NOTE) for one in kinds] == [0, 5, 1]
    assert (
        sum(entry.record_count for entry in frames(store)[1] if entry.kind == journal.APPEND) == 30
    )


def test_what_waits_is_counted_as_long_as_it_is_in_the_journal(store):
    store.append("topic", b"x")
    before = []
    ask(store, "topic", b"y" * 50, noted={b"k" * 100: b"v" * 500, b"l": None})
    before.append(store.store.pending_bytes)
    ask(store, "new", b"z", noted={b"m": b""})
    before.append(store.store.pending_bytes)
    ask(store, "topic", trim=store.store.topic("topic").end, destroy=True)
    waiting = store.store.pending_bytes
    assert 0 < before[0] < before[1] < waiting
    store.runner.run()
    taken = sum(len(encode_entry(*entry, seed=0)) for entry in frames(store)[-1])
    assert taken <= waiting < taken + 200
    assert store.store.pending_bytes == 0


def test_a_commit_with_notes_is_synced_as_its_topic_asks(open_store):
    store = open_store()
    store.append("written/w", b"makes it")
    put(store, "written/w", b"x", key=b"written")
    put(store, "written/w", key=b"notes alone")
    put(store, "written/never made", key=b"of no topic")
    assert store.store._synced == 1
    assert store.store._ring.unsynced()
    put(store, "never made", other=b"synced")
    assert store.store._synced == 5
    assert not store.store._ring.unsynced()
    put(store, "written/w", third=b"written")
    ask(store, "written/w", noted={b"fourth": b"written"})
    ask(store, "topic", noted={b"fifth": b"synced"})
    store.runner.run()
    assert store.store._synced == store.store.last_sequence == 7


def test_topics_in_memory_have_no_changes(store):
    with pytest.raises(AssertionError):
        ask(store, "memory/m", noted={b"k": b"v"})


def test_the_handle_of_a_topic_with_a_change_on_its_way_is_not_forgotten(store):
    ask(store, "topic", noted={b"k": b"v"})
    topic = ref(store.store.topic("topic"))
    seen = []
    while store.store.pending_bytes:
        store.store.forget(store.store.topic("topic"))
        seen.append(topic() is store.store.look("topic"))
        store.runner.step()
    assert seen == [True, True], "while it is gathered, and while it is written"
    assert topic() is None


def test_a_store_that_has_failed_takes_no_notes(store):
    store.store._fail("the disk is gone")
    with pytest.raises(Exception, match="the disk is gone"):
        put(store, key=b"value")
    assert listed(store) == {}


# Changes that are not applied yet


def test_what_was_given_last_is_known_until_just_that_is_applied(open_store, tmp_path):
    store = open_store(tiny(tmp_path / "data", journal=JournalConfig(file_bytes=65_536, files=4)))
    store.applying = False
    same = Note(b"key", b"one")
    for note in (same, Note(b"key", b"two", 5), same):
        store.change("topic", notes=[note])
        store.rotate()
    store.change("topic", notes=[Note(b"key", None)])
    ask(store, "topic", noted={b"key": b"three"})
    for closed in list(store._waiting):
        store._applier.apply_file(closed)
        assert listed(store) == {"key": b"three"}
        store.store.applied(closed.path)
        assert listed(store) == {"key": b"three"}
        assert store.store.due_notes(100, ALL) == []
        assert store.store.note(b"key") == Note(b"key", b"three")
    store._waiting.clear()
    store.applying = True
    store.settle()
    assert listed(store) == {"key": b"three"}
    assert store.store._notes._unapplied == {}


def test_very_many_are_forgotten_in_several_steps(store, monkeypatch):
    monkeypatch.setattr("headrace.log.embedded._NOTES_DROPPED_AT_ONCE", 3)
    for number in range(12):
        put(store, **{f"{number:02d}": b"v"})
    store.store._close_file()
    sizes = [len(store.store._notes._unapplied)]
    while store.runner.step():
        sizes.append(len(store.store._notes._unapplied))
        assert len(listed(store)) == 12
    assert {12, 9, 6, 3, 0} <= set(sizes)
    store.append("topic", b"x")
    store.settle()


class Counting(dict):
    looked = 0

    def get(self, key, default=None):
        self.looked += 1
        return super().get(key, default)

    def __iter__(self):
        raise AssertionError("all of them were looked at")

    items = values = keys = __iter__


def test_what_is_due_is_found_without_a_look_at_all_that_is_not_applied(store):
    given = [Note(b"%d" % n, b"v", 1000 + n) for n in range(500)] + [Note(b"due", b"v", 10)]
    store.change("topic", notes=given)
    assert store.store.due_notes(0, ALL) == []
    counting = store.store._notes._unapplied = Counting(store.store._notes._unapplied)
    for _ in range(3):
        assert [one.key for one in store.store.due_notes(900, ALL)] == [b"due"]
    assert [one.due_ms for one in store.store.due_notes(5000, 2)] == [10, 1000]
    assert counting.looked <= 6


def test_what_is_due_much_later_is_found_when_its_time_has_come(store):
    assert store.store.due_notes(0, ALL) == []
    later = 3 * tables._AHEAD_MS
    store.change("topic", notes=[Note(b"later", b"v", later), Note(b"soon", b"v", 10)])
    assert [one.key for one in store.store.due_notes(later - 1, ALL)] == [b"soon"]
    assert [one.key for one in store.store.due_notes(later, ALL)] == [b"soon", b"later"]


def test_what_is_listed_is_found_without_a_look_at_all_that_is_not_applied(store):
    store.change("topic", notes=[Note(b"%03d" % n, b"v") for n in range(500)])
    counting = store.store._notes._unapplied = Counting(store.store._notes._unapplied)
    assert len(store.store.notes(b"1", b"120", 5)) == 5
    assert counting.looked <= 6


def test_places_of_notes_that_are_gone_do_not_heap_up(store):
    for number in range(600):
        store.change("topic", notes=[Note(b"same", b"v", 10_000 + number)])
        store.change("topic", notes=[Note(b"%d" % number, b"v", 20_000)])
        if number % 100 == 0:
            store.settle()
    kept = store.store._notes
    store.settle()
    assert len(kept._due) <= tables._STALE_MAX
    assert len(kept._keys) <= tables._STALE_MAX
    store.change("topic", notes=[Note(b"same", b"v", 1)] * 500)
    assert len(kept._due) <= tables._STALE_MAX + 2


def count_rows(store, monkeypatch, name):
    """Return a list that collects the rows read by one of the catalogue's queries."""
    read = []
    query = getattr(Catalogue, name)

    def counted(self, *args):
        for row in query(self, *args):
            read.append(row)
            yield row

    monkeypatch.setattr(Catalogue, name, counted)
    return read


def test_a_list_reads_no_more_of_the_catalogue_than_it_needs(store, monkeypatch):
    put(store, **{f"{number:03}": b"v" for number in range(200)})
    store.settle()
    put(store, **{f"{number:03}": None for number in range(105, 110)})
    read = count_rows(store, monkeypatch, "notes")
    assert len(store.store.notes(b"1", b"099", 10)) == 10
    assert len(read) == 15
    read.clear()
    assert len(store.store.notes(b"19", b"", ALL)) == 10
    assert len(read) == 10


def test_what_was_due_and_is_put_off_is_not_read_again_and_again(store, monkeypatch):
    store.change("topic", notes=[Note(b"%03d" % n, b"v", 100 + n // 50) for n in range(200)])
    store.settle()
    read = count_rows(store, monkeypatch, "due_notes")
    handled = []
    while due := store.store.due_notes(500, 10):
        handled += [one.key for one in due]
        store.change("topic", notes=[Note(one.key, b"v", 1000) for one in due])
    assert handled == [b"%03d" % number for number in range(200)]
    assert len(read) < 2 * 200 + 50
    store.settle()
    assert store.store.due_notes(500, 10) == []
    assert len(store.store.due_notes(1000, ALL)) == 200
    store.change("topic", notes=[Note(b"first", b"v", 1)])
    store.settle()
    assert store.store.due_notes(1000, 1) == [Note(b"first", b"v", 1)]


def test_queries_use_the_index_from_where_they_begin(store):
    db = store._catalogue._db
    plans = []

    class Explained:
        def execute(self, query, values):
            plans.extend(db.execute(f"EXPLAIN QUERY PLAN {query}", values).fetchall())
            return iter(())

    catalogue = Catalogue(Explained(), store._catalogue.path)
    list(catalogue.due_notes((5, b"k"), 9))
    list(catalogue.notes(b"p", b"pq"))
    assert "COVERING INDEX notes_by_due ((due_ms,key)>(?,?)" in plans[0][-1]
    assert "PRIMARY KEY (key>? AND key<?)" in plans[1][-1]


# Sizes


def test_a_note_may_be_longer_than_other_commits(open_store, tmp_path):
    assert open_store().store.note_bytes_max == 16_384 - 2 * ENTRY_HEADER_BYTES - 16
    large = JournalConfig(file_bytes=8 << 20, files=2, commit_bytes_max=1 << 20)
    store = open_store(tiny(tmp_path / "large", journal=large))
    assert store.store.note_bytes_max == (1 << 20) + 4096
    value = bytes(range(256)) * 4096
    for number in range(10):
        store.change("topic", notes=[Note(b"k%d" % number, value, 1)])
    assert [one.value for one in store.store.due_notes(1, 3)] == [value] * 3
    store.settle()
    assert [one.value for one in store.store.due_notes(1, 3)] == [value] * 3
    store.change("topic", notes=[Note(b"k0", value[:-2])])
    store = open_store(tiny(tmp_path / "large", journal=large))
    assert len(listed(store)) == 10
    assert store.store.note(b"k0") == Note(b"k0", value[:-2])


def test_entries_of_the_journal_have_the_documented_kinds():
    assert (journal.CHANGE, journal.NOTE) == (8, 9)
