"""Data of a report: counts by topic, over time and by size, merged from the counts of tasks. Pure.

Tasks read the records twice, because the range of times is not known before:

    runs ──look──▶ Overview, one per task ──overview──▶ one Overview ──plan──▶ ReportPlan: buckets, topics
    runs ──count──▶ one array per task ──sum──▶ one line per topic of the plan, and one for all others

The result of a task grows with the number of its topics, never with the number of its records.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headrace.model import RECORD_HEADER_BYTES, Position

POINTS_MAX = 200
"""Maximum number of buckets of a line: more than the eye can tell apart, few enough for a page."""

TOPICS_MAX = 20
"""Maximum number of topics with their own line; all other topics are `others`."""

WIDTHS_MS = (
    *(100, 500, 1_000, 5_000, 10_000, 30_000, 60_000, 300_000, 600_000, 1_800_000, 3_600_000),
    *(10_800_000, 21_600_000, 43_200_000, 86_400_000, 604_800_000, 2_419_200_000),
    *(29_030_400_000, 290_304_000_000),
)
"""Possible widths of a bucket. Times in the log are not precise enough for smaller ones."""

PAUSES_MS = (100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000)
"""Bounds of the histogram of pauses between two messages of a topic."""

_SIZES = 32
"""Number of bars in the histogram of sizes, one per power of two; the largest payload needs far fewer."""

Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Records of one topic in their order, grouped by time."""

    topic: str
    offset: int
    end: int
    counts: Numbers
    bytes: Numbers
    """Bytes of payloads."""
    ms: Numbers


class TopicCounts(Struct, frozen=True):
    """Counts of one topic, or of its part that one task has read."""

    name: str
    messages: int
    bytes: int
    first_ms: int
    last_ms: int
    silence_ms: int
    """Longest pause between two messages."""
    silent_from_ms: int


class TopicPart(TopicCounts, frozen=True):
    offset: int
    """Start of the part: parts of a topic are joined in this order."""
    end: int


class Overview(NamedTuple):
    """Counts of one task, with the parts of topics that it has read; or of all, the busiest topic first."""

    topics: list[TopicPart]
    sizes: Numbers
    pauses: Numbers
    damaged: int = 0
    """Number of ranges that are left out because their index is damaged."""


class ReportPlan(NamedTuple):
    """Buckets and lines into which messages are counted."""

    start_ms: int
    width_ms: int
    points: int
    topics: tuple[str, ...]


# Output format


class Line(TopicCounts, frozen=True):
    """A topic; the line with the name "" is for all topics without their own line."""

    messages_over_time: list[int]
    bytes_over_time: list[int]


class Bar(Struct, frozen=True):
    """Number of values from one bound to below another; `below` is None without an upper bound."""

    least: int
    below: int | None
    count: int


class ReaderLag(Struct, frozen=True):
    """Named reader with cursors on the server."""

    name: str
    topics: int
    lag_records: int
    lag_bytes: int
    gone_records: int
    moved_ms: int
    slowest_topic: str


class ChannelMember(Struct, frozen=True):
    processor: str
    channel: str
    present: bool
    lag_messages: int
    missed_messages: int


class ChannelsSeen(Struct, frozen=True):
    channels: int
    more: bool
    """True if there are more channels, which were not examined."""
    with_log: int
    messages: int
    bytes: int
    trimmed: int
    """Number of channels with a log whose beginning is trimmed."""
    destroyed: int
    """Number of known channels that have no log now."""
    scheduled: int
    """Number of channels that are scheduled for destruction."""
    members: list[ChannelMember]
    """Members, the slowest first."""
    members_in_all: int


class ServerSeen(Struct, frozen=True):
    """Data that only a running server has."""

    duplicates_refused: int
    channels_trimmed: int
    channels_destroyed: int
    readers: list[ReaderLag]
    readers_in_all: int
    channels: ChannelsSeen


class ReportData(Struct, frozen=True, kw_only=True):
    format: int = 1
    made_ms: int
    log: str
    lake: str | None
    messages: int
    bytes: int
    topics_in_all: int
    first_ms: int | None
    last_ms: int | None
    bucket_ms: int
    buckets_from_ms: int
    buckets: int
    topics: list[Line]
    others: Line | None
    others_in_all: int
    sizes: list[Bar]
    sizes_are_means: bool
    """True if some sizes are only known as the mean of messages that were stored together."""
    pauses_ms: list[Bar]
    damaged: int
    """Number of ranges of the log that are left out because their index is damaged."""
    server: ServerSeen | None


