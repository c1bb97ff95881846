"""Server side of one Figg connection, without I/O: bytes in, commands out; events in, bytes out."""

from collections.abc import Sequence

from headrace.session.server import AttachCommand, Command, DetachCommand, Publish, TopicSession
from headrace.session.units import Unit
from headrace.wire import readers, websocket
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ServerDecoder


class FiggServerSession(TopicSession):
    __slots__ = ("_figg",)

    def __init__(self) -> None:
        self._figg = ServerDecoder()
        super().__init__(self._figg)

    def receive_data(self, data: bytes) -> list[Command]:
        commands: list[Command] = []
        for message in self._figg.receive(data):
            if isinstance(message, figg.Publishes):
                unit = Unit(message.lowest, message.highest)
                self._publishes_under_way().add(unit)
                # Publishes come first, so that a refusal of another message in this read does not lose them.
                commands.insert(0, Publish(message.records, unit))
            elif isinstance(message, figg.Ping):
                self._out.append(figg.encode_pong(message.timestamp))
            elif isinstance(message, figg.Attach):
                commands.append(AttachCommand(message.topic, message.offset))
            elif isinstance(message, figg.Detach):
                commands.append(DetachCommand(message.topic))
            elif isinstance(message, readers.Read | readers.Handled):
                commands.append(message)
            else:
                refused = message.refused
                number = None if refused is None else refused.number
                commands.append(self.refuse_publish(message, number, websocket.POLICY_VIOLATION))
        return commands

    @property
    def unread_bytes(self) -> int:
        """Number of bytes received and not decoded. `receive_data`, even without data, continues there."""
        return len(self._figg.unread)

    def attaching(self, command: AttachCommand) -> None:
        """Do nothing: the answer needs nothing of the command."""

    def attached(self, topic: str, epoch: int, offset: int, exact: bool) -> None:
        self._out.append(figg.encode_attached(topic, offset))

    def detached(self, topic: str) -> None:
        self._out.append(figg.encode_detached(topic))

    def tell_reader(self, message: readers.ToClient) -> None:
        if isinstance(message, readers.Stored):
            self._out.append(figg.encode_stored(message))
        elif isinstance(message, readers.Reading):
            self._out.append(figg.encode_reading(message))
        elif isinstance(message, readers.Waiting):
            self._out.append(figg.encode_waiting(message))
        elif isinstance(message, readers.Lost):
            self._out.append(figg.encode_lost(message))
        else:
            self._out.append(figg.encode_records(message))

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        """Send one ACK for all units."""
        self._out.append(figg.encode_ack(max(unit.highest for unit in ready)))
