"""A lake as an Iceberg table: assumptions of its commits, its readers, and its place.

Two of these tests check the library: they fail when it changes something that our commits rely on.
"""

import os
import re
import shutil

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, RESTError
from pyiceberg.table import StaticTable

from headrace.lake.format import LakeError, Shape
from headrace.lake.formats import iceberg
from headrace.lake.formats.iceberg import IcebergLake
from headrace.lake.storage.storage import replace, storage_of
from headrace.lake.table import make_table, open_table
from tests.lake.rows import DAY_MS, NOON_MS, rows, token
from tests.lake.test_table import APP, OLD, batch, merged, payloads, three_batches


@pytest.fixture
def lake(tmp_path):
    return make_table(storage_of(tmp_path / "a lake"), "iceberg", Shape())


def catalog_of(path):
    return SqlCatalog("headrace", uri=f"sqlite:///{path}/_headrace/catalog.db")


def commit(lake, table, number):
    with table.transaction() as change:
        with change.update_snapshot().merge_append() as snapshot:
            for one in batch(lake, number):
                snapshot.append_data_file(lake._data_file(table, one))
        change.set_properties({f"headrace.last.{APP}": str(number)})


def test_the_library_refuses_a_commit_on_what_has_changed_only_as_it_is_told(lake):
    opened = lake._table()
    assert lake.commit(APP, 0, batch(lake, 0), token())
    with pytest.raises(CommitFailedException):
        commit(lake, opened, 0)
    assert payloads(lake) == [b"0"]
    # Without that property, the library would retry.
    lake._table().transaction().remove_properties("commit.retry.num-retries").commit_transaction()
    opened = lake._table()
    assert lake.commit(APP, 1, batch(lake, 1), token())
    commit(lake, opened, 1)
    lake.sync()
    assert payloads(lake) == [b"0", b"1", b"1"]


def test_the_library_does_not_notice_that_properties_have_changed(lake):
    opened = lake._table()
    for table in (lake._table(), opened):
        with table.transaction() as change:
            change.set_properties({f"headrace.last.{APP}": "0"})


@pytest.mark.parametrize("same", [True, False], ids=["the same batch", "another application"])
@pytest.mark.parametrize("step", ["opened", "looked", "listed"])
def test_someone_else_commits_at_any_step_of_ours(lake, monkeypatch, step, same):
    """A batch comes before or after we read the last number, or a compaction after we listed live files."""
    other = open_table(lake._storage)
    paths = three_batches(lake) if step == "listed" else []
    app = "ours" if same else "theirs"

    def theirs():
        replaced = paths[:2] if same else ()
        made = merged(other, 0, 1) if replaced else batch(other, 7)
        assert other.commit(app, 0, made, token(), replaced=replaced)

    meddling = [theirs]

    def meddled(at, function):
        def call(*given):
            if at == "opened" == step and meddling:
                meddling.pop()()
            found = function(*given)
            if step in ("looked", "listed") and at == step and meddling:
                meddling.pop()()
            return found

        return call

    last, live = iceberg._last, IcebergLake._live
    monkeypatch.setattr(iceberg, "_last", meddled("looked" if step == "looked" else "opened", last))
    monkeypatch.setattr(IcebergLake, "_live", meddled("listed", live))
    ours = merged(lake, 0, 1) if paths else batch(lake, 8)
    made = lake.commit("ours", 0, ours, token(), replaced=paths[:2])
    assert not meddling
    assert made == (not same)
    expected = [b"0", b"1", b"2"] if paths else [b"7"] if same else [b"8"]
    assert payloads(lake) == sorted(expected + ([] if same else [b"7"]))


def test_everyone_reads_it(lake):
    some = [rows("a", [b"x"], ms=[NOON_MS]), rows("b", [b"y"], ms=[NOON_MS + DAY_MS])]
    assert lake.commit(APP, 0, batch(lake, 0, *some), token())
    assert lake.commit(APP, 1, batch(lake, 1, rows("c", [b"z"], ms=[NOON_MS])), token())
    by_catalog = catalog_of(lake._storage.root).load_table("headrace.records")
    by_hint = StaticTable.from_metadata(f"file://{lake._storage.root}")
    for table in (by_catalog, by_hint):
        found = table.scan().to_arrow()
        assert sorted(found["payload"].to_pylist()) == [b"x", b"y", b"z"]
        assert found.schema.names == ["topic", "epoch", "offset", "ordinal", "timestamp", "payload"]
        later = table.scan(row_filter="timestamp >= '2024-10-05T00:00:00+00:00'")
        (file,) = later.plan_files()
        assert "date=2024-10-05" in file.file.file_path
        (file,) = table.scan(row_filter="topic = 'c'").plan_files()
        assert str(table.sort_order()) == str(by_catalog.sort_order())
    files = [one.file.file_path for one in by_hint.scan().plan_files()]
    assert sorted(duckdb.read_parquet(files).project("topic").fetchall()) == [
        ("a",),
        ("b",),
        ("c",),
    ]


