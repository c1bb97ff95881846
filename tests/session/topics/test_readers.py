"""The named readers of a client session: their messages, events and memory. Time is passed in."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadReaderNameError, LocalProtocolError
from headrace.model import Position
from headrace.session.client import Broken
from headrace.session.figg import FiggClientSession
from headrace.session.topics.events import (
    Event,
    Missed,
    ReaderActive,
    ReaderFailed,
    ReaderLost,
    ReaderStored,
    ReaderSure,
    ReaderWaiting,
    ReadMessages,
)
from headrace.session.topics.readers import ANSWER_S, HANG_UPS_MAX, ClientReaders
from headrace.wire import readers
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ServerDecoder

EPOCH = 1_700_000_000_000
RECORD = b"\0\0\0\1x"


class Line:
    """A client's readers, with a connection on which the test plays the server."""

    def __init__(self) -> None:
        self.sent: list[readers.ToServer] = []
        self.detached: list[str] = []
        self.readers = ClientReaders(self.sent.append, self.detached.append)
        self.readers.read("t", "r", newest=False, window=1000, instance=7)
        self.readers.connected(0.0)

    def take_sent(self, now: float = 0.0) -> list[readers.ToServer]:
        self.readers.flush(now)
        sent = self.sent.copy()
        self.sent.clear()
        return sent

    def hear(self, message: readers.ToClient) -> list[Event]:
        events: list[Event] = []
        self.readers.take(message, events)
        return events

    def grant(self, grant: int = 1, at: int = 0, exact: bool = True) -> list[Event]:
        return self.hear(readers.Reading("t", grant, at * 5, exact, EPOCH, at * 5, at))

    def records(self, first: int, count: int) -> list[Event]:
        return self.hear(readers.Records("t", EPOCH, first * 5, first, 123, RECORD * count))

    def handled(self, *numbers: int) -> None:
        for number in numbers:
            assert self.readers.handled("t", (number + 1) * 5)

    def reconnect(self) -> None:
        self.readers.disconnected()
        self.readers.connected(0.0)
        assert len(self.take_sent()) == 1


@pytest.fixture
def line() -> Line:
    made = Line()
    assert made.take_sent() == [readers.Read("t", "r", False, 7, 1000)]
    return made


def handled_of(count: int, grant: int = 1) -> list[readers.Handled]:
    return [readers.Handled("t", grant, count * 5, count)]


def test_what_is_handled_is_told_as_a_prefix(line: Line) -> None:
    assert line.grant() == [ReaderActive("t", Position(EPOCH, 0, 0))]
    (event,) = line.records(0, 4)
    assert event == ReadMessages("t", EPOCH, 0, 123, [(5 * n, b"x") for n in (1, 2, 3, 4)])
    line.handled(2, 1)
    assert line.take_sent() == []
    line.handled(0)
    assert line.take_sent() == handled_of(3)
    assert line.hear(readers.Stored("t", 1, 15)) == [ReaderStored("t", 15)]
    line.handled(3)
    assert line.take_sent() == handled_of(4)


def test_nothing_is_handled_twice_or_before_it_came(line: Line) -> None:
    line.grant()
    line.records(0, 1)
    line.handled(0)
    assert not line.readers.handled("t", 5)
    assert not line.readers.handled("t", 10)
    assert not line.readers.handled("other", 5)


def test_after_a_lost_connection_only_what_is_new_is_delivered(line: Line) -> None:
    line.grant()
    line.records(0, 3)
    line.handled(0, 1)
    line.take_sent()
    line.reconnect()
    # The server has stored only the first of them, and starts after it.
    events = line.grant(grant=2, at=1)
    assert events == [ReaderActive("t", Position(EPOCH, 5, 1)), ReaderStored("t", 5)]
    assert line.take_sent() == [], "nothing may be acknowledged before it was sent again"
    (event,) = line.records(1, 3)
    assert event == ReadMessages("t", EPOCH, 3, 123, [(20, b"x")])
    assert line.take_sent() == handled_of(2, grant=2)


def test_a_reader_that_another_client_has_moved_starts_anew(line: Line) -> None:
    line.grant()
    line.records(0, 3)
    line.handled(0)
    line.reconnect()
    events = line.grant(grant=9, at=2)
    assert isinstance(events[0], ReaderLost)
    assert events[1] == ReaderActive("t", Position(EPOCH, 10, 2))
    assert not line.readers.handled("t", 10), "it is of the time before"
    (event,) = line.records(2, 1)
    assert event == ReadMessages("t", EPOCH, 2, 123, [(15, b"x")])


def test_a_cursor_that_was_moved_back_brings_messages_again(line: Line) -> None:
    line.grant()
    line.records(0, 3)
    line.handled(0, 1, 2)
    line.take_sent()
    line.hear(readers.Stored("t", 1, 15))
    assert isinstance(line.grant(grant=2, at=1)[0], ReaderLost)
    (event,) = line.records(1, 2)
    assert isinstance(event, ReadMessages) and len(event.messages) == 2


