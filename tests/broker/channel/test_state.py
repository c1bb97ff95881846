"""Joins that begin with the current state, and leases that members choose, on a store in memory."""

import json
from typing import Any

import pytest

from headrace.broker.channel.channel import Joined
from headrace.broker.channel.member import Batch, Receive
from headrace.broker.channel.notes import read_members
from headrace.broker.channel.snapshots import RecentStates
from headrace.errors import ChannelError
from headrace.payload.channel import Content
from tests.broker.channel.model_store import NAME, ModelStore
from tests.broker.channel.test_channel import Client, texts
from tests.broker.channel.world import GRACE_MS, LEASE_MS, World

TAB_MS = 60_000


@pytest.fixture
def world() -> World:
    return World(reducer_name="world:collect")


def state(joined: Joined) -> Any:
    assert joined.snapshot is not None
    return json.loads(joined.snapshot.content.data)


def test_a_page_that_is_loaded_again_has_everything_its_own_and_what_it_acknowledged(
    world: World,
) -> None:
    a, b = Client(world, "a", origin="state"), Client(world, "b")
    assert state(a.joined()) is None
    a.send("one")
    b.send("two")
    assert a.texts() == ["one", "two"]
    a.ack_all()
    a.close()
    again = Client(world, "a", origin="state")
    assert state(again.joined()) == ["one", "two"]
    b.send("three")
    again.send("four")
    assert again.texts() == ["three", "four"]


