"""Lists of topics that wait for a change: woken by it, limited in time and number, released at a stop."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.exceptions import HTTPException

from headrace import connect_blocking
from headrace.server.http import topics as api_topics
from headrace.server.http.topics import LongPolls
from headrace.testing import ServerProcess


def topics(http: httpx.Client, **query: object) -> dict:
    answer = http.get("/v1/topics", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_only_the_topics_named_are_listed(http, client, topic):
    names = [f"{topic}/{name}" for name in ("b", "a", "é")]
    for name in names:
        client.publish(name, b"x")
    asked = [*names, f"{topic}/nope", names[0], "", "x" * 300]
    found = topics(http, name=asked)
    assert [one["name"] for one in found["topics"]] == sorted(names)
    assert found["more"] is False
    first = topics(http, name=asked, limit=2)
    assert ([one["name"] for one in first["topics"]], first["more"]) == (sorted(names)[:2], True)
    rest = topics(http, name=asked, limit=2, after=first["topics"][-1]["name"])
    assert [one["name"] for one in rest["topics"]] == [f"{topic}/é"]


def test_a_thousand_names_are_answered_and_more_refused(http):
    names = [f"a name of usual length/{number}" for number in range(1000)]
    assert topics(http, name=names)["topics"] == []
    answer = http.get("/v1/topics", params={"name": [*names, "one more"]})
    assert answer.status_code == 400


def test_without_a_change_the_answer_says_so_after_a_while(http, client, topic):
    client.publish(topic, b"x")
    version = topics(http)["version"]
    began = time.monotonic()
    answer = topics(http, since=version, wait_ms=300)
    assert answer == {"topics": [], "more": False, "version": version, "unchanged": True}
    assert time.monotonic() - began >= 0.3
    assert topics(http, since=version)["unchanged"] is True


def test_a_change_is_answered_at_once(http, client, topic):
    client.publish(topic, b"x")
    version = topics(http)["version"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(topics, http, name=topic, since=version, wait_ms=10_000)
        time.sleep(0.3)
        assert not waiting.done()
        client.publish(topic, b"y")
        answer = waiting.result(30)
    assert answer["unchanged"] is False
    assert answer["version"] > version
    assert answer["topics"][0]["records"] == 2


def test_every_change_of_a_topic_has_a_version_of_its_own(http, client, topic):
    versions = [topics(http)["version"]]
    for change in (
        lambda: client.publish(topic, b"x"),
        lambda: client.publish(topic, b"x"),
        lambda: http.delete("/v1/topic", params={"name": topic}),
    ):
        change()
        versions.append(topics(http)["version"])
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    "query",
    [
        {"wait_ms": 5},
        {"since": -1},
        {"since": "x"},
        {"since": 2**64},
        {"since": 1, "wait_ms": "long"},
        {"since": 1, "wait_ms": -1},
    ],
)
def test_what_makes_no_sense_is_refused(http, query):
    assert http.get("/v1/topics", params=query).status_code == 400


def test_versions_go_on_after_a_restart_and_requests_that_wait_are_let_go(tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        with connect_blocking(server.figg_url) as client:
            client.publish("t", b"x")
        with httpx.Client(base_url=server.http_url, timeout=30) as http:
            version = topics(http)["version"]
        with socket.create_connection(server.http, 30) as waiting:
            path = f"/v1/topics?since={version}&wait_ms=10000"
            waiting.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for _ in range(3):
                httpx.get(f"{server.http_url}/healthz")  # it came later and was answered
            server.terminate()
            answer = b"".join(iter(lambda: waiting.recv(4096), b""))
        assert b'"unchanged":true' in answer
        assert "Cancel" not in server.stderr
        server.start()
        with httpx.Client(base_url=server.http_url) as http:
            assert topics(http)["version"] > version


class Versioned:
    """The part of a store that waiting needs."""

    def __init__(self) -> None:
        self.version = 1
        self._watchers = []

    def watch(self, changed) -> None:
        self._watchers.append(changed)

    def change(self) -> None:
        self.version += 1
        for changed in self._watchers:
            changed()


async def test_a_change_ends_the_wait_and_not_its_time():
    store = Versioned()
    queue = LongPolls(store)
    waiting = asyncio.create_task(queue.change(1, 3600))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.change()
    assert await asyncio.wait_for(waiting, 30)


def test_of_too_many_that_wait_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(api_topics, "WAITING_MAX", 2)

    async def check() -> None:
        store = Versioned()
        queue = LongPolls(store)
        tasks = [asyncio.create_task(queue.change(1, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="2 requests are waiting already"):
            await queue.change(1, 10)
        assert await queue.change(0, 10), "this one need not wait"
        tasks[0].cancel()
        await asyncio.sleep(0)
        third = asyncio.create_task(queue.change(1, 10))
        await asyncio.sleep(0)
        store.change()
        assert await tasks[1] and await third
        assert not await queue.change(2, 0.01)
        queue.close()
        assert not await queue.change(2, 10)

    asyncio.run(check())
