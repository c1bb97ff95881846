"""A table of states: its buckets are replaced in one commit that counts once; and its own metadata."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake import states
from headrace.lake.format import LakeError
from headrace.lake.states import (
    Buckets,
    StatesFile,
    StatesTable,
    StatesWriter,
    Totals,
    bucket_of,
    name_of,
    read_states,
)
from headrace.lake.storage.storage import storage_of
from headrace.model import Position

APP = "test"


def row(topic: str, ordinal: int, **other: Any) -> dict[str, Any]:
    given = {"topic": topic, "epoch": 7, "offset": 10 * ordinal, "ordinal": ordinal}
    given |= {"messages": ordinal, "reducer": "last", "state": b"%d" % ordinal, "is_json": True}
    return {**given, "complete": True, "error": None, **other}


def write(directory: Path, bucket: int, *rows: dict[str, Any], number: int = 0) -> StatesFile:
    with StatesWriter(storage_of(directory), name_of(number, bucket, 2)) as writer:
        for one in rows:
            writer.add(one)
        return writer.finish()


def seen(directory: Path) -> dict[str, int]:
    found = DeltaTable(str(directory)).to_pyarrow_table().to_pylist()
    assert len({one["topic"] for one in found}) == len(found)
    return {one["topic"]: one["ordinal"] for one in found}


@pytest.fixture
def table(tmp_path):
    made = StatesTable.make(storage_of(tmp_path))
    assert made.buckets() == (0, {})
    files = [write(tmp_path, 0, row("a", 1), row("b", 2)), write(tmp_path, 1, row("c", 3))]
    assert made.replace(APP, 0, files)
    return made


@given(st.lists(st.text(max_size=4)), st.integers(1, 5))
def test_every_topic_has_a_place_among_the_changed_buckets(topics, count):
    buckets = Buckets.of(count, topics)
    assert buckets.changed == tuple(sorted({bucket_of(topic, count) for topic in topics}))
    assert all(buckets.changed[buckets.place(topic)] == bucket_of(topic, count) for topic in topics)


@pytest.mark.parametrize("limit", ["_GROUP_BYTES", "_GROUP_ROWS"])
def test_changed_states_take_the_place_of_old_ones(table, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(states, limit, 2)
    count, files = table.buckets()
    assert (count, sorted(files)) == (2, [0, 1])
    storage = storage_of(tmp_path)
    with StatesWriter(storage, name_of(1, 0, 2)) as writer:
        for one in (row("b", 5), row("new", 1)):
            writer.add(one)
        for path in files[0]:
            writer.copy(storage.file(path), without=["b", "new"])
        made = writer.finish()
    assert made.rows == 3
    first = [one["topic"] for one in read_states(storage.file(made.path), ["topic"])]
    assert first == ["b", "new", "a"]  # changed states come first
    [some] = read_states(storage.file(made.path), ["topic", "ordinal"], ["b", "none"])
    assert some == {"topic": "b", "ordinal": 5}
    before = seen(tmp_path)
    assert table.update(APP, 1, [made], files[0])
    assert seen(tmp_path) == before | {"b": 5, "new": 1}
    assert table.buckets() == (2, {0: [made.path], 1: files[1]})
    assert sorted(table.rows()) == sorted([(made.path, 3), (files[1][0], 1)])


def test_a_file_that_is_not_finished_vanishes(table, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ZeroDivisionError), StatesWriter(storage_of(tmp_path), "x") as writer:
        writer.add(row("a", 1 // 0))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_commit_counts_once_and_only_while_old_files_are_there(table, tmp_path):
    _, files = table.buckets()
    made = write(tmp_path, 0, row("a", 9), number=1)
    assert not table.update(APP, 0, [made], files[0])
    assert not table.update(APP, 1, [made], ["another.parquet"])
    assert seen(tmp_path) == {"a": 1, "b": 2, "c": 3}
    assert table.update(APP, 1, [made], files[0])
    # The answer to a commit may have been lost: it is known by its files.
    assert table.update(APP, 1, [made], files[0])
    assert not table.replace(APP, 1, [write(tmp_path, 0, row("a", 7))])
    assert not table.update(APP, 2, [write(tmp_path, 0, row("a", 8))], files[0])
    assert seen(tmp_path) == {"a": 9, "c": 3}


def test_what_a_table_covers_and_what_it_is_in_numbers(table, tmp_path):
    bad = row("d", 4, error="no JSON", complete=False)
    assert table.replace(APP, 1, [write(tmp_path, 1, row("a", 1), bad, number=1)])
    covered = table.covered()
    assert covered.reducers == {"last"}
    assert covered.ends == {"a": Position(7, 10, 1), "d": Position(7, 40, 4)}
    assert table.totals() == Totals(2, 5, 1, 1, "topic 'd': no JSON")


def test_files_of_another_form_and_damaged_ones_are_refused(table, tmp_path):
    _, files = table.buckets()
    (tmp_path / files[0][0]).write_bytes(b"PAR1")
    with pytest.raises(LakeError, match=r"cannot be read.*builds the table again"):
        table.covered()
    (tmp_path / files[0][0]).unlink()
    with pytest.raises(LakeError, match="cannot be read"):
        list(read_states(storage_of(tmp_path).file(files[0][0]), ["topic"]))
    with StatesWriter(storage_of(tmp_path), "other.parquet") as writer:
        assert table.replace(APP, 1, [writer.finish()])
    with pytest.raises(LakeError, match=r"not written by this version \(other.parquet\)"):
        table.buckets()


def test_what_is_swept_is_of_its_own_making(table, tmp_path):
    mine = [tmp_path / "README.parquet", tmp_path / "lake" / "_delta_log" / "0.json"]
    left = [tmp_path / name_of(1, 0, 2), tmp_path / name_of(2, 1, 2)]
    for path in (*mine, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    week_ago_s = time.time() - 8 * 86_400
    for path in (*mine, left[0]):
        os.utime(path, (week_ago_s, week_ago_s))
    table.sweep()
    assert [path.exists() for path in (*mine, *left)] == [True, True, False, True]


def test_a_flipped_bit_in_a_state_is_found(tmp_path):
    file = write(tmp_path, 0, row("a", 1, state=b"the state " * 50))
    path = tmp_path / file.path
    data = bytearray(path.read_bytes())
    data[data.index(b"the state ") + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(LakeError, match="cannot be read"):
        list(read_states(storage_of(tmp_path).file(file.path), ["state"]))
