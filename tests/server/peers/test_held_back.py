"""Publishers that a rate or a quota holds back, over real sockets and a store that commits on request."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from headrace.config.protocols import Access as AccessSettings
from headrace.config.protocols import AccessToken
from headrace.config.settings import Config, Limits, PeerLimits, PrefixRule
from headrace.model import CHANNEL_PREFIX
from headrace.server.access import Access
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers import connection
from headrace.server.topic_connection import FiggConnection
from headrace.session.server import Close
from headrace.wire import tokens
from headrace.wire.figg.messages import encode_auth
from tests.server.test_figg_connection import WAIT_S, Figg
from tests.system.figg import foreign as figg

RESERVED = CHANNEL_PREFIX.encode() + b"x"
HOURS = Limits(peer=(PeerLimits(of="address", records_per_s=1),), refusal_delay_s=0.0)
"""A rate at which `DEBT` records are paid back in hours."""
DEBT = 10_000
FULL = Limits(
    peer=(PeerLimits(of="address", bytes_per_s=1),), refusal_delay_s=0.0, held_bytes_max=4096
)
"""A rate that one publish exhausts for hours, and memory for hardly any publish that waits."""


class Peer:
    """A Figg client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._buffer = b""
        self._messages: list[figg.Message] = []

    def send(self, *messages: bytes) -> None:
        self.writer.write(b"".join(messages))

    async def next(self) -> figg.Message | None:
        """Return the next message; None if the server has hung up."""
        while not self._messages:
            data = await asyncio.wait_for(self._reader.read(1 << 16), WAIT_S)
            if not data:
                return None
            self._buffer += data
            self._messages += self._decoded()
        return self._messages.pop(0)

    def _decoded(self) -> Iterator[figg.Message]:
        """Yield the messages that are complete, without those about tokens."""
        while len(self._buffer) >= figg.HEADER.size:
            kind, _, size = figg.HEADER.unpack_from(self._buffer)
            end = figg.HEADER.size + size
            if len(self._buffer) < end:
                return
            payload, self._buffer = self._buffer[figg.HEADER.size : end], self._buffer[end:]
            if kind not in (tokens.AUTH_OK, tokens.AUTH_REFUSED):
                yield figg.decode(kind, payload)

    async def pong(self, number: int) -> None:
        """Send a PING, and wait for its answer: the server has seen everything before."""
        self.send(figg.ping(number))
        while (message := await self.next()) != figg.Message(figg.PONG, number=number):
            assert message is not None

    async def rest(self) -> list[figg.Message]:
        """Return all messages until the server hangs up, and hang up too."""
        found = []
        try:
            while (message := await self.next()) is not None:
                found.append(message)
        except ConnectionResetError:
            pass
        self.writer.close()
        return found


