"""Batches with channel messages, on a real store driven step by step: each is stored once, and numbered."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headrace.broker.channel import batch_messages
from headrace.broker.channel.batch_messages import BatchMessages
from headrace.broker.channel.channel import Accepted, ChannelRule, Joined
from headrace.broker.channel.hub import Channels
from headrace.broker.channel.member import Batch, Receive, Standing
from headrace.broker.channel.snapshots import NotedSnapshots
from headrace.config.settings import Config, Journal, Segment
from headrace.errors import BadBlockError, ChannelError
from headrace.log import layout
from headrace.log.store import Appended, BatchAnswer, BatchRefusedError
from headrace.model import CHANNEL_PREFIX, PAYLOAD_BYTES_MAX
from headrace.payload.channel import Content, StoredMessage, decode_message, decode_row, encode_row
from headrace.payload.reducers import reducer
from tests.fakes.store import RecordingListener, StepClock, StepStore
from tests.log.conftest import QUICK

LEASE_MS, GRACE_MS, REMEMBER_MS = 1_000_000, 10_000, 10_000_000
NAMES = ("a", "b")
DUPLICATE = BatchAnswer(duplicate=True, records=0)


def row(processor: str, number: int = 0, value: Any = 0, size: int = 0) -> bytes:
    """Return a row of a block. A row without a number gets the next one."""
    data = json.dumps([value, "x" * size]).encode()
    return encode_row(StoredMessage(processor, number, Content(data, is_json=True)))


class Listener(RecordingListener):
    def __init__(self) -> None:
        super().__init__()
        self.hub: Channels | None = None

    def committed(self, appended: Sequence[Appended]) -> None:
        super().committed(appended)
        for one in appended:
            if self.hub is not None and one.topic.name.startswith("$channel/"):
                self.hub.committed(one)


class Watcher:
    """A connection that remembers what was sent to it."""

    is_gone = False
    instance, attempt = "", 0

    def __init__(self) -> None:
        self.got: list[tuple[str, int]] = []

    def messages(self, channel: str, batch: Batch) -> bool:
        found = [decode_message(one.payload) for one in batch.messages]
        self.got += [(one.processor, one.number) for one in found]
        return True

    def signal(self, channel: str) -> None: ...

    def ended(self, channel: str, reason: str) -> None: ...


class Bench:
    """A store with channels that can be killed and restarted."""

    def __init__(self, path: Path, reducer_name: str = "last") -> None:
        self._reducer = reducer(reducer_name)
        self._clock = StepClock()
        self.config = Config(
            data_dir=path,
            journal=Journal(file_bytes=1 << 16, files=3, commit_bytes_max=4096),
            segment=Segment(bytes=4096),
        )
        self.start()

    def start(self, *, ready: bool = True) -> None:
        listener = Listener()
        self.steps = StepStore(self.config, listener=listener, clock=self._clock)
        rule = ChannelRule(self._reducer, LEASE_MS, GRACE_MS, GRACE_MS)
        store = self.steps.store
        self.hub = listener.hub = Channels(
            store,
            self.steps.runner,
            NotedSnapshots(store),
            lambda _: rule,
            self.steps.clock,
            elapsed_ms=self.steps.clock,
            members_max=10,
            remember_ms=REMEMBER_MS,
        )
        if ready:
            self.make_ready()

    def make_ready(self) -> None:
        self.batches.take_over(CHANNEL_PREFIX, BatchMessages(self.hub, self.steps.runner))
        self.run()

    @property
    def batches(self) -> Any:
        return self.steps.store.batches

    def run(self) -> None:
        self.steps.runner.run()

    def decide(self, number: int, *staged: str) -> list[Any]:
        answers: list[Any] = []
        self.batches.decide("p", number, staged, answers.append)
        return answers

    def write(self, number: int, *blocks: tuple[str, list[bytes]]) -> Any:
        [answer] = self._asked(number, self.steps.stage(*blocks))
        return answer

    def _asked(self, number: int, staged: str) -> list[Any]:
        answers = self.decide(number, staged)
        self.run()
        return answers

    def refused(self, number: int, *blocks: tuple[str, list[bytes]]) -> str:
        answer = self.write(number, *blocks)
        assert isinstance(answer, BatchRefusedError)
        return str(answer)

    def kill(self) -> None:
        self.steps.crash()

    def restart(self, *, ready: bool = True) -> None:
        self.kill()
        self.start(ready=ready)

    def stored(self, name: str) -> list[tuple[str, int, Any]]:
        """Return processor, number and value of the stored messages, in order."""
        found = map(decode_message, self.steps.payloads(f"$channel/{name}"))
        return [(one.processor, one.number, json.loads(one.content.data)[0]) for one in found]

    def join(self, name: str, processor: str) -> tuple[Joined, Watcher]:
        watcher = Watcher()
        joined: list[Joined] = []
        self.hub.get(name).join(processor, watcher, Receive.PUSH, joined.append, _never)
        self.run()
        return joined[0], watcher

    def send(self, name: str, processor: str, number: int) -> Accepted:
        channel = self.hub.get(name)
        accepted: list[Accepted] = []
        content = Content(b'["sent"]', is_json=True)
        channel.send(channel.members[processor], number, content, accepted.append)
        self.run()
        return accepted[0]

    def leased_until_ms(self, name: str, processor: str) -> int:
        told = self.hub.report.describe(self.hub.get(name), None, self.steps.clock.ms)
        [member] = [one for one in told["members"] if one["processor"] == processor]
        return int(member["leased_until_ms"])

    def pass_time(self, ms: int) -> None:
        self.steps.clock.ms += ms
        for _ in range(3):
            self.hub.tick()
            self.run()


def _never(error: ChannelError) -> None:
    raise error


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield Path(path)


@pytest.fixture(autouse=True, scope="module")
def _few_directories() -> Iterator[None]:
    """Use four segment directories instead of 256, which makes many starts quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SEGMENT_DIRECTORIES", 4)
        yield


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.kill()


