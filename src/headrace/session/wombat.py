"""Both sides of Wombat, without I/O: a client over all its connections, and the server side of a connection.

`session/topics/client.py` has the theory of operation of clients, and the code that Wombat shares with Figg.
Wombat's own rules are here:

- Places are *serials*: opaque texts from the server that are only stored, compared and sent back. The client
  asks for a topic again with the serial of its last PAYLOAD, or of ATTACHED before the first PAYLOAD.
  Messages were missed if ATTACHED has another serial than the one asked for. To ask for an offset, the client
  sends `@OFFSET`, which Headrace servers understand: that offset in the topic's present epoch.
- Sequence numbers are `uint32` and wrap around on the wire. The session counts without wrapping. An ACK
  covers all publishes up to its number, whatever topic it names: one counter serves all topics. A publish
  that is not acknowledged in time is sent again, on the same connection and with the same number.
- The server hangs up on a client that does not ping, even if the client is not reading.
- A client repeats a publish that is not acknowledged within two seconds. So the server remembers the received
  publishes (`Numbers`). It also keeps the places where the client asked to be attached, and the time of the
  client's last sign of life.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import LocalProtocolError
from headrace.model import RefusedPublish
from headrace.session.client import Broken
from headrace.session.server import (
    AttachCommand,
    Authenticate,
    Close,
    Command,
    DetachCommand,
    NumberRange,
    Publish,
    TopicSession,
    Unit,
    Units,
)
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import Event, check_offset
from headrace.session.topics.window import WINDOW_BYTES_MAX, WINDOW_MAX
from headrace.wire import readers, tokens, websocket
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ClientDecoder, ServerDecoder

PING_INTERVAL_S = 5.0
PINGS_UNANSWERED_MAX = 1
RESEND_S = 2.0

_NUMBERS = wombat.SEQUENCE_NUMBERS


class WombatClientSession(ClientSession):
    """Session of a Wombat client. Chunks are whole WebSocket messages."""

    _codec = wombat

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

    def _check_place(self, place: object) -> str:
        if isinstance(place, str):
            if not place:
                raise LocalProtocolError(
                    "a serial must not be empty: leave it out to begin at the end"
                )
            return place
        return f"@{check_offset(place)}"

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
        elif isinstance(message, tokens.ToClient):
            self._auth_answer(message, now, events)
        else:
            events.append(Broken(f"the server broke the protocol: {message.reason}"))

    def _ack(self, number: int, events: list[Event]) -> None:
        window = self._window
        count = (number + 1 - window.oldest) % _NUMBERS
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


REMEMBERED_BYTES_MAX = 1 << 18
"""Memory limit of remembered publishes besides the pending ones: a client may have repeated them before it
got the acknowledgement."""
REMEMBERED_S = 30.0
"""Time for which they are remembered: many times the two seconds after which clients repeat a publish."""


class WombatServerSession(TopicSession):
    __slots__ = ("_asked", "_numbers", "_silence_s", "repeats", "silent_at")
    _decoder: ServerDecoder

    def __init__(self, now: float, silence_s: float) -> None:
        super().__init__(ServerDecoder())
        self._numbers: Numbers | None = None
        self._asked: dict[str, str | None] | None = None
        """By topic: the serial, if any, of an ATTACH that is being carried out and not answered yet."""
        self._silence_s = silence_s
        self.silent_at = now + silence_s
        """Time to give the client up, unless a PING comes before."""
        self.repeats = 0
        """Number of repeated publishes. The caller that counts them resets it."""

    def receive_messages(self, messages: Sequence[bytes], now: float) -> list[Command]:
        commands: list[Command] = []
        for message in self._decoder.receive(messages):
            if isinstance(message, wombat.Publishes):
                self._publishes(message, now, commands)
            elif isinstance(message, wombat.Ping):
                self.heard(now)
                self._out.append(wombat.encode_pong(message.timestamp))
            elif isinstance(message, wombat.Attach):
                commands.append(self._attach(message))
            elif isinstance(message, wombat.Detach):
                commands.append(DetachCommand(message.topic))
            elif isinstance(message, readers.Read | readers.Handled):
                commands.append(message)
            elif isinstance(message, tokens.Auth):
                commands.append(Authenticate(message.token))
            else:
                refused = self._unwrapped(message.refused)
                commands.append(self.refuse_publish(message.reason, message.code, refused))
        self._forget(now)
        return commands

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        # Nothing more is accepted, so no repeat can come, and the connection may stay open for a while.
        self._numbers = None
        return super().refuse(reason, code)

    def heard(self, now: float) -> None:
        """Restart the time limit: the client lives, or could not be heard because the server did not read."""
        self.silent_at = now + self._silence_s

    def attaching(self, command: AttachCommand) -> None:
        """Note that the next `attached` of the topic answers this ATTACH: one read may bring several."""
        if self._asked is None:
            self._asked = {}
        self._asked[command.topic] = command.serial

    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        asked = self._asked.pop(topic, None) if self._asked else None
        # A serial other than the one it asked for tells a client that it has missed messages.
        serial = asked if asked and exact else wombat.make_serial(epoch, offset)
        self._out.append(wombat.encode_attached(topic, serial))

    def detached(self, topic: str) -> None:
        if self._asked:
            self._asked.pop(topic, None)
        self._out.append(wombat.encode_detached(topic))

    def _unwrapped(self, refused: RefusedPublish | None) -> RefusedPublish | None:
        """Return a refused publish with its unwrapped number, as units have it."""
        if refused is None or refused.number is None:
            return refused
        number = None if self._numbers is None else self._numbers.unwrap(refused.number)
        return refused._replace(number=number)

    def tell_reader(self, message: readers.ToClient) -> None:
        self._out.append(wombat.encode_reader_answer(message))

    def _encode_auth_answer(self, answer: tokens.ToClient) -> bytes:
        return wombat.encode_auth_answer(answer)

    def _attach(self, message: wombat.Attach) -> AttachCommand:
        if message.serial is None:
            return AttachCommand(message.topic, None)
        serial = wombat.parse_serial(message.serial)
        if serial is None:
            # The serial is not Headrace's: deliver all kept records, and answer with another serial.
            return AttachCommand(message.topic, 0)
        return AttachCommand(message.topic, serial.offset, serial.epoch, message.serial)

    def _publishes(self, message: wombat.Publishes, now: float, commands: list[Command]) -> None:
        if self._numbers is None:
            self._numbers = Numbers()
        numbers, units = self._numbers, self._publishes_under_way()
        command = self._all_new(message, numbers, now)
        command = command or self._only_new(message, numbers, units, now)
        if command is not None:
            units.add(command.unit)
            self._take_publish(command, commands)

    def _forget(self, now: float) -> None:
        """Forget publishes that no client repeats any more."""
        if self._numbers is not None and self._numbers.bytes:
            under_way = self._publishes_under_way().size
            before = now - REMEMBERED_S if not under_way else 0.0
            self._numbers.forget(REMEMBERED_BYTES_MAX + under_way, before)

    def _all_new(self, message: wombat.Publishes, numbers: "Numbers", now: float) -> Publish | None:
        """Take publishes that are new because their numbers are above earlier ones; None if one may not."""
        firsts: list[int] = []
        for name, of in message.numbers.items():
            first = numbers.unwrap_of(name, of[0])
            if not numbers.is_ahead(name, first) or not (message.in_order or _is_run(of)):
                return None
            firsts.append(first)
        lowest, highest = [], []
        topics: dict[str, NumberRange] = {}
        before = numbers.bytes
        for (name, of), first in zip(message.numbers.items(), firsts, strict=True):
            last = numbers.add_ahead(name, of, first, message.records[name], now)
            topics[name] = NumberRange(first, last)
            lowest.append(numbers.unwrap(of[0]))
            highest.append(lowest[-1] + last - first)
        numbers.heard(max(highest))
        unit = Unit(min(lowest), max(highest), topics, numbers.bytes - before)
        return Publish(message.records, unit)

    def _only_new(
        self, message: wombat.Publishes, numbers: "Numbers", units: Units, now: float
    ) -> Publish | None:
        """Take publishes one by one. A repeat is not stored again, only acknowledged."""
        fresh: dict[str, list[bytes]] = {}
        topics: dict[str, NumberRange] = {}
        taken: list[int] = []
        before = numbers.bytes
        for name, records in message.records.items():
            of_topic: list[int] = []
            for wire_number, record in zip(message.numbers[name], records, strict=True):
                number = numbers.unwrap(wire_number)
                number_of_topic = numbers.unwrap_of(name, wire_number)
                numbers.heard(number)
                if numbers.add(name, number_of_topic, record, now):
                    fresh.setdefault(name, []).append(record)
                    of_topic.append(number_of_topic)
                    taken.append(number)
                else:
                    self.repeats += 1
                    units.repeat(name, number, number_of_topic)
            if of_topic:
                topics[name] = NumberRange(min(of_topic), max(of_topic))
        if not fresh:
            return None
        unit = Unit(min(taken), max(taken), topics, numbers.bytes - before)
        return Publish(fresh, unit)

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """Send one ACK for each topic, with the topic's highest number."""
        highest: dict[str, int] = {}
        for unit in ready:
            for topic, numbers in (unit.topics or {}).items():
                highest[topic] = max(numbers.highest, highest.get(topic, 0))
        for topic, number in highest.items():
            self._out.append(wombat.encode_ack(topic, number % _NUMBERS))


