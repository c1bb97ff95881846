"""The client's side of a Logux connection, message by message, including the specification's examples.

Messages are encoded with `msgpack`, so that our codec is tested against another implementation.
"""

from typing import Any

import msgpack
import pytest

from headrace.session.client import Broken, ConnectionRefused, ConnectionState, Finished
from headrace.session.logux.client import (
    EventsAcknowledged,
    LoguxClientSession,
    LoguxEvent,
    Opened,
    Passed,
    ReceivedEvents,
    Verify,
)

CONNECTED = ["connected", [0, 0], "server", [1475316481050, 1475316482879]]


class Client:
    """A session, with its messages decoded as a server receives them."""

    def __init__(self, credentials: Any = None, *, now: float = 0.0, **options: Any) -> None:
        self.session = LoguxClientSession("client1", credentials, **options)
        self.now = now

    def open(self) -> list[Any]:
        self.session.connecting()
        self.session.opened(self.now)
        return self.said()

    def connect(self) -> None:
        self.open()
        [event] = self.hear(*CONNECTED)
        assert isinstance(event, Opened)

    def reconnect(self) -> list[Any]:
        self.session.disconnected()
        return self.open()

    def hear(self, *message: Any) -> list[LoguxEvent]:
        return self.session.receive_data([msgpack.packb(message)], self.now)

    def tick(self, seconds: float, reading: bool = True) -> list[LoguxEvent]:
        self.now += seconds
        return self.session.tick(self.now, reading)

    def said(self) -> list[Any]:
        return [msgpack.unpackb(one) for one in self.session.data_to_send(1 << 30, self.now)]

    def add(self, number: int) -> None:
        self.session.added(number, own=True)

    def offer(self, *numbers: int, rest: int | None = None) -> None:
        events = [(number, {"type": str(number)}, [number, "client1", 0]) for number in numbers]
        self.session.offer(events, rest)


# The specification's examples


def test_wrong_authentication() -> None:
    client = Client({"token": "wrong"})
    # The example omits the position, which the message's format requires.
    assert client.open() == [["connect", [0, 0], "client1", 0, {"token": "wrong"}]]
    refused, finished = client.hear("error", "Wrong credentials", "auth")
    assert refused == ConnectionRefused("auth", "the server refuses this client: Wrong credentials")
    assert isinstance(finished, Finished)
    client.session.disconnected()
    assert client.session.state is ConnectionState.REFUSED


def test_correct_synchronisation() -> None:
    client = Client({"token": "correct"})
    assert client.open() == [["connect", [0, 0], "client1", 0, {"token": "correct"}]]
    [opened] = client.hear(*CONNECTED)
    assert isinstance(opened, Opened)
    client.tick(5)
    assert client.said() == [["ping", 0]]
    assert client.hear("pong", 0) == []
    created = [1475316540687, "client2", 0]
    assert client.hear("sync", 1, {"type": "a"}, created) == [
        ReceivedEvents(1, [({"type": "a"}, created)])
    ]
    assert client.said() == []
    client.session.added(1, own=False)
    client.session.stored(1)
    assert client.said() == [["synced", 1]]
    client.tick(5)
    assert client.said() == [["ping", 1]]
    assert client.hear("pong", 1) == []
    assert client.reconnect() == [["connect", [0, 0], "client1", 1, {"token": "correct"}]]
    client.hear("connected", [0, 0], "server", [1475316659892, 1475316660687])
    created = [1475316641759, "client2", 0]
    assert client.hear("sync", 2, {"type": "b"}, created) == [
        ReceivedEvents(2, [({"type": "b"}, created)])
    ]
    client.session.stored(2)
    assert client.said() == [["synced", 2]]


