"""Jobs on lakes of the formats `parquet` and `iceberg`: the same as on Delta, whatever is killed at any time.

Elsewhere: promises of the tables of each format are in tests/lake; more about each job is in its own tests,
on Delta.
"""

import sqlite3
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace

import duckdb
import pyarrow.parquet as pq
import pytest

from headrace import connect_blocking
from headrace.cli.main import main
from headrace.client.topics.lake import open_lake
from headrace.lake.format import LakeError
from headrace.lake.formats.parquet import ParquetLake
from headrace.lake.storage.storage import DirectoryStorage, storage_of
from headrace.lake.table import open_table
from headrace.pipeline import aggregate, audit, compact, export, replay, report
from headrace.pipeline.audit import files as audit_files
from headrace.pipeline.tasks import LocalRunner
from tests.lake.others import of_iceberg
from tests.pipeline.export.exporter import exporters
from tests.pipeline.export.test_job import POINTS, Published, check_manifests
from tests.pipeline.lakes import rows_of
from tests.pipeline.made import MadeLake
from tests.pipeline.meddling import Killed, Meddling, kill
from tests.pipeline.replayed import payloads_of
from tests.tools import TORTURE, usually

RUNNER = LocalRunner()
KINDS = ("parquet", "iceberg")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def published(server):
    made = Published(server)
    made.more(20)
    return made


