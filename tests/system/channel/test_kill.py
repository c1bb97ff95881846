"""Processors over real sockets, and a server that is killed repeatedly: nothing is lost or duplicated.

The raw clients know only the protocol's page, and none of our code. The reducer counts, so that a snapshot
says how many messages it stands for.
"""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from headrace.testing import ServerProcess, wait_until
from tests.system.checked import in_threads
from tests.system.support import get_json, verify

CHANNEL = "doc/1"
WINDOW = 20

CONFIG = """
[channels]
reducer = "count"
grace_s = {grace_s}
[journal]
rotate_s = 0.2
"""


class Processor:
    """Sends and receives until a test stops it, over as many connections as necessary."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.server, self.name = server, name
        self.offsets: dict[int, int] = {}
        """Offset of each own message by number, as far as it was reported."""
        self.got: dict[int, tuple[str, int]] = {}
        """Received messages by offset."""
        self.acked = 0
        """Offset up to which the server has confirmed the acknowledgement."""
        self.snapshots: list[tuple[int, int, int]] = []
        """Offset, count, and number of messages that were reported as missed."""
        self.joins = 0
        self.is_sending = True
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                host, port = self.server.ws
                with connect(
                    f"ws://{host}:{port}/v1/channels", max_size=None, close_timeout=1
                ) as socket:
                    _Life(self, socket).run()
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError):
                self.stopping.wait(0.05)

    def is_done(self, total: int) -> bool:
        return len(self.offsets) >= total


class _Life:
    """One connection of a processor."""

    def __init__(self, processor: Processor, socket: ClientConnection) -> None:
        self._processor = processor
        self._socket = socket
        self._next = 0
        self._acking: list[int] = []
        self._last = 0

    def run(self) -> None:
        processor = self._processor
        self._say(type="hello", processor=processor.name)
        self._say(type="join", channel=CHANNEL)
        while True:
            if processor.stopping.is_set():
                # Everything that was received and sent must be answered first.
                if not self._acking and self._next <= len(processor.offsets) + 1:
                    return
            elif self._next and processor.is_sending:
                while self._next <= len(processor.offsets) + WINDOW:
                    self._say(type="send", channel=CHANNEL, number=self._next, payload=[self._next])
                    self._next += 1
            with suppress(TimeoutError):  # returns to check whether to stop
                self._hear(json.loads(self._socket.recv(timeout=0.1)))

    def _hear(self, message: dict[str, Any]) -> None:
        processor = self._processor
        kind = message["type"]
        if kind == "joined":
            assert message["number"] >= len(processor.offsets)
            self._next = len(processor.offsets) + 1
            processor.joins += 1
            snapshot = message.get("snapshot")
            if snapshot is not None:
                missed = message.get("missed", {}).get("messages", 0)
                processor.snapshots.append((snapshot["offset"], snapshot["payload"], missed))
                self._last = snapshot["offset"]
                self._ack(snapshot["offset"])
            else:
                assert "missed" not in message
                assert message["cursor"] >= processor.acked
        elif kind == "sent":
            number = message["number"]
            assert number == len(processor.offsets) + 1 or number in processor.offsets
            if number not in processor.offsets:
                # Without an offset, the message was stored, its answer was lost, and the log has removed it
                # since.
                processor.offsets[number] = message.get("offset", -1)
        elif kind == "messages":
            assert message["count"] == len(message["messages"])
            assert "lost" not in message
            for one in message["messages"]:
                offset = one["offset"]
                assert offset > self._last, "in order"
                assert offset > processor.acked, "again, after its ack"
                assert one["payload"] == [one["number"]] and one["processor"] != processor.name
                known = processor.got.setdefault(offset, (one["processor"], one["number"]))
                assert known == (one["processor"], one["number"]), "another message at its place"
                self._last = offset
            self._ack(self._last)
        elif kind == "acked":
            asked = self._acking.pop(0)
            assert message["offset"] >= asked
            processor.acked = max(processor.acked, message["offset"])
        else:
            assert kind == "welcome", message

    def _ack(self, offset: int) -> None:
        self._acking.append(offset)
        self._say(type="ack", channel=CHANNEL, offset=offset)

    def _say(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))


def check(processors: list[Processor]) -> dict[int, tuple[str, int]]:
    """Check that all have the others' messages, once and in one order; return all messages by offset."""
    truth: dict[int, tuple[str, int]] = {}
    for one in processors:
        for offset, message in one.got.items():
            assert truth.setdefault(offset, message) == message, "two orders"
        for number, offset in one.offsets.items():
            if offset >= 0:
                assert truth.setdefault(offset, (one.name, number)) == (one.name, number)
    assert len(set(truth.values())) == len(truth), "a message lies twice in the log"
    for one in processors:
        covered = max((offset for offset, _, _ in one.snapshots), default=0)
        wanted = {o: m for o, m in truth.items() if m[0] != one.name and o > covered}
        assert wanted.items() <= one.got.items(), f"{one.name} lacks {len(wanted)} messages"
    return truth


