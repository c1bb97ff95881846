"""Raw clients written from the specification, in both encodings, against a real server."""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess
from tests.system.logux.conftest import logux_url
from tests.system.logux.raw import Client, Open


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_events_go_from_one_encoding_to_the_other(open_: Open, binary: bool, other: bool) -> None:
    one, two = open_(binary), open_(other)
    one.connect("one")
    two.connect("two")
    event = {"type": "x", "é": [1, 2.5, None, True, {"y": [-1, 2**53]}]}
    one.say("sync", 1, event, [1475316540687.5, "one", 0])
    assert one.hear() == ["synced", 1]
    assert two.hear() == ["sync", 1, event, [1475316540687.5, "one", 0]]


def test_what_was_missed_comes_in_order_and_once(open_: Open) -> None:
    writer = open_()
    writer.connect("writer")
    for n in range(1, 101):
        writer.say("sync", n, {"type": "n", "n": n}, [n, "writer", 0])
    for n in range(1, 101):
        assert writer.hear_only("synced") == ["synced", n]
    for synced in (0, 30, 100):
        reader = open_()
        reader.connect("reader", synced)
        for n in range(synced + 1, 101):
            assert reader.hear() == ["sync", n, {"type": "n", "n": n}, [n, "writer", 0]]
        reader.say("ping", 0)
        assert reader.hear() == ["pong", 100]
    # For a position that the log has never had, the server sends everything.
    reader = open_()
    reader.connect("reader", 101)
    assert reader.hear()[1] == 1


def test_duplicates_are_answered_and_delivered_once(
    open_: Open, server: ServerProcess, url: str
) -> None:
    chance = random.Random(3)
    one, two = open_(), open_()
    one.connect("one")
    two.connect("two")
    times = [[n, "one", n % 3] for n in range(50)]
    sent = [*times, *chance.choices(times, k=100)]
    chance.shuffle(sent)
    for number, created in enumerate(sent, 1):
        one.say("sync", number, {"type": "x"}, created)
    for number in range(1, len(sent) + 1):
        assert one.hear_only("synced") == ["synced", number]
    found = [two.hear_only("sync") for _ in times]
    assert sorted(message[3] for message in found) == times
    server.kill()
    server.start()
    three = open_(at=url)
    three.connect("three", 50)
    for number, created in enumerate(times, 1):
        three.say("sync", number, {"type": "x"}, created)
        assert three.hear_only("synced") == ["synced", number]
    three.say("ping", 0)
    assert three.hear_only("pong") == ["pong", 50]


@pytest.mark.parametrize("version", [[0, 0], [0, 1]])
def test_a_pong_far_ahead_of_what_was_sent_acknowledges_nothing(
    open_: Open, version: list[int]
) -> None:
    """The pong carries the last number of the client's log; ten `sync` messages bring a tenth of it each."""
    client = open_()
    client.say("connect", version, "one", 0)
    assert client.hear()[0] == "connected"
    heard = []
    for last in range(10, 101, 10):
        pairs = [part for n in range(last - 9, last + 1) for part in ({"type": "x"}, [n, "one", 0])]
        client.say("sync", last, *pairs)
        client.say("pong", 100)
        while heard[-1:] != [["synced", last]]:
            heard.append(client.hear())
        client.say("pong", 100)
    client.say("ping", 100)
    while heard[-1] != ["pong", 100]:
        heard.append(client.hear())
    assert [message for message in heard if message[0] == "synced"] == [
        ["synced", last] for last in range(10, 101, 10)
    ]
    assert {message[0] for message in heard} == {"synced", "pong"}, "nobody was silent"
    again = open_()
    again.connect("one", heard[-1][1])
    again.say("ping", 100)
    assert again.hear() == ["pong", 100], "its own events do not come back"


