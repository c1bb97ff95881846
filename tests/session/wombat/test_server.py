"""The server's side of a Wombat connection: tests feed it messages and take its output."""

import sys

import msgpack
import pytest

from headrace.errors import LocalProtocolError
from headrace.model import Refusal
from headrace.session.server import REPEATS_MAX, AttachCommand, Close, DetachCommand, Publish
from headrace.session.wombat import REMEMBERED_BYTES_MAX, REMEMBERED_S, WombatServerSession
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ClientDecoder

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


def test_of_a_read_with_old_and_new_publishes_only_the_new_are_stored() -> None:
    session = made()
    session.stored(published(session, publishes(1, 2)).unit)
    acks(session)
    command = published(session, [*publishes(2, 3), *publishes(4, topic="u")])
    assert command.records == {"t": [b"\0\0\0\1x"], "u": [b"\0\0\0\1x"]}
    session.stored(command.unit)
    assert acks(session) == [("t", 3), ("u", 4)]


def test_publishes_are_the_same_only_by_topic_number_and_payload() -> None:
    session = made()
    for topic, payload in (("a", b"x"), ("b", b"x"), ("a", b"y")):
        messages = publishes(0, topic=topic, payload=payload)
        command = published(session, messages)
        assert command.records == {topic: [b"\0\0\0\1" + payload]}
        assert session.receive_messages(messages, 2.0) == []
        session.stored(command.unit)
        assert acks(session) == [(topic, 0)]
    assert session.repeats == 3


def test_a_client_may_count_for_each_topic() -> None:
    session = made()
    first = published(session, [*publishes(0, topic="a"), *publishes(0, topic="b")])
    assert first.records.keys() == {"a", "b"}
    second = published(session, [*publishes(1, 2, topic="a"), *publishes(1, topic="b")])
    session.stored(second.unit)
    assert acks(session) == [], "numbers below are under way"
    session.stored(first.unit)
    assert acks(session) == [("a", 2), ("b", 1)]
    assert session.receive_messages(publishes(1, topic="b"), 2.0) == []
    assert acks(session) == [("b", 1)]


def test_numbers_of_each_topic_turn_on_their_own() -> None:
    session = made()
    ahead = published(session, publishes(LAST - 1, LAST, 0, topic="a"))
    behind = published(session, publishes(LAST, topic="b"))
    session.stored(behind.unit)
    assert acks(session) == []
    session.stored(ahead.unit)
    assert acks(session) == [("a", 0), ("b", LAST)]
    assert session.receive_messages(publishes(LAST, topic="a"), 2.0) == []
    turned = published(session, publishes(0, topic="b"))
    assert session.receive_messages(publishes(LAST, topic="b"), 2.0) == []
    session.stored(turned.unit)
    assert acks(session) == [("b", 0), ("a", LAST)]


def test_a_busy_topic_does_not_keep_another_waiting_for_ever() -> None:
    """A client with a counter for each topic always has low numbers pending on one of its topics."""
    session = made()
    low = published(session, publishes(0, topic="b"))
    high = published(session, publishes(1000, topic="a"))
    session.stored(high.unit)
    assert acks(session) == [], "with one counter for both, 1000 would stand for 0 too"
    next_low = published(session, publishes(1, topic="b"))
    session.stored(low.unit)
    assert acks(session) == [("b", 0), ("a", 1000)]
    session.stored(next_low.unit)
    assert acks(session) == [("b", 1)]


def test_what_is_discarded_is_not_acknowledged_as_a_repeat() -> None:
    session = made()
    command = published(session, publishes(0))
    assert session.receive_messages(publishes(0), 0.0) == []
    session.discard(command)
    assert acks(session) == []


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


def attach(session: WombatServerSession, serial: str | None) -> AttachCommand:
    """Send an ATTACH for topic `t`, and return the command for the broker."""
    (command,) = session.receive_messages([wombat.encode_attach("t", serial)], 0.0)
    assert isinstance(command, AttachCommand)
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
    assert made().receive_messages([message], 0.0) == [AttachCommand("t", None)]


