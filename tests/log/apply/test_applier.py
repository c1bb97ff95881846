"""The applier: any part of the journal, applied once or again, in one step or many, gives the same log."""

import errno
import random
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path

import msgspec
import pytest

from headrace.config.settings import TopicRule
from headrace.log.apply import applier as applier_module
from headrace.log.apply.applier import Applier
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit import journal
from headrace.log.commit.journal import CreateEntry, Destroy, Producer, Recent
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.read.index import decode_header
from headrace.log.read.segment import Segments
from headrace.log.records import pack_record
from headrace.model import Durability
from tests.fakes.disk import (
    CatalogueCommit,
    DiskModel,
    FailingDisk,
    RecordingDisk,
    SyncAll,
    Unlink,
)

RULE = TopicRule(Durability.SYNCED, 0.0, 0, 100)


class Directory:
    """A data directory and its applier, without a store."""

    def __init__(self, path: Path, disk: Disk | None = None, rule: TopicRule = RULE) -> None:
        self.layout = Layout(path)
        self.layout.make(Disk())
        self.disk = disk or Disk()
        self.catalogue = Catalogue.create(path)
        self.rule = rule
        self.applied = 0
        self._applier = self._applier_on(self.disk)

    def apply(self, *entries: journal.Entry) -> list[str]:
        self.applied += 1
        return self._applier.apply(entries, self.applied)

    def reopen(self) -> "Directory":
        """Reopen the directory as another process does."""
        self.catalogue = Catalogue.open(self.layout.root)
        self._applier = self._applier_on(self.disk)
        return self

    def _applier_on(self, disk: Disk) -> Applier:
        return Applier(disk, self.layout, self.catalogue, lambda _: self.rule)

    def rows(self) -> dict[str, list[tuple]]:
        """Return the rows of the catalogue, without the position up to which the journal is applied."""
        catalogue = self.catalogue
        meta = msgspec.structs.replace(catalogue.meta(), applied=0)
        return {
            "topics": list(catalogue.topics()),
            "segments": list(catalogue.all_segments()),
            "tombstones": sorted(catalogue.tombstones()),
            "producers": list(catalogue.producers()),
            "meta": [meta],
        }

    def files(self) -> dict[str, bytes]:
        """Return the content of the files that the catalogue lists."""
        found = {}
        for segment in self.catalogue.all_segments():
            path = self.layout.segment(segment.topic_id, segment.base)
            for file in (path, path.with_suffix(".idx")):
                found[file.name] = file.read_bytes()
        return found

    def names(self) -> set[str]:
        return {file.path.name for file in self.layout.files()}

    def records(self) -> dict[bytes, list[tuple[int, int, bytes]]]:
        """Return offset, ordinal and payload of every readable record, by topic."""
        files = Segments(self.layout, 10)
        found = {}
        for topic in self.catalogue.topics():
            of_topic = found[topic.name] = []
            for segment in self.catalogue.segments(topic.id):
                block = files.read(segment, segment.base, 1 << 30)
                assert block.damaged == []
                for run in block.runs:
                    at, ordinal = 0, run.ordinal
                    while at < len(run.data):
                        stop = at + 4 + int.from_bytes(run.data[at : at + 4])
                        if run.offset + at >= topic.start_offset:
                            of_topic.append((run.offset + at, ordinal, run.data[at + 4 : stop]))
                        at, ordinal = stop, ordinal + 1
        files.close()
        return found


@pytest.fixture
def directory(tmp_path):
    made = Directory(tmp_path / "data")
    yield made
    made.catalogue.close()


