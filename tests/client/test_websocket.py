"""The WebSocket of the Wombat client: what it accepts from a server, and its errors for invalid input."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import headrace
from headrace.client import Client, ConnectionState, Message
from headrace.client.connect import HEADER_BYTES_MAX
from headrace.wire.wombat import messages as wombat
from tests.client.refusals import refused
from tests.client.topics.wombat_peer import WombatConnection, WombatPeer
from tests.fakes.raw_server import raw_server

MESSAGE_BYTES_MAX = wombat.MESSAGE_BYTES_MAX + HEADER_BYTES_MAX

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]


def connect(peer: WombatPeer, **options: Any) -> Client:
    return headrace.connect(peer.url, **{"backoff": lambda attempt: 0.01, **options})


def connection(peer: WombatPeer) -> WombatConnection:
    [found] = peer.connections
    assert isinstance(found, WombatConnection)
    return found


class Losses:
    """Collects the reasons for which a client lost its connections."""

    def __init__(self, client: Client) -> None:
        self.reasons: list[str] = []
        self._client = client
        client.on("state", self._note)

    def _note(self, state: ConnectionState) -> None:
        if state is ConnectionState.DISCONNECTED:
            self.reasons.append(self._client.last_error)


# Handshake


async def test_it_asks_for_the_protocols_path_or_for_the_one_in_the_url(
    wombat_peer: WombatPeer,
) -> None:
    for path in ("", "/", "/v1/ws", "/prefix/v1/ws"):
        async with headrace.connect(wombat_peer.url + path):
            pass
    assert wombat_peer.paths == ["/v1/ws", "/v1/ws", "/v1/ws", "/prefix/v1/ws"]


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (403, "not\r\nfrom here\n", "the server answered 403: not from here"),
        (503, "", "the server answered 503: Service Unavailable"),
        (302, "elsewhere", "the server answered 302: elsewhere"),
        (200, "x" * 1000, "the server answered 200: xxx"),
    ],
)
async def test_a_refused_handshake_says_what_the_server_said(
    wombat_peer: WombatPeer, status: int, text: str, reason: str
) -> None:
    wombat_peer.refusal = status, text
    error = await refused(
        lambda timeout_s: connect(wombat_peer, connect_timeout_s=timeout_s), reason
    )
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed the connection during the WebSocket handshake"),
        (b"-ERR unknown command\r\n\r\n", "the server broke the protocol"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "the server broke the protocol"),
    ],
)
async def test_a_port_that_speaks_something_else_is_named(answer: bytes, reason: str) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with raw_server(say) as port:
        url = f"wombat://127.0.0.1:{port}"
        await refused(lambda timeout_s: headrace.connect(url, connect_timeout_s=timeout_s), reason)


async def test_a_server_that_does_not_answer_the_handshake_is_given_up_and_hung_up_on(
    until: Until,
) -> None:
    opened: list[asyncio.StreamReader] = []
    asked: list[bytes] = []
    ended: list[asyncio.StreamReader] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(reader)
        with suppress(asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            assert await reader.read() == b""
        ended.append(reader)

    async with raw_server(listen) as port:
        url = f"wombat://127.0.0.1:{port}"
        await refused(
            lambda timeout_s: headrace.connect(
                url, connect_timeout_s=timeout_s, attempt_timeout_s=timeout_s / 10
            ),
            r"no answer within [\d.]+ s",
        )
        await until(lambda: opened and len(ended) == len(opened))
        before = len(asked)
        async with headrace.connect(url, connect_timeout_s=None, attempt_timeout_s=60):
            await until(lambda: len(asked) == before + 1)
            assert len(ended) < len(opened)
        await until(lambda: len(ended) == len(opened))
    assert all(request.startswith(b"GET /v1/ws HTTP/1.1\r\n") for request in asked)


# Frames


async def test_small_and_large_messages_keep_their_order(wombat_peer: WombatPeer) -> None:
    sizes = [0, 10, 10, 500, 600, 10, 100_000, 600, 10, 10]
    async with connect(wombat_peer) as client:
        for size in sizes:
            client.publish_nowait("t", bytes(size))
        await asyncio.wait_for(client.flush(), 30)
    assert list(map(len, wombat_peer.payloads("t"))) == sizes
    assert [publish.number for publish in wombat_peer.publishes()] == list(range(len(sizes)))


async def test_a_message_in_fragments_is_one_message(wombat_peer: WombatPeer) -> None:
    async with connect(wombat_peer) as client:
        subscription = client.subscribe("t")
        await subscription.attached()
        peer = connection(wombat_peer)
        whole: list[bytes] = []
        peer.socket.send_binary, send_binary = whole.append, peer.socket.send_binary
        wombat_peer.append("t", b"foo", b"bar")
        peer.socket.send_binary = send_binary
        for message in whole:
            send_binary(message[:1], fin=False)
            peer.socket.send_ping(b"between")
            peer.socket.send_continuation(b"", fin=False)
            peer.socket.send_continuation(message[1:], fin=True)
        peer.send()
        async with asyncio.timeout(30):
            assert [await anext(subscription) for _ in whole] == [
                Message("t", 7, b"foo", "1@7", epoch=1),
                Message("t", 14, b"bar", "1@14", epoch=1),
            ]


async def test_pings_of_the_websocket_are_answered(wombat_peer: WombatPeer, until: Until) -> None:
    async with connect(wombat_peer) as client:
        peer = connection(wombat_peer)
        peer.socket.send_ping(b"are you there?")
        peer.socket.send_pong(b"nobody asked")
        peer.send()
        await until(lambda: peer.pongs == [b"are you there?"])
        assert client.state is ConnectionState.CONNECTED


def say_text(peer: WombatConnection) -> None:
    peer.socket.send_text(b"hello")


def say_too_much(peer: WombatConnection) -> None:
    peer.socket.send_binary(bytes(MESSAGE_BYTES_MAX + 1))


def say_too_much_in_pieces(peer: WombatConnection) -> None:
    peer.socket.send_binary(bytes(MESSAGE_BYTES_MAX), fin=False)
    peer.socket.send_continuation(b"x", fin=False)


def say_a_fragment_out_of_turn(peer: WombatConnection) -> None:
    peer.transport.write(b"\x80\x01x")


def say_a_message_within_a_message(peer: WombatConnection) -> None:
    peer.transport.write(b"\x02\x01x" + b"\x82\x01x")


def say_what_no_websocket_says(peer: WombatConnection) -> None:
    peer.transport.write(b"\x83\x00")


@pytest.mark.parametrize(
    ("misbehave", "reason", "code"),
    [
        (say_text, "a text message", 1003),
        (say_too_much, "exceeding max allowed size", 1009),
        (say_too_much_in_pieces, f"a message over {MESSAGE_BYTES_MAX} bytes", 1009),
        (say_a_fragment_out_of_turn, "a fragment out of turn", 1002),
        (say_a_message_within_a_message, "a fragment out of turn", 1002),
        (say_what_no_websocket_says, "invalid opcode", 1002),
    ],
)
async def test_a_server_that_breaks_the_websocket_is_left_with_the_reason(
    wombat_peer: WombatPeer,
    until: Until,
    misbehave: Callable[[WombatConnection], None],
    reason: str,
    code: int,
) -> None:
    async with connect(wombat_peer) as client:
        losses = Losses(client)
        peer = connection(wombat_peer)
        misbehave(peer)
        peer.send()
        await until(lambda: losses.reasons)
        assert losses.reasons[0].startswith("the server broke the protocol: ")
        assert reason in losses.reasons[0]
        await client.publish("t", b"on another connection")
    assert peer.socket.close_rcvd is not None
    assert peer.socket.close_rcvd.code == code


async def test_what_came_before_a_bad_frame_counts(wombat_peer: WombatPeer, until: Until) -> None:
    wombat_peer.acks = False
    async with connect(wombat_peer) as client:
        client.publish_nowait("t", b"foo")
        await until(lambda: wombat_peer.payloads("t"))
        losses = Losses(client)
        peer = connection(wombat_peer)
        peer.prepare(4, "ack", topic="t", sequence_number=0)
        peer.socket.send_text(b"hello")
        peer.send()
        await until(lambda: losses.reasons)
        assert client.unacknowledged == 0


# Closing


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (1008, "no PING for 10 s", "closed by the server: 1008 no PING for 10 s"),
        (1001, "", "closed by the server: 1001"),
        (4000, "its own", "closed by the server: 4000 its own"),
        (None, "", "closed by the server"),
    ],
)
async def test_a_server_that_closes_says_why(
    wombat_peer: WombatPeer, until: Until, code: int | None, text: str, reason: str
) -> None:
    async with connect(wombat_peer) as client:
        losses = Losses(client)
        peer = connection(wombat_peer)
        peer.socket.send_close(code, text)
        peer.send()
        await until(lambda: losses.reasons)
        await client.publish("t", b"on another connection")
    assert losses.reasons[0] == reason
    assert peer.socket.close_rcvd is not None


async def test_closing_the_client_closes_the_websocket_with_1000(wombat_peer: WombatPeer) -> None:
    async with connect(wombat_peer) as client:
        peer = connection(wombat_peer)
        client.publish_nowait("t", b"foo")
    assert peer.socket.close_rcvd is not None
    assert peer.socket.close_rcvd.code == 1000
    assert wombat_peer.payloads("t") == [b"foo"]
    assert client.last_error == ""


async def test_a_server_that_does_not_answer_the_close_is_not_waited_for_long(
    wombat_peer: WombatPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.client.link.CLOSE_TIMEOUT_S", 0.02)
    async with connect(wombat_peer):
        connection(wombat_peer).send = lambda: None  # type: ignore[method-assign]


# Good behaviour


async def test_nothing_of_the_websocket_gets_into_the_applications_log(
    wombat_peer: WombatPeer, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with connect(wombat_peer) as client:
            await client.connected()  # imports what is imported at the first connection
            loggers = set(logging.Logger.manager.loggerDict)
            losses = Losses(client)
            for misbehave in (say_too_much, say_text):
                count = len(losses.reasons)
                await client.connected()
                misbehave(connection(wombat_peer))
                connection(wombat_peer).send()
                await until(lambda count=count: len(losses.reasons) > count)  # type: ignore[misc]
    ours = [record for record in caplog.records if record.name.startswith(("headrace", "picows"))]
    assert ours
    assert {record.levelno for record in ours} == {logging.DEBUG}
    # A logger for each connection would stay in the process for ever.
    assert set(logging.Logger.manager.loggerDict) <= loggers


async def test_a_fault_of_our_own_is_told_and_not_swallowed(
    wombat_peer: WombatPeer, until: Until
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    async with connect(wombat_peer) as client:
        losses = Losses(client)

        def fail(chunks: object, now: float) -> None:
            del client._session.receive_data  # type: ignore[misc]
            raise ZeroDivisionError

        client._session.receive_data = fail  # type: ignore[method-assign, assignment]
        connection(wombat_peer).say_pong(0)
        await until(lambda: losses.reasons)
        await client.publish("t", b"on another connection")
    assert losses.reasons[0] == "ZeroDivisionError"
    assert isinstance(reported[0]["exception"], ZeroDivisionError)
