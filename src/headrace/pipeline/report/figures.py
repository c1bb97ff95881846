"""Figures of a report: plots in SVG, and numbers, sizes, times and names as text. Pure; times are UTC.

Plots contain no scripts and load nothing; the page defines their colours. A `<title>` describes the element
under the pointer; browsers show it without a script. Callers must escape labels.
"""

import html
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import cycle, groupby
from typing import NamedTuple

from headrace.pipeline.report.data import Line
from headrace.printing import size

WIDTH = 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 10, 26
_STRIP, _STRIP_LEFT = 20, 190
_LABEL = 24
"""Maximum number of characters of a name beside a plot; tables show the whole name."""
_LEVELS = 5
_TICKS = {
    100: (1, 2, 5),
    1_000: (1, 2, 5, 10, 15, 30),
    60_000: (1, 2, 5, 10, 15, 30),
    3_600_000: (1, 2, 3, 6, 12),
    86_400_000: (1, 2, 7, 28, 84, 336, 3360),
}
"""Distances of ticks on the axis of time, as multiples of a unit in milliseconds."""
_TICKS_MS = [unit_ms * count for unit_ms, counts in _TICKS.items() for count in counts]


Place = Callable[[float], float]
"""Function from a point or a value to its coordinate."""


class Over(NamedTuple):
    """Buckets of a plot over time."""

    start_ms: int
    width_ms: int
    points: int

    def x(self, point: float, left: float = _LEFT) -> float:
        return left + (WIDTH - _RIGHT - left) * point / self.points


def stacked(
    lines: Sequence[Sequence[int]], titles: Sequence[str], over: Over, *, binary: bool, label: str
) -> str:
    """Draw areas on top of each other; the first has the first colour, and the last is grey.

    `titles` describe the content of each bucket.
    """
    height = 250
    top = max(map(sum, zip(*lines, strict=True)), default=0)
    ticks = _scale(top, binary=binary)
    bottom, room = height - _BOTTOM, height - _BOTTOM - _TOP

    def y(value: float) -> float:
        return bottom - room * value / max(ticks[-1], 1)

    parts = []
    for value in ticks:
        text = bound(value) if binary else short(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="axis end" x="{_LEFT - 8}" y="{y(value) + 4:.1f}">{text}</text>')
    parts += _time_axis(over, bottom, _LEFT)
    below = [0] * over.points
    for number, line in enumerate(lines):
        above = [low + value for low, value in zip(below, line, strict=True)]
        if any(line):
            kind = "crest" if number == len(lines) - 1 and number else f"c{number}"
            parts.append(f'<path class="{kind}" d="{_area(below, above, over.x, y)}"/>')
        below = above
    for point, title in enumerate(titles):
        left, right = over.x(point), over.x(point + 1)
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
            f'height="{room}"><title>{title}</title></rect>'
        )
    return _wide(_svg(WIDTH, height, parts, label))


def columns(bars: Sequence[tuple[str, int, str]], label: str, *, by_digits: bool = False) -> str:
    """Draw a histogram: each column has a label below, its number above, and a title under the pointer.

    With `by_digits`, the scale is logarithmic: ten times as many are always one step higher.
    """
    width, height, top = 520, 210, max((value for _, value, _ in bars), default=0)

    def part(value: int) -> float:
        return math.log10(value + 1) / math.log10(top + 1) if by_digits else value / top

    bottom, room = height - 34, height - 34 - 22
    step = (width - 8) / max(len(bars), 1)
    parts = [f'<path class="grid" d="M4 {bottom}H{width - 4}"/>']
    every = -(-len(bars) // 11)
    for number, (text, value, title) in enumerate(bars):
        middle = 4 + step * (number + 0.5)
        wide = min(step * 0.82, 46)
        # A small value must stay visible beside large ones.
        tall = max(room * part(value), 1.5) if value else 0
        parts.append(
            f'<rect class="c0" x="{middle - wide / 2:.1f}" y="{bottom - tall:.1f}" '
            f'width="{wide:.1f}" height="{tall:.1f}" rx="2"><title>{title}</title></rect>'
        )
        if value and step > 26:
            parts.append(
                f'<text class="value mid" x="{middle:.1f}" y="{bottom - tall - 6:.1f}">'
                f"{short(value)}</text>"
            )
        if number % every == 0:
            parts.append(f'<text class="axis mid" x="{middle:.1f}" y="{bottom + 18}">{text}</text>')
    return _svg(width, height, parts, label)


def bar(value: float, top: float) -> str:
    """Draw a bar in a cell of a table."""
    part = 100 * value / top if top else 0
    wide = max(part, 0.7) if value else 0
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="c0" width="{wide:.1f}" height="10"/></svg>'
    )