def test_a_superseded_reader_asks_again_and_may_handle_nothing(line: Line) -> None:
    line.grant()
    line.records(0, 2)
    line.take_sent()
    assert line.hear(readers.Lost("t", readers.SUPERSEDED, "why")) == [ReaderLost("t", "why")]
    assert not line.readers.handled("t", 5)
    assert line.records(2, 1) == []
    assert line.take_sent() == [readers.Read("t", "r", False, 7, 1000)]
    assert line.hear(readers.Waiting("t", 1)) == [ReaderWaiting("t", 1)]


def test_waiting_behind_nobody_is_said_to_nobody(line: Line) -> None:
    assert line.hear(readers.Waiting("t", 0)) == []
    assert line.readers.tick(1e9, True) == []


def test_gaps_are_told(line: Line) -> None:
    assert line.grant(at=2, exact=False)[1:] == [Missed("t", 10, 10)]
    line.records(2, 1)
    assert line.records(5, 1)[0] == Missed("t", 15, 25)
    line.handled(2, 5)
    assert line.take_sent() == handled_of(6)


def test_records_that_make_no_sense_end_the_connection(line: Line) -> None:
    line.grant(at=1)
    assert isinstance(line.records(0, 1)[0], Broken)
    cut_off = readers.Records("t", EPOCH, 5, 1, 0, b"\0\0\0\x09x")
    assert isinstance(line.hear(cut_off)[0], Broken)


def test_a_server_that_does_not_answer_does_not_know_readers(line: Line) -> None:
    assert line.readers.tick_at == ANSWER_S
    assert line.readers.tick(ANSWER_S, False) == [], "nothing was read"
    (event,) = line.readers.tick(3 * ANSWER_S, True)
    assert isinstance(event, ReaderFailed) and "does not know named readers" in event.reason
    assert line.detached == ["t"], "it may be slow, and must not give this client the grant"
    assert line.readers.tick_at == inf


def test_a_server_that_hangs_up_on_read_does_not_know_readers(line: Line) -> None:
    for _ in range(HANG_UPS_MAX - 1):
        line.reconnect()
    line.readers.disconnected()
    line.readers.connected(8.0)
    assert line.take_sent(8.0) == []
    (event,) = line.readers.tick(8.0, True)
    assert isinstance(event, ReaderFailed)


def test_a_server_that_has_answered_knows_readers_however_often_it_is_cut_off(line: Line) -> None:
    line.hear(readers.Waiting("t", 1))
    for _ in range(3 * HANG_UPS_MAX):
        line.reconnect()  # each time, READ is sent again
    assert line.readers.tick(0.0, True) == []


def test_a_refused_reader_is_said_to_have_failed(line: Line) -> None:
    refused = line.hear(readers.Lost("t", readers.REFUSED, "too many"))
    assert refused == [ReaderFailed("t", "too many")]


def test_a_topic_is_read_again_when_the_server_has_let_go_of_it() -> None:
    session = FiggClientSession()
    session.connecting()
    session.opened(0.0)
    session.read("t", "a", newest=True, window=9, instance=1)

    def sent() -> list[figg.ToServer]:
        said = ServerDecoder().receive(b"".join(session.data_to_send(1 << 20, 0.0)))
        return [message for message in said if not isinstance(message, figg.Ping)]

    def hear(data: bytes) -> list[Event]:
        return session.receive_data([data], 0.0)

    assert sent() == [readers.Read("t", "a", True, 1, 9)]
    hear(figg.encode_of_reader(readers.Reading("t", 1, 0, True, EPOCH, 0, 0)))
    hear(figg.encode_records(readers.Records("t", EPOCH, 0, 0, 0, RECORD)))
    assert session.handled("t", 5)
    assert session.detach("t")
    assert sent() == [readers.Handled("t", 1, 5, 1), figg.Detach("t")], "in this order"
    session.read("t", "b", newest=False, window=9, instance=1)
    assert sent() == []
    assert hear(figg.encode_records(readers.Records("t", EPOCH, 5, 1, 0, RECORD))) == []
    hear(figg.encode_detached("t"))
    assert sent() == [readers.Read("t", "b", False, 1, 9)]


def test_names_are_checked_and_pings_are_needed() -> None:
    session = FiggClientSession()
    with pytest.raises(BadReaderNameError):
        session.read("t", "", newest=False, window=1, instance=1)
    with pytest.raises(TypeError, match="a reader's name is str"):
        session.read("t", 7, newest=False, window=1, instance=1)  # type: ignore[arg-type]
    silent = FiggClientSession(ping_interval_s=None)
    with pytest.raises(LocalProtocolError, match="needs pings"):
        silent.read("t", "r", newest=False, window=1, instance=1)


COUNT = 12
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "handle", "store", "drop", "other", "supersede"]),
        st.integers(0, COUNT),
    ),
    max_size=60,
)


