"""Named readers on a real store that is driven step by step: grants, takeovers, fencing and cursors."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.broker import Broker, BrokerSubscription, Slice
from headrace.broker.readers import Claim, Readers
from headrace.config.settings import Config, Journal, Segment
from headrace.errors import BadCursorError, BadReaderNameError
from headrace.log.records import pack_record
from headrace.log.store import waited_for
from headrace.model import LAKE_READER, Position
from tests.fakes.store import StepStore
from tests.tools import EXAMPLES

WINDOW = 1 << 20


def words(topic: str, at: Position, records: Sequence[bytes], ms: int) -> bytes:
    """Encode for people: payload, offset, ordinal and time of each record."""
    out, offset = [], at.offset
    for ordinal, record in enumerate(records, at.ordinal + 1):
        offset += len(record)
        out.append(b"%s %d %d %d;" % (record[4:], offset, ordinal, ms))
    return b"".join(out)


class Peer:
    """A connection that reads under a reader's name."""

    peer = "a test"
    protocol = "words"

    def __init__(self, bench: "Bench", instance: int) -> None:
        self.bench = bench
        self.instance = instance
        self.claim: Claim | None = None
        self.grant = 0
        self.news: list[str] = []
        self.received: list[tuple[bytes, int, int]] = []
        self.stored = 0
        self.silent = False
        self.pulling: list[BrokerSubscription] = []

    def read(self, reader: str = "r", *, newest: bool = False, window: int = WINDOW) -> "Peer":
        self.claim = Claim(
            self,
            "t",
            reader,
            newest=newest,
            instance=self.instance,
            window=window,
            encode=words,
        )
        self.bench.readers.enter(self.claim)
        self.bench.run()
        return self

    def handle(self, count: int | None = None) -> None:
        """Acknowledge the first `count` records of this grant, or all of them."""
        assert self.claim is not None
        _, offset, ordinal = self.received[-1 if count is None else count - 1]
        self.bench.readers.handled(self.claim, self.grant, offset, ordinal)

    def hang_up(self) -> None:
        claim, self.claim = self.claim, None
        if claim is not None:
            self.bench.readers.release(claim)

    @property
    def payloads(self) -> list[bytes]:
        return [payload for payload, _, _ in self.received]

    # The sink

    def attached(self, subscription: BrokerSubscription, offset: int, exact: bool) -> None:
        assert self.claim is not None
        self.bench.readers.attached(self.claim, subscription, exact)

    def reader_waits(self, claim: Claim, ahead: int) -> None:
        self.news.append(f"waiting behind {ahead}")

    def reader_begins(self, claim: Claim, exact: bool) -> None:
        assert self.bench.moved_by_hand or claim.asked.offset >= self.bench.confirmed
        self.news.append(f"reading from {claim.handled.offset}" + ("" if exact else ", some gone"))
        self.grant = claim.grant
        self.received = []

    def reader_stored(self, claim: Claim, offset: int) -> None:
        self.stored = self.bench.confirmed = offset

    def reader_ends(self, claim: Claim, subscription: BrokerSubscription) -> None:
        if subscription in self.pulling:
            self.pulling.remove(subscription)

    def reader_lost(self, claim: Claim, reason: str, refused: bool) -> None:
        assert claim is self.claim
        self.claim = None
        self.news.append("refused" if refused else "lost")

    def is_silent(self, now: float) -> bool:
        return self.silent

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        assert self.claim is not None
        if self.claim.is_full:
            self.claim.parked = True
            return False
        for piece in slices:
            self._take(piece.data)
            subscription.offset, subscription.ordinal = piece.end, piece.end_ordinal
        return True

    def live(self, subscription: BrokerSubscription) -> None: ...

    def broken(self, subscription: BrokerSubscription) -> None:
        raise AssertionError("broken")

    def overtaken(self, subscription: BrokerSubscription) -> None: ...

    def ready(self, subscription: BrokerSubscription) -> None:
        assert self.claim is not None
        if self.claim.is_full:
            self.claim.parked = True
        else:
            self.pulling.append(subscription)

    def pull(self) -> None:
        while self.pulling:
            subscription = self.pulling.pop(0)
            data = self.bench.broker.pull(subscription)
            self._take(data)
            if data:
                self.ready(subscription)

    def _take(self, data: bytes) -> None:
        for word in data.split(b";")[:-1]:
            payload, offset, ordinal, _ = word.split()
            self.received.append((payload, int(offset), int(ordinal)))