def test_a_serial_asks_for_epoch_and_offset_or_for_an_offset_alone() -> None:
    messages = [wombat.encode_attach("t", serial) for serial in ("17@42", "@42")]
    assert made().receive_messages(messages, 0.0) == [
        AttachCommand("t", 42, 17, "17@42"),
        AttachCommand("t", 42, None, "@42"),
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
    assert attach(session, "abc") == AttachCommand("t", 0)
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
        assert isinstance(command, AttachCommand)
        session.attaching(command)
        session.attached("t", 17, 7, exact=True)
    assert sent(session) == [wombat.Attached("t", one) for one in asked]
    detach, again = session.receive_messages(
        [wombat.encode_detach("t"), wombat.encode_attach("t", "@7")], 0.0
    )
    assert detach == DetachCommand("t")
    assert isinstance(again, AttachCommand)
    session.detached("t")
    session.attaching(again)
    session.attached("t", 17, 7, exact=True)
    assert sent(session)[-1] == wombat.Attached("t", "@7")


def test_a_detach_is_a_command_and_its_answer() -> None:
    session = made()
    assert session.receive_messages([wombat.encode_detach("t")], 0.0) == [DetachCommand("t")]
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


def test_a_refused_client_leaves_no_publishes_in_memory() -> None:
    """Its connection may stay open for a minute, until there is memory for what it brought."""
    session = made()
    command = published(session, publishes(0, payload=bytes(1000)))
    [record] = command.records["t"]
    session.discard(command)
    del command
    session.refuse("connect again")
    assert sys.getrefcount(record) == 2, "only this test has it"
    assert session.receive_messages(publishes(0), 1.0) == []


def test_publishes_that_come_again_and_again_cost_a_bounded_amount() -> None:
    session, count = made(), REPEATS_MAX + 100
    commands = [published(session, publishes(0, topic=f"t{number}")) for number in range(count)]
    for number in range(count):
        assert session.receive_messages(publishes(0, topic=f"t{number}"), 2.0) == []
        assert acks(session) == [], "still under way"
    for command in commands:
        session.stored(command.unit)
    assert len(acks(session)) == count
    assert session.finished
    units = session._units
    assert units is not None and not units.size and not units._repeats


def test_of_acknowledged_publishes_the_newest_are_remembered_for_a_while() -> None:
    session = made()
    for number in range(100):
        session.stored(published(session, publishes(number, payload=b"x" * 10_000)).unit)
        acks(session)
    numbers = session._numbers
    assert numbers is not None and numbers.bytes <= REMEMBERED_BYTES_MAX + 10_100
    assert session.receive_messages(publishes(99, 98, 97, payload=b"x" * 10_000), 0.0) == []
    assert acks(session) == [("t", 99)]
    again = published(session, publishes(0, payload=b"x" * 10_000))
    session.receive_messages([wombat.encode_ping(1)], REMEMBERED_S + 1.0)
    assert numbers.bytes, "this one is under way"
    session.stored(again.unit)
    assert acks(session) == [("t", 0)], "forgotten, and stored twice"
    session.receive_messages([wombat.encode_ping(1)], REMEMBERED_S + 1.0)
    assert not numbers.bytes


def test_publishes_come_before_what_else_a_read_brought() -> None:
    session = made()
    messages = [wombat.encode_attach("t", None), *publishes(0), wombat.encode_detach("t")]
    commands = session.receive_messages(messages, 0.0)
    assert [type(command) for command in commands] == [Publish, AttachCommand, DetachCommand]


def test_nothing_at_or_above_a_refused_number_is_acknowledged() -> None:
    """A client with one counter takes the ACK of a higher number as one for the refused number too."""
    session = made()
    below = published(session, publishes(LAST - 1, LAST))
    above = published(session, publishes(1, topic="u"))
    close = session.receive_messages(publishes(0, topic="$refused"), 0.0)[-1]
    assert isinstance(close, Close) and close.refused is Refusal.RESERVED_TOPIC
    session.stored(above.unit)
    assert acks(session) == []
    assert not session.finished
    session.stored(below.unit)
    assert acks(session) == [("t", LAST)]
    assert session.finished
