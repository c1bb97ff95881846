"""Staged uploads and batches over HTTP, on a real server process: every answer and every refusal."""

import asyncio
import json
import socket
from itertools import count

import httpx
import pytest

from headrace.config.settings import Config
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.server.http import api, requests
from headrace.server.http import batches as api_batches
from headrace.server.http.listener import HttpListener, HttpShared
from headrace.server.http.requests import RequestMemory
from headrace.server.metrics.metrics import Metrics
from headrace.testing import ServerProcess, wait_until
from tests.fakes.store import StepStore, block
from tests.server.http.open_gate import gated
from tests.server.http.open_limits import open_connections, open_limits
from tests.system.support import metrics

SETTINGS = ("limits.staged_bytes_max=8000000",)

_producers = count()


@pytest.fixture
def producer() -> str:
    return f"query ö {next(_producers)}"


def stage(http: httpx.Client, *blocks: bytes) -> str:
    answer = http.post("/v1/staged", content=b"".join(blocks))
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def decide(http: httpx.Client, producer: str, number: int, *staged: str) -> httpx.Response:
    asked = {"producer": producer, "number": number, "staged": staged}
    return http.post("/v1/batches", json=asked)


def records(http: httpx.Client, topic: str) -> int:
    answer = http.get("/v1/topic", params={"name": topic})
    return answer.json()["records"] if answer.status_code == 200 else 0


def staged_files(server: ServerProcess) -> list[str]:
    return [path.name for path in (server.data_dir / "staged").iterdir()]


def test_an_upload_is_answered_with_its_name_and_size(http, server):
    body = block("t", [b"one", b"two"]) + block("u", [b"three"])
    answer = http.post("/v1/staged", content=body)
    assert answer.status_code == 200
    staged_id = answer.json()["id"]
    assert answer.json() == {"id": staged_id, "records": 3, "bytes": len(body)}
    assert staged_id in staged_files(server)


def test_a_batch_is_answered_when_it_is_appended(http, server, producer):
    topic = f"of {producer}"
    staged = stage(http, block(topic, [b"one", b"two"]))
    expected = {"producer": producer, "number": 7}
    answer = decide(http, producer, 7, staged)
    assert answer.status_code == 200
    assert answer.json() == expected | {"duplicate": False, "records": 2, "damaged": 0}
    assert records(http, topic) == 2
    before = metrics(server)["headrace_duplicates_refused_total"]
    again = decide(http, producer, 7, stage(http, block(topic, [b"one"])))
    assert again.json() == expected | {"duplicate": True, "records": 0, "damaged": 0}
    assert metrics(server)["headrace_duplicates_refused_total"] == before + 1
    passed_over = decide(http, producer, 6)
    assert passed_over.status_code == 409
    assert "batch 6 of producer" in passed_over.json()["error"]
    assert records(http, topic) == 2


def test_events_of_a_batch_are_stored_once(http, producer):
    def event(*created: object) -> bytes:
        return json.dumps({"event": {"type": "t"}, "created": created}).encode()

    first = stage(http, block("$logux/http", [event(n, "x", 0) for n in range(500)]) * 2)
    assert decide(http, producer, 0, first).json()["records"] == 1000
    assert records(http, "$logux/http") == 500
    again = stage(http, block("$logux/http", [event(499, "x", 0), event(500, "x", 0)]))
    assert decide(http, producer, 1, again).json()["records"] == 2
    assert records(http, "$logux/http") == 501


def test_a_batch_with_a_gap_in_numbers_of_a_channel_is_refused_until_it_is_filled(http, producer):
    first, second = (
        encode_message(StoredMessage("x", number, Content(b"{}", is_json=True)))
        for number in (1, 2)
    )
    behind = stage(http, block("$channel/gap", [second]))
    answer = decide(http, producer, 0, behind)
    reason = "the next number of 'x' in channel 'gap' is 1, not 2"
    assert (answer.status_code, answer.json()) == (409, {"error": reason})
    assert records(http, "$channel/gap") == 0
    before = decide(http, f"other {producer}", 0, stage(http, block("$channel/gap", [first])))
    assert before.json()["records"] == 1
    assert decide(http, producer, 0, behind).json()["records"] == 1
    assert records(http, "$channel/gap") == 2


