"""The Figg client session: its messages, events and memory. Time is passed in."""

import random
from collections.abc import Iterable
from math import inf
from typing import Any

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
from headrace.session.figg import FiggClientSession
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import (
    Event,
    Missed,
    PublishesAcknowledged,
    PublishRefused,
    TopicAttached,
    TopicDetached,
    TopicMessages,
)
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ServerDecoder

BIG = 1 << 30


def connected(**options: int) -> FiggClientSession:
    session = FiggClientSession(**options)
    connect(session)
    return session


def connect(session: FiggClientSession, now: float = 0.0) -> list[figg.ToServer]:
    """Connect and return the first messages, without the ping."""
    session.connecting()
    session.opened(now)
    return [message for message in sent(session) if not isinstance(message, figg.Ping)]


def reconnect(session: FiggClientSession) -> list[figg.ToServer]:
    session.disconnected()
    return connect(session)


def output(session: FiggClientSession, bytes_max: int = BIG) -> bytes:
    return b"".join(session.data_to_send(bytes_max, 0.0))


def sent(session: FiggClientSession) -> list[figg.ToServer]:
    return ServerDecoder().receive(output(session))


def pings(session: FiggClientSession) -> list[int]:
    return [message.timestamp for message in sent(session) if isinstance(message, figg.Ping)]


def records(payloads: Iterable[bytes]) -> list[bytes]:
    return [len(payload).to_bytes(4, "big") + payload for payload in payloads]


def publishes(topic: str, first: int, payloads: list[bytes]) -> figg.Publishes:
    return figg.Publishes({topic: records(payloads)}, first, first + len(payloads) - 1)


def receive(session: FiggClientSession, *frames: bytes) -> list[Event]:
    return session.receive_data([b"".join(frames)], 0.0)


def data(topic: str, begin: int, *payloads: bytes) -> bytes:
    return figg.encode_data(topic, begin, records(payloads))


def attached(topic: str = "t", offset: int = 0) -> FiggClientSession:
    session = connected()
    session.attach(topic, offset)
    receive(session, figg.encode_attached(topic, offset))
    output(session)
    return session


def test_it_is_a_client_session() -> None:
    session: ClientSession = FiggClientSession()
    assert session.state is ConnectionState.DISCONNECTED


# Publishing


def test_publishes_are_numbered_from_zero_and_sent_together_in_order() -> None:
    session = connected()
    assert [session.publish("t", payload) for payload in (b"a", b"", b"c")] == [0, 1, 2]
    assert sent(session) == [publishes("t", 0, [b"a", b"", b"c"])]
    assert output(session) == b""


def test_an_ack_clears_everything_up_to_its_number() -> None:
    session = connected()
    for payload in (b"a", b"b", b"c"):
        session.publish("t", payload)
    assert receive(session, figg.encode_ack(1)) == [PublishesAcknowledged(2)]
    assert session.unacknowledged == 1
    assert receive(session, figg.encode_ack(1)) == []
    assert receive(session, figg.encode_ack(0), figg.encode_ack(2)) == [PublishesAcknowledged(1)]
    assert session.unacknowledged == 0


def test_an_ack_for_what_was_never_published_breaks_the_connection_and_clears_nothing() -> None:
    session = connected()
    session.publish("t", b"a")
    [event] = receive(session, figg.encode_ack(1), figg.encode_ack(0))
    assert isinstance(event, Broken)
    assert session.unacknowledged == 1


def test_unacknowledged_publishes_are_resent_in_order_with_their_old_numbers() -> None:
    session = connected()
    for payload in (b"a", b"b", b"c"):
        session.publish("t", payload)
    sent(session)
    receive(session, figg.encode_ack(0))
    assert reconnect(session) == [publishes("t", 1, [b"b", b"c"])]
    session.publish("t", b"d")
    assert sent(session) == [publishes("t", 3, [b"d"])]


def test_what_was_published_without_a_connection_is_sent_when_there_is_one() -> None:
    session = FiggClientSession()
    session.publish("t", b"a")
    session.connecting()
    session.publish("t", b"b")
    assert output(session) == b""
    session.opened(0.0)
    assert sent(session)[1:] == [publishes("t", 0, [b"a", b"b"])]


def test_nothing_is_sent_twice_on_one_connection() -> None:
    session = FiggClientSession()
    session.publish("t", b"a")
    connect(session)
    session.publish("t", b"b")
    assert sent(session) == [publishes("t", 1, [b"b"])]


