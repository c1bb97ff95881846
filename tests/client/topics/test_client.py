"""The asynchronous client over real loopback connections, on asyncio's loop and on uvloop."""

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from math import inf
from typing import Any, get_type_hints

import pytest

import headrace
from headrace.client import Client, ConnectionState, Message, Missed, Options
from headrace.client.topics.client import OptionsDict
from headrace.client.websocket import WebSocketTransport
from headrace.errors import (
    BadTopicNameError,
    ClientClosedError,
    ClientError,
    ConfigError,
    LocalProtocolError,
    PayloadTooLargeError,
    UnacknowledgedError,
    WindowFullError,
)
from headrace.testing import hold_port
from tests.client.peer import Detach, Peer, plain
from tests.client.refusals import refused
from tests.client.topics.wombat_peer import WombatPeer
from tests.fakes.raw_server import raw_server

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]


def connect(peer: Peer, **options: Any) -> Client:
    return headrace.connect(peer.url, **{"backoff": lambda attempt: 0.01, **options})


async def take(subscription: headrace.client.Subscription, count: int) -> list[Message]:
    async with asyncio.timeout(30):
        return [plain(await anext(subscription)) for _ in range(count)]


async def take_one(subscription: headrace.client.Subscription) -> Message:
    return (await take(subscription, 1))[0]


# Publishing


async def test_publish_returns_when_it_is_acknowledged(peer: Peer) -> None:
    async with connect(peer) as client:
        await client.publish("t", b"foo")
        assert peer.payloads("t") == [b"foo"]
        assert client.unacknowledged == 0


async def test_publishes_of_one_step_are_sent_with_one_write(peer: Peer, until: Until) -> None:
    async with connect(peer) as client:
        await until(lambda: client.latency_s is not None)
        peer.reads.clear()
        futures = [client.publish_nowait("t", b"%d" % number) for number in range(100)]
        await client.flush()
        assert len(peer.reads) == 1
        assert all(future.done() for future in futures)
        assert peer.payloads("t") == [b"%d" % number for number in range(100)]


async def test_a_full_window_refuses_and_then_makes_room(peer: Peer) -> None:
    peer.acks = False
    async with connect(peer, window_max=3) as client:
        for _ in range(3):
            client.publish_nowait("t", b"x")
        with pytest.raises(WindowFullError):
            client.publish_nowait("t", b"x")
        room = asyncio.ensure_future(client.window())
        waiting = asyncio.ensure_future(client.publish("t", b"later"))
        await asyncio.sleep(0.01)
        assert not room.done()
        peer.acknowledge()
        await asyncio.wait_for(asyncio.gather(room, waiting), 30)
        assert peer.payloads("t") == [b"x", b"x", b"x", b"later"]


async def test_more_than_fits_into_the_window_is_published_in_order(peer: Peer) -> None:
    async with connect(peer, window_max=10) as client:
        for number in range(1000):
            await client.window()
            client.publish_nowait("t", b"%d" % number)
        await client.flush()
        assert peer.payloads("t") == [b"%d" % number for number in range(1000)]


async def test_megabytes_go_out_although_the_transport_is_fed_in_slices(peer: Peer) -> None:
    async with connect(peer) as client:
        for _ in range(40):
            client.publish_nowait("t", bytes(200_000))
        await asyncio.wait_for(client.flush(), 30)
        assert len(peer.payloads("t")) == 40


async def test_a_cancelled_publish_leaves_the_client_sound(peer: Peer) -> None:
    peer.acks = False
    async with connect(peer, window_max=1) as client:
        sent = asyncio.ensure_future(client.publish("t", b"sent"))
        await asyncio.sleep(0.01)
        never_taken = asyncio.ensure_future(client.publish("t", b"never taken"))
        await asyncio.sleep(0.01)
        for task in (never_taken, sent):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        peer.acknowledge()
        await client.publish("t", b"next")
        assert peer.payloads("t") == [b"sent", b"next"]


