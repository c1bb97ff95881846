"""Counts of a report, by hand and against a slow model, for any division of records among tasks."""

import random

import numpy as np
import pytest

from headrace.model import Position
from headrace.pipeline.report import data as data
from headrace.pipeline.report.data import (
    POINTS_MAX,
    TOPICS_MAX,
    WIDTHS_MS,
    ReportData,
    ReportPlan,
    Runs,
)
from headrace.reader.decode import parse
from tests.reader.runs import index, packed

START_MS = 1_763_000_000_000
DAY_MS = 86_400_000

Record = tuple[int, int, int]
"""Offset, time, and bytes of payload."""


def runs(topic: str, records: list[Record]) -> Runs:
    offsets, ms, sizes = (np.array(column, np.int64) for column in zip(*records, strict=True))
    end = int(offsets[-1]) + 100  # records of `history` are this far apart
    return Runs(topic, int(offsets[0]), end, np.ones(len(records), np.int64), sizes, ms)


def made(parts: list[list[Runs]]) -> ReportData:
    """Make a report of the parts that different tasks have looked at."""
    seen = data.overview(map(data.look, parts))
    plan = data.plan(seen)
    counts = [data.count(part, plan) for part in parts]
    return data.report(seen, plan, counts, made_ms=0, log="log")


