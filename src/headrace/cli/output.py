"""How tables, sizes and times look on a terminal and in a pipe."""

import os
import sys
import time
from datetime import UTC, datetime
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_SHORT_S = 1.0
_WIDTH_MAX = 10_000


def console() -> Console:
    """Standard output; in a pipe as wide as its content, so that no cell is cut."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return Console(highlight=False, markup=False, width=_WIDTH_MAX, no_color=True, soft_wrap=True)


def print_table(table: Table, spare: int = 0) -> None:
    """Print without cutting a cell off: only columns that fold may give way, by `spare` in all.

    A line longer than the terminal is wrapped by it, which is better than a number without its end.
    """
    out = console()
    natural = out.measure(table, options=out.options.update(max_width=_WIDTH_MAX)).maximum
    out.width = max(out.width, natural - spare)
    out.print(table)


def open_closed_streams() -> None:
    """Put the null device where a standard stream is closed, which Python shows as None.

    Its number would otherwise go to the next socket or file that is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)


def discard_output() -> None:
    """After a broken pipe: the interpreter would flush standard output once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def moment(ms: int | None) -> str:
    if not ms:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


class ProgressBar:
    """Bytes done, on standard error when that is a terminal and the work takes a while."""

    def __init__(self, total: int | None) -> None:
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        # Without a total the input is typed or followed: a bar would stand in its way.
        self._wanted = total is not None and sys.stderr.isatty()
        self._total = total

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance_to(self, done: int, total: int | None = None) -> None:
        """With a total where it has become another."""
        if not self._wanted:
            return
        if self._progress is None:
            if time.monotonic() - self._begin < _SHORT_S:
                return
            self._progress = Progress(
                BarColumn(),
                DownloadColumn(binary_units=True),
                _Speed(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.add_task("", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)


class _Speed(ProgressColumn):
    """In the units of everything else: the one that comes with the library counts in thousands."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{size(int(speed))}/s")
