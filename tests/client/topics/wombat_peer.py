"""The peer's side of Wombat, built on `websockets` and `msgpack`.

The client is therefore tested against code that is not ours.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgpack
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from tests.client.peer import Attach, Auth, Connection, Detach, Heard, Peer, Ping, Publish


class WombatPeer(Peer):
    def __init__(self) -> None:
        super().__init__("wombat", WombatConnection)
        self.refusal: tuple[int, str] | None = None
        """Status and text with which the handshake is refused."""
        self.paths: list[str] = []


class WombatConnection(Connection):
    peer: WombatPeer

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.socket = ServerProtocol(max_size=None)
        self.numbers: set[int] = set()
        self.pongs: list[bytes] = []
        """Answers to WebSocket pings; pings of the protocol are not among them."""

    def hear(self, data: bytes) -> Iterator[Heard]:
        self.socket.receive_data(data)
        for event in self.socket.events_received():
            if isinstance(event, Request):
                self.handshake(event)
            elif event.opcode is Opcode.BINARY:
                yield heard(msgpack.unpackb(event.data))
            elif event.opcode is Opcode.PONG:
                self.pongs.append(bytes(event.data))
        self.send()

    def handshake(self, request: Request) -> None:
        self.peer.paths.append(request.path)
        if self.peer.refusal is None:
            self.socket.send_response(self.socket.accept(request))
        else:
            self.socket.send_response(self.socket.reject(*self.peer.refusal))

    def eof_received(self) -> None:
        self.socket.receive_eof()

    def send(self) -> None:
        """Write the pending bytes of the WebSocket at once. Close the transport after the last ones."""
        chunks = self.socket.data_to_send()
        self.transport.write(b"".join(chunks))
        if b"" in chunks:
            self.transport.close()

    def say(self, kind: int, name: str, **fields: Any) -> None:
        self.prepare(kind, name, **fields)
        self.send()

    def prepare(self, kind: int, name: str, **fields: Any) -> None:
        """Queue a message without writing it yet."""
        self.socket.send_binary(msgpack.packb({"type": kind, name: fields}))

    def say_attached(self, asked: Attach, offset: int) -> None:
        exact = asked.offset == offset and asked.epoch in (None, self.peer.epoch)
        epoch = (asked.epoch or "") if exact else self.peer.epoch
        self.say(2, "attached", topic=asked.topic, serial=f"{epoch}@{offset}")

    def say_detached(self, topic: str) -> None:
        self.say(9, "detached", topic=topic)

    def say_ack(self, publish: Publish) -> None:
        self.say(4, "ack", topic=publish.topic, sequence_number=publish.number)

    def say_pong(self, timestamp: int) -> None:
        self.say(7, "pong", timestamp=timestamp)

    def say_auth_ok(self, valid_ms: int) -> None:
        self.say(81, "auth_ok", valid_ms=valid_ms)

    def say_auth_refused(self, code: int, reason: str) -> None:
        self.say(82, "auth_refused", code=code, reason=reason)

    def say_messages(self, topic: str, begin: int, payloads: list[bytes]) -> None:
        for payload in payloads:
            begin += 4 + len(payload)
            serial = f"{self.peer.epoch}@{begin}"
            self.prepare(5, "payload", topic=topic, serial=serial, message=payload)
        self.send()

    def say_detach(self) -> None:
        self.say(8, "detach", topic="t")

    def is_new(self, publish: Publish) -> bool:
        new = publish.number not in self.numbers
        self.numbers.add(publish.number)
        return new


def heard(message: dict[str, Any]) -> Heard:
    match message:
        case {"type": 1, "attach": {"topic": topic, "serial": serial}}:
            epoch, offset = re.fullmatch(r"(\d+)?@(\d+)", serial).groups()
            return Attach(topic, int(offset), epoch and int(epoch))
        case {"type": 1, "attach": {"topic": topic}}:
            return Attach(topic, None)
        case {"type": 3, "publish": {"topic": topic, "message": bytes(payload), **rest}}:
            return Publish(rest["sequence_number"], topic, payload)
        case {"type": 6, "ping": {"timestamp": timestamp}}:
            return Ping(timestamp)
        case {"type": 8, "detach": {"topic": topic}}:
            return Detach(topic)
        case {"type": 80, "auth": {"token": token}}:
            return Auth(token)
    raise AssertionError(message)
