"""Spark that does not start, and Spark that dies: one sentence, and nothing is written."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.pipeline.tasks import JobError, SparkRunner, last_lines
from tests.pipeline.lakes import cursors_of
from tests.spark.support import publish, require_java
from tests.tools import takes_long

FAILING = """\
#!/bin/sh
cat >&2 <<END
WARNING: Using incubator modules: jdk.incubator.vector
Exception in thread "main" org.apache.spark.SparkException: Master must either be yarn or start with spark
\tat org.apache.spark.deploy.SparkSubmitArguments.error(SparkSubmitArguments.scala:650)
\tat org.apache.spark.deploy.SparkSubmit$$anon$2$$anon$3.<init>(SparkSubmit.scala:1140)
\t... 9 more
END
exit 1
"""


def java(home: Path, text: str) -> dict[str, str]:
    """Return the environment of a machine whose Java is this script."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(text)
    program.chmod(0o755)
    return {"JAVA_HOME": str(home)}


@pytest.mark.parametrize(
    ("master", "script", "said"),
    [
        (
            "nonsense",
            FAILING,
            (
                "its Java process ended at once. Spark said: org.apache.spark.SparkException: "
                "Master must either be yarn or start with spark (all of it is in "
            ),
        ),
        ("local[2]", "", " has none: install it"),
    ],
    ids=["no such master", "no Java"],
)
def test_where_spark_does_not_start_nothing_is_written(
    server, headrace, tmp_path, master, script, said
):
    publish(server.figg_url, "started", [b"one"])
    before = cursors_of(server, "lake")
    environ = java(tmp_path / "jdk", script) if script else {"JAVA_HOME": str(tmp_path)}
    given = ("--lake", tmp_path / "lake", "--http", server.http_url.removeprefix("http://"))
    done = headrace(
        *("pipeline", "export", "started", "--once", *given, "--master", master),
        environ=environ | {"TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert "a fault of our own" not in done.stderr
    assert not (tmp_path / "lake").exists()
    assert cursors_of(server, "lake") == before


def test_what_spark_said_is_told_without_its_stack() -> None:
    told = "\n".join(FAILING.splitlines()[2:-2])
    assert last_lines(told) == [
        "org.apache.spark.SparkException: Master must either be yarn or start with spark"
    ]
    assert last_lines("\n".join(map(str, range(9)))) == ["6", "7", "8"]
    assert last_lines("") == []


def runner_of(process: "subprocess.Popen[bytes]") -> SparkRunner:
    """Return a runner whose JVM is this process."""
    runner = SparkRunner("test", "local[2]")
    runner._java = process.pid
    return runner


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed (SIGKILL; was there enough memory?)"),
        ("sys.exit(143)", "was killed (SIGTERM)"),
        ("sys.exit(3)", "ended with exit code 3"),
    ],
)
@pytest.mark.parametrize("broken", ["network", "refused", "eof"])
def test_a_jvm_that_dies_is_one_sentence(end: str, said: str, broken: str) -> None:
    from py4j.protocol import Py4JNetworkError

    errors: dict[str, Exception] = {
        "network": Py4JNetworkError("Answer from Java side is empty"),
        "refused": ConnectionRefusedError(111, "Connection refused"),
        "eof": EOFError(),
    }
    with subprocess.Popen(
        [sys.executable, "-S", "-c", f"import os, signal, sys; {end}"]
    ) as process:
        runner = runner_of(process)
        with pytest.raises(JobError) as failed, runner.sentences():
            raise errors[broken]
    assert str(failed.value) == f"Spark's Java process {said} while the job ran"


def test_an_error_while_the_jvm_lives_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pipeline.tasks._DEATH_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(FileNotFoundError), runner_of(process).sentences():
            raise FileNotFoundError("lake")
        process.kill()


@takes_long
def test_a_real_jvm_that_is_killed_is_one_sentence(tmp_path: Path) -> None:
    require_java()
    script = (
        "import os, signal, threading, time\n"
        "from headrace.pipeline.tasks import SparkRunner\n"
        "runner = SparkRunner('test', 'local[1]')\n"
        "runner.start()\n"
        "kill = lambda: os.kill(runner._java, signal.SIGKILL)\n"
        "try:\n"
        "    runner.run([60], time.sleep, lambda part: kill())\n"
        "finally:\n"
        "    runner.close()\n"
    )
    environ: dict[str, Any] = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False
    )
    assert "JobError: Spark's Java process was killed (SIGKILL" in done.stderr
    assert -signal.SIGKILL != done.returncode == 1
