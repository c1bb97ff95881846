"""Rows of an index: which are valid, and which follow without a gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.read.index import ROW_BYTES, Row
from headrace.model import JUMP
from headrace.reader.decode import Stretch, parse, stretches
from headrace.reader.view import DamagedRange
from tests.reader.runs import flipped, index, packed

RUNS = [[b"a"] * 3, [b"bb"], [b""] * 5, [b"dddd"] * 2, [b"e"]]
ROWS, DATA = packed(RUNS, offset=1000, ordinal=70)
END = 1000 + len(DATA)


def damaged(rows: list[Row], *numbers: int) -> bytes:
    data = index(rows)
    for number in numbers:
        data = flipped(data, number * ROW_BYTES + 9)
    return data


def covered(found: list[Stretch | DamagedRange]) -> list[tuple[str, int, int]]:
    return [(type(one).__name__, one.offset, one.end) for one in found]


def test_rows_are_read_as_they_were_packed():
    found = parse(index(ROWS))
    assert [tuple(map(int, row))[:6] for row in found.rows] == [tuple(row) for row in ROWS]
    assert found.gaps == frozenset()
    assert found.end_offset == END


@pytest.mark.parametrize("extra", [1, ROW_BYTES - 1])
def test_a_row_that_is_only_half_there_does_not_count(extra):
    data = index(ROWS)
    assert len(parse(data[: len(data) - ROW_BYTES + extra]).rows) == len(ROWS) - 1


@pytest.mark.parametrize("extra", [0, 1])
def test_an_index_without_rows_covers_nothing(extra):
    found = parse(bytes(extra))
    assert (len(found.rows), found.gaps) == (0, frozenset())
    assert list(stretches(found, 0, 100, 1 << 20, "here")) == [DamagedRange(0, 100, "here")]


@pytest.mark.parametrize(
    ("numbers", "gaps"), [([0], {0}), ([2], {2}), ([4], {4}), ([1, 2], {1}), ([0, 4], {0, 3})]
)
def test_damaged_rows_are_left_out_and_remembered(numbers, gaps):
    found = parse(damaged(ROWS, *numbers))
    kept = [row.offset for number, row in enumerate(ROWS) if number not in numbers]
    assert found.rows["offset"].tolist() == kept
    assert found.gaps == gaps


def test_a_sound_index_is_one_stretch():
    assert covered(list(stretches(parse(index(ROWS)), 1000, END, 1 << 20, "here"))) == [
        ("Stretch", 1000, END)
    ]


@pytest.mark.parametrize("number", range(5))
def test_damage_is_named_wherever_it_stands(number):
    found = covered(list(stretches(parse(damaged(ROWS, number)), 1000, END, 1 << 20, "here")))
    gaps = [(start, end) for kind, start, end in found if kind == "DamagedRange"]
    assert gaps == [(ROWS[number].offset, ROWS[number].end)]
    assert found[0][1] == 1000
    assert [one[1] for one in found[1:]] == [one[2] for one in found[:-1]]
    assert found[-1][2] == END


def test_nothing_but_damage_is_named_once():
    found = parse(damaged(ROWS, *range(5)))
    assert covered(list(stretches(found, 1000, END, 1 << 20, "here"))) == [
        ("DamagedRange", 1000, END)
    ]


def test_a_topic_may_jump_ahead_and_that_is_no_damage():
    later, data = packed([[b"x"]], offset=END + JUMP, ordinal=100)
    found = list(stretches(parse(index([*ROWS, *later])), 1000, END + 3 * JUMP, 1 << 20, "here"))
    assert covered(found) == [
        ("Stretch", 1000, END),
        ("Stretch", END + JUMP, END + JUMP + len(data)),
        ("DamagedRange", END + JUMP + len(data), END + 3 * JUMP),
    ]


@pytest.mark.parametrize("number", range(5))
def test_rows_that_are_missing_are_damage(number):
    rest = [row for at, row in enumerate(ROWS) if at != number]
    found = covered(list(stretches(parse(index(rest)), 1000, END, 1 << 20, "here")))
    gaps = [(start, end) for kind, start, end in found if kind == "DamagedRange"]
    assert gaps == [(ROWS[number].offset, ROWS[number].end)]


def test_pieces_are_not_much_longer_than_asked_for():
    rows, data = packed([[b"x" * 96]] * 50)
    found = list(stretches(parse(index(rows)), 0, len(data), 1000, "here"))
    assert [one.end - one.offset for one in found] == [1000] * 5


damage = st.sets(st.integers(0, len(ROWS) - 1))
place = st.integers(1000, END - 1)


@given(damage, place, place, st.sampled_from([1, 20, 1 << 20]))
def test_every_wanted_run_is_in_a_stretch_or_a_gap(numbers, one, other, bytes_max):
    start, end = min(one, other), max(one, other) + 1
    found = list(stretches(parse(damaged(ROWS, *numbers)), start, end, bytes_max, "here"))
    for number, row in enumerate(ROWS):
        if row.end <= start or row.offset >= end:
            continue
        if number not in numbers:
            holding = [
                one
                for one in found
                if isinstance(one, Stretch) and row.offset in one.rows["offset"].tolist()
            ]
            assert len(holding) == 1
        else:
            wanted = max(row.offset, start), min(row.end, end)
            assert any(
                isinstance(one, DamagedRange) and one.offset <= wanted[0] and wanted[1] <= one.end
                for one in found
            )
    for one in found:
        if isinstance(one, Stretch):
            assert sum(one.rows["length"].tolist()) == one.end - one.offset
        else:
            assert numbers and one.offset < one.end
