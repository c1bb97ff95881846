"""The threat model of docs/security.md: every promise names tests that exist. It does not run them."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "security.md").read_text("utf-8")


class Promise(NamedTuple):
    attacker: str
    promise: str
    tests: str


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table under a title, without its heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


PROMISES = [Promise(*row) for row in rows("Promises")]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name for one in ast.walk(tree) if isinstance(one, functions)}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.promise[:60])
def test_a_promise_names_tests_that_exist(promise):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", promise.tests)
    assert named
    rest = re.sub(r"`tests/[\w/]+\.py::test_\w+`", "", promise.tests)
    assert not rest.strip(" ,"), rest
    for file, name in named:
        assert (REPOSITORY / file).is_file(), file
        assert name in functions_of(file), f"{file}::{name}"


def test_something_is_promised_against_each_attacker():
    attackers = {row[0].strip("*") for row in rows("Attackers")}
    assert attackers == {promise.attacker for promise in PROMISES}


@pytest.mark.parametrize("title", ["Assets", "Not promised", "Report a vulnerability"])
def test_the_page_says_what_is_protected_what_is_not_and_whom_to_tell(title):
    assert PAGE.partition(f"\n## {title}\n")[2].strip()


@pytest.mark.parametrize(
    ("document", "link"),
    [("README.md", "(docs/security.md)"), ("docs/operating.md", "(security.md)")],
)
def test_the_page_is_found(document, link):
    assert link in (REPOSITORY / document).read_text("utf-8")
