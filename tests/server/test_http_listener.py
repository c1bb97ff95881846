"""The HTTP listener's bounds, in this process: peers that dawdle, and too many of them."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.server import http

CONNECTIONS_MAX = 3
WAIT_S = 30
REQUEST = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.2)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    listener = http.HttpListener(Starlette(routes=[Route("/", hello)]), CONNECTIONS_MAX, sock)
    await listener.start()
    yield sock.getsockname()[1]
    await listener.stop()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server hangs up without a word."""
    try:
        return await asyncio.wait_for(reader.read(), WAIT_S) == b""
    except ConnectionResetError:
        return True


async def answered(streams: Streams) -> bytes:
    reader, writer = streams
    writer.write(REQUEST)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    assert await asyncio.wait_for(reader.readexactly(5), WAIT_S) == b"hello"
    return head


async def test_a_peer_that_asks_nothing_is_dropped(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await ended(reader)
    writer.close()


async def test_a_request_that_does_not_arrive_whole_is_dropped(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST[:-2])
    assert await ended(reader)
    writer.close()


async def test_the_same_holds_for_a_later_request_of_a_connection(port: int) -> None:
    streams = await asyncio.open_connection("127.0.0.1", port)
    assert (await answered(streams)).startswith(b"HTTP/1.1 200")
    streams[1].write(REQUEST[:-2])
    assert await ended(streams[0])
    streams[1].close()


async def test_connections_beyond_the_bound_are_closed_at_once(port: int) -> None:
    kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
    for streams in kept:
        await answered(streams)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await ended(reader)
    writer.close()
    kept.pop()[1].close()
    for streams in kept:
        await answered(streams)
        streams[1].close()
