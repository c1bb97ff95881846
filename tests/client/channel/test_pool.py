"""Many channels over one connection, and channels that begin with the state, against a real server."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

import headrace
from headrace.channels import Channel, Connection, Snapshot
from headrace.client import ConnectionState
from headrace.errors import (
    ChannelRefusedError,
    ClientClosedError,
    ConfigError,
    ConnectTimeoutError,
    LocalProtocolError,
    ReplacedError,
)
from headrace.model import CHANNEL_PREFIX
from headrace.testing import ServerProcess

WAIT_S = 30
CONFIG = f"""
[[topics]]
prefix = "{CHANNEL_PREFIX}map/"
reducer = "map"
"""

_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("many")
    (directory / "config.toml").write_text(CONFIG)
    with ServerProcess(directory / "data", f"--config={directory / 'config.toml'}") as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture
def name() -> str:
    """Name of a channel that no other test uses."""
    return f"map/{next(_numbers)}"


def url(server: ServerProcess) -> str:
    return server.wombat_url.replace("wombat://", "channel://")


def connect(server: ServerProcess, processor: str, **options: Any) -> Connection:
    options = {"backoff": lambda attempt: 0.05, **options}
    return headrace.channels.connect(url(server), processor=processor, **options)


def item(key: str, value: object = True) -> dict[str, object]:
    return {"key": key, "value": value}


async def take(channel: Channel, number: int) -> list[Any]:
    async with asyncio.timeout(WAIT_S):
        return [(await anext(channel)).content for _ in range(number)]


async def test_one_connection_serves_many_channels(server: ServerProcess, name: str) -> None:
    async with connect(server, "a") as a, connect(server, "b") as b:
        rooms = [(await a.join(f"{name}/{n}"), await b.join(f"{name}/{n}")) for n in range(5)]
        for n, (room, _) in enumerate(rooms):
            await room.send(item("x", n))
        for n, (_, room) in enumerate(rooms):
            assert await take(room, 1) == [item("x", n)]
        assert {room.state for pair in rooms for room in pair} == {ConnectionState.CONNECTED}
    assert a.state is ConnectionState.CLOSED
    with pytest.raises(ClientClosedError):
        await a.join("another")


async def test_the_state_comes_first_then_every_message_own_ones_too(
    server: ServerProcess, name: str
) -> None:
    seen: list[Any] = []
    async with connect(server, "a") as a:
        room = await a.join(name)
        await room.send(item("one"))
        await room.send(item("two"))
    async with connect(server, "a", start_at="state", restore=seen.append) as a:
        room = await a.join(name)
        [state] = seen
        assert isinstance(state, Snapshot)
        assert state.payload == {"one": True, "two": True}
        await room.send(item("three"))
        assert await take(room, 1) == [item("three")]
        now = await room.snapshot()
        assert now is not None and set(now.payload) == {"one", "two", "three"}


async def test_a_page_goes_on_where_it_was_when_the_server_is_killed(tmp_path: Path) -> None:
    states: list[Any] = []
    with ServerProcess(tmp_path / "data") as server:
        async with (
            connect(server, "a", start_at="state", restore=states.append) as a,
            connect(server, "b") as b,
        ):
            room, other = await a.join("room"), await b.join("room")
            await room.send("one")
            assert await take(room, 1) == ["one"]
            server.kill()
            other.send_nowait("two")
            room.send_nowait("three")
            server.start()
            assert sorted(await take(room, 2)) == ["three", "two"]
        assert [state.payload for state in states] == [None]


@pytest.mark.parametrize(("flush_s", "cuts_off"), [(None, False), (1.0, False), (0, True)])
async def test_only_a_close_without_patience_cuts_off_what_is_being_written(
    server: ServerProcess, name: str, monkeypatch: pytest.MonkeyPatch, flush_s: Any, cuts_off: bool
) -> None:
    connection = await connect(server, "a", flush_timeout_s=0)
    stop, given = connection._stop, []
    monkeypatch.setattr(connection, "_stop", lambda abort: (given.append(abort), stop(abort))[1])
    await connection.join(name)
    await connection.close(flush_s)
    assert given == [cuts_off]


async def test_a_channel_that_is_closed_leaves_the_others_and_can_be_joined_again(
    server: ServerProcess, name: str
) -> None:
    async with connect(server, "a") as a, connect(server, "b") as b:
        first, second = await a.join(f"{name}/1"), await a.join(f"{name}/2")
        with pytest.raises(LocalProtocolError, match="joined already"):
            await a.join(f"{name}/1")
        other = await b.join(f"{name}/1")
        await first.close()
        assert (first.state, second.state) == (ConnectionState.CLOSED, ConnectionState.CONNECTED)
        await other.send(item("kept"))
        again = await a.join(f"{name}/1", start_at="state")
        assert again.restored is not None and again.restored.payload == {"kept": True}
        await again.leave()
        assert await a.join(f"{name}/1") is not again
        await second.send(item("x"))


async def test_what_ends_one_channel_does_not_end_the_others(
    server: ServerProcess, name: str
) -> None:
    async with connect(server, "a") as a:
        first, second = await a.join(f"{name}/1"), await a.join(f"{name}/2")
        async with headrace.channels.join(f"{url(server)}/{name}/1", processor="a"):
            with pytest.raises(ReplacedError):
                await take(first, 1)
        await second.send(item("x"))
        answer = httpx.delete(f"{server.http_url}/v1/channel", params={"name": f"{name}/2"})
        assert answer.json()["members"] == 1
        with pytest.raises(ChannelRefusedError) as refused:
            await take(second, 1)
        assert refused.value.code == "destroyed"
        await (await a.join(f"{name}/2")).send(item("y"))


async def test_a_lease_ends_the_membership(server: ServerProcess, name: str) -> None:
    async with connect(server, "a", lease_s=1) as a:
        await a.join(name)
    told = httpx.get(f"{server.http_url}/v1/channel", params={"name": name}).json()
    [member] = told["members"]
    assert member["leased_until_ms"] - told["now_ms"] <= 1000


async def test_wrong_names_and_options_are_refused(server: ServerProcess) -> None:
    with pytest.raises(ConfigError, match="to `join` instead"):
        headrace.channels.connect(f"{url(server)}/room", processor="a")
    for options in ({"lease_s": 0.5}, {"lease_s": "x"}, {"start_at": "end"}):
        with pytest.raises(ConfigError):
            headrace.channels.connect(url(server), processor="a", **options)  # type: ignore[arg-type]
    closed = connect(server, "a")
    with pytest.raises(LocalProtocolError, match="enter the connection first"):
        await closed.join("room")
    async with connect(server, "a") as a:
        with pytest.raises(ConfigError):
            await a.join("")
        with pytest.raises(TypeError, match="token is not an option"):
            await a.join("room", token="x")  # type: ignore[call-arg]
    with pytest.raises(ConnectTimeoutError):
        async with headrace.channels.connect(
            "channel://127.0.0.1:1", processor="a", connect_timeout_s=0.1
        ):
            pass


def test_without_asyncio(server: ServerProcess, name: str) -> None:
    with headrace.channels.connect_blocking(url(server), processor="script") as connection:
        room, other = connection.join(f"{name}/1", start_at="state"), connection.join(f"{name}/2")
        room.send(item("x"))
        message = room.take(WAIT_S)
        assert message is not None and message.content == item("x")
        room.close()
        other.send(item("y"))
        assert other.state is ConnectionState.CONNECTED
    assert connection.state is ConnectionState.CLOSED
