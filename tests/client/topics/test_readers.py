"""Named readers against the real server: resuming, acknowledging, takeover and fencing."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.client import Message, ReaderChange
from headrace.errors import LocalProtocolError, ReaderRefusedError
from headrace.testing import ServerProcess
from tests.tools import takes_long

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("readers") / "data") as server:
        yield server


@pytest.fixture(params=["figg", "wombat"])
def url(shared: ServerProcess, request: pytest.FixtureRequest) -> str:
    return {"figg": shared.figg_url, "wombat": shared.wombat_url}[request.param]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


async def publish(client: headrace.client.Client, topic: str, count: int) -> None:
    for number in range(count):
        client.publish_nowait(topic, b"%d" % number)
    await client.flush()


async def take(subscription: Any, count: int) -> list[bytes]:
    async with asyncio.timeout(30):
        return [(await anext(subscription)).payload for _ in range(count)]


async def test_a_reader_resumes_behind_what_it_has_handled(url: str, topic: str) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 4)
        async with client.subscribe(topic, reader="billing") as messages:
            # Asking for the third message reports the first two as handled.
            assert await take(messages, 3) == [b"0", b"1", b"2"]
    async with headrace.connect(url) as client:
        async with client.subscribe(topic, reader="billing") as messages:
            assert await take(messages, 2) == [b"2", b"3"]
        async with client.subscribe(topic, reader="audit") as messages:
            assert await take(messages, 1) == [b"0"]


async def test_a_message_has_ordinal_epoch_and_time_where_they_are_known(
    url: str, topic: str
) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 2)
        async with client.subscribe(topic, reader="r") as messages:
            first, second = await anext(messages), await anext(messages)
            assert (first.ordinal, second.ordinal) == (0, 1)
            assert (first.offset, first.next_offset, second.offset) == (0, 5, 5)
            assert first.epoch == second.epoch
            assert first.epoch and first.time and 1.7e9 < first.time < 1e10
        async with client.subscribe(topic, offset=0) as messages:
            plain = await anext(messages)
            assert plain.ordinal is plain.time is None
            assert plain.epoch == (None if url.startswith("figg") else first.epoch)


async def test_only_a_contiguous_prefix_of_handled_messages_is_passed(url: str, topic: str) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 4)
        async with client.subscribe(topic, reader="r", ack="manual") as messages:
            got = [await anext(messages) for _ in range(4)]
            for number in (0, 3, 2):
                messages.ack(got[number])
            await messages.flush()
            assert messages.acknowledged == got[0].next_offset
        async with client.subscribe(topic, reader="r", ack="manual") as messages:
            got = [await anext(messages) for _ in range(3)]
            assert [one.payload for one in got] == [b"1", b"2", b"3"]
            messages.ack(got[1])
            messages.ack(got[0])
            await messages.flush()
            assert messages.acknowledged == got[1].next_offset


async def test_a_new_reader_can_start_with_what_comes_next(url: str, topic: str) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 2)
        async with client.subscribe(topic, reader="r", start="newest") as messages:
            await messages.attached()
            await client.publish(topic, b"new")
            assert await take(messages, 1) == [b"new"]


async def test_a_handler_that_returns_acknowledges_and_one_that_fails_does_not(
    url: str, topic: str, until: Until
) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 4)
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: errors.append(told))
        handled: list[bytes] = []

        async def handle(message: Message) -> None:
            if message.payload == b"2":
                raise ValueError("poison")
            handled.append(message.payload)

        subscription = client.subscribe(topic, handle, reader="r")
        await until(lambda: subscription.ended)
        assert handled == [b"0", b"1"]
        assert len(errors) == 1
        async with client.subscribe(topic, reader="r") as messages:
            assert await take(messages, 1) == [b"2"]


async def test_one_of_several_clients_is_active_and_the_next_takes_over(
    url: str, topic: str, until: Until
) -> None:
    changes: list[ReaderChange] = []
    async with headrace.connect(url) as second:
        second.on("reader", changes.append)
        async with headrace.connect(url) as first:
            await publish(first, topic, 3)
            active = first.subscribe(topic, reader="r", ack="manual")
            message = await anext(active)
            waiting = second.subscribe(topic, reader="r")
            await until(lambda: [one.state for one in changes] == ["waiting"])
            active.ack(message)
        assert await take(waiting, 2) == [b"1", b"2"]
        assert [one.state for one in changes] == ["waiting", "active"]


async def test_moving_the_cursor_over_http_moves_an_active_reader(
    shared: ServerProcess, url: str, topic: str
) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 3)
        async with client.subscribe(topic, reader="r", ack="manual") as messages:
            got = [await anext(messages) for _ in range(3)]
            for message in got:
                messages.ack(message)
            await messages.flush()
            cursor = {"topic": topic, "epoch": got[0].epoch, "offset": 5, "ordinal": 1}
            body = json.dumps({"reader": "r", "positions": [cursor]}).encode()
            request = urllib.request.Request(f"{shared.http_url}/v1/cursors", data=body)
            await asyncio.to_thread(lambda: urllib.request.urlopen(request).close())
            assert await take(messages, 2) == [b"1", b"2"]
            assert messages.losses == 1


async def test_reader_names_and_options_are_checked(url: str, topic: str) -> None:
    async with headrace.connect(url) as client:
        with pytest.raises(LocalProtocolError, match="neither offset"):
            client.subscribe(topic, reader="r", offset=0)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="reader's name must not be empty"):
            client.subscribe(topic, reader="")
        with pytest.raises(ValueError, match="start is"):
            client.subscribe(topic, reader="r", start="now")  # type: ignore[call-overload]
        with pytest.raises(ReaderRefusedError, match="choose another name"):
            await anext(client.subscribe(topic, reader="lake"))
        with pytest.raises(ReaderRefusedError, match="choose another name"):
            await client.subscribe(topic, reader="lake").attached()
        with pytest.raises(LocalProtocolError, match="not a message of"):
            client.subscribe(topic, reader="r").ack(Message("other", 1, b""))


async def test_two_tasks_that_iterate_are_told_to_acknowledge_themselves(
    url: str, topic: str
) -> None:
    async with headrace.connect(url) as client:
        messages = client.subscribe(topic, reader="r")
        one = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError, match='ack="manual"'):
            await anext(messages)
        one.cancel()


def test_a_blocking_client_acknowledges_what_its_loop_has_handled(url: str, topic: str) -> None:
    with headrace.connect_blocking(url) as client:
        for number in range(4):
            client.publish_nowait(topic, b"%d" % number)
        client.flush()
        with client.subscribe(topic, reader="r") as messages:
            for message in messages:
                if message.payload == b"2":
                    break
        with client.subscribe(topic, reader="r", ack="manual") as messages:
            message = next(messages)
            assert message.payload == b"2"
            messages.ack(message)
            messages.flush()
        with client.subscribe(topic, reader="r", timeout_s=0.1) as messages:
            assert next(messages).payload == b"3"


async def test_a_loop_that_never_waits_acknowledges_all_the_same(url: str, topic: str) -> None:
    async with headrace.connect(url) as client:
        await publish(client, topic, 2000)
        async with client.subscribe(topic, reader="r") as messages:
            async for message in messages:
                time.sleep(
                    0.02
                )  # an application does this that calculates, or uses a blocking library
                assert message.payload != b"1999", (
                    "nothing was acknowledged before the last message"
                )
                if messages.acknowledged:
                    break


async def test_messages_wait_while_there_is_no_connection(tmp_path: Path, topic: str) -> None:
    with ServerProcess(tmp_path / "data") as server:
        async with headrace.connect(server.figg_url) as client:
            await publish(client, topic, 3)
            messages = client.subscribe(topic, reader="r", ack="manual")
            assert await take(messages, 1) == [b"0"]
            lost = asyncio.Event()
            client.on("state", lambda state: lost.set())
            server.kill()
            await lost.wait()
            # Another process may be reading by now.
            following = asyncio.ensure_future(anext(messages))
            await asyncio.wait([following], timeout=0.1)
            assert not following.done()
            server.start()
            assert (await following).payload == b"1"


def test_a_blocking_client_gives_out_nothing_without_a_connection(
    tmp_path: Path, topic: str
) -> None:
    with (
        ServerProcess(tmp_path / "data") as server,
        headrace.connect_blocking(server.figg_url) as client,
    ):
        publish_blocking(server.figg_url, topic, 3)
        lost = threading.Event()
        messages = client.subscribe(topic, reader="r")
        assert next(messages).payload == b"0"
        client.on("state", lambda state: lost.set())
        server.kill()
        assert lost.wait(30)
        messages.timeout_s = 0.1
        assert list(messages) == []
        server.start()
        messages.timeout_s = 30
        assert next(messages).payload == b"1"


READ = """
import asyncio, sys, headrace
async def main():
    async with headrace.connect(sys.argv[1], ping_interval_s=0.2, pings_unanswered_max=9) as client:
        client.on("reader", lambda change: print(change.state, flush=True))
        async with client.subscribe(sys.argv[2], reader="r", ack="manual") as messages:
            async for message in messages:
                if message.payload == b"10":
                    print("holding", flush=True)
                    await asyncio.to_thread(sys.stdin.readline)
                try:
                    messages.ack(message)
                    await messages.flush()
                except headrace.errors.ReaderLostError:
                    print("fenced", flush=True)
                else:
                    print("stored", message.payload.decode(), flush=True)