def _is_run(numbers: Sequence[int]) -> bool:
    """True if each number is one more than the number before it."""
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


RECORD_OVERHEAD_BYTES = 64
"""Memory for a remembered record besides its bytes."""

_HALF = _NUMBERS // 2


class Numbers:
    """Publishes that a connection has received, to find repeats.

    Two publishes are the same only if topic, sequence number and payload are the same, because a client may
    have one counter for all topics or one for each. Numbers are `uint32`, and 0 follows the last. Here the
    numbers are *unwrapped*, as if they had any size, so that they can be compared: with the highest number of
    their topic, and also with the highest number of all topics.

    The records are kept in the batches in which they came, and the oldest are forgotten: a publish that a
    client repeats after that is stored again. A number above the highest of its topic is new without a
    search, and nearly every number is.
    """

    __slots__ = ("_highest", "_order", "_topics", "bytes")

    def __init__(self) -> None:
        self._topics: defaultdict[str, _Topic] = defaultdict(_Topic)
        self._highest = -1
        """Highest unwrapped number of all topics."""
        self._order: deque[tuple[str, int, float]] = deque()
        """Topic, size and time of each batch, the oldest first."""
        self.bytes = 0
        """Memory for all remembered records."""

    def unwrap(self, number: int) -> int:
        """Unwrap a number from the wire: return the candidate nearest to the highest of all topics."""
        return _unwrap(self._highest, number)

    def unwrap_of(self, topic: str, number: int) -> int:
        """Unwrap a number from the wire: return the candidate nearest to the highest of the topic.

        For an unknown topic, the highest of all topics counts.
        """
        known = self._topics.get(topic)
        return _unwrap(self._highest if known is None else known.highest, number)

    def is_ahead(self, topic: str, number: int) -> bool:
        """True if an unwrapped number is above all received numbers of the topic."""
        known = self._topics.get(topic)
        return known is None or number > known.highest

    def add_ahead(
        self, topic: str, numbers: Sequence[int], first: int, records: Sequence[bytes], now: float
    ) -> int:
        """Add publishes whose numbers rise. The first number is ahead, and `first` is its unwrapped form.

        Returns the last number, unwrapped.
        """
        known = self._topics[topic]
        last = first + (numbers[-1] - numbers[0]) % _NUMBERS
        shift = first - numbers[0]
        if last - first == len(numbers) - 1:
            numbers, shift = range(first, last + 1), 0
        elif numbers[-1] < numbers[0]:
            numbers, shift = [first + (n - numbers[0]) % _NUMBERS for n in numbers], 0
        known.starts.append(first)
        known.batches.append((numbers, shift, tuple(records), True))
        known.highest = last
        self._came(topic, records, now)
        return last

    def add(self, topic: str, number: int, record: bytes, now: float) -> bool:
        """Add one publish with an unwrapped number. Returns False if it is a repeat."""
        known = self._topics[topic]
        if known.has(number, record):
            return False
        place = bisect_right(known.starts, number)
        known.starts.insert(place, number)
        known.batches.insert(place, ((number,), 0, (record,), False))
        known.highest = max(known.highest, number)
        self._came(topic, (record,), now)
        return True

    def heard(self, number: int) -> None:
        """Note an unwrapped number, which may be the highest of all topics."""
        self._highest = max(self._highest, number)

    def forget(self, bytes_max: int, before: float) -> None:
        """Forget the oldest batches while all take more than `bytes_max`, or if they came before a time."""
        order = self._order
        while order and (self.bytes > bytes_max or order[0][2] < before):
            topic, size, _ = order.popleft()
            self.bytes -= size
            known = self._topics[topic]
            del known.starts[0], known.batches[0]
            if not known.starts:
                del self._topics[topic]

    def _came(self, topic: str, records: Sequence[bytes], now: float) -> None:
        size = RECORD_OVERHEAD_BYTES * len(records) + sum(map(len, records))
        self._order.append((topic, size, now))
        self.bytes += size


_Batch = tuple[Sequence[int], int, Sequence[bytes], bool]
"""Numbers, the shift that unwraps them, records, and whether they were ahead: such batches do not overlap."""


@dataclass(slots=True)
class _Topic:
    highest: int = -1
    starts: list[int] = field(default_factory=list)
    """First number of each batch."""
    batches: list[_Batch] = field(default_factory=list)
    """Batches in the order of their first numbers."""

    def has(self, number: int, record: bytes) -> bool:
        for place in range(bisect_right(self.starts, number) - 1, -1, -1):
            numbers, shift, records, was_ahead = self.batches[place]
            at = bisect_left(numbers, number - shift)
            if at < len(numbers) and numbers[at] == number - shift and records[at] == record:
                return True
            if was_ahead:
                break
        return False


def _unwrap(highest: int, number: int) -> int:
    if highest < 0:
        # This leaves room below: the first number that comes need not be the lowest.
        return number + _NUMBERS
    return highest + (number - highest + _HALF) % _NUMBERS - _HALF