class Writer:
    """Makes the entries of one life of a topic."""

    def __init__(self, topic_id: int, name: bytes = b"topic", offset: int = 0, ordinal: int = 0):
        self.id, self.name = topic_id, name
        self.offset, self.ordinal, self.ms = offset, ordinal, 1000
        self.epoch = 100 + topic_id

    def create(self) -> journal.Entry:
        extra = msgspec.msgpack.encode(CreateEntry(self.name, self.epoch, b"synced"))
        return self._entry(journal.CREATE, 0, extra)

    def append(self, *payloads: bytes, extra: bytes = b"") -> journal.Entry:
        data = b"".join(map(pack_record, payloads))
        entry = self._entry(journal.APPEND, len(payloads), extra, data)
        self.offset, self.ordinal = entry.end, self.ordinal + len(payloads)
        return entry

    def append_once(self, producer: bytes, number: int, *payloads: bytes) -> journal.Entry:
        return self.append(*payloads, extra=msgspec.msgpack.encode(Producer(producer, number)))

    def lose(self, *payloads: bytes) -> journal.Entry:
        entry = self.append(*payloads)
        return entry._replace(kind=journal.LOST, data=bytes(len(entry.data)))

    def trim(self) -> journal.Entry:
        """Make an entry that trims up to the present end."""
        return self._entry(journal.TRIM, 0, b"")

    def destroy(self) -> journal.Entry:
        return self._entry(journal.DESTROY, 0, msgspec.msgpack.encode(Destroy(self.epoch)))

    def next_life(self, topic_id: int) -> "Writer":
        return Writer(topic_id, self.name, self.offset, self.ordinal)

    def _entry(self, kind: int, count: int, extra: bytes, data: bytes = b"") -> journal.Entry:
        return journal.Entry(kind, self.id, self.offset, self.ordinal, count, self.ms, extra, data)


def some_entries(seed: int, count: int = 40) -> list[journal.Entry]:
    """Return a journal of several topics in which every kind of entry occurs."""
    chance = random.Random(seed)
    lives: dict[int, Writer] = {}
    entries: list[journal.Entry] = []
    next_id = 1
    for number in range(count):
        name = b"topic/%d" % chance.randrange(3)
        life = next((one for one in lives.values() if one.name == name), None)
        what = chance.choices(["append", "once", "trim", "destroy"], [8, 2, 1, 1])[0]
        if life is None or what == "destroy":
            if life is not None:
                entries.append(life.destroy())
                del lives[life.id]
                life = life.next_life(next_id)
            else:
                life = Writer(next_id, name)
            lives[next_id] = life
            next_id += 1
            entries.append(life.create())
        life.ms += chance.choice([0, 0, 150])
        payloads = [chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(1, 4))]
        if what == "once":
            entries.append(life.append_once(b"p%d" % chance.randrange(2), number, *payloads))
        elif what == "trim":
            entries.append(life.trim())
        else:
            entries.append(life.append(*payloads))
    return entries


def test_records_become_segments_with_an_index(directory):
    topic = Writer(7, b"name")
    directory.apply(topic.create(), topic.append(b"one", b"two"), topic.append(b"three"))
    assert directory.records() == {b"name": [(0, 0, b"one"), (7, 1, b"two"), (14, 2, b"three")]}
    (segment,) = directory.catalogue.segments(7)
    assert (segment.base, segment.end, segment.first_ordinal, segment.end_ordinal) == (0, 23, 0, 3)
    header = decode_header(directory.layout.index(7, 0).read_bytes())
    assert header == (7, topic.epoch, 0, 0, "name")


def test_a_segment_holds_nothing_but_records(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append(b"one"))
    directory.apply(topic.append(b"two"))
    written = directory.layout.segment(1, 0).read_bytes()
    assert written == pack_record(b"one") + pack_record(b"two")


