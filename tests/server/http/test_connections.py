"""Limits of HTTP connections: in total, of an address and of a principal; and the end of an answer."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from headrace.config.protocols import Access as AccessSettings
from headrace.config.protocols import AccessToken
from headrace.config.settings import Config, PeerLimits
from headrace.server.access import Access
from headrace.server.http import connections
from headrace.server.http import listener as http_listener
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.newcomers import GAVE_WAY, WAIT_S_MIN
from tests.server.listener import Answer, Listener, Peer, until


def access_of(*names: str) -> Access:
    """Return an access control that knows these tokens, each by its name."""
    tokens = tuple(
        AccessToken(name=name, sha256=sha256(name.encode()).hexdigest()) for name in names
    )
    config = Config(access=AccessSettings(token=tokens))
    return Access(config, Path("/nowhere/tokens.json"), lambda: 0, Metrics())


def limited(of: str) -> tuple[PeerLimits, ...]:
    return (PeerLimits(of=of, connections_max=2),)


async def ask(peer: Peer, path: str = "/", token: str = "") -> Answer:
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    peer.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{shown}\r\n".encode())
    return await peer.answer()


async def is_turned_away(peer: Peer, scope: str, token: str = "") -> None:
    answer = await ask(peer, token=token)
    assert answer.status == 503
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
    assert json.loads(answer.body) == {
        "error": f"connections_max{scope} is reached: connect again in a while"
    }
    assert await peer.ended()
    peer.close()


async def test_a_connection_above_the_total_is_told_so_and_makes_room() -> None:
    async with Listener(connections_max=2) as listener:
        kept = [await listener.connect() for _ in range(2)]
        for peer in kept:
            assert (await ask(peer)).status == 200
        await is_turned_away(await listener.connect(), "")
        assert listener.turned_away == ["connections_max is reached"]
        assert not listener.refusals, "a connection is refused, and no request"
        kept.pop().close()
        await until(lambda: listener.connections.tally.total == 1)
        assert (await ask(await listener.connect())).status == 200
        assert (await ask(kept[0])).status == 200
    await until(lambda: not listener.connections.tally.total)
    assert not listener.connections.turned_away


async def test_an_address_with_all_connections_gives_way_to_others() -> None:
    async with Listener(connections_max=3) as listener:
        idle = [await listener.connect() for _ in range(3)]
        await until(lambda: len(listener.places.newcomers) == 3)
        assert (await ask(await listener.connect("127.0.0.2"))).status == 200
        assert await idle[0].ended()
        await is_turned_away(await listener.connect(), "")
        assert (await ask(idle[1])).status == 200
        assert listener.places.applied == ["handshakes_max address"]
        assert listener.turned_away == [GAVE_WAY, "connections_max is reached"]


async def test_only_a_request_with_credentials_keeps_a_connection() -> None:
    """Otherwise a peer could ask for something public, and never read the answer."""
    async with Listener(connections_max=2, access=access_of("a")) as listener:
        known, stranger = await listener.connect(), await listener.connect()
        known.send(b"GET /endless HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\n\r\n")
        await until(lambda: len(listener.places.newcomers) == 1)
        assert (await ask(stranger, "/healthz")).status == 200
        listener.places.now_s += WAIT_S_MIN
        assert (await ask(await listener.connect("127.0.0.2"), token="a")).status == 200
        assert await stranger.ended()
        assert listener.turned_away == [GAVE_WAY]
        known.close()


async def test_connections_of_one_address_are_limited_and_leave_room_for_others() -> None:
    async with Listener(peers=limited("address")) as listener:
        for _ in range(2):
            assert (await ask(await listener.connect())).status == 200
        await is_turned_away(await listener.connect(), " of this address")
        assert (await ask(await listener.connect("127.0.0.2"))).status == 200


async def test_a_health_check_is_answered_above_the_limit() -> None:
    async with Listener(connections_max=1) as listener:
        assert (await ask(await listener.connect())).status == 200
        peer = await listener.connect()
        answer = await ask(peer, "/healthz")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await peer.ended()


async def test_connections_that_are_turned_away_are_limited_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "TURNED_AWAY_MAX", 1)
    async with Listener(connections_max=1) as listener:
        assert (await ask(await listener.connect())).status == 200
        waiting = await listener.connect()
        await until(lambda: listener.connections.turned_away == 1)
        assert await (await listener.connect()).ended()
        await is_turned_away(waiting, "")
        await until(lambda: not listener.connections.turned_away)
        await is_turned_away(await listener.connect(), "")


@asynccontextmanager
async def with_tokens(of: str) -> AsyncIterator[Listener]:
    async with Listener(peers=limited(of), access=access_of("a", "b")) as listener:
        yield listener


@pytest.mark.parametrize("of", ["principal", "token:a"])
async def test_connections_of_a_principal_are_limited(of: str) -> None:
    async with with_tokens(of) as listener:
        kept = [await listener.connect() for _ in range(2)]
        for _ in range(2):
            for peer in kept:
                assert (await ask(peer, token="a")).status == 200
        late = await listener.connect()
        assert (await ask(late, "/healthz")).status == 200
        await is_turned_away(late, " of token:a", "a")
        assert listener.turned_away == ["connections_max of token:a is reached"]
        assert (await ask(await listener.connect(), token="b")).status == 200
        kept.pop().close()
        await until(lambda: listener.connections.tally.total == 2)
        assert (await ask(await listener.connect(), token="a")).status == 200


async def test_a_connection_belongs_to_the_principal_of_its_last_request() -> None:
    async with with_tokens("principal") as listener:
        shared = [await listener.connect() for _ in range(3)]
        for peer in shared[:2]:
            assert (await ask(peer, token="a")).status == 200
        assert (await ask(shared[0], token="b")).status == 200
        assert (await ask(shared[2], token="a")).status == 200
        await is_turned_away(shared[0], " of token:a", "a")


async def test_an_address_is_that_of_the_connection_and_not_of_a_header() -> None:
    async with Listener() as listener:
        peer = await listener.connect()
        peer.send(b"GET /peer HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 10.1.2.3\r\n\r\n")
        assert (await peer.answer()).body == b"127.0.0.1"


# Answers that are given up


@pytest.mark.parametrize("pipelined", [0, 1])
async def test_an_answer_in_progress_ends_with_its_token_and_without_an_error(
    pipelined: int, caplog: pytest.LogCaptureFixture
) -> None:
    access = access_of("a")
    async with Listener(access=access) as listener:
        peer = await listener.connect()
        request = b"GET /endless HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\n\r\n"
        peer.send(request * (1 + pipelined))
        assert (await peer.head()).startswith("HTTP/1.1 200 ")
        await peer.part(b"4\r\npart\r\n")
        access.reload(Config(access=AccessSettings(anonymous=("inspect:x",))))
        assert await peer.ended(), "nothing says that the answer is complete"
        peer.close()
        await until(lambda: not listener.connections.tally.total)
        await until(lambda: not listener.memory.bytes)
    assert errors_in(caplog) == []


async def test_a_complete_answer_leaves_its_connection_to_the_next_request() -> None:
    access = access_of("a")
    async with Listener(access=access) as listener:
        peer = await listener.connect()
        assert (await ask(peer, "/after", "a")).status == 200
        access.reload(Config(access=AccessSettings(anonymous=("inspect:x",))))
        assert (await ask(peer)).status == 200


async def test_the_stop_of_the_server_ends_an_answer_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "_STOP_TIMEOUT_S", 0.1)
    async with Listener() as listener:
        peer = await listener.connect()
        peer.send(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await peer.head()
        await peer.part(b"4\r\npart\r\n")
        await listener.stop()
        assert await peer.ended()
    assert errors_in(caplog) == ["Cancel 1 running task(s), timeout graceful shutdown exceeded"]


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]
