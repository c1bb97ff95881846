"""Writes: tasks upload staged files to the server, and the driver's commit makes it append them once.

Uploaded files are durable, but invisible until the commit names them. A batch is identified by its producer
and number. A batch that was committed before is skipped, even if the second attempt splits it differently.
"""

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, StringType, StructType

from headrace.errors import OptionError, SinkError
from headrace.printing import quoted
from headrace.reader.upload import (
    check_written_topic,
    decide,
    encode_batch,
    upload,
)
from headrace.spark.columns import POSITIONS, Known, Stamps, check_known, check_type, envelope_of
from headrace.spark.options import SinkOptions

logger = logging.getLogger(__name__)


@dataclass
class TaskUpload(WriterCommitMessage):
    """The staged files that a task has uploaded, in order."""

    ids: list[str]
    query: str = ""
    """Id of the streaming query. Only tasks know it; the driver's commit does not."""


class _Writer:
    """Common part of batch and streaming writes."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("format headrace only appends: use mode append")
        self.options = options
        self._written = written_columns(schema, options)
        self._node = f"spark-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload the rows as staged files. Runs in a task."""
        context = TaskContext.get()
        assert context is not None
        stamps = Stamps(self._node, context.taskAttemptId())
        blocks = (
            block
            for batch in iterator
            for block in encode_batch(*self._written.rows(batch, stamps), self._written.prefix)
        )
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        return TaskUpload(upload(self.options.place, blocks), query)

    def decide(
        self, producer: str, number: int, messages: Sequence[WriterCommitMessage | None]
    ) -> None:
        """Make the server append all uploads, in the order of the tasks. Runs in the driver."""
        ids = [one for message in _uploads(messages) for one in message.ids]
        if decide(self.options.place, producer, number, ids):
            logger.warning(
                "batch %d of producer %s was written before: its rows are skipped",
                number,
                quoted(producer),
            )


def _uploads(messages: Iterable[WriterCommitMessage | None]) -> list[TaskUpload]:
    return [message for message in messages if isinstance(message, TaskUpload)]


class BatchWriter(_Writer, DataSourceArrowWriter):
    """`df.write.format("headrace")`."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        # Without a producer name, each write counts as a new one.
        producer = self.options.producer or self._node
        self.decide(producer, self.options.batch or 0, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: the server sweeps staged files that no batch claims."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream.format("headrace")`."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        queries = {message.query for message in _uploads(messages)}
        if not queries:
            return  # no tasks, no rows
        query, producer = queries.pop(), self.options.producer
        if not query and not producer:
            raise SinkError("Spark does not say which query this is: give it a name with producer")
        self.decide(producer or f"spark-query-{query}", batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: the server sweeps staged files that no batch claims."""


# Columns

_ROW: Known = {"topic": (StringType(),), "payload": (BinaryType(), StringType())}


class WrittenColumns(NamedTuple):
    """The columns of a frame that are written."""

    options: SinkOptions
    members: tuple[str, ...] = ()
    """Columns that are encoded in the envelope."""

    @property
    def prefix(self) -> str:
        """Name space of all topics that are written to; empty for ordinary topics."""
        return envelope_of(self.options.encode).prefix if self.options.encode else ""

    def rows(self, batch: pa.RecordBatch, stamps: Stamps) -> tuple[pa.Array | str, pa.Array]:
        """Return the topics and payloads of a batch."""
        topic, encode, processor = self.options.topic, self.options.encode, self.options.processor
        if encode:
            if processor:
                names = pa.repeat(pa.scalar(processor), batch.num_rows)
                batch = batch.append_column("processor", names)
            payloads = envelope_of(encode).encode(batch.select(list(self.members)), stamps)
        else:
            payloads = batch.column("payload").cast(pa.binary())
        return topic or batch.column("topic").cast(pa.string()), payloads


def written_columns(schema: StructType, options: SinkOptions) -> WrittenColumns:
    fields = {field.name: field.dataType for field in schema.fields}
    if "topic" in fields and options.topic:
        raise OptionError(
            "the option topic and the column topic contradict each other: leave out one, for instance "
            "with .drop('topic')"
        )
    if "topic" not in fields and not options.topic:
        raise OptionError("say where to write: give the option topic, or a column topic")
    if "topic" in fields:
        check_known({"topic": fields["topic"]}, _ROW)
    if options.topic:
        try:
            check_written_topic(options.topic, WrittenColumns(options).prefix)
        except SinkError as error:
            raise OptionError(f"topic makes no sense: {error}") from None
    if options.encode:
        envelope = envelope_of(options.encode)
        others = {name: kind for name, kind in fields.items() if name != "topic"}
        for name, kind in others.items():
            check_type(name, kind)
        if not others:
            raise OptionError(f"encode = {options.encode} needs a column beside topic to encode")
        if options.processor and "processor" in others:
            raise OptionError(
                "the option processor and the column processor contradict each other: leave out one, for "
                "instance with .drop('processor')"
            )
        if options.processor:
            others["processor"] = StringType()
        return WrittenColumns(options, envelope.members(others))
    if "payload" not in fields:
        raise OptionError(
            "there is no column payload to write; with encode = json all columns become one"
        )
    check_known({"payload": fields["payload"]}, _ROW)
    unwritten = [name for name in fields if name not in POSITIONS | {"topic", "payload"}]
    if unwritten:
        raise OptionError(
            f"the column {unwritten[0]!r} would not be written: select topic and payload, or give "
            "encode = json to make payloads of all columns"
        )
    return WrittenColumns(options)
