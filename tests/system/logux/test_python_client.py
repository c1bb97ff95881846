"""Our own client and a real server: offline and back, killed and restarted, accepted or refused."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import headrace
from headrace.client import LogEvents, LoguxClient
from headrace.errors import RefusedError
from headrace.testing import ServerProcess
from tests.system.logux.conftest import logux_url
from tests.system.logux.support import Host

WAIT_S = 30


@pytest.fixture
def address(server: ServerProcess) -> str:
    return address_of(server)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One server for each test, because tests look at everything that it has stored."""
    with ServerProcess(tmp_path / "server") as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def address_of(server: ServerProcess) -> str:
    return server.wombat_url.replace("wombat://", "logux://")


def connect(url: str, store: Path, **options: Any) -> LoguxClient:
    return headrace.connect(url, store=store, **{"backoff": lambda attempt: 0.05, **options})


async def add(log: LoguxClient, *numbers: int) -> None:
    await asyncio.gather(*(log.add({"type": "n", "n": n}) for n in numbers))


async def take(events: LogEvents, count: int) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return [(await anext(events)).event["n"] for _ in range(count)]


async def synced(*logs: LoguxClient) -> None:
    async with asyncio.timeout(WAIT_S):
        for log in logs:
            await log.synced()


async def stored(server: ServerProcess, log: str = "main") -> list[dict[str, Any]]:
    """Return everything in the topic, as any other protocol reads it."""
    topic = f"$logux/{log}"
    async with httpx.AsyncClient(base_url=server.http_url) as http:
        answer = await http.get("/v1/topics", params={"name": topic})
    [end] = [one["end"]["ordinal"] for one in answer.json()["topics"]]
    async with headrace.connect(server.figg_url) as client, asyncio.timeout(WAIT_S):
        subscription = client.subscribe(topic, offset=0)
        return [json.loads((await anext(subscription)).payload) for _ in range(end)]


async def test_two_clients_have_the_same_log(
    server: ServerProcess, address: str, tmp_path: Path
) -> None:
    async with (
        connect(address, tmp_path / "a", host="a") as a,
        connect(address, tmp_path / "b", host="b") as b,
    ):
        await add(a, *range(20))
        await synced(a)
        await add(b, *range(100, 120))
        await synced(b)
        assert await take(a.events(), 40) == [*range(20), *range(100, 120)]
        assert sorted(await take(b.events(), 40)) == [*range(20), *range(100, 120)]
    found = await stored(server)
    assert [one["event"]["n"] for one in found] == [*range(20), *range(100, 120)]
    assert [one["origin"] for one in found] == ["a"] * 20 + ["b"] * 20


async def test_500_events_come_in_order(address: str, tmp_path: Path) -> None:
    async with connect(address, tmp_path / "a") as a, connect(address, tmp_path / "b") as b:
        reading = asyncio.ensure_future(take(b.events(), 500))
        for n in range(500):
            await a.add({"type": "n", "n": n})
        assert await reading == list(range(500))
    async with connect(address, tmp_path / "c") as c:
        assert await take(c.events(), 500) == list(range(500))


async def test_what_happened_while_a_client_was_away_comes_later(
    address: str, tmp_path: Path
) -> None:
    async with connect(address, tmp_path / "a") as a:
        async with connect(address, tmp_path / "b") as b:
            await add(a, 1, 2)
            assert await take(b.events(), 2) == [1, 2]
        await add(a, 3, 4)
        # Nothing listens at this address, so the client is offline.
        async with connect("logux://127.0.0.1:1", tmp_path / "b") as b:
            await add(b, 10, 11)
        async with connect(address, tmp_path / "b") as b:
            await synced(a, b)
            assert await take(b.events(), 6) == [1, 2, 10, 11, 3, 4]
            assert sorted(await take(a.events(), 6)) == [1, 2, 3, 4, 10, 11]


async def test_a_server_that_is_killed_loses_and_doubles_nothing(
    server: ServerProcess, address: str, tmp_path: Path
) -> None:
    async with (
        connect(address, tmp_path / "a", host="a") as a,
        connect(address, tmp_path / "b", host="b") as b,
    ):
        events = b.events()
        n = 0
        for _ in range(3):
            adding = [asyncio.ensure_future(add(log, *range(n, n + 50))) for log in (a,)]
            n += 50
            await take(events, 1)
            await asyncio.to_thread(server.kill)
            await asyncio.gather(*adding)
            await add(b, n + 1000)
            await asyncio.to_thread(server.start)
        await synced(a, b)
        wanted = [*range(150), 1050, 1100, 1150]
        for log in (a, b):
            assert sorted(await take(log.events(), len(wanted))) == wanted
    found = [one["event"]["n"] for one in await stored(server)]
    assert sorted(found) == wanted
    assert [one for one in found if one < 1000] == list(range(150))


