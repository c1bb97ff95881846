"""Both sides of Figg, without I/O: a client over all its connections, and the server side of a connection.

`session/topics/client.py` has the theory of operation of clients, and the code that Figg shares with Wombat.
Figg's own rules are here: places are offsets, numbers do not wrap, and an ACK covers all publishes up to its
number.
"""

from collections.abc import Sequence

from headrace.errors import LocalProtocolError
from headrace.session.client import Broken
from headrace.session.server import (
    AttachCommand,
    Authenticate,
    Close,
    Command,
    DetachCommand,
    Publish,
    TopicSession,
    Unit,
)
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import Event, check_offset
from headrace.session.topics.window import WINDOW_BYTES_MAX, WINDOW_MAX
from headrace.wire import readers, tokens, websocket
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ClientDecoder, ServerDecoder

PING_INTERVAL_S = 2.0
PINGS_UNANSWERED_MAX = 2

SILENT_S = 1.0
"""Time after which a silent server with an open connection counts as a Figg server. The protocol does not
require answers to pings, and a server has nothing else to send to a client that asks for nothing."""


class FiggClientSession(ClientSession):
    _codec = figg

    def __init__(
        self,
        *,
        window_max: int = WINDOW_MAX,
        window_bytes_max: int = WINDOW_BYTES_MAX,
        ping_interval_s: float | None = PING_INTERVAL_S,
        pings_unanswered_max: int = PINGS_UNANSWERED_MAX,
    ) -> None:
        super().__init__(
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            ping_interval_s=ping_interval_s,
            pings_unanswered_max=pings_unanswered_max,
            silent_s=SILENT_S,
        )

    def _check_place(self, place: object) -> int:
        if isinstance(place, str):
            raise LocalProtocolError("Figg has no serials: subscribe with `offset`")
        return check_offset(place)

    def _reset_decoder(self) -> None:
        self._decoder = ClientDecoder()

    def _decode(self, chunks: Sequence[bytes]) -> Sequence[figg.ToClient]:
        return self._decoder.receive(b"".join(chunks))

    def _take(self, message: figg.ToClient, now: float, events: list[Event]) -> None:
        if isinstance(message, figg.Data):
            self._topics.deliver(message.topic, message.messages, events)
        elif isinstance(message, figg.Ack):
            self._ack(message.seq_num, events)
        elif isinstance(message, figg.Pong):
            self._pong(message.timestamp, now, events)
        elif isinstance(message, figg.Attached):
            self._topics.attached(message.topic, message.offset, events)
        elif isinstance(message, figg.Detached):
            self._detached(message.topic, events)
        elif isinstance(message, readers.ToClient):
            self._readers.take(message, events)
        elif isinstance(message, tokens.ToClient):
            self._auth_answer(message, now, events)
        else:
            events.append(Broken(f"the server broke the protocol: {message.reason}"))

    def _ack(self, seq_num: int, events: list[Event]) -> None:
        count = seq_num + 1 - self._window.oldest
        if count > len(self._window):
            text = f"the server acknowledged publish {seq_num}, which was never sent"
            events.append(Broken(text))
        elif count > 0:
            self._acknowledge(count, events)


class FiggServerSession(TopicSession):
    __slots__ = ()
    _decoder: ServerDecoder

    def __init__(self) -> None:
        super().__init__(ServerDecoder())

    def receive_data(self, data: bytes) -> list[Command]:
        commands: list[Command] = []
        for message in self._decoder.receive(data):
            if isinstance(message, figg.Publishes):
                unit = Unit(message.lowest, message.highest)
                self._publishes_under_way().add(unit)
                self._take_publish(Publish(message.records, unit), commands)
            elif isinstance(message, figg.Ping):
                self._out.append(figg.encode_pong(message.timestamp))
            elif isinstance(message, figg.Attach):
                commands.append(AttachCommand(message.topic, message.offset))
            elif isinstance(message, figg.Detach):
                commands.append(DetachCommand(message.topic))
            elif isinstance(message, readers.Read | readers.Handled):
                commands.append(message)
            elif isinstance(message, tokens.Auth):
                commands.append(Authenticate(message.token))
            else:
                code = websocket.POLICY_VIOLATION
                commands.append(self.refuse_publish(message.reason, code, message.refused))
        return commands

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        # Nothing more is decoded, and the connection may stay open for a while.
        self._decoder.forget()
        return super().refuse(reason, code)

    @property
    def unread_bytes(self) -> int:
        """Number of bytes received and not decoded. `receive_data`, even without data, continues there."""
        return len(self._decoder.unread)

    @property
    def unfinished(self) -> bytes:
        """All bytes that were received and not decoded yet."""
        return self._decoder.unfinished

    def attaching(self, command: AttachCommand) -> None:
        """Do nothing: the answer needs nothing of the command."""

    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        self._out.append(figg.encode_attached(topic, offset))

    def detached(self, topic: str) -> None:
        self._out.append(figg.encode_detached(topic))

    def tell_reader(self, message: readers.ToClient) -> None:
        self._out.append(figg.encode_of_reader(message))

    def _encode_auth_answer(self, answer: tokens.ToClient) -> bytes:
        return figg.encode_auth_answer(answer)

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """Send one ACK for all units."""
        self._out.append(figg.encode_ack(max(unit.highest for unit in ready)))
