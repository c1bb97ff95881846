"""Channel client sessions and the server's own code, over pipes that are cut and a store that crashes.

Sessions, connections and the broker are real; sockets, the clock and the disk are not. Each client has an
application that knows what it has sent and what it must have received.
"""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.client.channel.events import Inbox
from headrace.config.protocols import ChannelSettings
from headrace.config.settings import Config, Limits
from headrace.log.quota import Quotas
from headrace.payload.channel import decode_message
from headrace.payload.reducers import reducer
from headrace.server.access import Access
from headrace.server.channel.connection import ChannelConnection, ChannelConnections
from headrace.server.loop import Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.strangers import Strangers
from headrace.server.peers.tally import PeerRules, Tally, Who
from headrace.server.peers.throttle import Throttle
from headrace.session.channel.client import ChannelClientEvent, ChannelClientSession
from headrace.session.channel.membership import (
    Ended,
    LostMessages,
    ReceivedMessages,
    Rejected,
    Restored,
    SendAccepted,
)
from headrace.session.client import Broken, ConnectionState, Finished
from headrace.wire.channel import Delivered
from tests.broker.channel.world import NAME, World, collect, rule
from tests.fakes.places import Places

HEADER_BYTES = 4


def collect_good(state: Any, message: Any) -> Any:
    return collect(state, message)


def refuse_bad(message: Any) -> None:
    if message.startswith("bad"):
        raise ValueError("it is bad")


collect_good.check = refuse_bad  # type: ignore[attr-defined]


class Pair:
    """A server and its clients."""

    def __init__(self, receive: dict[str, str], pages: str = "") -> None:
        """Clients in `pages` begin with the state, and also get their own messages."""
        self.world = World("")
        made = reducer("pair:collect", lambda _: collect_good)
        self.world.rule = rule()._replace(reducer=made)
        self.world.crash()  # the channel's new rule applies after a restart
        self.clients = {
            name: Client(self, name, way, is_page=name in pages) for name, way in receive.items()
        }
        self.half_open: list[Pipe] = []
        """Connections that the client has lost without the server knowing."""
        self._start()

    def _start(self) -> None:
        loop = SimpleNamespace(time=lambda: self.now, call_soon=self.world.runner.soon)
        turns, metrics, limits = Turns(loop), Metrics(), Limits(topics_attached_max=10)  # type: ignore[arg-type]
        store = SimpleNamespace(quotas=Quotas(), exists=lambda name: True)
        rules = PeerRules(limits)
        throttle = Throttle(loop, turns, store, metrics)  # type: ignore[arg-type]
        throttle.configure(limits, rules)
        shared: Any = SimpleNamespace(
            loop=loop,
            turns=turns,
            limits=limits,
            metrics=metrics,
            broker=SimpleNamespace(store=store),
            throttle=throttle,
            strangers=Strangers(loop, limits, Places().newcomers),  # type: ignore[arg-type]
            subscriptions=Tally("subscriptions_max", lambda: rules, lambda: 0, metrics),
            output_bytes=0,
            why_not_created=lambda names: "",
            may_read=lambda size: True,
            paused=set(),
            trace=None,
            lost=lambda connection: None,
            access=Access(Config(), Path("/nowhere/tokens.json"), lambda: 0, metrics),
        )
        self.hub = ChannelConnections(shared, self.world.channels, ChannelSettings(ping_s=10_000.0))

    @property
    def now(self) -> float:
        return self.world.clock_ms / 1000

    def crash(self, durable: int) -> None:
        for client in self.clients.values():
            client.cut()
        self.half_open.clear()
        self.world.crash(durable)
        self._start()

    def notice(self) -> None:
        """Let the server notice the loss of the oldest lost connection."""
        if self.half_open:
            self.half_open.pop(0).lost()

    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)
        for client in self.clients.values():
            client.tick()

    @property
    def stored(self) -> list[str]:
        """Contents of all messages that were ever committed, in order."""
        return [
            decode_message(record[HEADER_BYTES:]).content.data.decode()[1:-1]
            for _, record in self.world.disk.records
        ]

    def check(self) -> None:
        stored = self.stored
        assert len(stored) == len(set(stored)), "a message is stored once"
        for name, client in self.clients.items():
            own = [token for token in stored if token.startswith(f"{name}-")]
            assert own == [token for token in client.sent if token in own], "in its order"
            assert client.accepted <= set(stored), "what is accepted is stored"

    def settle(self) -> None:
        """Connect every client and exchange messages until nothing more happens; then check that all arrived.

        Each client sends a last message, so that there is something to acknowledge: a snapshot that was
        trimmed away before it was acknowledged would leave nothing.
        """
        self._exchange(15)
        for client in self.clients.values():
            client.send()
        self._exchange(10)
        self._check_all()

    def _exchange(self, rounds: int) -> None:
        for _ in range(rounds):
            for client in self.clients.values():
                if client.session.state is ConnectionState.DISCONNECTED:
                    client.connect()
                client.deliver()
                client.take_all()
                client.deliver()
            self.world.commit_all()
            self.notice()
            self.pass_time(300)

    def _check_all(self) -> None:
        self.check()
        stored = self.stored
        for name, client in self.clients.items():
            assert not client.waiting, f"{name} waits for {client.waiting}"
            if client.is_page:
                assert client.have == stored, f"the page of {name} has {client.have} of {stored}"
            others = [token for token in stored if not token.startswith(f"{name}-")]
            got = [token for token in client.have if not token.startswith(f"{name}-")]
            assert got == others, f"{name} has {got} of {others}"
            member = self.world.channel.members[name]
            assert member.confirmed[0] == self.world.store.handle.end_offset, "all is acknowledged"


