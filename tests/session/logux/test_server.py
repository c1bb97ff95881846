"""The server's side of a 0.x connection, message by message, including the specification's examples."""

from typing import Any

import msgspec
import pytest

from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.logux import decode_envelope
from headrace.session.logux.server import AddEvents, AuthenticatePeer, Follow, LoguxServerSession
from headrace.session.server import Close
from headrace.wire.logux import messages as logux

NOW_MS = 1475316482879


class Peer:
    """A session, with its messages decoded as a client receives them."""

    def __init__(self, binary: bool = False) -> None:
        self.session = LoguxServerSession("server")
        self.binary = binary

    def say(self, *message: Any, now_ms: int = NOW_MS) -> list[Any]:
        data = logux.pack(message, binary=self.binary)
        return self.session.receive_messages([data if self.binary else data.decode()], now_ms)

    def heard(self) -> list[Any]:
        data, found = self.session.data_to_send(), []
        while data:
            assert data[0] == (0x82 if self.binary else 0x81)
            size, at = data[1], 2
            if size == 126:
                size, at = int.from_bytes(data[2:4]), 4
            found.append(logux.unpack(data[at : at + size], binary=self.binary))
            data = data[at + size :]
        return found

    def connect(self, version: object = (0, 0), host: object = "client1", *rest: Any) -> None:
        [command] = self.say("connect", version, host, *(rest or (0,)))
        assert isinstance(command, AuthenticatePeer)
        self.session.let_in(NOW_MS)
        self.heard()

    def store(self, command: Any) -> None:
        self.session.stored(command.unit)


@pytest.fixture(params=[False, True], ids=["text", "binary"])
def peer(request: pytest.FixtureRequest) -> Peer:
    return Peer(request.param)


# The specification's examples


def test_wrong_authentication(peer: Peer) -> None:
    [command] = peer.say("connect", [0, 0], "client1", {"token": "wrong"})
    assert command == AuthenticatePeer("client1", {"token": "wrong"})
    assert isinstance(peer.session.turn_away(), Close)
    assert peer.heard() == [["error", "Wrong credentials", "auth"]]
    assert peer.say("ping", 0) == []


def test_correct_synchronisation(peer: Peer) -> None:
    [command] = peer.say(
        "connect", [0, 0], "client1", 0, {"token": "correct"}, now_ms=1475316481050
    )
    assert command == AuthenticatePeer("client1", {"token": "correct"})
    assert peer.session.let_in(1475316482879) == [Follow(0)]
    assert peer.heard() == [["connected", [0, 0], "server", [1475316481050, 1475316482879]]]
    peer.say("ping", 0)
    assert peer.heard() == [["pong", 0]]
    peer.session.sent = 1
    peer.say("synced", 1)
    assert peer.heard() == []
    peer.say("ping", 1)
    assert peer.heard() == [["pong", 1]]


def test_positions_of_both_sides_differ(peer: Peer) -> None:
    peer.connect([0, 0], "client1", 130, {"token": "correct"})
    peer.session.sent = 132
    [add] = peer.say("sync", 1, {"type": "c"}, [1475316168370, "client1", 0])
    peer.say("synced", 132)
    assert peer.heard() == []
    peer.session.sent = 133
    peer.store(add)
    assert peer.heard() == [["synced", 1], ["pong", 133]]
    peer.session.sent = 150
    peer.say("ping", 3)
    assert peer.heard() == [["pong", 150]]
    [add] = peer.say("sync", 4, {"type": "d"}, [1475316404244, "client1", 0])
    peer.store(add)
    assert peer.heard() == [["synced", 4]]


# Connecting


def test_nothing_counts_before_connect(peer: Peer) -> None:
    for message in (["ping", 0], ["sync", 1, {"type": "a"}, [1]], ["nonsense"]):
        assert peer.say(*message) == []
        assert peer.heard() == [["error", "missed-auth", "auth"]]
    peer.connect()


def test_what_comes_while_a_peer_is_checked_waits(peer: Peer) -> None:
    peer.say("connect", [0, 0], "a", 5, "secret")
    assert peer.say("sync", 1, {"type": "x"}, [1, "a", 0]) == []
    assert peer.say("ping", 0) == []
    follow, add = peer.session.let_in(NOW_MS)
    assert follow == Follow(5)
    assert isinstance(add, AddEvents)
    assert peer.heard() == [["connected", [0, 0], "server", [NOW_MS, NOW_MS]], ["pong", 0]]