@pytest.mark.parametrize("seed", range(12))
def test_any_prefix_applied_twice_is_as_if_applied_once(tmp_path, seed):
    entries = some_entries(seed)
    cut = random.Random(seed).randrange(len(entries))
    once, twice = Directory(tmp_path / "once"), Directory(tmp_path / "twice")
    for directory in (once, twice):
        directory.apply(*entries[:cut])
    files, rows = twice.files(), twice.rows()
    twice.apply(*entries[:cut])
    assert (twice.files(), twice.rows()) == (files, rows) == (once.files(), once.rows())
    for directory in (once, twice):
        directory.apply(*entries[cut:])
        directory.catalogue.close()
    again = Directory(tmp_path / "again")
    again.apply(*entries[:cut])
    again.apply(*entries)
    assert (again.files(), again.rows()) != ({}, {})
    assert again.records() == once.reopen().records() == twice.reopen().records()
    for directory in (once, twice, again):
        directory.catalogue.close()


@pytest.mark.parametrize("seed", range(6))
def test_it_does_not_matter_in_how_many_pieces_entries_come(tmp_path, seed):
    entries = some_entries(seed)
    whole = Directory(tmp_path / "whole")
    whole.apply(*entries)
    pieces = Directory(tmp_path / "pieces")
    for entry in entries:
        pieces.apply(entry)
    assert pieces.records() == whole.records()
    for part in ("topics", "tombstones", "producers", "meta"):
        assert pieces.rows()[part] == whole.rows()[part]
    assert whole.names() == set(whole.files()), "nothing is left that nobody names"
    assert pieces.names() == set(pieces.files())
    whole.catalogue.close()
    pieces.catalogue.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_attempt_that_failed_anywhere_is_made_good_by_the_next(tmp_path, error):
    first = Writer(1, b"a")
    second = Writer(2, b"b")
    before = [first.create(), first.append(b"x" * 40), second.create(), second.append(b"gone")]
    after = [second.destroy()]
    for payload in (b"y" * 70, b"z" * 120, b"in a segment of its own"):
        first.ms += 200
        after.append(first.append(payload))
    sound = Directory(tmp_path / "sound")
    sound.apply(*before)
    sound.apply(*after)
    for number in count():
        disk = _FailOnce(error)
        directory = Directory(tmp_path / f"{error}-{number}", disk)
        directory.apply(*before)
        disk.left = number
        failed = _fails(directory, after)
        assert failed == (disk.left < 0)
        assert disk.open_files == 0
        directory.applied = 1
        if number % 2:
            # Another process applies the entries again, not the one that failed.
            directory.catalogue.close()
            directory.reopen()
        directory.apply(*after)
        assert directory.files() == sound.files()
        assert directory.rows() == sound.rows()
        directory.catalogue.close()
        if not failed:
            break
    assert number > 20
    sound.catalogue.close()


class _FailOnce(FailingDisk):
    """Disk that fails once, at the operation after `left` others."""

    def __init__(self, error: int) -> None:
        super().__init__(self._fail_once)
        self._error = error
        self.left = sys.maxsize

    def _fail_once(self, _: object) -> OSError | None:
        self.left -= 1
        return OSError(self._error, "injected") if self.left == -1 else None


def _fails(directory: Directory, entries: list[journal.Entry]) -> bool:
    try:
        directory.apply(*entries)
    except OSError:
        return True
    return False


def test_files_are_not_touched_again_if_the_disk_is_full_after_the_commit(tmp_path, monkeypatch):
    """SQLite copies a committed transaction from its log into its file, which may need more room."""
    disk, writer = RecordingDisk(), Writer(1)
    directory = Directory(tmp_path / "data", disk)
    directory.apply(writer.create(), writer.append(b"before"))
    later = writer.append(b"after")
    begin = Catalogue.transaction

    @contextmanager
    def full(catalogue: Catalogue) -> Iterator[None]:
        with begin(catalogue):
            yield
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "transaction", full)
        with pytest.raises(sqlite3.OperationalError):
            directory.apply(later)
    stored, done = directory.records(), len(disk.operations)
    assert [payload for _, _, payload in stored[b"topic"]] == [b"before", b"after"]
    # A kill during the next attempt must find the records, because the catalogue says that they are applied.
    directory.apply(later)
    assert disk.operations[done:] == []
    assert directory.records() == stored
    directory.catalogue.close()