async def test_what_the_server_would_refuse_is_refused_here(peer: Peer) -> None:
    async with connect(peer) as client:
        with pytest.raises(BadTopicNameError):
            await client.publish("", b"x")
        with pytest.raises(PayloadTooLargeError):
            await client.publish("t", bytes(262_145))
        with pytest.raises(TypeError, match="a payload is bytes, not str: encode it"):
            await client.publish("t", "text")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a payload is bytes, not int"):
            await client.publish("t", 5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a topic is str, not bytes"):
            await client.publish(b"t", b"x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a topic is str, not int"):
            client.subscribe(5)  # type: ignore[arg-type]
        await client.publish("t", bytearray(b"array"))
        await client.publish("t", memoryview(b"view"))
        assert peer.payloads("t") == [b"array", b"view"]


async def test_flush_waits_for_what_was_published_before_it_only(peer: Peer) -> None:
    peer.acks = False
    async with connect(peer) as client:
        client.publish_nowait("t", b"before")
        flush = asyncio.ensure_future(client.flush())
        await asyncio.sleep(0.01)
        assert not flush.done()
        peer.acknowledge()
        peer.acks = False
        await asyncio.wait_for(flush, 30)
        client.publish_nowait("t", b"after")
        await client.close(flush_s=0)


# Subscribing


async def test_a_subscription_gives_what_was_and_then_what_comes(peer: Peer) -> None:
    peer.append("t", b"foo", b"bar")
    async with connect(peer) as client:
        subscription = client.subscribe("t", offset=0)
        assert await take(subscription, 2) == [Message("t", 7, b"foo"), Message("t", 14, b"bar")]
        peer.append("t", b"car")
        assert await take(subscription, 1) == [Message("t", 21, b"car")]
        assert subscription.next_offset == 21


async def test_without_an_offset_it_starts_at_the_end_and_says_where(peer: Peer) -> None:
    peer.append("t", b"foo")
    async with connect(peer) as client:
        subscription = client.subscribe("t")
        assert await subscription.attached() == 7
        assert subscription.next_offset == 7
        await client.publish("t", b"bar")
        assert await take(subscription, 1) == [Message("t", 14, b"bar")]


async def test_batches_give_what_came_together(peer: Peer) -> None:
    peer.append("t", *(b"%d" % number for number in range(10)))
    async with connect(peer) as client:
        subscription = client.subscribe("t", offset=0)
        first = await take(subscription, 3)
        rest: list[Message] = []
        async for batch in subscription.batches():
            rest += batch
            if len(rest) == 7:
                break
        assert [message.payload for message in first + rest] == [b"%d" % i for i in range(10)]
        assert subscription.next_offset == rest[-1].next_offset


async def test_a_cancelled_wait_loses_no_message(peer: Peer) -> None:
    async with connect(peer) as client:
        subscription = client.subscribe("t", offset=0)
        for number in range(20):
            waiting = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(0)
            peer.append("t", b"%d" % number)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await take(subscription, 1))[0].payload == b"%d" % number


async def test_unsubscribing_ends_the_iteration_and_tells_the_server(peer: Peer) -> None:
    async with connect(peer) as client:
        async with client.subscribe("t", offset=0) as subscription:
            await subscription.attached()
            iteration = asyncio.ensure_future(take(subscription, 1))
            await asyncio.sleep(0)
        assert peer.received[-1] == Detach("t")
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)
        with pytest.raises((RuntimeError, StopAsyncIteration)):
            await iteration
        await client.unsubscribe("t")
        await subscription.unsubscribe()


async def test_a_topic_can_be_subscribed_again_at_once(peer: Peer) -> None:
    peer.append("t", b"foo", b"bar")
    async with connect(peer) as client:
        first = client.subscribe("t", offset=0)
        await take(first, 1)
        ending = asyncio.ensure_future(client.unsubscribe("t"))
        await asyncio.sleep(0)
        second = client.subscribe("t", offset=7)
        await asyncio.wait_for(ending, 30)
        assert await take(second, 1) == [Message("t", 14, b"bar")]


async def test_a_topic_is_subscribed_once_per_client(peer: Peer) -> None:
    async with connect(peer) as client:
        client.subscribe("t")
        with pytest.raises(LocalProtocolError):
            client.subscribe("t", offset=0)


