"""`headrace man`: a page for every command, which groff accepts."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headrace.cli.main import app
from headrace.cli.manual import pages
from tests.tools import tool


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    command = typer.main.get_command(app)
    return dict(pages(command.make_context("headrace", [], resilient_parsing=True)))


def test_every_command_has_a_page_with_its_options(written):
    assert {"headrace", "headrace-serve", "headrace-pipeline-export", "headrace-man"} <= set(
        written
    )
    page = written["headrace-publish"]
    assert page.startswith('.TH "HEADRACE\\-PUBLISH" 1')
    assert "headrace\\-publish \\- Append records to a topic" in page
    assert ".B \\-\\-file FILE\nRead this file, each line a record.\n" in page
    assert "headrace publish greetings" in page


def test_the_page_of_a_group_names_its_commands(written):
    assert ".BR headrace\\-pipeline\\-export (1)\n" in written["headrace-pipeline"]


def test_pages_are_plain_ascii_and_no_line_of_text_is_a_request_by_accident(written):
    requests = (".TH ", ".SH ", ".TP", ".B ", ".BR ", ".PP", ".nf", ".fi")
    for name, page in written.items():
        assert page.isascii(), name
        for line in page.splitlines():
            assert not line.startswith((".", "'")) or line.startswith(requests), (name, line)


def test_groff_accepts_every_page(written):
    together = "".join(written.values())
    done = subprocess.run(
        [tool("groff"), "-man", "-Tutf8", "-ww", "-z"],
        input=together,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_writes_all_pages_or_prints_one(tmp_path: Path, environment):
    command = [sys.executable, "-m", "headrace", "man"]
    done = subprocess.run(
        [*command, "--to", "man1"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "man1").iterdir()}
    assert "headrace-publish.1" in names
    done = subprocess.run(
        [*command, "pipeline", "export"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == (tmp_path / "man1" / "headrace-pipeline-export.1").read_text()


def test_a_page_that_does_not_exist_is_an_error(tmp_path: Path, environment):
    command = [sys.executable, "-m", "headrace", "man", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == 'headrace: there is no command "nothing"\n'
