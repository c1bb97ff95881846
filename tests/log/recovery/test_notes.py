"""Notes after crashes and damage: a change counts entirely or not at all, and losses are reported."""

import random
import shutil
import sqlite3

import msgspec
import pytest

from headrace.config.settings import Journal as JournalConfig
from headrace.log.apply.applier import Applier
from headrace.log.catalogue.catalogue import BACKUP_NAME, FILE_NAME, Catalogue, _sound_schema
from headrace.log.catalogue.rows import ADDED, FORMAT, DirectoryMeta, NoteRow
from headrace.log.commit import journal
from headrace.log.commit.commit import Commit, Encoder
from headrace.log.commit.journal import FRAME_HEAD_BYTES, decode_entry, encode_entry, entry_seed
from headrace.log.disk import Disk
from headrace.log.records import pack_record
from headrace.log.recovery import frames as journal_reading
from headrace.log.recovery.scan import _without_gaps
from headrace.log.store import BatchPart, Block, Note, Progress, Topic
from headrace.log.verify.verify import verify
from headrace.model import JUMP, Durability
from tests.fakes.disk import flip
from tests.fakes.store import StepStore
from tests.log.commit.test_notes import ask, listed, put
from tests.log.conftest import tiny
from tests.log.recovery.test_damage import flip_any
from tests.log.recovery.test_recovery import Journal
from tests.log.test_embedded import append

# After a crash


def test_a_journal_file_that_is_used_again_brings_back_no_old_value(open_store):
    store = open_store()
    for number in range(40):
        put(store, "topic", b"x" * 300, key=b"%d" % number, **{f"n{number % 7}": b"%d" % number})
        if number == 20:
            put(store, n3=None)
        if number % 3 == 0:
            store.rotate()
        if number % 10 == 9:
            expected = listed(store)
            store = open_store()
            assert store.reports == []
            assert listed(store) == expected
    assert expected["key"] == b"39"


def torn(store, stale):
    """Tear the last frame: its head is intact, followed by what an earlier use of the file left."""
    path, position, frame = Journal(store).frames()[-1]
    length = sum(len(encode_entry(*entry, seed=0)) for entry in frame.entries)
    at = position + FRAME_HEAD_BYTES
    data = path.read_bytes()
    assert len(stale) <= length
    left = stale.ljust(frame.end - at, b"\0")
    path.write_bytes(data[:at] + left + data[frame.end :])


@pytest.mark.parametrize("same_length", [False, True])
def test_what_an_earlier_use_left_in_a_torn_frame_brings_back_no_old_value(open_store, same_length):
    store = open_store()
    put(store, "topic", b"makes it")
    store.append("topic", b"names it again")
    put(store, "topic", b"1", key=b"1", dropped=b"1")
    put(store, "topic", b"2", key=b"2", dropped=None)
    if same_length:
        # All old entries are valid by themselves, as if they belonged to this commit.
        put(store, "topic", b"3", key=b"3", dropped=b"3")
    else:
        put(store, "topic", b"3" * 500, key=b"3", dropped=b"3")
    store.crash()
    frames = Journal(store).frames()
    old, seed = frames[2][2], frames[-1][2].seed
    torn(store, b"".join(encode_entry(*entry, seed=seed) for entry in old.entries))
    store = open_store()
    assert any("never acknowledged: dropped" in report for report in store.reports)
    assert listed(store) == {"key": b"2"}
    assert store.payloads("topic") == [b"makes it", b"names it again", b"1", b"2"]
    put(store, "topic", b"4", key=b"4")
    store = open_store()
    assert store.reports == []
    assert listed(store) == {"key": b"4"}
    assert store.payloads("topic") == [b"makes it", b"names it again", b"1", b"2", b"4"]


