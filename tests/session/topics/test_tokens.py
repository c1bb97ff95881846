"""Tokens in Figg and Wombat sessions: both sides are connected in memory. Time is passed in."""

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from headrace.model import TOKEN_BYTES_MAX
from headrace.session.client import (
    AUTH,
    TOKENS_REFUSED_MAX,
    Broken,
    ConnectionRefused,
    ConnectionState,
    Finished,
)
from headrace.session.figg import FiggClientSession, FiggServerSession
from headrace.session.server import AttachCommand, Authenticate, Close, Publish
from headrace.session.topics.client import AUTH_ANSWER_S, RENEW_AT
from headrace.session.wombat import WombatClientSession, WombatServerSession
from headrace.wire import tokens
from headrace.wire.figg import messages as figg
from headrace.wire.wombat import messages as wombat

BIG = 1 << 30


class Pair:
    """A client session and the server sessions of its connections."""

    def __init__(self, protocol: str) -> None:
        self.is_figg = protocol == "figg"
        self.client = FiggClientSession() if self.is_figg else WombatClientSession()
        self.server: Any = None
        self.codec: Any = figg if self.is_figg else wombat

    def connect(self, token: str | None, *, changes: bool = False, now: float = 0.0) -> None:
        self.server = FiggServerSession() if self.is_figg else WombatServerSession(now, 10.0)
        self.client.connecting()
        self.client.token = token
        self.client.token_changes = changes
        self.client.opened(now)

    def to_server(self, now: float = 0.0) -> list[Any]:
        """Let the server receive everything that the client sends; return the server's commands."""
        return self.feed(self.client.data_to_send(BIG, now), now)

    def feed(self, frames: list[bytes], now: float = 0.0) -> list[Any]:
        if self.is_figg:
            return list(self.server.receive_data(b"".join(frames)))
        return list(self.server.receive_messages(frames, now))

    def to_client(self, now: float = 0.0) -> list[Any]:
        data = self.server.data_to_send()
        if not data:
            return []
        chunks = [data] if self.is_figg else list(unframed(data))
        return list(self.client.receive_data(chunks, now))


def unframed(data: bytes) -> Iterator[bytes]:
    while data:
        assert data[0] == 0x82 and data[1] < 127
        begin = 2 if data[1] < 126 else 4
        end = begin + (data[1] if begin == 2 else int.from_bytes(data[2:4], "big"))
        yield data[begin:end]
        data = data[end:]


