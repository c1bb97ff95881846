"""A lake as a Delta table: batches count once, whoever else commits, and everyone can read it.

Two of these tests check the library: they fail when it changes something that our commits rely on.
"""

import json
import os

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError

from headrace.lake.format import LakeError, Shape
from headrace.lake.formats.delta import LOG, DeltaLake, _add, _removed
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import find_table, make_table
from tests.lake.rows import rows, token, write

APP = "test"


@pytest.fixture
def lake(tmp_path):
    return make_table(storage_of(tmp_path / "a lake"), "delta", Shape())


def batch(lake, number, *some):
    """Write the records of one batch, and return its files."""
    given = some or (rows("a", [b"%d" % number], offset=5 * number, ordinal=number),)
    return write(lake._storage.root, *given, by_topic=lake.shape.by_topic)


def table_of(lake):
    return DeltaTable(str(lake._storage.root))


def payloads(lake):
    return sorted(table_of(lake).to_pyarrow_table(columns=["payload"])["payload"].to_pylist())


def test_the_library_takes_a_number_again_from_a_table_opened_later(lake):
    assert lake.commit(APP, 3, batch(lake, 3), token())
    for number in (3, 1):
        commit(table_of(lake), number, batch(lake, number))
    assert len(payloads(lake)) == 3


def test_the_library_refuses_it_from_a_table_opened_before(lake):
    opened = table_of(lake)
    assert lake.commit(APP, 0, batch(lake, 0), token())
    with pytest.raises(CommitFailedError):
        commit(opened, 0, batch(lake, 0))
    assert payloads(lake) == [b"0"]


def commit(table, number, files):
    table.create_write_transaction(
        [_add(one) for one in files],
        "append",
        table.schema(),
        ["date"],
        commit_properties=CommitProperties(
            app_transactions=[Transaction(APP, number)], max_commit_retries=0
        ),
    )


@pytest.mark.parametrize("same", [True, False], ids=["the same batch", "another application"])
@pytest.mark.parametrize("step", ["opened", "looked"])
def test_someone_else_commits_at_any_step_of_ours(lake, monkeypatch, step, same):
    """The other commit comes before we read the application's last number, or between that and our commit."""
    other = DeltaLake(lake._storage, Shape())
    meddling = [lambda: other.commit(APP if same else "other", 0, batch(other, 0), token())]

    class Meddled(DeltaTable):
        def transaction_version(self, app):
            if step == "opened" and meddling:
                meddling.pop()()
            found = super().transaction_version(app)
            if step == "looked" and meddling:
                meddling.pop()()
            return found

    monkeypatch.setattr("headrace.lake.formats.delta.DeltaTable", Meddled)
    made = lake.commit(APP, 0, batch(lake, 1), token())
    assert not meddling
    # The first one has written the batch. A commit of another application does not conflict.
    assert made == (not same)
    assert len(payloads(lake)) == (1 if same else 2)


def test_a_commit_that_is_always_refused_ends_with_a_sentence(lake, monkeypatch):
    class Refused(DeltaTable):
        def create_write_transaction(self, *given, **more):
            raise OSError("Generic S3 error:\n access denied")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.lake.formats.delta.DeltaTable", Refused)
        with pytest.raises(LakeError) as refused:
            lake.commit(APP, 0, batch(lake, 0), token())
    where = lake._storage.root / LOG
    assert str(refused.value) == f"{where} cannot be written to: Generic S3 error: access denied"
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert payloads(lake) == [b"0"]