def test_positions_of_both_sides_differ_and_a_sync_has_two_events() -> None:
    client = Client({"token": "correct"}, received=130, last=1, unsent=1)
    assert client.open() == [["connect", [0, 0], "client1", 130, {"token": "correct"}]]
    client.hear("connected", [0, 0], "server", [1475316168379, 1475316169987])
    pairs = [
        ({"type": "a"}, [1475316158300, "client2", 0]),
        ({"type": "b"}, [1475316158300, "client2", 1]),
    ]
    received = client.hear("sync", 132, *pairs[0], *pairs[1])
    assert received == [ReceivedEvents(132, pairs)]
    assert client.session.wants == 1
    client.session.offer([(1, {"type": "c"}, [1475316168370, "client1", 0])], None)
    client.session.added(3, own=False)
    client.session.stored(132)
    assert client.said() == [
        ["sync", 1, {"type": "c"}, [1475316168370, "client1", 0]],
        ["synced", 132],
    ]
    assert client.hear("synced", 1) == [EventsAcknowledged(1, 1)]
    client.tick(5)
    assert client.said() == [["ping", 3]]
    assert client.hear("pong", 150) == [Passed(150)]
    client.add(4)
    client.session.offer([(4, {"type": "d"}, [1475316404244, "client1", 0])], None)
    assert client.said() == [["sync", 4, {"type": "d"}, [1475316404244, "client1", 0]]]
    assert client.hear("synced", 4) == [EventsAcknowledged(4, 1)]
    assert client.reconnect()[0][3] == 150


# Connecting


def test_without_credentials_none_are_sent() -> None:
    client = Client(received=7)
    assert client.open() == [["connect", [0, 0], "client1", 7]]
    assert client.session.state is ConnectionState.CONNECTING
    client.hear(*CONNECTED)
    assert client.session.state is ConnectionState.CONNECTED


@pytest.mark.parametrize(
    ("sent_at", "times", "heard_at", "shift_ms"),
    [
        (1000.0, [1_000_000, 1_000_000], 1000.0, 0),
        # The round trip took 1 s, and the server took 1 s to accept the connection.
        (1000.0, [1_005_000, 1_006_000], 1002.0, 4500),
        (1000.0, [400_000, 400_000], 1000.5, -600_250),
        (1000.0, [1_000_000.5, 1_000_000.5], 1000.0, 0.5),
    ],
)
def test_the_difference_of_the_clocks_is_found(
    sent_at: float, times: list[float], heard_at: float, shift_ms: float
) -> None:
    client = Client(now=sent_at)
    client.open()
    client.now = heard_at
    assert client.hear("connected", [0, 0], "server", times) == [Opened(shift_ms)]


@pytest.mark.parametrize("version", [[1, 0], [7, 3], 5])
def test_another_major_is_refused_for_good(version: Any) -> None:
    client = Client()
    client.open()
    refused, finished = client.hear("connected", version, "server", [1, 2])
    assert isinstance(refused, ConnectionRefused) and refused.kind == "protocol"
    assert isinstance(finished, Finished)
    [(kind, text, which)] = client.said()
    assert (kind, which) == ("error", "protocol")
    assert text.startswith("Only 0.x protocols are supported, but you use ")
    assert client.hear("ping", 1) == []
    assert client.said() == []
    client.session.disconnected()
    assert client.session.state is ConnectionState.REFUSED


def test_another_minor_is_not() -> None:
    client = Client()
    client.open()
    [opened] = client.hear("connected", [0, 9], "server", [1, 2])
    assert isinstance(opened, Opened)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (["Wrong credentials", "auth"], "auth"),
        (["wrong-credentials"], "auth"),
        (["Only 1.x protocols are supported, but you use 0.0", "protocol"], "protocol"),
        (["wrong-protocol", {"supported": [1], "used": [0, 0]}], "protocol"),
    ],
)
def test_a_server_that_refuses_us_does_so_for_good(error: list[Any], kind: str) -> None:
    client = Client()
    client.open()
    refused, _ = client.hear("error", *error)
    assert isinstance(refused, ConnectionRefused) and refused.kind == kind
    assert error[0] in refused.reason
    assert client.said() == []
    client.session.disconnected()
    assert client.session.state is ConnectionState.REFUSED


def test_an_auth_error_later_is_the_end_too_and_a_protocol_error_is_not() -> None:
    client = Client()
    client.connect()
    assert client.hear("error", "Unknown message type `x`", "protocol") == []
    assert client.session.complaint == "Unknown message type `x`"
    assert client.session.state is ConnectionState.CONNECTED
    refused, _ = client.hear("error", "Token has expired", "auth")
    assert isinstance(refused, ConnectionRefused) and refused.kind == "auth"


@pytest.mark.parametrize("message", [["sync", 1, {"type": "a"}, [1]], ["synced", 1], ["ping", 1]])
def test_nothing_counts_before_connected(message: list[Any]) -> None:
    client = Client()
    client.open()
    assert client.hear(*message) == []
    assert client.said() == [["error", "missed-auth", "auth"]]
    assert client.hear(*CONNECTED)


# The server's identity


