"""A server that is killed repeatedly under load: everything acknowledged is there, in one order.

There are 6 kills. HEADRACE_TORTURE=N makes it N, and repeats it without waiting for the disk (`written`).
"""

import asyncio
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace import connect
from headrace.testing import LogChecker, ServerProcess, wait_until
from tests.system.checked import (
    TINY,
    assert_sound,
    end_of,
    end_one_life,
    in_threads,
    publisher,
    subscriber,
)
from tests.system.conftest import Start
from tests.system.figg.foreign import Client
from tests.system.support import verify

TORTURE = os.environ.get("HEADRACE_TORTURE")
KILLS = int(TORTURE or 6)

TOPICS = [b"t0", b"t1", b"t2"]


@pytest.mark.timeout(240 + 30 * KILLS)
@pytest.mark.parametrize("durability", ["synced", "written"] if TORTURE else ["synced"])
def test_a_server_killed_again_and_again_keeps_its_promises(start: Start, durability: str) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", random.randrange(2**32)))
    print(f"HEADRACE_SEED={seed}")
    chance = random.Random(seed)
    server = start(f"--durability={durability}", config=TINY)
    checker = LogChecker()
    stop = threading.Event()
    small: list[bytes] = []
    with ExitStack() as stack:
        readers = [stack.enter_context(subscriber(server, checker, f"s{i}")) for i in range(2)]
        for reader, topic in itertools.product(readers, TOPICS):
            reader.attach(topic, 0)
        loads = [
            lambda i=i: _load(server, checker, f"p{i}", random.Random(seed + i), small, stop)
            for i in range(3)
        ]
        with in_threads(*loads, lambda: _sdk_load(server, checker, stop)):
            try:
                for number in range(KILLS):
                    end_one_life(server, chance, checker, number)
                wait_until(lambda: checker.records("t0") > 10 * KILLS, 60, "load")
            finally:
                stop.set()
        for reader, topic in itertools.product(readers, TOPICS):
            reader.wait_offset(topic, end_of(server, topic))
    _read_everything(server, checker, "final", small)
    assert_sound(checker)
    assert server.terminate() == 0
    found = verify(server.data_dir)
    assert found.returncode == 0, found.stdout + found.stderr
    server.start()
    _read_everything(server, checker, "after a clean stop", small)
    assert_sound(checker)
    assert "Traceback" not in server.stderr


def _load(
    server: ServerProcess,
    checker: LogChecker,
    name: str,
    chance: random.Random,
    small: list[bytes],
    stop: threading.Event,
) -> None:
    """Publish until stopped: mostly to common topics, sometimes to a new one."""
    with publisher(server, checker, name, window=64) as client:
        for number in itertools.count():
            if stop.is_set():
                break
            topic = chance.choice(TOPICS)
            if number % 100 == 0:
                topic = f"new/{name}/{number}".encode()
                small.append(topic)
            size = chance.choice([0, 10, 100, 100, 100, 3000])
            client.publish(topic, f"{name} {number} ".encode() + chance.randbytes(size))
            if number % 32 == 0:
                time.sleep(0.002)  # the publishers and subscribers share two cores with the server
        client.flush()


def _sdk_load(server: ServerProcess, checker: LogChecker, stop: threading.Event) -> None:
    """Run our own client beside the foreign ones; it publishes and subscribes at the same time."""
    missed: list[object] = []

    async def publish(client) -> None:  # type: ignore[no-untyped-def]
        for number in itertools.count():
            if stop.is_set():
                return
            payload = b"sdk %d" % number
            ticket = checker.sent("t0", payload, "sdk", repeats=True)
            await client.publish("t0", payload)
            checker.acked("t0", ticket)

    async def subscribe(client) -> None:  # type: ignore[no-untyped-def]
        async for message in client.subscribe("t0", offset=0):
            checker.received("sdk", "t0", message.next_offset, message.payload)

    async def run() -> None:
        url, pause_s = server.figg_url, 0.05
        async with connect(url, connect_timeout_s=None, backoff=lambda _: pause_s) as client:
            client.on("missed", missed.append)
            reading = asyncio.create_task(subscribe(client))
            await publish(client)
            end = await asyncio.to_thread(end_of, server, b"t0")
            while (checker.position("sdk", "t0") or 0) < end:
                assert not reading.done(), reading
                await asyncio.sleep(0.01)
            reading.cancel()
        assert not missed

    asyncio.run(asyncio.wait_for(run(), 200 + 30 * KILLS))


def _read_everything(
    server: ServerProcess, checker: LogChecker, name: str, small: list[bytes]
) -> None:
    with subscriber(server, checker, name) as reader:
        for topics in _batches([*TOPICS, *small], 100):
            for topic in topics:
                reader.attach(topic, 0)
            for topic in topics:
                reader.wait_offset(topic, end_of(server, topic))
            _detach_all(reader, topics)


def _batches(items: list[bytes], size: int) -> Iterator[list[bytes]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _detach_all(reader: Client, topics: list[bytes]) -> None:
    for topic in topics:
        reader.detach(topic)
