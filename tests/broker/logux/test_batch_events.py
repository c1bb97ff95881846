"""Batches with Logux events, on a real store and a real table, driven step by step: each is stored once."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.logux import log as logux_log
from headrace.broker.logux.event_ids import FILE_NAME, EventIds
from headrace.broker.logux.log import BatchEvents, LoguxLog, NewEvent
from headrace.config.settings import Config, Journal, Limits, PrefixRule, Segment
from headrace.errors import BadBlockError
from headrace.log import layout
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.records import pack_record
from headrace.log.store import BatchAnswer, BatchPart, Block, Progress
from headrace.model import LOGUX_PREFIX, PAYLOAD_BYTES_MAX, Durability
from headrace.payload.logux import created_of, decode_envelope
from tests.fakes.disk import DiskModel, RecordingDisk
from tests.fakes.store import StepStore
from tests.log.conftest import QUICK

LOGS = ("$logux/a", "$logux/b")

DUPLICATE = BatchAnswer(duplicate=True, records=0)


def event(*created: Any, size: int = 0) -> bytes:
    event = {"type": "t", "padding": "x" * size}
    return json.dumps({"event": event, "created": created, "origin": "o"}).encode()


class Bench:
    """A store with Logux logs that can be killed and restarted."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self._options = options
        self.config = Config(
            data_dir=path,
            journal=Journal(file_bytes=1 << 16, files=3, commit_bytes_max=4096),
            segment=Segment(bytes=4096),
            limits=Limits(memory_topic_bytes_max=1 << 20),
            topics=(
                PrefixRule(prefix="$logux/memory", durability=Durability.MEMORY),
                PrefixRule(prefix="$logux/written", durability=Durability.WRITTEN),
            ),
        )
        self.start()

    def start(self, *, ready: bool = True) -> None:
        self.steps = StepStore(self.config, **self._options)
        self.ids = EventIds(self.path)
        self.logs: dict[str, LoguxLog] = {}
        if ready:
            self.make_ready()

    def make_ready(self) -> None:
        self.batches.take_over(LOGUX_PREFIX, BatchEvents(self.log, self.steps.runner))
        self.run()

    @property
    def batches(self) -> Any:
        return self.steps.store.batches

    def log(self, topic: str) -> LoguxLog:
        store = self.steps.store
        handle = store.topic(topic)
        if topic not in self.logs or self.logs[topic].topic is not handle:
            self.logs[topic] = LoguxLog(handle, store, self.steps.runner, self.ids)
        return self.logs[topic]

    def run(self) -> None:
        self.steps.runner.run()

    def decide(self, number: int, *staged: str) -> list[BatchAnswer | None]:
        answers: list[BatchAnswer | None] = []
        self.batches.decide("p", number, staged, answers.append)
        return answers

    def kill(self) -> None:
        self.ids.close()
        self.steps.crash()

    def restart(self, *, ready: bool = True) -> None:
        self.kill()
        self.start(ready=ready)

    def stored(self, topic: str) -> list[list[Any]]:
        """Return the times of the stored events, in order."""
        return [created_of(decode_envelope(one)) for one in self.steps.payloads(topic)]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield Path(path)


