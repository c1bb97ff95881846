"""WebSocket connections: assemble frames into messages, and send close codes. They know no protocol.

Each protocol has its own subclass of `WebSocketConnection`. The messages of one read are passed on together,
so that batches cross layers here too.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from headrace.model import Refusal
from headrace.picows_adapter import (
    ServerListener,
    WSCloseCode,
    WSFrame,
    WSMsgType,
    WSTransport,
    serve,
)
from headrace.server.peers.connection import Connection
from headrace.server.peers.connections import Connections
from headrace.session.server import ServerSession
from headrace.wire import websocket

_CONTROL_BYTES_MAX = 125
"""Largest payload of a ping, pong or close (RFC 6455 section 5.5)."""

_CLOSE_FRAME = b"\x88"
"""First byte of a CLOSE that is not fragmented."""

_BINARY = WSMsgType.BINARY
_TEXT = WSMsgType.TEXT
_CONTINUATION = WSMsgType.CONTINUATION
_CLOSE = WSMsgType.CLOSE
_PING = WSMsgType.PING
_PONG = WSMsgType.PONG


class WebSocketConnection(Connection):
    """A connection whose peer sends messages and learns the reason when it is closed.

    Implements `ServerConnection`.
    """

    __slots__ = ("_kept_close", "_says_goodbye", "_websocket")
    message_bytes_max: int
    """Largest message. A larger frame is refused at its header, fragments when their sum is larger."""
    takes_text = False
    """True if text messages are part of the protocol."""
    large_refusal: Refusal | None = None
    """Set in protocols where a message above that size is a publish that the peer would send again."""

    def websocket_opened(self, transport: asyncio.Transport, ws: WSTransport) -> None:
        self._websocket = ws
        self._kept_close = b""
        """Picows' CLOSE for a frame that is too large, kept while this peer is held."""
        self._says_goodbye = False
        self.opened(transport)

    def messages_received(self, messages: Sequence[Any]) -> None:
        """Handle all messages of one read: bytes, and strings if the protocol takes text."""
        raise NotImplementedError

    def traced(self, messages: Sequence[bytes | str]) -> None:
        """Show the messages of a read to those who trace this connection."""
        if self._shared.trace is not None:
            self._shared.trace.received(self, messages)

    def heard(self, size: int) -> None:
        """Called after each read of `size` bytes was handled, also if it completes no message."""
        self._shared.strangers.heard(self, size)

    def answer(self, data: bytes) -> None:
        self._write_answer(data)

    def ponged(self) -> None:
        """Called when the peer has answered a ping."""

    def refuse(self, reason: str, code: int) -> None:
        refused = self.large_refusal if code == websocket.TOO_BIG else None
        self.handle([self._session.refuse(reason, code)._replace(refused=refused)], 0)

    def peer_closes(self, code: int) -> None:
        """Handle the peer's CLOSE. It is answered once the peer's publishes are acknowledged."""
        if self._hold_timer is not None:
            self.end_hold()
        self.handle([self._session.refuse("", code)._replace(is_peers_fault=False)], 0)

    def keeps(self, data: bytes) -> bool:
        """True if `data` is picows' own CLOSE for a frame that is too large. It is sent later, if at all."""
        if self.large_refusal is None or data[:1] != _CLOSE_FRAME or self._says_goodbye:
            return False
        if int.from_bytes(data[2:4]) == websocket.TOO_BIG:
            self._kept_close = data
        return bool(self._kept_close)

    def frames_refused(self) -> None:
        """End the connection after picows has refused the peer's frames. Its CLOSE was sent or is kept."""
        if self.is_gone or self._goodbye is not None:
            return
        said = self._websocket.close_handshake.sent
        reason = said.reason if said is not None else "bad frames"
        if self._kept_close:
            self.refuse(reason, websocket.TOO_BIG)
        else:
            self.count_refusal(reason)
            self._hang_up()

    def _say_goodbye(self, reason: str, code: int) -> None:
        if self._kept_close:
            self.write(self._kept_close)  # picows counts it as sent, and sends no other
            return
        self._says_goodbye = True
        self._websocket.send_close(WSCloseCode(code), websocket.close_reason(reason))


class HeardConnections:
    """The connections of one protocol, in the order in which they were last heard."""

    def __init__(self, shared: Connections) -> None:
        self.shared = shared
        self.open: dict[HeardConnection, None] = {}

    def tick(self, now: float) -> None:
        """Look at the peers that were silent longest."""
        for connection in list(self.open):
            if not connection.tick(now):
                break


class HeardConnection(WebSocketConnection):
    __slots__ = ("hub",)
    hub: HeardConnections

    def __init__(self, hub: HeardConnections, session: ServerSession) -> None:
        self.hub = hub
        super().__init__(hub.shared, session)
        hub.open[self] = None

    def lost(self) -> None:
        self.hub.open.pop(self, None)
        super().lost()

    def tick(self, now: float) -> bool:
        """Handle a peer that has been silent for too long. Return False if it was heard recently."""
        raise NotImplementedError

    def _move_to_end(self) -> None:
        if self.hub.open.pop(self, self) is None:
            self.hub.open[self] = None


class PingedConnections(HeardConnections):
    """The connections of one protocol: silent peers are pinged, and closed if they stay silent."""

    def __init__(self, shared: Connections, *, ping_s: float, timeout_s: float) -> None:
        super().__init__(shared)
        self.ping_s = ping_s
        self.timeout_s = timeout_s
        """Time for an answer to the ping."""