@pytest.mark.parametrize("topics", [1, 20, applier_module.SYNC_EACH_MAX])
def test_everything_is_on_disk_before_the_catalogue_says_so(tmp_path, topics):
    disk = RecordingDisk()
    with disk.record_catalogue():
        directory = Directory(tmp_path / "data", disk)
        writers = [Writer(number, b"%d" % number) for number in range(1, topics + 1)]
        for _ in range(2):
            entries = []
            for writer in writers:
                entries += [writer.create(), writer.append(b"x" * 60)]
            directory.apply(*entries)
        directory.apply(writers[0].destroy())
        directory.catalogue.close()
    model = DiskModel(tmp_path / "data")
    commits = unlinked = 0
    for operation in disk.operations:
        if isinstance(operation, CatalogueCommit):
            assert model.is_safe
            commits += 1
        if isinstance(operation, Unlink):
            assert commits == 4, "only what the catalogue names no more is deleted"
            unlinked += 1
        model.do(operation)
    assert commits == 4
    assert unlinked == 2
    assert (SyncAll() in disk.operations) == (2 * topics > applier_module.SYNC_EACH_MAX)


def test_segments_roll_by_bytes(directory):
    topic = Writer(1)
    directory.apply(topic.create())
    for number in range(10):
        topic.ms += 200
        directory.apply(topic.append(b"%d" % number * 40))
    sizes = [segment.end - segment.base for segment in directory.catalogue.segments(1)]
    assert len(sizes) > 3
    assert all(RULE.segment_bytes <= size < RULE.segment_bytes + 44 for size in sizes[:-1])
    assert len(directory.records()[b"topic"]) == 10


def test_segments_roll_inside_one_batch_too(directory):
    topic = Writer(1)
    entries = [topic.create()]
    for number in range(10):
        topic.ms += 200
        entries.append(topic.append(b"%d" % number * 40))
    directory.apply(*entries)
    segments = directory.catalogue.segments(1)
    assert len(segments) > 3
    for before, after in pairwise(segments):
        assert (before.end, before.end_ordinal) == (after.base, after.first_ordinal)
        assert before.last_ms < after.first_ms


def test_segments_roll_by_age_at_a_tenth_of_the_retention(directory):
    directory.rule = RULE._replace(segment_bytes=1 << 20, retention_age_s=100.0)
    topic = Writer(1)
    directory.apply(topic.create())
    for _ in range(30):
        topic.ms += 1000
        directory.apply(topic.append(b"x"))
    segments = directory.catalogue.segments(1)
    assert len(segments) == 3
    assert all(segment.last_ms - segment.first_ms <= 10_000 for segment in segments)


def test_segments_roll_at_a_tenth_of_the_bytes_that_are_kept(directory):
    directory.rule = RULE._replace(segment_bytes=1 << 20, retention_bytes=1000)
    topic = Writer(1)
    directory.apply(topic.create())
    for _ in range(30):
        topic.ms += 1000
        directory.apply(topic.append(b"x" * 46))
    sizes = [segment.end - segment.base for segment in directory.catalogue.segments(1)]
    assert set(sizes[:-1]) == {100}


def test_a_stretch_without_records_starts_a_new_segment(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append(b"one"))
    lost = topic.append(b"lost")
    (damage,) = directory.apply(topic.append(b"three"))
    assert '"topic": 1 records from offset 7 to 15 are lost' in damage
    assert directory.records()[b"topic"] == [(0, 0, b"one"), (lost.end, 2, b"three")]
    assert [segment.base for segment in directory.catalogue.segments(1)] == [0, 15]


