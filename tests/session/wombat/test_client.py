"""The Wombat client session: its messages, events and memory. Time is passed in.

Messages are encoded with `msgpack`, so that our codec is tested against another implementation.
"""

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    BadTopicNameError,
    LocalProtocolError,
    PayloadTooLargeError,
    WindowFullError,
)
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.session.client import Broken, ConnectionState
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import (
    Event,
    Missed,
    PublishesAcknowledged,
    TopicAttached,
    TopicDetached,
    TopicMessages,
)
from headrace.session.wombat import WombatClientSession

BIG = 1 << 30
LAST_NUMBER = 2**32 - 1

Said = tuple[Any, ...]


def connected(**options: float) -> WombatClientSession:
    session = WombatClientSession(**options)  # type: ignore[arg-type]
    connect(session)
    return session


def connect(session: WombatClientSession, now: float = 0.0) -> list[Said]:
    """Connect and return the first messages, without the ping."""
    session.connecting()
    session.opened(now)
    return [message for message in sent(session, now) if message[0] != "ping"]


def reconnect(session: WombatClientSession, now: float = 0.0) -> list[Said]:
    session.disconnected()
    return connect(session, now)


def sent(session: WombatClientSession, now: float = 0.0, bytes_max: int = BIG) -> list[Said]:
    """Return name and fields of each message; each frame holds one message."""
    return [said(message) for message in session.data_to_send(bytes_max, now)]


def said(message: bytes) -> Said:
    kind, (name, fields) = msgpack.unpackb(message).items()
    assert kind[1] == {"attach": 1, "publish": 3, "ping": 6, "detach": 8}[name]
    return (name, *fields.values())


def numbers(messages: list[Said]) -> list[int]:
    return [fields[-1] for name, *fields in messages if name == "publish"]


def receive(session: WombatClientSession, *messages: bytes, now: float = 0.0) -> list[Event]:
    return session.receive_data(messages, now)


def message(kind: int, name: str, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"type": kind, name: fields})
    return packed


def ack(number: int, topic: str = "t") -> bytes:
    return message(4, "ack", topic=topic, sequence_number=number)


def attached_at(serial: str, topic: str = "t") -> bytes:
    return message(2, "attached", topic=topic, serial=serial)


def payload(serial: str, data: bytes, topic: str = "t") -> bytes:
    return message(5, "payload", topic=topic, serial=serial, message=data)


def pong(timestamp: int) -> bytes:
    return message(7, "pong", timestamp=timestamp)


def detached(topic: str = "t") -> bytes:
    return message(9, "detached", topic=topic)


def following(serial: str = "3@0") -> WombatClientSession:
    """Return a session that is attached to `t` without having asked for a position."""
    session = connected()
    session.attach("t", None)
    receive(session, attached_at(serial))
    sent(session)
    return session


def test_it_is_a_client_session() -> None:
    session: ClientSession = WombatClientSession()
    assert session.state is ConnectionState.DISCONNECTED


# Publishing


def test_publishes_of_all_topics_are_numbered_by_one_counter_and_sent_in_order() -> None:
    session = connected()
    assert [session.publish(topic, b"x") for topic in "aba"] == [0, 1, 2]
    assert sent(session) == [
        ("publish", "a", b"x", 0),
        ("publish", "b", b"x", 1),
        ("publish", "a", b"x", 2),
    ]
    assert sent(session) == []


def test_an_ack_clears_everything_up_to_its_number_whatever_its_topic() -> None:
    session = connected()
    for topic in "abc":
        session.publish(topic, b"")
    sent(session)
    assert receive(session, ack(1, "b")) == [PublishesAcknowledged(2)]
    assert session.unacknowledged == 1
    assert receive(session, ack(0, "a"), ack(1, "b")) == []
    assert receive(session, ack(2, "c")) == [PublishesAcknowledged(1)]
    assert receive(session, ack(2, "c")) == []


@pytest.mark.parametrize("number", [1, 2, 1000, 2**31 - 1])
def test_an_ack_for_what_was_never_sent_breaks_the_connection_and_clears_nothing(
    number: int,
) -> None:
    session = connected()
    session.publish("t", b"a")
    sent(session)
    session.publish("t", b"published, and not yet handed to the transport")
    [event] = receive(session, ack(number), ack(0))
    assert isinstance(event, Broken)
    assert f"publish {number}, which was never sent" in event.reason
    assert session.unacknowledged == 2