def test_messages_without_numbers_get_the_next_ones_of_their_processor(bench: Bench) -> None:
    answer = bench.write(
        0,
        ("$channel/a", [row("x", value=1), row("y", value=2), row("x", value=3)]),
        ("plain", [b"one"]),
        ("$channel/b", [row("x", value=4)]),
        ("$channel/a", [row("x", value=5)]),
    )
    assert answer == BatchAnswer(duplicate=False, records=6)
    assert bench.stored("a") == [("x", 1, 1), ("y", 1, 2), ("x", 2, 3), ("x", 3, 5)]
    assert bench.stored("b") == [("x", 1, 4)]
    assert bench.steps.payloads("plain") == [b"one"]
    assert bench.decide(0) == [] and bench.steps.batch("p", 0) == DUPLICATE
    bench.write(1, ("$channel/a", [row("x", value=6)]))
    assert bench.stored("a")[-1] == ("x", 4, 6)
    bench.steps.settle()
    assert list(bench.steps.layout.staged.iterdir()) == []


def test_a_number_is_stored_once_whoever_brings_it(bench: Bench) -> None:
    bench.write(0, ("$channel/a", [row("x", 1, "one"), row("x", 2, "two"), row("x", 2, "again")]))
    assert bench.write(1, ("$channel/a", [row("x", n, "other") for n in (1, 2, 3)])).records == 3
    assert bench.stored("a") == [("x", 1, "one"), ("x", 2, "two"), ("x", 3, "other")]
    joined, _ = bench.join("a", "x")
    assert joined.number == 3
    assert bench.send("a", "x", 3).is_duplicate
    assert not bench.send("a", "x", 4).is_duplicate
    bench.restart()
    bench.write(2, ("$channel/a", [row("x", 4), row("x", 5, "five")]))
    assert [number for _, number, _ in bench.stored("a")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("x", 3)], "the next number of 'x' in channel 'a' is 2, not 3"),
        (
            [row("x", 2), row("x", 4)],
            "message 4 of 'x' to channel 'a' comes after its message 2",
        ),
        (
            [row("x", 2), row("x")],
            "some messages of 'x' to channel 'a' have a number and some have none",
        ),
    ],
)
def test_a_gap_refuses_the_batch_before_it_is_decided(
    bench: Bench, rows: list[bytes], said: str
) -> None:
    bench.write(0, ("$channel/a", [row("x", 1)]))
    staged = bench.steps.stage(
        ("plain", [b"row"]), ("$channel/b", [row("z")]), ("$channel/a", rows)
    )
    answers = bench.decide(1, staged)
    behind = bench.decide(2, bench.steps.stage(("plain", [b"behind"])))
    bench.run()
    assert [str(one).partition(":")[0] for one in answers] == [said]
    assert behind == [BatchAnswer(duplicate=False, records=1)]
    assert bench.steps.payloads("plain") == [b"behind"]
    assert bench.stored("b") == [] and len(bench.stored("a")) == 1
    assert bench.steps.layout.staged_file(staged).exists()
    assert bench.batches.pending == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_was_refused_can_be_asked_for_again(bench: Bench, is_killed: bool) -> None:
    staged = bench.steps.stage(("$channel/a", [row("x", 2), row("x", 3)]))
    answers = bench.decide(0, staged)
    bench.run()
    assert isinstance(answers[0], BatchRefusedError)
    if is_killed:
        bench.restart()
    bench.batches.decide("other", 0, [bench.steps.stage(("$channel/a", [row("x", 1)]))], print)
    bench.run()
    assert bench.steps.batch("p", 0, staged) == BatchAnswer(duplicate=False, records=2)
    assert [number for _, number, _ in bench.stored("a")] == [1, 2, 3]


