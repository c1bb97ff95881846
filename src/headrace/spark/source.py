"""Entry point of the format `headrace` for Spark: selects the reader or writer. Decides nothing else."""

import sys

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from headrace.spark.columns import default_schema
from headrace.spark.options import parse_sink, parse_source
from headrace.spark.reader import BatchReader, NarrowingReader
from headrace.spark.sink import BatchWriter, StreamWriter
from headrace.spark.stream import StreamReader

_PUSH_DOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class HeadraceSource(DataSource):
    """`spark.read.format("headrace")`, `readStream`, `write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> StructType:
        options = {key.lower(): value for key, value in self.options.items()}
        return default_schema(options.get("decode", ""))

    def reader(self, schema: StructType) -> DataSourceReader:
        # Spark asks a reader for filters in a separate worker process, and only if the session allows it.
        kind = NarrowingReader if _PUSH_DOWN_WORKER in sys.modules else BatchReader
        return kind(parse_source(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(parse_source(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(parse_sink(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(parse_sink(self.options, streaming=True), schema, overwrite)
