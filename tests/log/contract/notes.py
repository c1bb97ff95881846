"""Promises of every store about notes and changes, as tests for topics on disk.

The harness is the one of `topics.py`.
"""

import pytest

from headrace.log.records import pack_record
from headrace.log.store import NOTE_KEY_BYTES_MAX, Note
from headrace.model import Position

KEYS = [b"a", b"a\0", b"a/1", b"a/2", b"a\xff", b"a\xff\xff", b"b", b"\xff", b"\xff\xff/1"]
"""Keys of notes, in byte order."""
ALL = 1000


def change(harness, *payloads, name="topic", **parts):
    """Ask for a change without letting the store work yet; return the list that collects the answers."""
    done: list[bool] = []
    harness.store.change(
        harness.topic(name),
        records=[pack_record(payload) for payload in payloads],
        done=lambda: done.append(True),
        **parts,
    )
    return done


def note(harness, *notes, name="topic"):
    done = change(harness, notes=[Note(*one) for one in notes], name=name)
    harness.flush()
    assert done == [True], "every change is answered, once"


def listed(harness, prefix=b"", after=b"", limit=ALL):
    return [one.key for one in harness.store.notes(prefix, after, limit)]


def stages(harness):
    """Move the notes through every stage: given, committed, settled, and after each kind of stop."""
    yield "given"
    harness.flush()
    yield "committed"
    harness.settle()
    yield "settled"
    harness.restart(clean=False)
    yield "killed"
    harness.restart(clean=True)
    yield "stopped"