asyncio.run(main())
"""
"""A process that acknowledges one message after the other, and waits for a signal before the tenth."""


class ReaderProcess:
    def __init__(self, url: str, topic: str, *, holds: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", READ, url, topic],
            stdin=subprocess.PIPE if holds else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, line: str) -> None:
        assert self._process.stdout is not None
        while not self.lines or self.lines[-1] != line:
            found = self._process.stdout.readline()
            assert found, f"{line!r} did not come, but {self.lines}"
            self.lines.append(found.strip())

    def release(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def stored(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("stored")]

    def __enter__(self) -> "ReaderProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def publish_blocking(url: str, topic: str, count: int) -> None:
    with headrace.connect_blocking(url) as client:
        for number in range(count):
            client.publish_nowait(topic, b"%d" % number)


def test_another_process_takes_over_when_one_is_killed_and_nothing_comes_twice(
    url: str, topic: str
) -> None:
    publish_blocking(url, topic, 20)
    with ReaderProcess(url, topic, holds=True) as first:
        first.until("holding")
        with ReaderProcess(url, topic, holds=False) as second:
            second.until("waiting")
            first.signal(signal.SIGKILL)
            second.until("stored 19")
    assert first.stored == list(range(10))
    assert second.stored == list(range(10, 20))


@pytest.mark.parametrize("protocol", ["figg", pytest.param("wombat", marks=takes_long)])
def test_a_process_that_was_stopped_is_superseded_and_fenced(
    tmp_path: Path, topic: str, protocol: str
) -> None:
    with ServerProcess(tmp_path / "data", "--set=limits.silence_s=2") as server:
        url = {"figg": server.figg_url, "wombat": server.wombat_url}[protocol]
        publish_blocking(url, topic, 20)
        with ReaderProcess(url, topic, holds=True) as first:
            first.until("holding")
            with ReaderProcess(url, topic, holds=False) as second:
                second.until("waiting")
                first.signal(signal.SIGSTOP)
                second.until("stored 19")
                first.release()  # it continues with the next message as soon as it runs again
                first.signal(signal.SIGCONT)
                first.until("fenced")
            assert second.stored == list(range(10, 20))
            assert "lost" in first.lines
            # The other process is gone. The first one is active again, after everything.
            first.until("active")
            with headrace.connect_blocking(url) as client:
                client.publish(topic, b"20")
            first.until("stored 20")
            assert first.lines.count("fenced") == 1, "messages of the other one were given out"
            assert first.stored == [*range(10), 20]


def test_readers_go_on_when_the_server_was_killed(tmp_path: Path, topic: str) -> None:
    with ServerProcess(tmp_path / "data") as server:
        publish_blocking(server.figg_url, topic, 20)
        with ReaderProcess(server.figg_url, topic, holds=True) as reader:
            reader.until("holding")
            server.kill()
            server.start()
            reader.until("active")
            reader.release()
            reader.until("stored 19")
        assert reader.stored == list(range(20))
        assert "lost" not in reader.lines