def test_what_the_reducer_cannot_fold_refuses_the_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "map")
    good = encode_row(StoredMessage("x", 0, Content(b'{"key": "k", "value": 1}', is_json=True)))
    said = bench.refused(0, ("$channel/a", [good, row("x")]))
    assert said.startswith("channel 'a' cannot take a message of 'x': it is not what this reducer")
    assert bench.write(0, ("$channel/a", [good])) == BatchAnswer(duplicate=False, records=1)
    bench.kill()


def test_what_is_no_message_cannot_be_staged(bench: Bench) -> None:
    broken = row("x").replace(b"[0,", b"[0;")
    with pytest.raises(BadBlockError, match=r"block 2 at byte .*: record 2: its content is not"):
        bench.steps.stage(("$channel/a", [row("x")]), ("$channel/a", [row("x"), broken]))
    assert list(bench.steps.layout.staged.iterdir()) == []


@pytest.mark.parametrize("processor", ["x", "n" * 31, "n" * 32, "n" * 255, "ä" * 100])
@pytest.mark.parametrize("number", [0, 1, 300, (1 << 53) - 1])
def test_a_row_is_read_as_it_was_written(processor: str, number: int) -> None:
    for content in (Content(b"[1]", True), Content(b"\x00", False)):
        message = StoredMessage(processor, number, content)
        assert decode_row(encode_row(message)) == message


def test_a_message_without_a_number_leaves_room_for_the_largest(bench: Bench) -> None:
    largest = PAYLOAD_BYTES_MAX - len(
        encode_row(StoredMessage("x", 0, Content(bytes(1 << 17), False)))
    )
    content = Content(bytes((1 << 17) + largest - 8), is_json=False)
    payload = encode_row(StoredMessage("x", 0, content))
    assert len(payload) == PAYLOAD_BYTES_MAX - 8
    with pytest.raises(ValueError, match="may have 262144 bytes, this one has 262145"):
        encode_row(StoredMessage("x", 0, content._replace(data=content.data + b"0")))
    with pytest.raises(ValueError, match="may have 262144 bytes"):
        decode_row(payload[:-1] + b"00" * 4)


def test_members_get_what_a_batch_brings_and_its_sender_is_none(bench: Bench) -> None:
    _, watcher = bench.join("a", "member")
    bench.write(0, ("$channel/a", [row("x"), row("member"), row("x")]))
    assert watcher.got == [("x", 1), ("x", 2)]
    members = bench.hub.get("a").members
    assert members["x"].standing is Standing.LEFT
    assert members["member"].number == 1
    assert bench.hub.get("a").schedule is None
    assert bench.send("a", "member", 2) == Accepted(bench.hub.get("a").end_offset, False)
    [(at, _)] = bench.steps.read("$channel/a")[-1:]
    assert at == bench.hub.get("a").end_offset


def test_who_sends_with_batches_only_does_not_hold_the_log(bench: Bench) -> None:
    _, watcher = bench.join("a", "member")
    bench.write(0, ("$channel/a", [row("x"), row("x")]))
    channel = bench.hub.get("a")
    end = channel.topic.end_offset
    channel.ack(channel.members["member"], end, lambda _: None, _never)
    bench.pass_time(1000)
    assert channel.topic.start_offset == end
    assert watcher.got == [("x", 1), ("x", 2)]


