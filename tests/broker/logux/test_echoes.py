"""Echoes of received events by 0.x clients are recognised, and nothing else is taken for an echo."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.logux import echoes as logux_echoes
from headrace.broker.logux.echoes import Echoes, SentEvent
from headrace.config.settings import Config, Journal, Segment
from headrace.payload.logux import Created, Envelope, encode_envelope, raw_event
from tests.fakes.store import StepStore

TOPIC = "$logux/main"


def sent(ms: float, content: Any = "x", host: str = "c", number: int = 0) -> SentEvent:
    return SentEvent({"type": "t", "content": content}, [ms, host, number])


def echoed(event: SentEvent, shift: float) -> SentEvent:
    return SentEvent(event.event, [event.created[0] + shift, *event.created[1:]])


class Bench:
    def __init__(self, path: Path) -> None:
        config = Config(
            data_dir=path, journal=Journal(file_bytes=1 << 16, files=3), segment=Segment(bytes=4096)
        )
        self.steps = StepStore(config)
        self.topic = TOPIC

    def store(self, events: Sequence[SentEvent], origin: str = "b", *, batch: bool = False) -> None:
        self.steps.append(
            self.topic,
            *(
                encode_envelope(
                    Envelope(raw_event(one.event), created=one.created, origin=origin, batch=batch)
                )
                for one in events
            ),
        )

    def connect(self, synced: int, host: str = "a", hidden: Sequence[Created] = ()) -> Echoes:
        store = self.steps.store
        return Echoes(
            store.topic(self.topic),
            store,
            self.steps.runner,
            host=host,
            synced=synced,
            may_see=lambda event, created, origin: created not in hidden,
        )

    def echoes(self, echoes: Echoes, *events: SentEvent) -> list[bool]:
        answers: list[list[bool]] = []
        echoes.sift(events, answers.append)
        self.steps.runner.run()
        [found] = answers
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.steps.crash()


DELIVERED = [sent(1000.0, 1), sent(1010.5, 2), sent(1030.0, 3, "d", 4)]


def test_what_comes_back_with_one_difference_in_time_is_an_echo(bench: Bench) -> None:
    bench.store(DELIVERED)
    own = sent(2000.0, "new", "a")
    back = [echoed(one, -2.5) for one in reversed(DELIVERED)]
    assert bench.echoes(bench.connect(3), own, *back) == [False, True, True, True]
    bench.steps.settle()
    assert bench.echoes(bench.connect(3), *back[:2]) == [True, True], "from segments"


def test_one_event_alone_proves_nothing(bench: Bench) -> None:
    """Two events of a third host are equal and 3 ms apart: one was delivered, the other is new."""
    bench.store([sent(1000.0), sent(5000.0, "other")])
    echoes = bench.connect(2)
    assert bench.echoes(echoes, sent(1003.0)) == [False]
    assert bench.echoes(echoes, sent(1003.0), sent(5004.0, "other")) == [False, False]
    assert bench.echoes(echoes, sent(1000.0), sent(1003.0)) == [False, False]


def test_a_known_time_is_no_evidence_for_another_difference(bench: Bench) -> None:
    bench.store([sent(1000.0), sent(2000.0, "y")])
    events = [sent(1000.0), sent(2000.0, "y"), sent(1003.0), sent(2003.0, "y")]
    assert bench.echoes(bench.connect(2), *events) == [False] * 4


def test_each_delivered_event_absorbs_one_echo(bench: Bench) -> None:
    bench.store(DELIVERED)
    echoes = bench.connect(3)
    back = [echoed(one, 7.0) for one in DELIVERED]
    assert bench.echoes(echoes, *back) == [True] * 3
    again = [echoed(one, 9.0) for one in DELIVERED]
    assert bench.echoes(echoes, *again) == [False] * 3
    twice = [echoed(one, shift) for one in DELIVERED for shift in (7.0, 9.0)]
    assert bench.echoes(bench.connect(3), *twice) == [False] * 6, "which of them is the echo?"


def test_a_tie_is_in_doubt(bench: Bench) -> None:
    bench.store([sent(float(ms)) for ms in (0, 3, 6)])
    assert bench.echoes(bench.connect(3), sent(4.0), sent(7.0)) == [False, False]
    assert bench.echoes(bench.connect(3), sent(1.0), sent(4.0), sent(7.0)) == [True] * 3


def test_what_was_got_over_several_connections_has_several_differences(bench: Bench) -> None:
    bench.store([*DELIVERED, sent(4000.0, 5), sent(4001.0, 6)])
    back = [echoed(one, 1.0) for one in DELIVERED]
    back += [sent(4000.5, 5), sent(4001.5, 6)]
    assert bench.echoes(bench.connect(5), *back) == [True] * 5


@pytest.mark.parametrize(
    ("synced", "host", "kind"),
    [
        (0, "a", "nothing was delivered"),
        (2, "a", "the third was not"),
        (9, "a", "the log has never had so many"),
        (3, "b", "it has sent them itself"),
        (3, "c", "they are of its own clock"),
    ],
)
def test_only_what_was_delivered_comes_back(
    bench: Bench, synced: int, host: str, kind: str
) -> None:
    bench.store([sent(1000.0, 1), sent(1010.5, 2), sent(1030.0, 3)])
    back = [echoed(sent(1000.0, 1), 2.0), echoed(sent(1030.0, 3), 2.0)]
    assert bench.echoes(bench.connect(synced, host), *back) == [False, False], kind


def test_what_was_hidden_was_not_delivered(bench: Bench) -> None:
    bench.store(DELIVERED)
    back = [echoed(one, 2.0) for one in DELIVERED[:2]]
    echoes = bench.connect(3, hidden=[DELIVERED[0].created])
    assert bench.echoes(echoes, *back) == [False, False]


def test_events_of_a_batch_are_delivered_to_the_host_they_name(bench: Bench) -> None:
    bench.store(DELIVERED, "a", batch=True)
    assert bench.echoes(bench.connect(3), *(echoed(one, 1.0) for one in DELIVERED)) == [True] * 3


def test_messages_are_answered_in_their_order(bench: Bench) -> None:
    bench.store(DELIVERED)
    bench.steps.settle()
    echoes = bench.connect(3)
    answers: list[Any] = []
    echoes.sift([echoed(one, 2.0) for one in DELIVERED], answers.append)
    echoes.sift([sent(1.0, host="a")], answers.append)
    assert not answers
    bench.steps.runner.run()
    assert answers == [[True] * 3, [False]]


def test_a_peer_that_has_much_compared_is_stored_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [sent(float(ms), ms) for ms in range(20)]
    bench.store(events)
    back = [echoed(one, 0.5) for one in events]
    echoes = bench.connect(20)
    for place in range(0, 16, 2):
        assert bench.echoes(echoes, *back[place : place + 2]) == [True, True]
    assert bench.echoes(echoes, *back[16:]) == [False] * 4
    monkeypatch.setattr(logux_echoes, "DELIVERED_MAX", 3)
    assert bench.echoes(bench.connect(20), *back) == [False] * 17 + [True] * 3
    monkeypatch.setattr(logux_echoes, "PAIRS_MAX", 2)
    assert bench.echoes(bench.connect(20), *back) == [False] * 17 + [True] * 3
    monkeypatch.setattr(logux_echoes, "PAIRS_MAX", 1)
    assert bench.echoes(bench.connect(20), *back) == [False] * 20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    times=st.lists(st.integers(0, 400), min_size=2, max_size=40, unique=True),
    contents=st.integers(1, 40),
    shift=st.integers(-40, 40).filter(bool).map(lambda halves: halves / 2),
    data=st.data(),
)
def test_new_events_beside_echoes_are_stored(
    bench: Bench,
    times: list[int],
    contents: int,
    shift: float,
    data: st.DataObject,
) -> None:
    """New events are stored however similar they are: contents and time differences repeat."""
    bench.topic += "x"  # a log that no other example uses
    delivered = [sent(float(ms), place % contents) for place, ms in enumerate(times)]
    bench.store(delivered)
    fresh = data.draw(st.lists(st.integers(1000, 1400), max_size=1))
    new = [sent(float(ms), 0) for ms in fresh]
    found = bench.echoes(
        bench.connect(len(times)), *(echoed(one, shift) for one in delivered), *new
    )
    assert found[len(times) :] == [False] * len(new)
