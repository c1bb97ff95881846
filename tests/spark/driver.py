"""A driver process to be killed: queries from topics into Parquet, into a Delta table and into topics.

`python -m tests.spark.driver ROOT URL OPTIONS`, with the options as JSON. It runs until it is killed. A query
that fails is started again from its checkpoint.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.spark import session
from headrace.spark.session import register_source
from tests.spark import delta
from tests.spark.stopping import StoppingSource, Stops
from tests.spark.support import SETTINGS

COLUMNS = ("topic", "offset", "next_offset", "ordinal", "payload")
TASKS_AT_ONCE = 32
"""Number of parallel tasks.

There are many more than cores, because tasks that wait at a point must not keep others from reaching theirs.
"""


class Queries:
    def __init__(self, spark: Any, root: Path, url: str, options: Mapping[str, object]) -> None:
        self._spark, self._root, self._url, self._options = spark, root, url, options
        register_source(spark, StoppingSource)

    def start(self, sink: str, *, to_the_end: bool = False) -> Any:
        """Continue from the checkpoint, without end or up to the present end."""
        reader = self._spark.readStream.format("stopping").option("url", self._url)
        for key, value in {**self._options, "stops": str(self._root), "sink": sink}.items():
            reader = reader.option(key, value)
        writer = SINKS[sink](self, reader.load())
        writer = writer.option("checkpointLocation", str(self._root / f"checkpoint-{sink}"))
        return (writer.trigger(availableNow=True) if to_the_end else writer).start()

    def parquet(self, frame: Any) -> Any:
        writer = frame.select(*COLUMNS).writeStream.format("parquet")
        return writer.option("path", str(self._root / "parquet"))

    def delta(self, frame: Any) -> Any:
        table, stops = self._root / "delta", Stops(str(self._root), "delta")
        table.mkdir(exist_ok=True)

        def append(batch: Any, number: int) -> None:
            if delta.is_committed(table, "query", number):
                return
            made = delta.write_files(batch, table)
            stops.here("wrote")
            delta.commit(table, made, "query", number)
            stops.here("committed")

        return frame.select(*COLUMNS).writeStream.foreachBatch(append)

    def topic(self, frame: Any) -> Any:
        copy = frame.selectExpr("concat('copy/', topic) as topic", "payload")
        writer = copy.writeStream.format("stopping").option("url", self._url)
        return writer.option("stops", str(self._root)).option("sink", "topic")


SINKS: dict[str, Callable[[Queries, Any], Any]] = {
    "parquet": Queries.parquet,
    "delta": Queries.delta,
    "topic": Queries.topic,
}


def main(root: Path, url: str, options: Mapping[str, object]) -> None:
    spark = session("driver", master=f"local[{TASKS_AT_ONCE}]", settings=SETTINGS)
    queries = Queries(spark, root, url, options)
    running = {sink: queries.start(sink) for sink in SINKS}
    (root / "started").touch()
    while True:
        for sink, query in running.items():
            if not query.isActive:
                with (root / f"failed-{sink}").open("a") as file:
                    file.write(f"{query.exception()}\n")
                running[sink] = queries.start(sink)
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
