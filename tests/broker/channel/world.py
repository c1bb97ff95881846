"""Channels on a store in memory that can crash, with processors that check what they receive."""

import json
from collections.abc import Sequence
from typing import Any

from headrace.broker.channel.channel import Accepted, Channel, ChannelRule, Joined
from headrace.broker.channel.hub import Channels
from headrace.broker.channel.member import Batch, Origin, Receive
from headrace.broker.channel.notes import StoredSnapshot, read_members, read_snapshot
from headrace.broker.channel.snapshots import NotedSnapshots
from headrace.errors import ChannelError
from headrace.payload.channel import Content, decode_message
from headrace.payload.reducers import reducer
from tests.broker.channel.model_store import NAME, NO_SNAPSHOT, Disk, Id, ModelStore, SlowSnapshots
from tests.fakes.store import StepRunner

LEASE_MS, GRACE_MS, PRESENCE_MS, REMEMBER_MS = 1_000_000, 10_000, 5_000, 10_000_000


def collect(state: Any, message: Any) -> Any:
    """Reducer whose state is the list of all messages, so that a test can see what a snapshot covers."""
    return [*(state or []), message]


def rule(reducer_name: str = "world:collect", wait_for: Sequence[str] = ()) -> ChannelRule:
    made = reducer(reducer_name, lambda _: collect)
    return ChannelRule(made, LEASE_MS, GRACE_MS, PRESENCE_MS, wait_for)


class Processor:
    """Client that stores what it has acknowledged, and checks that it receives every message exactly once."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.accepted = 0
        """Highest message number that the processor knows to be stored."""
        self.kept: list[Id] = []
        """Messages on the processor's own disk: acknowledged, or part of a snapshot that it acknowledged."""
        self.confirmed: set[Id] = set()
        """Messages whose acknowledgement the server has confirmed."""
        self.connection: Connection | None = None
        self.is_member = False
        self.was_away_ms = 0
        """Time since the processor last acknowledged something in which it was not joined, in milliseconds.

        A processor whose join is not answered yet is not joined: its state may be in a database that does not
        answer for longer than a lease.
        """
        self.page: list[Id] | None = None
        """Content of the page: a state and every message after it."""
        self.page_offset = self.page_base = 0

    def connect(self) -> None:
        self._connect(Connection(self))

    def open_page(self, *, is_reloaded: bool = False) -> None:
        """Join from the state. If the page still exists, join after what the page shows."""
        if is_reloaded:
            self.page = None
        self._connect(PageConnection(self))

    def _connect(self, connection: "Connection") -> None:
        self.world.someone_comes()
        if self.connection is not None:
            self.connection.abandon()
        self.connection = connection
        connection.join()

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def leave(self) -> None:
        """End the membership. When the processor comes back, it may get its messages again."""
        assert self.connection is not None
        channel = self.connection.channel
        self.connection.abandon()
        self.connection = None
        self.confirmed = set()
        channel.leave(self.name, self.kept.clear)  # it keeps what it has until the answer

    def poll(self) -> None:
        """Receive what is pending without a connection, and acknowledge it."""
        self.world.someone_comes()
        channel = self.world.channels.get(NAME)
        try:
            member = channel.request(self.name)
        except ChannelError as error:
            self.world.expect(error, "not-joined")
            self.world.channels.rest(channel)
            return
        came: list[tuple[int, Id]] = []

        def got(batch: Batch) -> None:
            assert batch.lost == 0
            for offset, _, payload in batch.messages:
                told = decode_message(payload)
                assert told.processor != self.name, "its own"
                assert (told.processor, told.number) not in self.confirmed, "again, after its ack"
                came.append((offset, (told.processor, told.number)))

        channel.fetch(member, 100, got)
        if came:
            self.kept += [one for _, one in came]
            known = set(self.kept)

            def acked(_: int) -> None:
                if self.world.channels is channels:
                    self.confirmed |= known
                    self.was_away_ms = 0

            channels = self.world.channels
            channel.ack(member, came[-1][0], acked, self.world.refused)

    def post(self) -> None:
        """Send a message without a connection."""
        self.world.someone_comes()
        channel = self.world.channels.get(NAME)
        try:
            member = channel.request(self.name)
        except ChannelError:
            self.world.channels.rest(channel)
            return
        text = json.dumps([self.name, member.number + 1]).encode()
        channel.send(member, member.number + 1, Content(text, True), lambda _: None)


