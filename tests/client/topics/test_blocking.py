"""The blocking client over real connections, from one thread and from several."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import headrace
from headrace.client import BlockingClient, ConnectionState, Message
from headrace.errors import (
    BadTopicNameError,
    ClientClosedError,
    ConnectTimeoutError,
    LocalProtocolError,
    PayloadTooLargeError,
    UnacknowledgedError,
    WindowFullError,
)
from headrace.testing import wait_until
from tests.client.peer import Peer, PeerThread, plain


def connect(peer_thread: PeerThread, **options: Any) -> BlockingClient:
    return headrace.connect_blocking(
        peer_thread.peer.url, **{"backoff": lambda attempt: 0.01, **options}
    )


def test_publish_returns_when_it_is_acknowledged(peer_thread: PeerThread) -> None:
    with connect(peer_thread) as client:
        client.publish("t", b"foo", timeout_s=30)
        assert peer_thread.peer.payloads("t") == [b"foo"]
        assert client.unacknowledged == 0


def test_many_publishes_and_one_flush(peer_thread: PeerThread) -> None:
    with connect(peer_thread, window_max=100) as client:
        for number in range(1000):
            client.window(timeout_s=30)
            client.publish_nowait("t", b"%d" % number)
        client.flush(timeout_s=30)
        assert peer_thread.peer.payloads("t") == [b"%d" % number for number in range(1000)]


def test_a_full_window_refuses_and_waiting_times_out(peer_thread: PeerThread) -> None:
    peer_thread.peer.acks = False
    with connect(peer_thread, window_max=2) as client:
        future = client.publish_nowait("t", b"x")
        client.publish_nowait("t", b"x")
        with pytest.raises(WindowFullError):
            client.publish_nowait("t", b"x")
        waits: list[Callable[[], None]] = [
            lambda: client.window(timeout_s=0.01),
            lambda: client.flush(timeout_s=0.01),
            lambda: client.publish("t", b"x", timeout_s=0.01),
        ]
        for wait in waits:
            with pytest.raises(TimeoutError):
                wait()
        assert not future.done()
        client.close(flush_s=0)
        with pytest.raises(ClientClosedError):
            future.result(timeout=30)


def test_a_window_bounded_in_bytes_drains_by_itself(peer_thread: PeerThread) -> None:
    with connect(peer_thread, window_bytes_max=1000) as client:
        for _ in range(50):
            client.publish("t", bytes(900), timeout_s=30)
        assert len(peer_thread.peer.payloads("t")) == 50


def test_what_the_server_would_refuse_is_refused_in_the_callers_thread(
    peer_thread: PeerThread,
) -> None:
    with connect(peer_thread) as client:
        with pytest.raises(BadTopicNameError):
            client.publish_nowait("", b"x")
        with pytest.raises(PayloadTooLargeError):
            client.publish_nowait("t", bytes(262_145))
        with pytest.raises(TypeError):
            client.publish_nowait("t", "text")  # type: ignore[arg-type]
        assert client.unacknowledged == 0


def test_a_subscription_is_a_plain_iterator_and_can_end_by_timeout(
    peer_thread: PeerThread,
) -> None:
    with connect(peer_thread) as client:
        client.publish("t", b"foo")
        subscription = client.subscribe("t", offset=0, timeout_s=1)
        assert list(map(plain, subscription)) == [Message("t", 7, b"foo")]
        client.publish("t", b"bar")
        assert list(map(plain, subscription)) == [Message("t", 14, b"bar")]
        assert subscription.next_offset == 14


def test_a_subscription_from_now_on_knows_where_it_began(peer_thread: PeerThread) -> None:
    with connect(peer_thread) as client:
        client.publish("t", b"foo")
        with client.subscribe("t") as subscription:
            assert subscription.attached() == subscription.next_offset == 7
            client.publish("t", b"bar")
            assert plain(next(iter(subscription))) == Message("t", 14, b"bar")
            with pytest.raises(LocalProtocolError):
                client.subscribe("t")
        assert list(subscription) == []
        client.unsubscribe("t")


def test_a_handler_is_called_in_the_clients_thread(peer_thread: PeerThread) -> None:
    taken: list[tuple[bytes, str]] = []

    def take(message: Message) -> None:
        taken.append((message.payload, threading.current_thread().name))
        client.publish_nowait("answers", message.payload)

    with connect(peer_thread) as client:
        subscription = client.subscribe("t", take, offset=0)
        with pytest.raises(LocalProtocolError, match="handler"):
            next(subscription)
        client.publish("t", b"foo")
        wait_until(lambda: peer_thread.peer.payloads("answers") == [b"foo"])
        assert subscription.next_offset == 7
    assert taken == [(b"foo", f"headrace {peer_thread.peer.url}")]


def test_a_handler_that_would_wait_for_itself_is_told_so_and_can_unsubscribe(
    peer_thread: PeerThread,
) -> None:
    refused: list[str] = []

    def take(message: Message) -> None:
        waits: list[Callable[[], object]] = [
            lambda: client.publish("t", b"never published"),
            client.flush,
            client.window,
            lambda: client.subscribe("other"),
        ]
        for wait in waits:
            with pytest.raises(LocalProtocolError, match="wait here for itself"):
                wait()
            refused.append(message.payload.decode())
        client.unsubscribe("t")

    with connect(peer_thread, window_max=2) as client:
        client.publish("t", b"1")
        client.publish("t", b"2")
        peer_thread.peer.acks = False
        client.publish_nowait("other", b"x")
        client.publish_nowait("other", b"x")
        client.subscribe("t", take, offset=0)
        wait_until(lambda: len(refused) == 4)
        client.unsubscribe("t")
        peer_thread.acknowledge()
    assert refused == ["1"] * 4
    assert peer_thread.peer.payloads("t") == [b"1", b"2"]


def test_an_offset_in_the_place_of_the_handler_is_told_from_one(peer_thread: PeerThread) -> None:
    with connect(peer_thread) as client, pytest.raises(TypeError, match="offset="):
        client.subscribe("t", 7)  # type: ignore[arg-type]


def test_it_is_safe_from_several_threads(peer_thread: PeerThread) -> None:
    with connect(peer_thread, window_max=10) as client, ThreadPoolExecutor(8) as threads:

        def publish(thread: int) -> None:
            for number in range(100):
                client.publish("t", b"%d %d" % (thread, number), timeout_s=30)

        def read(expected: int) -> list[bytes]:
            return [next(subscription).payload for _ in range(expected)]

        subscription = iter(client.subscribe("t", offset=0))
        reading = [threads.submit(read, 200) for _ in range(2)]
        for publishing in [threads.submit(publish, thread) for thread in range(4)]:
            publishing.result(timeout=60)
        received = [payload for reader in reading for payload in reader.result(timeout=60)]
        expected = peer_thread.peer.payloads("t")
        assert sorted(received) == sorted(expected)
        assert len(set(expected)) == 400
        for thread in range(4):
            mine = [payload for payload in expected if payload.startswith(b"%d " % thread)]
            assert mine == [b"%d %d" % (thread, number) for number in range(100)]


def test_it_goes_on_over_a_server_that_goes_and_comes(peer_thread: PeerThread) -> None:
    with connect(peer_thread) as client:
        states: list[ConnectionState] = []
        client.on("state", states.append)
        client.publish("t", b"foo")
        subscription = client.subscribe("t", offset=0)
        assert next(subscription).payload == b"foo"
        peer_thread.stop()
        future = client.publish_nowait("t", b"bar")
        peer_thread.start()
        future.result(timeout=30)
        assert next(subscription).payload == b"bar"
        assert client.state is ConnectionState.CONNECTED
        wait_until(lambda: client.latency_s is not None)
        assert "disconnected" in states


def test_closing_wakes_whoever_waits_in_another_thread(peer_thread: PeerThread) -> None:
    peer_thread.peer.acks = False
    client = connect(peer_thread, window_max=1)
    client.publish_nowait("t", b"x")
    subscription = client.subscribe("t")
    subscription.attached()

    def refused(wait: Callable[[], object]) -> bool:
        with pytest.raises(ClientClosedError):
            wait()
        return True

    with ThreadPoolExecutor(4) as threads:
        iteration = threads.submit(list, subscription)
        waits = [threads.submit(refused, wait) for wait in (client.window, client.flush)]
        waits.append(threads.submit(refused, lambda: client.publish("t", b"y")))
        time.sleep(0.05)
        client.close(flush_s=0)
        assert [message.payload for message in iteration.result(timeout=30)] in ([], [b"x"])
        assert all(wait.result(timeout=30) for wait in waits)


def test_closing_flushes_and_tells_what_was_not_acknowledged(peer_thread: PeerThread) -> None:
    with connect(peer_thread) as client:
        flushed = client.publish_nowait("t", b"foo")
    assert flushed.done()
    peer_thread.peer.acks = False
    client = connect(peer_thread, flush_timeout_s=0.02)
    client.publish_nowait("t", b"foo")
    with pytest.raises(UnacknowledgedError):
        client.close()
    client.close()
    for call in (lambda: client.publish("t", b""), client.flush, lambda: client.subscribe("t")):
        with pytest.raises(ClientClosedError):
            call()


def test_it_leaves_no_thread_behind(peer_thread: PeerThread) -> None:
    before = threading.active_count()
    with connect(peer_thread):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_without_a_server_making_it_fails_in_time(idle_peer: Peer) -> None:
    before = threading.active_count()
    with pytest.raises(ConnectTimeoutError):
        headrace.connect_blocking(idle_peer.url, connect_timeout_s=0.05)
    assert threading.active_count() == before


def test_a_client_that_fails_on_its_own_lets_nobody_wait_for_ever(peer_thread: PeerThread) -> None:
    def backoff(attempt: int) -> float:
        raise ZeroDivisionError

    client = connect(peer_thread, backoff=backoff)
    peer_thread.peer.acks = False
    future = client.publish_nowait("t", b"x")
    peer_thread.stop()
    with pytest.raises(ClientClosedError):
        future.result(timeout=30)
    with pytest.raises(ClientClosedError):
        client.flush(timeout_s=30)
    client.close()