def spark(values: Sequence[int], label: str) -> str:
    """Draw a small line in a cell of a table, scaled to its own highest point."""
    points, top = max(len(values), 1), max(values, default=0)
    area = _area(
        [0] * len(values),
        values,
        lambda point: 200 * point / points,
        lambda value: 30 - 28 * value / max(top, 1),
    )
    return (
        '<svg class="spark" viewBox="0 0 200 31" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><path class="grid" d="M0 30.5H200"/>'
        f'<path class="c0" d="{area}"/></svg>'
    )


def strips(lines: Sequence[Line], over: Over, label: str) -> str:
    """Draw when each topic was busy: darker for more messages, with a line for its longest silence."""
    height = len(lines) * _STRIP + _BOTTOM + 4
    parts = _time_axis(over, len(lines) * _STRIP + 4, _STRIP_LEFT)
    for number, line in enumerate(lines):
        top = number * _STRIP + 4
        track = f"M{_STRIP_LEFT} {top}H{WIDTH - _RIGHT}v{_STRIP - 5}H{_STRIP_LEFT}z"
        topic = line.name if len(line.name) <= _LABEL else f"…{line.name[1 - _LABEL :]}"
        parts += [
            f'<text class="name end" x="{_STRIP_LEFT - 10}" y="{top + 13}">{name(topic)}</text>',
            f'<path class="track" d="{track}"/>',
        ]
        parts += _levels(line.messages_over_time, over, top)
        if line.silence_ms >= over.width_ms:  # a shorter one would not be visible
            begin = (line.silent_from_ms - over.start_ms) / over.width_ms
            left = over.x(begin, _STRIP_LEFT)
            right = over.x(begin + line.silence_ms / over.width_ms, _STRIP_LEFT)
            when = f"{span(line.silence_ms)} from {moment(line.silent_from_ms)}"
            title = f"{name(line.name)}: nothing for {when}"
            parts.append(
                f'<rect class="silence" x="{left:.1f}" y="{top + _STRIP / 2 - 4:.1f}" '
                f'width="{max(right - left, 2):.1f}" height="3" rx="1.5"><title>{title}</title></rect>'
            )
    return _wide(_svg(WIDTH, height, parts, label))


def _levels(values: Sequence[int], over: Over, top: float) -> list[str]:
    """Draw one path for all buckets of the same darkness; join neighbours."""
    most = max(values, default=0)
    found: list[list[str]] = [[] for _ in range(_LEVELS)]
    levels = [
        min(int(_LEVELS * (value / most) ** 0.5), _LEVELS - 1) if value else None
        for value in values
    ]
    for level, neighbours in groupby(range(len(levels)), levels.__getitem__):
        if level is not None:
            points = list(neighbours)
            left, right = over.x(points[0], _STRIP_LEFT), over.x(points[-1] + 1, _STRIP_LEFT)
            found[level].append(f"M{left:.1f} {top}H{right:.1f}v{_STRIP - 5}H{left:.1f}z")
    return [
        f'<path class="c0" opacity="{0.2 + 0.8 * level / (_LEVELS - 1):.2f}" d="{"".join(paths)}"/>'
        for level, paths in enumerate(found)
        if paths
    ]


