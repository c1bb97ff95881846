"""Compaction: the same rows in fewer files, whoever else writes and whatever is killed at any time."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pandas as pd
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c
from deltalake import DeltaTable

from headrace import connect_blocking
from headrace.errors import OptionError
from headrace.lake import manifests
from headrace.lake.files.reading import check_file, read_ranges, read_topic
from headrace.lake.format import LakeError
from headrace.lake.manifests import Manifests
from headrace.lake.storage.storage import HIDDEN, DirectoryStorage, storage_of
from headrace.lake.table import open_table
from headrace.log.records import pack_record
from headrace.pipeline.audit.job import audit
from headrace.pipeline.compact import compact
from headrace.pipeline.export.job import export
from headrace.pipeline.job import EXPORT_APP
from headrace.pipeline.tasks import LocalRunner
from tests.lake.others import KINDS
from tests.pipeline.lakes import expected, rows_of
from tests.pipeline.made import MadeLake
from tests.pipeline.meddling import Killed, Meddling, kill, tree
from tests.spark.lives import REPOSITORY, environment
from tests.tools import TORTURE, takes_long

POINTS = ("merging", "merged", "committed", "swept")


def run(lake, **given):
    return compact(lake, **{"runner": LocalRunner(), **given})


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    lake = MadeLake(tmp_path_factory.mktemp("made") / "lake")
    for number in range(6):
        lake.batch("a", "ü/..", *(["b"] if number % 2 else []), day=number // 4)
    return lake


@pytest.fixture
def made(template, tmp_path):
    return template.copy(tmp_path / "a lake")


def test_pandas_counts_rows_twice_unless_it_is_done_as_the_guide_says(made):
    run(made.path)
    rows = len(rows_of(made.path))
    assert len(pd.read_parquet(made.path)) == 2 * rows
    guide = (REPOSITORY / "docs" / "pipeline.md").read_text("utf-8")
    (line,) = (one for one in guide.splitlines() if 'DeltaTable("/lake").to_pandas(' in one)
    names = {"DeltaTable": DeltaTable}
    exec(line.replace('"/lake"', repr(str(made.path))), names)
    assert len(names["rows"]) == rows


@pytest.mark.parametrize("by_topic", [False, True])
def test_the_same_rows_are_in_fewer_files(tmp_path, by_topic):
    lake = MadeLake(tmp_path / "lake", by_topic=by_topic)
    for number in range(6):
        lake.batch("a", "ü/..", *(["b"] if number % 2 else []), day=number // 4)
    before, files = rows_of(lake.path), lake.table.files()
    reach = Manifests(storage_of(lake.path)).reach(lake.table.last(EXPORT_APP))
    done = run(lake.path)
    assert (done.merged, done.records, done.bytes) == (
        len(files) - (1 if by_topic else 0),
        len(before) - (5 if by_topic else 0),
        done.bytes,
    )
    assert rows_of(lake.path) == before
    live = lake.table.files()
    assert len(live) == (done.made + 1 if by_topic else done.made) == (6 if by_topic else 2)
    for path in live:
        check_file(storage_of(lake.path).file(path), read_ranges(storage_of(lake.path).file(path)))
        if not by_topic:
            table = pq.ParquetFile(lake.path / path).read(columns=["topic", "offset"])
            order = list(
                zip(*(table[name].to_pylist() for name in ("topic", "offset")), strict=True)
            )
            assert order == sorted(order)
    for topic, payloads in lake.payloads.items():
        got = [
            payload
            for some in read_topic(storage_of(lake.path), lake.table, topic)
            for _, payload in some
        ]
        assert got == payloads
        for offset in (1, 77, 300):
            some = [
                one
                for part in read_topic(storage_of(lake.path), lake.table, topic, offset)
                for one in part
            ]
            assert len(some) < len(payloads)
    # The ranges were joined without reading, yet have the checksum of all bytes of the log.
    first = [
        one
        for path in live
        for one in read_ranges(storage_of(lake.path).file(path))
        if one.topic == "a"
    ]
    data = b"".join(map(pack_record, lake.payloads["a"]))
    assert len(first) == 2
    assert all(one.crc == crc32c(data[one.offset : one.end]) for one in first)
    # Exports know where to continue.
    assert Manifests(storage_of(lake.path)).reach(lake.table.last(EXPORT_APP)) == reach
    assert run(lake.path)[1:-1] == (0,) * 6
    lake.batch("a", day=1)
    assert run(lake.path).merged == 2
    assert len(rows_of(lake.path)) == len(before) + 5


def test_a_dry_run_changes_nothing(made):
    before = tree(made.path)
    done = run(made.path, dry_run=True)
    assert (done.merged, done.made, done.dry_run) == (6, 2, True)
    assert tree(made.path) == before


@pytest.mark.parametrize("point", POINTS)
def test_a_compaction_killed_at_any_point_is_as_one_that_nobody_disturbed(made, point):
    before = rows_of(made.path)
    with pytest.raises(Killed):
        run(made.path, points=Meddling(**{point: kill}))
    assert rows_of(made.path) == before
    made.batch("a", "b", day=1)
    before = rows_of(made.path)
    run(made.path)
    assert rows_of(made.path) == before
    assert len(made.table.files()) == 2


@pytest.mark.parametrize("point", ["merging", "merged", "committed"])
def test_of_two_compactions_at_once_each_file_is_merged_by_one(made, point, monkeypatch):
    """This simulates two machines, where the lock of one does not reach the other."""
    before = rows_of(made.path)
    monkeypatch.setattr(DirectoryStorage, "lock", lambda self, job: nullcontext())
    others = []
    done = run(made.path, points=Meddling(**{point: lambda: others.append(run(made.path))}))
    assert len(others) == 1
    assert done.merged + others[0].merged == 6
    assert done.left + done.merged == 6
    assert rows_of(made.path) == before
    assert len(made.table.files()) == 2
    run(made.path)
    assert rows_of(made.path) == before


@pytest.mark.parametrize("step", ["opened", "looked", "listed"])
def test_another_compaction_at_any_step_of_the_commit(made, step, monkeypatch):
    before = rows_of(made.path)
    meddling = []
    monkeypatch.setattr(DirectoryStorage, "lock", lambda self, job: nullcontext())

    def meddle():
        if meddling:
            meddling.pop()()

    class Meddled(DeltaTable):
        def transaction_version(self, app):
            if step == "opened":
                meddle()
            found = super().transaction_version(app)
            if step == "looked":
                meddle()
            return found

        def get_add_actions(self, flatten=False):
            found = super().get_add_actions(flatten)
            if step == "listed":
                meddle()
            return found

    def arm():
        monkeypatch.setattr("headrace.lake.formats.delta.DeltaTable", Meddled)
        meddling.append(lambda: run(made.path))

    run(made.path, points=Meddling(merged=arm))
    assert not meddling
    assert rows_of(made.path) == before
    assert len(made.table.files()) == 2


@pytest.mark.parametrize("point", ["merging", "merged", "committed"])
def test_an_export_beside_it_loses_nothing(made, point):
    done = run(made.path, points=Meddling(**{point: lambda: made.batch("a", "c", day=1)}))
    assert done.merged == 6
    assert len(rows_of(made.path)) == sum(map(len, made.payloads.values()))
    assert len(made.table.files()) == 3


def test_the_second_on_a_machine_is_refused(made):
    with storage_of(made.path).lock("compact"), pytest.raises(LakeError) as refused:
        run(made.path)
    assert str(refused.value) == f"another compact writes to {made.path} (process {os.getpid()})"


def test_a_damaged_file_is_named_and_stays(made):
    (path,) = (one for one in made.path.rglob("*.parquet") if b"a 0 " in one.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(b"a 0 ")] ^= 1
    path.write_bytes(data)
    live = made.table.files()
    with pytest.raises(LakeError, match=f"{path.name}.*(cannot be read|a checksum fails)"):
        run(made.path)
    assert made.table.files() == live
    path.unlink()
    with pytest.raises(LakeError, match=f"{path.name} cannot be read: .*No such file"):
        run(made.path)


def test_records_that_are_there_twice_are_not_merged(made):
    """Whatever the cause, they are still two rows, and someone has to look at it."""
    again = MadeLake(made.path.parent / "other")
    (path,) = again.batch("a")
    (made.path / path).write_bytes((again.path / path).read_bytes())
    text = max((again.path / "_delta_log").glob("*.json")).read_text()
    version = len(list((made.path / "_delta_log").glob("*.json")))
    lines = [line for line in text.splitlines() if '"txn"' not in line]
    (made.path / "_delta_log" / f"{version:020}.json").write_text("\n".join(lines))
    assert len(made.table.files()) == 7
    with pytest.raises(LakeError, match="of topic 'a' appear twice"):
        run(made.path)


def test_old_files_are_swept_and_no_others(made, monkeypatch):
    monkeypatch.setattr("headrace.pipeline.job.check", lambda given: None)  # of `sweep_after_s`
    before = rows_of(made.path)
    with pytest.raises(Killed):
        run(made.path, points=Meddling(merged=kill))
    assert run(made.path, sweep_after_s=7200).swept == 0
    assert len(list(made.path.glob("date=*/*"))) == 6 + 2 + 2
    assert run(made.path, sweep_after_s=0).swept == 8
    assert rows_of(made.path) == before
    assert len(list(made.path.glob("date=*/*"))) == 2
    last = made.table.last(EXPORT_APP)
    assert Manifests(storage_of(made.path)).reach(last).ends["b"].ordinal == 15


def test_bad_input_is_refused_and_nothing_is_written(made, tmp_path):
    def refused(kind, lake, **given):
        before = tree(tmp_path)
        with pytest.raises(kind) as error:
            run(lake, **given)
        assert tree(tmp_path) == before
        return str(error.value)

    gone = tmp_path / "gone"
    assert refused(LakeError, gone) == (f"{gone} is not a lake of Headrace: it does not exist")
    (tmp_path / "notes.txt").touch()
    assert "is not a directory: " in refused(LakeError, tmp_path / "notes.txt")
    assert "holds something else than a lake of Headrace (a lake)" in refused(LakeError, tmp_path)
    assert "sweep_after_s must be at least 3600 seconds, not 60" in refused(
        OptionError, made.path, sweep_after_s=60
    )
    assert "file_bytes must be at least 1 bytes" in refused(OptionError, made.path, file_bytes=0)
    (commit, *_) = sorted((made.path / "_delta_log").glob("*.json"))
    commit.write_text(commit.read_text().replace('"headrace.format":"3"', '"headrace.format":"4"'))
    assert "newer version (format 4, this one writes 3)" in refused(LakeError, made.path)


def test_exports_of_a_real_server_go_on_after_every_compaction(server, tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "SINCE_MAX", 2)
    lake = tmp_path / "lake"
    payloads = {topic: [] for topic in ("compacted/a", "compacted/b")}
    chance = random.Random(3)
    for turn in range(3):
        with connect_blocking(server.figg_url) as client:
            for _ in range(20):
                for topic, known in payloads.items():
                    known.append(chance.randbytes(chance.choice([0, 1, 300])))
                    client.publish_nowait(topic, known[-1])
            client.flush(60)
        given = {"url": server.http_url, "runner": LocalRunner()}
        export(lake, payloads, **given, batch_bytes=2000, part_bytes=700)
        done = run(lake)
        assert done.made == 1, turn
        for path in lake.glob(f"{HIDDEN}/*/*.json"):
            os.utime(path, (turn, turn))
        assert rows_of(lake) == expected(server, payloads)
        found = audit(lake, payloads, **given)
        assert (found.lost, found.files, [one.records for one in found.topics]) == (
            *(False, 1),
            [20 * turn + 20] * 2,
        )
    # Most manifests are merged into one, which says the same, and compactions have deleted some of them.
    found = Manifests(storage_of(lake))
    names = found.names(open_table(storage_of(lake)).last(EXPORT_APP))
    merged = found.read_merged(names.merged)
    assert merged.batches > 2 >= len(names.single) - 1
    assert not list(lake.glob(f"{HIDDEN}/batches/{0:012}-*"))
    path = lake / HIDDEN / names.merged
    path.write_bytes(path.read_bytes()[:-9])
    (finding,) = (one for one in audit(lake, **given).all_findings() if one.file)
    assert (finding.kind, finding.file) == ("damaged", f"{HIDDEN}/{names.merged}")


KILLED = """
import sys
import headrace.lake.formats.delta, headrace.lake.formats.iceberg, headrace.lake.formats.parquet
from headrace.pipeline.compact import compact
from headrace.pipeline.tasks import LocalRunner
print("ready", flush=True)
compact(sys.argv[1], runner=LocalRunner())
"""


@takes_long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_compactions_killed_at_random_beside_an_export_lose_and_double_nothing(tmp_path, kind):
    made = MadeLake(tmp_path / "lake", kind=kind)
    chance = random.Random(TORTURE)
    for number in range(TORTURE):
        command = [sys.executable, "-c", KILLED, str(made.path)]
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as driver:
            assert driver.stdout.readline() == b"ready\n"
            until = time.monotonic() + chance.uniform(0, 0.8)
            while time.monotonic() < until:
                made.batch("a", "b", day=number % 3 + 1, count=2)
            driver.send_signal(signal.SIGKILL)
        found = rows_of(made.path)
        assert len(found) == len(set(found))
        if kind == "parquet":
            # The file with some of the rows may not be visible yet.
            made.table.sync()
            found = rows_of(made.path)
        assert len(found) == sum(map(len, made.payloads.values()))
    run(made.path)
    assert len(rows_of(made.path)) == sum(map(len, made.payloads.values()))
    assert len(made.table.files()) <= 4
