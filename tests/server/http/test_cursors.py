"""Cursors over HTTP: answers, refusals, and content after a crash."""

import asyncio
import json
from itertools import count

import httpx
import pytest

from headrace import connect_blocking
from headrace.broker.broker import Broker
from headrace.broker.readers import Readers
from headrace.config.settings import Config, Journal
from headrace.server.http import topics as api_cursors
from headrace.server.http.topics import CursorsApi
from headrace.testing import ServerProcess, wait_until
from tests.fakes.store import StepStore
from tests.server.http.open_gate import gated

_numbers = count()


@pytest.fixture
def reader() -> str:
    return f"group:{next(_numbers)}"


@pytest.fixture
def topic(server: ServerProcess) -> str:
    """A topic with three records of seven bytes."""
    name = f"topic/{next(_numbers)}"
    publish(server, name, b"foo", b"bar", b"car")
    return name


def publish(server: ServerProcess, topic: str, *payloads: bytes) -> None:
    with connect_blocking(server.figg_url) as client:
        for payload in payloads:
            client.publish(topic, payload)


def place(topic: str, ordinal: int = 1, epoch: int = 0) -> dict[str, object]:
    return {"topic": topic, "epoch": epoch, "offset": 7 * ordinal, "ordinal": ordinal}


def put(http: httpx.Client, reader: str, *places: dict[str, object]) -> httpx.Response:
    return http.post("/v1/cursors", json={"reader": reader, "positions": places})


