"""The lists of points at which tests kill jobs: they name all points that there are."""

import re
from pathlib import Path

import pytest

from headrace import pipeline
from tests.pipeline.export.test_job import POINTS
from tests.pipeline.objects.executor_jobs import JOBS
from tests.pipeline.objects.test_kills import (
    COMPACT_POINTS,
    DERIVED,
    REPLAY_POINTS,
    STREAM_POINTS,
)

SOURCE = Path(pipeline.__file__).parent

KILLED = {
    "export": (["export"], POINTS),
    "compact": (["compact.py"], COMPACT_POINTS),
    "replay": (["replay.py"], REPLAY_POINTS),
    "dedupe": (["dedupe", "../lake/deduped.py"], DERIVED["dedupe"][1]),
    "aggregate": (["aggregate/job.py", "aggregate/tasks.py"], DERIVED["aggregate"][1]),
    "aggregate --stream": (["aggregate/stream.py"], STREAM_POINTS),
}
"""Files and directories of each job, and the points at which it is killed."""


def points_in(place: str) -> list[str]:
    path = SOURCE / place
    files = path.rglob("*.py") if path.is_dir() else [path]
    return [name for file in files for name in re.findall(r'\bhere\("(\w+)"\)', file.read_text())]


@pytest.mark.parametrize("job", KILLED)
def test_a_job_is_killed_at_every_point(job):
    places, killed = KILLED[job]
    assert {point for place in places for point in points_in(place)} == set(killed)


def test_every_job_with_points_is_killed():
    known = [
        point for places, _ in KILLED.values() for place in places for point in points_in(place)
    ]
    assert sorted(known) == sorted([*points_in("."), *points_in("../lake")])


def test_executors_are_killed_at_every_point_of_a_task():
    """The name of a point in a task says what the task is doing; that of the driver's says what is done."""
    for job, points, _ in JOBS:
        assert set(points) == {point for point in KILLED[job][1] if point.endswith("ing")}
    assert {job for job, _, _ in JOBS} == {name for name in KILLED if name.isalpha()}
