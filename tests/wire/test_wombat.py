"""The Wombat codec against the byte examples of its page, another MessagePack library, and random input."""

import json
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.model import PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX, Refusal, is_reserved
from headrace.wire import readers, tokens, websocket
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ClientDecoder, ServerDecoder

PAGE = Path(__file__).parents[2] / "docs" / "protocols" / "wombat.md"
NUMBERS = wombat.SEQUENCE_NUMBERS


class Vector(NamedTuple):
    line: int
    sender: str
    kind: str
    name: str
    fields: dict[str, Any]
    bytes: bytes


def read_vectors() -> list[Vector]:
    text = PAGE.read_text()
    return [
        parse_vector(text[: found.start()].count("\n") + 1, found[1].split(), found[2])
        for found in re.finditer(r"^```wombat (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]


def parse_vector(line: int, words: list[str], body: str) -> Vector:
    first, *rows = body.splitlines()
    name, _, rest = first.partition(" ")
    fields = re.findall(r"([a-z_]+)=(\"(?:[^\"\\]|\\.)*\"|\d+|true|false)", rest)
    # A row has hexadecimal words, then an explanation after a wider gap.
    hexadecimal = "".join(re.split(r"  +", row)[0] for row in rows)
    return Vector(
        line,
        words[0],
        " ".join(words[1:]),
        name,
        {key: json.loads(value) for key, value in fields},
        bytes.fromhex(hexadecimal),
    )


VECTORS = read_vectors()
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"line{vector.line}")


def seen(vector: Vector) -> tuple[str, dict[str, Any]]:
    """Return a vector as our decoder reads it, in the page's words."""
    if vector.sender == "client":
        (message,) = ServerDecoder().receive([vector.bytes])
    else:
        (message,) = ClientDecoder().receive([vector.bytes])
    match message:
        case wombat.Publishes(records, numbers):
            ((topic, (record,)),) = records.items()
            fields = {"topic": topic, "message": record[4:].decode()}
            return "PUBLISH", fields | {"sequence_number": numbers[topic][0]}
        case wombat.Payloads(topic, [(serial, payload)]):
            fields = {"topic": topic, "serial": serial, "message": payload.decode()}
            return "PAYLOAD", fields
        case wombat.Ping(timestamp):
            return "PING", {"timestamp": msgpack.unpackb(timestamp)}
        case wombat.Ack(topic, number):
            return "ACK", {"topic": topic, "sequence_number": number}
        case readers.Read(topic, reader, newest, instance, window):
            fields = {"topic": topic, "reader": reader, "start": "newest" if newest else "oldest"}
            return "READ", fields | {"instance": instance, "window": window}
        case readers.Records(topic, epoch, offset, ordinal, ms, data):
            fields = {"topic": topic, "epoch": epoch, "offset": offset, "ordinal": ordinal}
            return "RECORDS", fields | {"time": ms, "records": data[4:].decode()}
    named = message._asdict() if isinstance(message, tuple) else msgspec.structs.asdict(message)
    fields = {key: value for key, value in named.items() if value is not None}
    fields.pop("refused", None)  # only for the server, not on the wire
    of_auth = tokens.NAMES.get(tokens.TYPES.get(type(message)))
    return (of_auth or type(message).__name__).upper(), fields


def encode(name: str, fields: dict[str, Any]) -> bytes:
    """Encode a message as Headrace sends it, without its WebSocket frame."""
    topic, serial = fields.get("topic", ""), fields.get("serial", "")
    number = fields.get("sequence_number", fields.get("timestamp", 0))
    payload = fields.get("message", "").encode()
    match name:
        case "ATTACH":
            return wombat.encode_attach(topic, fields.get("serial"))
        case "DETACH":
            return wombat.encode_detach(topic)
        case "PUBLISH":
            return wombat.encode_publish(topic, number, payload)
        case "PING":
            return wombat.encode_ping(number)
        case "ATTACHED":
            return unframed(wombat.encode_attached(topic, serial))
        case "DETACHED":
            return unframed(wombat.encode_detached(topic))
        case "ACK":
            return unframed(wombat.encode_ack(topic, number))
        case "PONG":
            return unframed(wombat.encode_pong(msgpack.packb(number)))
        case "READ":
            *names, start, instance, window = fields.values()
            return wombat.encode_of_reader(
                readers.Read(*names, start == "newest", instance, window)
            )
        case "HANDLED":
            return wombat.encode_of_reader(readers.Handled(**fields))
        case "WAITING":
            return unframed(wombat.encode_reader_answer(readers.Waiting(**fields)))
        case "READING":
            return unframed(wombat.encode_reader_answer(readers.Reading(**fields)))
        case "RECORDS":
            *position, data = fields.values()
            record = len(data).to_bytes(4, "big") + data.encode()
            return unframed(wombat.encode_reader_answer(readers.Records(*position, record)))
        case "STORED":
            return unframed(wombat.encode_reader_answer(readers.Stored(**fields)))
        case "AUTH":
            return wombat.encode_auth(**fields)
        case "AUTH_OK":
            return unframed(wombat.encode_auth_answer(tokens.AuthOk(**fields)))
        case "AUTH_REFUSED":
            return unframed(wombat.encode_auth_answer(tokens.AuthRefused(**fields)))
        case "LOST":
            return unframed(wombat.encode_reader_answer(readers.Lost(**fields)))
        case _:
            epoch, _, end = serial.partition("@")
            record = len(payload).to_bytes(4, "big") + payload
            offset = int(end) - len(record)
            return unframed(wombat.encode_payloads(topic, int(epoch), offset, [record]))


def unframed(data: bytes) -> bytes:
    (message,) = messages_of(data)
    return message


def messages_of(data: bytes) -> list[bytes]:
    """Split a server's WebSocket frames, by RFC 6455."""
    messages = []
    while data:
        assert data[0] == 0x82, "one whole binary message"
        size, at = data[1], 2
        if size > 125:
            at = 4 if size == 126 else 10
            size = int.from_bytes(data[2:at], "big")
        messages.append(data[at : at + size])
        data = data[at + size :]
    return messages


def publish(number: int, topic: str = "t", message: object = b"x") -> bytes:
    fields = {"topic": topic, "message": message, "sequence_number": number}
    packed: bytes = msgpack.packb({"type": 3, "publish": fields})
    return packed


def test_the_page_shows_every_message_and_every_kind_of_vector() -> None:
    shown = {(vector.sender, vector.name) for vector in VECTORS}
    sent_by_client = {("client", name) for name in ("ATTACH", "DETACH", "PUBLISH", "PING", "BAD")}
    sent_by_client |= {("client", "READ"), ("client", "HANDLED")}
    answers = ("ATTACHED", "DETACHED", "ACK", "PAYLOAD", "PONG")
    sent_by_client.add(("client", "AUTH"))
    answers += ("AUTH_OK", "AUTH_REFUSED")
    answers += ("WAITING", "READING", "RECORDS", "STORED", "LOST")
    assert shown == sent_by_client | {("server", name) for name in answers}
    assert {vector.kind for vector in VECTORS} == {"", "read-only", "bad"}


@each_vector
def test_a_vector_is_read_as_the_page_says(vector: Vector) -> None:
    assert seen(vector) == (vector.name, vector.fields)


@each_vector
def test_what_headrace_sends_is_what_the_page_shows(vector: Vector) -> None:
    if vector.kind == "":
        assert encode(vector.name, vector.fields) == vector.bytes


@each_vector
def test_another_library_reads_the_same(vector: Vector) -> None:
    if vector.kind == "":
        kind = {name: kind for kind, name in wombat.NAMES.items()}[vector.name.lower()]
        fields = {
            key: value.encode() if key == "message" else value
            for key, value in vector.fields.items()
        }
        if "records" in fields:
            fields["records"] = b"\0\0\0\3" + fields["records"].encode()
        assert msgpack.unpackb(vector.bytes) == {"type": kind, vector.name.lower(): fields}


@each_vector
def test_nothing_is_read_after_bad_input(vector: Vector) -> None:
    if vector.kind == "bad":
        decoder = ServerDecoder()
        received = decoder.receive([publish(0), vector.bytes, publish(1)])
        first, bad = received
        assert isinstance(first, wombat.Publishes) and first.numbers == {"t": [0]}
        assert isinstance(bad, wombat.Bad)
        assert decoder.receive([publish(2)]) == []


RAW_PUBLISH = b"\x82\xa4type\x03\xa7publish\x83\xafsequence_number\x07\xa7message\xc4\x01x\xa5topic"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (wombat.encode_publish("$anything", 7, b"x"), Refusal.RESERVED_TOPIC),
        (wombat.encode_publish("", 7, b"x"), Refusal.EMPTY_TOPIC),
        (wombat.encode_publish("x" * (TOPIC_BYTES_MAX + 1), 7, b"x"), Refusal.LONG_TOPIC),
        (RAW_PUBLISH + b"\xa2\xff\xfe", Refusal.BAD_TOPIC),
        (RAW_PUBLISH + b"\xd9\x02\xff\xfe", Refusal.BAD_TOPIC),
        (wombat.encode_publish("t", 7, bytes(PAYLOAD_BYTES_MAX + 1)), Refusal.LARGE_PAYLOAD),
    ],
)
def test_a_publish_that_stays_refused_is_told_with_its_number(message: bytes, why: Refusal) -> None:
    first, bad = ServerDecoder().receive([publish(0), message, publish(1)])
    assert isinstance(first, wombat.Publishes) and first.numbers == {"t": [0]}
    assert isinstance(bad, wombat.Bad) and bad.refused == (why, 7)


