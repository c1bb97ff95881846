"""An HTTP listener in the test's process, to test its limits: a small application on a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.config.settings import PeerLimits
from headrace.server.access import Access
from headrace.server.http.gate import AccessGate, rights
from headrace.server.http.listener import HttpListener, HttpShared
from headrace.server.http.requests import RequestMemory, body
from tests.fakes.places import Places
from tests.server.http.open_gate import NO_AUDIT
from tests.server.http.open_limits import open_connections

WAIT_S = 10.0
BODY_BYTES_MAX = 1000
"""Longest body that the endpoint `/body` accepts."""
LONGEST_BODY_BYTES = 1 << 30
"""Longest body of any endpoint, as the listener is configured."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Listener:
    def __init__(
        self,
        connections_max: int = 100,
        memory_bytes_max: int = 1 << 20,
        peers: tuple[PeerLimits, ...] = (),
        access: Access | None = None,
    ) -> None:
        self.memory = RequestMemory(memory_bytes_max)
        self.refusals: list[str] = []
        self.turned_away: list[str] = []
        self.places = Places(connections_max)
        self.connections = open_connections(connections_max, peers, self.turned_away, self.places)
        self._has_access = access is not None
        self.go_on = asyncio.Event()
        """Event that requests for `/slow` wait for."""
        self.waiting = 0
        self._peers: list[Peer] = []
        app = Starlette(
            routes=[
                Route("/", self._hello),
                Route("/slow", self._slow),
                Route("/body", self._body, methods=["POST"]),
                Route("/unread", self._hello, methods=["POST"]),
                Route("/healthz", self._hello),
                Route("/peer", self._peer_of),
                Route("/endless", self._endless),
                Route("/after", self._after),
            ],
            exception_handlers={HTTPException: _error},
            middleware=[Middleware(AccessGate, access=access, audit=NO_AUDIT)] if access else [],
        )
        shared = HttpShared(
            connections=self.connections,
            body_bytes_max=LONGEST_BODY_BYTES,
            memory=self.memory,
            refused=lambda peer, why: self.refusals.append(why),
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._listener = HttpListener(app, shared, self._socket)

    async def __aenter__(self) -> "Listener":
        await self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go_on.set()
        # With open transports and warnings as errors, a uvloop loop does not end.
        for peer in self._peers:
            peer.close()
        await self.stop()

    async def stop(self) -> None:
        await self._listener.stop()

    async def connect(self, address: str = "127.0.0.1") -> "Peer":
        opened = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        peer = Peer(*opened)
        self._peers.append(peer)
        return peer

    async def _hello(self, request: Request) -> Response:
        self._ask(request)
        return PlainTextResponse("hello")

    async def _peer_of(self, request: Request) -> Response:
        assert request.client is not None
        return PlainTextResponse(request.client.host)

    def _ask(self, request: Request) -> None:
        if self._has_access:
            rights(request).themselves()

    async def _endless(self, request: Request) -> Response:
        self._ask(request)

        async def parts() -> AsyncIterator[bytes]:
            yield b"part"
            await asyncio.Event().wait()

        return StreamingResponse(parts())

    async def _after(self, request: Request) -> Response:
        """Answer, and go on for ever."""
        self._ask(request)
        return PlainTextResponse("hello", background=BackgroundTask(asyncio.Event().wait))

    async def _slow(self, request: Request) -> Response:
        self.waiting += 1
        await self.go_on.wait()
        return PlainTextResponse("slow")

    async def _body(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await body(request, BODY_BYTES_MAX))))


class Peer:
    """Connection that sends arbitrary bytes and reads answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def send_all(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> Answer:
        head = await self._in_time(self._reader.readuntil(b"\r\n\r\n"))
        first, *lines = head.decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ") for line in lines)}
        content = await self._in_time(self._reader.readexactly(int(headers["content-length"])))
        return Answer(int(first.split()[1]), headers, content)

    async def head(self) -> str:
        return (await self._in_time(self._reader.readuntil(b"\r\n\r\n"))).decode()

    async def part(self, expected: bytes) -> None:
        assert await self._in_time(self._reader.readexactly(len(expected))) == expected

    async def ended(self) -> bool:
        """True if the server closes the connection without sending anything more."""
        try:
            return await self._in_time(self._reader.read()) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._writer.close()

    async def _in_time(self, call: Awaitable[bytes]) -> bytes:
        return await asyncio.wait_for(call, WAIT_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)
