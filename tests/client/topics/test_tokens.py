"""Tokens of topic clients: when they are shown, renewed and refused, and where they are never sent."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import headrace
from headrace import tokens
from headrace.errors import ConfigError, RefusedError
from headrace.session.client import TOKENS_REFUSED_MAX
from headrace.session.topics import client as session
from headrace.tokens import exposure_of
from tests.client.peer import Auth, Peer
from tests.client.refusals import refused

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]


async def test_the_token_comes_before_everything_else(peer: Peer) -> None:
    async with headrace.connect(peer.url, token="abc") as client:
        await client.publish("t", b"x")
    assert peer.received[0] == Auth("abc")
    assert peer.tokens() == ["abc"]


async def test_a_client_without_a_token_shows_none(peer: Peer) -> None:
    async with headrace.connect(peer.url) as client:
        await client.publish("t", b"x")
    assert peer.tokens() == []


async def test_a_function_is_asked_for_each_connection(peer: Peer, until: Until) -> None:
    numbers = itertools.count()

    async def asynchronous() -> str:
        await asyncio.sleep(0)
        return f"token{next(numbers)}"

    async with headrace.connect(
        peer.url, token=asynchronous, backoff=lambda attempt: 0.001
    ) as client:
        peer.drop()
        await until(lambda: peer.accepted == 2)
        await client.publish("t", b"x")
    assert peer.tokens() == ["token0", "token1"]


async def test_a_function_is_asked_again_before_its_token_expires(
    peer: Peer, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RENEW_S_MIN", 0.0)
    peer.valid_ms = 50
    numbers = itertools.count()
    async with headrace.connect(peer.url, token=lambda: f"token{next(numbers)}") as client:
        subscription = client.subscribe("t", offset=0)
        await until(lambda: len(peer.tokens()) > 3)
        await client.publish("t", b"x")
        assert (await anext(subscription)).payload == b"x"
    assert peer.accepted == 1
    assert peer.tokens()[:3] == ["token0", "token1", "token2"]


async def test_a_function_that_fails_at_a_renewal_is_asked_again(
    peer: Peer, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RENEW_S_MIN", 0.0)
    monkeypatch.setattr("headrace.client.link.RENEW_RETRY_S", 0.01)
    peer.valid_ms = 50
    numbers = itertools.count()

    def token() -> str:
        number = next(numbers)
        if number == 1:
            raise OSError("not now")
        return f"token{number}"

    async with headrace.connect(peer.url, token=token):
        await until(lambda: len(peer.tokens()) > 1)
    assert peer.accepted == 1
    assert peer.tokens()[:2] == ["token0", "token2"]


async def test_a_function_that_fails_delays_the_connection(peer: Peer) -> None:
    def token() -> str:
        raise OSError("the issuer is down")

    error = await refused(
        lambda timeout_s: headrace.connect(peer.url, token=token, connect_timeout_s=timeout_s),
        "the issuer is down",
    )
    assert "function for the token" in str(error)
    assert peer.accepted == 0


async def test_a_function_that_returns_no_token_is_named(peer: Peer) -> None:
    await refused(
        lambda timeout_s: headrace.connect(
            peer.url, token=lambda: None, connect_timeout_s=timeout_s
        ),
        "a token is str, not NoneType",
    )


async def test_a_refused_token_is_reported_once(peer: Peer) -> None:
    peer.refused_tokens["bad"] = 1, "unknown token"
    with pytest.raises(RefusedError, match="unknown token") as raised:
        await headrace.connect(peer.url, token="bad")
    assert raised.value.kind == "auth"
    assert "bad" not in str(raised.value)
    assert peer.accepted == 1


async def test_another_token_is_tried_a_few_times(peer: Peer) -> None:
    peer.refused_tokens = {f"token{number}": (1, "expired") for number in range(100)}
    numbers = itertools.count()
    with pytest.raises(RefusedError, match="expired"):
        await headrace.connect(
            peer.url, token=lambda: f"token{next(numbers)}", backoff=lambda attempt: 0.001
        )
    assert peer.accepted == TOKENS_REFUSED_MAX


async def test_a_client_whose_access_ends_fails_everything_that_waits(
    peer: Peer, until: Until
) -> None:
    peer.acks = False
    async with headrace.connect(peer.url, token="abc") as client:
        subscription = client.subscribe("t")
        await subscription.attached()
        publish = client.publish_nowait("u", b"x")
        waiting = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        peer.refuse(1, "revoked")
        with pytest.raises(RefusedError, match="revoked"):
            await publish
        with pytest.raises(RefusedError, match="revoked"):
            await waiting
        with pytest.raises(RefusedError, match="revoked"):
            await client.publish("t", b"y")
        await until(lambda: client.state == "refused")
    assert peer.accepted == 1


async def test_a_handler_whose_subscription_fails_is_reported(peer: Peer, until: Until) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    async with headrace.connect(peer.url, token="abc") as client:
        await client.subscribe("t", lambda message: None).attached()
        peer.refuse(1, "revoked")
        await until(lambda: reports)
    assert isinstance(reports[0]["exception"], RefusedError)


async def test_a_server_that_cannot_check_now_is_asked_again(peer: Peer, until: Until) -> None:
    peer.refused_tokens["abc"] = 2, "too many attempts"
    client = headrace.connect(
        peer.url, token="abc", backoff=lambda attempt: 0.001, connect_timeout_s=None
    )
    async with client:
        await until(lambda: peer.accepted > 4)
        peer.refused_tokens.clear()
        await client.connected()


async def test_a_server_without_the_extension_is_named(peer: Peer) -> None:
    peer.knows_tokens = False
    await refused(
        lambda timeout_s: headrace.connect(peer.url, token="abc", connect_timeout_s=timeout_s),
        "does not know the token extension",
    )


async def test_a_token_is_not_sent_where_others_can_read_it(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but loopback can be reached in a test, so loopback counts as another machine here."""
    monkeypatch.setattr(tokens, "_is_loopback", lambda host: False)
    with pytest.raises(RefusedError, match="insecure_token=True"):
        await headrace.connect(peer.url, token="abc")
    assert peer.received == []
    async with headrace.connect(peer.url, token="abc", insecure_token=True):
        assert peer.tokens() == ["abc"]
    async with headrace.connect(peer.url):
        pass