class NotesContract:
    """Tests of notes. A subclass provides a `harness` fixture whose topics are on disk."""

    def test_there_are_no_notes_at_first(self, harness):
        assert harness.store.note(b"key") is None
        assert harness.store.notes(b"", b"", ALL) == []
        assert harness.store.due_notes(1 << 62, ALL) == []

    def test_a_note_is_there_from_when_it_is_given(self, harness):
        change(harness, notes=[Note(b"key", b"value", 7), Note(b"empty", b"")])
        for stage in stages(harness):
            assert harness.store.note(b"key") == Note(b"key", b"value", 7), stage
            assert harness.store.note(b"empty") == Note(b"empty", b""), stage
            assert harness.store.note(b"other") is None
            assert listed(harness) == [b"empty", b"key"]

    def test_the_last_value_counts(self, harness):
        for value in (b"1", b"2"):
            change(harness, notes=[Note(b"key", b"not this"), Note(b"key", value)])
        change(harness, notes=[Note(b"key", b"3", 30)], name="another")
        for stage in stages(harness):
            assert harness.store.note(b"key") == Note(b"key", b"3", 30), stage
        note(harness, (b"key", b"4"))
        for stage in stages(harness):
            assert harness.store.note(b"key") == Note(b"key", b"4"), stage
            assert harness.store.due_notes(1 << 62, ALL) == [], stage

    def test_a_note_that_is_dropped_is_gone(self, harness):
        note(harness, (b"old", b"value", 5), (b"kept", b"value"))
        harness.settle()
        note(harness, (b"new", b"value", 5))
        change(harness, notes=[Note(b"old", None), Note(b"new", None, 9), Note(b"never", None)])
        for stage in stages(harness):
            assert harness.store.note(b"old") is None, stage
            assert harness.store.note(b"new") is None, stage
            assert listed(harness) == [b"kept"], stage
            assert harness.store.due_notes(1 << 62, ALL) == [], stage
        note(harness, (b"old", b"again"))
        for stage in stages(harness):
            assert harness.store.note(b"old") == Note(b"old", b"again"), stage

    def test_nobody_is_told_before_it_is_durable(self, harness):
        done = change(harness, b"x", notes=[Note(b"key", b"value")])
        assert done == []
        assert harness.read() == []
        harness.flush()
        assert done == [True]
        assert harness.payloads() == [b"x"]

    def test_notes_alone_make_no_topic_and_records_do(self, harness):
        note(harness, (b"key", b"value"))
        assert not harness.topic().exists
        harness.settle()
        assert harness.store.topics("", "", ALL) == []
        change(harness, b"x")
        harness.flush()
        assert harness.topic().exists

    def test_all_parts_of_a_change_are_done(self, harness):
        harness.append(b"one", b"two")
        second = harness.read()[1]
        at = Position(harness.topic().epoch, *second[:2])
        change(harness, b"three", notes=[Note(b"key", b"value")], trim=at)
        harness.flush()
        for stage in stages(harness):
            assert harness.payloads() == [b"two", b"three"], stage
            assert harness.store.note(b"key") is not None, stage

    def test_what_comes_after_a_topic_is_destroyed_belongs_to_its_next_life(self, harness):
        harness.append(b"old")
        epoch, end = harness.topic().epoch, harness.topic().end_offset
        change(harness, b"last", notes=[Note(b"key", b"gone")], destroy=True)
        change(harness, b"new", notes=[Note(b"other", b"value")])
        harness.flush()
        for stage in stages(harness):
            assert harness.payloads() == [b"new"], stage
            assert harness.topic().start_offset == end + 8, stage
            assert harness.topic().epoch > epoch, stage
            assert listed(harness) == [b"key", b"other"], stage

    def test_records_of_changes_and_appends_are_in_the_order_in_which_they_came(self, harness):
        topic = harness.topic()
        harness.store.append({topic: [pack_record(b"1")]}, lambda: None)
        change(harness, b"2", b"3")
        harness.store.append({topic: [pack_record(b"4")]}, lambda: None)
        change(harness, b"5", notes=[Note(b"key", b"value")])
        harness.flush()
        assert harness.payloads() == [b"1", b"2", b"3", b"4", b"5"]

    def test_the_records_that_were_given_stay_as_they_are(self, harness):
        records = [pack_record(b"1")]
        harness.store.change(harness.topic(), records=records, done=lambda: None)
        change(harness, b"2")
        harness.flush()
        assert records == [pack_record(b"1")]

    def test_a_change_of_nothing_is_answered(self, harness):
        done = change(harness)
        harness.flush()
        assert done == [True]
        assert not harness.topic().exists
        harness.restart(clean=False)

    # Lists

    def test_notes_are_listed_in_the_order_of_their_bytes(self, harness):
        change(harness, notes=[Note(key, key) for key in reversed(KEYS)])
        for stage in stages(harness):
            assert listed(harness) == KEYS, stage
            for prefix in (b"a", b"a/", b"a\xff", b"b", b"\xff", b"c"):
                wanted = [key for key in KEYS if key.startswith(prefix)]
                assert listed(harness, prefix) == wanted, (stage, prefix)
                for after in (*KEYS, b"a/11", b"\0", b"\xff" * 9):
                    rest = [key for key in wanted if key > after]
                    assert listed(harness, prefix, after) == rest, (stage, prefix, after)
                    assert listed(harness, prefix, after, 2) == rest[:2]
            assert listed(harness, limit=0) == []

    def test_lists_are_the_same_wherever_each_note_lies(self, harness):
        keys = [b"%03d" % number for number in range(60)]
        note(harness, *((key, b"old") for key in keys[:40]))
        harness.settle()
        note(harness, *((key, b"new") for key in keys[20::2]))
        change(harness, notes=[Note(key, None) for key in keys[5:50:3]])
        wanted = [key for key in keys[:40] + keys[40::2] if key not in keys[5:50:3]]
        for stage in stages(harness):
            assert listed(harness) == wanted, stage
            found, after = [], b""
            while page := listed(harness, b"0", after, 7):
                assert len(page) == 7 or page[-1] == wanted[-1]
                found += page
                after = page[-1]
            assert found == wanted, stage
            values = {one.key: one.value for one in harness.store.notes(b"", b"", ALL)}
            assert values[b"022"] == b"new"
            assert values[b"021"] == b"old"

    # Due notes

    def test_what_is_due_comes_earliest_first_and_only_then(self, harness):
        times = {b"late": 300, b"soon": 100, b"never": 0, b"sooner": 99, b"also": 100}
        change(harness, notes=[Note(key, b"x", ms) for key, ms in times.items()])
        for stage in stages(harness):
            for until, wanted in (
                (98, []),
                (99, [b"sooner"]),
                (100, [b"sooner", b"also", b"soon"]),
                (1 << 70, [b"sooner", b"also", b"soon", b"late"]),
            ):
                found = harness.store.due_notes(until, ALL)
                assert [one.key for one in found] == wanted, stage
                assert [one.due_ms for one in found] == [times[key] for key in wanted]
                assert harness.store.due_notes(until, 2) == found[:2]
                assert harness.store.due_notes(until, ALL) == found, "asking changes nothing"
            assert harness.store.due_notes(1000, 0) == []

    def test_what_is_put_off_is_due_later(self, harness):
        note(harness, *((b"%d" % number, b"x", 10 + number) for number in range(10)))
        harness.settle()
        change(harness, notes=[Note(b"%d" % number, b"x", 100 - number) for number in range(5)])
        change(harness, notes=[Note(b"9", b"x", 1), Note(b"8", b"x"), Note(b"7", None)])
        for stage in stages(harness):
            found = [one.key for one in harness.store.due_notes(1000, ALL)]
            assert found == [b"9", b"5", b"6", b"4", b"3", b"2", b"1", b"0"], stage
            assert harness.store.due_notes(1000, 3)[-1].key == b"6", stage

    # Limits

    def test_the_longest_note_comes_back(self, harness):
        longest = harness.store.note_bytes_max
        key = b"k" * min(NOTE_KEY_BYTES_MAX, longest - 1)
        value = b"v" * (longest - len(key))
        change(harness, notes=[Note(b"other", b"x"), Note(key, value), Note(b"another", b"x")])
        for stage in stages(harness):
            assert harness.store.note(key) == Note(key, value), stage
            assert listed(harness, b"k") == [key]

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda longest: Note(b"", b"value"),
            lambda longest: Note(b"k" * (NOTE_KEY_BYTES_MAX + 1), b""),
            lambda longest: Note(b"k", b"v" * longest),
            lambda longest: Note(b"k", b"v", -1),
            lambda longest: Note(b"k", b"v", 1 << 63),
        ],
    )
    def test_a_note_that_cannot_be_kept_is_refused_and_all_that_came_with_it(self, harness, wrong):
        with pytest.raises(AssertionError):
            change(harness, b"x", notes=[Note(b"a", b"x"), wrong(harness.store.note_bytes_max)])
        harness.flush()
        assert listed(harness) == []
        assert not harness.topic().exists

    @pytest.mark.parametrize("parts", [{"trim": Position(0, 0, 0)}, {"destroy": True}])
    def test_what_does_not_exist_is_neither_trimmed_nor_destroyed(self, harness, parts):
        with pytest.raises(AssertionError):
            change(harness, b"x", notes=[Note(b"a", b"x")], **parts)
        assert listed(harness) == []
