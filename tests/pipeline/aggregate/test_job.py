"""Aggregations of a real server's log: states equal the server's own, whatever is killed at any time."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.lake.format import LakeError
from headrace.lake.storage.storage import storage_of
from headrace.pipeline import export
from headrace.pipeline.aggregate.job import APP, AggregateSummary, aggregate
from headrace.pipeline.tasks import JobError, LocalRunner
from headrace.testing import ServerProcess
from tests.pipeline.aggregate.aggregates import (
    REDUCERS,
    Channels,
    State,
    channel_server,
    fill,
    rows_of,
)
from tests.pipeline.export.exporter import exporters
from tests.spark.support import wait_applied

HISTORIES = 3
"""Histories for each reducer in each example."""

_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with channel_server(tmp_path_factory.mktemp("aggregate")) as process:
        yield process


@pytest.fixture
def prefix() -> str:
    """Prefix for the topics of one test."""
    return f"t{next(_numbers)}"


@pytest.fixture
def channels(server: ServerProcess) -> Iterator[Channels]:
    made = Channels(server)
    yield made
    made.close()


def to_lake(server: ServerProcess, lake: Path, prefix: str, **given: Any) -> None:
    export(
        lake,
        pattern=f".*{prefix}/.*",
        url=server.http_url,
        runner=LocalRunner(),
        take_over=True,
        **given,
    )


def run(
    server: ServerProcess, lake: Path, into: Path, reducer: str, **given: Any
) -> AggregateSummary:
    place = {} if given.keys() & {"url", "data_dir"} else {"url": server.http_url}
    return aggregate(lake, into, reducer=reducer, **{"runner": LocalRunner(), **place, **given})


class Refusing(LocalRunner):
    """Refuses steps without a partition, as Spark does."""

    def exchange(self, works: Any, first: Any, steps: Any, progress: Any = None) -> Any:
        assert all(step.partitions for step in steps)
        return super().exchange(works, first, steps, progress)


# States equal to the server's

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=4)
numbers = st.one_of(st.integers(-(2**63), 2**64), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abä"), inner, max_size=3)
    ),
    max_leaves=6,
)
changes = st.one_of(
    st.builds(lambda key, value: {"key": key, "value": value}, st.sampled_from("abc"), values),
    st.builds(lambda key: {"key": key, "delete": True}, st.sampled_from("abc")),
)


def written(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[bytes, bool]]:
    """JSON with the formatting that people use."""
    ways = st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}])
    return st.builds(lambda value, way: (json.dumps(value, **way).encode(), True), inner, ways)


raw = st.builds(lambda data: (data, False), st.binary(max_size=5))
contents = {
    "last": written(values) | raw,
    "count": written(values) | raw,
    "merge": written(values),
    "map": written(changes),
    "eq": written(values) | raw,
}
histories = st.fixed_dictionaries(
    {
        prefix: st.lists(
            st.lists(one, min_size=1, max_size=8), min_size=HISTORIES, max_size=HISTORIES
        )
        for prefix, one in contents.items()
    }
)


@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(histories, st.integers(0, 8), st.sampled_from([300, 1 << 20]))
def test_job_and_server_come_to_the_same_states(
    server, channels, tmp_path, histories, exported, part_bytes
):
    example = f"e{next(_numbers)}"
    lake = tmp_path / example / "lake"
    named = {
        (prefix, f"{prefix}/{example}/{number}"): messages
        for prefix, some in histories.items()
        for number, messages in enumerate(some)
    }
    for first, last in ((0, exported), (exported, None)):
        if first:
            to_lake(server, lake, example, part_bytes=part_bytes)
        for (_, name), messages in named.items():
            for data, is_json in messages[first:last]:
                channels.send(name, data, is_json=is_json)
    if not exported:
        to_lake(server, lake, example, by_topic=True)
    found: dict[str, State] = {}
    for prefix, reducer in REDUCERS.items():
        into = tmp_path / example / prefix
        done = run(
            *(server, lake, into, reducer),
            pattern=rf"\$channel/{prefix}/{example}/.*",
            task_bytes=part_bytes,
        )
        assert (done.topics, done.failed, done.incomplete) == (HISTORIES, 0, 0)
        for topic, row in rows_of(into).items():
            assert (row["complete"], row["error"], row["reducer"]) == (True, None, reducer)
            messages = named[prefix, topic.removeprefix("$channel/")]
            assert row["messages"] == row["ordinal"] == len(messages)
            found[topic] = State(*(row[name] for name in State._fields))
    for _, name in named:
        channels.leave(name)
    for _, name in named:
        assert found[f"$channel/{name}"] == channels.snapshot(name)


# Input and output


def test_states_cover_lake_and_log_of_all_topics(server, prefix, tmp_path):
    lake, into = tmp_path / "lake", tmp_path / "into"
    payloads = {f"{prefix}/{i}": [b'{"%d": %d}' % (i, n) for n in range(40)] for i in range(9)}
    fill(server, payloads)
    to_lake(server, lake, prefix, part_bytes=1000)
    fill(server, {name: [b'{"more": 1}', b"no JSON"] for name in payloads})
    given = {"pattern": f"{prefix}/.*", "task_bytes": 2000}
    seen: list[tuple[int, int]] = []
    told = run(
        server, lake, into, "last", progress=lambda done, all_: seen.append((done, all_)), **given
    )
    assert seen[-1][0] == seen[-1][1] > 0
    assert (told.topics, told.messages, told.failed, told.refused) == (9, 9 * 42, 0, 0)
    for row in rows_of(into).values():
        assert (row["state"], row["is_json"], row["ordinal"]) == (b"no JSON", False, 42)
    # The states of another reducer replace those of the first, even where that reducer fails.
    told = run(server, lake, into, "merge", **given)
    assert (told.failed, told.messages) == (9, 9 * 41)
    assert "cannot be folded: it is bytes, and this reducer takes JSON" in told.first_failure
    for name, row in rows_of(into).items():
        number = int(name.removeprefix(f"{prefix}/"))
        assert json.loads(row["state"]) == {str(number): 39, "more": 1}
        assert (row["ordinal"], row["messages"], row["complete"]) == (41, 41, True)
        assert row["error"] == (
            f'message 42 of "{name}" cannot be folded: it is bytes, and this reducer takes JSON'
        )
    # First only what the lake has, then only one topic, then nothing.
    run(server, lake, into, "count", url="", pattern=f"{prefix}/.*")
    assert {row["state"] for row in rows_of(into).values()} == {b"40"}
    one = f"{prefix}/3"
    run(server, lake, into, "count", topics=[one])
    assert {name: row["state"] for name, row in rows_of(into).items()} == {one: b"42"}
    assert run(server, lake, into, "count", pattern="nothing", runner=Refusing()).topics == 0
    assert rows_of(into) == {}
    assert DeltaTable(str(into)).transaction_version(APP) == 4


def test_files_of_a_data_directory_give_the_same(server, prefix, tmp_path):
    lake = tmp_path / "lake"
    fill(server, {f"{prefix}/a": [b"1", b"2"], f"{prefix}/b": [b"3"]})
    to_lake(server, lake, prefix)
    fill(server, {f"{prefix}/a": [b"4"], f"{prefix}/c": [b"5"]})
    wait_applied(server, *(f"{prefix}/{name}" for name in "abc"))
    found = []
    for number, place in enumerate(({}, {"data_dir": str(server.data_dir)})):
        into = tmp_path / str(number)
        run(server, lake, into, "last", pattern=f"{prefix}/.*", **place)
        found.append(rows_of(into))
    assert found[0] == found[1]
    assert [row["state"] for _, row in sorted(found[0].items())] == [b"4", b"3", b"5"]


def test_a_state_without_its_first_records_says_so(server, prefix, tmp_path):
    lake, into = tmp_path / "lake", tmp_path / "into"
    fill(server, {f"{prefix}/a": [b"1"]})
    to_lake(server, lake, prefix)
    with httpx.Client(base_url=server.http_url) as http:
        assert http.delete("/v1/topic", params={"name": f"{prefix}/a"}).is_success
    fill(server, {f"{prefix}/a": [b"2"], f"{prefix}/b": [b"3"]})
    run(server, lake, into, "count", pattern=f"{prefix}/.*")
    assert rows_of(into)[f"{prefix}/a"]["state"] == b"2"  # counts both lives
    other = tmp_path / "other"
    to_lake(server, other, prefix)
    told = run(server, other, into, "count", pattern=f"{prefix}/.*")
    assert (told.incomplete, told.topics) == (1, 2)
    found = {name[-1]: (row["state"], row["complete"]) for name, row in rows_of(into).items()}
    assert found == {"a": (b"1", False), "b": (b"1", True)}


# Publishing to the server


def test_states_are_published_where_they_are_uploaded(server, prefix, channels, tmp_path):
    lake, into = tmp_path / "lake", tmp_path / "into"
    up, folded = f"up/{prefix}/1", f"map/{prefix}/1"
    for name in (up, folded):
        channels.send(name, b'{"key": "a", "value": 1}', is_json=True)
    fill(server, {f"{prefix}/topic": [b'{"key": "b", "value": 2}']})
    to_lake(server, lake, prefix)
    channels.send(up, b'{"key": "a", "value": 1.0}', is_json=True)
    given = {"pattern": f".*{prefix}/.*", "publish": True}
    told = run(server, lake, into, "map", **given)
    assert (told.topics, told.published, told.refused) == (3, 1, 1)
    assert told.first_refusal == (
        f"channel {folded!r}: channel {folded!r} has the reducer 'map': the server folds it"
    )
    row = rows_of(into)[f"$channel/{up}"]
    assert channels.kept(up) == State(*(row[name] for name in State._fields))
    assert (row["state"], channels.kept(up).is_json) == (b'{"a":1.0}', True)
    assert run(server, lake, into, "map", **given)[2:] == told[2:]  # repeating it does no harm
    with pytest.raises(OptionError, match="where states are published"):
        run(server, lake, into, "map", url="", **given)


# Kills


def test_a_run_that_was_killed_leaves_the_table_as_it_was(server, prefix, tmp_path):
    lake, into = tmp_path / "lake", tmp_path / "into"
    topics = [f"{prefix}/{i}" for i in range(5)]
    fill(server, {name: [b"1"] for name in topics})
    to_lake(server, lake, prefix)
    run(server, lake, into, "last", url="")
    given = {"lake": str(lake), "into": str(into), "pattern": f"{prefix}/.*"}
    given |= {"job": "aggregate", "reducer": "merge", "url": server.http_url}
    with exporters(tmp_path) as made:
        for number, point in enumerate(("reading", "folding", "folded", "committed")):
            before = rows_of(into)
            fill(server, {name: [b"%d" % number] for name in topics})
            made.kill_at(point, **given)
            assert (rows_of(into) == before) == (point != "committed"), point
            told = made.finish(**given)
            assert (told["topics"], told["messages"]) == (5, 5 * (2 + number))
            assert {row["state"] for row in rows_of(into).values()} == {b"%d" % number}


# Refusals


def test_what_cannot_be_done_is_said_and_nothing_is_changed(server, prefix, tmp_path):
    lake, into = tmp_path / "lake", tmp_path / "into"
    fill(server, {f"{prefix}/a": [b"1"]})
    to_lake(server, lake, prefix)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")

    def refused(kind: type[Exception], text: str, *args: Any, **given: Any) -> None:
        with pytest.raises(kind, match=text):
            run(server, *args, **given)

    refused(LakeError, r"something else than states of Headrace \(notes.txt\)", lake, other, "last")
    refused(
        LakeError, "one is inside the other: name another directory", lake, lake / "states", "last"
    )
    refused(
        LakeError, r"something else than states of Headrace \(a Delta table", lake, lake, "last"
    )
    refused(LakeError, r"than a lake of Headrace \(notes.txt\)", other, into, "last")
    refused(LakeError, "is not a lake of Headrace", tmp_path / "none", into, "last")
    refused(JobError, "no topic 'nope' to aggregate", lake, into, "last", topics=["nope"])
    refused(OptionError, "no reducer 'lsat'", lake, into, "lsat")
    refused(OptionError, "folds nothing", lake, into, "uploaded")
    refused(OptionError, "not a regular expression", lake, into, "last", pattern="[")
    refused(OptionError, "exclude each other", lake, into, "last", pattern="a", topics=["b"])
    assert not into.exists()
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    [file] = lake.glob("date=*/*.parquet")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    refused(LakeError, "cannot be read", lake, into, "last")
    file.unlink()
    refused(LakeError, "is missing, but the table names it", lake, into, "last")
    with storage_of(into).lock("aggregate"):
        refused(LakeError, "another aggregate writes to .* \\(process", lake, into, "last")
    assert rows_of(into) == {}


# With Spark


def test_with_spark_it_is_the_same(shared_spark, server, prefix, channels, tmp_path):
    assert shared_spark
    lake, into = tmp_path / "lake", tmp_path / "into"
    up = f"up/{prefix}/1"
    channels.send(up, b"[1]", is_json=True)
    fill(server, {f"{prefix}/{i}": [b"%d" % n for n in range(i + 3)] for i in range(7)})
    to_lake(server, lake, prefix, part_bytes=100)
    fill(server, {f"{prefix}/{i}": [b'{"a": 1}'] for i in range(7)})
    given = {"pattern": f".*{prefix}/.*", "task_bytes": 1000}
    reducer = "tests.pipeline.app:gather"
    alone = run(server, lake, into, reducer, **given)
    expected = rows_of(into)
    told = run(server, lake, into, reducer, runner=None, publish=True, **given)
    assert told == alone._replace(published=1)
    assert rows_of(into) == expected
    assert (told.topics, told.failed) == (8, 0)
    assert json.loads(expected[f"{prefix}/1"]["state"]) == [0, 1, 2, 3, {"a": 1}]
    assert channels.kept(up).state == b"[[1]]"