def test_numbers_start_over_behind_the_last() -> None:
    session = connected()
    session._window.next_number = LAST_NUMBER - 1
    for _ in range(5):
        session.publish("t", b"")
    assert numbers(sent(session)) == [LAST_NUMBER - 1, LAST_NUMBER, 0, 1, 2]
    assert receive(session, ack(LAST_NUMBER - 2)) == []
    assert receive(session, ack(LAST_NUMBER - 1)) == [PublishesAcknowledged(1)]
    assert receive(session, ack(1)) == [PublishesAcknowledged(3)]
    assert receive(session, ack(LAST_NUMBER), ack(0)) == []
    assert numbers(reconnect(session)) == [2]
    assert isinstance(receive(session, ack(3))[0], Broken)
    assert receive(session, ack(2)) == [PublishesAcknowledged(1)]


def test_unacknowledged_publishes_are_resent_on_a_new_connection_with_their_old_numbers() -> None:
    session = connected()
    for name in (b"a", b"b", b"c"):
        session.publish("t", name)
    sent(session)
    receive(session, ack(0))
    assert reconnect(session) == [("publish", "t", b"b", 1), ("publish", "t", b"c", 2)]
    session.publish("t", b"d")
    assert numbers(sent(session)) == [3]


def test_what_was_published_without_a_connection_is_sent_when_there_is_one() -> None:
    session = WombatClientSession()
    session.publish("t", b"a")
    session.connecting()
    session.publish("t", b"b")
    assert sent(session) == []
    session.opened(0.0)
    assert numbers(sent(session)) == [0, 1]


def test_what_the_server_would_refuse_is_refused_here() -> None:
    session = connected(window_max=1)
    with pytest.raises(BadTopicNameError):
        session.publish("", b"a")
    with pytest.raises(BadTopicNameError):
        session.attach("x" * 256, None)
    with pytest.raises(PayloadTooLargeError):
        session.publish("t", bytes(PAYLOAD_BYTES_MAX + 1))
    assert session.publish("t", bytes(PAYLOAD_BYTES_MAX)) == 0
    with pytest.raises(WindowFullError):
        session.publish("t", b"")


# Resending


def test_a_publish_not_acknowledged_within_two_seconds_is_sent_again_with_its_number() -> None:
    session = connected()
    session.publish("t", b"a")
    assert numbers(sent(session, 1.0)) == [0]
    assert session.tick_at == 3.0
    session.tick(2.9)
    assert sent(session, 2.9) == []
    session.tick(3.0)
    assert sent(session, 3.0) == [("publish", "t", b"a", 0)]
    assert receive(session, ack(0)) == [PublishesAcknowledged(1)]
    assert session.tick_at == 5.0  # the next ping
    session.tick(4.99)
    assert sent(session, 4.99) == []


def test_it_is_sent_again_every_two_seconds_from_when_it_was_last_handed_over() -> None:
    session = connected(ping_interval_s=100)
    session.publish("t", b"a")
    sent(session, 0.0)
    session.tick(2.5)
    assert numbers(sent(session, 2.5)) == [0]
    session.tick(4.4)
    assert numbers(sent(session, 4.4)) == []
    session.tick(4.5)
    assert numbers(sent(session, 4.5)) == [0]


def test_each_is_sent_again_in_its_own_time() -> None:
    session = connected(ping_interval_s=100)
    for now in (0.0, 0.5, 1.0):
        session.publish("t", b"")
        sent(session, now)
    session.tick(2.6)
    assert numbers(sent(session, 2.6)) == [0, 1]
    session.tick(3.0)
    assert numbers(sent(session, 3.0)) == [2]
    session.tick(5.1)
    assert numbers(sent(session, 5.1)) == [0, 1, 2]


def test_what_was_acknowledged_meanwhile_is_not_sent_again() -> None:
    session = connected()
    for _ in range(3):
        session.publish("t", b"")
    sent(session, 0.0)
    receive(session, ack(0))
    session.tick(2.0)
    receive(session, ack(1))
    assert numbers(sent(session, 2.0)) == [2]