class Server(Figg):
    def __init__(self, directory: Path, limits: Limits, **config: Any) -> None:
        self._config = config
        super().__init__(directory, limits)
        if "access" in config:
            self.access_config = Config(access=config["access"])
            access = Access(self.access_config, directory / "tokens.json", lambda: 0, Metrics())
            self.connections.access = access
        self.peers: list[Peer] = []

    def configured(self, config: Config) -> Config:
        return replace(config, **self._config)

    async def dial(self, source: str = "127.0.0.1") -> Peer:
        made = await asyncio.open_connection(*self.address, local_addr=(source, 0))
        peer = Peer(*made)
        self.peers.append(peer)
        return peer

    async def identified(self, token: str) -> Peer:
        peer = await self.dial()
        peer.send(encode_auth(token))
        await peer.pong(1)
        return peer

    def revoke(self) -> None:
        """Revoke all tokens."""
        none = replace(self.access_config.access, token=())
        self.connections.access.reload(replace(self.access_config, access=none))

    async def indebted(self, topic: bytes = b"t") -> Peer:
        """Return a peer whose further publishes wait for hours."""
        peer = await self.dial()
        peer.send(*(figg.publish(topic, number, b"") for number in range(DEBT)))
        await peer.pong(1)
        self.commit()
        return peer

    async def exhausted(self) -> Peer:
        """Return a peer that has published what the rate of `FULL` allows in hours."""
        peer = await self.dial()
        peer.send(figg.publish(b"exhaust", 0, bytes(50_000)))
        await peer.pong(1)
        self.commit()
        assert await peer.next() == figg.Message(figg.ACK, number=0)
        return peer

    @property
    def stored(self) -> list[bytes]:
        """Payloads in the log besides those of the debt."""
        return [payload for payload in self.store.payloads("t") if payload]

    def applied(self, limit: str, of: str = "server") -> int:
        """Return how often a limit has applied."""
        return self.connections.metrics.labelled["limits_applied_total"][limit, of]

    def lift(self) -> None:
        """End all limits of peers."""
        limits = replace(self.connections.limits, peer=())
        self.connections.configure(limits)

    async def committed(self, condition: Callable[[], object]) -> None:
        """Commit until a condition is met."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.commit()
                await asyncio.sleep(0)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as made:
        yield made


class serving:  # noqa: N801 - used like a function
    def __init__(self, path: Path, limits: Limits = HOURS, **config: Any) -> None:
        self._server = Server(path, limits, **config)

    async def __aenter__(self) -> Server:
        await self._server.listen()
        return self._server

    async def __aexit__(self, *_: object) -> None:
        for peer in self._server.peers:
            peer.writer.close()
        await self._server.close()
        assert self._server.connections.held.bytes == 0
        assert self._server.connections.output_bytes == 0
        assert self._server.connections.subscriptions.total == 0


async def test_a_ping_behind_a_publish_that_waits_is_answered(server: Server) -> None:
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"held"))
    await peer.pong(2)
    await peer.pong(3)
    server.commit()
    assert server.stored == []


async def test_publishes_that_wait_are_stored_in_their_order_when_the_rate_allows_it(
    server: Server,
) -> None:
    peer = await server.indebted()
    for number in range(100):
        peer.send(figg.publish(b"t", DEBT + number, b"%d" % number))
        await peer.pong(number)
    server.lift()
    await server.committed(lambda: len(server.stored) == 100)
    assert server.stored == [b"%d" % number for number in range(100)]
    acked = -1
    while acked < DEBT + 99:
        message = await peer.next()
        assert message is not None and message.type == figg.ACK
        acked = message.number


async def test_another_address_is_served_as_before(server: Server) -> None:
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"held"))
    await peer.pong(2)
    other = await server.dial("127.0.0.2")
    other.send(figg.publish(b"t", 0, b"served"))
    await server.committed(lambda: server.stored)
    assert server.stored == [b"served"]
    assert await other.next() == figg.Message(figg.ACK, number=0)


async def test_a_new_connection_does_not_escape_the_rate_of_its_address(server: Server) -> None:
    peer = await server.indebted()
    peer.writer.close()
    again = await server.dial()
    again.send(figg.publish(b"t", 0, b"again"))
    await again.pong(1)
    server.commit()
    assert server.stored == []


async def test_what_came_before_a_refused_publish_is_stored_and_nothing_after_it(
    server: Server,
) -> None:
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"before"))
    await peer.pong(2)
    peer.send(figg.publish(RESERVED, DEBT + 1, b"bad"), figg.publish(b"t", DEBT + 2, b"after"))
    [held] = server.connections.open
    await server.until(lambda: len(held._commands) >= 2)  # type: ignore[arg-type]
    server.lift()
    await server.committed(lambda: server.stored)
    acks = [message.number for message in await peer.rest() if message.type == figg.ACK]
    assert acks[-1] == DEBT
    server.commit()
    assert server.stored == [b"before"]


async def test_a_peer_that_stops_sending_gets_the_acks_of_what_waited(server: Server) -> None:
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"last"))
    await peer.pong(2)
    peer.writer.write_eof()
    [held] = server.connections.open
    await server.until(lambda: held._goodbye_timer is not None)
    server.lift()
    await server.committed(lambda: server.stored)
    assert (await peer.rest())[-1] == figg.Message(figg.ACK, number=DEBT)


async def test_a_peer_that_stops_sending_is_not_kept_for_hours(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GOODBYE_TIMEOUT_S", 0.05)
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"last"))
    await peer.pong(2)
    peer.writer.write_eof()
    await peer.rest()
    await server.until(lambda: not server.connections.open)
    server.lift()
    server.commit()
    assert server.stored == []


async def test_nothing_of_a_peer_that_is_closed_is_stored_later(server: Server) -> None:
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"late"))
    await peer.pong(2)
    [held] = server.connections.open
    held.close("the token was revoked", 1008)
    assert server.connections.held.bytes == 0
    server.lift()
    await peer.rest()
    server.commit()
    assert server.stored == []


@pytest.mark.parametrize("how", ["resets", "is aborted"])
async def test_a_peer_that_is_gone_leaves_nothing_behind(server: Server, how: str) -> None:
    peer = await server.indebted()
    peer.send(*(figg.publish(b"t", DEBT + number, bytes(1000)) for number in range(100)))
    await peer.pong(2)
    assert server.connections.held.bytes > 100_000
    if how == "resets":
        sock = peer.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.writer.transport.abort()
    else:
        [held] = server.connections.open
        held._transport.abort()
    await server.until(lambda: not server.connections.open)
    throttle = server.connections.throttle
    assert server.connections.held.bytes == 0 and not throttle._waits_at and not throttle._of


async def test_an_error_in_a_publish_that_waited_ends_one_connection_and_the_others_go_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await server.indebted()
    first.send(figg.publish(b"bad", DEBT, b""))
    await first.pong(2)
    others = []
    for number in range(3):
        others.append(await server.dial())
        others[-1].send(figg.publish(b"t", 0, b"%d" % number))
        await others[-1].pong(1)
    publish = server.connections.broker.publish

    def fail(records: dict[str, list[bytes]], done: Callable[[], None]) -> None:
        if "bad" in records:
            raise RuntimeError("an error in a publish")
        publish(records, done)

    monkeypatch.setattr(server.connections.broker, "publish", fail)
    server.lift()
    await server.committed(lambda: len(server.stored) == 3)
    acks = [message.number for message in await first.rest() if message.type == figg.ACK]
    assert all(number < DEBT for number in acks)
    for other in others:
        assert await other.next() == figg.Message(figg.ACK, number=0)


# Memory


A_READ = 1 << 19
"""Estimate of a read of 256 KiB of large payloads, with what it takes besides."""


async def test_the_memory_of_publishers_that_wait_is_bounded(tmp_path: Path) -> None:
    """However many there are: those beyond the limit are not read until there is memory."""
    bytes_max = 1 << 20
    async with serving(tmp_path, replace(FULL, held_bytes_max=bytes_max)) as server:
        memory = server.connections.held
        await server.exhausted()
        peers: dict[bytes, Peer] = {}
        for number in range(40):
            payload = b"%08d" % number + bytes(100_000)
            peers[payload] = await server.dial()
            peers[payload].send(figg.publish(b"t", number, payload))
            await server.until(
                lambda: memory.parked + sum(map(is_holding, server.connections.open)) == len(peers)
            )
            assert memory.bytes <= bytes_max + A_READ
        assert memory.parked > 20
        assert server.applied("held_bytes_max") >= memory.parked
        # Another address is served as before.
        other = await server.dial("127.0.0.2")
        other.send(figg.publish(b"t", 0, b"of another"))
        await server.committed(lambda: server.stored)
        assert await other.next() == figg.Message(figg.ACK, number=0)
        server.lift()
        parked = memory.parked
        insisting = [
            asyncio.ensure_future(insist(server, peer, payload)) for payload, peer in peers.items()
        ]
        while not all(one.done() for one in insisting):
            server.commit()
            server.connections.tick()  # ends parked connections, as the server does all the time
            await asyncio.sleep(0.001)
        assert sum(one.result() for one in insisting) == parked
        assert sorted(server.stored) == sorted([*peers, b"of another"])


async def insist(server: Server, peer: Peer, payload: bytes) -> int:
    """Send a publish again after each end of the connection. Return how often that was."""
    again = 0
    while (message := await peer.next()) is None:
        again += 1
        peer = await server.dial()
        peer.send(figg.publish(b"t", 0, payload))
    assert message.type == figg.ACK
    return again


def is_holding(connection: Any) -> bool:
    return bool(connection._held_bytes)


async def test_a_publisher_that_needs_more_memory_than_there_is_goes_on_alone(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, FULL) as server:
        peer = await server.exhausted()
        peer.send(figg.publish(b"t", 1, bytes([1]) * 100_000))
        await server.until(lambda: server.connections.held.bytes > 100_000)
        server.lift()
        await server.committed(lambda: server.stored)


async def test_a_peer_that_leaves_while_it_is_not_read_is_closed_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its publishes would take the memory of others for hours, and it sends them again anyway."""
    monkeypatch.setattr(connection, "GOODBYE_TIMEOUT_S", 0.01)
    async with serving(tmp_path, FULL) as server:
        peer = await server.exhausted()
        peer.send(figg.publish(b"t", 1, bytes(100_000)))
        await server.until(lambda: server.connections.held.bytes > 100_000)
        [held] = server.connections.open
        assert held.state == "paused"
        peer.writer.close()
        await server.until(lambda: not server.connections.open)
        assert server.connections.held.bytes == 0


