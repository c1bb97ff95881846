"""The Logux client over real loopback connections, on asyncio's loop and on uvloop."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import pytest_asyncio

import headrace
from headrace.client import ConnectionState, LogEvents, LoguxClient, LoguxOptions
from headrace.client.logux.client import LoguxOptionsDict
from headrace.client.logux.store import LogEvent
from headrace.errors import (
    BadEventError,
    ClientClosedError,
    ConfigError,
    ConnectTimeoutError,
    LocalProtocolError,
    LocalStoreError,
    PayloadTooLargeError,
    RefusedError,
    UnacknowledgedError,
)
from tests.client.logux.peer import LoguxPeer

HOUR_MS = 3_600_000
NOWHERE = "logux://127.0.0.1:1"


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[LoguxPeer]:
    async with LoguxPeer() as peer:
        yield peer


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "log.sqlite"


def connect(url: str, store: Path | None = None, **options: Any) -> LoguxClient:
    defaults = {"backoff": lambda attempt: 0.01, "flush_timeout_s": 0}
    return headrace.connect(url, store=store, **{**defaults, **options})


async def take(events: LogEvents, count: int) -> list[LogEvent]:
    async with asyncio.timeout(30):
        return [await anext(events) for _ in range(count)]


async def reaches(log: LoguxClient, state: ConnectionState) -> None:
    reached = asyncio.Event()
    forget = log.on("state", lambda new: new is state and reached.set())
    async with asyncio.timeout(30):
        if log.state is not state:
            await reached.wait()
    forget()


# Without a server


async def test_events_are_added_and_read_without_a_server(store: Path) -> None:
    async with connect(NOWHERE, store, host="me") as log:
        before = int(time.time() * 1000)
        created = [await log.add({"type": "n", "n": n}) for n in range(3)]
        assert all(len(one) == 3 and one[1] == "me" and one[0] >= before for one in created)
        assert created == sorted(created)
        assert await take(log.events(), 3) == [
            ({"type": "n", "n": n}, created[n], n + 1) for n in range(3)
        ]
        assert log.unacknowledged == 3
        assert log.last_error == "" or "no server at" in log.last_error
    async with connect(NOWHERE, store) as log:
        assert log.host == "me"
        assert [one.event["n"] for one in await take(log.events(after=1), 2)] == [1, 2]
        assert log.unacknowledged == 3


async def test_a_host_is_made_and_kept(store: Path) -> None:
    async with connect(NOWHERE, store) as log:
        host = log.host
        assert (await log.add({"type": "a"}))[1] == host
    async with connect(NOWHERE, store) as log:
        assert log.host == host


async def test_what_was_added_at_once_has_one_order(store: Path) -> None:
    async with connect(NOWHERE, store) as log:
        events = log.events()
        created = await asyncio.gather(*(log.add({"type": "n", "n": n}) for n in range(1000)))
        found = await take(events, 1000)
        assert [one.event["n"] for one in found] == list(range(1000))
        assert [one.created for one in found] == created == sorted(created)


async def test_iterators_are_live_and_have_their_own_place(store: Path) -> None:
    async with connect(NOWHERE, store) as log:
        first = log.events()
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        await log.add({"type": "a"})
        assert (await waiting).event == {"type": "a"}
        assert first.after == 1
        await log.add({"type": "b"})
        assert [one.added for one in await take(log.events(), 2)] == [1, 2]
        late = asyncio.ensure_future(anext(log.events(after=2)))
        await asyncio.sleep(0)
        late.cancel()
        assert [one.added for one in await take(first, 1)] == [2]


async def test_several_tasks_share_an_iterator_without_doubles() -> None:
    async with connect(NOWHERE) as log:
        events = log.events()
        tasks = [asyncio.ensure_future(anext(events)) for _ in range(10)]
        await asyncio.gather(*(log.add({"type": "n"}) for _ in range(10)))
        found = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert sorted(one.added for one in found) == list(range(1, 11))


@pytest.mark.parametrize(
    "event",
    [
        None, [], {}, {"type": 5}, {"type": "a", "x": {1, 2}}, {"type": "a", "x": b"1"},
        {"type": "a", "x": float("nan")}, {"type": "a", 1: 2}, {"type": "a", "x": "\ud800"},
        {"type": "a", "x": object()}, {"type": "a", "x": (1, 2)}, {"type": "a", "x": 2**70 + 1},
    ],
)  # fmt: skip
async def test_what_is_no_event_is_refused(event: Any) -> None:
    async with connect(NOWHERE) as log:
        with pytest.raises(BadEventError):
            await log.add(event)
        deep: list[Any] = []
        for _ in range(200):
            deep = [deep]
        with pytest.raises(BadEventError, match="deep"):
            await log.add({"type": "a", "x": deep})
        assert log.unacknowledged == 0


async def test_an_event_that_no_server_takes_is_refused_with_the_limit() -> None:
    async with connect(NOWHERE) as log:
        await log.add({"type": "x" * 261_900})
        with pytest.raises(PayloadTooLargeError, match="262144"):
            await log.add({"type": "x" * 262_144})


async def test_the_loop_does_not_wait_for_the_store(store: Path) -> None:
    async with connect(NOWHERE, store) as log:
        gate = threading.Event()
        assert log._open is not None
        log._open.ask(lambda store: gate.wait(30), lambda result: None)
        added = asyncio.ensure_future(log.add({"type": "a"}))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not added.done()
        gate.set()
        await added


# With a server


async def test_events_go_both_ways(peer: LoguxPeer, store: Path) -> None:
    async with connect(f"{peer.url}/a/%E2%98%83", store, host="me", credentials={"t": 1}) as log:
        server = await peer.accept()
        assert await server.hear() == ["connect", [0, 0], "me", 0, {"t": 1}]
        await server.greet()
        await log.connected()
        await log.add({"type": "a"})
        kind, number, event, created = await server.hear()
        assert (kind, number, event, created[1:]) == ("sync", 1, {"type": "a"}, ["me", 0])
        await server.say("synced", 1)
        await asyncio.wait_for(log.synced(), 30)
        assert log.unacknowledged == 0
        await server.say("sync", 2, {"type": "b"}, [1, "you", 0], {"type": "c"}, [1, "you", 1])
        assert await server.hear() == ["synced", 2]
        assert [one.event["type"] for one in await take(log.events(), 3)] == ["a", "b", "c"]
        assert log.state == "connected"
        assert log.last_error == ""
    assert log.state == "closed"
    assert peer.paths == ["/v1/logux/a/%E2%98%83"]


async def test_what_was_added_before_goes_in_order_and_several_at_once(
    peer: LoguxPeer, store: Path
) -> None:
    async with connect(NOWHERE, store) as log:
        for n in range(3):
            await log.add({"type": "n", "n": n})
    async with connect(peer.url, store) as log:
        server = await peer.greet()
        message = await server.hear("sync")
        assert message[:2] == ["sync", 3]
        assert [event["n"] for event in message[2::2]] == [0, 1, 2]
        await server.say("synced", 3)
        await asyncio.wait_for(log.synced(), 30)
    async with connect(peer.url, store) as log:
        assert log.unacknowledged == 0
        await log.synced()


async def test_a_lost_synced_costs_nothing(peer: LoguxPeer, store: Path) -> None:
    async with connect(peer.url, store) as log:
        server = await peer.greet()
        await log.add({"type": "a"})
        first = await server.hear("sync")
        await server.cut()
        later = int(time.time() * 1000) + HOUR_MS
        server = await peer.greet("connected", [0, 0], "server", [later, later])
        assert await server.hear("sync") == first
        await server.cut()
    async with connect(peer.url, store) as log:
        server = await peer.greet()
        assert await server.hear("sync") == first
        await server.say("synced", 1)
        await asyncio.wait_for(log.synced(), 30)


async def test_duplicate_deliveries_are_stored_once_and_answered(
    peer: LoguxPeer, store: Path
) -> None:
    pair = {"type": "a"}, [5, "you", 0]
    async with connect(peer.url, store, host="me") as log:
        server = await peer.greet()
        await server.say("sync", 1, *pair)
        await server.say("sync", 1, *pair)
        assert [await server.hear(), await server.hear()] == [["synced", 1]] * 2
        await server.cut()
        server = await peer.accept()
        assert (await server.hear())[3] == 1
        later = int(time.time() * 1000) + HOUR_MS
        await server.greet("connected", [0, 0], "server", [later, later])
        await server.say("sync", 2, *pair, {"type": "b"}, [6, "you", 0])
        assert await server.hear() == ["synced", 2]
        assert [one.event["type"] for one in await take(log.events(), 2)] == ["a", "b"]
        # One of our own events comes back, with the time with which it was sent.
        await log.add({"type": "c"})
        _, _, event, created = await server.hear("sync")
        await server.say("sync", 3, event, created)
        assert await server.hear() == ["synced", 3]
        await log.add({"type": "d"})
        assert [one.event["type"] for one in await take(log.events(), 4)] == ["a", "b", "c", "d"]


async def test_time_is_corrected(peer: LoguxPeer, store: Path) -> None:
    async with connect(peer.url, store, host="me") as log:
        later = int(time.time() * 1000) + HOUR_MS
        server = await peer.greet("connected", [0, 0], "server", [later, later])
        created = await log.add({"type": "a"})
        _, _, _, told = await server.hear("sync")
        assert told[0] - created[0] == pytest.approx(HOUR_MS, abs=5000)
        await server.say("sync", 1, {"type": "b"}, [later + 0.5, "you", 7])
        [_, received] = await take(log.events(), 2)
        assert received.created == [later + 0.5 - (told[0] - created[0]), "you", 7]


async def test_positions_are_kept(peer: LoguxPeer, store: Path) -> None:
    async with connect(peer.url, store) as log:
        server = await peer.greet()
        await server.say("sync", 1, {"type": "a"}, [1, "you", 0])
        await server.hear("synced")
        await server.say("ping", 9)
        assert await server.hear() == ["pong", 1]
        assert log.state == "connected"
    async with connect(peer.url, store):
        assert (await (await peer.accept()).hear())[3] == 9


async def test_an_unknown_message_is_told_and_it_goes_on(peer: LoguxPeer) -> None:
    async with connect(peer.url) as log:
        server = await peer.greet()
        await server.say("nonsense", 1)
        assert await server.hear() == ["error", "Unknown message type `nonsense`", "protocol"]
        await server.say("sync", 1, {"type": "a"}, [1, "you", 0])
        assert await server.hear() == ["synced", 1]
        await server.say("error", "Unknown message type `x`", "protocol")
        await server.say("ping", 1)
        await server.hear("pong")
        assert log.state == "connected"
        assert log.last_error == "Unknown message type `x`"


async def test_what_is_no_message_is_told_and_it_connects_again(peer: LoguxPeer) -> None:
    async with connect(peer.url) as log:
        server = await peer.greet()
        await server.socket.send(b"\xc1")
        error = await server.hear()
        assert (error[0], error[2]) == ("error", "protocol")
        await server.closed()
        await peer.greet()
        await log.connected()


async def test_a_server_that_speaks_nonsense_is_backed_off_from(peer: LoguxPeer) -> None:
    """It backs off even if the server accepts the connection first; a lost connection resets the count."""
    attempts: list[int] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.01

    async with connect(peer.url, backoff=backoff):
        for _ in range(3):
            connection = await peer.greet()
            await connection.say("sync", "no number")
            await connection.closed()
        connection = await peer.greet()
        await connection.cut()
        await peer.greet()
    assert attempts == [0, 1, 2, 0]


async def test_a_text_message_is_not_understood_and_it_connects_again(peer: LoguxPeer) -> None:
    async with connect(peer.url):
        server = await peer.greet()
        await server.socket.send('["ping", 1]')
        await server.closed()
        await peer.greet()


async def test_a_silent_server_is_pinged_and_given_up(peer: LoguxPeer) -> None:
    async with connect(peer.url, ping_interval_s=0.3, pings_unanswered_max=2) as log:
        server = await peer.greet()
        assert await server.hear() == ["ping", 0]
        await server.say("pong", 0)
        assert [await server.hear(), await server.hear()] == [["ping", 0]] * 2
        await server.closed()
        assert log.latency_s is not None
        await peer.greet()


async def test_a_server_that_does_not_answer_is_given_up(peer: LoguxPeer) -> None:
    async with connect(peer.url, ping_interval_s=0.05, pings_unanswered_max=2):
        server = await peer.accept()
        await server.closed()
        await peer.accept()


async def test_a_server_that_comes_later_gets_everything(peer: LoguxPeer, store: Path) -> None:
    await peer.stop()
    async with connect(peer.url, store) as log:
        await log.add({"type": "a"})
        await reaches(log, ConnectionState.DISCONNECTED)
        await peer.start()
        server = await peer.greet()
        assert (await server.hear())[0] == "sync"
        await server.say("synced", 1)
        await asyncio.wait_for(log.synced(), 30)


# Refusals


async def is_refused(log: LoguxClient, peer: LoguxPeer, kind: str, match: str) -> None:
    """Check that the client stays refused, and that its log can still be used."""
    await reaches(log, ConnectionState.REFUSED)
    for waiting in (log.synced(), log.connected(), anext(log.events(after=1))):
        with pytest.raises(RefusedError, match=match) as error:
            await asyncio.wait_for(waiting, 30)
        assert error.value.kind == kind
    await log.add({"type": "later"})
    assert [one.added for one in await take(log.events(), 2)] == [1, 2]
    assert peer.waiting == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (["Wrong credentials", "auth"], "auth"),
        (["Only 1.x protocols are supported, but you use 0.0", "protocol"], "protocol"),
    ],
)
async def test_a_server_that_refuses_us_is_not_asked_again(
    peer: LoguxPeer, store: Path, error: list[str], kind: str
) -> None:
    async with connect(peer.url, store) as log:
        await log.add({"type": "a"})
        waiting = asyncio.ensure_future(log.synced())
        server = await peer.accept()
        await server.hear()
        await server.say("error", *error)
        await server.closed()
        with pytest.raises(RefusedError):
            await asyncio.wait_for(waiting, 30)
        await is_refused(log, peer, kind, error[0])
        assert error[0] in log.last_error


async def test_a_server_of_another_version_is_told_and_not_asked_again(
    peer: LoguxPeer, store: Path
) -> None:
    async with connect(peer.url, store) as log:
        await log.add({"type": "a"})
        server = await peer.greet("connected", [1, 0], "server", [1, 2])
        error = await server.hear()
        assert error == [
            "error", "Only 0.x protocols are supported, but you use 1.0", "protocol",
        ]  # fmt: skip
        await server.closed()
        await is_refused(log, peer, "protocol", "version 1.0")


async def test_entering_says_that_it_was_refused(peer: LoguxPeer) -> None:
    entering = asyncio.ensure_future(_enter(connect(peer.url, connect_timeout_s=30)))
    server = await peer.accept()
    await server.hear()
    await server.say("error", "Wrong credentials", "auth")
    with pytest.raises(RefusedError, match="Wrong credentials"):
        await entering


async def _enter(log: LoguxClient) -> LoguxClient:
    return await log


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_credentials_of_a_server_are_verified(
    peer: LoguxPeer, store: Path, asynchronous: bool
) -> None:
    asked: list[Any] = []

    def verify(host: Any, credentials: Any) -> bool:
        asked.append((host, credentials))
        return credentials == "right"

    async def verify_later(host: Any, credentials: Any) -> bool:
        await asyncio.sleep(0)
        return verify(host, credentials)

    async with connect(peer.url, store, verify=verify_later if asynchronous else verify) as log:
        await log.add({"type": "a"})
        server = await peer.greet("connected", [0, 0], "server", [1, 1], "right")
        await server.hear("sync")
        await server.cut()
        server = await peer.greet("connected", [0, 0], "other", [1, 1], "wrong")
        assert await server.hear() == ["error", "Wrong credentials", "auth"]
        await server.closed()
        await is_refused(log, peer, "auth", "'other' are wrong")
    assert asked == [("server", "right"), ("other", "wrong")]


async def test_a_server_that_cannot_be_verified_is_refused(peer: LoguxPeer, store: Path) -> None:
    def verify(host: Any, credentials: Any) -> bool:
        raise KeyError(credentials)

    async with connect(peer.url, store, verify=verify) as log:
        await log.add({"type": "a"})
        server = await peer.greet()
        assert (await server.hear())[0] == "error"
        await server.closed()
        await is_refused(log, peer, "auth", r"could not be verified: KeyError: None")


async def test_an_answer_about_a_connection_that_is_gone_is_none(peer: LoguxPeer) -> None:
    answers: asyncio.Queue[asyncio.Future[bool]] = asyncio.Queue()

    async def verify(host: Any, credentials: Any) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        answers.put_nowait(answer)
        return await answer

    async with connect(peer.url, verify=verify) as log:
        server = await peer.greet()
        first = await answers.get()
        # The client reads nothing meanwhile, so only missing pings could reveal the loss.
        log._link._connection.drop("lost")  # type: ignore[union-attr]
        server = await peer.greet()
        second = await answers.get()
        assert first.cancelled()
        assert log.state == "connecting"
        second.set_result(True)
        await log.connected()
        await server.say("ping", 0)
        await server.hear("pong")


# Opening and closing


async def test_nothing_happens_before_it_is_entered(store: Path) -> None:
    log = connect(NOWHERE, store)
    assert not store.exists()
    assert log.state == "disconnected"
    for call in (log.add({"type": "a"}), log.synced(), log.connected()):
        with pytest.raises(LocalProtocolError, match="enter the client first"):
            await call
    with pytest.raises(LocalProtocolError, match="enter the client first"):
        log.events()
    await log.close()
    with pytest.raises(ClientClosedError):
        await log
    assert log.state == "closed"


async def test_a_store_that_is_in_use_is_told(store: Path) -> None:
    async with connect(NOWHERE, store):
        with pytest.raises(LocalStoreError, match="in use by another client"):
            await connect(NOWHERE, store)
    async with connect(NOWHERE, store) as log:
        await log.add({"type": "a"})


async def test_a_store_of_another_log_is_told(store: Path) -> None:
    async with connect(f"{NOWHERE}/other", store):
        pass
    with pytest.raises(LocalStoreError, match="'other', not 'main'"):
        await connect(NOWHERE, store)


async def test_entering_waits_for_a_connection_if_it_is_told_to(store: Path) -> None:
    with pytest.raises(ConnectTimeoutError, match=r"within 0\.05 s: "):
        await connect(NOWHERE, store, connect_timeout_s=0.05)
    async with connect(NOWHERE, store):  # the failed client has closed the store
        pass


async def test_closing_while_it_is_being_entered_leaves_nothing_open(store: Path) -> None:
    log = connect(NOWHERE, store)
    entering = asyncio.ensure_future(_enter(log))
    await asyncio.sleep(0)
    await log.close()
    with pytest.raises(ClientClosedError):
        await entering
    entering = asyncio.ensure_future(_enter(connect(NOWHERE, store)))
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with connect(NOWHERE, store):
        pass


async def test_entering_twice_is_entering_once(store: Path) -> None:
    log = connect(NOWHERE, store)
    assert await asyncio.gather(_enter(log), _enter(log)) == [log, log]
    async with log:
        await log.add({"type": "a"})
    assert log.state == "closed"


async def test_closing_ends_iterations_and_waits(store: Path) -> None:
    log = await connect(NOWHERE, store)
    await log.add({"type": "a"})
    events = log.events()
    await take(events, 1)
    iterating = asyncio.ensure_future(anext(events, None))
    syncing = asyncio.ensure_future(log.synced())
    adding = asyncio.ensure_future(log.add({"type": "b"}))
    await asyncio.sleep(0)
    await asyncio.gather(log.close(), log.close())
    assert await iterating in (None, ({"type": "b"}, await adding, 2))
    with pytest.raises(ClientClosedError):
        await syncing
    with pytest.raises(ClientClosedError):
        await log.add({"type": "c"})
    await log.close()
    async with connect(NOWHERE, store) as log:
        assert log.unacknowledged == 2


async def test_closing_waits_for_a_server_that_is_there(peer: LoguxPeer, store: Path) -> None:
    log = await connect(peer.url, store, flush_timeout_s=30)
    await log.add({"type": "a"})
    closing = asyncio.ensure_future(log.close())
    server = await peer.greet()
    await server.hear("sync")
    assert not closing.done()
    await server.say("synced", 1)
    await closing
    await server.closed()


async def test_closing_does_not_wait_for_one_that_is_not(store: Path) -> None:
    log = await connect(NOWHERE, store, flush_timeout_s=60, backoff=lambda attempt: 60.0)
    await log.add({"type": "a"})
    await asyncio.wait_for(log.close(), 30)


async def test_what_was_only_in_memory_is_told_when_it_is_lost() -> None:
    log = await connect(NOWHERE, None, flush_timeout_s=0.01)
    await log.add({"type": "a"})
    with pytest.raises(UnacknowledgedError) as error:
        await log.close()
    assert error.value.publishes == 1
    log = await connect(NOWHERE, None)
    await log.add({"type": "a"})
    await log.close(flush_s=0)


async def test_what_was_only_in_memory_is_waited_for(peer: LoguxPeer) -> None:
    await peer.stop()
    log = await connect(peer.url, None, flush_timeout_s=30)
    await log.add({"type": "a"})
    await reaches(log, ConnectionState.DISCONNECTED)
    closing = asyncio.ensure_future(log.close())
    await peer.start()
    server = await peer.greet()
    await server.hear("sync")
    await server.say("synced", 1)
    await closing


async def test_a_handler_hears_of_states(peer: LoguxPeer) -> None:
    states: list[ConnectionState] = []
    log = connect(peer.url)
    log.on("state", states.append)
    async with log:
        server = await peer.greet()
        await log.connected()
        await server.cut()
        await peer.greet()
        await log.connected()
    assert states == [
        "connecting", "connected", "disconnected", "connecting", "connected", "disconnected", "closed",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no event 'missed'"):
        log.on("missed", print)  # type: ignore[arg-type]


KILLED = """
import asyncio, os, signal, sys
import headrace