def last_change(open_store):
    """Return a store killed after a commit with two changes, and the places of that frame's entries."""
    store = open_store()
    store.append("a", b"a1")
    store.append("plain", b"p1")
    put(store, k=b"old", l=b"old")
    append(store, "plain", b"p2" * 20)
    ask(store, "a", b"a2" * 20, noted={b"k": b"new"})
    ask(store, "b", b"b1" * 20, noted={b"l": b"new" * 20})
    store.runner.run()
    store.crash()
    path, position, frame = Journal(store).frames()[-1]
    places = {}
    at = position + FRAME_HEAD_BYTES
    for number, entry in enumerate(frame.entries):
        places[number, entry.kind, entry.topic_id] = at, len(encode_entry(*entry, seed=0))
        at += places[number, entry.kind, entry.topic_id][1]
    return store, path, places


NEW = {"k": b"new", "l": b"new" * 20}
OLD = {"k": b"old", "l": b"old"}


def test_a_last_commit_that_was_cut_anywhere_leaves_all_of_its_changes_or_nothing(
    open_store, tmp_path
):
    store, path, places = last_change(open_store)
    data = path.read_bytes()
    begin = min(at for at, _ in places.values())
    end = max(at + length for at, length in places.values())
    left = set()
    for cut in [*range(begin, end, 7), end - 1, end]:
        path.write_bytes(data[:cut] + b"\xaa" * (len(data) - cut))
        copy = tmp_path / f"{cut}"
        shutil.copytree(store.layout.root, copy)
        again = StepStore(tiny(copy))
        left.add(whole := listed(again) == NEW)
        assert listed(again) == (NEW if whole else OLD)
        assert again.payloads("a") == [b"a1"] + [b"a2" * 20] * whole
        assert again.payloads("b") == [b"b1" * 20] * whole
        assert again.payloads("plain")[0] == b"p1"
        again.crash()
        shutil.rmtree(copy)
    assert left == {False, True}


def test_damage_in_a_last_commit_of_a_crashed_machine_takes_its_changes_together_and_no_others(
    open_store, tmp_path
):
    store, path, places = last_change(open_store)
    data = path.read_bytes()
    for (_, kind, topic_id), (at, length) in places.items():
        if kind in (journal.CHANGE, journal.CREATE):
            continue
        damaged = bytearray(data)
        damaged[at + length - 1] ^= 1  # the last byte of its data
        path.write_bytes(damaged)
        copy = tmp_path / f"{at}"
        shutil.copytree(store.layout.root, copy)
        again = StepStore(tiny(copy), boot_id=b"the second boot.")
        whole = topic_id == 2  # the damaged entry does not belong to the changes
        assert any("may have been acknowledged" in one for one in again.reports)
        assert listed(again) == (NEW if whole else OLD)
        assert again.payloads("a") == [b"a1"] + [b"a2" * 20] * whole
        assert again.payloads("b") == [b"b1" * 20] * whole
        assert again.payloads("plain") == [b"p1"] + [b"p2" * 20] * (not whole)
        again.crash()
    kinds = [kind for _, kind, _ in places]
    assert kinds.count(journal.NOTE) == 2
    assert kinds.count(journal.APPEND) == 3


def test_a_commit_that_does_not_say_all_that_has_changed_is_dropped():
    frame = encoded_frame(change_of(1, b"x"), change_of(2, b"y"))
    marks = [entry for entry in frame.entries if entry.kind == journal.CHANGE]
    assert [mark.record_count for mark in marks] == [2, 2]
    kept = [entry for entry in frame.entries if entry is not marks[1]]
    assert list(_without_gaps(frame._replace(entries=kept), 9)) == []
    assert list(_without_gaps(frame, 9)) == frame.entries


def test_a_change_goes_with_a_batch_that_is_broken_elsewhere():
    parts = [part(3, b"lost"), part(1, b"a row")]
    frame = encoded_frame(change_of(1, b"x"), parts=parts)
    entries = [
        entry._replace(kind=journal.LOST) if entry.topic_id == 3 else entry
        for entry in frame.entries
    ]
    assert list(_without_gaps(frame._replace(entries=entries), 9)) == []
    frame = encoded_frame(change_of(2, b"x"), parts=parts)
    assert list(_without_gaps(frame, 9)) == frame.entries


