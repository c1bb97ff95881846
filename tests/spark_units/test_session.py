"""Settings that a session chooses by itself, and checks of its workers' Python. Starts no Spark."""

import sys
from pathlib import Path

import pytest

import headrace
from headrace.spark.session import WorkerPythonError, _shuffle_partitions, check_python


@pytest.mark.parametrize(
    ("configured", "chosen"),
    [
        ({"spark.master": "local[*]"}, 6),
        ({"spark.master": "local[*]", "spark.sql.shuffle.partitions": "50"}, None),
        ({"spark.master": "spark://h:7077"}, None),
        ({"spark.master": "spark://h:7077", "spark.cores.max": "12"}, 12),
        ({"spark.master": "yarn", "spark.executor.instances": "3"}, 3),
        (
            {"spark.master": "yarn", "spark.executor.instances": "3", "spark.executor.cores": "4"},
            12,
        ),
        ({"spark.master": "yarn", "spark.executor.instances": "0"}, 1),
    ],
)
def test_a_shuffle_has_as_many_partitions_as_there_are_cores(configured, chosen):
    assert _shuffle_partitions(configured, 6) == chosen


def bare_python(directory: Path) -> str:
    """Make an interpreter without any packages. Unlike `-I`, it uses PYTHONPATH."""
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def check(python: str, includes: tuple[str, ...] = (), *, is_local: bool = True) -> None:
    check_python(python, includes, {"PYTHONPATH": ""}, is_local=is_local)


def test_a_python_without_headrace_is_named(tmp_path):
    python = bare_python(tmp_path)
    with pytest.raises(WorkerPythonError) as error:
        check(python)
    said = f"Spark's workers run {python}, which has no headrace and no crc32c"
    assert str(error.value).startswith(said)
    assert f"set PYSPARK_PYTHON={sys.executable} before the session starts" in str(error.value)
    # Packages that the user ships count.
    packages = {str(Path(module.__file__ or "").parent.parent) for module in (headrace, pytest)}
    check(python, tuple(packages))


def test_a_python_of_another_version_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[[], [3, 99]]'\n")
    python.chmod(0o755)
    with pytest.raises(WorkerPythonError, match=f"run {python}, which is Python 3.99, and this is"):
        check(str(python))


def test_this_python_needs_no_look_and_one_that_does_not_tell_is_not_refused(tmp_path):
    check(sys.executable)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    check(str(silent))


def test_a_python_that_is_not_here_may_be_on_a_cluster_s_machines(tmp_path):
    nowhere = str(tmp_path / "environment" / "bin" / "python")
    with pytest.raises(
        WorkerPythonError, match=f"are configured to run '{nowhere}', which does not exist"
    ):
        check(nowhere)
    check(nowhere, is_local=False)
