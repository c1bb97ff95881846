"""Foreign clients that report all they send and receive to a log checker, and kills of their server."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.testing import LogChecker, ServerProcess, wait_until
from tests.system.figg.foreign import Client, Wire
from tests.system.wombat import foreign as foreign_wombat

TINY = """
[journal]
file_bytes = 131072
files = 3
rotate_s = 0.15
commit_bytes_max = 65536
[segment]
bytes = 32768
"""
"""Settings with tiny files, which make each life of a server eventful."""


def publisher(server: ServerProcess, checker: LogChecker, name: str, window: int = 256) -> Client:
    return Client(
        server.figg,
        window=window,
        on_send=lambda topic, data: checker.sent(topic.decode(), data, name),
        on_ack=lambda topic, ticket: checker.acked(topic.decode(), ticket),  # type: ignore[arg-type]
    )


def subscriber(server: ServerProcess, checker: LogChecker, name: str) -> Client:
    return Client(
        server.figg,
        on_attached=lambda topic, asked, got: checker.attached(name, topic.decode(), asked, got),
        on_data=lambda topic, offset, data: checker.received(name, topic.decode(), offset, data),
    )


def wombat_publisher(
    server: ServerProcess, checker: LogChecker, name: str, window: int = 256, **options: object
) -> foreign_wombat.Client:
    return foreign_wombat.Client(
        server.ws,
        window=window,
        on_send=lambda topic, data: checker.sent(topic, data, name),
        on_ack=lambda topic, ticket: checker.acked(topic, ticket),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def wombat_subscriber(
    server: ServerProcess, checker: LogChecker, name: str
) -> foreign_wombat.Client:
    def attached(topic: str, asked: str | None, got: str) -> None:
        # A client notices a gap only by the serial. None of these clients may have a gap.
        assert asked is None or got == asked, f"{name} asked for {asked} of {topic}, got {got}"
        checker.attached(name, topic, None if asked is None else offset_of(asked), offset_of(got))

    return foreign_wombat.Client(
        server.ws,
        on_attached=attached,
        on_data=lambda topic, serial, data: checker.received(name, topic, offset_of(serial), data),
    )


def offset_of(serial: str) -> int:
    """Return the offset in a serial. Serials are opaque to clients, but the checker verifies the offset."""
    return int(serial.partition("@")[2])


def serial_at_end(server: ServerProcess, topic: str) -> str:
    with foreign_wombat.Wire(server.ws) as wire:
        return wire.attach(topic)


def assert_sound(checker: LogChecker) -> None:
    violations = checker.verdict()
    assert not violations, "\n".join(map(str, violations))


def end_of(server: ServerProcess, topic: bytes) -> int:
    with Wire(server.figg) as wire:
        return wire.attach(topic)


@contextmanager
def in_threads(*functions: Callable[[], object]) -> Iterator[None]:
    """Run the functions in threads beside the block and wait for them; raise the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[f], daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def end_one_life(
    server: ServerProcess, chance: random.Random, checker: LogChecker, number: int
) -> None:
    """Kill the server at a random moment, mostly under load and sometimes during recovery; then start it."""
    if number % 4 == 3:
        # This is long enough for the server to write and apply something, even on a busy machine.
        before = checker.records("t0")
        wait_until(lambda: checker.records("t0") > before + 50, 30, "records to come through")
    time.sleep(chance.uniform(0.0, 0.4))
    server.kill()
    while chance.random() < 0.3:
        server.spawn()
        time.sleep(chance.uniform(0.05, 0.6))
        server.kill()
    server.start()