def test_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(grace_s=300))
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        processors = [Processor(server, name) for name in "abc"]
        with in_threads(*(one.run for one in processors)):
            for total in (150, 300, 450, 600):
                wait_until(
                    lambda total=total: all(one.is_done(total) for one in processors), 60, "sends"
                )
                server.kill()
                server.restart()
            wait_until(lambda: all(one.is_done(750) for one in processors), 60, "sends")
            for one in processors:
                one.stopping.set()
        # Messages of others that a processor did not have when it stopped arrive now.
        for one in processors:
            one.stopping.clear()
            one.is_sending = False
        finished = sum(len(one.offsets) for one in processors)
        with in_threads(*(one.run for one in processors)):
            wait_until(lambda: _lag(server) == 0, 60, "the rest")
            for one in processors:
                one.stopping.set()
        assert finished >= 3 * 750
        truth = check(processors)
        for one in processors:
            assert not one.snapshots, "nobody was away for long"
            numbers = [number for name, number in truth.values() if name == one.name]
            assert sorted(numbers) == list(range(1, len(numbers) + 1))
        assert server.terminate() == 0
        assert verify(server.data_dir).returncode == 0
        assert "Traceback" not in server.stderr and "fault" not in server.stderr


def _lag(server: ServerProcess) -> int:
    """Return the number of messages that members have not acknowledged."""
    members = get_json(server, f"/v1/channel?name={CHANNEL}")["members"]
    return sum(one["lag_messages"] for one in members)


def test_channels_are_destroyed_and_restored_with_kills_in_between(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(grace_s=0.5))
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        processors = [Processor(server, name) for name in "ab"]
        for turn in range(1, 4):
            for one in processors:
                one.stopping.clear()
            with in_threads(*(one.run for one in processors)):
                wait_until(
                    lambda turn=turn: all(one.is_done(100 * turn) for one in processors),
                    60,
                    "sends",
                )
                for one in processors:
                    one.stopping.set()
            # No member is present now. The server is killed before, during or after the destruction.
            if turn != 3:
                server.kill()
                server.restart()
            wait_until(
                lambda: not get_json(server, f"/v1/channel?name={CHANNEL}")["exists"], 30, "the end"
            )
            snapshot = get_json(server, f"/v1/channel/snapshot?name={CHANNEL}")["snapshot"]
            total = sum(len(one.offsets) for one in processors)
            # The last messages may be stored without their sender knowing.
            assert total <= snapshot["payload"] <= total + 2 * WINDOW
        processors.append(Processor(server, "new"))
        for one in processors:
            one.stopping.clear()
            one.is_sending, one.joins = False, 0
        with in_threads(*(one.run for one in processors)):
            wait_until(lambda: all(one.joins for one in processors), 30, "the last state")
            for one in processors:
                one.stopping.set()
        truth = check(processors)
        for one in processors:
            for offset, count, missed in one.snapshots:
                known = sum(place <= offset for place in truth)
                assert known <= count, "a snapshot stands for every message before it"
                assert missed >= 0
        assert processors[-1].snapshots == [(snapshot["offset"], snapshot["payload"], 0)]
        assert server.terminate() == 0
        assert verify(server.data_dir).returncode == 0
        assert "Traceback" not in server.stderr and "fault" not in server.stderr