def test_columns_of_all_types_are_known_to_it(tmp_path):
    decoded = pa.schema(
        [
            ("id", pa.int64()),
            ("tags", pa.list_(pa.field("element", pa.string()))),
            ("more", pa.struct([("x", pa.float64()), ("y", pa.map_(pa.string(), pa.binary()))])),
            ("price", pa.decimal128(12, 2)),
        ]
    )
    lake = make_table(storage_of(tmp_path / "lake"), "iceberg", Shape(False, "json", decoded))
    found = open_table(storage_of(tmp_path / "lake")).shape
    assert (found.decode, found.decoded) == ("json", decoded)
    names = [field.name for field in lake._table().schema().fields]
    assert names[6:] == decoded.names


def test_one_that_was_moved_says_so(lake, tmp_path):
    assert lake.commit(APP, 0, batch(lake, 0), token())
    copy = tmp_path / "copy"
    shutil.copytree(lake._storage.root, copy)
    with pytest.raises(LakeError) as refused:
        open_table(storage_of(copy))
    assert str(refused.value) == (
        f"{copy} is a copy of an Iceberg table, or was moved: its metadata names files in "
        f"{lake._storage.root}; use that, or move it back there"
    )
    shutil.rmtree(lake._storage.root)
    with pytest.raises(
        LakeError, match="a table that was moved must be moved back to its first location"
    ):
        open_table(storage_of(copy))
    copy.rename(lake._storage.root)
    assert open_table(lake._storage).last(APP).number == 0


