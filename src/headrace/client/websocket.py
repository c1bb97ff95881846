"""A connection over WebSocket, plain or with TLS. picows does the handshake and reads frames.

It carries binary messages only; each message is one chunk. Small messages that are written together are sent
together.
"""

import asyncio
import logging
import os
import socket
from contextlib import suppress
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Any

from headrace.client.transport import (
    CLOSED_BY_SERVER,
    Transport,
    open_socket,
    place_of,
)
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
from headrace.printing import described
from headrace.tls import failure
from headrace.wire.websocket import KEY_BYTES, masked_frames

if TYPE_CHECKING:
    from headrace.client.link import Link

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
        """Prepare to connect. The handshake names `url`, and `ssl` is the context of `wss`."""
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
            if self._ssl is not None and isinstance(error, SSLError):
                place = place_of(self._host, self._port)
                raise ConnectionError(failure(error, place)) from None
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
