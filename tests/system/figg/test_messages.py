"""Each Figg message against a real server, as existing clients use it. Elsewhere: bad input."""

import time

import pytest

from headrace.testing import ServerProcess
from tests.system.conftest import Connect
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import ACK, ATTACHED, DATA, DETACHED, PONG, Message, Wire
from tests.system.support import get

PAYLOAD_BYTES_MAX = 262_144


@pytest.fixture
def foo_bar_car(connect: Connect, topic: bytes) -> bytes:
    """A topic with the three records of the notes."""
    connect().publish(topic, b"foo", b"bar", b"car")
    return topic


def data(wire: Wire, records: int) -> list[tuple[int, bytes]]:
    return [(message.number, message.data) for message in wire.expect_data(records)]


def test_the_first_records_of_a_topic_have_offsets_7_14_and_21(wire: Wire, topic: bytes) -> None:
    assert wire.attach(topic) == 0
    wire.send(*(figg.publish(topic, i, text) for i, text in enumerate([b"foo", b"bar", b"car"])))
    messages = []
    while sum(message.type == DATA for message in messages) < 3:
        messages.append(wire.receive())
    assert [m for m in messages if m.type == DATA] == [
        Message(DATA, topic, 7, b"foo"),
        Message(DATA, topic, 14, b"bar"),
        Message(DATA, topic, 21, b"car"),
    ]


def test_attaching_from_7_yields_bar_first(wire: Wire, foo_bar_car: bytes) -> None:
    assert wire.attach(foo_bar_car, 7) == 7
    assert data(wire, 2) == [(14, b"bar"), (21, b"car")]


def test_attaching_from_0_yields_everything(wire: Wire, foo_bar_car: bytes) -> None:
    assert wire.attach(foo_bar_car, 0) == 0
    assert data(wire, 3) == [(7, b"foo"), (14, b"bar"), (21, b"car")]


def test_attaching_without_an_offset_answers_the_end_and_delivers_only_later_records(
    wire: Wire, connect: Connect, foo_bar_car: bytes
) -> None:
    assert wire.attach(foo_bar_car) == 21
    connect().publish(foo_bar_car, b"later")
    assert data(wire, 1) == [(30, b"later")]


def test_attaching_to_an_unknown_topic_answers_0(wire: Wire, topic: bytes) -> None:
    assert wire.attach(topic) == 0


@pytest.mark.parametrize("offset", [None, 0, 99])
def test_attaching_makes_no_topic(
    server: ServerProcess, wire: Wire, topic: bytes, offset: int | None
) -> None:
    wire.attach(topic, offset)
    assert get(server, f"/v1/topic?name={topic.decode()}")[0] == 404


@pytest.mark.parametrize("flags", [0x8000, 0x0001, 0x8001, 0xFFFF, 0x8100, 0x0003])
def test_the_flag_for_an_offset_may_be_counted_from_either_end_and_other_bits_are_ignored(
    wire: Wire, foo_bar_car: bytes, flags: int
) -> None:
    wire.send(figg.attach(foo_bar_car, 14, flags))
    assert wire.expect(ATTACHED).number == 14
    assert data(wire, 1) == [(21, b"car")]


@pytest.mark.parametrize("flags", [0x0000, 0x7FFE, 0x4000, 0x0002])
@pytest.mark.parametrize("offset", [b"", bytes(7) + b"\7"])
def test_without_the_flag_the_offset_is_unused_and_may_be_left_out(
    wire: Wire, connect: Connect, foo_bar_car: bytes, flags: int, offset: bytes
) -> None:
    payload = flags.to_bytes(2, "big") + figg.field(foo_bar_car) + offset
    wire.send(figg.frame(figg.ATTACH, payload))
    assert wire.expect(ATTACHED).number == 21
    connect().publish(foo_bar_car, b"later")
    assert data(wire, 1) == [(30, b"later")]


@pytest.mark.parametrize("offset", [21, 22, 1000, 2**63, 2**64 - 1])
def test_an_offset_at_or_past_the_end_is_answered_with_the_end_and_goes_live(
    wire: Wire, connect: Connect, foo_bar_car: bytes, offset: int
) -> None:
    assert wire.attach(foo_bar_car, offset) == 21
    connect().publish(foo_bar_car, b"later")
    assert data(wire, 1) == [(30, b"later")]


