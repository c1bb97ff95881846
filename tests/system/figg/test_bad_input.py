"""Every kind of bad input: it ends its own connection, after everything before it was acknowledged."""

import http.client
import socket
import struct

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Connect, Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import ACK, DATA, Message, Wire, field, frame
from tests.system.support import metrics

NAME = field(b"bad")
U64 = struct.pack(">Q", 9)
TOO_LONG = b"x" * 256
TOO_LARGE = bytes(262_145)

BAD = {
    "type 0": frame(0, b""),
    "an unknown type": frame(10, U64),
    "the highest type": frame(65535, b""),
    "ATTACHED from a client": frame(figg.ATTACHED, NAME + U64),
    "DETACHED from a client": frame(figg.DETACHED, NAME),
    "ACK from a client": frame(figg.ACK, U64),
    "DATA from a client": frame(figg.DATA, NAME + U64 + field(b"x")),
    "PONG from a client": frame(figg.PONG, U64),
    "version 0": frame(figg.PING, U64, version=0),
    "version 2": frame(figg.PING, U64, version=2),
    "a publish of version 2": frame(figg.PUBLISH, NAME + U64 + field(b"x"), version=2),
    "an empty ATTACH": frame(figg.ATTACH, b""),
    "ATTACH that ends in its flags": frame(figg.ATTACH, b"\x80"),
    "ATTACH without a topic": frame(figg.ATTACH, b"\x80\0"),
    "ATTACH that ends in its topic": frame(figg.ATTACH, b"\x80\0" + NAME[:-1]),
    "ATTACH with the flag and no offset": frame(figg.ATTACH, b"\x80\0" + NAME),
    "ATTACH with the other flag and no offset": frame(figg.ATTACH, b"\0\1" + NAME),
    "ATTACH with 7 bytes of offset": frame(figg.ATTACH, b"\x80\0" + NAME + U64[:7]),
    "ATTACH without the flag and 7 bytes of offset": frame(figg.ATTACH, b"\0\0" + NAME + U64[:7]),
    "ATTACH with 9 bytes of offset": frame(figg.ATTACH, b"\x80\0" + NAME + U64 + b"x"),
    "ATTACH whose topic is longer than the frame": frame(
        figg.ATTACH, b"\x80\0" + struct.pack(">I", 100) + b"bad" + U64
    ),
    "an empty DETACH": frame(figg.DETACH, b""),
    "DETACH that ends in its topic": frame(figg.DETACH, NAME[:-1]),
    "DETACH with a byte too many": frame(figg.DETACH, NAME + b"x"),
    "an empty PUBLISH": frame(figg.PUBLISH, b""),
    "PUBLISH without a number": frame(figg.PUBLISH, NAME),
    "PUBLISH without data": frame(figg.PUBLISH, NAME + U64),
    "PUBLISH with a short payload": frame(figg.PUBLISH, NAME + U64 + field(b"xyz")[:-1]),
    "PUBLISH with a byte too many": frame(figg.PUBLISH, NAME + U64 + field(b"xyz") + b"!"),
    "PUBLISH whose payload is longer than all memory": frame(
        figg.PUBLISH, NAME + U64 + b"\xff\xff\xff\xff" + b"xyz"
    ),
    "PUBLISH of 262,145 bytes": frame(figg.PUBLISH, NAME + U64 + field(TOO_LARGE)),
    "an empty PING": frame(figg.PING, b""),
    "PING of 7 bytes": frame(figg.PING, U64[:7]),
    "PING of 9 bytes": frame(figg.PING, U64 + b"x"),
    "ATTACH to an empty name": figg.attach(b"", 0),
    "DETACH from an empty name": figg.detach(b""),
    "PUBLISH to an empty name": figg.publish(b"", 9, b"x"),
    "ATTACH to a name of 256 bytes": figg.attach(TOO_LONG, 0),
    "DETACH from a name of 256 bytes": figg.detach(TOO_LONG),
    "PUBLISH to a name of 256 bytes": figg.publish(TOO_LONG, 9, b"x"),
    "ATTACH to a name that is not UTF-8": figg.attach(b"\xff\xfe", 0),
    "DETACH from a name that is not UTF-8": figg.detach(b"a\xc3"),
    "PUBLISH to a name that is not UTF-8": figg.publish(b"\xed\xa0\x80", 9, b"x"),
    "PUBLISH to a name with overlong UTF-8": figg.publish(b"\xc0\xaf", 9, b"x"),
    "a frame of 4 GiB": figg.HEADER.pack(figg.PUBLISH, 1, 2**32 - 1),
    "a PING of 4 GiB": figg.HEADER.pack(figg.PING, 1, 2**32 - 1),
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_closes_its_connection_after_acknowledging_what_came_before(
    server: ServerProcess, connect: Connect, topic: bytes, bad: bytes
) -> None:
    bystander, sinner, publisher = connect(), connect(), connect()
    bystander.attach(topic)
    sinner.send(figg.publish(topic, 7, b"before"), bad)
    assert sinner.until_closed() == [Message(ACK, number=7)]
    publisher.publish(topic, b"after")
    assert [m.data for m in bystander.expect_data(2)] == [b"before", b"after"]
    assert bystander.alive()


@pytest.mark.parametrize("bad", [BAD["type 0"], BAD["PUBLISH of 262,145 bytes"]])
def test_nothing_after_bad_input_is_accepted(connect: Connect, topic: bytes, bad: bytes) -> None:
    sinner, reader = connect(), connect()
    later = [figg.publish(topic, 8 + i, b"after") for i in range(100)]
    sinner.send(figg.publish(topic, 7, b"before"), bad, *later)
    assert sinner.until_closed() == [Message(ACK, number=7)]
    connect().publish(topic, b"last")
    reader.attach(topic, 0)
    assert [m.data for m in reader.expect_data(2)] == [b"before", b"last"]


def test_a_frame_that_announces_too_many_bytes_is_refused_before_its_body_comes(
    connect: Connect,
) -> None:
    """Only the header is sent, so a server that waits for the body would wait until the test times out."""
    for kind, size in [
        (figg.PUBLISH, 2**32 - 1),
        (figg.PUBLISH, 4 + 255 + 8 + 4 + 262_144 + 1),
        (figg.ATTACH, 1_000_000),
        (figg.PING, 9),
    ]:
        wire = connect()
        wire.send(figg.HEADER.pack(kind, 1, size))
        assert wire.until_closed() == []


def test_the_largest_frame_is_not_refused(wire: Wire) -> None:
    wire.publish(b"y" * 255, bytes(262_144))


def test_why_a_connection_was_closed_is_logged(start: Start) -> None:
    server = start()  # a busy one sums up what one address does
    before = len(server.stderr)
    with Wire(server.figg) as wire:
        wire.send(frame(figg.PING, U64, version=77))
        wire.until_closed()
    wait_until(lambda: "77" in server.stderr[before:], 30, "the version in the log")


def test_bad_input_is_counted(server: ServerProcess, connect: Connect) -> None:
    before = metrics(server)
    with connect() as wire:
        wire.send(frame(0, b""))
        wire.until_closed()
    after = metrics(server)
    grown = {name for name, value in after.items() if value > before.get(name, 0)}
    assert any("bad" in name or "error" in name or "refused" in name for name in grown), grown


def test_half_a_message_followed_by_the_end_of_the_connection_does_no_harm(
    connect: Connect, topic: bytes
) -> None:
    whole = figg.publish(topic, 0, b"foo")
    for size in range(1, len(whole)):
        with connect() as wire:
            wire.send(whole[:size])
    connect().publish(topic, b"only")
    reader = connect()
    reader.attach(topic, 0)
    assert reader.expect(DATA).data == b"only"


def test_a_peer_that_sends_one_byte_at_a_time_is_served(wire: Wire, topic: bytes) -> None:
    sent = figg.attach(topic, 0) + figg.publish(topic, 0, b"foo") + figg.ping(5)
    for byte in sent:
        wire.send(bytes([byte]))
    received = {wire.receive() for _ in range(4)}
    assert received == {
        Message(figg.ATTACHED, topic, 0),
        Message(ACK, number=0),
        Message(DATA, topic, 7, b"foo"),
        Message(figg.PONG, number=5),
    }


def test_a_peer_that_stops_in_the_middle_of_a_message_delays_nobody(
    wire: Wire, connect: Connect, topic: bytes
) -> None:
    wire.send(figg.publish(topic, 0, bytes(200_000))[:100_000])
    other = connect()
    other.publish(topic, b"foo")
    wire.send(figg.publish(topic, 0, bytes(200_000))[100_000:])
    wire.wait_ack(0)
    other.attach(topic, 0)
    assert [m.number for m in other.expect_data(2)] == [7, 7 + 200_004]


def test_peers_of_another_protocol_are_told_what_is_wrong(start: Start) -> None:
    # The test uses its own server: a busy one logs only one line per second, and may omit these refusals.
    server = start()
    connection = http.client.HTTPConnection(*server.figg, timeout=30)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        assert response.status == 400
        text = response.read().decode()
    finally:
        connection.close()
    place = "{}:{}".format(*server.http)
    assert text == f"this is HTTP, and the port speaks Figg: HTTP listens at {place}\n"
    wait_until(lambda: text.strip() in server.stderr)
    hello = bytes.fromhex("16030100c8010000c40303") + bytes(40)
    for count, address in enumerate((server.ws, server.http), 1):
        with socket.create_connection(address, timeout=30) as sock:
            sock.sendall(hello)
            while sock.recv(4096):
                pass
        said = "this is TLS, and the port is plain"
        wait_until(lambda count=count, said=said: server.stderr.count(said) == count)