def test_the_window_is_bounded_in_messages() -> None:
    session = connected(window_max=2)
    session.publish("t", b"a")
    assert session.has_room
    session.publish("t", b"b")
    assert not session.has_room
    with pytest.raises(WindowFullError):
        session.publish("t", b"c")
    receive(session, figg.encode_ack(0))
    assert session.publish("t", b"c") == 2


def test_the_window_is_bounded_in_bytes_also_after_acknowledgements() -> None:
    session = connected(window_bytes_max=1000)
    for seq_num in range(50):
        session.publish("t", bytes(1000))
        assert not session.has_room
        receive(session, figg.encode_ack(seq_num))
        assert session.has_room


@pytest.mark.parametrize("topic", ["", "x" * 256, "é" * 128, "\ud800"])
def test_a_topic_the_server_would_refuse_is_refused_here(topic: str) -> None:
    session = connected()
    with pytest.raises(BadTopicNameError):
        session.publish(topic, b"a")
    with pytest.raises(BadTopicNameError):
        session.attach(topic, None)
    assert output(session) == b""
    assert session.publish("x" * 255, b"") == 0


def test_a_payload_the_server_would_refuse_is_refused_here() -> None:
    session = connected()
    with pytest.raises(PayloadTooLargeError):
        session.publish("t", bytes(PAYLOAD_BYTES_MAX + 1))
    assert session.unacknowledged == 0
    assert session.publish("t", bytes(PAYLOAD_BYTES_MAX)) == 0


def test_large_output_comes_in_slices_and_a_ping_overtakes_it() -> None:
    session = connected()
    for _ in range(10):
        session.publish("t", bytes(1000))
    decoder = ServerDecoder()
    first = decoder.receive(output(session, 2500))
    assert isinstance(first[0], figg.Publishes)
    assert first[0].highest < 4
    session.tick(2.0)
    second = decoder.receive(output(session, 2500))
    assert isinstance(second[0], figg.Ping)
    rest = [message for _ in range(10) for message in decoder.receive(output(session, 2500))]
    assert isinstance(rest[-1], figg.Publishes)
    assert rest[-1].highest == 9


def test_many_topic_names_are_remembered_boundedly() -> None:
    session = connected(window_max=BIG)
    for number in range(10_000):
        session.publish(f"topic {number}", b"")
    assert len(session._names_checked) <= 4096


# Attaching


def test_attaching_asks_from_the_offset_or_from_the_end() -> None:
    session = connected()
    session.attach("a", 7)
    session.attach("b", None)
    session.attach("c", 0)
    assert sent(session) == [figg.Attach("a", 7), figg.Attach("b", None), figg.Attach("c", 0)]


@pytest.mark.parametrize("offset", [-1, 2**64])
def test_an_offset_that_cannot_be_sent_is_refused(offset: int) -> None:
    with pytest.raises(LocalProtocolError):
        connected().attach("t", offset)


def test_messages_are_delivered_with_their_offsets() -> None:
    session = connected()
    session.attach("t", 0)
    events = receive(session, figg.encode_attached("t", 0), data("t", 0, b"foo", b"bar", b""))
    assert events == [
        TopicAttached("t", 0),
        TopicMessages("t", [(7, b"foo"), (14, b"bar"), (18, b"")]),
    ]


def test_messages_of_a_topic_that_was_not_asked_for_are_ignored() -> None:
    session = connected()
    assert receive(session, data("t", 0, b"foo")) == []
    assert receive(session, figg.encode_attached("t", 0), data("t", 0, b"foo")) == []
    assert receive(session, figg.encode_detached("t")) == []


def test_another_start_than_asked_for_is_told_with_both_offsets() -> None:
    session = connected()
    session.attach("t", 7)
    assert receive(session, figg.encode_attached("t", 21)) == [
        TopicAttached("t", 21),
        Missed("t", asked=7, got=21),
    ]
    assert receive(session, data("t", 21, b"x")) == [TopicMessages("t", [(26, b"x")])]


def test_a_topic_that_has_become_shorter_is_told_and_followed() -> None:
    session = attached("t", 100)
    reconnect(session)
    assert receive(session, figg.encode_attached("t", 0)) == [
        TopicAttached("t", 0),
        Missed("t", asked=100, got=0),
    ]
    assert receive(session, data("t", 0, b"x")) == [TopicMessages("t", [(5, b"x")])]


