"""The job `report`: shows what log and lake contain, as one HTML page and as JSON.

Tasks read twice: first to find the topics and their times, then, with the buckets chosen, to count records
over time. Both files replace existing ones when they are complete. Nothing else is changed.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.config.pipeline import ReportOptions
from headrace.errors import OptionError
from headrace.lake.format import Positions, ranges_in
from headrace.lake.storage.storage import LakeFile, Storage, storage_of
from headrace.model import LAKE_START_READER, RECORD_HEADER_BYTES
from headrace.pipeline.job import (
    JobArguments,
    job,
    list_lake,
    place_of,
    share_of,
    source_of,
    topics_of,
)
from headrace.pipeline.report import data as report_data
from headrace.pipeline.report.data import (
    ChannelMember,
    ChannelsSeen,
    Numbers,
    Overview,
    ReaderLag,
    ReportPlan,
    Runs,
    ServerSeen,
    count,
    look,
    runs_of,
)
from headrace.pipeline.report.page import page
from headrace.pipeline.tasks import JobError
from headrace.reader.http_client import HttpClient
from headrace.reader.planning import (
    SourceOptions,
    TopicSelection,
    find_topics,
    groups,
    parts_of,
)
from headrace.reader.view import (
    DamagedRange,
    LogLocation,
    LogRange,
    LogView,
    despite_loss,
    open_log,
)

_TASK_BYTES = 256 << 20
"""Bytes of the log or of lake files per task. A task reads only a thousandth of its part of the log."""

_TASK_RANGES = 1000
"""Maximum number of ranges per task.

