"""Batches on a real server that is killed: each row is there once, byte for byte and in order.

Meanwhile other clients publish and lose nothing, and subscribers of both protocols receive the batch's
records.
"""

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.fakes.store import block
from tests.system.checked import in_threads
from tests.system.conftest import SMALL, Start
from tests.system.support import get_json, metrics, verify

TOPICS = ["rows/0", "rows/1", "rows/ö"]
ROWS = 20_000

Row = tuple[str, bytes]


def make_rows(number: int, count: int = ROWS) -> list[Row]:
    chance = random.Random(number)
    return [
        (chance.choice(TOPICS), b"%d:%d:" % (number, index) + bytes(chance.randrange(300)))
        for index in range(count)
    ]


def bodies(rows: list[Row], files: int, chance: random.Random) -> list[bytes]:
    """Encode the rows in order into `files` files, as a sink would send them: by topic within a file."""
    cuts = sorted(chance.sample(range(1, len(rows)), files - 1))
    made = []
    for first, last in zip((0, *cuts), (*cuts, len(rows)), strict=True):
        by_topic: dict[str, list[bytes]] = {}
        for topic, payload in rows[first:last]:
            by_topic.setdefault(topic, []).append(payload)
        size = chance.randrange(1, 501)
        made.append(
            b"".join(
                block(topic, payloads[at : at + size])
                for topic, payloads in by_topic.items()
                for at in range(0, len(payloads), size)
            )
        )
    return made


def post(server: ServerProcess, path: str, body: bytes) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*server.http, timeout=60)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def stage(server: ServerProcess, body: bytes) -> str:
    status, answer = post(server, "/v1/staged", body)
    assert status == 200, answer
    return answer["id"]


def decide(server: ServerProcess, number: int, staged: list[str]) -> Any:
    asked = {"producer": "query", "number": number, "staged": staged}
    status, answer = post(server, "/v1/batches", json.dumps(asked).encode())
    assert status == 200, answer
    return answer


def visible(server: ServerProcess) -> int:
    listed = get_json(server, "/v1/topics?prefix=rows/")["topics"]
    return sum(topic["end"]["ordinal"] for topic in listed)


class Publisher:
    """Publishes during the test, despite kills, and remembers what was acknowledged."""

    def __init__(self, server: ServerProcess) -> None:
        self.acknowledged: list[bytes] = []
        self._server = server
        self._stop = threading.Event()

    def run(self) -> None:
        number = 0
        with connect_blocking(self._server.figg_url) as client:
            while not self._stop.is_set():
                payload = b"%d" % number
                client.publish("beside", payload, timeout_s=60)
                self.acknowledged.append(payload)
                number += 1

    def stop(self) -> None:
        self._stop.set()


def expected(*batches: list[Row]) -> dict[str, list[bytes]]:
    return {
        topic: [payload for rows in batches for name, payload in rows if name == topic]
        for topic in TOPICS
    }


def read_all(server: ServerProcess, topic: str) -> list[bytes]:
    count = get_json(server, f"/v1/topics?prefix={_quoted(topic)}")["topics"][0]["records"]
    with connect_blocking(server.figg_url) as client:
        messages = client.subscribe(topic, offset=0, timeout_s=30)
        return [next(messages).payload for _ in range(count)]


def _quoted(topic: str) -> str:
    return "".join(f"%{byte:02x}" for byte in topic.encode())


def kill_in_upload(server: ServerProcess, files: list[bytes], number: int) -> None:
    stage(server, min(files, key=len))
    body = b"".join(files)  # the server writes a file after the first MiB
    with socket.create_connection(server.http) as sock:
        head = f"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body[: len(body) // 2])
        staged = server.data_dir / "staged"
        wait_until(lambda: len(list(staged.iterdir())) == 2, 30, "a half of an upload")
        server.kill()


def kill_before_decision(server: ServerProcess, files: list[bytes], number: int) -> None:
    for body in files:
        stage(server, body)
    server.kill()


def killer_while_appending(share: float) -> Callable[[ServerProcess, list[bytes], int], None]:
    def kill(server: ServerProcess, files: list[bytes], number: int) -> None:
        ids = [stage(server, body) for body in files]
        before = visible(server)

        def ask() -> None:
            # On a busy machine, the kill may come after the answer.
            with suppress(ConnectionError, http.client.HTTPException):
                decide(server, number, ids)

        with in_threads(ask):
            deadline = time.monotonic() + 30
            while visible(server) - before <= share * ROWS and time.monotonic() < deadline:
                pass
            server.kill()

    return kill


def kill_after_answer(server: ServerProcess, files: list[bytes], number: int) -> None:
    assert decide(server, number, [stage(server, body) for body in files])["records"] == ROWS
    server.kill()


KILLS = {
    "in the upload": kill_in_upload,
    "before the decision": kill_before_decision,
    "at the first records": killer_while_appending(0),
    "in the middle": killer_while_appending(0.5),
    "after the answer": kill_after_answer,
}


