"""The format `headrace` with points at which it can be made to stop, so that a test can kill something there.

A test creates the file `stop-NAME` in a directory. Code that reaches the point creates `reached-NAME`, and
continues when the first file is removed. Everything else is the format's own.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.spark.columns import ReadPartition
from headrace.spark.options import parse_sink, parse_source
from headrace.spark.sink import StreamWriter
from headrace.spark.source import HeadraceSource
from headrace.spark.stream import StreamReader


class Stops:
    def __init__(self, directory: str, sink: str) -> None:
        self._directory = directory
        self.sink = sink

    def here(self, point: str) -> None:
        stop = Path(self._directory, f"stop-{self.sink}-{point}")
        if stop.exists():
            Path(self._directory, f"reached-{self.sink}-{point}").touch()
            while stop.exists():
                time.sleep(0.01)

    def note(self, text: str) -> None:
        with Path(self._directory, f"splits-{self.sink}").open("a") as file:
            file.write(f"{text}\n")


class StoppingSource(HeadraceSource):
    def __init__(self, options: dict[str, str]) -> None:
        given = {key.lower(): value for key, value in options.items()}
        self.stops = Stops(given.pop("stops"), given.pop("sink"))
        super().__init__(given)

    @classmethod
    def name(cls) -> str:
        return "stopping"

    def streamReader(self, schema: StructType) -> "StoppingReader":  # noqa: N802
        reader = StoppingReader(parse_source(self.options, streaming=True), schema)
        reader.stops = self.stops
        return reader

    def streamWriter(self, schema: StructType, overwrite: bool) -> "StoppingWriter":  # noqa: N802
        writer = StoppingWriter(parse_sink(self.options, streaming=True), schema, overwrite)
        writer.stops = self.stops
        return writer


class LastPart(ReadPartition):
    """The last of several parts of a batch."""


class StoppingReader(StreamReader):
    stops: Stops

    def partitions(self, start: Any, end: Any) -> Sequence[InputPartition]:
        self.stops.here("planning")
        parts = list(super().partitions(start, end))
        self.stops.note(json.dumps([json.dumps(start), json.dumps(end), len(parts)]))
        if len(parts) > 1:
            assert isinstance(parts[-1], ReadPartition)
            parts[-1] = LastPart(parts[-1].ranges)
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batches = super().read(partition)
        yield from (batch for batch, _ in zip(batches, range(1), strict=False))
        self.stops.here("reading")
        yield from batches
        if isinstance(partition, LastPart):
            self.stops.here("writing")


class StoppingWriter(StreamWriter):
    stops: Stops

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self.stops.here("uploading")
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.stops.here("staged")
        super().commit(messages, batchId)
        self.stops.here("decided")
