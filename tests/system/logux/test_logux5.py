"""Real clients of `@logux/client` (protocol 5) against a real server."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess
from tests.system.logux.conftest import logux_url
from tests.system.logux.support import Host

CHANNEL = "posts/1"


def numbered(first: int, last: int, channel: str = CHANNEL) -> list[dict[str, object]]:
    return [{"type": "n", "n": n, "channel": channel} for n in range(first, last)]


def start(host: Host, client: str, url: str, **options: object) -> None:
    host.do("make", client, url=url, **options)
    host.do("connect", client)


def subscribe(host: Host, client: str, channel: str = CHANNEL) -> None:
    action = {"type": "logux/subscribe", "channel": channel}
    before = host.of(client, "processed").count(action)
    host.do("sync", client, events=[action])
    host.wait("subscription", lambda: host.of(client, "processed").count(action) > before)


def publish(host: Host, client: str, events: list[dict[str, object]]) -> None:
    before = len(host.of(client, "processed"))
    host.do("sync", client, events=events)
    host.wait("processed", lambda: len(host.of(client, "processed")) >= before + len(events))


def numbers(host: Host, client: str) -> list[Any]:
    return [one["n"] for one in host.events(client)]


def test_a_channel_goes_to_its_subscribers_in_order(logux5: Host, url: str) -> None:
    for client in "abc":
        start(logux5, client, url)
    subscribe(logux5, "b")
    subscribe(logux5, "c", "posts/2")
    publish(logux5, "a", numbered(0, 500))
    publish(logux5, "a", numbered(1000, 1003, "posts/2"))
    logux5.wait_events("b", 500)
    assert numbers(logux5, "b") == list(range(500))
    logux5.wait_events("c", 3)
    assert numbers(logux5, "c") == [1000, 1001, 1002]
    assert numbers(logux5, "a") == [*range(500), 1000, 1001, 1002]  # its own actions
    assert {tuple(one) for one in logux5.of("b", "channels")} == {(CHANNEL,)}
    sent = dict(zip(numbers(logux5, "a"), logux5.of("a", "id"), strict=True))
    assert logux5.of("b", "id") == [sent[n] for n in range(500)]


def test_the_history_comes_first_and_oldest_first(logux5: Host, url: str) -> None:
    start(logux5, "a", url)
    publish(logux5, "a", numbered(0, 50))
    start(logux5, "b", url)
    logux5.do("sync", "b", events=[{"type": "logux/subscribe", "channel": CHANNEL}])
    logux5.do("sync", "a", events=numbered(50, 60))
    logux5.wait_events("b", 60)
    assert numbers(logux5, "b") == list(range(60))
    told = [
        one for one in logux5.seen if one["client"] == "b" and {"event", "processed"} & one.keys()
    ]
    assert [one["event"]["n"] for one in told[:50]] == list(range(50))


def test_a_client_goes_on_where_it_was(logux5: Host, server: ServerProcess, url: str) -> None:
    start(logux5, "a", url)
    start(logux5, "b", url)
    start(logux5, "c", url)
    subscribe(logux5, "b")
    subscribe(logux5, "c")
    publish(logux5, "a", numbered(0, 10))
    logux5.wait_events("b", 10)
    logux5.wait_events("c", 10)
    for round_ in range(3):
        if round_ == 1:
            server.kill()
        else:
            logux5.do("cut", "b")
            logux5.do("cut", "c")
        first = 10 + 10 * round_
        logux5.do("sync", "a", events=numbered(first, first + 10))
        if round_ == 1:
            server.start()
        logux5.wait_events("b", first + 10)
        logux5.wait_events("c", first + 10)
    assert numbers(logux5, "b") == list(range(40))
    assert numbers(logux5, "c") == list(range(40))


def test_one_that_got_nothing_yet_misses_nothing_and_gets_nothing_twice(
    logux5: Host, url: str
) -> None:
    start(logux5, "a", url)
    publish(logux5, "a", numbered(0, 3))
    start(logux5, "b", url)
    subscribe(logux5, "b")
    subscribe(logux5, "b", "quiet")
    logux5.wait_events("b", 3)
    logux5.disconnect("b")
    publish(logux5, "a", numbered(3, 6, "quiet"))
    logux5.do("connect", "b")
    logux5.wait_events("b", 6)
    publish(logux5, "a", numbered(6, 7))
    logux5.wait_events("b", 7)
    assert numbers(logux5, "b") == list(range(7))


def test_what_was_added_offline_comes_later(logux5: Host, url: str) -> None:
    start(logux5, "b", url)
    subscribe(logux5, "b")
    logux5.do("make", "a", url=url)
    logux5.do("sync", "a", events=numbered(0, 20))
    logux5.do("connect", "a")
    logux5.wait_events("b", 20)
    assert numbers(logux5, "b") == list(range(20))


def test_an_action_whose_answer_was_lost_is_delivered_once(logux5: Host, url: str) -> None:
    start(logux5, "a", url)
    start(logux5, "b", url)
    subscribe(logux5, "b")
    logux5.wait_state("a", "synchronized")
    logux5.do("deafen", "a")
    logux5.do("sync", "a", events=numbered(0, 5))
    logux5.wait_events("b", 5)
    logux5.do("cut", "a")  # it sends them again after it reconnects
    logux5.wait("processed", lambda: len(logux5.of("a", "processed")) == 5)
    publish(logux5, "a", numbered(5, 6))
    logux5.wait_events("b", 6)
    assert numbers(logux5, "b") == list(range(6))


def test_a_client_that_is_cut_off_within_a_history_asks_again(logux5: Host, url: str) -> None:
    start(logux5, "a", url)
    events = [{**one, "text": "t" * 4000} for one in numbered(0, 1500)]
    publish(logux5, "a", events)
    start(logux5, "b", url)
    logux5.do("sync", "b", events=[{"type": "logux/subscribe", "channel": CHANNEL}])
    logux5.wait_events("b", 1)
    logux5.do("cut", "b")
    logux5.wait("subscription", lambda: logux5.of("b", "processed"))
    publish(logux5, "a", numbered(1500, 1501))
    logux5.wait("last event", lambda: 1500 in numbers(logux5, "b"))
    assert numbers(logux5, "b") == list(range(1501))


def test_actions_that_came_late_come_once(logux5: Host, url: str) -> None:
    """Clients name the newest action that they have; actions that arrived after it may be older."""
    start(logux5, "b", url)
    subscribe(logux5, "b")
    for client in ("early", "late"):
        logux5.do("make", client, url=url)
        events = numbered(*((0, 2) if client == "early" else (2, 4)))
        logux5.do("sync", client, events=events)
        logux5.wait_events(client, 2)
    for client in ("late", "early"):
        logux5.do("connect", client)
        logux5.wait("processed", lambda client=client: len(logux5.of(client, "processed")) == 2)
    logux5.wait_events("b", 4)
    for round_ in range(3):
        logux5.do("cut", "b")
        publish(logux5, "early", numbered(10 + round_, 11 + round_))
        logux5.wait("last", lambda last=10 + round_: last in numbers(logux5, "b"))
    assert numbers(logux5, "b") == [2, 3, 0, 1, 10, 11, 12]


def test_who_unsubscribes_gets_no_more(logux5: Host, url: str) -> None:
    start(logux5, "a", url)
    start(logux5, "b", url)
    subscribe(logux5, "b")
    subscribe(logux5, "b", "other")
    publish(logux5, "b", [{"type": "logux/unsubscribe", "channel": CHANNEL}])
    publish(logux5, "a", numbered(0, 3))
    publish(logux5, "a", numbered(3, 4, "other"))
    logux5.wait_events("b", 1)
    assert numbers(logux5, "b") == [3]


def test_actions_of_others_are_undone(logux5: Host, url: str) -> None:
    start(logux5, "a", url)
    start(logux5, "b", url)
    subscribe(logux5, "b")
    event = {"type": "n", "n": 0, "channel": CHANNEL}
    logux5.do("sync", "a", events=[event], meta={"id": "1 a:other:tab 0"})
    logux5.wait("undo", lambda: logux5.of("a", "undone"))
    assert logux5.of("a", "reason") == ["denied"]
    publish(logux5, "a", numbered(1, 2))
    logux5.wait_events("b", 1)
    assert numbers(logux5, "b") == [1]


def test_a_client_stays_with_a_server_without_tls(logux5: Host, url: str) -> None:
    start(logux5, "a", url)
    logux5.wait_state("a", "synchronized")
    publish(logux5, "a", numbered(0, 1))
    assert logux5.of("a", "state")[-1] != "disconnected"


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"protocol": 1}, "wrong-protocol", {"supported": 5, "used": 1}),
        ({"protocol": 4}, "wrong-protocol", {"supported": 5, "used": 4}),
        ({"subprotocol": 2}, "wrong-subprotocol", {"supported": 3, "used": 2}),
        ({"token": "wrong"}, "wrong-credentials", None),
        ({"token": "right", "userId": "someone"}, "wrong-credentials", None),
    ],
)
def test_who_is_refused_does_not_come_again(
    logux5: Host, tmp_path: Path, options: dict[str, Any], error: str, facts: object
) -> None:
    config = tmp_path / "headrace.toml"
    digest = hashlib.sha256(b"right").hexdigest()
    config.write_text(
        f'[logux]\nsubprotocol_min = 3\n[[access.token]]\nname = "a"\nsha256 = "{digest}"\nuser = "a"\n'
    )
    with ServerProcess(tmp_path / "data", "--config", str(config)) as server:
        start(logux5, "a", logux_url(server), **{"token": "right", **options})
        logux5.wait("error", lambda: logux5.of("a", "error"))
        assert logux5.of("a", "error") == [error]
        if facts is not None:
            assert logux5.of("a", "options") == [facts]
        assert not logux5.facts("a")["reconnecting"]


def test_pings_are_answered(logux5: Host, url: str) -> None:
    start(logux5, "a", url, ping=50, timeout=2000)
    logux5.wait("pongs", lambda: len([m for m in logux5.of("a", "message") if m[0] == "pong"]) >= 3)
    assert logux5.of("a", "error") == []


def test_clients_of_all_protocols_share_a_log(logux5: Host, npm01: Host, url: str) -> None:
    start(logux5, "a", url)
    start(npm01, "old", url)
    subscribe(logux5, "a")
    publish(logux5, "a", numbered(0, 3))
    assert [one["n"] for one in npm01.wait_events("old", 3)] == [0, 1, 2]
    npm01.do("add", "old", events=numbered(3, 5))
    logux5.wait_events("a", 5)
    assert numbers(logux5, "a") == [0, 1, 2, 3, 4]
