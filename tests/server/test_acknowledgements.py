"""No peer gets an acknowledgement for something that is not in the log, whatever it cuts, repeats or counts.

Peers are legal but unusual. They use several topics, some of which are durable at once. Reads end anywhere.
Numbers come again or start over, and there is one counter or one for each topic. Connections are lost in the
middle. Some publishes are refused, before or after others with higher numbers.

Elsewhere: peers of channels are in `tests/broker/channel/test_acknowledgements.py`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.model import CHANNEL_PREFIX, PAYLOAD_BYTES_MAX
from headrace.server.logux.connection import LoguxConnection
from headrace.server.topic_connection import FiggConnection, WombatConnection
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ClientDecoder as FiggDecoder
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ClientDecoder as WombatDecoder
from tests.server.step_server import MEMORY, StepServer, Wire, breathe, frames
from tests.tools import EXAMPLES

_examples = count()

many = settings(max_examples=4 * EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=2 * EXAMPLES, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepServer]:
    made = StepServer(tmp_path_factory.mktemp("acknowledgements"))
    yield made
    made.close()


def fresh_topics() -> list[str]:
    number = next(_examples)
    return [f"a{number}", f"{MEMORY}b{number}", f"c{number}"]


# Figg


class FiggPeer:
    """Numbers its publishes, and sends bytes that are cut anywhere."""

    def __init__(self, server: StepServer, topics: list[str], first: int) -> None:
        self.server, self.topics = server, topics
        self.next = first
        self.unacknowledged: list[tuple[int, str, bytes]] = []
        self.connect()

    def connect(self) -> None:
        """Connect again, and resend what is not acknowledged."""
        self.decoder = FiggDecoder()
        self.wire = Wire(self.heard)
        self.connection = FiggConnection(self.server.connections)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self.unsent = b"".join(figg.encode_publish(t, n, p) for n, t, p in self.unacknowledged)
        self.refused: int | None = None

    def refuse(self, early: list[int]) -> None:
        """Publish something that is refused, after publishes with higher numbers."""
        self.send(1 << 20)
        refused = self.next = self.next + 1
        self.publish(early)
        self.connection.data_received(figg.encode_publish(f"{CHANNEL_PREFIX}x", refused, b""))
        self.refused = refused

    def publish(self, topics: list[int], size: int = 1 << 20) -> None:
        """Publish, and send the first `size` unsent bytes."""
        for topic in topics:
            self.next += 1
            name, payload = self.topics[topic], b"%d" % next(_examples)
            self.unacknowledged.append((self.next, name, payload))
            self.unsent += figg.encode_publish(name, self.next, payload)
        self.send(size)

    def send(self, size: int) -> None:
        if self.refused is not None:
            self.lose()  # nobody reads from the old connection
        data, self.unsent = self.unsent[:size], self.unsent[size:]
        if data:
            self.connection.data_received(data)

    def lose(self) -> None:
        self.wire.is_closed = True
        self.connection.connection_lost(None)
        self.connect()

    def heard(self, data: bytes) -> None:
        for message in self.decoder.receive(data):
            if isinstance(message, figg.Ack):
                assert self.refused is None or message.seq_num < self.refused
                covered = [one for one in self.unacknowledged if one[0] <= message.seq_num]
                for _, topic, payload in covered:
                    assert payload in self.server.payloads(topic), "acknowledged, and not stored"
                self.unacknowledged = [one for one in self.unacknowledged if one not in covered]


topic = st.integers(0, 2)
figg_step = st.one_of(
    st.tuples(st.just("publish"), st.lists(topic, min_size=1, max_size=3)),
    st.tuples(st.just("publish"), st.lists(topic, min_size=1, max_size=3), st.integers(1, 120)),
    st.tuples(st.just("send"), st.integers(1, 120)),
    st.tuples(st.just("refuse"), st.lists(topic, max_size=2)),
    st.tuples(st.just("step"), st.integers(1, 2)),
    st.sampled_from([("send", 1000), ("lose",)]),
)


@many
@given(st.sampled_from([0, 2**32 - 3, 2**63]), st.lists(figg_step, min_size=5, max_size=40))
def test_figg(server: StepServer, first: int, steps: list[Any]) -> None:
    async def run() -> None:
        server.start()
        peer = FiggPeer(server, fresh_topics(), first)
        await play(server, peer, steps)
        peer.send(1 << 20)
        await server.settle()
        assert not peer.unacknowledged

    asyncio.run(run())


async def play(server: StepServer, peer: Any, steps: list[Any]) -> None:
    for name, *args in steps:
        if name == "step":
            await server.step(*args)
        else:
            getattr(peer, name)(*args)
            await breathe()


# Wombat


class WombatPeer:
    """Numbers publishes over all topics or per topic, and resends any of them."""

    def __init__(self, server: StepServer, topics: list[str], first: int, by_topic: bool) -> None:
        self.server, self.topics, self.by_topic = server, topics, by_topic
        self.next = dict.fromkeys(topics if by_topic else [""], first)
        self.sent: list[tuple[int, str, bytes]] = []
        """Publishes sent on this connection, including acknowledged ones."""
        self.unacknowledged: list[tuple[int, str, bytes]] = []
        self.held: list[bytes] = []
        self.connect()

    def connect(self) -> None:
        self.wire = Wire(self.heard)
        self.connection = WombatConnection(self.server.wombats)
        self.connection.websocket_opened(self.wire, self.wire)  # type: ignore[arg-type]
        self.sent = []
        self.held = [self.encoded(one) for one in self.unacknowledged]
        self.refused: int | None = None

    def refuse(self, early: list[int]) -> None:
        """Publish something that is refused, after publishes with higher numbers."""
        self.send(1000)
        counter = self.topics[0] if self.by_topic else ""
        refused = self.next[counter] = self.next[counter] + 1
        self.publish([0 for _ in early] if self.by_topic else early)
        name = self.topics[0] if self.by_topic else f"{CHANNEL_PREFIX}x"
        payload = bytes(PAYLOAD_BYTES_MAX + 1) if self.by_topic else b""
        self.connection.messages_received([self.encoded((refused, name, payload))])
        self.refused = refused

    @staticmethod
    def encoded(one: tuple[int, str, bytes]) -> bytes:
        number, topic, payload = one
        return wombat.encode_publish(topic, number % wombat.SEQUENCE_NUMBERS, payload)

    def publish(self, topics: list[int], size: int = 1 << 20) -> None:
        """Publish, and send the first `size` held messages in one read."""
        for topic in topics:
            name = self.topics[topic]
            counter = name if self.by_topic else ""
            self.next[counter] += 1
            self._publish(self.next[counter], name)
        self.send(size)

    def change(self) -> None:
        """Publish another payload with the number that was used last."""
        if self.unacknowledged:
            number, topic, _ = self.unacknowledged[-1]
            self._publish(number, topic)

    def _publish(self, number: int, topic: str) -> None:
        one = number, topic, b"%d" % next(_examples)
        self.unacknowledged.append(one)
        self.held.append(self.encoded(one))

    def repeat(self, place: int) -> None:
        """Send a publish of this connection again."""
        if self.sent:
            self.held.append(self.encoded(self.sent[place % len(self.sent)]))

    def send(self, size: int) -> None:
        """Send the first `size` held messages in one read."""
        if self.refused is not None:
            self.lose()  # nobody reads from the old connection
        some, self.held = self.held[:size], self.held[size:]
        if some:
            known = {self.encoded(one): one for one in self.unacknowledged}
            self.sent += [known[message] for message in some if message in known]
            self.connection.messages_received(some)

    def lose(self) -> None:
        self.wire.is_closed = True
        self.connection.lost()
        self.connect()

    def heard(self, data: bytes) -> None:
        for message in WombatDecoder().receive(list(frames(data))):
            if not isinstance(message, wombat.Ack):
                continue
            numbers = [n for n, topic, _ in self.sent if topic == message.topic]
            assert message.number in [n % wombat.SEQUENCE_NUMBERS for n in numbers]
            highest = max(n for n in numbers if n % wombat.SEQUENCE_NUMBERS == message.number)
            if self.refused is not None and (not self.by_topic or message.topic == self.topics[0]):
                assert highest < self.refused
            covered = [
                (n, topic, payload)
                for n, topic, payload in self.sent
                if n <= highest and (topic == message.topic or not self.by_topic)
            ]
            for _, topic, payload in covered:
                assert payload in self.server.payloads(topic), "acknowledged, and not stored"
            self.unacknowledged = [one for one in self.unacknowledged if one not in covered]


wombat_step = st.one_of(
    st.tuples(st.just("publish"), st.lists(topic, min_size=1, max_size=3)),
    st.tuples(st.just("publish"), st.lists(topic, min_size=1, max_size=3), st.integers(0, 5)),
    st.tuples(st.just("repeat"), st.integers(0, 50)),
    st.tuples(st.just("refuse"), st.lists(topic, max_size=2)),
    st.tuples(st.just("step"), st.integers(1, 2)),
    st.sampled_from([("change",), ("send", 1), ("send", 100), ("lose",)]),
)


@many
@given(
    st.sampled_from([0, 2**31, 2**32 - 4]),
    st.booleans(),
    st.lists(wombat_step, min_size=5, max_size=40),
)
def test_wombat(server: StepServer, first: int, by_topic: bool, steps: list[Any]) -> None:
    async def run() -> None:
        server.start()
        topics = fresh_topics()
        peer = WombatPeer(server, topics, first, by_topic)
        await play(server, peer, steps)
        peer.send(1000)
        await server.settle()
        assert not peer.unacknowledged
        if not {"lose", "refuse"} & {name for name, *_ in steps}:
            for topic in topics:
                stored = server.payloads(topic)
                assert len(stored) == len(set(stored)), "stored once on one connection"

    asyncio.run(run())


# Logux 0.x


class LoguxPeer:
    """Sends its log page by page. Every connection corrects the peer's clock by another amount."""

    def __init__(self, server: StepServer, topic: str, host: str) -> None:
        self.server, self.topic, self.host = server, topic, host
        self.log: list[tuple[dict[str, Any], list[Any]]] = []
        """Events of the peer's log; the first one has the number 1."""
        self.received: set[int] = set()
        """Numbers of the events that came from the server."""
        self.synced = self.other = 0
        self.connect(0.0)

    def connect(self, fix: float) -> None:
        self.wire = Wire(self.heard)
        self.connection = LoguxConnection(self.server.logux, self.topic)
        self.connection.websocket_opened(self.wire, self.wire)  # type: ignore[arg-type]
        self.fix = fix
        self.sent, self.received_now = self.synced, set[int]()
        self.queue: list[Any] = []
        self.say("connect", [0, 1], self.host, self.other)

    def say(self, *message: Any) -> None:
        self.connection.messages_received([json.dumps(message)])

    def add(self, contents: list[int]) -> None:
        for content in contents:
            # The times of a host are unique, also after another correction of its clock.
            ms = 10 * next(_examples)
            self.log.append(({"type": "t", "n": content}, [ms, self.host, 0]))

    def page(self, size: int) -> None:
        """Send the next `size` events in one message; after a reconnect, these include the server's."""
        some = [n for n in range(self.sent + 1, len(self.log) + 1) if n not in self.received_now]
        if some := some[:size]:
            self.sent = some[-1]
            events = [self.log[number - 1] for number in reversed(some)]
            pairs = [[event, [ms - self.fix, *rest]] for event, (ms, *rest) in events]
            self.say("sync", self.sent, *(part for pair in pairs for part in pair))

    def pong(self) -> None:
        self.say("pong", len(self.log))

    def ping(self) -> None:
        self.say("ping", len(self.log))

    def answer(self) -> None:
        queue, self.queue = self.queue, []
        for message in queue:
            self.say(*message)

    def lose(self, fix: float) -> None:
        self.wire.is_closed = True
        self.connection.lost()
        self.connect(fix)

    def heard(self, data: bytes) -> None:
        for frame in frames(data):
            kind, *rest = json.loads(frame)
            if kind == "synced":
                self.synced = max(self.synced, rest[0])
                self.check()
            elif kind == "sync":
                number, event, (ms, *of) = rest
                self.log.append((event, [ms + self.fix, *of]))
                self.received.add(len(self.log))
                self.received_now.add(len(self.log))
                self.other = max(self.other, number)
                self.queue.append(["synced", number])
            elif kind == "pong":
                self.other = max(self.other, rest[0])
            else:
                assert kind == "connected", "nobody was silent"

    def check(self) -> None:
        """Check that all own events which the peer considers synchronised are stored."""
        own = [n for n in range(1, self.synced + 1) if n not in self.received]
        wanted = Counter(self.log[number - 1][0]["n"] for number in own)
        envelopes = map(json.loads, self.server.payloads(self.topic))
        stored = Counter(one["event"]["n"] for one in envelopes if one["created"][1] == self.host)
        assert wanted <= stored, "acknowledged, and not stored"


