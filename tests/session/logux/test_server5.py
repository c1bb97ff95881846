"""The server's side of a connection of protocol 5, message by message."""

from typing import Any

import msgspec
import pytest

from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.logux import decode_envelope
from headrace.session.logux.server import AddEvents, AuthenticatePeer
from headrace.session.logux.server5 import (
    CHANNEL_BYTES_MAX,
    LogMark,
    Logux5ServerSession,
    Since,
    Subscribe,
    Unsubscribe,
    is_protocol_5,
)
from headrace.session.server import Close
from headrace.wire.logux import messages as logux

NOW_MS = 1794706580880
NODE = "10:client:tab"


class Peer:
    """A session, with its messages decoded as a client receives them."""

    def __init__(self, *, binary: bool = False, subprotocol_min: int = 0) -> None:
        self.session = Logux5ServerSession("server", subprotocol_min)
        self.binary = binary

    def say(self, *message: Any, now_ms: int = NOW_MS) -> list[Any]:
        data = logux.pack(message, binary=self.binary)
        return self.session.receive_messages([data if self.binary else data.decode()], now_ms)

    def heard(self) -> list[Any]:
        data, found = self.session.data_to_send(), []
        while data:
            size, at = data[1], 2
            if size == 126:
                size, at = int.from_bytes(data[2:4]), 4
            elif size == 127:
                size, at = int.from_bytes(data[2:10]), 10
            found.append(logux.unpack(data[at : at + size], binary=self.binary))
            data = data[at + size :]
        return found

    def connect(self, *rest: Any) -> None:
        [command] = self.say("connect", 5, NODE, 0, *rest)
        assert isinstance(command, AuthenticatePeer)
        self.session.let_in(NOW_MS)
        self.heard()


@pytest.fixture(params=[False, True], ids=["text", "binary"])
def peer(request: pytest.FixtureRequest) -> Peer:
    return Peer(binary=request.param)


@pytest.fixture
def connected(peer: Peer) -> Peer:
    peer.connect()
    return peer


def add(connected: Peer, *message: Any) -> Any:
    [command] = connected.say(*message)
    assert isinstance(command, AddEvents)
    return command


def test_connecting(peer: Peer) -> None:
    options = {"token": "correct", "subprotocol": 10}
    assert peer.say("headers", {"language": "de"}) == []
    [command] = peer.say("connect", 5, NODE, 0, options, now_ms=NOW_MS - 7)
    assert command == AuthenticatePeer(NODE, "correct")
    assert peer.session.let_in(NOW_MS) == []
    assert peer.heard() == [
        ["headers", {"env": "development"}],
        ["connected", 5, "server", [NOW_MS - 7, NOW_MS]],
    ]
    peer.say("ping", 3)
    assert peer.heard() == [["pong", 0]]


def test_an_action_is_acknowledged_and_processed_when_it_is_durable(connected: Peer) -> None:
    command = add(connected, "sync", 7, {"type": "a"}, {"id": 15, "time": 15})
    assert connected.heard() == []
    [event] = command.events
    assert event.created == [NOW_MS + 15, NODE, 0]
    envelope = decode_envelope(event.payload)
    assert (envelope.id, envelope.time) == (f"{NOW_MS + 15} {NODE} 0", NOW_MS + 15)
    assert (envelope.origin, envelope.meta) == (NODE, {"subprotocol": 0})
    connected.session.stored(command.unit)
    processed = {"type": "logux/processed", "id": f"{NOW_MS + 15} {NODE} 0"}
    assert connected.heard() == [["synced", 7], ["sync", 0, processed, {"id": [0, 1], "time": 0}]]


@pytest.mark.parametrize(
    ("wire", "stored"),
    [
        (-3, f"{NOW_MS - 3} {NODE} 0"),
        (1.0, f"{NOW_MS + 1} {NODE} 0"),
        ([4, 2], f"{NOW_MS + 4} {NODE} 2"),
        ([4, "10:client:other", 2], f"{NOW_MS + 4} 10:client:other 2"),
    ],
)
def test_ids_are_relative_to_the_connection(connected: Peer, wire: object, stored: str) -> None:
    command = add(connected, "sync", 1, {"type": "a"}, {"id": wire, "time": 0.5})
    envelope = decode_envelope(command.events[0].payload)
    assert (envelope.id, envelope.time) == (stored, NOW_MS + 0.5)


