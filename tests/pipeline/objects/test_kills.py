"""Jobs on a real S3 server that are killed at every named point, or whose servers are killed there."""

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from headrace.lake.format import LakeError
from headrace.testing import ServerProcess
from tests.fakes.s3_server import S3Server, forget_credentials
from tests.pipeline.export.exporter import exporters
from tests.pipeline.export.test_job import POINTS
from tests.pipeline.meddling import Meddling
from tests.pipeline.objects.stored import StoredLake
from tests.pipeline.replayed import payloads_of
from tests.tools import TORTURE, takes_long

COMPACT_POINTS = ("merging", "merged", "committed", "swept")
REPLAY_POINTS = ("uploading", "uploaded", "decided")


@pytest.fixture
def lake(server, bucket):
    made = StoredLake(server, bucket)
    made.publish()
    return made


def given_of(lake: StoredLake, job: str = "export", **more: object) -> dict[str, object]:
    given = {"job": job, "lake": lake.bucket.url, "storage_options": lake.bucket.options}
    if job == "export":
        given |= {"pattern": lake.pattern, "url": lake.server.http_url}
    return given | more


def test_an_export_killed_at_every_point_exports_every_record_once(lake, tmp_path):
    with exporters(tmp_path) as processes:
        for number, point in enumerate(POINTS):
            processes.kill_at(point, **given_of(lake, batch_bytes=2000))
            if number % 2:
                lake.publish(3)
        processes.finish(**given_of(lake))
        lake.check()
        assert processes.finish(**given_of(lake))["batches"] == 0


def test_a_compaction_killed_at_every_point_keeps_every_row(lake, tmp_path):
    lake.export(batch_bytes=1000)
    with exporters(tmp_path) as processes:
        for point in COMPACT_POINTS:
            processes.kill_at(point, **given_of(lake, "compact"))
            assert lake.rows == lake.wanted, point
            lake.publish(1)
            lake.export()
        processes.finish(**given_of(lake, "compact"))
    lake.check()
    assert len(lake.table.file_uris()) == 1


def test_a_replay_killed_at_every_point_publishes_every_record_once(lake, tmp_path):
    lake.export()
    target = f"{lake.prefix}-again"
    given = given_of(lake, "replay", topic=lake.a, to=target, url=lake.server.http_url)
    with exporters(tmp_path) as processes:
        for point, rate in (
            ("uploading", 10),
            ("uploaded", 10),
            ("decided", 1e6),
            ("uploaded", 1e6),
        ):
            processes.kill_at(point, **given, rate=rate)
        processes.finish(**given, rate=1e6)
    assert payloads_of(lake.server, target) == lake.payloads[lake.a]


DERIVED: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "dedupe": (
        {"payload": True},
        ("staging", "deciding", "writing", "written", "noted", "committed", "swept"),
    ),
    "aggregate": ({"reducer": "count"}, ("reading", "folding", "folded", "committed")),
}
USUAL = ("written", "folded", "committed")
"""Points of a usual run. The tests of each job kill it at its other points, in a directory."""

TABLES = ("disturbed", "undisturbed")


@pytest.mark.parametrize("job", DERIVED)
def test_a_table_of_a_job_that_is_killed_equals_that_of_an_undisturbed_one(lake, tmp_path, job):
    more, points = DERIVED[job]
    killed, undisturbed = (f"s3://{lake.bucket.name}/{name}" for name in TABLES)
    with exporters(tmp_path) as processes:
        for point in points if TORTURE else filter(USUAL.__contains__, points):
            lake.publish(2)
            lake.export()
            processes.kill_at(point, **given_of(lake, job, into=killed, **more))
        for into in (killed, undisturbed):
            processes.finish(**given_of(lake, job, into=into, **more))
    check_equal(lake)


def check_equal(lake: StoredLake) -> None:
    """Check that the disturbed table has the rows of the undisturbed one, each once."""
    order = [("topic", "ascending"), ("offset", "ascending")]
    tables = [lake.table_at(name).to_pyarrow_table().sort_by(order) for name in TABLES]
    assert tables[0] == tables[1]


STREAM_POINTS = ("merged", "committed", "done")


def counted(lake: StoredLake) -> dict[str, tuple[int, bytes]]:
    """Return the end and the state of each topic in the table `states`."""
    rows = lake.table_at("states").to_pyarrow_table(columns=["topic", "ordinal", "state"])
    return {row["topic"]: (row["ordinal"], row["state"]) for row in rows.to_pylist()}