@pytest.mark.parametrize("message", [RAW_PUBLISH + b"\x07", RAW_PUBLISH, b"\x80", b"\xc1"])
def test_what_is_no_publish_is_not_told_as_one(message: bytes) -> None:
    [bad] = ServerDecoder().receive([message])
    assert isinstance(bad, wombat.Bad) and bad.refused is None


topics = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(
    lambda name: not is_reserved(name)
)
numbers = st.integers(0, NUMBERS - 1)
payloads = st.binary(max_size=300)


@given(st.lists(st.tuples(topics, numbers, payloads), min_size=1, max_size=20))
def test_publishes_come_through_by_topic_and_in_order(
    sent: list[tuple[str, int, bytes]],
) -> None:
    (found,) = ServerDecoder().receive([wombat.encode_publish(*one) for one in sent])
    assert isinstance(found, wombat.Publishes)
    for topic in {topic for topic, _, _ in sent}:
        mine = [(number, payload) for name, number, payload in sent if name == topic]
        assert [number for number, _ in mine] == found.numbers[topic]
        assert [payload for _, payload in mine] == [record[4:] for record in found.records[topic]]
        assert all(
            len(record) - 4 == int.from_bytes(record[:4], "big") for record in found.records[topic]
        )
    in_order = all(later[1] == (one[1] + 1) % NUMBERS for one, later in pairwise(sent))
    assert found.in_order is in_order


