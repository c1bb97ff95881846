"""Tokens in the greetings of Logux and channels: a client shows the present one, and tries another."""

from typing import Any

import msgspec
import pytest

from headrace.session.channel.client import ChannelClientSession
from headrace.session.client import (
    AUTH,
    TOKENS_REFUSED_MAX,
    ConnectionRefused,
    ConnectionState,
    Finished,
)
from headrace.session.logux.client import LoguxClientSession
from headrace.wire import channel
from headrace.wire.logux import messages as logux


class Logux:
    def __init__(self, credentials: Any = None) -> None:
        self.session = LoguxClientSession("1:a", credentials)

    def shown(self) -> Any:
        [data] = self.session.data_to_send(1 << 20, 0.0)
        message = logux.decode(data, binary=True)
        assert isinstance(message, logux.Connect)
        return message.options

    def answer(self) -> list[Any]:
        message = ["connected", [0, 0], "server", [0, 0]]
        return self.session.receive_data([logux.pack(message, binary=True)], 0.0)

    def refuse(self) -> list[Any]:
        message = ["error", "Wrong credentials", "auth"]
        return self.session.receive_data([logux.pack(message, binary=True)], 0.0)


class Channel:
    def __init__(self, credentials: Any = None) -> None:
        self.session = ChannelClientSession("p", credentials, is_shared=True)

    def shown(self) -> Any:
        [data] = self.session.data_to_send(1 << 20, 0.0)
        message = channel.decode(data)
        assert isinstance(message, channel.Hello)
        return message.token

    def answer(self) -> list[Any]:
        return self.hear(
            {"type": "welcome", "processor": "p", "version": channel.VERSION, "ping_s": 15.0}
        )

    def refuse(self) -> list[Any]:
        return self.hear(
            {"type": "error", "code": "wrong-credentials", "text": "no", "retry": False}
        )

    def hear(self, answer: dict[str, Any]) -> list[Any]:
        return self.session.receive_data([msgspec.msgpack.encode(answer)], 0.0)


@pytest.fixture(params=[Logux, Channel])
def kind(request: pytest.FixtureRequest) -> type[Logux] | type[Channel]:
    found: type[Logux] | type[Channel] = request.param
    return found


def connect(peer: Logux | Channel, token: str | None, *, changes: bool) -> Any:
    peer.session.connecting()
    peer.session.token = token
    peer.session.token_changes = changes
    peer.session.opened(0.0)
    return peer.shown()


def test_each_connection_shows_its_own_token(kind: type[Logux] | type[Channel]) -> None:
    peer = kind()
    for token in ("first", "second"):
        assert connect(peer, token, changes=True) == token
        peer.session.disconnected()


def test_other_credentials_are_shown_as_they_are(kind: type[Logux] | type[Channel]) -> None:
    assert connect(kind({"token": "abc"}), None, changes=False) == {"token": "abc"}


def test_a_refused_token_ends_the_client(kind: type[Logux] | type[Channel]) -> None:
    peer = kind()
    connect(peer, "abc", changes=False)
    refused, _ = peer.refuse()
    assert isinstance(refused, ConnectionRefused) and refused.kind == AUTH
    peer.session.disconnected()
    assert peer.session.state is ConnectionState.REFUSED


def test_another_token_is_tried_a_few_times(kind: type[Logux] | type[Channel]) -> None:
    peer = kind()
    for attempt in range(1, TOKENS_REFUSED_MAX + 1):
        connect(peer, f"token {attempt}", changes=True)
        kinds = [type(event) for event in peer.refuse()]
        is_last = attempt == TOKENS_REFUSED_MAX
        assert kinds == ([ConnectionRefused, Finished] if is_last else [Finished])
        peer.session.disconnected()
    assert peer.session.state is ConnectionState.REFUSED


def test_a_token_that_expires_later_is_replaced(kind: type[Logux] | type[Channel]) -> None:
    peer = kind()
    for attempt in range(2 * TOKENS_REFUSED_MAX):
        connect(peer, f"token {attempt}", changes=True)
        peer.answer()
        assert peer.session.state is ConnectionState.CONNECTED
        assert [type(event) for event in peer.refuse()] == [Finished]
        peer.session.disconnected()
        assert peer.session.state is ConnectionState.DISCONNECTED
