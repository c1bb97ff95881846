"""Restarts: acknowledged records are there, losses are reported, and no position gets other bytes."""

import shutil

import pytest

from headrace.config.settings import PrefixRule
from headrace.errors import DataDirectoryError
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit import journal
from headrace.log.commit.journal import (
    ENTRY_HEADER_BYTES,
    FRAME_HEAD_BYTES,
    FRAMES_POSITION,
    encode_entry,
)
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.records import pack_record
from headrace.log.recovery import frames as journal_reading
from headrace.log.recovery import recovery
from headrace.log.recovery import scan as journal_scan
from headrace.model import JUMP, Durability
from tests.fakes.disk import flip
from tests.fakes.store import StepClock
from tests.log.conftest import tiny

BOOTS = [b"boot number %4d" % number + b"." for number in range(4)]


class Journal:
    """The journal of a stopped store, for tests that damage it."""

    def __init__(self, store) -> None:
        self.layout = store.layout

    def frames(self):
        """Return file, position and content of every frame, in the order of commits."""
        found = []
        for path in self.layout.journal_files():
            position = FRAMES_POSITION
            for item in journal_reading.read_frames(path):
                assert isinstance(item, journal_reading.Frame)
                size = sum(len(encode_entry(*entry, seed=0)) for entry in item.entries)
                found.append((path, position, item))
                position += journal.frame_bytes(size)
        return sorted(found, key=lambda one: one[2].sequence)

    def lose(self, *numbers) -> None:
        """Overwrite some frames entirely, so that no copy of their heads is left."""
        frames = self.frames()
        for path, position, frame in (frames[number] for number in numbers):
            length = journal.frame_bytes(sum(len(encode_entry(*e, seed=0)) for e in frame.entries))
            data = path.read_bytes()
            path.write_bytes(data[:position] + b"\xaa" * length + data[position + length :])

    def quarantined(self) -> list[bytes]:
        if not self.layout.quarantine.exists():
            return []
        return [path.read_bytes() for path in sorted(self.layout.quarantine.iterdir())]


@pytest.fixture
def damaged(open_store):
    """Run commits without applying them, damage the journal with a function, and start again."""

    def run(commits, damage):
        store = open_store()
        for commit in commits:
            store.append(*commit)
        store.crash()
        found = Journal(store)
        damage(found)
        return open_store(clock=StepClock()), found

    return run


def ends(store, *names):
    return [store.store.topic(name).end_offset for name in names]


# Kills and boots


def test_a_killed_process_is_no_reason_for_a_word(open_store):
    store = open_store()
    for number in range(20):
        store.append("topic", b"%d" % number)
        store.append("written/topic", b"%d" % number)
        if number % 7 == 0:
            store.rotate()
    before = store.store.topic("topic").end, store.store.topic("written/topic").end
    store = open_store()
    assert store.reports == []
    assert (store.store.topic("topic").end, store.store.topic("written/topic").end) == before
    assert len(store.payloads("written/topic")) == 20


def test_after_a_crash_of_the_machine_written_topics_jump_and_no_others(open_store):
    store = open_store(boot_id=BOOTS[0])
    for name in ("synced", "written/topic", "memory/topic"):
        store.append(name, b"before")
    before = {name: store.store.topic(name).end for name in ("synced", "written/topic")}
    store = open_store(boot_id=BOOTS[1])
    assert store.reports == ["1 topics continue with a new epoch after a crash of the machine"]
    assert store.store.topic("synced").end == before["synced"]
    jumped = store.store.topic("written/topic")
    assert jumped.end_offset == before["written/topic"].offset + JUMP
    assert jumped.end_ordinal == before["written/topic"].ordinal + JUMP
    assert jumped.epoch > before["written/topic"].epoch
    assert store.payloads("written/topic") == [b"before"]
    store.append("written/topic", b"after")
    assert store.read("written/topic") == [
        (before["written/topic"].offset, b"before"),
        (jumped.start_offset + 10 + JUMP + 9, b"after"),
    ]
    assert not store.store.topic("memory/topic").exists


