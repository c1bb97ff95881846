"""The endpoint of streams on a real store, without sockets: requests go straight to the application."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from headrace.broker.broker import Broker
from headrace.config.protocols import StreamSettings
from headrace.config.settings import Config, Journal, Limits, PrefixRule, Segment
from headrace.config.values import Origins
from headrace.log.store import Note
from headrace.model import Durability
from headrace.server.http.api import EXCEPTION_HANDLERS
from headrace.server.http.gate import AccessGate
from headrace.server.http.limits import HttpLimits
from headrace.server.http.streams.api import StreamsApi
from headrace.server.http.streams.cors import StreamHeaders
from headrace.server.http.streams.streams import Streams
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.connections import Connections
from tests.fakes.store import StepStore
from tests.log.conftest import QUICK
from tests.server.http.open_gate import NO_AUDIT
from tests.server.step_server import open_to_all

PAGE = "https://app.example"
WAIT_S = 60.0


class Server:
    """One store and the application in front of it. The store works while requests wait."""

    def __init__(self, directory: Path, **limits: Any) -> None:
        self._directory = directory
        self._limits = limits
        self.settings = StreamSettings(long_poll_s=0.05)
        self.jumped_ms = 0
        """Part of the clock's time that has not really passed."""
        self.steps: StepStore
        self.open()

    def open(self) -> None:
        rules = (
            PrefixRule(prefix="memory/", durability=Durability.MEMORY),
            PrefixRule(prefix="held/", retention_wait_for=("lake",)),
        )
        config = Config(
            data_dir=self._directory,
            journal=Journal(file_bytes=1 << 20, files=3),
            segment=Segment(bytes=1 << 16),
            topics=rules,
        )
        self.steps = StepStore(config)
        store, runner = self.steps.store, self.steps.runner
        loop = asyncio.get_running_loop()
        self.is_working = True

        def work() -> None:
            if self.is_working:
                runner.step()

        runner.added = lambda: loop.call_soon(work)  # type: ignore[assignment, return-value]
        broker = Broker(store, runner, failed)
        health, access = open_to_all(store)
        self.connections = Connections(broker, Limits(**self._limits), Metrics(), health, access)
        clock = self.steps.clock
        self.streams = Streams(store, broker, config.rule, clock, lambda: clock.ms - self.jumped_ms)
        limits = HttpLimits(self.connections)
        api = StreamsApi(
            store, self.connections, self.streams, limits, lambda: self.settings, self.steps.clock
        )
        origins = Origins((PAGE,))
        app = Starlette(
            routes=api.routes(),
            exception_handlers=EXCEPTION_HANDLERS,
            middleware=[
                Middleware(StreamHeaders, origins=lambda: origins),
                Middleware(AccessGate, access=access, audit=NO_AUDIT),
            ],
        )
        self.app = app
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost/v1/stream/"
        )

    def restart(self) -> None:
        """Start again after a kill."""
        self.steps.crash()
        clock = self.steps.clock
        self.open()
        self.steps.clock.ms = clock.ms

    async def settle(self) -> None:
        """Do all steps that wait, and let requests answer."""
        self.is_working = True
        while self.steps.runner.step():
            await asyncio.sleep(0)

    def tick(self) -> None:
        """Handle the notes that are due."""
        for note in self.due():
            self.streams.due(note)

    def due(self) -> list[Note]:
        return self.steps.store.due_notes(self.steps.clock.ms, 100)

    def payloads(self, name: str) -> list[bytes]:
        return self.steps.payloads(name)

    # Requests

    async def put(self, name: str, content: bytes = b"", **headers: str) -> httpx.Response:
        return await self.http.put(name, content=content, headers=_named(headers))

    async def post(self, name: str, content: bytes = b"", **headers: str) -> httpx.Response:
        return await self.http.post(name, content=content, headers=_named(headers))

    async def get(self, name: str, **query: str) -> httpx.Response:
        return await self.http.get(name, params=query)


def failed(reason: str) -> None:
    raise AssertionError(reason)


def _named(headers: dict[str, str]) -> dict[str, str]:
    """Return headers by their names; `type` stands for the content type."""
    names = {"type": "content-type"}
    return {names.get(name, name.replace("_", "-")): value for name, value in headers.items()}


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield Path(path) / "data"


@pytest.fixture
async def server(directory: Path) -> AsyncIterator[Server]:
    made = Server(directory)
    yield made
    await made.http.aclose()
    made.steps.crash()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)
