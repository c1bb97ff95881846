"""Jobs on a cluster whose executors are killed: `python -m tests.pipeline.objects.executor_jobs JSON`.

Each job waits at its named points (`headrace.pipeline.job.Points`). Prints the results as JSON.
"""

import json
import sys
from typing import Any

from headrace import pipeline
from headrace.pipeline.job import Points
from headrace.spark import session
from tests.spark.cluster import CLUSTER

JOBS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("export", ("writing",), {}),
    ("compact", ("merging",), {}),
    ("aggregate", ("reading", "folding"), {"reducer": "count"}),
    ("dedupe", ("staging", "deciding", "writing"), {"payload": True}),
    ("replay", ("uploading",), {}),
)
"""Each job with the points that its tasks reach, in their order, and its own arguments."""


def main(given: dict[str, Any]) -> None:
    session("executors", master=given["master"], settings=CLUSTER)
    common = {"storage_options": given["options"], "points": Points(given["points"])}
    found = {}
    for job, _, own in JOBS:
        arguments = common | own | given.get(job, {})
        found[job] = getattr(pipeline, job)(given["lake"], **arguments)._asdict()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