def published(lake: StoredLake) -> dict[str, tuple[int, bytes]]:
    return {topic: (len(known), b"%d" % len(known)) for topic, known in lake.payloads.items()}


def stream_of(lake: StoredLake) -> dict[str, Any]:
    """Return the arguments of a stream of counts, without those of the storage."""
    return {
        "into": f"s3://{lake.bucket.name}/states",
        "reducer": "count",
        "pattern": lake.pattern,
        "url": lake.server.http_url,
        "every_s": 0,
    }


def test_a_stream_killed_at_every_point_counts_every_record_once(lake, tmp_path):
    given = stream_of(lake)
    lake.run("aggregate_stream", **given, stop=iter([False, True]).__next__)
    given |= {"job": "aggregate_stream", "storage_options": lake.bucket.options}
    with exporters(tmp_path) as processes:
        for point in STREAM_POINTS:
            before = counted(lake)
            lake.publish(2)
            processes.kill_at(point, **given)
            assert counted(lake) == (before if point == "merged" else published(lake)), point
    # A start finds nothing to do, because the last round was committed.
    done = lake.run("aggregate_stream", **stream_of(lake), stop=iter([False, True]).__next__)
    assert (done.messages, done.incomplete) == (2 * 26, 0)
    assert counted(lake) == published(lake)


# Headrace


def restart(server: ServerProcess | S3Server) -> None:
    server.kill()
    server.start()


def test_jobs_outlive_a_restart_of_headrace_at_every_point(own_server, bucket):
    """A usual run restarts Headrace at some points. Each kind of answer that may be lost is among them."""
    lake = StoredLake(own_server, bucket)

    meddlings = []

    def at(point: str) -> Meddling:
        meddlings.append(Meddling(**{point: lambda: restart(own_server)}))
        return meddlings[-1]

    for point in POINTS if TORTURE else ("writing", "committed", "verified"):
        lake.publish(3)
        assert lake.export(points=at(point)).batches == 1, point
    lake.check()
    place = {"url": own_server.http_url}
    for point in REPLAY_POINTS:
        done = lake.run("replay", lake.bucket.url, lake.a, point, points=at(point), **place)
        assert done.records == len(lake.payloads[lake.a])
        assert payloads_of(own_server, point) == lake.payloads[lake.a]
    lake.publish(2)  # these records are in the log only
    into = f"s3://{bucket.name}/states"
    for point in DERIVED["aggregate"][1] if TORTURE else ("reading",):
        given = {"topics": [lake.a], "reducer": "count", "points": at(point), **place}
        assert lake.run("aggregate", lake.bucket.url, into, **given).topics == 1, point
    [row] = lake.table_at("states").to_pyarrow_table().to_pylist()
    assert row["ordinal"] == len(lake.payloads[lake.a])
    assert not any(one.left for one in meddlings)


@pytest.mark.parametrize("what", ["headrace", "store"])
def test_a_stream_outlives_a_restart_at_every_point(request, what):
    """Each restart is followed by one more round, which asks both servers again."""
    if what == "headrace":
        server, bucket = map(request.getfixturevalue, ("own_server", "bucket"))
        restarted = server
    else:
        server, restarted = map(request.getfixturevalue, ("server", "s3"))
        bucket = restarted.bucket()
    lake = StoredLake(server, bucket)
    lake.publish(2)
    lake.run("aggregate_stream", **stream_of(lake), stop=iter([False, True]).__next__)
    for point in STREAM_POINTS if TORTURE else ("merged", "done"):
        lake.publish(2)
        meddling = Meddling(**{point: lambda: restart(restarted)})
        stop = partial(next, rounds(lake, meddling))
        done = lake.run("aggregate_stream", **stream_of(lake), points=meddling, stop=stop)
        assert done.incomplete == 0, point
        assert counted(lake) == published(lake), point


def rounds(lake: StoredLake, meddling: Meddling) -> Iterator[bool]:
    """Yield before each round whether the stream should end: after a round that follows the restart."""
    while meddling.left:
        yield False
    lake.publish(1)
    while counted(lake) != published(lake):
        yield False
    while True:
        yield True


# The S3 server


@pytest.fixture(scope="module")
def mortal_s3(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("mortal") / "s3") as made:
        yield made


