"""What a batch of an export is: from how far the lake has topics, and they themselves, to parts for tasks.

The lake must never have a record twice, and never lack one that nobody was told of. So it goes on behind a
jump, and never back at the beginning, as a streaming query does that was told to go on in any case.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.lake.format import LakeError, Lost, Positions
from headrace.lake.format import Range as LakeRange
from headrace.model import CHANNEL_PREFIX, JUMP, Position
from headrace.pipeline.tasks import JobError
from headrace.spark.log_view import LogView, Range, TopicState
from headrace.spark.options import SourceOptions, Topics
from headrace.spark.planning import earlier, find_topics, limit_bytes, parts_of, ranges_between

States = Mapping[str, TopicState]


class Begin(NamedTuple):
    """Where the lake goes on in each topic, and what is gone before that."""

    at: Positions
    lost: list[Lost]
    over: Positions
    """Topics that are no more, and where they ended."""


class Plan(NamedTuple):
    start: Positions
    """Of the topics that the batch changes."""
    end: Positions
    ranges: list[Range]
    parts: list[list[Range]]
    lost: list[Lost]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.ranges)


def find_kept(log: LogView, topics: Topics) -> dict[str, TopicState]:
    """Without topics that begin anew with their server: a table could not go on with them.

    Raises JobError where one of them was named.
    """
    found = find_topics(log, topics)
    for name in topics.names or ():
        if name in found and not found[name].is_kept:
            raise JobError(
                f"topic {name!r} is kept in memory only, and begins anew with the server: no table can go on "
                "with it"
            )
    return {name: state for name, state in found.items() if state.is_kept}


def begin(
    log: LogView, states: States, known: Positions, gone: Iterable[str], table: str = "the lake"
) -> Begin:
    """`known` is how far a table has topics; `gone` names those of them that are not there any more."""
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
    """Topics that have ended and begun again since; a crash gives a new epoch too, but has them jump."""
    return {
        name
        for name, state in states.items()
        if name in known
        and state.end.epoch != known[name].epoch
        and state.end.ordinal - known[name].ordinal < JUMP // 2
    }


def _go_on(log: LogView, state: TopicState, at: Position, table: str) -> Position:
    if at.ordinal <= state.start.ordinal:
        return state.start
    if at.ordinal > state.end.ordinal or at.epoch > state.end.epoch:
        raise _another_log(state, at, table)
    if at.epoch == state.end.epoch:
        return at
    # A crash that lost records gives a topic a new epoch and has it jump: that is the same log still, even
    # where the lake has records that the log has lost. In any other log there is no such jump ahead of us.
    if state.end.ordinal - at.ordinal < JUMP // 2:
        raise _another_log(state, at, table)
    return log.at_offset(state, at.offset)


def _another_log(state: TopicState, at: Position, table: str) -> LakeError:
    return LakeError(
        f"topic {state.name!r} is not the one that {table} has: {table} has it up to ordinal {at.ordinal} "
        f"of epoch {at.epoch}, and it ends at {state.end.ordinal} of epoch {state.end.epoch}. This is "
        "another log, or an older copy of it: name another directory"
    )


def _between(name: str, at: Position, next_at: Position) -> list[Lost]:
    # Nothing was ever stored where a topic has jumped ahead.
    count = (next_at.ordinal - at.ordinal) % JUMP if next_at.ordinal > at.ordinal else 0
    return [Lost(name, at.ordinal, at.ordinal + count)] if count else []


def until(states: States, end: States, known: Positions) -> dict[str, TopicState]:
    """The topics as far as they reached when the job began; later ones are left out.

    A topic may begin behind that by now, perhaps in another life. The job then notes what it has lost up to
    there, and is done with it.
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
) -> Plan:
    """The next batch: nothing in it when there is nothing to do."""
    assert options.bytes_max is not None
    ends = limit_bytes(log, found.at, states, options.bytes_max)
    ranges = sorted(ranges_between(found.at, ends), key=lambda one: one.topic)
    end = {one.topic: one.end for one in ranges}
    # Of a topic that has lost something, the lake goes on behind that, whether or not there is more.
    for one in found.lost:
        end.setdefault(one.topic, found.over.get(one.topic) or found.at[one.topic])
    start = {name: known.get(name) or found.at[name] for name in end}
    return Plan(start, end, ranges, parts_of(log, ranges, options), found.lost)


def lost_sentence(lost: Sequence[Lost]) -> str:
    first = lost[0]
    count = sum(one.end_ordinal - one.ordinal for one in lost)
    names = {one.topic for one in lost}
    more = f" and {len(names) - 1} other topics" if len(names) > 1 else ""
    return (
        f"{count} records of topic {first.topic!r}{more} are gone that the lake has not: retention was "
        "faster; --skip-lost goes on without them, and retention.wait_for lets the log wait for the lake"
    )


def not_over(lost: Iterable[Lost], ended: Collection[str]) -> list[Lost]:
    """Loss that ends an export: not of topics that have ended, and not of channels.

    A channel forgets what all its members have, and ends when they have left: that is normal, and an export
    that nobody waits for comes too late.
    """
    return [
        one for one in lost if one.topic not in ended and not one.topic.startswith(CHANNEL_PREFIX)
    ]


def ended_since(lost: Iterable[Lost], end: Positions, now: States) -> set[str]:
    """Topics that are not, or not any more, in the life that a batch was planned for."""
    names = {one.topic for one in lost}
    return {name for name in names if name not in now or now[name].end.epoch != end[name].epoch}


def missing(planned: Iterable[Range], written: Iterable[LakeRange]) -> list[Lost]:
    """What tasks have left out of what was planned; both in the order of topics and offsets."""
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


def _between_ordinals(name: str, ordinal: int, next_ordinal: int) -> list[Lost]:
    assert next_ordinal >= ordinal, f"records of {name!r} were written twice or out of order"
    return _between(name, Position(0, 0, ordinal), Position(0, 0, next_ordinal))
