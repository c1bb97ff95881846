"""Repeatedly refused publishes: their peers are held, unread and limited in number; others do not notice.

Delays are a minute here, so that a hold can only end for another reason and time plays no part.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.config.settings import Limits
from headrace.model import CHANNEL_PREFIX, Refusal
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.pause import Pause
from headrace.server.refusals import ADDRESSES_MAX, FORGOTTEN_AFTER_S, Refusals
from tests.server.test_figg_connection import WAIT_S, Figg
from tests.system.figg import foreign as figg

REFUSED = CHANNEL_PREFIX.encode() + b"x"
PER_ADDRESS_MAX = 3
LONG = {"refusal_delay_s": 60.0, "refusal_delay_max_s": 60.0}
LIMITS = Limits(refused_connections_per_address_max=PER_ADDRESS_MAX, **LONG)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator["Server"]:
    figg_server = Server(tmp_path, LIMITS)
    await figg_server.listen()
    yield figg_server
    for writer in figg_server.writers:
        writer.close()
    await figg_server.close()


class Server(Figg):
    """Server that remembers which connections to close after a test."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        super().__init__(directory, limits)
        self.writers: list[asyncio.StreamWriter] = []

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        return reader, writer


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


async def refused_peer(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a peer that has published something refused, once the server has noticed."""
    before = refusals(server)
    reader, writer = await server.dial()
    writer.write(figg.publish(REFUSED, 0, b"x"))
    await until(lambda: refusals(server) > before)
    return reader, writer


def refusals(server: Server) -> int:
    return server.connections.metrics.labelled["refusals_total"]["figg", "reserved_topic"]


async def test_a_client_that_reconnects_at_once_and_sends_the_same_is_held(server: Server) -> None:
    """Some SDKs do this: they back off only after a failed dial."""
    dialled = 0

    async def insist() -> None:
        nonlocal dialled
        while True:
            reader, writer = await server.dial()
            dialled += 1
            writer.write(figg.publish(REFUSED, 0, b"x"))
            await reader.read()
            writer.close()

    insisting = asyncio.ensure_future(insist())
    await until(lambda: len(server.connections.refusals.held) == 1)
    reader, writer = await server.dial()
    decoder = figg.Decoder()
    for number in range(100):  # a neighbour works normally meanwhile
        writer.write(figg.publish(b"t", number, b"x"))
        await until(lambda: server.store.store.pending_bytes)
        server.commit()
        acks: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            while not acks:
                acks = decoder.feed(await reader.read(1000))
        assert acks == [figg.Message(figg.ACK, number=number)]
    assert dialled == refusals(server) == 1
    insisting.cancel()
    writer.close()


async def test_a_held_peer_gets_its_acknowledgements_and_is_not_read(server: Server) -> None:
    reader, writer = await server.dial()
    writer.write(figg.publish(b"t", 0, b"before") + figg.publish(REFUSED, 1, b"x"))
    await until(lambda: server.connections.refusals.held)
    writer.write(figg.publish(b"t", 2, b"after") * 1000 + figg.ping(7))
    [connection] = server.connections.open
    assert connection._paused & Pause.CLOSING
    server.commit()
    received = await asyncio.wait_for(reader.readexactly(16), WAIT_S)
    assert figg.Decoder().feed(received) == [figg.Message(figg.ACK, number=0)]
    assert server.store.payloads("t") == [b"before"]
    assert not reader.at_eof()
    connection.end_hold()  # its timer would do this
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    assert not server.connections.refusals.held
    writer.close()


async def test_a_hold_ends_by_itself(tmp_path: Path) -> None:
    server = Server(tmp_path, Limits(refusal_delay_s=0.001))
    await server.listen()
    reader, writer = await refused_peer(server)
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    await until(lambda: not server.connections.open)
    assert not server.connections.refusals.held
    await server.close()


async def test_held_peers_of_an_address_are_bounded_and_further_ones_closed_at_once(
    server: Server,
) -> None:
    held = [await refused_peer(server) for _ in range(PER_ADDRESS_MAX)]
    assert len(server.connections.refusals.held) == PER_ADDRESS_MAX
    reader, writer = await refused_peer(server)
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    assert len(server.connections.refusals.held) == PER_ADDRESS_MAX
    writer.close()
    for _, other in held:
        other.close()


@pytest.mark.parametrize("how", ["closes", "resets", "half closes"])
async def test_a_peer_that_leaves_first_frees_its_place(server: Server, how: str) -> None:
    peers = [await refused_peer(server) for _ in range(PER_ADDRESS_MAX)]
    _, leaver = peers.pop()
    if how == "half closes":
        leaver.write_eof()
    elif how == "resets":
        sock = leaver.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how != "half closes":
        leaver.close()
    await until(lambda: len(server.connections.refusals.held) == PER_ADDRESS_MAX - 1)
    await refused_peer(server)
    assert len(server.connections.refusals.held) == PER_ADDRESS_MAX
    for _, writer in peers:
        writer.close()


async def test_a_stop_does_not_wait_for_held_peers(server: Server) -> None:
    reader, writer = await refused_peer(server)
    async with asyncio.timeout(WAIT_S):  # a sixth of the delay
        await server.connections.close()
    assert not server.connections.refusals.held
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()


# Without sockets


class Loop:
    now = 1000.0

    def time(self) -> float:
        return self.now


class Peer:
    protocol = "figg"
    fd = -1

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.address = address
        self.peer = f"{address}:7"

    def end_hold(self) -> None: ...


def made(**limits: Any) -> tuple[Refusals, Loop, Metrics]:
    loop, metrics = Loop(), Metrics()
    return Refusals(loop, Limits(**limits), metrics), loop, metrics  # type: ignore[arg-type]


def refuse(refusals: Refusals, peer: Peer) -> float:
    held_s = refusals.delay_close(peer, "no such name", Refusal.EMPTY_TOPIC)
    refusals.release(peer)
    return held_s


def test_a_hundred_clients_behind_one_proxy_are_all_held() -> None:
    refusals, _, _ = made()
    assert all(
        refusals.delay_close(Peer(), "no such name", Refusal.EMPTY_TOPIC) for _ in range(100)
    )


def test_the_delay_doubles_for_an_address_up_to_its_bound_and_begins_anew() -> None:
    refusals, loop, _ = made()
    assert [refuse(refusals, Peer()) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert refuse(refusals, Peer("10.0.0.2")) == 1.0
    loop.now += FORGOTTEN_AFTER_S
    refusals.tick()
    assert refuse(refusals, Peer()) == 1.0


def test_held_peers_are_bounded_in_total_and_leave_room_for_others() -> None:
    refusals, _, _ = made(refused_connections_max=2)
    peers = [Peer(f"10.0.0.{number}") for number in range(3)]
    assert [refusals.delay_close(peer, "", Refusal.EMPTY_TOPIC) for peer in peers] == [
        1.0,
        1.0,
        0.0,
    ]
    refusals.release(peers[2])  # this one was not held
    refusals.release(peers[0])
    assert list(refusals.held) == [peers[1]]
    assert refusals.delay_close(peers[2], "", Refusal.EMPTY_TOPIC) == 2.0
    few, _, _ = made(connections_max=4)
    assert [few.delay_close(Peer(f"1.{n}"), "", Refusal.EMPTY_TOPIC) for n in range(2)] == [
        1.0,
        0.0,
    ]
    none, _, _ = made(refusal_delay_s=0.0)
    assert none.delay_close(Peer(), "", Refusal.EMPTY_TOPIC) == 0.0


def test_the_log_has_one_line_for_an_address_and_then_sums_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    refusals, loop, metrics = made()
    for _ in range(1000):
        refuse(refusals, Peer())
    refuse(refusals, Peer("10.0.0.2"))
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("10.0.0.1:7: closing: no such name; held for 1 s")
    loop.now += FORGOTTEN_AFTER_S
    refusals.tick()
    assert caplog.messages[2:] == [
        "10.0.0.1: 999 more publishes refused in 60 s, the last: no such name"
    ]
    assert metrics.labelled["refusals_total"]["figg", "empty_topic"] == 1001


def test_the_addresses_that_are_remembered_are_bounded() -> None:
    refusals, _, _ = made()
    held = Peer("first")
    refusals.delay_close(held, "", Refusal.EMPTY_TOPIC)
    for number in range(ADDRESSES_MAX):
        refuse(refusals, Peer(str(number)))
    assert len(refusals._addresses) == ADDRESSES_MAX
    refusals.release(held)
    assert not refusals.held