@pytest.mark.timeout(480)
def test_a_batch_is_there_once_wherever_the_server_was_killed(start: Start) -> None:
    server = start(config=SMALL)
    chance = random.Random(4)
    publisher = Publisher(server)
    received: dict[tuple[str, str], list[bytes]] = {}
    batches = [make_rows(number) for number in range(len(KILLS))]
    with ExitStack() as stack:
        for url in (server.figg_url, server.wombat_url):
            client = stack.enter_context(connect_blocking(url))
            for topic in TOPICS:
                got = received[url, topic] = []
                client.subscribe(topic, lambda m, got=got: got.append(m.payload), offset=0)
        with in_threads(publisher.run):
            try:
                for number, (name, kill) in enumerate(KILLS.items()):
                    kill(server, bodies(batches[number], 4, chance), number)
                    server.restart()
                    again = bodies(batches[number], 7, chance)
                    answer = decide(server, number, [stage(server, body) for body in again])
                    decided = name not in ("in the upload", "before the decision")
                    assert answer["duplicate"] is decided, name
                    assert answer["records"] == (0 if decided else ROWS)
                    assert visible(server) == ROWS * (number + 1), name
                wait_until(lambda: len(publisher.acknowledged) > 20, 60, "publishes beside it")
            finally:
                publisher.stop()
        wanted = expected(*batches)
        for (_, topic), got in received.items():
            wait_until(lambda g=got, t=topic: len(g) >= len(wanted[t]), 30, "subscribers")
            assert got == wanted[topic]
    for topic in TOPICS:
        assert read_all(server, topic) == wanted[topic]
    published = read_all(server, "beside")
    assert set(publisher.acknowledged) <= set(published)
    firsts = list(dict.fromkeys(published))
    assert firsts == sorted(firsts, key=int)
    assert server.terminate() == 0
    assert verify(server.data_dir).returncode == 0
    assert "damage" not in server.stderr
    assert "Traceback" not in server.stderr


def test_events_of_a_batch_are_there_once_wherever_the_server_was_killed(start: Start) -> None:
    server = start(config=SMALL)
    total = 0
    for number, share in enumerate((0.0, 0.3, 0.7)):
        # A third of the events were already in the batch before.
        first = 4000 * number
        events = [
            b'{"event":{"type":"n"},"created":[%d,"x",0]}' % n for n in range(first, first + 6000)
        ]
        pieces = [events[at : at + 300] for at in range(0, len(events), 300)]
        body = b"".join(block("$logux/n", some) + block("rows/n", some) for some in pieces)
        asked = {"producer": "query", "number": number, "staged": [stage(server, body)]}

        def ask(asked: dict[str, Any] = asked) -> None:
            with suppress(ConnectionError, http.client.HTTPException):
                post(server, "/v1/batches", json.dumps(asked).encode())

        with in_threads(ask):
            deadline = time.monotonic() + 30
            while visible(server) - total <= share * 6000 and time.monotonic() < deadline:
                pass
            server.kill()
        server.restart()
        assert decide(server, number, [])["duplicate"]
        total += 6000
        assert visible(server) == total
        found = [json.loads(one)["created"][0] for one in read_all(server, "$logux/n")]
        assert found == list(range(first + 6000))
    assert server.terminate() == 0
    assert verify(server.data_dir).returncode == 0
    assert "Traceback" not in server.stderr


def test_live_subscribers_of_both_protocols_receive_a_batch(start: Start) -> None:
    server = start()
    rows = make_rows(1, 5000)
    wanted = expected(rows)
    with (
        connect_blocking(server.figg_url) as figg,
        connect_blocking(server.wombat_url) as wombat,
    ):
        received: dict[tuple[int, str], list[bytes]] = {}
        for index, client in enumerate((figg, wombat)):
            for topic in TOPICS:
                got = received[index, topic] = []
                client.subscribe(topic, lambda m, got=got: got.append(m.payload), offset=0)
                figg.publish(topic, b"before")
        wait_until(lambda: all(received.values()), 30, "live subscriptions")
        ids = [stage(server, body) for body in bodies(rows, 3, random.Random(1))]
        assert decide(server, 0, ids)["records"] == 5000
        for (_, topic), got in received.items():
            complete = [b"before"] * 2 + wanted[topic]
            wait_until(lambda g=got, c=complete: len(g) >= len(c), 30, "the batch")
            assert got == complete


def test_a_stop_in_the_middle_of_a_batch_is_clean_and_the_next_start_goes_on(start: Start) -> None:
    server = start(config=SMALL)
    rows = make_rows(1, 60_000)  # enough for a stop before the end
    ids = [stage(server, body) for body in bodies(rows, 3, random.Random(1))]
    asked = json.dumps({"producer": "query", "number": 0, "staged": ids}).encode()
    answers: list[tuple[int, Any]] = []
    with in_threads(lambda: answers.append(post(server, "/v1/batches", asked))):
        wait_until(lambda: visible(server) > 0, 30, "the first records")
        assert server.terminate() == 0
    assert answers == [(503, {"error": "the server is stopping: ask again when it is back"})]
    server.start()
    wait_until(lambda: metrics(server)["headrace_batches_pending"] == 0, 30, "the rest")
    assert {topic: read_all(server, topic) for topic in TOPICS} == expected(rows)
    assert decide(server, 0, [])["duplicate"]
    wait_until(lambda: metrics(server)["headrace_staged_bytes"] == 0, 30, "the files to be deleted")
    assert list((server.data_dir / "staged").iterdir()) == []


def test_what_is_being_uploaded_when_the_server_stops_leaves_nothing(start: Start) -> None:
    server = start()
    body = bodies(make_rows(1), 1, random.Random(1))[0]
    with socket.create_connection(server.http) as sock:
        head = f"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body[: len(body) // 2])
        staged = server.data_dir / "staged"
        wait_until(lambda: list(staged.iterdir()), 30, "a half of an upload")
        assert server.terminate() == 0
    server.start()
    assert list(staged.iterdir()) == []
    assert "Traceback" not in server.stderr
