"""Channels when the clock is set: durations stay the same, and no time in the future holds a log."""

import pytest

from headrace.broker.channel.member import Receive
from tests.broker.channel.test_channel import Client, texts
from tests.broker.channel.world import GRACE_MS, LEASE_MS, PRESENCE_MS, World

DAYS_MS = 3 * 24 * 3_600_000


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("jump_ms", [-DAYS_MS, DAYS_MS])
def test_what_all_have_acknowledged_is_trimmed_whatever_the_clock_says(
    world: World, jump_ms: int
) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    world.settle_broker()
    world.clock_ms += jump_ms
    a.ack_all()
    b.ack_all()
    world.pass_time(1000)
    world.settle_broker()
    assert world.disk.start == world.disk.end


def test_a_poller_from_before_the_clock_was_set_back_holds_up_no_other(world: World) -> None:
    for name in "ab":
        Client(world, name).close()
    world.channel.request("a")
    world.clock_ms -= DAYS_MS
    world.channel.request("b")
    world.commit_all()
    assert world.channel.present == 2
    world.pass_time(PRESENCE_MS + 1)
    assert world.channel.present == 0


def noted_with_a_clock_that_was_ahead(world: World) -> None:
    """Add a member that is away with a pending message, dated days in the future."""
    world.clock_ms += DAYS_MS
    a, b = Client(world, "a"), Client(world, "b", Receive.POLL)
    a.send("x")
    b.close()
    a.ack_all()
    world.commit_all()
    world.clock_ms -= DAYS_MS


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lease_from_the_future_ends_when_it_should(world: World, restarts: bool) -> None:
    noted_with_a_clock_that_was_ahead(world)
    if restarts:
        world.crash()
    else:
        world.channels.went_back()
    world.settle_broker()
    Client(world, "a")
    world.pass_time(LEASE_MS - 10)
    world.settle_broker()
    assert world.disk.start.offset < world.disk.end.offset, "it is held for its lease, from now"
    world.pass_time(20)
    world.settle_broker()
    assert world.disk.start == world.disk.end


@pytest.mark.parametrize("restarts", [False, True])
def test_a_destruction_that_is_due_in_the_future_is_not_put_off(
    world: World, restarts: bool
) -> None:
    noted_with_a_clock_that_was_ahead(world)
    world.clock_ms += DAYS_MS
    for client in [Client(world, "a")]:
        client.close()
    world.commit_all()
    assert world.channel.schedule is not None
    world.clock_ms -= DAYS_MS
    if restarts:
        world.crash()
    else:
        world.channels.went_back()
    world.settle_broker()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert not world.disk.exists


def test_a_member_that_comes_back_gets_what_waited(world: World) -> None:
    noted_with_a_clock_that_was_ahead(world)
    world.channels.went_back()
    world.settle_broker()
    again = Client(world, "b", Receive.POLL)
    assert texts(again.fetch()) == ["x"]
