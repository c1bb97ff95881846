"""Writes: tasks upload to staged files on the server, the driver's commit has them appended once.

What a task uploads is durable and seen by nobody until the commit names it. A batch is known by its producer
and number: one that was committed before is skipped, however it was split the second time.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
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
from headrace.spark.envelopes import Stamps
from headrace.spark.http_client import HttpClient
from headrace.spark.options import OptionError, SinkOptions
from headrace.spark.sink_columns import SinkError, Written, written_columns

logger = logging.getLogger(__name__)

STAGED_BYTES = 16 << 20
"""How much a task gathers in memory before it is uploaded: rows may come slowly, uploads must not."""

COMMIT_RETRY_S = 120.0
"""How long a commit is tried again: a server that restarts goes on with it by itself."""


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
        ids: list[str] = []
        uploading: Future[str] | None = None
        with (
            closing(HttpClient(self.options.place)) as client,
            # One at a time, while the next is gathered.
            ThreadPoolExecutor(1, "upload") as thread,
        ):
            for body in self._bodies(batches, stamps):
                if uploading is not None:
                    ids.append(uploading.result())
                uploading = thread.submit(_upload, client, body)
            if uploading is not None:
                ids.append(uploading.result())
        return ids

    def _bodies(self, batches: Iterator[pa.RecordBatch], stamps: Stamps) -> Iterator[bytes]:
        """Blocks of the rows, gathered."""
        prefix = self.written.prefix
        gathered: list[bytes | memoryview] = []
        size = 0
        for batch in batches:
            for block in encode_batch(*self.written.rows(batch, stamps), prefix):
                gathered += block
                size += sum(map(len, block))
                if size >= STAGED_BYTES:
                    yield b"".join(gathered)
                    gathered, size = [], 0
        if gathered:
            yield b"".join(gathered)

    def decide(
        self, producer: str, number: int, messages: Sequence[WriterCommitMessage | None]
    ) -> None:
        """In the driver: have everything appended, in the order of the tasks."""
        ids = [one for message in messages if isinstance(message, Staged) for one in message.ids]
        body = {"producer": producer, "number": number, "staged": ids}
        client = HttpClient(self.options.place, retry_s=COMMIT_RETRY_S)
        try:
            answer = client.json("POST", "/v1/batches", {}, body)
            asked_again = False
            while answer.get("pending"):
                # It is decided, and goes on whether or not anyone asks.
                answer = client.json("POST", "/v1/batches", {}, body)
                asked_again = True
        finally:
            client.close()
        if answer.get("damaged"):
            raise SinkError(
                f"batch {number} of producer {producer!r} is written, but {answer['damaged']} parts of it "
                "were damaged on the server's disk and are lost: the server's log names them"
            )
        if answer["duplicate"] and not asked_again:
            logger.warning(
                "batch %d of producer %r was written before: its rows are skipped", number, producer
            )


def _upload(client: HttpClient, body: bytes) -> str:
    answer: dict[str, str] = client.upload("/v1/staged", body)
    return answer["id"]


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
