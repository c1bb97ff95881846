"""Figg over TCP: passes received bytes to the session. Elsewhere: all other work (`connection.py`)."""

import asyncio
from collections.abc import Sequence
from typing import cast

from headrace.model import Position
from headrace.server.connection import Connections
from headrace.server.strangers import recognise
from headrace.server.topics import RecordsEncoding, TopicConnection
from headrace.session.figg import FiggServerSession
from headrace.wire.figg import messages as figg

_LARGE_READ_BYTES = 1 << 17
"""Size from which a read means that more data waits. uvloop reads at most 250 KiB at once."""


def encode(topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
    return figg.encode_data(topic, at.offset, records)


class FiggConnection(TopicConnection, asyncio.Protocol):
    __slots__ = ("_figg", "_is_new")
    protocol = "figg"
    encode = staticmethod(encode)
    encode_records = RecordsEncoding(figg.encode_records)

    def __init__(self, shared: Connections) -> None:
        self._figg = FiggServerSession()
        self._is_new = True
        super().__init__(shared, self._figg)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._shared.loop.time()
        if self._is_new:
            self._is_new = False
            if stranger := recognise(data, self._shared.listeners):
                self._write(stranger.answer)
                self.handle([self._figg.refuse(stranger.reason)], len(data))
                return
        self.handle(self._figg.receive_data(data), len(data) - self._figg.unread_bytes)
        if len(data) >= _LARGE_READ_BYTES:
            self.more_to_read()

    @property
    def _has_undecoded(self) -> bool:
        return self._figg.unread_bytes > 0

    def _decode_more(self) -> list[tuple[object, int]]:
        before = self._figg.unread_bytes
        if not before:
            return []
        commands = self._figg.receive_data(b"")
        size = before - self._figg.unread_bytes
        return [(command, size) for command in commands]

    def eof_received(self) -> bool:
        """Close after the last acknowledgements: a peer that has stopped sending may still read."""
        self.handle([self._figg.refuse("")._replace(is_peers_fault=False)], 0)
        # True keeps the transport open while acknowledgements are pending.
        return not self._closed

    def connection_lost(self, error: Exception | None) -> None:
        self.lost()