class Bench:
    def __init__(self, path: Path) -> None:
        self.confirmed = 0
        """Last offset that any reader was told is durable."""
        self.moved_by_hand = False
        self.config = Config(
            data_dir=path,
            journal=Journal(file_bytes=1 << 16, files=3),
            segment=Segment(bytes=256),
        )
        self._start()

    def _start(self) -> None:
        self.steps = StepStore(self.config)
        self.broker = Broker(self.steps.store, self.steps.runner, lambda reason: None)
        self.readers = Readers(self.broker)
        self.peers: list[Peer] = []

    def restart(self) -> None:
        self.steps.crash()
        self._start()

    def peer(self, instance: int) -> Peer:
        self.peers.append(Peer(self, instance))
        return self.peers[-1]

    def publish(self, *payloads: bytes) -> None:
        self.broker.publish({"t": [pack_record(one) for one in payloads]}, lambda: None)
        self.run()

    def run(self) -> None:
        while True:
            self.steps.runner.run()
            pulling = [peer for peer in self.peers if peer.pulling]
            if not pulling:
                return
            for peer in pulling:
                peer.pull()

    def cursor(self) -> Position | None:
        found = self.steps.store.cursors("t", "r", limit=1)
        return found[0].position if found else None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.steps.crash()


def test_a_new_reader_gets_everything_that_is_kept(bench: Bench) -> None:
    bench.publish(b"a", b"b")
    peer = bench.peer(1).read()
    assert peer.news == ["waiting behind 0", "reading from 0"]
    assert peer.received == [(b"a", 5, 1), (b"b", 10, 2)]


def test_a_new_reader_that_starts_at_the_end_stays_there_over_a_restart(bench: Bench) -> None:
    bench.publish(b"a")
    bench.peer(1).read(newest=True)
    bench.restart()
    bench.publish(b"b")
    assert bench.peer(1).read(newest=True).payloads == [b"b"]


def test_a_reader_resumes_where_it_stopped(bench: Bench) -> None:
    bench.publish(b"a", b"b", b"c")
    peer = bench.peer(1).read()
    peer.handle(2)
    bench.run()
    assert peer.stored == 10
    assert bench.cursor() is not None
    peer.hang_up()
    assert bench.peer(2).read().payloads == [b"c"]


def test_one_of_several_is_active_and_the_next_takes_over_behind_what_was_accepted(
    bench: Bench,
) -> None:
    bench.publish(b"a", b"b", b"c")
    first, second = bench.peer(1).read(), bench.peer(2).read()
    assert second.news == ["waiting behind 1"]
    assert not second.received
    first.handle(1)
    first.handle(2)
    first.hang_up()  # before anything of it is durable
    assert not second.received
    bench.run()
    assert second.news == ["waiting behind 1", "reading from 10"]
    assert second.payloads == [b"c"]


def test_a_superseded_reader_is_fenced(bench: Bench) -> None:
    bench.publish(b"a", b"b")
    first, second = bench.peer(1).read(), bench.peer(2).read()
    claim, grant = first.claim, first.grant
    assert claim is not None
    first.silent = True
    bench.readers.tick(0.0)
    bench.run()
    assert first.news[-1] == "lost"
    assert second.payloads == [b"a", b"b"]
    bench.readers.handled(claim, grant, 10, 2)
    bench.run()
    cursor = bench.cursor()
    assert cursor is not None and cursor.offset == 0


def test_a_silent_reader_keeps_its_grant_while_nobody_waits(bench: Bench) -> None:
    peer = bench.peer(1).read()
    peer.silent = True
    bench.readers.tick(0.0)
    bench.publish(b"a")
    assert peer.payloads == [b"a"]


def test_a_client_that_connects_again_replaces_its_own_old_connection(bench: Bench) -> None:
    bench.publish(b"a")
    old, other = bench.peer(1).read(), bench.peer(2).read()
    new = bench.peer(1).read()
    assert old.news[-1] == "lost"
    assert new.payloads == [b"a"]
    assert not other.received


def test_acknowledging_what_was_not_delivered_is_refused(bench: Bench) -> None:
    bench.publish(b"a")
    peer = bench.peer(1).read()
    assert peer.claim is not None
    with pytest.raises(BadCursorError, match="not been delivered"):
        bench.readers.handled(peer.claim, peer.grant, 500, 1)


def test_the_readers_of_the_export_are_not_for_clients(bench: Bench) -> None:
    with pytest.raises(BadReaderNameError, match="choose another"):
        bench.peer(1).read(LAKE_READER)


