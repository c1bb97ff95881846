"""Polling a channel over HTTP: requests that wait, presence of their members, and texts of refusals."""

import asyncio
import hashlib
import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from headrace.access.principals import OPEN
from headrace.broker.channel.channel import Channel
from headrace.broker.channel.member import Batch, OutgoingMessage, Receive
from headrace.errors import ChannelError, StoreFailedError
from headrace.model import CHANNEL_PREFIX
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.server.http.channels import ChannelsApi
from headrace.server.http.gate import Rights
from headrace.server.http.limits import OverLimitError
from headrace.testing import ServerProcess, wait_until
from tests.broker.channel.world import NAME, World
from tests.server.http.open_gate import NO_AUDIT, no_access_control
from tests.server.http.open_limits import open_limits

WAIT_S = 30
WAITING_MAX = 2
RAW = (b"accept", b"application/octet-stream")


class Poll:
    """A waiting request of `b` without a socket; its client may hang up."""

    def __init__(self, api: ChannelsApi, *headers: tuple[bytes, bytes], **query: object) -> None:
        self._hung_up = asyncio.Event()
        self._parts = [{"type": "http.request", "body": b"", "more_body": False}]
        asked = {"name": NAME, "processor": "b", "wait_s": 60} | query
        scope = {"type": "http", "method": "GET", "headers": list(headers)}
        scope["query_string"] = urlencode(asked).encode()
        scope["headrace.rights"] = Rights(no_access_control(), OPEN, NO_AUDIT)  # type: ignore[arg-type]
        self._task = asyncio.create_task(api.poll(Request(scope, self._receive)))

    async def begun(self) -> "Poll":
        """Wait until the request has begun to wait."""
        for _ in range(100):  # iterations, not time: nothing here waits for anything else
            await asyncio.sleep(0)
        assert not self._task.done()
        return self

    def hang_up(self) -> None:
        self._hung_up.set()

    async def answer(self) -> Response:
        return await asyncio.wait_for(self._task, WAIT_S)

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return self._parts.pop()
        await self._hung_up.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def world() -> World:
    world = World()
    for name in "ab":
        world.channel.join(name, None, Receive.POLL, lambda _: None, world.refused)
    world.commit_all()
    return world


@pytest.fixture
def api(world: World) -> ChannelsApi:
    return ChannelsApi(world.channels, open_limits(WAITING_MAX))


def send(world: World, number: int = 1) -> None:
    channel = world.channel
    content = Content(b'{"insert":"x"}', True)
    channel.send(channel.request("a"), number, content, lambda _: None)
    world.commit_all()


async def refusal(asked: Poll) -> tuple[str, str]:
    with pytest.raises(ChannelError) as caught:
        await asked.answer()
    return caught.value.code, str(caught.value)


async def test_a_message_wakes_who_waits(api: ChannelsApi, world: World) -> None:
    waiting = await Poll(api).begun()
    send(world)
    assert b'"count":1' in (await waiting.answer()).body


