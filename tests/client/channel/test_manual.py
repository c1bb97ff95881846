"""The statements of docs/protocols/channel.md about the Python client are true."""

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.channels import ChannelOptions
from headrace.testing import ServerProcess

PAGE = (Path(__file__).parents[3] / "docs" / "protocols" / "channel.md").read_text("utf-8")
SECTION = PAGE.partition("## From Python\n")[2].partition("\n## ")[0]
PROGRAM, *FRAGMENTS = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_the_examples_run_one_after_the_other(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.wombat_url.replace("wombat://", "channel://")
    done = subprocess.run(
        [sys.executable, "-c", at(url, PROGRAM)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "{'insert': 'x'} laptop-7 True\n"
    assert len(FRAGMENTS) == 6
    asyncio.run(run(url))
    assert capsys.readouterr().out.startswith("0\n")


async def run(url: str) -> None:
    """Run the page's fragments. They use a `channel` that another member sends to, and may await."""
    async with (
        headrace.channels.join(f"{url}/doc/1", processor="reader") as channel,
        headrace.channels.join(f"{url}/doc/1", processor="other") as other,
    ):
        names: dict[str, Any] = {"headrace": headrace, "channel": channel, "asyncio": asyncio}
        for content in ("go on", "stop"):
            await other.send(content)
        for fragment in FRAGMENTS:
            code = compile(
                at(url, fragment), "channel.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            async with asyncio.timeout(30):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result


def at(url: str, code: str) -> str:
    return code.replace("channel://127.0.0.1:8120", url)


def test_the_table_has_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", SECTION, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert {name: value(shown) for name, shown in rows} == {
        field.name: field.default for field in fields(ChannelOptions)
    }


def value(shown: str) -> object:
    if shown in ("None", "True", "False"):
        return ast.literal_eval(shown)
    if shown.endswith(" MiB"):
        return int(shown.split()[0]) * 1024 * 1024
    number = shown.replace(",", "")
    return float(number) if number.isdigit() else shown
