"""Server side of one Wombat connection, without I/O: messages in, commands out; events in, bytes out.

In addition to the state of every session, it keeps the received publishes (a client repeats a publish that
is not acknowledged within two seconds), the places where the client asked to be attached, and the time of
the client's last sign of life.
"""

from collections.abc import Sequence

from headrace.model import RefusedPublish
from headrace.session.server import AttachCommand, Command, DetachCommand, Publish, TopicSession
from headrace.session.units import NumberRange, Unit, Units
from headrace.session.wombat.numbers import Numbers
from headrace.wire import readers
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ServerDecoder

REMEMBERED_BYTES_MAX = 1 << 18
"""Memory limit of remembered publishes besides the pending ones: a client may have repeated them before it
got the acknowledgement."""
REMEMBERED_S = 30.0
"""Time for which they are remembered: many times the two seconds after which clients repeat a publish."""


class WombatServerSession(TopicSession):
    __slots__ = ("_asked", "_numbers", "_silence_s", "_wombat", "repeats", "silent_at")

    def __init__(self, now: float, silence_s: float) -> None:
        self._wombat = ServerDecoder()
        super().__init__(self._wombat)
        self._numbers: Numbers | None = None
        self._asked: dict[str, str] | None = None
        """By topic: the serial of an ATTACH that is being carried out and not answered yet."""
        self._silence_s = silence_s
        self.silent_at = now + silence_s
        """Time to give the client up, unless a PING comes before."""
        self.repeats = 0
        """Number of repeated publishes. The caller that counts them resets it."""

    def receive_messages(self, messages: Sequence[bytes], now: float) -> list[Command]:
        commands: list[Command] = []
        for message in self._wombat.receive(messages):
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
            else:
                number = self._number_of(message.refused)
                commands.append(self.refuse_publish(message, number, message.code))
        self._forget(now)
        return commands

    def heard(self, now: float) -> None:
        """Restart the time limit: the client lives, or could not be heard because the server did not read."""
        self.silent_at = now + self._silence_s

    def attaching(self, command: AttachCommand) -> None:
        """Note that the next `attached` of the topic answers this ATTACH: one read may bring several."""
        if self._asked is None:
            self._asked = {}
        self._asked.pop(command.topic, None)
        if command.serial is not None:
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

    def _number_of(self, refused: RefusedPublish | None) -> int | None:
        """Return the unwrapped number of a refused publish, as units have it."""
        if refused is None or refused.number is None or self._numbers is None:
            return None
        return self._numbers.unwrap(refused.number)

    def tell_reader(self, message: readers.ToClient) -> None:
        if isinstance(message, readers.Stored):
            self._out.append(wombat.encode_stored(message))
        elif isinstance(message, readers.Reading):
            self._out.append(wombat.encode_reading(message))
        elif isinstance(message, readers.Waiting):
            self._out.append(wombat.encode_waiting(message))
        elif isinstance(message, readers.Lost):
            self._out.append(wombat.encode_lost(message))
        else:
            self._out.append(wombat.encode_records(message))

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
        units = self._publishes_under_way()
        command = self._all_new(message, self._numbers, now)
        if command is None:
            command = self._only_new(message, self._numbers, units, now)
        if command is not None:
            units.add(command.unit)
            # Publishes come first, so that a refusal of another message in this read does not lose them.
            commands.insert(0, command)

    def _forget(self, now: float) -> None:
        """Forget publishes that no client repeats any more."""
        if self._numbers is not None and self._numbers.bytes:
            under_way = self._publishes_under_way().size
            before = now - REMEMBERED_S if not under_way else 0.0
            self._numbers.forget(REMEMBERED_BYTES_MAX + under_way, before)

    def _all_new(self, message: wombat.Publishes, numbers: Numbers, now: float) -> Publish | None:
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
        self, message: wombat.Publishes, numbers: Numbers, units: Units, now: float
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
            self._out.append(wombat.encode_ack(topic, number % wombat.SEQUENCE_NUMBERS))


def _is_run(numbers: Sequence[int]) -> bool:
    """True if each number is one more than the number before it."""
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