@pytest.fixture
def made(tmp_path, kind):
    lake = MadeLake(tmp_path / "a lake", kind=kind)
    for number in range(4):
        lake.batch("a", "ü/..", *(["b"] if number % 2 else []), day=number // 3)
    return lake


def test_an_export_killed_at_any_point_leaves_no_trace_for_anyone(published, tmp_path, kind):
    lake = tmp_path / "lake"
    given = {
        "lake": str(lake),
        "url": published.server.http_url,
        "pattern": published.pattern,
        "format": kind,
    }
    with exporters(tmp_path) as processes:
        # A usual run kills an export of one format or of the other at each point.
        for number, point in enumerate(POINTS if TORTURE else POINTS[KINDS.index(kind) :: 2]):
            processes.kill_at(
                point, **given, batch_bytes=4000 + number, part_bytes=1500 - 100 * number
            )
            rows = rows_of(lake)
            assert len(set(rows)) == len(rows)
            held = {row.topic: row.ordinal + 1 for row in rows}
            told = published.cursors()
            assert all(ordinal <= held.get(name, 0) for name, (_, ordinal) in told.items())
            published.more(2)
        done = processes.finish(**given)
        assert done.get("records"), done
    check_manifests(published.server, lake)
    assert rows_of(lake) == published.rows
    assert published.cursors() == published.ends
    found = audit(lake, published.payloads, url=published.server.http_url, runner=RUNNER)
    assert not found.lost


@pytest.mark.parametrize(
    ("kind", "point"),
    usually(
        [
            *(("parquet", "merging"), ("iceberg", "merged")),
            *(("parquet", "committed"), ("iceberg", "swept")),
        ],
        product(KINDS, ["merging", "merged", "committed", "swept"]),
    ),
)
def test_a_compaction_killed_at_any_point_keeps_every_row(made, point):
    before = rows_of(made.path)
    with pytest.raises(Killed):
        compact(made.path, runner=RUNNER, points=Meddling(**{point: kill}))
    assert rows_of(made.path) == before
    made.batch("a", "b", day=1)
    before = rows_of(made.path)
    compact(made.path, runner=RUNNER)
    assert rows_of(made.path) == before
    assert len(made.table.files()) == 2
    assert not audit(made.path, runner=RUNNER).lost


@pytest.mark.parametrize(
    ("kind", "point"),
    usually(
        [("iceberg", "merging"), ("parquet", "merged"), ("iceberg", "committed")],
        product(KINDS, ["merging", "merged", "committed"]),
    ),
)
def test_exports_and_another_compaction_beside_one_lose_nothing(made, point, monkeypatch):
    monkeypatch.setattr(DirectoryStorage, "lock", lambda self, job: nullcontext())

    def meanwhile():
        made.batch("a", "c", day=1)
        compact(made.path, runner=RUNNER)

    compact(made.path, runner=RUNNER, points=Meddling(**{point: meanwhile}))
    assert len(rows_of(made.path)) == sum(map(len, made.payloads.values()))
    compact(made.path, runner=RUNNER)
    rows = rows_of(made.path)
    assert len(rows) == len(set(rows)) == sum(map(len, made.payloads.values()))
    assert len(made.table.files()) == 2
    assert not audit(made.path, runner=RUNNER).lost


@pytest.mark.parametrize(
    ("kind", "by_topic"),
    usually([("parquet", True), ("iceberg", False)], product(KINDS, [False, True])),
)
def test_all_jobs_read_it(server, tmp_path, kind, by_topic):
    made = MadeLake(tmp_path / "lake", kind=kind, by_topic=by_topic)
    for day in (0, 0, 1):
        made.batch("a", "b", day=day)
    target = f"{tmp_path.name}/{kind}"
    done = replay(made.path, "a", target, url=server.http_url, runner=RUNNER)
    assert done.records == 15
    assert payloads_of(server, target) == made.payloads["a"]
    assert compact(made.path, runner=RUNNER).made == (2 if by_topic else 1)
    assert replay(made.path, "a", target, url=server.http_url, runner=RUNNER).records == 0
    counted = report(tmp_path / "page.html", lake=made.path, url=server.http_url, runner=RUNNER)
    assert counted.messages >= 30
    into = tmp_path / "states"
    assert aggregate(made.path, into, reducer="count", runner=RUNNER).topics == 2
    got = [payload for some in open_lake(made.path)("b", 0) for _, payload in some]
    assert got == made.payloads["b"]
    found = audit(made.path, runner=RUNNER)
    assert (found.lost, [topic.records for topic in found.topics]) == (False, [15, 15])


def test_decoded_columns_are_in_it(server, tmp_path, kind):
    topic = f"decoded/{kind}"
    with connect_blocking(server.figg_url) as client:
        for payload in (b'{"id": 1, "tags": ["x"], "more": {"y": 0.5}, "n": {"k": 2}}', b"no JSON"):
            client.publish(topic, payload)
    lake = tmp_path / "lake"
    columns = "id bigint, tags array<string>, more struct<y double>, n map<string, bigint>"
    given = {"url": server.http_url, "format": kind, "runner": RUNNER}
    export(lake, [topic], **given, decode="json", schema=columns)
    with connect_blocking(server.figg_url) as client:
        client.publish(topic, b'{"id": 3}')
    export(lake, [topic], **given)
    compact(lake, runner=RUNNER)
    names = ["id", "tags", "more", "n"]
    (file,) = (lake / path for path in open_table(storage_of(lake)).files())
    found = [tuple(row.values()) for row in pq.ParquetFile(file).read(names).to_pylist()]
    first = (1, ["x"], {"y": 0.5}, [("k", 2)])
    assert found == [first, (None,) * 4, (3, None, None, None)]
    if kind == "iceberg":
        found = of_iceberg(lake).select(names).to_pylist()
        assert [tuple(row.values()) for row in found] == [first, (None,) * 4, (3, None, None, None)]


def damaged(lake):
    found = audit(lake, runner=RUNNER)
    assert found.lost
    return {(one.kind, one.file) for one in found.all_findings() if one.file}


def test_an_audit_names_what_is_damaged_or_gone(made, monkeypatch):
    checked = lambda work: audit_files._Check(work).run()  # noqa: E731 - another process takes a second
    monkeypatch.setattr(audit_files, "_in_another_process", checked)
    path = next(path for path in made.table.files() if b"a 0 " in (made.path / path).read_bytes())
    whole = (made.path / path).read_bytes()
    wrong = bytearray(whole)
    wrong[whole.index(b"a 0 ")] ^= 1
    (made.path / path).write_bytes(wrong)
    assert damaged(made.path) == {("damaged", path)}
    (made.path / path).write_bytes(whole)
    assert not audit(made.path, runner=RUNNER).lost
    (made.path / path).unlink()
    assert damaged(made.path) == {("missing", path)}


@pytest.mark.parametrize(
    "change", ["least_topic = 'b'", "most_topic = '1'", "most_offset = most_offset - 1"]
)
def test_an_audit_holds_what_the_registry_says_against_the_files(tmp_path, change):
    made = MadeLake(tmp_path / "lake", kind="parquet")
    (path,) = made.batch("a")
    database = sqlite3.connect(made.path / "_headrace" / "files.db")
    with database:
        database.execute(f"update files set {change}")
    database.close()
    (one,) = audit(made.path, runner=RUNNER).all_findings()
    assert (one.kind, one.file) == ("damaged", path)
    assert one.reason.startswith("the table says that its ")


def test_an_audit_holds_what_an_iceberg_table_says_against_the_files(tmp_path, monkeypatch):
    from headrace.lake.formats.iceberg import IcebergLake  # the import takes seconds

    data_file = IcebergLake._data_file

    def wrong(self, table, one):
        found = data_file(self, table, one)
        found.upper_bounds[3] = bytes(8)  # the column of offsets
        return found

    made = MadeLake(tmp_path / "lake", kind="iceberg")
    made.batch("a")
    monkeypatch.setattr(IcebergLake, "_data_file", wrong)
    (path,) = made.batch("a")
    assert damaged(made.path) == {("damaged", path)}


def in_pause(monkeypatch, action) -> None:
    """Run an action before an audit looks for the second time; other threads sleep as usual."""
    pause = SimpleNamespace(sleep=lambda _: action())
    monkeypatch.setattr(sys.modules["headrace.pipeline.audit.job"], "time", pause)


def test_an_audit_beside_jobs_that_go_on_and_on_does_not_blame_their_hint(tmp_path, monkeypatch):
    made = MadeLake(tmp_path / "lake", kind="iceberg")
    hint = made.path / "metadata" / "version-hint.text"
    old = [hint.read_bytes()]
    for _ in range(3):
        made.batch("a")
        old.append(hint.read_bytes())
    hint.write_bytes(old[0])
    in_pause(monkeypatch, lambda: None)
    assert damaged(made.path) == {("missing", "metadata/version-hint.text")}
    in_pause(monkeypatch, lambda: hint.write_bytes(old[1]))
    assert not audit(made.path, runner=RUNNER).lost


def test_an_audit_notes_files_that_others_take_for_rows_of_the_lake(tmp_path):
    made = MadeLake(tmp_path / "lake", kind="parquet")
    (path,) = made.batch("a")
    shown = made.path / made.table.shown(path)
    shown.with_name("copy.parquet").write_bytes(shown.read_bytes())
    found = audit(made.path, runner=RUNNER)
    (note,) = found.notes
    assert (found.lost, note.startswith(f"{shown.parent.name}/copy.parquet: ")) == (False, True)


def test_an_audit_of_a_table_that_is_damaged_behind_its_front_looks_at_the_log(published, tmp_path):
    lake = tmp_path / "lake"
    published.export(lake, format="iceberg")
    for path in (lake / "metadata").glob("*.avro"):
        path.write_bytes(path.read_bytes()[:-9])
    assert open_table(storage_of(lake)).kind == "iceberg"
    found = audit(lake, published.payloads, url=published.server.http_url, runner=RUNNER)
    assert [(one.kind, one.file) for one in found.all_findings()] == [("damaged", "metadata")]
    assert [topic.records for topic in found.topics] == [
        len(published.payloads[name]) for name in sorted(published.payloads)
    ]
    for job in (partial(compact, runner=RUNNER), partial(published.export, format="iceberg")):
        with pytest.raises(LakeError, match=r"lake/metadata cannot be read: "):
            job(lake)


def test_an_audit_looks_at_what_others_see_as_well(tmp_path):
    made = MadeLake(tmp_path / "lake", kind="parquet")
    (path,) = made.batch("a")
    seen = made.path / made.table.shown(path)
    data = seen.read_bytes()
    seen.unlink()
    assert damaged(made.path) == {("missing", made.table.shown(path))}
    seen.write_bytes(data)
    assert not audit(made.path, runner=RUNNER).lost
    seen.write_bytes(data[:-1])
    assert damaged(made.path) == {("damaged", made.table.shown(path))}


def test_an_audit_beside_a_job_that_is_about_to_show_a_file_finds_nothing(tmp_path, monkeypatch):
    lake = MadeLake(tmp_path / "lake", kind="parquet")
    [path] = lake.batch("a")
    shown = lake.path / lake.table.shown(path)
    shown.unlink()
    in_pause(monkeypatch, lake.table.sync)
    assert not audit(lake.path, runner=LocalRunner()).lost
    assert shown.exists()


def test_the_next_job_shows_what_a_killed_one_has_left(published, tmp_path, monkeypatch):
    lake = tmp_path / "lake"
    published.export(lake, format="parquet")
    for next_job in (published.export, compact):
        before = rows_of(lake)
        published.more(3)
        with monkeypatch.context() as patch:
            patch.setattr(ParquetLake, "_show", lambda self, only=None: kill() if only else None)
            with pytest.raises(Killed):
                published.export(lake, format="parquet")
        assert rows_of(lake) == before
        assert {one.kind for one in audit(lake, runner=RUNNER).all_findings()} == {"missing"}
        given = {"format": "parquet"} if next_job != compact else {"runner": RUNNER}
        next_job(lake, **given)
        assert rows_of(lake) == published.rows
        assert not audit(lake, runner=RUNNER).lost


def test_a_lake_has_one_format(published, tmp_path, capsys):
    lake = tmp_path / "lake"
    published.export(lake, format="parquet")
    with pytest.raises(LakeError, match="is a lake of the format parquet: give --format parquet"):
        published.export(lake, format="delta")
    command = ["pipeline", "export", "--once", "--lake", str(lake), "--format", "iceberg"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--http", published.server.http_url])
    assert ended.value.code == 1
    assert "is a lake of the format parquet: give --format parquet" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["parquet", "iceberg"])
def test_what_was_decided_of_a_lake_need_not_be_said_again(published, tmp_path, kind):
    lake = tmp_path / "lake"
    published.export(lake, format=kind, by_topic=True)
    published.more(2)
    assert published.export(lake).records == 6
    assert (open_table(storage_of(lake)).kind, open_table(storage_of(lake)).shape.by_topic) == (
        kind,
        True,
    )
    with pytest.raises(LakeError, match="is partitioned by topic and date: give --by-topic"):
        published.export(lake, by_topic=False)


def test_commands_take_all_they_need_from_their_file_and_audit_a_lake_alone(
    published, shared_spark, tmp_path, capsys
):
    assert shared_spark
    config, lake = tmp_path / "headrace.toml", tmp_path / "lake"
    address = published.server.http_url.removeprefix("http://")
    into = {"aggregate_into": "states", "dedupe_into": "rows", "report_out": "page.html"}
    settings = {"lake": lake, "reducer": "count", "dedupe_key": "payload"}
    settings |= {name: tmp_path / place for name, place in into.items()}
    lines = [f'{name} = "{value}"' for name, value in settings.items()]
    config.write_text("\n".join([f'listen.http = "{address}"', "[pipeline]", *lines]))
    export_all = ["export", "--once", "--pattern", published.pattern]
    for job in (export_all, ["aggregate"], ["dedupe"], ["report"], ["audit", "--no-log"]):
        with pytest.raises(SystemExit) as ended:
            main(["pipeline", *job, "--config", str(config)])
        assert ended.value.code == 0, capsys.readouterr()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"exported {published.records:,} records")
    assert said[-1].startswith("nothing lost")
    assert all((tmp_path / place).exists() for place in into.values())


