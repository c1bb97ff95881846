"""Protocol 5 with raw clients against a real server: behaviour that well-behaved clients do not show."""

from typing import Any

import pytest

from headrace.server.logux.feeds import FILTERS_MAX
from headrace.testing import ServerProcess
from tests.system.logux.raw import Client, Open


class Peer:
    """Sends `sync` messages and receives them, one answer after the other."""

    def __init__(self, client: Client, node: str) -> None:
        self.client = client
        self.number = 0
        client.connect5(node)

    def sync(self, event: dict[str, Any], **meta: Any) -> None:
        self.number += 1
        self.client.say("sync", self.number, event, {"id": [0, self.number], "time": 0, **meta})

    def answered(self, event: dict[str, Any], **meta: Any) -> dict[str, Any]:
        """Send an event, and return the server's answer to it."""
        self.sync(event, **meta)
        assert self.client.hear_only("synced") == ["synced", self.number]
        answer: dict[str, Any] = self.client.hear_only("sync")[2]
        return answer

    def subscribe(self, channel: str = "x", **more: Any) -> list[Any]:
        """Subscribe, and return the history followed by the answer to our own action."""
        self.sync({"type": "logux/subscribe", "channel": channel, **more})
        heard = []
        while not heard or heard[-1][2]["type"] not in ("logux/processed", "logux/undo"):
            message = self.client.hear()
            if message[0] == "sync":
                heard.append(message)
        return heard

    def hear_until(self, last: list[Any]) -> None:
        while self.client.hear() != last:
            pass

    def hear(self) -> dict[str, Any]:
        event: dict[str, Any] = self.client.hear_only("sync")[2]
        return event


def event(number: int, channel: str = "x", **more: Any) -> dict[str, Any]:
    return {"type": "n", "n": number, "channel": channel, **more}


def numbers(messages: list[Any]) -> list[int]:
    return [one[2]["n"] for one in messages if "n" in one[2]]


@pytest.mark.parametrize("version", [1, 2, 4, 6])
@pytest.mark.parametrize("binary", [False, True])
def test_other_versions_that_are_one_number_are_refused_as_their_clients_expect(
    open_: Open, version: int, binary: bool
) -> None:
    client = open_(binary=binary)
    client.say("connect", version, "10:a:b", 0, {"subprotocol": "1.0.0"})
    facts = {"supported": 5, "used": version}
    assert client.hear() == ["error", "wrong-protocol", facts]
    assert client.closed() == 1008


@pytest.mark.parametrize(
    "created", [[1e-7, "h", 0], [1, "h h", 0], [1, 7, 1e-9], ["odd"], [5, 77, 0]]
)
def test_strange_times_of_older_protocols_are_shown_and_resumed(
    open_: Open, created: list[Any]
) -> None:
    old, live = open_(), Peer(open_(), "a:1:t")
    live.subscribe()
    old.connect("old")
    for number, time in enumerate(([1, "old", 0], created, [2, "old", 0])):
        old.say("sync", number + 1, event(number), time)
        assert old.hear_only("synced")[1] == number + 1
    messages = [live.client.hear_only("sync") for _ in range(3)]
    assert numbers(messages) == [0, 1, 2]
    base = 0
    shift, node, counter = messages[1][3]["id"]
    late = Peer(open_(), "b:1:t")
    assert numbers(late.subscribe()) == [0, 1, 2]
    # A client would name the action in this way: its milliseconds count from a time that it knows.
    base = round(messages[0][3]["id"][0] - 1)
    since = {"id": f"{_text(shift - base)} {node} {counter}", "time": 0}
    assert numbers(Peer(open_(), "c:1:t").subscribe(since=since)) == [2]