def test_a_cursor_that_is_moved_by_hand_moves_the_active_reader(bench: Bench) -> None:
    bench.publish(b"a", b"b", b"c")
    peer = bench.peer(1).read()
    peer.handle(2)
    bench.run()
    claim, grant = peer.claim, peer.grant
    assert claim is not None
    moved: list[int] = []
    bench.moved_by_hand = True
    with bench.readers.held("r", ["t"]):
        epoch = bench.steps.store.look("t").epoch
        at = Position(epoch, 5, 1)
        bench.steps.store.set_cursors("r", {"t": at}, lambda: moved.append(1))
        bench.readers.handled(claim, grant, 15, 3)  # on its way when the cursor was moved
        bench.run()
    bench.run()
    assert moved
    assert peer.news[-1] == "reading from 5"
    assert peer.payloads == [b"b", b"c"]
    assert bench.cursor() == at


def test_no_more_is_delivered_than_fits_into_the_window(bench: Bench) -> None:
    peer = bench.peer(1).read(window=1)
    bench.publish(b"a")
    bench.publish(b"b")
    bench.publish(b"c")
    assert peer.payloads == [b"a"]
    peer.handle(1)
    bench.run()
    assert peer.payloads == [b"a", b"b", b"c"]


def test_a_reader_that_was_overtaken_is_told(bench: Bench) -> None:
    bench.publish(b"a", b"b")
    peer = bench.peer(1).read()
    peer.hang_up()
    topic = bench.steps.store.topic("t")
    bench.steps.store.trim(topic, Position(topic.epoch, 5, 1), lambda: None)
    bench.run()
    assert bench.peer(2).read().news[-1] == "reading from 5, some gone"


def test_a_reader_follows_a_topic_into_its_next_life(bench: Bench) -> None:
    bench.publish(b"a")
    peer = bench.peer(1).read()
    peer.handle()
    bench.run()
    bench.steps.store.destroy(bench.steps.store.topic("t"), lambda: None)
    bench.run()
    bench.publish(b"b")
    assert peer.payloads == [b"a", b"b"]
    peer.handle()
    bench.run()
    cursor = bench.cursor()
    assert cursor == bench.steps.store.look("t").end
    peer.hang_up()
    bench.publish(b"c")
    assert bench.peer(2).read().payloads == [b"c"]


def test_a_new_reader_is_waited_for_from_the_beginning(bench: Bench) -> None:
    bench.publish(b"a")
    bench.peer(1).read()
    store = bench.steps.store
    (hold,) = waited_for(store, store.look("t"), ["r", "other"])
    assert (hold.reader, hold.position.offset) == ("r", 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "read", "handle", "hang up", "silent", "commit", "restart"]),
        st.integers(0, 2),
        st.integers(1, 4),
    ),
    max_size=30,
)


@settings(max_examples=max(5, EXAMPLES // 5), deadline=None)
@given(steps=STEPS)
def test_no_acknowledged_record_is_delivered_twice_and_none_is_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    bench = Bench(tmp_path_factory.mktemp("readers"))
    peers: list[Peer | None] = [None, None, None]
    published: list[bytes] = []
    for step, who, number in steps:
        peer = peers[who]
        if step == "publish":
            new = [b"%d" % (len(published) + one) for one in range(number)]
            published += new
            bench.publish(*new)
        elif step == "read" and (peer is None or peer.claim is None):
            peers[who] = bench.peer(who).read()
        elif step == "handle" and peer is not None and peer.claim is not None and peer.received:
            peer.handle(min(number, len(peer.received)))
        elif step == "hang up" and peer is not None:
            peer.hang_up()
        elif step == "silent":
            for one in bench.peers:
                one.silent = one is peer
            bench.readers.tick(0.0)
        elif step == "commit":
            bench.run()
        elif step == "restart":
            bench.restart()
            peers = [None, None, None]
        assert sum(one.claim is not None and one.claim.grant > 0 for one in bench.peers) <= 1
        for one in bench.peers:
            if one.claim is not None and one.claim.has_begun:
                ordinals = [ordinal for _, _, ordinal in one.received]
                first = ordinals[0] if ordinals else 0
                assert ordinals == list(range(first, first + len(ordinals)))
                assert one.payloads == [published[ordinal - 1] for ordinal in ordinals]
    bench.run()
    for one in list(bench.peers):
        one.hang_up()
    bench.run()
    last = bench.peer(9).read()
    begin = bench.cursor()
    assert begin is not None and begin.offset >= bench.confirmed
    assert last.payloads == published[begin.ordinal :]
    bench.steps.crash()
