"""Random and mutated input: the server answers, or closes with a code and a reason, and keeps running."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.frames import Opcode

from headrace.testing import ServerProcess
from tests.system.support import resident_bytes
from tests.system.wombat.foreign import (
    PONG,
    Closed,
    Wire,
    attach,
    detach,
    frame,
    message,
    pack,
    ping,
    publish,
)

MIB = 1024 * 1024
STAMP = 12345.678
CODES = {1002, 1003, 1008, 1009}

quick = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that must still be healthy after all tests."""
    with ServerProcess(tmp_path_factory.mktemp("fuzzed") / "data") as process:
        with Wire(process.ws) as wire:
            wire.publish("t", *[bytes(1000)] * 1000)
        before = resident_bytes(process.pid)
        yield process
        assert process.running, process.stderr
        with Wire(process.ws) as wire:
            wire.publish("t", b"still here")
            assert wire.alive()
        assert resident_bytes(process.pid) - before < 48 * MIB
        assert "Traceback" not in process.stderr
        assert "fault" not in process.stderr


topics = st.sampled_from(["t", "u", "$logux/x", "", "x" * 300])
numbers = st.integers(-1, 2**33) | st.integers(0, 10)
values: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=10,
)  # fmt: skip
valid = st.one_of(
    st.builds(attach, topics, st.none() | st.sampled_from(["@0", "@7", "abc", "1@5", ""])),
    st.builds(detach, topics),
    st.builds(publish, topics, numbers, st.binary(max_size=300) | st.text(max_size=9)),
    st.builds(publish, topics, numbers, st.lists(st.integers(0, 255), max_size=20)),
    st.builds(ping, st.integers(0, 2**64 - 1) | st.floats(allow_nan=False)),
)
nearly_valid = st.builds(
    lambda kind, name, fields: message(kind, name, **fields),
    st.integers(0, 11),
    st.sampled_from(["attach", "publish", "ping", "detach", "ack", "payload", "x"]),
    st.dictionaries(
        st.sampled_from(["topic", "serial", "message", "sequence_number", "timestamp", "x"]), values
    ),
)


@st.composite
def mutated(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(sound))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(["flip", "cut", "insert", "drop", "double"]))
        if what == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[at:]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif what == "drop":
            del data[at : at + 1]
        elif what == "double":
            data += data[at:]
    return bytes(data)


messages = st.one_of(valid, mutated(valid), nearly_valid, values.map(pack), st.binary(max_size=400))


@quick
@given(st.lists(messages, min_size=1, max_size=8))
def test_any_messages_are_answered_or_refused_in_words(
    fuzzed: ServerProcess, sent: list[bytes]
) -> None:
    with Wire(fuzzed.ws) as wire:
        wire.send(*sent, ping(STAMP))
        # The foreign client raises an error if an answer is not exactly what the protocol says.
        closed = until_pong(wire)
        assert closed is None or closed.code in CODES
        assert closed is None or closed.reason


def until_pong(wire: Wire) -> Closed | None:
    """Receive until the last PING is answered; if the server closed instead, return how."""
    try:
        while (found := wire.receive()).type != PONG or found.number != STAMP:
            pass
    except Closed as closed:
        return closed
    return None


frames = st.one_of(
    st.builds(frame, messages),
    st.builds(frame, messages, st.sampled_from([Opcode.TEXT, Opcode.CONT]), st.booleans()),
    st.builds(frame, messages, st.just(Opcode.BINARY), st.booleans()),
    st.builds(
        frame, st.binary(max_size=125), st.sampled_from([Opcode.PING, Opcode.PONG, Opcode.CLOSE])
    ),
)


@quick
@given(st.lists(frames | mutated(frames) | st.binary(max_size=2000), min_size=1, max_size=8))
def test_any_bytes_behind_the_handshake_end_well(fuzzed: ServerProcess, sent: list[bytes]) -> None:
    with Wire(fuzzed.ws) as wire, contextlib.suppress(ConnectionError):
        wire.send_bytes(*sent, frame(ping(STAMP)))
        wire.socket.shutdown(socket.SHUT_WR)
        _, closed = wire.until_closed()
        # The code is 1006 if we ended in the middle of something. A close frame of ours is echoed.
        assert 1000 <= closed.code < 5000


@quick
@given(
    st.binary(max_size=2000) | mutated(st.just(b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\n\r\n"))
)
def test_any_bytes_instead_of_a_handshake_end_well(fuzzed: ServerProcess, sent: bytes) -> None:
    with socket.create_connection(fuzzed.ws, timeout=30) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                received += more
        assert not received or received.startswith(b"HTTP/1.1 ")