def test_a_batch_does_not_renew_the_lease_of_a_member(bench: Bench) -> None:
    _, watcher = bench.join("a", "away")
    bench.join("a", "there")
    bench.hub.membership.gone(bench.hub.get("a"), "away", watcher)
    bench.pass_time(LEASE_MS // 2)
    bench.write(0, ("$channel/a", [row("away")]))
    away = bench.hub.get("a").members["away"]
    assert away.offset == bench.hub.get("a").end_offset > 0  # its own messages are not pending
    assert bench.leased_until_ms("a", "away") > bench.steps.clock.ms
    bench.pass_time(LEASE_MS // 2)
    assert bench.leased_until_ms("a", "away") <= bench.steps.clock.ms
    bench.write(1, ("$channel/a", [row("away")]))
    assert bench.leased_until_ms("a", "away") <= bench.steps.clock.ms
    # The member is forgotten only when this time has passed since the last message in its name.
    bench.pass_time(REMEMBER_MS - 1)
    assert bench.hub.get("a").members["away"].number == 2
    bench.pass_time(2)
    assert "away" not in bench.hub.get("a").members


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_channel_that_nobody_has_joined_is_destroyed_after_its_grace(
    bench: Bench, is_killed: bool
) -> None:
    bench.pass_time(1)  # completes the work that is done once after a start
    bench.write(0, ("$channel/a", [row("x", value="last")]))
    if is_killed:
        bench.restart()
    bench.pass_time(GRACE_MS - 1)
    assert len(bench.stored("a")) == 1
    bench.pass_time(1)
    assert bench.stored("a") == []
    joined, _ = bench.join("a", "x")
    assert joined.number == 1
    assert joined.snapshot is not None and joined.snapshot.content.data == b'["last", ""]'
    bench.write(1, ("$channel/a", [row("x")]))
    assert bench.stored("a") == [("x", 2, 0)]


def test_more_batches_do_not_put_off_the_destruction(bench: Bench) -> None:
    bench.write(0, ("$channel/a", [row("x")]))
    bench.pass_time(GRACE_MS - 1)
    bench.write(1, ("$channel/a", [row("x")]))
    bench.pass_time(1)
    assert bench.stored("a") == []


def test_a_gap_behind_the_decision_is_passed_over(bench: Bench) -> None:
    """The numbers before the gap are forgotten, but nothing that was decided is left out."""
    bench.write(0, ("$channel/a", [row("x", 1)]))
    answers = bench.decide(1, bench.steps.stage(("$channel/a", [row("x", 2), row("x", 3)])))
    while not bench.batches._batches[0].decided:
        bench.steps.runner.step()
    bench.pass_time(REMEMBER_MS + GRACE_MS)
    assert answers == [BatchAnswer(duplicate=False, records=2)]
    assert bench.hub.get("a").members["x"].number == 3


def mixed(bench: Bench) -> str:
    """Stage a batch of several pieces: numbered and unnumbered messages for two channels, and records."""
    blocks: list[tuple[str, list[bytes]]] = []
    for n in range(24):
        numbered = [row("numbered", n * 2 + m + 1, f"{n}.{m}", size=300) for m in range(2)]
        blocks.append(("$channel/a", numbered))
        free = [row("free", value=f"{n}.{m}", size=300) for m in range(3)]
        blocks.append((f"$channel/{NAMES[n % 3 % 2]}", free))
        blocks.append(("plain", [b"row %d" % n + bytes(300)]))
    return bench.steps.stage(*blocks)


def check_mixed(bench: Bench) -> None:
    stored = {name: bench.stored(name) for name in NAMES}
    numbered = [(number, value) for who, number, value in stored["a"] if who == "numbered"]
    assert numbered == [(n * 2 + m + 1, f"{n}.{m}") for n in range(24) for m in range(2)]
    for name in NAMES:
        free = [(number, value) for who, number, value in stored[name] if who == "free"]
        values = [f"{n}.{m}" for n in range(24) if NAMES[n % 3 % 2] == name for m in range(3)]
        assert free == list(enumerate(values, 1))
    rows = [payload.rstrip(b"\0") for payload in bench.steps.payloads("plain")]
    assert rows == [b"row %d" % n for n in range(24)]
    for name in NAMES:
        channel = bench.hub.get(name)
        assert channel.end_offset == channel.topic.end_offset
        assert channel.members["free"].number == (48 if name == "a" else 24)


def test_a_kill_at_any_step_leaves_each_message_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_messages, "SENT_BYTES_MAX", 700)  # so that blocks are cut too
    done = False
    kills = 0
    while not done:
        path = tmp_path / str(kills)
        bench = Bench(path)
        staged = mixed(bench)
        answers = bench.decide(0, staged)
        for _ in range(kills):
            bench.steps.runner.step()
        done = bool(answers)
        bench.restart()
        assert bench.batches.pending == 0
        if not bench.stored("a"):  # not decided: nothing is stored, and the batch can be sent again
            assert bench.steps.payloads("plain") == []
            assert bench.steps.batch("p", 0, staged).records == 144
        check_mixed(bench)
        assert bench.steps.batch("p", 0) == DUPLICATE
        bench.kill()
        shutil.rmtree(path)
        kills += 1
    assert kills > 20


def test_a_kill_while_messages_are_given_again_leaves_each_once(tmp_path: Path) -> None:
    for kills in range(0, 60, 3):
        bench = Bench(tmp_path / str(kills))
        bench.decide(0, mixed(bench))
        while bench.steps.store.topic("$channel/a").end_ordinal < 9:
            bench.steps.runner.step()
        bench.restart(ready=False)
        bench.batches.take_over(CHANNEL_PREFIX, BatchMessages(bench.hub, bench.steps.runner))
        for _ in range(kills):
            bench.steps.runner.step()
        bench.restart()
        check_mixed(bench)
        bench.kill()


@pytest.mark.parametrize("at", range(0, 60, 4))
def test_a_stop_at_any_step_is_clean_and_the_next_start_goes_on(tmp_path: Path, at: int) -> None:
    bench = Bench(tmp_path)
    staged = mixed(bench)
    answers = bench.decide(0, staged)
    for _ in range(at):
        bench.steps.runner.step()
    bench.batches.stop()
    bench.steps.close()
    assert answers in ([None], [BatchAnswer(duplicate=False, records=144)])
    bench.start()
    if not bench.stored("a"):
        assert bench.steps.batch("p", 0, staged).records == 144
    check_mixed(bench)
    assert bench.steps.batch("p", 0) == DUPLICATE
    bench.kill()


def test_a_store_that_fails_answers_nobody_and_the_next_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    answers = bench.decide(0, mixed(bench))
    while bench.steps.store.topic("$channel/a").end_ordinal < 9:
        bench.steps.runner.step()
    bench.steps.store._fail("the disk is gone")
    bench.run()
    assert answers == []
    bench.restart()
    check_mixed(bench)
    bench.kill()


def test_the_same_producer_and_number_again_is_another_batch_when_they_are_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(0, ("$channel/a", [row("x", value=1)]))
    monkeypatch.setattr(bench.batches, "_was_decided", lambda *_: False)
    bench.write(0, ("$channel/a", [row("x", value=2)]))
    assert bench.stored("a") == [("x", 1, 1), ("x", 2, 2)]


def test_uploads_from_before_a_start_are_looked_through_too(bench: Bench) -> None:
    gap = bench.steps.stage(("plain", [b"row"]), ("$channel/a", [row("x", 2)]))
    plain = bench.steps.stage(("plain", [b"row"]))
    bench.restart()
    refused, written = bench.decide(0, gap), bench.decide(1, plain)
    bench.run()
    assert isinstance(refused[0], BatchRefusedError)
    assert written == [BatchAnswer(duplicate=False, records=1)]
    assert bench.steps.payloads("plain") == [b"row"]


def test_a_batch_that_cannot_be_looked_through_is_so_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object) -> Any:
        raise OSError("no memory")

    staged = bench.steps.stage(("$channel/a", [row("x")]))
    with monkeypatch.context() as patch:
        patch.setattr("headrace.log.batch.batches.read_staged", no_memory)
        answers = bench.decide(0, staged)
        bench.run()
    assert answers == []
    assert 'batch 0 of producer "p" waits and is retried: no memory' in caplog.text
    bench.batches.tick()
    bench.run()
    assert answers == [BatchAnswer(duplicate=False, records=1)]
    assert bench.stored("a") == [("x", 1, 0)]
