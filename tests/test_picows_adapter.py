"""The internals of picows that the server relies on: says what differs in another version."""

import asyncio
import inspect
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import picows
import picows.picows as internals
import pytest

from headrace import picows_adapter
from headrace.picows_adapter import KNOWN_VERSION, ServerListener, serve
from headrace.wire import websocket

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: headrace\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FRAME_BYTES_MAX = 1000

USED = {
    "WSProtocol": ["transport", "get_buffer", "buffer_updated", "connection_made"],
    "WSTransport": [
        *["close_handshake", "is_close_frame_sent", "send", "send_close", "send_pong"],
        *["underlying_transport", "wait_disconnected"],
    ],
    "WSFrame": ["fin", "get_payload_as_bytes", "last_in_buffer", "msg_type"],
    "WSListener": [
        *["on_ws_connected", "on_ws_disconnected", "on_ws_frame"],
        *["pause_writing", "resume_writing"],
    ],
    "WSMsgType": ["BINARY", "CLOSE", "CONTINUATION", "PING", "PONG", "TEXT"],
    "WSAutoPingStrategy": ["PING_WHEN_IDLE"],
}
"""Attributes that the adapter and its users need, by the class of `picows.picows` that has them."""

CONNECT_PARAMETERS = {
    *("enable_auto_pong", "logger_name", "max_frame_size", "max_redirects", "socket_factory"),
    *("ssl_context", "use_aiofastnet", "websocket_handshake_timeout"),
}


def missing_in(module):
    for name, attributes in USED.items():
        if not hasattr(module, name):
            yield f"{name} is gone"
            continue
        for attribute in attributes:
            if not hasattr(getattr(module, name), attribute):
                yield f"{name}.{attribute} is gone"


def claim(differences):
    """Fail with the versions and everything that differs."""
    found = list(differences)
    assert not found, (
        f"picows {picows.__version__} differs from {KNOWN_VERSION}, the version that "
        f"src/headrace/picows_adapter.py knows: {'; '.join(found)}"
    )


class Transport(asyncio.Transport):
    """A transport that collects what is written, with a real socket for picows to set up."""

    def __init__(self, sock):
        super().__init__({"socket": sock})
        self.written = b""
        self.calls = []

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False

    def pause_reading(self):
        self.calls.append("pause_reading")

    def resume_reading(self):
        self.calls.append("resume_reading")

    def set_protocol(self, protocol):
        self.protocol = protocol


class Connection:
    def __init__(self):
        self.calls = []

    def keeps(self, data):
        return False

    def frames_refused(self):
        self.calls.append("frames_refused")

    def heard(self, size):
        pass

    def more_to_read(self):
        self.calls.append("more_to_read")

    def internal_error(self):
        self.calls.append("internal_error")


class Listener(ServerListener):
    def __init__(self):
        self.connection = Connection()
        self.frames = []
        self.reads = []

    def on_ws_connected(self, ws):
        self.ws = ws

    def on_ws_frame(self, ws, frame):
        self.frames.append((frame.msg_type, frame.get_payload_as_bytes(), frame.fin))

    def hand_on(self):
        self.reads.append(len(self.frames))


def masked(payload, opcode=0x82):
    """A frame of a client. With a key of zeros, masking changes nothing."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2)
    return bytes([opcode]) + length + bytes(4) + payload


@pytest.fixture
def sock():
    with socket.socket() as sock:
        yield sock


async def served(sock, data):
    listener, transport = Listener(), Transport(sock)
    try:
        serve(listener, transport, HANDSHAKE + data, frame_bytes_max=FRAME_BYTES_MAX)
    except (TypeError, AttributeError) as error:
        claim([f"its protocol cannot be made or fed ({error})"])
    return listener, transport


def test_the_known_version_is_the_one_that_is_tested():
    constraints = Path(__file__).parent.parent / "constraints.txt"
    pinned = re.search(r"^picows==(.*)$", constraints.read_text("utf-8"), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == KNOWN_VERSION, (
        f"constraints.txt has picows {pinned[1]}: read its WSProtocol, then set KNOWN_VERSION in "
        "src/headrace/picows_adapter.py"
    )


def test_the_installed_version_has_all_that_is_used():
    claim(missing_in(internals))
    parameters = inspect.signature(picows.ws_connect).parameters
    claim(f"ws_connect has no {name}" for name in CONNECT_PARAMETERS - parameters.keys())


def test_a_version_that_differs_is_named_with_everything_that_differs():
    names = {name: getattr(internals, name) for name in USED}
    other = SimpleNamespace(**names | {"WSProtocol": SimpleNamespace(get_buffer=None)})
    del other.WSAutoPingStrategy
    with pytest.raises(AssertionError, match=re.escape(KNOWN_VERSION)) as caught:
        claim(missing_in(other))
    said = str(caught.value)
    assert f"picows {picows.__version__} differs" in said
    assert "WSProtocol.buffer_updated is gone" in said
    assert "WSAutoPingStrategy is gone" in said
    assert "WSProtocol.get_buffer" not in said


async def test_a_protocol_that_takes_other_arguments_is_named(sock, monkeypatch):
    class Other:
        def __init__(self, listener_factory):
            raise NotImplementedError

    monkeypatch.setattr(picows_adapter, "_Protocol", Other)
    with pytest.raises(AssertionError, match=r"cannot be made or fed .*host_port"):
        await served(sock, b"")


async def test_frames_and_the_end_of_each_read_reach_the_listener(sock):
    listener, transport = await served(sock, masked(b"first") + masked(b"second"))
    assert transport.written.startswith(b"HTTP/1.1 101 ")
    assert transport.calls == ["pause_reading", "resume_reading"]
    kind = picows.WSMsgType.BINARY
    assert listener.frames == [(kind, b"first", True), (kind, b"second", True)]
    assert listener.reads[-1] == 2
    assert not listener.connection.calls


async def test_a_frame_that_is_too_large_is_closed_through_the_transport(sock):
    listener, transport = await served(sock, masked(bytes(FRAME_BYTES_MAX + 1)))
    sent = listener.ws.close_handshake.sent
    claim(["it does not refuse a frame that is too large"] if sent is None else [])
    assert listener.ws.is_close_frame_sent
    assert "frames_refused" in listener.connection.calls
    close = transport.written.partition(b"\r\n\r\n")[2]
    assert close[:1] == b"\x88", "a CLOSE that goes through the adapter's transport"
    assert int.from_bytes(close[2:4]) == websocket.TOO_BIG


async def test_pings_are_left_to_the_listener(sock):
    listener, transport = await served(sock, masked(b"hi", 0x89))
    assert [kind for kind, _, _ in listener.frames] == [picows.WSMsgType.PING]
    assert transport.written.endswith(b"\r\n\r\n"), "picows answers no ping by itself"


async def test_no_read_is_larger_than_the_limit(sock):
    _, transport = await served(sock, b"")
    assert 0 < len(transport.protocol.get_buffer(-1)) <= 1 << 17
