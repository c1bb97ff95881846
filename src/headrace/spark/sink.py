"""Writes: tasks upload to staged files on the server, the driver's commit has them appended once.

What a task uploads is durable and seen by nobody until the commit names it. A batch is known by its producer
and number: one that was committed before is skipped, however it was split the second time.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace.printing import quoted
from headrace.spark.encode import EncodedBlock, encode_batch
from headrace.spark.envelopes import Stamps
from headrace.spark.options import OptionError, SinkOptions
from headrace.spark.sink_columns import SinkError, Written, written_columns
from headrace.spark.uploading import decide, upload

logger = logging.getLogger(__name__)


@dataclass
class Staged(WriterCommitMessage):
    """What a task has uploaded, in order."""

    ids: list[str]
    query: str = ""
    """The streaming query it was for: only tasks know it, the driver's commit does not."""


class _Writer:
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("format headrace only appends: use mode append")
        self.options = options
        self.written: Written = written_columns(schema, options)
        self._node = f"spark-{uuid.uuid4()}"

    def upload(self, batches: Iterator[pa.RecordBatch]) -> list[str]:
        """In a task: the rows as staged files."""
        context = TaskContext.get()
        assert context is not None
        stamps = Stamps(self._node, context.taskAttemptId())
        return upload(self.options.place, self._blocks(batches, stamps))

    def _blocks(self, batches: Iterator[pa.RecordBatch], stamps: Stamps) -> Iterator[EncodedBlock]:
        for batch in batches:
            yield from encode_batch(*self.written.rows(batch, stamps), self.written.prefix)

    def decide(
        self, producer: str, number: int, messages: Sequence[WriterCommitMessage | None]
    ) -> None:
        """In the driver: have everything appended, in the order of the tasks."""
        ids = [one for message in messages if isinstance(message, Staged) for one in message.ids]
        if decide(self.options.place, producer, number, ids).duplicate:
            logger.warning(
                "batch %d of producer %s was written before: its rows are skipped",
                number,
                quoted(producer),
            )


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("headrace")`."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._writer = _Writer(options, schema, overwrite)
        # Without a name of its own each write is a new one.
        self._producer = options.producer or f"spark-{uuid.uuid4()}"
        self._number = options.batch if options.batch is not None else 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Staged(self._writer.upload(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.decide(self._producer, self._number, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what nobody claims is swept by the server."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("headrace")`."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._writer = _Writer(options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        if not query:
            raise SinkError("Spark does not say which query this is: give it a name with producer")
        return Staged(self._writer.upload(iterator), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        queries = {message.query for message in messages if isinstance(message, Staged)}
        if not queries:
            return  # no tasks, no rows
        producer = self._writer.options.producer or f"spark-query-{queries.pop()}"
        self._writer.decide(producer, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: what nobody claims is swept by the server."""
