"""File changes of the log, found in its source: all of them go through `log/disk.py`."""

import ast
from pathlib import Path

import pytest

from headrace.log import disk

LOG = Path(disk.__file__).parent

NAMING = {"replace", "rename", "link", "symlink", "unlink", "remove", "rmdir"}
WRITING = {"write", "writev", "pwrite", "pwritev", "truncate", "ftruncate", "fsync", "fdatasync"}
CALLS_OF_OS = NAMING | WRITING
CALLS_OF_PATHS = {"write_bytes", "write_text", "touch", "unlink", "rename", "rmdir", "hardlink_to"}
ALLOWED = {
    "disk.py": {f"os.{name}" for name in CALLS_OF_OS} | {"path.unlink"},
    "layout.py": {"os.ftruncate", "os.pwrite", "os.fsync"},  # the lock, and new directories
    "catalogue/catalogue.py": {"shutil.copyfile"},  # to a temporary directory
}


@pytest.mark.parametrize(
    "module", sorted(LOG.rglob("*.py")), ids=lambda module: str(module.relative_to(LOG))
)
def test_every_change_of_a_file_goes_through_the_disk(module):
    allowed = ALLOWED.get(str(module.relative_to(LOG)), set())
    assert set(changes_in(module)) <= allowed


def changes_in(module):
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            of_path = name in CALLS_OF_PATHS and not owner.lower().endswith(("disk", "disk()"))
            if of_path or owner == "shutil" or (owner == "os" and name in CALLS_OF_OS):
                yield f"{owner}.{name}"
