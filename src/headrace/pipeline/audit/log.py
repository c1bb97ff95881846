"""The log's side of an audit: tasks check a data directory or a server. Results are joined by topic."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace.errors import UnknownTopicError
from headrace.log.layout import Layout
from headrace.log.verify.checks import Advance, Damage, SegmentCheck, SegmentWork, VerifiedRange
from headrace.log.verify.verify import verify
from headrace.pipeline.audit.files import Kept
from headrace.pipeline.audit.plan import Finding, Kind
from headrace.pipeline.audit.tasks import (
    AuditPiece,
    check_pieces,
    check_segments,
    check_served,
    sound_segment,
)
from headrace.pipeline.tasks import Progress, TaskRunner
from headrace.reader.planning import groups
from headrace.reader.server import ServerLog
from headrace.reader.view import DataLossError, LogLocation
from headrace.reader.view import LogRange as Part

TASK_BYTES_MAX = 256 << 20
TASK_BYTES_MIN = 8 << 20
"""Limits of the bytes per task: a task reads much longer than it takes to start, and all cores have tasks."""
TASK_WORKS_MAX = 1000
_TASKS = 32

T = TypeVar("T")

Phase = Callable[[int], Progress | None]
"""Called with the number of bytes that follow; returns the callback for their progress."""


class LogTopic(NamedTuple):
    epoch: int
    sound: list[VerifiedRange]
    """Ranges that were read and are sound."""
    whole: list[VerifiedRange]
    """Ranges that the topic has, damaged or not; for an empty topic, an empty range at its end."""
    findings: list[Finding]


class LogAccount(NamedTuple):
    name: str | None = None
    """Directory or address of the log; None if no log was checked."""
    place: LogLocation = LogLocation()
    kept: Mapping[str, Sequence[Kept]] = {}
    """Ranges of each topic in the log, for comparing their bytes with the lake."""
    topics: Mapping[str, LogTopic] = {}
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    segments: int = 0


def task_groups(works: Iterable[T], size: Callable[[T], int], total: int) -> list[list[T]]:
    """Return groups of works, in order; one task does each group."""
    most = min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, total // _TASKS))
    return list(groups(works, size, most, TASK_WORKS_MAX))


# A data directory


def audit_directory(
    directory: Path,
    topics: Sequence[str],
    in_lake: frozenset[str],
    runner: TaskRunner,
    phase: Phase,
) -> LogAccount:
    """Check everything that `headrace verify` checks, with tasks for the segments."""
    segments = _Segments(runner, phase)
    report = verify(directory, topics, check=segments.check, may_lack=in_lake)
    found = {}
    for topic in report.topics:
        damaged = [one.range for one in topic.damages if one.range is not None]
        found[topic.name] = LogTopic(
            topic.epoch,
            topic.ranges,
            [*topic.ranges, *damaged] or [_nothing_at(topic.end, topic.end_ordinal)],
            [_finding(one, topic.epoch) for one in topic.damages],
        )
    return LogAccount(
        str(directory),
        LogLocation(str(directory)),
        segments.kept,
        found,
        findings=[_finding(one) for one in report.damages],
        notes=report.notes,
        segments=sum(topic.segments for topic in report.topics),
    )


def _nothing_at(offset: int, ordinal: int) -> VerifiedRange:
    return VerifiedRange(offset, offset, ordinal, ordinal)


def _finding(damage: Damage, epoch: int | None = None) -> Finding:
    reason = damage.reason
    gone = reason.endswith("missing") or reason.startswith(("no segment", "no entry"))
    kind: Kind = "missing" if gone else "damaged"
    return Finding(kind, reason, damage.file, damage.topic, epoch, damage.range)


class _Segments:
    """Segment checks for `verify`, in tasks; keeps the location of each segment."""

    def __init__(self, runner: TaskRunner, phase: Phase) -> None:
        self._runner, self._phase = runner, phase
        self.kept: dict[str, list[Kept]] = {}

    def check(
        self, layout: Layout, works: Sequence[SegmentWork], _: Advance
    ) -> Iterator[SegmentCheck]:
        total = sum(map(_bytes, works))
        pieces = [piece for work in works for piece in _pieces(work)]
        tasks = task_groups(pieces, _piece_bytes, total)
        task = partial(check_pieces, root=layout.root)
        results = self._runner.run(tasks, task, self._phase(total))
        chains = (chain for some in results for chain in some)
        unsound = []
        for work in works:
            name = work.topic.name.decode()
            path = str(layout.segment(work.segment.topic_id, work.segment.base))
            self.kept.setdefault(name, []).append(
                Kept(name, work.segment.base, work.segment.end, path)
            )
            check = sound_segment(layout, work, [next(chains) for _ in _pieces(work)])
            if check is None:
                unsound.append(work)
            else:
                yield check
        again = task_groups(unsound, _bytes, total)
        for found in self._runner.run(again, partial(check_segments, root=layout.root)):
            yield from found


def _bytes(work: SegmentWork) -> int:
    return work.segment.end - work.segment.base


def _pieces(work: SegmentWork) -> list[AuditPiece]:
    """Split a large segment into pieces, for several tasks."""
    rows = work.segment.rows
    count = max(1, -(-_bytes(work) // TASK_BYTES_MAX))
    step = max(1, -(-rows // count))
    return [AuditPiece(*work, first, min(first + step, rows)) for first in range(0, rows, step)]


def _piece_bytes(piece: AuditPiece) -> int:
    size = piece.segment.end - piece.segment.base
    return size * (piece.last - piece.first) // max(1, piece.segment.rows)


# A server


def audit_server(
    place: LogLocation,
    topics: Sequence[str],
    in_lake: frozenset[str],
    runner: TaskRunner,
    phase: Phase,
) -> LogAccount:
    """Check the log that a server serves.

    The server's API does not give access to its catalogue, its journal and its index files, so these are not
    checked.
    """
    with closing(ServerLog(place)) as log:
        states = log.topics(topics or None)
        for name in topics:
            if name not in states and name not in in_lake:
                raise UnknownTopicError(
                    f"there is no topic {name!r} on the server at {place.urls[0]}"
                )
        parts: list[Part] = []
        for name, state in sorted(states.items()):
            if state.start.offset < state.end.offset:
                parts += _split(log, Part(name, state.start, state.end))
    total = sum(part.bytes for part in parts)
    tasks = task_groups(parts, lambda part: part.bytes, total)
    results = runner.run(tasks, partial(check_served, place=place), phase(total))
    found = {name: LogTopic(state.end.epoch, [], [], []) for name, state in sorted(states.items())}
    for part, one in zip(parts, (one for some in results for one in some), strict=True):
        topic = found[part.topic]
        topic.sound.extend(one.ranges)
        topic.findings.extend(_finding(damage, topic.epoch) for damage in one.damages)
        start, end = part.start, part.end
        topic.whole.append(VerifiedRange(start.offset, end.offset, start.ordinal, end.ordinal))
    for name, topic in found.items():
        if not topic.whole:
            end = states[name].end
            topic.whole.append(_nothing_at(end.offset, end.ordinal))
    kept = {
        name: [Kept(name, state.start.offset, state.end.offset)] for name, state in states.items()
    }
    note = (
        "the log was read as the server gives it: its catalogue and its journal were not looked at"
    )
    return LogAccount(place.urls[0], place, kept, found, notes=[note])


def _split(log: ServerLog, whole: Part) -> Sequence[Part]:
    rest: Part | None = whole
    while rest is not None:
        try:
            return log.split(rest, TASK_BYTES_MAX // 4)
        except DataLossError as loss:
            rest = loss.rest  # retention has deleted the start meanwhile
    return ()