@pytest.mark.parametrize(
    ("event", "meta", "reason"),
    [
        ({"type": "a"}, {"id": [1, "10:other:tab", 0], "time": 1}, "denied"),
        ({"type": "a"}, {"id": [1, "server", 0], "time": 1}, "denied"),
        ({"type": "a"}, {"id": 1, "time": 1, "users": ["11"]}, "denied"),
        ({"type": "logux/processed", "id": "x"}, {"id": 1, "time": 1}, "denied"),
        ({"type": "logux/subscribe"}, {"id": 1, "time": 1}, "wrongChannel"),
        ({"type": "logux/subscribe", "channel": 5}, {"id": 1, "time": 1}, "wrongChannel"),
        (
            {"type": "logux/unsubscribe", "channel": "x" * (CHANNEL_BYTES_MAX + 1)},
            {"id": 1, "time": 1},
            "wrongChannel",
        ),
        ({"type": "a", "x": "x" * PAYLOAD_BYTES_MAX}, {"id": 1, "time": 1}, "tooLarge"),
    ],
)
def test_what_may_not_be_sent_is_undone_and_the_rest_is_stored(
    connected: Peer, event: Any, meta: Any, reason: str
) -> None:
    command = add(connected, "sync", 2, event, meta, {"type": "b"}, {"id": [1, 9], "time": 1})
    assert [one.event for one in command.events] == [{"type": "b"}]
    connected.session.stored(command.unit)
    synced, undo, processed = connected.heard()
    assert synced == ["synced", 2]
    assert (undo[2]["type"], undo[2]["reason"]) == ("logux/undo", reason)
    assert undo[2]["action"] == event
    assert processed[2] == {"type": "logux/processed", "id": f"{NOW_MS + 1} {NODE} 9"}


def test_what_the_application_refuses_is_undone(connected: Peer) -> None:
    command = add(
        connected,
        "sync",
        2,
        {"type": "a"},
        {"id": 1, "time": 1},
        {"type": "b"},
        {"id": 2, "time": 2},
    )
    connected.session.denied(command.unit, [False, True])
    connected.session.stored(command.unit)
    _, undo, processed = connected.heard()
    assert (undo[2]["reason"], undo[2]["action"]) == ("denied", {"type": "a"})
    assert processed[2]["type"] == "logux/processed"


def test_subscriptions(connected: Peer) -> None:
    event = {"type": "logux/subscribe", "channel": "x"}
    stored, command = connected.say("sync", 1, event, {"id": 1, "time": 1})
    assert stored.events == []
    assert isinstance(command, Subscribe)
    assert (command.channel, command.since) == ("x", None)
    connected.session.stored(stored.unit)
    assert (
        connected.heard() == []
    )  # otherwise a client that is cut off within the history would not ask again
    connected.session.subscribed(command, LogMark(3, 12))
    synced, processed = connected.heard()
    assert synced == ["synced", 1]
    assert processed[2] == {"type": "logux/processed", "id": f"{NOW_MS + 1} {NODE} 0"}
    # The client sends this id again to continue from here.
    shift, node, counter = processed[3]["id"]
    event["since"] = {"id": f"{NOW_MS + shift} {node} {counter}", "time": NOW_MS}
    _, command = connected.say("sync", 2, event, {"id": 2, "time": 2})
    assert command.since == Since(event["since"]["id"], LogMark(3, 12))
    event["since"] = {"id": "1794706580870 11:other:tab 0", "time": NOW_MS}
    _, command = connected.say("sync", 3, event, {"id": 3, "time": 3})
    assert command.since == Since("1794706580870 11:other:tab 0", None)
    event["since"] = {"id": "1794706580870 evil:at:3:12 0", "time": NOW_MS}
    _, command = connected.say("sync", 3, event, {"id": 3, "time": 3})
    assert command.since.mark is None
    del event["since"]
    event["type"] = "logux/unsubscribe"
    _, command = connected.say("sync", 4, event, {"id": 4, "time": 4})
    assert isinstance(command, Unsubscribe) and command.channel == "x"


def subscribe(connected: Peer, number: int, **more: Any) -> Any:
    event = {"type": "logux/subscribe", "channel": "x", **more}
    stored, command = connected.say("sync", number, event, {"id": [number, 0], "time": 1})
    connected.session.stored(stored.unit)
    return command


def test_what_comes_behind_a_subscription_waits_for_it_but_not_for_ever(connected: Peer) -> None:
    command = subscribe(connected, 1)
    later = add(connected, "sync", 2, {"type": "a"}, {"id": 2, "time": 2})
    connected.session.stored(later.unit)
    assert connected.heard() == []
    connected.session.let_go(command)
    first, second, processed = connected.heard()
    assert (first, second) == (["synced", 1], ["synced", 2])
    assert processed[2]["id"] == later_id(2)
    connected.session.subscribed(command, LogMark(1, 1))
    [processed] = connected.heard()
    assert processed[2] == {"type": "logux/processed", "id": later_id(1)}


def later_id(shift: int) -> str:
    return f"{NOW_MS + shift} {NODE} 0"


def test_a_subscription_that_is_refused_is_undone(connected: Peer) -> None:
    connected.session.undo(subscribe(connected, 1), "denied")
    synced, undo = connected.heard()
    assert synced == ["synced", 1]
    assert (undo[2]["type"], undo[2]["reason"]) == ("logux/undo", "denied")