def test_offsets_of_lost_records_are_not_used_again(directory):
    topic = Writer(1)
    (damage,) = directory.apply(topic.create(), topic.append(b"one"), topic.lose(b"two", b"three"))
    assert '"topic": 2 records from offset 7 to 23 are lost' in damage
    row = directory.catalogue.topic(b"topic")
    assert (row.end_offset, row.end_ordinal) == (topic.offset, topic.ordinal)
    assert directory.apply(topic.append(b"four")) == []
    (damage,) = directory.apply(topic.lose(b"five"))
    assert directory.apply(topic.append(b"six")) == []
    assert [one[2] for one in directory.records()[b"topic"]] == [b"one", b"four", b"six"]


def test_what_is_trimmed_is_deleted_a_segment_at_a_time(directory):
    topic = Writer(1)
    directory.apply(topic.create())
    for number in range(6):
        topic.ms += 200
        directory.apply(topic.append(b"%d" % number * 60))
        if number == 3:
            trim = topic.trim()
    before = directory.names()
    directory.apply(trim)
    assert [one[2][:1] for one in directory.records()[b"topic"]] == [b"4", b"5"]
    assert directory.names() == set(directory.files())
    assert directory.names() < before
    row = directory.catalogue.topic(b"topic")
    assert (row.start_offset, row.start_ordinal) == (trim.offset, trim.ordinal)


def test_what_was_trimmed_before_it_is_applied_is_never_in_a_file(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append(b"one"), topic.append(b"two"), topic.trim())
    assert directory.names() == set()
    row = directory.catalogue.topic(b"topic")
    assert row.start_offset == row.end_offset == topic.offset
    assert row.start_ordinal == row.end_ordinal == 2
    directory.apply(topic.append(b"three"), trim := topic.trim(), topic.append(b"four"))
    assert [one[2] for one in directory.records()[b"topic"]] == [b"four"]
    [segment] = directory.catalogue.segments(1)
    assert segment.base == trim.offset


def test_a_trim_past_an_end_that_did_not_survive_leaves_no_topic_inside_out(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append(b"one"))
    topic.append(b"lost with the machine")
    directory.apply(topic.trim())
    row = directory.catalogue.topic(b"topic")
    assert row.start_offset == row.end_offset == topic.offset
    assert row.start_ordinal == row.end_ordinal == topic.ordinal


def test_a_destroyed_topic_leaves_a_tombstone_and_no_file(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append(b"x" * 500))
    directory.apply(topic.append(b"y"), topic.destroy())
    assert directory.names() == set()
    assert directory.catalogue.topic(b"topic") is None
    grave = directory.catalogue.tombstone(b"topic")
    assert (grave.epoch, grave.end_offset, grave.end_ordinal) == (topic.epoch, topic.offset, 2)


def test_a_new_life_takes_the_tombstone_away(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append(b"old"), topic.destroy())
    new = topic.next_life(2)
    directory.apply(new.create(), new.append(b"new"))
    assert directory.catalogue.tombstone(b"topic") is None
    assert directory.records() == {b"topic": [(topic.offset, 1, b"new")]}


def test_old_tombstones_fold_into_a_floor_above_them_all(directory, monkeypatch):
    monkeypatch.setattr(applier_module, "TOMBSTONES_MAX", 3)
    ends = []
    for number in range(1, 7):
        topic = Writer(number, b"%d" % number)
        topic.ms += number
        directory.apply(topic.create(), topic.append(b"x" * 10 * (10 - number)), topic.destroy())
        ends.append((topic.offset, topic.epoch))
    assert [row.name for row in directory.catalogue.tombstones()] == [b"4", b"5", b"6"]
    meta = directory.catalogue.meta()
    assert meta.floor_offset == max(offset for offset, _ in ends[:3])
    assert meta.floor_ordinal == 1
    assert meta.floor_epoch == max(epoch for _, epoch in ends[:3])