def test_a_jump_leaves_every_position_answered(open_store):
    store = open_store(boot_id=BOOTS[0])
    store.append("written/topic", b"before", b"also before")
    store = open_store(boot_id=BOOTS[1])
    store.append("written/topic", b"after")
    for _ in range(2):
        topic = store.store.topic("written/topic")
        after = topic.end_offset - 9
        for offset in (26, 1000, JUMP, after - 1, after):
            assert store.store.locate_offset(topic, offset).offset == after
            assert store.payloads("written/topic", offset) == [b"after"]
        for ordinal in (3, JUMP, 2 + JUMP):
            found = store.store.locate_ordinal(topic, ordinal)
            assert (found.offset, found.ordinal) == (after, 2 + JUMP)
        assert store.payloads("written/topic") == [b"before", b"also before", b"after"]
        store.settle()


def test_an_empty_topic_that_jumps_stays_empty(open_store):
    store = open_store(boot_id=BOOTS[0])
    store.append("written/topic", b"before")
    store.trim("written/topic", store.store.topic("written/topic").end)
    store = open_store(boot_id=BOOTS[1])
    topic = store.store.topic("written/topic")
    assert topic.start == topic.end
    assert topic.end_offset == 10 + JUMP


def test_a_clean_stop_before_a_boot_changes_nothing(open_store):
    store = open_store(boot_id=BOOTS[0])
    store.append("written/topic", b"before")
    end = store.store.topic("written/topic").end
    store.close()
    store = open_store(boot_id=BOOTS[1])
    assert store.reports == []
    assert store.store.topic("written/topic").end == end


def test_journal_files_of_an_earlier_boot_say_nothing_about_this_one(open_store):
    store = open_store(boot_id=BOOTS[0])
    for _ in range(5):  # every journal file carries the first boot
        store.append("written/topic", b"x")
        store.rotate()
    store.close()
    store = open_store(boot_id=BOOTS[1])
    store.append("written/topic", b"y")
    end = store.store.topic("written/topic").end
    store = open_store(boot_id=BOOTS[1])
    assert store.reports == []
    assert store.store.topic("written/topic").end == end


def test_a_crash_of_the_machine_is_noticed_when_the_journal_has_lost_every_trace(open_store):
    store = open_store(boot_id=BOOTS[0])
    store.append("written/topic", b"synced, since it makes the topic")
    store.settle()
    store.append("written/topic", b"lost with the file's header")
    end = store.store.topic("written/topic").end_offset
    store.crash()
    for path in store.layout.journal_files():
        if journal_reading.read_header(path) and journal_reading.read_header(path).first == 2:
            path.write_bytes(bytes(path.stat().st_size))
    store = open_store(boot_id=BOOTS[1])
    assert store.store.topic("written/topic").end_offset > end
    assert store.payloads("written/topic") == [b"synced, since it makes the topic"]


def test_what_counts_is_the_durability_in_force_before_the_crash(open_store, tmp_path):
    synced = tiny(tmp_path / "data")
    written = tiny(
        tmp_path / "data", topics=(PrefixRule(prefix="", durability=Durability.WRITTEN),)
    )
    store = open_store(synced, boot_id=BOOTS[0])
    store.append("topic", b"made while synced")
    store.close()
    store = open_store(written, boot_id=BOOTS[1])
    store.append("topic", b"written only")
    end = store.store.topic("topic").end_offset
    store = open_store(synced, boot_id=BOOTS[2])
    assert store.store.topic("topic").end_offset == end + JUMP
    store.append("topic", b"synced again")
    end = store.store.topic("topic").end_offset
    store = open_store(written, boot_id=BOOTS[3])
    assert store.store.topic("topic").end_offset == end


