"""Channels by the sections of their protocol, on a store in memory, and all races that we know of."""

import json
from typing import Any

import pytest

from headrace.broker.channel.channel import Accepted, Joined, MissedByMember
from headrace.broker.channel.member import Batch, Origin, Receive
from headrace.broker.channel.notes import read_members
from headrace.errors import ChannelError
from headrace.log.records import split_records
from headrace.log.store import Chunk, Run
from headrace.model import Position
from headrace.payload.channel import Content, decode_message
from tests.broker.channel.model_store import NAME, ModelStore
from tests.broker.channel.world import GRACE_MS, LEASE_MS, PRESENCE_MS, REMEMBER_MS, World, rule


class Client:
    """A connection that records what it is told. Implements `MemberConnection`."""

    def __init__(
        self,
        world: World,
        name: str,
        receive: Receive = Receive.PUSH,
        *,
        settle: bool = True,
        instance: str = "",
        attempt: int = 0,
        origin: Origin = None,
        lease_ms: int = 0,
    ) -> None:
        self.world, self.name = world, name
        self.is_gone = False
        self.instance, self.attempt = instance, attempt
        self.has_room = True
        self.told: list[Any] = []
        self.channel = world.channels.get(NAME)
        self.channel.join(
            name, self, receive, self._hear, self._hear, origin=origin, lease_ms=lease_ms
        )
        if settle:
            world.commit_all()

    def messages(self, channel: str, batch: Batch) -> bool:
        if self.has_room:
            self.told.append(batch)
        return self.has_room

    def signal(self, channel: str) -> None:
        self.told.append("signal")

    def ended(self, channel: str, reason: str) -> None:
        self.told.append(reason)

    def _hear(self, told: Joined | ChannelError) -> None:
        self.told.append(told)

    @property
    def member(self) -> Any:
        return self.channel.members[self.name]

    def take(self) -> list[Any]:
        told, self.told = self.told, []
        return told

    def joined(self) -> Joined:
        [one] = [one for one in self.take() if isinstance(one, Joined)]
        return one

    def texts(self) -> list[str]:
        """Return the payloads of the messages that have arrived."""
        batches = [one for one in self.take() if isinstance(one, Batch)]
        return [text for batch in batches for text in texts(batch)]

    def send(self, text: str, number: int | None = None) -> Accepted:
        answers: list[Accepted] = []
        content = Content(json.dumps(text).encode(), True)
        self.channel.send(self.member, number or self.member.number + 1, content, answers.append)
        self.world.commit_all()
        return answers[0]

    def ack(self, offset: int) -> int | ChannelError:
        answers: list[int | ChannelError] = []
        self.channel.ack(self.member, offset, answers.append, answers.append)
        self.world.commit_all()
        return answers[0]

    def ack_all(self) -> None:
        self.ack(self.channel.topic.end_offset)

    def fetch(self, messages_max: int = 100) -> Batch:
        answers: list[Batch] = []
        self.channel.fetch(self.member, messages_max, answers.append)
        return answers[0]

    def close(self) -> None:
        self.is_gone = True
        self.world.channels.membership.gone(self.channel, self.name, self)
        self.world.commit_all()

    def leave(self) -> None:
        self.channel.leave(self.name, lambda: self.told.append("left"))
        self.world.commit_all()


def texts(batch: Batch) -> list[str]:
    return [json.loads(decode_message(one.payload).content.data) for one in batch.messages]


@pytest.fixture
def world() -> World:
    return World(reducer_name="last")


# 1. Sending


def test_a_message_is_answered_when_it_is_committed(world: World) -> None:
    a = Client(world, "a")
    answers: list[Accepted] = []
    a.channel.send(a.member, 1, Content(b'"x"', True), answers.append)
    assert answers == []
    world.commit_all()
    assert answers == [Accepted(world.disk.end.offset, False)]


def test_a_number_is_stored_once_also_after_a_crash(world: World) -> None:
    a = Client(world, "a")
    first = a.send("x")
    assert a.send("y", 1) == Accepted(first.offset, True)
    world.crash()
    a = Client(world, "a")
    assert a.joined().number == 1
    assert a.send("z", 1) == Accepted(first.offset, True)
    assert world.truth == [("a", 1)]


