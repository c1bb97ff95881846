"""The lake's rows with duplicates removed, whatever was killed, in any number of runs."""

import json
import os
import random
from contextlib import nullcontext
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace import connect_blocking
from headrace.errors import OptionError
from headrace.lake.deduped import APP, DedupedTable
from headrace.lake.format import FORMAT, LakeError, Shape
from headrace.lake.storage.storage import HIDDEN, DirectoryStorage, storage_of
from headrace.model import JUMP, Position
from headrace.pipeline.compact import compact
from headrace.pipeline.dedupe import job as dedupe_job
from headrace.pipeline.dedupe import keys as dedupe_keys
from headrace.pipeline.dedupe.job import dedupe
from headrace.pipeline.export.job import export
from headrace.pipeline.tasks import JobError, LocalRunner, NotSharedError, Step
from tests.lake.rows import NOON_MS
from tests.pipeline.export.exporter import exporters
from tests.pipeline.lakes import rows_of
from tests.pipeline.made import MadeLake
from tests.pipeline.meddling import Killed, Meddling, kill, tree
from tests.spark.support import send

POINTS = ("staging", "deciding", "writing", "written", "noted", "committed", "swept")
HOUR_MS = 3_600_000


def run(lake, into, **given):
    return dedupe(lake, into, **{"payload": True, "runner": LocalRunner(), **given})


def firsts(lake, window_ms=24 * HOUR_MS):
    """Return the rows that remain of a lake, by payload, decided one row after the other."""
    table = (
        DeltaTable(str(lake))
        .to_pyarrow_table()
        .sort_by([("topic", "ascending"), ("offset", "ascending")])
    )
    since, found = {}, []
    for row in table.to_pylist():
        key, at = (row["topic"], row["payload"]), row["timestamp"].timestamp() * 1000
        if key not in since or (window_ms is not None and at >= since[key] + window_ms):
            since[key] = at
            found.append((row["topic"], row["offset"]))
    return found


def left(into):
    return [(row.topic, row.offset) for row in rows_of(into)]


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """Lake in which payloads come again: in the same batch, in the next one, and hours or days later."""
    lake = MadeLake(tmp_path_factory.mktemp("doubled") / "lake")
    chance = random.Random(3)
    for number, hours in enumerate((0, 1, 11, 13, 25, 49, 50)):
        payloads = {}
        for topic in ("a", "ü/..", *(["b"] if number % 2 else [])):
            some = [b"%d" % chance.randrange(30) for _ in range(20)]
            payloads[topic] = some
        lake.add(payloads, NOON_MS + hours * HOUR_MS)
    return lake


@pytest.fixture
def made(template, tmp_path):
    return template.copy(tmp_path / "a lake")


@pytest.mark.parametrize("window_s", [86_400.0, 3600.0, None])
def test_the_first_row_of_a_key_stays_within_the_window(template, tmp_path, window_s):
    into = tmp_path / "into"
    done = run(template.path, into, window_s=window_s)
    expected = firsts(template.path, None if window_s is None else window_s * 1000)
    assert left(into) == expected
    assert (done.kept, done.dropped) == (len(expected), done.rows - len(expected))
    assert (done.rows, done.without_key, done.topics) == (len(rows_of(template.path)), 0, 3)
    kept = set(rows_of(into))
    assert kept <= set(rows_of(template.path))
    before = tree(into)
    assert run(template.path, into, window_s=window_s)[1:] == (0,) * 6
    assert tree(into).keys() == before.keys()


def test_its_files_are_sorted_and_others_read_them(template, tmp_path):
    into = tmp_path / "into"
    run(template.path, into)
    table = DeltaTable(str(into))
    assert table.transaction_version(APP) == 0
    assert table.metadata().partition_columns == ["date"]
    assert table.schema() == DeltaTable(str(template.path)).schema()
    for uri in table.file_uris():
        found = duckdb.sql(f"select topic, \"offset\" from read_parquet('{uri}')").fetchall()
        assert found == sorted(found)
    count = duckdb.read_parquet(table.file_uris()).aggregate("count(*)").fetchall()
    assert count == [(len(firsts(template.path)),)]
    some = table.to_pyarrow_table(filters=[("topic", "=", "b"), ("offset", ">", 50)])
    assert sorted(some["offset"].to_pylist()) == [
        offset for topic, offset in left(into) if topic == "b" and offset > 50
    ]


