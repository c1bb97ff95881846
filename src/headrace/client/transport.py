"""One connection to a server, from the attempt to its end: over TCP, or WebSocket with or without TLS.

A connection makes no decisions: it passes received data to its link (`client/link.py`) and sends the link's
frames.
"""

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, cast

from headrace.picows_adapter import (
    WSCloseCode,
    WSError,
    WSFrame,
    WSInvalidStatusError,
    WSListener,
    WSMsgType,
    WSTransport,
    ws_connect,
)
from headrace.printing import described, unreachable
from headrace.wire.websocket import KEY_BYTES, masked_frames

if TYPE_CHECKING:
    from headrace.client.link import Link

WRITE_BYTES_MAX = 256 * 1024
"""Bytes handed to the transport at once. A ping can overtake frames that are still in the session."""

CLOSED_BY_SERVER = "the server closed the connection"

_KEEPALIVE_IDLE_S = 15
_UNSENT_BYTES_MAX = 128 * 1024
"""Unsent bytes that the kernel may hold: a ping must not wait behind a full socket buffer."""


class Transport(ABC):
    """A connection that reports `opened` when it is established and later, once, `closed`.

    `lost` is resolved in any case, also if the connection is never established.
    """

    transport: asyncio.Transport

    def __init__(self, link: "Link[Any]") -> None:
        self._link = link
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.writing_paused = False
        self.was_hung_up = False
        """True if the server ended the connection; over WebSocket, only with a close code that blames us."""
        self._open = False
        self._dropped = False

    @abstractmethod
    async def dial(self) -> None:
        """Connect to the server; raise OSError if that fails."""

    @abstractmethod
    def write(self, frames: list[bytes]) -> None:
        """Send several frames of the protocol together."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection properly, after everything written has been sent."""

    @property
    def closing(self) -> bool:
        """True if nothing more can be written."""
        return self.transport.is_closing()

    def drop(self, reason: str = "") -> None:
        """Close at once, without sending buffered bytes."""
        self._dropped = True
        was_open = self._open
        self._lost(reason)
        if was_open:
            self.transport.abort()

    def read(self, reading: bool) -> None:
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._open:
            self._link.send()

    def _opened(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        if self._dropped:  # `drop` was called while the connection was being made
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BYTES_MAX // 4)
        self._open = True
        self._link.opened(self)

    def _lost(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._link.closed(reason)
        if not self.lost.done():
            self.lost.set_result(reason)


MakeConnection = Callable[["Link[Any]"], Transport]


class TcpConnection(Transport, asyncio.Protocol):
    """A connection over plain TCP, for protocols that frame their own messages."""

    def __init__(self, link: "Link[Any]", host: str, port: int) -> None:
        super().__init__(link)
        self._host = host
        self._port = port

    async def dial(self) -> None:
        sock = await open_socket(self._host, self._port)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def write(self, frames: list[bytes]) -> None:
        self.transport.write(b"".join(frames))

    def close(self) -> None:
        self.transport.close()

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._link.received((data,))

    def eof_received(self) -> None:
        self.was_hung_up = True  # asyncio closes the transport after this

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(str(error or "") or CLOSED_BY_SERVER)


async def open_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that answers.

    Raises an OSError with a readable message if none answers: the error of the last address tried.
    """
    loop = asyncio.get_running_loop()
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    error: OSError | None = None
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as failure:
        raise OSError(unreachable(failure, place)) from failure
    for family, kind, protocol, _, address in found:
        try:
            return await _connect(socket.socket(family, kind, protocol), address)
        except OSError as failure:
            # Class and text are derived from the errno, so that they are the same with every event loop.
            known = OSError(failure.errno, os.strerror(failure.errno or 0))
            error = type(known)(unreachable(known, place))
    raise error or OSError(f"{host} has no address")


async def _connect(sock: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Some systems lack these options. There, only pings detect a dead peer.
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


SMALL_BYTES_MAX = 512
"""Up to this many bytes, masking a message in Python is cheaper than a system call for it."""

RECEIVE_WINDOW_BYTES_MAX = 1024 * 1024
"""Approximate limit of received bytes in the kernel: picows reads them all at once, and keeps a buffer of
that size."""

BLAMING_CODES = frozenset({1002, 1003, 1007, 1008, 1009})
"""Close codes that mean: the server objects to something that it was sent."""

REASON_MAX = 250
"""Characters of a server's refusal that an error message repeats."""


class WebSocketTransport(Transport, WSListener):
    """A connection over WebSocket. picows does the handshake and reads frames.

    It carries binary messages only; each message is one chunk. Small messages that are written together are
    sent together.
    """

    _ws: WSTransport

    def __init__(
        self,
        link: "Link[Any]",
        host: str,
        port: int,
        *,
        url: str,
        ssl: SSLContext | None,
        message_bytes_max: int,
    ) -> None:
        """Prepare to connect. The handshake names `url`; `wss` without `ssl` uses the default TLS context."""
        super().__init__(link)
        self._host = host
        self._port = port
        self._url = url
        self._ssl = ssl
        self._message_bytes_max = message_bytes_max
        self._messages: list[bytes] = []
        self._fragments: bytearray | None = None
        self._explanation: asyncio.Task[None] | None = None

    async def dial(self) -> None:
        sock = await open_socket(self._host, self._port)
        if hasattr(socket, "TCP_WINDOW_CLAMP"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, RECEIVE_WINDOW_BYTES_MAX)
        try:
            _, listener = await ws_connect(
                lambda: self,
                self._url,
                ssl_context=self._ssl,
                socket_factory=lambda _: sock,
                use_aiofastnet=False,
                websocket_handshake_timeout=None,  # the caller has a timeout for the whole attempt
                max_redirects=0,
                max_frame_size=self._message_bytes_max,
                enable_auto_pong=False,  # else `on_ws_frame` misses a ping at the end of a read
                logger_name=_log,
            )
        except BaseException as error:
            # A cancelled picows leaves its transport open. The end of the stream closes the transport.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if isinstance(error, WSError):
                raise ConnectionError(_refusal(error)) from None
            raise
        if listener is None:
            raise ConnectionError(f"{CLOSED_BY_SERVER} during the WebSocket handshake")

    @property
    def closing(self) -> bool:
        return self._ws.is_close_frame_sent or super().closing

    def write(self, frames: list[bytes]) -> None:
        small: list[bytes] = []
        for frame in frames:
            if len(frame) <= SMALL_BYTES_MAX:
                small.append(frame)
            else:
                self._write_small(small)
                small = []
                self._ws.send(WSMsgType.BINARY, frame)
        self._write_small(small)

    def close(self) -> None:
        self._ws.send_close(WSCloseCode.OK)  # the server's answer ends the connection

    # Callbacks of picows

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._ws = transport
        self._opened(transport.underlying_transport)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if not self._open:
            return
        if frame.msg_type is WSMsgType.BINARY and frame.fin and self._fragments is None:
            self._messages.append(frame.get_payload_as_bytes())
        else:
            self._other_frame(frame)
        if frame.last_in_buffer:
            self._hand_over()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        if self._open:
            # picows knows the reason only after this callback has returned.
            self._explanation = asyncio.get_running_loop().create_task(self._explain())

    async def _explain(self) -> None:
        reason = CLOSED_BY_SERVER
        try:
            await self._ws.wait_disconnected()
        except WSError as error:
            reason = f"the server broke the protocol: {error}"
        self._lost(reason)

    def _other_frame(self, frame: WSFrame) -> None:
        if frame.msg_type is WSMsgType.PING:
            self._ws.send_pong(frame.get_payload_as_bytes())
        elif frame.msg_type is WSMsgType.CLOSE:
            self._hand_over()
            self._closed_by_server(frame.get_payload_as_bytes())
        elif frame.msg_type is WSMsgType.TEXT:
            self._give_up(WSCloseCode.UNSUPPORTED_DATA, "a text message")
        elif frame.msg_type is not WSMsgType.PONG:
            self._fragment(frame)

    def _fragment(self, frame: WSFrame) -> None:
        """Take a fragment of a message: BINARY first, then CONTINUATION up to the final one."""
        if frame.msg_type is WSMsgType.BINARY and self._fragments is None:
            self._fragments = bytearray()
        elif frame.msg_type is WSMsgType.BINARY or self._fragments is None:
            self._give_up(WSCloseCode.PROTOCOL_ERROR, "a fragment out of turn")
            return
        self._fragments += frame.get_payload_as_bytes()
        if len(self._fragments) > self._message_bytes_max:
            over = f"a message over {self._message_bytes_max} bytes"
            self._give_up(WSCloseCode.MESSAGE_TOO_BIG, over)
        elif frame.fin:
            self._messages.append(bytes(self._fragments))
            self._fragments = None

    def _hand_over(self) -> None:
        messages = self._messages
        # After an error, picows still delivers some frames. It has sent CLOSE by then.
        if not messages or not self._open or self._ws.is_close_frame_sent:
            return
        self._messages = []
        try:
            self._link.received(messages)
        except Exception as error:
            # Internal error: report it as asyncio does. picows would only log it.
            context = {"message": "receiving failed", "exception": error, "protocol": self}
            asyncio.get_running_loop().call_exception_handler(context)
            self.drop(described(error))

    def _closed_by_server(self, payload: bytes) -> None:
        if self._ws.is_close_frame_sent:  # this is the answer to our close frame
            self.transport.abort()
            return
        code = int.from_bytes(payload[:2], "big")
        self._ws.send_close(WSCloseCode.OK)
        self.was_hung_up = code in BLAMING_CODES
        reason = payload[2:].decode(errors="replace")
        self.drop(f"closed by the server: {code or ''} {reason}".rstrip(": "))

    def _give_up(self, code: WSCloseCode, what: str) -> None:
        self._hand_over()
        if self._open:
            self._ws.send_close(code, what)
            self.drop(f"the server broke the protocol: {what}")

    def _write_small(self, messages: list[bytes]) -> None:
        if len(messages) == 1:
            self._ws.send(WSMsgType.BINARY, messages[0])
        elif messages:
            keys = os.urandom(KEY_BYTES * len(messages))
            self.transport.write(masked_frames(messages, keys))


def _refusal(error: WSError) -> str:
    if not isinstance(error, WSInvalidStatusError) or error.response is None:
        return f"the server broke the protocol: {error}"
    status = error.response.status
    body = (error.raw_body or b"").decode(errors="replace").split()
    return f"the server answered {status.value}: {' '.join(body) or status.phrase}"[:REASON_MAX]


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """Lower all messages of picows to DEBUG.

    picows logs every connection and warns of every failure; our callers learn of them from us.
    """

    def log(self, level: int, msg: object, *args: Any, **details: Any) -> None:
        super().log(min(level, logging.DEBUG), msg, *args, **details)


# An adapter instead of a logger: picows would create a child logger for each connection.
_log = _Quiet(logging.getLogger(__name__), {})
