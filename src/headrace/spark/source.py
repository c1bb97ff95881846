"""Entry point of the format `headrace` for Spark, and its batch reads, with filters that reduce what is read.

Filters on topic, offset, ordinal and timestamp only save work. Spark applies every filter again, so a filter
that is not understood here costs time and nothing else.
"""

import datetime
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from headrace.model import Position
from headrace.reader.planning import SourceOptions, parts_of, plan_batch
from headrace.reader.view import LogRange, LogView, TopicState, open_log
from headrace.spark.columns import PartReader, ReadPartition, default_schema
from headrace.spark.options import parse_sink, parse_source
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


class BatchReader(DataSourceReader):
    """`spark.read.format("headrace")`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._parts = PartReader(options, schema)
        self._narrowing: Narrowing | None = None

    def partitions(self) -> list[InputPartition]:
        options = self._parts.options
        with closing(open_log(options.place)) as log:
            ranges = plan_batch(log, options, self._narrowing)
            return [ReadPartition(task) for task in parts_of(log, ranges, options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._parts.read(partition)


class NarrowingReader(BatchReader):
    """Batch reader for sessions with filter push-down. Other sessions reject a reader with `pushFilters`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._narrowing = narrowing_of(filters)
        return filters


# Filters

_NUMBERS = ("offset", "ordinal", "timestamp")
_1970 = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Narrowing:
    """Topics and ranges that pass the filters. `least` bounds are inclusive, `below` bounds exclusive."""

    topics: set[str] | None = None
    prefixes: list[str] = field(default_factory=list)
    least: dict[str, int] = field(default_factory=dict)
    below: dict[str, int] = field(default_factory=dict)

    def matches(self, topic: str) -> bool:
        if self.topics is not None and topic not in self.topics:
            return False
        return all(topic.startswith(prefix) for prefix in self.prefixes)

    def narrow(self, log: LogView, state: TopicState, whole: LogRange) -> LogRange:
        start, end = whole.start, whole.end
        for column, value in self.least.items():
            start = max(start, _at(log, state, column, value), key=_ordinal)
        for column, value in self.below.items():
            end = min(end, _at(log, state, column, value), key=_ordinal)
        return whole._replace(start=start, end=end)


def narrowing_of(filters: Iterable[Filter]) -> Narrowing:
    found = Narrowing()
    for one in filters:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        if len(attribute) != 1:
            continue
        if attribute[0] == "topic":
            _narrow_topic(found, one)
        elif attribute[0] in _NUMBERS:
            _narrow_number(found, attribute[0], one)
    return found


def _narrow_topic(found: Narrowing, one: Filter) -> None:
    if isinstance(one, EqualTo):
        names = {str(one.value)}
    elif isinstance(one, In):
        names = {str(value) for value in one.value}
    elif isinstance(one, StringStartsWith):
        found.prefixes.append(one.value)
        return
    else:
        return
    found.topics = names if found.topics is None else found.topics & names


def _narrow_number(found: Narrowing, column: str, one: Filter) -> None:
    value = getattr(one, "value", None)
    if column == "timestamp" and isinstance(value, datetime.datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
        # Times have a resolution of one millisecond, and a bound may be between two.
        floor, rest = divmod(zoned - _1970, datetime.timedelta(milliseconds=1))
        ceiling = floor + bool(rest)
    elif column != "timestamp" and isinstance(value, int) and not isinstance(value, bool):
        floor = ceiling = value
    else:
        return
    if isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
        least = floor + 1 if isinstance(one, GreaterThan) else ceiling
        found.least[column] = max(least, found.least.get(column, least))
    if isinstance(one, EqualTo | LessThan | LessThanOrEqual):
        below = ceiling if isinstance(one, LessThan) else floor + 1
        found.below[column] = min(below, found.below.get(column, below))


def _at(log: LogView, state: TopicState, column: str, value: int) -> Position:
    if value <= 0:
        return state.start
    look_up = {"offset": log.at_offset, "ordinal": log.at_ordinal, "timestamp": log.at_time}
    return look_up[column](state, value)


def _ordinal(position: Position) -> int:
    return position.ordinal
