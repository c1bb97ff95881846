"""Every job as a command on real Spark, killed with all its processes at random, then run to its end.

The lake is in a directory or on a real S3 server. The result equals that of an undisturbed run. Kills at
named points, without Spark and in every run of the tests, are in the tests of each job.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace.pipeline import aggregate, dedupe
from headrace.pipeline.tasks import LocalRunner
from tests.pipeline.lakes import expected, rows_of
from tests.pipeline.replayed import payloads_of
from tests.spark.lives import REPOSITORY, environment, session_members
from tests.spark.support import publish, require_java
from tests.tools import TORTURE, takes_long

KILLS = max(2, TORTURE // 20)
"""Kills of each job. There are few, because a start of Spark takes some seconds."""

pytestmark = takes_long


class Commands:
    def __init__(self, root: Path, url: str, environ: Mapping[str, str]) -> None:
        self._url, self._environ = url, environment() | environ
        self._output = root / "output"
        self._chance = random.Random(TORTURE)

    def until_done(self, job: str, *arguments: object, is_asked: bool = True) -> None:
        """Kill the job some times, unless it has ended before; the last run ends by itself."""
        place = ["--http", self._url] if is_asked else []
        command = [sys.executable, "-m", "headrace", "pipeline", job, *map(str, arguments), *place]
        for _ in range(KILLS):
            # In the first second or two, only Spark's start runs.
            self._run(command, self._chance.uniform(2, 12))
        self._run(command, None)

    def _run(self, command: list[str], kill_after_s: float | None) -> None:
        with (
            self._output.open("wb") as output,
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=self._environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                code = process.wait(kill_after_s or 240)
                assert code == 0, self._output.read_text()
            except subprocess.TimeoutExpired:
                assert kill_after_s is not None, self._output.read_text()
                while members := session_members(process.pid):
                    for pid in members:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    process.poll()


def table(path: str, options: Mapping[str, str], *names: str) -> list[dict[str, Any]]:
    found = DeltaTable(path, storage_options={**options, "AWS_ALLOW_HTTP": "true"})
    rows: list[dict[str, Any]] = found.to_pyarrow_table(columns=list(names)).to_pylist()
    return sorted(rows, key=lambda row: tuple(row[name] for name in names))


@pytest.fixture(params=["directory", "s3"])
def place(request, tmp_path) -> tuple[str, dict[str, str]]:
    """Return the address under which all tables of a test are, and the options of its storage."""
    if request.param == "directory":
        return str(tmp_path), {}
    bucket = request.getfixturevalue("bucket")
    return f"s3://{bucket.name}", bucket.options


@pytest.mark.timeout(14_400)
def test_jobs_killed_at_random_leave_what_an_undisturbed_one_does(own_server, tmp_path, place):
    require_java()
    root, options = place
    chance = random.Random(3)
    topics = {
        name: [chance.randbytes(chance.randint(1, 400)) for _ in range(3000)] for name in "ab"
    }
    for name, payloads in topics.items():
        payloads += payloads[:50]
        publish(own_server.figg_url, name, payloads)
    # Credentials come from the environment, as a scheduler passes them.
    lake, commands = f"{root}/lake", Commands(tmp_path, own_server.http_url, options)
    undisturbed = {"storage_options": options, "runner": LocalRunner()}
    commands.until_done("export", "--once", "--lake", lake, "--batch-bytes", 100_000)
    assert rows_of(lake, options) == expected(own_server, topics)
    commands.until_done("compact", "--lake", lake, is_asked=False)
    assert rows_of(lake, options) == expected(own_server, topics)
    commands.until_done("replay", "a", "--to", "again", "--lake", lake, "--rate", 2000)
    assert payloads_of(own_server, "again") == topics["a"]
    into, other = f"{root}/states", f"{root}/states2"
    commands.until_done("aggregate", "a", "b", "--lake", lake, "--reducer", "last", "--into", into)
    aggregate(lake, other, ["a", "b"], reducer="last", **undisturbed)
    names = ("topic", "epoch", "offset", "ordinal", "messages", "state", "complete")
    assert table(into, options, *names) == table(other, options, *names)
    into, other = f"{root}/deduped", f"{root}/deduped2"
    commands.until_done("dedupe", "--lake", lake, "--into", into, "--payload", is_asked=False)
    dedupe(lake, other, payload=True, **undisturbed)
    names = ("topic", "offset", "ordinal", "payload")
    assert table(into, options, *names) == table(other, options, *names)
    page = tmp_path / "report.html"
    commands.until_done("report", "--lake", lake, "--out", page)
    assert "</html>" in page.read_text()
    commands.until_done("audit", "--lake", lake)
