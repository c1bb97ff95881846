"""Channels never confirm something that a crash could still lose, whatever a processor does."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.channel.channel import Accepted, Joined
from headrace.broker.channel.member import Batch, Receive
from headrace.broker.channel.notes import StoredSnapshot, read_members, read_snapshot
from headrace.errors import ChannelError
from headrace.payload.channel import Content, decode_message
from tests.broker.channel.model_store import NAME, Id, ModelStore
from tests.broker.channel.world import World, rule
from tests.tools import EXAMPLES


class Peer:
    """A processor that sends and acknowledges anything. Implements `MemberConnection`."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_gone = True
        self.instance, self.attempt = "", 0
        self.is_joined = False
        self.offsets: list[int] = []
        """Next offsets of the messages that arrived on this connection."""

    # Actions of the processor

    def connect(self) -> None:
        self.cut()
        self.is_gone, self.is_joined, self.offsets = False, False, []
        self.world.channel.join(self.name, self, Receive.PUSH, self.joined, self.world.refused)

    def cut(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self.world.channels.membership.gone(self.world.channel, self.name, self)

    def send(self, back: int) -> None:
        """Send the next number, an earlier one, or one that leaves a gap."""
        member = self.world.channel.members[self.name]
        number = max(1, member.number + 1 - back)
        text = json.dumps([self.name, number]).encode()

        def accepted(answer: Accepted) -> None:
            stored = self.world.truth
            assert (self.name, number) in stored, "told that it is stored"
            if answer.offset is not None:
                place = stored.index((self.name, number))
                assert self.world.ends[place] == answer.offset

        try:
            self.world.channel.send(member, number, Content(text, True), accepted)
        except ChannelError as error:
            self.world.expect(error, "gap")

    def ack(self, places: list[int]) -> None:
        """Acknowledge any received messages in any order, repeatedly, without waiting for an answer."""
        for place in places if self.offsets else ():
            offset = self.offsets[place % len(self.offsets)]
            member = self.world.channel.members[self.name]
            self.world.channel.ack(member, offset, self.acked, self.world.refused)

    def upload(self, place: int) -> None:
        if self.offsets:
            offset = self.offsets[place % len(self.offsets)]
            state = Content(b"%d" % offset, True)
            self.world.channel.upload(offset, state, self.uploaded, self.world.refused)

    def look(self) -> None:
        self.world.channels.load_snapshot(NAME, self.shown, lambda _: None)

    # Answers to the processor

    def joined(self, joined: Joined) -> None:
        self.is_joined = True
        assert {(self.name, n) for n in range(1, joined.number + 1)} <= set(self.world.truth)
        if joined.snapshot is not None:
            self.shown(joined.snapshot)

    def acked(self, offset: int) -> None:
        [member] = [one for one in self.noted if one.name == self.name]
        own = {self.name}
        between = zip(self.world.ends, self.world.truth, strict=True)
        passed = [one for end, one in between if member.offset < end <= offset]
        # The answer may also cover the processor's own messages, which are never sent to it.
        assert {processor for processor, _ in passed} <= own, (offset, member.offset)

    def uploaded(self, offset: int) -> None:
        snapshot = read_snapshot(ModelStore(self.world.disk), NAME)  # type: ignore[arg-type]
        assert snapshot is not None and snapshot.offset >= offset

    def shown(self, found: StoredSnapshot | None) -> None:
        if found is not None:
            durable = read_snapshot(ModelStore(self.world.disk), NAME)  # type: ignore[arg-type]
            assert durable is not None and durable.offset >= found.offset

    def messages(self, channel: str, batch: Batch) -> bool:
        stored: set[Id] = set(self.world.truth)
        for offset, _, payload in batch.messages:
            told = decode_message(payload)
            assert (told.processor, told.number) in stored
            self.offsets.append(offset)
        return True

    def signal(self, channel: str) -> None: ...

    def ended(self, channel: str, reason: str) -> None:
        self.is_gone = True

    @property
    def noted(self) -> list[Any]:
        """The members as stored on disk."""
        return list(read_members(ModelStore(self.world.disk), NAME))  # type: ignore[arg-type]


who = st.integers(0, 1)
common = st.one_of(
    st.tuples(st.just("send"), who, st.integers(-1, 3)),
    st.tuples(st.just("ack"), who, st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("upload"), who, st.integers(0, 5)),
    st.tuples(st.just("look"), who),
    st.tuples(st.just("commit"), st.integers(1, 3)),
)
rare = st.one_of(
    st.tuples(st.just("connect"), who),
    st.tuples(st.just("cut"), who),
    st.tuples(st.just("crash"), st.integers(0, 2)),
)
step = st.one_of(common, common, common, common, rare)


@settings(max_examples=12 * EXAMPLES)
@given(st.lists(step, min_size=5, max_size=40))
def test_nothing_is_acknowledged_that_a_crash_would_take(steps: list[Any]) -> None:
    world = World("ab")
    world.rule = rule("uploaded")
    peers = [Peer(world, "a"), Peer(world, "b")]
    for peer in peers:
        peer.connect()
    world.commit_all()
    for peer in 2 * peers:
        peer.send(0)
    world.commit_all()
    for name, *args in steps:
        if name == "commit":
            for _ in range(min(args[0], len(world.store.pending))):
                world.commit()
        elif name == "crash":
            world.crash(*args)
            peers = [Peer(world, "a"), Peer(world, "b")]
            for peer in peers:
                peer.connect()
        else:
            peer = peers[args[0]]
            is_there = not peer.is_gone and peer.is_joined
            if name in ("connect", "cut", "look") or is_there:
                getattr(peer, name)(*args[1:])
        world.runner.run()
    world.commit_all()
