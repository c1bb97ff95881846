"""Each Wombat message against a real server, as its SDKs use it. Elsewhere: bad input."""

import pytest
from websockets.frames import Close, Opcode
from websockets.sync.client import connect as connect_websocket

from headrace.testing import ServerProcess
from tests.system.conftest import SMALL, Dial, Start
from tests.system.support import get, get_json, held_back
from tests.system.wombat import foreign as wombat_client
from tests.system.wombat.foreign import (
    ACK,
    ATTACH,
    ATTACHED,
    DETACHED,
    NUMBERS,
    PAYLOAD,
    PONG,
    Message,
    Wire,
    attach,
    detach,
    frame,
    message,
    pack,
    ping,
    publish,
)

PAYLOAD_BYTES_MAX = 262_144


def data(wire: Wire, records: int) -> list[bytes]:
    return [found.data for found in wire.expect_payloads(records)]


def offset_of(serial: str) -> int:
    return int(serial.partition("@")[2])


def epoch_of(server: ServerProcess, topic: str) -> int:
    epoch: int = get_json(server, f"/v1/topic?name={topic}")["epoch"]
    return epoch


# ATTACH, ATTACHED, PAYLOAD


def test_what_is_published_is_received_with_a_serial_for_each(
    server: ServerProcess, wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.attach(name)
    dial().publish(name, b"foo", b"bar", b"car")
    epoch = epoch_of(server, name)
    assert wombat.expect_payloads(3) == [
        Message(PAYLOAD, name, f"{epoch}@7", data=b"foo"),
        Message(PAYLOAD, name, f"{epoch}@14", data=b"bar"),
        Message(PAYLOAD, name, f"{epoch}@21", data=b"car"),
    ]


@pytest.mark.parametrize(
    "fields", [{}, {"serial": None}, {"serial": ""}], ids=["absent", "nil", "empty"]
)
def test_without_a_serial_only_later_messages_come(
    wombat: Wire, dial: Dial, name: str, fields: dict[str, object]
) -> None:
    dial().publish(name, b"foo", b"bar")
    wombat.send(message(ATTACH, "attach", topic=name, **fields))
    attached = wombat.expect(ATTACHED)
    assert attached.topic == name
    assert offset_of(attached.serial) == 14, "the serial of the latest message"
    dial().publish(name, b"later")
    assert data(wombat, 1) == [b"later"]


def test_attached_comes_with_the_serial_that_the_last_message_had(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.attach(name)
    dial().publish(name, b"foo")
    last = wombat.expect(PAYLOAD)
    assert dial().attach(name) == last.serial


def test_a_topic_that_does_not_exist_can_be_attached_and_is_not_made(
    server: ServerProcess, wombat: Wire, dial: Dial, name: str
) -> None:
    serial = wombat.attach(name)
    assert serial
    assert get(server, f"/v1/topic?name={name}")[0] == 404
    dial().publish(name, b"first")
    assert data(wombat, 1) == [b"first"]
    late = dial()
    assert late.attach(name, serial) == serial, "from where the first one had attached"
    assert data(late, 1) == [b"first"]


def test_topics_of_one_connection_are_attached_independently(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.attach(name)
    wombat.attach(f"{name}/other")
    publisher = dial()
    publisher.publish(name, b"one")
    assert wombat.expect(PAYLOAD).topic == name
    publisher.publish(f"{name}/other", b"two")
    found = wombat.expect(PAYLOAD)
    assert (found.topic, found.data) == (f"{name}/other", b"two")


def test_fields_may_come_in_any_order_and_unknown_ones_are_passed_over(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.send(pack({"more": [1], "attach": {"x": {}, "serial": None, "topic": name}, "type": 1}))
    assert wombat.expect(ATTACHED).topic == name
    fields = {"sequence_number": 3, "x": None, "message": b"foo", "topic": name}
    dial().send(pack({"publish": fields, "type": 3, "attach": None} | {"attach": {"topic": name}}))
    assert data(wombat, 1) == [b"foo"]


# DETACH, DETACHED


def test_nothing_comes_after_detached(wombat: Wire, dial: Dial, name: str) -> None:
    other = dial()
    other.attach(name)
    wombat.attach(name)
    wombat.send(detach(name))
    assert wombat.receive() == Message(DETACHED, name)
    dial().publish(name, b"foo")
    assert data(other, 1) == [b"foo"]
    assert wombat.alive()
    assert wombat.alive()


def test_detaching_what_is_not_attached_is_answered_and_creates_nothing(
    server: ServerProcess, wombat: Wire, name: str
) -> None:
    wombat.send(detach(name))
    assert wombat.receive() == Message(DETACHED, name)
    assert get(server, f"/v1/topic?name={name}")[0] == 404


def test_detaching_in_the_middle_of_a_backlog_ends_it(wombat: Wire, dial: Dial, name: str) -> None:
    dial().publish(name, *[bytes(100_000)] * 100)
    wombat.attach(name, "@0")
    wombat.send(detach(name))
    while (found := wombat.receive()).type == PAYLOAD:
        pass
    assert found == Message(DETACHED, name)
    assert wombat.alive()
    assert wombat.alive()


def test_a_topic_can_be_attached_again_after_detaching(wombat: Wire, dial: Dial, name: str) -> None:
    dial().publish(name, b"foo", b"bar")
    wombat.attach(name)
    wombat.send(detach(name))
    wombat.expect(DETACHED)
    assert wombat.attach(name, "@7") == "@7"
    assert data(wombat, 1) == [b"bar"]


# PING, PONG


@pytest.mark.parametrize(
    "stamp", [0, 1, 127, 128, 2**32, 2**53 + 1, 2**63, 2**64 - 1, 1.5, 1e300, 1763164800000.25]
)
def test_ping_is_answered_with_a_pong_that_returns_the_timestamp(
    wombat: Wire, stamp: float
) -> None:
    wombat.send(ping(stamp))
    pong = wombat.expect(PONG)
    assert pong == Message(PONG, number=stamp)
    assert type(pong.number) is type(stamp)


def test_pings_of_websocket_itself_are_answered_too(wombat: Wire) -> None:
    wombat.send_bytes(frame(b"are you there", Opcode.PING), frame(b"", Opcode.PONG))
    assert wombat.alive()
    assert wombat.pongs == [b"are you there"]


# PUBLISH, ACK


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        (b"\x00\xff foo", b"\x00\xff foo"),
        (b"", b""),
        ("text: ä€😀", "text: ä€😀".encode()),
        ("", b""),
        ([0, 1, 127, 128, 255], b"\x00\x01\x7f\x80\xff"),
        ([], b""),
        (list(range(256)) * 3, bytes(range(256)) * 3),
        (b"x" * 300, b"x" * 300),
        ("x" * 300, b"x" * 300),
        (b"x" * 70_000, b"x" * 70_000),
        ("é" * 70_000, "é".encode() * 70_000),
    ],
    ids=lambda value: f"{type(value).__name__} of {len(value)}",
)
def test_a_payload_may_be_bin_or_text_or_an_array_and_comes_out_as_bin(
    wombat: Wire, dial: Dial, name: str, written: object, stored: bytes
) -> None:
    wombat.attach(name)
    publisher = dial()
    publisher.send(publish(name, 0, written))
    publisher.wait_ack(name, 0)
    assert data(wombat, 1) == [stored], "the foreign client refuses anything but bin"


@pytest.mark.parametrize("size", [0, 1, PAYLOAD_BYTES_MAX - 1, PAYLOAD_BYTES_MAX])
def test_payloads_of_0_to_262144_bytes_are_valid(
    wombat: Wire, dial: Dial, name: str, size: int
) -> None:
    payload = (bytes(i * 7 & 255 for i in range(1000)) * (size // 1000 + 1))[:size]
    live, late = dial(), dial()
    live.attach(name)
    wombat.publish(name, payload, b"next")
    late.attach(name, "@0")
    for reader in (live, late):
        assert data(reader, 2) == [payload, b"next"]


def test_the_largest_payload_may_be_an_array_of_the_longest_integers(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.attach(name)
    dial().send(publish(name, 0, [255] * PAYLOAD_BYTES_MAX))
    assert data(wombat, 1) == [b"\xff" * PAYLOAD_BYTES_MAX]


def test_many_of_the_largest_payloads_are_delivered_whole(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.attach(name)
    payloads = [bytes([i]) * PAYLOAD_BYTES_MAX for i in range(40)]
    dial().publish(name, *payloads)
    assert data(wombat, 40) == payloads


@pytest.mark.parametrize(
    "topic_name",
    ["../../etc/passwd", "a\0b", "\n", "тема/ΩΩΩ", "x" * 255, "é" * 127 + "x", "%2e%d%b%s", " "],
)
def test_any_utf8_of_up_to_255_bytes_names_a_topic(
    wombat: Wire, dial: Dial, topic_name: str
) -> None:
    begun = wombat.attach(topic_name)
    dial().publish(topic_name, b"foo")
    found = wombat.expect(PAYLOAD)
    assert (found.topic, found.data) == (topic_name, b"foo")
    assert dial().attach(topic_name, begun) == begun


def test_a_batch_is_acknowledged_up_to_its_highest_number(wombat: Wire, name: str) -> None:
    wombat.send(*(publish(name, number, b"x") for number in range(1000)))
    acks = wombat.wait_ack(name, 999)
    assert acks == sorted(set(acks))
    assert acks[-1] == 999


def test_what_is_acknowledged_can_be_read(wombat: Wire, dial: Dial, name: str) -> None:
    for number in range(20):
        wombat.send(publish(name, number, b"%d" % number))
        wombat.wait_ack(name, number)
        reader = dial()
        reader.attach(name, "@0")
        assert data(reader, number + 1) == [b"%d" % i for i in range(number + 1)]


def test_each_topic_of_a_commit_has_one_acknowledgement_with_its_highest_number(
    wombat: Wire, name: str
) -> None:
    topics = [f"{name}/{i}" for i in range(10)]
    # After a large message, reads are large, and messages that are sent together arrive together.
    wombat.send(publish(name, NUMBERS - 1, bytes(100_000)))
    wombat.expect(ACK)
    wombat.send(*(publish(topics[number % 10], number, b"x") for number in range(50)))
    acks = [wombat.expect(ACK) for _ in topics]
    assert {ack.topic: ack.number for ack in acks} == {
        topic: 40 + i for i, topic in enumerate(topics)
    }
    assert wombat.alive(), "and no further ACK"


def test_an_acknowledgement_is_never_above_the_lowest_number_that_is_not_stored(
    start: Start,
) -> None:
    """One counter serves topics that are stored at different times, here one of them at once."""
    server = start(config=SMALL + '[[topics]]\nprefix = "memory/"\ndurability = "memory"\n')
    with Wire(server.ws, timeout_s=30) as publisher, Wire(server.ws) as reader:
        reader.attach("memory/t")
        large = [publish("disk/t", number, bytes(100_000)) for number in range(100)]
        with held_back(server, lambda: publisher.send(*large)):
            publisher.send(publish("memory/t", 100, b"stored at once"), ping(42))
            assert data(reader, 1) == [b"stored at once"]
            while (found := publisher.receive()).type == ACK:
                assert found.topic == "disk/t"
                assert found.number < 99
            assert found == Message(PONG, number=42)
        acks = [publisher.expect(ACK)]
        while acks[-1].number < 100:
            acks.append(publisher.expect(ACK))
    assert {ack.topic: ack.number for ack in acks} == {"disk/t": 99, "memory/t": 100}


def test_a_number_sent_again_on_one_connection_is_acknowledged_and_not_stored_again(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.publish(name, b"a", b"b", b"c")
    wombat.send(publish(name, 1, b"b"))
    assert wombat.receive() == Message(ACK, name, number=1)
    wombat.send(publish(name, 2, b"c"), publish(name, 3, b"d"), publish(name, 0, b"a"))
    while wombat.expect(ACK).number != 3:
        pass
    reader = dial()
    reader.attach(name, "@0")
    wombat.send(publish(name, 4, b"end"))
    assert data(reader, 5) == [b"a", b"b", b"c", b"d", b"end"]


def test_a_number_sent_again_in_the_same_breath_is_stored_once(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.send(*[publish(name, 7, b"once")] * 10, publish(name, 8, b"next"))
    while wombat.expect(ACK).number != 8:
        pass
    reader = dial()
    reader.attach(name, "@0")
    wombat.send(publish(name, 9, b"end"))
    assert data(reader, 3) == [b"once", b"next", b"end"]


def test_a_client_that_counts_for_each_topic_loses_nothing(
    wombat: Wire, dial: Dial, name: str
) -> None:
    topics = [f"{name}/a", f"{name}/b"]
    for topic in topics:
        wombat.send(publish(topic, 0, b"first"))
        assert wombat.receive() == Message(ACK, topic, number=0)
    wombat.send(*(publish(topic, n, b"%d" % n) for n in range(1, 100) for topic in topics))
    last: dict[str, int] = {}
    while list(last.values()) != [99, 99]:
        ack = wombat.expect(ACK)
        last[ack.topic] = int(ack.number)
    for topic in topics:
        wombat.send(publish(topic, 99, b"99"), publish(topic, 99, b"another"))
        assert wombat.receive() == Message(ACK, topic, number=99)
        reader = dial()
        reader.attach(topic, "@0")
        expected = [b"first", *(b"%d" % n for n in range(1, 100)), b"another"]
        assert data(reader, 101) == expected


def test_a_number_sent_again_on_another_connection_is_another_clients(
    wombat: Wire, dial: Dial, name: str
) -> None:
    wombat.publish(name, b"x")
    dial().publish(name, b"x")
    reader = dial()
    reader.attach(name, "@0")
    assert data(reader, 2) == [b"x", b"x"]


def test_numbers_go_on_from_0_behind_the_last(wombat: Wire, dial: Dial, name: str) -> None:
    first = NUMBERS - 150
    numbers = [(first + i) % NUMBERS for i in range(300)]
    for at in range(0, 300, 100):
        wombat.send(*(publish(name, number, b"%d" % number) for number in numbers[at : at + 100]))
    while wombat.expect(ACK).number != numbers[-1]:
        pass
    again = [NUMBERS - 1, 0, 1]
    wombat.send(*(publish(name, number, b"%d" % number) for number in again))
    assert wombat.receive() == Message(ACK, name, number=1), "the highest of them"
    wombat.send(publish(name, 150, b"end"))
    wombat.expect(ACK)
    reader = dial()
    reader.attach(name, "@0")
    assert data(reader, 301) == [*(b"%d" % number for number in numbers), b"end"]


def test_numbers_out_of_order_are_all_stored_and_acknowledged(
    wombat: Wire, dial: Dial, name: str
) -> None:
    numbers = [5, 3, 4, 0, 2, 1]
    wombat.send(*(publish(name, number, b"%d" % number) for number in numbers))
    wombat.wait_ack(name, 5)
    reader = dial()
    reader.attach(name, "@0")
    assert data(reader, 6) == [b"%d" % number for number in numbers]


def test_a_low_number_is_neither_refused_nor_dropped(wombat: Wire, dial: Dial, name: str) -> None:
    wombat.send(publish(name, 10, b"late"))
    wombat.wait_ack(name, 10)
    wombat.send(publish(name, 3, b"early"))
    assert wombat.expect(ACK).number == 3
    reader = dial()
    reader.attach(name, "@0")
    assert data(reader, 2) == [b"late", b"early"]


@pytest.mark.parametrize("gap", [2, 1_000_000, 2**31 - 1, 2**31, 2**31 + 1])
def test_numbers_may_leave_gaps(wombat: Wire, dial: Dial, name: str, gap: int) -> None:
    for number in (0, gap, gap + 1):
        wombat.send(publish(name, number, b"%d" % number))
        assert wombat.receive() == Message(ACK, name, number=number)
    reader = dial()
    reader.attach(name, "@0")
    assert data(reader, 3) == [b"0", b"%d" % gap, b"%d" % (gap + 1)]


def test_very_many_gaps_are_remembered_in_bounded_memory(
    wombat: Wire, dial: Dial, name: str
) -> None:
    for first in range(0, 20_000, 2000):
        numbers = range(first, first + 2000, 2)
        wombat.send(*(publish(name, number, b"%d" % number) for number in numbers))
        wombat.wait_ack(name, numbers[-1])
    wombat.send(publish(name, 19_998, b"19998"), publish(name, 20_000, b"end"))
    while wombat.expect(ACK).number != 20_000:
        pass
    reader = dial()
    reader.attach(name, "@0")
    assert data(reader, 10_001) == [*(b"%d" % n for n in range(0, 20_000, 2)), b"end"]


def test_a_publisher_need_not_be_attached_and_receives_no_payload(wombat: Wire, name: str) -> None:
    wombat.publish(name, b"foo")
    assert wombat.alive()


def test_a_subscriber_receives_what_it_publishes_itself(wombat: Wire, name: str) -> None:
    wombat.attach(name)
    wombat.send(publish(name, 0, b"foo"))
    found = {wombat.receive().type, wombat.receive().type}
    assert found == {ACK, PAYLOAD}


def test_one_topic_has_one_order_for_all(wombat: Wire, dial: Dial, name: str) -> None:
    readers = [dial() for _ in range(3)]
    for reader in readers:
        reader.attach(name)
    publishers = [dial() for _ in range(3)]
    for number in range(100):
        for i, publisher in enumerate(publishers):
            publisher.send(publish(name, number, b"%d/%d" % (i, number)))
    received = [reader.expect_payloads(300) for reader in readers]
    assert received[0] == received[1] == received[2]
    for i in range(3):
        mine = [found.data for found in received[0] if found.data.startswith(b"%d/" % i)]
        assert mine == [b"%d/%d" % (i, number) for number in range(100)]


# Topics of other protocols


@pytest.mark.parametrize(
    "topic_name", ["$logux/a", "$channel/a", "$logux/", "$channel/", "$lost/1", "$"]
)
def test_topics_with_an_envelope_can_be_followed_and_not_published_to(
    wombat: Wire, dial: Dial, topic_name: str
) -> None:
    assert wombat.attach(topic_name)
    publisher = dial()
    publisher.send(publish(topic_name, 0, b"x"))
    messages, closed = publisher.until_closed()
    assert messages == []
    assert closed.code == 1008
    assert topic_name in closed.reason
    assert wombat.alive(), "and nothing has come"


@pytest.mark.parametrize("topic_name", ["logux/a", "channel/a", "/$logux/a", "a$"])
def test_topics_that_only_look_like_them_are_ordinary(wombat: Wire, topic_name: str) -> None:
    wombat.publish(topic_name, b"x")


# Closing


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4321, 4999])
def test_a_client_that_says_goodbye_is_answered_with_its_code(wombat: Wire, code: int) -> None:
    wombat.send_bytes(frame(Close(code, "bye").serialize(), Opcode.CLOSE))
    messages, closed = wombat.until_closed()
    assert messages == []
    assert closed.code == code


def test_a_client_that_says_goodbye_without_a_code_is_answered(wombat: Wire) -> None:
    wombat.send_bytes(frame(b"", Opcode.CLOSE))
    messages, closed = wombat.until_closed()
    assert messages == []
    assert closed.code in (1000, 1005)


def test_what_came_before_goodbye_is_acknowledged(wombat: Wire, dial: Dial, name: str) -> None:
    goodbye = frame(Close(1000, "").serialize(), Opcode.CLOSE)
    publishes = [frame(publish(name, number, b"x")) for number in range(100)]
    wombat.send_bytes(*publishes, goodbye, frame(publish(name, 100, b"too late")))
    messages, closed = wombat.until_closed()
    assert messages[-1] == Message(ACK, name, number=99)
    assert closed.code == 1000
    reader = dial()
    assert offset_of(reader.attach(name)) == 500


def test_a_message_in_fragments_is_put_together(wombat: Wire, dial: Dial, name: str) -> None:
    wombat.attach(name)
    whole = publish(name, 0, b"foo" * 1000)
    for size in (1, 7, 1000, 3000):
        publisher = dial()
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        for i, part in enumerate(parts):
            kind = Opcode.CONT if i else Opcode.BINARY
            publisher.send_bytes(
                frame(part, kind, fin=i == len(parts) - 1), frame(b"between", Opcode.PING)
            )
        assert publisher.wait_ack(name, 0) == [0]
        assert publisher.pongs == [b"between"] * len(parts)
        assert data(wombat, 1) == [b"foo" * 1000]


def test_a_peer_that_sends_one_byte_at_a_time_is_served(wombat: Wire, name: str) -> None:
    sent = frame(attach(name, "@0")) + frame(publish(name, 0, b"foo")) + frame(ping(5))
    for byte in sent:
        wombat.send_bytes(bytes([byte]))
    received = [wombat.receive() for _ in range(4)]
    assert {(found.type, found.topic) for found in received} == {
        (ATTACHED, name),
        (ACK, name),
        (PAYLOAD, name),
        (PONG, ""),
    }


def test_an_ordinary_websocket_library_with_all_its_defaults_is_served(
    server: ServerProcess, name: str
) -> None:
    host, port = server.ws
    with connect_websocket(f"ws://{host}:{port}/v1/ws", open_timeout=30) as websocket:
        assert websocket.response is not None
        assert "Sec-WebSocket-Extensions" not in websocket.response.headers
        websocket.send(attach(name))
        assert wombat_client.decode(_bytes(websocket.recv(30))).type == ATTACHED
        websocket.send(publish(name, 0, b"foo"))
        found = {wombat_client.decode(_bytes(websocket.recv(30))).type for _ in range(2)}
        assert found == {ACK, PAYLOAD}


def _bytes(data: bytes | str) -> bytes:
    assert isinstance(data, bytes)
    return data