@pytest.mark.parametrize(
    ("rest", "credentials"),
    [((0,), None), ((0, {}), None), ((0, {"credentials": {"token": "t"}}), {"token": "t"})],
)
def test_npm_has_its_credentials_in_an_object(peer: Peer, rest: Any, credentials: Any) -> None:
    [command] = peer.say("connect", [0, 1], "a5", *rest)
    assert command == AuthenticatePeer("a5", credentials)
    peer.session.let_in(NOW_MS, "mine")
    assert peer.heard() == [
        ["connected", [0, 1], "server", [NOW_MS, NOW_MS], {"credentials": "mine"}]
    ]


@pytest.mark.parametrize(
    ("version", "rest", "error"),
    [
        ([7, 0], (0, "x"), ["Only 0.x protocols are supported, but you use 7.0", "protocol"]),
        ([1, 2], (0,), ["Only 0.x protocols are supported, but you use 1.2", "protocol"]),
        ([7, 0], (0, {"credentials": 1}), ["wrong-protocol", {"supported": [0], "used": [7, 0]}]),
        ([7, 0], (0, {"subprotocol": "1.0.0"}), ["wrong-protocol", {"supported": [0], "used": [7, 0]}]),
    ],
)  # fmt: skip
def test_another_major_is_refused_in_the_peers_own_words(
    peer: Peer, version: Any, rest: Any, error: Any
) -> None:
    [command] = peer.say("connect", version, "a", *rest)
    assert isinstance(command, Close)
    assert peer.heard() == [["error", *error]]
    assert peer.session.finished


def test_npm_hears_of_wrong_credentials_in_its_own_words(peer: Peer) -> None:
    peer.say("connect", [0, 1], "a", 0)
    peer.session.turn_away()
    assert peer.heard() == [["error", "wrong-credentials"]]


def test_a_second_connect_is_refused(peer: Peer) -> None:
    peer.connect()
    [command] = peer.say("connect", [0, 0], "client1", 0)
    assert isinstance(command, Close)


# Events


def test_an_event_is_stored_with_its_time_and_origin(peer: Peer) -> None:
    peer.connect([0, 0], 7, 0)
    event = {"type": "a", "x": [1, 2.5, None, {"y": "é"}]}
    [add] = peer.say("sync", 3, event, [1475316540687.5, "b", 0])
    [one] = add.events
    found = decode_envelope(one.payload)
    assert msgspec.json.decode(found.event) == event
    assert (found.created, found.origin) == ([1475316540687.5, "b", 0], 7)
    assert peer.heard() == []
    peer.store(add)
    assert peer.heard()[0] == ["synced", 3]


def test_events_of_one_message_are_oldest_first(peer: Peer) -> None:
    peer.connect()
    times = {"2": [2, "a", 0], "1b": [1, "a", 1], "1": [1, "a", 0]}
    pairs = [part for name, time in times.items() for part in ({"type": name}, time)]
    [add] = peer.say("sync", 3, *pairs)
    assert [one.event["type"] for one in add.events] == ["1", "1b", "2"]
    [add] = peer.say("sync", 3, {"type": "x"}, ["x"], {"type": "y"}, [1, "a", 1])
    assert [one.event["type"] for one in add.events] == ["x", "y"]


def test_each_sync_has_its_answer_in_order(peer: Peer) -> None:
    peer.connect([0, 1])
    adds = [peer.say("sync", n, {"type": "a"}, [n, "a", 0])[0] for n in (1, 2, 3)]
    peer.store(adds[1])
    assert peer.heard() == []
    peer.store(adds[0])
    assert peer.heard() == [["synced", 1], ["synced", 2]]
    peer.store(adds[2])
    assert peer.heard() == [["synced", 3]]


@pytest.mark.parametrize("version", [(0, 0), (0, 1)])
@pytest.mark.parametrize(
    "rest",
    [
        (1, {"type": "good"}, [1, "a", 0], {"type": "bad"}, []),
        (1, {"type": "a"}, [1 << 63, "a", 0]),
        (1, {"type": "a"}, [1e300, "a", 0]),
        (1, {"type": "good"}, [1, "a", 0], {"type": "bad"}, {"id": 1}),
        (1, {"type": "good"}, [1, "a", 0], {"type": "x" * PAYLOAD_BYTES_MAX}, [2, "a", 0]),
        (-1, {"type": "good"}, [1, "a", 0]),
        (1, {"no": "type"}, [1, "a", 0]),
    ],
)
def test_a_message_with_one_bad_event_stores_none(peer: Peer, version: Any, rest: Any) -> None:
    peer.connect(version)
    [command] = peer.say("sync", *rest)
    assert isinstance(command, Close)
    [error] = peer.heard()
    assert error[0] == "error"
    if version == (0, 0):
        assert error[2] == "protocol"
    else:
        assert error[1] == "wrong-format"
    assert peer.session.finished