@pytest.mark.parametrize(("offset", "boundary"), [(1, 7), (6, 7), (8, 14), (13, 14), (15, 21)])
def test_an_offset_inside_a_record_is_answered_with_the_next_boundary(
    wire: Wire, connect: Connect, foo_bar_car: bytes, offset: int, boundary: int
) -> None:
    assert wire.attach(foo_bar_car, offset) == boundary
    connect().publish(foo_bar_car, b"later")
    later = data(wire, (21 - boundary) // 7 + 1)
    assert [offset for offset, _ in later] == [*range(boundary + 7, 22, 7), 30]


def test_an_offset_past_the_end_of_an_unknown_topic_is_answered_with_0(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    assert wire.attach(topic, 1000) == 0
    connect().publish(topic, b"foo")
    assert data(wire, 1) == [(7, b"foo")]


def test_a_second_attach_replaces_the_first(
    wire: Wire, connect: Connect, foo_bar_car: bytes
) -> None:
    assert wire.attach(foo_bar_car) == 21
    assert wire.attach(foo_bar_car, 14) == 14
    connect().publish(foo_bar_car, b"later")
    assert data(wire, 2) == [(21, b"car"), (30, b"later")]
    connect().publish(foo_bar_car, b"last")
    assert data(wire, 1) == [(38, b"last")], "each record once, from the second attachment alone"


def test_a_second_attach_without_an_offset_ends_the_backlog_of_the_first(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    connect().publish(topic, *[bytes(100_000)] * 100)
    assert wire.attach(topic, 0) == 0
    wire.send(figg.attach(topic))
    while (message := wire.receive()).type == DATA:
        pass
    assert (message.type, message.number) == (ATTACHED, 100 * 100_004)
    connect().publish(topic, b"later")
    assert data(wire, 1) == [(100 * 100_004 + 9, b"later")]


def test_topics_of_one_connection_are_attached_independently(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    other = topic + b"/other"
    wire.attach(topic)
    wire.attach(other)
    connect().publish(topic, b"one")
    assert wire.expect(DATA).topic == topic
    connect().publish(other, b"two")
    assert wire.expect(DATA) == Message(DATA, other, 7, b"two")


def test_detaching_what_is_not_attached_is_answered_and_creates_nothing(
    server: ServerProcess, wire: Wire, topic: bytes
) -> None:
    wire.send(figg.detach(topic))
    assert wire.receive() == Message(DETACHED, topic)
    assert get(server, f"/v1/topic?name={topic.decode()}")[0] == 404


def test_nothing_comes_after_detached(wire: Wire, connect: Connect, topic: bytes) -> None:
    other = connect()
    other.attach(topic)
    wire.attach(topic)
    wire.send(figg.detach(topic))
    assert wire.receive() == Message(DETACHED, topic)
    connect().publish(topic, b"foo")
    assert data(other, 1) == [(7, b"foo")]
    assert wire.alive()
    assert wire.alive()


def test_detaching_in_the_middle_of_a_backlog_ends_it(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    connect().publish(topic, *[bytes(100_000)] * 100)
    wire.attach(topic, 0)
    wire.send(figg.detach(topic))
    while (message := wire.receive()).type == DATA:
        pass
    assert message == Message(DETACHED, topic)
    assert wire.alive()
    assert wire.alive()


def test_a_topic_can_be_attached_again_after_detaching(wire: Wire, foo_bar_car: bytes) -> None:
    wire.attach(foo_bar_car)
    wire.send(figg.detach(foo_bar_car))
    wire.expect(DETACHED)
    assert wire.attach(foo_bar_car, 14) == 14
    assert data(wire, 1) == [(21, b"car")]


def test_removing_one_subscriber_keeps_the_others(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    """The existing server had a bug here: it kept the wrong subscriber."""
    subscribers = [connect() for _ in range(4)]
    for subscriber in subscribers:
        subscriber.attach(topic)
    subscribers[1].send(figg.detach(topic))
    subscribers[1].expect(DETACHED)
    subscribers[2].close()
    wire.publish(topic, b"foo")
    assert data(subscribers[0], 1) == [(7, b"foo")]
    assert data(subscribers[3], 1) == [(7, b"foo")]
    assert subscribers[1].alive()


@pytest.mark.parametrize("stamp", [0, 1, 2**63, 2**64 - 1])
def test_ping_is_answered_with_a_pong_that_echoes_it(wire: Wire, stamp: int) -> None:
    wire.send(figg.ping(stamp))
    assert wire.receive() == Message(PONG, number=stamp)


def test_a_connection_that_never_pings_stays_open(wire: Wire) -> None:
    """The wait is as long as a test allows: longer than the SDK waits for an answer to a ping."""
    time.sleep(4.5)
    assert wire.alive()


def test_a_batch_is_acknowledged_up_to_its_highest_number(wire: Wire, topic: bytes) -> None:
    wire.send(*(figg.publish(topic, number, b"x") for number in range(1000)))
    acks = wire.wait_ack(999)
    assert acks == sorted(acks)
    assert acks[-1] == 999


def test_what_is_acknowledged_can_be_read(wire: Wire, connect: Connect, topic: bytes) -> None:
    reader = connect()
    reader.attach(topic, 0)
    wire.send(*(figg.publish(topic, number, b"%d" % number) for number in range(300)))
    assert wire.wait_ack(0)[-1] >= 0
    assert data(reader, 300) == _numbered(300)


def test_numbers_need_not_begin_at_0_nor_follow_each_other(wire: Wire, topic: bytes) -> None:
    wire.send(figg.publish(topic, 1_000_000, b"a"), figg.publish(topic, 2**64 - 1, b"b"))
    assert wire.wait_ack(2**64 - 1)


def test_a_low_number_is_neither_refused_nor_dropped(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    wire.publish(topic, b"late", first=10)
    wire.send(figg.publish(topic, 3, b"early"))
    assert wire.expect(ACK).number >= 3
    reader = connect()
    reader.attach(topic, 0)
    assert data(reader, 2) == [(8, b"late"), (17, b"early")]


def test_numbers_out_of_order_are_all_stored_and_acknowledged(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    numbers = [5, 3, 4, 0, 2, 1]
    wire.send(*(figg.publish(topic, number, b"%d" % number) for number in numbers))
    wire.wait_ack(5)
    reader = connect()
    reader.attach(topic, 0)
    assert [text for _, text in data(reader, 6)] == [b"%d" % number for number in numbers]


def test_a_number_sent_again_is_stored_again(wire: Wire, connect: Connect, topic: bytes) -> None:
    """This protocol offers at-least-once delivery: numbers are per client, and there are many clients."""
    wire.publish(topic, b"x")
    connect().publish(topic, b"x")
    reader = connect()
    reader.attach(topic, 0)
    assert data(reader, 2) == [(5, b"x"), (10, b"x")]


def test_one_acknowledgement_covers_all_topics_of_a_batch(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    topics = [topic + b"/%d" % i for i in range(50)]
    wire.send(*(figg.publish(name, i, b"foo") for i, name in enumerate(topics)))
    wire.wait_ack(49)
    for name in topics:
        assert wire.attach(name) == 7


def test_a_publisher_need_not_be_attached_and_receives_no_data(wire: Wire, topic: bytes) -> None:
    wire.publish(topic, b"foo")
    assert wire.alive()


@pytest.mark.parametrize("size", [0, 1, PAYLOAD_BYTES_MAX - 1, PAYLOAD_BYTES_MAX])
def test_payloads_of_0_to_262144_bytes_are_valid(
    wire: Wire, connect: Connect, topic: bytes, size: int
) -> None:
    payload = bytes(i * 7 & 255 for i in range(1000)) * (size // 1000 + 1)
    live, late = connect(), connect()
    live.attach(topic)
    wire.publish(topic, payload[:size], b"next")
    late.attach(topic, 0)
    for reader in (live, late):
        assert data(reader, 2) == [(4 + size, payload[:size]), (4 + size + 8, b"next")]


def test_many_of_the_largest_payloads_are_delivered_whole(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    reader = connect()
    reader.attach(topic)
    payloads = [bytes([i]) * PAYLOAD_BYTES_MAX for i in range(40)]
    wire.publish(topic, *payloads)
    assert [text for _, text in data(reader, 40)] == payloads


@pytest.mark.parametrize(
    "name",
    [
        b"../../etc/passwd",
        b"/etc/passwd",
        b"a/b",
        b"..",
        b".",
        b"/",
        b"a\0b",
        b"\0",
        b"\n",
        "тема/ΩΩΩ".encode(),
        b"x" * 255,
        ("é" * 127 + "x").encode(),
        b"con.log\\..\\x",
        b"%2e%2e%2f",
        b" ",
        b"'; drop table topics; --",
    ],
)
def test_any_utf8_of_up_to_255_bytes_names_a_topic(
    wire: Wire, connect: Connect, name: bytes
) -> None:
    wire.publish(name, b"foo")
    reader = connect()
    reader.attach(name, 0)
    assert reader.expect(DATA) == Message(DATA, name, 7, b"foo")


def test_names_that_look_alike_are_different_topics(wire: Wire, topic: bytes) -> None:
    names = [topic + suffix for suffix in (b"", b"/", b"/.", b"/x/..", b"\0", b" ", b"/A", b"/a")]
    for name in names:
        assert wire.attach(name) == 0
        wire.send(figg.detach(name))
        wire.expect(DETACHED)
        wire.publish(name, b"foo")


def _numbered(count: int) -> list[tuple[int, bytes]]:
    out, offset = [], 0
    for number in range(count):
        text = b"%d" % number
        offset += 4 + len(text)
        out.append((offset, text))
    return out
