"""Sockets, clocks, threads, processes, signals and file writes: only where ARCHITECTURE.md says.

The table under "Where effects are" lists folders and modules for each effect. A module that has an effect
must be in its row, and every place in a row must still have the effect. The source is read, not run.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "headrace"

OF_MODULES = {
    "socket": "sockets",
    "http.client": "sockets",
    "http.server": "sockets",
    "hdfs_native": "sockets",
    "obstore": "sockets",
    "picows": "sockets",
    "psycopg": "sockets",
    "urllib.request": "sockets",
    "threading": "threads",
    "concurrent.futures": "threads",
    "subprocess": "processes",
    "multiprocessing": "processes",
    "signal": "signals",
    "tempfile": "files",
    "shutil": "files",
}
"""An effect of each module of the standard library or an extra, for those who import it."""

OF_METHODS = {
    **dict.fromkeys(["create_server", "create_connection", "open_connection"], "sockets"),
    **dict.fromkeys(["to_thread", "run_in_executor"], "threads"),
    "add_signal_handler": "signals",
    **dict.fromkeys(["write_text", "write_bytes", "touch", "truncate", "ftruncate"], "files"),
    **dict.fromkeys(["unlink", "rmdir", "rmtree", "mkdir", "makedirs", "rename"], "files"),
    **dict.fromkeys(["hardlink_to", "symlink_to", "fsync", "fdatasync"], "files"),
    **dict.fromkeys(["pwrite", "pwritev", "posix_fallocate", "copy_file_range"], "files"),
}
"""An effect of each method, whatever it is called on."""

OF_ATTRIBUTES = {
    **{f"time.{name}": "clocks" for name in ("time", "monotonic", "perf_counter")},
    **{f"time.{name}_ns": "clocks" for name in ("time", "monotonic", "perf_counter")},
    **dict.fromkeys(["time.clock_gettime", "time.clock_gettime_ns"], "clocks"),
    **dict.fromkeys(["datetime.now", "datetime.utcnow", "date.today", "loop.time"], "clocks"),
    **dict.fromkeys(["os.fork", "os.kill", "os.killpg", "os.posix_spawn"], "processes"),
    "sqlite3.connect": "files",
    **dict.fromkeys(["os.replace", "os.remove", "os.link", "os.write"], "files"),
    **dict.fromkeys(["os.O_CREAT", "os.O_WRONLY", "os.O_RDWR", "os.O_APPEND"], "files"),
}

MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def effects_of(module: Path) -> set[str]:
    return {effect for node in ast.walk(ast.parse(module.read_text())) for effect in _of(node)}


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            yield from (
                OF_ATTRIBUTES[one]
                for name in names
                if (one := f"{node.module}.{name}") in OF_ATTRIBUTES
            )
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            yield from (
                effect for known, effect in OF_MODULES.items() if f"{name}.".startswith(f"{known}.")
            )
    elif isinstance(node, ast.Attribute):
        name = f"{_last_name(node.value)}.{node.attr}"
        if name in OF_ATTRIBUTES:
            yield OF_ATTRIBUTES[name]
    elif isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in OF_METHODS:
            # A write through `log/disk.py` is an effect of that module, and of none that uses it.
            if not _last_name(function.value).lower().endswith("disk"):
                yield OF_METHODS[function.attr]
        elif _last_name(function) == "open" and _opens_for_writing(node):
            yield "files"


def _opens_for_writing(call: ast.Call) -> bool:
    given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [
        arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    ]
    return any(re.fullmatch(r"[rwaxbt+]{1,3}", text) and set(text) & set("wax+") for text in texts)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@cache
def places() -> dict[str, list[str]]:
    """Return the folders and modules of each row in the table of ARCHITECTURE.md."""
    text = (
        (ROOT / "ARCHITECTURE.md")
        .read_text()
        .partition("## Where effects are")[2]
        .partition("\n## ")[0]
    )
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| **")]
    return {effect.strip(" *"): re.findall(r"`([^`]+)`", where) for effect, where in rows}


def is_in(module: str, place: str) -> bool:
    return module == place or (place.endswith("/") and module.startswith(place))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_a_module_has_only_the_effects_that_the_architecture_names(module):
    name = str(module.relative_to(PACKAGE))
    for effect in effects_of(module):
        assert any(is_in(name, place) for place in places()[effect]), (
            f"{name} has the effect {effect}"
        )


def test_every_place_in_the_table_has_its_effect():
    for effect, listed in places().items():
        having = [
            str(module.relative_to(PACKAGE)) for module in MODULES if effect in effects_of(module)
        ]
        for place in listed:
            assert any(is_in(name, place) for name in having), f"{place} no longer has {effect}"


@pytest.mark.parametrize(
    ("line", "effect"),
    [
        ("import socket", "sockets"),
        ("from time import monotonic", "clocks"),
        ("now = datetime.now(UTC)", "clocks"),
        ("from concurrent.futures import Future", "threads"),
        ("path.with_name('x').unlink()", "files"),
        ("open(path, 'r+b')", "files"),
        ("path.open('w')", "files"),
        ("os.open(path, os.O_RDWR)", "files"),
    ],
)
def test_effects_are_recognised(line, effect, tmp_path):
    module = tmp_path / "module.py"
    module.write_text(line)
    assert effects_of(module) == {effect}


@pytest.mark.parametrize(
    "line", ["open(path)", "self._disk.unlink(path)", "text.replace('a', 'b')"]
)
def test_what_is_no_effect_is_not_taken_for_one(line, tmp_path):
    module = tmp_path / "module.py"
    module.write_text(line)
    assert not effects_of(module)