def test_an_upload_in_chunks_without_a_length_is_taken(http, producer):
    blocks = [block("chunked", [b"%d" % number] * 400) for number in range(1500)]
    answer = http.post("/v1/staged", content=iter(blocks))
    assert answer.json()["records"] == 600_000
    assert answer.json()["bytes"] == sum(map(len, blocks))
    assert decide(http, producer, 0, answer.json()["id"]).json()["records"] == 600_000


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"x" * 100, "block 1 at byte 0: it begins with b'xxxx' instead of b'HRB1'"),
        (block("t", [b"x"])[:-1], "block 1 at byte 0: the body ends inside it"),
        (
            block("$channel/x", [b"x"]),
            "block 1 at byte 0: record 1: this is not a channel message: Expected `array`, got `int`",
        ),
        (
            block("$logux/x", [b'{"event": {}, "created": [1]}']),
            "block 1 at byte 0: record 1: its event is not an object with a string `type`",
        ),
        (b"y" * 5_000_000, "block 1 at byte 0: it begins with b'yyyy' instead of b'HRB1'"),
    ],
)
def test_a_bad_upload_is_refused_and_nothing_of_it_is_kept(http, server, body, reason):
    before = set(staged_files(server))
    answer = http.post("/v1/staged", content=body)
    assert (answer.status_code, answer.json()) == (400, {"error": reason})
    wait_until(lambda: set(staged_files(server)) <= before, 30, "nothing to be left")


def test_more_than_may_be_staged_is_refused(http, server):
    before = set(staged_files(server))
    answer = http.post("/v1/staged", content=block("t", [bytes(200_000)]) * 45)
    assert answer.status_code == 507
    assert "limits.staged_bytes_max allows 8000000" in answer.json()["error"]
    wait_until(lambda: set(staged_files(server)) <= before, 30, "nothing to be left")


def test_an_upload_that_says_it_is_too_long_is_refused_at_once(http):
    request = http.build_request(
        "POST", "/v1/staged", headers={"content-length": str((4 << 30) + 1)}
    )
    request.stream = httpx.ByteStream(b"")
    with socket.create_connection((http.base_url.host, http.base_url.port), 10) as sock:
        sock.sendall(
            b"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % ((4 << 30) + 1)
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_connection_lost_in_an_upload_leaves_nothing(http, server):
    before = set(staged_files(server))
    with socket.create_connection((http.base_url.host, http.base_url.port), 10) as sock:
        sock.sendall(
            b"POST /v1/staged HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
        )
        sock.sendall(block("t", [bytes(100_000)]) * 15)
        wait_until(lambda: set(staged_files(server)) - before, 30, "a beginning")
    wait_until(lambda: set(staged_files(server)) <= before, 30, "nothing to be left")
    wait_until(lambda: "Traceback" not in server.stderr, 1)


def test_an_unknown_staged_file_is_named_and_nothing_is_decided(http, producer):
    topic = f"of {producer}"
    staged = stage(http, block(topic, [b"one"]))
    answer = decide(http, producer, 0, staged, "0" * 32)
    expected = {"error": f"there is no staged file {'0' * 32!r}"}
    assert (answer.status_code, answer.json()) == (404, expected)
    assert records(http, topic) == 0
    assert not decide(http, producer, 0, staged).json()["duplicate"]


def test_a_staged_file_of_another_batch_is_refused(http, server, producer):
    staged = stage(http, block(f"of {producer}", [b"one"]))
    assert decide(http, producer, 0, staged).status_code == 200
    answer = decide(http, producer + " other", 0, staged)
    # The staged file exists until the batch is applied.
    assert answer.status_code in (404, 409)
    assert staged in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the body is not a batch: Input data was truncated"),
        (b"[]", "the body is not a batch: Expected `object`, got `array`"),
        (b"{}", "the body is not a batch: Object missing required field `producer`"),
        (
            b'{"producer": "p", "number": -1, "staged": []}',
            "the body is not a batch: Expected `int` >= 0 - at `$.number`",
        ),
        (
            b'{"producer": "p", "number": 9223372036854775808, "staged": []}',
            "the body is not a batch: Expected `int` <= 9223372036854775807 - at `$.number`",
        ),
        (
            b'{"producer": "p", "number": 1, "staged": [1]}',
            "the body is not a batch: Expected `str`, got `int` - at `$.staged[0]`",
        ),
        (
            b'{"producer": "p", "number": 1, "staged": [], "batch": 1}',
            "the body is not a batch: Object contains unknown field `batch`",
        ),
        (
            b'{"producer": "", "number": 1, "staged": []}',
            "a producer's name has 1 to 255 bytes of UTF-8, not 0",
        ),
        (
            b'{"producer": "%b", "number": 1, "staged": []}' % ("ö" * 128).encode(),
            "a producer's name has 1 to 255 bytes of UTF-8, not 256",
        ),
        (
            b'{"producer": "p", "number": 1, "staged": ["a", "a"]}',
            "a staged file is named twice",
        ),
    ],
)
def test_a_bad_batch_is_refused_in_one_sentence(http, body, reason):
    answer = http.post("/v1/batches", content=body)
    assert (answer.status_code, answer.json()) == (400, {"error": reason})


