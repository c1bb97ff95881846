"""Every job as a command on real Spark, killed with all its processes at random, then run to its end.

The result equals that of an undisturbed run. Kills at named points, without Spark and in every run of the
tests, are in the tests of each job.
"""

import os
import random
import signal
import subprocess
import sys
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
    def __init__(self, root: Path, url: str) -> None:
        self._url = url
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
                env=environment(),
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


def table(path: Path, *names: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        DeltaTable(str(path)).to_pyarrow_table(columns=list(names)).to_pylist()
    )
    return sorted(rows, key=lambda row: tuple(row[name] for name in names))


@pytest.mark.timeout(14_400)
def test_jobs_killed_at_random_leave_what_an_undisturbed_one_does(own_server, tmp_path):
    require_java()
    chance = random.Random(3)
    topics = {
        name: [chance.randbytes(chance.randint(1, 400)) for _ in range(3000)] for name in "ab"
    }
    for name, payloads in topics.items():
        payloads += payloads[:50]
        publish(own_server.figg_url, name, payloads)
    lake, commands = tmp_path / "lake", Commands(tmp_path, own_server.http_url)
    commands.until_done("export", "--once", "--lake", lake, "--batch-bytes", 100_000)
    assert rows_of(lake) == expected(own_server, topics)
    commands.until_done("compact", "--lake", lake, is_asked=False)
    assert rows_of(lake) == expected(own_server, topics)
    commands.until_done("replay", "a", "--to", "again", "--lake", lake, "--rate", 2000)
    assert payloads_of(own_server, "again") == topics["a"]
    into = tmp_path / "states"
    commands.until_done("aggregate", "a", "b", "--lake", lake, "--reducer", "last", "--into", into)
    aggregate(lake, tmp_path / "states2", ["a", "b"], reducer="last", runner=LocalRunner())
    names = ("topic", "epoch", "offset", "ordinal", "messages", "state", "complete")
    assert table(into, *names) == table(tmp_path / "states2", *names)
    into = tmp_path / "deduped"
    commands.until_done("dedupe", "--lake", lake, "--into", into, "--payload", is_asked=False)
    dedupe(lake, tmp_path / "deduped2", payload=True, runner=LocalRunner())
    names = ("topic", "offset", "ordinal", "payload")
    assert table(into, *names) == table(tmp_path / "deduped2", *names)
    page = tmp_path / "report.html"
    commands.until_done("report", "--lake", lake, "--out", page)
    assert "</html>" in page.read_text()
    commands.until_done("audit", "--lake", lake)
