"""Assignment of records to tasks: shares of topics, parts of ranges, and the start of a read."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.model import JUMP, Position
from headrace.reader.planning import (
    CUT_TOPICS_MAX,
    SourceOptions,
    Where,
    check_positions,
    gone_error,
    kept,
    limit_bytes,
    limit_rows,
    locate,
    parts_of,
    plan_batch,
    ranges_between,
)
from headrace.reader.view import DamagedRange, DataLossError, LogBlock, LogRange, TopicState
from headrace.spark.options import parse_source
from tests.reader.conftest import Filled
from tests.reader.test_logs import NAMES, read

RECORD_BYTES = 10


def at(ordinal: int) -> Position:
    return Position(1, ordinal * RECORD_BYTES, ordinal)


class EvenLog:
    """A log of records of ten bytes each from ordinal 0 on; it counts requests."""

    def __init__(self, ends: dict[str, int]) -> None:
        self.states = {name: TopicState(name, at(0), at(end)) for name, end in ends.items()}
        self.asked = 0

    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        return {n: s for n, s in self.states.items() if names is None or n in names}

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        return {}

    def wait(self, timeout_s: float) -> None: ...

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        return self.at_ordinal(topic, -(-offset // RECORD_BYTES))

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        self.asked += 1
        return at(min(max(0, ordinal), topic.end.ordinal))

    def at_time(self, topic: TopicState, ms: int) -> Position:
        return self.at_ordinal(topic, ms)

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        step = max(1, bytes_max // RECORD_BYTES)
        edges = [*range(whole.start.ordinal, whole.end.ordinal, step), whole.end.ordinal]
        return [LogRange(whole.topic, at(one), at(two)) for one, two in pairwise(edges)]

    def read(self, part: LogRange) -> Iterator[LogBlock | DamagedRange]:
        raise NotImplementedError

    def close(self) -> None: ...


def options(**given: str) -> SourceOptions:
    return parse_source({"path": "/d", "subscribePattern": ".*"} | given, streaming=False)


# Shares

backlogs = st.dictionaries(
    st.integers(0, 300).map(str), st.integers(0, 2000), min_size=1, max_size=200
)


@given(backlogs, st.integers(1, 5000))
def test_a_batch_has_as_many_rows_as_its_limit_allows(backlog, rows_max):
    log = EvenLog(backlog)
    start = {name: at(0) for name in backlog}
    ends = limit_rows(log, start, log.states, rows_max)
    taken = {name: ends[name].ordinal for name in backlog}
    assert all(0 <= taken[name] <= backlog[name] for name in backlog)
    assert sum(taken.values()) == min(rows_max, sum(backlog.values()))
    assert log.asked <= CUT_TOPICS_MAX


@given(backlogs, st.integers(1, 5000))
def test_what_fits_into_the_limit_is_all_taken(backlog, rows_max):
    log = EvenLog(backlog)
    ends = limit_rows(log, {name: at(0) for name in backlog}, log.states, rows_max)
    if sum(backlog.values()) <= rows_max:
        assert {name: end.ordinal for name, end in ends.items()} == backlog
        assert log.asked == 0


@given(backlogs, st.integers(1, 20000))
def test_a_batch_has_few_more_bytes_than_its_limit_and_at_least_one_record(backlog, bytes_max):
    log = EvenLog(backlog)
    ends = limit_bytes(log, {name: at(0) for name in backlog}, log.states, bytes_max)
    taken = sum(end.offset for end in ends.values())
    assert taken <= bytes_max + CUT_TOPICS_MAX * RECORD_BYTES
    assert taken > 0 or not any(backlog.values())


@given(backlogs, st.integers(1, 500))
def test_batch_after_batch_everything_is_read(backlog, rows_max):
    log = EvenLog(backlog)
    start = {name: at(0) for name in backlog}
    left = sum(backlog.values())
    for _ in range(left):
        if start == {name: state.end for name, state in log.states.items()}:
            break
        start = limit_rows(log, start, log.states, max(rows_max, left // 20))
    assert {name: position.ordinal for name, position in start.items()} == backlog


def test_a_large_topic_does_not_keep_small_ones_waiting():
    log = EvenLog({"large": 1_000_000} | {f"small{n}": 5 for n in range(10)})
    ends = limit_rows(log, {name: at(0) for name in log.states}, log.states, 1000)
    assert all(ends[f"small{n}"].ordinal == 5 for n in range(10))
    assert ends["large"].ordinal == 950


def test_large_topics_get_alike():
    log = EvenLog({"a": 10_000, "b": 20_000, "c": 30_000})
    ends = limit_rows(log, {name: at(0) for name in log.states}, log.states, 3000)
    assert {end.ordinal for end in ends.values()} == {1000}


def test_of_very_many_large_topics_those_with_most_come_first():
    log = EvenLog({f"t{n:03}": 100 + n for n in range(500)})
    ends = limit_rows(log, {name: at(0) for name in log.states}, log.states, 1000)
    taken = {name for name, end in ends.items() if end.ordinal}
    assert taken == {f"t{n:03}" for n in range(500 - CUT_TOPICS_MAX, 500)}


def test_very_many_equal_topics_fill_the_batch():
    log = EvenLog({f"t{n:03}": 10 for n in range(500)})
    ends = limit_rows(log, {name: at(0) for name in log.states}, log.states, 4000)
    taken = [end.ordinal for end in ends.values()]
    assert (sum(taken), taken.count(10)) == (4000, 6 * CUT_TOPICS_MAX)


# Parts


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 500)), min_size=1, max_size=20),
    st.integers(1, 3000),
    st.integers(1, 40),
)
def test_tasks_cover_the_ranges_exactly(ranges, partition_bytes, partitions_min):
    wanted = [
        LogRange(f"t{number}", at(start), at(start + count))
        for number, (start, count) in enumerate(ranges)
    ]
    log = EvenLog({})
    given_options = options(
        maxBytesPerPartition=str(partition_bytes), minPartitions=str(partitions_min)
    )
    tasks = parts_of(log, wanted, given_options)
    assert all(tasks)
    parts = [part for task in tasks for part in task]
    for one in wanted:
        own = [part for part in parts if part.topic == one.topic]
        assert (own[0].start, own[-1].end) == (one.start, one.end)
        assert [part.start for part in own[1:]] == [part.end for part in own[:-1]]
    for task in tasks:
        assert sum(part.bytes for part in task) <= max(partition_bytes, RECORD_BYTES)


def test_nothing_to_read_is_no_task():
    assert parts_of(EvenLog({}), [], options()) == []


def test_there_are_as_many_tasks_as_asked_for():
    ranges = [LogRange("a", at(0), at(1000)), LogRange("b", at(0), at(1000))]
    assert len(parts_of(EvenLog({}), ranges, options(minPartitions="8"))) >= 8


def test_small_topics_share_a_task():
    ranges = [LogRange(f"t{n}", at(0), at(3)) for n in range(1000)]
    assert len(parts_of(EvenLog({}), ranges, options())) == 1


@pytest.mark.parametrize("size", ["1", "3000", "100000"])
def test_tasks_of_a_real_log_read_it_exactly(log, filled: Filled, size):
    ranges = plan_batch(log, options(maxBytesPerPartition=size))
    found: dict[str, list[object]] = {name: [] for name in NAMES}
    for task in parts_of(log, ranges, options(maxBytesPerPartition=size)):
        for part in task:
            found[part.topic] += read(log, part)
    assert found == filled.records


# Start and end positions


STATE = TopicState("t", at(10), at(20))


@pytest.mark.parametrize(
    ("where", "ordinal"),
    [
        (Where(-2), 10),
        (Where(-1), 20),
        (Where(topics={"t": 150}), 15),
        (Where(topics={"t": 151}), 16),
        (Where(topics={"t": -1}), 20),
        (Where(topics={"other": 0}), 10),
        (Where(topics={"t": 10_000}), 20),
        (Where(ms=12), 12),
    ],
)
def test_a_read_begins_where_the_user_says(where, ordinal):
    assert locate(EvenLog({}), STATE, where, options(), -2) == at(ordinal)


def test_an_offset_that_is_no_longer_kept_is_an_error_unless_the_user_does_not_mind():
    where = Where(topics={"t": 99})
    with pytest.raises(DataLossError, match=r"'t': offset 99 is no longer kept, the oldest is 100"):
        locate(EvenLog({}), STATE, where, options(), -2)


def test_a_topic_that_is_not_there_is_an_error():
    chosen = parse_source({"path": "/d", "subscribe": "a,b"}, streaming=False)
    with pytest.raises(OptionError, match="there is no topic 'b'"):
        plan_batch(EvenLog({"a": 1}), chosen)


def test_topics_without_anything_to_read_take_no_part():
    chosen = options(startingTimestamp="5", endingTimestamp="8")
    assert plan_batch(EvenLog({"a": 3, "b": 7, "c": 9}), chosen) == [
        LogRange("b", at(5), at(7)),
        LogRange("c", at(5), at(8)),
    ]


def test_what_is_gone_is_counted():
    start = {"t": at(4), "u": at(12), "other": at(0)}
    states = {"t": STATE, "u": STATE._replace(name="u")}
    with pytest.raises(DataLossError, match=r"6 records of topic 't' are gone .* retention"):
        check_positions(start, states, None)
    error = gone_error({"t": 6, "u": 1})
    assert "7 records of topic 't' and 1 other topics are gone" in error
    assert "failOnDataLoss" in error


def of(epoch: int, ordinal: int) -> Position:
    return at(ordinal)._replace(epoch=epoch)


def test_a_topic_made_anew_has_begun_where_the_old_one_ended():
    anew = {"t": TopicState("t", of(2, 10), of(2, 20))}
    check_positions({"t": of(1, 10)}, anew, None)
    with pytest.raises(
        DataLossError, match=r"3 records of topic 't' .* it was destroyed and created again"
    ):
        check_positions({"t": of(1, 7)}, anew, None)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_position_of_another_life_inside_of_this_one_is_of_another_log(epoch):
    other = {"t": TopicState("t", of(2, 0), of(2, 20))}
    with pytest.raises(DataLossError, match=f"its epoch is 2, the checkpoint's {epoch}"):
        check_positions({"t": of(epoch, 5)}, other, None)


def test_a_batch_that_was_planned_must_be_there_up_to_its_end():
    states = {"t": TopicState("t", at(0), at(13))}
    check_positions({"t": at(10)}, states, {"t": at(13)})
    with pytest.raises(DataLossError, match="ends at ordinal 13, before the query's 20"):
        check_positions({"t": at(10)}, states, {"t": at(20)})
    with pytest.raises(DataLossError, match=r"10 records of topic 't' .* it was destroyed"):
        check_positions({"t": at(10)}, {}, {"t": at(20)})


@pytest.mark.parametrize(
    ("position", "found"),
    [
        (at(5), at(5)),
        (of(0, 0), of(0, 0)),
        (of(0, 5), of(0, 5)),
        (of(0, 5)._replace(offset=51), at(0)),
        (at(21), at(0)),
        (of(3, 30), at(0)),
    ],
)
def test_who_wants_to_go_on_whatever_is_missing_goes_on_where_it_can(position, found):
    log = EvenLog({"t": 20})
    assert kept(log, log.topics(["t"])["t"], position) == found


def test_only_what_moved_is_read():
    start = {"a": at(1), "b": at(2)}
    assert ranges_between(start, {"a": at(1), "b": at(5)}) == [LogRange("b", at(2), at(5))]


def jumped(ordinal: int, jumps: int = 1) -> Position:
    """Return the same position as `at`, after jumps of the log."""
    return Position(2, ordinal * RECORD_BYTES + jumps * JUMP, ordinal + jumps * JUMP)


def test_bytes_of_a_range_leave_jumps_out() -> None:
    assert LogRange("a", at(2), jumped(12)).bytes == 10 * RECORD_BYTES
    assert LogRange("a", at(2), jumped(12, 5)).bytes == 10 * RECORD_BYTES
    assert LogRange("a", at(12), jumped(12)).bytes == 0


def test_a_range_that_is_only_a_jump_is_a_task_s_too() -> None:
    class WholeLog(EvenLog):
        def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
            return [whole]

    empty = LogRange("a", at(12), jumped(12))
    assert parts_of(WholeLog({"a": 12}), [empty], options()) == [[empty]]


def test_records_that_are_gone_are_counted_without_jumps() -> None:
    with pytest.raises(DataLossError, match=r"^5 records of topic 'a' are gone"):
        check_positions({"a": at(7)}, {"a": TopicState("a", jumped(12), jumped(20))}, None)
    with pytest.raises(DataLossError, match=r"^perhaps records of topic 'a' are gone"):
        check_positions({"a": at(12)}, {"a": TopicState("a", jumped(12), jumped(20))}, None)