peer = st.integers(0, 1)
logux_step = st.one_of(
    st.tuples(st.just("add"), peer, st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("page"), peer, st.integers(1, 5)),
    st.tuples(st.sampled_from(["pong", "ping", "answer"]), peer),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("lose"), peer, st.sampled_from([0.0, 0.5, 2.0])),
)


@some
@given(st.lists(logux_step, min_size=5, max_size=40))
def test_logux_0(server: StepServer, steps: list[Any]) -> None:
    async def run() -> None:
        server.start()
        topic = f"$logux/{next(_examples)}"
        peers = [LoguxPeer(server, topic, host) for host in ("a", "b")]
        await breathe()
        for name, *args in steps:
            if name == "step":
                await server.step(*args)
            else:
                getattr(peers[args[0]], name)(*args[1:])
                await breathe()
        for _ in range(2):
            for one in peers:
                one.page(1 << 20)
                one.answer()
            await server.settle()
        for one in peers:
            assert one.synced == one.sent
            assert one.sent >= max(n for n in range(len(one.log) + 1) if n not in one.received)

    asyncio.run(run())


# Logux 5


class Logux5Peer:
    """Sends its own actions and those of others, also repeatedly, and subscribes; several in one `sync`."""

    NODE = "10:client:tab"
    BASE = 1_700_000_000_000

    def __init__(self, server: StepServer, topic: str) -> None:
        self.server, self.topic = server, topic
        self.ids: list[int] = []
        """Times of the actions that the peer has made; time and node are an action's id."""
        self.unanswered: set[int] = set()
        self.number = 0
        self.connect()

    def connect(self) -> None:
        self.wire = Wire(self.heard)
        self.connection = LoguxConnection(self.server.logux, self.topic)
        self.connection.websocket_opened(self.wire, self.wire)  # type: ignore[arg-type]
        self.syncs: dict[int, list[int]] = {}
        self.say("connect", 5, self.NODE, 0)
        if self.unanswered:
            self.sync([("own", one) for one in sorted(self.unanswered)])

    def say(self, *message: Any) -> None:
        self.connection.messages_received([json.dumps(message)])

    def send(self, kinds: list[str]) -> None:
        actions: list[tuple[str, int]] = []
        for kind in kinds:
            if kind == "again" and self.ids:
                actions.append(("own", self.ids[len(actions) % len(self.ids)]))
                continue
            made = next(_examples)
            if kind != "foreign" and kind != "subscribe":
                self.ids.append(made)
            actions.append(("own" if kind == "again" else kind, made))
        self.sync(actions)

    def sync(self, actions: list[tuple[str, int]]) -> None:
        self.number += 1
        parts: list[Any] = []
        for kind, ms in actions:
            event = {"type": "logux/subscribe" if kind == "subscribe" else "t", "channel": "c"}
            made = [ms, "11:other:tab", 0] if kind == "foreign" else [ms, 0]
            parts += [event, {"id": made, "time": ms}]
        self.syncs[self.number] = [ms for kind, ms in actions if kind == "own"]
        self.unanswered.update(self.syncs[self.number])
        self.say("sync", self.number, *parts)

    def lose(self) -> None:
        self.wire.is_closed = True
        self.connection.lost()
        self.connect()

    def heard(self, data: bytes) -> None:
        for frame in frames(data):
            kind, *rest = json.loads(frame)
            if kind == "synced":
                for number in [one for one in self.syncs if one <= rest[0]]:
                    for ms in self.syncs.pop(number):
                        assert self.is_stored(ms), "synced, and not stored"
                        self.unanswered.discard(ms)
            elif kind == "sync" and rest[1]["type"] == "logux/processed":
                ms, node, _ = rest[1]["id"].split(" ")
                is_action = int(ms) - self.BASE in self.ids
                assert node == self.NODE
                assert not is_action or self.is_stored(int(ms) - self.BASE), "processed, not stored"

    def is_stored(self, ms: int) -> bool:
        wanted = f"{self.BASE + ms} {self.NODE} 0"
        payloads = self.server.payloads(self.topic)
        return any(json.loads(payload)["id"] == wanted for payload in payloads)


kind = st.sampled_from(["own", "own", "own", "again", "foreign", "subscribe"])
logux5_step = st.one_of(
    st.tuples(st.just("send"), st.lists(kind, min_size=1, max_size=4)),
    st.tuples(st.just("send"), st.lists(kind, min_size=1, max_size=4)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.just(("lose",)),
)


@some
@given(st.lists(logux5_step, min_size=5, max_size=40))
def test_logux_5(server: StepServer, steps: list[Any]) -> None:
    async def run() -> None:
        server.start()
        one = Logux5Peer(server, f"$logux/{next(_examples)}")
        await breathe()
        await play(server, one, steps)
        await server.settle()
        assert not one.unanswered
        assert not one.syncs

    asyncio.run(run())
