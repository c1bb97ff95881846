"""The Wombat protocol of one client over all its connections, without I/O, futures or clocks.

`session/topics/resuming.py` has the theory of operation, and the code that Wombat shares with Figg. Wombat's
own rules are here:

- Places are *serials*: opaque texts from the server that are only stored, compared and sent back. The client
  asks for a topic again with the serial of its last PAYLOAD, or of ATTACHED before the first PAYLOAD.
  Messages were missed if ATTACHED has another serial than the one asked for. To ask for an offset, the client
  sends `@OFFSET`, which Headrace servers understand: that offset in the topic's present epoch.
- Sequence numbers are `uint32` and wrap around on the wire. The session counts without wrapping. An ACK
  covers all publishes up to its number, whatever topic it names: one counter serves all topics. A publish
  that is not acknowledged in time is sent again, on the same connection and with the same number.
- The server hangs up on a client that does not ping, even if the client is not reading.
"""

from collections.abc import Sequence

from headrace.errors import LocalProtocolError
from headrace.session.topics.client import Broken, Event, Place
from headrace.session.topics.resuming import ResumingClientSession
from headrace.session.topics.window import WINDOW_BYTES_MAX, WINDOW_MAX
from headrace.wire import readers
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ClientDecoder

PING_INTERVAL_S = 5.0
PINGS_UNANSWERED_MAX = 1
RESEND_S = 2.0

_NUMBERS = wombat.SEQUENCE_NUMBERS
_OFFSET_MAX = 2**64 - 1


class WombatClientSession(ResumingClientSession[wombat.ToClient]):
    """Implementation of `ClientSession` for Wombat. Chunks are whole WebSocket messages."""

    def __init__(
        self,
        *,
        window_max: int = WINDOW_MAX,
        window_bytes_max: int = WINDOW_BYTES_MAX,
        ping_interval_s: float = PING_INTERVAL_S,
        pings_unanswered_max: int = PINGS_UNANSWERED_MAX,
        resend_s: float = RESEND_S,
    ) -> None:
        super().__init__(
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            ping_interval_s=ping_interval_s,
            pings_unanswered_max=pings_unanswered_max,
            resend_s=resend_s,
        )
        self._decoder = ClientDecoder()

    _encode_detach = staticmethod(wombat.encode_detach)
    _encode_ping = staticmethod(wombat.encode_ping)

    def _encode_publish(self, topic: str, number: int, payload: bytes, /) -> bytes:
        return wombat.encode_publish(topic, number % _NUMBERS, payload)

    def _encode_attach(self, topic: str, place: Place | None) -> bytes:
        assert not isinstance(place, int), place
        return wombat.encode_attach(topic, place)

    def _check_place(self, place: object) -> str:
        if isinstance(place, str):
            if not place:
                raise LocalProtocolError("a serial is not empty: leave it out to begin with now")
            return place
        if not (isinstance(place, int) and 0 <= place <= _OFFSET_MAX):
            raise LocalProtocolError(f"an offset is a number from 0 to {_OFFSET_MAX}, not {place}")
        return f"@{place}"

    def _encode_of_reader(self, message: readers.ToServer) -> bytes:
        if isinstance(message, readers.Handled):
            return wombat.encode_handled(message)
        return wombat.encode_read(message)

    def _reset_decoder(self) -> None:
        self._decoder = ClientDecoder()

    def _decode(self, chunks: Sequence[bytes]) -> Sequence[wombat.ToClient]:
        return self._decoder.receive(chunks)

    def _take(self, message: wombat.ToClient, now: float, events: list[Event]) -> None:
        if isinstance(message, wombat.Payloads):
            self._topics.deliver_serials(message.topic, message.messages, events)
        elif isinstance(message, wombat.Ack):
            self._ack(message.number, events)
        elif isinstance(message, wombat.Pong):
            self._pong(message.timestamp, now, events)
        elif isinstance(message, wombat.Attached):
            self._topics.attached(message.topic, message.serial, events)
        elif isinstance(message, wombat.Detached):
            self._detached(message.topic, events)
        elif isinstance(message, readers.ToClient):
            self._readers.take(message, events)
        else:
            events.append(Broken(f"the server broke the protocol: {message.reason}"))

    def _ack(self, number: int, events: list[Event]) -> None:
        window = self._window
        count = (number + 1 - (window.next_number - len(window))) % _NUMBERS
        if count > _NUMBERS // 2:
            return  # below the oldest: it was acknowledged before
        if count > window.sent:
            events.append(Broken(f"the server acknowledged publish {number}, which was never sent"))
        elif count:
            self._acknowledge(count, events)

    def _ping_unheard(self, now: float) -> None:
        # The client does not wait for the answers to this ping and to earlier pings.
        self._pings.clear()
        self._ping(now)
        self._pings.clear()
