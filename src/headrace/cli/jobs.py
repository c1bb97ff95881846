"""What the jobs of `headrace pipeline` share: their extra, their settings, and how those end that go on."""

import importlib
import os
import signal
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Annotated, Self

import typer

from headrace.cli.failure import CommandError, UsageError
from headrace.config_pipeline import Pipeline
from headrace.settings import load

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


def job(name: str) -> ModuleType:
    """The module of a job, where what it needs is installed."""
    try:
        return importlib.import_module(f"headrace.pipeline.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headrace"):
            raise
        raise CommandError(
            f"this needs: pip install 'headrace[pipeline]' ({error.name} is missing)"
        ) from None


def settings(config_file: Path | None, **flags: object) -> Pipeline:
    """What is set of `[pipeline]`; flags go over the environment, and that over the file."""
    given = {f"pipeline.{name}": value for name, value in flags.items()}
    return load(given, os.environ, config_file).config.pipeline


def lake_of(found: Pipeline) -> str:
    if not found.lake:
        raise UsageError("say where the lake is: --lake DIR, or lake in [pipeline] of --config")
    return found.lake


class Ending:
    """Ctrl-C or SIGTERM end a job that goes on, after what it is doing; the second one at once."""

    def __init__(self) -> None:
        self._asked = False

    def asked(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)
        }
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
