"""Statements of the documents about the code that a test can check: field sizes, file names, links."""

import re
from pathlib import Path

import pytest

from headrace.config.load import SETTINGS
from headrace.log.commit import journal
from headrace.log.read import index

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "src" / "headrace"
# README.md has its own test.
DOCUMENTS = sorted({*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")})
DOCUMENTS.remove(REPOSITORY / "README.md")


@pytest.mark.parametrize(
    ("title", "size"),
    [
        ("Journal file header", journal.FILE_HEADER.size + 4),
        ("Frame", journal.FRAME_HEAD_BYTES),
        ("Entry", journal.ENTRY_HEADER_BYTES),
        ("Index header", index.HEADER_BYTES),
        ("Index row", index.ROW_BYTES),
    ],
)
def test_the_fields_of_a_format_add_up_to_its_size(title, size):
    page = (REPOSITORY / "docs" / "storage.md").read_text("utf-8")
    table = page.partition(f"**{title}**")[2].partition("| field | bytes |")[2].partition("\n\n")[0]
    fields = re.findall(r"^\| [\w ]+ \| (\d+) \|", table, re.MULTILINE)
    assert sum(map(int, fields)) == size


def test_the_code_map_names_every_folder():
    page = (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8")
    table = page.partition("## Code map")[2].partition("\n## ")[0].partition("|---|---|")[2]
    named = set(re.findall(r"`([\w/]+)/`", table.rpartition("\n\n")[0]))
    folders = {str(file.parent.relative_to(PACKAGE)) for file in PACKAGE.rglob("__init__.py")} - {
        "."
    }
    assert named == folders


def test_the_architecture_names_only_files_that_exist():
    page = (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8")
    for name in set(re.findall(r"`([\w/]+\.py)`", page)):
        root = REPOSITORY if name.startswith("tests/") else PACKAGE
        assert any(root.rglob(name)), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_link_leads_somewhere(document):
    text = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            path = document.parent / file if file else document
            assert path.exists(), target
            if anchor:
                assert anchor in anchors(path), target


def anchors(path: Path) -> set[str]:
    text = path.read_text("utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([\w-]+)">', text))


def test_a_unit_of_systemd_doubles_its_dollars():
    """In a command of a unit, `$id` is a variable, and `$$` is a dollar."""
    commands = [
        command
        for document in DOCUMENTS
        for command in re.findall(r"^Exec\w+=(.*)$", document.read_text("utf-8"), re.MULTILINE)
    ]
    assert any("$$." in command for command in commands)
    for command in commands:
        assert not re.search(r"\$(?!MAINPID\b)", command.replace("$$", "")), command


def test_every_setting_a_document_names_exists():
    sections = {key.partition(".")[0] for key in SETTINGS if "." in key}
    for document in DOCUMENTS:
        for key in re.findall(r"`([a-z_]+\.[a-z_]+)`", document.read_text("utf-8")):
            if key.partition(".")[0] in sections and not key.endswith(".py"):
                assert key in SETTINGS, (document, key)