async def test_a_peer_without_memory_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path, FULL) as server:
        holder, other = await server.exhausted(), await server.dial()
        holder.send(figg.publish(b"t", 1, b"held" + bytes(100_000)))
        await server.until(lambda: server.connections.held.bytes)
        other.send(figg.publish(b"t", 0, b"dropped"))
        await server.until(lambda: server.connections.held.parked)
        other.writer.close()
        await server.until(lambda: len(server.connections.open) == 1)
        assert not server.connections.held.parked
        server.lift()
        await server.committed(lambda: server.stored)
        assert server.stored == [b"held" + bytes(100_000)]


async def test_a_peer_without_memory_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    limits = replace(of_principal(bytes_per_s=1), held_bytes_max=4096)
    async with serving(tmp_path, limits, access=TOKENS) as server:
        holder, other = await server.identified("a"), await server.identified("a")
        holder.send(figg.publish(b"t", 0, bytes(50_000)))
        await holder.pong(2)
        server.commit()
        holder.send(figg.publish(b"t", 1, bytes(50_000)))
        await server.until(lambda: server.connections.held.bytes)
        other.send(figg.publish(b"t", 0, b"dropped"))
        await server.until(lambda: server.connections.held.parked)
        server.revoke()
        assert [one for one in await other.rest() if one.type == figg.ACK] == []
        await holder.rest()


