"""Masked WebSocket frames conform to RFC 6455, and another implementation can read them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from headrace.wire.websocket import KEY_BYTES, masked_frames

KEY = bytes.fromhex("37fa213d")


def test_the_example_of_the_rfc() -> None:
    masked = masked_frames([b"Hello"], KEY)
    assert masked == b"\x82\x85" + KEY + bytes.fromhex("7f9f4d5158")


def test_each_message_has_its_own_key() -> None:
    other = bytes.fromhex("00000001")
    both = masked_frames([b"Hello", b"Hello"], KEY + other)
    assert both == masked_frames([b"Hello"], KEY) + masked_frames([b"Hello"], other)


@given(st.lists(st.binary(max_size=300), min_size=1))
def test_what_is_masked_can_be_read(messages: list[bytes]) -> None:
    assert read(masked_frames(messages, os.urandom(KEY_BYTES * len(messages)))) == messages


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_every_form_of_the_length(size: int) -> None:
    assert read(masked_frames([bytes(size)], KEY)) == [bytes(size)]


def read(stream: bytes) -> list[bytes]:
    server = ServerProtocol(state=OPEN, max_size=None)
    server.receive_data(stream)
    frames = server.events_received()
    assert all(frame.opcode is Opcode.BINARY and frame.fin for frame in frames)
    return [bytes(frame.data) for frame in frames]