def test_a_topic_on_disk_that_is_to_be_in_memory_stays_on_disk(open_store, tmp_path):
    store = open_store()
    store.append("topic", b"on disk")
    store.close()
    memory = PrefixRule(prefix="", durability=Durability.MEMORY)
    store = open_store(tiny(tmp_path / "data", topics=(memory,)))
    store.append("topic", b"as well")
    store.append("other", b"in memory")
    store = open_store()
    assert store.payloads("topic") == [b"on disk", b"as well"]
    assert not store.store.topic("other").exists


def test_after_a_clean_stop_the_journal_is_not_read(open_store, monkeypatch):
    store = open_store()
    store.append("topic", b"x")
    store.close()
    monkeypatch.setattr(journal_scan, "read_frames", None)
    assert open_store().payloads("topic") == [b"x"]


def test_numbers_of_commits_go_on_above_all_there_were(open_store):
    store = open_store()
    for _ in range(5):
        store.append("topic", b"x")
    store = open_store()
    store.append("topic", b"y")
    store.crash()
    numbers = [frame.sequence for _, _, frame in Journal(store).frames()]
    assert max(numbers) == 6


# Unfinished writes


def test_a_commit_that_was_not_finished_is_dropped(damaged):
    def tear(found):
        path, position, _ = found.frames()[-1]
        data = path.read_bytes()
        path.write_bytes(data[: position + FRAME_HEAD_BYTES + 70] + bytes(len(data) - position))

    store, found = damaged([("topic", b"one"), ("topic", b"two" * 100)], tear)
    assert store.payloads("topic") == [b"one"]
    assert "never acknowledged: dropped" in store.reports[0]
    assert found.quarantined() == []
    assert ends(store, "topic") == [7]
    store.append("topic", b"three")
    assert store.payloads("topic") == [b"one", b"three"]


def test_of_a_last_commit_only_what_is_damaged_is_dropped(open_store):
    store = open_store()
    store.append("a", b"first")
    handles = [store.store.topic(name) for name in ("a", "b", "c")]
    store.store.append({topic: [pack_record(b"last")] for topic in handles}, lambda: None)
    store.runner.run()
    store.crash()
    found = Journal(store)
    path, position, frame = found.frames()[-1]
    # The frame has the name of a again and its append, then creation and append of b and of c.
    kinds = [(entry.kind, entry.topic_id) for entry in frame.entries]
    assert kinds[2:4] == [(journal.CREATE, 2), (journal.APPEND, 2)]
    data_at = position + FRAME_HEAD_BYTES
    data_at += (
        sum(len(encode_entry(*entry, seed=0)) for entry in frame.entries[:3]) + ENTRY_HEADER_BYTES
    )
    flip(path, data_at + 5)
    store = open_store()
    assert store.payloads("a") == [b"first", b"last"]
    assert store.payloads("b") == []
    assert store.payloads("c") == [b"last"]


def test_an_append_with_a_number_is_stored_whole_or_not_at_all(open_store):
    store = open_store()
    store.append("topic", b"before")
    payloads = [b"%04d" % number for number in range(1300)]
    assert not store.append_once("topic", "p", 1, *payloads).duplicate
    store.crash()
    found = Journal(store)
    path, position, frame = found.frames()[-1]
    pieces = [len(encode_entry(*entry, seed=0)) for entry in frame.entries]
    assert [entry.kind for entry in frame.entries] == [journal.NAMES, *[journal.APPEND] * 3]
    names, *pieces = pieces
    whole = path.read_bytes()
    for cut in (pieces[0] + 1000, pieces[0] + pieces[1] + 10, sum(pieces) - 1):
        cut += names
        at = position + FRAME_HEAD_BYTES + cut
        path.write_bytes(whole[:at] + bytes(len(whole) - at))
        copy = store.layout.root.parent / f"{cut}"
        shutil.copytree(store.layout.root, copy)
        again = open_store(tiny(copy))
        assert again.payloads("topic") == [b"before"]
        assert not again.append_once("topic", "p", 1, *payloads).duplicate
        assert again.payloads("topic") == [b"before", *payloads]


