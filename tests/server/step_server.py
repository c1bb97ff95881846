"""A server that tests drive step by step: real connections and broker on a real store, without sockets.

Commits happen when a test says so, and a test sees every answer at the moment when it is written. So a test
can check that the log already contains what the answer acknowledges.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.broker.broker import Broker
from headrace.broker.logux.event_ids import EventIds
from headrace.config.protocols import LoguxSettings
from headrace.config.settings import ClockSettings, Config, Journal, Limits, PrefixRule, Segment
from headrace.log.store import Store
from headrace.model import Durability
from headrace.server.access import Access
from headrace.server.clock import SteadyClock
from headrace.server.diagnostics import Health
from headrace.server.logux.connection import Logux
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.connections import Connections
from headrace.server.websocket import HeardConnections
from tests.fakes.store import StepStore

MEMORY = "memory/"
"""Prefix of topics that are durable at once, so that their publishes overtake others."""


class StepServer:
    """One store for many examples; each example uses its own topics."""

    def __init__(self, path: Path) -> None:
        self.steps = StepStore(
            Config(
                data_dir=path,
                journal=Journal(file_bytes=16 << 20, files=3),
                segment=Segment(bytes=1 << 20),
                topics=(PrefixRule(prefix=MEMORY, durability=Durability.MEMORY),),
            )
        )
        self.ids = EventIds(path)
        self.runner = self.steps.runner

    def start(self) -> None:
        """Start to serve, in the event loop of an example."""

        def failed(reason: str) -> None:
            raise AssertionError(reason)

        broker = Broker(self.steps.store, self.runner, failed)
        self.connections = Connections(broker, Limits(), Metrics(), *open_to_all(self.steps.store))
        self.wombats = HeardConnections(self.connections)
        self.logux = Logux(
            self.connections,
            self.runner,
            self.ids,
            LoguxSettings(),
            None,
            None,
            lambda: 1_700_000_000_000,
        )

    async def step(self, count: int) -> None:
        """Let the store do `count` steps, and let connections answer after each step."""
        for _ in range(count):
            self.runner.step()
            await breathe()

    async def settle(self) -> None:
        while self.runner.step():
            await breathe()

    def payloads(self, topic: str) -> list[bytes]:
        """Return the payloads that are in the log now."""
        return self.steps.payloads(topic)

    def close(self) -> None:
        self.ids.close()
        self.steps.crash()


async def breathe() -> None:
    """Let the event loop run all callbacks that are ready, and those that they schedule."""
    for _ in range(4):
        await asyncio.sleep(0)


class Wire:
    """A transport, and WebSocket, that passes on written bytes at once."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self._heard = heard
        self.is_closed = False

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._heard(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def send_close(self, code: object, reason: object) -> None:
        raise AssertionError(f"closed by the server: {reason!r}")

    def _nothing(self, *args: object, **kwargs: object) -> None: ...

    pause_reading = resume_reading = set_write_buffer_limits = set_protocol = write_eof = _nothing


def frames(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of a server's WebSocket frames."""
    while data:
        size, at = data[1], 2
        if size >= 126:
            at = 4 if size == 126 else 10
            size = int.from_bytes(data[2:at])
        yield data[at : at + size]
        data = data[at + size :]


def open_to_all(store: Store) -> tuple[Health, Access]:
    """Return a `Health` whose clock stands still, and no access control."""
    clock = SteadyClock(
        ClockSettings(),
        wall_ms=lambda: 0,
        boot_ms=lambda: 0,
        is_synchronised=lambda: False,
        boot_id="boot",
        saved=None,
        newest_ms=0,
    )
    access = Access(Config(), Path("/nowhere/tokens.json"), lambda: 0, Metrics())
    return Health(store, clock, access), access
