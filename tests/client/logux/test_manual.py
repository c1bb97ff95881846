"""The statements of docs/protocols/logux.md about the Python client are true."""

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import headrace
from headrace.client import LoguxOptions
from headrace.testing import ServerProcess

PAGE = (Path(__file__).parents[3] / "docs" / "protocols" / "logux.md").read_text("utf-8")
SECTION = PAGE.partition("## From Python\n")[2].partition("\n## ")[0]
PROGRAM, *FRAGMENTS = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_the_examples_run_one_after_the_other(server: ServerProcess, tmp_path: Path) -> None:
    url = server.wombat_url.replace("wombat://", "logux://")
    done = subprocess.run(
        [sys.executable, "-c", at(url, PROGRAM)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 milk [")
    asyncio.run(run(url, tmp_path / "notes.sqlite"))


async def run(url: str, store: Path) -> None:
    """Run the page's fragments. They use an open `log`, and may await at top level."""
    async with headrace.connect(url, store=store) as log:
        names = {"headrace": headrace, "log": log, "asyncio": asyncio}
        for fragment in FRAGMENTS:
            code = compile(
                at(url, fragment), "logux.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            async with asyncio.timeout(30):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result
        assert log.unacknowledged == 0


def at(url: str, code: str) -> str:
    assert "127.0.0.1:8120" in code or "log." in code
    return code.replace("logux://127.0.0.1:8120", url)


def test_the_table_has_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", SECTION, re.MULTILINE)
    assert sorted(rows) == sorted(
        (
            field.name,
            f"{field.default:g}" if type(field.default) in (int, float) else str(field.default),
        )
        for field in fields(LoguxOptions)
    )
