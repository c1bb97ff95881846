"""Writes: tasks upload to staged files on the server, the driver's commit has them appended once.

What a task uploads is durable and seen by nobody until the commit names it. A batch is known by its producer
and number: one that was committed before is skipped, however it was split the second time.
"""

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

from headrace.spark.encode import encode_batch
from headrace.spark.http_client import HttpClient
from headrace.spark.options import OptionError, SinkOptions
from headrace.spark.sink_columns import Written, written_columns

STAGED_BYTES = 256 << 20
"""How much a task puts into one staged file before it begins another."""

COMMIT_RETRY_S = 120.0
"""How long a commit is tried again: a server that restarts goes on with it by itself."""

_CHUNK_BYTES = 1 << 20


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

    def upload(self, batches: Iterator[pa.RecordBatch]) -> list[str]:
        """In a task: the rows as staged files."""
        blocks = _Blocks(self.written, batches)
        client = HttpClient(self.options.place)
        ids = []
        try:
            while not blocks.exhausted:
                ids.append(client.post_stream("/v1/staged", blocks.chunks())["id"])
        finally:
            client.close()
        return ids

    def decide(
        self, producer: str, number: int, messages: Sequence[WriterCommitMessage | None]
    ) -> None:
        """In the driver: have everything appended, in the order of the tasks."""
        ids = [one for message in messages if isinstance(message, Staged) for one in message.ids]
        body = {"producer": producer, "number": number, "staged": ids}
        client = HttpClient(self.options.place, retry_s=COMMIT_RETRY_S)
        try:
            client.json("POST", "/v1/batches", {}, body)
        finally:
            client.close()


class _Blocks:
    """The blocks of a task's rows, as bodies of a bounded size."""

    def __init__(self, written: Written, batches: Iterator[pa.RecordBatch]) -> None:
        self._blocks = (block for batch in batches for block in encode_batch(*written.rows(batch)))
        self._next = next(self._blocks, None)

    @property
    def exhausted(self) -> bool:
        return self._next is None

    def chunks(self) -> Iterator[bytes]:
        """One body."""
        total = size = 0
        gathered: list[bytes] = []
        while self._next is not None and total < STAGED_BYTES:
            gathered.append(self._next)
            size += len(self._next)
            total += len(self._next)
            if size >= _CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
            self._next = next(self._blocks, None)
        if gathered:
            yield b"".join(gathered)


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
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        return Staged(self._writer.upload(iterator), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        queries = {message.query for message in messages if isinstance(message, Staged)}
        if not queries:
            return  # no tasks, no rows
        producer = self._writer.options.producer or f"spark-query-{queries.pop()}"
        self._writer.decide(producer, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: what nobody claims is swept by the server."""
