"""One log, two protocols: records published over one are read over the other, in one order, at one offset."""

from contextlib import ExitStack

import pytest

from headrace.testing import LogChecker
from tests.system.checked import (
    assert_sound,
    end_of,
    in_threads,
    offset_of,
    publisher,
    serial_at_end,
    subscriber,
    wombat_publisher,
    wombat_subscriber,
)
from tests.system.conftest import SMALL, Connect, Dial, Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import DATA
from tests.system.support import get_json
from tests.system.wombat import foreign as wombat_client
from tests.system.wombat.foreign import PAYLOAD

RECORDS = 3000


def test_what_one_protocol_publishes_both_receive(
    connect: Connect, dial: Dial, topic: bytes, name: str
) -> None:
    figg_live, wombat_live = connect(), dial()
    figg_live.attach(topic)
    wombat_live.attach(name)
    connect().publish(topic, b"from figg")
    dial().publish(name, b"from wombat")
    figg_late, wombat_late = connect(), dial()
    figg_late.attach(topic, 0)
    wombat_late.attach(name, "@0")
    for figg_reader in (figg_live, figg_late):
        found = figg_reader.expect_data(2)
        assert [(one.number, one.data) for one in found] == [
            (13, b"from figg"),
            (28, b"from wombat"),
        ]
    for wombat_reader in (wombat_live, wombat_late):
        payloads = wombat_reader.expect_payloads(2)
        assert [(offset_of(one.serial), one.data) for one in payloads] == [
            (13, b"from figg"),
            (28, b"from wombat"),
        ]


def test_a_place_taken_on_figg_is_resumed_on_wombat(
    connect: Connect, dial: Dial, topic: bytes, name: str
) -> None:
    payloads = [b"%d" % number * (number % 5) for number in range(50)]
    connect().publish(topic, *payloads)
    reader = connect()
    places = [reader.attach(topic, 0)]
    places += [one.number for one in reader.expect_data(50)]
    for received, offset in enumerate(places):
        with dial() as again:
            assert again.attach(name, f"@{offset}") == f"@{offset}"
            found = again.expect_payloads(50 - received)
            assert [one.data for one in found] == payloads[received:]
            assert [offset_of(one.serial) for one in found] == places[received + 1 :]


def test_a_place_taken_on_wombat_is_resumed_on_figg(
    connect: Connect, dial: Dial, topic: bytes, name: str
) -> None:
    payloads = [b"%d" % number * (number % 5) for number in range(50)]
    reader = dial()
    serials = [reader.attach(name)]
    dial().publish(name, *payloads)
    serials += [one.serial for one in reader.expect_payloads(50)]
    for received, serial in enumerate(serials):
        with connect() as again:
            assert again.attach(topic, offset_of(serial)) == offset_of(serial)
            found = again.expect_data(50 - received)
            assert [one.data for one in found] == payloads[received:]
            assert [one.number for one in found] == [offset_of(s) for s in serials[received + 1 :]]


def test_the_end_of_a_topic_is_the_same_place_on_both(
    connect: Connect, dial: Dial, topic: bytes, name: str
) -> None:
    for number in range(20):
        if number % 2:
            connect().publish(topic, b"x" * number)
        else:
            dial().publish(name, b"x" * number)
        assert connect().attach(topic) == offset_of(dial().attach(name))


@pytest.mark.parametrize("size", [0, 1, 65_536, 262_144])
def test_payloads_of_any_size_are_the_same_bytes_on_both(
    connect: Connect, dial: Dial, topic: bytes, name: str, size: int
) -> None:
    payload = (bytes(range(256)) * 1024)[:size]
    connect().publish(topic, payload)
    dial().publish(name, payload)
    figg_reader, wombat_reader = connect(), dial()
    figg_reader.attach(topic, 0)
    wombat_reader.attach(name, "@0")
    assert [one.data for one in figg_reader.expect_data(2)] == [payload, payload]
    assert [one.data for one in wombat_reader.expect_payloads(2)] == [payload, payload]


