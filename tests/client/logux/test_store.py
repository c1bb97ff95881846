"""The local log of a Logux client: each event once, in order, durable, and for one client at a time."""

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.client.logux.store import (
    NEVER,
    PAGE_EVENTS_MAX,
    SYNC_BYTES_MAX,
    SYNC_EVENTS_MAX,
    LogEvent,
    LoguxStore,
    ReceptionPlace,
    Tick,
    Unsent,
    after,
    following,
    text_of,
)
from headrace.errors import LocalStoreError

NOW = 1_475_316_540_000
HOST = "me"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.sqlite"


class Log:
    """An open store that runs one job at a time."""

    def __init__(self, path: Path | None = None, host: str | None = HOST) -> None:
        self.store = LoguxStore(path)
        self.facts = self.store.open("main", host)
        self._receptions = -1

    def add(self, type_: str = "a", now: int = NOW, difference: int | None = None) -> LogEvent:
        event = json.dumps({"type": type_}).encode()
        [added] = self.store.run([lambda store: store.add(event, now, difference)])
        return added

    def receive(
        self, number: int, *created: list[Any], difference: int = 0
    ) -> int | LocalStoreError:
        self._receptions += 1
        place = ReceptionPlace(0, self._receptions)
        pairs = [({"type": str(time)}, time) for time in created]
        [last] = self.store.run([lambda store: store.receive(number, pairs, difference, place)])
        return last

    def unsent(self, start: int = 1, difference: int = 0) -> Unsent:
        [unsent] = self.store.run([lambda store: store.unsent(start, difference)])
        return unsent

    def read(self, behind: int = 0) -> list[LogEvent]:
        [page] = self.store.run([lambda store: store.read(behind)])
        return page

    def created(self) -> list[Any]:
        return [one.created for one in self.read()]

    def reopen(self) -> "Log":
        self.store.close()
        return Log(self.store.path)

    def crash(self) -> "Log":
        """Reopen the store as if the process had ended here."""
        self.store._file.close()
        return Log(self.store.path)


# Times


def test_times_are_those_of_the_standard_timer_and_only_grow() -> None:
    log = Log()
    for now in (NOW, NOW, NOW + 1, NOW - 5000, NOW + 2):
        log.add(now=now)
    assert log.created() == [
        [NOW, "me", 0], [NOW, "me", 1], [NOW + 1, "me", 0], [NOW + 1, "me", 1], [NOW + 2, "me", 0],
    ]  # fmt: skip


def test_the_timer_goes_on_where_it_was(path: Path) -> None:
    log = Log(path)
    log.add()
    log.add()
    log = log.reopen()
    assert log.add(now=NOW - 1).created == [NOW, "me", 2]


def test_events_are_told_in_the_servers_time() -> None:
    log = Log()
    log.add()
    log.add(difference=5000)
    # The first event had no difference when it was added. The second is not reported before it.
    assert [wire for *_, wire in log.unsent(difference=5000).events] == [
        [NOW - 5000, "me", 0], [NOW - 5000, "me", 1],
    ]  # fmt: skip
    log.add(now=NOW + 7, difference=7)
    assert log.unsent(3, difference=-1).events[0][2] == [NOW, "me", 0]


def test_the_servers_time_of_an_event_is_given_once(path: Path) -> None:
    log = Log(path)
    log.add()
    first = log.unsent(difference=5000)
    log = log.crash()
    assert log.unsent(difference=3000) == first
    assert log.reopen().unsent(difference=0) == first


def test_no_two_events_are_told_with_one_time_when_the_clock_is_corrected() -> None:
    log = Log()
    for number in range(5):
        log.add(now=NOW + number, difference=2 * number)
    wires = [wire for *_, wire in log.unsent().events]
    assert wires == sorted(wires)
    assert len({tuple(wire) for wire in wires}) == 5


def test_received_events_have_local_times() -> None:
    log = Log()
    log.receive(1, [NOW, "you", 0], difference=5000)
    log.receive(2, [NOW + 0.5, "you", 0], difference=-1)
    log.receive(3, ["x", 1], [7], difference=5000)
    assert log.created() == [[NOW + 5000, "you", 0], [NOW - 0.5, "you", 0], ["x", 1], [7]]


