"""Ends of channels that operators choose: destruction by hand, states that expire or are not kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.channel.channel import ChannelRule, Joined
from headrace.broker.channel.hub import Channels
from headrace.broker.channel.member import Receive, Standing
from headrace.broker.channel.notes import read_members, read_snapshot
from headrace.broker.channel.snapshots import NotedSnapshots
from headrace.config.settings import Config
from headrace.payload.channel import Content
from headrace.payload.reducers import reducer
from tests.broker.channel.model_store import NAME, ModelStore
from tests.broker.channel.test_channel import Client
from tests.broker.channel.world import GRACE_MS, World
from tests.fakes.store import StepStore

AGE_MS = 1_000_000

both = pytest.mark.parametrize("slow", [False, True], ids=["notes", "database"])


def come(world: World, name: str, origin: Any = "state") -> Client:
    client = Client(world, name, origin=origin)
    world.rest_all()
    return client


def settle(world: World) -> None:
    """Run until nothing more happens, including in a database that answers on demand."""
    for _ in range(3):
        world.settle_broker()
        world.rest_all()


def state(client: Client) -> Any:
    snapshot = client.joined().snapshot
    return None if snapshot is None else json.loads(snapshot.content.data)


def end_session(world: World, *clients: Client) -> None:
    for client in clients:
        client.close()
    world.pass_time(GRACE_MS + 1)
    settle(world)


# Destruction by hand


def test_a_channel_may_be_destroyed_by_hand_while_its_first_message_waits(tmp_path: Path) -> None:
    """With the embedded store: the topic does not exist yet when the channel is destroyed."""
    store = StepStore(Config(data_dir=tmp_path / "data"))
    channels = Channels(
        store.store,
        store.runner,
        NotedSnapshots(store.store),
        lambda name: ChannelRule(reducer("last"), 9000, 9000, 9000),
        store.clock,
        elapsed_ms=store.clock,
        members_max=9,
        remember_ms=9000,
    )
    channel, told = channels.get("c"), []
    channel.join("a", None, Receive.POLL, told.append, told.append)
    store.runner.run()
    assert isinstance(told.pop(), Joined)
    channel.send(channel.request("a"), 1, Content(b"1", True), told.append)
    channel.destroy(lambda: told.append("destroyed"), told.append)
    store.runner.run()
    assert told[-1] == "destroyed"
    assert not channel.is_busy
    assert not channel.topic.exists
    channel.join("a", None, Receive.POLL, told.append, told.append)
    store.runner.run()
    assert isinstance(told[-1], Joined)
    store.crash()


@both
def test_a_channel_that_is_destroyed_by_hand_begins_empty(slow: bool) -> None:
    world = World(slow=slow)
    a, b = come(world, "a"), come(world, "b")
    a.send("one")
    a.ack_all()
    b.ack_all()
    settle(world)
    assert world.snapshot is not None
    a.send("two")
    a.take()
    told: list[Any] = []
    a.channel.destroy(lambda: told.append("done"), told.append)
    world.rest_all()
    assert told == ["done"]
    assert a.take()[-1] == b.take()[-1] == "destroyed"
    assert not world.disk.exists
    assert world.snapshot is None
    # Numbers are remembered, and offsets continue.
    [member] = read_members(ModelStore(world.disk), NAME)  # type: ignore[arg-type]
    assert (member.name, member.number, member.standing) == ("a", 2, Standing.LEFT)
    again = come(world, "a")
    joined = again.joined()
    assert (joined.number, joined.missed, joined.start) == (2, None, world.disk.end.offset)
    assert joined.snapshot is not None and joined.snapshot.content.data == b"null"
    again.send("three")
    assert state(come(world, "c")) == ["three"]


def test_what_is_being_written_is_destroyed_with_the_rest() -> None:
    world = World()
    a = come(world, "a")
    a.send("one")
    answers: list[Any] = []
    a.channel.send(a.member, 2, Content(b'"two"', True), answers.append)
    a.channel.destroy(lambda: answers.append("done"), answers.append)
    Client(world, "b", origin="state", settle=False)
    settle(world)
    assert answers[0].offset == world.disk.end.offset
    assert answers[1] == "done"
    assert not world.disk.exists
    assert "b" in world.channel.members


def test_a_channel_of_which_only_a_state_is_left_is_destroyed_too() -> None:
    world = World()
    a = come(world, "a")
    a.send("one")
    end_session(world, a)
    assert world.snapshot is not None and not world.disk.exists
    told: list[Any] = []
    world.channel.destroy(lambda: told.append("done"), told.append)
    world.rest_all()
    assert told == ["done"]
    assert world.snapshot is None
    assert state(come(world, "b")) is None


# Age


@both
def test_a_state_expires_when_its_log_was_destroyed_long_ago(slow: bool) -> None:
    world = World(slow=slow, snapshot_age_ms=AGE_MS)
    a = come(world, "a")
    a.send("one")
    a.ack_all()
    settle(world)
    # While there is a log, its state stays, however old it is.
    world.pass_time(3 * AGE_MS)
    settle(world)
    assert world.snapshot is not None
    end_session(world, a)
    world.pass_time(AGE_MS - 1)
    settle(world)
    assert world.snapshot is not None, "its age counts from the end of the log"
    for _ in range(3):
        world.pass_time(AGE_MS)
        settle(world)
    assert world.snapshot is None
    assert state(come(world, "b")) is None


def test_without_an_age_states_are_kept_for_ever() -> None:
    world = World()
    a = come(world, "a")
    a.send("one")
    end_session(world, a)
    for _ in range(3):
        world.pass_time(100 * AGE_MS)
        settle(world)
    assert state(come(world, "b")) == ["one"]


def test_a_member_that_comes_back_to_an_expired_state_is_told_that_it_missed_something() -> None:
    world = World(snapshot_age_ms=AGE_MS)
    a, b = come(world, "a", None), come(world, "b", None)
    a.send("one")
    b.ack_all()
    a.send("two")
    end_session(world, a, b)
    for _ in range(3):
        world.pass_time(AGE_MS)
        settle(world)
    joined = come(world, "b", None).joined()
    assert joined.snapshot is None
    assert joined.missed is not None
    assert (joined.missed.messages, joined.missed.reason) == (1, "destroyed")


# States that are not kept


@both
@pytest.mark.parametrize("reducer_name", ["world:collect", "uploaded"])
def test_a_state_that_is_not_kept_ends_with_the_log(slow: bool, reducer_name: str) -> None:
    world = World(reducer_name=reducer_name, slow=slow, persist=False)
    a = come(world, "a")
    a.send("one")
    a.ack_all()
    settle(world)
    if reducer_name != "uploaded":
        assert world.snapshot is not None, "trimmed messages are in it while the log is there"
        assert state(come(world, "b")) == ["one"]
        world.channel.leave("b", lambda: None)
        settle(world)
    end_session(world, a)
    assert not world.disk.exists
    assert world.snapshot is None
    again = come(world, "a")
    assert state(again) is None
    again.send("two")
    if reducer_name != "uploaded":
        assert state(come(world, "c")) == ["two"]


def test_a_state_of_an_earlier_life_does_not_count_where_the_database_has_it_still() -> None:
    world = World(slow=True, persist=False)
    a = come(world, "a")
    a.send("one")
    a.ack_all()
    settle(world)
    assert world.database is not None
    kept = dict(world.database)
    end_session(world, a)
    world.database |= kept
    assert state(come(world, "b")) is None
    b = come(world, "b")
    b.send("two")
    assert state(come(world, "c")) == ["two"]


def test_notes_of_a_state_that_is_not_kept_go_in_the_commit_that_destroys_the_log() -> None:
    world = World(persist=False)
    a = come(world, "a")
    a.send("one")
    a.ack_all()
    settle(world)
    a.close()
    world.pass_time(GRACE_MS + 1)
    while world.store.pending:
        world.commit()
        has_state = read_snapshot(ModelStore(world.disk), NAME) is not None  # type: ignore[arg-type]
        assert has_state is world.disk.exists
