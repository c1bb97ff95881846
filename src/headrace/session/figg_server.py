"""The server's side of one Figg connection, without I/O: bytes in, commands out; events in, bytes out.

Keeps one thing only: which publishes of this connection are not durable yet. One read's worth of them is a
*unit* with a range of sequence numbers. ACK n may go out when no unit that is still under way holds a number
at or below n, so units that finish out of turn (topics may differ in durability) wait for the others.

    open ──bad input──▶ closing ──every accepted publish acknowledged──▶ closed
"""

from collections import deque
from typing import NamedTuple

from headrace.errors import LocalProtocolError
from headrace.wire import figg


class Publish(NamedTuple):
    """Store these; call `stored` with the unit when all of them are durable."""

    records: dict[str, list[bytes]]
    unit: "Unit"


class Attach(NamedTuple):
    topic: str
    offset: int | None


class Detach(NamedTuple):
    topic: str


class Close(NamedTuple):
    """The peer broke the protocol: read no more, close when `finished`."""

    reason: str


Command = Publish | Attach | Detach | Close


class Unit:
    """Publishes that came in one read."""

    __slots__ = ("done", "highest", "lowest")

    def __init__(self, lowest: int, highest: int) -> None:
        self.lowest = lowest
        self.highest = highest
        self.done = False


class FiggServerSession:
    __slots__ = ("_decoder", "_news", "_out", "_units", "closing")

    def __init__(self) -> None:
        self._decoder = figg.ServerDecoder()
        self._units: deque[Unit] | None = None
        self._out: list[bytes] = []
        self._news = False
        """Whether a unit has become durable since the last ACK."""
        self.closing = False

    def receive_data(self, data: bytes) -> list[Command]:
        commands: list[Command] = []
        for message in self._decoder.receive(data):
            if isinstance(message, figg.Publishes):
                unit = Unit(message.lowest, message.highest)
                if self._units is None:
                    self._units = deque()
                self._units.append(unit)
                commands.append(Publish(message.records, unit))
            elif isinstance(message, figg.Ping):
                self._out.append(figg.encode_pong(message.timestamp))
            elif isinstance(message, figg.Attach):
                commands.append(Attach(message.topic, message.offset))
            elif isinstance(message, figg.Detach):
                commands.append(Detach(message.topic))
            else:
                commands.append(self.refuse(message.reason))
        return commands

    def refuse(self, reason: str) -> Close:
        """Take nothing more from this peer."""
        self.closing = True
        self._decoder.closed = True
        return Close(reason)

    def stored(self, unit: Unit) -> None:
        """All publishes of the unit are durable."""
        if unit.done:
            raise LocalProtocolError("a unit is stored once")
        unit.done = self._news = True

    def discard(self, unit: Unit) -> None:
        """The unit is not stored, and never acknowledged: its connection is being closed."""
        assert self._units is not None
        self._units.remove(unit)

    def _acknowledge(self) -> None:
        """One ACK for everything that may be acknowledged by now."""
        assert self._units is not None
        self._news = False
        waiting = min((one.lowest for one in self._units if not one.done), default=1 << 64)
        kept: deque[Unit] = deque()
        highest = -1
        for one in self._units:
            if one.done and one.highest < waiting:
                highest = max(highest, one.highest)
            else:
                kept.append(one)
        self._units = kept
        if highest >= 0:
            self._out.append(figg.encode_ack(highest))

    def attached(self, topic: str, offset: int) -> None:
        self._out.append(figg.encode_attached(topic, offset))

    def detached(self, topic: str) -> None:
        self._out.append(figg.encode_detached(topic))

    def data_to_send(self) -> bytes:
        """Control messages; they go out ahead of any DATA that still waits."""
        if self._news:
            self._acknowledge()
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    @property
    def finished(self) -> bool:
        """Whether every publish that was accepted is acknowledged."""
        return not self._units