@given(
    st.integers(0, NUMBERS - 1),
    st.sampled_from([0, 1, 127, 128, 255, 256, 70_000]),
    st.integers(60, 200),
    st.lists(
        st.tuples(st.integers(0, 199), st.sampled_from(["topic", "size", "gap", "ping", "key"])),
        max_size=3,
    ),
)
@example(65_500, 128, 130, [])
@example(NUMBERS - 10, 128, 130, [])
@example(70_000, 128, 64, [])
@example(70_000, 128, 64, [(63, "topic")])
@example(70_000, 128, 130, [(128, "key")])
def test_many_alike_are_read_as_each_alone(
    first: int, size: int, count: int, oddities: list[tuple[int, str]]
) -> None:
    """A long sequence of similar messages uses a faster path, which must give the same result."""
    messages = []
    for index in range(count):
        number = (first + index) % NUMBERS
        payload = (b"%d\xafsequence_number\xce%%" % index).ljust(size, b".")[:size]
        made = publish(number, "50%", payload)
        for at, oddity in oddities:
            if at == index:
                made = {
                    "topic": publish(number, "51%", payload),
                    "size": publish(number, "50%", payload + b"!"),
                    "gap": publish((number + 7) % NUMBERS, "50%", payload),
                    "ping": msgpack.packb({"type": 6, "ping": {"timestamp": 1}}),
                    "key": made.replace(b"publish", b"publisi", 1)[:-1] + b"\0",
                }[oddity]
        messages.append(made)
    together = ServerDecoder().receive(messages)
    alone: list[wombat.ToServer] = []
    decoder = ServerDecoder()
    for message in messages:
        alone += decoder.receive([message])
    assert flat(together) == flat(alone)


