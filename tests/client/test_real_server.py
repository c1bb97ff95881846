"""The client against the real server, which is also killed under it."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import headrace
from headrace.client import Message, Missed
from headrace.testing import ServerProcess

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("client") / "data") as server:
        yield server


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


async def test_offsets_are_byte_positions_and_can_be_resumed_from(
    shared: ServerProcess, topic: str
) -> None:
    async with headrace.connect(shared.figg_url) as client:
        for payload in (b"foo", b"bar", b"car"):
            await client.publish(topic, payload)
        async with client.subscribe(topic, 7) as subscription:
            assert await anext(subscription) == Message(topic, 14, b"bar")
            assert await anext(subscription) == Message(topic, 21, b"car")
        async with client.subscribe(topic) as subscription:
            assert await subscription.attached() == 21


@pytest.mark.parametrize(
    ("asked", "got"), [(None, 14), (0, 0), (7, 7), (14, 14), (3, 7), (1000, 14)]
)
async def test_any_offset_is_answered_as_the_protocols_page_says(
    shared: ServerProcess, topic: str, asked: int | None, got: int
) -> None:
    missed: list[Missed] = []
    async with headrace.connect(shared.figg_url) as client:
        client.on("missed", missed.append)
        await client.publish(topic, b"foo")
        await client.publish(topic, b"bar")
        subscription = client.subscribe(topic, asked)
        assert await subscription.attached() == got
        await client.publish(topic, b"car")
        assert (await anext(subscription)).offset == got + 7
    assert missed == ([] if asked in (None, got) else [Missed(topic, asked, got)])


async def test_the_smallest_and_the_largest_payload_and_name(
    shared: ServerProcess, topic: str
) -> None:
    name = "é" * 127 + topic[-8:-7]
    payloads = [b"", bytes(262_144), b"end"]
    async with headrace.connect(shared.figg_url) as client:
        subscription = client.subscribe(name)
        await subscription.attached()
        for payload in payloads:
            await client.publish(name, payload)
        assert [(await anext(subscription)).payload for _ in payloads] == payloads


async def test_a_pipeline_over_many_topics_keeps_the_order_of_each(
    shared: ServerProcess, topic: str
) -> None:
    topics = [f"{topic} {number}" for number in range(50)]
    async with headrace.connect(shared.figg_url) as client:
        for number in range(5000):
            await client.window()
            client.publish_nowait(topics[number % 50], b"%d" % number)
        await client.flush()
        for which, name in enumerate(topics):
            subscription = client.subscribe(name, 0)
            received = [(await anext(subscription)).payload for _ in range(100)]
            assert received == [b"%d" % number for number in range(which, 5000, 50)]


async def test_a_slow_subscriber_gets_everything(shared: ServerProcess, topic: str) -> None:
    async with headrace.connect(
        shared.figg_url, receive_bytes_max=50_000, receive_pause_s=0.01
    ) as client:
        subscription = client.subscribe(topic, 0)
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


async def test_pings_are_answered(shared: ServerProcess, until: Until) -> None:
    async with headrace.connect(shared.figg_url, ping_interval_s=0.05) as client:
        await until(lambda: client.latency_s is not None)
        await asyncio.sleep(0.3)
        assert client.last_error == ""


async def test_a_killed_server_costs_time_and_nothing_else(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--durability=written") as server:
        acknowledged: set[bytes] = set()
        received: list[Message] = []
        missed: list[Missed] = []
        enough = asyncio.Event()
        total = 6000

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
            async for message in client.subscribe("t", 0):
                received.append(message)
                seen.add(message.payload)
                if len(seen) == total:
                    enough.set()
                    return

        async with (
            headrace.connect(server.figg_url, backoff=lambda attempt: 0.02) as publisher,
            headrace.connect(server.figg_url, backoff=lambda attempt: 0.02) as subscriber,
        ):
            subscriber.on("missed", missed.append)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publish(publisher))
                tasks.create_task(subscribe(subscriber))
                for _ in range(3):
                    await asyncio.sleep(0.2)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                await asyncio.wait_for(enough.wait(), 60)

    assert missed == []
    assert len(acknowledged) == total
    # Offsets are contiguous: no gap and no double delivery. (A resent publish may be there twice.)
    end = 0
    for message in received:
        assert message.offset == end + 4 + len(message.payload)
        end = message.offset
    assert {message.payload for message in received} == acknowledged


def test_the_blocking_client(shared: ServerProcess, topic: str) -> None:
    with headrace.connect_blocking(shared.figg_url) as client:
        for number in range(1000):
            client.window()
            client.publish_nowait(topic, b"%d" % number)
        client.flush(timeout_s=30)
        messages = list(client.subscribe(topic, 0, timeout_s=1.0))
        assert [message.payload for message in messages] == [b"%d" % i for i in range(1000)]