def test_echoes_with_other_times_are_answered_and_not_stored(
    open_: Open, server: ServerProcess, url: str
) -> None:
    writer, reader = open_(), open_()
    writer.connect("writer")
    reader.connect("reader")
    for n in range(1, 6):
        writer.say("sync", n, {"type": "x", "n": n}, [n, "writer", 0])
        assert reader.hear() == ["sync", n, {"type": "x", "n": n}, [n, "writer", 0]]
    for is_killed in (False, True):
        if is_killed:
            server.kill()
            server.start()
        again = open_(at=url)
        again.connect("reader", 5 + is_killed)
        back = [
            part
            for n in range(5, 0, -1)
            for part in ({"n": n, "type": "x"}, [n + 0.5, "writer", 0])
        ]
        again.say("sync", 6, {"type": "new"}, [9 + is_killed, "reader", 0], *back)
        assert again.hear() == ["synced", 6]
        again.say("ping", 6)
        assert again.hear_only("pong")[1] == 6 + is_killed


def test_equal_events_of_a_third_host_are_both_stored(open_: Open) -> None:
    """One event was delivered to the client that sends the other, 3 ms later."""
    writer = open_()
    writer.connect("writer")
    writer.say("sync", 1, {"type": "x"}, [1000, "third", 0])
    assert writer.hear_only("synced") == ["synced", 1]
    relay = open_()
    relay.connect("relay", 1)
    relay.say("sync", 1, {"type": "x"}, [1003, "third", 0])
    assert relay.hear_only("synced") == ["synced", 1]
    relay.say("sync", 2, {"type": "x"}, [1000, "third", 0], {"type": "x"}, [1006, "third", 0])
    assert relay.hear_only("synced") == ["synced", 2]
    reader = open_()
    reader.connect("reader")
    assert [reader.hear()[3][0] for _ in range(3)] == [1000, 1003, 1006]


def test_a_lost_answer_costs_nothing(open_: Open) -> None:
    one = open_()
    one.connect("one")
    one.say("sync", 1, {"type": "x"}, [1, "one", 0])
    one.socket.close()  # before it receives the answer
    again = open_()
    again.connect("one", 0)
    again.say("sync", 1, {"type": "x"}, [1, "one", 0])
    assert again.hear_only("synced", "sync")[0] in ("synced", "sync")
    watcher = open_()
    watcher.connect("watcher")
    assert watcher.hear()[1] == 1
    watcher.say("ping", 0)
    assert watcher.hear() == ["pong", 1]


def test_logs_are_topics_of_their_own(open_: Open, server: ServerProcess) -> None:
    for log in ("main", "a/b", "☃ x"):
        client = open_(at=logux_url(server, log.replace("☃ x", "%E2%98%83%20x")))
        client.connect("one")
        client.say("sync", 1, {"type": log}, [1, "one", 0])
        assert client.hear() == ["synced", 1]
        with connect_blocking(server.figg_url) as reader:
            [message] = [next(iter(reader.subscribe(f"$logux/{log}", offset=0)))]
            assert json.loads(message.payload) == {
                "event": {"type": log},
                "created": [1, "one", 0],
                "origin": "one",
            }


