"""The peer's side of Figg. It shares the codec with the client; the codec has its own tests."""

from collections.abc import Iterator

from headrace.wire import tokens
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ServerDecoder
from tests.client.peer import Attach, Auth, Connection, Detach, Heard, Peer, Ping, Publish


class FiggConnection(Connection):
    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.decoder = ServerDecoder()

    def hear(self, data: bytes) -> Iterator[Heard]:
        for message in self.decoder.receive(data):
            match message:
                case figg.Attach(topic, offset):
                    yield Attach(topic, offset)
                case figg.Detach(topic):
                    yield Detach(topic)
                case figg.Ping(timestamp):
                    yield Ping(timestamp)
                case figg.Publishes(records, _, highest):
                    for topic, new in records.items():
                        for record in new:
                            yield Publish(highest, topic, record[4:])
                case tokens.Auth(token):
                    yield Auth(token)
                case figg.Bad(reason):
                    raise AssertionError(reason)

    def say_attached(self, asked: Attach, offset: int) -> None:
        self.transport.write(figg.encode_attached(asked.topic, offset))

    def say_detached(self, topic: str) -> None:
        self.transport.write(figg.encode_detached(topic))

    def say_ack(self, publish: Publish) -> None:
        self.transport.write(figg.encode_ack(publish.number))

    def say_pong(self, timestamp: int) -> None:
        self.transport.write(figg.encode_pong(timestamp))

    def say_auth_ok(self, valid_ms: int) -> None:
        self.transport.write(figg.encode_auth_answer(tokens.AuthOk(valid_ms)))

    def say_auth_refused(self, code: int, reason: str) -> None:
        self.transport.write(figg.encode_auth_answer(tokens.AuthRefused(code, reason)))

    def say_messages(self, topic: str, begin: int, payloads: list[bytes]) -> None:
        records = [len(payload).to_bytes(4, "big") + payload for payload in payloads]
        self.transport.write(figg.encode_data(topic, begin, records))

    def say_detach(self) -> None:
        self.transport.write(figg.encode_detach("t"))


def figg_peer() -> Peer:
    return Peer("figg", FiggConnection)
