"""The examples of docs/spark.md and of the README, run in order as a reader would."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import OptionError
from headrace.spark.options import parse_sink, parse_source
from headrace.testing import ServerProcess
from tests.spark.conftest import Start
from tests.spark.support import publish

REPOSITORY = Path(__file__).parent.parent.parent
GUIDE = (REPOSITORY / "docs" / "spark.md").read_text("utf-8")
README = (REPOSITORY / "README.md").read_text("utf-8")


def examples(text: str) -> list[str]:
    """Return the blocks of Python, except those that are marked as not run."""
    found = re.findall(
        r"^(<!-- not run -->\n)?```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    assert found
    return [code for skipped, code in found if not skipped]


def run(code: str, server: ServerProcess, lake: Path, names: dict[str, Any]) -> None:
    code = code.replace("http://127.0.0.1:8121", server.http_url).replace("/lake", str(lake))
    exec(compile(code, "example", "exec"), names)


@pytest.mark.usefixtures("spark")
def test_the_guide_does_what_it_says(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start()
    [prepare] = re.findall(r"^```sh\n(printf.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    command = prepare.replace("headrace publish", f"{sys.executable} -m headrace publish")
    environ = os.environ | {"HEADRACE_URL": server.figg_url}
    subprocess.run(["/bin/sh", "-ec", command], env=environ, check=True, timeout=240)
    names: dict[str, Any] = {}
    for code in examples(GUIDE):
        run(code, server, tmp_path, names)
    names["spark"].streams.removeListener(names["listener"])
    shown = capfd.readouterr().out
    assert "|orders|     0|      0|" in shown
    # The frame was planned at its first use, with a filter that must not stick to it.
    assert names["everything"].count() == 5
    everything = names["log"]().option("subscribePattern", ".*").load()
    counted = everything.groupBy("topic").count().collect()
    expected = {"orders": 3, "returns": 4, "copies": 3, "daily": 1, "$logux/main": 2}
    expected["$channel/doc/1"] = 2
    assert dict(counted) == expected


@pytest.mark.usefixtures("spark")
def test_the_readme_does_what_it_says(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start()
    publish(server.figg_url, "greetings", [b"hello, log", b"1", b"2", b"3"])
    (code,) = (code for code in examples(README) if "headrace.spark" in code)
    run(code, server, tmp_path, {})
    assert "|greetings|    4|" in capfd.readouterr().out


@pytest.mark.parametrize(("title", "parse"), [("Reading", parse_source), ("Writing", parse_sink)])
def test_the_guide_names_every_option(title: str, parse: Callable[..., object]) -> None:
    with pytest.raises(OptionError) as refused:
        parse({"nope": ""}, streaming=False)
    options = str(refused.value).partition("valid ones are: ")[2].split(", ")
    section = GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert set(options) <= set(re.findall(r"`(\w+)`", section))