async def test_each_connection_is_checked_anew(
    peer: Peer, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with headrace.connect(peer.url, token="abc", backoff=lambda attempt: 0.001) as client:
        monkeypatch.setattr(tokens, "_is_loopback", lambda host: False)
        peer.drop()
        await until(lambda: client.state == "refused")
    assert peer.tokens() == ["abc"]


@pytest.mark.parametrize(
    ("peer_name", "is_exposed"),
    [
        (("127.0.0.1", 1), False),
        (("127.9.9.9", 1), False),
        (("::1", 1, 0, 0), False),
        (("::ffff:127.0.0.1", 1, 0, 0), False),
        (("::ffff:10.0.0.1", 1, 0, 0), True),
        (("10.0.0.1", 1), True),
        (("0.0.0.0", 1), True),
        (("fe80::1%eth0", 1, 0, 2), True),
        (("localhost", 1), True),
        (None, True),
        ("", True),
    ],
)
def test_only_addresses_of_this_machine_are_safe_without_tls(
    peer_name: Any, is_exposed: bool
) -> None:
    assert bool(exposure_of(peer_name)) == is_exposed


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "é", b"abc", 7, "x" * 8193])
def test_a_wrong_token_is_refused_at_once_and_not_shown(token: Any) -> None:
    with pytest.raises(ConfigError, match=r"^token: ") as raised:
        headrace.connect("figg://127.0.0.1:1", token=token)
    assert repr(token) not in str(raised.value)


def test_options_do_not_show_their_token() -> None:
    assert "s3cret" not in repr(headrace.client.Options(token="s3cret"))
