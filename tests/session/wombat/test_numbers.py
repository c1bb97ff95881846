"""Numbers of received publishes, compared with a plain set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.session.wombat import RECORD_OVERHEAD_BYTES, Numbers
from headrace.wire.wombat.messages import SEQUENCE_NUMBERS

PAYLOADS = [b"x", b"y"]

came = st.tuples(
    st.sampled_from("ab"), st.integers(-20, 20), st.integers(1, 6), st.sampled_from(PAYLOADS)
)


@given(st.integers(0, SEQUENCE_NUMBERS - 1), st.lists(came, max_size=60))
def test_what_came_is_known_and_nothing_else(
    start: int, reads: list[tuple[str, int, int, bytes]]
) -> None:
    numbers = Numbers()
    known: set[tuple[str, int, bytes]] = set()
    for topic, step, count, payload in reads:
        wire = [(start + step + n) % SEQUENCE_NUMBERS for n in range(count)]
        first = numbers.unwrap_of(topic, wire[0])
        wanted = {(topic, first + n, payload) for n in range(count)}
        if numbers.is_ahead(topic, first):
            assert not wanted & known
            last = numbers.add_ahead(topic, wire, first, [payload] * count, 0.0)
            assert last == first + count - 1
        else:
            for n in range(count):
                is_new = (topic, first + n, payload) not in known
                assert numbers.add(topic, first + n, payload, 0.0) is is_new
        numbers.heard(first + count - 1)
        known |= wanted
        for name, number, record in sorted(known):
            assert not numbers.add(name, number, record, 0.0)


@given(st.integers(0, SEQUENCE_NUMBERS - 1), st.integers(1, 2**31 - 1))
def test_numbers_go_on_behind_the_last_of_their_topic(start: int, step: int) -> None:
    numbers = Numbers()
    before = numbers.unwrap_of("a", start)
    numbers.add("a", before, b"", 0.0)
    far = numbers.unwrap_of("b", (start + 3 * 2**30) % SEQUENCE_NUMBERS)
    numbers.add("b", far, b"", 0.0)
    numbers.heard(far)
    assert numbers.unwrap_of("a", (start + step) % SEQUENCE_NUMBERS) == before + step
    assert numbers.unwrap_of("a", (start - step) % SEQUENCE_NUMBERS) == before - step


@pytest.mark.parametrize("wire", [[5, 7, 9], [SEQUENCE_NUMBERS - 1, 1, 2]])
def test_numbers_with_gaps_are_found(wire: list[int]) -> None:
    numbers = Numbers()
    first = numbers.unwrap_of("a", wire[0])
    records = [b"%d" % number for number in wire]
    numbers.add_ahead("a", wire, first, records, 0.0)
    for number, record in zip(wire, records, strict=True):
        unwrapped = numbers.unwrap_of("a", number)
        assert not numbers.add("a", unwrapped, record, 0.0)
        assert numbers.add("a", unwrapped, b"another", 0.0)
        assert not numbers.add("a", unwrapped, b"another", 0.0)


def test_the_oldest_are_forgotten_by_size_and_by_time() -> None:
    numbers = Numbers()
    cost = RECORD_OVERHEAD_BYTES + 10
    for number in range(100):
        assert numbers.add(f"t{number % 7}", number, b"0123456789", float(number))
    assert numbers.bytes == 100 * cost
    numbers.forget(50 * cost, 0.0)
    assert numbers.bytes == 50 * cost
    assert not numbers.add("t1", 50, b"0123456789", 100.0)
    assert numbers.add("t0", 49, b"0123456789", 100.0)
    numbers.forget(1 << 30, 100.0)
    assert numbers.bytes == cost
    numbers.forget(0, 0.0)
    assert not numbers.bytes
    assert not numbers._topics