def test_a_batch_of_too_many_files_or_bytes_is_refused(http):
    many = {"producer": "p", "number": 1, "staged": [f"{n:032x}" for n in range(100_001)]}
    answer = http.post("/v1/batches", json=many)
    assert answer.status_code == 400
    assert "Expected `array` of length <= 100000" in answer.json()["error"]
    assert http.post("/v1/batches", content=b" " * (9 << 20)).status_code == 413
    assert http.post("/v1/batches", content=iter([b" " * (1 << 20)] * 9)).status_code == 413


def test_the_largest_number_and_name_are_taken(http):
    assert decide(http, "x" * 255, (1 << 63) - 1).json()["duplicate"] is False
    assert decide(http, "x" * 255, (1 << 63) - 1).json()["duplicate"] is True


def test_other_methods_are_refused(http):
    assert http.get("/v1/staged").status_code == 405
    assert http.get("/v1/batches").status_code == 405


async def test_a_batch_that_takes_long_is_answered_before_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(api_batches, "ANSWER_S", 0.05)
    store = StepStore(Config(data_dir=tmp_path / "data"))
    staged = store.stage(("t", [b"one", b"two"]))
    app = gated(api_batches.BatchesApi(store.store, Metrics(), open_limits()).routes())
    body = {"producer": "p", "number": 0, "staged": [staged]}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        for _ in range(2):
            answer = await http.post("/v1/batches", json=body)
            assert answer.status_code == 202
            assert answer.json() == {"producer": "p", "number": 0, "pending": True}
        monkeypatch.setattr(api_batches, "ANSWER_S", 10)
        asked = asyncio.create_task(http.post("/v1/batches", json=body))
        while store.store.batches._batches[0].asked is None:
            await asyncio.sleep(0)
        while not asked.done():
            store.runner.run()
            await asyncio.sleep(0)
        assert asked.result().json()["records"] == 2
    assert store.payloads("t") == [b"one", b"two"]
    store.crash()


async def test_a_body_that_dawdles_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(api_batches, "BODY_SILENCE_S", 0.2)
    monkeypatch.setattr(requests, "BODY_TIMEOUT_S", 0.2)
    store = StepStore(Config(data_dir=tmp_path / "data"))
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    app = gated(
        api_batches.BatchesApi(store.store, Metrics(), open_limits()).routes(),
        exception_handlers=api.EXCEPTION_HANDLERS,
    )
    shared = HttpShared(
        open_connections(), 1 << 20, RequestMemory(1 << 20), refused=lambda peer, why: None
    )
    listener = HttpListener(app, shared, sock)
    await listener.start()
    try:
        for path, said in (
            (b"staged", "nothing of the body came for 0.2 s"),
            (b"batches", "the body must come within 0.2 seconds"),
        ):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(
                b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nHRB1" % path
            )
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 408 ")
            body = await asyncio.wait_for(reader.readuntil(b"}"), 30)
            assert json.loads(body) == {"error": said}
            writer.close()
    finally:
        await listener.stop()
    store.runner.run()
    assert list(store.layout.staged.iterdir()) == []
    assert store.store.staging.bytes == 0
    store.crash()