def test_nothing_is_missed_where_nothing_was_asked_for() -> None:
    session = connected()
    session.attach("t", None)
    assert receive(session, figg.encode_attached("t", 700)) == [TopicAttached("t", 700)]


def test_a_gap_in_the_stream_is_told_before_what_comes_after_it() -> None:
    session = attached("t", 0)
    stream = data("t", 0, b"foo") + data("t", 14, b"car", b"dar")
    assert receive(session, stream) == [
        TopicMessages("t", [(7, b"foo")]),
        Missed("t", asked=7, got=14),
        TopicMessages("t", [(21, b"car"), (28, b"dar")]),
    ]


def test_doubles_are_dropped() -> None:
    session = attached("t", 0)
    receive(session, data("t", 0, b"foo", b"bar"))
    assert receive(session, data("t", 0, b"foo", b"bar")) == []
    assert receive(session, data("t", 7, b"bar", b"car")) == [TopicMessages("t", [(21, b"car")])]


def test_detaching_ends_delivery_at_once_and_is_over_when_confirmed() -> None:
    session = attached("t", 0)
    assert session.detach("t") is True
    assert sent(session) == [figg.Detach("t")]
    assert receive(session, data("t", 0, b"foo")) == []
    assert receive(session, figg.encode_detached("t")) == [TopicDetached("t")]
    assert session.detach("t") is False
    assert sent(session) == []


def test_detaching_what_is_still_attaching_ignores_its_answer() -> None:
    session = connected()
    session.attach("t", 0)
    session.detach("t")
    assert sent(session) == [figg.Attach("t", 0), figg.Detach("t")]
    stream = figg.encode_attached("t", 0) + data("t", 0, b"foo") + figg.encode_detached("t")
    assert receive(session, stream) == [TopicDetached("t")]


def test_attaching_again_waits_for_detached_so_that_old_answers_are_not_taken_for_new() -> None:
    session = connected()
    session.attach("t", 0)
    session.detach("t")
    session.attach("t", 7)
    assert sent(session) == [figg.Attach("t", 0), figg.Detach("t")]
    assert receive(session, figg.encode_attached("t", 0), data("t", 0, b"foo")) == []
    assert receive(session, figg.encode_detached("t")) == []
    assert sent(session) == [figg.Attach("t", 7)]
    stream = figg.encode_attached("t", 7) + data("t", 7, b"bar")
    assert receive(session, stream) == [TopicAttached("t", 7), TopicMessages("t", [(14, b"bar")])]


def test_detach_attach_detach_sends_one_detach() -> None:
    session = attached("t", 0)
    session.detach("t")
    session.attach("t", 7)
    assert session.detach("t") is True
    assert sent(session) == [figg.Detach("t")]
    assert receive(session, figg.encode_detached("t")) == [TopicDetached("t")]


def test_a_server_that_detaches_unasked_is_broken_rather_than_silent() -> None:
    for session in (attached("t", 0), connected()):
        if session.detach("t") is False:
            session.attach("t", 0)
        else:
            session.attach("t", 0)
            receive(session, figg.encode_detached("t"))
        [event] = receive(session, figg.encode_detached("t"))
        assert isinstance(event, Broken)


def test_a_paused_topic_is_resumed_where_it_stopped() -> None:
    session = attached("t", 0)
    receive(session, data("t", 0, b"foo"))
    session.pause("t")
    assert sent(session) == [figg.Detach("t")]
    assert receive(session, data("t", 7, b"bar"), figg.encode_detached("t")) == [TopicDetached("t")]
    session.resume("t")
    assert sent(session) == [figg.Attach("t", 7)]


def test_a_topic_paused_before_it_was_attached_is_resumed_as_it_was_asked_for() -> None:
    session = connected()
    session.attach("t", None)
    session.pause("t")
    session.resume("t")
    receive(session, figg.encode_attached("t", 7), figg.encode_detached("t"))
    assert sent(session) == [figg.Attach("t", None), figg.Detach("t"), figg.Attach("t", None)]


# Reconnecting: the table of docs/protocols/figg.md


@pytest.mark.parametrize("offset", [None, 0, 7])
def test_an_attaching_topic_is_asked_for_again_in_the_same_way(offset: int | None) -> None:
    session = connected()
    session.attach("t", offset)
    assert reconnect(session) == [figg.Attach("t", offset)]
    assert reconnect(session) == [figg.Attach("t", offset)]


