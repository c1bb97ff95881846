"""The HTTP listener's limits on requests and connections: a violation is answered early and clearly."""

import json
from collections.abc import AsyncIterator

import pytest

from headrace.server.http import listener as http_protocol
from headrace.server.http import requests
from headrace.server.http.listener import PIPELINED_MAX
from headrace.server.http.requests import HEAD_BYTES_MAX, HEADERS_MAX, URL_BYTES_MAX
from headrace.server.peers.hangup import DISCARDED_BYTES_MAX
from tests.server.listener import BODY_BYTES_MAX, LONGEST_BODY_BYTES, Listener, Peer, until

CONNECTIONS_MAX = 3
GET = b"GET / HTTP/1.1\r\nHost: test\r\n"
POST = b"POST /body HTTP/1.1\r\nHost: test\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with Listener() as made:
        yield made


def long_url(size: int) -> bytes:
    return b"GET /?" + b"x" * (size - 2) + b" HTTP/1.1\r\nHost: test\r\n\r\n"


def length(size: int) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % size


REFUSED = {
    "many headers": (431, GET + b"a: b\r\n" * (HEADERS_MAX + 1)),
    "headers of many bytes": (431, GET + (b"a: " + b"b" * 1000 + b"\r\n") * 17),
    "a header without an end": (431, GET + b"a: " + b"b" * 20_000),
    "a name without an end": (431, GET + b"a" * 20_000),
    "a request line without an end": (431, b"GET " + b" " * 20_000),
    "empty lines without an end": (431, b"\r\n" * 10_000),
    "a long URL": (414, long_url(URL_BYTES_MAX + 1)),
    "a URL without an end": (414, b"GET /" + b"x" * 70_000),
    "a folded header": (400, GET + b"a: b\r\n c\r\n\r\n"),
    "no HTTP": (400, b"hello\r\n\r\n"),
    "no URL of ours": (400, b"CONNECT test:80 HTTP/1.1\r\nHost: test\r\n\r\n"),
    "an absurd length": (413, length(10**30)),
    "a length over all limits": (413, length(LONGEST_BODY_BYTES + 1)),
    "a length over the endpoint's limit": (413, length(BODY_BYTES_MAX + 1)),
    "a chunk over the endpoint's limit": (413, CHUNKED + b"3e9\r\n" + b"x" * 1001),
    "an absurd chunk": (413, CHUNKED + b"F" * 17 + b"\r\n"),
    "chunks without an end": (413, CHUNKED + b"1\r\nx\r\n" * 1001),
    "a chunk extension without an end": (400, CHUNKED + b"5;a=" + b"b" * 70_000),
    "a chunk size without an end": (400, CHUNKED + b"0" * 70_000),
    "many trailers": (431, CHUNKED + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 102),
    "a trailer without an end": (400, CHUNKED + b"1\r\nx\r\n0\r\na: " + b"b" * 140_000),
    "two lengths": (400, POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
    "a length and chunks": (400, length(1)[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"),
}


@pytest.mark.parametrize(("status", "sent"), REFUSED.values(), ids=REFUSED)
async def test_a_request_that_breaks_a_limit_is_answered_and_its_connection_ends(
    listener: Listener, status: int, sent: bytes
) -> None:
    peer = await listener.connect()
    peer.send(sent)
    answer = await peer.answer()
    assert answer.status == status
    assert json.loads(answer.body)["error"]
    assert answer.headers["connection"] == "close"
    assert len(listener.refusals) == 1
    assert await peer.ended()
    peer.close()
    await until(lambda: not listener.memory.bytes)


ACCEPTED = {
    "as many headers": GET + b"a: b\r\n" * (HEADERS_MAX - 1) + b"\r\n",
    "as long headers": GET + b"a: " + b"b" * (HEAD_BYTES_MAX - 9) + b"\r\n\r\n",
    "as long a URL": long_url(URL_BYTES_MAX),
    "as long a body": length(BODY_BYTES_MAX) + bytes(BODY_BYTES_MAX),
    "as many trailers": CHUNKED + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * HEADERS_MAX + b"\r\n",
    "an upgrade": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("sent", ACCEPTED.values(), ids=ACCEPTED)
@pytest.mark.parametrize("piece", [1 << 20, 1000, 7])
async def test_a_request_at_a_limit_is_taken_however_it_is_cut(
    listener: Listener, sent: bytes, piece: int
) -> None:
    peer = await listener.connect()
    for at in range(0, len(sent), piece):
        await peer.send_all(sent[at : at + piece])
    assert (await peer.answer()).status == 200
    assert not listener.refusals
    peer.close()


# Bodies that nobody reads


@pytest.mark.parametrize("head", [length(DISCARDED_BYTES_MAX), CHUNKED], ids=["length", "chunks"])
async def test_a_peer_that_sends_all_of_a_refused_body_still_sees_the_answer(
    listener: Listener, head: bytes
) -> None:
    peer = await listener.connect()
    await peer.send_all(head)
    chunk = bytes(MIB // 2)
    for _ in range(DISCARDED_BYTES_MAX // MIB * 2 - 1):
        await peer.send_all(chunk if head != CHUNKED else b"80000\r\n" + chunk + b"\r\n")
    assert (await peer.answer()).status == 413
    assert await peer.ended()
    peer.close()


async def test_a_refused_body_is_not_read_for_ever(listener: Listener) -> None:
    peer = await listener.connect()
    await peer.send_all(length(LONGEST_BODY_BYTES))
    with pytest.raises(ConnectionError):
        await peer.send_all(bytes(8 * DISCARDED_BYTES_MAX))
    peer.close()


async def test_an_answer_before_the_body_ends_the_connection_and_one_behind_it_does_not(
    listener: Listener,
) -> None:
    unread = b"POST /unread HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\n"
    peer = await listener.connect()
    for _ in range(3):
        peer.send(unread + bytes(100))
        answer = await peer.answer()
        assert (answer.status, answer.headers.get("connection")) == (200, None)
    peer.send(unread + bytes(99))
    answer = await peer.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await peer.ended()
    peer.close()


async def test_a_body_that_does_not_come_is_answered(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "BODY_TIMEOUT_S", 0.05)
    peer = await listener.connect()
    peer.send(length(10) + b"x")
    assert (await peer.answer()).status == 408
    assert await peer.ended()
    peer.close()


# Several requests at once


async def test_requests_that_come_together_are_answered_in_order(listener: Listener) -> None:
    peer = await listener.connect()
    hello = GET + b"\r\n"
    numbered = length(3) + b"foo"
    peer.send((hello + numbered) * (PIPELINED_MAX // 2))
    for _ in range(PIPELINED_MAX // 2):
        assert (await peer.answer()).body == b"hello"
        assert (await peer.answer()).body == b"3"
    await until(lambda: not listener.memory.bytes)
    peer.close()


async def test_too_many_requests_at_once_are_refused_behind_the_answers_to_the_others(
    listener: Listener,
) -> None:
    peer = await listener.connect()
    peer.send(b"GET /slow HTTP/1.1\r\nHost: test\r\n\r\n" + (GET + b"\r\n") * 1000)
    await until(lambda: listener.refusals)
    listener.go_on.set()
    assert (await peer.answer()).body == b"slow"
    for _ in range(PIPELINED_MAX):
        assert (await peer.answer()).body == b"hello"
    assert (await peer.answer()).status == 429
    assert await peer.ended()
    peer.close()


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (GET + b"a: b\r\n" * (HEADERS_MAX + 1), 431),
        (CHUNKED + b"1\r\nx\r\nnonsense\r\n", 400),
        (length(10**30), 413),
    ],
    ids=["headers", "a chunk", "a length"],
)
async def test_a_refusal_waits_for_the_answer_to_an_earlier_request(
    listener: Listener, bad: bytes, status: int
) -> None:
    peer = await listener.connect()
    peer.send(b"GET /slow HTTP/1.1\r\nHost: test\r\n\r\n" + bad)
    await until(lambda: listener.refusals)
    peer.send(bytes(1000))  # nobody reads these bytes any more
    listener.go_on.set()
    assert (await peer.answer()).body == b"slow"
    assert (await peer.answer()).status == status
    assert await peer.ended()
    peer.close()
    await until(lambda: not listener.memory.bytes)


# Slow peers


@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "second"])
async def test_a_head_that_comes_too_slowly_is_answered(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    # Long enough for a busy machine to send what must come before it.
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 1.0)
    peer = await listener.connect()
    if before:
        peer.send(before)
        assert (await peer.answer()).status == 200
    for byte in GET:
        await peer.send_all(bytes([byte]))
    assert (await peer.answer()).status == 408
    assert await peer.ended()
    peer.close()


# All connections together


async def half_heads(listener: Listener, count: int, size: int) -> list[Peer]:
    peers = [await listener.connect() for _ in range(count)]
    for number, peer in enumerate(peers, 1):
        peer.send(GET + b"a: " + b"b" * size + b"\r\n")
        peer.send(b"c: ")
        await until(lambda number=number: listener.memory.bytes > number * size)
    return peers


async def test_heads_of_all_connections_together_are_bounded() -> None:
    async with Listener(memory_bytes_max=100_000) as listener:
        peers = await half_heads(listener, 6, 15_000)
        late = await listener.connect()
        late.send(GET + b"a: " + b"b" * 15_000 + b"\r\n\r\n")
        answer = await late.answer()
        assert answer.status == 503
        assert b"requests_bytes_max" in answer.body
        late.close()
        for peer in peers:
            peer.close()
        await until(lambda: not listener.memory.bytes)
        again = await listener.connect()
        again.send(GET + b"\r\n")
        assert (await again.answer()).status == 200
        again.close()


async def test_bodies_of_all_connections_together_are_bounded() -> None:
    async with Listener(memory_bytes_max=5000) as listener:
        peers = [await listener.connect() for _ in range(3)]
        for peer in peers:
            peer.send(length(1000) + bytes(999))
        await until(lambda: listener.memory.bytes > 3 * 999)
        late = await listener.connect()
        late.send(length(1000) + bytes(1000))
        assert (await late.answer()).status == 503
        late.close()
        for peer in peers:
            peer.send(b"x")
            assert (await peer.answer()).body == b"1000"
            peer.close()
        await until(lambda: not listener.memory.bytes)


async def test_what_a_waiting_request_holds_is_released_with_its_connection(
    listener: Listener,
) -> None:
    peer = await listener.connect()
    peer.send(b"GET /slow HTTP/1.1\r\nHost: test\r\n\r\n")
    await until(lambda: listener.waiting)
    assert listener.memory.bytes
    peer.close()
    await until(lambda: not listener.memory.bytes)


# Connections: silent peers, and too many peers


@pytest.fixture
async def impatient(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    # Long enough for a busy machine to send what must come before it.
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 1.0)
    async with Listener(CONNECTIONS_MAX) as made:
        yield made


async def answered(peer: Peer) -> None:
    peer.send(GET + b"\r\n")
    answer = await peer.answer()
    assert (answer.status, answer.body) == (200, b"hello")


async def test_a_peer_that_asks_nothing_is_dropped(impatient: Listener) -> None:
    peer = await impatient.connect()
    assert await peer.ended()
    peer.close()


async def test_a_peer_that_asks_nothing_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "IDLE_TIMEOUT_S", 0.1)
    async with Listener() as listener:
        peer = await listener.connect()
        await answered(peer)
        assert await peer.ended()


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_request_that_does_not_arrive_whole_is_given_up(
    impatient: Listener, earlier: int
) -> None:
    peer = await impatient.connect()
    for _ in range(earlier):
        await answered(peer)
    peer.send(GET)
    assert (await peer.answer()).status == 408
    assert await peer.ended()
    peer.close()
