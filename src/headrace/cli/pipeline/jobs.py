"""What the commands of `headrace pipeline` share: options, settings, how a job is run and how it ends."""

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

from headrace.cli import options
from headrace.cli.failure import CommandError, UsageError
from headrace.cli.output import ProgressBar
from headrace.config_pipeline import Pipeline
from headrace.settings import load

_EVERYWHERE = ("0.0.0.0", "::")
"""Where a server listens that listens on all addresses."""

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
    """What is set of `[pipeline]`; flags go over the environment, and that over the file."""
    given = {f"pipeline.{name}": value for name, value in flags.items()}
    return load(given, os.environ, config_file).config.pipeline


def lake_of(found: Pipeline) -> str:
    if not found.lake:
        raise UsageError("say where the lake is: --lake DIR, or lake in [pipeline] of --config")
    return found.lake


def seconds(option: str, text: str | None) -> float | None:
    """A duration, in seconds unless it has a unit; None where the option is not given."""
    return None if text is None else options.seconds(option, text)


class Server(NamedTuple):
    url: str = ""
    token: str = ""


def server_of(
    http: str | None,
    token: str | None,
    data_dir: str | None = None,
    *,
    config_file: Path | None = None,
) -> Server:
    """The one that is named, that of the file, or the default one; none where only a directory is named."""
    if data_dir and not http:
        return Server()
    if not http and not os.environ.get("HEADRACE_HTTP") and config_file:
        listen = load({}, os.environ, config_file).config.listen.http
        http = str(listen._replace(host="127.0.0.1") if listen.host in _EVERYWHERE else listen)
    api = options.http_api(http, token)
    return Server(api.base, api.token or "")


def pattern_of(found: Pipeline, topics: list[str] | None, pattern: str | None) -> str:
    """Topics on the command line go over a pattern in the file."""
    return (pattern or "") if topics else found.pattern


class Job(NamedTuple):
    run: Callable[..., Any]
    progress: Callable[[int, int], None]
    """To be told how many bytes are done, of how many."""


@contextmanager
def running(name: str) -> Iterator[Job]:
    """The function of a job where what it needs is installed, and a bar for its progress."""
    run = _function(name)
    from headrace.spark.options import OptionError

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
            typer.echo("interrupted: the same command does the rest", err=True)
            raise


@contextmanager
def _told_on_standard_error() -> Iterator[None]:
    """What jobs say while they run; on a terminal also what they are about to do."""
    jobs = logging.getLogger("headrace.pipeline")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("headrace: %(message)s"))
    before, jobs.propagate = jobs.level, False
    jobs.setLevel(logging.DEBUG if sys.stderr.isatty() else logging.INFO)
    jobs.addHandler(handler)
    others = logging.StreamHandler()
    others.setLevel(logging.WARNING)
    # It logs a traceback for a JVM that has died, and the job ends with a sentence about it.
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
        found: Callable[..., Any] = getattr(
            importlib.import_module(f"headrace.pipeline.{name}"), name
        )
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
    """Ctrl-C or SIGTERM end a job that goes on, after what it is doing; the second one at once."""

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
