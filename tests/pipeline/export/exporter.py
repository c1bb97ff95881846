"""Exports without Spark in processes that tests can kill: `python -m tests.pipeline.export.exporter`.

It reads one JSON object per line: the arguments of an export, or of another `job`. For each line it forks a
process, prints the process id, and runs the job in that process. So modules are imported only once. Nothing
that has threads is used before the fork.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.testing import wait_until
from tests.spark.lives import REPOSITORY, environment

ENDED = "ended"


class Exporters:
    """The tests' side of the exporter process."""

    def __init__(self, process: "subprocess.Popen[str]", root: Path) -> None:
        self._process = process
        self.points = root / "points"
        self.points.mkdir()

    def start(self, **given: Any) -> int:
        """Start a job, and return the id of its process."""
        (self.points / ENDED).unlink(missing_ok=True)
        assert self._process.stdin and self._process.stdout
        print(
            json.dumps({**given, "points": str(self.points)}), file=self._process.stdin, flush=True
        )
        return int(self._process.stdout.readline())

    def kill_at(self, point: str, **given: Any) -> None:
        (self.points / f"stop-{point}").touch()
        pid = self.start(**given)
        reached = self.points / f"reached-{point}"
        wait_until(lambda: reached.exists() or self._said(), 120, f"the export to be {point}")
        assert reached.exists(), self._said()
        kill_and_wait(pid)
        (self.points / f"stop-{point}").unlink()
        reached.unlink()

    def finish(self, **given: Any) -> dict[str, Any]:
        """Run a job to its end, and return its summary."""
        self.start(**given)
        wait_until(self._said, 120, "the export to end")
        found: dict[str, Any] = json.loads(self._said())
        assert "error" not in found, found["error"]
        return found

    def kill_after(self, seconds: float, **given: Any) -> None:
        """Kill a job after this time, unless it ended before."""
        pid = self.start(**given)
        time.sleep(seconds)
        kill_and_wait(pid)

    def _said(self) -> str:
        path = self.points / ENDED
        return path.read_text() if path.exists() else ""


def kill_and_wait(pid: int) -> None:
    """Kill a process and wait until it is gone: it holds its locks until then, which refuse the next job."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the killed process to end")


@contextmanager
def exporters(root: Path) -> Iterator[Exporters]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.export.exporter"],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Exporters(process, root)
        finally:
            process.kill()


def main() -> None:
    # The imports are here because only the exporter process needs them; tests import the other side.
    from headrace import pipeline
    from headrace.pipeline.job import Points
    from headrace.pipeline.tasks import LocalRunner

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        given = json.loads(line)
        if given.get("format") == "iceberg":
            import headrace.lake.formats.iceberg  # noqa: F401 - it takes seconds
        if pid := os.fork():
            print(pid, flush=True)
            continue
        ended = Path(given["points"], ENDED)
        try:
            given["points"] = Points(given["points"])
            job = getattr(pipeline, given.pop("job", "export"))
            said = json.dumps(job(**given, runner=LocalRunner())._asdict())
        except BaseException as error:
            said = json.dumps({"error": str(error)})
        made = ended.with_suffix(".tmp")
        made.write_text(said)
        made.rename(ended)
        os._exit(0)


if __name__ == "__main__":
    main()