class Connection:
    """Connection of a processor; implements `MemberConnection`."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self.world = processor.world
        self.is_open = True
        self.is_gone = False
        """True once the server knows that the connection is closed."""
        self.instance, self.attempt = "", 0
        self.is_joined = False
        self.got: list[tuple[int, Id]] = []
        """Offset and id of each message that arrived and is not acknowledged."""
        self.state: list[Id] | None = None
        """Snapshot that arrived and is not acknowledged."""
        self.state_offset = 0
        self.channel = self.world.channels.get(NAME)

    def abandon(self) -> None:
        """Drop the connection on the client's side. The server does not know about it yet."""
        self.is_open = False
        self.world.half_open.append(self)

    def join(self) -> None:
        self.channel.join(self.processor.name, self, Receive.PUSH, self._joined, self.world.refused)

    def close(self) -> None:
        if not self.is_gone:
            self.is_open, self.is_gone = False, True
            self.world.channels.membership.gone(self.channel, self.processor.name, self)
            self.world.channels.rest(self.channel)

    def _joined(self, joined: Joined) -> None:
        if not self.is_open:
            return
        self.is_joined = True
        processor, world = self.processor, self.world
        processor.is_member = True
        if joined.snapshot is not None:
            self.state = [(p, n) for p, n in json.loads(joined.snapshot.content.data)]
            self.state_offset = joined.snapshot.offset
            assert self.state == world.kept_before(joined.snapshot), "a snapshot is all before it"
        if joined.missed is not None:
            assert joined.snapshot is not None, "whoever misses something gets the state"
            assert joined.missed.messages is not None and joined.missed.messages > 0
            if joined.missed.reason == "trimmed":
                assert processor.was_away_ms > LEASE_MS, "the log is kept while its lease lasts"
            else:
                assert joined.missed.reason == "destroyed"
            gone = world.forgotten - set(processor.kept)
            unseen = {one for one in gone if one[0] != processor.name}
            assert len(unseen) <= joined.missed.messages
        elif joined.snapshot is None:
            # The server reports no missing messages, so none may be missing.
            gone = world.forgotten - set(processor.kept)
            assert not {one for one in gone if one[0] != processor.name}, "missing, and not told"
        assert joined.number >= processor.accepted

    def messages(self, channel: str, batch: Batch) -> bool:
        if not self.is_open:
            return True  # the message is on its way to a client that is gone
        assert self.is_joined, "messages behind `joined`"
        assert batch.lost == 0
        last = self.got[-1][0] if self.got else 0
        for offset, _, payload in batch.messages:
            told = decode_message(payload)
            one = told.processor, told.number
            assert told.processor != self.processor.name, "its own"
            assert offset > last, "in order"
            assert one not in self.processor.confirmed, "again, after its ack"
            if self.state is not None:
                assert one not in self.state, "in the snapshot, and again"
            last = offset
            self.got.append((offset, one))
        return True

    def signal(self, channel: str) -> None:
        raise AssertionError

    def ended(self, channel: str, reason: str) -> None:
        self.is_open = False

    def send(self, number: int) -> None:
        processor = self.processor
        member = self.channel.members[processor.name]

        def accepted(answer: Accepted) -> None:
            stored = self.world.truth
            assert (processor.name, number) in stored
            if answer.offset is not None:
                assert self.world.ends[stored.index((processor.name, number))] == answer.offset
            if self.is_open:
                processor.accepted = max(processor.accepted, number)

        text = json.dumps([processor.name, number]).encode()
        try:
            self.channel.send(member, number, Content(text, True), accepted)
        except ChannelError as error:
            self.world.expect(error, "gap")

    def ack(self, count: int) -> None:
        """Acknowledge the snapshot, if there is one, and the next `count` messages."""
        some = self.got[:count]
        offset = some[-1][0] if some else self.state_offset
        state, processor = self.state, self.processor
        member = self.channel.members[processor.name]
        if state is not None:
            processor.kept = list(state)
        processor.kept += [one for _, one in some]
        self.got = self.got[count:]
        self.state = None
        known = set(processor.kept)

        def acked(_: int) -> None:
            if self.is_open:
                processor.confirmed |= known
                processor.was_away_ms = 0

        self.channel.ack(member, offset, acked, self.world.refused)