class Client:
    """Client session with an application that keeps what it received, even across its own restarts."""

    def __init__(self, pair: Pair, name: str, receive: str, *, is_page: bool) -> None:
        self.pair = pair
        self.is_page = is_page
        self.name = name
        self.receive = receive
        self.have: list[str] = []
        """Messages that the application received or found in a snapshot, in the order of the log."""
        self.sent: list[str] = []
        self.accepted: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Restart the process. It forgets messages that were not accepted; they may be stored or not."""
        if hasattr(self, "pipe"):
            self.cut()
        self.pipe: Pipe | None = None
        self.session = ChannelClientSession(self.name, poll_interval_s=0.01)
        self.session.join(NAME, self.receive, from_state=self.is_page)
        if self.is_page:
            self.have = []
        self.inbox = Inbox()
        self.taken: int | None = None
        self.waiting: dict[int, str] = {}
        self.from_before = set(self.have)
        """Messages that may come again: perhaps they were not acknowledged when the process ended."""

    def connect(self) -> None:
        if self.session.state is ConnectionState.DISCONNECTED:
            self.session.connecting()
            self.session.opened(self.pair.now)
            self.pipe = Pipe(self.pair)
            self.say()

    def cut(self) -> None:
        if self.pipe is not None:
            self.session.disconnected()
            self.pair.half_open.append(self.pipe)
            if not self.pipe.has_joined:
                # A `join` that arrives late would take the channel from the next connection.
                self.pipe.to_server.clear()
            self.pipe = None

    def send(self, *, bad: bool = False) -> None:
        token = f"{'bad-' if bad else ''}{self.name}-{len(self.sent)}"
        self.waiting[self.session.send(NAME, token)] = token
        self.sent.append(token)
        self.say()

    def say(self) -> None:
        if self.pipe is not None:
            self.pipe.to_server += self.session.data_to_send(1 << 20, self.pair.now)

    def tick(self) -> None:
        self.hear(self.session.tick(self.pair.now))
        self.say()

    def up(self) -> None:
        """Deliver one message to the server."""
        if self.pipe is not None:
            self.pipe.up()

    def down(self) -> None:
        """Deliver one message to the client."""
        if self.pipe is not None and self.pipe.to_client:
            self.hear(self.session.receive_data([self.pipe.to_client.popleft()], self.pair.now))
            self.say()

    def deliver(self) -> None:
        """Deliver all messages that are on their way, and those that follow from them."""
        while self.pipe is not None and (self.pipe.to_server or self.pipe.to_client):
            self.up()
            self.down()
            self.pair.world.commit_all()

    def hear(self, events: list[ChannelClientEvent]) -> None:
        for event in events:
            if isinstance(event, ReceivedMessages | Restored | LostMessages):
                self.inbox.put(event)
            elif isinstance(event, SendAccepted):
                self._accepted(event)
            elif isinstance(event, Rejected):
                assert (event.code, self.waiting.pop(event.ticket)[:3]) == ("cannot-fold", "bad")
            elif isinstance(event, Broken | Finished):
                self.cut()
            else:
                assert not isinstance(event, Ended), event

    def _accepted(self, event: SendAccepted) -> None:
        token = self.waiting.pop(event.ticket)
        self.accepted.add(token)
        stored = self.pair.stored
        assert token in stored, "accepted, and not stored"
        if event.offset is not None:
            assert self.pair.world.ends[stored.index(token)] == event.offset

    def take(self) -> bool:
        """Acknowledge the last message and take the next one. Return False if there is none."""
        if self.taken is not None:
            self.session.ack(NAME, self.taken)
            self.taken = None
        entry = self.inbox.first
        if entry is None:
            self.session.more(NAME)
            self.say()
            return False
        self.inbox.take(entry)
        if isinstance(entry, Delivered):
            assert self.is_page or entry.processor != self.name
            at = self.pair.world.ends.index(entry.offset)
            assert self.pair.stored[at] == entry.payload
            if entry.payload not in self.have:
                self.have.append(entry.payload)
            else:
                assert entry.payload in self.from_before, "twice"
            self.taken = entry.offset
        else:
            assert isinstance(entry, Restored) and entry.snapshot is not None, entry
            told = entry.snapshot.payload or []
            assert told == self.pair.stored[: len(told)], "a snapshot is all before it"
            self.have = list(told)
            self.taken = entry.offset
        if self.is_page:
            assert self.have == self.pair.stored[: len(self.have)], "a page is the log so far"
        self.say()
        return True

    def take_all(self) -> None:
        while self.take():
            pass


class Pipe:
    """A connection, with the messages that are on their way."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.has_joined = False
        self.is_closed = False
        self.server = ChannelConnection(pair.hub)
        self.server.peer = "127.0.0.1:1"
        self.server.who = Who.of("127.0.0.1", self.server.rights.principal)
        self.server._transport = self  # type: ignore[assignment]

    def up(self) -> None:
        if self.to_server:
            message = self.to_server.popleft()
            self.has_joined = self.has_joined or b"\xa4join" in message
            self.server.messages_received([message])
            self.pair.world.runner.run()

    def lost(self) -> None:
        while self.to_server:
            self.up()
        self.is_closed = True
        self.server.lost()
        self.pair.world.runner.run()

    # The transport interface for the server's connection

    def write(self, data: bytes) -> None:
        while data:
            size, begin = data[1], 2
            if size == 126:
                size, begin = int.from_bytes(data[2:4]), 4
            elif size == 127:
                size, begin = int.from_bytes(data[2:10]), 10
            self.to_client.append(data[begin : begin + size])
            data = data[begin + size :]

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...
