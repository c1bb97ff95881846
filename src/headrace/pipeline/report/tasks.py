"""Tasks of a report: they count index rows of the log, or offsets and times in lake files."""

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.format import ranges_in
from headrace.model import RECORD_HEADER_BYTES
from headrace.pipeline.report.data import (
    Counts,
    Numbers,
    ReportPlan,
    Runs,
    TaskCounts,
    count,
    look,
    runs_of,
)
from headrace.reader.planning import TopicSelection
from headrace.reader.view import (
    DamagedRange,
    DataLossError,
    LogLocation,
    LogRange,
    LogView,
    open_log,
)

logger = logging.getLogger(__name__)


class LogWork(NamedTuple):
    place: LogLocation
    ranges: list[LogRange]


class LakeWork(NamedTuple):
    lake: str
    files: list[str]
    topics: TopicSelection


Work = LogWork | LakeWork


class CountWork(NamedTuple):
    work: Work
    plan: ReportPlan


def look_at(work: Work) -> TaskCounts:
    found = _Found(work)
    return look(found.runs())._replace(damaged=found.damaged)


def count_in(work: CountWork) -> Counts:
    return count(_Found(work.work).runs(), work.plan)


class _Found:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.damaged = 0

    def runs(self) -> Iterator[Runs]:
        work = self._work
        if isinstance(work, LakeWork):
            for name in work.files:
                yield from _runs_of_file(Path(work.lake, name), work.topics)
            return
        with closing(open_log(work.place)) as log:
            log.expect(work.ranges)
            for one in work.ranges:
                yield from self._runs_of_range(log, one)

    def _runs_of_range(self, log: LogView, wanted: LogRange) -> Iterator[Runs]:
        rest: LogRange | None = wanted
        while rest is not None:
            try:
                for rows in log.rows(rest):
                    if isinstance(rows, DamagedRange):
                        self.damaged += 1
                    else:
                        yield runs_of(rest.topic, rest.start, rest.end, rows)
                return
            except DataLossError as loss:
                # A report shows the records that are there: retention may delete some while it is made.
                logger.warning("%s; these records are left out", loss)
                rest = loss.rest


def _runs_of_file(path: Path, topics: TopicSelection) -> Iterator[Runs]:
    """Yield the runs of every range of a file. Its rows are in order; the last ends with the range."""
    with pq.ParquetFile(path) as file:
        ranges = ranges_in(file.metadata)
        table = file.read(["offset", "timestamp"], use_threads=False)
    offsets = _numbers(table["offset"])
    ms = _numbers(table["timestamp"].cast(pa.timestamp("us", "UTC"))) // 1000
    row = 0
    for one in ranges:
        first, row = row, row + one.rows
        if topics.matches(one.topic):
            lengths = np.diff(offsets[first:row], append=one.end)
            ones = np.ones(one.rows, np.int64)
            payloads = lengths - RECORD_HEADER_BYTES
            yield Runs(one.topic, one.offset, one.end, ones, payloads, ms[first:row])


def _numbers(column: pa.ChunkedArray) -> Numbers:
    found: Numbers = pc.cast(column, pa.int64()).to_numpy()
    return found
