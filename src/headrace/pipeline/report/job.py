"""The job `report`: what log and lake hold, as one page to look at and the same as JSON.

Tasks look twice: first at which topics there are and when, then, with buckets chosen, at how much was when.
Both files appear when they are whole, in place of what was there; nothing else is changed.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.lake.format import Positions
from headrace.lake.manifests import Manifests
from headrace.lake.table import open_table
from headrace.pipeline import report_data
from headrace.pipeline.export import APP
from headrace.pipeline.report_page import page
from headrace.pipeline.report_server import ask_server
from headrace.pipeline.report_tasks import CountWork, LakeWork, LogWork, Work, count_in, look_at
from headrace.pipeline.staging import together
from headrace.pipeline.tasks import JobError, Runner, SparkRunner
from headrace.spark.log_view import LogView, Range
from headrace.spark.open_log import open_log
from headrace.spark.options import OptionError, SourceOptions, Topics, parse_place, parse_source
from headrace.spark.planning import find_topics, parts_of

_TASK_BYTES = 256 << 20
"""Of the log or of lake files. Of the log a task reads a thousandth of that."""

_TASK_RANGES = 1000
"""Ten thousand small topics are one task by their bytes, and take ten times as long as a thousand."""

Progress = Callable[[int, int], None]
"""Told how many bytes of log and lake are covered, of how many."""


class Summary(NamedTuple):
    """What a report is of."""

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
    runner: Runner | None = None,
) -> Summary:
    """Write a report on topics, or on all.

    The log is asked at `url`, or read in `data_dir`; with both it is read there, and the server at `url` is
    asked what only it knows. With `lake`, what the lake has is counted there, and the rest in the log.
    """
    source = _source(tuple(topics), pattern, url, token, data_dir)
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
    return Summary(
        *(str(out), str(json), made.messages, made.bytes, made.topics_in_all),
        *(made.first_ms, made.last_ms, made.damaged),
    )


class _Halves:
    """Progress over both looks."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.first = self.second = None
        if progress is not None and total:
            self.first = lambda part: progress(int(total * part / 2), total)
            self.second = lambda part: progress(int(total * (1 + part) / 2), total)


# What is looked at


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
        options = options._replace(topics=Topics(tuple(sorted(set(topics)))))
    return options


def _works(source: SourceOptions, lake: str) -> tuple[list[Work], int]:
    """What tasks are to look at, and how many bytes of log and lake that is."""
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


def _ranges(log: LogView, topics: Topics, ends: Positions) -> list[Range]:
    """What the log has and the lake has not."""
    states = find_topics(log, topics)
    for name in topics.names or ():
        if name not in states and name not in ends:
            raise JobError(f"there is no topic {name!r} to report on")
    ranges = []
    for state in states.values():
        start = max(state.start, ends.get(state.name, state.start), key=lambda at: at.ordinal)
        if start.ordinal < state.end.ordinal:
            ranges.append(Range(state.name, start._replace(epoch=state.end.epoch), state.end))
    return ranges


def _lake_files(lake: Path) -> tuple[dict[str, int], Positions]:
    """The files of a lake with their sizes, and how far it has each topic."""
    table = open_table(lake)
    last = table.last(APP)
    while True:
        files = table.files()
        before, last = last, table.last(APP)
        if last == before:
            return files, Manifests(lake).reach(last).ends
        # An export has committed a batch meanwhile: its files are not among these, or not all.


# What is written


class _Targets:
    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._made = [path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}") for path in paths]

    def prepare(self) -> None:
        """Before anything is read it is known whether they can be written."""
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
            with suppress(OSError):  # most often it has its name now, or could not be made
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