def test_an_attached_topic_goes_on_from_the_last_message_received() -> None:
    session = attached("t", 0)
    receive(session, data("t", 0, b"foo", b"bar"))
    assert reconnect(session) == [figg.Attach("t", 14)]
    assert reconnect(session) == [figg.Attach("t", 14)]
    assert receive(session, figg.encode_attached("t", 14)) == [TopicAttached("t", 14)]


def test_an_attached_topic_without_messages_goes_on_from_attached() -> None:
    session = connected()
    session.attach("t", None)
    receive(session, figg.encode_attached("t", 700))
    assert reconnect(session) == [figg.Attach("t", 700)]
    assert receive(session, figg.encode_attached("t", 800)) == [
        TopicAttached("t", 800),
        Missed("t", asked=700, got=800),
    ]


def test_a_detaching_topic_is_detached_again() -> None:
    session = attached("t", 0)
    session.detach("t")
    assert reconnect(session) == [figg.Detach("t")]
    receive(session, figg.encode_detached("t"))
    assert reconnect(session) == []


def test_a_detaching_topic_that_was_attached_again_is_attached() -> None:
    session = attached("t", 0)
    session.detach("t")
    session.attach("t", 7)
    assert reconnect(session) == [figg.Attach("t", 7)]


def test_without_a_connection_only_the_last_wish_counts() -> None:
    session = attached("t", 0)
    session.disconnected()
    assert session.detach("t") is False
    session.attach("t", 7)
    session.detach("t")
    session.attach("t", 14)
    assert connect(session) == [figg.Attach("t", 14)]


def test_half_a_frame_of_the_old_connection_is_forgotten() -> None:
    session = attached("t", 0)
    receive(session, data("t", 0, b"foo")[:-1])
    reconnect(session)
    stream = figg.encode_attached("t", 0) + data("t", 0, b"foo")
    assert receive(session, stream) == [TopicAttached("t", 0), TopicMessages("t", [(7, b"foo")])]


def test_topics_are_attached_before_publishes_are_resent() -> None:
    session = connected()
    session.publish("t", b"a")
    session.attach("t", None)
    assert reconnect(session) == [figg.Attach("t", None), publishes("t", 0, [b"a"])]


# Pings


def test_it_is_connected_when_the_peer_has_answered_and_not_before() -> None:
    session = connected()
    assert session.state is ConnectionState.CONNECTING
    receive(session, figg.encode_pong(0))
    assert session.state is ConnectionState.CONNECTED
    reconnect(session)
    assert session.state is ConnectionState.CONNECTING


def test_a_peer_that_says_nothing_is_connected_when_it_has_stood_for_a_while() -> None:
    """Pings are optional in the protocol: a server may know only message types 1 to 7."""
    session = FiggClientSession()
    session.connecting()
    session.opened(10.0)
    assert session.tick_at == 11.0
    assert session.tick(10.9) == []
    assert session.state is ConnectionState.CONNECTING
    assert session.tick(11.0) == []
    assert session.state is ConnectionState.CONNECTED
    assert session.tick_at == 12.0  # the next ping
    session.disconnected()
    assert session.tick_at == inf


def test_without_pings_none_is_sent_and_an_open_connection_is_connected() -> None:
    session = FiggClientSession(ping_interval_s=None)
    session.connecting()
    session.opened(0.0)
    assert session.state is ConnectionState.CONNECTED
    assert session.tick_at == inf
    for reading in (True, False):
        assert session.tick(1e9, reading) == []
    assert session.data_to_send(BIG, 0.0) == []
    assert session.latency_s is None


def test_figg_has_no_serials() -> None:
    with pytest.raises(LocalProtocolError, match="offset"):
        FiggClientSession().attach("t", "3@7")


