"""The Wombat protocol of one client over all its connections, without I/O, futures or clocks.

What it shares with other protocols, and the theory of operation, is in `resuming_client.py`. Here are
Wombat's own:

- Places are *serials*, `EPOCH@OFFSET`. A topic is asked for again with the serial of its last PAYLOAD, or of
  ATTACHED before any. `@OFFSET` asks for an offset in whichever life the topic is in; a server that missed
  nothing answers every ATTACH with the serial asked for, so the epoch may come with the first PAYLOAD only.
- Sequence numbers are `uint32` and start over behind the last. In here they count on; only on the wire are
  they cut. An ACK stands for all publishes up to its number, whatever the topic it names: one counter serves
  all topics. What is not acknowledged in time is sent again, on the same connection and with the same number.
- The server hangs up on a client that does not ping, also on one that is not reading.
"""

from collections.abc import Sequence

from headrace.model import RECORD_HEADER_BYTES
from headrace.session.client import Broken, Event, Messages
from headrace.session.client_topics import Place
from headrace.session.client_window import WINDOW_BYTES_MAX, WINDOW_MAX
from headrace.session.resuming_client import ResumingClientSession
from headrace.wire import wombat
from headrace.wire.wombat_decoder import ClientDecoder

PING_INTERVAL_S = 5.0
PINGS_UNANSWERED_MAX = 1
RESEND_S = 2.0

_NUMBERS = wombat.SEQUENCE_NUMBERS


class WombatClientSession(ResumingClientSession[wombat.ToClient]):
    """Implements `ClientSession` for Wombat. Chunks are whole WebSocket messages."""

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
        if place is None:
            return wombat.encode_attach(topic, None)
        return wombat.encode_attach(topic, f"{_life(place.epoch)}{place.offset}")

    def _reset_decoder(self) -> None:
        self._decoder = ClientDecoder()

    def _decode(self, chunks: Sequence[bytes]) -> Sequence[wombat.ToClient]:
        return self._decoder.receive(chunks)

    def _take(self, message: wombat.ToClient, now: float, events: list[Event]) -> None:
        if isinstance(message, wombat.Payloads):
            self._payloads(message.topic, message.messages, events)
        elif isinstance(message, wombat.Ack):
            self._ack(message.number, events)
        elif isinstance(message, wombat.Pong):
            self._pong(message.timestamp, now)
        elif isinstance(message, wombat.Attached):
            self._attached(message, events)
        elif isinstance(message, wombat.Detached):
            self._topics.detached(message.topic, events)
        else:
            events.append(Broken(f"the server broke the protocol: {message.reason}"))

    def _ack(self, number: int, events: list[Event]) -> None:
        window = self._window
        count = (number + 1 - (window.next_number - len(window))) % _NUMBERS
        if count > _NUMBERS // 2:
            return  # below the oldest: acknowledged before
        if count > window.sent:
            events.append(Broken(f"the server acknowledged publish {number}, which was never sent"))
        elif count:
            self._acknowledge(count, events)

    def _attached(self, message: wombat.Attached, events: list[Event]) -> None:
        serial = wombat.parse_serial(message.serial)
        if serial is None:
            events.append(_unknown_serial("ATTACHED", message.topic, message.serial))
        else:
            self._topics.attached(message.topic, Place(*serial), events)

    def _payloads(self, name: str, payloads: list[tuple[str, bytes]], events: list[Event]) -> None:
        """Deliver what goes on where the topic stands, without looking into serials."""
        topic = self._topics.following(name)
        if topic is None:
            return
        epoch, offset = topic.last
        life = _life(epoch)
        messages: list[tuple[int, bytes]] = []
        for serial, payload in payloads:
            offset += RECORD_HEADER_BYTES + len(payload)
            if serial != f"{life}{offset}":
                self._other_payloads(name, payloads, events)
                return
            messages.append((offset, payload))
        topic.last = Place(epoch, offset)
        events.append(Messages(name, messages))

    def _other_payloads(
        self, name: str, payloads: list[tuple[str, bytes]], events: list[Event]
    ) -> None:
        """The same where there is a gap, a double or an epoch that was not known."""
        messages: list[tuple[int, bytes]] = []
        epoch: int | None = None
        for text, payload in payloads:
            serial = wombat.parse_serial(text)
            if serial is None:
                break
            epoch = serial.epoch
            messages.append((serial.offset, payload))
        if messages:
            self._topics.deliver(name, messages, events, epoch)
        if len(messages) < len(payloads):
            events.append(_unknown_serial("PAYLOAD", name, payloads[len(messages)][0]))

    def _ping_unheard(self, now: float) -> None:
        # The answer to this one, or to those before it, is not waited for.
        self._pings.clear()
        self._ping(now)
        self._pings.clear()


def _life(epoch: int | None) -> str:
    """A serial up to its offset."""
    return "@" if epoch is None else f"{epoch}@"


def _unknown_serial(message: str, topic: str, serial: str) -> Broken:
    return Broken(
        f"the server broke the protocol: {message} of {topic!r} has the serial {serial!r}, "
        "which is not EPOCH@OFFSET"
    )
