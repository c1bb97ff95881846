"""Conditions for running a test: programs that need not be installed, and HEADRACE_TORTURE.

Without its program a test is skipped. If HEADRACE_REQUIRE_TOOLS is set, the test fails instead.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import pytest

TORTURE = int(os.environ.get("HEADRACE_TORTURE", "0"))
"""Number of repetitions in `make torture`; 0 in a usual run."""

takes_long = pytest.mark.skipif(not TORTURE, reason="takes long: see `make torture`")
"""Marks tests of which a usual run has a shorter form, or a very similar test."""

EXAMPLES = 200 if TORTURE else 25
"""Number of examples with which hypothesis tries to refute a property, unless a test says otherwise."""

NODE_MAJOR_MIN = 20


T = TypeVar("T")


def sampled(cases: Sequence[T], every: int, first: int = 0) -> Sequence[T]:
    """Return one of `every` cases in a usual run, from number `first` on, and all of them in `make torture`.

    Use a prime number for `every`: cases often repeat with a small period.
    """
    return cases if TORTURE else cases[first::every]


def usually(some: Sequence[tuple[Any, ...]], of_all: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return combinations for `parametrize`: those of a usual run, and all others, which take long."""
    rest = (one for one in of_all if one not in some)
    return [*some, *(pytest.param(*one, marks=takes_long) for one in rest)]


def without(reason: str) -> NoReturn:
    if os.environ.get("HEADRACE_REQUIRE_TOOLS"):
        pytest.fail(f"{reason}, and HEADRACE_REQUIRE_TOOLS is set")
    pytest.skip(reason)


def tool(*names: str) -> str:
    """Return the path of the first of these programs that is installed."""
    found = next(filter(None, map(shutil.which, names)), None)
    return found or without(f"{' or '.join(names)} is not installed")


def node_tool() -> str:
    """Return the path of a Node that is new enough."""
    path = tool("node")
    if (major := _node_major(path)) < NODE_MAJOR_MIN:
        without(f"Node {major} is installed, {NODE_MAJOR_MIN} is needed")
    return path


@functools.cache
def _node_major(path: str) -> int:
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.removeprefix("v").partition(".")[0])
