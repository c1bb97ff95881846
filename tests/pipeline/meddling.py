"""Actions at a job's named points, in the test's process, and the times at which files changed."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Killed(BaseException):
    """Simulates a kill of a job in the test's process: no handler of the job catches it."""


def kill() -> NoReturn:
    raise Killed


class Meddling:
    """Named points at which an action runs, each once."""

    directory = ""

    def __init__(self, **actions: Callable[[], object]) -> None:
        self._actions = actions

    @property
    def left(self) -> list[str]:
        """Names of the points that the job has not reached."""
        return list(self._actions)

    def here(self, name: str) -> None:
        self._actions.pop(name, lambda: None)()


def tree(root: Path) -> dict[str, int]:
    """Return the modification time of every path under `root`."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}
