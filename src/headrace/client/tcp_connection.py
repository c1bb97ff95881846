"""A connection over plain TCP, for protocols that frame their own messages."""

import asyncio
from typing import cast

from headrace.client.connection import CLOSED_BY_SERVER, Connection, Owner
from headrace.client.sockets import open_socket


class TcpConnection(Connection, asyncio.Protocol):
    def __init__(self, owner: Owner, host: str, port: int) -> None:
        super().__init__(owner)
        self._host = host
        self._port = port

    async def dial(self) -> None:
        sock = await open_socket(self._host, self._port)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def write(self, frames: list[bytes]) -> None:
        self.transport.write(b"".join(frames))

    def close(self) -> None:
        self.transport.close()

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._owner.received((data,))

    def eof_received(self) -> None:
        self.was_hung_up = True  # and the transport closes

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(str(error or "") or CLOSED_BY_SERVER)
