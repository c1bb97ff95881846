"""What happens to a job at its named points, in the process of the test; and what has changed on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Killed(BaseException):
    """What a kill is to a job in the process of the test: nothing of it goes on."""


def kill() -> NoReturn:
    raise Killed


class Meddling:
    """Points at which something else happens, each once."""

    directory = ""

    def __init__(self, **actions: Callable[[], object]) -> None:
        self._actions = actions

    def here(self, name: str) -> None:
        self._actions.pop(name, lambda: None)()


def tree(root: Path) -> dict[str, int]:
    """All that is there, and when it was changed."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}
