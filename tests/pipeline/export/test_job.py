"""Exports from a real server: every record once, whatever is killed at any time; refusals; reports.

Most exports run their tasks in their own process. Tests with Spark are at the end.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest
from crc32c import crc32c
from deltalake import DeltaTable

import headrace.channels
from headrace import connect_blocking
from headrace.cli.main import main
from headrace.lake.files.reading import check_file, read_topic
from headrace.lake.format import LakeError, LostRange
from headrace.lake.formats.delta import DeltaLake
from headrace.lake.storage.storage import storage_of
from headrace.pipeline import export
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import JobError, LocalRunner, SparkRunner
from headrace.reader.decode import DamageError
from headrace.reader.http_client import HttpClient
from headrace.reader.view import parse_place
from headrace.testing import ServerProcess, wait_until
from tests.lake.others import KINDS
from tests.pipeline.export.exporter import exporters
from tests.pipeline.lakes import Row, cursors_of, ends_of, expected, manifests_of, rows_of
from tests.spark.lives import environment, session_members
from tests.spark.support import JAVA_OPTIONS, require_java, send, topics_of, wait_applied
from tests.tools import TORTURE, takes_long

_numbers = itertools.count()
POINTS = ("planned", "writing", "written", "noted", "committed", "verified", "moved")


class Published:
    """Published payloads by topic. The topics of a test have the same prefix."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.prefix = f"in{next(_numbers)}"
        self._chance = random.Random(5)
        names = ("a", "b", "ü/..")
        self.payloads: dict[str, list[bytes]] = {f"{self.prefix}/{name}": [] for name in names}

    @property
    def pattern(self) -> str:
        return f"{self.prefix}/.*"

    def more(self, count: int = 50) -> None:
        with connect_blocking(self.server.figg_url) as client:
            for _ in range(count):
                for topic, known in self.payloads.items():
                    known.append(self._chance.randbytes(self._chance.choice([0, 1, 30, 300])))
                    client.window(30)
                    client.publish_nowait(topic, known[-1])
            client.flush(60)

    @property
    def records(self) -> int:
        return sum(map(len, self.payloads.values()))

    @property
    def rows(self) -> list[Row]:
        return expected(self.server, self.payloads)

    def cursors(self, reader: str = "lake") -> dict[str, tuple[int, int]]:
        return self._ours(cursors_of(self.server, reader))

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        return self._ours(ends_of(self.server))

    def _ours(self, found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        return {name: at for name, at in found.items() if name in self.payloads}

    def export(self, lake: Path, **given: Any) -> Any:
        place = {} if given.keys() & {"url", "data_dir"} else {"url": self.server.http_url}
        which = {} if given.keys() & {"topics", "pattern"} else {"pattern": self.pattern}
        return export(lake, **{"runner": LocalRunner(), **place, **which, **given})


@pytest.fixture
def published(server: ServerProcess) -> Published:
    made = Published(server)
    made.more()
    return made


def check_manifests(server: ServerProcess, lake: Path) -> None:
    """Check that ranges are contiguous, equal those of the log, and equal the content of the files."""
    ends: dict[str, tuple[int, int]] = {}
    with closing(HttpClient(parse_place(server.http_url, ""))) as http:
        for number, manifest in enumerate(manifests_of(lake)):
            assert manifest.number == number
            for one in sorted(manifest.ranges):
                assert ends.get(one.topic, (0, 0)) == (one.offset, one.ordinal)
                ends[one.topic] = one.end, one.end_ordinal
                data, at = b"", one.offset
                while at < one.end:
                    asked = {"topic": one.topic, "from": at, "to": one.end}
                    data += http.send("GET", "/v1/range", asked)
                    at = one.offset + len(data)
                assert crc32c(data) == one.crc
            for place, file in enumerate(manifest.files):
                ranges = [one._replace(file=0) for one in manifest.ranges if one.file == place]
                check_file(storage_of(lake).file(file.path), ranges)
                assert sum(one.rows for one in ranges) == file.rows
            assert manifest.start.keys() == manifest.end.keys()


def test_every_record_is_in_the_lake_once(published, tmp_path):
    lake = tmp_path / "a lake"
    done = published.export(lake)
    assert (done.batches, done.records, done.topics, done.lost) == (1, published.records, 3, 0)
    assert done.told
    assert rows_of(lake) == published.rows
    assert published.export(lake).batches == 0
    published.more(7)
    # Small batches and parts give more files, and the same rows.
    done = published.export(lake, batch_bytes=500, part_bytes=300)
    assert (done.batches > 2, done.records) == (True, 21)
    assert rows_of(lake) == published.rows
    check_manifests(published.server, lake)
    assert published.cursors() == published.ends
    assert published.cursors("lake:start") == dict.fromkeys(published.payloads, (0, 0))
    table = DeltaLake.open(storage_of(lake))
    for topic, payloads in published.payloads.items():
        got = [
            payload for some in read_topic(storage_of(lake), table, topic) for _, payload in some
        ]
        assert got == payloads


def test_others_read_it_without_spark(published, tmp_path):
    published.export(tmp_path / "lake")
    table = DeltaTable(str(tmp_path / "lake"))
    database = duckdb.connect()
    database.register("lake", table.to_pyarrow_dataset())
    counted = database.sql(
        "select topic, count(*), sum(octet_length(payload)) from lake group by 1"
    )
    assert sorted(counted.fetchall()) == [
        (topic, len(payloads), sum(map(len, payloads)))
        for topic, payloads in sorted(published.payloads.items())
    ]
    found = database.execute(
        'select topic, "offset", payload from read_parquet(?, hive_partitioning = true)',
        [table.file_uris()],
    ).fetchall()
    assert sorted(found) == [(row.topic, row.offset, row.payload) for row in published.rows]


def test_topics_are_chosen_and_may_have_directories_of_their_own(published, tmp_path):
    lake = tmp_path / "lake"
    *others, name = published.payloads
    assert published.export(lake, topics=[name], by_topic=True).topics == 1
    assert published.export(lake, pattern=f"{published.prefix}/[ab]", by_topic=True).topics == 2
    assert rows_of(lake) == published.rows
    assert {one["topic"] for one in DeltaTable(str(lake)).partitions()} == {*others, name}
    assert len({path.parent.parent for path in lake.rglob("*.parquet")}) == 3


def test_a_data_directory_is_read_as_well_and_nobody_is_told(published, tmp_path):
    wait_applied(published.server, *published.payloads)
    place = {"data_dir": str(published.server.data_dir)}
    assert not published.export(tmp_path / "lake", **place).told
    assert rows_of(tmp_path / "lake") == published.rows
    assert published.cursors() == {}
    # The server is told if it is named beside the directory.
    assert published.export(tmp_path / "lake", url=published.server.http_url, **place).told
    assert published.cursors() == published.ends


def test_an_export_killed_at_any_point_leaves_no_trace_in_the_lake(published, tmp_path):
    """The lake is compared row for row with an undisturbed export, and with the published records."""
    lake = tmp_path / "lake"
    given = {"lake": str(lake), "url": published.server.http_url, "pattern": published.pattern}
    with exporters(tmp_path) as made:
        for number, point in enumerate(POINTS):
            made.kill_at(point, **given, batch_bytes=9000 + number, part_bytes=3000 - 300 * number)
            rows = rows_of(lake)
            assert len(set(rows)) == len(rows)
            # The log may only remove records that are in the lake.
            held = {row.topic: row.ordinal + 1 for row in rows}
            told = published.cursors()
            assert all(ordinal <= held.get(name, 0) for name, (_, ordinal) in told.items())
            published.more(3)
        done = made.finish(**given)
        assert done.get("records"), done
    check_manifests(published.server, lake)
    undisturbed = tmp_path / "undisturbed"
    published.export(undisturbed, take_over=True)
    assert rows_of(lake) == rows_of(undisturbed) == published.rows
    assert published.cursors() == published.ends
    # Files written in vain are still there, and no reader uses them.
    live = DeltaTable(str(lake)).file_uris()
    assert len(list(lake.rglob("*.parquet"))) > len(live)


def test_a_server_killed_in_the_middle_of_batches_is_waited_for(own_server, tmp_path):
    published = Published(own_server)
    published.more(20)

    def restart() -> None:
        own_server.kill()
        own_server.start()

    times = Meddling(writing=restart, verified=restart)
    published.export(tmp_path / "lake", batch_bytes=2000, points=times)
    assert rows_of(tmp_path / "lake") == published.rows
    assert published.cursors() == published.ends


@takes_long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_exports_killed_at_random_lose_and_double_nothing(own_server, tmp_path, kind):
    published = Published(own_server)
    chance = random.Random(TORTURE)
    lake = tmp_path / "lake"
    given = {"lake": str(lake), "url": own_server.http_url, "format": kind}
    with exporters(tmp_path) as made:
        for number in range(TORTURE):
            published.more(5)
            sizes = {
                "batch_bytes": chance.randint(500, 9000),
                "part_bytes": chance.randint(200, 3000),
            }
            made.kill_after(chance.uniform(0, 0.5), **given, **sizes)
            found = rows_of(lake)
            assert len(found) == len(set(found))
            if number % 7 == 3:
                own_server.kill()
                own_server.start()
        made.finish(**given)
    assert rows_of(lake) == published.rows
    check_manifests(own_server, lake)


class Meddling:
    """Named points at which an action runs."""

    directory = ""

    def __init__(self, **actions: Any) -> None:
        self._actions = actions

    def here(self, name: str) -> None:
        self._actions.pop(name, lambda: None)()


def test_what_a_deleted_topic_took_with_it_is_counted(published, tmp_path, caplog):
    lake = tmp_path / "lake"
    name = f"{published.prefix}/a"
    published.export(lake)
    published.more(2)
    send(published.server, "DELETE", "/v1/topic", name=name)
    before = rows_of(lake)
    done = published.export(lake)
    assert (done.lost, done.records) == (2, 4)
    assert (
        f'2 records so far were deleted before they could be exported, for example of topic "{name}"'
        in (caplog.text)
    )
    assert "retention.wait_for" in caplog.text
    assert manifests_of(lake)[-1].lost == (LostRange(name, 50, 52),)
    # The loss is noted once, and a new life of the topic continues after it.
    assert published.export(lake).batches == 0
    with connect_blocking(published.server.figg_url) as client:
        client.publish(name, b"again")
    assert published.export(lake).records == 1
    row = rows_of(lake)[50]
    assert (row.topic, row.ordinal, row.payload) == (name, 52, b"again")
    assert row.epoch > before[0].epoch


@pytest.mark.parametrize("again", [False, True], ids=["for good", "and made again"])
def test_a_topic_that_ends_while_it_is_exported_is_counted(published, tmp_path, again):
    """The topic ends between the plan and the tasks that read it; all other topics are exported."""
    lake = tmp_path / "lake"
    name = f"{published.prefix}/a"

    def end() -> None:
        send(published.server, "DELETE", "/v1/topic", name=name)
        if again:
            with connect_blocking(published.server.figg_url) as client:
                client.publish(name, b"again")

    done = published.export(lake, points=Meddling(planned=end), batch_bytes=4000)
    assert (done.lost, done.records) == (50, 100)
    assert {row.topic for row in rows_of(lake)} == published.payloads.keys() - {name}
    lost = [one for manifest in manifests_of(lake) for one in manifest.lost]
    assert sum(one.end_ordinal - one.ordinal for one in lost) == 50
    assert {one.topic for one in lost} == {name}
    # Later records are exported, and nothing is counted as lost twice.
    done = published.export(lake)
    assert (done.lost, done.records) == (0, int(again))


def test_a_topic_that_ends_while_spark_starts_is_counted_and_one_that_begins_is_exported(
    published, tmp_path
):
    lake = tmp_path / "lake"
    name, new = f"{published.prefix}/a", f"{published.prefix}/new"

    class SlowRunner(LocalRunner):
        started = False

        def start(self) -> None:
            if self.started:
                return
            self.started = True
            send(published.server, "DELETE", "/v1/topic", name=name)
            with connect_blocking(published.server.figg_url) as client:
                client.publish(new, b"new")

    done = published.export(lake, runner=SlowRunner())
    assert (done.lost, done.records) == (50, 101)
    assert {row.topic for row in rows_of(lake)} == published.payloads.keys() - {name} | {new}
    done = published.export(lake)
    assert (done.lost, done.records) == (0, 0)


def test_rooms_that_everyone_leaves_while_they_are_exported_end_no_export(tmp_path):
    """A channel is destroyed after its grace period, here in the middle of a batch."""
    lake = tmp_path / "lake"
    with ServerProcess(tmp_path / "data", "--set=channels.grace_s=0.05") as server:
        given = {"url": server.http_url, "runner": LocalRunner()}
        address = f"channel://{server.ws[0]}:{server.ws[1]}/room"
        with headrace.channels.join_blocking(address, processor="one") as room:
            room.send({"n": 1}, timeout_s=30)
            assert export(lake, **given).records == 1
            room.send({"n": 2}, timeout_s=30)

            def leave() -> None:
                room.leave(30)
                wait_until(lambda: not topics_of(server), 60, "the channel to be destroyed")

            done = export(lake, **given, points=Meddling(planned=leave))
        assert (done.records, done.lost) == (0, 1)
        assert export(lake, **given)[1:] == (0, 0, 0, 0, 0, 0, True)


def test_bad_input_is_refused_and_nothing_is_written(published, tmp_path):
    def refused(kind: type[Exception], lake: Path, **given: Any) -> str:
        before = sorted(map(str, tmp_path.rglob("*")))
        with pytest.raises(kind) as error:
            published.export(lake, **given)
        assert sorted(map(str, tmp_path.rglob("*"))) == before
        return str(error.value)

    new = tmp_path / "new"
    assert refused(JobError, new, topics=["nope"]) == "there is no topic 'nope' to export"
    (tmp_path / "notes.txt").touch()
    assert "holds something else" in refused(LakeError, tmp_path)
    below = tmp_path / "notes.txt" / "lake"
    assert refused(LakeError, below) == f"{below} cannot be written to: Not a directory"
    assert "unknown lake format" in refused(LakeError, new, format="csv")
    published.export(new)
    assert "leave out --by-topic" in refused(LakeError, new, by_topic=True)
    (commit, *_) = sorted((new / "_delta_log").glob("*.json"))
    commit.write_text(commit.read_text().replace('"headrace.format":"3"', '"headrace.format":"4"'))
    assert "newer version (format 4, this one writes 3)" in refused(LakeError, new)


def test_a_missing_or_cut_file_of_the_last_batch_is_named(published, tmp_path):
    published.export(tmp_path / "lake")
    (path,) = (tmp_path / "lake").rglob("*.parquet")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(LakeError, match=f"{path.name} has {len(data) - 1} bytes instead of"):
        published.export(tmp_path / "lake")
    path.unlink()
    with pytest.raises(LakeError, match=f"{path.name} is missing"):
        published.export(tmp_path / "lake")


def test_a_damaged_run_stops_it_or_is_left_out(own_server, tmp_path):
    published = Published(own_server)
    published.more(20)
    wait_applied(own_server, *published.payloads)
    own_server.terminate()
    payload = next(one for one in published.payloads[f"{published.prefix}/b"] if len(one) > 20)
    (segment,) = (one for one in own_server.data_dir.rglob("*.log") if payload in one.read_bytes())
    data = bytearray(segment.read_bytes())
    data[data.index(payload)] ^= 1
    segment.write_bytes(data)
    lake, place = tmp_path / "lake", {"data_dir": str(own_server.data_dir)}
    with pytest.raises(DamageError, match=r"a checksum fails; run `headrace verify`.*--skip-lost"):
        published.export(lake, **place)
    assert rows_of(lake) == []
    done = published.export(lake, skip_lost=True, **place)
    assert done.lost > 0
    assert done.records + done.lost == published.records


# With Spark


@pytest.mark.usefixtures("shared_spark")
def test_tasks_of_spark_write_the_same(published, tmp_path):
    many = {f"{published.prefix}/c/{number:04}": [b"%d" % number] for number in range(500)}
    with connect_blocking(published.server.figg_url) as client:
        for topic, (payload,) in many.items():
            client.window(30)
            client.publish_nowait(topic, payload)
        client.flush(60)
    told: list[tuple[int, int]] = []
    lake = tmp_path / "lake"
    done = published.export(
        lake, runner=None, part_bytes=15_000, progress=lambda *at: told.append(at)
    )
    assert rows_of(lake) == expected(published.server, published.payloads | many)
    # The number of files follows tasks and days, not topics.
    assert done.files == len(list(lake.rglob("*.parquet"))) <= 8
    assert told[-1][0] == told[-1][1] > 0
    assert told == sorted(told)
    # A failed task gives one sentence.
    published.more(1)
    with pytest.raises(JobError, match="is another directory for Spark's executors"):
        published.export(lake, runner=_Elsewhere())


class _Elsewhere(LocalRunner):
    """Executors that do not see the driver's files."""

    def run(self, works: Any, function: Any, progress: Any = None) -> Any:
        elsewhere = [work._replace(storage=storage_of("/nowhere")) for work in works]
        return SparkRunner("test", "").run(elsewhere, function, progress)


@pytest.mark.usefixtures("shared_spark")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_goes_on_ends_after_its_batch(
    published, tmp_path, capsys, monkeypatch, number
):
    """The command runs in this process. It is asked to end while a task of its second batch writes."""
    lake, points = tmp_path / "lake", tmp_path / "points"
    points.mkdir()

    def ask_to_end() -> None:
        wait_until(lambda: len(rows_of(lake)) == published.records, 120, "the first batch")
        (points / "stop-writing").touch()
        published.more(3)
        wait_until((points / "reached-writing").exists, 120, "a task")
        os.kill(os.getpid(), number)
        (points / "stop-writing").unlink()

    given = ["--lake", str(lake), "--http", published.server.http_url, "--every", "0.1"]
    given += ["--pattern", published.pattern]
    monkeypatch.setattr(
        sys.modules["headrace.pipeline"], "export", partial(export, points=Points(str(points)))
    )
    asking = threading.Thread(target=ask_to_end)
    asking.start()
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "export", *given])
    asking.join()
    said, error = capsys.readouterr()
    assert ended.value.code == 0
    assert error == f"headrace: keeping {lake} up to date, with a batch every 0.1 s\n"
    assert said.startswith(f"exported {published.records:,} records (")
    assert said.endswith(f" of 3 topics to {lake} in 2 batches and 2 files\n")
    assert rows_of(lake) == published.rows
    assert published.cursors() == published.ends