def _area(below: Sequence[int], above: Sequence[int], x: Place, y: Place) -> str:
    """Return the path of the area between two stepped lines, where they differ."""
    path = []
    for is_area, neighbours in groupby(range(len(above)), lambda at: above[at] > below[at]):
        if is_area:
            points = list(neighbours)
            path.append(f"M{x(points[0]):.1f} {y(below[points[0]]):.1f}")
            path += [f"V{y(above[at]):.1f}H{x(at + 1):.1f}" for at in points]
            path += [f"V{y(below[at]):.1f}H{x(at):.1f}" for at in reversed(points)]
            path.append("z")
    return "".join(path)


def _time_axis(over: Over, bottom: float, left: float) -> list[str]:
    whole = over.width_ms * over.points
    step = next((one for one in _TICKS_MS if whole / one <= 9), _TICKS_MS[-1])
    first = -(-over.start_ms // step) * step
    parts = []
    for ms in range(first, over.start_ms + whole + 1, step):
        at = over.x((ms - over.start_ms) / over.width_ms, left)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
        if left + 20 < at < WIDTH - 24:
            parts.append(
                f'<text class="axis mid" x="{at:.1f}" y="{bottom + 18}">{tick(ms, step)}</text>'
            )
    return parts


def _scale(top: int, *, binary: bool) -> list[float]:
    """Return round numbers from 0 to at least `top`."""
    step = 1.0
    factors = cycle([2] if binary else [2, 2.5, 2])
    while step * 5 < top:
        step *= next(factors)
    count = max(1, -(-top // int(step)))
    return [step * number for number in range(count + 1)]


def _wide(plot: str) -> str:
    """Make the plot scroll on a narrow screen: if it shrank, it would be too small to read."""
    return f'<div class="wide"><div class="over">{plot}</div></div>'


def _svg(width: int, height: int, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


# Text


_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000}
_UNITS = {"d": "day", "h": "hour", "min": "minute", "s": "second"}
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
    counts: list[tuple[int, str]] = []
    for unit, length in _UNITS_MS.items():
        count, ms = divmod(ms, length)
        if count or counts:
            counts.append((int(count), unit))
    # The next unit is shown only if there is something of it.
    shown = counts[:2] if counts[0][0] < 10 else counts[:1]
    return " ".join(f"{count:,} {unit}" for count, unit in shown if count)


def bucket(ms: int) -> str:
    """Format a width for a sentence such as `messages per 10 minutes`."""
    if ms < 1000:
        return f"{ms / 1000:g} seconds"
    unit = next(unit for unit, length in _UNITS_MS.items() if ms >= length)
    count = ms // _UNITS_MS[unit]
    return _UNITS[unit] if count == 1 else f"{count} {_UNITS[unit]}s"


def moment(ms: int, width_ms: int = 1000) -> str:
    """Format a time as precisely as a bucket of that width needs."""
    when = _utc(ms)
    if when is None:
        return f"{ms} ms since 1970"
    if width_ms >= 86_400_000:
        return f"{when:%Y-%m-%d}"
    if width_ms >= 60_000:
        return f"{when:%Y-%m-%d %H:%M}"
    tenths = "" if width_ms >= 1000 else f".{when.microsecond // 100_000}"
    return f"{when:%Y-%m-%d %H:%M:%S}{tenths}"


def tick(ms: int, step_ms: int) -> str:
    """Format a time for an axis: the part that changes between ticks, and the date at the start of a day."""
    when = _utc(ms)
    if when is None:
        return ""
    if step_ms >= 28 * 86_400_000:
        return f"{when:%b %Y}"
    if step_ms >= 86_400_000 or ms % 86_400_000 == 0:
        return f"{when.day} {when:%b}"
    if step_ms >= 60_000:
        return f"{when:%H:%M}"
    return f"{when:%H:%M:%S}" if step_ms >= 1000 else f"{when:%S}.{when.microsecond // 100_000}"


def _utc(ms: int) -> datetime | None:
    """Return the time, or None if no calendar has it, because of a wrong clock."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
