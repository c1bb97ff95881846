"""The server's side of a Figg connection: tests feed it bytes and take its output."""

import pytest

from headrace.errors import LocalProtocolError
from headrace.model import Refusal
from headrace.session.figg import FiggServerSession
from headrace.session.server import AttachCommand, Close, DetachCommand, Publish
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ClientDecoder


def publishes(*numbers: int, topic: str = "t", payload: bytes = b"x") -> bytes:
    return b"".join(figg.encode_publish(topic, number, payload) for number in numbers)


def acks(session: FiggServerSession) -> list[int]:
    sent = ClientDecoder().receive(session.data_to_send())
    return [message.seq_num for message in sent if isinstance(message, figg.Ack)]


def published(session: FiggServerSession, data: bytes) -> Publish:
    (command,) = session.receive_data(data)
    assert isinstance(command, Publish)
    return command


def test_one_read_of_publishes_is_one_command_and_one_ack() -> None:
    session = FiggServerSession()
    command = published(session, publishes(0, 1, 2))
    assert command.records == {"t": [b"\0\0\0\1x"] * 3}
    assert acks(session) == []
    session.stored(command.unit)
    assert acks(session) == [2]
    assert session.finished


def test_an_ack_waits_for_earlier_numbers_that_are_still_under_way() -> None:
    session = FiggServerSession()
    slow = published(session, publishes(0, 1))
    fast = published(session, publishes(2, 3))
    session.stored(fast.unit)
    assert acks(session) == []
    session.stored(slow.unit)
    assert acks(session) == [3]


def test_an_ack_does_not_pass_a_lower_number_that_came_later() -> None:
    session = FiggServerSession()
    high = published(session, publishes(5))
    low = published(session, publishes(4))
    session.stored(high.unit)
    assert acks(session) == []
    session.stored(low.unit)
    assert acks(session) == [5]


def test_numbers_out_of_order_inside_one_read_are_acknowledged_together() -> None:
    session = FiggServerSession()
    command = published(session, publishes(7, 5, 6))
    session.stored(command.unit)
    assert acks(session) == [7]


def test_a_resent_low_number_is_stored_again_and_acknowledged() -> None:
    session = FiggServerSession()
    session.stored(published(session, publishes(9)).unit)
    assert acks(session) == [9]
    session.stored(published(session, publishes(3)).unit)
    assert acks(session) == [3]


def test_units_that_become_durable_together_are_one_ack() -> None:
    session = FiggServerSession()
    units = [published(session, publishes(number)).unit for number in range(5)]
    for unit in units:
        session.stored(unit)
    assert acks(session) == [4]


def test_a_publish_into_a_reserved_name_space_is_refused_and_not_acknowledged() -> None:
    session = FiggServerSession()
    accepted, close = session.receive_data(
        publishes(0) + publishes(1, topic="$logux/main") + publishes(2)
    )
    assert isinstance(accepted, Publish) and isinstance(close, Close)
    assert accepted.records == {"t": [b"\0\0\0\1x"]}
    session.stored(accepted.unit)
    assert acks(session) == [0]


def test_nothing_at_or_above_a_refused_number_is_acknowledged() -> None:
    """A client takes the ACK of a higher number as one for the refused number too."""
    session = FiggServerSession()
    below = published(session, publishes(3, 4))
    above = published(session, publishes(6))
    close = session.receive_data(publishes(5, topic="$refused"))[-1]
    assert isinstance(close, Close) and close.refused is Refusal.RESERVED_TOPIC
    session.stored(above.unit)
    assert acks(session) == []
    assert not session.finished
    session.stored(below.unit)
    assert acks(session) == [4]
    assert session.finished
    session.discard(above)


def test_a_unit_is_stored_once() -> None:
    session = FiggServerSession()
    command = published(session, publishes(0))
    session.stored(command.unit)
    with pytest.raises(LocalProtocolError):
        session.stored(command.unit)


def test_a_ping_is_answered_without_waiting_for_publishes() -> None:
    session = FiggServerSession()
    published(session, publishes(0))
    session.receive_data(figg.encode_ping(42))
    assert session.data_to_send() == figg.encode_pong(42)


def test_attach_and_detach_become_commands() -> None:
    session = FiggServerSession()
    commands = session.receive_data(
        figg.encode_attach("a", 7) + figg.encode_attach("b", None) + figg.encode_detach("a")
    )
    assert commands == [AttachCommand("a", 7), AttachCommand("b", None), DetachCommand("a")]


def test_bad_input_closes_after_what_was_accepted_is_acknowledged() -> None:
    session = FiggServerSession()
    accepted, close = session.receive_data(publishes(0, 1) + b"\xff" * 8)
    assert isinstance(accepted, Publish)
    assert isinstance(close, Close)
    assert "unknown message type" in close.reason
    assert not session.finished
    assert session.receive_data(publishes(2)) == []
    session.stored(accepted.unit)
    assert acks(session) == [1]
    assert session.finished


def test_a_refused_client_leaves_no_undecoded_bytes() -> None:
    """Its connection may stay open for a minute, until there is memory for what it brought."""
    session = FiggServerSession()
    pings = figg.encode_ping(1) * 200
    session.receive_data(pings + publishes(1)[:-1])
    assert session.unread_bytes
    session.refuse("connect again")
    assert (session.unread_bytes, session.unfinished) == (0, b"")
    assert session.receive_data(publishes(1)) == []
