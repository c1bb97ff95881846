"""Compaction and replay as commands, on Spark: their output, and that tasks do the same as without Spark."""

import json

import pytest

from headrace.cli.main import app
from tests.pipeline.lakes import rows_of
from tests.pipeline.made import MadeLake
from tests.pipeline.replayed import payloads_of
from tests.spark.support import publish


@pytest.fixture
def made(tmp_path):
    lake = MadeLake(tmp_path / "lake")
    for day in (0, 0, 1, 1):
        lake.batch("a", "b", day=day)
    return lake


def said(capsys, *command):
    app(["pipeline", *map(str, command)], standalone_mode=False)
    return capsys.readouterr().out


def test_a_lake_is_compacted(made, shared_spark, capsys):
    assert shared_spark
    before = rows_of(made.path)
    command = ["compact", "--lake", made.path]
    assert said(capsys, *command, "--dry-run").startswith("would have merged 4 files (")
    done = said(capsys, *command)
    assert done.startswith("merged 4 files (")
    assert done.endswith(f") with 40 records of {made.path} into 2\n")
    assert rows_of(made.path) == before
    assert said(capsys, *command) == f"nothing to merge in {made.path}\n"


def test_a_topic_is_replayed(server, made, shared_spark, capsys):
    assert shared_spark
    target = "replayed/on/spark"
    command = ["replay", "a", "--to", target, "--lake", made.path, "--http", server.http_url]
    end = sum(4 + len(payload) for payload in made.payloads["a"])
    where = f"a (offsets 0 to {end}) to {target}"
    assert said(capsys, *command) == f"replayed 20 records ({end} B) of {where} in 1 batch\n"
    assert payloads_of(server, target) == made.payloads["a"]
    assert said(capsys, *command) == (
        f"nothing to replay of {where}; offsets 0 to {end} were replayed before\n"
    )


def test_a_summary_is_one_line_of_json(own_server, shared_spark, tmp_path, capsys):
    assert shared_spark
    publish(own_server.figg_url, "orders", [b'{"id": 1}', b'{"id": 2}', b'{"id": 2}'])
    http, lake = ["--http", own_server.http_url], ["--lake", tmp_path / "lake"]
    jobs = {
        "export": (["orders", "--once", *http], "records", 3),
        "compact": ([], "merged", 0),
        "dedupe": (["--into", tmp_path / "rows", "--json-path", "$.id"], "kept", 2),
        "aggregate": (["--into", tmp_path / "states", "--reducer", "last", *http], "messages", 3),
        "replay": (["orders", "--to", "copy", *http], "records", 3),
    }
    for job, (flags, key, value) in jobs.items():
        (line,) = said(capsys, job, *lake, *flags, "--json").splitlines()
        assert json.loads(line)[key] == value, job
    (line,) = said(capsys, "audit", *lake, *http, "--json").splitlines()
    assert [topic["name"] for topic in json.loads(line)["topics"]] == ["copy", "orders"]