async def test_a_subscription_that_ends_before_it_began_says_so(peer: Peer) -> None:
    async with connect(peer) as client:
        subscription = client.subscribe("t")
        waiting = asyncio.ensure_future(subscription.attached())
        await client.unsubscribe("t")
        with pytest.raises(ClientError):
            await waiting


# Message handlers


async def test_a_handler_is_called_with_each_message_in_order(peer: Peer, until: Until) -> None:
    peer.append("t", b"foo", b"bar")
    async with connect(peer) as client:
        taken: list[Message] = []
        subscription = client.subscribe("t", taken.append, offset=0)
        await until(lambda: len(taken) == 2)
        peer.append("t", b"car")
        await until(lambda: len(taken) == 3)
        assert list(map(plain, taken)) == [
            Message("t", 7, b"foo"),
            Message("t", 14, b"bar"),
            Message("t", 21, b"car"),
        ]
        assert subscription.next_offset == 21


async def test_an_asynchronous_handler_is_awaited_before_it_gets_the_next(
    peer: Peer, until: Until
) -> None:
    peer.append("t", *(b"%d" % number for number in range(10)))
    async with connect(peer) as client:
        steps: list[tuple[str, bytes]] = []

        async def take(message: Message) -> None:
            steps.append(("begin", message.payload))
            await client.publish("answers", message.payload)
            assert subscription.next_offset == message.next_offset
            steps.append(("end", message.payload))

        subscription = client.subscribe("t", take, offset=0)
        await until(lambda: len(steps) == 20)
    assert steps == [(step, b"%d" % number) for number in range(10) for step in ("begin", "end")]
    assert peer.payloads("answers") == [b"%d" % number for number in range(10)]


