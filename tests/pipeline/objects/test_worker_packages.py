"""Spark's workers whose Python lacks a package of the job: one sentence with the extra, and no lake."""

import sys
from pathlib import Path

import pytest

from tests.fakes.s3_server import SECRET
from tests.pipeline.lakes import cursors_of
from tests.pipeline.objects.stored import StoredLake
from tests.pipeline.objects.test_refusals import flags_of
from tests.spark.support import publish, require_java


def python_without(module: str, directory: Path) -> str:
    """Make a Python that is this one, except that it cannot import `module`."""
    (directory / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    python = directory / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{directory}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("module", "extras"),
    [("headrace", "pipeline,s3"), ("deltalake", "pipeline"), ("obstore", "pipeline,s3")],
)
def test_a_job_names_the_package_and_the_extra_before_it_makes_a_lake(
    server, bucket, headrace, tmp_path, module, extras
):
    require_java()
    topic = f"packages/{module}"
    publish(server.figg_url, topic, [b"one"])
    is_stored = extras.endswith("s3")
    lake = [bucket.url, *flags_of(bucket)] if is_stored else [tmp_path / "lake"]
    python = tmp_path / "python"
    python.mkdir()
    done = headrace(
        *("pipeline", "export", topic, "--once", "--master", "local[1]"),
        *("--http", server.http_url.removeprefix("http://"), "--lake", *lake),
        environ={"PYSPARK_PYTHON": python_without(module, python)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"headrace: Spark's workers run {sys.executable}, which has no ")
    assert done.stderr.endswith(
        f" no {module}: set PYSPARK_PYTHON={sys.executable} before the session starts, or install "
        f"'headrace[{extras}]' there\n"
    )
    assert done.stderr.count("\n") == 1 and SECRET not in done.stderr
    assert not (tmp_path / "lake").exists()
    assert not StoredLake(server, bucket).paths()
    assert topic not in cursors_of(server, "lake")