def test_a_lake_has_a_path_or_an_address(published, tmp_path):
    published.export(f"file://{tmp_path}/lake")
    assert len(rows_of(tmp_path / "lake")) == published.records
    assert published.export(tmp_path / "lake").batches == 0
    with pytest.raises(LakeError, match="ftp://host/lake has the unknown scheme ftp: give a dir"):
        published.export("ftp://host/lake")


def test_what_iceberg_needs_is_said(tmp_path, monkeypatch):
    for name in ("iceberg", "catalogue"):
        monkeypatch.delitem(sys.modules, f"headrace.lake.formats.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog.sql", None)
    with pytest.raises(LakeError, match=r"this needs: pip install 'headrace\[iceberg\]'"):
        export(tmp_path / "lake", ["t"], url="http://127.0.0.1:1", format="iceberg", runner=RUNNER)
    assert list(tmp_path.iterdir()) == []


def test_spark_writes_it_and_reads_it(published, shared_spark, tmp_path):
    """Spark's tasks write the lake, and Spark's own reader of directories reads it."""
    lake = tmp_path / "lake"
    given = {"url": published.server.http_url, "pattern": published.pattern}
    export(lake, **given, format="parquet", by_topic=True)
    rows = shared_spark.read.parquet(str(lake))
    assert rows.columns[-1] == "date"
    assert rows.count() == published.records
    assert {row.topic for row in rows.select("topic").distinct().collect()} == set(
        published.payloads
    )
    counted = duckdb.read_parquet(f"{lake}/**/*.parquet").aggregate("topic, count(*)").fetchall()
    assert dict(counted) == {name: len(some) for name, some in published.payloads.items()}
    assert rows_of(lake) == published.rows
