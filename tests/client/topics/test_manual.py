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
from headrace.client.connect import topics_client
from headrace.testing import ServerProcess

PAGE = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


@pytest.mark.parametrize("protocol", ["figg", "wombat"])
def test_the_examples_run_one_after_the_other(server: ServerProcess, protocol: str) -> None:
    url = {"figg": server.figg_url, "wombat": server.wombat_url}[protocol]
    programs, fragments = BLOCKS[:1], BLOCKS[1:]
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", at(url, program)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
    asyncio.run(run(url, fragments))


async def run(url: str, fragments: list[str]) -> None:
    """Run the page's fragments. They use a connected `client`, and may await at top level."""
    async with headrace.connect(url) as client:
        names = {"headrace": headrace, "client": client, "asyncio": asyncio}
        for fragment in fragments:
            code = compile(
                at(url, fragment), "client.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            async with asyncio.timeout(30):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result


def at(url: str, code: str) -> str:
    return code.replace("figg://127.0.0.1:8119", url)


def test_the_table_has_every_option_with_its_default_for_each_protocol() -> None:
    rows = re.findall(
        r"^\| `([a-z_]+)` \| ([^|]+) \| ([^|]+) \|", PAGE.split("## Options")[1], re.MULTILINE
    )
    assert sorted(name for name, *_ in rows) == sorted(field.name for field in fields(Options))
    sessions = [
        inspect.signature(type(topics_client(f"{name}://host", Options())._session)).parameters
        for name in ("figg", "wombat")
    ]
    for name, *columns in rows:
        for shown, session in zip(columns, sessions, strict=True):
            value = session[name].default if name in session else getattr(Options(), name)
            if name != "backoff":
                assert value == number(shown), name


def number(shown: str) -> float | None:
    if shown in ("-", "None"):
        return None
    if shown == "False":
        return False
    if shown.endswith(" MiB"):
        return int(shown.split()[0]) * 1024 * 1024
    return float(shown.replace(",", ""))
