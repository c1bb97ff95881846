"""The catalogue: rows are read back, damage is noticed, intact rows are salvaged, commits are atomic."""

import random
import shutil
import sqlite3

import msgspec
import pytest

from headrace.errors import DataDirectoryError
from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue, DamagedCatalogueError
from headrace.log.catalogue.rows import (
    CursorRow,
    DirectoryMeta,
    MetaRow,
    NoteRow,
    ProducerRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
)
from headrace.log.disk import Disk
from headrace.model import Position

TOPICS = [
    TopicRow(number, b"topic/%d" % number, 10, b"synced", 0, 0, 100, 5, 1000)
    for number in range(1, 41)
]
ROWS = [
    *TOPICS,
    SegmentRow(1, 0, 60, 2, 0, 3, 900, 950),
    SegmentRow(1, 60, 100, 1, 3, 5, 960, 1000),
    SegmentRow(2, 0, 100, 1, 0, 5, 500, 500),
    TombstoneRow(b"gone", 3, 70, 7, 800),
    CursorRow(b"topic/1", b"reader", 10, 60, 3, 999),
    ProducerRow(b"topic/1", b"producer", 4, msgspec.msgpack.encode([(4, 100)]), 990),
    NoteRow(b"note", b"value", 0, 980),
    NoteRow(b"note/2", b"", 2000, 980),
]


def fill(catalogue: Catalogue) -> None:
    with catalogue.transaction():
        for row in ROWS:
            catalogue.put([row])


@pytest.fixture
def catalogue(tmp_path):
    catalogue = Catalogue.create(tmp_path)
    yield catalogue
    catalogue.close()


def test_rows_come_back(catalogue):
    fill(catalogue)
    assert list(catalogue.topics()) == sorted(TOPICS, key=lambda row: row.name)
    assert catalogue.topic(b"topic/7") == catalogue.topic_by_id(7) == TOPICS[6]
    assert catalogue.topic(b"unknown") is None
    assert [row.base for row in catalogue.segments(1)] == [0, 60]
    assert catalogue.last_segment(1).base == 60
    assert [row.topic_id for row in catalogue.segments_older_than(960)] == [2, 1]
    assert catalogue.producer(b"topic/1", b"producer").last == 4
    assert [row.reader for row in catalogue.cursors(b"topic/1")] == [b"reader"]
    assert list(catalogue.notes()) == ROWS[-2:]
    assert catalogue.note(b"note/2") == ROWS[-1]
    assert list(catalogue.due_notes((0, b""), 2000)) == [(2000, b"note/2")]
    assert catalogue.meta() == DirectoryMeta()


def test_topics_are_listed_by_prefix_and_after_a_name(catalogue):
    fill(catalogue)
    names = sorted(row.name for row in TOPICS)
    assert [row.name for row in catalogue.topics(b"topic/3")] == [
        name for name in names if name.startswith(b"topic/3")
    ]
    assert [row.name for row in catalogue.topics(b"", b"topic/12")] == names[4:]
    assert list(catalogue.topics(b"z")) == []


def test_a_row_that_is_put_again_replaces_the_first(catalogue):
    fill(catalogue)
    catalogue.put([TOPICS[0]._replace(end_offset=500)])
    assert catalogue.topic_by_id(1).end_offset == 500
    assert len(list(catalogue.topics())) == len(TOPICS)


def test_a_transaction_is_all_or_nothing(catalogue):
    def put_and_fail() -> None:
        with catalogue.transaction():
            catalogue.put([TOPICS[0]])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        put_and_fail()
    assert catalogue.topic_by_id(1) is None
    with catalogue.transaction():
        catalogue.put([TOPICS[0]])
    assert catalogue.topic_by_id(1) == TOPICS[0]


def test_a_commit_that_fails_leaves_room_for_the_next(catalogue):
    catalogue._db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(sqlite3.OperationalError, match="full"), catalogue.transaction():
        catalogue.put([ProducerRow(b"x", b"y", 1, bytes(200_000), 1)])
    catalogue._db.execute("PRAGMA max_page_count = 100000")
    with catalogue.transaction():
        catalogue.put([TOPICS[0]])
    assert catalogue.topic_by_id(1) == TOPICS[0]


def test_readers_see_commits_and_only_those(catalogue, tmp_path):
    reader = Catalogue.open_for_reading(tmp_path)
    with catalogue.transaction():
        catalogue.put([TOPICS[0]])
        assert reader.topic_by_id(1) is None
    assert reader.topic_by_id(1) == TOPICS[0]
    reader.close()


def test_what_was_committed_is_not_in_the_write_ahead_log_alone(catalogue, tmp_path):
    fill(catalogue)
    copied = tmp_path / "copy"
    copied.mkdir()
    shutil.copy(tmp_path / FILE_NAME, copied)
    copy = Catalogue.open(copied)
    copy.check()
    assert list(copy.topics()) == list(catalogue.topics())
    copy.close()