def test_what_only_looks_like_many_alike_is_read_as_it_is() -> None:
    """The same names occur again outside `publish`, at the end, where they mean nothing."""
    inner = {"topic": "t", "message": b"real", "sequence_number": 70_000}
    messages = [
        msgpack.packb(
            {"type": 3, "publish": inner, "message": b"real", "sequence_number": 70_000 + index}
        )
        for index in range(100)
    ]
    (found,) = ServerDecoder().receive(messages)
    assert isinstance(found, wombat.Publishes)
    assert found.numbers == {"t": [70_000] * 100}


def flat(messages: list[wombat.ToServer]) -> tuple[list[Any], list[Any]]:
    """Return the publishes of each topic in order, and everything else in order."""
    publishes: dict[str, list[Any]] = {}
    others: list[Any] = []
    for message in messages:
        if isinstance(message, wombat.Publishes):
            for topic, records in message.records.items():
                of = zip(records, message.numbers[topic], strict=True)
                publishes.setdefault(topic, []).extend(of)
        else:
            others.append(message)
    return sorted(publishes.items()), others


@given(
    topics | st.just("100%d"),
    st.integers(0, 2**45),
    st.integers(0, 2**64 - 10**6),
    st.lists(payloads | st.just(b"%b"), min_size=1, max_size=40),
)
@example("t", 1, 99_990, [b"x"] * 40)
@example("t", 1, 90, [b"x" * 1000] * 40)
def test_payloads_come_through_with_their_serials(
    topic: str, epoch: int, offset: int, sent: list[bytes]
) -> None:
    records = [len(payload).to_bytes(4, "big") + payload for payload in sent]
    messages = messages_of(wombat.encode_payloads(topic, epoch, offset, records))
    (found,) = ClientDecoder().receive(messages)
    ends = [offset + sum(map(len, records[: index + 1])) for index in range(len(records))]
    serials = [wombat.make_serial(epoch, end) for end in ends]
    assert found == wombat.Payloads(topic, list(zip(serials, sent, strict=True)))
    for message, serial, payload in zip(messages, serials, sent, strict=True):
        fields = {"topic": topic, "serial": serial, "message": payload}
        assert msgpack.unpackb(message) == {"type": 5, "payload": fields}


@pytest.mark.parametrize("text", ["1@2", "@2", "18446744073709551615@18446744073709551615", "@0"])
def test_a_serial_of_ours_is_read(text: str) -> None:
    serial = wombat.parse_serial(text)
    assert serial is not None
    assert text == f"{'' if serial.epoch is None else serial.epoch}@{serial.offset}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "1@",
        "abc",
        "-1@2",
        "1@2@3",
        "1@ 2",
        "١@٢",
        "@18446744073709551616",
        "1@2\n",
        "9" * 500,
    ],
)
def test_any_other_text_is_no_serial_of_ours(text: str) -> None:
    assert wombat.parse_serial(text) is None


def test_the_timestamp_of_a_ping_comes_back_as_it_was() -> None:
    for stamp in (0, 2**64 - 1, 1.5, -1):
        packed = msgpack.packb(stamp)
        (ping,) = ServerDecoder().receive(
            [msgpack.packb({"type": 6, "ping": {"timestamp": stamp}})]
        )
        assert ping == wombat.Ping(packed)
        assert msgpack.unpackb(unframed(wombat.encode_pong(packed)))["pong"]["timestamp"] == stamp


@pytest.mark.parametrize("message", [b"x" * (PAYLOAD_BYTES_MAX + 1), "x" * (PAYLOAD_BYTES_MAX + 1)])
def test_a_payload_over_the_limit_is_too_big(message: object) -> None:
    (bad,) = ServerDecoder().receive([publish(0, message=message)])
    assert isinstance(bad, wombat.Bad) and bad.code == websocket.TOO_BIG
    (found,) = ServerDecoder().receive([publish(0, message=message[:-1])])  # type: ignore[index]
    assert isinstance(found, wombat.Publishes)