def test_a_number_that_comes_again_is_looked_up_a_block_at_a_time_and_answered_in_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.broker.channel.sending._OFFSETS_MAX", 3)
    a = Client(world, "a")
    places = [a.send(f"{number}").offset for number in range(1, 10)]
    read, reads = ModelStore.read, 0

    def one(self: ModelStore, offset: int, bytes_max: int) -> Chunk:
        nonlocal reads
        reads += 1
        runs = read(self, offset, bytes_max).runs[0]
        data = split_records(runs.data, runs.record_count)[0]
        run = Run(runs.offset, runs.ordinal, 1, runs.ms, data)
        return Chunk([run], run.end, 0)

    monkeypatch.setattr(ModelStore, "read", one)
    answers: list[Accepted] = []
    for number in (5, 6, 2, 9, 10, 1, 5):
        a.channel.send(a.member, number, Content(b"0", True), answers.append)
    assert answers == []
    while world.runner.step():
        assert len(a.member.offsets or ()) <= 4
        if world.store.pending:
            world.store.commit()
    assert reads > 20
    ten = world.ends[-1]
    wanted = [places[4], places[5], places[1], places[8], ten, places[0], places[4]]
    assert [one.offset for one in answers] == wanted
    assert [one.is_duplicate for one in answers] == [True] * 4 + [False, True, True]


def test_two_of_a_number_at_once_are_one(world: World) -> None:
    a = Client(world, "a")
    answers: list[Accepted] = []
    for _ in range(2):
        a.channel.send(a.member, 1, Content(b'"x"', True), answers.append)
    world.commit_all()
    assert answers == [
        Accepted(world.disk.end.offset, False),
        Accepted(world.disk.end.offset, True),
    ]


def test_a_number_above_the_next_is_refused_for_now(world: World) -> None:
    a = Client(world, "a")
    with pytest.raises(
        ChannelError, match="the next number of 'a' in channel 'c' is 1, not 2"
    ) as e:
        a.send("x", 2)
    assert (e.value.code, e.value.retry) == ("gap", True)


def test_what_cannot_be_folded_is_refused_for_good(world: World) -> None:
    world.rule = rule("map")
    a = Client(world, "a")
    with pytest.raises(ChannelError) as error:
        a.send("x")
    assert (error.value.code, error.value.retry) == ("cannot-fold", False)
    assert not world.truth
    # The refused message's number is still free.
    a.channel.send(a.member, 1, Content(b'{"key":"k","value":1}', True), lambda _: None)


def test_what_is_too_large_is_refused(world: World) -> None:
    a = Client(world, "a")
    with pytest.raises(ChannelError) as error:
        a.send("x" * 262_144)
    assert error.value.code == "too-large"
    assert a.send("x").offset is not None


# 2. Receiving by signal


