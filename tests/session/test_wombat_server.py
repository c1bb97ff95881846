"""The server's side of a Wombat connection, fed and drained by hand."""

import msgpack
import pytest

from headrace.errors import LocalProtocolError
from headrace.session.server import Attach, Close, Detach, Publish
from headrace.session.units import REPEATS_MAX
from headrace.session.wombat_server import WombatServerSession
from headrace.wire import wombat
from headrace.wire.wombat_decoder import ClientDecoder

LAST = wombat.SEQUENCE_NUMBERS - 1


def made(now: float = 0.0) -> WombatServerSession:
    return WombatServerSession(now, silence_s=10.0)


def publishes(*numbers: int, topic: str = "t", payload: bytes = b"x") -> list[bytes]:
    return [wombat.encode_publish(topic, number, payload) for number in numbers]


def published(session: WombatServerSession, messages: list[bytes]) -> Publish:
    (command,) = session.receive_messages(messages, 0.0)
    assert isinstance(command, Publish)
    return command


def sent(session: WombatServerSession) -> list[wombat.ToClient]:
    messages, data = [], session.data_to_send()
    while data:
        size, at = data[1], 2
        assert size < 126
        messages.append(data[at : at + size])
        data = data[at + size :]
    return ClientDecoder().receive(messages)


def acks(session: WombatServerSession) -> list[tuple[str, int]]:
    return [(ack.topic, ack.number) for ack in sent(session) if isinstance(ack, wombat.Ack)]


def test_one_read_of_publishes_is_one_command_and_one_ack() -> None:
    session = made()
    command = published(session, publishes(0, 1, 2))
    assert command.records == {"t": [b"\0\0\0\1x"] * 3}
    assert acks(session) == []
    session.stored(command.unit)
    assert acks(session) == [("t", 2)]
    assert session.finished


def test_every_topic_of_a_commit_gets_an_ack_with_its_own_highest_number() -> None:
    session = made()
    command = published(
        session,
        [*publishes(0, 1), *publishes(2, topic="u"), *publishes(3), *publishes(4, topic="u")],
    )
    session.stored(command.unit)
    assert acks(session) == [("t", 3), ("u", 4)]


def test_an_ack_waits_for_earlier_numbers_that_are_still_under_way() -> None:
    session = made()
    slow = published(session, publishes(0, 1))
    fast = published(session, publishes(2, 3, topic="u"))
    session.stored(fast.unit)
    assert acks(session) == []
    session.stored(slow.unit)
    assert acks(session) == [("t", 1), ("u", 3)]


def test_an_ack_does_not_pass_a_lower_number_that_came_later() -> None:
    session = made()
    high = published(session, publishes(5))
    low = published(session, publishes(4))
    session.stored(high.unit)
    assert acks(session) == []
    session.stored(low.unit)
    assert acks(session) == [("t", 5)]


def test_a_number_that_came_before_is_acknowledged_and_not_stored_again() -> None:
    session = made()
    first = published(session, publishes(7, 8))
    assert session.receive_messages(publishes(7, 8), 2.0) == []
    assert acks(session) == [], "still under way"
    session.stored(first.unit)
    assert acks(session) == [("t", 8)]
    assert session.receive_messages(publishes(7), 4.0) == []
    assert acks(session) == [("t", 7)]
    assert session.repeats == 3
    assert session.finished


def test_of_a_read_with_old_and_new_numbers_only_the_new_are_stored() -> None:
    session = made()
    session.stored(published(session, publishes(1, 2)).unit)
    acks(session)
    command = published(session, [*publishes(2, 3, payload=b"y"), *publishes(2, 4, topic="u")])
    assert command.records == {"t": [b"\0\0\0\1y"], "u": [b"\0\0\0\1x"]}
    session.stored(command.unit)
    assert acks(session) == [("t", 3), ("u", 4)]


def test_numbers_below_the_first_are_new_too() -> None:
    session = made()
    session.stored(published(session, publishes(10)).unit)
    assert published(session, publishes(8, 9)).records == {"t": [b"\0\0\0\1x"] * 2}


def test_numbers_go_on_at_0_behind_the_last() -> None:
    session = made()
    command = published(session, publishes(LAST - 1, LAST, 0, 1))
    session.stored(command.unit)
    assert acks(session) == [("t", 1)]
    assert session.receive_messages(publishes(LAST, 0), 0.0) == [], "not stored again"
    later = published(session, publishes(2))
    session.stored(later.unit)
    assert acks(session)[-1] == ("t", 2)


def test_an_ack_waits_also_across_the_turn_of_the_numbers() -> None:
    session = made()
    before = published(session, publishes(LAST))
    after = published(session, publishes(0))
    session.stored(after.unit)
    assert acks(session) == []
    session.stored(before.unit)
    assert acks(session) == [("t", 0)]


def attach(session: WombatServerSession, serial: str | None) -> Attach:
    """Ask for the topic `t`, up to where the broker is asked for it."""
    (command,) = session.receive_messages([wombat.encode_attach("t", serial)], 0.0)
    assert isinstance(command, Attach)
    session.attaching(command)
    return command


