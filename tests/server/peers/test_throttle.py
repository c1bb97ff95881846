"""Rates and quotas without sockets: publishers that wait for their turns. Time is passed in."""

import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from headrace.config.settings import Limits, PeerLimits
from headrace.log.quota import Quotas
from headrace.model import Position
from headrace.server.loop import Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.tally import PeerRules, Who
from headrace.server.peers.throttle import RETRY_AFTER_S_MAX, SWEEP_S, Cost, Throttle


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """A loop that runs what is ready, and then sets its clock to the next timer."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.wakes = 0
        """Callbacks that were run."""
        self._ready: deque[Callable[..., None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()

    def time(self) -> float:
        return self.now_s

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._ready.append(lambda: call(*args))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), timer))
        return timer

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while True:
            while self._ready:
                self.wakes += 1
                self._ready.popleft()()
            if not self._timers or self._timers[0][0] > until_s:
                break
            self.now_s, _, timer = heapq.heappop(self._timers)
            if timer.call is not None:
                self._ready.append(timer.call)
        self.now_s = until_s

    @property
    def timers(self) -> int:
        return sum(timer.call is not None for _, _, timer in self._timers)


class Topics:
    def __init__(self) -> None:
        self.quotas = Quotas()
        self.known: set[str] = set()

    def exists(self, name: str) -> bool:
        return name in self.known


class Publisher:
    """A connection with publishes that are all there already."""

    def __init__(
        self, bench: "Bench", name: str, costs: list[Cost], address: str = "1.1.1.1"
    ) -> None:
        self.bench = bench
        self.peer = name
        self.who = Who(address)
        self.costs = deque(costs)
        self.is_broken = False
        self.asked = 0

    def go_on(self) -> None:
        bench = self.bench
        while self.costs:
            self.asked += 1
            if not bench.throttle.admit(self, self.costs[0]):
                return
            cost = self.costs.popleft()
            bench.order.append(self.peer)
            bench.stored[self.peer] += cost.records
            for name in cost.topics:
                bench.topics.known.add(name)
                bench.topics.quotas.appended(name, cost.bytes)

    def internal_error(self) -> None:
        self.is_broken = True


class Bench:
    def __init__(self, *peers: PeerLimits, **limits: Any) -> None:
        self.loop = Loop()
        self.topics = Topics()
        self.metrics = Metrics()
        turns = Turns(self.loop)  # type: ignore[arg-type]
        self.throttle = Throttle(self.loop, turns, self.topics, self.metrics)  # type: ignore[arg-type]
        self.configure(*peers, **limits)
        self.order: list[str] = []
        self.stored: Counter[str] = Counter()

    def configure(self, *peers: PeerLimits, **limits: Any) -> None:
        found = Limits(peer=peers, **limits)
        self.throttle.configure(found, PeerRules(found))

    def publisher(self, name: str, costs: list[Cost], address: str = "1.1.1.1") -> Publisher:
        made = Publisher(self, name, costs, address)
        made.go_on()
        return made

    def applied(self) -> dict[str, int]:
        counts = self.metrics.labelled["limits_applied_total"]
        return {limit: value for (limit, _), value in counts.items() if value}


def records(number: int, topic: str = "t", size: int = 100) -> Cost:
    return Cost(number, number * size, (topic,))


def test_a_publisher_below_its_rate_is_never_held_back():
    bench = Bench(records_per_s=100)
    for _ in range(50):
        publisher = bench.publisher("p", [records(10)])
        bench.loop.run(0.2)
        assert not publisher.costs
    assert bench.applied() == {}


def test_a_publisher_above_a_rate_is_stored_at_that_rate():
    bench = Bench(records_per_s=100)
    bench.publisher("p", [records(5)] * 1000)
    bench.loop.run(10)
    assert 1000 <= bench.stored["p"] <= 1110
    assert bench.applied()["records_per_s"] > 0


@pytest.mark.parametrize("per_s", [1, 7, 1000, 100_000, 10**9])
def test_every_rate_is_used_in_full_also_with_single_records(per_s):
    bench = Bench(records_per_s=per_s)
    total = min(3 * per_s, 100_000)
    bench.publisher("p", [records(1)] * total)
    bench.loop.run(4)
    assert bench.stored["p"] == total


def test_a_rate_costs_a_bounded_number_of_wakes():
    bench = Bench(topics_per_s=10)
    bench.publisher("p", [records(1, f"t{number}") for number in range(1000)])
    bench.loop.wakes = 0
    bench.loop.run(10)
    assert 100 <= bench.stored["p"] <= 111
    assert bench.loop.wakes <= 500


def test_a_blip_over_a_rate_slows_nobody_afterwards():
    bench = Bench(records_per_s=1000)
    publisher = bench.publisher("p", [records(1)] * 1100)
    bench.loop.run(2)
    assert not publisher.costs
    bench.loop.run(10)
    for _ in range(500):
        publisher.costs.append(records(1))
        publisher.go_on()
        assert not publisher.costs


def test_a_publish_larger_than_a_burst_is_stored_whole_and_paid_back():
    bench = Bench(bytes_per_s=1000)
    bench.publisher("p", [records(100), records(1)])
    assert bench.stored["p"] == 100
    bench.loop.run(9)
    assert bench.stored["p"] == 100
    bench.loop.run(0.1)
    assert bench.stored["p"] == 101


def test_all_rates_of_a_publisher_apply():
    bench = Bench(
        PeerLimits(of="connection", records_per_s=20),
        PeerLimits(of="address", records_per_s=30),
        records_per_s=50,
    )
    for name, address in (("a", "1.1.1.1"), ("b", "1.1.1.1"), ("c", "2.2.2.2"), ("d", "3.3.3.3")):
        bench.publisher(name, [records(1)] * 10_000, address)
    bench.loop.run(100)
    assert bench.stored.total() == pytest.approx(5000, rel=0.05)
    assert bench.stored["a"] + bench.stored["b"] <= 3050
    assert max(bench.stored.values()) <= 2050
    assert min(bench.stored.values()) >= 1000


def test_publishers_on_one_limit_share_it_also_if_one_sends_in_large_pieces():
    bench = Bench(bytes_per_s=100_000)
    bench.publisher("large", [records(1000)] * 1000)
    bench.publisher("small", [records(10)] * 100_000)
    bench.loop.run(100)
    assert bench.stored["large"] == pytest.approx(bench.stored["small"], rel=0.1)


def test_a_publisher_that_comes_later_queues_behind_those_that_wait():
    bench = Bench(records_per_s=1)
    bench.publisher("first", [records(1)] * 3)
    bench.loop.run(0.5)
    bench.publisher("second", [records(1)])
    bench.loop.run(10)
    assert bench.order == ["first", "first", "second", "first"]


def test_one_address_over_its_rate_does_not_slow_another():
    bench = Bench(PeerLimits(of="address", records_per_s=1))
    bench.publisher("greedy", [records(1)] * 100)
    assert not bench.publisher("other", [records(1)], "2.2.2.2").costs


def test_a_principals_own_table_replaces_the_one_for_all_and_0_lifts_a_limit():
    bench = Bench(
        PeerLimits(of="principal", records_per_s=1, bytes_per_s=10**6),
        PeerLimits(of="token:shipper", records_per_s=100),
        PeerLimits(of="token:free", records_per_s=0),
    )
    for name in ("token:shipper", "token:free", "token:other"):
        publisher = Publisher(bench, name, [records(1)] * 150)
        publisher.who = Who("1.1.1.1", name)
        publisher.go_on()
    assert bench.stored == {"token:shipper": 100, "token:free": 150, "token:other": 1}


def test_connections_of_one_principal_share_its_rate():
    bench = Bench(PeerLimits(of="principal", records_per_s=10))
    for address in ("1.1.1.1", "2.2.2.2"):
        publisher = Publisher(bench, address, [records(1)] * 100, address)
        publisher.who = Who(address, "token:a")
        publisher.go_on()
    assert bench.stored.total() == 10


def test_a_full_prefix_holds_its_publishers_back_until_bytes_are_freed_and_nothing_polls():
    bench = Bench()
    bench.topics.quotas.set({"a/": 1000}, lambda prefix: ())
    full = bench.publisher("full", [records(5, "a/1")] * 4)
    assert bench.stored["full"] == 10 and len(full.costs) == 2
    assert not bench.publisher("other", [records(5, "b")]).costs
    asked = full.asked
    bench.loop.run(3600)
    assert full.asked == asked and not bench.loop.timers
    start = Position(1, 0, 0)
    bench.topics.quotas.deleted("a/1", start, Position(1, 300, 3))
    bench.loop.run(0.1)
    assert bench.stored["full"] == 15 and len(full.costs) == 1
    assert bench.applied() == {"quota_bytes": 2}


def test_room_under_a_prefix_is_shared():
    bench = Bench()
    bench.topics.quotas.set({"": 1000}, lambda prefix: ())
    bench.topics.quotas.appended("t", 1000)
    for name in "abc":
        bench.publisher(name, [records(1)] * 100)
    at = 0
    for _ in range(9):
        bench.topics.quotas.deleted("t", Position(1, at, at), Position(1, at + 100, at))
        at += 100
        bench.loop.run(0.1)
    assert bench.stored == {"a": 3, "b": 3, "c": 3}


def test_a_quota_that_is_lifted_lets_its_publishers_go_on():
    bench = Bench()
    bench.topics.quotas.set({"a/": 100}, lambda prefix: ())
    publisher = bench.publisher("p", [records(5, "a/1")] * 2)
    assert publisher.costs
    bench.topics.quotas.set({}, lambda prefix: ())
    bench.loop.run(0.1)
    assert not publisher.costs and not bench.throttle.is_active


def test_other_rates_apply_at_once_to_those_that_wait():
    bench = Bench(records_per_s=1)
    publisher = bench.publisher("p", [records(1)] * 100)
    bench.configure()
    bench.loop.run(0.1)
    assert not publisher.costs
    assert not bench.loop.timers


def test_an_error_of_one_publisher_ends_that_one_and_the_others_go_on(caplog):
    caplog.set_level(logging.CRITICAL, "headrace.server.peers.throttle")
    bench = Bench(records_per_s=1)
    bench.publisher("first", [records(1)])
    bad = bench.publisher("bad", [records(1)])

    def fail() -> None:
        raise RuntimeError("an error in a publish")

    bad.go_on = fail  # type: ignore[method-assign]
    others = [bench.publisher(f"other {number}", [records(1)]) for number in range(3)]
    bench.loop.run(10)
    assert bad.is_broken
    assert not any(other.costs for other in others)


def test_a_publisher_that_is_gone_has_no_turn_and_leaves_nothing_behind():
    bench = Bench(PeerLimits(of="connection", records_per_s=1), records_per_s=1)
    bench.publisher("first", [records(1)] * 2)
    gone = bench.publisher("gone", [records(1)] * 2)
    bench.throttle.lost(gone)
    last = bench.publisher("last", [records(1)])
    asked = gone.asked
    bench.loop.run(20)
    assert gone.asked == asked and not last.costs
    assert all(key[1] is not gone for key in bench.throttle._gates)
    assert gone not in bench.throttle._of and gone not in bench.throttle._waits_at


def test_gates_that_nobody_uses_are_dropped_and_debts_are_kept():
    bench = Bench(PeerLimits(of="address", records_per_s=1))
    for number in range(100):
        peer = bench.publisher(f"{number}", [records(1)], f"1.1.1.{number}")
        bench.throttle.lost(peer)
    debtor = bench.publisher("debtor", [records(60)], "9.9.9.9")
    bench.throttle.lost(debtor)
    bench.loop.run(SWEEP_S)
    bench.throttle.tick()
    assert list(bench.throttle._gates) == [("address", "9.9.9.9", "records_per_s")]
    assert bench.publisher("again", [records(1)], "9.9.9.9").costs


def test_a_client_of_http_is_told_when_to_come_back():
    bench = Bench(records_per_s=10)
    who = Who("1.1.1.1")
    assert bench.throttle.retry_after_s(who, records(40)) == 0
    assert bench.throttle.retry_after_s(who, records(1)) == 4
    bench.loop.run(4)
    assert bench.throttle.retry_after_s(who, records(1)) == 0
    bench.topics.quotas.set({"": 1}, lambda prefix: ())
    bench.topics.quotas.appended("t", 1)
    bench.loop.run(4)
    assert bench.throttle.retry_after_s(who, records(1)) == RETRY_AFTER_S_MAX
