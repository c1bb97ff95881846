"""Streams on a real server: kills, other protocols, the examples of the documentation.

Elsewhere: the public conformance suite (`test_conformance.py`), every answer without sockets
(`tests/server/http/streams`).
"""

import http.client
import json
import re
import shlex
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.fakes.store import block
from tests.system.checked import in_threads
from tests.system.conftest import SMALL, Start
from tests.system.figg import foreign as figg
from tests.system.support import get_json, metrics, verify
from tests.system.wombat import foreign as wombat
from tests.tools import TORTURE

PAGE = (Path(__file__).parents[3] / "docs" / "protocols" / "streams.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8121"
JSON, BYTES = "application/json", "application/octet-stream"
KILLS = TORTURE or 3


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(server: ServerProcess, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(*server.http, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"/v1/stream/{path}", body or None, named)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


def insist(
    server: ServerProcess, method: str, path: str, body: bytes = b"", **headers: str
) -> Answer:
    """Ask until the server answers, as a client does whose server may be killed at any time."""
    while True:
        try:
            return ask(server, method, path, body, **headers)
        except (OSError, http.client.HTTPException):
            time.sleep(0.01)


# The page


def test_the_examples_of_the_page_are_answered_as_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    parts = [part for text in blocks for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    assert len(parts) > 5
    with ServerProcess(tmp_path / "data") as server:
        for part in parts:
            command, _, expected = part.partition("\n")
            assert settled(answer_to(server, command)) == settled(expected), command


def answer_to(server: ServerProcess, command: str) -> str:
    """Return the body of the answer to a command of curl."""
    words = shlex.split(command)
    assert words[0] == "curl" and words[-1].startswith(f"{ADDRESS}/v1/stream/")
    given = dict(pairwise(words))
    headers = dict(text.split(": ", 1) for flag, text in pairwise(words) if flag == "-H")
    body = given.get("-d", "").encode()
    method = given.get("-X", "POST" if body else "GET")
    path = words[-1].removeprefix(f"{ADDRESS}/v1/stream/")
    answer = ask(server, method, path, body, **headers)
    assert answer.status < 300, answer
    return answer.body.decode()


def settled(text: str) -> str:
    """Return an output without the epochs of its offsets, which differ in every run."""
    return re.sub(r"\d{16}_", "EPOCH_", text.strip())


# Kills


def test_nothing_of_a_stream_is_lost_or_repeated_when_its_server_is_killed(start: Start) -> None:
    server = start(config=SMALL)
    stop = threading.Event()
    counts = {"a": 0, "b": 0}

    def produce(producer: str) -> None:
        assert insist(server, "PUT", "s", Content_Type=JSON).status in (200, 201)
        while not stop.is_set() or counts[producer] % 10:
            number = counts[producer]
            answer = insist(
                server,
                "POST",
                "s",
                json.dumps([[producer, number], [producer, number]]).encode(),
                Content_Type=JSON,
                Producer_Id=producer,
                Producer_Epoch="0",
                Producer_Seq=str(number),
            )
            assert answer.status in (200, 204), answer
            counts[producer] = number + 1

    def live_and_die() -> None:
        """Create, close and delete streams; each state that was answered must still be there."""
        number = 0
        while not stop.is_set():
            name = f"short/{number}"
            number += 1
            assert insist(server, "PUT", name, b"1", Content_Type=BYTES).status in (200, 201)
            assert insist(server, "GET", name).body == b"1"
            closed = insist(server, "POST", name, Stream_Closed="true")
            assert closed.status == 204
            assert insist(server, "POST", name, b"2", Content_Type=BYTES).status == 409
            assert insist(server, "HEAD", name).headers["stream-closed"] == "true"
            fork = f"fork/{number}"
            path = f"/v1/stream/{name}"
            assert insist(server, "PUT", fork, Stream_Forked_From=path).status in (200, 201)
            assert insist(server, "DELETE", name).status in (204, 410)
            assert insist(server, "GET", name).status == 410
            assert insist(server, "POST", fork, b"2", Content_Type=BYTES).status == 204
            assert insist(server, "GET", fork).body in (b"12", b"122"), "it was perhaps asked twice"
            assert insist(server, "DELETE", fork).status in (204, 404)
            for gone in (name, fork):
                assert insist(server, "GET", gone).status == 404

    with in_threads(lambda: produce("a"), lambda: produce("b"), live_and_die):
        try:
            for _ in range(KILLS):
                goals = {one: count + 20 for one, count in counts.items()}
                wait_until(lambda goals=goals: all_reached(counts, goals), 120, "appends")
                server.kill()
                server.start()
        finally:
            stop.set()
    found: list[Any] = []
    at = "-1"
    while True:
        answer = ask(server, "GET", f"s?offset={at}")
        found += json.loads(answer.body)
        at = answer.headers["stream-next-offset"]
        if answer.headers["stream-up-to-date"]:
            break
    for producer, count in counts.items():
        assert [n for one, n in found if one == producer] == [n // 2 for n in range(2 * count)]
    assert server.terminate() == 0
    checked = verify(server.data_dir)
    assert checked.returncode == 0, checked.stdout
    assert "Traceback" not in server.stderr, server.stderr


def all_reached(counts: dict[str, int], goals: dict[str, int]) -> bool:
    return all(counts[one] >= goal for one, goal in goals.items())


# Other protocols


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("streams")
    config = directory / "headrace.toml"
    config.write_text("[limits]\nrefusal_delay_s = 0.01\nrefusal_delay_max_s = 0.01\n")
    with ServerProcess(directory / "data", f"--config={config}") as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def test_records_and_positions_are_the_same_over_all_protocols(server: ServerProcess) -> None:
    ask(server, "PUT", "mixed", Content_Type=BYTES)
    with figg.Wire(server.figg) as wire:
        wire.publish(b"mixed", b"figg")
    first = ask(server, "GET", "mixed")
    assert first.body == b"figg"
    position = first.headers["stream-next-offset"]
    ask(server, "POST", "mixed", b"http", Content_Type=BYTES)
    with wombat.Wire(server.ws) as wire:
        wire.send(wombat.attach("mixed", position))
        attached = wire.expect(wombat.ATTACHED)
        assert attached.serial == position, "the asked one: nothing was missed"
        message = wire.expect(wombat.PAYLOAD)
        assert message.data == b"http"
    with wombat.Wire(server.ws) as wire:
        wire.send(wombat.publish("mixed", 9, b"wombat"))
        wire.expect(wombat.ACK)
    assert ask(server, "GET", f"mixed?offset={message.serial}").body == b"wombat"
    offset = message.serial.partition("@")[2]
    assert ask(server, "GET", f"mixed?offset=@{offset}").body == b"wombat"
    with connect_blocking(server.figg_url) as client:
        messages = client.subscribe("mixed", offset=int(offset))
        assert next(iter(messages)).payload == b"wombat"


def test_a_closed_stream_is_refused_over_every_protocol(server: ServerProcess) -> None:
    ask(server, "PUT", "closed", b"1", Content_Type=BYTES)
    ask(server, "POST", "closed", b"last", Content_Type=BYTES, Stream_Closed="true")
    with figg.Wire(server.figg) as wire:
        wire.send(figg.publish(b"open", 1, b"x"))
        wire.wait_ack(1)
        wire.send(figg.publish(b"closed", 2, b"x"), figg.publish(b"open", 3, b"x"))
        assert wire.until_closed() == []
    with wombat.Wire(server.ws) as wire:
        wire.send(wombat.publish("closed", 2, b"x"))
        messages, closed = wire.until_closed()
        assert messages == [] and closed.code == 1008
        assert closed.reason == 'topic "closed" is closed: it takes no more records'
    connection = http.client.HTTPConnection(*server.http, timeout=60)
    connection.request("POST", "/v1/staged", block("closed", [b"x"]))
    staged = json.loads(connection.getresponse().read())["id"]
    batch = {"producer": "p", "number": 0, "staged": [staged]}
    connection.request("POST", "/v1/batches", json.dumps(batch))
    response = connection.getresponse()
    assert response.status == 409
    assert "is closed" in json.loads(response.read())["error"]
    connection.close()
    for protocol in ("figg", "wombat"):
        name = f'headrace_refusals_total{{protocol="{protocol}",reason="closed_topic"}}'
        assert metrics(server)[name] == 1
    assert ask(server, "GET", "closed").body == b"1last"
    assert get_json(server, "/v1/topic?name=closed")["records"] == 2
    ask(server, "DELETE", "closed")
    with figg.Wire(server.figg) as wire:
        wire.send(figg.publish(b"closed", 1, b"again"))
        wire.wait_ack(1)
