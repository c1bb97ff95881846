"""What decides whether a test runs, and how long: programs that need not be installed, and HEADRACE_TORTURE.

Without its program a test is skipped. Where HEADRACE_REQUIRE_TOOLS is set, everything has to be there, and it
fails.
"""

import functools
import os
import shutil
import subprocess
from typing import NoReturn

import pytest

TORTURE = int(os.environ.get("HEADRACE_TORTURE", "0"))
"""How often `make torture` does things to a server; 0 in a usual run."""

takes_long = pytest.mark.skipif(not TORTURE, reason="takes long: see `make torture`")
"""For tests of which a usual run has a shorter form, or of another that is much the same."""

EXAMPLES = 200 if TORTURE else 25
"""Of a property that hypothesis tries to refute, unless a test says otherwise."""

NODE_MAJOR_MIN = 20


def without(reason: str) -> NoReturn:
    if os.environ.get("HEADRACE_REQUIRE_TOOLS"):
        pytest.fail(f"{reason}, and HEADRACE_REQUIRE_TOOLS is set")
    pytest.skip(reason)


def tool(*names: str) -> str:
    """The path of the first program of these that is installed."""
    found = next(filter(None, map(shutil.which, names)), None)
    return found or without(f"{' or '.join(names)} is not installed")


def node_tool() -> str:
    """The path of a Node that is new enough."""
    path = tool("node")
    if (major := _node_major(path)) < NODE_MAJOR_MIN:
        without(f"Node {major} is installed, {NODE_MAJOR_MIN} is needed")
    return path


@functools.cache
def _node_major(path: str) -> int:
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.removeprefix("v").partition(".")[0])