@pytest.fixture(autouse=True, scope="module")
def _few_directories() -> Iterator[None]:
    """Use four segment directories instead of 256, which makes hundreds of starts quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SEGMENT_DIRECTORIES", 4)
        yield


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.kill()


def test_events_of_a_batch_are_stored_once_and_others_beside_them(bench: Bench) -> None:
    staged = bench.steps.stage(
        ("plain", [b"one"]),
        ("$logux/a", [event(1, "x", 0), event(2, "x", 0), event(1, "x", 0)]),
        ("plain", [b"two"]),
        ("$logux/b", [event(1, "x", 0)]),
        ("$logux/a", [event(2.0, "x", 0.0), event("any", "timer")]),
    )
    assert bench.steps.batch("p", 0, staged) == BatchAnswer(duplicate=False, records=8)
    assert bench.stored("$logux/a") == [[1, "x", 0], [2, "x", 0], ["any", "timer"]]
    assert bench.stored("$logux/b") == [[1, "x", 0]]
    assert bench.steps.payloads("plain") == [b"one", b"two"]
    assert bench.steps.batch("p", 0, staged) == DUPLICATE
    again = bench.steps.stage(("$logux/a", [event(2, "x", 0), event(3, "x", 0)]))
    assert bench.steps.batch("p", 1, again).records == 2
    assert bench.stored("$logux/a")[2:] == [["any", "timer"], [3, "x", 0]]
    bench.steps.settle()
    assert list(bench.steps.layout.staged.iterdir()) == []


def test_an_event_with_an_id_is_the_one_with_the_same_time(bench: Bench) -> None:
    ids = [b'{"event": {"type": "t"}, "id": "5 x 0", "time": 7}']
    staged = bench.steps.stage(("$logux/a", [*ids, event(5, "x", 0), event(5, "x", 1)]))
    bench.steps.batch("p", 0, staged)
    assert bench.stored("$logux/a") == [[5, "x", 0], [5, "x", 1]]


def test_what_is_no_event_cannot_be_staged(bench: Bench) -> None:
    with pytest.raises(
        BadBlockError, match=r"block 2 at byte .*: record 2: its event is not an object"
    ):
        bench.steps.stage(
            ("$logux/a", [event(1)]),
            ("$logux/a", [event(1), b'{"event": [], "created": [1]}']),
        )
    assert list(bench.steps.layout.staged.iterdir()) == []


def test_what_comes_behind_events_waits_until_they_are_durable(bench: Bench) -> None:
    staged = bench.steps.stage(("$logux/a", [event(1, "x", 0)]), ("plain", [b"one"]))
    answers = bench.decide(0, staged)
    log, plain = bench.log("$logux/a").topic, bench.steps.store.topic("plain")
    while not answers:
        assert bench.steps.runner.step()
        assert plain.end_ordinal <= log.end_ordinal
    assert bench.stored("$logux/a") and bench.steps.payloads("plain") == [b"one"]


def test_many_events_are_given_to_their_logs_in_portions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.store.PORTION_RECORDS_MAX", 10)
    given: list[int] = []
    add = LoguxLog.add

    def counted(log: LoguxLog, events: Any, done: Any) -> None:
        given.append(len(events))
        add(log, events, done)

    monkeypatch.setattr(LoguxLog, "add", counted)
    blocks = [(LOGS[n % 2], [event(n, "x", m, size=50) for m in range(4)]) for n in range(30)]
    assert bench.steps.batch("p", 0, bench.steps.stage(*blocks)).records == 120
    assert max(given) <= 10 and sum(given) == 120
    for log in LOGS:
        expected = [[n, "x", m] for n in range(30) for m in range(4) if LOGS[n % 2] == log]
        assert bench.stored(log) == expected


def test_events_found_at_a_start_wait_for_whoever_stores_them(bench: Bench) -> None:
    staged = bench.steps.stage(("plain", [b"one"]), ("$logux/a", [event(1, "x", 0)]))
    bench.decide(0, staged)
    while not bench.batches._batches[0].decided:
        bench.steps.runner.step()
    bench.restart(ready=False)
    bench.run()
    assert bench.batches.pending == 1
    assert bench.stored("$logux/a") == []
    bench.make_ready()
    assert bench.batches.pending == 0
    assert bench.stored("$logux/a") == [[1, "x", 0]]
    assert bench.steps.payloads("plain") == [b"one"]
    assert bench.steps.batch("p", 0) == DUPLICATE


def mixed(bench: Bench) -> str:
    """Stage a batch of several pieces: events of two logs, some twice, and records of another topic."""
    blocks: list[tuple[str, list[bytes]]] = []
    for n in range(24):
        times = [(n - n % 2 * 3, "x", m) for m in range(3)]
        blocks.append((LOGS[n % 3 % 2], [event(*time, size=400) for time in times]))
        blocks.append(("plain", [b"row %d" % n + bytes(300)]))
    return bench.steps.stage(*blocks)


def check_mixed(bench: Bench) -> None:
    for log in LOGS:
        seen: dict[tuple[Any, ...], None] = {}
        for n in range(24):
            if LOGS[n % 3 % 2] == log:
                seen |= dict.fromkeys((n - n % 2 * 3, "x", m) for m in range(3))
        assert bench.stored(log) == [list(one) for one in seen]
    rows = [payload.rstrip(b"\0") for payload in bench.steps.payloads("plain")]
    assert rows == [b"row %d" % n for n in range(24)]


def test_a_kill_at_any_step_leaves_each_event_once(tmp_path: Path) -> None:
    done = False
    kills = 0
    while not done:
        bench = Bench(tmp_path / str(kills))
        answers = bench.decide(0, mixed(bench))
        for _ in range(kills):
            bench.steps.runner.step()
        done = bool(answers)
        was_decided = bench.steps.store.last_sequence > 0 and not bench.steps.store._writing
        bench.restart()
        assert bench.batches.pending == 0
        if was_decided:
            check_mixed(bench)
            assert bench.steps.batch("p", 0) == DUPLICATE
        bench.kill()
        kills += 1
    assert kills > 20


def test_a_kill_while_events_are_given_again_leaves_each_once(tmp_path: Path) -> None:
    for kills in range(0, 60, 3):
        bench = Bench(tmp_path / str(kills))
        bench.decide(0, mixed(bench))
        while bench.steps.store.topic("$logux/a").end_ordinal < 9:
            bench.steps.runner.step()
        bench.restart(ready=False)
        bench.batches.take_over(LOGUX_PREFIX, BatchEvents(bench.log, bench.steps.runner))
        for _ in range(kills):
            bench.steps.runner.step()
        bench.restart()
        check_mixed(bench)
        bench.kill()


def test_what_a_batch_has_stored_before_is_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    blocks = [("$logux/a", [event(n, "x", 0, size=3000)]) for n in range(40)]
    bench.decide(0, bench.steps.stage(*blocks))
    while bench.steps.store.topic("$logux/a").end_ordinal < 30:
        bench.steps.runner.step()
    given: list[int] = []
    add = BatchEvents.add

    def counted(events: BatchEvents, batch: bytes, parts: Any, done: Any) -> None:
        given.append(len(parts))
        add(events, batch, parts, done)

    monkeypatch.setattr(BatchEvents, "add", counted)
    bench.restart()
    assert 10 <= sum(given) <= 20
    assert bench.stored("$logux/a") == [[n, "x", 0] for n in range(40)]
    bench.kill()


@pytest.mark.parametrize("at", range(0, 60, 4))
def test_a_stop_at_any_step_is_clean_and_the_next_start_goes_on(tmp_path: Path, at: int) -> None:
    bench = Bench(tmp_path)
    answers = bench.decide(0, mixed(bench))
    while not bench.batches._batches[0].decided:
        bench.steps.runner.step()
    for _ in range(at):
        bench.steps.runner.step()
    bench.batches.stop()
    bench.steps.close()
    bench.ids.close()
    assert answers in ([None], [BatchAnswer(duplicate=False, records=96)])
    assert Catalogue.open_for_reading(bench.path).meta().clean
    bench.start()
    check_mixed(bench)
    assert bench.steps.batch("p", 0) == DUPLICATE
    bench.kill()


def test_a_log_in_memory_gets_its_events_and_the_batch_its_end(bench: Bench) -> None:
    staged = bench.steps.stage(
        ("$logux/memory", [event(1, "x", 0), event(1, "x", 0)]),
        ("$logux/written", [event(1, "x", 0)]),
    )
    assert bench.steps.batch("p", 0, staged).records == 3
    assert bench.stored("$logux/memory") == [[1, "x", 0]]
    bench.restart()
    assert bench.stored("$logux/memory") == []
    assert bench.stored("$logux/written") == [[1, "x", 0]]
    assert bench.steps.batch("p", 0) == DUPLICATE


class Unlucky:
    """Random choices with which a crash loses everything that was not synced."""

    def random(self) -> float:
        return 1.0

    def choice(self, fates: Any) -> str:
        assert "missing" in fates
        return "missing"


def test_what_a_crash_of_the_machine_takes_from_a_written_log_is_stored_again(
    tmp_path: Path,
) -> None:
    disk = RecordingDisk()
    with disk.record_catalogue():
        bench = Bench(tmp_path / "data", disk=disk)
        bench.steps.append("$logux/written", event(0, "x", 0))
        bench.steps.store.sync_written()
        bench.run()
        blocks = [("$logux/written", [event(n, "x", 0, size=3000)]) for n in range(1, 20)]
        assert bench.steps.batch("p", 0, bench.steps.stage(*blocks)).records == 19
        while not bench.logs["$logux/written"].idle:
            bench.logs["$logux/written"].tick()
            bench.run()
    bench.kill()
    model = DiskModel(tmp_path / "data")
    for operation in disk.operations:
        model.do(operation)
    model.crashed(tmp_path / "after", None, Unlucky())
    # The table of ids is not written through the same disk, and knows more events than are left.
    for file in (tmp_path / "data").glob(f"{FILE_NAME}*"):
        shutil.copy(file, tmp_path / "after")
    bench = Bench(tmp_path / "after", boot_id=b"the second boot.")
    assert bench.stored("$logux/written") == [[n, "x", 0] for n in range(20)]
    assert bench.steps.batch("p", 0) == DUPLICATE
    bench.kill()


def test_damage_of_a_staged_file_takes_its_block_only(bench: Bench) -> None:
    staged = bench.steps.stage(
        ("$logux/a", [event(1, "x", 0)]),
        ("$logux/a", [event(2, "x", 0)]),
        ("$logux/a", [event(3, "x", 0)]),
        ("plain", [b"behind it"]),
        ("$logux/a", [event(4, "x", 0)]),
    )
    path = bench.steps.layout.staged_file(staged)
    data = bytearray(path.read_bytes())
    for time in (b"[2, ", b"[4, "):
        data[data.index(time)] ^= 1
    path.write_bytes(data)
    assert bench.steps.batch("p", 0, staged) == BatchAnswer(False, records=3, damaged=2)
    assert bench.stored("$logux/a") == [[1, "x", 0], [3, "x", 0]]
    assert bench.batches.pending == 0
    bench.restart()
    assert bench.steps.batch("p", 0) == DUPLICATE


def test_a_store_that_fails_answers_nobody_and_the_next_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    answers = bench.decide(0, mixed(bench))
    while bench.steps.store.topic("$logux/a").end_ordinal < 9:
        bench.steps.runner.step()
    bench.steps.store._fail("the disk is gone")
    bench.run()
    assert answers == []
    bench.restart()
    check_mixed(bench)
    bench.kill()


def test_an_event_of_a_client_and_of_a_batch_is_one(bench: Bench) -> None:
    """Both arrive at the same time, in a log that nobody has used before."""
    staged = bench.steps.stage(("$logux/a", [event(n, "x", 0) for n in range(5)]))
    answers = bench.decide(0, staged)
    mine = [NewEvent.of(event(n, "x", 0), [n, "x", 0]) for n in range(3, 8)]
    told: list[int] = []
    bench.log("$logux/a").add(mine, lambda: told.append(1))
    bench.run()
    assert told and answers
    counted = Counter(map(tuple, bench.stored("$logux/a")))
    assert counted == {(n, "x", 0): 1 for n in range(8)}


def test_who_looks_at_a_log_meanwhile_and_leaves_does_not_cost_it_its_events(bench: Bench) -> None:
    store = bench.steps.store
    answers = bench.decide(0, bench.steps.stage(("$logux/a", [event(1, "x", 0)])))
    while not answers:
        store.forget(store.topic("$logux/a"))
        assert bench.steps.runner.step()
    assert bench.stored("$logux/a") == [[1, "x", 0]]
    bench.steps.append("$logux/a", event(2, "x", 0))
    bench.steps.settle()
    bench.restart()
    assert bench.stored("$logux/a") == [[1, "x", 0], [2, "x", 0]]


def test_a_record_that_is_no_event_after_all_is_told_and_left_out(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    payloads = [event(1, "x", 0), b"no event", event(2, "x", 0)]
    block = Block("$logux/a", 3, b"".join(map(pack_record, payloads)))
    told: list[BaseException | None] = []
    BatchEvents(bench.log, bench.steps.runner).add(
        b"", [BatchPart(block, "p", 0, Progress())], told.append
    )
    bench.run()
    assert told == [None]
    assert bench.stored("$logux/a") == [[1, "x", 0], [2, "x", 0]]
    assert 'topic "$logux/a": a record of a batch is left out' in caplog.text


def test_events_that_cannot_be_looked_at_are_given_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logux_log, "_events_of", _no_memory)
    answers = bench.decide(0, bench.steps.stage(("$logux/a", [event(1, "x", 0)])))
    bench.run()
    assert answers == []
    assert 'batch 0 of producer "p" waits and is retried: no memory' in caplog.text
    monkeypatch.undo()
    bench.batches.tick()
    bench.run()
    assert answers == [BatchAnswer(duplicate=False, records=1)]
    assert bench.stored("$logux/a") == [[1, "x", 0]]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stop_does_not_wait_for_events_that_cannot_be_looked_at(
    tmp_path: Path, is_late: bool
) -> None:
    bench = Bench(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logux_log, "_events_of", _no_memory)
        answers = bench.decide(0, bench.steps.stage(("$logux/a", [event(1, "x", 0)])))
        while bench.batches._held is None:
            bench.steps.runner.step()
        if not is_late:
            bench.run()
        bench.batches.stop()
        bench.steps.close()
        bench.ids.close()
    assert answers == [None]
    bench.start()
    assert bench.stored("$logux/a") == [[1, "x", 0]]
    bench.kill()


def _no_memory(blocks: object) -> None:
    raise OSError("no memory")


@pytest.mark.parametrize("size", [10, PAYLOAD_BYTES_MAX])
def test_events_say_that_they_came_with_a_batch(tmp_path: Path, size: int) -> None:
    bench = Bench(tmp_path)
    one = event(1, "x", 0, size=max(size - len(event(1, "x", 0)), 0))
    none = json.dumps({"event": {"type": "t"}, "created": [2, "x", 0]}).encode()
    bench.steps.batch("p", 0, bench.steps.stage(("$logux/a", [one, none])))
    bench.run()
    first, second = map(decode_envelope, bench.steps.payloads("$logux/a"))
    assert (first.origin, first.batch) == (("o", True) if size == 10 else (None, False))
    assert second.batch is False
    bench.kill()


times = st.tuples(st.integers(0, 5), st.sampled_from("xy"), st.integers(0, 1))
blocks = st.tuples(st.sampled_from([*LOGS, "plain"]), st.lists(times, min_size=1, max_size=6))
batches = st.lists(st.lists(blocks, min_size=1, max_size=8), min_size=1, max_size=3)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches, st.lists(st.integers(0, 60), max_size=3))
def test_whatever_comes_and_whenever_it_is_killed(
    tmp_path: Path, given: Any, kills: list[int]
) -> None:
    bench = Bench(Path(mkdtemp(dir=tmp_path)))
    for number, one in enumerate(given):
        staged = bench.steps.stage(
            *((topic, [event(*time) for time in times]) for topic, times in one)
        )
        answers = bench.decide(number, staged)
        while not bench.batches._batches[0].decided:
            bench.steps.runner.step()
        for steps in kills:
            for _ in range(steps):
                bench.steps.runner.step()
            bench.restart(ready=False)
            bench.batches.take_over(LOGUX_PREFIX, BatchEvents(bench.log, bench.steps.runner))
        bench.run()
        assert kills or answers
        assert bench.batches.pending == 0
    wanted: dict[str, list[tuple[Any, ...]]] = {topic: [] for topic in (*LOGS, "plain")}
    for one in given:
        for topic, some in one:
            wanted[topic] += some
    for log in LOGS:
        assert bench.stored(log) == [list(time) for time in dict.fromkeys(wanted[log])]
    assert bench.stored("plain") == [list(time) for time in wanted["plain"]]
    bench.kill()