async def test_the_memory_of_tiny_publishes_is_not_underestimated(server: Server) -> None:
    """The estimate is at least the bytes and the objects of the records, not only the bytes."""
    peer = await server.indebted()
    peer.send(*(figg.publish(b"t", DEBT + number, b"x") for number in range(1000)))
    await peer.pong(2)
    [held] = server.connections.open
    assert held._held_bytes >= 1000 * 100


async def test_thousands_of_messages_behind_a_publish_that_waits_are_decoded_in_turns(
    server: Server,
) -> None:
    peer = await server.indebted()
    peer.send(figg.publish(b"t", DEBT, b"held"))
    await peer.pong(2)
    peer.send(*[figg.attach(b"own") + figg.detach(b"own")] * 2000)
    await peer.pong(3)
    server.lift()
    await server.committed(lambda: server.stored)
    await peer.pong(4)
    assert len(server.attached) == 2000


# Quotas


QUOTA = (PrefixRule(prefix="t", quota_bytes=1000),)


async def test_a_full_prefix_holds_back_until_records_are_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, Limits(), topics=QUOTA) as server:
        peer = await server.dial()
        peer.send(figg.publish(b"t", 0, bytes([1]) * 1000))
        await server.committed(lambda: len(server.stored) == 1)
        peer.send(figg.publish(b"t", 1, b"waits"))
        await peer.pong(1)
        other = await server.dial()
        other.send(figg.publish(b"free", 0, b"served"))
        await server.committed(lambda: server.store.payloads("free"))
        assert len(server.stored) == 1
        topic = server.store.store.topic("t")
        server.store.store.trim(topic, topic.end, lambda: None)
        await server.committed(lambda: server.stored == [b"waits"])


async def test_a_quota_counts_what_a_restart_finds(tmp_path: Path) -> None:
    async with serving(tmp_path, Limits(), topics=QUOTA) as server:
        peer = await server.dial()
        peer.send(figg.publish(b"t", 0, bytes([1]) * 1000))
        await server.committed(lambda: len(server.stored) == 1)
    async with serving(tmp_path, Limits(), topics=QUOTA) as server:
        peer = await server.dial()
        peer.send(figg.publish(b"t", 0, b"waits"))
        await peer.pong(1)
        server.commit()
        assert len(server.stored) == 1


# Refusals