def history(chance: random.Random, topics: int, span_ms: int) -> dict[str, list[Record]]:
    found = {}
    for number in range(topics):
        times = sorted(
            START_MS + chance.randrange(span_ms)
            for _ in range(chance.randint(1, 400 // (number + 1)))
        )
        found[f"topic {number}"] = [
            (100 * place, ms, chance.choice([0, 1, 90, 5000])) for place, ms in enumerate(times)
        ]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_how_records_are_divided_makes_no_difference(seed):
    chance = random.Random(seed)
    span = chance.choice([90, 5_000, 7_200_000, 40 * DAY_MS, 9000 * DAY_MS])
    topics = history(chance, 30, span)
    whole = [[runs(name, records) for name, records in topics.items()]]
    cut = [
        runs(name, records[first : first + 7])
        for name, records in topics.items()
        for first in range(0, len(records), 7)
    ]
    chance.shuffle(cut)
    parts = [cut[number::5] for number in range(5)] if seed % 2 else [cut[:40], cut[40:]]
    assert made(parts) == made(whole)


@pytest.mark.parametrize("seed", range(8))
def test_everything_is_counted_once(seed):
    chance = random.Random(seed)
    topics = history(chance, 30, chance.choice([3_000, 3 * DAY_MS]))
    report = made([[runs(name, records) for name, records in topics.items()]])
    messages = sum(map(len, topics.values()))
    size = sum(record[2] for records in topics.values() for record in records)
    assert (report.messages, report.bytes, report.topics_in_all) == (messages, size, 30)
    assert sum(bar.count for bar in report.sizes) == messages
    assert sum(bar.count for bar in report.pauses_ms) == messages - len(topics)
    assert len(report.topics) == TOPICS_MAX and report.others_in_all == 10
    assert report.others is not None
    lines = [*report.topics, report.others]
    assert sum(sum(line.messages_over_time) for line in lines) == messages
    assert sum(sum(line.bytes_over_time) for line in lines) == size
    for line in report.topics:
        assert line.messages == len(topics[line.name]) == sum(line.messages_over_time)
        for point, count in enumerate(line.messages_over_time):
            begin = report.buckets_from_ms + point * report.bucket_ms
            inside = [
                one for one in topics[line.name] if begin <= one[1] < begin + report.bucket_ms
            ]
            assert count == len(inside)
    assert [line.messages for line in report.topics] == sorted(
        (line.messages for line in report.topics), reverse=True
    )


@pytest.mark.parametrize("span_ms", [0, 1, 19_900, 20_100, DAY_MS, 365 * DAY_MS, 40_000 * DAY_MS])
def test_there_are_never_more_points_than_a_page_takes(span_ms):
    report = made([[runs("t", [(0, START_MS, 1), (5, START_MS + span_ms, 1)])]])
    assert 1 <= report.buckets <= POINTS_MAX
    assert report.bucket_ms in WIDTHS_MS
    assert sum(report.topics[0].messages_over_time) == 2
    # There are not many fewer buckets than possible.
    finer = [width for width in WIDTHS_MS if width < report.bucket_ms]
    if finer:
        last = START_MS + span_ms
        assert last // finer[-1] - START_MS // finer[-1] + 1 > POINTS_MAX


def test_the_longest_silence_is_found_also_between_two_tasks():
    first = [(0, START_MS, 1), (5, START_MS + 700, 1)]
    second = [(10, START_MS + 60_700, 1), (15, START_MS + 61_000, 1)]
    report = made([[runs("t", second)], [runs("t", first)]])
    [line] = report.topics
    assert (line.silence_ms, line.silent_from_ms) == (60_000, START_MS + 700)
    counts = {(bar.least, bar.below): bar.count for bar in report.pauses_ms if bar.count}
    assert counts == {(100, 1000): 2, (60_000, 600_000): 1}


def test_sizes_are_told_apart_at_powers_of_two():
    sizes = [0, 0, 1, 2, 3, 4, 7, 8, 1023, 1024, 262_144]
    report = made([[runs("t", [(n, START_MS, size) for n, size in enumerate(sizes)])]])
    found = {(bar.least, bar.below): bar.count for bar in report.sizes if bar.count}
    small = {(0, 1): 2, (1, 2): 1, (2, 4): 2, (4, 8): 2, (8, 16): 1}
    assert found == small | {(512, 1024): 1, (1024, 2048): 1, (262_144, 524_288): 1}


def test_an_empty_log_is_a_report_too():
    report = made([[]])
    assert (report.messages, report.topics, report.buckets, report.sizes) == (0, [], 0, [])
    assert report.first_ms is None


def test_what_came_since_the_first_look_does_not_break_the_second():
    plan = ReportPlan(START_MS, 1000, 2, ("t",))
    late = runs("t", [(0, START_MS - 1, 1), (5, START_MS + 500, 1), (10, START_MS + 9000, 1)])
    messages, _ = data.count([late], plan).tolist()
    assert messages == [[1, 0], [0, 0]]


# From rows of an index


def test_rows_are_cut_at_the_positions_of_a_part():
    rows, _ = packed([[b"abc"] * 4, [b""] * 3, [b"defg"] * 5], offset=100, ordinal=10, ms=START_MS)
    found = parse(index(rows)).rows
    whole = data.runs_of("t", Position(1, 100, 10), Position(1, 100 + 28 + 12 + 40, 22), found)
    assert whole.counts.tolist() == [4, 3, 5]
    assert whole.bytes.tolist() == [12, 0, 20]
    assert whole.ms.tolist() == [START_MS, START_MS + 1, START_MS + 2]
    # The part begins with the fourth record, and ends before the last.
    part = data.runs_of("t", Position(1, 121, 13), Position(1, 172, 21), found)
    assert (part.offset, part.end, part.counts.tolist()) == (121, 172, [1, 3, 4])
    assert part.bytes.tolist() == [3, 0, 16]
    nothing = data.runs_of("t", Position(1, 128, 14), Position(1, 140, 17), found)
    assert nothing.counts.tolist() == [3]


def test_messages_of_one_run_have_no_pause_between_them_and_their_mean_size():
    one = Runs("t", 0, 9, *(np.array([value], np.int64) for value in (500, 500 * 48, START_MS)))
    report = made([[one]])
    assert [(bar.least, bar.count) for bar in report.sizes] == [(32, 500)]
    assert report.pauses_ms[0].count == 499
    assert report.sizes_are_means