@given(STEPS)
def test_what_is_stored_was_handled_and_never_comes_again(steps: list[tuple[str, int]]) -> None:
    """The server is minimal; its connection breaks, and others read from it as well."""
    line = Line()
    line.take_sent()
    cursor = told = seen = 0
    """Numbers of records that are durable, that HANDLED reported, and that were sent on this grant."""
    grant = 1
    line.grant(grant)
    held: set[int] = set()
    handled: set[int] = set()

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ReaderLost):
                held.clear()
            elif isinstance(event, ReadMessages):
                for offset, _ in event.messages:
                    assert offset // 5 > cursor
                    assert offset // 5 not in held
                    held.add(offset // 5)

    def begin_again() -> None:
        nonlocal grant, seen, told
        grant, seen, told = grant + 1, cursor, cursor
        take(line.grant(grant, cursor))

    for step, number in steps:
        if step == "send" and seen < COUNT:
            count = min(number + 1, COUNT - seen)
            take(line.records(seen, count))
            seen += count
        elif step == "handle" and held:
            one = sorted(held)[number % len(held)]
            held.discard(one)
            handled.add(one)
            assert line.readers.handled("t", one * 5)
        elif step == "store" and told > cursor:
            cursor = told
            line.hear(readers.Stored("t", grant, cursor * 5))
        elif step == "drop":
            line.reconnect()
            begin_again()
        elif step == "other" and cursor < COUNT:
            line.reconnect()
            take(line.hear(readers.Waiting("t", 1)))
            cursor = min(COUNT, cursor + number % 3)
            handled |= set(range(1, cursor + 1))
            begin_again()
        elif step == "supersede":
            take(line.hear(readers.Lost("t", readers.SUPERSEDED, "")))
            line.take_sent()
            begin_again()
        for message in line.take_sent():
            assert isinstance(message, readers.Handled)
            assert message.grant == grant
            assert message.offset == message.ordinal * 5
            assert told < message.ordinal <= seen
            assert set(range(1, message.ordinal + 1)) <= handled
            told = message.ordinal
    # In the end everything is handled, so that the cursor can reach the end.
    take(line.records(seen, COUNT - seen) if seen < COUNT else [])
    for one in held:
        assert line.readers.handled("t", one * 5)
    last = [message.ordinal for message in line.take_sent() if isinstance(message, readers.Handled)]
    assert max([*last, told]) == COUNT


class Clock:
    """A session whose reader is active, and a server that answers its pings."""

    def __init__(self) -> None:
        self.session = FiggClientSession(ping_interval_s=2, pings_unanswered_max=2)
        self.session.read("t", "r", newest=False, window=1000, instance=7)
        self.session.connecting()
        self.session.opened(100.0)
        self.hear(figg.encode_of_reader(readers.Reading("t", 1, 0, True, EPOCH, 0, 0)), 100.0)

    def hear(self, data: bytes, now: float) -> list[Event]:
        return self.session.receive_data([data], now)

    def pings(self, now: float) -> list[int]:
        """Return the timestamps of the pings that are sent now."""
        decoder = ServerDecoder()
        found = decoder.receive(b"".join(self.session.data_to_send(10_000, now)))
        return [one.timestamp for one in found if isinstance(one, figg.Ping)]

    def answer(self, ping: int, now: float) -> list[Event]:
        return self.hear(figg.encode_pong(ping), now)


def test_a_reader_is_sure_for_a_while_after_each_answered_ping() -> None:
    clock = Clock()
    assert not clock.session.is_sure("t", 100.0)
    (ping,) = clock.pings(100.0)
    assert clock.answer(ping, 100.5) == []
    assert clock.session.is_sure("t", 103.9)
    assert not clock.session.is_sure("t", 104.0)
    assert not clock.session.is_sure("another", 101.0)


def test_an_unsure_reader_asks_once_and_an_old_answer_does_not_count() -> None:
    clock = Clock()
    (ping,) = clock.pings(100.0)
    # The process is suspended here, and the answer waits in its socket.
    clock.session.make_sure("t", 160.0)
    assert clock.pings(160.0) == []
    assert clock.answer(ping, 160.0) == [ReaderSure("t")]
    assert not clock.session.is_sure("t", 160.0)
    clock.session.make_sure("t", 160.0)
    (ping,) = clock.pings(160.0)
    clock.session.make_sure("t", 160.1)
    assert clock.pings(160.1) == []
    assert clock.answer(ping, 160.2) == [ReaderSure("t")]
    assert clock.session.is_sure("t", 160.2)


def test_a_reader_without_a_connection_or_a_grant_is_not_sure() -> None:
    clock = Clock()
    clock.answer(*clock.pings(100.0), now=100.0)
    clock.hear(figg.encode_of_reader(readers.Lost("t", readers.SUPERSEDED, "gone")), 101.0)
    assert not clock.session.is_sure("t", 101.0)
    clock.hear(figg.encode_of_reader(readers.Reading("t", 2, 0, True, EPOCH, 0, 0)), 101.0)
    assert clock.session.is_sure("t", 101.0)
    clock.session.disconnected()
    assert not clock.session.is_sure("t", 101.0)
    clock.session.make_sure("t", 101.0)
    assert clock.pings(101.0) == []
