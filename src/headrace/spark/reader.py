"""Reading of parts as Arrow batches in a task, which batch and streaming reads share."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.reader.decode import BATCH_RECORDS_MAX, DecodedRecords, decode, to_batch
from headrace.reader.planning import SourceOptions, despite_loss
from headrace.reader.view import LogRange, open_log
from headrace.spark.columns import Columns, columns_of, envelope_of

_GATHERED_ROWS = 8192
"""Batches with fewer rows are joined, so that many small topics do not make many small batches."""


class ReadPartition(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: list[LogRange]) -> None:
        super().__init__(None)
        self.ranges = ranges


class PartReader:
    """Reader of parts in a task."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.columns = columns_of(schema, decode=options.decode)

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(part, ReadPartition):
            return  # Spark passes another kind if the list of partitions is empty
        build = _Builder(self.options, self.schema, self.columns)
        with closing(open_log(self.options.place)) as log:

            def read(wanted: LogRange) -> Iterator[DecodedRecords]:
                return decode(wanted, log.read(wanted), verify=self.options.verify)

            log.expect(part.ranges)
            for one in part.ranges:
                for records in despite_loss(one, self.options, read):
                    yield from build.add(records)
        yield from build.rest()


class _Builder:
    """Builder of batches that joins small ones."""

    def __init__(self, options: SourceOptions, schema: StructType, columns: Columns) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._columns = columns
        self._envelope = envelope_of(options.decode) if columns.decoded else None
        self._gathered: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, records: DecodedRecords) -> Iterator[pa.RecordBatch]:
        batch = self._batch(records)
        if not self._gathered and batch.num_rows >= _GATHERED_ROWS:
            yield batch
            return
        self._gathered.append(batch)
        self._rows += batch.num_rows
        if self._rows >= BATCH_RECORDS_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        if self._gathered:
            table = pa.Table.from_batches(self._gathered, schema=self._schema)
            self._gathered, self._rows = [], 0
            yield from table.combine_chunks().to_batches(max_chunksize=BATCH_RECORDS_MAX)

    def _batch(self, records: DecodedRecords) -> pa.RecordBatch:
        decoded: dict[str, Any] = {}
        if self._envelope is not None:
            fields = [self._schema.field(field.name) for field in self._columns.decoded]
            arrays = self._envelope.decode(records.payloads(), fields)
            decoded = {field.name: array for field, array in zip(fields, arrays, strict=True)}
        return to_batch(records, self._columns.names, decoded, self._schema)