def test_the_largest_payload_fits_a_message_in_every_form() -> None:
    payload = b"\xff" * PAYLOAD_BYTES_MAX
    for form in (payload, list(payload)):
        message = publish(NUMBERS - 1, "t" * 255, form)
        assert len(message) <= wombat.MESSAGE_BYTES_MAX
        (found,) = ServerDecoder().receive([message])
        assert isinstance(found, wombat.Publishes)
        assert found.records["t" * 255][0][4:] == payload


def wrapped(inner: bytes) -> st.SearchStrategy[bytes]:
    """A valid beginning, followed by something else in place of a value."""
    beginnings = [
        b"\x82\xa4type\x03\xa7publish\x83\xa5topic\xa1t\xafsequence_number\x00\xa7message",
        b"\x82\xa4type\x03\xa7publish",
        b"\x82\xa4type\x06\xa4ping\x81\xa9timestamp",
        b"\x82\xa4type\x01\xa6attach\x82\xa5topic\xa1t\xa6serial",
        b"\x82\xa1?",
        b"",
    ]
    return st.sampled_from(beginnings).map(lambda beginning: beginning + inner)


deep = st.integers(1, 100_000).flatmap(lambda depth: wrapped(b"\x91" * depth + b"\x01"))
huge = st.sampled_from(
    [
        *(b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
        *(b"\xdf\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xde\xff\xff"),
    ]
).flatmap(wrapped)
noise = st.binary(max_size=200).flatmap(wrapped)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
odd = st.fixed_dictionaries(
    {"type": st.integers(0, 11) | values},
    optional={name: values for name in wombat.NAMES if name},
).map(msgpack.packb)


@given(st.lists(deep | huge | noise | odd, min_size=1, max_size=3), st.booleans())
def test_no_input_breaks_a_decoder_or_makes_it_take_much_memory(
    messages: list[bytes], from_client: bool
) -> None:
    decoder = ServerDecoder() if from_client else ClientDecoder()
    tracemalloc.start()
    try:
        found = decoder.receive(messages)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * sum(map(len, messages)) + 100_000
    for message in found[:-1]:
        assert not isinstance(message, wombat.Bad)
    if not all(map(is_map, messages)):
        assert found and isinstance(found[-1], wombat.Bad), (
            "what makes no sense is never passed over"
        )
    if found and isinstance(found[-1], wombat.Bad):
        bad = found[-1]
        assert bad.code in (1002, 1008, 1009)
        assert bad.reason
        assert len(websocket.close_reason(bad.reason)) <= 123


@pytest.mark.parametrize("message", [b"bar", "bar", [98, 97, 114]])
def test_a_client_takes_a_payload_in_every_form_too(message: object) -> None:
    fields = {"topic": "t", "serial": "1@7", "message": message}
    packed = msgpack.packb({"type": 5, "payload": fields})
    assert ClientDecoder().receive([packed]) == [wombat.Payloads("t", [("1@7", b"bar")])]


def test_a_client_passes_over_what_it_does_not_know_and_a_server_refuses_it() -> None:
    later = msgpack.packb({"type": 10, "news": {"topic": "t"}})
    pong = msgpack.packb({"type": 7, "pong": {"timestamp": 1}})
    assert ClientDecoder().receive([later, pong]) == [wombat.Pong(1)]
    assert ServerDecoder().receive([later]) == [wombat.Bad(1002, "unknown message type 10")]


def is_map(message: bytes) -> bool:
    try:
        return isinstance(msgpack.unpackb(message, raw=True, strict_map_key=False), dict)
    except (ValueError, RecursionError):
        return False


def test_a_reason_is_cut_between_characters() -> None:
    assert websocket.close_reason("é" * 100) == ("é" * 61).encode()
    assert websocket.close_reason("plain") == b"plain"


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_a_frame_says_its_size_in_the_shortest_form(size: int) -> None:
    assert messages_of(websocket.frame(b"x" * size)) == [b"x" * size]
    assert len(websocket.head(size)) == (2 if size < 126 else 4 if size < 65536 else 10)
