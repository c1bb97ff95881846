"""Logux messages: valid and invalid ones, in both encodings."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.logux import messages as logux
from headrace.wire.logux.messages import (
    DEPTH_MAX,
    BadLoguxMessageError,
    Connect,
    Connected,
    Error,
    Headers,
    Ping,
    Pong,
    Sync,
    Synced,
    Unknown,
)

BOTH = pytest.mark.parametrize("binary", [False, True])

GOOD: list[tuple[list[Any], logux.Message]] = [
    (["connect", [0, 0], "client1", {"token": "wrong"}], Connect((0, 0), "client1", 0, {"token": "wrong"})),
    (["connect", [0, 0], "client1", 130, {"token": "t"}], Connect((0, 0), "client1", 130, {"token": "t"})),
    (["connect", [0, 1], 7, 0], Connect((0, 1), 7, 0)),
    (["connect", 5, "10:a:b", 3, {"token": "t"}], Connect((5, 0), "10:a:b", 3, {"token": "t"})),
    (["connect", [0, 0], "c"], Connect((0, 0), "c", 0)),
    (["connected", [0, 0], "server", [1, 2.5]], Connected((0, 0), "server", (1, 2.5))),
    (["connected", [0, 0], "s", [1, 2], "c"], Connected((0, 0), "s", (1, 2), "c")),
    (["ping", 0], Ping(0)),
    (["pong", 1.0], Pong(1.0)),
    (["sync", 1, {"type": "a"}, [1, "c", 0]], Sync(1, [({"type": "a"}, [1, "c", 0])])),
    (["sync", 2, {"type": "a"}, [1], {"type": "b"}, [2]],
     Sync(2, [({"type": "a"}, [1]), ({"type": "b"}, [2])])),
    (["synced", 132], Synced(132)),
    (["error", "Wrong credentials", "auth"], Error(["Wrong credentials", "auth"])),
    (["error", "wrong-protocol", {"supported": [0]}], Error(["wrong-protocol", {"supported": [0]}])),
    (["headers", {"env": "development"}], Headers({"env": "development"})),
    (["nonsense", 1, 2], Unknown("nonsense")),
]  # fmt: skip

BAD: list[Any] = [
    None, 5, "ping", {}, [], [5], [["ping"]],
    ["connect"], ["connect", [0, 0]], ["connect", "0", "c", 0], ["connect", [0], "c", 0],
    ["connect", [0, "0"], "c", 0], ["connect", [0, 0], "", 0], ["connect", [0, 0], None, 0],
    ["connect", [0, 0], True, 0], ["connect", [0, 0], "c", -1], ["connect", [0, 0], "c", 0, 1, 2],
    ["connected", [0, 0], "s"], ["connected", [0, 0], "s", 5], ["connected", [0, 0], "s", [1]],
    ["connected", [0, 0], "s", [1, "2"]],
    ["ping"], ["ping", "1"], ["ping", -1], ["ping", True], ["ping", None], ["ping", 1, 2],
    ["pong", []], ["synced"], ["synced", -0.5], ["synced", {}],
    ["sync"], ["sync", 1], ["sync", 1, {"type": "a"}], ["sync", "1", {"type": "a"}, [1]],
    ["sync", -1, {"type": "a"}, [1]], ["sync", 1, {"type": 5}, [1]], ["sync", 1, {}, [1]],
    ["sync", 1, [], [1]], ["sync", 1, None, [1]], ["sync", 1, {"type": "a"}, [1], {"type": "b"}],
    ["error"], ["error", 5], ["headers", []],
]  # fmt: skip


def packed(value: Any, *, binary: bool) -> bytes:
    return msgspec.msgpack.encode(value) if binary else msgspec.json.encode(value)


@BOTH
@pytest.mark.parametrize(("value", "message"), GOOD)
def test_a_message_is_read_in_both_encodings(value: Any, message: Any, binary: bool) -> None:
    assert logux.decode(packed(value, binary=binary), binary=binary) == message


@BOTH
@pytest.mark.parametrize("value", BAD)
def test_what_is_no_message_is_refused(value: Any, binary: bool) -> None:
    with pytest.raises(BadLoguxMessageError):
        logux.decode(packed(value, binary=binary), binary=binary)


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b'["ping",1] x', b'["ping",NaN]', b'["ping",1e999]', b'["x","\xff"]', b"\x92\xa4ping\x01",
     b'["x","\\ud800"]'],
)  # fmt: skip
def test_text_that_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadLoguxMessageError, match="not JSON"):
        logux.decode(data, binary=False)


@pytest.mark.parametrize(
    "value",
    [b"\xc4\x01a", b"\xc7\x01\x05a", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xcb\x7f\xf0\0\0\0\0\0\0",
     b"\x81\x01\x02", b"\x81\xc0\x02", b"\xd6\xff\0\0\0\0", b"\x91\xc4\x01a"],
)  # fmt: skip
def test_what_json_does_not_have_is_refused_in_messagepack(value: bytes) -> None:
    with pytest.raises(BadLoguxMessageError):
        logux.decode(b"\x92\xa1x" + value, binary=True)


@BOTH
def test_a_message_may_be_deep_but_not_too_deep(binary: bool) -> None:
    def nested(depth: int) -> bytes:
        value: Any = 1
        for level in range(depth - 1):
            value = [value] if level % 2 else {"x": value}
        return packed(["x", value], binary=binary)

    assert logux.decode(nested(DEPTH_MAX), binary=binary) == Unknown("x")
    for depth in (DEPTH_MAX + 1, 500):
        with pytest.raises(BadLoguxMessageError, match="deep in each other"):
            logux.decode(nested(depth), binary=binary)


def test_a_bomb_of_brackets_is_refused() -> None:
    for data, binary in ((b"[" * 1_000_000, False), (b"\x91" * 1_000_000, True)):
        with pytest.raises(BadLoguxMessageError):
            logux.decode(data, binary=binary)


@BOTH
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)  # fmt: skip
def test_what_is_packed_is_unpacked(binary: bool, value: Any) -> None:
    assert logux.unpack(logux.pack(["x", value], binary=binary), binary=binary) == ["x", value]


def test_integers_that_messagepack_does_not_have_become_floats() -> None:
    message = ["x", 2**70, {"y": [-(2**65)]}]
    assert logux.unpack(logux.pack(message, binary=True), binary=True) == [
        "x",
        2.0**70,
        {"y": [-(2.0**65)]},
    ]
    assert logux.unpack(logux.pack(message, binary=False), binary=False) == message


@given(st.binary(max_size=60), st.booleans())
def test_nothing_else_comes_of_any_bytes(data: bytes, binary: bool) -> None:
    with contextlib.suppress(BadLoguxMessageError):
        logux.decode(data, binary=binary)


@pytest.mark.parametrize("created", [None, 5, "x", {}, [], [None], [[1]], [True], [1, {}]])
def test_a_time_is_numbers_and_strings(created: Any) -> None:
    with pytest.raises(BadLoguxMessageError, match="the time of an event"):
        logux.check_created(created)