def test_what_an_earlier_use_left_in_a_torn_frame_brings_no_topic_back(open_store):
    store = open_store()
    store.append("gone", b"x" * 200)  # creates the topic at the beginning of the first file
    store.destroy("gone")
    end = store.store.topic("gone").end
    for _ in range(3):  # until that file is used again
        store.settle()
        store.append("other", b"y" * 200)
    store.crash()
    found = Journal(store)
    path, position, frame = found.frames()[-1]
    stale = encode_entry(
        journal.CREATE,
        1,
        0,
        0,
        0,
        1,
        recovery.msgspec.msgpack.encode([b"gone", 1, b"synced"]),
        b"",
        seed=frame.seed,
    )
    at = position + FRAME_HEAD_BYTES
    data = path.read_bytes()
    path.write_bytes(data[:at] + stale.ljust(frame.end - at, b"\0") + data[frame.end :])
    store = open_store()
    assert not store.store.topic("gone").exists
    assert store.store.topic("gone").end[1:] == end[1:]


def test_what_an_earlier_use_left_behind_a_closed_file_is_no_damage(open_store):
    store = open_store()
    store.applying = False
    store.append("topic", b"one")
    store.rotate()
    store.append("topic", b"two")
    store.append("topic", b"three")
    store.crash()
    path, position, frame = Journal(store).frames()[0]
    end = position + journal.frame_bytes(sum(len(encode_entry(*e, seed=0)) for e in frame.entries))
    data = bytearray(path.read_bytes())
    seed = journal.entry_seed(journal_reading.read_header(path).generation, frame.sequence + 1)
    stale = encode_entry(*frame.entries[-1], seed=seed)
    data[end + FRAME_HEAD_BYTES : end + FRAME_HEAD_BYTES + len(stale)] = stale
    path.write_bytes(data)
    assert [type(item) for item in journal_reading.read_frames(path)] == [
        journal_reading.Frame,
        journal_reading.Problem,
    ]
    store = open_store()
    assert store.reports == []
    assert store.payloads("topic") == [b"one", b"two", b"three"]


# Damage


COMMITS = [("a", b"a1"), ("b", b"b1"), ("a", b"a2"), ("a", b"a3"), ("b", b"b2")]


def test_damaged_data_is_kept_aside_and_its_offsets_are_not_used_again(damaged):
    def flip_data(found):
        path, position, frame = found.frames()[2]
        names = len(encode_entry(*frame.entries[0], seed=0))
        flip(path, position + FRAME_HEAD_BYTES + names + ENTRY_HEADER_BYTES + 5)

    store, found = damaged(COMMITS, flip_data)
    assert store.payloads("a") == [b"a1", b"a3"]
    assert store.payloads("b") == [b"b1", b"b2"]
    assert any("damage: kept in quarantine" in report for report in store.reports)
    assert any('"a": 1 records from offset 6 to 12 are lost' in one for one in store.reports)
    assert b"a" in found.quarantined()[0]
    assert ends(store, "a", "b") == [18, 12]  # the lost records are known, so no topic jumps
    assert store.store.locate_ordinal(store.store.topic("a"), 1).offset == 12


def test_a_lost_frame_makes_every_topic_jump_whose_end_no_later_entry_proves(damaged):
    store, found = damaged(COMMITS, lambda found: found.lose(3))
    assert store.payloads("a") == [b"a1", b"a2"]
    assert store.payloads("b") == [b"b1", b"b2"]
    assert len(found.quarantined()) == 1
    assert ends(store, "a", "b") == [12 + JUMP, 12]
    # Clients may know of records in a topic whose name is lost.
    assert store.store.topic("new").end_offset >= JUMP
    store.append("a", b"a4")
    assert store.payloads("a") == [b"a1", b"a2", b"a4"]
    assert store.payloads("a", 18) == [b"a4"]


