"""Forks of streams: the records they inherit, whose offsets they understand, and what deleting does."""

import asyncio

import pytest

from headrace.log.records import pack_record
from headrace.server.http.streams import forks
from tests.server.http.streams.conftest import Server, until

TEXT, JSON = "text/plain", "application/json"


def path(name: str) -> str:
    return f"/v1/stream/{name}"


async def fork(server: Server, name: str, source: str, body: bytes = b"", **headers: str):
    return await server.put(name, body, stream_forked_from=path(source), **headers)


async def test_a_fork_begins_with_the_records_of_its_source(server: Server) -> None:
    first = await server.put("s", b"a", type=TEXT)
    middle = first.headers["stream-next-offset"]
    await server.post("s", b"bc", type=TEXT)
    whole = await fork(server, "whole", "s")
    assert (whole.status_code, whole.headers["content-type"]) == (201, TEXT)
    assert (await fork(server, "part", "s", stream_fork_offset=middle)).status_code == 201
    assert (await fork(server, "none", "s", stream_fork_offset="-1", type=TEXT)).status_code == 201
    more = await fork(
        server, "more", "s", b"XY", stream_fork_offset=middle, stream_fork_sub_offset="1"
    )
    assert more.status_code == 201
    await server.post("s", b"later", type=TEXT)
    await server.post("whole", b"own", type=TEXT)
    for _ in range(2):
        for name, content in {
            "whole": b"abcown",
            "part": b"a",
            "none": b"",
            "more": b"abXY",
            "s": b"abclater",
        }.items():
            assert (await server.get(name)).content == content
        server.restart()


async def test_a_place_in_the_source_is_a_place_in_the_fork(server: Server) -> None:
    first = await server.put("s", b"[1]", type=JSON)
    middle = first.headers["stream-next-offset"]
    end = (await server.post("s", b"[2,3]", type=JSON)).headers["stream-next-offset"]
    await fork(server, "f", "s")
    await server.post("f", b"4", type=JSON)
    later = (await server.post("s", b"5", type=JSON)).headers["stream-next-offset"]
    await fork(server, "g", "f", stream_fork_offset=middle, stream_fork_sub_offset="1")
    await server.post("g", b"6", type=JSON)
    server.restart()
    assert (await server.get("f", offset=middle)).json() == [2, 3, 4]
    assert (await server.get("f", offset=end)).json() == [4]
    assert (await server.get("f", offset=later)).status_code == 410
    assert (await server.get("g", offset=middle)).json() == [2, 6]
    assert (await server.get("g", offset=end)).status_code == 410


async def test_a_fork_is_created_once(server: Server) -> None:
    await server.put("s", b"ab", type=TEXT, stream_ttl="60")
    asked = {"stream_fork_offset": "-1", "stream_fork_sub_offset": "1"}
    assert (await fork(server, "f", "s", **asked)).status_code == 201
    assert (await fork(server, "f", "s", **asked)).status_code == 200
    assert (await server.http.head("f")).headers["stream-ttl"] == "60"
    for other in (
        {"stream_fork_offset": "-1", "stream_fork_sub_offset": "2"},
        {"stream_fork_offset": "-1"},
        asked | {"type": JSON},
        asked | {"stream_ttl": "5"},
    ):
        assert (await fork(server, "f", "s", **other)).status_code == 409
    assert (await fork(server, "f", "other", **asked)).status_code == 409
    await server.put("plain", type=TEXT)
    assert (await fork(server, "plain", "s", type=TEXT)).status_code == 409


async def test_a_fork_that_cannot_be_is_refused_and_holds_nothing(server: Server) -> None:
    made = await server.put("s", b"[1,2]", type=JSON)
    end = made.headers["stream-next-offset"]
    inside = f"@{server.steps.store.topic('s').start_offset + 1}"
    assert (await fork(server, "f", "none")).status_code == 404
    assert (await fork(server, "f", "s", type=TEXT)).status_code == 409
    for status, asked in (
        (400, {"stream_fork_offset": "9999999999999999_9999999999999999"}),
        (400, {"stream_fork_offset": end, "stream_fork_sub_offset": "1"}),
        (400, {"stream_fork_offset": "-1", "stream_fork_sub_offset": "3"}),
        (400, {"stream_fork_offset": inside}),
    ):
        assert (await fork(server, "f", "s", **asked)).status_code == status
    assert (await server.get("f")).status_code == 404
    assert (await server.http.delete("s")).status_code == 204
    assert (await server.get("s")).status_code == 404


async def test_a_source_with_forks_stays_known_until_the_last_one_is_deleted(
    server: Server,
) -> None:
    await server.put("s", b"x", type=TEXT)
    await fork(server, "f", "s")
    await fork(server, "g", "f")
    await fork(server, "h", "f")
    for name in ("s", "f"):
        assert (await server.http.delete(name)).status_code == 204
    for _ in range(2):
        for name in ("s", "f"):
            for answer in (
                await server.get(name),
                await server.http.head(name),
                await server.post(name, b"y", type=TEXT),
                await server.http.delete(name),
            ):
                assert answer.status_code == 410
            assert (await server.put(name, type=TEXT)).status_code == 409
            assert (await fork(server, "new", name)).status_code == 409
        assert (await server.get("g")).content == (await server.get("h")).content == b"x"
        server.restart()
    assert (await server.http.delete("g")).status_code == 204
    assert (await server.get("f")).status_code == 410
    assert (await server.http.delete("h")).status_code == 204
    for name in "sfgh":
        assert (await server.get(name)).status_code == 404
    assert server.steps.store.notes(b"", b"", 10) == []
    assert (await server.put("s", type=TEXT)).status_code == 201