def _text(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def test_what_was_answered_does_not_come_again_to_one_that_began_with_an_empty_log(
    open_: Open,
) -> None:
    """The peer's clock is ahead of the writer's, so the last action that it knows is its own subscription."""
    peer, writer = Peer(open_(), "a:1:t"), Peer(open_(), "b:1:t")
    [processed] = peer.subscribe()
    peer.client.say("synced", processed[1])
    name = processed[3]["id"][1]
    assert name.endswith(":0"), "there was nothing yet"
    for number in range(2):
        writer.answered(event(number))
        message = peer.client.hear_only("sync")
        assert message[2] == event(number)
        peer.client.say("synced", message[1])
    peer.client.say("ping", 0)
    assert peer.client.hear()[0] == "pong", "it has come"
    peer.client.socket.close()
    writer.answered(event(2))
    again = Peer(open_(), "a:1:t")
    again.number = peer.number
    assert numbers(again.subscribe(since={"id": f"9 {name} 0", "time": 9})) == [2]


def test_only_the_server_speaks_as_the_server(open_: Open) -> None:
    old, peer = open_(), Peer(open_(), "a:1:t")
    peer.subscribe()
    old.connect("old")
    old.say("sync", 1, {"type": "logux/undo", "id": "1 a:1:t 0", "channel": "x"}, [1, "server", 0])
    old.say("sync", 2, event(1), [2, "server", 0])
    assert peer.hear() == event(1)


def test_a_name_like_a_mark_is_no_mark(open_: Open) -> None:
    writer = Peer(open_(), "a:1:t")
    writer.answered(event(-1, "none"))
    [processed] = writer.subscribe("other")
    epoch = processed[3]["id"][1].split(":")[2]
    evil = Peer(open_(), f"server-:at:{epoch}:3")
    old = open_()
    old.connect("old")
    for number in range(2):
        evil.answered(event(number))
    old.say("sync", 1, event(2), [5, f"server:at:{epoch}:4", 0])
    while old.hear()[0] != "synced":
        pass
    for number in range(3, 6):
        evil.answered(event(number))
    since = {"id": f"5 server:at:{epoch}:4 0", "time": 5}
    assert numbers(Peer(open_(), "b:1:t").subscribe(since=since)) == [3, 4, 5]


def test_each_filter_is_unsubscribed_for_itself(open_: Open) -> None:
    writer, peer = Peer(open_(), "a:1:t"), Peer(open_(), "b:1:t")
    peer.subscribe(filter={"a": 1})
    peer.subscribe(filter={"a": 2})
    gone = {"type": "logux/unsubscribe", "channel": "x"}
    assert peer.answered({**gone, "filter": {"a": 1}})["type"] == "logux/processed"
    writer.answered(event(1))
    assert peer.hear() == event(1)
    assert peer.answered({**gone, "filter": {"a": 2}})["type"] == "logux/processed"
    writer.answered(event(2))
    peer.subscribe("y")
    writer.answered(event(3, "y"))
    assert peer.hear() == event(3, "y")


def test_the_filters_of_a_channel_are_limited(open_: Open) -> None:
    peer = Peer(open_(), "b:1:t")
    answers = [peer.subscribe(filter={"n": number})[-1][2] for number in range(FILTERS_MAX + 1)]
    assert {one["type"] for one in answers[:-1]} == {"logux/processed"}
    assert (answers[-1]["type"], answers[-1]["reason"]) == ("logux/undo", "tooManyChannels")
    assert peer.subscribe(filter={"n": 0})[-1][2]["type"] == "logux/processed"


def test_every_subscription_is_answered(open_: Open) -> None:
    """This includes subscriptions that are cancelled before their history is sent."""
    writer = Peer(open_(), "a:1:t")
    for number in range(200):
        writer.sync(event(number, text="t" * 5000))
    writer.hear_until(["synced", 200])
    peer = Peer(open_(), "b:1:t")
    for _ in range(20):
        peer.sync({"type": "logux/subscribe", "channel": "x"})
        peer.sync({"type": "logux/unsubscribe", "channel": "x"})
    answers, synced = 0, []
    while answers < 40 or len(synced) < 40:
        message = peer.client.hear_only("sync", "synced")
        if message[0] == "synced":
            synced.append(message[1])
        else:
            answers += message[2]["type"] == "logux/processed"
    assert synced == list(range(1, 41))


def test_an_id_that_comes_twice_in_a_message_is_stored_once(open_: Open) -> None:
    writer, peer = Peer(open_(), "a:1:t"), Peer(open_(), "b:1:t")
    peer.subscribe()
    same = {"id": 7, "time": 7}
    writer.client.say("sync", 1, event(1), same, event(1), same)
    assert [writer.client.hear_only("synced", "sync")[0] for _ in range(3)] == [
        "synced",
        "sync",
        "sync",
    ]
    writer.number = 1
    writer.answered(event(2))
    assert [peer.hear()["n"] for _ in range(2)] == [1, 2]


def test_many_channels_are_served_with_the_rest(open_: Open, server: ServerProcess) -> None:
    writer, peer = Peer(open_(), "a:1:t"), Peer(open_(), "b:1:t")
    for number in range(500):
        peer.sync({"type": "logux/subscribe", "channel": f"many/{number}"})
    peer.hear_until(["synced", 500])
    for number in (3, 499, 77):
        writer.answered(event(number, f"many/{number}"))
    found = []
    while len(found) < 3:
        message = peer.client.hear_only("sync")
        found += numbers([message])
    assert found == [3, 499, 77]
