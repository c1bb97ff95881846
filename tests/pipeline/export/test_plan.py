"""Next positions of a lake in topics that have grown, lost records, ended, jumped or been recreated."""

from collections.abc import Iterable, Sequence

import pytest

from headrace.lake.format import LakeError, LostRange
from headrace.lake.format import RecordRange as LakeRange
from headrace.model import CHANNEL_PREFIX, JUMP, Position
from headrace.pipeline.export.plan import (
    begin,
    ended_since,
    lost_sentence,
    made_anew,
    missing,
    not_over,
    plan_batch,
    until,
)
from headrace.reader.view import LogRange, TopicState
from headrace.spark.options import parse_source

SIZE = 10
"""Size of each record, in bytes."""


def at(ordinal: int, epoch: int = 1) -> Position:
    return Position(epoch, ordinal * SIZE, ordinal)


def topic(name: str, start: int, end: int, epoch: int = 1) -> TopicState:
    return TopicState(name, at(start, epoch), at(end, epoch))


class Log:
    """Topics of records of one size."""

    def __init__(self, **ended: Position) -> None:
        self._ended = ended

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        return {name: self._ended[name] for name in names if name in self._ended}

    def at_offset(self, state: TopicState, offset: int) -> Position:
        # A topic that has jumped has no records in between.
        if state.end.offset >= JUMP * SIZE > offset >= 100 * SIZE:
            return at(JUMP, state.end.epoch)
        return at(-(-offset // SIZE), state.end.epoch)

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        return [whole]


def options(bytes_max: int = 1 << 30):
    given = {"path": "/x", "subscribePattern": ".*", "maxBytesPerTrigger": str(bytes_max)}
    return parse_source(given, streaming=True)


def plan(states: list[TopicState], known: dict, log: Log | None = None, bytes_max: int = 1 << 30):
    log = log or Log()
    found = {state.name: state for state in states}
    begun = begin(log, found, known, [name for name in known if name not in found])
    return plan_batch(log, found, begun, known, options(bytes_max))


def test_a_topic_that_is_new_to_the_lake_begins_where_it_begins():
    made = plan([topic("b", 3, 7), topic("a", 0, 2)], {})
    assert made.start == {"a": at(0), "b": at(3)}
    assert made.end == {"a": at(2), "b": at(7)}
    assert [one.topic for one in made.ranges] == ["a", "b"]
    assert made.parts == [made.ranges]
    assert made.bytes == 6 * SIZE
    assert not made.lost


def test_a_batch_is_of_topics_that_have_something_new():
    made = plan([topic("a", 0, 5), topic("b", 0, 5)], {"a": at(5), "b": at(4)})
    assert (made.start, made.end) == ({"b": at(4)}, {"b": at(5)})
    assert not plan([topic("a", 0, 5)], {"a": at(5)}).end


def test_a_batch_has_about_as_many_bytes_as_it_may():
    made = plan([topic("a", 0, 100), topic("b", 0, 3)], {}, bytes_max=20 * SIZE)
    assert made.end == {"a": at(17), "b": at(3)}


def test_what_retention_has_taken_is_lost():
    made = plan([topic("a", 4, 9)], {"a": at(1)})
    assert made.lost == [LostRange("a", 1, 4)]
    assert (made.start["a"], made.ranges[0].start, made.end["a"]) == (at(1), at(4), at(9))
    assert lost_sentence(made.lost).startswith("retention has deleted 3 records of topic 'a'")
    several = lost_sentence([*made.lost, LostRange("b", 0, 2)])
    assert several.startswith(
        "retention has deleted 5 records of topic 'a' and 1 other topics before"
    )


def test_a_topic_made_anew_goes_on_where_the_old_one_ended():
    assert not plan([topic("a", 5, 9, epoch=2)], {"a": at(5)}).lost
    assert plan([topic("a", 5, 9, epoch=2)], {"a": at(3)}).lost == [LostRange("a", 3, 5)]


def test_what_a_topic_had_that_is_no_more_is_lost():
    made = plan([], {"a": at(3), "b": at(2)}, Log(a=at(5), b=at(2)))
    assert made.lost == [LostRange("a", 3, 5)]
    assert (made.start, made.end, made.ranges) == ({"a": at(3)}, {"a": at(5)}, [])


def test_a_topic_that_jumped_after_a_crash_goes_on_behind_what_the_lake_has():
    jumped = TopicState("a", at(0, 2), at(JUMP + 9, 2))
    # Everything that the lake has survived: the rest of the old records follows, then those after the jump.
    assert plan([jumped], {"a": at(90)}).ranges[0].start == at(90, 2)
    # The lake has more than survived: nothing is lost, and nothing comes twice.
    made = plan([jumped], {"a": at(120)})
    assert made.ranges[0].start == at(JUMP, 2)
    assert not made.lost
    # Not even the topic's start exists any more.
    assert not plan([TopicState("a", at(JUMP, 2), at(JUMP + 9, 2))], {"a": at(0)}).lost


@pytest.mark.parametrize(
    "state",
    [topic("a", 0, 4), topic("a", 0, 4, epoch=3), topic("a", 0, 50, epoch=3), topic("a", 0, 50, 0)],
    ids=["ends before", "other epoch, ends before", "other epoch", "older epoch"],
)
def test_another_log_is_refused(state):
    with pytest.raises(LakeError, match="is another log, or an older copy"):
        plan([state], {"a": at(5)})


def test_an_export_to_now_ends_where_topics_ended_when_it_began():
    now = {"a": topic("a", 0, 9), "b": topic("b", 0, 2)}
    assert until(now, {"a": topic("a", 0, 4)}, {}) == {"a": topic("a", 0, 4)}


def test_an_export_to_now_is_soon_done_with_a_topic_that_began_again_since():
    then, now = {"a": topic("a", 0, 4)}, {"a": topic("a", 6, 9, epoch=2)}
    # A loss up to there is noted once, however often the topic ends and begins again.
    states = until(now, then, {"a": at(1)})
    assert states == {"a": topic("a", 4, 4)}
    assert plan(list(states.values()), {"a": at(1)}).lost == [LostRange("a", 1, 4)]
    assert until(now, then, {"a": at(4)}) == {}
    assert until(now, then, {"a": at(6)}) == {}
    # A log that ends before the lake is another log, and is not skipped.
    assert until({"a": topic("a", 0, 4)}, then, {"a": at(6)})


def test_a_topic_that_ended_and_a_channel_end_no_export():
    room = f"{CHANNEL_PREFIX}room"
    lost = [LostRange("a", 1, 4), LostRange("b", 1, 4), LostRange(room, 1, 4)]
    now = {"a": topic("a", 4, 9, epoch=2), "b": topic("b", 4, 9), room: topic(room, 4, 9)}
    known = dict.fromkeys(now, at(1))
    assert made_anew(now, known) == {"a"}
    assert not_over(lost, made_anew(now, known)) == [LostRange("b", 1, 4)]
    assert ended_since(lost, known, now) == {"a"}
    assert ended_since(lost, known, {}) == now.keys()
    # After a crash, a topic jumps to another epoch. That is not an end of the topic.
    assert made_anew({"a": TopicState("a", at(0, 2), at(JUMP + 9, 2))}, known) == set()


def test_what_tasks_have_left_out_is_found():
    def piece(name: str, first: int, last: int) -> LakeRange:
        return LakeRange(name, 1, first * SIZE, last * SIZE, first, last, 0)

    planned = [LogRange("a", at(0), at(9)), LogRange("b", at(5), at(JUMP + 7))]
    whole = [piece("a", 0, 4), piece("a", 4, 9), piece("b", 5, 6), piece("b", JUMP + 6, JUMP + 7)]
    assert missing(planned, whole) == []
    assert missing(planned, whole[1:]) == [LostRange("a", 0, 4)]
    assert missing(planned, whole[:1]) == [LostRange("a", 4, 9), LostRange("b", 5, 7)]
    with pytest.raises(AssertionError, match="twice or out of order"):
        missing(planned, [*whole[:2], whole[1]])
