"""Clients with their stores, and server sessions, in one thread and driven step by step.

Whatever is lost at any time, in the end every log has every event once.
"""

import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.logux.store import Job, LogEvent, LoguxStore
from headrace.client.logux.sync import UNSTORED_EVENTS_MAX, LoguxSync
from headrace.errors import LocalStoreError
from headrace.payload.logux import created_of, decode_envelope, key_of
from headrace.session.client import Broken, ConnectionRefused, ConnectionState, Finished
from headrace.session.logux.client import LoguxClientSession, LoguxEvent, Verify
from headrace.session.logux.server import AddEvents as ServerAdd
from headrace.session.logux.server import AuthenticatePeer, Follow, Incoming, LoguxServerSession
from headrace.wire.logux import messages as logux

MS = 1000

SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Directory for files that need no disk: these tests do not cover crashes of the machine."""


class Server:
    """A server with a log in a list, and its connections."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, list[Any], Any]] = []
        """Event, time and origin of each entry."""
        self.keys: set[bytes] = set()
        self.uncommitted: deque[tuple[Connection, ServerAdd]] = deque()
        self.connections: list[Connection] = []
        self.numbers = 0
        """Number of events that clients were asked to add."""

    def commit(self) -> None:
        if self.uncommitted:
            connection, add = self.uncommitted.popleft()
            for one in add.events:
                self.store(one, connection.session.peer)
            if connection in self.connections:
                connection.session.stored(add.unit)
            for other in self.connections:
                other.deliver()

    def store(self, one: Incoming, origin: Any) -> None:
        envelope = decode_envelope(one.payload)
        created = created_of(envelope)
        if key_of(created) not in self.keys:
            self.keys.add(key_of(created))
            self.log.append((msgspec.json.decode(envelope.event), created, origin))


