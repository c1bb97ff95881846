"""The checker against histories made by hand: a correct one, and a mutated one for each violation."""

import tracemalloc

import pytest

from headrace.testing import Kind, LogChecker

PAYLOADS = [b"foo", b"", b"car", b"a longer one", b"x"]


class History:
    """A correct run of one topic, which tests change before a checker sees it."""

    def __init__(self) -> None:
        self.sent = [("p", payload) for payload in PAYLOADS]
        self.acked = list(range(len(PAYLOADS)))
        self.received: dict[str, list[tuple[str, int, bytes | int | None]]] = {
            name: [("attached", 0, 0), *_records(PAYLOADS)] for name in ("one", "two")
        }

    def checked(self) -> LogChecker:
        checker = LogChecker()
        tickets = [checker.sent("t", payload, publisher) for publisher, payload in self.sent]
        for index in self.acked:
            checker.acked("t", tickets[index])
        for name, events in self.received.items():
            for event, offset, value in events:
                if event == "attached":
                    assert not isinstance(value, bytes)
                    checker.attached(name, "t", value, offset)
                else:
                    assert isinstance(value, bytes)
                    checker.received(name, "t", offset, value)
        return checker

    def kinds(self) -> set[Kind]:
        return {violation.kind for violation in self.checked().verdict()}


def _records(payloads: list[bytes], offset: int = 0) -> list[tuple[str, int, bytes]]:
    events = []
    for payload in payloads:
        offset += 4 + len(payload)
        events.append(("data", offset, payload))
    return events


@pytest.fixture
def history() -> History:
    return History()


def test_a_sound_history_has_no_violations(history: History) -> None:
    assert history.kinds() == set()


def test_an_unacknowledged_record_may_be_missing(history: History) -> None:
    history.acked.remove(4)
    for events in history.received.values():
        events.pop()
    assert history.kinds() == set()


def test_an_acknowledged_record_that_nobody_received_is_lost(history: History) -> None:
    for events in history.received.values():
        events.pop()
    assert history.kinds() == {Kind.LOST}


def test_a_record_acknowledged_twice_must_be_there_twice(history: History) -> None:
    history.sent.append(("p", b"foo"))
    history.acked.append(5)
    assert history.kinds() == {Kind.LOST}
    for events in history.received.values():
        events.append(("data", 39 + 7, b"foo"))
    assert history.kinds() == set()


def test_a_record_that_nobody_published_is_a_phantom(history: History) -> None:
    history.received["one"] += _records([b"ghost"], 39)
    assert history.kinds() == {Kind.PHANTOM}


def test_a_record_more_often_in_the_log_than_sent_is_duplicated(history: History) -> None:
    history.received["one"] += _records([b"x"], 39)
    assert history.kinds() == {Kind.DUPLICATED}


def test_a_resent_record_may_be_in_the_log_twice(history: History) -> None:
    history.sent.append(("p", b"x"))
    history.received["one"] += _records([b"x"], 39)
    assert history.kinds() == set()


def test_a_client_that_resends_unseen_may_repeat_any_number_of_times() -> None:
    checker = LogChecker()
    checker.acked("t", checker.sent("t", b"x", repeats=True))
    for offset in (5, 10, 15):
        checker.received("one", "t", offset, b"x")
    assert checker.verdict() == []


def test_subscribers_that_were_told_different_orders_are_found(history: History) -> None:
    history.received["two"][1:4] = _records([b"car", b"", b"foo"])
    assert Kind.ORDER in history.kinds()


def test_different_orders_of_different_sizes_are_found(history: History) -> None:
    history.received["two"][1:] = _records(list(reversed(PAYLOADS)))
    assert Kind.ORDER in history.kinds()


def test_one_offset_with_two_contents_is_found(history: History) -> None:
    history.sent.append(("p", b"bar"))
    history.received["two"][1] = ("data", 7, b"bar")
    assert history.kinds() == {Kind.BYTES}


def test_the_same_subscriber_told_other_bytes_after_resuming_is_found(history: History) -> None:
    history.sent.append(("q", b"caz"))
    history.received["one"] += [("attached", 11, 11), ("data", 18, b"caz")]
    assert history.kinds() == {Kind.BYTES}


def test_a_record_that_begins_inside_another_is_found(history: History) -> None:
    history.sent.append(("q", b"!"))
    history.received["three"] = [("attached", 2, None), ("data", 7, b"!")]
    assert Kind.BOUNDARY in history.kinds()


