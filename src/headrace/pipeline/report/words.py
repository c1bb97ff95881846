"""Formats numbers, sizes, times and names for the readers of a report. Pure; times are UTC."""

import html
from datetime import UTC, datetime

from headrace.printing import size

_SPANS_MS = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1000))
_SHORT = {"day": "d", "hour": "h", "minute": "min", "second": "s"}
_LARGE = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""Least value that is written in a unit, the unit, and its letter."""


def name(text: str) -> str:
    """Escape a name for a page; a name with control characters is shown as Python would write it."""
    return html.escape(text if text.isprintable() else repr(text))


def short(value: float) -> str:
    """Format a number with three digits, which are enough for a plot."""
    for least, unit, letter in _LARGE:
        # A value that is rounded to a thousand of a unit becomes one of the next unit.
        if value >= least * 0.9995:
            scaled = value / unit
            return f"{scaled:,.0f}{letter}" if scaled >= 999.5 else f"{scaled:.3g}{letter}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def bound(value: float) -> str:
    """Format a size that is mostly a round number of its unit."""
    return size(value).replace(".0", "")


def span(ms: float) -> str:
    """Format a duration in its largest unit and, if that number is small, also in the next unit."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 10_000:
        return f"{ms / 1000:.1f} s".replace(".0", "")
    for place, (unit, length) in enumerate(_SPANS_MS):
        if ms >= length:
            count, rest = divmod(ms, length)
            text = f"{count:,.0f} {_SHORT[unit]}"
            if place + 1 < len(_SPANS_MS) and count < 10:
                smaller, smaller_length = _SPANS_MS[place + 1]
                if more := int(rest // smaller_length):
                    text += f" {more} {_SHORT[smaller]}"
            return text
    raise AssertionError


def bucket(ms: int) -> str:
    """Format a width for a sentence such as `messages per 10 minutes`."""
    if ms < 1000:
        return f"{ms / 1000:g} seconds"
    unit, length = next(one for one in _SPANS_MS if ms >= one[1])
    count = ms // length
    return unit if count == 1 else f"{count} {unit}s"


def moment(ms: int, width_ms: int = 1000) -> str:
    """Format a time as precisely as a bucket of that width needs."""
    try:
        when = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms since 1970"  # from a wrong clock
    if width_ms >= 86_400_000:
        return f"{when:%Y-%m-%d}"
    if width_ms >= 60_000:
        return f"{when:%Y-%m-%d %H:%M}"
    tenths = "" if width_ms >= 1000 else f".{when.microsecond // 100_000}"
    return f"{when:%Y-%m-%d %H:%M:%S}{tenths}"


def tick(ms: int, step_ms: int) -> str:
    """Format a time for an axis: the part that changes between ticks, and the date at the start of a day."""
    try:
        when = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    if step_ms >= 28 * 86_400_000:
        return f"{when:%b %Y}"
    if step_ms >= 86_400_000 or ms % 86_400_000 == 0:
        return f"{when.day} {when:%b}"
    if step_ms >= 60_000:
        return f"{when:%H:%M}"
    return f"{when:%H:%M:%S}" if step_ms >= 1000 else f"{when:%S}.{when.microsecond // 100_000}"
