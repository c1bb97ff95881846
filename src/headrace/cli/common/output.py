"""Output of tables, sizes, times, notes, progress and errors, to a terminal or a pipe.

Functions that need `rich` import it themselves: it takes longer to load than most commands take to run.
"""

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import typer
from typer.exceptions import TyperException

from headrace.errors import HeadraceError
from headrace.printing import for_terminal, printable_json, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def with_hint(reason: str) -> str:
    """Return the reason why a server was not reached, or refuses, with a hint what to do next if known."""
    if "is it running?" in reason:
        return f"{reason} (`headrace serve` starts one)"
    if "broke the protocol" in reason or "the server answered" in reason:
        return f"{reason}; is it the server's address for this protocol?"
    if reason.endswith("the server closed the connection"):
        return f"{reason}; is it the server's address for this protocol, or does it need TLS (figgs://)?"
    if "refuses the credentials" in reason:
        return f"{reason}: give a token that it knows with HEADRACE_TOKEN"
    if "have no grant for" in reason:
        return f"{reason}: give a token that has one with HEADRACE_TOKEN"
    return reason


class UsageError(TyperException):
    """The command line is wrong: exit code 2."""

    exit_code = 2


class CommandError(HeadraceError):
    """The command failed: exit code 1."""


_SHORT_S = 1.0
_WIDTH_MAX = 10_000
_quiet = False


def console() -> "Console":
    """Return a console for standard output; for a pipe it is very wide, so that no cell is cut."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return Console(highlight=False, markup=False, width=_WIDTH_MAX, no_color=True, soft_wrap=True)


def payload_line(data: bytes) -> bytes:
    """Return a line with a payload: its bytes, or what a terminal may show of them."""
    return (for_terminal(data) if sys.stdout.isatty() else data) + b"\n"


def print_json(value: Any) -> None:
    typer.echo(printable_json(value))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and facts in two columns, without breaking them."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, fact in facts.items():
        table.add_row(name, fact)
    _print_unbroken(console(), table)


def print_table(
    rows: Sequence[Mapping[str, str]],
    *,
    right: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print rows of cells by heading, without breaking cells; columns of `right` are aligned to the right.

    On a narrow terminal, columns of `optional` are left out in order. If the table still does not fit, the
    terminal wraps its lines, which is better than a truncated number.
    """
    out = console()
    left_out: list[str] = []
    table = _table(rows, right, left_out)
    for heading in optional:
        if _natural_width(out, table) <= out.width:
            break
        if heading in rows[0]:
            left_out.append(heading)
            table = _table(rows, right, left_out)
    _print_unbroken(out, table)
    if left_out:
        note(f"not shown, for lack of width: {', '.join(left_out)} (a pipe and --json have all)")


def _table(
    rows: Sequence[Mapping[str, str]], right: Collection[str], left_out: Collection[str]
) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    shown = [heading for heading in rows[0] if heading not in left_out]
    for heading in shown:
        table.add_column(heading, justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def _print_unbroken(out: "Console", table: "Table") -> None:
    for column in table.columns:
        column.no_wrap = True
    out.width = max(out.width, _natural_width(out, table))
    out.print(table)


def _natural_width(out: "Console", table: "Table") -> int:
    return out.measure(table, options=out.options.update(max_width=_WIDTH_MAX)).maximum


def be_quiet(quiet: bool) -> None:
    """Set `--quiet`: print results and errors only, without notes and progress bars."""
    global _quiet  # noqa: PLW0603 - one process runs one command
    _quiet = quiet


def is_quiet() -> bool:
    return _quiet


def note(text: str) -> None:
    """Print a text that is not part of the result to standard error, unless `--quiet`."""
    if not _quiet:
        typer.echo(text, err=True)


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream (None in Python).

    Otherwise the next socket or file would get the stream's descriptor number.
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
    """Redirect standard output to the null device after a broken pipe.

    Otherwise the interpreter would flush it again at exit, and report an error.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def discard_unwritable() -> None:
    """Discard output that a closed terminal cannot take: else the interpreter would exit with an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def moment(ms: int | None) -> str:
    if not ms:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


class ProgressBar:
    """A bar of processed bytes on standard error, if that is a terminal and the work takes a while."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance_to(self, done: int, total: int | None) -> None:
        """Show the bytes done. Without a total the input is typed or followed: a bar would disturb it."""
        if not total or _quiet or not sys.stderr.isatty():
            return
        if self._begin_s is None:
            self._begin_s = time.monotonic()
        if self._progress is None:
            if time.monotonic() - self._begin_s < _SHORT_S:
                return
            self._progress = _bytes_and_speed()
            self._progress.add_task("", total=total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)


def _bytes_and_speed() -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        """Speed in the units of `size`: the library's own column counts in thousands."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{size(int(speed))}/s")

    return Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        Speed(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