def test_a_peer_that_speaks_something_else_is_never_connected() -> None:
    session = connected()
    [event] = receive(session, b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert isinstance(event, Broken)
    assert session.state is ConnectionState.CONNECTING


def test_it_pings_when_connected_and_every_two_seconds_and_knows_the_latency() -> None:
    session = FiggClientSession()
    assert session.tick(0.0) == []
    session.connecting()
    session.opened(10.0)
    assert pings(session) == [10_000_000]
    assert session.latency_s is None
    session.receive_data([figg.encode_pong(10_000_000)], 10.25)
    assert session.latency_s == 0.25
    assert session.tick_at == 12.0
    assert session.tick(11.9) == []
    assert pings(session) == []
    assert session.tick(12.0) == []
    assert pings(session) == [12_000_000]


def test_two_unanswered_pings_end_the_connection_when_the_third_is_due() -> None:
    session = connected()
    assert session.tick(2.0) == []
    assert session.tick(3.9) == []
    [event] = session.tick(4.0)
    assert isinstance(event, Broken)
    reconnect(session)
    assert session.tick(2.0) == []


def test_data_is_no_answer_to_a_ping() -> None:
    session = attached("t", 0)
    session.tick(2.0)
    receive(session, data("t", 0, b"foo"))
    assert isinstance(session.tick(4.0)[0], Broken)


def test_a_late_pong_answers_the_pings_before_it_too() -> None:
    session = connected()
    session.tick(2.0)
    session.receive_data([figg.encode_pong(2_000_000)], 3.0)
    assert session.latency_s == 1.0
    assert session.tick(4.0) == []
    assert session.tick(6.0) == []
    assert isinstance(session.tick(8.0)[0], Broken)


def test_a_foreign_pong_answers_nothing() -> None:
    session = connected()
    session.tick(2.0)
    session.receive_data([figg.encode_pong(12345)], 3.0)
    assert session.latency_s is None
    assert isinstance(session.tick(4.0)[0], Broken)


def test_while_we_do_not_read_no_answer_is_expected() -> None:
    session = connected()
    session.tick(2.0)
    for now in (4.0, 6.0, 8.0, 10.0):
        assert session.tick(now, reading=False) == []
    assert pings(session) == [2_000_000]
    assert isinstance(session.tick(12.0)[0], Broken)


# Publishes that a server does not accept


def hang_up_on(session: FiggClientSession, now: float = 0.0, after_s: float = 1.0) -> list[Event]:
    """Connect, send everything, receive a PONG, and let the server close without an acknowledgement."""
    connect(session, now)
    session.receive_data([figg.encode_pong(0)], now)
    events = session.hung_up("the server closed the connection", now + after_s)
    session.disconnected()
    return events


def test_a_publish_that_the_server_hangs_up_on_again_and_again_is_given_up() -> None:
    session = FiggClientSession()
    for payload in (b"bad", b"b", b"c"):
        session.publish("t", payload)
    assert hang_up_on(session) == []
    assert hang_up_on(session) == []
    assert hang_up_on(session) == [PublishRefused("the server closed the connection", 3)]
    assert session.unacknowledged == 2
    [rest] = connect(session)
    assert isinstance(rest, figg.Publishes) and (rest.lowest, rest.highest) == (1, 2)
    assert receive(session, figg.encode_ack(2)) == [PublishesAcknowledged(2)]


def test_before_it_is_given_up_it_was_sent_alone() -> None:
    session = FiggClientSession()
    session.publish("t", b"good")
    session.publish("t", b"bad")
    hang_up_on(session)
    hang_up_on(session)
    [alone] = connect(session)
    assert isinstance(alone, figg.Publishes) and alone.highest == 0
    session.publish("t", b"more")
    assert session.data_to_send(BIG, 0.0) == []
    assert receive(session, figg.encode_ack(0)) == [PublishesAcknowledged(1)]
    assert len(session.data_to_send(BIG, 0.0)) == 2
    session.disconnected()
    assert [hang_up_on(session) for _ in range(2)] == [[], []]


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda session: lose(session), id="a connection that is lost"),
        pytest.param(lambda session: fail(session), id="an attempt that fails"),
        pytest.param(lambda session: hang_up_on(session, after_s=60), id="a server that stops"),
        pytest.param(lambda session: silent(session), id="a port that says nothing"),
    ],
)
def test_another_end_of_a_connection_says_nothing_about_the_publish(between: Any) -> None:
    session = FiggClientSession()
    session.publish("t", b"good")
    for _ in range(5):
        assert [hang_up_on(session) for _ in range(2)] == [[], []]
        assert not between(session)
    assert session.unacknowledged == 1


def lose(session: FiggClientSession) -> None:
    connect(session)
    session.receive_data([figg.encode_pong(0)], 0.0)
    session.disconnected()


def fail(session: FiggClientSession) -> None:
    session.connecting()
    session.disconnected()


def silent(session: FiggClientSession) -> list[Event]:
    connect(session)
    events = session.hung_up("", 1.0)
    session.disconnected()
    return events


def test_a_server_that_hangs_up_without_having_been_sent_anything_refuses_nothing() -> None:
    session = FiggClientSession()
    assert [hang_up_on(session) for _ in range(5)] == [[]] * 5
    session.publish("t", b"good")
    assert session.unacknowledged == 1


# Bad input


