"""The client against the real server, which is killed meanwhile."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import headrace
from headrace.client import Message, Missed
from headrace.errors import PublishRefusedError
from headrace.testing import ServerProcess
from tests.client.peer import plain
from tests.client.tls import Certificate, tls_proxy

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]

PROTOCOLS = pytest.mark.parametrize("protocol", ["figg", "wombat"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("client") / "data") as server:
        yield server


@pytest.fixture(params=["figg", "wombat"])
def url(shared: ServerProcess, request: pytest.FixtureRequest) -> str:
    return url_of(shared, request.param)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def url_of(server: ServerProcess, protocol: str) -> str:
    return {"figg": server.figg_url, "wombat": server.wombat_url}[protocol]


async def test_offsets_are_byte_positions_and_can_be_resumed_from(url: str, topic: str) -> None:
    async with headrace.connect(url) as client:
        for payload in (b"foo", b"bar", b"car"):
            await client.publish(topic, payload)
        async with client.subscribe(topic, offset=7) as subscription:
            assert plain(await anext(subscription)) == Message(topic, 14, b"bar")
            assert plain(await anext(subscription)) == Message(topic, 21, b"car")
        async with client.subscribe(topic) as subscription:
            assert await subscription.attached() == 21


@pytest.mark.parametrize(
    ("asked", "got"), [(None, 14), (0, 0), (7, 7), (14, 14), (3, 7), (1000, 14)]
)
async def test_any_offset_is_answered_as_the_protocols_page_says(
    url: str, topic: str, asked: int | None, got: int
) -> None:
    missed: list[Missed] = []
    async with headrace.connect(url) as client:
        client.on("missed", missed.append)
        await client.publish(topic, b"foo")
        await client.publish(topic, b"bar")
        subscription = client.subscribe(topic, offset=asked)
        assert await subscription.attached() == got
        await client.publish(topic, b"car")
        assert (await anext(subscription)).next_offset == got + 7
    told = [(one.topic, one.asked, one.got) for one in missed]
    assert told == ([] if asked in (None, got) else [(topic, asked, got)])


async def test_the_smallest_and_the_largest_payload_and_name(url: str, topic: str) -> None:
    name = "é" * 127 + topic[-8:-7]
    payloads = [b"", bytes(262_144), b"end"]
    async with headrace.connect(url) as client:
        subscription = client.subscribe(name)
        await subscription.attached()
        for payload in payloads:
            await client.publish(name, payload)
        assert [(await anext(subscription)).payload for _ in payloads] == payloads


async def test_a_pipeline_over_many_topics_keeps_the_order_of_each(url: str, topic: str) -> None:
    topics = [f"{topic} {number}" for number in range(50)]
    async with headrace.connect(url) as client:
        for number in range(5000):
            await client.window()
            client.publish_nowait(topics[number % 50], b"%d" % number)
        await client.flush()
        for which, name in enumerate(topics):
            subscription = client.subscribe(name, offset=0)
            received = [(await anext(subscription)).payload for _ in range(100)]
            assert received == [b"%d" % number for number in range(which, 5000, 50)]


async def test_a_slow_subscriber_gets_everything(url: str, topic: str) -> None:
    async with headrace.connect(url, receive_bytes_max=50_000, receive_pause_s=0.01) as client:
        subscription = client.subscribe(topic, offset=0)
        for number in range(2000):
            await client.window()
            client.publish_nowait(topic, b"%04d" % number + bytes(2000))
        await client.flush()
        received = 0
        async for message in subscription:
            assert message.payload[:4] == b"%04d" % received
            received += 1
            if received % 100 == 0:
                await asyncio.sleep(0.005)
            if received == 2000:
                break


async def test_pings_are_answered(url: str, until: Until) -> None:
    async with headrace.connect(url, ping_interval_s=0.5) as client:
        await until(lambda: client.latency_s is not None)
        assert client.last_error == ""


async def test_what_is_published_in_one_protocol_is_at_the_same_offset_in_the_other(
    shared: ServerProcess, topic: str
) -> None:
    async with (
        headrace.connect(shared.figg_url) as figg,
        headrace.connect(shared.wombat_url) as wombat,
    ):
        await figg.publish(topic, b"foo")
        await wombat.publish(topic, b"bar")
        for client in (figg, wombat):
            subscription = client.subscribe(topic, offset=0)
            assert plain(await anext(subscription)) == Message(topic, 7, b"foo")
            assert plain(await anext(subscription)) == Message(topic, 14, b"bar")


async def test_over_wombat_a_topic_that_began_anew_is_noticed_although_the_offset_exists_again(
    tmp_path: Path, until: Until
) -> None:
    missed: list[Missed] = []
    with ServerProcess(tmp_path / "data", "--durability=memory") as server:
        async with headrace.connect(
            server.wombat_url, receive_bytes_max=1, backoff=lambda _: 0.02
        ) as client:
            client.on("missed", missed.append)
            subscription = client.subscribe("t", offset=0)
            await client.publish("t", b"old")
            # One message fills the subscription: the client asks for no more until it is taken.
            await until(lambda: client._flow is not None and subscription in client._flow._aside)
            await asyncio.to_thread(server.restart)
            async with headrace.connect(server.wombat_url) as another:
                await another.publish("t", b"new")
                await another.publish("t", b"new")
            async with asyncio.timeout(30):
                taken = [await anext(subscription) for _ in range(3)]
        assert [message.payload for message in taken] == [b"old", b"new", b"new"]
        assert [(one.asked, one.got) for one in missed] == [(7, 0)]
        assert missed[0].asked_serial == taken[0].serial


async def test_a_stored_serial_resumes_in_another_process_with_its_epoch(
    tmp_path: Path, until: Until
) -> None:
    """To the server, a client that has only the serial, as from a file, is another process."""
    with ServerProcess(tmp_path / "data", "--durability=memory") as server:
        async with headrace.connect(server.wombat_url) as client:
            for payload in (b"foo", b"bar"):
                await client.publish("t", payload)
            stored = (await anext(client.subscribe("t", offset=0))).serial
        assert stored is not None
        missed: list[Missed] = []
        async with headrace.connect(server.wombat_url) as client:
            client.on("missed", missed.append)
            subscription = client.subscribe("t", serial=stored)
            assert subscription.serial == stored
            assert (await anext(subscription)).payload == b"bar"
        assert missed == []
        await asyncio.to_thread(server.restart)
        async with headrace.connect(server.wombat_url) as client:
            client.on("missed", missed.append)
            await client.publish("t", b"new")
            await client.publish("t", b"next")
            # The offset exists again. Only the epoch shows that it belongs to another topic.
            assert (await anext(client.subscribe("t", serial=stored))).payload == b"new"
            assert [(one.asked, one.got, one.asked_serial) for one in missed] == [(7, 0, stored)]


async def test_a_publish_that_only_the_server_refuses_fails_alone(url: str, topic: str) -> None:
    async with headrace.connect(url, backoff=lambda _: 0.001) as client, asyncio.timeout(60):
        client._session._names_checked.add("$refused")  # type: ignore[attr-defined]
        futures = [client.publish_nowait(name, b"x") for name in (topic, "$refused", topic)]
        with pytest.raises(PublishRefusedError):
            await client.flush()
        assert [future.exception() is None for future in futures] == [True, False, True]
        subscription = client.subscribe(topic, offset=0)
        assert [(await anext(subscription)).payload for _ in range(2)] == [b"x", b"x"]


async def test_through_something_that_does_tls(
    shared: ServerProcess, topic: str, tmp_path: Path
) -> None:
    certificate = Certificate.make(tmp_path)
    async with tls_proxy(certificate, *shared.ws) as tls_port:
        url = f"wombats://localhost:{tls_port}"
        async with headrace.connect(url, ssl=certificate.trusted()) as client:
            subscription = client.subscribe(topic, offset=0)
            await client.publish(topic, b"foo")
            assert plain(await anext(subscription)) == Message(topic, 7, b"foo")


@PROTOCOLS
async def test_a_killed_server_costs_time_and_nothing_else(tmp_path: Path, protocol: str) -> None:
    with ServerProcess(tmp_path / "data", "--durability=written") as server:
        acknowledged: set[bytes] = set()
        received: list[Message] = []
        missed: list[Missed] = []
        enough = asyncio.Event()
        total = 3000

        def note(payload: bytes, done: "asyncio.Future[None]") -> None:
            if done.exception() is None:
                acknowledged.add(payload)

        async def publish(client: headrace.client.Client) -> None:
            for number in range(total):
                await client.window()
                payload = b"%d" % number
                future = client.publish_nowait("t", payload)
                future.add_done_callback(partial(note, payload))
                if number % 20 == 0:
                    await asyncio.sleep(0.002)
            await client.flush()

        async def subscribe(client: headrace.client.Client) -> None:
            seen: set[bytes] = set()
            async for message in client.subscribe("t", offset=0):
                received.append(message)
                seen.add(message.payload)
                if len(seen) == total:
                    enough.set()
                    return

        async with (
            headrace.connect(url_of(server, protocol), backoff=lambda _: 0.02) as publisher,
            headrace.connect(url_of(server, protocol), backoff=lambda _: 0.02) as subscriber,
        ):
            subscriber.on("missed", missed.append)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publish(publisher))
                tasks.create_task(subscribe(subscriber))
                for life in range(1, 4):
                    while len(received) < life * total // 5:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                await asyncio.wait_for(enough.wait(), 60)

    assert missed == []
    assert len(acknowledged) == total
    # Offsets are contiguous: no gap and no double delivery. (A resent publish may be there twice.)
    end = 0
    for message in received:
        assert message.offset == end
        assert message.next_offset == end + 4 + len(message.payload)
        end = message.next_offset
    assert {message.payload for message in received} == acknowledged


def test_the_blocking_client(url: str, topic: str) -> None:
    with headrace.connect_blocking(url) as client:
        for number in range(1000):
            client.window()
            client.publish_nowait(topic, b"%d" % number)
        client.flush(timeout_s=30)
        messages = list(client.subscribe(topic, offset=0, timeout_s=1.0))
        assert [message.payload for message in messages] == [b"%d" % i for i in range(1000)]
