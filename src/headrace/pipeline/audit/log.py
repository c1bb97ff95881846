"""The log's side of an audit: a data directory or a server, checked by tasks, and what each topic has."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace.errors import UnknownTopicError
from headrace.log.inspect import open_unchanged
from headrace.log.layout import Layout
from headrace.log.report import Damage, Range
from headrace.log.verify import verify
from headrace.log.verify_segments import Advance, SegmentCheck, SegmentWork
from headrace.model import check_topic_name
from headrace.pipeline.audit_files import Kept
from headrace.pipeline.audit_plan import Finding, Kind
from headrace.pipeline.audit_tasks import (
    Piece,
    PiecesWork,
    SegmentsWork,
    ServedWork,
    check_pieces,
    check_segments,
    check_served,
    sound_segment,
)
from headrace.pipeline.tasks import Progress, Runner
from headrace.spark.log_server import ServerLog
from headrace.spark.log_view import DataLossError
from headrace.spark.log_view import Range as Part
from headrace.spark.options import Place

TASK_BYTES_MAX = 256 << 20
TASK_BYTES_MIN = 8 << 20
"""What a task reads: much more than it costs to start one, and enough of them for all cores."""
TASK_WORKS_MAX = 1000
_TASKS = 32

T = TypeVar("T")

Phase = Callable[[int], Progress | None]
"""Told how many bytes come now; gives whom to tell how much of them is done."""


class LogTopic(NamedTuple):
    epoch: int
    sound: list[Range]
    """What was read, and is right."""
    whole: list[Range]
    """What it has, damaged or not; where it ends, for one that has nothing."""
    findings: list[Finding]


class LogAccount(NamedTuple):
    name: str
    """Where it is."""
    topics: dict[str, LogTopic]
    findings: list[Finding]
    notes: list[str]
    segments: int
    place: Place
    kept: Mapping[str, Sequence[Kept]]
    """Where the bytes of each topic are, for those who compare them."""


def groups(works: Iterable[T], size: Callable[[T], int], total: int) -> Iterator[tuple[T, ...]]:
    """Works that one task does together, in their order."""
    most = min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, total // _TASKS))
    gathered: list[T] = []
    filled = 0
    for work in works:
        if gathered and (filled + size(work) > most or len(gathered) == TASK_WORKS_MAX):
            yield tuple(gathered)
            gathered, filled = [], 0
        gathered.append(work)
        filled += size(work)
    if gathered:
        yield tuple(gathered)


# A directory


def audit_directory(
    directory: Path,
    topics: Sequence[str],
    in_lake: frozenset[str],
    runner: Runner,
    phase: Phase,
) -> LogAccount:
    """Everything that `headrace verify` looks at; segments in tasks."""
    segments = _Segments(runner, phase)
    wanted = _still_there(directory, topics, in_lake)
    found: dict[str, LogTopic] = {}
    account = LogAccount(str(directory), found, [], [], 0, Place(str(directory)), segments.kept)
    if topics and not wanted:
        return account
    report = verify(directory, wanted, check=segments.check)
    for topic in report.topics:
        damaged = [one.range for one in topic.damages if one.range is not None]
        found[topic.name] = LogTopic(
            *(topic.epoch, topic.ranges),
            [*topic.ranges, *damaged] or [_nothing_at(topic.end, topic.end_ordinal)],
            [_finding(one, topic.epoch) for one in topic.damages],
        )
    account.findings.extend(_finding(one) for one in report.damages)
    account.notes.extend(report.notes)
    return account._replace(segments=sum(topic.segments for topic in report.topics))


def _nothing_at(offset: int, ordinal: int) -> Range:
    return Range(offset, offset, ordinal, ordinal)


def _still_there(directory: Path, topics: Sequence[str], in_lake: frozenset[str]) -> Sequence[str]:
    """Without those that only the lake has; a name that nobody knows stays, and is complained about."""
    if not in_lake.intersection(topics):
        return topics
    with open_unchanged(directory) as view:
        return [
            name
            for name in topics
            if name not in in_lake or view.topic(check_topic_name(name)) is not None
        ]


def _finding(damage: Damage, epoch: int | None = None) -> Finding:
    reason = damage.reason
    gone = reason.endswith("missing") or reason.startswith(("no segment", "no entry"))
    kind: Kind = "missing" if gone else "damaged"
    return Finding(kind, reason, damage.file, damage.topic, epoch, damage.range)


class _Segments:
    """Checks segments for `verify`, and remembers where they are."""

    def __init__(self, runner: Runner, phase: Phase) -> None:
        self._runner, self._phase = runner, phase
        self.kept: dict[str, list[Kept]] = {}

    def check(
        self, layout: Layout, works: Sequence[SegmentWork], _: Advance
    ) -> Iterator[SegmentCheck]:
        total = sum(map(_bytes, works))
        root = str(layout.root)
        pieces = [piece for work in works for piece in _pieces(work)]
        tasks = [PiecesWork(root, some) for some in groups(pieces, _piece_bytes, total)]
        results = iter(self._runner.run(tasks, check_pieces, self._phase(total)))
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
        again = [SegmentsWork(root, some) for some in groups(unsound, _bytes, total)]
        for found in self._runner.run(again, check_segments):
            yield from found


def _bytes(work: SegmentWork) -> int:
    return work.segment.end - work.segment.base


def _pieces(work: SegmentWork) -> list[Piece]:
    """A large segment is checked by several tasks."""
    rows = work.segment.rows
    count = max(1, -(-_bytes(work) // TASK_BYTES_MAX))
    step = max(1, -(-rows // count))
    return [Piece(*work, first, min(first + step, rows)) for first in range(0, rows, step)]


def _piece_bytes(piece: Piece) -> int:
    size = piece.segment.end - piece.segment.base
    return size * (piece.last - piece.first) // max(1, piece.segment.rows)


# A server


def audit_server(
    place: Place,
    topics: Sequence[str],
    in_lake: frozenset[str],
    runner: Runner,
    phase: Phase,
) -> LogAccount:
    """What a server gives: it has no word for its catalogue, its journal and the files of its indexes."""
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
    tasks = [ServedWork(place, some) for some in groups(parts, _part_bytes, total)]
    results = iter(runner.run(tasks, check_served, phase(total)))
    found = {name: LogTopic(state.end.epoch, [], [], []) for name, state in sorted(states.items())}
    for part, one in zip(parts, (one for some in results for one in some), strict=True):
        topic = found[part.topic]
        topic.sound.extend(one.ranges)
        topic.findings.extend(_finding(damage, topic.epoch) for damage in one.damages)
        start, end = part.start, part.end
        topic.whole.append(Range(start.offset, end.offset, start.ordinal, end.ordinal))
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
    return LogAccount(place.urls[0], found, [], [note], 0, place, kept)


def _part_bytes(part: Part) -> int:
    return part.bytes


def _split(log: ServerLog, whole: Part) -> Sequence[Part]:
    rest: Part | None = whole
    while rest is not None:
        try:
            return log.split(rest, TASK_BYTES_MAX // 4)
        except DataLossError as loss:
            rest = loss.rest  # retention was faster
    return ()