@pytest.fixture(params=["figg", "wombat"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def admitted(pair: Pair, token: str = "abc", valid_ms: int = 0, **options: Any) -> None:
    pair.connect(token, **options)
    assert pair.to_server() == [Authenticate(token)]
    pair.server.authenticated(valid_ms)
    assert pair.to_client() == []


def test_a_client_without_a_token_sends_none(pair: Pair) -> None:
    pair.connect(None)
    pair.client.attach("t", 0)
    assert [type(one) for one in pair.to_server()] == [AttachCommand]


def test_a_client_shows_its_token_first_and_everything_else_after_the_answer(pair: Pair) -> None:
    pair.client.attach("t", 0)
    pair.client.publish("t", b"x")
    pair.connect("abc")
    pair.client.publish("t", b"y")
    assert pair.to_server() == [Authenticate("abc")]
    assert pair.client.state is ConnectionState.CONNECTING
    pair.server.authenticated()
    assert pair.to_client() == []
    assert pair.client.state is ConnectionState.CONNECTED
    publish, attach = pair.to_server()
    assert isinstance(publish, Publish) and isinstance(attach, AttachCommand)
    assert [record[4:] for record in publish.records["t"]] == [b"x", b"y"]


def test_each_connection_shows_a_token(pair: Pair) -> None:
    admitted(pair, "first")
    pair.client.disconnected()
    admitted(pair, "second")


def test_commands_come_in_order_and_publishes_of_the_read_come_behind_its_token(pair: Pair) -> None:
    pair.connect(None)
    codec = pair.codec
    frames = [
        codec.encode_attach("before", None),
        codec.encode_publish("t", 0, b"x"),
        codec.encode_auth("abc"),
        codec.encode_attach("after", None),
    ]
    before, shown, after, publish = pair.feed(frames)
    assert (before.topic, shown, after.topic) == ("before", Authenticate("abc"), "after")
    assert isinstance(publish, Publish)


def test_a_refused_message_loses_no_publish_that_came_with_a_token(pair: Pair) -> None:
    pair.connect(None)
    codec = pair.codec
    frames = [codec.encode_auth("abc"), codec.encode_publish("t", 0, b"x"), b"\xc1" * 8]
    kinds = [type(one) for one in pair.feed(frames)]
    assert kinds == [Authenticate, Publish, Close]


def test_a_token_never_appears_in_a_text() -> None:
    shown = [tokens.Auth("s3cret"), Authenticate("s3cret")]
    assert "s3cret" not in f"{shown} {shown[0]} {shown[1]}"


def test_a_refused_token_ends_the_client(pair: Pair) -> None:
    pair.connect("abc")
    pair.to_server()
    close = pair.server.refuse_credentials("unknown token")
    assert isinstance(close, Close) and close.reason == "unknown token"
    refused, finished = pair.to_client()
    assert refused == ConnectionRefused(AUTH, "the server refuses the credentials: unknown token")
    assert isinstance(finished, Finished)
    pair.client.disconnected()
    assert pair.client.state is ConnectionState.REFUSED


def test_a_client_without_a_token_learns_that_one_is_needed(pair: Pair) -> None:
    pair.connect(None)
    pair.client.attach("t", 0)
    pair.to_server()
    pair.server.refuse_credentials("a token is needed")
    refused, _ = pair.to_client()
    assert isinstance(refused, ConnectionRefused) and "a token is needed" in refused.reason


def test_after_a_refusal_a_client_with_changing_tokens_asks_for_another(pair: Pair) -> None:
    for attempt in range(TOKENS_REFUSED_MAX):
        pair.connect(f"token {attempt}", changes=True)
        pair.to_server()
        pair.server.refuse_credentials("expired")
        last = pair.to_client()[-1]
        is_last = attempt == TOKENS_REFUSED_MAX - 1
        assert isinstance(last, Finished if is_last else Broken)
        pair.client.disconnected()
    assert pair.client.state is ConnectionState.REFUSED


def test_an_accepted_token_forgives_refused_tokens(pair: Pair) -> None:
    for attempt in range(2 * TOKENS_REFUSED_MAX):
        pair.connect(f"bad {attempt}", changes=True)
        pair.to_server()
        pair.server.refuse_credentials("expired")
        assert isinstance(pair.to_client()[-1], Broken)
        pair.client.disconnected()
        admitted(pair, f"good {attempt}", changes=True)
        pair.client.disconnected()


def test_the_same_token_is_not_refused_twice(pair: Pair) -> None:
    for kind in (Broken, Finished):
        pair.connect("same", changes=True)
        pair.to_server()
        pair.server.refuse_credentials("expired")
        assert isinstance(pair.to_client()[-1], kind)
        pair.client.disconnected()


def test_a_server_that_cannot_check_now_is_asked_again(pair: Pair) -> None:
    for _ in range(2 * TOKENS_REFUSED_MAX):
        pair.connect("abc")
        pair.to_server()
        pair.server.refuse_credentials("too many attempts", tokens.LATER)
        [broken] = pair.to_client()
        assert isinstance(broken, Broken) and "too many attempts" in broken.reason
        pair.client.disconnected()


def test_a_forbidden_operation_ends_the_client_whatever_its_next_token(pair: Pair) -> None:
    admitted(pair, changes=True)
    pair.server.refuse_credentials('token:a may not subscribe to "t"', tokens.FORBIDDEN)
    refused, _ = pair.to_client()
    assert refused == ConnectionRefused(AUTH, 'token:a may not subscribe to "t"')


def test_accepted_publishes_are_acknowledged_before_the_refusal(pair: Pair) -> None:
    admitted(pair)
    pair.client.publish("t", b"x")
    [publish] = pair.to_server()
    pair.to_client()
    pair.server.refuse_credentials("revoked")
    assert pair.to_client() == []
    pair.server.stored(publish.unit)
    acknowledged, refused, _ = pair.to_client()
    assert acknowledged.publishes == 1
    assert isinstance(refused, ConnectionRefused)
    assert pair.client.unacknowledged == 0


def test_the_client_renews_a_token_before_it_expires(pair: Pair) -> None:
    admitted(pair, valid_ms=10_000)
    assert pair.client.renew_at == RENEW_AT * 10
    pair.to_server(1.0)
    pair.client.renew("next", 8.0)
    assert pair.client.renew_at == inf
    assert pair.to_server(8.0) == [Authenticate("next")]
    pair.server.authenticated(10_000)
    assert pair.to_client(8.0) == []
    assert pair.client.renew_at == 16.0
    assert pair.client.state is ConnectionState.CONNECTED


def test_a_token_without_end_is_not_renewed(pair: Pair) -> None:
    admitted(pair)
    assert pair.client.renew_at == inf


def test_a_token_that_is_refused_at_its_renewal_ends_the_connection(pair: Pair) -> None:
    admitted(pair, valid_ms=10_000)
    pair.client.renew("next", 8.0)
    pair.to_server(8.0)
    pair.server.refuse_credentials("unknown token")
    assert isinstance(pair.to_client(8.0)[0], ConnectionRefused)


def test_a_renewal_without_connection_only_remembers_the_token(pair: Pair) -> None:
    admitted(pair)
    pair.client.disconnected()
    pair.client.renew("next", 1.0)
    assert pair.client.data_to_send(BIG, 1.0) == []


def test_a_server_that_hangs_up_is_said_not_to_know_tokens(pair: Pair) -> None:
    pair.connect("abc")
    pair.to_server()
    assert pair.client.hung_up("closed", 0.1) == []
    text = pair.client.explain("the server closed the connection")
    assert "does not know the token extension" in text and text.startswith("the server closed")
    pair.client.disconnected()
    admitted(pair)
    assert pair.client.explain("closed") == "closed"


def test_a_server_that_says_nothing_is_given_up(pair: Pair) -> None:
    pair.connect("abc")
    assert pair.client.tick_at <= AUTH_ANSWER_S
    assert pair.client.tick(AUTH_ANSWER_S - 0.1) == []
    [broken] = pair.client.tick(AUTH_ANSWER_S)
    assert isinstance(broken, Broken) and "does not know the token extension" in broken.reason


def test_an_unanswered_renewal_breaks_the_connection(pair: Pair) -> None:
    admitted(pair)
    pair.client.renew("next", 1.0)
    assert any(isinstance(one, Broken) for one in pair.client.tick(1.0 + AUTH_ANSWER_S))


def test_nothing_counts_before_the_answer(pair: Pair) -> None:
    pair.client.attach("t", 0)
    pair.connect("abc")
    pair.server.attached("t", 0, 0, True)
    [broken] = pair.to_client()
    assert isinstance(broken, Broken)
    assert pair.client.state is ConnectionState.CONNECTING


def test_a_token_over_the_limit_is_bad_input(pair: Pair) -> None:
    pair.connect(None)
    longest = "x" * TOKEN_BYTES_MAX
    assert pair.feed([pair.codec.encode_auth(longest)]) == [Authenticate(longest)]
    frame = pair.codec.encode_auth("é" + longest[:-1])
    assert [type(one) for one in pair.feed([frame])] == [Close]
