"""The Figg codec against the byte examples of its page, and against arbitrary input."""

import json
import re
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model import PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX, Refusal, is_reserved
from headrace.wire import readers, tokens
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import CONTROLS_AT_ONCE_MAX, ClientDecoder, ServerDecoder

PAGE = Path(__file__).parents[2] / "docs" / "protocols" / "figg.md"


class Frame(NamedTuple):
    """A message as the page writes it: one per frame, where the decoders may join several."""

    name: str
    fields: tuple[tuple[str, object], ...]


class Vector(NamedTuple):
    line: int
    sender: str
    kind: str
    frames: list[Frame]
    bytes: bytes


def read_vectors() -> list[Vector]:
    text = PAGE.read_text()
    return [
        parse_vector(text[: found.start()].count("\n") + 1, found[1].split(), found[2])
        for found in re.finditer(r"^```figg (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]


def parse_vector(line: int, words: list[str], body: str) -> Vector:
    frames, hexadecimal = [], ""
    for row in body.splitlines():
        if found := re.fullmatch(r"([A-Z_]+)((?: [a-z_]+=(?:\"(?:[^\"\\]|\\.)*\"|\d+))+)", row):
            fields = re.findall(r" ([a-z_]+)=(\"(?:[^\"\\]|\\.)*\"|\d+)", found[2])
            frames.append(Frame(found[1], tuple((key, json.loads(value)) for key, value in fields)))
        else:
            # A row has hexadecimal words, and possibly an explanation after a wider gap.
            found = re.match(r"(?:[0-9a-f]{2,}(?:  ?|$))+", row)
            assert found, f"{PAGE.name}:{line}: cannot read {row!r}"
            hexadecimal += found[0]
    sender, kind = words[0], " ".join(words[1:])
    assert sender in ("client", "server"), words
    assert kind in ("", "read-only", "bad"), words
    return Vector(line, sender, kind, frames, bytes.fromhex(hexadecimal))


VECTORS = read_vectors()
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"line{vector.line}")


def frames_of(messages: Iterable[figg.ToServer | figg.ToClient]) -> list[Frame]:
    return [frame for message in messages for frame in split(message)]


def split(message: figg.ToServer | figg.ToClient) -> list[Frame]:
    if isinstance(message, figg.Publishes):
        # Numbers are given as a range; a vector's publishes are consecutive.
        records = [(topic, record) for topic, many in message.records.items() for record in many]
        assert message.highest - message.lowest == len(records) - 1
        return [
            frame("PUBLISH", topic=topic, seq_num=message.lowest + i, data=record[4:].decode())
            for i, (topic, record) in enumerate(records)
        ]
    if isinstance(message, figg.Data):
        return [
            frame("DATA", topic=message.topic, offset=offset, data=payload.decode())
            for offset, payload in message.messages
        ]
    named = message._asdict() if isinstance(message, tuple) else msgspec.structs.asdict(message)
    fields = {key: value for key, value in named.items() if value is not None}
    fields.pop("refused", None)  # only for the server, not on the wire
    if isinstance(message, readers.Records):
        fields["data"] = message.data[4:].decode()
    of_auth = tokens.NAMES.get(tokens.TYPES.get(type(message)))
    return [frame((of_auth or type(message).__name__).upper(), **fields)]


def frame(name: str, **fields: object) -> Frame:
    return Frame(name, tuple(fields.items()))


def encode(frame: Frame) -> bytes:
    fields: dict[str, object] = dict(frame.fields)
    if frame.name in OF_AUTH:
        return OF_AUTH[frame.name](**fields)
    if frame.name in OF_READERS:
        return encode_of_reader(frame.name, fields)
    data = str(fields.get("data", "")).encode()
    topic, offset = str(fields.get("topic")), fields.get("offset")
    match frame.name, offset:
        case "ATTACH", int() | None:
            return figg.encode_attach(topic, offset)
        case "ATTACHED", int():
            return figg.encode_attached(topic, offset)
        case "DETACH", _:
            return figg.encode_detach(topic)
        case "DETACHED", _:
            return figg.encode_detached(topic)
        case "PUBLISH", _:
            return figg.encode_publish(topic, int(str(fields["seq_num"])), data)
        case "DATA", int():
            record = len(data).to_bytes(4, "big") + data
            return figg.encode_data(topic, offset - len(record), [record])
        case name, _:
            number = int(str(fields.get("seq_num", fields.get("timestamp"))))
            encoders = {"ACK": figg.encode_ack, "PING": figg.encode_ping, "PONG": figg.encode_pong}
            return encoders[name](number)


TOO_LARGE = PAYLOAD_BYTES_MAX + 1


@pytest.mark.parametrize(
    ("data", "why", "number"),
    [
        (figg.encode_publish("$anything", 7, b"x"), Refusal.RESERVED_TOPIC, 7),
        (figg.encode_publish("", 7, b"x"), Refusal.EMPTY_TOPIC, 7),
        (figg.encode_publish("x" * (TOPIC_BYTES_MAX + 1), 7, b"x"), Refusal.LONG_TOPIC, 7),
        (figg.encode_publish("ab", 7, b"x").replace(b"ab", b"\xff\xfe"), Refusal.BAD_TOPIC, 7),
        (figg.encode_publish("t", 7, bytes(TOO_LARGE)), Refusal.LARGE_PAYLOAD, 7),
        # The publish is refused by its header. The number is known if it has already arrived.
        (figg.encode_publish("t", 7, bytes(TOO_LARGE + 300)), Refusal.LARGE_PAYLOAD, 7),
        (figg.encode_publish("t", 7, bytes(TOO_LARGE + 300))[:10], Refusal.LARGE_PAYLOAD, None),
    ],
)
def test_a_publish_that_stays_refused_is_told_with_its_number(
    data: bytes, why: Refusal, number: int | None
) -> None:
    first, bad = ServerDecoder().receive(figg.encode_publish("t", 0, b"x") + data)
    assert isinstance(first, figg.Publishes) and first.highest == 0
    assert isinstance(bad, figg.Bad) and bad.refused == (why, number)


@pytest.mark.parametrize(
    "data",
    [
        figg.encode_attach("", 7),
        figg.encode_publish("t", 7, b"x") + figg.HEADER.pack(figg.PUBLISH, 1, 3) + bytes(3),
        figg.HEADER.pack(figg.PUBLISH, 1, 0),
        figg.HEADER.pack(figg.PUBLISH, 2, 0),
    ],
)
def test_what_is_no_publish_is_not_told_as_one(data: bytes) -> None:
    *_, bad = ServerDecoder().receive(data)
    assert isinstance(bad, figg.Bad) and bad.refused is None


OF_AUTH = {
    "AUTH": figg.encode_auth,
    "AUTH_OK": lambda **fields: figg.encode_auth_answer(tokens.AuthOk(**fields)),
    "AUTH_REFUSED": lambda **fields: figg.encode_auth_answer(tokens.AuthRefused(**fields)),
}

OF_READERS = {
    "READ": (readers.Read, figg.encode_of_reader),
    "WAITING": (readers.Waiting, figg.encode_of_reader),
    "READING": (readers.Reading, figg.encode_of_reader),
    "RECORDS": (readers.Records, figg.encode_records),
    "HANDLED": (readers.Handled, figg.encode_of_reader),
    "STORED": (readers.Stored, figg.encode_of_reader),
    "LOST": (readers.Lost, figg.encode_of_reader),
}


def encode_of_reader(name: str, fields: dict[str, Any]) -> bytes:
    if "data" in fields:
        fields["data"] = len(fields["data"]).to_bytes(4, "big") + fields["data"].encode()
    kind, encoder = OF_READERS[name]
    return encoder(kind(**fields))


def decoder_for(vector: Vector) -> ServerDecoder | ClientDecoder:
    return ServerDecoder() if vector.sender == "client" else ClientDecoder()


def test_the_page_shows_every_message_and_every_kind_of_vector() -> None:
    shown = {(vector.sender, frame.name) for vector in VECTORS for frame in vector.frames}
    sent_by_client = {("client", name) for name in ("ATTACH", "DETACH", "PUBLISH", "PING")}
    sent_by_server = {("server", name) for name in ("ATTACHED", "DETACHED", "ACK", "DATA", "PONG")}
    sent_by_client |= {("client", name) for name in ("READ", "HANDLED")}
    sent_by_server |= {("server", name) for name in OF_READERS.keys() - {"READ", "HANDLED"}}
    sent_by_client.add(("client", "AUTH"))
    sent_by_server |= {("server", "AUTH_OK"), ("server", "AUTH_REFUSED")}
    assert shown == sent_by_client | sent_by_server | {("client", "BAD"), ("server", "BAD")}
    assert {vector.kind for vector in VECTORS} == {"", "read-only", "bad"}


@each_vector
def test_a_vector_is_read_as_the_page_says(vector: Vector) -> None:
    assert frames_of(decoder_for(vector).receive(vector.bytes)) == vector.frames


@each_vector
def test_a_vector_is_read_the_same_one_byte_at_a_time(vector: Vector) -> None:
    decoder = decoder_for(vector)
    frames = [f for byte in vector.bytes for f in frames_of(decoder.receive(bytes([byte])))]
    assert frames == vector.frames


@each_vector
def test_a_vector_is_read_the_same_whatever_came_before_it(vector: Vector) -> None:
    before = encode(frame("PING" if vector.sender == "client" else "PONG", timestamp=1))
    read = frames_of(decoder_for(vector).receive(before + vector.bytes))
    # A PING may be answered before publishes that came with it; that is its purpose.
    assert [f for f in read if f.name not in ("PING", "PONG")] == [
        f for f in vector.frames if f.name not in ("PING", "PONG")
    ]


@each_vector
def test_what_headrace_sends_is_what_the_page_shows(vector: Vector) -> None:
    if vector.kind == "":
        assert b"".join(map(encode, vector.frames)) == vector.bytes


@each_vector
def test_nothing_is_read_after_bad_input(vector: Vector) -> None:
    if vector.kind == "bad":
        decoder = decoder_for(vector)
        decoder.receive(vector.bytes)
        assert decoder.closed
        assert decoder.receive(encode(frame("PING", timestamp=1))) == []


topics = st.text(min_size=1, max_size=TOPIC_BYTES_MAX // 4).filter(
    lambda text: encodable(text) and not text.startswith("$")
)
u64 = st.integers(0, 2**64 - 1)
payloads = st.binary(max_size=64)


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


publishes = st.tuples(topics.filter(lambda name: not is_reserved(name)), u64, payloads)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Split the same bytes into reads of random sizes."""
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=8))
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(publishes, min_size=1, max_size=20), st.data())
def test_publishes_come_through_in_any_reads(
    sent: list[tuple[str, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(figg.encode_publish(*publish) for publish in sent)
    decoder = ServerDecoder()
    received: dict[str, list[bytes]] = {}
    lowest, highest = [], []
    for read in data.draw(cut(stream)):
        for message in decoder.receive(read):
            assert isinstance(message, figg.Publishes)
            lowest.append(message.lowest)
            highest.append(message.highest)
            for topic, records in message.records.items():
                received.setdefault(topic, []).extend(records)
    expected: dict[str, list[bytes]] = {}
    for topic, _, payload in sent:
        expected.setdefault(topic, []).append(len(payload).to_bytes(4, "big") + payload)
    assert received == expected
    numbers = [seq_num for _, seq_num, _ in sent]
    assert (min(lowest), max(highest)) == (min(numbers), max(numbers))


@given(topics, st.integers(0, 2**40), st.lists(payloads, max_size=20), st.data())
def test_data_comes_through_in_any_reads(
    topic: str, begin: int, sent: list[bytes], data: st.DataObject
) -> None:
    records = [len(payload).to_bytes(4, "big") + payload for payload in sent]
    stream = figg.encode_data(topic, begin, records)
    decoder = ClientDecoder()
    received: list[tuple[int, bytes]] = []
    for read in data.draw(cut(stream)):
        for message in decoder.receive(read):
            assert isinstance(message, figg.Data)
            assert message.topic == topic
            received += message.messages
    assert [payload for _, payload in received] == sent
    ends = [begin + sum(map(len, records[: i + 1])) for i in range(len(records))]
    assert [offset for offset, _ in received] == ends


@given(topics, st.none() | u64, u64)
def test_control_messages_come_through(topic: str, offset: int | None, number: int) -> None:
    sent = figg.encode_attach(topic, offset) + figg.encode_detach(topic) + figg.encode_ping(number)
    assert ServerDecoder().receive(sent) == [
        figg.Attach(topic, offset),
        figg.Detach(topic),
        figg.Ping(number),
    ]
    sent = (
        figg.encode_attached(topic, number)
        + figg.encode_detached(topic)
        + figg.encode_ack(number)
        + figg.encode_pong(number)
    )
    assert ClientDecoder().receive(sent) == [
        figg.Attached(topic, number),
        figg.Detached(topic),
        figg.Ack(number),
        figg.Pong(number),
    ]


@given(st.lists(st.sampled_from("apb"), max_size=5 * CONTROLS_AT_ONCE_MAX), st.data())
def test_very_many_messages_of_one_read_are_decoded_a_part_at_a_time(
    kinds: list[str], data: st.DataObject
) -> None:
    attach, ping = figg.encode_attach("t", 7), figg.encode_ping(1)
    encoded = {"a": attach, "p": ping, "b": figg.encode_publish("t", 0, b"foo")}
    decoder = ServerDecoder()
    controls: list[object] = []
    published = 0
    for read in data.draw(cut(b"".join(encoded[kind] for kind in kinds))):
        while True:
            some = decoder.receive(read)
            ours = [one for one in some if not isinstance(one, figg.Publishes)]
            assert len(ours) <= CONTROLS_AT_ONCE_MAX
            controls += ours
            published += sum(
                len(one.records["t"]) for one in some if isinstance(one, figg.Publishes)
            )
            read = b""
            if not decoder.unread:
                break
    expected = {"a": figg.Attach("t", 7), "p": figg.Ping(1)}
    assert controls == [expected[kind] for kind in kinds if kind != "b"]
    assert published == kinds.count("b")


def headers() -> st.SearchStrategy[bytes]:
    """Bytes that look like the beginning of frames, to pass the first check."""
    kinds = (st.integers(0, 11) | st.integers(63, 71)).map(lambda kind: kind.to_bytes(2, "big"))
    versions = st.sampled_from([b"\0\1", b"\0\0", b"\1\0"])
    sizes = st.integers(0, 40) | st.integers(0, 2**32 - 1)
    return st.tuples(kinds, versions, sizes.map(lambda n: n.to_bytes(4, "big"))).map(b"".join)


anything = st.lists(headers() | st.binary(max_size=60), max_size=12).map(b"".join)
decoders = pytest.mark.parametrize("decoder_type", [ServerDecoder, ClientDecoder])


@decoders
@given(stream=anything, data=st.data())
def test_any_bytes_give_messages_and_then_perhaps_bad_however_they_are_cut(
    decoder_type: type[ServerDecoder] | type[ClientDecoder],
    stream: bytes,
    data: st.DataObject,
) -> None:
    whole = decoder_type().receive(stream)
    assert not any(isinstance(message, figg.Bad) for message in whole[:-1])
    decoder = decoder_type()
    pieces = [m for read in data.draw(cut(stream)) for m in decoder.receive(read)]
    assert bads(pieces) == bads(whole)


def bads(messages: Iterable[object]) -> list[object]:
    return [message for message in messages if isinstance(message, figg.Bad)]


@decoders
def test_a_frame_that_never_ends_takes_bounded_memory(
    decoder_type: type[ServerDecoder] | type[ClientDecoder],
) -> None:
    kind = figg.PUBLISH if decoder_type is ServerDecoder else figg.DATA
    size = 4 + 1 + 8 + 4 + PAYLOAD_BYTES_MAX
    head = kind.to_bytes(2, "big") + b"\0\1" + size.to_bytes(4, "big")
    decoder = decoder_type()
    tracemalloc.start()
    try:
        decoder.receive(head)
        for _ in range((size - 1) // 16):  # a slow peer: 16 bytes at a time, without the last ones
            decoder.receive(bytes(16))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 8 * size


@decoders
def test_the_largest_payload_passes_and_one_byte_more_does_not(
    decoder_type: type[ServerDecoder] | type[ClientDecoder],
) -> None:
    for length, good in ((PAYLOAD_BYTES_MAX, True), (PAYLOAD_BYTES_MAX + 1, False)):
        record = length.to_bytes(4, "big") + bytes(length)
        if decoder_type is ServerDecoder:
            stream = figg.encode_publish("t", 0, bytes(length))
        else:
            stream = figg.encode_data("t", 0, [record])
        messages = decoder_type().receive(stream)
        assert bool(bads(messages)) is not good


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "cc"]), st.sampled_from([0, 1, 5]), st.integers(1, 200)
        ),
        max_size=6,
    ),
    st.integers(0, 40),
)
def test_long_stretches_of_publishes_are_read_as_what_they_are(
    stretches: list[tuple[str, int, int]], cut: int
) -> None:
    """The decoder splits many equal frames at once; nothing may depend on where a sequence ends."""
    sent = [
        (topic, bytes([n % 256]) * size) for topic, size, count in stretches for n in range(count)
    ]
    stream = b"".join(
        figg.encode_publish(topic, number, payload) for number, (topic, payload) in enumerate(sent)
    )
    decoder = ServerDecoder()
    received: dict[str, list[bytes]] = {}
    highest = -1
    for part in (stream[: len(stream) * cut // 40], stream[len(stream) * cut // 40 :]):
        for message in decoder.receive(part):
            assert isinstance(message, figg.Publishes)
            assert message.lowest == highest + 1
            highest = message.highest
            for topic, records in message.records.items():
                received.setdefault(topic, []).extend(record[4:] for record in records)
    assert highest == len(sent) - 1
    expected: dict[str, list[bytes]] = {}
    for topic, payload in sent:
        expected.setdefault(topic, []).append(payload)
    assert received == expected
