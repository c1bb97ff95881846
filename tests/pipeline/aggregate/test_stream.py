"""Continuous aggregations: states equal the server's own, and nothing counts twice, whatever ends when."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltalake import DeltaTable

from headrace.cli.main import main
from headrace.errors import OptionError
from headrace.lake.format import LakeError
from headrace.lake.states import StatesTable, StatesWriter, name_of
from headrace.lake.storage.storage import storage_of
from headrace.pipeline import aggregate, aggregate_stream, export
from headrace.pipeline.aggregate import stream as stream_module
from headrace.pipeline.aggregate.job import APP, AggregateSummary
from headrace.pipeline.tasks import JobError, LocalRunner
from headrace.reader.http_client import HttpClient
from headrace.testing import ServerProcess, wait_until
from tests.pipeline.aggregate.aggregates import (
    Channels,
    State,
    channel_server,
    fill,
    is_table,
    rows_of,
)
from tests.pipeline.meddling import Killed, Meddling, kill, tree
from tests.spark.lives import environment, session_members
from tests.spark.support import JAVA_OPTIONS, require_java, wait_applied
from tests.tools import takes_long

GATHER = "tests.pipeline.app:gather"

_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with channel_server(tmp_path_factory.mktemp("stream")) as process:
        yield process


@pytest.fixture
def prefix() -> str:
    """Prefix for the topics of one test."""
    return f"s{next(_numbers)}"


class Steps:
    """Steps that run during a job, as its `stop` callback: one step per call. At last it ends the job."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps

    def __call__(self) -> bool:
        return next(self._steps, self) is self


def stream(
    server: ServerProcess, into: Path, steps: Iterator[None], **given: Any
) -> AggregateSummary:
    place = {} if given.keys() & {"url", "data_dir"} else {"url": server.http_url}
    given = {"runner": LocalRunner(), "every_s": 0, **place, **given}
    return aggregate_stream(into, stop=Steps(steps), **given)


def until(condition: Callable[[], bool]) -> Iterator[None]:
    end_s = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end_s, "the stream does not get there"
        yield


def ordinals(into: Path | str, options: Mapping[str, str] | None = None) -> dict[str, int]:
    if not is_table(into, options):
        return {}
    return {topic: row["ordinal"] for topic, row in rows_of(into, options).items()}


# States equal to the server's


def random_change(chance: random.Random, reducer: str) -> tuple[bytes, bool]:
    key = chance.choice("abä")
    value = chance.choice([None, True, 1.50, "ü", [1, {}], {"b": None, "c": chance.random()}])
    if reducer in ("last", "count") and chance.random() < 0.3:
        return chance.randbytes(3), False
    if reducer != "map":
        value = {key: value, chance.choice("xyz"): chance.randrange(9)}
        return json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(), True
    change = {"key": key, "delete": True} if chance.random() < 0.3 else {"key": key, "value": value}
    return json.dumps(change, indent=chance.choice([None, 1])).encode(), True


@pytest.mark.parametrize("reducer", ["last", "count", "merge", "map"])
def test_a_stream_comes_to_the_states_of_the_server(server, prefix, tmp_path, reducer):
    chance, into = random.Random(prefix), tmp_path / "into"
    channels = Channels(server)
    names = [f"{reducer}/{prefix}/{i}" for i in range(4)]
    up = f"up/{prefix}/1"
    sent = dict.fromkeys([*names, up], 0)

    def send(some: list[str], number: int) -> None:
        for _ in range(number):
            name = chance.choice(some)
            data, is_json = random_change(chance, reducer)
            channels.send(name, data, is_json=is_json)
            sent[name] += 1

    def caught_up() -> bool:
        wanted = {f"$channel/{name}": number for name, number in sent.items() if number}
        return ordinals(into) == wanted

    def steps() -> Iterator[None]:
        for some in ([up, *names], names):
            for name in some:
                send([name], 1)
            send(some, 15)
            yield from until(caught_up)

    send(names[:2], 5)
    given = {"reducer": reducer, "pattern": rf"\$channel/.*/{prefix}/.*", "publish": True}
    done = stream(server, into, steps(), **given)
    assert (done.topics, done.messages) == (len(sent), sum(sent.values()))
    assert (done.incomplete, done.failed) == (0, 0)
    assert done.refused and done.published  # the server folds the other channels itself
    found = rows_of(into)
    for topic, row in found.items():
        name = topic.removeprefix("$channel/")
        assert (row["complete"], row["messages"]) == (True, sent[name])
        state = State(*(row[column] for column in State._fields))
        if name == up:
            assert channels.kept(name) == state
        else:
            channels.leave(name)
            assert channels.snapshot(name) == state
    channels.close()


