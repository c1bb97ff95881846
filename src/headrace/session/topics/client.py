"""Base of Figg and Wombat client sessions: state that every new connection is told again, and pings.

A client outlives its connections. Everything that the server must know is kept as state, never as bytes in
flight: the wanted topics and how far each was received (`topics.py`, and `readers.py` for topics that are
read under a name), and the unacknowledged publishes (`window.py`). When a connection is lost, its unsent
bytes are dropped. The next connection is told the state again (`opened`), which also resends everything that
was lost with the old connection.

    connection     connecting()     opened()     a valid message     disconnected()
    disconnected   connecting       -            -                   disconnected
    connecting     -                connecting   connected           disconnected
    connected      -                -            connected           disconnected

An open connection is used at once. But it is `connected` only when the peer has proved that it speaks the
protocol, because any port may accept connections. The proof is usually the PONG for the first PING. Where a
protocol does not require servers to answer pings, a connection that is open for `silent_s` is `connected` as
well. Without pings there is nothing to wait for, and a connection is `connected` when it is open.

A publish that a server never accepts must not be sent forever. Figg has no error message, so the server can
only hang up. A hang-up counts against the oldest unacknowledged publish if the server has sent anything on
this connection, was sent that publish at most `REFUSAL_S` before, and then ended the connection itself
(Wombat: with a code that blames the peer). After two such connections in a row the publish is sent alone, and
after `REFUSALS_MAX` it is given up (`PublishRefused`). Any acknowledgement, and any other end of a
connection, resets the count.

Control frames overtake unsent publishes: a PING must not wait behind megabytes. The subclass has the frames
and messages: it names the encoders and decides what each message means.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

from headrace.errors import LocalProtocolError
from headrace.model import (
    PAYLOAD_BYTES_MAX,
    check_publish_topic,
    check_reader_name,
    check_topic_name,
)
from headrace.session.client import (
    Broken,
    ConnectionState,
    Finished,
    LinkedSession,
    unanswered,
)
from headrace.session.topics.events import (
    Event,
    Place,
    PublishesAcknowledged,
    PublishRefused,
    check_payload,
    check_topic_type,
)
from headrace.session.topics.readers import ClientReaders
from headrace.session.topics.topics import ClientTopics
from headrace.session.topics.window import WINDOW_BYTES_MAX, WINDOW_MAX, Window
from headrace.wire import readers, tokens

REFUSALS_MAX = 3
"""Connections in a row that may end because of a publish before the client gives it up."""
REFUSAL_S = 15.0
"""Longest time between a publish and a hang-up because of it. A later hang-up has another reason."""

_NAMES_CHECKED_MAX = 4096

AUTH_ANSWER_S = 5.0
"""Time limit for the answer to AUTH."""
RENEW_AT = 0.8
"""Share of a token's remaining time after which the client renews the token."""
RENEW_S_MIN = 0.5
"""Shortest time until a renewal: the application may return a token that expires in a moment."""

_NO_TOKENS = (
    "the server does not answer AUTH, so it does not know the token extension: connect without a token, or "
    "update the server"
)


class Codec(Protocol):
    """Encoders of a protocol's messages."""

    def encode_publish(self, topic: str, number: int, payload: bytes, /) -> bytes: ...
    def encode_attach(self, topic: str, place: Any, /) -> bytes: ...
    def encode_detach(self, topic: str, /) -> bytes: ...
    def encode_of_reader(self, message: readers.ToServer, /) -> bytes: ...
    def encode_ping(self, timestamp: int, /) -> bytes: ...
    def encode_auth(self, token: str, /) -> bytes: ...


