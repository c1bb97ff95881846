"""A lake of plain Parquet files: a reader of all files sees no row twice, whatever is killed at any time."""

import sqlite3
import threading

import duckdb
import pytest

from headrace.lake.format import LakeError, Shape
from headrace.lake.formats import parquet as registry
from headrace.lake.formats.parquet import ParquetLake
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import make_table, open_table
from tests.lake.others import of_all_files
from tests.lake.rows import rows, token
from tests.lake.test_table import APP, batch, merged, payloads, three_batches


class Killed(BaseException): ...


@pytest.fixture
def lake(tmp_path):
    return make_table(storage_of(tmp_path / "a lake"), "parquet", Shape())


def kill(*given):
    raise Killed


@pytest.mark.parametrize("step", ["_show", "_hide", "_link", "half"])
def test_a_compaction_killed_while_names_change_doubles_nothing(lake, monkeypatch, step):
    paths = three_batches(lake)
    made = merged(lake, 0, 1)
    hide, hidden = ParquetLake._hide, []

    def half(self, name):
        if hidden:
            raise Killed
        hidden.append(name)
        hide(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(
            ParquetLake, "_hide" if step == "half" else step, half if step == "half" else kill
        )
        with pytest.raises(Killed):
            lake.commit("merge", 0, made, token(), replaced=paths[:2])
    seen = payloads(lake)
    assert len(seen) == len(set(seen))
    assert b"2" in seen
    # Our own readers still have all rows.
    assert all((lake._storage.root / path).exists() for path in [*lake.files(), *paths])
    open_table(lake._storage).sync()
    assert payloads(lake) == [b"0", b"1", b"2"]


def test_a_batch_killed_before_anyone_can_see_it_is_seen_later(lake, monkeypatch):
    made = batch(lake, 0, rows("a", [b"0"]), rows("b", [b"1"], ms=[0]))
    with monkeypatch.context() as patch:
        patch.setattr(ParquetLake, "_show", kill)
        with pytest.raises(Killed):
            lake.commit(APP, 0, made, token())
    assert (payloads(lake), lake.last(APP).number) == ([], 0)
    lake.sync()
    assert payloads(lake) == [b"0", b"1"]


@pytest.mark.parametrize("same", [True, False], ids=["the same batch", "another application"])
def test_someone_else_who_commits_meanwhile_waits_and_looks_then(lake, monkeypatch, same):
    other = open_table(lake._storage)
    theirs = []
    app = APP if same else "other"
    thread = threading.Thread(
        target=lambda: theirs.append(other.commit(app, 0, batch(other, 1), token()))
    )
    last = registry._last

    def looked(*given):
        found = last(*given)
        if thread.ident is None:
            thread.start()
        return found

    monkeypatch.setattr(registry, "_last", looked)
    assert lake.commit(APP, 0, batch(lake, 0), token())
    thread.join()
    assert theirs == [not same]
    assert payloads(lake) == ([b"0"] if same else [b"0", b"1"])


def test_two_that_show_what_they_have_committed_do_not_undo_each_other(lake):
    paths = three_batches(lake)
    jobs = [
        threading.Thread(
            target=lake.commit,
            args=("merge", 0, merged(lake, 0, 1), token()),
            kwargs={"replaced": paths[:2]},
        ),
        *(
            threading.Thread(target=lake.commit, args=(f"app {n}", 0, batch(lake, n), token()))
            for n in range(3, 6)
        ),
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert payloads(lake) == [b"%d" % number for number in range(6)]


def test_files_of_others_stay_and_so_does_what_cannot_be_put_right(lake):
    (path, *_) = three_batches(lake)
    day = lake._storage.root / "date=2024-10-04"
    others = [
        day / name
        for name in (
            "mine.parquet",
            "orders-20260101.parquet",
            f"{'0' * 8}-{'0' * 12}-0000.parquet",
        )
    ]
    for other in others:
        other.write_bytes((lake._storage.root / path).read_bytes())
    shown = lake._storage.root / lake.shown(path)
    shown.unlink()
    lake.sync()
    assert shown.exists()
    assert all(other.exists() for other in others)
    shown.unlink()
    (lake._storage.root / path).unlink()
    with pytest.raises(LakeError, match=r"\.data is missing, which the table names: restore it"):
        lake.sync()


@pytest.mark.parametrize("by_topic", [False, True])
def test_everyone_reads_it(tmp_path, by_topic):
    lake = make_table(storage_of(tmp_path / "lake"), "parquet", Shape(by_topic))
    lake.commit(APP, 0, batch(lake, 0, rows("a", [b"x"]), rows("b/..", [b"y"], ms=[0])), token())
    for pattern in ("", "/**/*.parquet"):
        found = duckdb.read_parquet(f"{tmp_path / 'lake'}{pattern}", hive_partitioning=True)
        assert sorted(found.project("topic, payload, date::varchar").fetchall()) == [
            ("a", b"x", "2024-10-04"),
            ("b/..", b"y", "1970-01-01"),
        ]
    assert of_all_files(tmp_path / "lake").num_rows == 2


def test_a_newer_format_is_refused(lake):
    with sqlite3.connect(lake._storage.root / "_headrace" / "files.db") as database:
        database.execute("update lake set format = 4")
    database.close()
    with pytest.raises(LakeError) as refused:
        open_table(lake._storage)
    assert str(refused.value) == (
        f"{lake._storage.root} was written by a newer version (format 4, this one writes 3): use that one"
    )