def listed(http: httpx.Client, **query: object) -> list[dict[str, object]]:
    answer = http.get("/v1/cursors", params={key: str(value) for key, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()["cursors"]


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


def test_a_cursor_is_listed_with_what_is_left_to_read(http, topic, reader):
    epoch = http.get("/v1/topic", params={"name": topic}).json()["epoch"]
    assert put(http, reader, place(topic, 1, epoch)).json() == {"reader": reader, "set": 1}
    for query in ({"topic": topic}, {"reader": reader}, {"topic": topic, "reader": reader}):
        (found,) = listed(http, **query)
        assert found.pop("ms") > 1_700_000_000_000
        assert found == place(topic, 1, epoch) | {
            "reader": reader,
            "lag_records": 2,
            "lag_bytes": 14,
            "gone_records": 0,
        }
    (shown,) = http.get("/v1/topic", params={"name": topic}).json()["cursors"]
    assert (shown["reader"], shown["offset"], shown["lag_records"]) == (reader, 7, 2)
    assert "topic" not in shown


def test_lag_follows_the_topic_over_its_lives(http, server, topic, reader):
    put(http, reader, place(topic, 1))
    http.delete("/v1/topic", params={"name": topic})
    (found,) = listed(http, topic=topic)
    assert (found["lag_records"], found["lag_bytes"], found["gone_records"]) == (0, 0, 2)
    publish(server, topic, b"new")
    (found,) = listed(http, topic=topic)
    assert (found["lag_records"], found["lag_bytes"], found["gone_records"]) == (1, 7, 2)
    put(http, reader, place(topic, 4))
    (found,) = listed(http, topic=topic)
    assert (found["lag_records"], found["lag_bytes"], found["gone_records"]) == (0, 0, 0)


def test_many_cursors_are_set_at_once_and_listed_in_pages(http, reader):
    names = [f"{reader}/{number:04}" for number in range(1000)]
    assert put(http, reader, *(place(name, 0) for name in names)).json()["set"] == 1000
    assert [one["topic"] for one in listed(http, reader=reader)] == names
    found, after = [], ""
    while True:
        query = {"reader": reader, "limit": 300, "after": after}
        page = http.get("/v1/cursors", params=query).json()
        found += [one["topic"] for one in page["cursors"]]
        if not page["more"]:
            break
        after = found[-1]
    assert found == names
    gone = http.delete("/v1/cursors", params={"reader": reader})
    assert gone.json() == {"reader": reader, "dropped": 1000}
    assert listed(http, reader=reader) == []


def test_readers_of_a_topic_and_all_cursors_are_listed_in_pages_too(http, topic, reader):
    readers = [f"{reader}/{name}" for name in ("a", "b", "é", "☃")]
    for one in readers:
        put(http, one, place(topic))
    found, after = [], ""
    while True:
        query = {"topic": topic, "limit": 1, "after": after}
        page = http.get("/v1/cursors", params=query).json()
        found += [one["reader"] for one in page["cursors"]]
        if not page["more"]:
            break
        after = found[-1]
    assert found == readers
    pages, place_ = [], {}
    while True:
        page = http.get("/v1/cursors", params={"limit": "3"} | place_).json()
        pages += [(one["topic"], one["reader"]) for one in page["cursors"]]
        if not page["more"]:
            break
        place_ = {"after": pages[-1][0], "after_reader": pages[-1][1]}
    assert pages == sorted(set(pages), key=lambda key: (key[0].encode(), key[1].encode()))
    assert {(topic, one) for one in readers} <= set(pages)


def test_one_cursor_is_dropped_and_the_others_stay(http, topic, reader):
    put(http, reader, place(topic), place("not there", 0))
    put(http, f"{reader}/other", place(topic))
    gone = http.delete("/v1/cursors", params={"reader": reader, "topic": topic})
    assert gone.json() == {"reader": reader, "dropped": 1}
    assert [one["topic"] for one in listed(http, reader=reader)] == ["not there"]
    assert [one["reader"] for one in listed(http, topic=topic)] == [f"{reader}/other"]


def test_no_positions_are_no_fault(http, reader):
    assert put(http, reader).json() == {"reader": reader, "set": 0}


def test_a_refused_position_takes_the_others_with_it(http, topic, reader):
    error = refused(put(http, reader, place("not there", 0), place(topic, 4)))
    assert error.startswith("offset 28 and ordinal 4 lie past the end of topic")
    later = place(topic, 1, epoch=10**15)
    assert "has not had the epoch" in refused(put(http, reader, place("not there", 0), later))
    assert listed(http, reader=reader) == []


BAD_NUMBERS = [-1, 1.5, "1", None, True, 2**63, 2**64, 10**30]


@pytest.mark.parametrize("field", ["epoch", "offset", "ordinal"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_what_is_no_number_of_a_position_is_refused(http, topic, reader, field, value):
    refused(put(http, reader, place(topic) | {field: value}))
    assert listed(http, reader=reader) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"reader": "r"}',
        b'{"positions": []}',
        b'{"reader": 1, "positions": []}',
        b'{"reader": "r", "positions": {}}',
        b'{"reader": "r", "positions": [1]}',
        b'{"reader": "r", "positions": [{}]}',
        b'{"reader": "r", "positions": [], "more": 1}',
        b'{"reader": "r", "positions": [{"topic":"t","epoch":0,"offset":0,"ordinal":0,"x":1}]}',
        b'{"reader": "r", "positions": [{"topic":"","epoch":0,"offset":0,"ordinal":0}]}',
        b'{"reader": "", "positions": []}',
        b'{"reader": "r\xff", "positions": []}',
        b'{"reader": "\\ud800", "positions": []}',
        b'{"reader": "r", "positions": []} {}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        json.dumps({"reader": "r" * 256, "positions": []}).encode(),
        json.dumps({"reader": "r", "positions": [place("x" * 256, 0)]}).encode(),
        json.dumps({"reader": "r", "positions": [place("t", 0)] * 2}).encode(),
        json.dumps({"reader": "r", "positions": [place(str(n), 0) for n in range(1001)]}).encode(),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(http, body):
    refused(http.post("/v1/cursors", content=body))
    assert listed(http, reader="r") == []


def test_a_body_that_is_too_long_is_refused_before_it_is_all_there(http):
    refused(http.post("/v1/cursors", content=b" " * (3 * 1024 * 1024)), 413)
    pieces = (b" " * 65536 for _ in range(100))
    refused(http.post("/v1/cursors", content=pieces), 413)


@pytest.mark.parametrize(
    ("method", "query"),
    [
        ("GET", {"limit": 0}),
        ("GET", {"limit": "all"}),
        ("DELETE", {}),
        ("DELETE", {"topic": "t"}),
        ("DELETE", {"reader": ""}),
        ("DELETE", {"reader": "x" * 256}),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(http, method, query):
    refused(http.request(method, "/v1/cursors", params=query))


def test_other_methods_are_not_allowed(http):
    assert http.put("/v1/cursors").status_code == 405


def test_bad_utf_8_in_a_query_is_some_other_name(http):
    for which in ("topic", "reader"):
        assert http.get(f"/v1/cursors?{which}=%ff%fe").json()["cursors"] == []


def test_of_too_many_changes_that_wait_for_the_disk_the_last_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(api_cursors, "CHANGES_MAX", 2)
    steps = StepStore(Config(data_dir=tmp_path / "data", journal=Journal(file_bytes=65_536)))
    readers = Readers(Broker(steps.store, steps.runner, lambda reason: None))
    app = gated(CursorsApi(steps.store, readers, lambda topics: None).routes())

    async def check() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"reader": "r", "positions": [place("t", 0)]}
            waiting = [asyncio.create_task(http.post("/v1/cursors", json=body)) for _ in range(2)]
            while steps.store.pending_bytes < 2 * 52:
                await asyncio.sleep(0)
            third = await http.post("/v1/cursors", json=body)
            assert not any(task.done() for task in waiting)
            steps.runner.run()
            return [third.status_code, *[(await task).status_code for task in waiting]]

    assert asyncio.run(check()) == [503, 200, 200]
    steps.crash()


def test_cursors_survive_a_kill(tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        publish(server, "t", b"foo", b"bar")
        for number in range(20):
            with httpx.Client(base_url=server.http_url) as http:
                put(http, "kept", place("t", number % 3), place("memory/none", 0))
                put(http, f"reader {number}", place("t", 2))
                put(http, "dropped", place("t", 1))
                http.delete("/v1/cursors", params={"reader": "dropped"})
                before = listed(http)
            server.kill()
            server.start()
            with httpx.Client(base_url=server.http_url) as http:
                assert listed(http) == before
            if number == 2:
                break
        assert len(before) == 5


def test_retention_waits_for_a_reader_and_then_lets_go(tmp_path):
    settings = {
        "retention.age_s": "1.0",
        "retention.check_s": "0.1",
        "retention.wait_for": "group:slow,group:other",
        "retention.wait_s": "3600",
        "journal.rotate_s": "0.1",
        "segment.bytes": "64",
    }
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    with (
        ServerProcess(tmp_path / "data", *flags) as server,
        httpx.Client(base_url=server.http_url) as http,
    ):
        publish(server, "held", b"foo", b"bar", b"car")
        publish(server, "free", b"foo")
        put(http, "group:slow", place("held", 0))

        def start(name: str) -> int:
            return http.get("/v1/topic", params={"name": name}).json()["start"]["ordinal"]

        wait_until(lambda: start("free") == 1, 30, "retention without a reader")
        assert start("held") == 0
        put(http, "group:slow", place("held", 3))
        wait_until(lambda: start("held") == 3, 30, "retention after the reader")
        assert "will miss" not in server.stderr
