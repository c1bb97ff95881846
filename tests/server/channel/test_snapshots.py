"""Calls to a snapshot database: their order, their time limits, and the results of failures."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker.channel.notes import StoredSnapshot, snapshot_note
from headrace.errors import ConfigError
from headrace.log.store import Note, Topic
from headrace.model import Durability
from headrace.payload.channel import Content
from headrace.server.channel import snapshots as postgres_snapshots
from headrace.server.channel.snapshots import DatabaseError, PostgresSnapshots, make_postgres

DOWN = DatabaseError("no route to db.internal", is_down=True)
REFUSED = DatabaseError("a check is violated", is_down=False)


def snapshot(offset: int, data: bytes = b"1") -> StoredSnapshot:
    return StoredSnapshot(0, offset, 1, 0, Content(data, True))


class Store:
    """The part of a store that these tests need."""

    def __init__(self, *notes: Note, end: int = 1000) -> None:
        self._notes = {note.key: note for note in notes}
        self._end = end

    def note(self, key: bytes) -> Note | None:
        return self._notes.get(key)

    def look(self, name: str) -> Topic:
        topic = Topic(name, Durability.SYNCED)
        topic.end_offset = self._end
        return topic


class Fake:
    """A database that fails when a test says so. All connections see the same rows."""

    def __init__(self) -> None:
        self.rows: dict[str, StoredSnapshot] = {}
        self.failures: list[Exception] = []
        """Errors that the next uses of a connection raise."""
        self.connect_failures: list[Exception] = []
        self.connections: list[FakeConnection] = []
        self.asked: list[str] = []
        self.go_on = threading.Event()
        """Event that calls wait for."""
        self.go_on.set()
        self.is_stuck = False
        """True if even a cut connection does not end waiting calls."""

    def connect(self) -> "FakeConnection":
        if self.connect_failures:
            raise self.connect_failures.pop(0)
        self.connections.append(FakeConnection(self))
        return self.connections[-1]


class FakeConnection:
    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self.is_lost = self.is_closed = self.is_cut = False

    def load(self, channel: str) -> StoredSnapshot | None:
        self._use(f"load {channel}")
        return self._fake.rows.get(channel)

    def save(self, channel: str, snapshot: StoredSnapshot) -> None:
        self._use(f"save {channel}")
        self._fake.rows[channel] = snapshot

    def cut(self) -> None:
        self.is_lost = self.is_cut = True
        if not self._fake.is_stuck:
            self._fake.go_on.set()

    def close(self) -> None:
        self.is_closed = True

    def _use(self, what: str) -> None:
        self._fake.asked.append(what)
        self._fake.go_on.wait(30)
        if self.is_lost:
            raise DatabaseError("the connection is lost", is_down=True)
        if self._fake.failures:
            raise self._fake.failures.pop(0)


class Asker:
    """Makes calls, and collects their answers in order of arrival."""

    def __init__(self, snapshots: PostgresSnapshots) -> None:
        self.snapshots = snapshots
        self.answers: list[tuple[str, Any]] = []
        self._came = asyncio.Event()

    def load(self, channel: str) -> None:
        self.snapshots.load(channel, self._tell(channel), self._tell(f"{channel} failed"))

    def save(self, channel: str, offset: int, data: bytes = b"1") -> None:
        tell = self._tell(channel)
        self.snapshots.save(
            channel, snapshot(offset, data), lambda: tell(None), self._tell(f"{channel} failed")
        )

    async def answered(self, count: int) -> list[tuple[str, Any]]:
        while len(self.answers) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), 30)
        return self.answers

    def _tell(self, what: str) -> Callable[[Any], None]:
        def tell(result: Any) -> None:
            self.answers.append((what, result))
            self._came.set()

        return tell


@pytest.fixture
def fake() -> Fake:
    return Fake()


def make(fake: Fake, store: Any = None) -> Asker:
    return Asker(PostgresSnapshots(store or Store(), fake.connect))


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_snapshots, "CALL_S_MAX", 0.05)


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_snapshots, "BACKOFF_S_MIN", 0.0)
    monkeypatch.setattr(postgres_snapshots, "BACKOFF_S_MAX", 0.0)


async def test_calls_are_done_and_answered_in_order_and_never_at_once(fake: Fake):
    asker = make(fake)
    asker.save("a", 1)
    asker.load("a")
    asker.save("b", 2)
    asker.load("b")
    assert asker.answers == []
    assert await asker.answered(4) == [
        *(("a", None), ("a", snapshot(1))),
        *(("b", None), ("b", snapshot(2))),
    ]
    assert fake.asked == ["save a", "load a", "save b", "load b"]
    assert len(fake.connections) == 1
    await asker.snapshots.close()
    assert fake.connections[0].is_closed


async def test_answers_come_on_the_loop_and_work_is_done_elsewhere(fake: Fake):
    threads: list[int] = []
    asker = make(fake)
    done = asyncio.Event()

    def answer(_: object) -> None:
        threads.append(threading.get_ident())
        done.set()

    asker.snapshots.load("a", answer, answer)
    await asyncio.wait_for(done.wait(), 30)
    assert threads == [threading.get_ident()]
    await asker.snapshots.close()


async def test_while_the_database_is_away_calls_fail_and_nobody_is_told_where_it_is(
    fake: Fake, caplog: pytest.LogCaptureFixture
):
    fake.connect_failures = [DOWN] * 100
    asker = make(fake)
    asker.load("a")
    asker.save("b", 1)
    assert await asker.answered(2) == [
        ("a failed", "PostgreSQL is not available"),
        ("b failed", "PostgreSQL is not available"),
    ]
    assert len(fake.connect_failures) == 99, "it is not tried again at once"
    assert caplog.text.count("no route to db.internal") == 1
    await asker.snapshots.close()


@pytest.mark.usefixtures("no_backoff")
async def test_it_goes_on_by_itself_when_the_database_is_back(
    fake: Fake, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    fake.connect_failures = [DOWN, DOWN]
    asker = make(fake)
    asker.load("a")
    asker.save("a", 1)
    asker.load("a")
    assert await asker.answered(3) == [
        ("a failed", "PostgreSQL is not available"),
        ("a", None),
        ("a", snapshot(1)),
    ]
    assert caplog.text.count("stores snapshots of channels again") == 1
    await asker.snapshots.close()


async def test_a_connection_that_was_lost_meanwhile_is_replaced_without_an_error(fake: Fake):
    asker = make(fake)
    asker.load("a")
    await asker.answered(1)
    fake.connections[0].is_lost = True
    asker.save("a", 1)
    assert (await asker.answered(2))[1] == ("a", None)
    assert [one.is_closed for one in fake.connections] == [True, False]
    await asker.snapshots.close()


async def test_what_fails_for_one_channel_does_not_keep_others_waiting(fake: Fake):
    asker = make(fake)
    asker.load("a")
    await asker.answered(1)
    fake.failures = [REFUSED]
    asker.save("a", 1)
    asker.save("b", 1)
    assert (await asker.answered(3))[1:] == [
        ("a failed", "PostgreSQL refuses the snapshot"),
        ("b", None),
    ]
    await asker.snapshots.close()


async def test_a_fault_of_our_own_fails_the_call_and_not_the_thread(fake: Fake):
    asker = make(fake)
    fake.failures = [ZeroDivisionError()]
    asker.load("a")
    assert await asker.answered(1) == [("a failed", "PostgreSQL is not available")]
    await asker.snapshots.close()


@pytest.mark.usefixtures("short_calls")
async def test_a_database_that_does_not_answer_is_cut_off_in_time(
    fake: Fake, caplog: pytest.LogCaptureFixture
):
    asker = make(fake)
    fake.go_on.clear()
    asker.load("a")
    assert await asker.answered(1) == [
        ("a failed", "PostgreSQL has not answered within 0.05 s"),
    ]
    await asyncio.wait_for(asyncio.to_thread(fake.go_on.wait), 30)
    assert fake.connections[0].is_cut
    await asker.snapshots.close()
    assert "PostgreSQL has not answered in time" in caplog.text


@pytest.mark.usefixtures("short_calls")
async def test_a_call_that_has_waited_for_too_long_is_not_done_any_more(fake: Fake):
    asker = make(fake)
    fake.go_on.clear()
    fake.is_stuck = True
    asker.load("a")
    asker.save("b", 1)
    assert [what for what, _ in await asker.answered(2)] == ["a failed", "b failed"]
    fake.go_on.set()
    await asker.snapshots.close()
    assert fake.asked == ["load a"]


async def test_more_calls_than_may_wait_fail_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres_snapshots, "CALLS_MAX", 2)
    asker = make(fake)  # it makes one call at the beginning
    fake.go_on.clear()
    asker.load("a")
    asker.load("b")
    assert asker.answers == [("b failed", "2 calls are already waiting for PostgreSQL")]
    fake.go_on.set()
    await asker.answered(2)
    asker.load("c")
    assert (await asker.answered(3))[2] == ("c", None)
    await asker.snapshots.close()


async def test_more_bytes_than_may_wait_fail_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres_snapshots, "CALLS_BYTES_MAX", 10)
    asker = make(fake)
    asker.save("a", 1, bytes(10))
    asker.save("b", 1, bytes(1))
    assert [what for what, _ in asker.answers] == ["b failed"]
    await asker.answered(2)
    asker.save("c", 1, bytes(10))
    assert (await asker.answered(3))[2] == ("c", None)
    await asker.snapshots.close()


async def test_closing_waits_for_what_is_under_way_and_what_comes_of_it(fake: Fake):
    asker = make(fake)
    fake.go_on.clear()
    asker.snapshots.load("a", lambda _: asker.save("a", 7), lambda _: None)
    closing = asyncio.create_task(asker.snapshots.close())
    await asyncio.sleep(0)
    assert not closing.done()
    fake.go_on.set()
    await asyncio.wait_for(closing, 30)
    assert fake.rows == {"a": snapshot(7)}
    assert fake.connections[0].is_closed
    asker.load("a")
    assert asker.answers[-1] == ("a failed", "the server is stopping")


@pytest.mark.usefixtures("short_calls")
async def test_closing_does_not_wait_forever(fake: Fake):
    asker = make(fake)
    fake.go_on.clear()
    asker.load("a")
    await asyncio.wait_for(asker.snapshots.close(), 30)
    assert [what for what, _ in asker.answers] == ["a failed"]


@pytest.mark.parametrize(
    ("kept", "noted", "counts"),
    [(None, 5, 5), (4, 5, 5), (6, 5, 6), (5, None, 5), (None, None, None)],
)
async def test_of_a_note_and_a_row_the_later_counts(
    fake: Fake, kept: int | None, noted: int | None, counts: int | None
):
    if kept is not None:
        fake.rows["a"] = snapshot(kept)
    notes = [snapshot_note("a", snapshot(noted))] if noted is not None else []
    asker = make(fake, Store(*notes))
    asker.load("a")
    [(_, found)] = await asker.answered(1)
    assert found == (snapshot(counts) if counts is not None else None)
    await asker.snapshots.close()


async def test_a_row_that_is_ahead_of_the_log_is_not_of_this_log(fake: Fake):
    fake.rows["a"] = snapshot(101)
    asker = make(fake, Store(end=100))
    asker.load("a")
    [(what, reason)] = await asker.answered(1)
    assert what == "a failed"
    assert "another data directory" in reason
    await asker.snapshots.close()


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "headrace.server.channel.postgres", raising=False)
    monkeypatch.delattr("headrace.server.channel.postgres", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[postgres\]'"):
        make_postgres("postgresql://localhost/headrace", Store())  # type: ignore[arg-type]


def test_without_a_url_there_is_no_database():
    assert make_postgres("", Store()) is None  # type: ignore[arg-type]


def test_an_error_of_the_driver_does_not_tell_the_password():
    psycopg = pytest.importorskip("psycopg")
    from headrace.server.channel import postgres

    def fail() -> None:
        with postgres._translated(secret="s3cret"):
            raise psycopg.OperationalError(
                'no "s3cret" in postgresql://u:s3cret@h/d,\npassword=s3cret'
            )

    with pytest.raises(DatabaseError) as caught:
        fail()
    assert str(caught.value) == 'no "***" in postgresql://u:***@h/d, password=***'
