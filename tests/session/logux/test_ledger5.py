"""The ledger of a node: what the node has received of its channels, over all its connections."""

from headrace.session.logux.server5 import PLACES_MAX, UNANSWERED_MAX, Ledger


def test_what_is_answered_is_known():
    ledger = Ledger()
    ledger.sent("a", 5, 1)
    ledger.said()
    ledger.sent("b", 6, 1)
    ledger.sent("a", 9, 1)
    ledger.answered(3)
    again = ledger.connected(1, 0)
    assert [again.place(one, is_resumed=True) for one in "abc"] == [5, 6, 0]
    assert again.place("a", is_resumed=False) == 0


def test_the_number_that_a_node_has_seen_counts_as_an_answer():
    ledger = Ledger()
    for channel, number in (("a", 5), ("b", 2), ("a", 6), ("b", 3)):
        ledger.sent(channel, number, 1)
    again = ledger.connected(1, 6)
    assert [again.place(one, is_resumed=True) for one in "ab"] == [6, 2]
    assert ledger.connected(1, 7).place("b", is_resumed=True) == 2


def test_another_life_of_the_log_is_another_story():
    ledger = Ledger()
    ledger.sent("a", 5, 1)
    ledger.answered(1)
    assert ledger.connected(2, 5).place("a", is_resumed=True) == 0


def test_a_history_that_was_not_finished_goes_on():
    ledger = Ledger()
    ledger.begun("a")
    ledger.sent("a", 5, 1)
    ledger.said("a")
    ledger.answered(1)
    again = ledger.connected(1, 0)
    assert again.place("a", is_resumed=False) == 5
    ledger.answered(1)
    assert ledger.connected(1, 0).place("a", is_resumed=False) == 0
    again.forget("a")
    assert again.place("a", is_resumed=True) == 0


def test_a_node_that_answers_nothing_is_forgotten():
    ledger = Ledger()
    for number in range(1, UNANSWERED_MAX + 10):
        ledger.sent("a", number, 1)
    ledger.answered(1)
    assert ledger.connected(1, 5).place("a", is_resumed=True) == 0


def test_a_log_that_is_made_anew_meanwhile_is_forgotten():
    ledger = Ledger()
    ledger.sent("a", 5, 1)
    ledger.answered(1)
    ledger.sent("a", 1, 2)
    ledger.answered(1)
    assert ledger.connected(2, 1).place("a", is_resumed=True) == 0


def test_the_channels_of_a_node_are_limited_over_all_its_connections():
    ledger = Ledger()
    for number in range(1, PLACES_MAX + 11):
        ledger.sent(f"channel {number}", number, 1)
        ledger.answered(1)
        if number % 1000 == 0:
            ledger = ledger.connected(1, 0)
    assert len(ledger._places) == PLACES_MAX
    assert ledger.place("channel 10", is_resumed=True) == 0, "its history is sent again"
    assert ledger.place("channel 11", is_resumed=True) == 11
