"""Wombat over WebSocket: passes messages to the session, and closes silent clients."""

import logging
from collections.abc import Sequence

from headrace.broker.broker import BrokerSubscription
from headrace.model import Position, Refusal
from headrace.printing import quoted
from headrace.server.connection import Connections, Pause
from headrace.server.topics import RecordsEncoding, TopicConnection
from headrace.server.websocket import WebSocketConnection
from headrace.session.wombat import WombatServerSession
from headrace.wire import websocket
from headrace.wire.wombat import messages as wombat

logger = logging.getLogger(__name__)


def encode(topic: str, at: Position, records: Sequence[bytes], _ms: int) -> bytes:
    return wombat.encode_payloads(topic, at.epoch, at.offset, records)


class Wombats:
    """The Wombat connections of one server, in the order in which they were last heard."""

    def __init__(self, shared: Connections) -> None:
        self.shared = shared
        self.heard: dict[WombatConnection, None] = {}

    def __call__(self) -> "WombatConnection":
        return WombatConnection(self)

    def tick(self, now: float) -> None:
        """Close connections that have been silent for too long. The others cost nothing."""
        while self.heard:
            connection = next(iter(self.heard))
            if now < connection.silent_at:
                break
            connection.time_is_up(now)


class WombatConnection(TopicConnection, WebSocketConnection):
    __slots__ = ("_wombat", "_wombats")
    protocol = "wombat"
    encode = staticmethod(encode)
    encode_records = RecordsEncoding(wombat.encode_reader_answer)
    message_bytes_max = wombat.MESSAGE_BYTES_MAX
    large_refusal = Refusal.LARGE_PAYLOAD

    def __init__(self, wombats: Wombats) -> None:
        self._wombats = wombats
        shared = wombats.shared
        self._wombat = WombatServerSession(shared.loop.time(), shared.limits.silence_s)
        super().__init__(shared, self._wombat)
        wombats.heard[self] = None

    def messages_received(self, messages: Sequence[bytes]) -> None:
        silent_at = self._wombat.silent_at
        now = self._heard_s = self._shared.loop.time()
        commands = self._wombat.receive_messages(messages, now)
        if self._wombat.silent_at != silent_at:
            self._move_to_end()
        if self._wombat.repeats:
            self._shared.metrics.count("duplicates_refused_total", self._wombat.repeats)
            self._wombat.repeats = 0
        self.handle(commands, sum(map(len, messages)))

    @property
    def silent_at(self) -> float:
        return self._wombat.silent_at

    def time_is_up(self, now: float) -> None:
        """Close the connection, because no PING came, unless the server could not have received a PING."""
        if self._paused & ~Pause.ANSWERS:
            # The server does not read, so it could not receive a PING. A pause for unread answers does not
            # count: the peer itself causes it.
            self._wombat.heard(now)
            self._move_to_end()
        else:
            del self._wombats.heard[self]
            silence_s = self._shared.limits.silence_s
            reason = f"no PING for {silence_s:g} s"
            self.count_refusal(reason)
            self.close(reason, websocket.POLICY_VIOLATION)

    def lost(self) -> None:
        self._wombats.heard.pop(self, None)
        super().lost()

    def overtaken(self, subscription: BrokerSubscription) -> None:
        name = subscription.topic.name
        if self._claims and name in self._claims:
            return  # RECORDS carry their offset
        # A client need not interpret serials: the next ATTACHED tells the client what it missed.
        reason = f"messages of {quoted(name)} are gone: attach again"
        logger.warning("%s: closing: %s", self.peer, reason)
        self._drop(name)
        self.handle([self._session.refuse(reason)._replace(is_peers_fault=False)], 0)

    def _reads_again(self, why: int) -> None:
        # The peer's PING may be behind all the data that was not read.
        if why & (Pause.PUBLISHES | Pause.COMMANDS):
            self._wombat.heard(self._shared.loop.time())
            self._move_to_end()

    def _move_to_end(self) -> None:
        if self._wombats.heard.pop(self, self) is None:
            self._wombats.heard[self] = None