def test_a_frame_is_found_by_its_foot_when_its_head_is_damaged(damaged):
    store, found = damaged(COMMITS, lambda found: flip(*found.frames()[3][:2]))
    assert store.payloads("a") == [b"a1", b"a2", b"a3"]
    assert ends(store, "a", "b") == [18, 12]
    assert [report for report in store.reports if "nothing is lost" in report]
    assert found.quarantined() == []


def test_a_damaged_frame_that_made_a_topic_leaves_its_offsets_unused(damaged):
    def lose_first(found):
        found.lose(0)

    store, _ = damaged([("lost", b"x" * 100), ("a", b"a1"), ("a", b"a2")], lose_first)
    # The next commit names the topic again. Its record is lost, and its offsets are not used again.
    assert store.payloads("lost") == []
    assert store.store.topic("lost").end_offset > 104
    assert store.payloads("a") == [b"a1", b"a2"]


def test_records_behind_a_lost_create_are_kept_under_their_name(damaged):
    commits = [("topic", b"1"), ("topic", b"2"), ("topic", b"3")]
    store, _ = damaged(commits, lambda found: found.lose(0))
    assert store.payloads("topic") == [b"2", b"3"]
    assert store.store.topic("topic").end_offset == 15
    assert any("1 records from offset 0 to 5 are lost" in report for report in store.reports)


def test_records_that_nothing_names_are_kept_under_the_number_of_their_topic(damaged):
    commits = [("topic", b"1"), ("topic", b"2"), ("topic", b"3"), ("topic", b"4")]
    store, _ = damaged(commits, lambda found: found.lose(0, 1))
    assert not store.store.topic("topic").exists
    assert store.payloads("$lost/1") == [b"3", b"4"]
    assert any('kept in "$lost/1"' in report for report in store.reports)
    store.append("topic", b"again")
    assert store.store.topic("topic").end_offset > JUMP
    assert store.payloads("topic") == [b"again"]
    assert store.payloads("$lost/1") == [b"3", b"4"]


def test_tombstones_jump_when_nobody_knows_what_was_lost(open_store):
    store = open_store()
    store.append("gone", b"x" * 50)
    store.destroy("gone")
    store.settle()
    end = store.store.topic("gone").end_offset
    store.append("gone", b"a new life that will be lost")
    store.append("other", b"x")
    store.append("other", b"y")
    store.append("other", b"z")
    store.crash()
    found = Journal(store)
    sequences = [frame.sequence for _, _, frame in found.frames()]
    lost = sequences.index(3)
    found.lose(lost, lost + 1)  # the second frame names the topic again
    store = open_store()
    assert not store.store.topic("gone").exists
    assert store.store.topic("gone").end_offset == end + JUMP


def test_the_last_frame_may_be_damaged_without_anyone_jumping(damaged):
    def tear(found):
        path, position, _ = found.frames()[-1]
        data = path.read_bytes()
        path.write_bytes(
            data[:position]
            + bytes(FRAME_HEAD_BYTES)
            + data[position + FRAME_HEAD_BYTES : position + 400]
            + bytes(len(data) - position - 400)
        )

    store, found = damaged(COMMITS, tear)
    assert store.payloads("b") == [b"b1"]
    assert "never acknowledged: dropped" in store.reports[0]
    assert ends(store, "a", "b") == [18, 6]
    assert found.quarantined() == []


@pytest.mark.parametrize("position", journal.HEADER_POSITIONS)
def test_a_damaged_file_header_costs_nothing_and_is_reported(damaged, position):
    store, _ = damaged(COMMITS, lambda found: flip(found.frames()[0][0], position + 12))
    assert store.payloads("a") == [b"a1", b"a2", b"a3"]
    assert ends(store, "a", "b") == [18, 12]
    assert any("a copy of the file's header is damaged" in report for report in store.reports)


