"""An application for `spark-submit`, on a cluster whose workers lack Headrace."""

import json
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.pipeline.lakes import expected, rows_of
from tests.spark.cluster import (
    CLUSTER,
    archive_of_headrace,
    daemons,
    start_cluster,
    workers_without_headrace,
)
from tests.spark.lives import environment
from tests.spark.support import publish
from tests.tools import takes_long

pytestmark = takes_long

APPLICATION = """\
import json, sys
from headrace.errors import HeadraceError
from headrace.pipeline import aggregate, export

url, root = sys.argv[1:]
try:
    exported = export(f"{root}/lake", ["orders"], url=url)
except HeadraceError as error:
    sys.exit(f"headrace: {error}")
states = aggregate(f"{root}/lake", f"{root}/states", reducer="last")
print(json.dumps([exported.records, states.topics]))
"""


@pytest.mark.timeout(600)
def test_workers_get_headrace_with_the_application(own_server, tmp_path):
    payloads = [b"%d" % number for number in range(100)]
    publish(own_server.figg_url, "orders", payloads)
    application = tmp_path / "application.py"
    application.write_text(APPLICATION)
    package = archive_of_headrace(tmp_path)
    environ = environment() | workers_without_headrace(tmp_path)
    environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    settings = [f"--conf={key}={value}" for key, value in CLUSTER.items()]
    with daemons(tmp_path) as daemon:
        master = start_cluster(daemon, tmp_path)

        def run(*options: str) -> "subprocess.CompletedProcess[str]":
            given = [*options, application, own_server.http_url, tmp_path]
            return subprocess.run(
                [submit, "--master", master, *settings, *given],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )

        without = run()
        done = run("--py-files", package)
    assert without.returncode == 1
    # Spark passes everything on to standard output.
    assert "headrace: Spark's workers run" in without.stdout, without.stderr
    assert "which has no headrace" in without.stdout
    assert done.returncode == 0, done.stderr[-10_000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [100, 1]
    assert rows_of(tmp_path / "lake") == expected(own_server, {"orders": payloads})