By their bytes, ten thousand small topics would be one task, but they take ten times as long as a thousand.
"""


CHANNELS_MAX = 10_000
"""Maximum number of channels that are examined: the server reads the notes of each."""

SHOWN_MAX = 20
"""Maximum number of readers, and of members of channels, that are named: the slowest ones."""

_PAGE = 1000


class ReportSummary(NamedTuple):
    page: str
    json: str
    messages: int
    bytes: int
    topics: int
    first_ms: int | None
    last_ms: int | None
    damaged: int


@dataclass(frozen=True)
class ReportArguments(ReportOptions, JobArguments):
    pass


@job(ReportArguments)
def report(given: ReportArguments) -> ReportSummary:
    """Write a report on the given topics, or on all topics.

    The log is read from the server at `url` or in `data_dir`. With both, it is read in `data_dir`, and the
    server at `url` is asked for the data that only a server has. With `lake`, records in the lake are counted
    there, and the others in the log.
    """
    source = source_of(
        topics_of(given.topics, given.pattern),
        given,
        data_dir=given.data_dir,
        task_bytes=_TASK_BYTES,
    )
    out, json = Path(given.out), Path(given.json or "")
    lake = (
        storage_of(given.lake, given.storage_options, given.catalog_options) if given.lake else None
    )
    if given.json and json.absolute() == out.absolute():
        raise OptionError("the page and the JSON cannot be the same file: name two files")
    paths = [out, json] if given.json else [out]
    with _new_files(paths) as files:
        works, total = _works(source, lake)
        server = ask_server(place_of(given), source.topics) if given.url else None
        with closing(given.task_runner("report")) as runner:
            first = share_of(given.progress, total, 0, 0.5)
            seen = report_data.overview(runner.run(works, look_at, first))
            plan = report_data.plan(seen)
            second = share_of(given.progress, total, 0.5, 1)
            found = runner.run(works, partial(count_in, plan=plan), second)
        made = report_data.report(
            seen,
            plan,
            found,
            made_ms=int(time.time() * 1000),
            log=given.data_dir or given.url,
            lake=str(given.lake) or None,
            sizes_are_means=any(isinstance(work, LogWork) for work in works),
            server=server,
        )
        text = msgspec.json.format(msgspec.json.encode(made)) + b"\n"
        _replace(paths, files, [page(made).encode(), text][: len(paths)])
    return ReportSummary(
        page=str(out),
        json=str(given.json),
        messages=made.messages,
        bytes=made.bytes,
        topics=made.topics_in_all,
        first_ms=made.first_ms,
        last_ms=made.last_ms,
        damaged=made.damaged,
    )


# Works


class LogWork(NamedTuple):
    source: SourceOptions
    ranges: list[LogRange]


class LakeWork(NamedTuple):
    storage: Storage
    files: list[str]
    topics: TopicSelection


Work = LogWork | LakeWork


def _works(source: SourceOptions, lake: Storage | None) -> tuple[list[Work], int]:
    """Return the works of tasks, and the number of bytes of log and lake that they cover."""
    works: list[Work] = []
    total = 0
    ends: Positions = {}
    if lake is not None:
        files, ends = list_lake(lake)
        works += [
            LakeWork(lake, some, source.topics)
            for some in groups(sorted(files), files.__getitem__, _TASK_BYTES)
        ]
        total += sum(files.values())
    with closing(open_log(source.place)) as log:
        ranges = _ranges(log, source.topics, ends)
        works += [
            LogWork(source, part[first : first + _TASK_RANGES])
            for part in parts_of(log, ranges, source)
            for first in range(0, len(part), _TASK_RANGES)
        ]
        total += sum(one.bytes for one in ranges)
    return works, total


def _ranges(log: LogView, topics: TopicSelection, ends: Positions) -> list[LogRange]:
    """Return the ranges that the log has and the lake does not."""
    states = find_topics(log, topics)
    for name in topics.names or ():
        if name not in states and name not in ends:
            raise JobError(f"there is no topic {name!r} to report on")
    ranges = []
    for state in states.values():
        start = max(state.start, ends.get(state.name, state.start), key=lambda at: at.ordinal)
        if start.ordinal < state.end.ordinal:
            ranges.append(LogRange(state.name, start._replace(epoch=state.end.epoch), state.end))
    return ranges


# A running server: readers and their lag, channels and their members, counters


def ask_server(place: LogLocation, topics: TopicSelection) -> ServerSeen:
    with closing(HttpClient(place)) as http:
        counters = _counters(http.send("GET", "/metrics", {}).decode("utf-8", "replace"))
        cursors = _all(http, "cursors", {"limit": _PAGE}, after="topic", after_reader="reader")
        readers = readers_of(cursor for cursor in cursors if topics.matches(cursor["topic"]))
        channels = _all(http, "channels", {}, after="name")
        some = list(islice(channels, CHANNELS_MAX))
        more = next(channels, None) is not None
    return ServerSeen(
        counters.get("headrace_duplicates_refused_total", 0),
        counters.get("headrace_channels_trimmed_total", 0),
        counters.get("headrace_channels_destroyed_total", 0),
        readers[:SHOWN_MAX],
        len(readers),
        channels_of(some, more=more),
    )


def readers_of(cursors: Iterator[dict[str, Any]]) -> list[ReaderLag]:
    """Sum up the cursors of each reader; the reader that is furthest behind comes first."""
    found: dict[str, ReaderLag] = {}
    slowest: dict[str, int] = {}
    for one in cursors:
        name, lag = one["reader"], one["lag_records"]
        if name == LAKE_START_READER:
            continue  # this cursor is the lake's start, and never moves
        known = found.get(name) or ReaderLag(name, 0, 0, 0, 0, 0, one["topic"])
        is_slowest = lag > slowest.get(name, -1)
        slowest[name] = max(lag, slowest.get(name, -1))
        found[name] = ReaderLag(
            name,
            known.topics + 1,
            known.lag_records + lag,
            known.lag_bytes + one["lag_bytes"],
            known.gone_records + one["gone_records"],
            max(known.moved_ms, one["ms"]),
            one["topic"] if is_slowest else known.slowest_topic,
        )
    return sorted(found.values(), key=lambda reader: (-reader.lag_records, reader.name))


def channels_of(found: list[dict[str, Any]], *, more: bool) -> ChannelsSeen:
    alive = [one for one in found if one["exists"]]
    members = [
        ChannelMember(
            member["processor"],
            one["name"],
            member["present"],
            member["lag_messages"],
            member["missed_messages"],
        )
        for one in found
        for member in one["members"]
    ]
    members.sort(key=lambda member: (-member.lag_messages, member.processor, member.channel))
    return ChannelsSeen(
        len(found),
        more,
        len(alive),
        sum(one["messages"] for one in alive),
        sum(one["bytes"] for one in alive),
        sum(1 for one in alive if one["start"] > 0),
        len(found) - len(alive),
        sum(1 for one in found if one["destroyed_ms"]),
        members[:SHOWN_MAX],
        len(members),
    )


def _counters(text: str) -> dict[str, int]:
    pairs = (line.partition(" ")[::2] for line in text.splitlines() if "_total " in line)
    return {name: int(float(value)) for name, value in pairs if not name.startswith("#")}


def _all(http: HttpClient, kind: str, query: dict[str, Any], **after: str) -> Iterator[Any]:
    """Yield all that the server lists in pages; `after` maps parameters to the fields of the last item."""
    while True:
        page = http.json("GET", f"/v1/{kind}", query)
        yield from page[kind]
        if not page["more"]:
            return
        query |= {name: page[kind][-1][field] for name, field in after.items()}


# Output


@contextmanager
def _new_files(paths: list[Path]) -> Iterator[list[Path]]:
    """Make a file beside each path, so that a path that cannot be written fails before anything is read."""
    files = [path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}") for path in paths]
    try:
        for path, made in zip(paths, files, strict=True):
            if path.is_dir():
                raise JobError(f"{path} is a directory: name a file")
            try:
                made.touch()
            except OSError as error:
                raise JobError(f"{path} cannot be written: {error.strerror}") from None
        yield files
    finally:
        for made in files:
            with suppress(OSError):  # usually it is renamed already, or was never made
                made.unlink()


def _replace(paths: list[Path], files: list[Path], contents: list[bytes]) -> None:
    try:
        for made, content in zip(files, contents, strict=True):
            with made.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, made in zip(paths, files, strict=True):
            made.rename(path)
    except OSError as error:
        raise JobError(f"{paths[0]} cannot be written: {error.strerror}") from None


# Tasks: count index rows of the log, or offsets and times in lake files


def look_at(work: Work) -> Overview:
    damaged: list[DamagedRange] = []
    return look(_runs(work, damaged))._replace(damaged=len(damaged))


def count_in(work: Work, *, plan: ReportPlan) -> Numbers:
    return count(_runs(work, []), plan)


def _runs(work: Work, damaged: list[DamagedRange]) -> Iterator[Runs]:
    """Yield the runs of a work, and add the ranges that cannot be read to `damaged`."""
    if isinstance(work, LakeWork):
        for name in work.files:
            yield from _runs_of_file(work.storage.file(name), work.topics)
        return
    with closing(open_log(work.source.place)) as log:
        log.expect(work.ranges)
        for one in work.ranges:
            # A report shows the records that are there: retention may delete some while it is made.
            yield from despite_loss(
                one, work.source.leave_out, lambda rest: _runs_of_range(log, rest, damaged)
            )


def _runs_of_range(log: LogView, part: LogRange, damaged: list[DamagedRange]) -> Iterator[Runs]:
    for rows in log.rows(part):
        if isinstance(rows, DamagedRange):
            damaged.append(rows)
        else:
            yield runs_of(part.topic, part.start, part.end, rows)


def _runs_of_file(file: LakeFile, topics: TopicSelection) -> Iterator[Runs]:
    """Yield the runs of every range of a file. Its rows are in order; the last ends with the range."""
    with file.open() as content, pq.ParquetFile(content) as parquet:
        ranges = ranges_in(parquet.metadata)
        table = parquet.read(["offset", "timestamp"], use_threads=False)
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