def test_an_attachment_inside_a_record_is_found(history: History) -> None:
    history.received["three"] = [("attached", 20, None)]
    assert history.kinds() == {Kind.BOUNDARY}


def test_an_offset_that_does_not_increase_is_found(history: History) -> None:
    history.received["two"].insert(2, history.received["two"][1])
    assert history.kinds() == {Kind.OFFSET_ORDER}


def test_an_offset_that_does_not_fit_the_payload_is_found(history: History) -> None:
    del history.received["two"][2]
    assert history.kinds() == {Kind.OFFSET_SIZE}


def test_a_resume_from_the_last_offset_is_sound(history: History) -> None:
    for index in range(1, 6):
        offset = history.received["one"][index - 1][1]
        history.received["two"] = [
            *history.received["one"][:index],
            ("attached", offset, offset),
            *history.received["one"][index:],
        ]
        assert history.kinds() == set()


@pytest.mark.parametrize("asked", [7, 11])
def test_a_resume_that_skips_a_record_is_a_gap(history: History, asked: int) -> None:
    history.received["two"][2:3] = [("attached", 11, asked)]
    if asked == 11:  # ATTACHED says 11, but the next record does not begin there
        del history.received["two"][3]
    assert history.kinds() == {Kind.RESUME_GAP}


@pytest.mark.parametrize("got", [7, 11])
def test_a_resume_that_repeats_a_record_is_a_double(history: History, got: int) -> None:
    again = history.received["two"][2]
    history.received["two"][3:3] = [("attached", got, 11), again]
    assert history.kinds() == {Kind.RESUME_DOUBLE}


def test_records_of_one_publisher_out_of_its_order_are_found(history: History) -> None:
    history.sent.reverse()
    assert history.kinds() == {Kind.PUBLISHER_ORDER}


def test_records_of_different_publishers_may_be_in_any_order(history: History) -> None:
    history.sent = [(str(index), payload) for index, (_, payload) in enumerate(history.sent)]
    history.sent.reverse()
    assert history.kinds() == set()


def test_a_live_subscriber_fixes_the_order_for_one_that_starts_earlier_and_comes_later(
    history: History,
) -> None:
    history.received = {
        "live": [("attached", 18, None), *history.received["one"][4:]],
        "late": history.received["one"],
    }
    assert history.kinds() == set()
    history.received["late"][4:6] = _records([b"x", b"a longer one"], 18)
    assert Kind.ORDER in history.kinds()


def test_stretches_meet_without_counting_anything_twice(history: History) -> None:
    records = history.received["one"]
    history.received = {
        "end": [("attached", 34, None), records[5]],
        "middle": [("attached", 11, None), records[3]],
        "all": records,
    }
    assert history.kinds() == set()
    assert history.checked().records("t") == 5


def test_topics_are_judged_separately() -> None:
    checker = LogChecker()
    checker.acked("a", checker.sent("a", b"x"))
    checker.received("one", "b", 5, b"x")
    assert {(v.kind, v.topic) for v in checker.verdict()} == {(Kind.LOST, "a"), (Kind.PHANTOM, "b")}


def test_the_verdict_may_be_asked_for_again_as_the_history_goes_on() -> None:
    checker = LogChecker()
    checker.acked("t", checker.sent("t", b"x"))
    assert [violation.kind for violation in checker.verdict()] == [Kind.LOST]
    checker.received("one", "t", 5, b"x")
    assert checker.verdict() == []


def test_a_violation_reads_as_a_sentence_with_its_facts() -> None:
    checker = LogChecker()
    checker.attached("one", "t", 0, 0)
    checker.received("one", "t", 5, b"x")
    (violation,) = checker.verdict()
    assert str(violation) == "phantom: topic 't' subscriber one at offset 5: 1 bytes nobody sent"


def test_many_violations_are_kept_in_bounded_number() -> None:
    checker = LogChecker()
    for index in range(10_000):
        checker.received("one", "t", 5 * (index + 1), b"x")
    assert len(checker.verdict()) < 100


def test_a_record_costs_the_checker_a_bounded_amount_of_memory() -> None:
    records = 20_000
    tracemalloc.start()
    try:
        checker = LogChecker()
        for index in range(records):
            checker.acked("t", checker.sent("t", b"%0100d" % index, "p"))
        for subscriber in ("one", "two", "three"):
            for index in range(records):
                checker.received(subscriber, "t", (index + 1) * 104, b"%0100d" % index)
        assert checker.verdict() == []
        assert tracemalloc.get_traced_memory()[0] / records < 250
    finally:
        tracemalloc.stop()