def test_numbers_survive_when_only_a_checkpoint_is_left(lake):
    for number in range(3):
        lake.commit(APP, number, batch(lake, number), token())
    table_of(lake).create_checkpoint()
    for path in sorted((lake._storage.root / LOG).glob("0*.json"))[:-1]:
        path.unlink()
    assert lake.last(APP).number == 2
    assert not lake.commit(APP, 2, batch(lake, 2), token())
    assert lake.commit(APP, 3, batch(lake, 3), token())
    assert len(payloads(lake)) == 4


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "an unknown outcome"])
def test_a_commit_is_on_disk_when_it_counts(lake, monkeypatch, is_known):
    synced = set()
    monkeypatch.setattr("os.fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")))

    class Lost(DeltaTable):
        def create_write_transaction(self, *given, **more):
            super().create_write_transaction(*given, **more)
            raise OSError("the answer is lost")

    if not is_known:
        monkeypatch.setattr("headrace.lake.formats.delta.DeltaTable", Lost)
    log = lake._storage.root / LOG
    before = set(log.iterdir())
    for number in range(100):  # the last commit makes a checkpoint
        synced.clear()
        assert lake.commit(APP, number, [], token())
        written = set(log.iterdir()) - before
        before |= written
        assert written
        assert {str(path) for path in (*written, log)} <= synced
    assert log / "_last_checkpoint" in before


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    def refused(path, **given):
        before = sorted(map(str, tmp_path.rglob("*")))
        with pytest.raises(LakeError) as error:
            find_table(storage_of(path), "delta", Shape(**given))
        assert sorted(map(str, tmp_path.rglob("*"))) == before
        return str(error.value)

    assert find_table(storage_of(tmp_path / "new"), "delta", Shape()) is None
    assert find_table(storage_of(tmp_path), "delta", Shape()) is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    assert refused(other) == (
        f"{other} holds something else than a lake of Headrace (notes.txt): name a new or an empty "
        "directory"
    )
    assert (
        refused(other / "notes.txt")
        == f"{other / 'notes.txt'} is not a directory: name a new or an empty one"
    )
    foreign = tmp_path / "foreign"
    DeltaTable.create(str(foreign), pa.schema([("n", pa.int64())]))
    assert "a Delta table of others" in refused(foreign)
    ours = tmp_path / "ours"
    make_table(storage_of(ours), "delta", Shape(by_topic=True))
    assert refused(ours).startswith(f"{ours} is partitioned by topic and date: give --by-topic")
    (commit_file,) = (ours / LOG).glob("*.json")
    text = commit_file.read_text()
    assert '"headrace.format":"3"' in text
    commit_file.write_text(text.replace('"headrace.format":"3"', '"headrace.format":"4"'))
    assert refused(ours, by_topic=True) == (
        f"{ours} was written by a newer version (format 4, this one writes 3): use that one"
    )
    commit_file.write_text("")
    assert f"{ours / LOG} cannot be read: " in refused(ours, by_topic=True)
    with pytest.raises(LakeError, match="unknown lake format 'csv'"):
        find_table(storage_of(ours), "csv", Shape())


def test_readers_are_told_what_lies_where(lake):
    lake.commit(APP, 0, batch(lake, 0, rows("a", [b"x"]), rows("b", [b"y"], offset=70)), token())
    (line,) = (
        json.loads(line)["add"]
        for line in max((lake._storage.root / LOG).glob("*.json")).read_text().splitlines()
        if "add" in json.loads(line)
    )
    statistics = json.loads(line["stats"])
    assert statistics["numRecords"] == 2
    assert statistics["minValues"] | {"timestamp": 0} == {
        "topic": "a",
        "epoch": 1,
        "offset": 0,
        "ordinal": 0,
        "timestamp": 0,
    }
    assert statistics["maxValues"]["offset"] == 70
    assert lake.files_of("b", 71) == []
    assert lake.files_of("c", 0) == []


def three_batches(lake):
    """Commit three batches, and return their files in order."""
    paths = []
    for number in range(3):
        (made,) = batch(lake, number)
        assert lake.commit(APP, number, [made], token())
        paths.append(made.path)
    return paths


def merged(lake, *numbers):
    """Write the records of the batches with these numbers into one file."""
    some = [rows("a", [b"%d" % number], offset=5 * number, ordinal=number) for number in numbers]
    return write(lake._storage.root, *some)


def test_files_that_are_replaced_are_no_change_of_data(lake):
    """Streams that follow the table do not see these rows again."""
    paths = three_batches(lake)
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths[:2])
    commits = max((lake._storage.root / LOG).glob("*.json")).read_text().splitlines()
    changes = [json.loads(line) for line in commits]
    assert [
        one["dataChange"] for line in changes for one in line.values() if "dataChange" in one
    ] == [False] * 3


def test_the_library_takes_the_same_files_out_twice(lake):
    for number in range(2):
        lake.commit(APP, number, batch(lake, number), token())
    opened = table_of(lake)
    removed = _removed(opened, list(lake.files()), data_change=False)
    for _ in range(2):
        (made,) = merged(lake, 0, 1)
        table_of(lake).create_write_transaction(
            [*removed, _add(made, is_new=False)],
            "append",
            opened.schema(),
            ["date"],
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    assert len(payloads(lake)) == 4
