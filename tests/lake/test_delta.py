"""A lake as a Delta table: batches count once, whoever else commits, and everyone can read it.

Two of these tests check the library: they fail when it changes something that our commits rely on.
"""

import json

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError

from headrace.lake.format import LakeError, Shape
from headrace.lake.formats.delta import LOG, DeltaLake, _add, _removed
from headrace.lake.table import find_table, make_table
from tests.lake.rows import rows, write

APP = "test"


@pytest.fixture
def lake(tmp_path):
    return DeltaLake.make(tmp_path / "a lake", Shape())


def batch(lake, number, *some):
    """Write the records of one batch, and return its files."""
    given = some or (rows("a", [b"%d" % number], offset=5 * number, ordinal=number),)
    return write(lake._lake, *given, by_topic=lake.shape.by_topic)


def table_of(lake):
    return DeltaTable(str(lake._lake))


def payloads(lake):
    return sorted(table_of(lake).to_pyarrow_table(columns=["payload"])["payload"].to_pylist())


def test_the_library_takes_a_number_again_from_a_table_opened_later(lake):
    assert lake.commit(APP, 3, batch(lake, 3), {})
    for number in (3, 1):
        commit(table_of(lake), number, batch(lake, number))
    assert len(payloads(lake)) == 3


def test_the_library_refuses_it_from_a_table_opened_before(lake):
    opened = table_of(lake)
    assert lake.commit(APP, 0, batch(lake, 0), {})
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
    other = DeltaLake(lake._lake, Shape())
    meddling = [lambda: other.commit(APP if same else "other", 0, batch(other, 0), {})]

    class Meddled(DeltaTable):
        def transaction_version(self, app):
            if step == "opened" and meddling:
                meddling.pop()()
            found = super().transaction_version(app)
            if step == "looked" and meddling:
                meddling.pop()()
            return found

    monkeypatch.setattr("headrace.lake.formats.delta.DeltaTable", Meddled)
    made = lake.commit(APP, 0, batch(lake, 1), {})
    assert not meddling
    # The first one has written the batch. A commit of another application does not conflict.
    assert made == (not same)
    assert len(payloads(lake)) == (1 if same else 2)


def test_numbers_survive_when_only_a_checkpoint_is_left(lake):
    for number in range(3):
        lake.commit(APP, number, batch(lake, number), {})
    table_of(lake).create_checkpoint()
    for path in sorted((lake._lake / LOG).glob("0*.json"))[:-1]:
        path.unlink()
    assert lake.last(APP) == 2
    assert not lake.commit(APP, 2, batch(lake, 2), {})
    assert lake.commit(APP, 3, batch(lake, 3), {})
    assert len(payloads(lake)) == 4


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    def refused(path, **given):
        before = sorted(map(str, tmp_path.rglob("*")))
        with pytest.raises(LakeError) as error:
            find_table(path, "delta", Shape(**given))
        assert sorted(map(str, tmp_path.rglob("*"))) == before
        return str(error.value)

    assert find_table(tmp_path / "new", "delta", Shape()) is None
    assert find_table(tmp_path, "delta", Shape()) is None
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
    make_table(ours, "delta", Shape(by_topic=True))
    assert refused(ours).startswith(f"{ours} is partitioned by topic and date: give --by-topic")
    (commit_file,) = (ours / LOG).glob("*.json")
    text = commit_file.read_text()
    assert '"headrace.format":"2"' in text
    commit_file.write_text(text.replace('"headrace.format":"2"', '"headrace.format":"3"'))
    assert refused(ours, by_topic=True) == (
        f"{ours} was written by a newer version (format 3, this one writes 2): use that one"
    )
    commit_file.write_text("")
    assert f"{ours / LOG} cannot be read: " in refused(ours, by_topic=True)
    with pytest.raises(LakeError, match="unknown lake format 'csv'"):
        find_table(ours, "csv", Shape())


def test_readers_are_told_what_lies_where(lake):
    lake.commit(APP, 0, batch(lake, 0, rows("a", [b"x"]), rows("b", [b"y"], offset=70)), {})
    (line,) = (
        json.loads(line)["add"]
        for line in max((lake._lake / LOG).glob("*.json")).read_text().splitlines()
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
        assert lake.commit(APP, number, [made], {"more": f"of {number}"})
        paths.append(made.path)
    return paths


def merged(lake, *numbers):
    """Write the records of the batches with these numbers into one file."""
    some = [rows("a", [b"%d" % number], offset=5 * number, ordinal=number) for number in numbers]
    return write(lake._lake, *some)


def test_files_that_are_replaced_are_no_change_of_data(lake):
    """Streams that follow the table do not see these rows again."""
    paths = three_batches(lake)
    assert lake.commit("merge", 0, merged(lake, 0, 1), {}, replaced=paths[:2])
    commits = max((lake._lake / LOG).glob("*.json")).read_text().splitlines()
    changes = [json.loads(line) for line in commits]
    assert [
        one["dataChange"] for line in changes for one in line.values() if "dataChange" in one
    ] == [False] * 3


def test_the_library_takes_the_same_files_out_twice(lake):
    for number in range(2):
        lake.commit(APP, number, batch(lake, number), {})
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