def test_numbers_of_topics_are_never_given_twice(directory):
    topic = Writer(5)
    directory.apply(topic.create(), topic.append(b"x"))
    assert directory.catalogue.meta().next_topic_id == 6
    directory.apply(topic.destroy())
    assert directory.catalogue.meta().next_topic_id == 6


def test_what_is_applied_never_goes_back(directory):
    directory.applied = 41
    directory.apply()
    directory.applied = 10
    directory.apply()
    assert directory.catalogue.meta().applied == 42


def recent(directory: Directory, producer: bytes) -> tuple[int, list]:
    row = directory.catalogue.producer(b"topic", producer)
    return row.last, msgspec.msgpack.decode(row.recent, type=Recent)


def test_a_producer_is_kept_with_its_last_few_numbers(directory):
    topic = Writer(1)
    directory.apply(topic.create())
    ends = []
    for number in range(1, 12):
        directory.apply(topic.append_once(b"p", number, b"x"))
        ends.append((number, topic.offset))
    assert recent(directory, b"p") == (11, ends[-8:])
    directory.apply(topic.destroy())
    assert recent(directory, b"p") == (11, ends[-8:])


def test_a_number_whose_record_is_lost_is_still_known(directory):
    topic = Writer(1)
    lost = topic.append_once(b"p", 4, b"x")
    directory.apply(topic.create(), lost._replace(kind=journal.LOST, data=bytes(len(lost.data))))
    assert recent(directory, b"p") == (4, [(4, topic.offset)])


def test_an_append_in_pieces_counts_with_its_last(directory):
    topic = Writer(1)
    pieces = [msgspec.msgpack.encode(Producer(b"p", 9, left)) for left in (1, 0)]
    directory.apply(topic.create(), topic.append(b"first", extra=pieces[0]))
    assert directory.catalogue.producer(b"topic", b"p") is None
    directory.apply(topic.append(b"second", extra=pieces[1]))
    assert recent(directory, b"p") == (9, [(9, topic.offset)])


def test_a_producer_that_was_silent_for_its_lease_is_forgotten(directory):
    topic = Writer(1)
    directory.apply(topic.create(), topic.append_once(b"silent", 1, b"x"))
    topic.ms += applier_module.PRODUCER_LEASE_MS
    directory.apply(topic.append_once(b"lively", 1, b"x"))
    assert {row.producer for row in directory.catalogue.producers()} == {b"silent", b"lively"}
    topic.ms += 1
    directory.apply(topic.append_once(b"lively", 2, b"x"))
    assert {row.producer for row in directory.catalogue.producers()} == {b"lively"}


def test_a_life_that_the_catalogue_knows_to_be_over_does_not_come_back(directory):
    old = Writer(1)
    entries = [old.create(), old.append(b"old")]
    new = old.next_life(2)
    directory.apply(new.create(), new.append(b"new"))  # a rebuilt catalogue is like this
    assert directory.apply(*entries, old.destroy()) == []
    assert directory.records() == {b"topic": [(old.offset, 1, b"new")]}


def test_a_destruction_that_was_lost_is_made_up_for_by_the_next_life(directory):
    old = Writer(1)
    directory.apply(old.create(), old.append(b"old"))
    new = old.next_life(2)
    directory.apply(new.create(), new.append(b"new"))
    assert directory.records() == {b"topic": [(old.offset, 1, b"new")]}
    assert directory.names() == {"2-00000000000000000007.log", "2-00000000000000000007.idx"}


def test_records_of_a_topic_that_nothing_names_are_kept_under_its_number(directory):
    ghost = Writer(9)
    (lost,) = directory.apply(ghost.append(b"x"), ghost.append(b"y"))
    assert str(lost).startswith(
        'topic number 9: its name is lost, its records are kept in "$lost/9"'
    )
    assert [payload for _, _, payload in directory.records()[b"$lost/9"]] == [b"x", b"y"]
    directory.apply(ghost.create())
    assert [payload for _, _, payload in directory.records()[b"topic"]] == [b"x", b"y"]