async def test_a_handler_that_fails_is_told_to_the_loop_and_gets_the_next(
    peer: Peer, until: Until
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    peer.append("t", b"raises", b"raises later", b"is cancelled", b"works")
    taken: list[bytes] = []

    async def fail_later() -> None:
        raise ZeroDivisionError

    async def be_cancelled() -> None:
        raise asyncio.CancelledError

    def take(message: Message) -> object:
        taken.append(message.payload)
        if message.payload == b"raises":
            raise ZeroDivisionError
        if message.payload == b"raises later":
            return fail_later()
        return be_cancelled() if message.payload == b"is cancelled" else 42

    async with connect(peer) as client:
        client.subscribe("t", take, offset=0)
        await until(lambda: len(taken) == 4)
    errors = [ZeroDivisionError, ZeroDivisionError, asyncio.CancelledError]
    assert [type(context["exception"]) for context in reported] == errors
    assert "the handler of 't' failed" in reported[0]["message"]


async def test_closing_the_client_under_a_handler_that_publishes_is_no_fault_of_the_handler(
    peer: Peer, until: Until
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    peer.append("t", b"foo")
    ended: list[type[BaseException]] = []

    async def wait_for_ever(message: Message) -> None:
        try:
            while True:
                await client.publish("answers", b"again")
        except ClientClosedError as error:
            ended.append(type(error))
            raise

    client = await connect(peer)
    client.subscribe("t", wait_for_ever, offset=0)
    await until(lambda: bool(peer.payloads("answers")))
    await client.close(flush_s=0)
    await until(lambda: bool(ended))
    assert reported == []


async def test_a_handled_subscription_cannot_be_iterated_over_as_well(peer: Peer) -> None:
    async with connect(peer) as client:
        subscription = client.subscribe("t", print, offset=0)
        assert await subscription.attached() == 0
        for take in (anext(subscription), subscription.batch(), anext(subscription.batches())):
            with pytest.raises(LocalProtocolError, match="'t' was subscribed with a handler"):
                await take


async def test_an_offset_in_the_place_of_the_handler_is_told_from_one(peer: Peer) -> None:
    async with connect(peer) as client:
        with pytest.raises(TypeError, match=r"not int: to begin at an offset, .*offset="):
            client.subscribe("t", 7)  # type: ignore[arg-type]
        client.subscribe("t", offset=7)


async def test_unsubscribing_ends_the_calls_at_once_and_lets_the_last_one_finish(
    peer: Peer, until: Until
) -> None:
    peer.append("t", b"1", b"2", b"3", b"4")
    taken: list[bytes] = []
    finished: list[bytes] = []

    def take(message: Message) -> object:
        taken.append(message.payload)
        if message.payload == b"2":
            client.unsubscribe_nowait("t")
            return finish(message.payload)
        return None

    async def finish(payload: bytes) -> None:
        await client.unsubscribe("t")
        finished.append(payload)

    async with connect(peer) as client:
        client.subscribe("t", take, offset=0)
        await until(lambda: finished)
        peer.append("t", b"5")
        await client.publish("other", b"")
        again = client.subscribe("t", offset=10)
        assert await take_one(again) == Message("t", 15, b"3")
    assert taken == [b"1", b"2"]


async def test_a_slow_handler_holds_the_server_back_and_loses_nothing(
    peer: Peer, until: Until
) -> None:
    payloads = [b"%06d" % number + bytes(10_000) for number in range(300)]
    peer.append("t", *payloads)
    taken: list[bytes] = []
    go_on = asyncio.Event()

    async def take(message: Message) -> None:
        await go_on.wait()
        taken.append(message.payload)

    async with connect(peer, receive_bytes_max=100_000, receive_pause_s=60) as client:
        subscription = client.subscribe("t", take, offset=0)
        await until(lambda: client._link is not None and not client._link.reading)
        assert subscription._batches_bytes < 1_000_000
        go_on.set()
        await until(lambda: taken == payloads)


async def test_closing_ends_the_calls(peer: Peer) -> None:
    peer.append("t", b"1", b"2", b"3")
    taken: list[bytes] = []

    async def take(message: Message) -> None:
        taken.append(message.payload)
        await client.close(flush_s=0)

    client = await connect(peer)
    task = client.subscribe("t", take, offset=0)._handing
    assert task is not None
    await asyncio.wait_for(task, 30)
    assert taken == [b"1"]


# Slow subscribers


async def test_a_slow_subscriber_holds_the_server_back_and_loses_nothing(
    peer: Peer, until: Until
) -> None:
    payloads = [b"%06d" % number + bytes(10_000) for number in range(1000)]
    peer.append("t", *payloads)
    async with connect(peer, receive_bytes_max=100_000, receive_pause_s=60) as client:
        subscription = client.subscribe("t", offset=0)
        await until(lambda: client._link is not None and not client._link.reading)
        buffered = subscription._batches_bytes
        await asyncio.sleep(0.05)
        assert subscription._batches_bytes == buffered < 1_000_000
        assert [message.payload for message in await take(subscription, 1000)] == payloads
        assert len(peer.attaches()) == 1


async def test_a_subscriber_that_does_not_read_steps_aside_for_the_others(peer: Peer) -> None:
    payloads = [b"%06d" % number + bytes(10_000) for number in range(1000)]
    peer.append("slow", *payloads)
    async with connect(peer, receive_bytes_max=100_000, receive_pause_s=0.02) as client:
        slow = client.subscribe("slow", offset=0)
        await slow.attached()
        quick = client.subscribe("quick", offset=0)
        peer.append("quick", b"foo")
        assert await take(quick, 1) == [Message("quick", 7, b"foo")]
        assert [message.payload for message in await take(slow, 1000)] == payloads
        assert len(peer.attaches()) > 2


async def test_a_slow_subscriber_does_not_keep_acknowledgements_from_a_publisher(
    peer: Peer, until: Until
) -> None:
    peer.append("t", *(bytes(10_000) for _ in range(1000)))
    async with connect(peer, receive_bytes_max=100_000, receive_pause_s=60) as client:
        subscription = client.subscribe("t", offset=0)
        await until(lambda: client._link is not None and not client._link.reading)
        await asyncio.wait_for(client.publish("other", b"foo"), 30)
        received = 0
        async for _ in subscription:  # answers every message while more arrive than it can hold
            await asyncio.wait_for(client.publish("other", b"foo"), 30)
            received += 1
            if received == 100:
                break
        await client.unsubscribe("t")


async def test_a_slow_subscriber_goes_on_over_a_lost_connection(peer: Peer, until: Until) -> None:
    payloads = [b"%06d" % number + bytes(10_000) for number in range(300)]
    peer.append("t", *payloads)
    async with connect(peer, receive_bytes_max=100_000, receive_pause_s=60) as client:
        subscription = client.subscribe("t", offset=0)
        await until(lambda: client._link is not None and not client._link.reading)
        peer.drop()
        assert [message.payload for message in await take(subscription, 300)] == payloads


@pytest.mark.parametrize("pause_s", [60.0, 0.0])
async def test_unsubscribing_a_slow_topic_lets_the_client_read_on(
    peer: Peer, until: Until, pause_s: float
) -> None:
    peer.append("t", *(bytes(10_000) for _ in range(1000)))
    async with connect(peer, receive_bytes_max=100_000, receive_pause_s=pause_s) as client:
        subscription = client.subscribe("t", offset=0)
        await until(lambda: subscription._over)
        await asyncio.sleep(0.05)
        await asyncio.wait_for(client.unsubscribe("t"), 30)
        await asyncio.wait_for(client.publish("other", b"foo"), 30)


# Connections


async def test_it_says_how_it_stands_with_the_server(peer: Peer, until: Until) -> None:
    client = connect(peer)
    states: list[ConnectionState] = []
    remove = client.on("state", states.append)
    assert str(client.state) == "disconnected"
    async with client:
        await until(lambda: client.latency_s is not None)
        assert states == ["connecting", "connected"]
        assert client.state is ConnectionState.CONNECTED
        peer.drop()
        await until(lambda: states[2:] == ["disconnected", "connecting", "connected"])
        remove()
        remove()
    assert states[5:] == []
    assert str(client.state) == "closed"


async def test_it_resends_and_resumes_over_a_server_that_goes_and_comes(
    peer: Peer, until: Until
) -> None:
    peer.append("t", b"foo")
    async with connect(peer) as client:
        subscription = client.subscribe("t", offset=0)
        await take(subscription, 1)
        await peer.stop()
        await until(lambda: client.state is not ConnectionState.CONNECTED)
        published = asyncio.ensure_future(client.publish("t", b"bar"))
        await until(lambda: "no server at" in client.last_error)
        await peer.start()
        await asyncio.wait_for(published, 30)
        assert await take(subscription, 1) == [Message("t", 14, b"bar")]
        assert [(attach.topic, attach.offset) for attach in peer.attaches()] == [("t", 0), ("t", 7)]


async def test_it_may_start_before_the_server_does(idle_peer: Peer) -> None:
    peer = idle_peer
    async with connect(peer, connect_timeout_s=None) as client:
        published = client.publish_nowait("t", b"foo")
        subscription = client.subscribe("t", offset=0)
        async with peer:
            await asyncio.wait_for(client.connected(), 30)
            await asyncio.wait_for(published, 30)
            assert await take(subscription, 1) == [Message("t", 7, b"foo")]
            await client.close()


async def test_without_a_server_entering_fails_in_time_and_says_why(idle_peer: Peer) -> None:
    async def enter(timeout_s: float) -> None:
        async with connect(idle_peer, connect_timeout_s=timeout_s):
            raise AssertionError("entered without a server")

    await refused(enter, r"within [\d.]+ s: no server at 127\.0\.0\.1:\d+; is it running\?")


async def test_the_wait_between_attempts_is_the_applications_to_choose(
    idle_peer: Peer, until: Until
) -> None:
    attempts: list[int] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.001

    async with connect(idle_peer, connect_timeout_s=None, backoff=backoff):
        await until(lambda: len(attempts) >= 3)
    assert attempts[:3] == [0, 1, 2]


async def test_a_server_that_hangs_up_at_once_is_backed_off_from(peer: Peer, until: Until) -> None:
    peer.hang_up = True
    attempts: list[int] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.001

    async with connect(peer, backoff=backoff, connect_timeout_s=None) as client:
        await until(lambda: 3 in attempts)
        assert client.last_error
        peer.hang_up = False
        await client.publish("t", b"foo")
        attempts.clear()
        peer.drop()
        await until(lambda: attempts == [0])


async def test_a_silent_server_is_left_and_another_connection_tried(
    peer: Peer, until: Until
) -> None:
    peer.pongs = False
    async with connect(peer, ping_interval_s=0.02, connect_timeout_s=None) as client:
        await until(lambda: peer.accepted >= 2)
        assert "unanswered" in client.last_error
        peer.pongs = True
        await until(lambda: client.latency_s is not None)
        assert client.latency_s is not None
        assert 0 < client.latency_s < 5


async def test_a_server_that_breaks_the_protocol_is_left_with_the_reason(
    peer: Peer, until: Until
) -> None:
    async with connect(peer) as client:
        errors: list[tuple[ConnectionState, str]] = []
        client.on("state", lambda state: errors.append((state, client.last_error)))
        peer.connections[0].say_detach()
        await until(lambda: len(errors) == 3)
    (lost, why), _, (found, nothing) = errors[:3]
    assert (lost, found) == (ConnectionState.DISCONNECTED, ConnectionState.CONNECTED)
    assert "DETACH is not for a server to send" in why
    assert nothing == ""


async def test_a_port_that_speaks_something_else_is_backed_off_from_and_named(
    until: Until,
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    attempts: list[int] = []
    states: list[ConnectionState] = []
    async with raw_server(answer) as port:
        client = headrace.connect(
            f"figg://127.0.0.1:{port}",
            connect_timeout_s=None,
            backoff=lambda attempt: attempts.append(attempt) or 0.01,
        )
        client.on("state", states.append)
        async with client:
            await until(lambda: len(attempts) >= 3)
            assert "the server broke the protocol" in client.last_error
    assert attempts[:3] == [0, 1, 2]
    assert ConnectionState.CONNECTED not in states


async def test_an_attempt_that_takes_too_long_is_given_up(idle_peer: Peer) -> None:
    with hold_port(port=idle_peer.port) as full, socket.socket() as first:
        full.listen(0)  # a full backlog accepts nobody and sends nothing
        first.connect(full.getsockname())
        await refused(
            lambda timeout_s: connect(
                idle_peer, attempt_timeout_s=timeout_s / 10, connect_timeout_s=timeout_s
            ),
            r"no answer within [\d.]+ s",
        )
        client = connect(idle_peer, attempt_timeout_s=60, connect_timeout_s=None)
        async with client:
            await asyncio.sleep(0.01)


async def test_what_is_not_acknowledged_in_time_is_sent_again_and_stored_once(
    wombat_peer: WombatPeer, until: Until
) -> None:
    wombat_peer.acks = False
    async with connect(wombat_peer, resend_s=0.02) as client:
        published = client.publish_nowait("t", b"foo")
        await until(lambda: len(wombat_peer.publishes()) == 3)
        assert not published.done()
        wombat_peer.acknowledge()
        await asyncio.wait_for(published, 30)
    assert {publish.number for publish in wombat_peer.publishes()} == {0}
    assert wombat_peer.payloads("t") == [b"foo"]
    assert wombat_peer.accepted == 1


async def test_missed_messages_are_told(peer: Peer, until: Until) -> None:
    peer.append("t", b"foo", b"bar")
    async with connect(peer) as client:
        missed: list[Missed] = []
        client.on("missed", missed.append)
        subscription = client.subscribe("t", offset=0)
        await take(subscription, 2)
        await peer.stop()
        peer.append("t", b"car", b"dar")
        peer.expire("t", 3)
        await peer.start()
        assert await take(subscription, 1) == [Message("t", 28, b"dar")]
        serials = ("1@14", "1@21") if isinstance(peer, WombatPeer) else (None, None)
        assert missed == [Missed("t", 14, 21, *serials)]


async def test_a_handler_may_fail_without_harm_to_the_client(peer: Peer, until: Until) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def fail(state: ConnectionState) -> None:
        raise ZeroDivisionError

    client = connect(peer)
    client.on("state", fail)
    async with client:
        await client.publish("t", b"foo")
    assert all(isinstance(context["exception"], ZeroDivisionError) for context in reported)
    assert reported


async def test_only_known_events_can_be_asked_for(peer: Peer) -> None:
    with pytest.raises(ValueError, match="no event 'stat'"):
        connect(peer).on("stat", print)  # type: ignore[call-overload]


async def test_a_backoff_that_fails_ends_the_client_with_its_error(idle_peer: Peer) -> None:
    def backoff(attempt: int) -> float:
        raise ZeroDivisionError

    with pytest.raises(ClientClosedError) as raised:
        await connect(idle_peer, backoff=backoff)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


# Closing


async def test_closing_waits_for_acknowledgements(peer: Peer) -> None:
    peer.acks = False
    async with connect(peer) as client:
        published = client.publish_nowait("t", b"foo")
        asyncio.get_running_loop().call_later(0.02, peer.acknowledge)
    assert published.result() is None


async def test_closing_tells_what_was_not_acknowledged_in_time(peer: Peer) -> None:
    peer.acks = False
    client = await connect(peer, flush_timeout_s=0.02)
    published = [client.publish_nowait("t", b"foo") for _ in range(3)]
    with pytest.raises(UnacknowledgedError) as raised:
        await client.close()
    assert raised.value.publishes == 3
    for future in published:
        with pytest.raises(ClientClosedError):
            await future


async def test_closing_twice_at_once_is_closing_once(peer: Peer, until: Until) -> None:
    client = await connect(peer)
    states: list[ConnectionState] = []
    client.on("state", states.append)
    peer.acks = False
    published = client.publish_nowait("t", b"x")
    closing = asyncio.gather(client.close(), client.close())
    await until(lambda: peer.payloads("t"))
    peer.acknowledge()
    await closing
    assert published.exception() is None
    assert states.count(ConnectionState.CLOSED) == 1


async def test_closing_without_flushing_is_quick_and_quiet(peer: Peer) -> None:
    peer.acks = False
    client = await connect(peer)
    client.publish_nowait("t", b"foo")
    await asyncio.wait_for(client.close(flush_s=0), 30)
    await client.close()


async def test_an_error_inside_the_context_is_not_delayed_or_hidden(peer: Peer) -> None:
    peer.acks = False
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the context is what is tested
        async with connect(peer, flush_timeout_s=60) as client:
            client.publish_nowait("t", b"foo")
            raise ZeroDivisionError


async def test_closing_ends_iterations_and_everyone_who_waits(peer: Peer) -> None:
    peer.acks = False
    client = await connect(peer, window_max=1)
    subscription = client.subscribe("t")

    async def iterate() -> None:
        async for _ in subscription:
            raise AssertionError("a message from nowhere")

    iteration = asyncio.ensure_future(iterate())
    client.publish_nowait("t", b"foo")
    waiting = [asyncio.ensure_future(wait) for wait in (client.window(), client.flush())]
    await asyncio.sleep(0)
    await client.close(flush_s=0)
    await iteration
    for wait in waiting:
        with pytest.raises(ClientClosedError):
            await wait


async def test_a_closed_client_refuses_everything(peer: Peer) -> None:
    client = await connect(peer)
    await client.close()
    with pytest.raises(ClientClosedError):
        client.publish_nowait("t", b"foo")
    for call in (client.publish("t", b""), client.window(), client.flush(), client.connected()):
        with pytest.raises(ClientClosedError):
            await call
    with pytest.raises(ClientClosedError):
        client.subscribe("t")
    with pytest.raises(ClientClosedError):
        await client


async def test_a_client_must_be_entered_before_it_is_used(peer: Peer) -> None:
    client = connect(peer)
    with pytest.raises(LocalProtocolError):
        client.publish_nowait("t", b"foo")
    await client.close()


# URLs and options


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:8119", "must begin with figg:// or figgs:// or wombat:// or wombats://"),
        ("http://127.0.0.1", "must begin with"),
        ("ws://127.0.0.1", "must begin with"),
        ("figg://", "has no host"),
        ("wombat:///v1/ws", "has no host"),
        ("wombat://h/a path", "has no host, or contains a space"),
        ("figg://h:99999", "has an invalid port"),
        ("figg://h/x", "more than a host and a port"),
        ("figg://u@h", "more than a host, a port and a path"),
        ("wombat://h/v1/ws?x=1", "more than a host, a port and a path"),
        ("wombats://u:p@h", "more than a host, a port and a path"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        headrace.connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "figg://127.0.0.1",
        "figg://[::1]:8119/",
        "figg://localhost:1",
        "wombat://127.0.0.1",
        "wombat://[::1]:8120/v1/ws",
        "wombats://localhost/prefix/v1/ws",
    ],
)
def test_a_port_may_be_left_out_and_ipv6_has_brackets(url: str) -> None:
    assert headrace.connect(url).url == url


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("wombat://h", ("h", 8120, "ws://h:8120/v1/ws")),
        ("wombats://h", ("h", 443, "wss://h:443/v1/ws")),
        ("wombat://[::1]:7/x", ("::1", 7, "ws://[::1]:7/x")),
    ],
)
async def test_where_a_wombat_url_leads(url: str, dialled: tuple[str, int, str]) -> None:
    client = headrace.connect(url)
    connection = client._make_connection(None)  # type: ignore[arg-type]
    assert isinstance(connection, WebSocketTransport)
    assert (connection._host, connection._port, connection._url) == dialled