def test_metadata_is_on_disk_before_the_catalogue_names_it(lake, monkeypatch):
    synced, written = set(), []
    commit_table = SqlCatalog.commit_table

    def fsync(fd):
        # A file has another name until its content is on disk.
        synced.add(re.sub(r"\.[0-9a-f]{12}\.tmp$", "", os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr("os.fsync", fsync)

    def commit(self, *given):
        before = {str(path) for path in (lake._storage.root / "metadata").iterdir()}
        written.extend(before)
        assert {path for path in before if path.endswith(".avro")} <= synced
        return commit_table(self, *given)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert any(path.endswith(".avro") for path in written)
    assert lake._table().metadata_location.removeprefix("file://") in synced
    assert str(lake._storage.root / "metadata") in synced


def test_a_hint_that_was_left_behind_is_brought_up_to_date(lake, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(IcebergLake, "sync", lambda self: None)  # killed before the hint is written
        assert lake.commit(APP, 0, batch(lake, 0), token())
    assert payloads(lake) == []
    lake.sync()
    assert payloads(lake) == [b"0"]
    (lake._storage.root / iceberg.HINT).write_bytes(b"\xff no text")
    lake.sync()
    assert payloads(lake) == [b"0"]


def test_a_hint_that_names_something_else_is_odd(lake, monkeypatch):
    assert lake.commit(APP, 0, batch(lake, 0), token())
    hint = lake._storage.root / iceberg.HINT
    newest = hint.read_bytes()
    assert lake.commit(APP, 1, batch(lake, 1), token())
    assert lake.oddities() == []
    for content, kind in ((newest, "missing"), (b"\xff", "damaged"), (newest[1:], "damaged")):
        hint.write_bytes(content)
        (odd,) = lake.oddities()
        assert (odd.kind, odd.file) == (kind, iceberg.HINT)
    hint.unlink()
    (odd,) = lake.oddities()
    assert odd.kind == "missing"
    lake.sync()
    assert lake.oddities() == []


def test_a_hint_never_stays_behind_one_who_was_faster(lake, monkeypatch):
    other = open_table(lake._storage)
    meddling = [lambda: other.commit("other", 0, batch(other, 1), token())]

    def slower(path, data):
        if meddling:
            meddling.pop()()
        replace(path, data)

    monkeypatch.setattr(iceberg, "replace", slower)
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert not meddling
    assert payloads(lake) == [b"0", b"1"]


# Old snapshots

MOST = 5


def snapshots(lake):
    return lake._table().metadata.snapshots


def test_a_commit_keeps_few_snapshots_and_everything_else_stays(lake, monkeypatch):
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", MOST)
    for number in range(3 * MOST):
        assert lake.commit(APP, number, batch(lake, number), number)
        assert len(snapshots(lake)) == min(number + 1, MOST)
        again = open_table(lake._storage)
        assert again.last(APP) == (number, number)
        # A repeat after an unknown outcome, and another one with this number.
        assert again.commit(APP, number, batch(lake, number), number)
        assert not again.commit(APP, number, batch(lake, number), number + 1)
        assert not again.commit(APP, 0, batch(lake, 0), 99)
    wanted = sorted(b"%d" % number for number in range(3 * MOST))
    assert payloads(lake) == wanted
    by_catalog = catalog_of(lake._storage.root).load_table("headrace.records")
    assert sorted(by_catalog.scan().to_arrow()["payload"].to_pylist()) == wanted
    lake.sweep(0, dry_run=False)
    assert payloads(lake) == wanted


def test_a_commit_with_a_lost_answer_counts_once_although_it_drops_snapshots(lake, monkeypatch):
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", MOST)
    commit_table = SqlCatalog.commit_table

    def commit(self, *given):
        commit_table(self, *given)
        raise RESTError("the answer is lost")

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    for number in range(2 * MOST):
        assert lake.commit(APP, number, batch(lake, number), number)
    assert len(snapshots(lake)) == MOST
    assert payloads(lake) == [b"%d" % number for number in range(2 * MOST)]


def test_replaced_files_stay_named_until_they_are_swept(lake, monkeypatch):
    """One snapshot stays for all replacements of a compaction."""
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", MOST)
    paths = three_batches(lake)
    (fourth,) = batch(lake, 3)
    assert lake.commit(APP, 3, [fourth], token())
    replaced = [*paths, fourth.path]
    for path in replaced:
        os.utime(lake._storage.root / path, (OLD, OLD))
    for number, some in enumerate(([0, 1], [2, 3])):
        names = [replaced[one] for one in some]
        assert lake.commit("merge", number, merged(lake, *some), token(), replaced=names)
    for number in range(4, 4 + 3 * MOST):
        assert open_table(lake._storage).commit(APP, number, batch(lake, number), token())
    assert len(snapshots(lake)) == MOST + 1
    first = snapshots(lake)[0]
    named = {
        lake._path(entry.data_file.file_path)
        for manifest in first.manifests(lake._table().io)
        for entry in manifest.fetch_manifest_entry(lake._table().io)
    }
    assert named == set(replaced)
    lake.sweep(7200, dry_run=False)
    assert all((lake._storage.root / path).exists() for path in replaced)
    lake.sweep(0, dry_run=False)
    assert not any((lake._storage.root / path).exists() for path in replaced)
    assert payloads(lake) == sorted(b"%d" % number for number in range(4 + 3 * MOST))


def test_a_snapshot_stays_if_only_it_names_a_file_that_was_replaced_twice(lake, monkeypatch):
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", MOST)
    paths = three_batches(lake)
    (both,) = merged(lake, 0, 1)
    assert lake.commit("merge", 0, [both], token(), replaced=paths[:2])
    last = [both.path, paths[2]]
    assert lake.commit("merge", 1, merged(lake, 0, 1, 2), token(), replaced=last)
    for number in range(3, 3 + 3 * MOST):
        assert lake.commit(APP, number, batch(lake, number), token())
    assert len(snapshots(lake)) == MOST + 2
    for path in (*paths, both.path):
        os.utime(lake._storage.root / path, (OLD, OLD))
    lake.sweep(7200, dry_run=False)
    assert all((lake._storage.root / path).exists() for path in (*paths, both.path))


def test_snapshots_that_others_refer_to_or_have_made_stay(lake, monkeypatch):
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", MOST)
    three_batches(lake)
    tagged = lake._table().current_snapshot().snapshot_id
    lake._table().manage_snapshots().create_tag(tagged, "monday").commit()
    assert lake.commit(APP, 3, batch(lake, 3), token())
    before = lake._table().current_snapshot().snapshot_id
    lake._table().delete("offset = 0")  # a row, and so a file, that only `before` has
    for number in range(4, 4 + 3 * MOST):
        assert lake.commit(APP, number, batch(lake, number), token())
    assert [one.snapshot_id for one in snapshots(lake)][:-MOST] == [tagged, before]
    assert lake._table().refs()["monday"].snapshot_id == tagged


def test_a_catalogue_that_keeps_all_snapshots_commits(lake, monkeypatch):
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", MOST)
    commit_table = SqlCatalog.commit_table

    def commit(self, table, requirements, updates):
        if any(one.action == "remove-snapshots" for one in updates):
            raise RESTError("snapshots cannot be removed")
        return commit_table(self, table, requirements, updates)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    for number in range(2 * MOST):
        assert lake.commit(APP, number, batch(lake, number), token())
    assert len(snapshots(lake)) == 2 * MOST
    assert len(payloads(lake)) == 2 * MOST