class PageConnection(Connection):
    """Connection that begins with the current state, or after what its page shows."""

    def join(self) -> None:
        one = self.processor
        member = self.channel.members.get(one.name)
        self.cursor = member.confirmed if member is not None and member.is_member else None
        origin: Origin = "state" if one.page is None else one.page_offset
        self.asked = origin
        place = (one.name, self, Receive.PUSH, self._joined, self.world.refused)
        self.channel.join(*place, origin=origin)

    def _joined(self, joined: Joined) -> None:
        if not self.is_open:
            return
        self.is_joined = True
        one = self.processor
        one.is_member = True
        assert joined.missed is None, "a state is whole"
        if joined.snapshot is not None:
            told = json.loads(joined.snapshot.content.data)
            one.page = [(p, n) for p, n in told or []]
            one.page_offset = joined.snapshot.offset
            one.page_base = self.world.disk.base
            assert one.page == self.world.kept_before(joined.snapshot), "a state is all before it"
        assert one.page_base == self.world.disk.base, "what was destroyed is shown"
        assert self.asked != "state" or joined.snapshot is not None
        assert joined.cursor == one.page_offset
        assert joined.number >= one.accepted
        member = self.channel.members[one.name]
        if self.cursor is not None:
            assert member.confirmed[0] == self.cursor[0], "joining moves no cursor"

    def messages(self, channel: str, batch: Batch) -> bool:
        if not self.is_open:
            return True
        one = self.processor
        assert self.is_joined and one.page is not None and batch.lost == 0
        for offset, _, payload in batch.messages:
            told = decode_message(payload)
            one.page.append((told.processor, told.number))
            place = one.page_base + len(one.page)
            assert offset == self.world.ends[place - 1], "each once, and in order"
            one.page_offset = offset
            self.got.append((offset, (told.processor, told.number)))
        place = one.page_base + len(one.page)
        assert one.page == self.world.truth[one.page_base : place], "the page is the log"
        return True

    def ack(self, count: int) -> None:
        one = self.processor
        assert one.page is not None
        some, self.got = self.got[:count], self.got[count:]
        kept = one.page[: len(one.page) - len(self.got)]
        offset = some[-1][0] if some else one.page_offset
        one.kept, known = kept, set(kept)

        def acked(_: int) -> None:
            if self.is_open:
                one.confirmed |= known
                one.was_away_ms = 0

        self.channel.ack(self.channel.members[one.name], offset, acked, self.world.refused)


