"""The examples and the option table of docs/client.md are true."""

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
from headrace.client import Options
from headrace.testing import ServerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_the_examples_run_one_after_the_other(server: ServerProcess) -> None:
    programs, fragments = BLOCKS[:1], BLOCKS[1:]
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", at(server, program)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
    asyncio.run(run(server, fragments))


async def run(server: ServerProcess, fragments: list[str]) -> None:
    """Fragments use a connected `client`, and may await at the top."""
    async with headrace.connect(server.figg_url) as client:
        names = {"headrace": headrace, "client": client}
        for fragment in fragments:
            code = compile(
                at(server, fragment), "client.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            async with asyncio.timeout(30):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result


def at(server: ServerProcess, code: str) -> str:
    return code.replace("figg://127.0.0.1:8119", server.figg_url)


def test_the_table_has_every_option_with_its_default() -> None:
    options = Options()
    table = dict(
        re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", PAGE.split("## Options")[1], re.MULTILINE)
    )
    assert set(table) == {field.name for field in fields(Options)}
    for name, shown in table.items():
        value = getattr(options, name)
        if name == "backoff":
            assert shown == "exponential"
        elif shown.endswith(" MiB"):
            assert value == int(shown.split()[0]) * 1024 * 1024
        else:
            assert value == float(shown.replace(",", ""))
