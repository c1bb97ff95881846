"""The server's side of one Wombat connection, without I/O: messages in, commands out; events in, bytes out.

Besides what every session keeps: which sequence numbers it has brought (a client sends again what was not
acknowledged within two seconds), where it asked to be attached, and when it was last heard of.
"""

from collections.abc import Sequence

from headrace.session.numbers import Numbers
from headrace.session.server import Attach, Command, Detach, Publish, TopicSession
from headrace.session.units import Unit
from headrace.wire import wombat
from headrace.wire.wombat_decoder import ServerDecoder


class WombatServerSession(TopicSession):
    __slots__ = ("_asked", "_numbers", "_silence_s", "_wombat", "repeats", "silent_at")

    def __init__(self, now: float, silence_s: float) -> None:
        self._wombat = ServerDecoder()
        super().__init__(self._wombat)
        self._numbers: Numbers | None = None
        self._asked: dict[str, str] | None = None
        """The serials of ATTACHs that are being done and not answered yet."""
        self._silence_s = silence_s
        self.silent_at = now + silence_s
        """When to give the client up, unless a PING comes."""
        self.repeats = 0
        """Publishes that have come before; whoever counts them sets it back."""

    def receive_messages(self, messages: Sequence[bytes], now: float) -> list[Command]:
        commands: list[Command] = []
        for message in self._wombat.receive(messages):
            if isinstance(message, wombat.Publishes):
                self._publishes(message, commands)
            elif isinstance(message, wombat.Ping):
                self.heard(now)
                self._out.append(wombat.encode_pong(message.timestamp))
            elif isinstance(message, wombat.Attach):
                commands.append(self._attach(message))
            elif isinstance(message, wombat.Detach):
                commands.append(Detach(message.topic))
            else:
                commands.append(self.refuse(message.reason, message.code))
        return commands

    def heard(self, now: float) -> None:
        """The client is there, or could not be heard because nobody read."""
        self.silent_at = now + self._silence_s

    def attaching(self, command: Attach) -> None:
        """The next `attached` of the topic answers this one: several may have come in one read."""
        if self._asked is None:
            self._asked = {}
        self._asked.pop(command.topic, None)
        if command.serial is not None:
            self._asked[command.topic] = command.serial

    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        asked = self._asked.pop(topic, None) if self._asked else None
        # A client sees that it missed something by a serial that is not the one it asked for.
        serial = asked if asked and exact else wombat.make_serial(epoch, offset)
        self._out.append(wombat.encode_attached(topic, serial))

    def detached(self, topic: str) -> None:
        if self._asked:
            self._asked.pop(topic, None)
        self._out.append(wombat.encode_detached(topic))

    def _attach(self, message: wombat.Attach) -> Attach:
        if message.serial is None:
            return Attach(message.topic, None)
        serial = wombat.parse_serial(message.serial)
        if serial is None:
            # Not one of ours: all that is kept, and the answer is not what was asked for.
            return Attach(message.topic, 0)
        return Attach(message.topic, serial.offset, serial.epoch, message.serial)

    def _publishes(self, message: wombat.Publishes, commands: list[Command]) -> None:
        if self._numbers is None:
            self._numbers = Numbers()
        if message.in_order:
            first = self._numbers.unwrap(message.first)
            last = first + sum(map(len, message.records.values())) - 1
            if self._numbers.add_run(first, last):
                topics = {
                    name: first + (of[-1] - message.first) % wombat.SEQUENCE_NUMBERS
                    for name, of in message.numbers.items()
                }
                unit = Unit(first, last, topics)
                self._publishes_under_way().add(unit)
                # First, so that a refusal of anything else in this read does not cost them.
                commands.insert(0, Publish(message.records, unit))
                return
        self._one_by_one(message, self._numbers, commands)

    def _one_by_one(
        self, message: wombat.Publishes, numbers: Numbers, commands: list[Command]
    ) -> None:
        """A number that has come before is not stored again, only acknowledged."""
        units = self._publishes_under_way()
        fresh: dict[str, list[bytes]] = {}
        taken: dict[str, list[int]] = {}
        for name, records in message.records.items():
            for wire_number, record in zip(message.numbers[name], records, strict=True):
                number = numbers.unwrap(wire_number)
                if numbers.add(number):
                    fresh.setdefault(name, []).append(record)
                    taken.setdefault(name, []).append(number)
                else:
                    self.repeats += 1
                    units.repeat(name, number)
        if fresh:
            unit = Unit(
                min(map(min, taken.values())),
                max(map(max, taken.values())),
                {topic: max(of) for topic, of in taken.items()},
            )
            units.add(unit)
            commands.insert(0, Publish(fresh, unit))

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """One ACK for each topic, with the highest number of it."""
        highest: dict[str, int] = {}
        for unit in ready:
            for topic, number in (unit.topics or {}).items():
                highest[topic] = max(number, highest.get(topic, 0))
        for topic, number in highest.items():
            self._out.append(wombat.encode_ack(topic, number % wombat.SEQUENCE_NUMBERS))