def test_a_new_life_begins_at_its_tombstone_or_at_the_floor(catalogue):
    fill(catalogue)
    assert catalogue.grave(b"gone") == (Position(3, 70, 7), 800)
    assert catalogue.grave(b"never known") == (Position(0, 0, 0), 0)
    catalogue.put_meta(DirectoryMeta(floor_epoch=5, floor_offset=900, floor_ordinal=90))
    assert catalogue.grave(b"never known") == (Position(5, 900, 90), 0)


def test_a_row_that_someone_changed_is_noticed(catalogue):
    fill(catalogue)
    catalogue.check()
    catalogue._db.execute("UPDATE topics SET end_offset = 99 WHERE id = 3")
    with pytest.raises(DamagedCatalogueError, match="a row of topics is damaged"):
        catalogue.topic_by_id(3)
    assert catalogue.topic_by_id(4) == TOPICS[3]
    with pytest.raises(DamagedCatalogueError):
        catalogue.check()
    assert catalogue.salvage(TopicRow)[0] == [row for row in TOPICS if row.id != 3]


def test_a_value_of_another_type_is_noticed(catalogue):
    fill(catalogue)
    catalogue._db.execute("UPDATE topics SET name = CAST(x'ff' || name AS TEXT) WHERE id = 3")
    with pytest.raises(DamagedCatalogueError):
        catalogue.check()
    assert set(catalogue.salvage(TopicRow)[0]) < set(TOPICS)


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE cursors",
        "DROP INDEX segments_by_age",
        "DROP INDEX notes_by_due",
        "DELETE FROM meta",
        "CREATE TABLE more (x)",
    ],
)
def test_tables_that_are_not_as_they_should_be_are_noticed(catalogue, damage):
    catalogue._db.execute(damage)
    with pytest.raises(DamagedCatalogueError):
        catalogue.check()


def test_a_later_format_is_refused_and_not_rebuilt(catalogue):
    catalogue.put_meta(DirectoryMeta(format=99))
    with pytest.raises(DataDirectoryError, match="has format 99") as raised:
        catalogue.check()
    assert not isinstance(raised.value, DamagedCatalogueError)


def test_there_is_no_catalogue_where_none_was_made(tmp_path):
    with pytest.raises(DataDirectoryError, match=FILE_NAME):
        Catalogue.open_for_reading(tmp_path)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_file_that_is_no_database_is_damage(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"no database at all " * 500)
    with pytest.raises(DamagedCatalogueError):
        Catalogue.open(tmp_path)
    with pytest.raises(DamagedCatalogueError):
        Catalogue.open_for_reading(tmp_path)


def test_a_new_file_is_blank_until_it_is_made(tmp_path):
    catalogue = Catalogue.open(tmp_path)
    assert catalogue.is_blank()
    catalogue.make()
    assert not catalogue.is_blank()
    catalogue.check()
    catalogue.close()


def test_a_backup_holds_everything(catalogue, tmp_path):
    fill(catalogue)
    catalogue.back_up(tmp_path / "copy.sqlite", Disk())
    copy = Catalogue.open(tmp_path, name="copy.sqlite")
    copy.check()
    assert list(copy.topics()) == list(catalogue.topics())
    copy.close()


def test_silent_producers_and_too_many_are_forgotten(catalogue):
    rows = [ProducerRow(b"t", b"%d" % ms, 1, b"\x90", ms) for ms in range(100)]
    with catalogue.transaction():
        catalogue.put(rows)
        catalogue.drop_producers(20, keep_max=1000)
    assert sorted(row.ms for row in catalogue.producers()) == list(range(20, 100))
    with catalogue.transaction():
        catalogue.drop_producers(0, keep_max=30)
    assert sorted(row.ms for row in catalogue.producers()) == list(range(70, 100))


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path, seed):
    made = Catalogue.create(tmp_path)
    fill(made)
    made.close()
    chance = random.Random(seed)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    # Every other flip hits the first bytes of a page, on which much depends.
    at = chance.randrange(len(data))
    at = at if seed % 2 else at // 4096 * 4096 + chance.randrange(100)
    data[at] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    try:
        catalogue = Catalogue.open(tmp_path)
    except DamagedCatalogueError:
        return
    try:
        catalogue.check()
    except DamagedCatalogueError:
        kinds = {type(row) for row in ROWS} | {MetaRow}
        saved = [row for kind in kinds for row in catalogue.salvage(kind)[0]]
        assert all(row in ROWS or isinstance(row, MetaRow) for row in saved)
    else:
        found = [row for kind in {type(row) for row in ROWS} for row in catalogue.salvage(kind)[0]]
        assert sorted(found, key=repr) == sorted(ROWS, key=repr)
        assert [catalogue.topic(row.name) for row in TOPICS] == TOPICS
        assert [row.base for row in catalogue.segments_older_than(2000)] == [0, 0, 60]
        assert list(catalogue.due_notes((0, b""), 2000)) == [(2000, b"note/2")]
        assert catalogue.meta() == DirectoryMeta()
    finally:
        catalogue.close()
