"""Buckets of tokens, turns at a limit, and the addresses that limits count. Time is passed in."""

from random import Random

import pytest

from headrace.access.quotas import Bucket, FairQueue, address_of_limits


def test_a_bucket_gives_a_burst_and_then_its_rate():
    bucket = Bucket(10, 0.0)
    taken = 0
    while bucket.is_open(0.0):
        bucket.take(1)
        taken += 1
    assert taken == 10
    assert bucket.opens_in_s(0.0) == pytest.approx(0.1, rel=1e-3)
    assert not bucket.is_open(0.05)
    assert bucket.is_open(0.1)


def test_a_bucket_that_is_open_takes_any_amount_and_pays_it_back():
    bucket = Bucket(10, 0.0)
    bucket.take(1010)
    assert bucket.opens_in_s(0.0) == pytest.approx(100.1, rel=1e-3)
    assert not bucket.is_open(100.0)
    assert bucket.is_open(100.2)


def test_the_time_that_a_bucket_names_is_enough_to_open_it():
    random = Random(7)
    for _ in range(500):
        now, bucket = random.random() * 1e6, Bucket(random.randrange(1, 10**9), 0.0)
        bucket.is_open(now)
        bucket.take(random.random() * 1e9 + 1)
        now += bucket.opens_in_s(now)
        assert bucket.is_open(now), "a timer for this time would fire again and again"
        assert bucket.opens_in_s(now) < 1e-3


def test_a_bucket_gains_nothing_from_a_clock_that_stands_still_or_goes_back():
    bucket = Bucket(10, 5.0)
    bucket.take(10)
    assert not bucket.is_open(5.0) and not bucket.is_open(1.0)
    assert bucket.is_open(5.2)


def test_a_bucket_holds_at_most_a_burst():
    bucket = Bucket(10, 0.0)
    assert bucket.is_full(1000.0)
    bucket.take(10)
    assert not bucket.is_open(1000.0) and not bucket.is_full(1000.5)
    assert bucket.is_full(1001.0)


def test_another_rate_keeps_the_debt():
    bucket = Bucket(10, 0.0)
    bucket.take(110)
    bucket.change(100, 0.0)
    assert bucket.opens_in_s(0.0) == pytest.approx(1.01, rel=1e-3)
    bucket.change(1, 10.0)
    assert bucket.is_open(10.0) and bucket.is_full(10.0)


def test_those_that_wait_have_their_turns_in_order():
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push(name, 1)
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


def test_turns_of_equal_cost_alternate():
    queue: FairQueue[str] = FairQueue()
    queue.push("a", 1)
    queue.push("b", 1)
    order = []
    for _ in range(6):
        name = queue.pop()
        order.append(name)
        queue.push(name, 1)
    assert order == ["a", "b"] * 3


def test_one_with_large_turns_gets_no_larger_share():
    queue: FairQueue[str] = FairQueue()
    cost = {"large": 100, "small": 1}
    for name in cost:
        queue.push(name, cost[name])
    used = dict.fromkeys(cost, 0)
    for _ in range(1010):
        name = queue.pop()
        used[name] += cost[name]
        queue.push(name, cost[name])
    assert abs(used["large"] - used["small"]) <= 100


def test_one_that_comes_later_is_not_owed_the_time_before():
    queue: FairQueue[str] = FairQueue()
    queue.push("old", 1)
    for _ in range(1000):
        assert queue.pop() == "old"
        queue.push("old", 1)
    queue.push("new", 1)
    order = []
    for _ in range(6):
        name = queue.pop()
        order.append(name)
        queue.push(name, 1)
    assert order.count("new") == 3


def test_one_that_leaves_has_no_turn_and_leaves_nothing_behind():
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", 1)
    for number in range(1000):
        queue.push(f"{number}", 1)
        queue.discard(f"{number}")
    assert len(queue._turns) < 20 and len(queue._ends) < 20
    assert queue.pop() == "stays"
    queue.discard("stays")
    queue.push("stays", 1)
    queue.push("stays too", 1)
    queue.discard("stays")
    assert queue.pop() == "stays too"


def test_ends_of_those_that_left_are_forgotten():
    queue: FairQueue[int] = FairQueue()
    queue.push(-1, 1)
    for number in range(1000):
        queue.push(number, 1)
        queue.pop()
        queue.push(-1 if -1 not in queue else number, 1)
        queue.pop()
        if not len(queue):
            queue.push(-1, 1)
    assert len(queue._ends) < 50


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("::1", "::1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::9]", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
        ("no:address", "no:address"),
        ("", ""),
    ],
)
def test_a_whole_network_of_one_machine_counts_as_one_address(address, counted):
    assert address_of_limits(address) == counted