def test_without_both_headers_the_catalogue_knows_the_generation(damaged):
    def flip_both(found):
        path = found.frames()[0][0]
        for position in journal.HEADER_POSITIONS:
            flip(path, position + 12)

    store, found = damaged(COMMITS, flip_both)
    assert store.payloads("a") == [b"a1", b"a2", b"a3"]
    assert ends(store, "a", "b") == [18, 12]
    # The file is kept, and another one takes its place, so the next start has another generation.
    assert len(found.quarantined()) == 1


def test_a_file_without_headers_is_no_riddle_for_the_next_start(open_store):
    store = open_store()
    for commit in COMMITS:
        store.append(*commit)
    store.crash()
    path = Journal(store).frames()[0][0]
    path.write_bytes(bytes(journal.FRAMES_POSITION) + path.read_bytes()[journal.FRAMES_POSITION :])
    assert open_store().payloads("a") == [b"a1", b"a2", b"a3"]
    store = open_store()
    assert store.reports == []
    assert ends(store, "a", "b") == [18, 12]


def test_frames_of_an_earlier_use_do_not_vouch_for_a_file_without_headers(open_store):
    store = open_store()
    for number in range(40):
        store.append("topic", b"%d" % number)
    store.settle()
    store.rotate()
    store.append("topic", b"in a file that was used before")
    end = ends(store, "topic")[0]
    store.crash()
    path, position, frame = Journal(store).frames()[-1]
    assert position == journal.FRAMES_POSITION
    path.write_bytes(bytes(frame.end) + path.read_bytes()[frame.end :])
    store = open_store()
    assert any("neither copy of its header can be read" in report for report in store.reports)
    assert ends(store, "topic")[0] > end


def test_a_file_of_which_nothing_can_be_believed_is_kept_and_all_topics_jump(damaged):
    def spoil(found):
        path = found.frames()[0][0]
        path.write_bytes(b"\xaa" * path.stat().st_size)

    store, found = damaged(COMMITS, spoil)
    assert found.quarantined() == [b"\xaa" * 65_536]
    assert any("neither copy of its header can be read" in report for report in store.reports)
    assert store.store.topic("a").end_offset >= JUMP
    store.append("a", b"goes on")
    assert store.payloads("a") == [b"goes on"]


def test_the_newest_journal_file_may_not_vanish(open_store):
    store = open_store()
    for commit in COMMITS:
        store.append(*commit)
    store.settle()
    store.append("a", b"in the newest file")
    end = store.store.topic("a").end_offset
    store.crash()
    Journal(store).frames()[-1][0].unlink()
    store = open_store()
    assert any("the file is missing" in report for report in store.reports)
    assert store.store.topic("a").end_offset > end + JUMP // 2
    assert store.payloads("a") == [b"a1", b"a2", b"a3"]


def test_a_journal_file_that_is_missing_is_noticed(open_store):
    store = open_store()
    store.applying = False
    for number in range(2):
        store.append("a", b"%d" % number)
        store.append("b", b"%d" % number)
        store.rotate()
    store.append("a", b"2")
    store.append("a", b"3")
    before = ends(store, "a", "b")
    store.crash()
    Journal(store).frames()[0][0].unlink()
    store = open_store()
    assert any("missing" in report for report in store.reports)
    assert store.payloads("b") == [b"1"]
    # The next file names the topics again, and its entries prove their ends, except that of the newest topic.
    assert all(new >= old for new, old in zip(ends(store, "a", "b"), before, strict=True))
    assert store.store.topic("new").end_offset >= JUMP
    assert not any("the catalogue is rebuilt" in report for report in store.reports)