class PingedConnection(HeardConnection):
    __slots__ = ("_pinged",)
    hub: PingedConnections

    def __init__(self, hub: PingedConnections, session: ServerSession) -> None:
        self._pinged = False
        super().__init__(hub, session)

    def tick(self, now: float) -> bool:
        if now < self._heard_s + self.hub.ping_s:
            return False
        if self._is_unread:
            self._was_heard()  # the server could not hear the peer
        elif now >= self._heard_s + self.hub.ping_s + self.hub.timeout_s:
            self.hub.open.pop(self, None)
            self._stays_silent(f"nothing was heard for {now - self._heard_s:.0f} s")
        elif not self._pinged:
            self._pinged = True
            self._ping()
        return True

    def _ping(self) -> None:
        raise NotImplementedError

    def _stays_silent(self, reason: str) -> None:
        self.close(reason, websocket.POLICY_VIOLATION)

    def _was_heard(self) -> None:
        self._heard_s = self._shared.loop.time()
        self._pinged = False
        self._move_to_end()


def upgrade(
    connection: WebSocketConnection, transport: asyncio.Transport, data: bytes, subprotocol: str
) -> None:
    """Make a transport a WebSocket. `data` is the handshake, and perhaps the first frames."""
    frames = _Frames(connection, transport)
    bytes_max = connection.message_bytes_max
    serve(frames, transport, data, frame_bytes_max=bytes_max, subprotocol=subprotocol)


class _Frames(ServerListener):
    """Assembles messages, and passes on those of one read together."""

    __slots__ = ("_add", "_is_text", "_messages", "_parts", "_pongs", "_transport")
    connection: WebSocketConnection

    def __init__(self, connection: WebSocketConnection, transport: asyncio.Transport) -> None:
        self.connection = connection
        self._transport = transport
        self._messages: list[bytes | str] = []
        self._add = self._messages.append
        self._parts: bytearray | None = None
        self._is_text = False
        self._pongs = bytearray()

    def on_ws_connected(self, ws: WSTransport) -> None:
        self.connection.websocket_opened(self._transport, ws)

    def on_ws_frame(self, ws: WSTransport, frame: WSFrame) -> None:
        # Only this method runs for every incoming message, so it is short. Asking a frame for its type costs
        # as much as all the rest, and most frames need not be asked: a frame is binary if it is longer than a
        # control frame may be, and begins like a MessagePack map, as no text does.
        payload = frame.get_payload_as_bytes()
        if len(payload) > _CONTROL_BYTES_MAX and payload[0] & 0xF0 == 0x80:
            if frame.fin and self._parts is None:
                self._add(payload)
            else:
                self._fragment(frame, payload)
        else:
            self._other(frame, payload)

    def on_ws_disconnected(self, ws: WSTransport) -> None:
        self.connection.lost()

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()

    def hand_on(self) -> None:
        """Pass the pongs and messages so far to the connection."""
        if self._pongs:
            pongs = bytes(self._pongs)
            self._pongs.clear()
            self.connection.answer(pongs)
        if self._messages:
            messages = self._messages.copy()
            self._messages.clear()
            self.connection.traced(messages)
            self.connection.messages_received(messages)

    def _other(self, frame: WSFrame, payload: bytes) -> None:
        kind = frame.msg_type
        if kind is _BINARY and frame.fin and self._parts is None:
            self._add(payload)
        elif kind is _TEXT and not self.connection.takes_text:
            self._refuse("text messages are not part of this protocol", websocket.UNSUPPORTED_DATA)
        elif kind is _TEXT and frame.fin and self._parts is None:
            self._add_text(payload)
        elif kind is _BINARY or kind is _TEXT or kind is _CONTINUATION:
            self._fragment(frame, payload)
        elif kind is _CLOSE:
            self.hand_on()
            # Picows knows only the standard's codes, and applications have codes of their own.
            code = int.from_bytes(payload[:2]) or websocket.OK
            if websocket.may_be_sent(code):
                self.connection.peer_closes(code)
            else:
                self.connection.refuse(f"close code {code} is never sent", websocket.PROTOCOL_ERROR)
        elif kind is _PONG:
            self.connection.ponged()
        elif kind is _PING:
            self._pongs += websocket.frame(payload, websocket.PONG)

    def _fragment(self, frame: WSFrame, payload: bytes) -> None:
        """Add a fragment to its message (RFC 6455 section 5.4)."""
        begins = frame.msg_type is not _CONTINUATION
        if begins is not (self._parts is None):
            self._refuse("fragments out of order", websocket.PROTOCOL_ERROR)
            return
        if self._parts is None:
            self._parts = bytearray()
            self._is_text = frame.msg_type is _TEXT
        self._parts += payload
        if len(self._parts) > self.connection.message_bytes_max:
            limit = self.connection.message_bytes_max
            self._refuse(f"a message of more than {limit} bytes", websocket.TOO_BIG)
            return
        if frame.fin:
            whole, self._parts = bytes(self._parts), None
            add = self._add_text if self._is_text else self._add
            add(whole)

    def _add_text(self, payload: bytes) -> None:
        try:
            self._messages.append(payload.decode())
        except UnicodeDecodeError:
            self._refuse("a text message is not UTF-8", websocket.INVALID_DATA)

    def _refuse(self, reason: str, code: int) -> None:
        """Refuse the peer, after passing on the messages that came before."""
        self.hand_on()
        self.connection.refuse(reason, code)
