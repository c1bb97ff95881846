"""Sequence numbers that came, against a plain set of them."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.session.numbers import RUNS_MAX, Numbers
from headrace.wire.wombat import SEQUENCE_NUMBERS


@given(
    st.integers(0, SEQUENCE_NUMBERS - 1),
    st.lists(st.tuples(st.integers(-20, 20), st.integers(1, 6)), max_size=60),
)
def test_what_came_is_known_and_nothing_else(start: int, runs: list[tuple[int, int]]) -> None:
    numbers = Numbers()
    came: set[int] = set()
    for step, count in runs:
        first = numbers.unwrap((start + step) % SEQUENCE_NUMBERS)
        wanted = set(range(first, first + count))
        assert numbers.add_run(first, first + count - 1) is not bool(wanted & came)
        if not wanted & came:
            came |= wanted
        for number in range(first - 2, first + count + 2):
            if number in came:
                assert not numbers.add(number)


@given(st.integers(0, SEQUENCE_NUMBERS - 1), st.integers(1, 2**31 - 1))
def test_numbers_go_on_behind_the_last(start: int, step: int) -> None:
    numbers = Numbers()
    before = numbers.unwrap(start)
    numbers.add(before)
    assert numbers.unwrap((start + step) % SEQUENCE_NUMBERS) == before + step
    assert numbers.unwrap((start - step) % SEQUENCE_NUMBERS) == before - step


def test_a_number_after_a_whole_round_is_new() -> None:
    numbers = Numbers()
    first = numbers.unwrap(5)
    assert numbers.add_run(first, first + SEQUENCE_NUMBERS - 1)
    again = numbers.unwrap(5)
    assert again == first + SEQUENCE_NUMBERS
    assert numbers.add(again)


def test_gap_upon_gap_costs_a_bounded_amount_and_never_calls_a_new_number_old() -> None:
    numbers = Numbers()
    first = numbers.unwrap(0)
    for number in range(3 * RUNS_MAX):
        assert numbers.add(first + 2 * number)
    assert all(numbers.add(first + 2 * number + 1) for number in range(3 * RUNS_MAX))
