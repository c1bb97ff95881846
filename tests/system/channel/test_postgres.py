"""Snapshots in a real PostgreSQL: stored before the log is trimmed, whatever is stopped or killed."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from websockets.sync.client import connect

from headrace.broker.channel.notes import StoredSnapshot
from headrace.payload.channel import Content
from headrace.server.channel import postgres as server_side
from headrace.testing import ServerFailedError, ServerProcess, wait_until
from tests.archives import extract
from tests.system.channel.postgres import PASSWORD, Cluster, Database
from tests.system.conftest import SMALL, Start
from tests.system.support import get, start_of

CHANNEL = "doc/1"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def database(cluster: Cluster) -> Database:
    return cluster.database()


def config(url: str, *, reducer: str = "count", grace_s: float = 0.2) -> str:
    return (
        f"{SMALL}[channels]\nreducer = {reducer!r}\ngrace_s = {grace_s}\nsnapshots_url = {url!r}\n"
    )


class Processor:
    """A member of a channel, over HTTP; it stays a member until it leaves."""

    def __init__(self, server: ServerProcess, name: str, channel: str = CHANNEL) -> None:
        self._server = server
        self._query = {"name": channel, "processor": name}

    def ask(
        self, method: str, what: str, body: Any = None, **query: object
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(*self._server.http, timeout=30)
        try:
            connection.request(
                method,
                f"/v1/channel/{what}?{urlencode(self._query | query)}",
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def join(self) -> dict[str, Any]:
        status, joined = self.ask("POST", "join")
        assert status == 200, joined
        return joined

    def send(self, *numbers: int) -> int:
        """Send messages, and return the offset after the last one."""
        for number in numbers:
            status, sent = self.ask("POST", "messages", {"n": number}, number=number)
            assert status == 201, sent
        return int(sent["offset"])

    def ack(self, offset: int) -> None:
        assert self.ask("POST", "ack", offset=offset)[0] == 200

    def leave(self) -> None:
        assert self.ask("POST", "leave")[0] == 200


def joined(server: ServerProcess, *names: str) -> list[Processor]:
    found = [Processor(server, name) for name in names]
    for one in found:
        one.join()
    return found


def log_exists(server: ServerProcess) -> bool:
    return get(server, f"/v1/topic?name=$channel/{CHANNEL}")[0] == 200


def wait_destroyed(server: ServerProcess) -> None:
    wait_until(lambda: not log_exists(server), 30, "the log to be destroyed")


def test_a_log_is_destroyed_when_its_snapshot_is_stored_and_not_before(
    start: Start, database: Database
):
    server = start(config=config(database.url))
    [a] = joined(server, "a")
    end = a.send(1, 2, 3)
    with database.held("EXCLUSIVE"):
        a.leave()
        database.wait_for_write()
        assert log_exists(server)
        assert database.snapshot(CHANNEL) is None
    wait_destroyed(server)
    assert database.snapshot(CHANNEL) == (end, b"3")


def test_who_joins_after_a_destruction_gets_the_snapshot_also_from_another_life_of_the_server(
    start: Start, database: Database
):
    server = start(config=config(database.url))
    [a] = joined(server, "a")
    end = a.send(1, 2, 3)
    a.leave()
    wait_destroyed(server)
    restored = Processor(server, "b").join()
    assert (restored["snapshot"]["offset"], restored["snapshot"]["payload"]) == (end, 3)
    assert restored["cursor"] == end
    assert server.terminate() == 0
    server.start()
    assert Processor(server, "c").join()["snapshot"]["payload"] == 3
    a.join()
    later = a.send(4)
    assert later > end
    for name in "abc":
        Processor(server, name).leave()
    wait_until(lambda: database.snapshot(CHANNEL) == (later, b"4"), 30, "the next snapshot")


def test_a_server_killed_when_the_snapshot_is_stored_and_the_log_is_not_destroyed(
    start: Start, database: Database
):
    server = start(config=config(database.url))
    [a] = joined(server, "a")
    end = a.send(1, 2, 3)
    with database.held("EXCLUSIVE"):
        a.leave()
        database.wait_for_write()
        server.kill()
    # PostgreSQL completes the write that it was given.
    wait_until(lambda: database.snapshot(CHANNEL) == (end, b"3"), what="the snapshot")
    server.start()
    wait_destroyed(server)
    assert database.snapshot(CHANNEL) == (end, b"3"), "nothing is folded twice"
    assert Processor(server, "b").join()["snapshot"]["payload"] == 3


def test_a_server_killed_before_the_snapshot_is_stored_has_its_log(
    start: Start, database: Database
):
    server = start(config=config(database.url))
    [a] = joined(server, "a")
    end = a.send(1, 2, 3)
    with database.held("EXCLUSIVE"):
        a.leave()
        writer = database.wait_for_write()
        server.kill()
        assert database.rows("SELECT pg_terminate_backend(%s, 10000)", writer) == [(True,)]
    assert database.snapshot(CHANNEL) is None
    server.start()
    assert start_of(server, f"$channel/{CHANNEL}") == 0
    wait_destroyed(server)
    assert database.snapshot(CHANNEL) == (end, b"3")


def test_while_the_database_is_stopped_members_go_on_and_what_is_read_is_kept(
    start: Start, cluster: Cluster, database: Database
):
    server = start(config=config(database.url))
    a, b = joined(server, "a", "b")
    first = a.send(1)
    b.ack(first)
    wait_until(lambda: start_of(server, f"$channel/{CHANNEL}") == first, what="a first trim")
    with cluster.stopped():
        b.join()
        end = a.send(2, 3)
        assert b.ask("GET", "messages")[1]["count"] == 2
        status, refused = Processor(server, "c").ask("POST", "join")
        assert (status, refused["code"], refused["retry"]) == (503, "unavailable", True)
        assert str(cluster.directory) not in refused["error"], "it is not for clients where it is"
        b.ack(end)
        server.wait_stderr("the log cannot be trimmed now")
        assert start_of(server, f"$channel/{CHANNEL}") == first
    wait_until(lambda: start_of(server, f"$channel/{CHANNEL}") == end, 30, "the log to be trimmed")
    assert database.snapshot(CHANNEL) == (end, b"3")
    assert Processor(server, "c").join()["snapshot"]["payload"] == 3


def test_a_destruction_waits_while_the_database_is_stopped(
    start: Start, cluster: Cluster, database: Database
):
    server = start(config=config(database.url))
    [a] = joined(server, "a")
    end = a.send(1, 2, 3)
    with cluster.stopped():
        a.leave()
        server.wait_stderr("the log cannot be trimmed now")
        assert log_exists(server)
    wait_destroyed(server)
    assert database.snapshot(CHANNEL) == (end, b"3")


def test_requests_behind_a_join_that_waits_for_its_snapshot_do_not_overtake_it(
    start: Start, database: Database
):
    server = start(config=config(database.url))
    database.wait_for_table()
    host, port = server.ws
    with connect(f"ws://{host}:{port}/v1/channels") as wire:
        with database.held("ACCESS EXCLUSIVE"):
            for message in (
                {"type": "hello", "processor": "a"},
                {"type": "join", "channel": CHANNEL},
                {"type": "send", "channel": CHANNEL, "number": 1, "payload": 1},
                {"type": "leave", "channel": CHANNEL},
            ):
                wire.send(json.dumps(message))
            assert json.loads(wire.recv(timeout=30))["type"] == "welcome"
        told = [json.loads(wire.recv(timeout=30)) for _ in range(3)]
        assert [one["type"] for one in told] == ["joined", "sent", "left"]
    assert "Traceback" not in server.stderr


def test_a_connection_that_the_database_has_closed_costs_nobody_an_error(
    start: Start, cluster: Cluster, database: Database
):
    server = start(config=config(database.url))
    joined(server, "a")
    with cluster.stopped():
        pass
    joined(server, "b")
    assert "cannot keep snapshots" not in server.stderr


def test_a_server_starts_without_its_database_and_says_so(
    start: Start, cluster: Cluster, database: Database
):
    with cluster.stopped():
        server = start(config=config(database.url))
        server.wait_stderr(
            "PostgreSQL does not store snapshots of channels at the moment: connection"
        )
        assert get(server, "/healthz")[0] == 200
    a = Processor(server, "a")
    wait_until(lambda: a.ask("POST", "join")[0] == 200, what="the database to be found")
    server.wait_stderr("PostgreSQL stores snapshots of channels again")


def test_a_wrong_password_is_told_to_operators_and_not_to_clients(start: Start, cluster: Cluster):
    wrong = "sesame-open"
    server = start(config=config(cluster.url("postgres", password=wrong)))
    server.wait_stderr("password authentication failed")
    status, refused = Processor(server, "a").ask("POST", "join")
    assert (status, refused["code"]) == (503, "unavailable")
    assert "authentication" not in refused["error"]
    assert wrong not in server.stderr


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://headrace:{PASSWORD}@localhost/headrace",
        "postgresql://headrace:p@ss@localhost/headrace",
        "postgresql://headrace:p%zz@localhost/headrace",
        "postgresql://headrace:12/34@localhost/headrace",
        "postgresql://localhost/headrace?pasword=sesame",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_and_not_shown(start: Start, url: str):
    server = start(config=config(url), start=False)
    with pytest.raises(ServerFailedError) as failed:
        server.start()
    assert failed.value.returncode == 1
    assert "channels.snapshots_url cannot be read" in failed.value.stderr
    assert "p@" not in failed.value.stderr
    assert "zz" not in failed.value.stderr
    assert "sesame" not in failed.value.stderr


def test_a_url_of_something_else_is_refused_and_not_shown(start: Start):
    server = start(config=config("mysql://headrace:sesame@localhost/headrace"), start=False)
    with pytest.raises(ServerFailedError) as failed:
        server.start()
    assert failed.value.returncode == 2
    assert "channels.snapshots_url must be a URL such as postgresql://" in failed.value.stderr
    assert "sesame" not in failed.value.stderr


def test_notes_count_until_the_next_snapshot_brings_them_over(start: Start, database: Database):
    server = start(config=config(""))
    [a] = joined(server, "a")
    a.send(1, 2)
    a.leave()
    wait_destroyed(server)
    assert server.terminate() == 0
    data_dir = server.data_dir
    server = start(config=config(database.url), data_dir=data_dir)
    database.wait_for_table()
    assert database.rows("SELECT * FROM headrace_snapshots") == []
    a = Processor(server, "a")
    assert a.join()["snapshot"]["payload"] == 2
    end = a.send(3)
    a.leave()
    wait_destroyed(server)
    assert database.snapshot(CHANNEL) == (end, b"3")
    assert Processor(server, "b").join()["snapshot"]["payload"] == 3, "the later one counts"


def test_a_snapshot_of_another_data_directory_is_not_taken_for_ours(
    start: Start, database: Database
):
    server = start(config=config(database.url))
    database.wait_for_table()
    database.rows(
        "INSERT INTO headrace_snapshots VALUES (%s, 0, 1000, 10, 0, true, '5')", CHANNEL.encode()
    )
    status, refused = Processor(server, "a").ask("POST", "join")
    assert (status, refused["code"]) == (503, "unavailable")
    assert "from another data directory" in refused["error"]


def test_one_bad_row_is_the_trouble_of_its_channel_alone(start: Start, database: Database):
    server = start(config=config(database.url))
    database.wait_for_table()
    database.rows("ALTER TABLE headrace_snapshots ADD CHECK (channel <> 'doc/1')")
    [a] = joined(server, "a")
    a.send(1)
    a.leave()
    server.wait_stderr("violates check constraint")
    other = Processor(server, "a", "doc/2")
    other.join()
    other.send(1)
    other.leave()
    wait_until(lambda: database.snapshot("doc/2") is not None, what="the other's snapshot")
    assert log_exists(server)


def test_an_earlier_snapshot_never_replaces_a_later_one(database: Database):
    connection = server_side.connector(database.url)()
    for offset, text in ((20, b"new"), (10, b"old"), (20, b"same")):
        connection.save(CHANNEL, StoredSnapshot(0, offset, 1, 0, Content(text, False)))
        assert connection.load(CHANNEL) == StoredSnapshot(0, 20, 1, 0, Content(b"new", False))
    connection.save(CHANNEL, later := StoredSnapshot(1, 21, 2, 5, Content(b"\0\xff", False)))
    assert connection.load(CHANNEL) == later
    connection.close()


def test_a_snapshot_is_stored_again_with_a_later_time(database: Database):
    connection = server_side.connector(database.url)()
    for ms in (5, 7, 6):
        connection.save(CHANNEL, StoredSnapshot(0, 20, 1, ms, Content(b"x", False)))
    kept = connection.load(CHANNEL)
    assert kept is not None and kept.ms == 7
    connection.close()


def test_old_snapshots_are_found_page_by_page_and_removed(database: Database):
    connection = server_side.connector(database.url)()
    for ms, name in enumerate(["b", "ä", "a", "\0"]):
        connection.save(name, StoredSnapshot(0, 20, 1, ms, Content(b"x", False)))
    assert connection.older(3, "", 2) == ["a", "b"]
    assert connection.older(3, "b", 2) == ["ä"]
    connection.remove("b")
    connection.remove("b")
    assert connection.older(9, "", 9) == ["\0", "a", "ä"]
    assert connection.load("b") is None
    connection.close()


def test_a_channel_that_is_destroyed_or_expires_leaves_nothing_in_the_database(
    start: Start, database: Database
):
    server = start(config=config(database.url) + "snapshot_age_s = 1\n")
    [a] = joined(server, "a")
    a.send(1, 2)
    a.leave()
    wait_destroyed(server)
    wait_until(lambda: database.snapshot(CHANNEL) is None, 30, "the state to expire")
    [b] = joined(server, "b")
    b.ack(b.send(1))
    wait_until(lambda: database.snapshot(CHANNEL) is not None, 30, "the state to be stored")
    connection = http.client.HTTPConnection(*server.http, timeout=30)
    connection.request("DELETE", f"/v1/channel?{urlencode({'name': CHANNEL})}")
    assert connection.getresponse().status == 200
    connection.close()
    assert database.snapshot(CHANNEL) is None
    assert not log_exists(server)


@pytest.mark.parametrize("name", ["\0", "a\0b", "ä\U0001f600", "'; DROP", "%s", "\\x00", "x" * 247])
def test_any_name_and_any_number_can_be_kept(database: Database, name: str):
    connection = server_side.connector(database.url)()
    kept = StoredSnapshot(2**62, 2**62, 2**62, 2**62, Content(bytes(range(256)), True))
    connection.save(name, kept)
    assert connection.load(name) == kept
    assert connection.load(name + "x") is None
    connection.close()


def test_who_may_not_make_tables_can_use_one_that_is_there(cluster: Cluster, database: Database):
    server_side.connector(database.url)().close()
    database.rows("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    database.rows("GRANT SELECT, INSERT, UPDATE ON headrace_snapshots TO guest")
    database.rows("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    url = database.url.partition("@")[2]
    connection = server_side.connector(f"postgresql://guest:guest@{url}")()
    connection.save(CHANNEL, StoredSnapshot(0, 1, 1, 0, Content(b"x", False)))
    assert connection.load(CHANNEL) is not None
    connection.close()


def test_commits_are_synchronous_whatever_the_database_says(database: Database):
    name = database.rows("SELECT current_database()")[0][0]
    database.rows(f"ALTER DATABASE {name} SET synchronous_commit TO off")
    connection = server_side.connector(database.url)()
    setting = connection._connection.execute("SHOW synchronous_commit").fetchone()
    assert setting == ("on",)
    connection.close()


def test_a_snapshot_from_before_topics_were_renamed_belongs_to_its_channel(
    database: Database, tmp_path: Path
):
    extract(
        Path(__file__).parents[2] / "log" / "old_versions" / "old_names" / "served.tar.xz", tmp_path
    )
    connection = server_side.connector(database.url)()
    connection.save("room", StoredSnapshot(1, 64, 4, 1, Content(b"1000", is_json=True)))
    connection.close()
    (tmp_path / "config.toml").write_text(config(database.url, reducer="count", grace_s=300))
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        for _ in range(2):
            # Three messages come after the snapshot.
            status, found = Processor(server, "new", "room").ask("GET", "snapshot")
            assert status == 200
            assert (found["snapshot"]["offset"], found["snapshot"]["payload"]) == (112, 1003)
            server.kill()
            server.start()
        assert start_of(server, "$channel/room") == 48