def test_it_begins_with_lake_and_table_and_goes_on_after_any_end(server, prefix, tmp_path):
    lake, into, alone = tmp_path / "lake", tmp_path / "into", tmp_path / "alone"
    a, b, c = (f"{prefix}/{name}" for name in "abc")
    given = {"reducer": GATHER, "pattern": f"{prefix}/.*"}

    def publish(*topics: str, number: int = 1) -> None:
        fill(server, {topic: [b"%d" % next(_numbers) for _ in range(number)] for topic in topics})

    def to_lake() -> None:
        export(
            lake, pattern=f"{prefix}/.*", url=server.http_url, skip_lost=True, runner=LocalRunner()
        )

    def forget(topic: str) -> None:
        with httpx.Client(base_url=server.http_url) as http:
            assert http.delete("/v1/topic", params={"name": topic}).is_success

    def reach(**wanted: int) -> Iterator[None]:
        yield from until(lambda: {name[-1]: n for name, n in ordinals(into).items()} == wanted)

    def is_as_in_one_run() -> bool:
        """Compare with one run over lake and log, without Spark."""
        aggregate(lake, alone, url=server.http_url, runner=LocalRunner(), **given)
        return rows_of(alone) == rows_of(into)

    # The log no longer has what the lake has, and some topics are created later.
    publish(a, b, number=3)
    to_lake()
    forget(a)

    def first() -> Iterator[None]:
        yield from reach(a=3, b=3)
        publish(a, c, number=2)
        yield from reach(a=5, b=3, c=2)

    stream(server, into, first(), lake=lake, **given)
    assert is_as_in_one_run()
    # The job is killed, and records are gone that the lake does not have either. Nothing counts twice, and
    # the loss is reported.
    publish(c)
    forget(c)
    publish(c)
    before = ordinals(into)
    for point in ("reading", "folding", "merged", "committed"):
        publish(a, b)
        with pytest.raises(Killed):
            stream(server, into, until(lambda: False), points=Meddling(**{point: kill}), **given)
        assert (ordinals(into) == before) == (point != "committed")
    # Meanwhile records were appended to the log and removed from it, so that only the lake has them.
    publish(b)
    to_lake()
    forget(b)
    ended = ordinals(into) | {b: ordinals(into)[b] + 1}
    done = stream(server, into, until(lambda: ordinals(into) == ended), lake=lake, **given)
    assert (done.topics, done.incomplete, done.failed) == (3, 1, 0)
    assert is_as_in_one_run()
    assert [row["complete"] for _, row in sorted(rows_of(into).items())] == [True, True, False]


def test_a_server_that_is_away_is_waited_for(own_server, tmp_path, caplog, monkeypatch):
    # Each request has its own retries, which come before the waiting.
    monkeypatch.setitem(HttpClient.__init__.__kwdefaults__, "retry_s", 0.2)
    into = tmp_path / "into"

    def steps() -> Iterator[None]:
        for number in (1, 2, 3):
            fill(own_server, {"a": [b"1"]})
            yield from until(lambda number=number: ordinals(into) == {"a": number})
            own_server.kill()
            yield from until(lambda: "retrying until the server answers" in caplog.text)
            own_server.start()
            caplog.clear()

    done = stream(own_server, into, steps(), reducer="count")
    assert (done.messages, done.incomplete) == (3, 0)


# Rounds


class Counting(LocalRunner):
    """Runner that counts the jobs that it is given."""

    jobs = 0

    def run(self, *args: Any, **given: Any) -> Any:
        self.jobs += 1
        return super().run(*args, **given)

    def exchange(self, *args: Any, **given: Any) -> Any:
        self.jobs += 1
        return super().exchange(*args, **given)