def test_a_server_is_verified_before_anything_it_says_counts() -> None:
    client = Client(verifies=True)
    client.open()
    assert client.hear(*CONNECTED, {"token": "mine"}) == [Verify("server", {"token": "mine"})]
    assert client.hear("sync", 1, {"type": "a"}, [1]) == []
    assert client.hear("ping", 1) == []
    assert client.session.wants is None
    assert client.tick(60) == []
    assert client.said() == []
    assert client.session.state is ConnectionState.CONNECTING
    opened, received = client.session.accept(client.now)
    assert isinstance(opened, Opened)
    assert received == ReceivedEvents(1, [({"type": "a"}, [1])])
    assert client.said() == [["pong", 0]]
    assert client.session.stored(1) == []
    assert client.session.received == 1


def test_a_server_with_wrong_credentials_is_told_and_refused_for_good() -> None:
    client = Client(verifies=True)
    client.open()
    assert client.hear(*CONNECTED) == [Verify("server", None)]
    refused, _ = client.session.reject("it is another")
    assert refused == ConnectionRefused("auth", "it is another")
    assert client.said() == [["error", "Wrong credentials", "auth"]]
    client.session.disconnected()
    assert client.session.state is ConnectionState.REFUSED


def test_an_answer_that_comes_too_late_is_none() -> None:
    client = Client(verifies=True)
    client.open()
    client.hear(*CONNECTED)
    client.session.disconnected()
    assert client.session.accept(client.now) == []
    assert client.session.reject("late") == []
    assert client.said() == []


# Incoming messages


def test_each_sync_is_answered_when_it_is_stored() -> None:
    client = Client()
    client.connect()
    for number in (1, 2, 3):
        client.hear("sync", number, {"type": "a"}, [number])
    assert client.said() == []
    client.session.stored(1)
    client.session.stored(2)
    assert client.said() == [["synced", 1], ["synced", 2]]
    assert client.reconnect()[0][3] == 2


def test_a_position_is_not_raised_over_what_is_not_stored() -> None:
    client = Client()
    client.connect()
    client.hear("sync", 1, {"type": "a"}, [1])
    assert client.hear("ping", 9) == []
    client.hear("sync", 10, {"type": "a"}, [10])
    assert client.session.stored(1) == []
    assert client.session.received == 1
    assert client.session.stored(10) == []
    assert client.hear("pong", 12) == [Passed(12)]
    assert client.hear("pong", 11) == []
    assert client.reconnect()[0][3] == 12


def test_what_a_lost_connection_would_have_raised_it_to_is_forgotten() -> None:
    client = Client()
    client.connect()
    client.hear("sync", 1, {"type": "a"}, [1])
    client.hear("ping", 9)
    assert client.reconnect()[0][3] == 0


def test_a_server_that_counts_anew_is_followed() -> None:
    client = Client(received=150)
    client.connect()
    client.hear("sync", 1, {"type": "a"}, [1])
    client.session.stored(1)
    assert client.hear("ping", 3) == [Passed(3)]
    assert client.reconnect()[0][3] == 3


# Outgoing messages


def test_one_sync_is_under_way_at_a_time() -> None:
    client = Client()
    client.connect()
    assert client.session.wants is None
    client.add(1)
    assert client.session.wants == 1
    client.offer(1)
    client.add(2)
    client.add(3)
    assert client.session.wants is None
    assert client.hear("synced", 0) == []
    assert client.session.wants is None
    assert client.hear("synced", 1) == [EventsAcknowledged(1, 1)]
    assert client.session.wants == 2
    client.offer(2, 3)
    assert client.hear("synced", 3) == [EventsAcknowledged(3, 2)]
    assert client.session.wants is None
    assert [message[:2] for message in client.said()] == [["sync", 1], ["sync", 3]]


def test_what_is_not_answered_is_sent_again_on_the_next_connection() -> None:
    client = Client(last=9, unsent=4)
    client.connect()
    client.offer(4, 6, rest=9)
    client.reconnect()
    client.hear(*CONNECTED)
    assert client.session.wants == 4
    client.offer(4, 6, rest=9)
    assert client.hear("synced", 6) == [EventsAcknowledged(6, 2)]
    assert client.session.wants == 9
    client.reconnect()
    client.hear(*CONNECTED)
    assert client.session.wants == 9


