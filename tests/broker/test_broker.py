"""The broker on a real store that is driven step by step: no sockets, no threads, no sleeps."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.broker.broker import (
    SLICE_BYTES_MAX,
    Broker,
    BrokerSubscription,
    Slice,
    SubscriptionState,
)
from headrace.config.settings import Config, Journal, Segment
from headrace.log.records import pack_record
from headrace.model import Durability, Position
from tests.fakes.store import StepStore


def names(topic: str, at: Position, records: Sequence[bytes], ms: int = 0) -> bytes:
    """Encode for people: payload and next offset of each record."""
    out = []
    offset = at.offset
    for record in records:
        offset += len(record)
        out.append(b"%s@%d;" % (record[4:], offset))
    return b"".join(out)


class Peer:
    """A sink that accepts data when a test lets it."""

    peer = "a test"
    protocol = "words"

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.attached_at: int | None = None
        self.exact = False
        self.received = b""
        self.room = True
        self.overtaken_at: list[int] = []
        self.broken_at: list[int] = []
        self.pulling: list[BrokerSubscription] = []

    def attached(self, subscription: BrokerSubscription, offset: int, exact: bool) -> None:
        self.attached_at = offset
        self.exact = exact

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        for piece in slices:
            if not self.room:
                return False
            self.received += piece.data
            subscription.offset, subscription.ordinal = piece.end, piece.end_ordinal
        return True

    def live(self, subscription: BrokerSubscription) -> None:
        """Ignore the change to live delivery."""

    def broken(self, subscription: BrokerSubscription) -> None:
        self.broken_at.append(subscription.offset)

    def overtaken(self, subscription: BrokerSubscription) -> None:
        self.overtaken_at.append(subscription.offset)

    def ready(self, subscription: BrokerSubscription) -> None:
        self.pulling.append(subscription)

    def pull(self) -> None:
        while self.pulling:
            subscription = self.pulling[0]
            data = self.broker.pull(subscription)
            self.received += data
            if not data:
                self.pulling.pop(0)

    @property
    def words(self) -> list[str]:
        return self.received.decode().split(";")[:-1]


class Bench:
    def __init__(self, path: Path, durability: Durability = Durability.SYNCED) -> None:
        config = Config(
            data_dir=path,
            durability=durability,
            journal=Journal(file_bytes=1 << 16, files=3),
            segment=Segment(bytes=256),
        )
        self.steps = StepStore(config)
        self.failures: list[str] = []
        self.broker = Broker(self.steps.store, self.steps.runner, self.failures.append)

    def publish(self, topic: str, *payloads: bytes) -> None:
        stored: list[int] = []
        records = [pack_record(payload) for payload in payloads]
        self.broker.publish({topic: records}, lambda: stored.append(1))
        self.steps.runner.run()
        assert stored == [1]

    def subscribe(
        self, topic: str, offset: int | None, epoch: int | None = None
    ) -> tuple[Peer, BrokerSubscription]:
        peer = Peer(self.broker)
        subscription = self.broker.subscribe(peer, topic, offset, names, epoch)
        self.steps.runner.run()
        return peer, subscription


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.steps.crash()


def test_offsets_point_just_past_each_record(bench: Bench) -> None:
    bench.publish("t", b"foo", b"bar", b"car")
    peer, _ = bench.subscribe("t", 0)
    peer.pull()
    assert peer.words == ["foo@7", "bar@14", "car@21"]


def test_a_subscription_without_offset_gets_only_what_comes_later(bench: Bench) -> None:
    bench.publish("t", b"old")
    peer, subscription = bench.subscribe("t", None)
    assert peer.attached_at == 7
    assert subscription.state is SubscriptionState.LIVE
    bench.publish("t", b"new")
    assert peer.words == ["new@14"]


def test_attaching_to_an_unknown_topic_makes_nothing(bench: Bench) -> None:
    peer, subscription = bench.subscribe("nowhere", None)
    assert peer.attached_at == 0
    bench.broker.unsubscribe(subscription)
    assert bench.steps.store.topics("", "", 10) == []
    bench.publish("nowhere", b"x")
    assert peer.words == []


def test_a_resuming_subscription_becomes_live_without_gap_or_double(bench: Bench) -> None:
    for number in range(50):
        bench.publish("t", b"%d" % number)
    bench.steps.settle()
    bench.publish("t", b"tail")
    peer, subscription = bench.subscribe("t", 0)
    assert subscription.state is SubscriptionState.RESUMING
    bench.publish("t", b"meanwhile")
    peer.pull()
    assert subscription.state is SubscriptionState.LIVE
    bench.publish("t", b"live")
    payloads = [word.partition("@")[0] for word in peer.words]
    assert payloads == [*map(str, range(50)), "tail", "meanwhile", "live"]


def test_a_slow_subscriber_falls_back_to_the_log_and_loses_nothing(bench: Bench) -> None:
    slow, subscription = bench.subscribe("t", None)
    fast, _ = bench.subscribe("t", None)
    bench.publish("t", b"a")
    slow.room = False
    bench.publish("t", b"b", b"c")
    assert subscription.state is SubscriptionState.RESUMING
    bench.publish("t", b"d")
    slow.room = True
    slow.pull()
    assert subscription.state is SubscriptionState.LIVE
    bench.publish("t", b"e")
    assert slow.words == fast.words == ["a@5", "b@10", "c@15", "d@20", "e@25"]


def test_a_fault_in_one_sink_costs_the_other_subscribers_nothing(bench: Bench) -> None:
    faulty, subscription = bench.subscribe("t", None)
    sound, _ = bench.subscribe("t", None)

    def fail(subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        raise RuntimeError("a transport that is gone")

    faulty.deliver = fail  # type: ignore[method-assign]
    bench.publish("t", b"a")
    assert sound.words == ["a@5"]
    assert subscription.state is SubscriptionState.RESUMING
    faulty.pull()
    assert faulty.words == ["a@5"]


def bad_words(topic: str, at: Position, records: Sequence[bytes], ms: int = 0) -> bytes:
    if b"poison" in b"".join(records):
        raise ValueError("a fault")
    return names(topic, at, records)


def test_a_fault_in_one_encoding_costs_the_other_subscribers_nothing(bench: Bench) -> None:
    good, _ = bench.subscribe("t", None)
    bad = Peer(bench.broker)
    bench.broker.subscribe(bad, "t", None, bad_words)
    other, _ = bench.subscribe("t", None)
    bench.publish("t", b"a")
    bench.publish("t", b"poison")
    bench.publish("t", b"b")
    assert good.words == other.words == ["a@5", "poison@15", "b@20"]
    assert bad.words == ["a@5"]
    assert bad.broken_at[0] == 5
    late = Peer(bench.broker)
    bench.broker.subscribe(late, "t", 0, bad_words)
    late.pull()
    assert late.broken_at


class OnlyA:
    """An encoding that takes nothing from most commits."""

    def __init__(self) -> None:
        self.calls = 0

    def takes(self, topic: str, at: Position, records: Sequence[bytes]) -> bool:
        return any(b"a" in record for record in records)

    def __call__(self, topic: str, at: Position, records: Sequence[bytes], ms: int) -> bytes:
        self.calls += 1
        return names(topic, at, [one for one in records if b"a" in one])


def test_who_takes_nothing_of_a_commit_is_passed_over(bench: Bench) -> None:
    peer, encode = Peer(bench.broker), OnlyA()
    subscription = bench.broker.subscribe(peer, "t", None, encode)
    bench.publish("t", b"x")
    bench.publish("t", b"a")
    bench.publish("t", b"y")
    assert (subscription.offset, subscription.ordinal) == (15, 3)
    peer.room = False
    bench.publish("t", b"aa")
    assert subscription.state is SubscriptionState.RESUMING
    peer.room = True
    peer.pull()
    assert peer.words == ["a@10", "aa@21"]
    assert encode.calls == 3


def test_an_unsubscribed_peer_gets_nothing_and_the_others_go_on(bench: Bench) -> None:
    peers = [bench.subscribe("t", None) for _ in range(3)]
    bench.broker.unsubscribe(peers[1][1])
    bench.publish("t", b"x")
    assert [peer.words for peer, _ in peers] == [["x@5"], [], ["x@5"]]


def test_one_publish_to_many_topics_is_done_once(bench: Bench) -> None:
    done: list[int] = []
    records = {f"t{number}": [pack_record(b"x")] for number in range(5)}
    bench.broker.publish(records, lambda: done.append(1))
    bench.steps.runner.run()
    assert done == [1]
    assert len(bench.steps.store.topics("", "", 10)) == 5


def test_a_large_commit_is_delivered_in_slices(bench: Bench) -> None:
    peer, _ = bench.subscribe("t", None)
    sizes: list[int] = []
    deliver = peer.deliver

    def spy(subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        sizes.extend(len(piece.data) for piece in slices)
        return deliver(subscription, slices)

    peer.deliver = spy  # type: ignore[method-assign]
    payload = bytes(1000)
    bench.publish("t", *[payload] * 1000)
    assert len(sizes) > 1
    assert max(sizes) < SLICE_BYTES_MAX * 1.1
    assert len(peer.words) == 1000


def test_a_subscription_goes_on_in_the_next_life_of_a_topic(bench: Bench) -> None:
    bench.publish("t", b"a")
    peer, _ = bench.subscribe("t", None)
    bench.steps.store.destroy(bench.steps.store.topic("t"), lambda: None)
    bench.steps.runner.run()
    bench.publish("t", b"b")
    assert peer.words == ["b@10"]


def test_an_offset_inside_a_record_starts_at_the_next_one(bench: Bench) -> None:
    bench.publish("t", b"foo", b"bar")
    peer, _ = bench.subscribe("t", 3)
    assert peer.attached_at == 7
    peer.pull()
    assert peer.words == ["bar@14"]


def test_an_offset_past_the_end_is_answered_with_the_end(bench: Bench) -> None:
    bench.publish("t", b"foo")
    peer, subscription = bench.subscribe("t", (1 << 64) - 1)
    assert peer.attached_at == 7
    assert subscription.state is SubscriptionState.LIVE


def test_a_position_of_this_life_is_where_it_says(bench: Bench) -> None:
    bench.publish("t", b"foo", b"bar")
    epoch = bench.steps.store.topic("t").epoch
    for offset, found, exact in ((7, 7, True), (14, 14, True), (5, 7, False), (99, 14, False)):
        peer, _ = bench.subscribe("t", offset, epoch)
        assert (peer.attached_at, peer.exact) == (found, exact)


def test_a_position_of_another_life_is_answered_with_everything_kept(bench: Bench) -> None:
    bench.publish("t", b"foo", b"bar")
    epoch = bench.steps.store.topic("t").epoch
    for foreign in (epoch - 1, epoch + 1):
        peer, _ = bench.subscribe("t", 7, foreign)
        assert (peer.attached_at, peer.exact) == (0, False)
        peer.pull()
        assert peer.words == ["foo@7", "bar@14"]


def test_who_had_read_an_earlier_life_to_its_end_has_missed_nothing(bench: Bench) -> None:
    store = bench.steps.store
    bench.publish("t", b"foo")
    epoch = store.topic("t").epoch
    store.destroy(store.topic("t"), lambda: None)
    bench.steps.runner.run()
    for offset, exact in ((7, True), (0, False)):
        peer, _ = bench.subscribe("t", offset, epoch)
        assert (peer.attached_at, peer.exact) == (7, exact), "between two lives"
    bench.publish("t", b"bar")
    assert store.topic("t").epoch > epoch
    for offset, exact in ((7, True), (0, False)):
        peer, _ = bench.subscribe("t", offset, epoch)
        assert (peer.attached_at, peer.exact) == (7, exact), "in the next one"
        peer.pull()
        assert peer.words == ["bar@14"]


def test_who_came_before_a_topic_was_made_has_missed_nothing(bench: Bench) -> None:
    before = bench.steps.store.topic("t").epoch
    bench.publish("t", b"foo")
    peer, _ = bench.subscribe("t", 0, before)
    assert (peer.attached_at, peer.exact) == (0, True)


def test_of_a_topic_in_memory_no_other_life_is_known(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Durability.MEMORY)
    bench.publish("t", b"foo")
    peer, _ = bench.subscribe("t", 0, bench.steps.store.topic("t").epoch - 1)
    assert (peer.attached_at, peer.exact) == (0, False)
    bench.steps.crash()


def test_frames_carry_the_epoch_of_the_life_they_belong_to(bench: Bench) -> None:
    epochs: list[int] = []

    def encode(topic: str, at: Position, records: Sequence[bytes], ms: int = 0) -> bytes:
        epochs.append(at.epoch)
        return b"."

    store = bench.steps.store
    bench.broker.subscribe(Peer(bench.broker), "t", None, encode)
    bench.publish("t", b"foo")
    first = store.topic("t").epoch
    store.destroy(store.topic("t"), lambda: None)
    bench.steps.runner.run()
    bench.publish("t", b"bar")
    assert epochs == [first, store.topic("t").epoch]
    assert first < epochs[1]


def test_a_sink_hears_of_records_that_are_gone_before_it_gets_what_follows(bench: Bench) -> None:
    store = bench.steps.store
    for number in range(8):
        bench.publish("t", b"%03d" % number)
        bench.steps.settle()
    peer, _ = bench.subscribe("t", 7)
    store.trim(store.topic("t"), store.locate_offset(store.topic("t"), 35), lambda: None)
    bench.steps.runner.run()
    peer.pull()
    assert peer.overtaken_at == [7]
    assert peer.words == ["005@42", "006@49", "007@56"]


def test_a_sink_that_ends_a_subscription_when_it_is_overtaken_gets_no_more(bench: Bench) -> None:
    store = bench.steps.store
    bench.publish("t", b"old")
    peer, subscription = bench.subscribe("t", 0)
    store.destroy(store.topic("t"), lambda: None)
    bench.steps.runner.run()
    bench.publish("t", b"new")
    peer.overtaken = lambda subscription: bench.broker.unsubscribe(subscription)  # type: ignore[method-assign]
    peer.pull()
    assert peer.words == []
    assert subscription.state is SubscriptionState.CLOSED


def test_a_delivery_is_encoded_once_for_all_live_subscribers_of_a_protocol(bench: Bench) -> None:
    calls: list[int] = []

    def encode(topic: str, at: Position, records: Sequence[bytes], ms: int = 0) -> bytes:
        calls.append(len(records))
        return b"%d;" % len(records)

    peers = [Peer(bench.broker) for _ in range(50)]
    for peer in peers:
        bench.broker.subscribe(peer, "t", None, encode)
    bench.publish("t", b"one", b"two")
    assert calls == [2]
    assert all(peer.words == ["2"] for peer in peers)


def ordinals(topic: str, at: Position, records: Sequence[bytes], ms: int = 0) -> bytes:
    """Encode the ordinals of the records."""
    return b"".join(b"%d;" % (at.ordinal + number) for number in range(len(records)))


def test_what_is_behind_so_many_records_can_be_followed(bench: Bench) -> None:
    bench.publish("t", b"a", b"b", b"c")
    bench.steps.settle()
    bench.publish("t", b"d")
    peer = Peer(bench.broker)
    subscription = bench.broker.follow(peer, "t", 2, ordinals)
    bench.steps.runner.run()
    assert peer.exact
    peer.pull()
    assert (peer.words, subscription.ordinal) == (["2", "3"], 4)
    bench.publish("t", b"e", b"f")
    assert (peer.words, subscription.ordinal) == (["2", "3", "4", "5"], 6)


def test_a_count_of_records_that_was_never_reached_means_all_that_is_kept(bench: Bench) -> None:
    bench.publish("t", b"a", b"b")
    peer = Peer(bench.broker)
    bench.broker.follow(peer, "t", 3, ordinals)
    bench.steps.runner.run()
    peer.pull()
    assert (peer.exact, peer.words) == (False, ["0", "1"])


def test_a_large_commit_is_counted_through_its_portions(bench: Bench) -> None:
    peer = Peer(bench.broker)
    subscription = bench.broker.follow(peer, "t", 0, ordinals)
    size = SLICE_BYTES_MAX // 3
    bench.publish("t", *(bytes(size) for _ in range(7)))
    assert peer.words == [str(number) for number in range(7)]
    assert subscription.ordinal == 7