def test_written_topics_jump_after_a_crash_of_the_machine_also_where_an_entry_is_damaged(
    open_store,
):
    store = open_store(boot_id=BOOTS[0])
    for name in ("written/w", "a", "a", "written/w", "a", "a"):
        store.append(name, b"x")
    store.append("written/w", b"seen, and lost with the power")
    end = ends(store, "written/w")[0]
    store.crash()
    found = Journal(store)
    path, position, _ = found.frames()[-1]
    found.lose(2)
    path.write_bytes(path.read_bytes()[:position] + bytes(65_536 - position))
    store = open_store(boot_id=BOOTS[1])
    assert ends(store, "written/w")[0] > end


def test_a_topic_called_like_lost_ones_leaves_a_tombstone(open_store):
    store = open_store()
    store.append("$lost/7", b"first life")
    store.destroy("$lost/7")
    end = store.store.topic("$lost/7").end
    store = open_store()
    store.append("$lost/7", b"second life")
    assert store.store.topic("$lost/7").epoch > end.epoch
    assert store.store.topic("$lost/7").start_offset == end.offset


def test_a_start_that_was_killed_forgets_no_name(open_store, monkeypatch):
    store = open_store()
    store.applying = False
    handles = [store.store.topic(name) for name in ("one", "two")]
    store.store.append({topic: [pack_record(b"x" * 700)] for topic in handles}, lambda: None)
    store.runner.run()
    store.rotate()
    for number in range(3):
        store.append("one", b"%d" % number)
    store.append("two", b"y")
    store.crash()
    path, position, _ = Journal(store).frames()[0]
    flip(path, position + FRAME_HEAD_BYTES + 9)  # the entry that creates "one"
    apply, calls = recovery.Applier.apply, []

    def killed(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return apply(*args)

    with monkeypatch.context() as patch:
        patch.setattr(recovery.Applier, "apply", killed)
        with pytest.raises(KeyboardInterrupt):
            open_store()
    store = open_store()
    assert store.payloads("one") == [b"x" * 700, b"0", b"1", b"2"]
    assert store.payloads("two") == [b"x" * 700, b"y"]


def test_files_of_others_in_the_journal_are_left_alone(open_store):
    store = open_store()
    store.append("topic", b"x")
    store.crash()
    other = store.layout.journal / "0 copy.journal"
    other.write_bytes(b"someone's")
    store = open_store()
    assert store.reports == []
    assert store.payloads("topic") == [b"x"]
    assert other.read_bytes() == b"someone's"


def test_a_start_that_was_killed_forgets_no_jump(open_store, monkeypatch):
    store = open_store()
    for commit in COMMITS:
        store.append(*commit)
    store.crash()
    found = Journal(store)
    found.lose(3)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_jump", killed)
        with pytest.raises(KeyboardInterrupt):
            open_store()
    store = open_store()
    assert ends(store, "a", "b") == [12 + JUMP, 12 + JUMP]
    assert store.payloads("a") == [b"a1", b"a2"]


# The first start


def test_a_first_start_that_was_killed_is_no_damage(open_store, tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    Catalogue.open(path).close()  # a file without tables
    store = open_store()
    assert store.reports == []
    store.append("topic", b"x")
    assert store.read("topic") == [(5, b"x")]


def test_directories_that_a_crash_took_are_made_again(open_store):
    store = open_store()
    store.append("topic", b"x")
    store.close()
    (store.layout.segments / "03").rmdir()
    (store.layout.segments / "00").rmdir()
    store = open_store()
    for number in range(6):
        store.append(f"{number}", b"x")
    store.settle()
    assert store.payloads("5") == [b"x"]


def test_files_that_are_not_ours_stay(open_store):
    store = open_store()
    store.close()
    foreign = [store.layout.segments / "00" / name for name in ("notes.log", "x-1.idx", "a.txt")]
    for path in foreign:
        path.write_bytes(b"someone's")
    open_store()
    assert all(path.exists() for path in foreign)


def test_a_directory_that_cannot_be_used_is_said_in_words(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataDirectoryError, match="cannot be used"):
        Layout(tmp_path / "file").make(Disk())