def test_no_position_is_told_above_what_was_sent() -> None:
    client = Client(last=9, unsent=4)
    client.connect()
    client.hear("ping", 0)
    client.offer(4, 5, rest=7)
    client.hear("ping", 0)
    assert client.hear("synced", 5) == [EventsAcknowledged(5, 2)]
    client.offer(7)
    client.hear("ping", 0)
    client.add(10)
    client.hear("ping", 0)
    assert [message[1] for message in client.said() if message[0] == "pong"] == [3, 6, 9, 9]


def test_an_answer_to_nothing_is_ignored() -> None:
    client = Client(last=3, unsent=1)
    client.connect()
    assert client.hear("synced", 1000) == []
    assert client.session.wants == 1


# Silence


def test_a_silent_server_is_pinged_and_given_up() -> None:
    client = Client(ping_interval_s=5, pings_unanswered_max=2)
    client.connect()
    assert client.session.tick_at == 5
    assert client.tick(4.9) == []
    assert client.said() == []
    client.tick(0.1)
    assert client.said() == [["ping", 0]]
    client.now += 1
    client.hear("pong", 0)
    assert client.session.latency_s == 1
    assert client.session.tick_at == client.now + 5
    client.tick(5)
    client.tick(5)
    assert client.said() == [["ping", 0], ["ping", 0]]
    assert client.tick(5) == [Broken("2 pings are unanswered")]


def test_anything_that_is_said_proves_that_it_is_there() -> None:
    client = Client(ping_interval_s=5, pings_unanswered_max=1)
    client.connect()
    for _ in range(5):
        assert client.tick(5) == []
        client.hear("ping", 0)


def test_a_server_that_does_not_answer_connect_is_given_up() -> None:
    client = Client(ping_interval_s=5, pings_unanswered_max=4)
    client.open()
    assert client.tick(19) == []
    client.hear("nonsense")
    assert client.tick(1) == [Broken("the server does not answer `connect`")]


def test_silence_proves_nothing_while_we_do_not_read() -> None:
    client = Client(ping_interval_s=5, pings_unanswered_max=1)
    client.connect()
    for _ in range(5):
        assert client.tick(5, reading=False) == []
        assert client.said() == [["ping", 0]]
    assert client.tick(5) == []
    assert client.tick(5) == [Broken("the last ping is unanswered")]


# Unknown and invalid messages


@pytest.mark.parametrize(
    "message", [["nonsense", 1], ["headers", {}], ["connect", [0, 0], "x", 0], ["debug", "error"]]
)
@pytest.mark.parametrize("greeted", [False, True])
def test_an_unknown_type_is_told_and_the_connection_goes_on(
    message: list[Any], greeted: bool
) -> None:
    client = Client()
    client.open()
    if greeted:
        client.hear(*CONNECTED)
    assert client.hear(*message) == []
    assert client.said() == [["error", f"Unknown message type `{message[0]}`", "protocol"]]
    if not greeted:
        client.hear(*CONNECTED)
    client.hear("ping", 0)
    assert client.said() == [["pong", 0]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb(["sync", 1, {"type": "good"}, [1], {"type": "bad"}, []]),
        msgpack.packb(["sync", 1, {"no": "type"}, [1]]),
        msgpack.packb(["sync", -1, {"type": "a"}, [1]]),
        msgpack.packb(["sync", 2**63, {"type": "a"}, [1]]),
        msgpack.packb(["ping", 1e300]),
        msgpack.packb(["ping", b"1"]),
        msgpack.packb(CONNECTED),
    ],
)
def test_what_is_no_message_is_told_and_ends_the_connection_only(data: bytes) -> None:
    client = Client()
    client.connect()
    [event] = client.session.receive_data([data, msgpack.packb(["ping", 1])], client.now)
    assert isinstance(event, Finished)
    [error] = client.said()
    assert (error[0], error[2]) == ("error", "protocol")
    client.session.disconnected()
    assert client.session.state is ConnectionState.DISCONNECTED
    assert client.open()[0][3] == 0


def test_times_beyond_all_measure_are_refused() -> None:
    client = Client()
    client.open()
    [event] = client.hear("connected", [0, 0], "server", [0, 1e300])
    assert isinstance(event, Finished)


def test_a_server_that_asks_and_does_not_read_gets_no_endless_answers() -> None:
    client = Client()
    client.connect()
    for _ in range(3000):
        client.hear("ping", 1)
        client.hear("n" * 10_000)
    said = client.said()
    assert len(said) == 1000
    assert max(len(str(one)) for one in said) < 200