async def main():
    async with headrace.connect("logux://127.0.0.1:1", store=sys.argv[1]) as log:
        for n in range(5):
            print(await log.add({"type": "n", "n": n}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_was_added_survives_kill_9(store: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, store], capture_output=True, text=True)
    assert done.stdout.count("\n") == 5, done.stderr
    async with connect(NOWHERE, store) as log:
        assert [one.event["n"] for one in await take(log.events(), 5)] == list(range(5))
        assert log.unacknowledged == 5


# Options and addresses


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("logux://127.0.0.1:1/%ff", "names no log"),
        (f"logux://127.0.0.1:1/{'x' * 300}", "names no log"),
        ("logux://127.0.0.1:1/a?b", "more than a host"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        headrace.connect(url, store=None)


@pytest.mark.parametrize(
    "options",
    [
        {"host": ""}, {"host": 5}, {"host": "\ud800"}, {"host": "é" * 128}, {"credentials": b"x"},
        {"credentials": {1, 2}}, {"verify": True}, {"backoff": 1}, {"ssl": True}, {"ping_interval_s": 0},
        {"pings_unanswered_max": None}, {"flush_timeout_s": -1}, {"connect_timeout_s": 0},
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        connect(NOWHERE, **options)


def test_options_of_other_protocols_are_unknown() -> None:
    with pytest.raises(TypeError, match="window_max"):
        connect(NOWHERE, window_max=5)
    with pytest.raises(TypeError, match="store"):
        headrace.connect("figg://127.0.0.1:1", store=None)


def test_there_is_no_blocking_client() -> None:
    with pytest.raises(ConfigError, match=r"for `headrace\.connect` only"):
        headrace.connect_blocking(NOWHERE)


def test_every_option_is_an_argument() -> None:
    assert list(get_type_hints(LoguxOptionsDict)) == [
        field.name for field in fields(LoguxOptions) if field.name != "store"
    ]


def test_other_clients_do_not_load_sqlite() -> None:
    script = "import sys, headrace.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not {"sqlite3", "picows"} & set(done.stdout.split())
