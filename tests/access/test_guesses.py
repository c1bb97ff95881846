"""Wrong credentials: a few are answered at once, more of them wait, and time forgives."""

from headrace.access import guesses
from headrace.access.guesses import DELAY_MAX_S, FREE, REFILL_S, Guesses


def test_a_few_wrong_guesses_are_answered_at_once():
    known = Guesses()
    assert [known.wrong("a", 0.0) for _ in range(FREE)] == [0.0] * FREE


def test_more_of_them_wait_longer_and_longer_up_to_a_limit():
    known = Guesses()
    delays = [known.wrong("a", 0.0) for _ in range(2 * FREE)][FREE:]
    assert delays[0] > 0
    assert delays == sorted(delays)
    assert delays[-1] == DELAY_MAX_S


def test_another_address_is_not_affected():
    known = Guesses()
    for _ in range(10 * FREE):
        known.wrong("a", 0.0)
    assert known.wrong("b", 0.0) == 0.0


def test_time_forgives():
    known = Guesses()
    for _ in range(10 * FREE):
        known.wrong("a", 0.0)
    assert known.wrong("a", 2 * FREE * REFILL_S) == 0.0


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(guesses, "ADDRESSES_MAX", 3)
    known = Guesses()
    for number in range(10):
        known.wrong(str(number), float(number))
    assert len(known._used) == 3
    known.tick(1e6)
    assert not known._used


def test_no_more_than_a_limit_wait_at_once(monkeypatch):
    monkeypatch.setattr(guesses, "DELAYED_MAX", 3)
    known = Guesses()
    delays = [known.wrong("a", 0.0) for _ in range(FREE + 4)]
    assert delays[-1] is None
    assert delays.count(None) == 1
    assert known.wrong("a", DELAY_MAX_S) is not None