def test_two_events_that_would_have_one_local_time_are_both_kept() -> None:
    log = Log()
    log.receive(1, [NOW + 5, "you", 0], difference=5)
    log.receive(2, [NOW, "you", 0], [NOW + 1, "you", 0], difference=10)
    log.receive(3, [NOW + 1, "me", 0], difference=0)
    log.add(now=NOW + 1)
    assert log.created() == [
        [NOW + 10, "you", 0], [NOW + 10, "you", 1], [NOW + 11, "you", 0],
        [NOW + 1, "me", 0], [NOW + 1, "me", 1],
    ]  # fmt: skip


# Duplicates


@pytest.mark.parametrize("again", [[NOW, "you", 0], [float(NOW), "you", 0.0]])
def test_an_event_that_comes_again_is_ignored_whatever_the_clocks_say(again: list[Any]) -> None:
    log = Log()
    assert log.receive(1, [NOW, "you", 0], difference=5000) == 1
    assert log.receive(2, again, [NOW + 1, "you", 0], again, difference=3000) == 2
    assert log.created() == [[NOW + 5000, "you", 0], [NOW + 3001, "you", 0]]


def test_an_event_of_our_own_is_recognised_when_it_comes_back() -> None:
    log = Log()
    log.add()
    [(_, _, wire)] = log.unsent(difference=5000).events
    assert log.receive(1, wire, difference=3000) == 1
    assert log.created() == [[NOW, "me", 0]]


def test_only_events_of_our_own_are_to_be_sent() -> None:
    log = Log()
    log.add("a")
    log.receive(1, [NOW, "you", 0])
    log.add("b")
    assert [(number, event["type"]) for number, event, _ in log.unsent().events] == [
        (1, "a"), (3, "b"),
    ]  # fmt: skip


