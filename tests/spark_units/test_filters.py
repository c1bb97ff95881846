"""Filters that narrow a read: no row that the filters accept is missing, compared with trying every row."""

import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringEndsWith,
    StringStartsWith,
)

from headrace.reader.planning import plan_batch
from headrace.reader.view import LogView
from headrace.spark.options import parse_source
from headrace.spark.source import narrowing_of
from tests.reader.conftest import Filled
from tests.reader.test_logs import NAMES, read, state_of, times_of
from tests.tools import EXAMPLES

COMPARISONS = {
    EqualTo: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
}
ALL = parse_source({"path": "/d", "subscribePattern": ".*"}, streaming=False)

Row = dict[str, Any]


def moment(ms: int, microseconds: int = 0) -> datetime.datetime:
    start = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return start + datetime.timedelta(milliseconds=ms, microseconds=microseconds)


def rows_of(log: LogView, filled: Filled) -> list[Row]:
    rows = []
    for name in NAMES:
        times = times_of(log, state_of(log, name))
        for record, ms in zip(filled.records[name], times, strict=True):
            rows.append(
                {"topic": name, "offset": record.offset, "ordinal": record.ordinal}
                | {"timestamp": moment(ms)}
            )
    return rows


def planned(log: LogView, filters: list[Filter]) -> list[tuple[str, int]]:
    ranges = plan_batch(log, ALL, narrowing_of(filters))
    return [(one.topic, record.ordinal) for one in ranges for part in log.split(one, 1 << 40)
            for record in read(log, part)]  # fmt: skip


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_exactly_the_rows_that_the_filters_leave_are_read(log, filled, data):
    rows = rows_of(log, filled)
    filters: list[Filter] = []
    left = rows
    for _ in range(data.draw(st.integers(1, 3))):
        column = data.draw(st.sampled_from(["offset", "ordinal", "timestamp"]))
        # The value is chosen by index, because Hypothesis may print the collection that it chooses from.
        value = rows[data.draw(st.integers(0, len(rows) - 1))][column]
        if column == "timestamp":
            value += datetime.timedelta(microseconds=data.draw(st.sampled_from([-1, 0, 0, 1, 999])))
        else:
            value += data.draw(st.integers(-2, 2))
        kind = data.draw(st.sampled_from(list(COMPARISONS)))
        filters.append(kind((column,), value))
        left = [row for row in left if COMPARISONS[kind](row[column], value)]
    got = planned(log, filters)
    expected = [(row["topic"], row["ordinal"]) for row in left]
    # An offset inside a record belongs to no record. Only Spark applies that.
    assert set(expected) <= set(got)
    assert sorted(set(got)) == sorted(got)
    if not any(isinstance(one, EqualTo) for one in filters):
        assert sorted(got) == sorted(expected)


@pytest.mark.parametrize(
    ("filters", "topics"),
    [
        ([EqualTo(("topic",), "many")], ["many"]),
        ([In(("topic",), ("one", "anew", "nope"))], ["anew", "one"]),
        ([StringStartsWith(("topic",), "short/")], ["short/many"]),
        ([EqualTo(("topic",), "many"), EqualTo(("topic",), "one")], []),
        ([StringStartsWith(("topic",), "s"), In(("topic",), ("one", "short/many"))], ["short/many"]),
        ([StringEndsWith(("topic",), "many")], NAMES),
        ([IsNotNull(("topic",)), Not(EqualTo(("topic",), "many"))], NAMES),
        ([EqualTo(("topic", "deeper"), "many")], NAMES),
        ([EqualTo(("payload",), b"x"), EqualTo(("n",), 5)], NAMES),
        ([LessThan(("offset",), 0)], []),
        ([LessThan(("offset",), -5)], []),
        ([GreaterThanOrEqual(("offset",), -5)], NAMES),
        ([GreaterThan(("ordinal",), (1 << 63) - 1)], []),
        ([GreaterThan(("offset",), (1 << 63) - 1)], []),
        ([LessThanOrEqual(("ordinal",), (1 << 63) - 1)], NAMES),
        ([LessThan(("timestamp",), moment(-1000))], []),
        ([GreaterThan(("timestamp",), moment(0))], NAMES),
        ([GreaterThan(("offset",), None)], NAMES),
        ([GreaterThan(("offset",), 1.5)], NAMES),
        ([EqualTo(("timestamp",), "2024-01-01")], NAMES),
    ],
)  # fmt: skip
def test_filters_choose_topics_or_are_left_to_spark(log, filters, topics):
    assert sorted({topic for topic, _ in planned(log, filters)}) == topics


def test_a_time_between_two_milliseconds_is_no_record_s(log, filled):
    time = rows_of(log, filled)[0]["timestamp"]
    assert planned(log, [EqualTo(("timestamp",), time)])
    assert planned(log, [EqualTo(("timestamp",), time + datetime.timedelta(microseconds=1))]) == []