def test_what_the_transport_has_not_taken_is_not_sent_again() -> None:
    session = connected(ping_interval_s=100)
    for _ in range(4):
        session.publish("t", bytes(1000))
    assert numbers(sent(session, 0.0, bytes_max=1500)) == [0, 1]
    for now in (2.0, 4.0, 6.0):
        session.tick(now)
    assert numbers(sent(session, 7.0, bytes_max=1)) == [0]
    session.tick(8.0)
    assert numbers(sent(session, 8.0)) == [1]
    assert numbers(sent(session, 8.0)) == [2, 3]
    assert sent(session, 8.0) == []
    session.tick(10.0)
    assert numbers(sent(session, 10.0)) == [0, 1, 2, 3]


def test_pings_overtake_what_is_sent_again_and_that_overtakes_what_is_new() -> None:
    session = connected()
    session.publish("t", b"old")
    sent(session, 3.0)
    receive(session, pong(0))
    session.publish("t", b"new")
    session.tick(5.0)
    [ping, *again] = sent(session, 5.0)
    assert ping[0] == "ping"
    assert numbers(again) == [0]
    assert numbers(sent(session, 5.0)) == [1]


def test_while_we_do_not_read_nothing_is_sent_again_and_the_time_counts_anew() -> None:
    session = connected(ping_interval_s=100)
    session.publish("t", b"")
    sent(session, 0.0)
    session.tick(2.0, reading=False)
    assert sent(session, 2.0) == []
    assert session.tick_at == 4.0
    session.tick(4.0)
    assert numbers(sent(session, 4.0)) == [0]


def test_a_new_connection_sends_once_and_counts_from_then_on() -> None:
    session = connected(ping_interval_s=100)
    session.publish("t", b"")
    sent(session, 0.0)
    session.tick(2.0)
    assert numbers(reconnect(session, now=2.0)) == [0]
    session.tick(3.9)
    assert sent(session, 3.9) == []
    session.tick(4.0)
    assert numbers(sent(session, 4.0)) == [0]


def test_what_came_late_and_out_of_turn_is_sent_again_in_order() -> None:
    session = connected(ping_interval_s=100)
    session.publish("t", b"")
    sent(session, 0.0)
    session.publish("t", b"")
    sent(session, 1.5)
    session.tick(2.0)
    assert numbers(sent(session, 2.0)) == [0]
    session.tick(4.0)
    assert numbers(sent(session, 4.0)) == [0, 1]


# Pings


def test_it_is_connected_when_the_peer_has_answered_and_not_before() -> None:
    session = connected()
    assert session.state is ConnectionState.CONNECTING
    receive(session, pong(0))
    assert session.state is ConnectionState.CONNECTED
    reconnect(session)
    assert session.state is ConnectionState.CONNECTING


def test_it_pings_when_connected_and_every_five_seconds_and_knows_the_latency() -> None:
    session = WombatClientSession()
    session.connecting()
    session.opened(10.0)
    assert sent(session) == [("ping", 10_000_000)]
    assert session.latency_s is None
    receive(session, pong(10_000_000), now=10.25)
    assert session.latency_s == 0.25
    assert session.tick_at == 15.0
    assert session.tick(14.9) == []
    assert sent(session) == []
    assert session.tick(15.0) == []
    assert sent(session) == [("ping", 15_000_000)]


def test_a_ping_unanswered_when_the_next_is_due_ends_the_connection() -> None:
    session = connected()
    session.attach("t", None)
    receive(session, attached_at("3@0"), payload("3@5", b"x"), pong(12345))
    assert session.tick(4.9) == []
    [event] = session.tick(5.0)
    assert event == Broken("the last ping is unanswered")
    reconnect(session)
    receive(session, pong(0))
    assert session.tick(5.0) == []


def test_while_we_do_not_read_it_pings_and_expects_no_answer() -> None:
    session = connected()
    for now in (5.0, 10.0, 15.0):
        assert session.tick(now, reading=False) == []
        assert [name for name, *_ in sent(session)] == ["ping"]
    assert session.tick(20.0) == []
    assert session.tick(24.9) == []
    assert isinstance(session.tick(25.0)[0], Broken)


# Attaching


def test_attaching_asks_from_the_offset_or_from_the_end() -> None:
    session = connected()
    session.attach("a", 7)
    session.attach("b", None)
    assert sent(session) == [("attach", "a", "@7"), ("attach", "b")]
    with pytest.raises(LocalProtocolError):
        session.attach("c", -1)