@pytest.mark.parametrize(
    "option",
    [
        {"window_max": 0},
        {"window_max": None},
        {"ping_interval_s": -1},
        {"ping_interval_s": "2"},
        {"flush_timeout_s": None},
        {"backoff": 3},
        {"resend_s": 0},
        {"ssl": True},
    ],
)
@pytest.mark.parametrize("scheme", ["figg", "wombat", "wombats"])
def test_an_option_that_cannot_be_meant_is_refused(scheme: str, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        headrace.connect(f"{scheme}://h", **option)


@pytest.mark.parametrize(
    ("scheme", "option"),
    [
        ("figg", {"ssl": ssl.create_default_context()}),
        ("wombat", {"ssl": ssl.create_default_context()}),
        ("figg", {"resend_s": 1.0}),
        ("wombat", {"ping_interval_s": None}),
    ],
)
def test_an_option_of_another_protocol_is_refused(scheme: str, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        headrace.connect(f"{scheme}://h", **option)


@pytest.mark.parametrize(
    ("url", "expected"), [("figg://h", (2.0, 2, inf)), ("wombat://h", (5.0, 1, 2.0))]
)
def test_what_is_not_set_is_the_protocols_own(url: str, expected: tuple[float, int, float]) -> None:
    own: Any = headrace.connect(url)._session
    assert (own._ping_interval_s, own._pings_unanswered_max, own._window._resend_s) == expected
    given: Any = headrace.connect(url, ping_interval_s=1.0, pings_unanswered_max=7)._session
    assert (given._ping_interval_s, given._pings_unanswered_max) == (1.0, 7)


def test_figg_does_without_the_websocket() -> None:
    check = (
        "import sys, headrace; headrace.connect('figg://h'); assert 'picows' not in sys.modules; "
        "headrace.connect('wombat://h'); assert 'picows' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_every_option_is_a_keyword_argument_and_documented() -> None:
    hints = get_type_hints(Options) | {"ping_interval_s": float | None}  # without its default
    assert {field.name: hints[field.name] for field in fields(Options)} == get_type_hints(
        OptionsDict
    )
    with pytest.raises(TypeError):
        headrace.connect(no_such_option=1)  # type: ignore[call-arg]


def test_the_backoff_doubles_to_its_limit_with_jitter_only_on_figg() -> None:
    attempts = (0, 1, 2, 6, 7, 10_000)
    exact = headrace.connect("wombat://h").options.backoff
    assert exact is not None
    assert [exact(attempt) for attempt in attempts] == pytest.approx(
        [0.1 * min(2**attempt, 100) for attempt in attempts]
    )
    assert headrace.connect("figg://h").options.backoff is None
    spread = [headrace.client.exponential()(3) for _ in range(100)]
    assert 0.4 <= min(spread) < max(spread) <= 0.8
