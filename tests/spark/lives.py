"""A driver process with its JVM and Python workers: started, stopped at named points, killed all at once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.testing import wait_until

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
POINT_TIMEOUT_S = 180.0


def environment() -> dict[str, str]:
    """Return the environment of a process that can import the tests and run Spark."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("HEADRACE_")}
    path = os.pathsep.join([*filter(None, [kept.get("PYTHONPATH")]), str(REPOSITORY)])
    local = {"PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    return kept | local


class Driver:
    """Runs `driver.py` on a directory that survives the process."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self._url = root, url
        self._process: subprocess.Popen[bytes] | None = None
        self._output = root / "output"

    def start(self, options: Mapping[str, object]) -> None:
        self._unlink("started")
        given = json.dumps({key: str(value) for key, value in options.items()})
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", str(self.root), self._url, given],
                cwd=REPOSITORY,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the workers have their own process groups
            )
        self.wait(lambda: (self.root / "started").exists(), "the driver", START_TIMEOUT_S)

    def wait(self, condition: object, what: str, timeout_s: float = POINT_TIMEOUT_S) -> None:
        assert callable(condition)
        try:
            wait_until(lambda: condition() or self._ended(), timeout_s, what)
        except TimeoutError:
            raise TimeoutError(f"waited for {what}\n{self.said}") from None
        assert condition(), f"the driver ended before {what}\n{self.said}"

    def stop_at(self, sink: str, point: str) -> None:
        self._unlink(f"reached-{sink}-{point}")
        (self.root / f"stop-{sink}-{point}").touch()

    def wait_reached(self, sink: str, point: str) -> None:
        reached = self.root / f"reached-{sink}-{point}"
        self.wait(reached.exists, f"{sink} to be {point}")

    def go_on(self, sink: str, point: str) -> None:
        self._unlink(f"stop-{sink}-{point}")

    def commits(self, sink: str) -> int:
        """Number of batches that the checkpoint lists as committed."""
        done = (self.root / f"checkpoint-{sink}" / "commits").glob("[0-9]*")
        return max((int(path.name) + 1 for path in done), default=0)

    def kill(self) -> None:
        """Send SIGKILL to the driver, its JVM and all Python workers."""
        if self._process is not None:
            while members := session_members(self._process.pid):
                for pid in members:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                self._process.wait(30)
            self._process = None
        for path in self.root.glob("stop-*"):
            path.unlink()

    @property
    def said(self) -> str:
        failed = [path.read_text() for path in sorted(self.root.glob("failed-*"))]
        return "\n".join([self._output.read_text(errors="replace"), *failed])[-20_000:]

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _unlink(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)


def session_members(session: int) -> list[int]:
    """Return the processes of a session that are not dead already."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == session and state not in ("Z", "X"):
            found.append(int(path.parent.name))
    return found