def test_attaching_asks_with_any_serial_as_it_is() -> None:
    session = connected()
    session.attach("a", "of another server: \u00fc @7")
    assert sent(session) == [("attach", "a", "of another server: \u00fc @7")]
    with pytest.raises(LocalProtocolError):
        session.attach("c", "")


def test_messages_are_delivered_with_their_serials() -> None:
    session = connected()
    session.attach("t", 0)
    stream = payload("3@7", b"foo"), payload("3@14", b"bar"), payload("3@18", b"")
    assert receive(session, attached_at("@0"), *stream) == [
        TopicAttached("t", "@0"),
        TopicMessages("t", [("3@7", b"foo"), ("3@14", b"bar"), ("3@18", b"")]),
    ]
    assert receive(session, payload("3@23", b"x"), payload("3@27", b"")) == [
        TopicMessages("t", [("3@23", b"x"), ("3@27", b"")])
    ]


@pytest.mark.parametrize(
    "serials", [("a", "b"), ("zz", "aa"), ("7", "7"), ("3@", "-1@7"), ("\u2603", "x@y@z")]
)
def test_serials_of_other_servers_are_stored_compared_and_given_back(
    serials: tuple[str, str],
) -> None:
    first, last = serials
    session = following("start")
    assert reconnect(session) == [("attach", "t", "start")]
    assert receive(session, attached_at("start")) == [TopicAttached("t", "start")]
    assert receive(session, payload(first, b"foo"), payload(last, b"bar")) == [
        TopicMessages("t", [(first, b"foo"), (last, b"bar")])
    ]
    assert reconnect(session) == [("attach", "t", last)]
    assert receive(session, attached_at(last)) == [TopicAttached("t", last)]
    assert reconnect(session) == [("attach", "t", last)]
    assert receive(session, attached_at("other")) == [
        TopicAttached("t", "other"),
        Missed("t", None, None, asked_serial=last, got_serial="other"),
    ]


def test_messages_of_a_topic_that_was_not_asked_for_are_ignored() -> None:
    session = connected()
    assert receive(session, payload("3@7", b"foo")) == []
    assert receive(session, attached_at("3@0"), payload("3@7", b"foo"), detached()) == []


@pytest.mark.parametrize(
    ("asked", "answer", "missed"),
    [
        (None, "3@700", None),
        (7, "@7", None),
        (7, "@21", Missed("t", 7, 21, "@7", "@21")),
        (7, "3@21", Missed("t", 7, 21, "@7", "3@21")),
        (7, "3@0", Missed("t", 7, 0, "@7", "3@0")),
        (7, "another's", Missed("t", 7, None, "@7", "another's")),
        ("3@7", "3@7", None),
        ("3@7", "4@7", Missed("t", 7, 7, "3@7", "4@7")),
    ],
)
def test_another_start_than_asked_for_is_told_with_both_places(
    asked: int | str | None, answer: str, missed: Missed | None
) -> None:
    session = connected()
    session.attach("t", asked)
    events = receive(session, attached_at(answer))
    assert events[0] == TopicAttached("t", answer)
    assert events[1:] == ([] if missed is None else [missed])


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        ("3@14", None),
        ("3@21", Missed("t", 14, 21, "3@14", "3@21")),
        ("4@14", Missed("t", 14, 14, "3@14", "4@14")),
        ("4@0", Missed("t", 14, 0, "3@14", "4@0")),
        ("@14", Missed("t", 14, 14, "3@14", "@14")),
    ],
)
def test_a_topic_made_anew_has_another_serial_and_counts_as_missed(
    answer: str, missed: Missed | None
) -> None:
    session = following("3@7")
    receive(session, payload("3@14", b"foo"))
    assert reconnect(session) == [("attach", "t", "3@14")]
    assert receive(session, attached_at(answer))[1:] == ([] if missed is None else [missed])


def test_a_topic_made_anew_while_it_is_followed_goes_on_with_its_new_epoch() -> None:
    session = following("3@0")
    stream = payload("3@7", b"foo"), payload("5@14", b"bar")
    assert receive(session, *stream) == [TopicMessages("t", [("3@7", b"foo"), ("5@14", b"bar")])]
    assert reconnect(session) == [("attach", "t", "5@14")]


# Detaching


def test_detaching_ends_delivery_at_once_and_is_over_when_confirmed() -> None:
    session = following()
    assert session.detach("t") is True
    assert sent(session) == [("detach", "t")]
    assert receive(session, payload("3@7", b"foo")) == []
    assert receive(session, detached()) == [TopicDetached("t")]
    assert session.detach("t") is False
    assert sent(session) == []


