"""The client against servers that are not Headrace: raw ones, written only from the seeds' text.

Neither shares a codec with us: the Figg server packs its own frames, the Wombat server uses `msgpack`.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgpack
import pytest
from websockets.asyncio.server import ServerConnection, serve

import headrace
from headrace.client import Message, Missed
from headrace.errors import PublishRefusedError, ReaderRefusedError
from headrace.session.topics import readers as client_readers
from tests.fakes.raw_server import raw_server

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]

HEADER = struct.Struct(">HHI")
ATTACH, ATTACHED, DETACH, DETACHED, PUBLISH, ACK, DATA, PING, PONG = range(1, 10)


class SeedFiggServer:
    """A server with message types 1 to 7 only: PING and PONG are optional in the seed."""

    def __init__(self, hangs_up: bool = False, refused: bytes | None = None) -> None:
        self.refused = refused
        """Payload that the server refuses. With it, the server answers pings, as a part of the protocol."""
        self.hangs_up = hangs_up
        """True if the server hangs up at an unknown message type; otherwise it ignores the message."""
        self.unknown: list[int] = []
        self.connections = 0
        self.log: dict[bytes, list[bytes]] = {}
        self.attached: dict[bytes, asyncio.StreamWriter] = {}

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                kind, _, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                body = await reader.readexactly(size)
                if self.refused is not None and kind == PUBLISH and body.endswith(self.refused):
                    return
                if self.refused is not None and kind == PING:
                    say(writer, PONG, body)
                elif kind in (ATTACH, DETACH, PUBLISH):
                    self.take(kind, body, writer)
                else:
                    self.unknown.append(kind)
                    if self.hangs_up:
                        return
        except asyncio.IncompleteReadError:
            return

    def take(self, kind: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        if kind == ATTACH:
            flags, size = struct.unpack_from(">HI", body)
            topic = body[6 : 6 + size]
            from_offset = struct.unpack_from(">Q", body, 6 + size)[0] if flags else None
            start = self.end(topic) if from_offset is None else from_offset
            say(writer, ATTACHED, text(topic) + struct.pack(">Q", start))
            self.attached[topic] = writer
            self.deliver(topic, start)
        elif kind == DETACH:
            self.attached.pop(body[4:], None)
            say(writer, DETACHED, body)
        else:
            (size,) = struct.unpack_from(">I", body)
            topic = body[4 : 4 + size]
            (number,) = struct.unpack_from(">Q", body, 4 + size)
            end = self.end(topic)
            self.log.setdefault(topic, []).append(body[4 + size + 8 + 4 :])
            say(writer, ACK, struct.pack(">Q", number))
            self.deliver(topic, end)

    def end(self, topic: bytes) -> int:
        return sum(4 + len(payload) for payload in self.log.get(topic, []))

    def deliver(self, topic: bytes, start: int) -> None:
        position = 0
        for payload in self.log.get(topic, []):
            position += 4 + len(payload)
            if position > start and topic in self.attached:
                fields = text(topic) + struct.pack(">Q", position) + text(payload)
                say(self.attached[topic], DATA, fields)


def say(writer: asyncio.StreamWriter, kind: int, body: bytes) -> None:
    writer.write(HEADER.pack(kind, 1, len(body)) + body)


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


@asynccontextmanager
async def figg(
    hangs_up: bool = False, refused: bytes | None = None
) -> AsyncIterator[tuple[str, SeedFiggServer]]:
    server = SeedFiggServer(hangs_up, refused)
    async with raw_server(server.run) as port:
        yield f"figg://127.0.0.1:{port}", server


@pytest.mark.parametrize(
    ("hangs_up", "options"),
    [
        pytest.param(False, {}, id="passes pings over"),
        pytest.param(False, {"ping_interval_s": None}, id="passes over, no pings"),
        pytest.param(True, {"ping_interval_s": None}, id="hangs up, no pings"),
    ],
)
async def test_a_figg_server_with_the_seven_message_types_of_the_seed(
    hangs_up: bool, options: dict[str, Any]
) -> None:
    async with figg(hangs_up) as (url, server), asyncio.timeout(30):
        async with headrace.connect(url, **options) as client:
            assert client.last_error == ""
            await client.publish("t", b"foo")
            subscription = client.subscribe("t", offset=0)
            assert await anext(subscription) == Message("t", 7, b"foo")
            await client.publish("t", b"bar")
            assert await anext(subscription) == Message("t", 14, b"bar")
            assert client.latency_s is None
            await subscription.unsubscribe()
        if options:
            assert server.unknown == []
            assert server.connections == 1


async def test_without_pings_a_port_that_hangs_up_at_once_is_backed_off_from(until: Until) -> None:
    attempts: list[int] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with raw_server(hang_up) as port:
        url = f"figg://127.0.0.1:{port}"
        async with headrace.connect(url, ping_interval_s=None, backoff=backoff):
            await until(lambda: len(attempts) >= 5)
    assert attempts[:5] == [0, 1, 2, 3, 4]


class OtherWombatServer:
    """A server whose serials are texts without order or form; only the server knows their meaning."""

    def __init__(self, refused: bytes | None = None) -> None:
        self.refused = refused
        """Payload that the server refuses."""
        self.log: list[tuple[str, bytes]] = []
        self.asked: list[str | None] = []
        self.attached: ServerConnection | None = None
        self.start = "in the beginning \u2603"

    async def run(self, socket: ServerConnection) -> None:
        async for data in socket:
            message = msgpack.unpackb(data)
            match message:
                case {"type": 1, "attach": {"topic": topic, **rest}}:
                    await self.attach(socket, topic, rest.get("serial"))
                case {"type": 3, "publish": {"message": self.refused}}:
                    await socket.close(1009, "too much for me")
                    return
                case {"type": 3, "publish": {"message": payload, "sequence_number": number}}:
                    await self.append(payload)
                    await send(socket, 4, "ack", topic="t", sequence_number=number)
                case {"type": 6, "ping": {"timestamp": timestamp}}:
                    await send(socket, 7, "pong", timestamp=timestamp)

    async def attach(self, socket: ServerConnection, topic: str, serial: str | None) -> None:
        self.asked.append(serial)
        self.attached = socket
        serials = [self.start, *(one for one, _ in self.log)]
        known = serials.index(serial) if serial in serials else 0
        at = len(self.log) if serial is None else known
        await send(socket, 2, "attached", topic=topic, serial=serials[at])
        for serial, payload in self.log[at:]:
            await send(socket, 5, "payload", topic=topic, serial=serial, message=payload)

    async def append(self, payload: bytes) -> None:
        serial = f"{9 - len(self.log)}@{'z' * len(self.log)}-of-another-form"
        self.log.append((serial, payload))
        if self.attached is not None:
            await send(self.attached, 5, "payload", topic="t", serial=serial, message=payload)

    async def drop(self) -> None:
        assert self.attached is not None
        socket, self.attached = self.attached, None
        socket.transport.abort()


async def send(socket: ServerConnection, kind: int, name: str, **fields: Any) -> None:
    await socket.send(msgpack.packb({"type": kind, name: fields}))


@asynccontextmanager
async def wombat(refused: bytes | None = None) -> AsyncIterator[tuple[str, OtherWombatServer]]:
    server = OtherWombatServer(refused)
    async with serve(server.run, "127.0.0.1", 0, compression=None) as listener:
        port = next(iter(listener.sockets)).getsockname()[1]
        yield f"wombat://127.0.0.1:{port}", server


async def test_a_wombat_server_with_serials_of_its_own() -> None:
    missed: list[Missed] = []
    async with wombat() as (url, server), asyncio.timeout(30):
        async with headrace.connect(url, backoff=lambda _: 0.01) as client:
            client.on("missed", missed.append)
            subscription = client.subscribe("t")
            assert await subscription.attached() is None
            assert subscription.serial == server.start
            await client.publish("t", b"foo")
            message = await anext(subscription)
            assert (message.payload, message.serial) == (b"foo", server.log[0][0])
            assert message.offset is message.next_offset is subscription.next_offset is None
            assert subscription.serial == message.serial
            await server.drop()
            await client.publish("t", b"bar")
            assert [m.payload for m in await subscription.batch()] == [b"bar"]
            assert server.asked == [None, message.serial]
            assert missed == []
            first, second = (serial for serial, _ in server.log)
            del server.log[:]
            await server.drop()
            await client.publish("t", b"car")
            assert (await anext(subscription)).payload == b"car"
            assert missed == [Missed("t", None, None, second, server.start)]
        async with headrace.connect(url) as another:
            assert (await anext(another.subscribe("t", serial=server.start))).payload == b"car"
            with pytest.raises(TypeError, match="a serial is str"):
                another.subscribe("u", serial=7)  # type: ignore[arg-type]
    assert server.asked == [None, first, second, server.start]


# Publishes whose refusal only the server knows


async def check_refusal(url: str, log: Callable[[], list[bytes]], reason: str) -> None:
    async with headrace.connect(url, backoff=lambda _: 0.001) as client:
        futures = [client.publish_nowait("t", payload) for payload in (b"a", b"refused", b"b")]
        with pytest.raises(PublishRefusedError, match=reason):
            await client.flush()
        assert [type(future.exception()) for future in futures] == [
            *(type(None), PublishRefusedError, type(None)),
        ]
        with pytest.raises(PublishRefusedError, match=reason):
            await client.publish("t", b"refused")
        await client.publish("t", b"c")
        await client.flush()  # all results have been reported
        assert log() == [b"a", b"b", b"c"]
        assert client.unacknowledged == 0

    def block() -> None:
        with headrace.connect_blocking(url, backoff=lambda _: 0.001) as blocking:
            blocking.publish("t", b"d", timeout_s=30)
            refused = blocking.publish_nowait("t", b"refused")
            good = blocking.publish_nowait("t", b"e")
            with pytest.raises(PublishRefusedError, match=reason):
                blocking.flush(timeout_s=30)
            assert isinstance(refused.exception(30), PublishRefusedError)
            assert good.exception(30) is None
            with pytest.raises(PublishRefusedError, match=reason):
                blocking.publish("t", b"refused", timeout_s=30)
            blocking.flush(timeout_s=30)

    await asyncio.to_thread(block)
    assert log() == [b"a", b"b", b"c", b"d", b"e"]


async def test_a_figg_server_that_hangs_up_on_a_publish_costs_that_publish_alone() -> None:
    async with figg(refused=b"refused") as (url, server), asyncio.timeout(60):
        await check_refusal(url, lambda: server.log[b"t"], "the server closed the connection")


async def test_a_wombat_server_that_closes_on_a_publish_costs_that_publish_alone() -> None:
    async with wombat(refused=b"refused") as (url, server), asyncio.timeout(60):
        await check_refusal(url, lambda: [data for _, data in server.log], "1009 too much for me")


async def test_a_server_without_named_readers_is_told_from_one_that_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_readers, "ANSWER_S", 0.05)
    async with figg(False) as (figg_url, _), wombat() as (wombat_url, _), asyncio.timeout(30):
        for url in (figg_url, wombat_url):
            async with headrace.connect(url) as client:
                with pytest.raises(ReaderRefusedError, match="does not know named readers"):
                    await anext(client.subscribe("t", reader="r"))
                with pytest.raises(ReaderRefusedError, match="cannot be read as 'r'"):
                    await client.subscribe("t", reader="r").batch()


async def test_a_server_that_hangs_up_on_readers_is_not_asked_for_ever() -> None:
    connections = 0

    async def pong_or_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError):
            while True:
                kind, _, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                body = await reader.readexactly(size)
                if kind != 8:
                    break
                say(writer, 9, body)

    async with raw_server(pong_or_hang_up) as port:
        client = headrace.connect(f"figg://127.0.0.1:{port}", backoff=lambda _: 0.01)
        async with asyncio.timeout(30), client:
            with pytest.raises(ReaderRefusedError, match="does not know named readers"):
                await anext(client.subscribe("t", reader="r"))
    assert connections == client_readers.HANG_UPS_MAX + 1
