"""Running a job of the pipeline from the command line: its progress, its log messages and its end."""

import importlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple, Self

import typer

from headrace.cli.common.output import CommandError, ProgressBar, UsageError, note
from headrace.errors import OptionError


class Job(NamedTuple):
    run: Callable[..., Any]
    progress: Callable[[int, int], None]
    """Called with the bytes that are done, and the total."""


@contextmanager
def running(name: str) -> Iterator[Job]:
    """Yield the function of a job and a progress bar; raise CommandError if a package is missing."""
    run = _function(name)
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
            note("interrupted: run the same command again to do the rest")
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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
