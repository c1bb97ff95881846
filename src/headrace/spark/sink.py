"""Writes: tasks upload staged files to the server, and the driver's commit makes it append them once.

Uploaded files are durable, but invisible until the commit names them. A batch is identified by its producer
and number. A batch that was committed before is skipped, even if the second attempt splits it differently.
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

from headrace.errors import OptionError, SinkError
from headrace.printing import quoted
from headrace.reader.upload import EncodedBlock, decide, encode_batch, upload
from headrace.spark.envelopes.registry import Stamps
from headrace.spark.options import SinkOptions
from headrace.spark.sink_columns import WrittenColumns, written_columns

logger = logging.getLogger(__name__)


@dataclass
class TaskUpload(WriterCommitMessage):
    """The staged files that a task has uploaded, in order."""

    ids: list[str]
    query: str = ""
    """Id of the streaming query. Only tasks know it; the driver's commit does not."""


class _Writer:
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("format headrace only appends: use mode append")
        self.options = options
        self.written: WrittenColumns = written_columns(schema, options)
        self._node = f"spark-{uuid.uuid4()}"

    def upload(self, batches: Iterator[pa.RecordBatch]) -> list[str]:
        """Upload the rows as staged files. Runs in a task."""
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
        """Make the server append all uploads, in the order of the tasks. Runs in the driver."""
        ids = [
            one for message in messages if isinstance(message, TaskUpload) for one in message.ids
        ]
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
        # Without a producer name, each write counts as a new one.
        self._producer = options.producer or f"spark-{uuid.uuid4()}"
        self._number = options.batch if options.batch is not None else 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return TaskUpload(self._writer.upload(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.decide(self._producer, self._number, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: the server sweeps staged files that no batch claims."""


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
        return TaskUpload(self._writer.upload(iterator), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        queries = {message.query for message in messages if isinstance(message, TaskUpload)}
        if not queries:
            return  # no tasks, no rows
        producer = self._writer.options.producer or f"spark-query-{queries.pop()}"
        self._writer.decide(producer, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: the server sweeps staged files that no batch claims."""
