"""Sessions: settings that they choose by themselves, and Sparks that they cannot use. Starts no Spark."""

import os
import sys

import pyspark
import pytest

from headrace.spark.session import SparkStartError, _shuffle_partitions
from headrace.testing import hold_port

module = sys.modules["headrace.spark.session"]  # the package has a function of this name


@pytest.mark.parametrize(
    ("configured", "chosen"),
    [
        ({"spark.master": "local[*]"}, os.cpu_count()),
        ({"spark.master": "local[6]"}, 6),
        ({"spark.master": "local[6,2]"}, 6),
        ({"spark.master": "local"}, 1),
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
    assert _shuffle_partitions(configured) == chosen


class OtherSession:
    """A session of the Spark version `version`, which records whether it was stopped."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


@pytest.mark.parametrize("version", ["3.5.6", "4.2.1", "5.3.0"])
def test_a_session_of_another_spark_is_one_sentence(version):
    with pytest.raises(SparkStartError) as failed:
        module.register(OtherSession(version))
    wanted = ".".join(version.split(".")[:2])
    assert str(failed.value) == (
        f"the session is of Spark {version}, and pyspark here is {pyspark.__version__}: install "
        f"pyspark~={wanted}.0 here, or use another Spark"
    )


def test_only_a_session_that_was_started_here_is_stopped_when_it_is_of_no_use(monkeypatch):
    given, started = OtherSession("3.5.6"), OtherSession("3.5.6")
    monkeypatch.setattr(module, "_started_here", lambda *_, **__: started)
    for running in (given, None):
        monkeypatch.setattr(module, "active_session", lambda running=running: running)
        with pytest.raises(SparkStartError):
            module.session()
    assert (given.is_stopped, started.is_stopped) == (False, True)


def test_a_spark_connect_server_that_does_not_answer_is_one_sentence(monkeypatch):
    pytest.importorskip("grpc")
    monkeypatch.setattr(module, "_CONNECT_S", 0.2)
    # Tests of Spark may run in the same process.
    monkeypatch.setattr(module, "active_session", lambda: None)
    with hold_port() as held:
        address = "sc://{}:{}".format(*held.getsockname())
        with pytest.raises(SparkStartError) as failed:
            module.session(master=f"{address}/;token=s3cr3t")
    assert str(failed.value) == f"no Spark Connect server answers at {address}: tried for 0.2 s"
