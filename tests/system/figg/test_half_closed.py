"""Figg peers that shut down their writing side and continue to read."""

import socket

from tests.system.conftest import SMALL, Connect, Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import ACK, DATA, Message, Wire
from tests.system.support import held_back


def shut_down(wire: Wire) -> None:
    wire.socket.shutdown(socket.SHUT_WR)


def test_a_half_closed_sender_receives_every_acknowledgement_and_then_the_close(
    connect: Connect, topic: bytes
) -> None:
    sender = connect()
    sender.send(*(figg.publish(topic, number, bytes(1000)) for number in range(2000)))
    shut_down(sender)
    received = sender.until_closed()
    assert {message.type for message in received} == {ACK}
    assert received[-1].number == 1999
    reader = connect()
    reader.attach(topic, 0)
    reader.expect_data(2000)


def test_a_half_closed_sender_waits_until_its_publishes_are_no_longer_held_back(
    start: Start,
) -> None:
    server = start(config=SMALL)
    with Wire(server.figg, timeout_s=30) as sender:
        much = [figg.publish(b"t", number, bytes(100_000)) for number in range(80)]

        def send_all() -> None:
            sender.send(*much)
            shut_down(sender)

        with held_back(server, send_all), Wire(server.figg) as other:
            assert other.alive()
        assert sender.until_closed()[-1] == Message(ACK, number=79)
    assert "Traceback" not in server.stderr


def test_half_a_message_before_the_end_costs_no_acknowledgement(
    connect: Connect, topic: bytes
) -> None:
    sender = connect()
    sender.send(figg.publish(topic, 0, b"foo"), figg.publish(topic, 1, b"bar")[:-1])
    shut_down(sender)
    assert sender.until_closed() == [Message(ACK, number=0)]


def test_a_peer_that_is_owed_nothing_is_closed_at_once(connect: Connect, topic: bytes) -> None:
    idle, subscriber = connect(), connect()
    subscriber.attach(topic)
    for wire in (idle, subscriber):
        shut_down(wire)
        assert wire.until_closed() == []


def test_pings_and_attaches_before_the_end_are_answered(connect: Connect, topic: bytes) -> None:
    connect().publish(topic, b"foo")
    peer = connect()
    peer.send(figg.ping(7), figg.attach(topic, 0), figg.publish(topic, 5, b"bar"))
    shut_down(peer)
    answered = {message for message in peer.until_closed() if message.type != DATA}
    assert answered == {
        Message(figg.PONG, number=7),
        Message(figg.ATTACHED, topic, 0),
        Message(ACK, number=5),
    }
