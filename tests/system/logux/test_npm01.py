"""Real clients of the 0.1 npm packages against a real server."""

import hashlib
from pathlib import Path

from headrace.testing import ServerProcess
from tests.system.logux.conftest import logux_url
from tests.system.logux.support import Host


def numbered(first: int, last: int) -> list[dict[str, object]]:
    return [{"type": "n", "n": n} for n in range(first, last)]


def start(host: Host, client: str, url: str, **options: object) -> None:
    host.do("make", client, url=url, **options)
    host.do("connect", client)


def settle(host: Host, position: int) -> None:
    """Wait until both clients know that they have the server's log up to `position`, including own events."""
    for client in ("a", "b"):
        host.wait_position(client, position)


def test_events_go_both_ways_in_order(npm01: Host, url: str) -> None:
    start(npm01, "a", url)
    start(npm01, "b", url)
    npm01.do("add", "a", events=numbered(0, 500))
    found = npm01.wait_events("b", 500)
    assert [one["n"] for one in found] == list(range(500))
    npm01.do("add", "b", events=numbered(500, 510))
    found = npm01.wait_events("a", 510)
    assert [one["n"] for one in found] == list(range(510))
    assert len(npm01.events("b")) == 510


def test_what_was_added_offline_comes_later(npm01: Host, url: str) -> None:
    npm01.do("make", "a", url=url)
    npm01.do("add", "a", events=numbered(0, 20))
    start(npm01, "b", url)
    npm01.do("connect", "a")
    assert [one["n"] for one in npm01.wait_events("b", 20)] == list(range(20))
    settle(npm01, 20)
    npm01.disconnect("b")
    npm01.do("setClock", "b", fast=5000)
    npm01.do("add", "a", events=numbered(20, 30))
    npm01.do("add", "b", events=numbered(100, 105))
    npm01.do("connect", "b")
    npm01.wait_events("a", 35)
    npm01.wait_events("b", 35)
    for client in ("a", "b"):
        numbers = sorted(one["n"] for one in npm01.events(client))
        assert numbers == [*range(30), *range(100, 105)]


def test_a_server_that_was_killed_goes_on(npm01: Host, server: ServerProcess, url: str) -> None:
    start(npm01, "a", url)
    start(npm01, "b", url)
    npm01.do("add", "a", events=numbered(0, 50))
    npm01.wait_events("b", 50)
    settle(npm01, 50)
    server.kill()
    npm01.do("setClock", "b", fast=-70)
    npm01.do("add", "a", events=numbered(50, 60))
    npm01.do("add", "b", events=numbered(200, 210))
    server.start()
    npm01.wait_events("a", 70)
    npm01.wait_events("b", 70)
    for client in ("a", "b"):
        numbers = sorted(one["n"] for one in npm01.events(client))
        assert numbers == [*range(60), *range(200, 210)]


def test_a_client_that_is_cut_off_again_and_again_gets_everything_once(
    npm01: Host, url: str
) -> None:
    start(npm01, "a", url)
    start(npm01, "b", url)
    for round_ in range(5):
        writer, reader = ("a", "b") if round_ % 2 else ("b", "a")
        npm01.do("add", writer, events=numbered(round_ * 20, round_ * 20 + 20))
        npm01.wait_events(reader, 20 * round_ + 20)
        settle(npm01, 20 * round_ + 20)
        # Both clocks have another error on the next connection.
        npm01.do("setClock", reader, fast=100 * round_)
        npm01.do("cut", reader)
        npm01.do("setClock", writer, fast=-3 * round_)
        npm01.do("cut", writer)
        for client in ("a", "b"):
            npm01.wait_reconnected(client, round_ + 1)
    npm01.do("add", "a", events=numbered(100, 101))
    npm01.wait_events("b", 101)
    for client in ("a", "b"):
        assert sorted(one["n"] for one in npm01.events(client)) == list(range(101))


def test_a_client_that_disconnects_after_a_catch_up_lives_on(npm01: Host, url: str) -> None:
    """A `ping` that reaches the client at that moment makes it throw, which ends the process."""
    start(npm01, "a", url)
    npm01.do("add", "a", events=numbered(0, 500))
    npm01.wait_position("a", 500)
    readers = [f"reader {n}" for n in range(6)]
    for reader in readers:
        npm01.do("make", reader, url=url)
        npm01.do("disconnectAfter", reader, count=500)
        npm01.do("connect", reader)
        npm01.wait(f"end of {reader}", lambda reader=reader: npm01.of(reader, "closed"))
        assert len(npm01.events(reader)) == 500
    for reader in readers:
        assert npm01.facts(reader)["otherSynced"] == 500


def test_a_client_that_lost_its_log_gets_its_own_events(npm01: Host, url: str) -> None:
    start(npm01, "a", url)
    npm01.do("add", "a", events=numbered(0, 20))
    npm01.wait_position("a", 20)
    npm01.disconnect("a")
    npm01.do("connect", "a")
    npm01.wait_reconnected("a", 1)
    npm01.disconnect("a")
    assert len(npm01.events("a")) == 20, "it has them"
    start(npm01, "a", url)
    assert [one["n"] for one in npm01.wait_events("a", 40)[20:]] == list(range(20))


def test_another_version_is_refused_for_good(npm01: Host, url: str) -> None:
    start(npm01, "a", url, protocol=[7, 0], credentials=1)
    npm01.wait("error", lambda: npm01.of("a", "error"))
    assert npm01.of("a", "error") == ["wrong-protocol"]
    assert npm01.of("a", "options") == [{"supported": [0], "used": [7, 0]}]
    assert not npm01.facts("a")["reconnecting"]


def test_wrong_credentials_are_refused_for_good(npm01: Host, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    digest = hashlib.sha256(b"right").hexdigest()
    config.write_text(f'[[access.token]]\nname = "a"\nsha256 = "{digest}"\n')
    with ServerProcess(tmp_path / "guarded", f"--config={config}") as server:
        start(npm01, "a", logux_url(server), credentials={"token": "wrong"})
        npm01.wait("error", lambda: npm01.of("a", "error"))
        assert npm01.of("a", "error") == ["wrong-credentials"]
        assert not npm01.facts("a")["reconnecting"]
        start(npm01, "b", logux_url(server), credentials={"token": "right"})
        npm01.wait_state("b", "synchronized")


def test_an_event_whose_answer_was_lost_is_stored_once(npm01: Host, url: str) -> None:
    # A client that corrects its clock sends the event again with another time, which makes it another event.
    start(npm01, "a", url, fixTime=False, ping=10_000, timeout=2000)
    start(npm01, "b", url)
    npm01.wait_state("a", "synchronized")
    npm01.do("deafen", "a")
    npm01.do("add", "a", events=numbered(0, 5))
    npm01.wait_events("b", 5)
    npm01.do("cut", "a")
    npm01.wait_state("a", "synchronized", 2)
    npm01.do("add", "a", events=numbered(5, 6))
    npm01.wait_events("b", 6)
    assert [one["n"] for one in npm01.events("b")] == [0, 1, 2, 3, 4, 5]


def test_pings_are_answered(npm01: Host, url: str) -> None:
    start(npm01, "a", url, ping=50, timeout=2000)
    npm01.wait("pongs", lambda: npm01.of("a", "message").count(["pong", 0]) >= 3)
    assert npm01.of("a", "error") == []