class ClientSession(LinkedSession[Event]):
    """Session that publishes to topics and subscribes to topics. A subclass has the protocol's messages."""

    _codec: Codec

    def __init__(
        self,
        *,
        ping_interval_s: float | None,
        pings_unanswered_max: int,
        silent_s: float = inf,
        window_max: int = WINDOW_MAX,
        window_bytes_max: int = WINDOW_BYTES_MAX,
        resend_s: float = inf,
    ) -> None:
        super().__init__()
        self._reset_decoder()
        self._open = False
        self._authenticating = False
        """True from AUTH to its first answer. The session sends nothing else until then."""
        self._answer_at = inf
        """Time limit for the answer to AUTH."""
        self._ping_interval_s = inf if ping_interval_s is None else ping_interval_s
        self._silent_s = silent_s
        self._connected_at = inf
        """Time when a silent peer counts as connected."""
        self._pings_unanswered_max = pings_unanswered_max
        self._ping_at = inf
        self._pings: deque[tuple[int, float]] = deque()
        self._sure_until = -inf
        """Time until which the last answered ping proves that the server has not given this client up."""
        self._control: list[bytes] = []
        self._topics = ClientTopics(self._send_attach, self._send_detach)
        self._readers = ClientReaders(self._send_of_reader, self._send_detach)
        self._window = Window(window_max, window_bytes_max, resend_s)
        self._names_checked: set[str] = set()
        self._heard = False
        """True if the server has sent anything on this connection."""
        self._was_hung_up = False
        self._refusals = 0
        """Number of connections in a row that ended because of the oldest publish."""

    @property
    def tick_at(self) -> float:
        return min(
            self._ping_at,
            self._window.overdue_at,
            self._connected_at,
            self._readers.tick_at,
            self._answer_at,
        )

    @property
    def unacknowledged(self) -> int:
        """Number of publishes that wait for their acknowledgement."""
        return len(self._window)

    @property
    def has_room(self) -> bool:
        """True if `publish` would accept a message now."""
        return self._window.has_room

    def opened(self, now: float) -> None:
        assert self.state is ConnectionState.CONNECTING and not self._open, self.state
        self._reset_decoder()
        if self.token is None:
            self._begin(now)
            return
        self._authenticating = True
        self._send_token(now)

    def renew(self, token: str, now: float) -> None:
        if self._open:
            self.token = token
            self.renew_at = inf
            self._send_token(now)

    def _send_token(self, now: float) -> None:
        assert self.token is not None
        self._answer_at = now + AUTH_ANSWER_S
        self._control.append(self._codec.encode_auth(self.token))

    def _begin(self, now: float) -> None:
        """Tell the server the state of this client."""
        self._open = True
        if self._ping_interval_s < inf:
            self._ping(now)
            self._connected_at = now + self._silent_s
        else:
            self.state = ConnectionState.CONNECTED
        self._topics.connected()
        self._readers.connected(now)

    def explain(self, reason: str) -> str:
        return f"{reason}: {_NO_TOKENS}" if self._authenticating else reason

    def hung_up(self, reason: str, now: float) -> list[Event]:
        window = self._window
        if not self._heard or not window.sent or now - window.oldest_sent_at > REFUSAL_S:
            return []
        self._was_hung_up = True
        self._refusals += 1
        if self._refusals < REFUSALS_MAX:
            window.alone = self._refusals == REFUSALS_MAX - 1
            return []
        window.acknowledge(1)
        self._suspect_nothing()
        return [PublishRefused(reason, REFUSALS_MAX)]

    def disconnected(self) -> None:
        if not self._was_hung_up:
            self._suspect_nothing()
        self._heard = self._was_hung_up = False
        super().disconnected()

    def publish(self, topic: str, payload: bytes) -> int:
        """Queue a publish, also without a connection. Returns its number, counted from 0.

        Raises BadTopicNameError, PayloadTooLargeError or WindowFullError; in that case nothing is sent.
        """
        window = self._window
        if not window.has_room:
            raise window.full()
        if topic not in self._names_checked:
            self._check_name(topic)
        if len(payload) > PAYLOAD_BYTES_MAX:
            check_payload(payload)
        number = window.next_number
        window.add(self._codec.encode_publish(topic, number, payload))
        return number

    def attach(self, topic: str, place: Place | None) -> Place | None:
        """Ask for a topic, beginning at an offset or a serial, or at its end.

        Returns the place as the protocol names it. Raises LocalProtocolError for a place that the
        protocol does not have.
        """
        check_topic_type(topic)
        check_topic_name(topic)
        asked = None if place is None else self._check_place(place)
        self._topics.attach(topic, asked)
        return asked

    def detach(self, topic: str) -> bool:
        """Stop asking for a topic. None of its messages is delivered after this call.

        Returns True if a `TopicDetached` will come, unless the connection is lost before.
        """
        if topic in self._readers:
            self._readers.stop(topic)
            return self._topics.leave(topic)
        return self._topics.detach(topic)

    def read(self, topic: str, reader: str, *, newest: bool, window: int, instance: int) -> None:
        """Ask for a topic under a reader's name; `detach` ends this too.

        `window`: limit in bytes of records delivered and not `handled`; `instance`: a random number of this
        client. Raises BadReaderNameError, and LocalProtocolError if pings are turned off.
        """
        check_topic_type(topic)
        check_topic_name(topic)
        if not isinstance(reader, str):
            raise TypeError(f"a reader's name is str, not {type(reader).__name__}")
        check_reader_name(reader)
        if self._ping_interval_s == inf:
            raise LocalProtocolError(
                "a reader needs pings, by which the server knows that it lives: set ping_interval_s"
            )
        self._readers.read(topic, reader, newest=newest, window=window, instance=instance)
        self._readers.claim(topic, held=self._topics.is_leaving(topic))

    def handled(self, topic: str, offset: int) -> bool:
        """Note that the application has handled the message of a reader that ends at `offset`.

        Returns False if the message is not, or no longer, this client's to handle.
        """
        return self._readers.handled(topic, offset)

    def handled_up_to(self, topic: str) -> int:
        """Return the offset up to which every message of a reader was handled; 0 if the topic is not read."""
        return self._readers.prefix(topic)

    def is_sure(self, topic: str, now: float) -> bool:
        """True while no other client can have received this reader's messages.

        This holds while the reader is active and the server has answered a ping recently.
        """
        return now < self._sure_until and self._readers.is_active(topic)

    def make_sure(self, topic: str, now: float) -> None:
        """Ask the server, unless a ping is pending; `ReaderSure` or another event of the reader answers."""
        self._readers.wait_for_answer(topic)
        # The answer to a pending ping is enough. Another ping would only delay the end of a dead connection.
        if self._open and not self._pings:
            self._ping(now)

    def pause(self, topic: str) -> None:
        """Detach a topic for now, and remember the place where it stopped."""
        self._topics.pause(topic)

    def resume(self, topic: str) -> None:
        """Attach a paused topic at the place where it stopped."""
        self._topics.resume(topic)

    def receive_data(self, chunks: Sequence[bytes], now: float) -> list[Event]:
        events: list[Event] = []
        for message in self._decode(chunks):
            if self._authenticating and not isinstance(message, tokens.ToClient):
                self._take_too_early(message, events)
                break
            self._take(message, now, events)
            if events and type(events[-1]) in (Broken, Finished):
                break
            self._heard = True
            self._connected()
        return events

    def tick(self, now: float, reading: bool = True) -> list[Event]:
        if now >= self._answer_at:
            if reading:
                return [Broken(_NO_TOKENS if self._authenticating else "AUTH is unanswered")]
            self._answer_at = now + AUTH_ANSWER_S
        if not self._open:
            return []
        if now >= self._connected_at:
            self._connected()
        events = self._readers.tick(now, reading)
        if not reading:
            self._window.wait_longer(now)
            if now >= self._ping_at:
                self._ping_unheard(now)
            return events
        if now >= self._ping_at:
            if len(self._pings) >= self._pings_unanswered_max:
                return [*events, Broken(unanswered(len(self._pings)))]
            self._ping(now)
        self._window.resend(now)
        return events

    def data_to_send(self, bytes_max: int, now: float) -> list[bytes]:
        if self._authenticating:
            frames, self._control = self._control, []
            return frames
        if not self._open:
            return []
        self._readers.flush(now)
        frames = self._control
        self._control = []
        frames += self._window.take(bytes_max, now)
        return frames

    # Hooks for the protocol.

    @abstractmethod
    def _check_place(self, place: object) -> Place:
        """Return a place of this protocol, or raise LocalProtocolError."""

    @abstractmethod
    def _reset_decoder(self) -> None:
        """Prepare to decode the beginning of a connection."""

    @abstractmethod
    def _decode(self, chunks: Sequence[bytes]) -> Sequence[Any]: ...

    @abstractmethod
    def _take(self, message: Any, now: float, events: list[Event]) -> None:
        """Handle a message. A `Broken` among the events ends the connection."""

    # Messages of any protocol.

    def _connected(self) -> None:
        self.state = ConnectionState.CONNECTED
        self._connected_at = inf

    def _auth_answer(self, answer: tokens.ToClient, now: float, events: list[Event]) -> None:
        self._answer_at = inf
        if isinstance(answer, tokens.AuthRefused):
            self._auth_refused(answer, events)
            return
        self._token_accepted()
        if answer.valid_ms:
            self.renew_at = now + max(RENEW_AT * answer.valid_ms / 1000, RENEW_S_MIN)
        if self._authenticating:
            self._authenticating = False
            self._begin(now)

    def _auth_refused(self, answer: tokens.AuthRefused, events: list[Event]) -> None:
        reason = f"the server refuses the credentials: {answer.reason}"
        if answer.code == tokens.FORBIDDEN:
            reason = answer.reason
        self._authenticating = False  # the server knows the extension
        is_last = answer.code != tokens.LATER
        if answer.code == tokens.CREDENTIALS and self._may_try_again():
            is_last = False
        events += self.refuse(reason) if is_last else [Broken(reason)]

    def _take_too_early(self, message: Any, events: list[Event]) -> None:
        reason = getattr(message, "reason", "it answers AUTH with another message")
        events.append(Broken(f"the server broke the protocol: {reason}"))

    def _acknowledge(self, count: int, events: list[Event]) -> None:
        self._window.acknowledge(count)
        if self._refusals:
            self._suspect_nothing()
        events.append(PublishesAcknowledged(count))

    def _suspect_nothing(self) -> None:
        self._refusals = 0
        self._window.alone = False

    def _pong(self, timestamp: int, now: float, events: list[Event]) -> None:
        if all(timestamp != sent for sent, _ in self._pings):
            return
        sent, at = self._pings.popleft()
        while sent != timestamp:
            sent, at = self._pings.popleft()
        self.latency_s = now - at
        self._sure_until = at + self._ping_interval_s * self._pings_unanswered_max
        self._readers.answered(events)

    def _ping_unheard(self, now: float) -> None:
        """Handle a due ping whose answer would not be read."""
        self._ping_at = now + self._ping_interval_s

    def _send_attach(self, name: str, place: Place | None) -> None:
        self._control.append(self._codec.encode_attach(name, place))

    def _send_detach(self, name: str) -> None:
        self._control.append(self._codec.encode_detach(name))

    def _send_of_reader(self, message: readers.ToServer) -> None:
        self._control.append(self._codec.encode_of_reader(message))

    def _detached(self, topic: str, events: list[Event]) -> None:
        self._topics.detached(topic, events)
        self._readers.detached(topic)

    def _ping(self, now: float) -> None:
        timestamp = int(now * 1e6)
        self._pings.append((timestamp, now))
        self._ping_at = now + self._ping_interval_s
        self._control.append(self._codec.encode_ping(timestamp))

    def _forget_connection(self) -> None:
        self._open = self._authenticating = False
        self._ping_at = self._connected_at = self._answer_at = self.renew_at = inf
        self._sure_until = -inf
        self._pings.clear()
        self._control.clear()
        self._window.start_over()
        self._topics.disconnected()
        self._readers.disconnected()

    def _check_name(self, topic: str) -> None:
        check_topic_type(topic)
        check_publish_topic(topic)
        if len(self._names_checked) >= _NAMES_CHECKED_MAX:
            self._names_checked.clear()
        self._names_checked.add(topic)
