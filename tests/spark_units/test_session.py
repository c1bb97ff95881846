"""Settings that a session chooses by itself. Starts no Spark."""

import os

import pytest

from headrace.spark.session import _shuffle_partitions


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
