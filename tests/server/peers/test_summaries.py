"""Log lines about bad peers: a flood of them is a line for each address, and then a sum once a minute."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.settings import Limits
from headrace.server.peers.connections import _KNOWN_LINES_MAX
from headrace.server.peers.summaries import ADDRESSES_MAX, SUMMARY_S, Summaries
from headrace.wire.figg.messages import encode_auth
from tests.server.peers.test_held_back import TOKENS, Server, serving


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def summaries(clock: Clock, caplog: pytest.LogCaptureFixture) -> Summaries:
    caplog.set_level(logging.WARNING)
    loop: Any = SimpleNamespace(time=clock.time)
    return Summaries(loop, "connections closed")


def test_the_first_of_an_address_is_a_line_and_the_others_are_a_sum_once_a_minute(
    summaries: Summaries, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for minute in range(3):
        for number in range(1000):
            summaries.note(f"192.0.2.1:{number}", "192.0.2.1", f"reason {number}")
        summaries.tick()
        assert len(caplog.messages) == 1 + minute
        clock.now_s += SUMMARY_S
        summaries.tick()
    assert caplog.messages[:2] == [
        "192.0.2.1:0: closing: reason 0",
        "192.0.2.1: 999 more connections closed in 60 s, the last: reason 999",
    ]
    clock.now_s += SUMMARY_S
    summaries.tick()
    summaries.note("192.0.2.1:7", "192.0.2.1", "again")
    assert caplog.messages[4:] == ["192.0.2.1:7: closing: again"], "a quiet address is forgotten"


def test_a_network_of_ipv6_addresses_has_one_line(
    summaries: Summaries, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        summaries.note("peer", f"2001:db8::{number:x}", "bad")
    summaries.close()
    assert caplog.messages == [
        "peer: closing: bad",
        "2001:db8::/64: 99 more connections closed in 0 s, the last: bad",
    ]


def test_very_many_addresses_cost_bounded_memory_and_lines(
    summaries: Summaries, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(ADDRESSES_MAX + 1000):
        summaries.note("peer", f"10.0.{number >> 8}.{number & 255}", "bad")
    assert len(caplog.messages) == ADDRESSES_MAX
    assert len(summaries._addresses) == ADDRESSES_MAX + 1
    clock.now_s += SUMMARY_S
    summaries.tick()
    assert caplog.messages[ADDRESSES_MAX:] == [
        "other addresses: 1000 more connections closed in 60 s, the last: bad"
    ]
    clock.now_s += SUMMARY_S
    summaries.tick()
    assert not summaries._addresses


async def test_a_flood_of_wrong_tokens_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path, Limits(), access=TOKENS) as server:
        for number in range(30):
            await wrong(server, f"guess {number}")
        counted = server.connections.metrics.counts["connections_closed_for_bad_input_total"]
        assert counted == 30
        assert caplog.text.count("closing: ") == 1
    assert "127.0.0.1: 29 more connections closed" in caplog.text


async def wrong(server: Server, token: str) -> None:
    peer = await server.dial()
    peer.send(encode_auth(token))
    await peer.rest()


async def test_some_bad_messages_of_clients_with_a_token_are_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path, Limits(), access=TOKENS) as server:
        for _ in range(_KNOWN_LINES_MAX + 5):
            peer = await server.identified("a")
            peer.send(b"\xff" * 100)
            await peer.rest()
        assert caplog.text.count("closing: ") == _KNOWN_LINES_MAX
