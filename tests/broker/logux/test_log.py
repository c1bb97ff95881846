"""A Logux log on a real store and a real table, driven step by step: every event is stored once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.logux import log as logux_log
from headrace.broker.logux.event_ids import FILE_NAME, EventIds, EventIdsError
from headrace.broker.logux.log import LoguxLog, NewEvent
from headrace.config.settings import Config, Journal, Segment
from headrace.model import Durability, Position
from headrace.payload.logux import Envelope, decode_envelope, encode_envelope, key_of, raw_event
from tests.fakes.store import StepStore

TOPIC = "$logux/main"


def event(*created: Any, origin: str = "a") -> NewEvent:
    times = list(created)
    raw = raw_event({"type": "t", "of": times})
    return NewEvent.of(encode_envelope(Envelope(raw, created=times, origin=origin)), times)


class Bench:
    """A log that can be restarted and killed."""

    def __init__(self, path: Path, durability: Durability = Durability.SYNCED) -> None:
        self.path = path
        self.config = Config(
            data_dir=path,
            durability=durability,
            journal=Journal(file_bytes=1 << 16, files=3),
            segment=Segment(bytes=4096),
        )
        self.repeated: list[int] = []
        self.start()

    def start(self) -> None:
        self.steps = StepStore(self.config)
        self.ids = EventIds(self.path)
        topic = self.steps.store.topic(TOPIC)
        self.log = LoguxLog(
            topic, self.steps.store, self.steps.runner, self.ids, self.repeated.append
        )

    def run(self) -> None:
        self.steps.runner.run()

    def add(self, *events: NewEvent) -> None:
        answers: list[int] = []
        self.log.add(events, lambda: answers.append(1))
        self.run()
        if not answers:
            # The next tick rebuilds a table that cannot be used.
            self.log.tick()
            self.run()
        assert answers == [1]

    def locate(self, *created: Any) -> int | None:
        answers: list[int | None] = []
        self.log.locate([key_of(["nothing", *created]), key_of(list(created))], answers.append)
        self.run()
        if not answers:
            self.log.tick()
            self.run()
        [found] = answers
        return found

    def index(self) -> None:
        """Run until the table has every event."""
        while not self.log.idle:
            self.log.tick()
            self.run()

    def kill(self) -> None:
        self.ids.close()
        self.steps.crash()

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def stored(self) -> list[list[Any]]:
        """Times of the stored events, in order."""
        payloads = self.steps.payloads(TOPIC)
        return [decode_envelope(payload).created or [] for payload in payloads]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.kill()


def nothing(bench: Bench) -> None: ...


def index(bench: Bench) -> None:
    bench.index()


def restart(bench: Bench) -> None:
    bench.restart()


def apply_and_restart(bench: Bench) -> None:
    bench.index()
    bench.steps.settle()
    bench.restart()


def lose_the_table(bench: Bench) -> None:
    bench.index()
    bench.kill()
    for file in bench.path.glob(f"{FILE_NAME}*"):
        file.unlink()
    bench.start()


def damage_the_table(bench: Bench) -> None:
    bench.index()
    bench.kill()
    (bench.path / FILE_NAME).write_bytes(b"this is no table" * 1000)
    bench.start()


MEANWHILE = [nothing, index, restart, apply_and_restart, lose_the_table, damage_the_table]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_an_event_that_comes_again_is_not_stored_again(
    bench: Bench, meanwhile: Callable[[Bench], None]
) -> None:
    first = [event(n, "a", 0) for n in range(10)]
    bench.add(*first)
    meanwhile(bench)
    bench.add(*first[3:], event(10, "a", 0), *first[:3])
    bench.add(event(10.0, "a", 0.0))
    assert bench.stored == [[n, "a", 0] for n in range(11)]
    assert bench.repeated == [10, 1]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_an_old_event_that_was_never_there_is_new(
    bench: Bench, meanwhile: Callable[[Bench], None]
) -> None:
    bench.add(event(5, "a", 0), event(7, "a", 0))
    meanwhile(bench)
    bench.add(event(6, "a", 0), event(5, "a", 0), event(5, "b", 0), event(5, "a", 1))
    expected = [[5, "a", 0], [7, "a", 0], [6, "a", 0], [5, "b", 0], [5, "a", 1]]
    assert bench.stored == expected


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_times_of_any_timer_are_told_apart(
    bench: Bench, meanwhile: Callable[[Bench], None]
) -> None:
    times: list[list[Any]] = [[1], ["1"], ["x", 1], [1, 2], [1, 2, 3], [1, "2", 3], [1.5, "a", 0]]
    bench.add(*(event(*time) for time in times))
    meanwhile(bench)
    bench.add(*(event(*time) for time in reversed(times)))
    assert bench.stored == times


def test_times_of_one_addition_may_run_backwards(bench: Bench) -> None:
    bench.add(event(1, "a", 0))
    bench.index()
    bench.add(event(9, "a", 0), event(8, "a", 0), event(9, "a", 0), event(1, "a", 0))
    assert bench.stored == [[1, "a", 0], [9, "a", 0], [8, "a", 0]]


def test_nobody_is_answered_before_the_event_is_durable(bench: Bench) -> None:
    bench.add(event(0, "a", 0))
    answers: list[str] = []
    bench.log.add([event(1, "a", 0)], lambda: answers.append("first"))
    bench.log.add([event(1, "a", 0)], lambda: answers.append("again"))
    bench.log.add([event(0, "a", 0)], lambda: answers.append("old"))
    seen: list[tuple[int, int]] = []
    while bench.steps.runner.step():
        seen.append((len(answers), bench.log.topic.end_ordinal))
    assert answers == ["first", "again", "old"]
    assert all(ordinal == 2 for count, ordinal in seen if count)


def test_an_event_that_is_no_longer_kept_is_new(bench: Bench) -> None:
    events = [event(n, "a", 0) for n in range(50)]
    bench.add(*events)
    bench.steps.settle()
    store, topic = bench.steps.store, bench.log.topic
    store.trim(topic, store.locate_ordinal(topic, 30), lambda: None)
    bench.run()
    bench.index()
    bench.add(events[40], events[10])
    assert bench.stored == [[n, "a", 0] for n in [*range(30, 50), 10]]


@pytest.mark.parametrize("meanwhile", [nothing, index, restart])
def test_a_log_made_anew_has_nothing_of_the_old_one(
    bench: Bench, meanwhile: Callable[[Bench], None]
) -> None:
    events = [event(n, "a", 0) for n in range(5)]
    bench.add(*events)
    meanwhile(bench)
    bench.steps.store.destroy(bench.log.topic, lambda: None)
    bench.run()
    bench.add(*events[2:])
    bench.add(*events)
    bench.index()
    bench.add(*events)
    assert bench.stored == [[n, "a", 0] for n in [2, 3, 4, 0, 1]]


def test_another_log_notices_that_the_table_is_gone(bench: Bench) -> None:
    store, runner = bench.steps.store, bench.steps.runner
    other = LoguxLog(store.topic("$logux/other"), store, runner, bench.ids)
    other.add([event(1, "a", 0)], lambda: None)
    bench.add(event(1, "a", 0))
    while not other.idle:
        other.tick()
        runner.run()
    bench.ids.discard()
    other.add([event(1, "a", 0)], lambda: None)
    runner.run()
    assert store.topic("$logux/other").end_ordinal == 1


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_an_event_is_found_where_it_lies(bench: Bench, meanwhile: Callable[[Bench], None]) -> None:
    bench.add(*[event(n, "a", 0) for n in range(200)])
    meanwhile(bench)
    bench.add(*[event(n, "b", 0) for n in range(200)])
    assert bench.locate(7, "a", 0) == 7
    assert bench.locate(199.0, "b", 0) == 399
    assert bench.locate(200, "b", 0) is None


def test_an_event_that_is_no_longer_kept_lies_nowhere(bench: Bench) -> None:
    bench.add(event(1, "a", 0), event(2, "a", 0))
    bench.index()
    topic = bench.steps.store.topic(TOPIC)
    bench.steps.store.trim(topic, Position(topic.epoch, topic.end_offset // 2, 1), lambda: None)
    bench.run()
    assert bench.locate(1, "a", 0) is None
    assert bench.locate(2, "a", 0) == 1


def test_records_that_are_no_events_are_passed_over(bench: Bench) -> None:
    bench.steps.append(TOPIC, b"no event", b"{}", b"\xff")
    bench.add(event(1, "a", 0))
    bench.index()
    bench.restart()
    bench.add(event(1, "a", 0), event(2, "a", 0))
    assert bench.steps.store.topic(TOPIC).end_ordinal == 5


def test_a_topic_in_memory_does_not_believe_the_table_of_an_earlier_process(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, Durability.MEMORY)
    bench.add(event(1, "a", 0))
    bench.index()
    bench.restart()
    bench.add(event(1, "a", 0), event(1, "a", 0))
    assert bench.stored == [[1, "a", 0]]
    bench.kill()


def test_a_table_that_cannot_be_written_for_now_holds_nobody_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.add(event(1, "a", 0))
    bench.index()
    generation = bench.ids.generation

    def full(*_: object) -> None:
        raise EventIdsError("database or disk is full", is_damage=False)

    with monkeypatch.context() as patch:
        patch.setattr(bench.ids, "add", full)
        bench.add(event(2, "a", 0))
        for _ in range(5):
            bench.log.tick()
            bench.run()
        bench.add(event(3, "a", 0), event(2, "a", 0))
    assert caplog.text.count("disk is full") == 1
    bench.index()
    bench.add(event(2, "a", 0), event(3, "a", 0))
    assert bench.stored == [[n, "a", 0] for n in (1, 2, 3)]
    assert bench.ids.generation == generation


def test_a_full_disk_is_no_damage(tmp_path: Path) -> None:
    ids = EventIds(tmp_path)
    ids.reset("t", Position(1, 0, 0))
    with ids._open() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    many = [(number.to_bytes(16), number) for number in range(10_000)]
    with pytest.raises(EventIdsError, match="full") as full:
        ids.add("t", many, {}, Position(1, 5, 5))
    assert not full.value.is_damage
    assert ids.indexed("t") == Position(1, 0, 0)
    ids.add("t", many, {}, Position(1, 5, 5))
    assert ids.find("t", [many[7][0]], []).ordinals == {many[7][0]: 7}
    ids.close()
    (tmp_path / FILE_NAME).write_bytes(b"x" * 5000)
    with pytest.raises(EventIdsError) as damaged:
        ids.indexed("t")
    assert damaged.value.is_damage
    ids.close()


def test_a_topic_that_jumped_ahead_is_read_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Durability.WRITTEN)
    bench.add(event(1, "a", 0))
    bench.index()
    bench.kill()
    # After another boot, records that were written and not synced may be lost.
    bench.steps = StepStore(bench.config, boot_id=b"the second boot.")
    bench.ids = EventIds(tmp_path)
    store = bench.steps.store
    bench.log = LoguxLog(store.topic(TOPIC), store, bench.steps.runner, bench.ids)
    assert store.topic(TOPIC).end_ordinal > 1 << 32
    kept = len(bench.stored)
    bench.add(event(1, "a", 0), event(2, "a", 0))
    assert bench.stored == [[1, "a", 0], [2, "a", 0]]
    assert kept in (0, 1)
    bench.index()
    position = bench.ids.indexed(TOPIC)
    bench.log.tick()
    assert bench.log.idle
    assert bench.ids.indexed(TOPIC) == position
    bench.kill()


def test_what_is_remembered_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logux_log, "INDEXED_AT_ONCE", 8)
    monkeypatch.setattr(logux_log, "RECENT_MAX", 16)
    monkeypatch.setattr(logux_log, "HOSTS_MAX", 4)
    for n in range(200):
        bench.add(event(n, f"host{n % 13}", 0), event(n // 2, f"host{(n // 2) % 13}", 0))
        assert len(bench.log._recent) <= 18
        assert len(bench.log._latest) <= 4
    assert bench.stored == [[n, f"host{n % 13}", 0] for n in range(200)]


STEPS = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.integers(0, 12), st.sampled_from(["a", "b"]), st.integers(0, 1)),
            min_size=1,
            max_size=5,
        ),
        st.sampled_from(["index", "restart", "tick", "settle", "lose"]),
    ),
    max_size=14,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(STEPS)
def test_whatever_happens_each_event_is_there_once_and_in_the_order_it_came(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    bench = Bench(tmp_path_factory.mktemp("log"))
    expected: list[list[Any]] = []
    for step in steps:
        if isinstance(step, list):
            bench.add(*(event(*created) for created in step))
            for created in map(list, step):
                if created not in expected:
                    expected.append(created)
        elif step == "index":
            bench.index()
        elif step == "restart":
            bench.restart()
        elif step == "tick":
            bench.log.tick()
        elif step == "settle":
            bench.steps.settle()
        else:
            lose_the_table(bench)
    bench.run()
    assert bench.stored == expected
    bench.kill()