async def test_a_topic_above_topics_max_is_refused_and_others_are_published_to(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Limits(topics_max=2, refusal_delay_s=0.0)) as server:
        peer = await server.dial()
        peer.send(figg.publish(b"t", 0, b"first"), figg.publish(b"u", 1, b"second"))
        await server.committed(lambda: server.stored)
        peer.send(figg.publish(b"t", 2, b"third"))
        await peer.pong(1)
        peer.send(figg.publish(b"v", 3, b"refused"))
        await server.committed(lambda: all(one.is_gone for one in server.connections.open))
        acks = [message.number for message in await peer.rest() if message.type == figg.ACK]
        assert acks == [2]
        assert server.stored == [b"first", b"third"]
        assert server.store.payloads("v") == []
        peer = await server.dial()
        server.store.destroy("u")
        peer.send(figg.publish(b"v", 0, b"has room"))
        await server.committed(lambda: server.store.payloads("v"))


async def test_a_closed_topic_is_refused_also_to_publishes_that_waited_for_their_turn(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Limits(refusal_delay_s=0.0)) as server:
        peer = await server.dial()
        peer.send(figg.publish(b"t", 0, b"first"), figg.publish(b"u", 1, b"second"))
        await server.committed(lambda: server.stored)
        peer.send(figg.publish(b"t", 2, b"third"))
        await peer.pong(1)
        server.store.store.change(
            server.store.store.topic("t"), records=[], close=True, done=lambda: None
        )
        peer.send(figg.publish(b"u", 3, b"fourth"))
        await peer.pong(2)
        peer.send(figg.publish(b"t", 4, b"refused"))
        await server.committed(lambda: all(one.is_gone for one in server.connections.open))
        acks = [message.number for message in await peer.rest() if message.type == figg.ACK]
        assert acks == [3]
        assert server.stored == [b"first", b"third"]
        assert server.store.payloads("u") == [b"second", b"fourth"]
        counts = server.connections.metrics.labelled["refusals_total"]
        assert counts["figg", "closed_topic"] == 1


async def test_connections_of_one_address_are_limited_and_leave_room_for_others(
    tmp_path: Path,
) -> None:
    limits = Limits(peer=(PeerLimits(of="address", connections_max=2),))
    async with serving(tmp_path, limits) as server:
        peers = [await server.dial() for _ in range(2)]
        for peer in peers:
            await peer.pong(1)
        assert await (await server.dial()).rest() == []
        await (await server.dial("127.0.0.2")).pong(1)
        peers[0].writer.close()
        await server.until(lambda: len(server.connections.open) == 2)
        await (await server.dial()).pong(1)


async def test_subscriptions_of_one_address_are_limited_over_all_its_connections(
    tmp_path: Path,
) -> None:
    limits = Limits(peer=(PeerLimits(of="address", subscriptions_max=3),))
    async with serving(tmp_path, limits) as server:
        first, second = await server.dial(), await server.dial()
        first.send(figg.attach(b"a"), figg.attach(b"b"))
        await first.pong(1)
        second.send(figg.attach(b"a"))
        await second.pong(1)
        first.send(figg.detach(b"a"), figg.attach(b"c"), figg.attach(b"c"))
        await first.pong(2)
        second.send(figg.attach(b"d"))
        assert [message.topic for message in await second.rest()] == [b"a"]
        await server.until(lambda: len(server.connections.open) == 1)
        first.send(figg.attach(b"d"))
        await first.pong(3)


# Principals

TOKENS = AccessSettings(
    token=tuple(
        AccessToken(name=name, sha256=sha256(name.encode()).hexdigest()) for name in ("a", "b")
    ),
)


def of_principal(**limits: int) -> Limits:
    return Limits(peer=(PeerLimits(of="principal", **limits),))


async def test_a_publish_that_waits_is_not_stored_after_its_token_was_revoked(
    tmp_path: Path,
) -> None:
    limits = of_principal(records_per_s=1)
    async with serving(tmp_path, limits, access=TOKENS) as server:
        peer = await server.identified("a")
        peer.send(*(figg.publish(b"t", number, b"") for number in range(DEBT)))
        await peer.pong(2)
        peer.send(figg.publish(b"t", DEBT, b"late"))
        await peer.pong(3)
        [held] = server.connections.open
        assert held._held_bytes
        server.revoke()
        server.commit()
        server.lift()
        await peer.rest()
        server.commit()
        assert server.stored == []