@pytest.mark.parametrize(
    "data",
    [
        "", "[", "{}", "null", '["sync"]', '["connect",[0,0],"x",-1]', '["connect",[0,0],null,0]',
        b"", b"\xc1", b"\x92\xa4ping\xc4\x01a", "[" * 200_000, b"\x91" * 200_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("connected", [False, True])
def test_what_is_no_message_is_told_and_closed(
    open_: Open, server: ServerProcess, data: Any, connected: bool
) -> None:
    client = open_(isinstance(data, bytes))
    if connected:
        client.connect("one")
    client.socket.send(data)
    message = client.hear()
    assert message[0] == "error" and message[2] == "protocol"
    assert client.closed() == 1002
    assert server.running


@pytest.mark.parametrize("binary", [False, True])
def test_bad_messages_of_protocol_5_are_told_and_closed(
    open_: Open, server: ServerProcess, binary: bool
) -> None:
    good = {"id": 1, "time": 1}
    bad: list[Any] = [
        "", [], {}, None, ["sync"], ["sync", 1], ["sync", "1", {"type": "a"}, good],
        ["connect", 5, "b:c:d", 0],
        ["sync", 1, {"type": 1}, good], ["sync", 1, {"type": "a"}, None],
        ["sync", 1, {"type": "a"}, {"id": {}}],
        ["sync", 1, {"type": "a"}, good, {"type": "a"}], ["synced", -1], ["ping"], ["headers", 1], ["error"],
        ["sync", 1, {"type": "a", "deep": json.loads("[" * 150 + "]" * 150)}, good],
    ]  # fmt: skip
    for message in bad:
        client = open_(binary)
        client.connect5("a:b:c")
        client.say(*message) if isinstance(message, list) else client.say_plain(message)
        kind, name, text = client.hear()
        assert (kind, name, bool(text)) == ("error", "wrong-format", True), message
        assert client.closed() == 1002
    client = open_(binary)
    client.connect5("a:b:c")
    client.say("nonsense", 1)
    assert client.hear() == ["error", "unknown-message", "nonsense"]
    assert client.closed() == 1008
    other = open_()
    other.connect("two")
    other.say("ping", 0)
    assert other.hear() == ["pong", 0]  # nothing was stored


def test_a_message_that_is_too_large_is_closed_and_nothing_is_stored(
    open_: Open, server: ServerProcess
) -> None:
    client = open_()
    client.connect("one")
    client.say("sync", 1, {"type": "x" * 10_000_000}, [1, "one", 0])
    assert client.closed() == 1009
    other = open_()
    other.connect("two")
    other.say("ping", 0)
    assert other.hear() == ["pong", 0]


def test_an_event_that_is_too_large_is_refused_with_the_limit(open_: Open) -> None:
    client = open_()
    client.connect("one")
    client.say("sync", 1, {"type": "ok"}, [1, "one", 0], {"type": "x" * 262_144}, [2, "one", 0])
    kind, text, reason = client.hear()
    assert (kind, reason) == ("error", "protocol")
    assert "262144 bytes" in text
    client.closed()
    other = open_()
    other.connect("two")
    other.say("ping", 0)
    assert other.hear() == ["pong", 0]


def test_a_server_can_show_who_it_is(tmp_path: Path) -> None:
    flag = "--set=logux.credentials=it is me"
    with ServerProcess(tmp_path / "data", flag) as server, ExitStack() as stack:
        for version, options in (
            ([0, 0], ["it is me"]), ([0, 1], [{"credentials": "it is me"}]), (5, [{"token": "it is me"}]),
        ):  # fmt: skip
            client = Client(stack, logux_url(server))
            client.say("connect", version, "a", 0)
            answer = client.hear_only("connected", "headers")
            if answer[0] == "headers":
                answer = client.hear()
            assert answer[4:] == options


def test_publishers_of_other_protocols_are_refused(server: ServerProcess) -> None:
    from headrace.errors import BadTopicNameError

    with connect_blocking(server.figg_url) as client, pytest.raises(BadTopicNameError):
        client.publish("$logux/main", b"x")


# Access


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = f"""
[[access.token]]
name = "all"
sha256 = "{digest("all")}"
[[access.token]]
name = "ada"
sha256 = "{digest("ada's")}"
user = "ada"
[[access.token]]
name = "other"
sha256 = "{digest("other")}"
grants = ["$logux/other"]
[[access.token]]
name = "both"
sha256 = "{digest("both")}"
grants = ["$logux/other", "http"]
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Open]:
    (tmp_path / "tokens.toml").write_text(TOKENS)
    with ServerProcess(tmp_path / "guarded", f"--config={tmp_path / 'tokens.toml'}") as server:
        with ExitStack() as stack:

            def make(log: str = "") -> Client:
                return Client(stack, logux_url(server, log))

            yield make
        assert "Traceback" not in server.stderr, server.stderr


@pytest.mark.parametrize(
    ("log", "host", "credentials", "allowed"),
    [
        ("", "x", ["all"], True),
        ("", "x", [{"token": "all"}], True),
        ("", "ada:1:2", ["ada's"], True),
        ("", "ada", ["ada's"], True),
        ("", "adam:1", ["ada's"], False),
        ("", "bob:ada", ["ada's"], False),
        ("other", "x", ["other"], True),
        ("", "x", ["other"], False),
        ("", "x", ["both"], True),  # it may read and write every log over HTTP too
        ("", "x", [], False),
        ("", "x", ["nope"], False),
        ("", "x", [{"token": 5}], False),
        ("", "x", [{}], False),
        ("", "x", [["all"]], False),
        ("", "x", [digest("all")], False),
    ],
)
def test_tokens_open_logs(
    guarded: Open, log: str, host: str, credentials: list[Any], allowed: bool
) -> None:
    client = guarded(log)
    client.say("connect", [0, 0], host, 0, *credentials)
    answer = client.hear()
    if allowed:
        assert answer[0] == "connected"
    else:
        assert answer == ["error", "Wrong credentials", "auth"]
        assert client.closed() == 1008


APPLICATION = """
import asyncio

async def verify(host, credentials):
    await asyncio.sleep(0)
    if host == "broken":
        raise ValueError("broken")
    return credentials == f"of {host}"

def may(what, event, meta, peer):
    if event["type"] == "crash":
        raise ValueError("crash")
    if what == "send":
        return event["type"] != "forbidden"
    return "for" not in event or event["for"] == peer["host"] or meta["origin"] == peer["host"]
"""


@pytest.fixture
def governed(tmp_path: Path) -> Iterator[Open]:
    """A server with an application's functions."""
    (tmp_path / "application.py").write_text(APPLICATION)
    flags = ("--set=logux.verify=application:verify", "--set=logux.filter=application:may")
    environ = {"PYTHONPATH": str(tmp_path)}
    with ServerProcess(tmp_path / "data", *flags, env=environ) as server, ExitStack() as stack:

        def make() -> Client:
            return Client(stack, logux_url(server))

        yield make


def test_an_application_decides_who_is_let_in(governed: Open) -> None:
    for host, credentials, allowed in (
        ("a", "of a", True), ("a", "of b", False), ("broken", "of broken", False),
    ):  # fmt: skip
        client = governed()
        client.say("connect", [0, 0], host, 0, credentials)
        assert client.hear()[0] == ("connected" if allowed else "error")


def test_an_application_hides_events_and_positions_differ(governed: Open) -> None:
    one, two, three = governed(), governed(), governed()
    one.connect("one", 0, "of one")
    two.connect("two", 0, "of two")
    events = [
        {"type": "a", "for": "two"}, {"type": "b"}, {"type": "forbidden"}, {"type": "crash"},
        {"type": "c", "for": "three"}, {"type": "d"}, {"type": "e", "for": "three"},
    ]  # fmt: skip
    for number, event in enumerate(events, 1):
        one.say("sync", number, event, [number, "one", 0])
        assert one.hear_only("synced") == ["synced", number]
    found = [two.hear_only("sync")[1:3] for _ in range(3)]
    assert found == [[1, events[0]], [2, events[1]], [4, events[5]]]
    two.say("ping", 0)
    assert two.hear_only("pong") == ["pong", 5]
    three.connect("three", 0, "of three")
    found = [three.hear_only("sync")[1:3] for _ in range(4)]
    assert found == [[2, events[1]], [3, events[4]], [4, events[5]], [5, events[6]]]


def test_a_silent_client_is_pinged_and_given_up(tmp_path: Path) -> None:
    flags = ("--set=logux.ping_s=0.3", "--set=logux.timeout_s=2")
    with ServerProcess(tmp_path / "data", *flags) as server, ExitStack() as stack:
        client = Client(stack, logux_url(server))
        client.connect("one")
        assert client.hear() == ["ping", 0]
        client.say("pong", 0)
        assert client.hear() == ["ping", 0]
        assert client.closed() == 1008
