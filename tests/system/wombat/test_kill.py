"""A server that is killed repeatedly under load of Wombat clients: they miss nothing and are not misled.

There are 6 kills. HEADRACE_TORTURE=N makes it N, and repeats it without waiting for the disk (`written`).
"""

import itertools
import os
import random
import threading
import time
from contextlib import ExitStack

import pytest

from headrace.testing import LogChecker, ServerProcess, wait_until
from tests.system.checked import (
    TINY,
    assert_sound,
    end_of,
    end_one_life,
    in_threads,
    serial_at_end,
    subscriber,
    wombat_publisher,
    wombat_subscriber,
)
from tests.system.conftest import Start
from tests.system.support import verify
from tests.system.wombat.foreign import NUMBERS, Client

TORTURE = os.environ.get("HEADRACE_TORTURE")
KILLS = int(TORTURE or 6)
TOPICS = ["t0", "t1", "t2"]

PUBLISHERS: dict[str, dict[str, object]] = {
    "by number": {},
    "by topic": {"by_topic": True},
    "over the end of the numbers": {"first_number": NUMBERS - 500},
}


@pytest.mark.timeout(240 + 30 * KILLS)
@pytest.mark.parametrize("durability", ["synced", "written"] if TORTURE else ["synced"])
def test_a_server_killed_again_and_again_keeps_its_promises_to_wombats(
    start: Start, durability: str
) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", random.randrange(2**32)))
    print(f"HEADRACE_SEED={seed}")
    chance = random.Random(seed)
    server = start(f"--durability={durability}", config=TINY)
    checker = LogChecker()
    stop = threading.Event()
    small: list[str] = []
    with ExitStack() as stack:
        # One reader starts at the first offset, one before any record exists, and one uses the other
        # protocol.
        readers = [stack.enter_context(wombat_subscriber(server, checker, f"w{i}")) for i in (0, 1)]
        figg_reader = stack.enter_context(subscriber(server, checker, "f"))
        for topic in TOPICS:
            readers[0].attach(topic, "@0")
            readers[1].attach(topic)
            figg_reader.attach(topic.encode(), 0)
        for reader, topic in itertools.product(readers, TOPICS):
            reader.wait_attached(topic)
        loads = [
            lambda name=name, options=options: _load(
                wombat_publisher(server, checker, name, window=64, **options),
                name,
                random.Random(f"{seed} {name}"),
                small,
                stop,
            )
            for name, options in PUBLISHERS.items()
        ]
        with in_threads(*loads):
            try:
                for number in range(KILLS):
                    end_one_life(server, chance, checker, number)
                wait_until(lambda: checker.records("t0") > 10 * KILLS, 60, "load")
            finally:
                stop.set()
        for topic in TOPICS:
            end = serial_at_end(server, topic)
            for reader in readers:
                reader.wait_serial(topic, end)
            figg_reader.wait_offset(topic.encode(), end_of(server, topic.encode()))
        assert min(reader.connections for reader in readers) > 1, "they were cut off"
    _read_everything(server, checker, "final", small)
    assert_sound(checker)
    assert server.terminate() == 0
    found = verify(server.data_dir)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Traceback" not in server.stderr


def _load(
    publisher: Client, name: str, chance: random.Random, small: list[str], stop: threading.Event
) -> None:
    """Publish until stopped: mostly to common topics, sometimes to a new one."""
    with publisher as client:
        for number in itertools.count():
            if stop.is_set():
                break
            topic = chance.choice(TOPICS)
            if number % 100 == 0:
                topic = f"new/{name}/{number}"
                small.append(topic)
            size = chance.choice([0, 10, 100, 100, 100, 3000])
            client.publish(topic, f"{name} {number} ".encode() + chance.randbytes(size))
            if number % 32 == 0:
                time.sleep(0.002)  # the publishers and subscribers share two cores with the server
        client.flush()


def _read_everything(
    server: ServerProcess, checker: LogChecker, name: str, small: list[str]
) -> None:
    topics = [*TOPICS, *small]
    with wombat_subscriber(server, checker, name) as reader:
        for first in range(0, len(topics), 100):
            some = topics[first : first + 100]
            for topic in some:
                reader.attach(topic, "@0")
            for topic in some:
                reader.wait_serial(topic, serial_at_end(server, topic))
                reader.detach(topic)