def test_a_second_lake_takes_nothing_from_the_first_by_mistake(published, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    published.export(first)
    before = published.cursors()
    with pytest.raises(LakeError, match="the server knows a lake that has topic"):
        published.export(second)
    assert published.cursors() == before
    assert not second.exists()
    published.more(3)
    published.export(second, take_over=True)
    assert rows_of(second) == published.rows
    # Now the first lake lacks records that the server knows to be exported.
    with pytest.raises(LakeError, match="with --take-over"):
        published.export(first)
    published.export(first, take_over=True)
    assert rows_of(first) == published.rows
    # Exports do not conflict if they have different topics, or tell no server.
    one, *_ = published.payloads
    wait_applied(published.server, *published.payloads)
    published.export(tmp_path / "third", topics=[one], data_dir=str(published.server.data_dir))


def test_topics_that_begin_anew_with_their_server_are_left_out(tmp_path):
    (tmp_path / "config.toml").write_text('[[topics]]\nprefix = "m/"\ndurability = "memory"\n')
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        given = {"url": server.http_url, "runner": LocalRunner()}
        for records in (1, 1):
            with connect_blocking(server.figg_url) as client:
                client.publish("m/gone", b"one")
                client.publish("kept", b"one")
            assert export(tmp_path / "lake", **given).records == records
            with pytest.raises(JobError, match="topic 'm/gone' is kept in memory only"):
                export(tmp_path / "lake", ["m/gone"], **given)
            server.kill()
            server.start()
    assert {row.topic for row in rows_of(tmp_path / "lake")} == {"kept"}


def test_an_export_that_goes_on_waits_for_a_server_that_is_away(
    own_server, tmp_path, caplog, monkeypatch
):
    monkeypatch.setitem(HttpClient.__init__.__kwdefaults__, "retry_s", 0.1)
    published, lake = Published(own_server), tmp_path / "lake"
    published.more()
    enough = threading.Event()
    done = []

    def go_on() -> None:
        done.append(published.export(lake, once=False, every_s=0.05, stop=enough.is_set))

    exporting = threading.Thread(target=go_on)
    exporting.start()
    wait_until(lambda: len(rows_of(lake)) == published.records, 120, "the first batch")
    for _ in range(2):
        own_server.kill()
        wait_until(lambda: "retrying until it answers" in caplog.text, 120, "a warning")
        own_server.start()
        published.more(5)
        wait_until(lambda: len(rows_of(lake)) == published.records, 120, "another batch")
        wait_until(lambda: published.cursors() == published.ends, 120, "the cursor")
        caplog.clear()
    enough.set()
    exporting.join()
    assert rows_of(lake) == published.rows
    assert done[0].records == published.records


@takes_long
@pytest.mark.timeout(600)
def test_a_driver_killed_with_all_its_processes_while_tasks_write(published, tmp_path):
    require_java()
    lake, points = tmp_path / "lake", tmp_path / "points"
    points.mkdir()
    (points / "stop-writing").touch()
    given = {"url": published.server.http_url, "pattern": published.pattern, "part_bytes": 4000}
    script = (
        "from headrace.pipeline import export; from headrace.pipeline.job import Points\n"
        f"export({str(lake)!r}, **{given!r}, master='local[2]', points=Points({str(points)!r}))"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment() | {"JDK_JAVA_OPTIONS": JAVA_OPTIONS, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    reached = points / "reached-writing"
    wait_until(lambda: reached.exists() or driver.poll() is not None, 120, "a task")
    assert driver.poll() is None
    while members := session_members(driver.pid):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.wait(30)
    assert rows_of(lake) == []
    assert list(lake.rglob("*.parquet"))
    published.export(lake)
    assert rows_of(lake) == published.rows
