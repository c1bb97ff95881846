"""Channels in Python against a real server, which is killed, stopped and started meanwhile."""

import asyncio
import hashlib
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

import headrace
from headrace.channels import BlockingChannel, Channel, Message, Missed, Snapshot
from headrace.client import ConnectionState
from headrace.errors import (
    ChannelRefusedError,
    ClientClosedError,
    ConfigError,
    ConnectTimeoutError,
    LeftError,
    LocalProtocolError,
    PayloadTooLargeError,
    QueueFullError,
    RefusedError,
    ReplacedError,
    UnacknowledgedError,
)
from headrace.payload.channel import BadMessageError
from headrace.testing import ServerProcess
from tests.client.tls import Certificate, tls_proxy
from tests.fakes.raw_server import raw_server

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]

WAIT_S = 30
TOKEN, SHORT_TOKEN = "for all", "for some"
CONFIG = """
[[topics]]
prefix = "$channel/short/"
grace_s = 0.05
reducer = "merge"
[[topics]]
prefix = "$channel/map/"
reducer = "map"
[[topics]]
prefix = "$channel/uploaded/"
reducer = "uploaded"
"""
TOKENS = f"""
[[access.token]]
name = "all"
sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
[[access.token]]
name = "some"
sha256 = "{hashlib.sha256(SHORT_TOKEN.encode()).hexdigest()}"
grants = ["$channel/mine/"]
"""
WAYS = pytest.mark.parametrize("receive", ["push", "signal", "poll"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("channels")
    (directory / "config.toml").write_text(CONFIG)
    with ServerProcess(directory / "data", f"--config={directory / 'config.toml'}") as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may kill."""
    with ServerProcess(tmp_path / "data") as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


_numbers = count()


def url_of(server: ServerProcess, name: str = "") -> str:
    """Return the URL of a channel that no other test uses."""
    address = server.wombat_url.replace("wombat://", "channel://")
    return f"{address}/{name}{next(_numbers)}"


def join(url: str, processor: str, **options: Any) -> Channel:
    options = {"backoff": lambda attempt: 0.05, "poll_interval_s": 0.02, **options}
    return headrace.channels.join(url, processor=processor, **options)


async def take(channel: Channel, count: int) -> list[Any]:
    async with asyncio.timeout(WAIT_S):
        return [(await anext(channel)).content for _ in range(count)]


async def nothing_comes(channel: Channel) -> None:
    """Check that nothing arrives before a message that is sent now."""
    async with join(channel.url, "herald") as herald:
        await herald.send("nothing before this")
        assert await take(channel, 1) == ["nothing before this"]


# Sending and receiving


@WAYS
async def test_messages_go_to_all_others_in_one_order(shared: ServerProcess, receive: Any) -> None:
    url = url_of(shared)
    async with join(url, "a") as a, join(url, "b", receive=receive) as b:
        first = await a.send({"insert": "x"})
        second = await a.send(b"\x00bytes")
        one, two = [await anext(b) for _ in range(2)]
        assert (one.payload, one.bytes, one.content) == ({"insert": "x"}, None, {"insert": "x"})
        assert (two.payload, two.bytes, two.content) == (None, b"\x00bytes", b"\x00bytes")
        assert [(m.processor, m.number, m.next_offset) for m in (one, two)] == [
            ("a", 1, first),
            ("a", 2, second),
        ]
        assert one.ms > 1_600_000_000_000
        await b.send("from b")
        assert await take(a, 1) == ["from b"]


@WAYS
async def test_many_messages_are_pipelined(shared: ServerProcess, receive: Any) -> None:
    url = url_of(shared)
    async with join(url, "a") as a, join(url, "b", receive=receive) as b:
        futures = [a.send_nowait(number) for number in range(3000)]
        await a.flush()
        assert a.unacknowledged == 0
        offsets = [future.result() for future in futures]
        assert offsets == sorted(set(offsets))  # type: ignore[type-var]
        assert await take(b, 3000) == list(range(3000))


@WAYS
async def test_a_slow_reader_gets_everything(shared: ServerProcess, receive: Any) -> None:
    url = url_of(shared)
    async with join(url, "a") as a, join(url, "b", receive=receive) as b:
        for number in range(2500):
            a.send_nowait([number, "x" * 500])
        await a.flush()
        got = []
        async with asyncio.timeout(WAIT_S):
            async for message in b:
                got.append(message.payload[0])
                if len(got) % 250 == 0:
                    await asyncio.sleep(0.01)
                if len(got) == 2500:
                    break
        assert got == list(range(2500))


@WAYS
async def test_a_message_is_done_with_when_the_next_is_asked_for(
    shared: ServerProcess, receive: Any
) -> None:
    url = url_of(shared)
    async with join(url, "a") as a:
        async with join(url, "b", receive=receive):
            for content in "xyz":
                await a.send(content)
        with suppress(ZeroDivisionError):
            async with join(url, "b", receive=receive) as b:
                async for message in b:
                    if message.content == "y":
                        await b.snapshot()  # the answer comes after the acknowledgement of "x"
                        raise ZeroDivisionError
        async with join(url, "b", receive=receive) as b:
            assert await take(b, 2) == ["y", "z"]
        async with join(url, "b", receive=receive) as b:
            await nothing_comes(b)


async def test_without_auto_ack_the_application_says_when(shared: ServerProcess) -> None:
    url = url_of(shared)
    async with join(url, "a") as a:
        async with join(url, "b", auto_ack=False) as b:
            for content in "xyz":
                await a.send(content)
            assert await take(b, 3) == list("xyz")
        async with join(url, "b", auto_ack=False) as b:
            assert (await anext(b)).content == "x"
            y = await anext(b)
            await y.ack()
            await b.ack(y)
            with pytest.raises(LocalProtocolError, match="has not delivered"):
                await b.ack(10_000)
        async with join(url, "b", auto_ack=False) as b:
            z = await anext(b)
            assert z.content == "z"
            await b.ack(z)
        async with join(url, "b") as b:
            await nothing_comes(b)


async def test_cancelling_loses_nothing(shared: ServerProcess) -> None:
    url = url_of(shared)
    async with join(url, "a") as a, join(url, "b") as b:
        for number in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(b)
            await a.send(number)
            assert await take(b, 1) == [number]


async def test_one_task_at_a_time_takes_messages(shared: ServerProcess) -> None:
    async with join(url_of(shared), "b") as b:
        waiting = asyncio.ensure_future(anext(b))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError, match="one task"):
            await anext(b)
        waiting.cancel()


async def test_what_cannot_be_sent_is_refused_at_once(shared: ServerProcess) -> None:
    async with join(url_of(shared), "a") as a:
        with pytest.raises(BadMessageError, match="JSON"):
            await a.send({"a": {1, 2}})
        with pytest.raises(PayloadTooLargeError):
            a.send_nowait(bytes(300_000))
        assert await a.send(bytes(262_000)) == 262_000 + 4 + 1 + 2 + 1 + 5


async def test_what_the_reducer_refuses_is_told_and_holds_nothing_up(
    shared: ServerProcess,
) -> None:
    url = url_of(shared, "map/")
    async with join(url, "a") as a, join(url, "b") as b:
        good = [a.send_nowait({"key": "k", "value": number}) for number in range(3)]
        bad = a.send_nowait({"no": "key"})
        more = [a.send_nowait({"key": "k", "value": number}) for number in range(3, 6)]
        with pytest.raises(ChannelRefusedError) as refused:
            await bad
        assert refused.value.code == "cannot-fold"
        await asyncio.gather(*good, *more)
        assert [one["value"] for one in await take(b, 6)] == list(range(6))


# Connections


async def test_a_server_that_is_killed_costs_nothing(own: ServerProcess) -> None:
    url = url_of(own)
    async with join(url, "a") as a, join(url, "b") as b:
        got: list[int] = []

        async def receive() -> None:
            async for message in b:
                got.append(message.payload)
                if len(got) == 1200:
                    await message.ack()
                    return

        receiving = asyncio.ensure_future(receive())
        for life in range(3):
            futures = [a.send_nowait(life * 400 + number) for number in range(400)]
            await futures[100]
            own.kill()
            own.restart()
        async with asyncio.timeout(WAIT_S):
            await a.flush()
            await receiving
        assert got == list(range(1200))
    async with join(url, "b") as b:
        await nothing_comes(b)


async def test_what_is_sent_offline_is_queued(own: ServerProcess, until: Until) -> None:
    url = url_of(own)
    async with join(url, "a", queue_max=5) as a, join(url, "b") as b:
        await a.send(0)
        own.kill()
        await until(lambda: a.state is not ConnectionState.CONNECTED)
        futures = [a.send_nowait(number) for number in range(1, 6)]
        with pytest.raises(QueueFullError, match="5 messages"):
            a.send_nowait(6)
        waiting = asyncio.ensure_future(a.send(6))
        own.restart()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*futures)
            assert isinstance(await waiting, int)
        assert await take(b, 7) == list(range(7))


async def test_it_may_begin_offline(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        url = url_of(server)
        server.kill()
        with pytest.raises(ConnectTimeoutError, match="was not joined"):
            await join(url, "a", connect_timeout_s=0.2)
        async with join(url, "a", connect_timeout_s=None) as a:
            sent = a.send_nowait("x")
            server.restart()
            async with asyncio.timeout(WAIT_S):
                assert await sent is not None
                await a.connected()


async def test_a_dead_connection_is_noticed(own: ServerProcess, until: Until) -> None:
    url = url_of(own)
    async with join(url, "a", ping_interval_s=0.1) as a:
        await until(lambda: a.latency_s is not None)
        own.signal(signal.SIGSTOP)
        try:
            await until(lambda: "unanswered" in a.last_error)
            sent = a.send_nowait("x")
        finally:
            own.signal(signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            await sent
        await until(lambda: a.last_error == "")


async def test_states_are_told(own: ServerProcess, until: Until) -> None:
    told: list[str] = []
    channel = join(url_of(own), "a")
    channel.on("state", told.append)
    async with channel:
        own.kill()
        await until(lambda: channel.last_error != "")
    assert told[:3] == ["connecting", "connected", "disconnected"]
    assert told[-1] == "closed"


async def test_closing_says_how_many_messages_may_be_lost(own: ServerProcess) -> None:
    a = await join(url_of(own), "a", flush_timeout_s=0.1)
    own.kill()
    sent = [a.send_nowait(number) for number in range(3)]
    with pytest.raises(UnacknowledgedError, match="3"):
        await a.close()
    for one in sent:
        with pytest.raises(ClientClosedError):
            one.result()
    with pytest.raises(ClientClosedError):
        await a.send("x")
    await a.close()


async def test_another_client_of_the_same_name_replaces_it(
    shared: ServerProcess, until: Until
) -> None:
    url = url_of(shared)
    async with join(url, "a") as first:
        waiting = asyncio.ensure_future(anext(first))
        async with join(url, "a") as second, join(url, "b") as b:
            with pytest.raises(ReplacedError, match="name of its own"):
                await waiting
            with pytest.raises(ReplacedError):
                await first.send("x")
            await until(lambda: first.state is ConnectionState.REFUSED)
            await b.send("to the second")
            assert await take(second, 1) == ["to the second"]


@WAYS
async def test_who_is_made_to_leave_elsewhere_is_told(
    shared: ServerProcess, until: Until, receive: Any
) -> None:
    url = url_of(shared)
    async with join(url, "a", receive=receive) as a:
        waiting = asyncio.ensure_future(anext(a))
        async with httpx.AsyncClient(base_url=shared.http_url) as http:
            query = {"name": a.name, "processor": "a"}
            assert (await http.post("/v1/channel/leave", params=query)).is_success
        with pytest.raises(LeftError, match="over HTTP or on another connection"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(LeftError):
            await a.send("x")
        await until(lambda: a.state is ConnectionState.REFUSED)
    async with join(url, "a") as again:
        assert await again.send("x") > 0


async def test_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(TOKENS)
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'tokens.toml'}") as server:
        url, mine = url_of(server), url_of(server, "mine/")
        for token in (None, "wrong", {"token": 1}):
            with pytest.raises(RefusedError) as refused:
                await join(url, "a", token=token)
            assert refused.value.kind == "auth"
        with pytest.raises(ChannelRefusedError) as forbidden:
            await join(url, "a", token=SHORT_TOKEN)
        assert forbidden.value.code == "forbidden"
        for there, token in ((url, TOKEN), (mine, TOKEN), (mine, {"token": SHORT_TOKEN})):
            async with join(there, "a", token=token) as a:
                await a.send("x")


async def test_tls(shared: ServerProcess, tmp_path: Path) -> None:
    certificate = Certificate.make(tmp_path)
    async with tls_proxy(certificate, *shared.ws) as tls_port:
        url = f"channels://localhost:{tls_port}/tls/{next(_numbers)}"
        trusted = certificate.trusted()
        async with join(url, "a", ssl=trusted) as a, join(url, "b", ssl=trusted) as b:
            await a.send("x")
            assert await take(b, 1) == ["x"]


# The last known state


async def destroyed(server: ServerProcess, url: str) -> None:
    """Wait until the log of a channel is destroyed."""
    name = url.split("/", 3)[3]
    async with httpx.AsyncClient(base_url=server.http_url) as http, asyncio.timeout(WAIT_S):
        while True:
            answer = await http.get("/v1/topics", params={"prefix": f"$channel/{name}"})
            if not answer.json()["topics"]:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_state_is_restored_after_the_log_was_destroyed(
    shared: ServerProcess, is_async: bool
) -> None:
    url = url_of(shared, "short/")
    async with join(url, "a") as a, join(url, "b") as b:
        await a.send({"x": 1})
        assert await take(b, 1) == [{"x": 1}]
    async with join(url, "a") as a:
        await a.send({"y": 2})
    await destroyed(shared, url)
    seen: list[Any] = []

    async def restore_async(snapshot: Snapshot) -> None:
        await asyncio.sleep(0)
        seen.append(snapshot)

    restore = restore_async if is_async else seen.append
    b = join(url, "b", restore=restore)
    b.on("missed", seen.append)
    async with join(url, "a") as a, b:
        await a.send({"z": 3})
        assert await take(b, 1) == [{"z": 3}]
        missed, snapshot = seen
        assert missed == snapshot.missed == Missed(1, "destroyed")
        assert (snapshot.payload, b.restored) == ({"x": 1, "y": 2}, snapshot)
    async with join(url, "b", restore=restore):
        pass
    assert len(seen) == 2, "it was acknowledged"


async def test_a_restore_that_fails_is_called_again(shared: ServerProcess) -> None:
    url = url_of(shared, "short/")
    async with join(url, "a") as a:
        await a.send({"x": 1})
    await destroyed(shared, url)

    def fail(snapshot: Snapshot) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await join(url, "b", restore=fail)
    seen: list[Snapshot] = []
    async with join(url, "b", restore=seen.append):
        assert [(one.payload, one.missed) for one in seen] == [({"x": 1}, None)]


async def test_without_a_function_the_state_can_be_looked_at(shared: ServerProcess) -> None:
    url = url_of(shared, "short/")
    async with join(url, "a") as a:
        await a.send({"x": 1})
    await destroyed(shared, url)
    for _ in range(2):
        b = await join(url, "b")
        assert b.restored is not None and b.restored.payload == {"x": 1}
        await b.close()  # not acknowledged, so it comes again
    async with join(url, "b") as b:
        assert b.restored is not None
    async with join(url, "b") as b:
        assert b.restored is None, "whoever leaves the block without an error is done with it"


async def test_a_state_is_restored_on_a_connection_in_between(
    shared: ServerProcess, until: Until
) -> None:
    url = url_of(shared, "short/")
    seen: list[Any] = []
    proxy = Proxy(*shared.ws)
    async with raw_server(proxy.serve) as port:
        through = f"channel://127.0.0.1:{port}/{url.split('/', 3)[3]}"
        b = await join(through, "b", restore=lambda snapshot: seen.append(snapshot.payload))
        async with join(url, "a") as a:
            await a.send({"x": 1})
            assert await take(b, 1) == [{"x": 1}]
            proxy.stop()
            await until(lambda: b.state is not ConnectionState.CONNECTED)
            await a.send({"y": 2})
        await destroyed(shared, url)
        proxy.go_on()
        async with join(url, "a") as a, asyncio.timeout(WAIT_S):
            await a.send({"z": 3})
            seen.append((await anext(b)).payload)
        assert seen == [{"x": 1, "y": 2}, {"z": 3}]
        await b.close()


async def test_snapshots_are_asked_for_and_uploaded(shared: ServerProcess) -> None:
    url = url_of(shared, "uploaded/")
    async with join(url, "a") as a:
        assert await a.snapshot() is None
        offset = await a.send("x")
        assert offset is not None
        assert await a.upload({"all": ["x"]}, offset) == offset
        snapshot = await a.snapshot()
        assert snapshot is not None
        assert (snapshot.payload, snapshot.offset) == ({"all": ["x"]}, offset)
        assert await a.upload(b"\x01", offset) == offset
        with pytest.raises(ChannelRefusedError) as refused:
            await a.upload("x", offset + 1)
        assert refused.value.code == "bad-offset"
        with pytest.raises(LocalProtocolError):
            await a.upload("x", -1)
    async with join(url_of(shared), "a") as a:
        offset = await a.send("x")
        assert offset is not None
        with pytest.raises(ChannelRefusedError) as refused:
            await a.upload("x", offset)
        assert refused.value.code == "not-uploaded"


# Ends


async def test_leaving_ends_the_membership(shared: ServerProcess) -> None:
    url = url_of(shared)
    async with join(url, "a") as a, join(url, "b") as b:
        await a.send("x")
        waiting = asyncio.ensure_future(anext(b, None))
        assert (await waiting) is not None
        b.send_nowait("goodbye")
        await b.leave()
        assert await anext(b, None) is None
        with pytest.raises(ClientClosedError, match="left"):
            await b.send("y")
        assert await take(a, 1) == ["goodbye"]
        async with httpx.AsyncClient(base_url=shared.http_url) as http:
            told = (await http.get("/v1/channels", params={"prefix": a.name})).json()
        [channel] = told["channels"]
        members = {one["processor"] for one in channel["members"]}
        assert members == {"a"}


async def test_closing_ends_an_iteration(shared: ServerProcess) -> None:
    b = await join(url_of(shared), "b")
    waiting = asyncio.ensure_future(anext(b, None))
    await asyncio.sleep(0)
    await b.close()
    assert await waiting is None
    with pytest.raises(ClientClosedError):
        await b


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "the server remembers"),
        ({"processor": ""}, "must not be empty"),
        ({"processor": "x" * 256}, "255 bytes"),
        ({"processor": "a", "receive": "pull"}, "push, signal or poll"),
        ({"processor": "a", "restore": 1}, "restore must be a function"),
        ({"processor": "a", "queue_max": 0}, "queue_max must be above 0"),
        ({"processor": "a", "token": {1}}, "token must be"),
        ({"processor": "a", "ssl": True}, "ssl.SSLContext"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        headrace.channels.join("channel://localhost/doc/1", **options)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("wombat://localhost/doc", "channel://"),
        ("channel://localhost", "names no channel"),
        ("channel://localhost/", "names no channel"),
        (f"channel://localhost/{'x' * 250}", "names no channel"),
        ("channel://localhost/%ff", "names no channel"),
        ("channel://localhost/doc?x=1", "more than a host"),
    ],
)
def test_addresses_that_cannot_be_meant(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        headrace.channels.join(url, processor="a")


async def test_names_may_have_anything_in_them(shared: ServerProcess) -> None:
    address = url_of(shared)
    async with join(f"{address}/a%3Fb%23c%20%C3%A9", "é") as a:
        assert a.name.endswith("/a?b#c é")
        await a.send("x")


# The blocking client


def join_blocking(url: str, processor: str, **options: Any) -> BlockingChannel:
    return headrace.channels.join_blocking(url, processor=processor, **options)


@WAYS
def test_blocking(shared: ServerProcess, receive: Any) -> None:
    url = url_of(shared)
    with (
        join_blocking(url, "a") as a,
        join_blocking(url, "b", receive=receive, poll_interval_s=0.02) as b,
    ):
        assert a.snapshot() is None
        offset = a.send({"n": 0})
        futures = [a.send_nowait({"n": number}) for number in range(1, 100)]
        a.flush(WAIT_S)
        assert offset is not None and futures[-1].result(WAIT_S) is not None
        got = []
        for message in b:
            assert isinstance(message, Message)
            got.append(message.payload["n"])
            if len(got) == 100:
                break
        assert got == list(range(100))
        assert list(b.messages(timeout_s=0.05)) == []
        with pytest.raises(TimeoutError):
            b.take(0.01)
        assert a.unacknowledged == 0 and a.state is ConnectionState.CONNECTED
    assert b.take() is None
    with pytest.raises(ClientClosedError):
        a.send("x")
    with join_blocking(url, "b") as b:
        assert list(b.messages(timeout_s=0.1)) == [], "all was acknowledged"
        b.leave()


def test_blocking_restores(shared: ServerProcess) -> None:
    url = url_of(shared, "short/")
    with join_blocking(url, "a") as a:
        a.send({"x": 1})
    asyncio.run(destroyed(shared, url))
    seen: list[Any] = []

    def restore(snapshot: Snapshot) -> None:
        seen.append(snapshot.payload)

    with join_blocking(url, "b", restore=restore, auto_ack=False) as b:
        assert seen == [{"x": 1}]
        with join_blocking(url, "a") as a:
            a.send({"y": 2})
            message = b.take(WAIT_S)
            assert message is not None and message.payload == {"y": 2}
            b.ack(message, WAIT_S)


def test_blocking_refuses_what_would_never_return(shared: ServerProcess) -> None:
    errors: list[BaseException] = []
    with join_blocking(url_of(shared), "a") as a:

        def handler(state: ConnectionState) -> None:
            try:
                a.send("x")
            except LocalProtocolError as error:
                errors.append(error)

        a.on("state", handler)
    assert errors and "another thread" in str(errors[0])


def test_blocking_tells_what_is_wrong(shared: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the server remembers"):
        headrace.channels.join_blocking("channel://localhost/x")  # type: ignore[call-arg]
    url = url_of(shared)
    with join_blocking(url, "a") as first, join_blocking(url, "a"):
        with pytest.raises(ReplacedError):
            first.take(WAIT_S)
        with pytest.raises(ReplacedError):
            first.send("x")


class Proxy:
    """A proxy between client and server that can be stopped."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """Close all connections, and accept no new ones."""
        self._is_stopped = True
        for writer in self._writers:
            writer.close()

    def go_on(self) -> None:
        self._is_stopped = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_stopped:
            return
        far_reader, far_writer = await asyncio.open_connection(*self._to)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            far_writer.close()
            with suppress(OSError):
                await far_writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()
