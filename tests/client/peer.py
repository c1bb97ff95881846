"""A small Figg server on loopback that does as it is told, to test clients against.

It shares the codec with the client, which has its own tests, and nothing else: topics are lists.
"""

import asyncio
import socket
import threading
from types import TracebackType
from typing import Self, cast

import uvloop

from headrace.wire import figg


class Peer:
    """Answers like a server, unless one of its switches says otherwise."""

    def __init__(self) -> None:
        self.log: dict[str, list[bytes]] = {}
        self.begins: dict[str, int] = {}
        """Where the oldest record kept of a topic begins, for expiry."""
        self.received: list[figg.ToServer] = []
        self.reads: list[bytes] = []
        self.connections: list[Connection] = []
        self.accepted = 0
        self.acks = True
        self.pongs = True
        self.hang_up = False
        """Close every connection as soon as it stands."""
        self._server: asyncio.Server | None = None
        # Bound once, so that the address stays the same while nothing listens.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"figg://127.0.0.1:{self.port}"

    async def start(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, reuse_address=True
        )
        return self

    async def stop(self) -> None:
        """Close the listener and every connection; the log stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop()
        while self.connections:
            await asyncio.sleep(0)

    def drop(self) -> None:
        for connection in self.connections:
            connection.transport.abort()

    def append(self, topic: str, *payloads: bytes) -> None:
        """Publish from nowhere, and deliver."""
        self.log.setdefault(topic, []).extend(
            len(payload).to_bytes(4, "big") + payload for payload in payloads
        )
        for connection in self.connections:
            connection.deliver()

    def expire(self, topic: str, records: int) -> None:
        gone = self.log[topic][:records]
        del self.log[topic][:records]
        self.begins[topic] = self.begins.get(topic, 0) + sum(map(len, gone))

    def payloads(self, topic: str) -> list[bytes]:
        return [record[4:] for record in self.log.get(topic, [])]

    def attaches(self) -> list[figg.Attach]:
        return [message for message in self.received if isinstance(message, figg.Attach)]

    def acknowledge(self) -> None:
        """Send the acknowledgements held back so far."""
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


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.decoder = figg.ServerDecoder()
        self.next: dict[str, int] = {}
        self.highest = -1

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
        for message in self.decoder.receive(data):
            self.peer.received.append(message)
            self.answer(message)
        self.deliver()

    def answer(self, message: figg.ToServer) -> None:
        match message:
            case figg.Attach(topic, offset):
                start = self.end(topic) if offset is None else offset
                start = max(start, self.peer.begins.get(topic, 0))
                self.next[topic] = start
                self.transport.write(figg.encode_attached(topic, start))
            case figg.Detach(topic):
                self.next.pop(topic, None)
                self.transport.write(figg.encode_detached(topic))
            case figg.Publishes(records, _, highest):
                for topic, new in records.items():
                    self.peer.log.setdefault(topic, []).extend(new)
                self.highest = max(self.highest, highest)
                if self.peer.acks:
                    self.acknowledge()
            case figg.Ping(timestamp) if self.peer.pongs:
                self.transport.write(figg.encode_pong(timestamp))

    def acknowledge(self) -> None:
        if self.highest >= 0:
            self.transport.write(figg.encode_ack(self.highest))

    def end(self, topic: str) -> int:
        return self.peer.begins.get(topic, 0) + sum(map(len, self.peer.log.get(topic, [])))

    def deliver(self) -> None:
        for topic, begin in self.next.items():
            position = self.peer.begins.get(topic, 0)
            new = []
            for record in self.peer.log.get(topic, []):
                if position >= begin:
                    new.append(record)
                position += len(record)
            if new:
                self.transport.write(figg.encode_data(topic, begin, new))
                self.next[topic] = position


class PeerThread:
    """A peer in a thread of its own, for blocking clients."""

    def __init__(self) -> None:
        self.peer = Peer()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self.peer.start(), self._loop).result(5)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.peer.stop(), self._loop).result(5)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