def test_attaching_again_waits_for_detached_so_that_old_answers_are_not_taken_for_new() -> None:
    session = connected()
    session.attach("t", 0)
    session.detach("t")
    session.attach("t", 7)
    assert sent(session) == [("attach", "t", "@0"), ("detach", "t")]
    assert receive(session, attached_at("@0"), payload("3@7", b"foo")) == []
    assert receive(session, detached()) == []
    assert sent(session) == [("attach", "t", "@7")]
    assert receive(session, attached_at("@7"), payload("3@14", b"bar")) == [
        TopicAttached("t", "@7"),
        TopicMessages("t", [("3@14", b"bar")]),
    ]


def test_detach_attach_detach_sends_one_detach() -> None:
    session = following()
    session.detach("t")
    session.attach("t", 7)
    assert session.detach("t") is True
    assert sent(session) == [("detach", "t")]
    assert receive(session, detached()) == [TopicDetached("t")]


def test_a_server_that_detaches_unasked_is_broken_rather_than_silent() -> None:
    [event] = receive(following(), detached())
    assert isinstance(event, Broken)


def test_a_paused_topic_is_resumed_with_its_serial_and_not_only_its_offset() -> None:
    session = following("3@0")
    receive(session, payload("3@7", b"foo"))
    session.pause("t")
    assert sent(session) == [("detach", "t")]
    receive(session, payload("3@14", b"bar"), detached())
    session.resume("t")
    assert sent(session) == [("attach", "t", "3@7")]
    session.pause("t")
    assert sent(session) == [("detach", "t")]
    session.resume("t")
    assert sent(session) == []
    receive(session, detached())
    assert sent(session) == [("attach", "t", "3@7")]


def test_a_paused_topic_that_is_no_longer_wanted_is_forgotten() -> None:
    session = following("3@0")
    session.pause("t")
    assert session.detach("t") is True
    session.attach("t", None)
    receive(session, detached())
    assert sent(session) == [("detach", "t"), ("attach", "t")]
    assert not session._topics._paused


# Reconnecting


@pytest.mark.parametrize(("offset", "again"), [(None, ()), (0, ("@0",)), (7, ("@7",))])
def test_an_attaching_topic_is_asked_for_again_in_the_same_way(
    offset: int | None, again: tuple[str, ...]
) -> None:
    session = connected()
    session.attach("t", offset)
    assert reconnect(session) == [("attach", "t", *again)]
    assert reconnect(session) == [("attach", "t", *again)]


def test_an_attached_topic_goes_on_from_the_serial_of_the_last_message_received() -> None:
    session = connected()
    session.attach("t", 0)
    receive(session, attached_at("@0"), payload("3@7", b"foo"), payload("3@14", b"bar"))
    assert reconnect(session) == [("attach", "t", "3@14")]
    assert reconnect(session) == [("attach", "t", "3@14")]
    assert receive(session, attached_at("3@14")) == [TopicAttached("t", "3@14")]
    assert reconnect(session) == [("attach", "t", "3@14")]


@pytest.mark.parametrize(("asked", "answer"), [(None, "3@700"), (7, "@7"), (7, "3@7"), (7, "3@21")])
def test_an_attached_topic_without_messages_goes_on_from_the_serial_of_attached(
    asked: int | None, answer: str
) -> None:
    session = connected()
    session.attach("t", asked)
    receive(session, attached_at(answer))
    assert reconnect(session) == [("attach", "t", answer)]


def test_a_detaching_topic_is_detached_again_or_attached_if_wanted_again() -> None:
    session = following()
    session.detach("t")
    assert reconnect(session) == [("detach", "t")]
    session.attach("t", 7)
    assert reconnect(session) == [("attach", "t", "@7")]


def test_topics_are_attached_before_publishes_are_resent() -> None:
    session = connected()
    session.publish("t", b"a")
    session.attach("t", None)
    assert reconnect(session) == [("attach", "t"), ("publish", "t", b"a", 0)]


# Bad input


def test_a_server_that_breaks_the_protocol_is_left_after_what_it_said_before() -> None:
    session = connected()
    session.publish("t", b"a")
    sent(session)
    events = receive(session, ack(0), message(8, "detach", topic="t"), ack(0))
    assert events[0] == PublishesAcknowledged(1)
    assert isinstance(events[1], Broken)
    assert len(events) == 2
    assert "DETACH is not for a server to send" in events[1].reason


