"""A user's own session of Spark Connect ships Headrace to a server whose workers lack it."""

import json
import subprocess
import sys

import pytest

from tests.pipeline.lakes import expected, rows_of
from tests.spark.cluster import (
    archive_of_headrace,
    daemons,
    start_connect,
    workers_without_headrace,
)
from tests.spark.lives import REPOSITORY, environment
from tests.spark.support import publish

NOTEBOOK = """\
import json, sys
from pyspark.sql import SparkSession
from headrace.errors import HeadraceError
from headrace.pipeline import aggregate, audit, export
from headrace.spark import register

address, package, url, root = sys.argv[1:]
spark = SparkSession.builder.remote(address).getOrCreate()
try:
    export(f"{root}/lake", ["orders"], url=url, spark=spark)
except HeadraceError as error:
    refused = str(error)
spark.addArtifacts(package, pyfile=True)
exported = export(f"{root}/lake", ["orders"], url=url, spark=spark)
states = aggregate(f"{root}/lake", f"{root}/states", reducer="last", spark=spark)
audited = audit(f"{root}/lake", url=url, spark=spark)
register(spark)
read = spark.read.format("headrace").option("url", url).option("subscribe", "orders").load()
results = [exported.records, states.topics, audited.lost, read.count(), *spark.getTags()]
print(json.dumps([refused, *results]))
"""


@pytest.mark.timeout(300)
def test_a_session_of_spark_connect_ships_the_package_and_outlives_the_jobs(own_server, tmp_path):
    payloads = [b"%d" % number for number in range(100)]
    publish(own_server.figg_url, "orders", payloads)
    package = archive_of_headrace(tmp_path)
    with daemons(tmp_path) as daemon:
        address = start_connect(daemon, tmp_path, workers_without_headrace(tmp_path))
        given = [address, package, own_server.http_url, str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-c", NOTEBOOK, *given],
            cwd=REPOSITORY,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-10_000:]
    refused, *results = json.loads(done.stdout.splitlines()[-1])
    assert "which has no headrace: " in refused
    assert refused.endswith("or install 'headrace[pipeline]' there")
    assert results == [100, 1, False, 100]
    assert rows_of(tmp_path / "lake") == expected(own_server, {"orders": payloads})
