"""An HTTP listener in the test's process, to test its limits: a small application on a real socket."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from headrace.config.settings import Limits
from headrace.server.http.gate import KNOWN
from headrace.server.http.listener import HttpListener, HttpShared
from headrace.server.http.requests import RequestMemory, body
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.tally import PeerRules, Tally
from tests.fakes.places import Places

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
        limits: Limits | None = None,
    ) -> None:
        self.memory = RequestMemory(memory_bytes_max)
        self.places = Places()
        self.tally = http_tally(limits or Limits())
        self.refusals: list[str] = []
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
            ],
            exception_handlers={HTTPException: _error},
        )
        shared = HttpShared(
            connections_max=connections_max,
            body_bytes_max=LONGEST_BODY_BYTES,
            memory=self.memory,
            newcomers=self.places.newcomers,
            tally=self.tally,
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
        await self._listener.stop()

    async def connect(self, source: str = "127.0.0.1") -> "Peer":
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0)))
        self._peers.append(peer)
        return peer

    async def _hello(self, request: Request) -> Response:
        return PlainTextResponse("hello")

    async def _slow(self, request: Request) -> Response:
        """Answer later. Credentials are not looked at, except that there are some."""
        self.waiting += 1
        if "authorization" in request.headers:
            request.scope[KNOWN]()
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


def http_tally(limits: Limits) -> Tally:
    """Return a count of the connections of each address, with these limits."""
    rules = PeerRules(limits)
    return Tally("connections_max", lambda: rules, lambda: 0, Metrics())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)
