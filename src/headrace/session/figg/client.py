"""The Figg protocol of one client over all its connections, without I/O, futures or clocks.

`session/topics/resuming.py` has the theory of operation, and the code that Figg shares with Wombat. Figg's
own rules are here: places are offsets, numbers do not wrap, and an ACK covers all publishes up to its number.
"""

from collections.abc import Sequence

from headrace.errors import LocalProtocolError
from headrace.session.topics.client import Broken, Event, Place
from headrace.session.topics.resuming import ResumingClientSession
from headrace.session.topics.window import WINDOW_BYTES_MAX, WINDOW_MAX
from headrace.wire import readers
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ClientDecoder

PING_INTERVAL_S = 2.0
PINGS_UNANSWERED_MAX = 2

SILENT_S = 1.0
"""Time after which a silent server with an open connection counts as a Figg server. The protocol does not
require answers to pings, and a server has nothing else to send to a client that asks for nothing."""

_OFFSET_MAX = 2**64 - 1


class FiggClientSession(ResumingClientSession[figg.ToClient]):
    """Implementation of `ClientSession` for Figg."""

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
        self._decoder = ClientDecoder()

    _encode_publish = staticmethod(figg.encode_publish)
    _encode_detach = staticmethod(figg.encode_detach)
    _encode_ping = staticmethod(figg.encode_ping)

    def _encode_attach(self, topic: str, place: Place | None) -> bytes:
        assert not isinstance(place, str), place
        return figg.encode_attach(topic, place)

    def _check_place(self, place: object) -> int:
        if isinstance(place, str):
            raise LocalProtocolError("Figg has no serials: subscribe with `offset`")
        if not (isinstance(place, int) and 0 <= place <= _OFFSET_MAX):
            raise LocalProtocolError(f"an offset is a number from 0 to {_OFFSET_MAX}, not {place}")
        return place

    def _encode_of_reader(self, message: readers.ToServer) -> bytes:
        if isinstance(message, readers.Handled):
            return figg.encode_handled(message)
        return figg.encode_read(message)

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
        else:
            events.append(Broken(f"the server broke the protocol: {message.reason}"))

    def _ack(self, seq_num: int, events: list[Event]) -> None:
        unacknowledged = seq_num + 1 - self._window.next_number
        if unacknowledged > 0:
            events.append(
                Broken(f"the server acknowledged publish {seq_num}, which was never sent")
            )
            return
        count = len(self._window) + unacknowledged
        if count > 0:
            self._acknowledge(count, events)
