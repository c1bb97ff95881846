"""Memory for publishes that wait, of connections without sockets: who is read again, and who is ended, when.

Elsewhere: the same over real sockets (`test_held_back.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.settings import Config, Limits, PeerLimits
from headrace.log.quota import Quotas
from headrace.server.access import Access
from headrace.server.loop import TURN_PIECES_MAX, Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers import connection
from headrace.server.peers.connection import GOODBYE_TIMEOUT_S
from headrace.server.peers.held import AT_ONCE_MAX, HeldMemory
from headrace.server.peers.strangers import Strangers
from headrace.server.peers.tally import PeerRules, Tally
from headrace.server.peers.throttle import Throttle
from headrace.server.topic_connection import FiggConnection
from headrace.wire.figg import messages as figg
from tests.fakes.places import Places

HELD_BYTES_MAX = 100_000
LIMITS = Limits(held_bytes_max=HELD_BYTES_MAX, peer=(PeerLimits(of="connection", records_per_s=1),))
HOUR_S = 3600


class Loop:
    """An event loop whose clock a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timers: list[SimpleNamespace] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._soon.append((call, args))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(at_s=self.now_s + delay_s, call=call)
        timer.cancel = lambda: self._timers.remove(timer) if timer in self._timers else None
        self._timers.append(timer)
        return timer

    def iterate(self) -> None:
        """Run one iteration."""
        for _ in range(len(self._soon)):
            call, args = self._soon.popleft()
            call(*args)

    def settle(self) -> None:
        while self._soon:
            self.iterate()

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        while due := [timer for timer in self._timers if timer.at_s <= self.now_s]:
            due[0].cancel()
            due[0].call()
            self.settle()


class Transport:
    """A socket that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_read = True
        self.is_over = False

    def get_extra_info(self, name: str) -> object:
        return ("192.0.2.1", 7) if name == "peername" else None

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.is_over = True

    def is_closing(self) -> bool:
        return self.is_over

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """Do nothing."""


class Server:
    def __init__(self) -> None:
        self.loop: Any = Loop()
        self.stored: list[bytes] = []
        turns, metrics, rules = Turns(self.loop), Metrics(), PeerRules(LIMITS)
        store = SimpleNamespace(quotas=Quotas(), exists=lambda name: True, closed=lambda names: "")
        throttle = self.throttle = Throttle(self.loop, turns, store, metrics)  # type: ignore[arg-type]
        throttle.configure(LIMITS, rules)
        self.memory = HeldMemory(self.loop, turns, LIMITS, metrics)
        self.shared: Any = SimpleNamespace(
            loop=self.loop,
            turns=turns,
            limits=LIMITS,
            metrics=metrics,
            broker=SimpleNamespace(store=store, publish=self._publish),
            throttle=throttle,
            held=self.memory,
            tally=Tally("connections_max", lambda: rules, lambda: 0, metrics),
            strangers=Strangers(self.loop, LIMITS, Places().newcomers),
            refusals=SimpleNamespace(release=lambda peer: None),
            access=Access(Config(), Path("/nowhere/tokens.json"), lambda: 0, metrics),
            why_refused=lambda who: "",
            why_not_created=lambda names: "",
            make_room=lambda who: None,
            may_read=lambda size: True,
            lost=lambda connection: None,
            subscriptions=Tally("subscriptions_max", lambda: rules, lambda: 0, metrics),
            output_bytes=0,
            open=set(),
            listeners={},
            trace=None,
        )

    def _publish(self, records: dict[str, list[bytes]], done: Callable[[], None]) -> None:
        self.stored += records["t"]
        done()

    def lift(self) -> None:
        """End all limits of peers."""
        self.throttle.configure(LIMITS, PeerRules(replace(LIMITS, peer=())))


class Peer:
    """A client whose publishes wait for an hour, after the first."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.transport: Any = Transport()
        self.connection = FiggConnection(server.shared)
        self.connection.connection_made(self.transport)
        self.publish(b"x", HOUR_S)
        assert self.transport.is_read

    def publish(self, payload: bytes, count: int = 1) -> None:
        assert self.transport.is_read
        self.connection.data_received(figg.encode_publish("t", 0, payload) * count)
        self._server.loop.settle()

    def leave(self) -> None:
        self._server.shared.open.discard(self.connection)
        self.connection.connection_lost(None)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    for one in list(made.shared.open):
        one.connection_lost(None)
    assert (made.memory.bytes, made.memory.parked) == (0, 0)
    assert not made.memory._unread


def crowded(server: Server) -> tuple[list[Peer], Peer]:
    """Return peers whose publishes take nearly all memory, and one that is not read because of them."""
    others = [Peer(server) for _ in range(2)]
    for other in others:
        other.publish(bytes(40_000))
    assert server.memory.is_crowded
    waiting = Peer(server)
    waiting.publish(b"waits")
    assert not waiting.transport.is_read
    return others, waiting


def test_a_publisher_is_read_again_when_others_use_less_memory(server: Server) -> None:
    others, waiting = crowded(server)
    server.memory.tick()
    server.loop.settle()
    assert not waiting.transport.is_read
    others[0].leave()
    server.memory.tick()
    server.loop.settle()
    assert waiting.transport.is_read
    waiting.connection.data_received(figg.encode_ping(7))
    server.loop.settle()
    assert waiting.transport.sent.endswith(figg.encode_pong(7))


def test_publishes_of_a_peer_that_left_do_not_wait_for_long_also_if_it_is_not_read(
    server: Server,
) -> None:
    _, waiting = crowded(server)
    waiting.connection.end_hold()  # as `Departures` does when the peer hangs up
    server.loop.pass_time(GOODBYE_TIMEOUT_S - 1)
    assert not waiting.transport.is_over
    server.loop.pass_time(1)
    assert waiting.transport.is_over


def test_a_peer_that_has_sent_all_and_left_still_publishes_when_its_turn_comes(
    server: Server,
) -> None:
    _, waiting = crowded(server)
    waiting.connection.end_hold()
    server.lift()
    server.loop.settle()
    assert waiting.transport.is_read
    assert server.stored[-3:].count(b"\0\0\0\5waits") == 1


def test_many_parked_connections_end_in_turns_the_first_first(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "hang_up", lambda transport, lost: None)
    holders = [Peer(server) for _ in range(3)]
    for holder in holders:
        holder.publish(bytes(40_000))
    parked = [Peer(server) for _ in range(AT_ONCE_MAX + 50)]
    for peer in parked:
        peer.publish(b"dropped")
    assert server.memory.parked == len(parked)
    for holder in holders:
        holder.leave()
    server.memory.limits = replace(LIMITS, held_bytes_max=10_000_000)
    server.memory.tick()
    ended = 0
    while ended < AT_ONCE_MAX:
        server.loop.iterate()
        states = [peer.connection.state for peer in parked]
        before, ended = ended, states.count("closing")
        assert before < ended <= before + TURN_PIECES_MAX
        assert states[:ended] == ["closing"] * ended
    assert server.memory.parked == 50
    assert not any(b"dropped" in record for record in server.stored)
