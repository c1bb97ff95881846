"""The README's examples, run against a real server as a reader would, and its links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing import ServerProcess

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_examples_do_what_the_readme_shows(tmp_path, environment):
    with ServerProcess(tmp_path / "data") as server:
        environ = environment(HEADRACE_URL=server.figg_url, HEADRACE_HTTP=server.http_url)
        for command, expected in commands(blocks("console")):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                env=environ,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, expected), done.stderr
        for script in blocks("python"):
            if "headrace.spark" in script:
                continue  # tests/spark runs these
            done = subprocess.run(
                [sys.executable, "-c", script.replace("figg://127.0.0.1:8119", server.figg_url)],
                env=environ,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert done.stdout == "29 b'hello from Python'\n", done.stderr


def commands(consoles: list[str]) -> list[tuple[str, str]]:
    """Return each command after a `$` with the output shown below it."""
    pairs = []
    for console in consoles:
        for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            pairs.append((command, expected))
    assert pairs
    return pairs


@pytest.mark.parametrize("target", ["run", "test"])
def test_the_two_commands_are_targets_of_the_makefile(target):
    assert f"make {target} " in "".join(blocks("sh"))
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_a_link_leads_somewhere(link):
    assert (REPOSITORY / link).exists()