def test_notes_of_no_topic_do_not_go_with_a_decision_that_is_lost():
    frame = encoded_frame(change_of(0))
    decision = frame.entries[0]._replace(
        kind=journal.LOST, ordinal=0, extra=msgspec.msgpack.encode([b"p", 1])
    )
    kept = list(_without_gaps(frame._replace(entries=[*frame.entries, decision]), 9))
    assert [entry.kind for entry in kept] == [journal.CHANGE, journal.NOTE]


def existing(topic_id):
    topic = Topic(f"{topic_id}", Durability.SYNCED)
    topic.id = topic_id
    return topic


def change_of(topic_id, *payloads):
    return existing(topic_id), [pack_record(payload) for payload in payloads]


def part(topic_id, payload):
    record = pack_record(payload)
    return existing(topic_id), BatchPart(Block(f"{topic_id}", 1, record), "p", 1, Progress(0, 9))


def encoded_frame(*changes, parts=()):
    commit = Commit()
    for topic, records in changes:
        commit.changed[topic] = None
        commit.notes.append((topic, Note(b"key", b"value")))
        if records:
            commit.appends[topic] = records
    commit.parts += parts
    entries = Encoder(9, 1, 1 << 16).encode(commit, 1, 7).entries
    return journal_reading.Frame(
        7, 0, [decode_entry(entry) for entry in entries], [], entry_seed(1, 7), 0, False
    )


# Damage


def damaged_note(open_store, *, header=False):
    """Return a store with a change in the middle of the journal whose note has a damaged header or value."""
    store = open_store()
    put(store, "topic", b"1", key=b"old", other=b"old")
    put(store, "topic", b"2", key=b"new", other=b"new")
    put(store, "topic", b"3", third=b"new")
    store.crash()
    path, position, frame = Journal(store).frames()[1]
    kinds = [entry.kind for entry in frame.entries]
    first = kinds.index(journal.NOTE)
    at = position + FRAME_HEAD_BYTES
    at += sum(len(encode_entry(*entry, seed=0)) for entry in frame.entries[:first])
    length = len(encode_entry(*frame.entries[first], seed=0))
    flip(path, at + 9 if header else at + length - 1)
    return store


def test_a_damaged_value_is_told_of_and_what_was_noted_before_holds(open_store):
    store = damaged_note(open_store)
    damages = [str(one) for one in verify(store.layout.root).damages]
    assert damages == ["journal/0.journal: the note b'key' is damaged"]
    store = open_store()
    assert 'note "key": its last value is lost' in str(store.reports)
    assert any("damage: kept in quarantine" in report for report in store.reports)
    assert b"key" in Journal(store).quarantined()[0]
    assert listed(store) == {"key": b"old", "other": b"new", "third": b"new"}
    assert store.payloads("topic") == [b"1", b"2", b"3"]
    assert store.store.topic("topic").end_offset < JUMP
    assert open_store().reports == []


def test_a_damaged_header_costs_its_entry_and_makes_topics_jump(open_store):
    store = damaged_note(open_store, header=True)
    assert verify(store.layout.root).damaged
    store = open_store()
    assert listed(store) == {"key": b"old", "other": b"new", "third": b"new"}
    assert store.payloads("topic") == [b"1", b"2", b"3"]
    assert store.store.topic("new").end_offset >= JUMP
    assert store.store.topic("topic").end_offset < JUMP  # a later entry proves the topic's end


