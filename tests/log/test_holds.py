"""Trimming a topic while retention waits for readers: the new start, and what overdue readers miss."""

import pytest

from headrace.log.retention import TrimPoint, trimming
from headrace.log.store import Hold
from headrace.model import Position


def at(number: int, epoch: int = 5) -> Position:
    """Return the position after `number` records of ten bytes."""
    return Position(epoch, 10 * number, number)


def places(*numbers: int, overdue: int = 0) -> list[TrimPoint]:
    return [TrimPoint(at(number), number <= overdue) for number in numbers]


@pytest.mark.parametrize(
    ("overdue", "holds", "start", "missed"),
    [
        (0, {}, 6, {}),
        (0, {"a": 6}, 6, {}),
        (0, {"a": 9}, 6, {}),
        (0, {"a": 5}, 4, {}),
        (0, {"a": 5, "b": 3}, 2, {}),
        (0, {"a": 1}, 0, {}),
        (2, {"a": 1}, 2, {"a": 1}),
        (4, {"a": 1, "b": 3, "c": 4}, 4, {"a": 3, "b": 1}),
        (6, {"a": 9}, 6, {}),
        (2, {"a": 5}, 4, {}),
    ],
)
def test_a_topic_is_trimmed_to_where_the_slowest_reader_is_unless_it_is_overdue(
    overdue, holds, start, missed
):
    held = [Hold(reader, at(number)) for reader, number in holds.items()]
    found = trimming(places(2, 4, 6, overdue=overdue), held, at(0))
    assert found == (at(start), list(missed.items()))


def test_the_order_of_places_does_not_matter():
    assert trimming(reversed(places(2, 4, 6)), [Hold("a", at(5))], at(0)) == (at(4), [])


def test_what_is_gone_already_is_not_missed_again():
    found = trimming(places(2, 4, 6, overdue=6), [Hold("a", at(1))], at(4))
    assert found == (at(6), [("a", 2)])
    found = trimming(places(2, 4, overdue=4), [Hold("a", at(1))], at(4))
    assert found == (at(4), []), "nothing goes, so nothing is missed"


def test_a_reader_from_an_earlier_life_holds_all_of_this_one():
    found = trimming(places(2, 4, 6), [Hold("a", at(1, epoch=3))], at(1))
    assert found == (at(1), [])