def test_what_is_not_carried_out_is_not_answered(peer: Peer) -> None:
    peer.connect()
    [add] = peer.say("sync", 1, {"type": "a"}, [1, "a", 0])
    peer.say("ping", -1)
    assert not peer.session.finished
    peer.session.discard(add)
    assert peer.session.finished
    assert ["synced", 1] not in peer.heard()


# Positions


def test_a_pong_never_acknowledges_anything(peer: Peer) -> None:
    """A pong carries the last number of the peer's own log, of which we may have received only a tenth."""
    peer.connect([0, 1])
    adds = []
    for last in range(10, 101, 10):
        pairs = [part for n in range(last - 9, last + 1) for part in ({"type": "a"}, [n, "a", 0])]
        adds += peer.say("sync", last, *pairs)
        peer.say("pong", 100)
        assert peer.heard() == []
    for last, add in zip(range(10, 101, 10), adds, strict=True):
        peer.store(add)
        assert peer.heard() == [["synced", last]]
        peer.say("pong", 100)
        assert peer.heard() == []


def test_a_peer_hears_of_its_own_events_when_all_are_stored(peer: Peer) -> None:
    """The pong prevents the peer from asking for its own events when it connects again."""
    peer.connect([0, 1])
    adds = [peer.say("sync", n, {"type": "a"}, [n, "client1", 0])[0] for n in (1, 2)]
    peer.session.sent = 1
    peer.store(adds[0])
    assert peer.heard() == [["synced", 1]]
    peer.session.sent = 2
    peer.store(adds[1])
    assert peer.heard() == [["synced", 2], ["pong", 2]]
    [add] = peer.say("sync", 2, {"type": "a"}, [2, "client1", 0])
    peer.store(add)
    assert peer.heard() == [["synced", 2]], "it knows"


def test_a_peer_is_pinged_after_silence_only(peer: Peer) -> None:
    peer.connect([0, 1])
    peer.session.sent = 3
    for n in (1, 2, 3):
        peer.say("synced", n)
    assert peer.heard() == []


def test_a_silent_peer_is_pinged_when_it_is_in(peer: Peer) -> None:
    peer.session.ping()
    assert peer.heard() == []
    peer.connect()
    peer.session.sent = 4
    peer.session.ping()
    assert peer.heard() == [["ping", 4]]


# Unknown messages


@pytest.mark.parametrize("name", ["nonsense", "headers", "connected"])
def test_an_unknown_type_is_told_and_the_connection_goes_on(peer: Peer, name: str) -> None:
    message = {"headers": ["headers", {}], "connected": ["connected", [0, 0], "x", [1, 2]]}
    for version, error in (
        ((0, 0), ["error", f"Unknown message type `{name}`", "protocol"]),
        ((0, 1), ["error", "unknown-message", name]),
    ):
        other = Peer(peer.binary)
        other.connect(version)
        assert other.say(*message.get(name, [name, 1])) == []
        assert other.heard() == [error]
        other.say("ping", 0)
        assert other.heard() == [["pong", 0]]


def test_errors_of_the_peer_are_only_heard(peer: Peer) -> None:
    peer.connect()
    assert peer.say("error", "whatever", "protocol") == []
    assert peer.heard() == []


@pytest.mark.parametrize("data", ["", "[", "{}", "5", "[]"])
def test_what_is_no_message_ends_the_connection(data: str) -> None:
    peer = Peer()
    [command] = peer.session.receive_messages([data, '["ping",0]'], NOW_MS)
    assert isinstance(command, Close)
    [error] = peer.heard()
    assert error == ["error", "wrong-format", "protocol"]


def test_an_integer_that_no_float_can_hold_is_refused() -> None:
    """Otherwise it would be stored but could not be sent to peers that use MessagePack."""
    peer = Peer()
    peer.connect()
    [command] = peer.say("sync", 1, {"type": "a", "n": [{"x": -(10**400)}]}, [1, "a", 0])
    assert isinstance(command, Close)
    digits = {"type": "a", "text": "1" * 400}
    other = Peer()
    other.connect()
    [command] = other.say("sync", 1, digits, [1, "a", 0])
    assert isinstance(command, AddEvents)
    assert logux.unpack(logux.pack([10**400, 1], binary=True), binary=True)[1] == 1