class World:
    def __init__(
        self,
        names: str = "ab",
        reducer_name: str = "world:collect",
        *,
        slow: bool = False,
        persist: bool = True,
        snapshot_age_ms: int = 0,
    ) -> None:
        self.clock_ms = self.elapsed_ms = 1_000_000
        self.disk = Disk()
        self.database: dict[str, StoredSnapshot] | None = {} if slow else None
        self.rule = rule(reducer_name)._replace(persist=persist)
        self._snapshot_age_ms = snapshot_age_ms
        self.processors = {name: Processor(self, name) for name in names}
        self.refusals: list[ChannelError] = []
        self.is_kept = False
        """True if an operator was told that the log is kept, and nobody has come since they asked."""
        self._came = 0
        self.counted: list[str] = []
        """Names of the counters that were incremented."""
        self._start()

    def _start(self) -> None:
        self.half_open: list[Connection] = []
        self.store = ModelStore(self.disk)
        self.runner = StepRunner()
        self.slow = SlowSnapshots(self.database) if self.database is not None else None
        self.channels = Channels(
            self.store,  # type: ignore[arg-type]
            self.runner,
            self.slow or NotedSnapshots(self.store),  # type: ignore[arg-type]
            lambda name: self.rule,
            lambda: self.clock_ms,
            elapsed_ms=lambda: self.elapsed_ms,
            members_max=10,
            look_ms=0,
            remember_ms=REMEMBER_MS,
            snapshot_age_ms=self._snapshot_age_ms,
            count=self.counted.append,
        )
        self.store.committed = self.channels.committed

    @property
    def truth(self) -> list[Id]:
        """Every message that was ever committed, in order."""
        return self.disk.ids

    def kept_before(self, snapshot: StoredSnapshot) -> list[Id]:
        """Return the messages that the state of `snapshot` must contain."""
        return self.truth[self.disk.base : snapshot.ordinal]

    @property
    def forgotten(self) -> set[Id]:
        """Messages that the log no longer has and that were not destroyed by hand."""
        return set(self.truth[self.disk.base : self.store.handle.start_ordinal])

    @property
    def ends(self) -> list[int]:
        return [at + len(record) for at, record in self.disk.records]

    def refused(self, error: ChannelError) -> None:
        self.refusals.append(error)

    @staticmethod
    def expect(error: ChannelError, code: str) -> None:
        assert error.code == code, error

    @property
    def snapshot(self) -> StoredSnapshot | None:
        """The durable snapshot."""
        if self.database is not None:
            return self.database.get(NAME)
        return read_snapshot(ModelStore(self.disk), NAME)  # type: ignore[arg-type]

    def database_answers(self) -> None:
        assert self.slow is not None
        self.slow.asked.popleft()()
        self.runner.run()

    @property
    def channel(self) -> Channel:
        return self.channels.get(NAME)

    def tick(self) -> None:
        self.channels.tick()
        self.runner.run()

    def pass_time(self, ms: int) -> None:
        self.clock_ms += ms
        self.elapsed_ms += ms
        for one in self.processors.values():
            there = one.connection
            if there is None or not (there.is_open and there.is_joined):
                one.was_away_ms += ms
        self.tick()

    def someone_comes(self) -> None:
        self.is_kept = False
        self._came += 1

    def keep(self) -> None:
        """Cancel the destruction, as an operator does."""
        existed, came = self.disk.exists, self._came

        def answered(was_planned: bool) -> None:
            if was_planned and existed:
                assert self.disk.exists, "kept, and destroyed"
                self.is_kept = came == self._came

        self.channel.keep(answered)

    def destroy(self) -> None:
        """Destroy the channel by hand, as an operator does."""
        self.someone_comes()

        def answered() -> None:
            assert not self.store.note(NO_SNAPSHOT.key), "destroyed, and its state is there"

        self.channel.destroy(answered, self.refused)  # type: ignore[arg-type]

    def commit(self) -> None:
        self.store.commit()
        self.runner.run()

    def commit_all(self) -> None:
        while self.store.pending:
            self.commit()

    def crash(self, durable: int = 0) -> None:
        """Crash after `durable` of the pending changes reached the disk; the server does not know that."""
        for _ in range(min(durable, len(self.store.pending))):
            self.store.commit(silently=True)
        noted = {one.name: one for one in read_members(ModelStore(self.disk), NAME)}  # type: ignore[arg-type]
        for one in self.processors.values():
            if one.connection is not None:
                one.connection.is_open = False
            one.connection = None
            if one.name in noted:
                # The lease counts from the last note that the processor was present.
                not_noted_ms = self.clock_ms - noted[one.name].seen_ms
                one.was_away_ms = max(one.was_away_ms, not_noted_ms)
        self._start()

    def check(self) -> None:
        """Check the invariants that hold at any time."""
        truth, disk = self.truth, self.disk
        assert len(truth) == len(set(truth)), "a message is stored once"
        for name in self.processors:
            numbers = [n for p, n in truth if p == name]
            assert numbers == list(range(1, len(numbers) + 1)), "numbers have no gaps"
        assert disk.exists or not self.is_kept, "kept, and destroyed"
        snapshot = self.snapshot
        if snapshot is not None:
            state = [(p, n) for p, n in json.loads(snapshot.content.data)]
            assert state == self.kept_before(snapshot), "a snapshot is all before it"
            assert snapshot.ordinal >= disk.start.ordinal, "what was forgotten is in the snapshot"
        else:
            assert disk.start.ordinal == disk.base, "nothing is forgotten without a snapshot"

    def rest_all(self) -> None:
        """Commit and answer until nothing is pending."""
        while self.store.pending or (self.slow is not None and self.slow.asked):
            self.commit_all()
            if self.slow is not None and self.slow.asked:
                self.database_answers()

    def settle_broker(self) -> None:
        """Run the broker until nothing more happens."""
        for _ in range(30):
            self.rest_all()
            self.tick()
            if not self.store.pending:
                return
        raise AssertionError("it never comes to rest")

    def settle(self) -> None:
        """Run until nothing more happens, then check that every connected processor has everything."""
        for abandoned in self.half_open:
            abandoned.close()
        self.settle_broker()
        self.check()
        for member in self.channel.members.values():
            there = self.processors[member.name].connection
            assert member.subscriber in (None, there), "a subscriber that is not there"
        self.channels.rest(self.channel)
        truth = set(self.truth[self.disk.base :])
        for one in self.processors.values():
            connection = one.connection
            if connection is None or not connection.is_open or not connection.is_joined:
                continue
            if isinstance(connection, PageConnection):
                shown = self.truth[self.disk.base :]
                assert one.page == shown, f"the page of {one.name} lacks something"
                continue
            has = set(connection.state if connection.state is not None else one.kept)
            has |= {message for _, message in connection.got}
            has |= {message for message in truth if message[0] == one.name}
            assert truth <= has, f"{one.name} lacks {truth - has}"
