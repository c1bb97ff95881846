"""The server's side of one Figg connection, without I/O: bytes in, commands out; events in, bytes out.

Keeps one thing only: which publishes of this connection are not durable yet.

    open ──bad input──▶ closing ──every accepted publish acknowledged──▶ closed
"""

from headrace.session.server import Attach, Close, Command, Detach, Publish, Unit, Units
from headrace.wire import figg, websocket
from headrace.wire.figg_decoder import ServerDecoder


class FiggServerSession:
    __slots__ = ("_decoder", "_out", "_units", "closing")

    def __init__(self) -> None:
        self._decoder = ServerDecoder()
        self._units: Units | None = None
        self._out: list[bytes] = []
        self.closing = False

    def receive_data(self, data: bytes) -> list[Command]:
        commands: list[Command] = []
        for message in self._decoder.receive(data):
            if isinstance(message, figg.Publishes):
                unit = Unit(message.lowest, message.highest)
                if self._units is None:
                    self._units = Units()
                self._units.add(unit)
                # First, so that a refusal of anything else in this read does not cost them.
                commands.insert(0, Publish(message.records, unit))
            elif isinstance(message, figg.Ping):
                self._out.append(figg.encode_pong(message.timestamp))
            elif isinstance(message, figg.Attach):
                commands.append(Attach(message.topic, message.offset))
            elif isinstance(message, figg.Detach):
                commands.append(Detach(message.topic))
            else:
                commands.append(self.refuse(message.reason))
        return commands

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        """Take nothing more from this peer, which this protocol cannot tell why."""
        self.closing = True
        self._decoder.closed = True
        return Close(reason, code)

    def stored(self, unit: Unit) -> None:
        """All publishes of the unit are durable."""
        assert self._units is not None
        self._units.stored(unit)

    def discard(self, unit: Unit) -> None:
        """The unit is not stored, and never acknowledged: its connection is being closed."""
        assert self._units is not None
        self._units.discard(unit)

    def attaching(self, command: Attach) -> None:
        """Nothing of it is needed for the answer."""

    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        self._out.append(figg.encode_attached(topic, offset))

    def detached(self, topic: str) -> None:
        self._out.append(figg.encode_detached(topic))

    def data_to_send(self) -> bytes:
        """Answers; they go out ahead of any DATA that still waits."""
        out = self._out
        if self._units is not None and (ready := self._units.take()):
            # One for everything that may be acknowledged by now.
            out.append(figg.encode_ack(max(unit.highest for unit in ready)))
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    @property
    def finished(self) -> bool:
        """Whether every publish that was accepted is acknowledged."""
        return not self._units
