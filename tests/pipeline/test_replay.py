"""Replays to a real server: every record once and in order, for any number of runs and kills."""

import datetime
import random
import subprocess
import sys
import time
from itertools import count

import pytest

from headrace.errors import BadTopicNameError, OptionError
from headrace.lake.format import LakeError
from headrace.pipeline.compact import compact
from headrace.pipeline.replay import replay
from headrace.pipeline.tasks import JobError, LocalRunner
from headrace.reader.http_client import HttpClient, ServerError
from tests.lake.rows import NOON_MS
from tests.pipeline.made import MadeLake
from tests.pipeline.meddling import Killed, Meddling, kill, tree
from tests.pipeline.replayed import payloads_of
from tests.spark.lives import REPOSITORY, environment
from tests.tools import TORTURE, takes_long

module = sys.modules["headrace.pipeline.replay"]  # the package has a function of this name

_numbers = count()


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    lake = MadeLake(tmp_path_factory.mktemp("made") / "lake")
    for number in range(6):
        lake.batch("a", "b", day=number // 4)
    return lake


@pytest.fixture
def made(template, tmp_path):
    return template.copy(tmp_path / "lake")


@pytest.fixture
def target():
    return f"replayed/{next(_numbers)}"


@pytest.fixture
def small_cuts(monkeypatch):
    """Use small cuts, so that a few records make many batches."""
    monkeypatch.setattr(module, "CUT_BYTES", 200)
    monkeypatch.setattr(module, "_CUTS_AT_ONCE", 2)


def run(server, lake, target, topic="a", **given):
    given = {"runner": LocalRunner(), "url": server.http_url, **given}
    return replay(lake.path, topic, target, **given)


def offsets_of(payloads):
    found = [0]
    for payload in payloads:
        found.append(found[-1] + 4 + len(payload))
    return found


def test_a_topic_is_replayed_in_its_order_and_once(server, made, target, small_cuts):
    payloads = list(made.payloads["a"])
    done = run(server, made, target)
    assert payloads_of(server, target) == payloads
    assert (done.records, done.start, done.end) == (30, 0, offsets_of(payloads)[-1])
    assert done.bytes == done.end
    assert done.batches > 3
    again = run(server, made, target)
    assert (again.batches, again.records, again.resumed) == (0, 0, done.end)
    # A repeat sends nothing, even with other files or when the lake has more records.
    compact(made.path, runner=LocalRunner())
    assert run(server, made, target).records == 0
    made.batch("a", day=2)
    assert run(server, made, target).records == 0
    assert payloads_of(server, target) == payloads
    # Under another name, it is another replay.
    assert run(server, made, target, name="second").records == 35
    assert payloads_of(server, target) == payloads + made.payloads["a"]
    # The same holds for another topic.
    assert run(server, made, f"{target}/b", "b").records == 30
    assert payloads_of(server, f"{target}/b") == made.payloads["b"]


def test_a_range_of_offsets_or_times_is_replayed(server, made, target):
    payloads = made.payloads["a"]
    at = offsets_of(payloads)
    assert run(server, made, target, from_offset=at[3], to_offset=at[17]).records == 14
    assert payloads_of(server, target) == payloads[3:17]
    # A start between two records means the next record. An end inside a record includes that record.
    inside = f"{target}/inside"
    run(server, made, inside, from_offset=at[3] + 1, to_offset=at[17] + 1)
    assert payloads_of(server, inside) == payloads[4:18]
    # Each batch of the lake has a time: NOON_MS plus its number, and a day more from the fifth on.
    times = f"{target}/times"
    since = datetime.datetime.fromtimestamp((NOON_MS + 2) / 1000, datetime.UTC)
    run(server, made, times, since=since, until=NOON_MS + 4 + 86_400_000)
    assert payloads_of(server, times) == payloads[10:20]
    late = run(server, made, f"{target}/late", since=NOON_MS * 2)
    assert (late.batches, late.start) == (0, late.end)


@pytest.mark.parametrize("point", ["uploaded", "decided"])
def test_one_that_was_killed_goes_on_where_it_was(server, made, target, point, small_cuts):
    calls = count()

    class Later:
        directory = ""

        def here(self, name):
            if name == point and next(calls) == 2:
                raise Killed

    with pytest.raises(Killed):
        run(server, made, target, points=Later())
    payloads = list(made.payloads["a"])
    before = payloads_of(server, target)
    assert 0 < len(before) < len(payloads)
    assert before == payloads[: len(before)]
    # Meanwhile the lake has grown and has other files, and the rate is another one.
    made.batch("a", day=2)
    compact(made.path, runner=LocalRunner())
    done = run(server, made, target, rate=1e6)
    assert 0 < done.records < len(payloads)
    assert done.resumed > 0
    assert payloads_of(server, target) == payloads


@pytest.mark.parametrize("point", ["uploaded", "decided"])
def test_of_two_at_once_each_batch_is_written_by_one(server, made, target, point, small_cuts):
    others = []
    meddling = Meddling(**{point: lambda: others.append(run(server, made, target))})
    done = run(server, made, target, points=meddling)
    assert done.records + others[0].records == 30
    assert payloads_of(server, target) == made.payloads["a"]


def test_a_server_that_was_killed_is_replayed_to_once(own_server, made, target, small_cuts):
    def restart():
        own_server.kill()
        own_server.start()

    run(own_server, made, target, points=Meddling(decided=restart))
    assert run(own_server, made, target).records == 0
    assert payloads_of(own_server, target) == made.payloads["a"]


def test_a_rate_is_kept(server, made, target, monkeypatch):
    monkeypatch.setattr(module, "_CUT_S", 0.05)
    begun_s = time.monotonic()
    done = run(server, made, target, rate=50)
    passed_s = time.monotonic() - begun_s
    assert done.batches > 5
    # The last cut is sent after the time of all cuts before it.
    assert passed_s > 0.4
    assert payloads_of(server, target) == made.payloads["a"]


def test_records_larger_than_a_cut_and_empty_ones(server, tmp_path, target, monkeypatch):
    monkeypatch.setattr(module, "CUT_BYTES", 3)
    lake = MadeLake(tmp_path / "lake", by_topic=True)
    lake.batch("a", "it's", count=4)
    for _ in range(2):
        run(server, lake, target, "it's")
        assert payloads_of(server, target) == lake.payloads["it's"]


def test_damage_is_told_and_nothing_is_replayed_of_it(server, made, target):
    (path,) = (one for one in made.path.rglob("*.parquet") if b"a 0 " in one.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(b"a 0 ")] ^= 1
    path.write_bytes(data)
    with pytest.raises(LakeError, match=f"{path.name} cannot be read: .*checksum"):
        run(server, made, target)
    with pytest.raises(ServerError):
        payloads_of(server, target)


def test_bad_input_is_refused_and_nothing_is_written(server, made, target, tmp_path, monkeypatch):
    def refused(kind, to=target, topic="a", **given):
        before = tree(tmp_path)
        with pytest.raises(kind) as error:
            run(server, given.pop("lake", made), to, topic, **given)
        assert tree(tmp_path) == before
        with pytest.raises(ServerError):
            payloads_of(server, to)
        return str(error.value)

    assert refused(JobError, topic="nope") == f"there is no topic 'nope' in {made.path}"
    for to in ("$channel/x", "$logux/x"):
        assert refused(BadTopicNameError, to) == (
            f"replay writes records unchanged, but only its own protocol publishes to '{to}': name another "
            "topic"
        )
    assert "is not all of 0 to 100000" in refused(JobError, to_offset=100_000)
    assert "exclude each other" in refused(OptionError, from_offset=1, since=5)
    assert "it is empty" in refused(OptionError, from_offset=5, to_offset=5)
    assert "at least 0.001" in refused(OptionError, rate=0.0)
    assert "url must be" in refused(OptionError, url="nowhere")
    monkeypatch.setitem(HttpClient.__init__.__kwdefaults__, "retry_s", 0)
    assert "no server answers" in refused(ServerError, url="http://127.0.0.1:1")
    made.path = tmp_path / "gone"
    assert "it does not exist" in refused(LakeError)


def test_a_damaged_note_is_named(server, made, target):
    with pytest.raises(Killed):
        run(server, made, target, points=Meddling(uploaded=kill))
    (path,) = (made.path / "_headrace" / "replays").iterdir()
    path.write_text("{")
    with pytest.raises(LakeError, match=f"{path.name} is damaged .*replay under another name"):
        run(server, made, target)


KILLED = """
import sys
from headrace.pipeline.replay import replay
from headrace.pipeline.tasks import LocalRunner
sys.modules["headrace.pipeline.replay"].CUT_BYTES = int(sys.argv[4])
print("ready", flush=True)
replay(sys.argv[1], "a", sys.argv[2], url=sys.argv[3], runner=LocalRunner())
"""


@takes_long
@pytest.mark.timeout(3600)
def test_replays_killed_at_random_lose_and_double_nothing(own_server, made, target, small_cuts):
    server = own_server
    chance = random.Random(TORTURE)
    payloads = list(made.payloads["a"])
    with pytest.raises(Killed):
        run(server, made, target, points=Meddling(uploaded=kill))
    for number in range(TORTURE):
        # The cuts that the first run has noted count, even for runs that would cut differently.
        arguments = [str(made.path), target, server.http_url, str(chance.randint(30, 300))]
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, *arguments],
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as driver:
            assert driver.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0, 0.5))
            if number % 5 == 4:
                server.kill()
                server.start()
            driver.kill()
        made.batch("a", day=number % 3 + 2)
        compact(made.path, runner=LocalRunner())
    run(server, made, target)
    assert payloads_of(server, target) == payloads