# From rows to runs


def runs_of(topic: str, start: Position, end: Position, rows: npt.NDArray[np.void]) -> Runs:
    """Convert index rows to runs, without the parts outside of two positions: rows may reach over both."""
    ordinals, offsets = rows["ordinal"].astype(np.int64), rows["offset"].astype(np.int64)
    counts = _inside(ordinals, rows["count"], start.ordinal, end.ordinal)
    lengths = _inside(offsets, rows["length"], start.offset, end.offset)
    there = counts > 0
    counts, lengths = counts[there], lengths[there]
    payloads = lengths - counts * RECORD_HEADER_BYTES
    if not len(rows):
        return Runs(topic, start.offset, start.offset, counts, payloads, counts)
    begin = max(int(offsets[0]), start.offset)
    stop = min(int(offsets[-1]) + int(rows["length"][-1]), end.offset)
    return Runs(topic, begin, stop, counts, payloads, rows["ms"].astype(np.int64)[there])


def _inside(begins: Numbers, lengths: npt.NDArray[np.void], first: int, end: int) -> Numbers:
    ends = begins + lengths.astype(np.int64)
    found: Numbers = np.maximum(np.minimum(ends, end) - np.maximum(begins, first), 0)
    return found


# First pass


def look(runs: Iterable[Runs]) -> Overview:
    # The records between parts that do not touch belong to another task.
    return overview((_look_at(one) for one in runs if len(one.counts)), only_touching=True)