KILLED = """
import asyncio, sys
import headrace

async def main():
    async with headrace.connect(sys.argv[1], store=sys.argv[2]) as log:
        first = int(sys.argv[3])
        for n in range(first, first + 1000):
            await log.add({"type": "n", "n": n})
            print(n, flush=True)

asyncio.run(main())
"""


async def test_a_client_that_is_killed_loses_and_doubles_nothing(
    server: ServerProcess, address: str, tmp_path: Path
) -> None:
    told: list[int] = []
    for first in (0, 1000, 2000):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, address, tmp_path / "a", str(first)],
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            told += [int(process.stdout.readline()) for _ in range(60)]
            os.kill(process.pid, signal.SIGKILL)
            told += map(int, process.stdout)
    async with connect(address, tmp_path / "a") as log:
        await synced(log)
    found = [one["event"]["n"] for one in await stored(server)]
    assert len(set(found)) == len(found)
    assert found == sorted(found)
    assert set(told) <= set(found)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServerProcess]:
    sha256 = hashlib.sha256(b"ada's").hexdigest()
    config = f'[[access.token]]\nname = "ada"\nsha256 = "{sha256}"\nuser = "ada"\n'
    (tmp_path / "tokens.toml").write_text(config)
    with ServerProcess(tmp_path / "guarded", f"--config={tmp_path / 'tokens.toml'}") as process:
        yield process


@pytest.mark.parametrize(
    ("host", "token"), [("ada:1", "nope"), ("bob:1", "ada's"), ("ada:1", None)]
)
async def test_with_wrong_credentials_it_stops_and_is_a_log_all_the_same(
    guarded: ServerProcess, tmp_path: Path, host: str, token: str | None
) -> None:
    async with connect(address_of(guarded), tmp_path / "a", host=host, credentials=token) as log:
        with pytest.raises(RefusedError, match="Wrong credentials") as error:
            await asyncio.wait_for(log.connected(), WAIT_S)
        assert error.value.kind == "auth"
        await add(log, 1)
        with pytest.raises(RefusedError):
            await log.synced()
    async with connect(address_of(guarded), tmp_path / "a", host=host, credentials="ada's") as log:
        if host == "ada:1":
            await synced(log)


async def test_logs_are_topics_of_their_own(
    server: ServerProcess, address: str, tmp_path: Path
) -> None:
    for number, log in enumerate(("main", "a/b", "☃"), 1):
        async with connect(f"{address}/{log}", tmp_path / str(number), host="me") as client:
            await add(client, number)
            await synced(client)
        [found] = await stored(server, log)
        assert (found["event"]["n"], found["origin"]) == (number, "me")


async def test_a_filter_of_the_server_hides_events(tmp_path: Path) -> None:
    (tmp_path / "application.py").write_text(
        "def may(what, event, meta, peer):\n"
        "    return what == 'send' or event['n'] % 2 == 0 or meta['origin'] == peer['host']\n"
    )
    flags = ("--set=logux.filter=application:may",)
    environ = {"PYTHONPATH": str(tmp_path)}
    with ServerProcess(tmp_path / "data", *flags, env=environ) as server:
        url = address_of(server)
        async with connect(url, tmp_path / "a") as a, connect(url, tmp_path / "b") as b:
            await add(a, *range(10))
            await synced(a)
            assert await take(b.events(), 5) == [0, 2, 4, 6, 8]
            await add(b, 1001)
            await synced(b)
        async with connect(url, tmp_path / "b") as b:
            await synced(b)
            assert await take(b.events(), 6) == [0, 2, 4, 6, 8, 1001]


async def test_a_client_of_npm_and_ours_understand_each_other(
    npm01: Host, server: ServerProcess, address: str, tmp_path: Path
) -> None:
    npm01.do("make", "x", url=logux_url(server))
    npm01.do("connect", "x")
    async with connect(address, tmp_path / "a") as log:
        await add(log, *range(10))
        events = await asyncio.to_thread(npm01.wait_events, "x", 10)
        assert [one["n"] for one in events] == list(range(10))
        npm01.do("add", "x", events=[{"type": "n", "n": n} for n in range(100, 105)])
        assert await take(log.events(), 15) == [*range(10), *range(100, 105)]


@pytest.mark.parametrize("wanted", ["the server's", "another's"])
async def test_a_server_shows_who_it_is(tmp_path: Path, wanted: str) -> None:
    with ServerProcess(tmp_path / "data", "--set=logux.credentials=the server's") as server:
        asked: list[Any] = []

        def verify(host: Any, credentials: Any) -> bool:
            asked.append((host, credentials))
            return credentials == wanted

        async with connect(address_of(server), tmp_path / "a", verify=verify) as log:
            await add(log, 1)
            if wanted == "the server's":
                await synced(log)
            else:
                with pytest.raises(RefusedError, match="are wrong"):
                    await asyncio.wait_for(log.synced(), WAIT_S)
        assert asked == [("server", "the server's")]