def test_a_unit_is_stored_once() -> None:
    session = made()
    command = published(session, publishes(0))
    session.stored(command.unit)
    with pytest.raises(LocalProtocolError):
        session.stored(command.unit)


@pytest.mark.parametrize("serial", [None, ""])
def test_without_a_serial_a_topic_is_attached_at_its_end(serial: str | None) -> None:
    message = msgpack.packb({"type": 1, "attach": {"topic": "t", "serial": serial}})
    assert made().receive_messages([message], 0.0) == [Attach("t", None)]


def test_a_serial_asks_for_epoch_and_offset_or_for_an_offset_alone() -> None:
    messages = [wombat.encode_attach("t", serial) for serial in ("17@42", "@42")]
    assert made().receive_messages(messages, 0.0) == [
        Attach("t", 42, 17, "17@42"),
        Attach("t", 42, None, "@42"),
    ]


def test_attached_repeats_the_serial_if_nothing_was_missed() -> None:
    session = made()
    for asked in ("17@42", "@42"):
        attach(session, asked)
        session.attached("t", 17, 42, exact=True)
        assert sent(session) == [wombat.Attached("t", asked)]


def test_attached_has_another_serial_if_something_was_missed() -> None:
    session = made()
    for asked in ("17@42", "@42", "16@50", "abc"):
        attach(session, asked)
        session.attached("t", 17, 50, exact=False)
        assert sent(session) == [wombat.Attached("t", "17@50")]


def test_a_foreign_serial_asks_for_everything_and_is_never_repeated() -> None:
    session = made()
    assert attach(session, "abc") == Attach("t", 0)
    session.attached("t", 17, 0, exact=True)
    assert sent(session) == [wombat.Attached("t", "17@0")]


def test_an_attach_that_replaces_another_is_answered_for_itself() -> None:
    session = made()
    attach(session, "17@42")
    attach(session, None)
    session.attached("t", 17, 42, exact=True)
    assert sent(session) == [wombat.Attached("t", "17@42")], "its own position, not what was asked"
    attach(session, "@7")
    session.detached("t")
    attach(session, None)
    session.attached("t", 17, 50, exact=True)
    assert sent(session)[-1] == wombat.Attached("t", "17@50")


def test_attaches_of_one_read_are_each_answered_in_their_own_words() -> None:
    session = made()
    asked = ["@7", "17@7", "@7"]
    commands = session.receive_messages([wombat.encode_attach("t", one) for one in asked], 0.0)
    for command in commands:
        assert isinstance(command, Attach)
        session.attaching(command)
        session.attached("t", 17, 7, exact=True)
    assert sent(session) == [wombat.Attached("t", one) for one in asked]
    detach, again = session.receive_messages(
        [wombat.encode_detach("t"), wombat.encode_attach("t", "@7")], 0.0
    )
    assert detach == Detach("t")
    assert isinstance(again, Attach)
    session.detached("t")
    session.attaching(again)
    session.attached("t", 17, 7, exact=True)
    assert sent(session)[-1] == wombat.Attached("t", "@7")


def test_a_detach_is_a_command_and_its_answer() -> None:
    session = made()
    assert session.receive_messages([wombat.encode_detach("t")], 0.0) == [Detach("t")]
    session.detached("t")
    assert sent(session) == [wombat.Detached("t")]


def test_a_ping_is_answered_at_once_and_keeps_the_client_alive() -> None:
    session = made(now=100.0)
    assert session.silent_at == 110.0
    assert session.receive_messages([wombat.encode_ping(123)], 105.0) == []
    assert sent(session) == [wombat.Pong(123)]
    assert session.silent_at == 115.0


def test_only_a_ping_keeps_the_client_alive() -> None:
    session = made(now=100.0)
    session.receive_messages([*publishes(0), wombat.encode_attach("t", None)], 105.0)
    assert session.silent_at == 110.0


def test_bad_input_closes_after_what_came_before_is_acknowledged() -> None:
    session = made()
    command, close = session.receive_messages([*publishes(0), b"\xc1", *publishes(1)], 0.0)
    assert isinstance(command, Publish) and isinstance(close, Close)
    assert close.code == 1002
    assert not session.finished
    session.stored(command.unit)
    assert acks(session) == [("t", 0)]
    assert session.finished
    assert session.receive_messages(publishes(2), 0.0) == []


def test_a_discarded_unit_is_never_acknowledged() -> None:
    session = made()
    command = published(session, publishes(0))
    session.discard(command)
    assert session.finished
    assert acks(session) == []


def test_publishes_that_come_again_and_again_cost_a_bounded_amount() -> None:
    session = made()
    first = published(session, publishes(0))
    for number in range(5000):
        assert session.receive_messages(publishes(0, topic=f"t{number}"), 2.0) == []
        assert acks(session) == [], "still under way"
    session.stored(first.unit)
    again = acks(session)
    assert ("t", 0) in again
    assert len(again) <= REPEATS_MAX + 1
    assert session.finished


def test_publishes_come_before_what_else_a_read_brought() -> None:
    session = made()
    messages = [wombat.encode_attach("t", None), *publishes(0), wombat.encode_detach("t")]
    commands = session.receive_messages(messages, 0.0)
    assert [type(command) for command in commands] == [Publish, Attach, Detach]