def test_a_server_that_breaks_the_protocol_is_left_after_what_it_said_before() -> None:
    session = connected()
    session.publish("t", b"a")
    events = receive(session, figg.encode_ack(0), b"\xff" * 8, figg.encode_ack(0))
    assert events[0] == PublishesAcknowledged(1)
    assert isinstance(events[1], Broken)
    assert len(events) == 2
    assert "unknown message type" in events[1].reason


@given(st.binary(max_size=200))
def test_any_bytes_give_events(stream: bytes) -> None:
    session = attached("t", 0)
    session.publish("t", b"a")
    for event in session.receive_data([stream], 0.0):
        assert isinstance(event, Event)


# A session and a small server with a log, over connections that break


class Peer:
    """A minimal Figg server: topics in memory, one connection at a time."""

    def __init__(self) -> None:
        self.log: dict[str, list[bytes]] = {}
        self.connect()

    def connect(self) -> None:
        self.decoder = ServerDecoder()
        self.next: dict[str, int] = {}
        self.highest = -1
        self.out = b""

    def receive(self, stream: bytes) -> None:
        for message in self.decoder.receive(stream):
            match message:
                case figg.Attach(topic, offset):
                    start = self.end(topic) if offset is None else offset
                    self.next[topic] = start
                    self.out += figg.encode_attached(topic, start)
                case figg.Detach(topic):
                    self.next.pop(topic, None)
                    self.out += figg.encode_detached(topic)
                case figg.Publishes(records, _, highest):
                    for topic, new in records.items():
                        self.log.setdefault(topic, []).extend(new)
                    self.out += figg.encode_ack(highest)
                case figg.Ping(timestamp):
                    self.out += figg.encode_pong(timestamp)
                case figg.Bad(reason):
                    raise AssertionError(reason)
        for topic in self.next:
            self.out += self.deliver(topic)

    def end(self, topic: str) -> int:
        return sum(map(len, self.log.get(topic, [])))

    def deliver(self, topic: str) -> bytes:
        position, begin = 0, self.next[topic]
        out = b""
        for record in self.log.get(topic, []):
            if position >= begin:
                out += figg.encode_data(topic, position, [record])
            position += len(record)
        self.next[topic] = max(position, begin)
        return out


@given(st.integers(0, 2**32))
def test_over_broken_connections_nothing_acknowledged_is_lost_and_nothing_comes_twice(
    seed: int,
) -> None:
    choose = random.Random(seed)
    session, peer = FiggClientSession(), Peer()
    published = acknowledged = 0
    received: list[tuple[int, bytes]] = []
    session.attach("t", 0)

    def take(stream: bytes) -> None:
        nonlocal acknowledged
        for event in session.receive_data([stream], 0.0):
            assert not isinstance(event, Missed | Broken), event
            if isinstance(event, TopicMessages):
                received.extend(event.messages)
            elif isinstance(event, PublishesAcknowledged):
                acknowledged += event.publishes

    def step(lossy: bool) -> None:
        nonlocal published
        if session.state is ConnectionState.DISCONNECTED:
            peer.connect()
            session.connecting()
            session.opened(0.0)
        for _ in range(choose.randrange(4) if lossy else 0):
            session.publish("t", b"%d" % published)
            published += 1
        peer.receive(output(session, choose.choice([20, BIG])))
        # A connection may break after any byte that the peer sent.
        cut = choose.randrange(len(peer.out) + 1) if lossy else len(peer.out)
        take(peer.out[:cut])
        peer.out = peer.out[cut:]
        if lossy and choose.random() < 0.3:
            session.disconnected()

    for _ in range(20):
        step(lossy=True)
    while session.unacknowledged or peer.next.get("t") != peer.end("t"):
        step(lossy=False)
    step(lossy=False)

    log = peer.log.get("t", [])
    assert acknowledged == published
    assert {record[4:] for record in log} == {b"%d" % number for number in range(published)}
    assert [payload for _, payload in received] == [record[4:] for record in log]
    ends = [sum(map(len, log[: i + 1])) for i in range(len(log))]
    assert [offset for offset, _ in received] == ends


@pytest.mark.parametrize(
    ("asked", "got", "is_jump"),
    [(0, 500, False), (500, 0, False), (7, 7 + (1 << 32), True), (900, 700 + (1 << 32), False)],
)
def test_a_jump_of_the_log_is_told_from_expired_messages(asked, got, is_jump):
    assert Missed("topic", asked, got).is_jump is is_jump
