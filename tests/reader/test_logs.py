"""One contract for both views of a log, files and server: topics, positions, parts, records as published."""

from collections.abc import Iterator
from contextlib import closing
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.model import Position
from headrace.reader.decode import DecodedRecords, decode
from headrace.reader.files import FileLog
from headrace.reader.http_client import ServerError
from headrace.reader.server import ServerLog
from headrace.reader.view import DataLossError, LogLocation, LogRange, LogView, TopicState
from tests.reader.conftest import Filled, Record

NAMES = ["$audit", "anew", "many", "one", "short/many", "é/☃ +&%"]

names = st.sampled_from(NAMES)
share = st.floats(0, 1)
random_places = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def state_of(log: LogView, name: str) -> TopicState:
    return log.topics([name])[name]


def decoded(log: LogView, part: LogRange, *, verify: bool) -> Iterator[DecodedRecords]:
    return decode(((part, block) for block in log.read(part)), verify=verify)


def read(log: LogView, part: LogRange, *, verify: bool = True) -> list[Record]:
    found = []
    for records in decoded(log, part, verify=verify):
        columns = (records.offsets, records.ordinals, records.payloads())
        some = [Record(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        sizes = np.diff(records.boundaries).tolist()
        assert [one.end for one in some] == [
            one.offset + size for one, size in zip(some, sizes, strict=True)
        ]
        found += some
    return found


def between(start: int, end: int, part: float) -> int:
    """Return a number in this range, or slightly below or above it."""
    return max(0, round(start - 3 + part * (end - start + 6)))


# Topics


def test_all_topics_are_seen_in_both_views(filled):
    files = FileLog(str(filled.path)).topics(None)
    assert sorted(files) == NAMES
    with closing(ServerLog(LogLocation(urls=(filled.server.http_url,)))) as server:
        assert files == server.topics(None)


def test_topics_reach_as_far_as_was_published(log, filled):
    for name, state in log.topics(NAMES).items():
        kept = filled.records[name]
        assert (state.start.offset, state.start.ordinal) == (kept[0].offset, kept[0].ordinal)
        assert (state.end.offset, state.end.ordinal) == (kept[-1].end, kept[-1].ordinal + 1)


def test_names_without_a_topic_are_left_out(log):
    assert list(log.topics(["nope", "many", "x" * 255])) == ["many"]
    assert log.topics([]) == {}


def test_topics_asked_for_again_are_the_same(log):
    first = log.topics(["many"])
    log.wait(0.01)
    assert log.topics(["many"]) == first
    assert sorted(log.topics(None)) == NAMES
    assert log.topics(["many"]) == first


def test_any_number_of_long_names_can_be_asked_for(log):
    """The names do not fit into one URL, because each letter takes nine bytes there."""
    asked = [f"{number}/{'☃' * 80}" for number in range(400)]
    assert list(log.topics([*asked, "many", *asked])) == ["many"]


def test_the_log_has_what_these_tests_are_about(filled):
    assert filled.records["anew"][0].ordinal == 7
    assert filled.records["short/many"][0].ordinal > 100
    assert len(filled.segments("many")) > 2


# Positions


def first_where(records: list[Record], condition: object) -> tuple[int, int]:
    for record in records:
        if condition(record):  # type: ignore[operator]
            return record.offset, record.ordinal
    return records[-1].end, records[-1].ordinal + 1


@random_places
@given(names, share)
def test_an_offset_is_the_next_record_that_is_kept(log, filled: Filled, name, part):
    state, records = state_of(log, name), filled.records[name]
    offset = between(records[0].offset, records[-1].end, part)
    expected = first_where(records, lambda record: record.offset >= offset)
    assert log.at_offset(state, offset) == Position(state.end.epoch, *expected)


@random_places
@given(names, share)
def test_an_ordinal_is_the_record_with_so_many_before_it(log, filled: Filled, name, part):
    state, records = state_of(log, name), filled.records[name]
    ordinal = between(records[0].ordinal, records[-1].ordinal, part)
    expected = first_where(records, lambda record: record.ordinal >= ordinal)
    assert log.at_ordinal(state, ordinal) == Position(state.end.epoch, *expected)


@random_places
@given(names, share)
def test_a_time_is_the_first_record_from_then_on(log, filled: Filled, name, part):
    state, records = state_of(log, name), filled.records[name]
    times = times_of(log, state)
    ms = between(times[0], times[-1], part)
    number = next((number for number, time in enumerate(times) if time >= ms), None)
    expected = (
        (records[number].offset, records[number].ordinal)
        if number is not None
        else (state.end.offset, state.end.ordinal)
    )
    assert log.at_time(state, ms) == Position(state.end.epoch, *expected)


def times_of(log: LogView, state: TopicState) -> list[int]:
    (whole,) = log.split(LogRange(state.name, state.start, state.end), 1 << 40)
    return [ms for one in decoded(log, whole, verify=True) for ms in one.ms.tolist()]


@random_places
@given(names, share, st.integers(1, 30_000))
def test_rows_without_their_bytes_are_those_of_the_records(log, filled: Filled, name, part, size):
    state, records = state_of(log, name), filled.records[name]
    start = log.at_offset(state, between(records[0].offset, records[-1].end, part))
    whole = LogRange(name, start, state.end)
    for one in log.split(whole, size) if start.ordinal < state.end.ordinal else ():
        rows = [row for some in log.rows(one) for row in some.tolist()]
        assert rows == [row for block in log.read(one) for row in block.rows.tolist()]


def test_times_differ_and_never_decrease(log):
    times = times_of(log, state_of(log, "many"))
    assert times == sorted(times)
    assert len(set(times)) > 5


@pytest.mark.parametrize("number", [0, 1 << 31, (1 << 63) - 1])
def test_every_number_has_a_position(log, number):
    state = state_of(log, "anew")
    expected = state.end if number else state.start
    assert log.at_offset(state, number) == expected
    assert log.at_ordinal(state, number) == expected
    assert log.at_time(state, number if number != 1 << 31 else (1 << 62)) == expected


def test_positions_end_where_the_topic_ended_when_it_was_asked(log, filled):
    """The log has grown since then."""
    state, records = state_of(log, "many"), filled.records["many"]
    middle = records[300]
    before = state._replace(end=Position(state.end.epoch, middle.offset, middle.ordinal))
    assert log.at_offset(before, records[400].offset) == before.end
    assert log.at_ordinal(before, 400) == before.end
    assert log.at_time(before, times_of(log, state)[-1]) == before.end


# Parts


def position(state: TopicState, record: Record) -> Position:
    return Position(state.end.epoch, record.offset, record.ordinal)


@random_places
@given(names, share, share, st.sampled_from([1, 100, 3000, 1 << 40]))
def test_parts_give_exactly_the_records_of_the_whole(log, filled: Filled, name, one, other, size):
    state, records = state_of(log, name), filled.records[name]
    first, last = sorted(min(len(records) - 1, int(part * len(records))) for part in (one, other))
    end = position(state, records[last]) if other < 0.9 else state.end
    stop = last if other < 0.9 else len(records)
    whole = LogRange(name, position(state, records[first]), end)
    parts = log.split(whole, size) if whole.start.ordinal < whole.end.ordinal else []
    assert [record for part in parts for record in read(log, part)] == records[first:stop]
    if parts:
        assert (parts[0].start, parts[-1].end) == (whole.start, whole.end)
        assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
        assert all(part.start.ordinal < part.end.ordinal for part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_topic_is_read_as_it_was_published(log, filled, name):
    state = state_of(log, name)
    for size in (1, 5000, 1 << 40):
        parts = log.split(LogRange(name, state.start, state.end), size)
        assert [record for part in parts for record in read(log, part)] == filled.records[name]


def test_parts_are_about_as_large_as_asked_for(log, filled):
    state = state_of(log, "many")
    parts = log.split(LogRange("many", state.start, state.end), 5_000)
    assert len(parts) > 3
    assert all(part.bytes <= 20_000 for part in parts)


class Asked(ServerLog):
    """View that records the requested paths, and can have some refused."""

    def __init__(self, place: LogLocation) -> None:
        super().__init__(place)
        self.paths: list[str] = []
        self.refused: dict[str, int] = {}
        """Status of the answer for each refused path."""
        ask = self._http.send

        def send(method: str, path: str, *given: Any) -> bytes:
            self.paths.append(path)
            if path in self.refused:
                raise ServerError("refused", self.refused[path])
            return ask(method, path, *given)

        self._http.send = send  # type: ignore[method-assign]


def test_small_parts_take_one_request_together(filled):
    with closing(Asked(LogLocation(urls=(filled.server.http_url,)))) as log:
        states = log.topics(NAMES)
        parts = [LogRange(name, state.start, state.end) for name, state in states.items()]
        log.paths.clear()
        log.expect(parts)
        for part in parts:
            assert read(log, part) == filled.records[part.topic]
        assert log.paths == ["/v1/ranges"]
        for part in reversed(parts):
            assert read(log, part) == filled.records[part.topic]
        assert "/v1/ranges" not in log.paths[1:], "nothing was announced"


def test_parts_may_be_read_in_any_order_or_not_at_all(filled):
    with closing(ServerLog(LogLocation(urls=(filled.server.http_url,)))) as log:
        states = log.topics(NAMES)
        parts = [LogRange(name, state.start, state.end) for name, state in states.items()]
        for order in permutations(parts, 3):
            log.expect(parts)
            for part in order:
                assert read(log, part) == filled.records[part.topic]


def test_many_parts_are_fetched_in_several_requests(filled):
    """The parts exceed one URL and one answer, and a part between them is gone."""
    with closing(Asked(LogLocation(urls=(filled.server.http_url,)))) as log:
        state, records = state_of(log, "many"), filled.records["many"]
        ends = [position(state, record) for record in records[1:]] + [state.end]
        starts = [position(state, record) for record in records]
        parts = [LogRange("many", *one) for one in zip(starts, ends, strict=True)]
        nowhere = LogRange("nope", starts[0], ends[0])
        log.paths.clear()
        log.expect([*parts[:5], nowhere, *parts[5:]])
        assert [one for part in parts[:5] for one in read(log, part)] == records[:5]
        with pytest.raises(DataLossError, match="'nope' was destroyed"):
            read(log, nowhere)
        assert [one for part in parts[5:] for one in read(log, part)] == records[5:]
        assert 2 < log.paths.count("/v1/ranges") < 10


def test_a_place_in_a_topic_that_has_ended_since_is_its_end(filled):
    """A read up to that position finds out that the topic has ended."""
    with closing(ServerLog(LogLocation(urls=(filled.server.http_url,)))) as log:
        ended = state_of(log, "many")._replace(name="nope")
        assert log.at_offset(ended, 1) == ended.end
        assert log.at_ordinal(ended, 1) == ended.end
        assert log.at_time(ended, 1) == ended.end


@pytest.mark.parametrize("status", [404, 414, 500])
def test_where_parts_are_refused_together_each_is_asked_for_alone(filled, status):
    """A proxy may not know the path, or may accept only short URLs."""
    with closing(Asked(LogLocation(urls=(filled.server.http_url,)))) as log:
        states = log.topics(NAMES)
        parts = [LogRange(name, state.start, state.end) for name, state in states.items()]
        log.refused["/v1/ranges"] = status
        log.expect(parts)
        for part in parts:
            assert read(log, part) == filled.records[part.topic]
        assert log.paths.count("/v1/ranges") == 1


def test_an_empty_part_harms_none_beside_it(filled):
    with closing(ServerLog(LogLocation(urls=(filled.server.http_url,)))) as log:
        states = log.topics(["anew", "many", "one"])
        parts = [LogRange(name, state.start, state.end) for name, state in states.items()]
        empty = LogRange("many", states["many"].end, states["many"].start)
        log.expect([parts[0], empty, *parts[1:]])
        for part in parts:
            assert read(log, part) == filled.records[part.topic]