def test_a_round_is_one_job_and_nothing_runs_without_new_records(server, prefix, tmp_path):
    into, topics = tmp_path / "into", [f"{prefix}/{i}" for i in range(40)]
    fill(server, {topic: [b"1"] for topic in topics})
    runner = Counting()

    def steps() -> Iterator[None]:
        yield from until(lambda: set(ordinals(into).values()) == {1})
        assert runner.jobs == 1
        for _ in range(3):
            yield
        assert runner.jobs == 1
        fill(server, {topics[0]: [b"2"]})
        yield from until(lambda: ordinals(into)[topics[0]] == 2)
        assert runner.jobs == 2

    stream(server, into, steps(), reducer="count", pattern=f"{prefix}/.*", runner=runner)
    added = DeltaTable(str(into)).get_add_actions(flatten=True)
    numbers = [path.partition("-")[0] for path in added["path"].to_pylist()]
    assert sorted(set(numbers)) == ["00000000", "00000001"]
    assert numbers.count("00000001") == 1  # the other buckets keep their files


def test_a_round_reads_a_limited_part_of_the_log(server, prefix, tmp_path):
    into, topic = tmp_path / "into", f"{prefix}/a"
    stream(server, into, iter([None]), reducer=GATHER, pattern=f"{prefix}/.*")
    fill(server, {topic: [b"%d" % n for n in range(20)]})
    steps = until(lambda: ordinals(into) == {topic: 20})
    stream(server, into, steps, reducer=GATHER, topics=[topic], batch_bytes=25)
    assert json.loads(rows_of(into)[topic]["state"]) == list(range(20))
    assert DeltaTable(str(into)).transaction_version(APP) >= 4


def test_old_files_are_deleted_after_a_while(server, prefix, tmp_path, monkeypatch):
    into, topic = tmp_path / "into", f"{prefix}/a"
    found: list[int] = []

    def steps() -> Iterator[None]:
        for number in range(1, 5):
            fill(server, {topic: [b"1"]})
            yield from until(lambda number=number: ordinals(into) == {topic: number})
            found.append(len(list(into.glob("*.parquet"))))
            if number == 3:
                monkeypatch.setattr(stream_module, "_READABLE_S", 0.0)

    stream(server, into, steps(), reducer="count", pattern=topic)
    assert found == [1, 2, 3, 2]


def test_records_that_the_log_loses_meanwhile_come_from_the_lake(server, prefix, tmp_path):
    lake, into, topic = tmp_path / "lake", tmp_path / "into", f"{prefix}/a"
    fill(server, {topic: [b"1"]})

    def lose() -> None:
        fill(server, {topic: [b"2"]})
        export(lake, [topic], url=server.http_url, runner=LocalRunner(), take_over=True)
        with httpx.Client(base_url=server.http_url) as http:
            assert http.delete("/v1/topic", params={"name": topic}).is_success
        fill(server, {topic: [b"3"]})

    export(lake, [topic], url=server.http_url, runner=LocalRunner(), take_over=True)
    given = {"reducer": GATHER, "topics": [topic], "lake": lake}

    def steps() -> Iterator[None]:
        yield from until(lambda: ordinals(into) == {topic: 1})
        lose()
        yield from until(lambda: ordinals(into) == {topic: 3})

    done = stream(server, into, steps(), **given)
    assert (done.messages, done.incomplete) == (3, 0)
    assert rows_of(into)[topic]["state"] == b"[1,2,3]"


@pytest.mark.parametrize("place", ["url", "data_dir"])
def test_a_state_that_ended_with_a_failure_stays(server, prefix, tmp_path, place):
    into, topic = tmp_path / "into", f"{prefix}/a"
    given = {"reducer": "merge", "topics": [topic]}
    if place == "data_dir":
        given["data_dir"] = str(server.data_dir)

    def reach(number: int) -> Iterator[None]:
        yield from until(lambda: ordinals(into) == {topic: number})

    fill(server, {topic: [b'{"a": 1}']})
    wait_applied(server, topic)
    stream(server, into, reach(1), **given)
    fill(server, {topic: [b'{"a": 2}', b"no JSON", b'{"a": 3}']})
    wait_applied(server, topic)
    stream(server, into, reach(2), **given)
    fill(server, {topic: [b'{"a": 4}']})
    wait_applied(server, topic)
    before = rows_of(into)
    done = stream(server, into, iter([None] * 3), **given)
    assert (done.failed, done.messages) == (1, 2)
    assert rows_of(into) == before
    assert before[topic]["state"] == b'{"a":2}'