@pytest.fixture
def s3(mortal_s3, monkeypatch):
    """S3 server that may be killed. A test that kills it starts it again."""
    forget_credentials(monkeypatch)
    return mortal_s3


def test_an_export_outlives_a_restart_of_the_store_at_every_point(server, s3):
    """A usual run restarts the store at three points."""
    lake = StoredLake(server, s3.bucket())
    for point in POINTS if TORTURE else ("writing", "noted", "committed"):
        lake.publish(3)
        meddling = Meddling(**{point: lambda: restart(s3)})
        assert lake.export(points=meddling).batches == 1, point
        assert not meddling.left
    lake.check()


def test_a_compaction_outlives_a_restart_of_the_store_at_every_point(server, s3):
    """A usual run restarts the store at two points."""
    lake = StoredLake(server, s3.bucket())
    lake.publish(1)
    lake.export()
    for point in COMPACT_POINTS if TORTURE else ("merging", "merged"):
        lake.publish(1)
        lake.export()
        meddling = Meddling(**{point: lambda: restart(s3)})
        assert lake.compact(points=meddling).merged == 2, point
        assert not meddling.left
    lake.check()
    assert len(lake.table.file_uris()) == 1


def test_a_replay_outlives_a_restart_of_the_store_at_every_point(server, s3):
    """A usual run restarts the store at one point, in a task that reads from it."""
    lake = StoredLake(server, s3.bucket())
    lake.publish()
    lake.export(batch_bytes=2000)
    for point in REPLAY_POINTS if TORTURE else ("uploading",):
        target = f"{lake.prefix}-{point}"
        given = {"url": server.http_url, "rate": 10 if point == "decided" else None}
        meddling = Meddling(**{point: lambda: restart(s3)})
        done = lake.run("replay", lake.bucket.url, lake.a, target, points=meddling, **given)
        assert (done.records, meddling.left) == (20, [])
        assert payloads_of(server, target) == lake.payloads[lake.a]


@pytest.mark.parametrize("job", DERIVED)
def test_a_table_outlives_a_restart_of_the_store_at_every_point(server, s3, job):
    """A usual run restarts the store at two points of each job."""
    lake = StoredLake(server, s3.bucket())
    more, points = DERIVED[job]
    restarted, undisturbed = (f"s3://{lake.bucket.name}/{name}" for name in TABLES)
    for point in points if TORTURE else filter(USUAL.__contains__, points):
        lake.publish(3)
        lake.export()
        meddling = Meddling(**{point: lambda: restart(s3)})
        done = lake.run(job, lake.bucket.url, restarted, points=meddling, **more)
        assert (done.topics, meddling.left) == (2, []), point
    lake.run(job, lake.bucket.url, undisturbed, **more)
    check_equal(lake)


def test_an_export_whose_store_stays_away_ends_with_one_sentence(server, s3):
    lake = StoredLake(server, s3.bucket())
    lake.publish()
    few = {**lake.bucket.options, "max_retries": "1"}
    for point in ("writing", "noted", "committed") if TORTURE else ("noted",):
        try:
            with pytest.raises(LakeError) as refused:
                lake.export(storage_options=few, points=Meddling(**{point: s3.kill}))
        finally:
            s3.kill()
            s3.start()
        assert "cannot be reached, because nothing listens at 127.0.0.1:" in str(refused.value)
    lake.export()
    lake.check()


@takes_long
@pytest.mark.timeout(14_400)
def test_exports_whose_store_is_killed_at_random_lose_and_double_nothing(server, s3):
    lake = StoredLake(server, s3.bucket())
    chance = random.Random(TORTURE)
    for _ in range(max(3, TORTURE // 10)):
        lake.publish(200)
        killer = threading.Timer(chance.uniform(0, 2), restart, [s3])
        killer.start()
        with suppress(LakeError):
            lake.export(batch_bytes=5000)
        killer.join()
    lake.export()
    lake.check()


@takes_long
@pytest.mark.timeout(14_400)
def test_exports_killed_at_random_lose_and_double_nothing(lake, tmp_path):
    chance = random.Random(TORTURE)
    with exporters(tmp_path) as processes:
        for _ in range(TORTURE):
            lake.publish(20)
            processes.kill_after(chance.uniform(0, 2), **given_of(lake, batch_bytes=3000))
        processes.finish(**given_of(lake))
    lake.check()
