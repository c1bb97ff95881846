"""Foreign clients that tell a log checker everything they send and receive."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.testing import LogChecker, ServerProcess
from tests.system.foreign_figg import Client, Wire


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


def assert_sound(checker: LogChecker) -> None:
    violations = checker.verdict()
    assert not violations, "\n".join(map(str, violations))


def end_of(server: ServerProcess, topic: bytes) -> int:
    with Wire(server.figg) as wire:
        return wire.attach(topic)


@contextmanager
def in_threads(*functions: Callable[[], object]) -> Iterator[None]:
    """Run the functions beside the block, and wait for them; the first error is raised here."""
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