async def test_a_living_source_outlives_its_forks(server: Server) -> None:
    server.steps.append("s", b"x")
    await fork(server, "f", "s")
    assert (await server.http.delete("f")).status_code == 204
    assert (await server.get("s")).content == b"x"
    assert (await server.http.delete("s")).status_code == 204
    assert (await server.get("s")).status_code == 404


async def test_an_expired_fork_frees_its_source(server: Server) -> None:
    await server.put("s", b"x", type=TEXT)
    await fork(server, "f", "s", stream_ttl="10")
    await server.http.delete("s")
    assert (await server.get("s")).status_code == 410
    server.steps.clock.ms += 10_000
    server.tick()
    await server.settle()
    assert (await server.get("s")).status_code == 404


async def test_a_fork_that_replaces_an_expired_fork_of_the_same_source_counts_once(
    server: Server,
) -> None:
    await server.put("s", b"x", type=TEXT)
    await fork(server, "f", "s", stream_ttl="10", stream_fork_offset="-1")
    server.steps.clock.ms += 10_000
    assert (await fork(server, "f", "s", stream_fork_offset="-1")).status_code == 201
    await server.http.delete("s")
    assert (await server.get("s")).status_code == 410
    await server.http.delete("f")
    assert (await server.get("s")).status_code == 404


async def test_a_fork_has_no_records_of_other_protocols_before_its_own(server: Server) -> None:
    await server.put("s", b"x", type=TEXT)
    await server.settle()
    server.is_working = False
    making = asyncio.ensure_future(fork(server, "f", "s"))
    server.connections.broker.publish({"f": [pack_record(b"other")]}, lambda: None)
    for _ in range(200):
        await asyncio.sleep(0)
    await server.settle()
    assert (await making).status_code == 409
    assert server.payloads("f") == [b"other"]


async def test_an_expired_source_with_forks_is_not_replaced(server: Server) -> None:
    await server.put("s", b"x", type=TEXT, stream_ttl="10")
    await fork(server, "f", "s", stream_expires_at="2100-01-01T00:00:00Z")
    server.steps.clock.ms += 10_000
    assert (await server.put("s", type=TEXT)).status_code == 409
    server.tick()
    await server.settle()
    assert (await server.put("s", type=TEXT)).status_code == 409
    assert (await server.get("s")).status_code == 410
    assert (await server.get("f")).content == b"x"
    await server.http.delete("f")
    assert (await server.put("s", type=TEXT)).status_code == 201


async def test_a_source_without_its_beginning_has_no_forks(server: Server) -> None:
    await server.put("s", b"[1,2,3]", type=JSON)
    store = server.steps.store
    server.steps.trim("s", store.locate_last(store.topic("s"), 1))
    answer = await fork(server, "f", "s")
    assert answer.status_code == 409 and "begin" in answer.json()["error"]
    await server.put("again", b"x", type=TEXT)
    await server.http.delete("again")
    await server.put("t", type=TEXT)
    assert (await fork(server, "again", "t")).status_code == 409


async def test_a_long_history_is_not_copied(server: Server, monkeypatch) -> None:
    monkeypatch.setattr(forks, "FORK_BYTES_MAX", 1000)
    await server.put("s", bytes(2000), type=TEXT)
    assert (await fork(server, "f", "s")).status_code == 413
    end = (await server.put("t", bytes(500), type=TEXT)).headers["stream-next-offset"]
    await server.post("t", bytes(5000), type=TEXT)
    assert (await fork(server, "g", "t", stream_fork_offset=end)).status_code == 201


async def test_a_source_that_is_deleted_meanwhile_has_no_fork(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.put("s", b"x", type=TEXT)
    reads, goes_on = asyncio.Event(), asyncio.Event()
    own = forks.inherited

    async def slow(*asked):
        found = await own(*asked)
        reads.set()
        await goes_on.wait()
        return found

    monkeypatch.setattr(forks, "inherited", slow)
    forking = asyncio.ensure_future(fork(server, "f", "s"))
    await until(reads.is_set)
    assert (await server.http.delete("s")).status_code == 204
    goes_on.set()
    assert (await forking).status_code == 404
    assert not server.steps.store.topic("f").exists


async def test_events_of_a_source_end_when_it_is_deleted(server: Server) -> None:
    await server.put("s", type=TEXT)
    await fork(server, "f", "s")
    asking = asyncio.ensure_future(server.get("s", offset="now", live="sse"))
    await until(lambda: server.connections.waiting.total)
    await server.http.delete("s")
    assert (await asking).status_code == 200
