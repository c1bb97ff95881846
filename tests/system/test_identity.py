"""JWTs and tickets against a real server: every protocol accepts, refuses, ends and renews them."""

import asyncio
import base64
import json
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import jwt
import msgpack
import pytest
import websockets
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import headrace
from headrace import channels
from headrace.client import Client
from headrace.errors import RefusedError
from headrace.session.topics import client as topics_session
from headrace.testing import ServerProcess

KEY = ec.generate_private_key(ec.SECP256R1())
PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

LIFETIME_S = 2.0
"""Lifetime of tokens that are to expire. A test on a busy machine doubles it until it is enough."""

Connect = Callable[[Any], Awaitable[Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("identity")
    (directory / "keys.pem").write_bytes(PEM)
    settings = directory / "headrace.toml"
    settings.write_text(
        f'[access.jwt]\nkey_file = "{directory}/keys.pem"\nleeway_s = 0\nroles_claim = "roles"\n'
        '[[access.jwt.role]]\nname = "all"\ngrants = ["all:*", "all:$*"]\n'
    )
    with ServerProcess(directory / "data", "--config", str(settings)) as server:
        yield server


def token(lifetime_s: float = 3600.0, key: Any = KEY, **claims: Any) -> str:
    given = {"sub": "anna", "exp": time.time() + lifetime_s, "roles": ["all"]} | claims
    return jwt.encode(given, key, "ES256")


def connections(server: ServerProcess) -> dict[str, Connect]:
    """Return a function for each protocol that connects with a token."""
    ws = server.wombat_url.removeprefix("wombat://")

    def logux(shown: Any) -> Awaitable[Any]:
        url = f"logux://{ws}/main"
        return headrace.connect(url, store=None, token=shown, connect_timeout_s=30.0, host="anna:a")

    def channel(shown: Any) -> Awaitable[Any]:
        url = f"channel://{ws}"
        return channels.connect(url, processor="p", token=shown, connect_timeout_s=30.0)

    return {
        "figg": lambda shown: headrace.connect(server.figg_url, token=shown),
        "wombat": lambda shown: headrace.connect(server.wombat_url, token=shown),
        "logux": logux,
        "channel": channel,
    }


PROTOCOLS = ("figg", "wombat", "logux", "channel")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_jwt_lets_its_bearer_in(server: ServerProcess, protocol: str) -> None:
    async with await connections(server)[protocol](token()) as client:
        assert client.state == "connected"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_wrong_jwt_is_refused_once(server: ServerProcess, protocol: str) -> None:
    unsigned = jwt.encode({"sub": "anna", "exp": time.time() + 60, "roles": ["all"]}, "", "none")
    other = ec.generate_private_key(ec.SECP256R1())
    for wrong in (unsigned, token(key=other), token(-1.0), token(exp=None), "a.b.c"):
        with pytest.raises(RefusedError) as raised:
            await connections(server)[protocol](wrong)
        assert raised.value.kind == "auth"


def test_a_wrong_jwt_is_refused_over_http_with_a_reason(server: ServerProcess) -> None:
    for wrong, reason in (
        (token(-1.0), "the token has expired"),
        (token(key=ec.generate_private_key(ec.SECP256R1())), "the signature of the token is wrong"),
    ):
        assert ask(server, "GET", "/v1/topics", wrong) == (401, {"error": reason})
    assert ask(server, "GET", "/v1/topics", token())[0] == 200


async def test_a_connection_ends_with_its_jwt_on_every_protocol(server: ServerProcess) -> None:
    async with asyncio.timeout(120):
        await asyncio.gather(*(expire(connect) for connect in connections(server).values()))


async def expire(connect: Connect) -> None:
    """Connect with a token that expires, and wait until the client is refused for good."""
    lifetime_s = LIFETIME_S
    while True:
        try:
            client = await connect(token(lifetime_s))
            break
        except RefusedError:
            lifetime_s *= 2  # the token had expired before the busy machine could show it
    async with client:
        await until(lambda: client.state == "refused")
        if isinstance(client, Client):
            with pytest.raises(RefusedError, match="the credentials have expired"):
                await client.publish("t", b"x")


async def test_a_renewed_jwt_keeps_connections_beyond_the_first_one(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client renews early: only a very busy machine could be too late, and then the test begins anew."""
    monkeypatch.setattr(topics_session, "RENEW_AT", 0.05)
    monkeypatch.setattr(topics_session, "RENEW_S_MIN", 0.1)
    async with asyncio.timeout(200):
        for url in (server.figg_url, server.wombat_url):
            lifetime_s = LIFETIME_S
            while not await is_kept(url, lifetime_s):
                lifetime_s *= 2


async def is_kept(url: str, lifetime_s: float) -> bool:
    """Keep a connection by renewals beyond its first token. Return False if the machine was too busy."""
    asked_s: list[float] = []

    async def renewed() -> str:
        asked_s.append(time.time())
        return token(lifetime_s)

    states: list[str] = []
    try:
        client = await headrace.connect(url, token=renewed)
    except RefusedError:
        return False
    async with client:
        client.on("state", states.append)
        subscription = client.subscribe("renewed")
        await subscription.attached()
        await until(lambda: time.time() > asked_s[0] + lifetime_s + 0.5)
        gaps = (after - before for before, after in pairwise([*asked_s, time.time()]))
        if max(gaps) > lifetime_s / 2:
            return False
        assert states == []
        await client.publish("renewed", b"x")
        assert (await anext(subscription)).payload == b"x"
    return True


@pytest.mark.parametrize("protocol", ["logux", "channel"])
async def test_a_function_for_tokens_brings_a_client_back(
    server: ServerProcess, protocol: str
) -> None:
    """Logux and channels have no message for a renewal: the client connects again, with a new token."""
    asked: list[None] = []

    def next_token() -> str:
        asked.append(None)
        return token(LIFETIME_S * 4 ** (len(asked) - 1))  # longer each time, for busy machines

    client = await connections(server)[protocol](next_token)
    async with client:
        await until(lambda: len(asked) > 1)
        await client.connected()


# Tickets


def ask(server: ServerProcess, method: str, path: str, shown: str | None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {shown}"} if shown else {}
    request = urllib.request.Request(f"{server.http_url}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def ticket(server: ServerProcess, **claims: Any) -> str:
    status, answer = ask(server, "POST", "/v1/tickets", token(**claims))
    assert (status, answer["expires_in_s"]) == (201, 30.0)
    found: str = answer["ticket"]
    return found


def websocket(server: ServerProcess, query: str = "", **options: Any) -> Any:
    url = server.wombat_url.replace("wombat://", "ws://") + "/v1/ws" + query
    return websockets.connect(url, open_timeout=60, **options)


async def test_a_ticket_opens_one_websocket_with_the_rights_of_its_token(
    server: ServerProcess,
) -> None:
    shown = f"?ticket={ticket(server, roles=None, headrace=['publish,create:mine/*'])}"
    async with websocket(server, shown) as connection:
        await publish(connection, "mine/a")
        assert "ack" in msgpack.unpackb(await connection.recv())
        await publish(connection, "other")
        with pytest.raises(websockets.ConnectionClosed, match="no grant for publish"):
            await drain(connection)
    with pytest.raises(websockets.InvalidStatus, match="401"):
        async with websocket(server, shown):
            pass


async def test_a_subprotocol_may_hold_a_token_and_is_never_repeated(server: ServerProcess) -> None:
    held = base64.urlsafe_b64encode(token().encode()).decode().rstrip("=")
    offered = ["wombat", f"headrace.token.{held}"]
    async with websocket(server, subprotocols=offered) as connection:
        assert connection.subprotocol == "wombat"
        await publish(connection, "t")
        assert "ack" in msgpack.unpackb(await connection.recv())
    for wrong in (held[:-8], "", "%", base64.urlsafe_b64encode(b"\xff").decode().rstrip("=")):
        with pytest.raises(websockets.InvalidStatus, match="401"):
            async with websocket(
                server,
                additional_headers={"Sec-WebSocket-Protocol": f"wombat, headrace.token.{wrong}"},
            ):
                pass


async def test_credentials_are_shown_in_one_way_only(server: ServerProcess) -> None:
    headers = {"Authorization": f"Bearer {token()}"}
    with pytest.raises(websockets.InvalidStatus, match="400"):
        async with websocket(server, f"?ticket={ticket(server)}", additional_headers=headers):
            pass
    async with websocket(server, additional_headers=headers) as connection:
        await publish(connection, "t")
        assert "ack" in msgpack.unpackb(await connection.recv())


def test_only_credentials_get_a_ticket(server: ServerProcess) -> None:
    assert ask(server, "POST", "/v1/tickets", None)[0] == 401
    assert ask(server, "POST", "/v1/tickets", token(-1.0))[0] == 401
    assert ask(server, "GET", "/v1/tickets", token())[0] == 405


async def publish(connection: Any, topic: str) -> None:
    fields = {"topic": topic, "message": b"x", "sequence_number": 0}
    await connection.send(msgpack.packb({"type": 3, "publish": fields}))


async def drain(connection: Any) -> None:
    while True:
        await connection.recv()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_server_with_a_wrong_file_of_keys_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "keys.pem").write_text("hello")
    with pytest.raises(Exception, match=r"access\.jwt\.key_file: .*neither PEM nor a JWKS"):
        ServerProcess(tmp_path / "data", "--set", f"access.jwt.key_file={tmp_path}/keys.pem")
