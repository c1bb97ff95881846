"""The temporary directories of test runs that begin and end at the same time (`tests/temporary.py`)."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

CONFTEST = """
import shutil
import _pytest.tmpdir
from _pytest.pathlib import create_cleanup_lock
from tests.temporary import pytest_sessionfinish

def delete(path, **options):
    shutil.rmtree(path, **options)
    path.mkdir()  # another run begins, finds the number free, and locks its directory
    create_cleanup_lock(path)

_pytest.tmpdir.rmtree = delete
"""

PROGRAM = "import sys, pytest; sys.path.insert(0, sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"


def test_a_run_that_ends_leaves_the_lock_of_a_run_that_begins(tmp_path, environment):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_it.py").write_text("def test_it(tmp_path):\n    pass\n")
    (tests / "pytest.ini").write_text("[pytest]\ntmp_path_retention_policy = failed\n")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT), "-p", "no:cacheprovider", str(tests)],
        cwd=tests,
        env=environment(PYTEST_DEBUG_TEMPROOT=str(tmp_path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (directory,) = tmp_path.glob("pytest-of-*/pytest-0")
    assert (directory / ".lock").exists()