@pytest.mark.parametrize("look", [1, 2])
async def test_what_comes_while_it_is_looked_is_not_missed(
    api: ChannelsApi, world: World, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    fetch, looks, loop = Channel.fetch, count(1), asyncio.get_running_loop()

    def slow_fetch(self: Channel, member: Any, limit: int, answer: Callable[[Any], None]) -> None:
        """Delay the answer, as when the log is on a disk. Meanwhile a message arrives."""
        fetch(self, member, limit, lambda batch: loop.call_later(0.01, answer, batch))
        if next(looks) == look:
            send(world)

    monkeypatch.setattr(Channel, "fetch", slow_fetch)
    assert b'"count":1' in (await Poll(api).answer()).body


async def test_who_hangs_up_frees_its_place_at_once(
    api: ChannelsApi,
) -> None:
    first, second = await Poll(api).begun(), await Poll(api).begun()
    with pytest.raises(OverLimitError, match="waiting_max is reached: ask again") as caught:
        await Poll(api).answer()
    assert caught.value.headers == {"Retry-After": "1"}
    first.hang_up()
    await first.answer()
    third = await Poll(api).begun()
    for one in (second, third):
        one.hang_up()
        await one.answer()


async def test_who_need_not_wait_takes_no_place(api: ChannelsApi, world: World) -> None:
    waiting = [await Poll(api).begun() for _ in range(WAITING_MAX)]
    assert (await Poll(api, wait_s=0).answer()).status_code == 200
    send(world)
    assert (await Poll(api).answer()).status_code == 200
    for one in waiting:
        await one.answer()


async def test_a_log_that_has_failed_may_be_asked_again(
    api: ChannelsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFailedError("the disk is gone")

    monkeypatch.setattr(Channel, "fetch", fail)
    assert await refusal(Poll(api)) == ("unavailable", "the disk is gone")


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("has_message", [False, True])
async def test_a_raw_answer_says_what_was_lost(
    api: ChannelsApi, monkeypatch: pytest.MonkeyPatch, lost: int, has_message: bool
) -> None:
    payload = encode_message(StoredMessage("é x", 7, Content(b"raw", False)))
    messages = [OutgoingMessage(40, 1, payload)] if has_message else []

    def fetch(self: Channel, member: Any, limit: int, answer: Callable[[Any], None]) -> None:
        answer(Batch(NAME, messages, more=False, lost=lost))

    monkeypatch.setattr(Channel, "fetch", fetch)
    answer = await Poll(api, RAW, wait_s=0).answer()
    assert answer.headers.get("headrace-lost") == ("3" if lost else None)
    assert (answer.status_code, answer.body) == ((200, b"raw") if has_message else (204, b""))
    if has_message:
        assert answer.headers["headrace-processor"] == "%C3%A9%20x"


# A real server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ("--set=channels.presence_s=0.6", "--set=channels.grace_s=100")
    with ServerProcess(tmp_path / "data", *settings) as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


def is_there(server: ServerProcess) -> bool:
    told = httpx.get(f"{server.http_url}/v1/channel", params={"name": "c"}).json()
    return bool(told["members"][0]["present"])


def test_a_member_is_there_while_its_request_waits_and_no_longer(server: ServerProcess) -> None:
    query = {"name": "c", "processor": "p"}
    httpx.post(f"{server.http_url}/v1/channel/join", params=query)
    with socket.create_connection(server.http) as client:
        path = "/v1/channel/messages?" + urlencode(query | {"wait_s": 60})
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        client.settimeout(0.1)
        for _ in range(20):  # longer than its presence would last without the request
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert is_there(server)
    # The client has hung up, so nothing keeps the member present.
    wait_until(lambda: not is_there(server), 30, "the end of its presence")


def test_what_is_not_there_is_told_with_a_code(server: ServerProcess) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/keep"), ("GET", "/snapshot")):
        answer = httpx.request(method, f"{server.http_url}/v1/channel{path}?name=nope")
        assert answer.status_code == 404
        told = answer.json()
        assert (told["code"], told["retry"], bool(told["error"])) == ("not-found", False, True)


def test_who_polls_gets_the_state_then_every_message_behind_it(server: ServerProcess) -> None:
    query = {"name": "c", "processor": "p"}

    def ask(method: str, path: str, **given: Any) -> tuple[int, Any]:
        body = {"json": given.pop("json")} if "json" in given else {}
        url = f"{server.http_url}/v1/channel{path}"
        answer = httpx.request(method, url, params=query | given, **body)
        return answer.status_code, answer.json()

    def texts(told: Any) -> list[Any]:
        return [one["payload"] for one in told["messages"]]

    _, joined = ask("POST", "/join", **{"from": "state", "lease_s": 60})
    assert (joined["snapshot"]["payload"], joined["lease_s"]) == (None, 60)
    for number in (1, 2):
        _, sent = ask("POST", "/messages", number=number, json=number)
    _, told = ask("GET", "/messages", **{"from": joined["snapshot"]["offset"]})
    assert texts(told) == [1, 2], "its own"
    first = told["messages"][0]["offset"]
    _, told = ask("GET", "/messages", **{"from": first})
    assert texts(told) == [2]
    _, told = ask("GET", "/messages", **{"from": sent["offset"]})
    assert texts(told) == []
    _, told = ask("GET", "/messages")
    assert texts(told) == [], "not pending for it, as ever"
    _, joined = ask("POST", "/join", **{"from": "state"})
    assert (joined["snapshot"]["payload"], joined["snapshot"]["offset"]) == (2, sent["offset"])
    _, joined = ask("POST", "/join", **{"from": first})
    assert "snapshot" not in joined
    assert ask("GET", "/messages", **{"from": first - 1})[1]["code"] == "bad-offset"
    for wrong in ({"from": "end"}, {"from": -1}, {"lease_s": 0.5}, {"lease_s": "nan"}):
        status, refused = ask("POST", "/join", **wrong)
        assert (status, refused["code"]) == (400, "bad-message")


def test_a_channel_is_destroyed_by_an_operator_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(entry("job", "http") + entry("peer", CHANNEL_PREFIX))
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as process:

        def ask(method: str, path: str = "", token: str = "job", **query: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            url = f"{process.http_url}/v1/channel{path}"
            return httpx.request(method, url, headers=headers, params={"name": "c"} | query)

        assert ask("POST", "/join", processor="a").is_success
        refused = ask("DELETE", token="peer")
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert ask("DELETE").json() == {"channel": "c", "messages": 0, "members": 1}
        assert ask("GET").status_code == 404


def entry(token: str, grant: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[access.token]]\nname = "{token}"\nsha256 = "{digest}"\ngrants = ["{grant}"]\n'


UPLOADED = '[[topics]]\nprefix = "$channel/up/"\nreducer = "uploaded"\n'


def test_a_job_that_is_no_member_uploads_a_state(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        entry("job", "http") + entry("peer", "$channel/") + UPLOADED
    )
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as process:

        def ask(method: str, path: str, token: str = "job", **given: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            url = f"{process.http_url}/v1/channel/{path}"
            return httpx.request(method, url, headers=headers, **given)

        def told(answer: httpx.Response) -> tuple[int, str]:
            return answer.status_code, answer.json()["code"]

        for name in ("up/1", "other"):
            member = {"name": name, "processor": "a"}
            assert ask("POST", "join", params=member).is_success
            sent = ask("POST", "messages", params=member | {"number": 1}, json=1)
        end = {"offset": sent.json()["offset"]}
        state = {"params": {"name": "up/1", **end}, "json": {"n": 1}}
        assert told(ask("PUT", "snapshot", "peer", **state)) == (403, "forbidden")
        assert ask("PUT", "snapshot", **state).json() == {"channel": "up/1", **end}
        kept = ask("GET", "snapshot", params={"name": "up/1"}).json()["snapshot"]
        assert (kept["offset"], kept["payload"]) == (end["offset"], {"n": 1})
        refused = ask("PUT", "snapshot", params={"name": "other", **end}, json=1)
        assert told(refused) == (409, "not-uploaded")
        assert "has the reducer 'last': the server folds it" in refused.json()["error"]
        nowhere = ask("PUT", "snapshot", params={"name": "up/2", **end}, json=1)
        assert told(nowhere) == (404, "not-found")
        past = {"name": "up/1", "offset": end["offset"] + 1}
        assert told(ask("PUT", "snapshot", params=past, json=1)) == (400, "bad-offset")


def test_a_channel_that_is_gone_is_not_listed_for_a_sender_that_is_remembered(
    tmp_path: Path,
) -> None:
    with (
        ServerProcess(tmp_path / "data") as server,
        httpx.Client(base_url=server.http_url) as client,
    ):
        for name in ("gone", "there"):
            query = {"name": name, "processor": "p"}
            assert client.post("/v1/channel/join", params=query).is_success
            sent = client.post("/v1/channel/messages", params=query | {"number": "1"}, json="x")
            assert sent.status_code == 201
        query = {"name": "gone", "processor": "p"}
        assert client.post("/v1/channel/leave", params=query).is_success
        assert client.delete("/v1/channel", params={"name": "gone"}).is_success
        listed = client.get("/v1/channels").json()
        assert [one["name"] for one in listed["channels"]] == ["there"]