class Connection:
    """Both directions of a connection, and the server's session at its end."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.session = LoguxServerSession("server")
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.at: int | None = None
        self.born = 0
        server.connections.append(self)

    def hear(self, now_ms: int) -> None:
        """Receive one message of the client."""
        commands = deque(self.session.receive_messages([self.to_server.popleft()], now_ms))
        while commands:
            command = commands.popleft()
            if isinstance(command, AuthenticatePeer):
                commands.extend(self.session.let_in(now_ms))
            elif isinstance(command, Follow):
                self.born = len(self.server.log)
                self.at = command.ordinal if command.ordinal <= self.born else 0
            else:
                assert isinstance(command, ServerAdd), command
                self.server.uncommitted.append((self, command))
        self.deliver()

    def deliver(self) -> None:
        self.flush()
        if self.at is None:
            return
        for ordinal in range(self.at, len(self.server.log)):
            event, created, origin = self.server.log[ordinal]
            if origin != self.session.peer or ordinal < self.born:
                message = ["sync", ordinal + 1, event, created]
                self.to_client.append(logux.pack(message, binary=True))
        self.at = self.session.sent = len(self.server.log)
        self.flush()

    def flush(self) -> None:
        data = self.session.data_to_send()
        while data:
            size, start = data[1], 2
            if size == 126:
                size, start = int.from_bytes(data[2:4]), 4
            self.to_client.append(data[start : start + size])
            data = data[start + size :]


class Client:
    """A client without thread and socket; implements `Shell`."""

    def __init__(self, server: Server, path: Path | None, host: str) -> None:
        self.server = server
        self.path = path
        self.host = host
        self.now = 1000.0
        """The client's monotonic clock; the server has the same one."""
        self.skew_ms = 0
        """Error of the client's wall clock, in milliseconds."""
        self.reading = True
        self.refusal: ConnectionRefused | None = None
        self.added: list[int] = []
        """Events that were reported as stored."""
        self.start()

    def start(self) -> None:
        self.store = LoguxStore(self.path)
        facts = self.store.open("main", self.host)
        self.connection: Connection | None = None
        self.asked: deque[tuple[Job, Callable[[Any], None]]] = deque()
        self.session = LoguxClientSession(
            facts.host, received=facts.received, last=facts.last, unsent=facts.unsent
        )
        self.sync = LoguxSync(self.session, facts, self, lambda: self.skew_ms)

    def crash(self) -> None:
        self.hang_up()
        self.store._file.close()
        self.start()

    def add(self, number: int) -> None:
        def done(result: LogEvent | Exception) -> None:
            if isinstance(result, LogEvent):
                self.added.append(number)

        event = b'{"type":"n","n":%d}' % number
        self.sync.add(event, int(self.now * MS) + self.skew_ms, done)

    def work(self, jobs: int, *, failing: bool = False) -> None:
        """Let the store run up to `jobs` requested jobs together."""
        asked = [self.asked.popleft() for _ in range(min(jobs, len(self.asked)))]

        def fail(store: LoguxStore) -> None:
            raise sqlite3.OperationalError("disk is full")

        try:
            results = self.store.run([job for job, _ in asked] + ([fail] if failing else []))
        except LocalStoreError as error:
            results = [error] * len(asked)
        for (_, done), result in zip(asked, results, strict=False):
            done(result)

    def dial(self) -> None:
        if self.connection is None and self.session.state is ConnectionState.DISCONNECTED:
            self.connection = Connection(self.server)
            self.reading = True
            self.session.connecting()
            self.session.opened(self.now)
            self.send()

    def hang_up(self) -> None:
        if self.connection is not None:
            self.server.connections.remove(self.connection)
            self.connection = None
            self.session.disconnected()
            self.sync.disconnected()

    def hear(self) -> None:
        """Receive one message of the server."""
        if self.connection is not None and self.connection.to_client and self.reading:
            message = self.connection.to_client.popleft()
            self.take(self.session.receive_data([message], self.now))

    def tell(self) -> None:
        """Deliver one message to the server."""
        if self.connection is not None and self.connection.to_server:
            self.connection.hear(int(self.now * MS))

    def send(self) -> None:
        if self.connection is not None:
            self.connection.to_server.extend(self.session.data_to_send(1 << 30, self.now))

    # The shell

    def ask(self, job: Job, done: Callable[[Any], None]) -> None:
        self.asked.append((job, done))

    def take(self, events: list[LoguxEvent]) -> None:
        if events:
            self.sync.handle(events)
        self.send()
        if events and isinstance(events[-1], Broken | Finished):
            self.hang_up()

    def read(self, reading: bool) -> None:
        self.reading = reading

    def changed(self) -> None:
        pass

    def verify(self, question: Verify) -> None:
        raise AssertionError(question)

    def refused(self, refusal: ConnectionRefused) -> None:
        self.refusal = refusal

    # State

    @property
    def is_quiet(self) -> bool:
        connection = self.connection
        if connection is None or self.asked:
            return False
        return not connection.to_server and not connection.to_client

    def numbers(self) -> list[int]:
        return [one.event["n"] for one in self.events()]

    def events(self) -> list[LogEvent]:
        found: list[LogEvent] = []
        while True:
            behind = found[-1].added if found else 0
            [page] = self.store.run([lambda store, behind=behind: store.read(behind)])
            if not page:
                return found
            found += page


def settle(server: Server, clients: list[Client]) -> None:
    """Complete everything that is pending, without further failures."""
    for _ in range(10_000):
        for client in clients:
            client.dial()
            client.tell()
            client.hear()
            client.work(3)
        server.commit()
        if not server.uncommitted and all(client.is_quiet for client in clients):
            return
    raise AssertionError("it does not come to an end")


MISHAPS = ["hang up", "crash", "fail", "clock", "restart"]
PROGRESS = ["add", "dial", "work", "tell", "hear", "commit"]


def go_on(what: str, server: Server, clients: list[Client], chance: Random) -> None:
    client = chance.choice(clients)
    client.now += 0.001 * chance.randrange(3)
    match what:
        case "add":
            number = client.server.numbers = client.server.numbers + 1
            client.add(number)
        case "work":
            client.work(chance.randrange(1, 4))
        case "fail":
            client.work(chance.randrange(1, 4), failing=True)
        case "tell":
            client.tell()
        case "hear":
            client.hear()
        case "dial":
            client.dial()
        case "commit":
            server.commit()
        case "hang up":
            client.hang_up()
        case "crash":
            client.crash()
        case "clock":
            client.skew_ms += chance.randrange(-5, 6)
        case "restart":
            server.uncommitted.clear()
            for one in clients:
                one.hang_up()


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(20, 90), st.sampled_from(MISHAPS)), min_size=4, max_size=12),
    st.integers(0),
)
def test_in_the_end_every_log_has_every_event_once(
    mishaps: list[tuple[int, str]], seed: int
) -> None:
    chance = Random(seed)
    # Steps have random rates, so that work piles up before a slow one.
    paces = [0.1 + chance.random() for _ in PROGRESS]
    with TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        server = Server()
        clients = [Client(server, Path(directory) / name, name) for name in ("a", "b")]
        for steps, mishap in mishaps:
            for what in chance.choices(PROGRESS, paces, k=steps):
                go_on(what, server, clients, chance)
            go_on(mishap, server, clients, chance)
        settle(server, clients)
        check(server, clients)
        for client in clients:
            client.store.close()


