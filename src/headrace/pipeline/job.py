"""Parts that several jobs share: arguments and their checks, progress, points for tests."""

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_type_hints

from headrace.config.pipeline import JobOptions, ServerOptions, check
from headrace.errors import BadTopicNameError, OptionError
from headrace.lake.format import Positions
from headrace.lake.manifests import Manifests
from headrace.lake.storage.storage import LIBRARIES, Storage
from headrace.lake.table import open_table
from headrace.model import check_topic_name
from headrace.pipeline import tasks
from headrace.pipeline.tasks import SparkRunner, TaskRunner
from headrace.reader.planning import SourceOptions, TopicSelection
from headrace.reader.planning import groups as groups
from headrace.reader.view import LogLocation, parse_place
from headrace.spark.options import parse_source

EXPORT_APP = "headrace-export"
"""Application ID of exports in a lake's commits, which number the batches."""

_POLL_S = 0.01

P = ParamSpec("P")
Given = TypeVar("Given", bound=JobOptions)
Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""Called with the number of bytes that are done, and with their total."""


class Points(NamedTuple):
    """Named points of a job where a test can make it wait, to kill something.

    To make a job wait, a test creates the file `stop-NAME` in a directory. At the point, the job creates
    `reached-NAME` and waits until `stop-NAME` is removed.
    """

    directory: str = ""
    """Directory for these files; empty outside of tests."""

    def here(self, name: str) -> None:
        if not self.directory:
            return
        stop = Path(self.directory, f"stop-{name}")
        if stop.exists():
            Path(self.directory, f"reached-{name}").touch()
            while stop.exists():
                time.sleep(_POLL_S)


NO_POINTS = Points()


# Arguments


@dataclass(frozen=True, kw_only=True)
class JobArguments(JobOptions):
    """Arguments of a job that only Python has."""

    progress: Progress | None = None
    spark: Any = None
    """Spark session (`SparkSession`) to use, which is not stopped; None for the active one or a new one."""
    runner: TaskRunner | None = None
    """Runner of tasks; None for Spark."""
    points: Points = NO_POINTS

    def task_runner(self, name: str) -> TaskRunner:
        """Return the runner of a job, whose workers must have what the addresses of its lakes need."""
        addresses = {str(getattr(self, field, "")).partition(":")[0] for field in ("lake", "into")}
        needed = [
            (module, extra) for scheme, (module, extra) in LIBRARIES.items() if scheme in addresses
        ]
        modules = [*tasks.MODULES, *(module for module, _ in needed)]
        if name == "dedupe":
            modules.append("pandas")
        return self.runner or SparkRunner(
            f"headrace {name}",
            self.master,
            self.spark,
            modules=modules,
            extras=",".join(["pipeline", *sorted({extra for _, extra in needed})]),
        )


def job(
    arguments: Callable[P, Given],
) -> Callable[[Callable[[Given], Result]], Callable[P, Result]]:
    """Return a decorator: the function then takes the fields of `arguments` as its own arguments."""

    def decorate(function: Callable[[Given], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> Result:
            given = arguments(*args, **kwargs)
            check(given)
            return function(given)

        hints = get_type_hints(arguments)
        signature = inspect.signature(arguments)
        parameters = [
            one.replace(annotation=hints[name]) for name, one in signature.parameters.items()
        ]
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=get_type_hints(function)["return"]
        )
        return run

    return decorate


def topics_of(topics: Iterable[str], pattern: str) -> TopicSelection:
    """Return a selection of the named topics, of the topics that match the pattern, or of all topics."""
    names = tuple(sorted(set(topics)))
    if names and pattern:
        raise OptionError("topics and a pattern exclude each other: give one of them")
    try:
        for name in names:
            check_topic_name(name)
    except BadTopicNameError as error:
        raise OptionError(str(error)) from None
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"the pattern is not a regular expression: {error}") from None
    return TopicSelection(names) if names else TopicSelection(pattern=pattern or "(?s:.*)")


def source_of(
    topics: TopicSelection,
    server: ServerOptions,
    *,
    data_dir: str,
    task_bytes: int,
    batch_bytes: int | None = None,
) -> SourceOptions:
    """Return how the log is read: from files if there is a `data_dir`, otherwise from a server."""
    if not server.url and not data_dir:
        raise OptionError("say where the log is: give a server's address or a data directory")
    path = data_dir if "://" in data_dir else str(Path(data_dir).absolute())
    place = {"path": path} if data_dir else {"url": server.url}
    # Tasks skip lost records. The driver then finds them missing and decides if that is an error.
    given = {"maxBytesPerPartition": str(task_bytes), "failOnDataLoss": "false"}
    found = parse_source({**place, **given, "subscribePattern": ".*"}, streaming=False)
    if not data_dir:
        found = found._replace(place=place_of(server))
    return found._replace(topics=topics, bytes_max=batch_bytes)


def place_of(server: ServerOptions) -> LogLocation:
    """Return the location of the server that a job asks."""
    return parse_place(
        server.url,
        server.token,
        server.ca,
        token_file=str(server.token_file),
        insecure_token=server.insecure_token,
    )


def list_lake(storage: Storage) -> tuple[dict[str, int], Positions]:
    """Return the lake's files with their sizes, and the end of each topic in them."""
    table = open_table(storage)
    last = table.last(EXPORT_APP)
    while True:
        files = table.files()
        before, last = last, table.last(EXPORT_APP)
        if last == before:
            return files, Manifests(storage).reach(last).ends
        # An export has committed a batch meanwhile, so `files` lacks some or all of its files.


# Progress


def part_of(
    progress: Progress | None, *, done: int, size: int, total: int
) -> tasks.Progress | None:
    """Return the progress of works that cover `size` of `total` bytes, after `done` bytes."""
    if progress is None:
        return None
    return lambda part: progress(min(total, done + int(size * part)), total)


def share_of(
    progress: Progress | None, total: int, first: float, last: float
) -> tasks.Progress | None:
    """Return the progress of works that do the share from `first` to `last`, of 0 to 1, of a job."""
    done = int(total * first)
    return part_of(progress, done=done, size=int(total * last) - done, total=total)
