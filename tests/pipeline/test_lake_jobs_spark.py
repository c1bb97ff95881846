"""Compaction and replay as commands, on Spark: their output, and that tasks do the same as without Spark."""

import pytest

from headrace.cli.main import app
from tests.pipeline.lakes import rows_of
from tests.pipeline.made import MadeLake
from tests.pipeline.replayed import payloads_of


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