batches = st.lists(
    st.tuples(
        st.dictionaries(
            st.sampled_from(["a", "b/ü"]),
            st.lists(st.sampled_from([b"", b"x", b"yy", b"zzz"]), min_size=1, max_size=4),
            min_size=1,
        ),
        st.integers(0, 30),
        st.sampled_from(["", "run", "run", "compact", "one topic"]),
        st.sampled_from([500, 5000]),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=int(os.environ.get("HEADRACE_TORTURE", "8")),
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches, st.booleans())
def test_many_runs_come_to_the_same_as_one(tmp_path_factory, monkeypatch, some, by_topic):
    root = tmp_path_factory.mktemp("runs")
    lake, ms = MadeLake(root / "lake", by_topic=by_topic), NOON_MS
    for payloads, hours, then, size in some:
        ms += hours * HOUR_MS
        lake.add(payloads, ms)
        if then == "compact":
            compact(lake.path, runner=LocalRunner())
        elif then:
            only = [min(payloads)] if then == "one topic" else []
            monkeypatch.setattr(dedupe_keys, "_BUCKET_ROWS", size // 500)
            monkeypatch.setattr(dedupe_job, "_STAGED_ROWS", size // 250)
            monkeypatch.setattr(dedupe_job, "_LETTER_BYTES", size // 5)
            run(lake.path, root / "steps", topics=only, task_bytes=size)
    run(lake.path, root / "steps")
    run(lake.path, root / "once")
    assert left(root / "steps") == left(root / "once") == firsts(lake.path)
    assert rows_of(root / "steps") == rows_of(root / "once")


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_any_point_is_as_one_that_nobody_disturbed(made, tmp_path, point):
    into = tmp_path / "into"
    run(made.path, into)
    made.add({"a": [b"1", b"2", b"new"], "c": [b"1", b"1"]}, NOON_MS + 51 * HOUR_MS)
    before = left(into)
    with pytest.raises(Killed):
        run(made.path, into, points=Meddling(**{point: kill}))
    expected = firsts(made.path)
    assert left(into) == (expected if point in ("committed", "swept") else before)
    done = run(made.path, into)
    assert left(into) == expected != before
    assert bool(done.rows) == (point not in ("committed", "swept"))
    # The keys that the next run needs are intact too.
    made.add({"a": [b"new", b"1", b"newer"]}, NOON_MS + 52 * HOUR_MS)
    run(made.path, into)
    assert left(into) == firsts(made.path)
    hidden = into / HIDDEN
    assert len(list((hidden / "runs").iterdir())) == 1
    assert len(list((hidden / "keys").iterdir())) <= 4
    assert {path.name for path in hidden.iterdir()} == {"runs", "keys", "lock-dedupe"}


class Repeating(LocalRunner):
    """Runs each task twice. Each task of the next step gets the letters of one run, chosen by chance."""

    def __init__(self):
        self._chance = random.Random(5)

    def exchange(self, works, first, steps, progress=None):
        steps = [Step(step.partitions, self._twice(step.function)) for step in steps]
        return super().exchange(works, self._twice(first), steps, progress)

    def _twice(self, function):
        def either(*given):
            # The last argument is a work, or letters that both runs read.
            *before, last = given
            kept = list(last) if before else []
            runs = [list(function(*before, iter(kept) if before else last)) for _ in range(2)]
            to = {letter.to for letter in runs[0]}
            chosen = {number: self._chance.choice(runs) for number in sorted(to)}
            found = [
                letter for letters in runs for letter in letters if chosen[letter.to] is letters
            ]
            self._chance.shuffle(found)
            return iter(found)

        return either


def test_tasks_that_run_again_change_nothing(made, tmp_path):
    into = tmp_path / "into"
    for hours in (51, 52):
        run(made.path, into, runner=Repeating(), task_bytes=3000)
        assert left(into) == firsts(made.path)
        made.add({"a": [b"1", b"2", b"%d" % hours], "c": [b"1", b"1"]}, NOON_MS + hours * HOUR_MS)
    run(made.path, into)
    assert left(into) == firsts(made.path)
    assert len(list((into / HIDDEN / "keys").iterdir())) == 4


def test_without_new_rows_no_task_runs(made, tmp_path):
    class Idle(LocalRunner):
        def exchange(self, *given):
            raise AssertionError

    into = tmp_path / "into"
    run(made.path, into)
    compact(made.path, runner=LocalRunner())
    assert run(made.path, into, runner=Idle()).rows == 0


def test_a_machine_that_does_not_see_the_table_writes_nothing(made, tmp_path, monkeypatch):
    """The table is hidden while tasks run, as if they ran on a machine without this directory."""

    class Elsewhere(LocalRunner):
        def exchange(self, *given):
            into.rename(tmp_path / "hidden")
            return super().exchange(*given)

    into = tmp_path / "into"
    with pytest.raises(NotSharedError, match="Spark's executors do not see "):
        run(made.path, into, runner=Elsewhere())
    assert not into.exists()


def test_each_table_has_a_secret_and_keeps_it(made, tmp_path):
    secrets = []
    for into in (tmp_path / "one", tmp_path / "other"):
        for hours in (51, 52):
            run(made.path, into)
            made.add({"a": [b"%d" % hours]}, NOON_MS + hours * HOUR_MS)
            secrets.append(DedupedTable.open(storage_of(into), Shape()).last().secret)
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert {len(secret) for secret in secrets} == {32}


def test_files_that_an_earlier_version_has_left_are_deleted(made, tmp_path):
    into = tmp_path / "into"
    run(made.path, into)
    staging = into / HIDDEN / "staging"
    staging.mkdir()
    (staging / "000000-keys-0123456789ab.arrow").touch()
    (staging / "mine").touch()
    made.add({"a": [b"newest"]}, NOON_MS + 52 * HOUR_MS)
    run(made.path, into)
    assert [path.name for path in staging.iterdir()] == ["mine"]


def test_files_of_others_stay(made, tmp_path):
    into = tmp_path / "into"
    run(made.path, into)
    names = ("keys/mine.parquet", "keys/000000000000.parquet", "runs/000000000000-mine.json")
    others = [into / HIDDEN / name for name in names]
    others += [into / name for name in ("date=2020-01-01/x.parquet", "README.txt")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (1_600_000_000, 1_600_000_000))
    made.add({"a": [b"newest"]}, NOON_MS + 52 * HOUR_MS)
    assert run(made.path, into).rows == 1
    assert all(path.exists() for path in others)


def test_a_process_killed_at_any_point_is_as_one_that_nobody_disturbed(made, tmp_path):
    into = tmp_path / "into"
    given = {"job": "dedupe", "lake": str(made.path), "into": str(into), "payload": True}
    (tmp_path / "killed").mkdir()
    with exporters(tmp_path / "killed") as killed:
        for number, point in enumerate(POINTS):
            made.add({"a": [b"1", b"%d" % (100 + number)]}, NOON_MS + (51 + number) * HOUR_MS)
            killed.kill_at(point, **given)
        killed.finish(**given)
    assert left(into) == firsts(made.path)


@pytest.mark.parametrize(("kind", "by_topic"), [("parquet", False), ("iceberg", True)])
def test_lakes_of_every_format(tmp_path, kind, by_topic):
    lakes = [
        MadeLake(tmp_path / name, kind=name, by_topic=by_topic and name == kind)
        for name in (kind, "delta")
    ]
    for lake in lakes:
        into = tmp_path / f"{lake.path.name}-into"
        lake.add({"a": [b"1", b"2", b"1"], "b": [b"1"]}, NOON_MS)
        run(lake.path, into)
        lake.add({"a": [b"3", b"1", b"3"], "b": [b"1", b"2"]}, NOON_MS + HOUR_MS)
        compact(lake.path, runner=LocalRunner())
        assert run(lake.path, into)[1:4] == (5, 2, 3)
    assert left(tmp_path / f"{kind}-into") == firsts(tmp_path / "delta")
    assert rows_of(tmp_path / f"{kind}-into") == rows_of(tmp_path / "delta-into")


def test_more_buckets_than_before_have_the_same_keys(made, tmp_path, monkeypatch):
    into = tmp_path / "into"
    run(made.path, into, window_s=None)
    assert len(list((into / HIDDEN / "keys").iterdir())) == 4
    made.add({"a": [b"%d" % n for n in range(100)]}, NOON_MS + 100 * HOUR_MS)
    monkeypatch.setattr(dedupe_keys, "_BUCKET_ROWS", 20)
    run(made.path, into, window_s=None)
    assert len(list((into / HIDDEN / "keys").iterdir())) == 16
    made.add({"a": [b"%d" % n for n in range(110)]}, NOON_MS + 200 * HOUR_MS)
    assert run(made.path, into, window_s=None).kept == 10
    assert left(into) == firsts(made.path, None)


@pytest.mark.parametrize(
    ("end", "covered", "rows"),
    [
        (Position(1, 1000, 10), 0, 10),
        (Position(1, 1000, 10), 700, 3),
        (Position(2, JUMP + 1000, JUMP + 10), 700, 10),
        (Position(2, JUMP + 1000, JUMP + 10), JUMP + 700, 3),
        (Position(2, JUMP, JUMP), 0, 0),
    ],
)
def test_a_topic_that_jumped_ahead_has_no_more_rows_for_that(end, covered, rows):
    """The table would keep a thousand buckets for ever."""
    assert dedupe_job.new_rows(end, covered) == rows


def test_nothing_but_rows_that_are_there_once_more(made, tmp_path):
    into = tmp_path / "into"
    run(made.path, into, window_s=None)
    made.add({"a": made.payloads["a"][:7]}, NOON_MS + 100 * HOUR_MS)
    assert run(made.path, into, window_s=None)[1:] == (7, 0, 7, 0, 1, 0)
    assert run(made.path, into, window_s=None).rows == 0


def test_files_that_others_have_merged_are_no_matter(made, tmp_path):
    into = tmp_path / "into"
    for number in range(3):
        made.add({"a": [b"%d" % number, b"1"]}, NOON_MS + (60 + number) * HOUR_MS)
        run(made.path, into)
    DeltaTable(str(into)).optimize.compact()
    made.add({"a": [b"2", b"3"]}, NOON_MS + 63 * HOUR_MS)
    run(made.path, into)
    assert left(into) == firsts(made.path)


def test_by_a_place_in_json(tmp_path):
    lake = MadeLake(tmp_path / "lake")
    orders = [
        *(b'{"id": 1, "n": 0}', b'{"id": 1.0, "n": 1}', b'{"id": "1"}', b"no JSON", b"no JSON"),
        *(b'{"id": null}', b'{"id": {"a": 1, "b": 2}}', b'{"id": {"b": 2, "a": 1}}'),
    ]
    lake.add({"orders": orders}, NOON_MS)
    done = run(lake.path, tmp_path / "into", payload=False, json_path="$.id")
    assert done[1:5] == (8, 6, 2, 3)
    assert [row.payload for row in rows_of(tmp_path / "into")] == [
        orders[place] for place in (0, 2, 3, 4, 5, 6)
    ]


def test_by_a_decoded_column(server, tmp_path):
    topic, lake, into = "dedupe/decoded", tmp_path / "lake", tmp_path / "into"
    orders = [{"id": 1}, {"id": 2}, {"id": 1, "again": True}, {"other": 1}, {"other": 1}]
    with connect_blocking(server.figg_url) as client:
        for order in orders:
            client.publish(topic, json.dumps(order).encode())
    decoded = {"decode": "json", "schema": "id bigint, tags array<string>"}
    export(lake, [topic], url=server.http_url, runner=LocalRunner(), **decoded)
    done = run(lake, into, payload=False, key="id")
    assert done[1:5] == (5, 4, 1, 2)
    table = DeltaTable(str(into)).to_pyarrow_table().sort_by("offset")
    assert table["id"].to_pylist() == [1, 2, None, None]
    for column, reason in (
        ("name", "has no column 'name' that could identify rows: use one of payload, id, tags"),
        ("offset", "has no column 'offset' that could identify rows"),
        ("tags", "column 'tags' holds nested values: name one of a plain type"),
    ):
        with pytest.raises(LakeError, match=reason):
            run(lake, tmp_path / "other", payload=False, key=column)
    assert not (tmp_path / "other").exists()


def test_a_topic_that_was_deleted_and_made_again_is_the_same_topic(server, tmp_path):
    topic, lake, into = "dedupe/lives", tmp_path / "lake", tmp_path / "into"
    for payloads in ([b"one", b"two"], [b"two", b"three", b"one"]):
        with connect_blocking(server.figg_url) as client:
            for payload in payloads:
                client.publish(topic, payload)
        export(lake, [topic], url=server.http_url, runner=LocalRunner())
        send(server, "DELETE", "/v1/topic", name=topic)
        run(lake, into)
    run(lake, tmp_path / "once")
    found = rows_of(into)
    assert [row.payload for row in found] == [b"one", b"two", b"three"]
    assert len({row.epoch for row in found}) == 2
    assert found == rows_of(tmp_path / "once")


def test_of_two_runs_at_once_one_counts(made, tmp_path, monkeypatch):
    """This simulates two machines, where the lock of one does not reach the other."""
    into = tmp_path / "into"
    run(made.path, into)
    made.add({"a": [b"1", b"new"]}, NOON_MS + 51 * HOUR_MS)
    with (
        storage_of(into).lock("dedupe"),
        pytest.raises(LakeError, match="another dedupe writes to"),
    ):
        run(made.path, into)
    monkeypatch.setattr(DirectoryStorage, "lock", lambda self, job: nullcontext())
    for point in ("written", "noted"):
        meddling = Meddling(**{point: lambda: run(made.path, into)})
        with pytest.raises(LakeError, match="it has committed run"):
            run(made.path, into, points=meddling)
        assert left(into) == firsts(made.path)
        made.add({"a": [b"1", b"newer"]}, NOON_MS + 52 * HOUR_MS)
        run(made.path, into)
        assert left(into) == firsts(made.path)
        made.add({"a": [b"2", b"newest"]}, NOON_MS + 53 * HOUR_MS)


def test_what_the_next_run_writes_is_not_swept_by_the_last(made, tmp_path):
    """This simulates two machines: one sweeps after its commit while the other is about to commit."""
    into = tmp_path / "into"
    run(made.path, into)
    table = DedupedTable.open(storage_of(into), Shape())
    for hours in (51, 52):
        made.add({"a": [b"1", b"%d" % hours]}, NOON_MS + hours * HOUR_MS)
        run(made.path, into, points=Meddling(noted=lambda: table.sweep(table.last())))
        assert left(into) == firsts(made.path)


def test_a_damaged_file_ends_it_and_is_named(made, tmp_path):
    into = tmp_path / "into"
    run(made.path, into)
    (path,) = made.add({"a": [b"12345678" * 20, b"new"]}, NOON_MS + 51 * HOUR_MS)
    data = bytearray((made.path / path).read_bytes())
    data[data.index(b"12345678") + 3] ^= 1
    (made.path / path).write_bytes(data)
    before = left(into)
    with pytest.raises(LakeError, match=f"{Path(path).name} cannot be read: "):
        run(made.path, into)
    (made.path / path).unlink()
    with pytest.raises(LakeError, match=f"{Path(path).name} cannot be read: "):
        run(made.path, into)
    assert left(into) == before


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"payload": False}, OptionError, "say what identifies a row"),
        ({"key": "id"}, OptionError, "say what identifies a row: a column, a JSON path, or"),
        ({"json_path": "$.id"}, OptionError, "say what identifies a row"),
        ({"payload": False, "json_path": "id"}, OptionError, "a path begins with"),
        ({"payload": False, "key": "id"}, LakeError, "has no column 'id'"),
        ({"window_s": 0}, OptionError, "window_s must be at least 0.001 seconds, not 0"),
        ({"window_s": float("nan")}, OptionError, "seconds, not nan"),
        ({"topics": ["gone"]}, JobError, "there is no topic 'gone' in "),
        ({"topics": ["a"], "pattern": "b"}, OptionError, "exclude each other"),
        ({"pattern": "["}, OptionError, "not a regular expression"),
        ({"lake": "nowhere"}, LakeError, "is not a lake of Headrace"),
        ({"into": "a lake"}, LakeError, "is the lake itself: name another directory"),
        ({"into": "a lake/into"}, LakeError, "one is inside the other"),
        ({"into": "."}, LakeError, "one is inside the other: name another directory"),
        ({"into": "a file"}, LakeError, "is not a directory: name a new or an empty one"),
        ({"into": "things"}, LakeError, "else than deduped rows of Headrace [(]thing[)]"),
        ({"into": "other lake"}, LakeError, "holds something else than deduped rows of Headrace"),
        ({"into": "newer"}, LakeError, "was written by a newer version [(]format 99"),
        ({"into": "/proc/into"}, LakeError, "/proc/into cannot be written to: "),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(made, tmp_path, given, error, reason):
    (tmp_path / "a file").touch()
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "thing").touch()
    MadeLake(tmp_path / "other lake")
    DeltaTable.create(
        str(tmp_path / "newer"),
        DeltaTable(str(made.path)).schema(),
        configuration={"headrace.deduped": "99"},
        raise_if_key_not_exists=False,
    )
    before = tree(tmp_path)
    given = {"lake": "a lake", "into": "into", **given}
    with pytest.raises(error, match=reason):
        run(tmp_path / given.pop("lake"), tmp_path / given.pop("into"), **given)
    assert tree(tmp_path) == before


def test_what_was_decided_at_the_first_run_stays(made, tmp_path):
    into = tmp_path / "into"
    run(made.path, into)
    before = tree(into)
    for options, reason in (
        (
            {"window_s": None},
            "and a window of 86400 seconds, not with payload and no window",
        ),
        (
            {"payload": False, "json_path": "$"},
            "not with json [$] and a window of 86400 seconds: name another",
        ),
    ):
        with pytest.raises(LakeError, match=reason):
            run(made.path, into, **options)
    other = MadeLake(tmp_path / "other")
    with pytest.raises(LakeError, match="has the rows of another lake: name another directory"):
        run(other.path, into)
    (note,) = (into / HIDDEN / "runs").iterdir()
    data = note.read_bytes()
    for changed, reason in (
        (data.replace(b'"format":%d' % FORMAT, b'"format":99'), "was written by a newer version"),
        (data[:-9], "is damaged [(].*: restore it, or dedupe into a new directory"),
        (data.replace(b'"a":', b'"x":'), "is damaged [(]its checksum fails[)]: restore it"),
    ):
        note.write_bytes(changed)
        with pytest.raises(LakeError, match=reason):
            run(made.path, into)
    note.unlink()
    with pytest.raises(LakeError, match="the note of run 0 is missing, so it is unknown how far"):
        run(made.path, into)
    note.write_bytes(data)
    assert tree(into).keys() == before.keys()