def test_a_topic_that_begins_anew_with_its_server_has_a_state_that_does(tmp_path):
    into = tmp_path / "into"
    with ServerProcess(tmp_path / "data", "--durability=memory") as memory_server:

        def reach(state: bytes) -> Iterator[None]:
            yield from until(lambda: rows_of(into)["a"]["state"] == state)

        def steps() -> Iterator[None]:
            yield from reach(b"[1,2]")
            memory_server.kill()
            memory_server.start()
            fill(memory_server, {"a": [b"3"]})
            yield from reach(b"[3]")

        fill(memory_server, {"a": [b"1", b"2"]})
        stream(memory_server, into, iter([None]), reducer=GATHER)
        done = stream(memory_server, into, steps(), reducer=GATHER)
    assert (done.messages, done.incomplete) == (1, 0)


@pytest.mark.parametrize("number", [3, 21, 30])
def test_what_is_left_of_a_topic_that_began_anew_is_a_new_state(tmp_path, number):
    """The server keeps the last records of a memory topic: before, around or after the old state's end."""
    into, config = tmp_path / "into", tmp_path / "config.toml"
    config.write_text('durability = "memory"\n[limits]\nmemory_topic_bytes_max = 64\n')
    with ServerProcess(tmp_path / "data", f"--config={config}") as memory_server:

        def steps() -> Iterator[None]:
            yield from until(lambda: ordinals(into) == {"a": 20})
            memory_server.kill()
            memory_server.start()
            for _ in range(number):
                fill(memory_server, {"a": [bytes(20)]})
            yield from until(lambda: ordinals(into) == {"a": number})

        for _ in range(4):
            fill(memory_server, {"a": [b"1"] * 5})
            stream(memory_server, into, iter([None]), reducer="count")
        before = rows_of(into)["a"]
        done = stream(memory_server, into, steps(), reducer="count")
    assert (before["messages"], before["complete"]) == (20, True)
    assert (done.messages, done.incomplete) == (2, 1)


# With Spark