def test_messages_of_a_later_version_are_passed_over() -> None:
    session = following("3@0")
    stream = payload("3@7", b"foo"), message(10, "news", of="tomorrow"), payload("3@14", b"bar")
    assert receive(session, *stream) == [TopicMessages("t", [("3@7", b"foo"), ("3@14", b"bar")])]


def test_a_peer_that_speaks_something_else_is_never_connected() -> None:
    session = connected()
    [event] = receive(session, b"hello")
    assert isinstance(event, Broken)
    assert session.state is ConnectionState.CONNECTING


def test_bad_input_of_the_old_connection_is_forgotten() -> None:
    session = connected()
    receive(session, b"hello")
    reconnect(session)
    receive(session, pong(0))
    assert session.state is ConnectionState.CONNECTED


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_any_messages_give_events(stream: list[bytes]) -> None:
    session = following()
    session.publish("t", b"a")
    for event in session.receive_data(stream, 0.0):
        assert isinstance(event, Event)


# A session and a small server with a log, over connections that break and delay


class Peer:
    """A minimal Wombat server: one topic in memory, one connection at a time."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.connect()

    def connect(self) -> None:
        self.next: int | None = None
        self.numbers: set[int] = set()
        self.unacknowledged: list[int] = []
        self.out: list[bytes] = []

    def receive(self, messages: list[Said]) -> None:
        for name, *fields in messages:
            if name == "attach":
                self.next = int(fields[1].partition("@")[2])
                self.out.append(attached_at(fields[1]))
            elif name == "publish":
                if fields[2] not in self.numbers:
                    self.numbers.add(fields[2])
                    self.log.append(fields[1])
                self.unacknowledged.append(fields[2])
            elif name == "ping":
                self.out.append(pong(fields[0]))

    def answer(self) -> None:
        for number in self.unacknowledged:
            self.out.append(ack(number))
        self.unacknowledged.clear()
        if self.next is not None:
            position = 0
            for data in self.log:
                position += 4 + len(data)
                if position > self.next:
                    self.out.append(payload(f"3@{position}", data))
            self.next = max(position, self.next)


@given(st.integers(0, 2**32))
def test_over_bad_connections_nothing_acknowledged_is_lost_and_nothing_comes_twice(
    seed: int,
) -> None:
    choose = random.Random(seed)
    session, peer = WombatClientSession(), Peer()
    session._window.next_number = choose.choice([0, LAST_NUMBER - 10])
    now = 0.0
    published = acknowledged = 0
    received: list[tuple[int | str, bytes]] = []
    session.attach("t", 0)

    def take(messages: list[bytes]) -> None:
        nonlocal acknowledged
        for event in session.receive_data(messages, now):
            assert not isinstance(event, Missed | Broken), event
            if isinstance(event, TopicMessages):
                received.extend(event.messages)
            elif isinstance(event, PublishesAcknowledged):
                acknowledged += event.publishes

    def step(lossy: bool) -> None:
        nonlocal now, published
        now += choose.random()
        if session.state is ConnectionState.DISCONNECTED:
            peer.connect()
            session.connecting()
            session.opened(now)
        elif session.tick(now):
            session.disconnected()  # a pong was late
            return
        for _ in range(choose.randrange(4) if lossy else 0):
            session.publish("t", b"%d" % published)
            published += 1
        peer.receive(sent(session, now, choose.choice([20, BIG])))
        if not lossy or choose.random() < 0.3:
            peer.answer()
        # A connection may break between any two messages that the peer sent.
        cut = choose.randrange(len(peer.out) + 1) if lossy else len(peer.out)
        take(peer.out[:cut])
        peer.out = peer.out[cut:]
        if lossy and choose.random() < 0.1:
            session.disconnected()

    for _ in range(30):
        step(lossy=True)
    while session.unacknowledged or len(received) < len(peer.log) or peer.next is None:
        step(lossy=False)

    assert acknowledged == published
    assert set(peer.log) == {b"%d" % number for number in range(published)}
    assert [data for _, data in received] == peer.log
    ends = [sum(4 + len(data) for data in peer.log[: i + 1]) for i in range(len(peer.log))]
    assert [serial for serial, _ in received] == [f"3@{end}" for end in ends]