def test_joining_from_the_state_moves_no_cursor_and_the_log_is_kept_from_it(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    for text in ("one", "two", "three"):
        a.send(text)
    first = b.told[1].messages[0].offset
    b.ack(first)
    b.close()
    page = Client(world, "b", origin="state")
    joined = page.joined()
    assert state(joined) == ["one", "two", "three"]
    assert joined.cursor == world.disk.end.offset
    assert page.member.confirmed[0] == first
    world.settle_broker()
    assert world.disk.start.offset == first
    page.close()
    plain = Client(world, "b")
    assert plain.texts() == ["two", "three"]


def test_an_acknowledgement_behind_the_state_moves_the_cursor_with_it(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    offsets = [a.send(text).offset for text in ("one", "two", "three")]
    b.close()
    page = Client(world, "b", origin="state")
    assert page.ack(offsets[1] or 0) == offsets[1]
    assert page.member.confirmed[0] == offsets[1]
    assert page.ack(offsets[2] or 0) == offsets[2]
    world.crash()
    [cursor] = [one.offset for one in read_members(world.store, NAME) if one.name == "b"]  # type: ignore[arg-type]
    assert cursor == offsets[2]


def test_a_connection_that_was_lost_goes_on_behind_what_it_has(world: World) -> None:
    a, b = Client(world, "a", origin="state"), Client(world, "b")
    a.send("one")
    [batch] = [one for one in a.take() if isinstance(one, Batch)]
    a.close()
    b.send("two")
    b.ack_all()
    again = Client(world, "a", origin=batch.messages[0].offset)
    joined, tail = again.take()
    assert joined.snapshot is None
    assert texts(tail) == ["two"]


@pytest.mark.parametrize("offset", [1, 1 << 40])
def test_an_offset_that_the_log_does_not_have_is_answered_with_the_state(
    world: World, offset: int
) -> None:
    Client(world, "a").send("one")
    assert state(Client(world, "b", origin=offset).joined()) == ["one"]


def test_with_uploads_it_is_the_last_one_and_every_message_behind_it(world: World) -> None:
    world = World(reducer_name="uploaded")
    a = Client(world, "a", origin="state")
    assert state(a.joined()) is None
    first = a.send("one").offset
    a.send("two")
    a.ack_all()
    answers: list[Any] = []
    a.channel.upload(first or 0, Content(b'["one"]', True), answers.append, answers.append)
    world.commit_all()
    assert answers == [first]
    cursor = a.member.confirmed
    a.close()
    again = Client(world, "a", origin="state")
    joined, tail = again.take()
    assert (joined.snapshot.offset, state(joined)) == (first, ["one"])
    assert texts(tail) == ["two"]
    assert again.member.confirmed == cursor
    # An acknowledgement below the cursor does not move the cursor back.
    again.ack(tail.messages[0].offset)
    assert again.member.confirmed == cursor


def test_a_signalled_page_fetches_its_own_messages_too(world: World) -> None:
    a = Client(world, "a", Receive.SIGNAL, origin="state")
    a.send("one")
    assert "signal" in a.take()
    batch = a.fetch()
    assert texts(batch) == ["one"]
    a.ack(batch.messages[0].offset)
    assert texts(a.fetch()) == []


def test_a_page_with_a_full_window_gets_the_rest_when_it_acknowledges(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.broker.channel.member.WINDOW_MESSAGES_MAX", 2)
    a = Client(world, "a", origin="state")
    for number in range(5):
        a.send(str(number))
    shown = a.texts()
    assert shown == ["0", "1"]
    while len(shown) < 5:
        a.ack(world.ends[len(shown) - 1])
        shown += a.texts()
    assert shown == ["0", "1", "2", "3", "4"]


def test_the_state_as_of_now_is_given_also_while_a_member_lags(world: World) -> None:
    a = Client(world, "a")
    Client(world, "b")
    a.send("one")
    a.send("two")
    world.settle_broker()
    found: list[Any] = []
    world.channels.load_snapshot(NAME, found.append, found.append)
    world.rest_all()
    [snapshot] = found
    assert json.loads(snapshot.content.data) == ["one", "two"]
    assert world.snapshot is None, "nothing is stored for that"


def test_a_channel_without_messages_has_no_state(world: World) -> None:
    Client(world, "a")
    found: list[Any] = []
    world.channels.load_snapshot(NAME, found.append, found.append)
    assert found == [None]


def test_states_that_were_made_are_remembered_within_a_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Client(world, "a")
    a.send("x" * 50)
    Client(world, "b", origin="state")
    known = world.channels.recent.get(a.channel)
    assert known is not None and json.loads(known.content.data) == ["x" * 50]
    monkeypatch.setattr("headrace.broker.channel.snapshots.STATES_BYTES_MAX", 10)
    few = RecentStates()
    few.put(a.channel, known)
    assert few.get(a.channel) is None


def test_a_reducer_that_fails_refuses_the_join_and_lets_others_go_on(world: World) -> None:
    def fails(state: Any, message: Any) -> Any:
        raise RuntimeError("no")

    a = Client(world, "a")
    a.send("one")
    reducer = world.rule.reducer
    reducer._function = fails  # type: ignore[attr-defined]
    [refused] = Client(world, "b", origin="state").take()
    assert isinstance(refused, ChannelError)
    assert (refused.code, refused.retry) == ("unavailable", True)
    assert Client(world, "c").joined().end == world.disk.end.offset


# Leases


def test_a_membership_ends_with_the_lease_that_was_chosen(world: World) -> None:
    tab = Client(world, "tab", origin="state", lease_ms=TAB_MS)
    assert tab.joined().lease_ms == TAB_MS
    b = Client(world, "b")
    tab.send("one")
    tab.close()
    b.send("two")
    b.ack_all()
    world.settle_broker()
    world.pass_time(TAB_MS - 1)
    world.settle_broker()
    assert world.disk.start.offset < world.disk.end.offset
    assert world.channel.members["tab"].is_member
    world.pass_time(1)
    world.settle_broker()
    assert not world.channel.members["tab"].is_member
    assert world.disk.start.offset == world.disk.end.offset
    # The number is remembered, so nothing that is sent again is stored twice.
    assert Client(world, "tab", origin="state").joined().number == 1


def test_a_tab_that_is_there_stays_a_member_for_as_long(world: World) -> None:
    tab = Client(world, "tab", lease_ms=TAB_MS)
    for _ in range(5):
        world.pass_time(TAB_MS)
        world.settle_broker()
    assert tab.member.is_member
    tab.close()
    world.pass_time(TAB_MS)
    world.settle_broker()
    assert "tab" not in world.channel.members


def test_after_a_crash_a_chosen_lease_counts_from_the_next_start(world: World) -> None:
    Client(world, "tab", lease_ms=TAB_MS)
    Client(world, "b").send("one")
    world.clock_ms += TAB_MS - 1
    world.crash()
    world.clock_ms += 10
    world.tick()
    world.settle_broker()
    assert world.channel.members["tab"].is_member
    world.pass_time(TAB_MS)
    world.settle_broker()
    assert "tab" not in world.channel.members


def test_a_chosen_lease_is_never_longer_than_the_channels(world: World) -> None:
    assert Client(world, "a", lease_ms=2 * LEASE_MS).joined().lease_ms == LEASE_MS
    assert Client(world, "b").joined().lease_ms == 0


def test_a_lease_is_chosen_anew_with_every_join(world: World) -> None:
    Client(world, "a", lease_ms=TAB_MS).close()
    Client(world, "a").close()
    world.pass_time(TAB_MS + GRACE_MS)
    world.settle_broker()
    assert world.channel.members["a"].is_member


def test_leases_are_on_disk(world: World) -> None:
    Client(world, "a", lease_ms=TAB_MS)
    [noted] = read_members(ModelStore(world.disk), NAME)  # type: ignore[arg-type]
    assert noted.lease_ms == TAB_MS