def test_a_signal_comes_once_and_again_after_an_ack_with_more(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b", Receive.SIGNAL)
    b.take()
    offsets = [a.send(text).offset for text in "xyz"]
    assert b.take() == ["signal"]
    assert texts(b.fetch(1)) == ["x"]
    assert b.ack(offsets[0] or 0) == offsets[0]
    assert b.take() == ["signal"]
    assert texts(b.fetch()) == ["y", "z"]
    b.ack_all()
    assert b.take() == []
    a.send("w")
    assert b.take() == ["signal"]


def test_what_is_pending_is_signalled_behind_joined(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    b.close()
    a.send("x")
    b = Client(world, "b", Receive.SIGNAL)
    assert isinstance(b.told[0], Joined) and b.told[1:] == ["signal"]


# 3. Broadcasting


def test_a_message_goes_to_all_but_its_sender(world: World) -> None:
    a, b, c = (Client(world, name) for name in "abc")
    a.send("x")
    assert (a.texts(), b.texts(), c.texts()) == ([], ["x"], ["x"])
    b.send("y")
    assert (a.texts(), b.texts(), c.texts()) == (["y"], [], ["y"])


def test_a_cursor_steps_over_what_its_processor_has_sent(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    first = a.send("x").offset
    b.send("own")
    b.send("own too")
    b.take()
    assert b.ack(first or 0) == world.disk.end.offset
    assert b.member.offset == world.disk.end.offset
    world.crash()
    assert {m.name: m.offset for m in read_members(ModelStore(world.disk), NAME)}["b"] == (  # type: ignore[arg-type]
        world.disk.end.offset
    )


def test_members_that_send_at_once_see_one_order(world: World) -> None:
    a, b, c = (Client(world, name) for name in "abc")
    for client, text in ((a, "1"), (b, "2"), (a, "3")):
        content = Content(json.dumps(text).encode(), True)
        client.channel.send(client.member, client.member.number + 1, content, lambda _: None)
    world.commit_all()
    assert (a.texts(), b.texts(), c.texts()) == (["2"], ["1", "3"], ["1", "2", "3"])


# 4. Pushing


def test_what_was_missed_is_pushed_on_reconnect(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("1")
    assert b.texts() == ["1"]
    b.ack_all()
    b.close()
    a.send("2")
    a.send("3")
    b = Client(world, "b")
    [_, batch] = b.take()
    assert texts(batch) == ["2", "3"]


def test_what_was_not_acknowledged_comes_again(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("1")
    b.close()
    a.send("2")
    a.send("3")
    assert Client(world, "b").texts() == ["1", "2", "3"]


def test_a_member_that_does_not_acknowledge_is_sent_a_window(
    world: World, monkeypatch: Any
) -> None:
    monkeypatch.setattr("headrace.broker.channel.member.WINDOW_MESSAGES_MAX", 2)
    a, b = Client(world, "a"), Client(world, "b")
    offsets = [a.send(str(n)).offset for n in range(5)]
    assert b.texts() == ["0", "1"]
    b.ack(offsets[0] or 0)
    b.ack(offsets[1] or 0)
    assert b.texts()[:2] == ["2", "3"]


def test_an_ack_that_comes_again_is_answered_with_what_is_durable(world: World) -> None:
    """The answer does not contain a later acknowledgement that is not committed."""
    a, b = Client(world, "a"), Client(world, "b")
    first, second, third = (a.send(str(n)).offset or 0 for n in range(3))
    answers: list[int] = []
    for offset in (second, first, third):
        b.channel.ack(b.member, offset, answers.append, world.refused)
    world.commit()
    world.commit()
    assert answers == [second, second]
    world.commit()
    assert answers == [second, second, third]


def test_a_connection_without_room_goes_on_when_it_has_some(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    b.has_room = False
    a.send("x")
    a.send("y")
    b.has_room = True
    b.channel.go_on(b.member)
    assert b.texts() == ["x", "y"]


# 5. Polling


def test_a_poll_brings_what_is_pending_or_nothing_and_moves_nothing(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b", Receive.POLL)
    assert texts(b.fetch()) == []
    a.send("x")
    assert b.texts() == []
    assert texts(b.fetch()) == texts(b.fetch()) == ["x"]
    b.ack_all()
    assert texts(b.fetch()) == []


def test_the_ways_of_receiving_share_a_cursor(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b", Receive.POLL)
    a.send("x")
    texts(b.fetch())
    b.ack_all()
    a.send("y")
    b.close()
    assert Client(world, "b", Receive.PUSH).texts() == ["y"]


def test_requests_make_a_member_present_for_a_while(world: World) -> None:
    a = Client(world, "a")
    a.close()
    channel = world.channel
    assert not channel.present
    channel.request("a")
    world.commit_all()
    assert channel.present and channel.schedule is None
    world.pass_time(PRESENCE_MS + 1)
    assert not channel.present and channel.schedule is not None


def test_who_polls_a_quiet_channel_keeps_its_lease(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    b.close()
    for _ in range(10):
        world.channel.request("b")
        world.commit_all()
        world.pass_time(LEASE_MS // 4)
        world.settle_broker()
    a.send("x")
    world.settle_broker()
    world.channel.request("b")
    assert texts(b.fetch()) == ["x"]


def test_who_polls_is_there_still_when_its_connection_ends(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    world.channel.request("b")
    b.close()
    a.close()
    assert world.channel.present == 1 and world.channel.schedule is None
    assert texts(b.fetch()) == ["x"]
    world.pass_time(PRESENCE_MS + 1)
    assert not world.channel.present and world.channel.schedule is not None


def test_a_join_that_a_dead_connection_brings_late_does_not_replace_the_next(world: World) -> None:
    live = Client(world, "b", instance="x", attempt=2)
    late = Client(world, "b", instance="x", attempt=1)
    [refused] = late.take()
    assert isinstance(refused, ChannelError) and "on a later connection" in str(refused)
    Client(world, "a").send("to b")
    assert live.texts() == ["to b"]
    for instance, attempt in (("x", 3), ("", 0), ("y", 1)):
        other = Client(world, "b", instance=instance, attempt=attempt)
        assert live.take() == ["replaced"] and isinstance(other.told[0], Joined)
        live = other
        live.take()


def test_who_leaves_elsewhere_is_told_on_its_connection(world: World) -> None:
    b = Client(world, "b")
    b.take()
    world.channel.leave("b", lambda: None)
    world.commit_all()
    assert b.take() == ["left"]


def test_an_ack_and_a_fetch_behind_a_join_are_done_behind_it(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    ends = [a.send(text).offset or 0 for text in ("x", "y", "z")]
    b.ack(ends[0])
    again = Client(world, "b", settle=False)
    answers: list[Any] = []
    again.channel.ack(again.member, ends[1], answers.append, answers.append)
    again.channel.fetch(again.member, 10, answers.append)
    assert answers == [] and again.told == []
    world.commit_all()
    batch, acked = answers
    assert acked == ends[1] and texts(batch) == ["z"]
    assert isinstance(again.told[0], Joined)
    again.close()
    assert Client(world, "b").texts() == ["z"]


def test_who_has_not_joined_is_told(world: World) -> None:
    with pytest.raises(ChannelError, match="'x' is no member of channel 'c': join first"):
        world.channel.request("x")


# 6. Forgetting


def test_what_only_its_sender_is_there_for_is_trimmed_when_it_acknowledges(world: World) -> None:
    a = Client(world, "a")
    for number in (1, 2, 3):
        offset = a.send(f"{number}").offset or 0
        a.ack(offset)
        world.settle_broker()
        assert world.disk.start.ordinal == number


def test_what_all_have_read_is_trimmed_and_folded(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.send("y")
    b.ack_all()
    world.settle_broker()
    assert world.disk.start.ordinal == 1  # a has not acknowledged y
    a.ack_all()
    world.settle_broker()
    assert world.disk.start == world.disk.end
    assert world.snapshot is not None
    assert (world.snapshot.offset, world.snapshot.content.data) == (world.disk.end.offset, b'"y"')


def test_a_member_that_is_away_holds_the_log_while_its_lease_lasts(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.ack_all()
    b.close()
    a.send("y")
    world.pass_time(LEASE_MS - 1)
    world.settle_broker()
    assert world.disk.start.ordinal == 1
    world.pass_time(2)
    world.settle_broker()
    assert world.disk.start.ordinal == 2
    joined = Client(world, "b").joined()
    assert joined.missed == MissedByMember(1, "trimmed")
    assert joined.snapshot is not None and joined.snapshot.content.data == b'"y"'
    assert joined.cursor == joined.start == world.disk.end.offset


def test_a_member_that_is_there_holds_the_log_for_ever(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    for _ in range(20):
        world.pass_time(LEASE_MS // 4)
        world.settle_broker()
    assert world.disk.start.ordinal == 0
    world.crash()
    world.pass_time(LEASE_MS // 2)
    assert Client(world, "b").joined().missed is None
    assert b.name == "b"


def test_who_leaves_holds_nothing(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.leave()
    world.settle_broker()
    assert world.disk.start.ordinal == 1
    joined = Client(world, "b").joined()
    assert joined.missed is None
    assert joined.snapshot is not None


def test_a_new_processor_gets_the_snapshot_and_what_is_behind_it(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.ack_all()
    world.settle_broker()
    a.send("y")
    c = Client(world, "c")
    assert c.told[0].snapshot.content.data == b'"x"'
    assert c.told[0].missed is None
    assert c.texts() == ["y"]


def test_readers_that_are_waited_for_hold_the_log(world: World) -> None:
    world.rule = rule("last", wait_for=["lake"])
    a, b = Client(world, "a"), Client(world, "b")
    first = a.send("x").offset or 0
    a.send("y")
    b.ack_all()
    world.store.reader_cursors["lake"] = Position(1, first, 1)
    world.settle_broker()
    assert world.disk.start.ordinal == 1
    a.close()
    b.close()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert world.disk.exists and world.disk.start.ordinal == 1
    world.store.reader_cursors["lake"] = world.disk.end
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert not world.disk.exists


def test_the_lake_holds_a_channel_before_its_first_export_and_lets_go_when_it_moves(
    world: World,
) -> None:
    world.rule = rule("last", wait_for=["lake"])
    a, b = Client(world, "a"), Client(world, "b")
    first = a.send("x").offset or 0
    a.send("y")
    b.ack_all()
    world.settle_broker()
    assert world.disk.start.ordinal == 0
    world.store.reader_cursors["lake"] = Position(1, first, 1)
    world.channels.readers_moved(["orders", f"$channel/{NAME}"])
    world.settle_broker()
    assert world.disk.start.ordinal == 1


def test_an_empty_channel_is_destroyed_after_its_grace(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    a.close()
    b.close()
    world.pass_time(GRACE_MS - 1)
    world.settle_broker()
    assert world.disk.exists
    world.pass_time(2)
    world.settle_broker()
    assert not world.disk.exists
    joined = Client(world, "b").joined()
    assert joined.missed == MissedByMember(1, "destroyed")
    assert joined.snapshot is not None and joined.snapshot.content.data == b'"x"'


def test_what_is_trimmed_destroyed_and_refused_is_counted(world: World) -> None:
    counted = world.counted
    a = Client(world, "a")
    a.ack(a.send("x").offset or 0)
    world.settle_broker()
    assert counted == ["channels_trimmed_total"]
    a.send("y")
    a.send("y", 2)
    assert counted[1:] == ["duplicates_refused_total"]
    a.close()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert not world.disk.exists
    assert counted[2:] == ["channels_destroyed_total"]


def test_who_has_never_acknowledged_is_told_what_it_missed_until_it_does(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    a.send("y")
    a.close()
    b.close()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    for _ in range(2):
        again = Client(world, "b")
        assert again.joined().missed == MissedByMember(2, "destroyed")
        again.close()
    again = Client(world, "b")
    again.ack(again.joined().cursor)
    again.close()
    assert Client(world, "b").joined().missed is None


def test_what_was_not_read_when_the_log_was_destroyed_is_counted(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.ack_all()
    b.close()
    a.send("y")
    a.send("z")
    a.close()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    again = Client(world, "b")
    assert again.told[0].missed == MissedByMember(2, "destroyed")
    assert again.told[0].snapshot.content.data == b'"z"'
    # The server repeats this until it is acknowledged.
    again.close()
    assert Client(world, "b").joined().missed == MissedByMember(2, "destroyed")


def test_someone_who_comes_in_time_cancels_the_destruction(world: World) -> None:
    a = Client(world, "a")
    a.send("x")
    a.close()
    world.pass_time(GRACE_MS - 1)
    a = Client(world, "a")
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert world.disk.exists


def test_an_operator_keeps_a_channel(world: World) -> None:
    a = Client(world, "a")
    a.send("x")
    a.close()
    answers: list[bool] = []
    world.channel.keep(answers.append)
    world.commit_all()
    assert answers == [True]
    world.crash()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert world.disk.exists
    # This holds until a member joins and leaves again.
    Client(world, "a").close()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    assert not world.disk.exists


@pytest.mark.parametrize("by", ["an operator", "a visitor"])
def test_a_destruction_is_cancelled_also_while_its_snapshot_is_being_saved(by: str) -> None:
    world = World(reducer_name="last", slow=True)
    a = Client(world, "a", settle=False)
    world.rest_all()
    a.send("x")
    a.close()
    world.pass_time(GRACE_MS + 1)
    world.commit_all()
    assert world.slow is not None and world.slow.asked, "it is under way"
    if by == "an operator":
        world.channel.keep(lambda _: None)
    else:
        world.channel.request("a")
        world.channels.membership.stopped_polling(world.channel, "a")
    world.rest_all()
    assert world.disk.exists
    world.settle_broker()
    assert world.disk.exists


def test_a_destruction_survives_a_restart(world: World) -> None:
    a = Client(world, "a")
    a.send("x")
    a.close()
    world.pass_time(GRACE_MS - 10)
    world.crash()
    world.pass_time(11)
    world.settle_broker()
    assert not world.disk.exists


def test_a_channel_that_was_not_empty_at_the_crash_has_its_grace_from_the_start(
    world: World,
) -> None:
    Client(world, "a").send("x")
    world.crash()
    world.tick()
    world.commit_all()
    world.pass_time(GRACE_MS - 1)
    world.settle_broker()
    assert world.disk.exists
    world.pass_time(2)
    world.settle_broker()
    assert not world.disk.exists


def test_numbers_outlive_destruction_and_are_forgotten_at_last(world: World) -> None:
    a = Client(world, "a")
    a.send("x")
    a.close()
    world.pass_time(GRACE_MS + 1)
    world.settle_broker()
    a = Client(world, "a")
    assert a.joined().number == 1
    assert a.send("again", 1) == Accepted(None, True)
    a.close()
    world.pass_time(LEASE_MS + 1)
    world.settle_broker()
    world.pass_time(REMEMBER_MS + 1)
    world.settle_broker()
    assert Client(world, "a").joined().number == 0


def test_members_have_a_limit(world: World) -> None:
    for number in range(10):
        Client(world, f"p{number}")
    [refused] = Client(world, "one more").take()
    assert isinstance(refused, ChannelError) and refused.code == "too-many"


# Uploaded snapshots


def test_an_uploaded_state_is_kept_and_an_older_one_never_replaces_it(world: World) -> None:
    world.rule = rule("uploaded")
    a, b = Client(world, "a"), Client(world, "b")
    first, second = a.send("x").offset or 0, a.send("y").offset or 0
    b.ack_all()
    world.settle_broker()
    assert world.disk.start.ordinal == 0  # nothing is uploaded yet
    answers: list[Any] = []
    for offset, state in ((second, b"2"), (first, b"1"), (second, b"2 again")):
        a.channel.upload(offset, Content(state, True), answers.append, answers.append)
        world.commit_all()
    assert answers == [second, second, second]
    assert world.snapshot is not None and world.snapshot.content.data == b"2"
    world.settle_broker()
    assert world.disk.start.ordinal == 2


def test_a_state_is_shown_when_it_is_durable(world: World) -> None:
    world.rule = rule("uploaded")
    a = Client(world, "a")
    offset = a.send("x").offset or 0
    shown: list[Any] = []
    a.channel.upload(offset, Content(b"1", True), lambda _: None, lambda _: None)
    world.channels.load_snapshot(NAME, shown.append, shown.append)
    assert not shown
    world.commit_all()
    assert [one.content.data for one in shown] == [b"1"]
    assert world.snapshot == shown[0]


def test_what_an_uploaded_state_stands_for_is_missed_by_who_was_away(world: World) -> None:
    world.rule = rule("uploaded")
    a, b, c = Client(world, "a"), Client(world, "b"), Client(world, "c")
    ends = [a.send(text).offset or 0 for text in "123456"]
    b.ack(ends[0])
    b.close()
    c.ack(ends[2])
    world.pass_time(LEASE_MS + 1)
    a.channel.upload(ends[4], Content(b"5", True), lambda _: None, lambda _: None)
    world.settle_broker()
    assert world.disk.start.ordinal == 3
    again = Client(world, "b")
    [joined, batch] = again.take()
    assert joined.missed == MissedByMember(4, "trimmed") and joined.cursor == ends[4]
    assert texts(batch) == ["6"]


def test_a_log_that_no_upload_covers_is_not_destroyed(world: World) -> None:
    world.rule = rule("uploaded")
    a = Client(world, "a")
    first = a.send("x").offset or 0
    a.send("y")
    a.channel.upload(first, Content(b"1", True), lambda _: None, lambda _: None)
    world.commit_all()
    a.close()
    for _ in range(3):
        world.pass_time(GRACE_MS + 1)
        world.settle_broker()
    assert world.disk.exists and world.disk.start.ordinal == 1


def test_uploads_are_for_channels_that_want_them_and_for_places_in_the_log(world: World) -> None:
    a = Client(world, "a")
    a.send("x")
    with pytest.raises(ChannelError, match="has the reducer 'last'"):
        a.channel.upload(1, Content(b"1", True), lambda _: None, lambda _: None)
    world.rule = rule("uploaded")
    world.crash()
    a = Client(world, "a")
    answers: list[Any] = []
    a.channel.upload(3, Content(b"1", True), answers.append, answers.append)
    assert answers[0].code == "bad-offset"


# Failures of the reducer


def test_nothing_is_forgotten_while_the_reducer_fails(world: World, caplog: Any) -> None:
    world.rule = rule("map")
    a, b = Client(world, "a"), Client(world, "b")
    a.channel.send(a.member, 1, Content(b'{"key":"k","value":1}', True), lambda _: None)
    world.commit_all()
    b.ack_all()
    world.settle_broker()
    world.rule = rule("merge")
    world.crash()
    a, b = Client(world, "a"), Client(world, "b")
    a.channel.send(a.member, 2, Content(b'{"k":2}', True), lambda _: None)
    world.commit_all()
    b.ack_all()
    world.settle_broker()
    assert world.snapshot is not None and json.loads(world.snapshot.content.data) == {"k": 2}
    world.rule = rule("count")
    world.crash()
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.ack_all()
    world.settle_broker()
    assert world.disk.start.ordinal == 2
    assert (
        'the log cannot be trimmed now, and is trimmed later: the reducer "count" fails'
        in caplog.text
    )


# Races


def test_race_a_join_while_destruction_is_running() -> None:
    world = World(slow=True)
    a = Client(world, "a", settle=False)
    world.rest_all()
    assert a.joined()
    a.channel.send(a.member, 1, Content(b'["a",1]', True), lambda _: None)
    world.rest_all()
    a.close()
    world.pass_time(GRACE_MS + 1)  # the database is asked for the state
    assert world.slow is not None and world.slow.asked
    b = Client(world, "b")
    assert b.take() == []
    world.rest_all()
    joined = b.joined()
    assert joined.snapshot is not None and json.loads(joined.snapshot.content.data) == [["a", 1]]
    assert not world.disk.exists and joined.start == joined.end == joined.cursor


def test_race_a_send_during_the_snapshot() -> None:
    world = World(slow=True)
    a, b = Client(world, "a", settle=False), Client(world, "b", settle=False)
    world.rest_all()
    a.channel.send(a.member, 1, Content(b'["a",1]', True), lambda _: None)
    world.commit_all()
    b.ack_all()
    world.tick()  # the database is asked for the state
    a.channel.send(a.member, 2, Content(b'["a",2]', True), lambda _: None)
    world.rest_all()
    assert world.snapshot is not None and world.snapshot.ordinal == 1
    assert world.disk.start.ordinal == 1 and world.disk.end.ordinal == 2
    assert len([one for one in b.take() if isinstance(one, Batch)]) == 2


@pytest.mark.parametrize("slow", [False, True])
def test_race_a_crash_between_snapshot_and_destruction(slow: bool) -> None:
    world = World(slow=slow)
    a = Client(world, "a", settle=False)
    world.rest_all()
    a.channel.send(a.member, 1, Content(b'["a",1]', True), lambda _: None)
    world.rest_all()
    a.close()
    world.pass_time(GRACE_MS + 1)
    while slow and world.slow is not None and world.slow.asked:
        world.database_answers()
    assert world.store.pending[0].destroy
    world.crash()  # before the log is destroyed; with a database, after the snapshot is saved
    assert (world.snapshot is not None) is slow
    assert world.disk.exists
    world.tick()
    world.rest_all()
    assert not world.disk.exists
    assert world.snapshot is not None and json.loads(world.snapshot.content.data) == [["a", 1]]


def test_race_an_ack_that_arrives_after_the_lease_ended(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    first = a.send("x").offset or 0
    b.ack(first)
    b.close()
    second = a.send("y").offset or 0
    world.pass_time(LEASE_MS + 1)
    world.settle_broker()
    assert world.disk.start.offset == second
    with pytest.raises(ChannelError, match="messages are gone: join again") as error:
        world.channel.request("b")
    assert error.value.code == "not-joined"
    b = Client(world, "b")
    assert b.joined().missed == MissedByMember(1, "trimmed")
    assert b.ack(second) == second


def test_race_two_connections_of_one_processor(world: World) -> None:
    a, old = Client(world, "a"), Client(world, "b")
    a.send("x")
    new = Client(world, "b")
    assert old.take()[-1] == "replaced"
    assert new.texts() == ["x"]
    a.send("y")
    assert (old.texts(), new.texts()) == ([], ["y"])
    old.close()
    assert world.channel.present == 2
    a.send("z")
    assert new.texts() == ["z"]


def test_race_a_retry_of_a_message_that_was_trimmed_meanwhile(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    b.ack_all()
    world.settle_broker()
    assert world.disk.start == world.disk.end
    assert a.send("x", 1) == Accepted(None, True)
    world.crash()
    assert Client(world, "a").send("x", 1) == Accepted(None, True)
    assert world.truth == [("a", 1)]


# Invalid acknowledgements


def test_only_the_end_of_a_message_can_be_acknowledged(world: World) -> None:
    a, b = Client(world, "a"), Client(world, "b")
    end = a.send("x").offset or 0
    for wrong in (1, end - 1, end + 1, 1 << 60):
        refused = b.ack(wrong)
        assert isinstance(refused, ChannelError) and refused.code == "bad-offset"
    assert b.ack(end) == end
    assert b.ack(end) == b.ack(0) == end