def test_a_peer_that_is_refused_does_not_wait_for_histories(connected: Peer) -> None:
    subscribe(connected, 1)
    assert not connected.session.finished
    connected.say("nonsense")
    connected.heard()
    assert connected.session.finished


def test_acknowledgements_keep_their_order(connected: Peer) -> None:
    first = add(connected, "sync", 1, {"type": "a"}, {"id": 1, "time": 1})
    second = add(connected, "sync", 2, {"type": "b"}, {"id": 2, "time": 2})
    connected.session.stored(second.unit)
    assert connected.heard() == []
    connected.session.stored(first.unit)
    assert [one[:2] for one in connected.heard()] == [
        *(["synced", 1], ["sync", 0], ["synced", 2], ["sync", 0]),
    ]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (["connect", 4, NODE, 0], ["wrong-protocol", {"supported": 5, "used": 4}]),
        (
            ["connect", 5, NODE, 0, {"subprotocol": 2}],
            ["wrong-subprotocol", {"supported": 3, "used": 2}],
        ),
        (["connect", 5, "server", 0, {"subprotocol": 3}], ["wrong-credentials"]),
        (["connect", 5, "server:1:1", 0, {"subprotocol": 3}], ["wrong-credentials"]),
    ],
)
def test_who_is_refused(message: Any, error: object) -> None:
    peer = Peer(subprotocol_min=3)
    [command] = peer.say(*message)
    assert isinstance(command, Close)
    assert peer.heard() == [["error", *error]]
    assert peer.say("ping", 0) == []


@pytest.mark.parametrize("node", ["a" * 256, "a b", 7])
def test_node_ids_are_words_of_a_bounded_length(peer: Peer, node: Any) -> None:
    [command] = peer.say("connect", 5, node, 0)
    assert isinstance(command, Close)
    assert peer.heard()[0][:2] == ["error", "wrong-format"]


def test_wrong_credentials(peer: Peer) -> None:
    peer.say("connect", 5, NODE, 0, {"token": "wrong"})
    assert isinstance(peer.session.turn_away(), Close)
    assert peer.heard() == [["error", "wrong-credentials"]]


@pytest.mark.parametrize(
    "message",
    [
        ["connect", 5, NODE, 0],
        ["sync", 1, {"type": "a"}, [1, NODE, 0]],
        ["sync", 1, {"type": "a"}, {"time": 1}],
        ["sync", 1, {"type": "a"}, {"id": 1}],
        ["sync", 1, {"type": "a"}, {"id": "1 a 0", "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": [1], "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": [1, "a b", 1], "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": [1, "", 1], "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": [True, 1], "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": 1e300, "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": [1, 1e-7], "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": [1, "a" * 256, 1], "time": 1}],
        ["sync", 1, {"type": "a"}, {"id": 1, "time": "1"}],
        ["sync", 1, {"type": "b"}, {"id": 1, "time": 1}, {"no": "type"}, {"id": 2, "time": 1}],
        ["sync", -1, {"type": "a"}, {"id": 1, "time": 1}],
        ["synced", "1"],
    ],
)
def test_bad_messages_are_refused_and_nothing_of_them_is_stored(
    connected: Peer, message: Any
) -> None:
    [command] = connected.say(*message)
    assert isinstance(command, Close)
    [[kind, name, text]] = connected.heard()
    assert (kind, name) == ("error", "wrong-format") and text
    assert connected.session.finished


def test_an_unknown_message_ends_the_connection(connected: Peer) -> None:
    [command] = connected.say("nonsense", 1)
    assert isinstance(command, Close)
    assert connected.heard() == [["error", "unknown-message", "nonsense"]]


def test_what_comes_before_connect_is_not_heard(peer: Peer) -> None:
    assert peer.say("sync", 1, {"type": "a"}, {"id": 1, "time": 1}) == []
    assert peer.heard() == [["error", "missed-auth", "auth"]]


@pytest.mark.parametrize(
    ("first", "is_5"),
    [
        (["connect", 5, "a", 0], True),
        (["connect", [5, 0], "a", 0], True),
        (["headers", {}], True),
        (["connect", [0, 1], "a", 0], False),
        (["connect", 0, "a", 0], False),
        (["connect", 1, "a", 0], True),  # another protocol, refused in the format of protocol 5
        (["connect", 4, "a", 0], True),
        (["connect", [1, 0], "a", 0], False),
        (["ping", 5], False),
        ("connect", False),
    ],
)
def test_the_first_message_says_which_protocol_it_is(first: object, is_5: bool) -> None:
    data = msgspec.json.encode(first)
    assert is_protocol_5(data.decode()) is is_5
    assert is_protocol_5(msgspec.msgpack.encode(first)) is is_5
    assert not is_protocol_5("no json")