def test_with_spark_it_is_the_same(server, prefix, tmp_path, shared_spark):
    assert shared_spark
    into, alone = tmp_path / "into", tmp_path / "alone"
    topics = [f"{prefix}/{i}" for i in range(7)]
    given = {"reducer": GATHER, "pattern": f"{prefix}/.*"}

    def steps() -> Iterator[None]:
        for number in range(1, 4):
            fill(server, {topic: [b"%d" % number] for topic in topics[-3 * number :]})
            wanted = {topic: (number - i // 3) for i, topic in enumerate(reversed(topics))}
            yield from until(
                lambda wanted=wanted: (
                    ordinals(into) == {topic: n for topic, n in wanted.items() if n > 0}
                )
            )

    stream(server, into, steps(), runner=None, **given)
    stream(server, alone, iter([None]), **given)
    assert rows_of(into) == rows_of(alone)


# The command


def test_a_command_goes_on_until_it_is_told_to_end(server, prefix, tmp_path, shared_spark, capsys):
    assert shared_spark
    into = tmp_path / "into"
    topic = f"{prefix}/a"
    fill(server, {topic: [b"{}", b"[]"]})

    def meanwhile() -> None:
        wait_until(lambda: ordinals(into) == {topic: 2}, 120, "the states of the log")
        fill(server, {topic: [b"no JSON"]})
        wait_until(lambda: rows_of(into)[topic]["error"] is not None, 120, "the failure")
        os.kill(os.getpid(), signal.SIGTERM)

    other = threading.Thread(target=meanwhile, daemon=True)
    other.start()
    command = ["pipeline", "aggregate", topic, "--stream", "--every", "0", "--reducer", "merge"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--into", str(into), "--http", server.http_url])
    other.join()
    assert ended.value.code in (0, None)
    said = capsys.readouterr()
    assert said.out == (
        f"merge of 2 messages of 1 topic in {into}; 1 failed, the first: topic {topic!r}: message 3 of "
        f'"{topic}" cannot be folded: it is bytes, and this reducer takes JSON\n'
    )
    assert said.err == ""
    assert rows_of(into)[topic]["state"] == b"[]"


# Refusals


def test_what_cannot_be_done_is_said_and_nothing_is_changed(server, prefix, tmp_path):
    lake, into, other = tmp_path / "lake", tmp_path / "into", tmp_path / "other"
    topics = [f"{prefix}/a", f"{prefix}/b"]
    fill(server, {topic: [b"1"] for topic in topics})
    export(lake, topics, url=server.http_url, runner=LocalRunner())
    aggregate(lake, into, topics, reducer="last", runner=LocalRunner())
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    before = tree(tmp_path)

    def refused(kind: type[Exception], text: str, *args: Any, **given: Any) -> None:
        with pytest.raises(kind, match=text):
            stream(server, *args, iter(()), **{"reducer": "last", "topics": topics, **given})

    refused(LakeError, "has states of the reducer 'last': name another", into, reducer="count")
    refused(
        LakeError, f"states of other topics too, such as '{topics[1]}'", into, topics=topics[:1]
    )
    refused(LakeError, r"something else than states of Headrace \(notes.txt\)", other)
    refused(LakeError, "is not a lake of Headrace", into, lake=tmp_path / "none")
    refused(JobError, "no topic 'nope' to aggregate", into, topics=[*topics, "nope"])
    refused(OptionError, "no reducer 'lsat'", into, reducer="lsat")
    refused(OptionError, "exclude each other", into, pattern="a")
    refused(OptionError, "say where the log is", into, url="")
    refused(OptionError, "where states are published", into, data_dir=".", publish=True)
    assert tree(tmp_path) == before
    with storage_of(into).lock("aggregate"):
        refused(LakeError, "another aggregate writes to .* \\(process", into)
    # This table belongs to another log.
    table = StatesTable.open(storage_of(into))
    assert table is not None
    with StatesWriter(storage_of(into), name_of(1, 0, 16)) as writer:
        writer.add({**rows_of(into)[topics[0]], "ordinal": 9})
        assert table.replace(APP, 1, [writer.finish()])
    refused(LakeError, "is not the one that .*/into has", into)


# Kills


@takes_long
@pytest.mark.parametrize("place", ["directory", "s3"])
def test_a_driver_killed_with_all_its_processes_counts_nothing_twice(
    server, prefix, tmp_path, place, request
):
    require_java()
    into, options, points = str(tmp_path / "into"), {}, tmp_path / "points"
    if place == "s3":
        bucket = request.getfixturevalue("bucket")
        into, options = f"s3://{bucket.name}/into", bucket.options
    points.mkdir()
    topics = [f"{prefix}/{i}" for i in range(5)]
    given = {"url": server.http_url, "pattern": f"{prefix}/.*", "reducer": "count", "every_s": 0}
    given["storage_options"] = options
    script = (
        "from headrace.pipeline import aggregate_stream; from headrace.pipeline.job import Points\n"
        f"aggregate_stream({into!r}, **{given!r}, master='local[2]', points=Points({str(points)!r}))"
    )
    sent = 0
    for point in ("merged", "committed", "done"):
        (points / f"stop-{point}").touch()
        driver = subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment() | {"JDK_JAVA_OPTIONS": JAVA_OPTIONS, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        reached = points / f"reached-{point}"

        def is_there(driver: Any = driver, reached: Path = reached) -> bool:
            return reached.exists() or driver.poll() is not None

        wait_until(lambda: is_table(into, options), 120, "the table")
        fill(server, {topic: [b"1"] * 3 for topic in topics})
        sent += 3
        wait_until(is_there, 120, f"it to be {point}")
        assert driver.poll() is None
        while members := session_members(driver.pid):
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            driver.wait(30)
        (points / f"stop-{point}").unlink()
        reached.unlink()
        if point != "merged":
            assert set(ordinals(into, options).values()) == {sent}
    assert {row["state"] for row in rows_of(into, options).values()} == {b"%d" % sent}