def _look_at(one: Runs) -> Overview:
    messages = int(one.counts.sum())
    between = np.diff(one.ms)
    longest = int(np.argmax(between)) if len(between) else 0
    part = TopicPart(
        name=one.topic,
        messages=messages,
        bytes=int(one.bytes.sum()),
        first_ms=int(one.ms[0]),
        last_ms=int(one.ms[-1]),
        silence_ms=int(between[longest]) if len(between) else 0,
        silent_from_ms=int(one.ms[longest]),
        offset=one.offset,
        end=one.end,
    )
    # The number of a bar is that of the bits of the mean size, 0 for empty payloads.
    _, bits = np.frexp((one.bytes // one.counts).astype(np.float64))
    sizes = np.bincount(bits, one.counts, _SIZES).astype(np.int64)
    pauses = _pauses(between)
    pauses[0] += messages - len(one.counts)
    return Overview([part], sizes, pauses)


def _pauses(lengths_ms: Numbers | list[int]) -> Numbers:
    found: Numbers = np.bincount(
        np.searchsorted(PAUSES_MS, lengths_ms, "right"), None, len(PAUSES_MS) + 1
    )
    return found


def _joined(
    parts: Iterable[TopicPart], *, only_touching: bool
) -> tuple[list[TopicPart], list[int]]:
    """Join the parts of each topic; also return the lengths of the pauses between joined parts."""
    found: list[TopicPart] = []
    pauses: list[int] = []
    for part in sorted(parts, key=lambda one: (one.name, one.offset)):
        before = found[-1] if found and found[-1].name == part.name else None
        if before is None or (only_touching and before.end != part.offset):
            found.append(part)
            continue
        pause = max(0, part.first_ms - before.last_ms)
        pauses.append(pause)
        silence = max(
            (before.silence_ms, before.silent_from_ms),
            (pause, before.last_ms),
            (part.silence_ms, part.silent_from_ms),
            key=lambda one: one[0],
        )
        found[-1] = _together(part.name, [before, part], *silence)
    return found, pauses


def _together(
    name: str, parts: Sequence[TopicPart], silence_ms: int, silent_from_ms: int
) -> TopicPart:
    return TopicPart(
        name=name,
        messages=sum(part.messages for part in parts),
        bytes=sum(part.bytes for part in parts),
        first_ms=min(part.first_ms for part in parts),
        last_ms=max(part.last_ms for part in parts),
        silence_ms=silence_ms,
        silent_from_ms=silent_from_ms,
        offset=parts[0].offset,
        end=parts[-1].end,
    )


def overview(seen: Iterable[Overview], *, only_touching: bool = False) -> Overview:
    """Merge results; with `only_touching`, join two parts of a topic only if nothing lies between them."""
    parts: list[TopicPart] = []
    damaged = 0
    sizes = np.zeros(_SIZES, np.int64)
    pauses = np.zeros(len(PAUSES_MS) + 1, np.int64)
    for one in seen:
        parts += one.topics
        sizes += one.sizes
        pauses += one.pauses
        damaged += one.damaged
    topics, between = _joined(parts, only_touching=only_touching)
    pauses += _pauses(between)
    topics.sort(key=lambda part: (-part.messages, -part.bytes, part.name))
    return Overview(topics, sizes, pauses, damaged)


def plan(overview: Overview) -> ReportPlan:
    if not overview.topics:
        return ReportPlan(0, WIDTHS_MS[0], 0, ())
    first = min(part.first_ms for part in overview.topics)
    last = max(part.last_ms for part in overview.topics)
    width = next((w for w in WIDTHS_MS if last // w - first // w < POINTS_MAX), WIDTHS_MS[-1])
    start = first // width
    # A wrong clock may give times that are further apart than all of history: limit the points.
    points = min(last // width - start + 1, POINTS_MAX)
    names = tuple(part.name for part in overview.topics[:TOPICS_MAX])
    return ReportPlan(start * width, width, points, names)


# Second pass


def count(runs: Iterable[Runs], plan: ReportPlan) -> Numbers:
    """Return messages and bytes: a line for each topic of the plan, and a last line for all other topics."""
    counts = np.zeros((2, len(plan.topics) + 1, plan.points), np.int64)
    lines = {name: number for number, name in enumerate(plan.topics)}
    for one in runs:
        line = lines.get(one.topic, len(lines))
        places = (one.ms - plan.start_ms) // plan.width_ms
        # Records that arrived since the first pass are left out if they are in no existing bucket.
        inside = (places >= 0) & (places < plan.points)
        places = places[inside]
        for sums, what in zip(counts, (one.counts, one.bytes), strict=True):
            sums[line] += np.bincount(places, what[inside], plan.points).astype(np.int64)
    return counts


# Results of both passes


def report(
    overview: Overview,
    plan: ReportPlan,
    counts: Iterable[Numbers],
    *,
    made_ms: int,
    log: str,
    lake: str | None = None,
    sizes_are_means: bool = True,
    server: ServerSeen | None = None,
) -> ReportData:
    """Make the report from the overview, and from what all tasks have counted."""
    busiest, rest = overview.topics[: len(plan.topics)], overview.topics[len(plan.topics) :]
    # A common silence of many topics would say nothing about any of them.
    parts = [*busiest, _together("", rest, 0, 0)] if rest else busiest
    messages, sizes = sum(counts, start=count([], plan)).tolist()
    lines = [
        Line(*(getattr(part, field) for field in TopicCounts.__struct_fields__), *over_time)
        for part, *over_time in zip(parts, messages, sizes, strict=False)
    ]
    used = np.flatnonzero(overview.sizes)
    first, last = (used[0], used[-1] + 1) if len(used) else (0, 0)
    return ReportData(
        made_ms=made_ms,
        log=log,
        lake=lake,
        messages=sum(part.messages for part in overview.topics),
        bytes=sum(part.bytes for part in overview.topics),
        topics_in_all=len(overview.topics),
        first_ms=min((part.first_ms for part in overview.topics), default=None),
        last_ms=max((part.last_ms for part in overview.topics), default=None),
        bucket_ms=plan.width_ms,
        buckets_from_ms=plan.start_ms,
        buckets=plan.points,
        topics=lines[: len(busiest)],
        others=lines[-1] if rest else None,
        others_in_all=len(rest),
        sizes=_bars(overview.sizes, [0, *(1 << bit for bit in range(_SIZES - 1))])[first:last],
        sizes_are_means=sizes_are_means,
        pauses_ms=_bars(overview.pauses, [0, *PAUSES_MS]),
        damaged=overview.damaged,
        server=server,
    )


def _bars(found: Numbers, bounds: Sequence[int]) -> list[Bar]:
    ends = [*bounds[1:], None]
    return [Bar(least, end, n) for least, end, n in zip(bounds, ends, found.tolist(), strict=True)]