async def test_an_error_in_the_end_of_one_connection_does_not_spare_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials are ended by the periodic work of the server, which stops the server after an error."""
    async with serving(tmp_path, Limits(), access=TOKENS) as server:
        peers = [await server.identified("a") for _ in range(3)]
        broken = peers[0].writer.get_extra_info("sockname")[1]
        turned_away = FiggConnection._turned_away

        def fail(connection: FiggConnection, reason: str) -> Close:
            if connection.peer.endswith(f":{broken}"):
                raise RuntimeError("an error in the end")
            return turned_away(connection, reason)

        monkeypatch.setattr(FiggConnection, "_turned_away", fail)
        server.revoke()
        for peer in peers:
            await peer.rest()
        await server.until(lambda: not server.connections.open)


async def test_connections_of_one_principal_share_its_rate_and_others_have_their_own(
    tmp_path: Path,
) -> None:
    limits = of_principal(records_per_s=1)
    async with serving(tmp_path, limits, access=TOKENS) as server:
        first, second = await server.identified("a"), await server.identified("a")
        other = await server.identified("b")
        first.send(*(figg.publish(b"t", number, b"") for number in range(DEBT)))
        await first.pong(2)
        second.send(figg.publish(b"t", 0, b"of the same"))
        await second.pong(2)
        other.send(figg.publish(b"t", 0, b"of another"))
        await server.committed(lambda: server.stored)
        assert server.stored == [b"of another"]
        assert server.applied("records_per_s", "principal") >= 1


async def test_connections_and_subscriptions_of_a_principal_are_limited(tmp_path: Path) -> None:
    limits = of_principal(connections_max=2, subscriptions_max=1)
    async with serving(tmp_path, limits, access=TOKENS) as server:
        first, _ = await server.identified("a"), await server.identified("a")
        third = await server.dial()
        third.send(encode_auth("a"))
        await third.rest()
        await server.identified("b")
        first.send(figg.attach(b"t"))
        await first.pong(2)
        first.send(figg.attach(b"u"))
        await first.rest()
        assert server.applied("connections_max", "principal") == 1
        assert server.applied("subscriptions_max", "principal") == 1


async def test_a_peer_that_shows_no_token_in_time_is_closed_and_one_that_did_is_not(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Limits(authentication_s=0.001), access=TOKENS) as server:
        known = await server.identified("a")
        stranger = await server.dial()
        await server.until(lambda: len(server.connections.open) == 2)
        await asyncio.sleep(0.002)
        server.connections.tick()
        await stranger.rest()
        await known.pong(2)
        assert server.applied("authentication_s") == 1
        assert not server.connections.strangers


async def test_a_peer_that_sends_much_without_a_token_is_closed(tmp_path: Path) -> None:
    limits = Limits(authentication_bytes_max=1024)
    async with serving(tmp_path, limits, access=TOKENS) as server:
        known = await server.identified("a")
        stranger = await server.dial()
        stranger.send(*(figg.ping(number) for number in range(200)))
        await stranger.rest()
        for number in range(200):
            await known.pong(number)
        assert server.applied("authentication_bytes_max") == 1


async def test_strangers_of_one_address_give_way_to_others(tmp_path: Path) -> None:
    async with serving(tmp_path, Limits(connections_max=5), access=TOKENS) as server:
        known = await server.identified("a")
        idle = [await server.dial() for _ in range(4)]
        await server.until(lambda: len(server.connections.open) == 5)
        other = await server.dial("127.0.0.2")
        other.send(encode_auth("b"))
        await other.pong(1)
        assert await idle[0].rest() == []
        assert server.applied("connections_max", "address") == 1
        assert await (await server.dial()).rest() == [], "its own address has no room"
        await known.pong(2)
        await server.until(lambda: len(server.connections.open) == 5)
        assert len(server.connections.strangers.newcomers) == 3


async def test_peers_that_have_shown_a_token_never_give_way(tmp_path: Path) -> None:
    async with serving(tmp_path, Limits(connections_max=2), access=TOKENS) as server:
        known = [await server.identified("a") for _ in range(2)]
        assert await (await server.dial("127.0.0.2")).rest() == []
        for peer in known:
            await peer.pong(2)


async def test_a_stranger_whose_time_is_over_gives_way_before_it_has_hung_up(
    tmp_path: Path,
) -> None:
    limits = Limits(connections_max=2, authentication_s=0.001)
    async with serving(tmp_path, limits, access=TOKENS) as server:
        idle = [await server.dial() for _ in range(2)]
        await server.until(lambda: len(server.connections.open) == 2)
        await asyncio.sleep(0.002)
        server.connections.tick()
        assert server.applied("authentication_s") == 2
        other = await server.dial("127.0.0.2")
        other.send(encode_auth("b"))
        await other.pong(1)
        for peer in idle:
            peer.writer.close()
