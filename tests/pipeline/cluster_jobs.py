"""Run every job on a Spark elsewhere: `python -m tests.pipeline.cluster_jobs MASTER URL DATA_DIR DIRECTORY`.

All jobs use the same running session. Prints the results of the jobs as JSON.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from headrace.pipeline import (
    aggregate,
    aggregate_stream,
    audit,
    compact,
    dedupe,
    export,
    replay,
    report,
)
from headrace.spark import session
from tests.spark.cluster import CLUSTER

FORMATS = ("delta", "parquet", "iceberg")


def parents(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the parent process of this worker. Each executor has its own."""
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"parent": [os.getppid()]})


def main(master: str, url: str, data_dir: str, directory: str) -> None:
    root = Path(directory)
    is_cluster = master.startswith("spark://")
    spark = session("cluster", master=master, settings=CLUSTER if is_cluster else {})
    numbers = spark.range(8).selectExpr("int(id) as id").repartitionById(8, "id")
    found: dict[str, Any] = {
        "executors": numbers.mapInArrow(parents, "parent long").distinct().count()
    }
    for kind in FORMATS:
        lake = root / kind
        exported = export(
            lake, pattern="in/.*", url=url, part_bytes=300_000, format=kind, take_over=True
        )
        compacted = compact(lake)
        audited = audit(lake, url=url)
        found[kind] = {
            "exported": exported.records,
            "merged": compacted.merged == exported.files > 1,
            "lost": audited.lost,
        }
    lake = root / "delta"
    which = {"pattern": "(in|replayed)/.*", "url": url}
    for reducer in ("last", "merge"):
        done = aggregate(lake, root / reducer, reducer=reducer, **which)
        found[reducer] = (done.topics, done.messages, done.failed)
    found["replayed"] = replay(lake, "in/a", "replayed/a", url=url).records

    def has_all() -> bool:
        return DeltaTable(str(root / "last")).to_pyarrow_dataset().count_rows() == len("abc") + 1

    streamed = aggregate_stream(root / "last", reducer="last", every_s=0.1, stop=has_all, **which)
    found["streamed"] = (streamed.topics, streamed.messages, streamed.failed)
    found["deduped"] = dedupe(lake, root / "deduped", payload=True)[1:4]
    found["reported"] = report(root / "report.html", url=url, lake=str(lake)).messages
    in_files = audit(lake, data_dir=data_dir)
    found["audited"] = (in_files.lost, sum(topic.records for topic in in_files.topics))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