def check(server: Server, clients: list[Client]) -> None:
    stored = [event["n"] for event, _, _ in server.log]
    assert len(set(stored)) == len(stored)
    for client in clients:
        # Every event that was reported as stored is stored. A crash may have stored another one without
        # reporting it.
        assert set(client.added) <= set(stored)
        own = [event["n"] for event, _, origin in server.log if origin == client.host]
        assert own == sorted(own), "in the order in which they were added"
        assert sorted(client.numbers()) == sorted(stored)
        times = [tuple(one.created) for one in client.events()]
        assert len(set(times)) == len(times)
        assert client.sync.unacknowledged == 0


def test_a_lost_answer_and_a_corrected_clock_make_no_second_event() -> None:
    server = Server()
    client = Client(server, None, "a")
    client.skew_ms = 3_600_000
    client.add(1)
    client.dial()
    while not server.log:
        client.tell()
        client.hear()
        client.work(1)
        server.commit()
    client.hang_up()  # the answer is on its way
    client.skew_ms = 5
    settle(server, [client])
    [(_, created, _)] = server.log
    assert created == [1_000_000, "a", 0]
    assert client.events()[0].created == [4_600_000, "a", 0]
    assert client.numbers() == [1]
    assert client.sync.unacknowledged == 0


def test_times_of_others_are_corrected_both_ways() -> None:
    server = Server()
    slow, fast = Client(server, None, "slow"), Client(server, None, "fast")
    slow.skew_ms, fast.skew_ms = -5000, 7000
    slow.add(1)
    settle(server, [slow, fast])
    assert [one.created for one in slow.events()] == [[995_000, "slow", 0]]
    assert [created for _, created, _ in server.log] == [[1_000_000, "slow", 0]]
    assert [one.created for one in fast.events()] == [[1_007_000, "slow", 0]]


def test_what_was_received_is_not_sent_back() -> None:
    server = Server()
    a, b = Client(server, None, "a"), Client(server, None, "b")
    a.add(1)
    settle(server, [a, b])
    for client in (a, b):
        client.hang_up()
    b.add(2)
    b.dial()
    while not b.connection or not b.connection.to_server:
        b.work(1)
        b.hear()
    said: list[Any] = []
    while len(server.log) < 2:
        assert b.connection is not None
        said += [logux.unpack(one, binary=True) for one in b.connection.to_server]
        b.tell()
        b.hear()
        b.work(1)
        server.commit()
    assert [message for message in said if message[0] == "sync"] == [
        ["sync", 2, {"type": "n", "n": 2}, [1_000_000, "b", 0]]
    ]
    assert said[0] == ["connect", [0, 0], "b", 1]


def test_a_client_that_stores_slowly_stops_reading() -> None:
    server = Server()
    a, b = Client(server, None, "a"), Client(server, None, "b")
    for number in range(UNSTORED_EVENTS_MAX + 500):
        a.add(number)
    a.work(UNSTORED_EVENTS_MAX + 500)
    settle(server, [a])
    b.dial()
    b.tell()
    while b.reading:
        b.hear()
    assert len(b.asked) == UNSTORED_EVENTS_MAX + 1
    settle(server, [b])
    assert b.numbers() == list(range(UNSTORED_EVENTS_MAX + 500))


def test_after_a_failed_write_everything_is_asked_for_again() -> None:
    server = Server()
    a, b = Client(server, None, "a"), Client(server, None, "b")
    for number in range(3):
        a.add(number)
    settle(server, [a])
    b.dial()
    b.tell()
    while b.connection is not None and b.connection.to_client:
        b.hear()
    b.work(2, failing=True)
    assert b.connection is None
    b.work(10)
    assert b.numbers() == []
    settle(server, [b])
    assert b.numbers() == [0, 1, 2]
