"""Printing of results as tables. Computes nothing but medians."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from bench.measure import Check, Part, Run, middle

PLAIN_WIDTH = 180  # width of a table that is not printed to a terminal


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def print_part(out: Console, part: Part) -> None:
    if part.runs:
        out.print(_runs(part))
    if part.checks:
        out.print(_checks(part.checks))
    for note in part.notes:
        out.print(f"  {note}", style="dim", highlight=False)
    out.print()


def print_summary(out: Console, parts: Sequence[Part]) -> None:
    checks = [check for part in parts for check in part.checks]
    missed = [check for check in checks if not check.met]
    out.print(f"{len(checks) - len(missed)} of {len(checks)} targets met", style="bold")
    for check in missed:
        out.print(f"  not met: {check.part}: {check.claim}", style="red", highlight=False)


def _runs(part: Part) -> Table:
    table = Table(title=part.title, title_justify="left", title_style="bold")
    table.add_column("server", no_wrap=True)
    for name in ("per s", "ack p50 ms", "ack p99 ms", "CPU µs", "during µs", "peak MiB"):
        table.add_column(name, justify="right")
    table.add_column("load CPU µs", justify="right", style="dim")
    table.add_column("load busy", justify="right", style="dim")
    table.add_column("others", justify="right", style="dim")
    for label, runs in part.runs.items():
        table.add_row(
            label,
            _spread(runs, lambda run: run.rate, _thousands),
            _middle(runs, lambda run: run.ack_p50_ms, _one_digit),
            _middle(runs, lambda run: run.ack_p99_ms, _one_digit),
            _spread(runs, lambda run: run.cpu_us, _micro),
            _middle(runs, lambda run: run.cpu_during_us, _micro),
            _middle(runs, lambda run: run.memory_peak / (1 << 20), _whole),
            _middle(runs, lambda run: run.client_cpu_us, _micro),
            _middle(runs, lambda run: run.client_busy, _percent),
            _middle(runs, lambda run: run.other_busy, _percent),
        )
    return table


def _checks(checks: Sequence[Check]) -> Table:
    table = Table()
    table.add_column("target")
    table.add_column("reached", justify="right")
    table.add_column("min–max", justify="right")
    table.add_column("wanted", justify="right")
    table.add_column("")
    for check in checks:
        sign = "≥" if check.at_least else "≤"
        spread = "" if check.spread is None else f"{check.spread[0]:.3g}–{check.spread[1]:.3g}"
        table.add_row(
            check.claim,
            f"{check.value:.3g} {check.unit}",
            spread,
            f"{sign} {check.limit:.3g} {check.unit}",
            "[green]met[/]" if check.met else "[red]not met[/]",
        )
    return table


def _spread(
    runs: Sequence[Run], value: Callable[[Run], float], show: Callable[[float], str]
) -> str:
    median, least, greatest = middle(runs, value)
    if not median:
        return ""
    return show(median) if len(runs) == 1 else f"{show(median)} ({show(least)}–{show(greatest)})"


def _middle(
    runs: Sequence[Run], value: Callable[[Run], float], show: Callable[[float], str]
) -> str:
    return show(middle(runs, value)[0])


def _thousands(value: float) -> str:
    return f"{value / 1000:,.0f}k"


def _one_digit(value: float) -> str:
    return f"{value:.1f}" if value else ""


def _micro(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
