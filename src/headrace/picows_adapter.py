"""picows, which reads WebSocket frames. No other module imports it, or relies on its internals.

Clients use the public API of picows, which this module passes on. The server reads and checks a handshake
itself, and so hands a transport over to picows' protocol class, which picows does not export.
`tests/test_picows_adapter.py` says what differs in another version. Elsewhere: messages and close codes
(`server/websocket.py`, `client/transport.py`).
"""

import asyncio
import logging
import sys
from typing import Any, Protocol

# Names with an alias are for other modules, which do not import picows.
from picows import WSAutoPingStrategy, WSUpgradeResponse, WSUpgradeResponseWithListener
from picows import WSCloseCode as WSCloseCode
from picows import WSError as WSError
from picows import WSFrame as WSFrame
from picows import WSInvalidStatusError as WSInvalidStatusError
from picows import WSListener as WSListener
from picows import WSMsgType as WSMsgType
from picows import WSTransport as WSTransport
from picows import ws_connect as ws_connect

try:
    from picows.picows import WSProtocol  # type: ignore[attr-defined]
except ImportError:
    WSProtocol = object  # clients need only the public API, and work without it

from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)

KNOWN_VERSION = "2.3.1"
"""Version of picows whose source this module was checked against."""

_READ_BUFFER_BYTES = 1024
"""Read buffer of an idle connection. It grows with the data that arrives."""

_READ_BYTES_MAX = 1 << 17
"""Largest read. Otherwise the buffer, which never shrinks, would grow to all that the kernel holds."""


class ServerConnection(Protocol):
    """A connection of the server, as far as it is known here."""

    def keeps(self, data: bytes) -> bool:
        """Return True if the connection keeps this data of picows instead of sending it now."""

    def frames_refused(self) -> None:
        """Called when picows has refused the peer's frames, and has written a CLOSE."""

    def heard(self, size: int) -> None:
        """Called after each read of `size` bytes was handled, also if it completes no message."""

    def more_to_read(self) -> None:
        """Called after a read that filled the buffer."""

    def internal_error(self) -> None:
        """Called after an exception in `hand_on`, which is logged here."""


class ServerListener(WSListener):
    """The listener of a connection of the server."""

    __slots__ = ("connection",)
    connection: ServerConnection

    def hand_on(self) -> None:
        """Called after every read, when `on_ws_frame` was called for all its frames."""
        raise NotImplementedError


def check_can_serve() -> None:
    """Raise HeadraceError if the server cannot use the installed version of picows."""
    if WSProtocol is object:
        raise HeadraceError(
            f"the installed picows has no WSProtocol, which the server needs: install picows {KNOWN_VERSION}"
        )


def serve(
    listener: ServerListener,
    transport: asyncio.Transport,
    data: bytes,
    *,
    frame_bytes_max: int,
    subprotocol: str = "",
) -> None:
    """Hand a transport over to picows. `data` is the handshake, and perhaps the first frames.

    `subprotocol`: the one that the answer to the handshake names; empty: none.
    """
    headers = {"Sec-WebSocket-Protocol": subprotocol} if subprotocol else {}
    response = WSUpgradeResponse.create_101_response(headers)
    protocol = _Protocol(
        host_port=None,  # only clients have a host and a path
        ws_path=None,
        is_client_side=False,
        ws_listener_factory=lambda _: WSUpgradeResponseWithListener(response, listener),
        logger=_Silent(logger, None),
        disconnect_on_exception=True,
        websocket_handshake_timeout=None,  # the handshake has arrived
        enable_auto_ping=False,
        auto_ping_idle_timeout=10,
        auto_ping_reply_timeout=10,
        auto_ping_strategy=WSAutoPingStrategy.PING_WHEN_IDLE,
        enable_auto_pong=False,  # pongs that a peer does not read must be counted
        max_frame_size=frame_bytes_max,
        extra_headers=None,
        read_buffer_init_size=_READ_BUFFER_BYTES,
    )
    transport.pause_reading()
    transport.set_protocol(protocol)
    protocol.frames = listener
    protocol.connection_made(_Transport(transport, listener.connection))
    # Pausing and resuming makes the loop read for the new protocol, which is of another kind.
    transport.resume_reading()
    while data:
        room = protocol.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


class _Protocol(WSProtocol):  # type: ignore[misc]
    """Picows' protocol, extended to notice the end of a read."""

    __slots__ = ("frames", "room")

    def get_buffer(self, size_hint: int) -> memoryview:
        buffer: memoryview = super().get_buffer(size_hint)[:_READ_BYTES_MAX]
        self.room = len(buffer)
        return buffer

    def buffer_updated(self, size: int) -> None:
        super().buffer_updated(size)
        try:
            self.frames.hand_on()
        except Exception:
            logger.exception("internal error in a WebSocket connection")
            self.frames.connection.internal_error()
        self.frames.connection.heard(size)
        # After refusing a frame, picows would still read it for a moment, however large it is.
        if self.transport.is_close_frame_sent:
            self.frames.connection.frames_refused()
        elif size == self.room:
            self.frames.connection.more_to_read()


class _Transport:
    """Transport for picows: the real one, except that the connection decides about writing and closing."""

    __slots__ = ("_connection", "_transport")

    def __init__(self, transport: asyncio.Transport, connection: ServerConnection) -> None:
        self._transport = transport
        self._connection = connection

    def close(self) -> None:
        self._connection.frames_refused()

    def write(self, data: bytes | memoryview) -> None:
        """Send the answer to the handshake, or a CLOSE. All other data bypasses picows."""
        copied = bytes(data)  # picows owns the memory
        if not self._connection.keeps(copied) and not self._transport.is_closing():
            self._transport.write(copied)

    def get_write_buffer_size(self) -> int:
        return 1  # at 0, picows would write to the socket itself

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Silent(logging.LoggerAdapter[logging.Logger]):
    """Logger for picows: drops messages about peers, and logs exceptions as internal errors.

    The server itself logs what matters about peers.
    """

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return level >= logging.CRITICAL

    def exception(self, msg: object, *args: object, **kwargs: object) -> None:
        logger.error("internal error in a WebSocket connection", exc_info=sys.exc_info())