def test_names_beyond_ascii_are_the_same_topic_on_both(connect: Connect, dial: Dial) -> None:
    reader = connect()
    reader.attach("тема/é%d".encode())
    dial().publish("тема/é%d", b"foo")
    assert reader.expect(DATA).data == b"foo"
    other = dial()
    other.attach("тема/é%d")
    connect().publish("тема/é%d".encode(), b"bar")
    assert other.expect(PAYLOAD).data == b"bar"


@pytest.mark.parametrize("durability", ["synced", "memory"])
def test_publishers_and_subscribers_of_both_see_one_order(start: Start, durability: str) -> None:
    server = start(f"--durability={durability}", config=SMALL)
    checker = LogChecker()
    with ExitStack() as stack:
        figg_readers = [stack.enter_context(subscriber(server, checker, f"f{i}")) for i in (1, 2)]
        wombat_readers = [
            stack.enter_context(wombat_subscriber(server, checker, f"w{i}")) for i in (1, 2)
        ]
        figg_writer = stack.enter_context(publisher(server, checker, "figg"))
        writers = [
            stack.enter_context(wombat_publisher(server, checker, "wombat", by_topic=True)),
            stack.enter_context(
                wombat_publisher(
                    server, checker, "wombat that wraps", first_number=wombat_client.NUMBERS - 1000
                )
            ),
        ]
        figg_readers[0].attach(b"t", 0)
        wombat_readers[0].attach("t")

        def publish_figg() -> None:
            for number in range(RECORDS):
                figg_writer.publish(b"t", b"figg %d" % number)
                if number == RECORDS // 2:
                    figg_readers[1].attach(b"t", 0)
                    wombat_readers[1].attach("t", "@0")
            figg_writer.flush()

        def publish_wombat(writer: wombat_client.Client, who: int) -> None:
            for number in range(RECORDS):
                writer.publish("t", b"wombat %d %d" % (who, number) + bytes(number % 50))
            writer.flush()

        with in_threads(
            publish_figg,
            *(lambda w=w, i=i: publish_wombat(w, i) for i, w in enumerate(writers)),
        ):
            pass
        end, last = end_of(server, b"t"), serial_at_end(server, "t")
        assert offset_of(last) == end
        for figg_reader in figg_readers:
            figg_reader.wait_offset(b"t", end)
        for wombat_reader in wombat_readers:
            wombat_reader.wait_serial("t", last)
        assert {client.connections for client in writers + wombat_readers} == {1}
    assert_sound(checker)
    assert checker.records("t") == 3 * RECORDS


def test_a_subscriber_that_changes_its_protocol_all_the_time_misses_nothing(start: Start) -> None:
    server = start(config=SMALL)
    checker = LogChecker()
    with wombat_publisher(server, checker, "p") as writer:

        def publish_all() -> None:
            for number in range(RECORDS):
                writer.publish("t", b"%04d" % number)
            writer.flush()

        with in_threads(publish_all):
            received: list[bytes] = []
            offset = 0
            while len(received) < RECORDS:
                some = min(200, RECORDS - len(received))
                with figg.Wire(server.figg) as on_figg:
                    assert on_figg.attach(b"t", offset) == offset
                    for found in on_figg.expect_data(some // 2):
                        received.append(found.data)
                        offset = found.number
                with wombat_client.Wire(server.ws) as on_wombat:
                    assert on_wombat.attach("t", f"@{offset}") == f"@{offset}"
                    for payload in on_wombat.expect_payloads(some - some // 2):
                        received.append(payload.data)
                        offset = offset_of(payload.serial)
    assert received == [b"%04d" % number for number in range(RECORDS)]


def test_the_http_api_names_the_protocol_of_each_subscription(
    start: Start,
) -> None:
    server = start()
    with figg.Wire(server.figg) as one, wombat_client.Wire(server.ws) as other:
        one.publish(b"t", b"foo")
        one.attach(b"t")
        other.attach("t")
        found = get_json(server, "/v1/topic?name=t")["subscriptions"]
        assert sorted(subscription["protocol"] for subscription in found) == ["figg", "wombat"]
        assert {subscription["offset"] for subscription in found} == {7}