def test_a_value_that_is_damaged_while_the_store_runs_is_told_of(store):
    store.applying = False
    put(store, key=b"value", other=b"value")
    store.rotate()
    (closed,) = store._waiting
    path, position, frame = Journal(store).frames()[0]
    place = len(encode_entry(*frame.entries[0], seed=0)) + len(
        encode_entry(*frame.entries[1], seed=0)
    )
    flip(path, position + FRAME_HEAD_BYTES + place - 1)
    reports = store._applier.apply_file(closed)
    assert "an entry's data is damaged" in reports[0]
    assert 'note "key"' in reports[1]
    store.store.applied(closed.path)
    assert listed(store) == {"other": b"value"}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A directory that is partly applied, and the values of each key in order."""
    path = tmp_path_factory.mktemp("changed") / "data"
    store = StepStore(tiny(path, journal=JournalConfig(file_bytes=65_536, files=6)))
    given = {f"k{number}": [] for number in range(9)}
    for number in range(60):
        key, value = f"k{number * number % 9}", b"%d " % number * (number * 7 % 40)
        given[key].append(value)
        put(store, "topic", b"%d" % number, **{key: value})
        if number in (10, 25, 40):
            store.rotate()
        if number == 25:
            store._catalogue.keep_backup(Disk())
            store.applying = False
    store.crash()
    return path, {key: values for key, values in given.items() if values}


@pytest.mark.parametrize("case", range(40))
@pytest.mark.parametrize("kind", ["journal/*.journal", FILE_NAME])
def test_a_flipped_bit_leaves_no_note_that_was_never_given(changed, tmp_path, kind, case):
    path, given = changed
    shutil.copytree(path, tmp_path / "data")
    chance = random.Random(f"{kind} {case}")
    flip_any(chance.choice(sorted((tmp_path / "data").glob(kind))), chance)
    store = StepStore(tiny(tmp_path / "data"))
    found = listed(store)
    for key, values in given.items():
        assert found.get(key) in values
        if not store.reports:
            assert found[key] == values[-1]
    assert sum(found[key] != values[-1] for key, values in given.items()) <= 1
    put(store, "topic", b"after", k0=b"after")
    store.crash()
    store = StepStore(tiny(tmp_path / "data"))
    assert listed(store) == found | {"k0": b"after"}
    store.crash()


def test_verify_reads_the_notes_of_catalogue_and_backup(open_store):
    store = open_store()
    put(store, "topic", b"x", key=b"value")
    store.settle()
    put(store, "topic", b"y", key=None, other=b"value")
    assert not verify(store.layout.root).damaged
    store.close()
    assert not verify(store.layout.root).damaged
    for name in (FILE_NAME, BACKUP_NAME):
        with sqlite3.connect(store.layout.root / name) as db:
            db.execute("UPDATE notes SET value = x'00'")
        db.close()
    damages = [str(one) for one in verify(store.layout.root).damages]
    assert damages == [f"{name}: a row of notes is damaged" for name in (FILE_NAME, BACKUP_NAME)]


# Rebuilding


def lose(store):
    for suffix in ("", "-wal", "-shm"):
        (store.layout.root / f"{FILE_NAME}{suffix}").unlink(missing_ok=True)


def test_notes_come_back_from_the_backup_and_from_the_journal(open_store):
    store = open_store()
    put(store, early=b"1", dropped=b"1", changed=b"1")
    store.settle()
    store._catalogue.keep_backup(Disk())
    put(store, dropped=None, changed=b"2")
    store.settle()
    put(store, "topic", b"x", late=b"2")
    before = listed(store)
    assert set(before) == {"early", "changed", "late"}
    store.crash()
    lose(store)
    store = open_store()
    assert listed(store) == before
    assert store.payloads("topic") == [b"x"]
    assert "cursors, producers, batches and notes are from the backup" in str(store.reports)


def test_without_a_backup_notes_come_back_as_far_as_the_journal_goes(open_store):
    store = open_store()
    put(store, long_ago=b"1", twice=b"1")
    for number in range(12):
        put(store, twice=b"%d" % number, recent=b"%d" % number)
        store.rotate()
    store.crash()
    lose(store)
    store = open_store()
    assert listed(store) == {"twice": b"11", "recent": b"11"}
    assert "notes are lost" in str(store.reports)


def test_rows_that_hold_are_taken_from_the_damaged_catalogue(open_store):
    store = open_store()
    for number in range(12):
        put(store, **{f"n{number}": b"value"})
        store.rotate()
    store._catalogue._db.execute("UPDATE notes SET crc = crc + 1 WHERE key = x'6e33'")
    store.crash()
    store = open_store()
    assert set(listed(store)) == {f"n{number}" for number in range(12)} - {"n3"}
    assert "a row of notes is damaged" in str(store.reports)


@pytest.mark.parametrize("killed_at", [0, 1, 2, 3])
def test_what_the_journal_says_from_before_a_gap_is_not_noted_again(
    open_store, monkeypatch, killed_at
):
    """A start uses files in the order of their names, so other files may keep much older commits for long."""
    store = open_store()
    for number in range(4):
        put(store, key=b"%d" % number, dropped=b"%d" % number, number=b"%d" % number)
        store.rotate()
    store.close()
    for values in ({"key": b"new", "dropped": None}, {"later": b"new"}):
        store = open_store()
        put(store, **values)
        store.close()
    store = open_store()
    expected = listed(store)
    assert expected == {"key": b"new", "number": b"3", "later": b"new"}
    assert [frame.sequence for _, _, frame in Journal(store).frames()] == [2, 3, 6]
    store._catalogue._db.execute("INSERT INTO tombstones VALUES (x'00', 1, 1, 1, 1, 1)")
    store.crash()
    if killed_at:
        # The kill happens while the journal is applied to the new catalogue.
        with monkeypatch.context() as patch:
            patch.setattr(Applier, "apply", killed_in(Applier.apply, killed_at))
            with pytest.raises(KeyboardInterrupt):
                open_store()
    store = open_store()
    assert listed(store) == expected
    assert store._catalogue.meta().rebuilt_from == 0
    put(store, key=b"newer")
    store = open_store()
    assert listed(store)["key"] == b"newer"


def killed_in(function, at):
    calls = []

    def call(*args, **options):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return function(*args, **options)

    return call


# Formats


def make_format_2(path):
    """Turn a catalogue into that of an earlier version: the same without notes."""
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE notes")
    db.close()
    catalogue = Catalogue.open(path.parent, name=path.name)
    catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), format=2))
    assert catalogue._schema() == _sound_schema(2)
    catalogue.check()
    catalogue.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_directory_of_format_2_is_verified_opened_and_loses_nothing(open_store, killed):
    store = open_store()
    store.append("a", b"one", b"two")
    store.append_once("b", "p", 7, b"numbered")
    store.batch("p", 3, store.stage(("a", [b"three"])))
    store.store.set_cursors("r", {"a": store.store.topic("a").end}, lambda: None)
    store.runner.run()
    if killed:
        store.settle()
        store._catalogue.keep_backup(Disk())
        store.append("a", b"four")
        store.crash()
    else:
        store.append("a", b"four")
        store.close()
    for name in (FILE_NAME, BACKUP_NAME):
        make_format_2(store.layout.root / name)
    assert not verify(store.layout.root).damaged
    store = open_store()
    assert store.reports == []
    assert store._catalogue.meta().format == FORMAT
    store._catalogue.check()
    assert store._catalogue._schema() == _sound_schema(3)
    assert store.payloads("a") == [b"one", b"two", b"three", b"four"]
    assert store.append_once("b", "p", 7, b"numbered").duplicate
    assert store.batch("p", 3, store.stage(("a", [b"three"]))).duplicate
    assert [one.reader for one in store.store.cursors(limit=9)] == ["r"]
    put(store, key=b"value")
    store.settle()
    store.crash()
    lose(store)  # the backup still has format 2
    store = open_store()
    assert listed(store) == {"key": b"value"}
    assert store.payloads("a") == [b"one", b"two", b"three", b"four"]


def test_a_catalogue_made_anew_is_what_migrating_makes(tmp_path):
    for version in (1, 2):
        path = tmp_path / f"{version}"
        path.mkdir()
        old = Catalogue.open(path)
        with old.transaction():
            old._add(*range(1, version + 1))
            old.put_meta(DirectoryMeta(format=version))
        old.check()
        old.migrate()
        old.check()
        assert old._schema() == _sound_schema(max(ADDED))
        old.put([NoteRow(b"k", b"v", 1, 1)])
        assert list(old.notes()) == [NoteRow(b"k", b"v", 1, 1)]
        old.close()
