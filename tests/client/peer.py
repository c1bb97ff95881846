"""A small scripted server on loopback to test clients against. Topics are lists.

Elsewhere: the bytes on the wire are in `figg_peer.py` and `wombat_peer.py`.
"""

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self, cast

import uvloop

from headrace.client import Message
from headrace.testing import hold_port
from tests.fakes.raw_server import last_accepted


class Attach(NamedTuple):
    topic: str
    offset: int | None
    epoch: int | None = None


class Detach(NamedTuple):
    topic: str


class Publish(NamedTuple):
    number: int
    topic: str
    payload: bytes


class Ping(NamedTuple):
    timestamp: int


class Auth(NamedTuple):
    token: str


Heard = Attach | Detach | Publish | Ping | Auth


class Peer:
    """Server that answers as usual, unless one of its switches says otherwise."""

    def __init__(self, scheme: str, connection: "type[Connection]") -> None:
        self.scheme = scheme
        self.log: dict[str, list[bytes]] = {}
        self.begins: dict[str, int] = {}
        """Start offset of the oldest record that a topic still has; expiry raises it."""
        self.epoch = 1
        self.received: list[Heard] = []
        self.reads: list[bytes] = []
        self.connections: list[Connection] = []
        self.accepted = 0
        self.acks = True
        self.pongs = True
        self.refused_tokens: dict[str, tuple[int, str]] = {}
        """By token: code and reason of its refusal. All others are accepted."""
        self.valid_ms = 0
        """Time until an accepted token expires; 0 if it does not."""
        self.knows_tokens = True
        """False: close a connection that shows a token, as servers without the extension do."""
        self.hang_up = False
        """Close every connection as soon as it is established."""
        self._connection = connection
        self._server: asyncio.Server | None = None
        # The port stays reserved for this peer while nothing listens.
        held = hold_port()
        weakref.finalize(self, held.close)
        self.port: int = held.getsockname()[1]

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def start(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._connection(self), "127.0.0.1", self.port, reuse_address=True
        )
        return self

    async def stop(self) -> None:
        """Close the listener and every connection; keep the log."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await last_accepted()
        self.drop()
        while self.connections:
            await asyncio.sleep(0)

    def drop(self) -> None:
        for connection in self.connections:
            connection.transport.abort()

    def append(self, topic: str, *payloads: bytes) -> None:
        """Append payloads without a publisher, and deliver them."""
        self.log.setdefault(topic, []).extend(payloads)
        for connection in self.connections:
            connection.deliver()

    def expire(self, topic: str, records: int) -> None:
        gone = self.log[topic][:records]
        del self.log[topic][:records]
        self.begins[topic] = self.begins.get(topic, 0) + sum(map(_size, gone))

    def end(self, topic: str) -> int:
        return self.begins.get(topic, 0) + sum(map(_size, self.log.get(topic, [])))

    def payloads(self, topic: str) -> list[bytes]:
        return self.log.get(topic, [])

    def attaches(self) -> list[Attach]:
        return [message for message in self.received if isinstance(message, Attach)]

    def publishes(self) -> list[Publish]:
        return [message for message in self.received if isinstance(message, Publish)]

    def tokens(self) -> list[str]:
        return [message.token for message in self.received if isinstance(message, Auth)]

    def refuse(self, code: int, reason: str) -> None:
        """End every connection because of its credentials."""
        for connection in self.connections:
            connection.refuse(code, reason)

    def acknowledge(self) -> None:
        """Send the acknowledgements that were held back so far."""
        self.acks = True
        for connection in self.connections:
            connection.acknowledge()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


class Connection(asyncio.Protocol, ABC):
    """Behaviour of a server on one connection. Subclasses encode it in their protocol."""

    transport: asyncio.Transport

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.next: dict[str, int] = {}
        self.unacknowledged: Publish | None = None

    @abstractmethod
    def hear(self, data: bytes) -> Iterable[Heard]: ...

    @abstractmethod
    def say_attached(self, asked: Attach, offset: int) -> None: ...

    @abstractmethod
    def say_detached(self, topic: str) -> None: ...

    @abstractmethod
    def say_ack(self, publish: Publish) -> None: ...

    @abstractmethod
    def say_pong(self, timestamp: int) -> None: ...

    @abstractmethod
    def say_auth_ok(self, valid_ms: int) -> None: ...

    @abstractmethod
    def say_auth_refused(self, code: int, reason: str) -> None: ...

    @abstractmethod
    def say_messages(self, topic: str, begin: int, payloads: list[bytes]) -> None: ...

    @abstractmethod
    def say_detach(self) -> None:
        """Send a DETACH, which only clients may send."""

    def is_new(self, publish: Publish) -> bool:
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.peer.accepted += 1
        self.peer.connections.append(self)
        if self.peer.hang_up:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.peer.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        self.peer.reads.append(data)
        for message in self.hear(data):
            self.peer.received.append(message)
            self.answer(message)
        if self.peer.acks:
            self.acknowledge()
        self.deliver()

    def answer(self, message: Heard) -> None:
        match message:
            case Attach(topic, offset):
                start = self.peer.end(topic) if offset is None else offset
                start = max(start, self.peer.begins.get(topic, 0))
                self.next[topic] = start
                self.say_attached(message, start)
            case Detach(topic):
                self.next.pop(topic, None)
                self.say_detached(topic)
            case Publish(_, topic, payload):
                if self.is_new(message):
                    self.peer.log.setdefault(topic, []).append(payload)
                    self.unacknowledged = message
            case Ping(timestamp):
                if self.peer.pongs:
                    self.say_pong(timestamp)
            case Auth(token):
                if not self.peer.knows_tokens:
                    self.transport.close()
                elif token in self.peer.refused_tokens:
                    self.refuse(*self.peer.refused_tokens[token])
                else:
                    self.say_auth_ok(self.peer.valid_ms)

    def refuse(self, code: int, reason: str) -> None:
        self.say_auth_refused(code, reason)
        self.transport.close()

    def acknowledge(self) -> None:
        if self.unacknowledged is not None:
            self.say_ack(self.unacknowledged)
            self.unacknowledged = None

    def deliver(self) -> None:
        for topic, begin in self.next.items():
            position = self.peer.begins.get(topic, 0)
            new = []
            for payload in self.peer.log.get(topic, []):
                if position >= begin:
                    new.append(payload)
                position += _size(payload)
            if new:
                self.next[topic] = position
                self.say_messages(topic, begin, new)


class PeerThread:
    """A peer in its own thread, for blocking clients."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self.peer.start(), self._loop).result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.peer.stop(), self._loop).result(30)

    def acknowledge(self) -> None:
        self._loop.call_soon_threadsafe(self.peer.acknowledge)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def plain(message: Message) -> Message:
    """Return the same message without its serial, which only Wombat has."""
    return Message(message.topic, message.next_offset, message.payload)


def _size(payload: bytes) -> int:
    return 4 + len(payload)
