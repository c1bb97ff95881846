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
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SHORT_S = 1.0


def console() -> Console:
    """Standard output; in a pipe as wide as its content, so that no cell is cut."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return Console(highlight=False, markup=False, width=10_000, no_color=True, soft_wrap=True)


def discard_output() -> None:
    """After a broken pipe: the interpreter would flush standard output once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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

    def advance_to(self, done: int) -> None:
        if not self._wanted:
            return
        if self._progress is None:
            if time.monotonic() - self._begin < _SHORT_S:
                return
            self._progress = Progress(
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.add_task("", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done)