def test_what_goes_together_has_its_limits() -> None:
    log = Log()
    log.store.run([lambda store: store.add(b'{"type":"a"}', NOW, 0)] * (SYNC_EVENTS_MAX + 1))
    first = log.unsent()
    assert (len(first.events), first.rest) == (SYNC_EVENTS_MAX, SYNC_EVENTS_MAX + 1)
    assert [number for number, *_ in log.unsent(first.rest or 0).events] == [first.rest]
    large = json.dumps({"type": "x" * (SYNC_BYTES_MAX // 4)}).encode()
    log = Log()
    log.store.run([lambda store: store.add(large, NOW, 0)] * 9)
    assert (len(log.unsent().events), log.unsent().rest) == (4, 5)
    assert [one.added for one in log.read(2)] == [3, 4, 5, 6]


def test_reading_goes_on_page_by_page() -> None:
    log = Log()
    log.store.run([lambda store: store.add(b'{"type":"a"}', NOW, 0)] * (PAGE_EVENTS_MAX + 5))
    page = log.read()
    assert [one.added for one in page] == list(range(1, PAGE_EVENTS_MAX + 1))
    assert len(log.read(page[-1].added)) == 5
    assert log.read(PAGE_EVENTS_MAX + 5) == []


# Durability


def test_what_was_stored_is_there_after_a_crash(path: Path) -> None:
    log = Log(path)
    log.add()
    log.receive(7, [NOW, "you", 0])
    log.store.run([lambda store: store.note(sent=1)])
    log = log.crash()
    # Positions that were only noted are lost, so more is exchanged than necessary.
    assert log.facts[1:] == (2, 1, 1, 7)
    assert len(log.read()) == 2


def test_noted_positions_are_written_with_the_next_event_and_when_closing(path: Path) -> None:
    log = Log(path)
    log.add()
    log.store.run([lambda store: store.note(sent=1, received=4)])
    log.add()
    log = log.crash()
    assert log.facts[1:] == (2, 2, 1, 4)
    log.store.run([lambda store: store.note(sent=2)])
    assert log.reopen().facts[1:] == (2, None, 0, 4)


CRASHING = """
import os, signal, sys
from headrace.client.logux.store import LoguxStore
store = LoguxStore(sys.argv[1])
print(store.open("main", None).host)
for number in range(5):
    [added] = store.run([lambda store: store.add(b'{"type":"n"}', 1000, None)])
    print(added.added, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_added_survives_kill_9_and_the_file_can_be_used_at_once(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASHING, path], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    host, *added = done.stdout.split()
    log = Log(path, host=None)
    assert log.facts.host == host
    assert [one.added for one in log.read()] == list(map(int, added)) == [1, 2, 3, 4, 5]
    assert log.created() == [[1000, host, number] for number in range(5)]


def test_of_what_belongs_together_all_is_stored_or_nothing(path: Path) -> None:
    log = Log(path)
    log.add()

    def fail(store: LoguxStore) -> None:
        raise sqlite3.OperationalError("disk is full")

    for _ in range(2):
        with pytest.raises(LocalStoreError, match="disk is full"):
            log.store.run([lambda store: store.add(b'{"type":"b"}', NOW, 0), fail])
    assert log.add().created == [NOW, "me", 1]
    assert [one.added for one in log.read()] == [1, 2]


def test_what_is_behind_something_that_could_not_be_stored_is_not_stored_either() -> None:
    log = Log()
    log.receive(1, [1, "you", 0])
    log._receptions += 1  # a reception that has failed
    for number in (3, 4):
        assert isinstance(log.receive(number, [number, "you", 0]), LocalStoreError)
    pairs = [({"type": "a"}, [2, "you", 0])]
    log.store.run([lambda store: store.receive(2, pairs, 0, ReceptionPlace(1, 0))])
    assert log.created() == [[1, "you", 0], [2, "you", 0]]


def test_what_comes_with_it_is_stored_all_the_same() -> None:
    log = Log()
    refused, added = log.store.run(
        [
            lambda store: store.receive(
                3, [({"type": "a"}, [3, "you", 0])], 0, ReceptionPlace(0, 7)
            ),
            lambda store: store.add(b'{"type":"b"}', NOW, 0),
        ]
    )
    assert "an earlier event could not be stored" in str(refused)
    assert log.created() == [added.created]


# Ownership


def test_a_host_is_made_once_and_kept(path: Path) -> None:
    log = Log(path, host=None)
    assert len(log.facts.host) == 36
    log.store.close()
    again = Log(path, host=None)
    assert again.facts.host == log.facts.host
    assert Log(None, host=None).facts.host != log.facts.host


def test_a_store_is_of_one_log_and_one_host(path: Path) -> None:
    log = Log(path)
    log.store.close()
    with pytest.raises(LocalStoreError, match="is the store of 'me', not 'you'"):
        LoguxStore(path).open("main", "you")
    with pytest.raises(LocalStoreError, match="is the store of the log 'main', not 'other'"):
        LoguxStore(path).open("other", None)
    Log(path)


def test_a_store_is_used_by_one_client_at_a_time(path: Path) -> None:
    log = Log(path)
    with pytest.raises(LocalStoreError, match="in use by another client"):
        Log(path)
    script = "import sys; from tests.client.logux.test_store import Log; Log(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert "in use by another client" in done.stderr
    log.add()
    assert len(log.reopen().read()) == 1


def test_what_is_no_store_is_left_alone(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(LocalStoreError, match="not a database"):
        Log(path)
    assert path.read_bytes() == b"something else" * 1000
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    before = other.read_bytes()
    with pytest.raises(LocalStoreError, match="not a store of a Logux client"):
        Log(other)
    assert other.read_bytes() == before
    with pytest.raises(LocalStoreError, match="unable to open"):
        Log(tmp_path / "missing" / "log.sqlite")


def test_the_time_behind_another_is_another() -> None:
    for number in (0, 1.5, 1e16, 2**53, -1):
        assert text_of(after([1, "a", number])) != text_of([1, "a", number])


def test_a_clock_that_was_far_ahead_once_is_not_followed_for_ever() -> None:
    ahead = following(NEVER, Tick(4_102_444_800_000, 0))
    assert following(ahead, Tick(1_800_000_000_000, 0)) == Tick(1_800_000_000_000, 0)
    assert following(Tick(1000, 3), Tick(999, 0)) == Tick(1000, 4)
