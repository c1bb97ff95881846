"""Plans a batch of an export: from the lake's positions and the state of the topics to parts for tasks.

The lake must never contain a record twice, and never lack a record without a report. When the log has lost
records, the topic's offsets jump ahead (`model.JUMP`): an export continues behind the jump and reports the
loss. It never reads a topic from its beginning again, because that would write records twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.lake.format import LakeError, LostRange, Positions
from headrace.lake.format import RecordRange as LakeRange
from headrace.model import CHANNEL_PREFIX, JUMP, Position
from headrace.pipeline.tasks import JobError
from headrace.reader.planning import (
    SourceOptions,
    TopicSelection,
    earlier,
    find_topics,
    limit_bytes,
    parts_of,
    ranges_between,
)
from headrace.reader.view import LogRange, LogView, TopicState

States = Mapping[str, TopicState]

_LOOKS_LIKE_A_JUMP = JUMP // 2
"""A difference of ordinals from which on it is a jump: no topic has that many records."""


class Begin(NamedTuple):
    """Positions where the lake continues in each topic, and the records that are lost before them."""

    at: Positions
    lost: list[LostRange]
    over: Positions
    """Topics that no longer exist, and the positions where they ended."""


class ExportPlan(NamedTuple):
    start: Positions
    """Start positions of the topics that the batch changes."""
    end: Positions
    ranges: list[LogRange]
    parts: list[list[LogRange]]
    lost: list[LostRange]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.ranges)


def find_kept(log: LogView, topics: TopicSelection) -> dict[str, TopicState]:
    """Return the topics without those of durability memory: they begin anew when their server restarts.

    A table could not continue with such a topic. Raises JobError if one of them was named.
    """
    found = find_topics(log, topics)
    for name in topics.names or ():
        if name in found and not found[name].is_kept:
            raise JobError(
                f"topic {name!r} is kept in memory only, and starts again with the server: it cannot be "
                "exported"
            )
    return {name: state for name, state in found.items() if state.is_kept}


def begin(
    log: LogView, states: States, known: Positions, gone: Iterable[str], table: str = "the lake"
) -> Begin:
    """Find where a table continues: `known` are its positions, `gone` its topics that no longer exist."""
    at: Positions = {}
    lost = []
    for name, state in states.items():
        if name not in known:
            at[name] = state.start
            continue
        at[name] = _go_on(log, state, known[name], table)
        if state.start.ordinal > known[name].ordinal:
            lost += _between(name, known[name], state.start)
    over = log.ended([name for name in gone if name not in states])
    for name, ended in over.items():
        lost += _between(name, known[name], ended)
    return Begin(at, lost, over)


def made_anew(states: States, known: Positions) -> set[str]:
    """Return topics that ended and began again. A crash gives a new epoch too, but makes the topic jump."""
    return {
        name
        for name, state in states.items()
        if name in known
        and state.end.epoch != known[name].epoch
        and state.end.ordinal - known[name].ordinal < _LOOKS_LIKE_A_JUMP
    }


def _go_on(log: LogView, state: TopicState, at: Position, table: str) -> Position:
    if at.ordinal <= state.start.ordinal:
        return state.start
    if at.ordinal > state.end.ordinal or at.epoch > state.end.epoch:
        raise _another_log(state, at, table)
    if at.epoch == state.end.epoch:
        return at
    # A crash that lost records gives a topic a new epoch and makes it jump ahead. It is still the same log,
    # even if the lake has records that the log has lost. Any other log has no such jump ahead of the lake's
    # end.
    if state.end.ordinal - at.ordinal < _LOOKS_LIKE_A_JUMP:
        raise _another_log(state, at, table)
    return log.at_offset(state, at.offset)


def _another_log(state: TopicState, at: Position, table: str) -> LakeError:
    return LakeError(
        f"topic {state.name!r} is not the one that {table} has: {table} has it up to ordinal {at.ordinal} "
        f"of epoch {at.epoch}, and it ends at {state.end.ordinal} of epoch {state.end.epoch}. This is "
        "another log, or an older copy of it: name another directory"
    )


def whole(state: TopicState) -> list[LostRange]:
    """Return all records of a topic as lost."""
    return _between(state.name, state.start, state.end)


def _between(name: str, at: Position, next_at: Position) -> list[LostRange]:
    # A jump of a topic contains no records.
    count = (next_at.ordinal - at.ordinal) % JUMP if next_at.ordinal > at.ordinal else 0
    return [LostRange(name, at.ordinal, at.ordinal + count)] if count else []


def until(states: States, end: States, known: Positions) -> dict[str, TopicState]:
    """Return the topics up to the ends that they had when the job began; leave out newer topics.

    By now, a topic may begin after that end, perhaps with another epoch. The job then notes the records that
    are lost up to that end, and is done with the topic.
    """
    found = {}
    for name, state in states.items():
        if name not in end:
            continue
        last = end[name].end
        is_past = state.start.ordinal >= last.ordinal
        if is_past and name in known and last.ordinal <= known[name].ordinal <= state.end.ordinal:
            continue
        found[name] = state._replace(start=earlier(state.start, last), end=earlier(state.end, last))
    return found


def plan_batch(
    log: LogView, states: States, found: Begin, known: Positions, options: SourceOptions
) -> ExportPlan:
    """Return the next batch; it is empty if there is nothing to export."""
    assert options.bytes_max is not None
    ends = limit_bytes(log, found.at, states, options.bytes_max)
    ranges = sorted(ranges_between(found.at, ends), key=lambda one: one.topic)
    end = {one.topic: one.end for one in ranges}
    # If records of a topic are lost, the lake continues after them, even if no more records follow.
    for one in found.lost:
        end.setdefault(one.topic, found.over.get(one.topic) or found.at[one.topic])
    start = {name: known.get(name) or found.at[name] for name in end}
    return ExportPlan(start, end, ranges, parts_of(log, ranges, options), found.lost)


def lost_sentence(lost: Sequence[LostRange]) -> str:
    first = lost[0]
    count = sum(one.end_ordinal - one.ordinal for one in lost)
    names = {one.topic for one in lost}
    more = f" and {len(names) - 1} other topics" if len(names) > 1 else ""
    return (
        f"retention has deleted {count} records of topic {first.topic!r}{more} before they were exported: "
        "give --skip-lost to continue without them, and set retention.wait_for to make the log wait"
    )


def not_over(lost: Iterable[LostRange], ended: Collection[str]) -> list[LostRange]:
    """Return the losses that stop an export: not those of topics that ended, and not those of channels.

    A channel deletes messages that all its members have, and ends when they have left. That is normal: an
    export that retention does not wait for comes too late.
    """
    return [
        one for one in lost if one.topic not in ended and not one.topic.startswith(CHANNEL_PREFIX)
    ]


def ended_since(lost: Iterable[LostRange], end: Positions, now: States) -> set[str]:
    """Return topics that are gone or have another epoch than the batch was planned for."""
    names = {one.topic for one in lost}
    return {name for name in names if name not in now or now[name].end.epoch != end[name].epoch}


def missing(planned: Iterable[LogRange], written: Iterable[LakeRange]) -> list[LostRange]:
    """Return the planned records that tasks have not written; both in the order of topics and offsets."""
    by_topic: dict[str, list[LakeRange]] = {}
    for one in written:
        by_topic.setdefault(one.topic, []).append(one)
    found = []
    for part in planned:
        ordinal = part.start.ordinal
        for piece in by_topic.get(part.topic, ()):
            found += _between_ordinals(part.topic, ordinal, piece.ordinal)
            ordinal = piece.end_ordinal
        found += _between_ordinals(part.topic, ordinal, part.end.ordinal)
    return found


def _between_ordinals(name: str, ordinal: int, next_ordinal: int) -> list[LostRange]:
    assert next_ordinal >= ordinal, f"records of {name!r} were written twice or out of order"
    return _between(name, Position(0, 0, ordinal), Position(0, 0, next_ordinal))
