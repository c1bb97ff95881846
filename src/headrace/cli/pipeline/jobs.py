"""Shared parts of the commands `headrace pipeline …`: options, settings, and running and ending a job."""

import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, NamedTuple, Self

import typer

from headrace.cli.common import options
from headrace.cli.common.output import CommandError, ProgressBar, UsageError, note
from headrace.config.load import load
from headrace.config.pipeline import Pipeline

_EVERYWHERE = ("0.0.0.0", "::")
"""Hosts that mean: the server listens on all addresses."""

Topics = Annotated[list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="RE",
        help="Only topics whose whole name matches.  [pipeline.pattern]",
    ),
]
Lake = Annotated[
    str | None,
    typer.Option("--lake", metavar="DIR", help="The lake's directory.  [pipeline.lake]"),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Where Spark runs.  [pipeline.master, else local[*]]",
    ),
]


def settings(config_file: Path | None, **flags: object) -> Pipeline:
    """Return the settings of `[pipeline]`: flags override the environment, which overrides the file."""
    given = {f"pipeline.{name}": value for name, value in flags.items()}
    return load(given, os.environ, config_file).config.pipeline


def lake_of(found: Pipeline) -> str:
    if not found.lake:
        raise UsageError("say where the lake is: --lake DIR, or lake in [pipeline] of --config")
    return found.lake


def seconds(option: str, text: str | None) -> float | None:
    """Return a duration in seconds; None if the option is not given. Without a unit it is in seconds."""
    return None if text is None else options.seconds(option, text)


class ServerAddress(NamedTuple):
    url: str = ""
    token: str = ""


def server_of(
    http: str | None,
    token: str | None,
    data_dir: str | None = None,
    *,
    config_file: Path | None = None,
) -> ServerAddress:
    """Return the server given by option, environment, file or default; empty if only `data_dir` is given."""
    if data_dir and not http:
        return ServerAddress()
    if not http and not os.environ.get("HEADRACE_HTTP") and config_file:
        listen = load({}, os.environ, config_file).config.listen.http
        http = str(listen._replace(host="127.0.0.1") if listen.host in _EVERYWHERE else listen)
    api = options.http_api(http, token)
    return ServerAddress(api.base, api.token or "")


def pattern_of(found: Pipeline, topics: list[str] | None, pattern: str | None) -> str:
    """Return the pattern to use. Topics on the command line override a pattern in the settings."""
    return (pattern or "") if topics else found.pattern


class Job(NamedTuple):
    run: Callable[..., Any]
    progress: Callable[[int, int], None]
    """Called with the bytes that are done, and the total."""


@contextmanager
def running(name: str) -> Iterator[Job]:
    """Yield the function of a job and a progress bar; raise CommandError if a package is missing."""
    run = _function(name)
    from headrace.errors import OptionError

    with ExitStack() as stack:
        bars: list[ProgressBar] = []
        stack.enter_context(_told_on_standard_error())

        def progress(done: int, total: int) -> None:
            if not bars and total:
                bars.append(stack.enter_context(ProgressBar(total)))
            for bar in bars:
                bar.advance_to(done, total)

        try:
            yield Job(run, progress)
        except OptionError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            note("interrupted: the same command does the rest")
            raise


@contextmanager
def _told_on_standard_error() -> Iterator[None]:
    """Print log messages of jobs to standard error, on a terminal also debug messages.

    Other loggers print warnings and errors only.
    """
    jobs = logging.getLogger("headrace.pipeline")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("headrace: %(message)s"))
    before, jobs.propagate = jobs.level, False
    jobs.setLevel(logging.DEBUG if sys.stderr.isatty() else logging.INFO)
    jobs.addHandler(handler)
    others = logging.StreamHandler()
    others.setLevel(logging.WARNING)
    # py4j logs a traceback if the JVM has died; the job itself reports that in one sentence.
    others.addFilter(lambda record: "py4j" not in record.pathname)
    logging.root.addHandler(others)
    try:
        yield
    finally:
        logging.root.removeHandler(others)
        jobs.removeHandler(handler)
        jobs.setLevel(before)
        jobs.propagate = True


def _function(name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(importlib.import_module("headrace.pipeline"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headrace"):
            raise
        raise CommandError(
            f"this needs: pip install 'headrace[pipeline]' ({error.name} is missing)"
        ) from None
    return found


def print_summary(summary: Any, words: Callable[[Any], str], *, as_json: bool) -> None:
    typer.echo(json.dumps(summary._asdict()) if as_json else words(summary))


class Ending:
    """End a continuous job on Ctrl-C or SIGTERM, after its current work; a second signal ends it at once."""

    def __init__(self, *, goes_on: bool) -> None:
        self._signals = (signal.SIGINT, signal.SIGTERM) if goes_on else ()
        self._asked = False

    def asked(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._ask) for number in self._signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
