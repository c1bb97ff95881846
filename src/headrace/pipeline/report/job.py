"""The job `report`: shows what log and lake contain, as one HTML page and as JSON.

Tasks read twice: first to find the topics and their times, then, with the buckets chosen, to count records
over time. Both files replace existing ones when they are complete. Nothing else is changed.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import OptionError
from headrace.lake.format import Positions
from headrace.lake.manifests import Manifests
from headrace.lake.table import open_table
from headrace.pipeline.export.job import APP
from headrace.pipeline.report import data as report_data
from headrace.pipeline.report.page import page
from headrace.pipeline.report.server import ask_server
from headrace.pipeline.report.tasks import CountWork, LakeWork, LogWork, Work, count_in, look_at
from headrace.pipeline.staging import together
from headrace.pipeline.tasks import JobError, SparkRunner, TaskRunner
from headrace.reader.planning import SourceOptions, TopicSelection, find_topics, parts_of
from headrace.reader.view import LogRange, LogView, open_log, parse_place
from headrace.spark.options import parse_source

_TASK_BYTES = 256 << 20
"""Bytes of the log or of lake files per task. A task reads only a thousandth of its part of the log."""

_TASK_RANGES = 1000
"""Maximum number of ranges per task.

By their bytes, ten thousand small topics would be one task, but they take ten times as long as a thousand.
"""

Progress = Callable[[int, int], None]
"""Called with the number of bytes of log and lake that are covered, and with their total."""


class ReportSummary(NamedTuple):
    """Contents of a report."""

    page: str
    json: str
    messages: int
    bytes: int
    topics: int
    first_ms: int | None
    last_ms: int | None
    damaged: int


def report(
    out: str | Path = "report.html",
    topics: Iterable[str] = (),
    *,
    json: str | Path = "",
    pattern: str = "",
    url: str = "",
    token: str = "",
    data_dir: str = "",
    lake: str | Path = "",
    master: str = "local[*]",
    progress: Progress | None = None,
    runner: TaskRunner | None = None,
) -> ReportSummary:
    """Write a report on the given topics, or on all topics.

    The log is read from the server at `url` or in `data_dir`. With both, it is read in `data_dir`, and the
    server at `url` is asked for the data that only a server has. With `lake`, records in the lake are counted
    there, and the others in the log.
    """
    source = _source(topics=tuple(topics), pattern=pattern, url=url, token=token, data_dir=data_dir)
    with _targets(Path(out), Path(json) if json else None) as targets:
        works, total = _works(source, str(lake))
        server = ask_server(parse_place(url, token), source.topics) if url else None
        runner = runner or SparkRunner("headrace report", master)
        with closing(runner):
            told = _Halves(progress, total)
            seen = report_data.overview(runner.run(works, look_at, told.first))
            plan = report_data.plan(seen)
            again = [CountWork(work, plan) for work in works]
            counts = report_data.added(plan, runner.run(again, count_in, told.second))
        made = report_data.report(
            seen,
            plan,
            counts,
            made_ms=int(time.time() * 1000),
            log=data_dir or url,
            lake=str(lake) or None,
            sizes_are_means=any(isinstance(work, LogWork) for work in works),
            server=server,
        )
        targets.write(page(made).encode(), msgspec.json.format(msgspec.json.encode(made)) + b"\n")
    return ReportSummary(
        page=str(out),
        json=str(json),
        messages=made.messages,
        bytes=made.bytes,
        topics=made.topics_in_all,
        first_ms=made.first_ms,
        last_ms=made.last_ms,
        damaged=made.damaged,
    )


class _Halves:
    """Progress over both passes."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.first = self.second = None
        if progress is not None and total:
            self.first = lambda part: progress(int(total * part / 2), total)
            self.second = lambda part: progress(int(total * (1 + part) / 2), total)


# Input


def _source(
    topics: tuple[str, ...], pattern: str, url: str, token: str, data_dir: str
) -> SourceOptions:
    if topics and pattern:
        raise OptionError("topics and a pattern exclude each other: give one of them")
    if not url and not data_dir:
        raise OptionError("say where the log is: give a server's address or a data directory")
    place = {"path": str(Path(data_dir).absolute())} if data_dir else {"url": url, "token": token}
    options = parse_source(
        {
            **place,
            "subscribePattern": pattern or ".*",
            "maxBytesPerPartition": str(_TASK_BYTES),
            "failOnDataLoss": "false",
        },
        streaming=False,
    )
    if topics:
        options = options._replace(topics=TopicSelection(tuple(sorted(set(topics)))))
    return options


def _works(source: SourceOptions, lake: str) -> tuple[list[Work], int]:
    """Return the works of tasks, and the number of bytes of log and lake that they cover."""
    works: list[Work] = []
    total = 0
    ends: Positions = {}
    if lake:
        root = Path(lake).absolute()
        files, ends = _lake_files(root)
        works += [
            LakeWork(str(root), some, source.topics)
            for some in together(sorted(files.items()), _TASK_BYTES)
        ]
        total += sum(files.values())
    with closing(open_log(source.place)) as log:
        ranges = _ranges(log, source.topics, ends)
        works += [
            LogWork(source.place, part[first : first + _TASK_RANGES])
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


def _lake_files(lake: Path) -> tuple[dict[str, int], Positions]:
    """Return the files of a lake with their sizes, and the end of each topic in the lake."""
    table = open_table(lake)
    last = table.last(APP)
    while True:
        files = table.files()
        before, last = last, table.last(APP)
        if last == before:
            return files, Manifests(lake).reach(last).ends
        # An export has committed a batch meanwhile, so `files` lacks some or all of its files.


# Output


class _Targets:
    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._made = [path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}") for path in paths]

    def prepare(self) -> None:
        """Raise JobError if the files cannot be written, before anything is read."""
        for path, made in zip(self._paths, self._made, strict=True):
            if path.is_dir():
                raise JobError(f"{path} is a directory: name a file")
            try:
                made.touch()
            except OSError as error:
                raise JobError(f"{path} cannot be written: {error.strerror}") from None

    def write(self, *contents: bytes) -> None:
        try:
            for made, content in zip(self._made, contents, strict=False):
                with made.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for path, made in zip(self._paths, self._made, strict=True):
                made.rename(path)
        except OSError as error:
            raise JobError(f"{self._paths[0]} cannot be written: {error.strerror}") from None

    def clear(self) -> None:
        for made in self._made:
            with suppress(OSError):  # usually it is renamed already, or was never made
                made.unlink()


@contextmanager
def _targets(out: Path, json: Path | None) -> Iterator[_Targets]:
    if json is not None and json.absolute() == out.absolute():
        raise OptionError("the page and the JSON would be the same file: name two")
    targets = _Targets([out, json] if json is not None else [out])
    try:
        targets.prepare()
        yield targets
    finally:
        targets.clear()
