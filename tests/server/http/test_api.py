"""The HTTP API of a real server process: every example of its page, every answer and every error."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace import connect_blocking
from headrace.errors import BadTopicNameError, ChannelError, StoreFailedError
from headrace.printing import quoted
from headrace.server.http.api import EXCEPTION_HANDLERS
from headrace.testing import ServerProcess, wait_until
from tests.system.support import children, metrics

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8121"
PAUSE_S = 0.25
"""Pause that is longer than the maximum duration of a run in the index."""


def ask(http: httpx.Client, path: str, **query: object) -> Any:
    answer = http.get(path, params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def refusal(http: httpx.Client, method: str, path: str, **query: object) -> tuple[int, str]:
    answer = http.request(method, path, params={name: str(v) for name, v in query.items()})
    assert set(answer.json()) == {"error"}
    return answer.status_code, answer.json()["error"]


# The page


def test_the_examples_of_the_page_are_answered_as_it_says(tmp_path, environment):
    with ServerProcess(tmp_path / "data", "--set", "journal.rotate_s=0.1") as server:
        environ = environment(HEADRACE_URL=server.figg_url)
        with connect_blocking(server.figg_url) as client:
            ids: dict[str, str] = {}
            """Ids of staged files on the page, and their ids in this run."""
            for command, expected in examples():
                if "headrace publish" in command or command.startswith("printf"):
                    run(command, environ, tmp_path)
                    continue
                if "subscribers" in expected and "segments" in expected:
                    client.subscribe("greetings")
                    wait_until(lambda: topic_has_segment_and_subscriber(server), 30, "the applier")
                for known, name in ids.items():
                    command = command.replace(known, name)
                got = answer(server, command, tmp_path)
                if shown := re.search(r'"id": "(\w+)"', expected):
                    ids[shown[1]] = json.loads(got)["id"]
                assert settled(got) == settled(expected), command


def examples() -> list[tuple[str, str]]:
    """Return each command of the page with the answer shown below it."""
    found = []
    for console in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            found.append((command, expected))
    assert len(found) > 15
    return found


def run(command: str, environ: dict[str, str], directory: Path) -> None:
    subprocess.run(["bash", "-euc", command], env=environ, cwd=directory, check=True, timeout=90)


def answer(server: ServerProcess, command: str, directory: Path) -> str:
    """Return the answer to the command's request; a status other than 200 comes before it."""
    words = shlex.split(command)
    assert words[0] == "curl"
    data = next(
        (words[words.index(flag) + 1] for flag in ("-d", "--data-binary") if flag in words), None
    )
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if data else "GET"
    body = data.encode() if data is not None else None
    if data is not None and data.startswith("@"):
        body = (directory / data[1:]).read_bytes()
    url = words[-1].replace(ADDRESS, server.http_url)
    got = httpx.request(method, url, content=body, timeout=30)
    return got.text if got.status_code == 200 else f"{got.status_code} {got.text}"


def settled(text: str) -> tuple[str, Any]:
    """Return status and content without the values that change from run to run."""
    status = text[:4] if text[:3].isdigit() else ""
    text = re.sub(
        r'"(epoch|last_ms|first_ms|ms|version)": ?\d{13,19}\b',
        r'"\1": "some time"',
        text[len(status) :],
    )
    text = re.sub(r'"id": ?"\w{32}"', '"id": "some id"', text)
    return status, json.loads(re.sub(r"127\.0\.0\.1:\d+", "some peer", text))


def topic_has_segment_and_subscriber(server: ServerProcess) -> bool:
    found = httpx.get(server.http_url + "/v1/topic?name=greetings").json()
    return bool(found["subscriptions"]) and [one["end"] for one in found["segments"]] == [21]


# Topics


def test_topics_are_listed_in_pages_in_the_order_of_their_bytes(http, client, topic):
    names = [f"{topic}/{name}" for name in ("a", "b", "é", "☃", "Z", "\U0001f600")]
    for name in names:
        client.publish(name, b"x")
    listed, after = [], ""
    while True:
        page = ask(http, "/v1/topics", prefix=topic + "/", after=after, limit=2)
        listed += [one["name"] for one in page["topics"]]
        if not page["more"]:
            break
        assert len(page["topics"]) == 2
        after = listed[-1]
    assert listed == sorted(names, key=str.encode)


def test_a_page_is_never_longer_than_its_maximum(http):
    assert len(ask(http, "/v1/topics", limit=10**9)["topics"]) <= 1000


def test_a_topic_that_was_only_subscribed_to_is_not_listed(http, client, topic):
    client.subscribe(topic)
    assert ask(http, "/v1/topics", prefix=topic)["topics"] == []
    assert refusal(http, "GET", "/v1/topic", name=topic)[0] == 404


def test_a_subscription_shows_how_far_it_is(http, client, topic, server):
    client.publish(topic, b"foo")
    with connect_blocking(server.figg_url) as other:
        messages = other.subscribe(topic, offset=0)
        assert next(messages).payload == b"foo"
        (one,) = ask(http, "/v1/topic", name=topic)["subscriptions"]
        assert (one["protocol"], one["offset"], one["live"], one["lag_bytes"]) == (
            *("figg", 7),
            *(True, 0),
        )
    wait_until(lambda: ask(http, "/v1/topic", name=topic)["subscribers"] == 0, 30, "the end of it")


def test_segments_cover_what_is_applied(http, client, topic):
    client.publish(topic, b"foo")
    client.publish(topic, b"bar")
    wait_until(lambda: ask(http, "/v1/topic", name=topic)["segments"], 30, "the applier")
    wait_until(
        lambda: ask(http, "/v1/topic", name=topic)["segments"][-1]["end"] == 14, 10, "all of it"
    )
    (segment,) = ask(http, "/v1/topic", name=topic)["segments"]
    first_ms, last_ms = segment.pop("first_ms"), segment.pop("last_ms")
    assert segment == {"base": 0, "end": 14, "first_ordinal": 0, "records": 2, "bytes": 14}
    assert time.time() * 1000 - 60_000 < first_ms <= last_ms <= time.time() * 1000 + 1000


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128])
@pytest.mark.parametrize(("method", "path"), [("GET", "topic"), ("DELETE", "topic")])
def test_a_name_no_topic_can_have_is_refused(http, method, path, name):
    status, error = refusal(http, method, f"/v1/{path}", name=name)
    assert status == 400
    assert error.startswith("a topic name m")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\0b", "'; DROP TABLE topics", "é" * 127])
def test_any_other_name_is_just_a_name(http, client, name):
    assert refusal(http, "GET", "/v1/topic", name=name) == (
        404,
        f"there is no topic {quoted(name)}",
    )
    client.publish(name, b"foo")
    assert ask(http, "/v1/topic", name=name)["end"] == {"offset": 7, "ordinal": 1}
    assert http.delete("/v1/topic", params={"name": name}).status_code == 200


# Positions


@pytest.fixture
def filled(client, topic) -> str:
    """A topic with `foo`, a pause, `bar` and `car`."""
    client.publish(topic, b"foo")
    time.sleep(PAUSE_S)
    client.publish(topic, b"bar")
    client.publish(topic, b"car")
    return topic


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(
    ("query", "place"),
    [
        ({"offset": 0}, (0, 0)),
        ({"offset": 1}, (7, 1)),
        ({"offset": 7}, (7, 1)),
        ({"offset": 20}, (21, 3)),
        ({"offset": 21}, (21, 3)),
        ({"offset": 2**63}, (21, 3)),
        ({"ordinal": 0}, (0, 0)),
        ({"ordinal": 2}, (14, 2)),
        ({"ordinal": 3}, (21, 3)),
        ({"ordinal": 10**18}, (21, 3)),
        ({"last": 0}, (21, 3)),
        ({"last": 2}, (7, 1)),
        ({"last": 10**18}, (0, 0)),
        ({"time": 0}, (0, 0)),
        ({"time": "1970-01-01T00:00:00Z"}, (0, 0)),
        ({"time": "2999-12-31T23:59:59+02:00"}, (21, 3)),
    ],
)
def test_every_number_and_time_has_a_position(http, filled, query, place, applied):
    if applied:
        wait_until(lambda: ends(http, filled)[-1:] == [21], 30, "the applier")
    found = ask(http, "/v1/position", topic=filled, **query)
    assert (found["offset"], found["ordinal"]) == place
    assert found["topic"] == filled
    assert found["epoch"] == ask(http, "/v1/topic", name=filled)["epoch"]


def ends(http: httpx.Client, topic: str) -> list[int]:
    return [segment["end"] for segment in ask(http, "/v1/topic", name=topic)["segments"]]


def test_a_time_between_two_records_is_the_later_one_s(http, client, topic):
    client.publish(topic, b"foo")
    time.sleep(PAUSE_S)
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.01)  # the server's time may be a millisecond behind
    client.publish(topic, b"bar")
    last_ms = ask(http, "/v1/topic", name=topic)["last_ms"]
    for time_ms, offset in ((between_ms, 7), (last_ms, 7), (last_ms + 1, 14)):
        assert ask(http, "/v1/position", topic=topic, time=time_ms)["offset"] == offset


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"offset": 1, "ordinal": 1},
        {"offset": -1},
        {"offset": "1.0"},
        {"offset": "٣"},
        {"ordinal": ""},
        {"last": "all"},
        {"time": "soon"},
        {"time": -1},
    ],
)
def test_what_is_no_position_is_refused(http, filled, query):
    status, error = refusal(http, "GET", "/v1/position", topic=filled, **query)
    assert status == 400
    assert next(iter(query), "give one of") in error


def test_a_position_needs_a_topic_that_exists(http):
    assert refusal(http, "GET", "/v1/position", offset=0) == (400, "name the topic")
    unknown = refusal(http, "GET", "/v1/position", topic="nope", offset=0)
    assert unknown == (404, 'there is no topic "nope"')


# The end of a topic


def test_a_destroyed_topic_goes_on_where_it_ended(http, client, server, filled):
    epoch = ask(http, "/v1/topic", name=filled)["epoch"]
    with connect_blocking(server.figg_url) as other:
        messages = other.subscribe(filled)
        wait_until(lambda: ask(http, "/v1/topic", name=filled)["subscribers"] == 1, 30, "ATTACHED")
        gone = http.delete("/v1/topic", params={"name": filled})
        assert gone.status_code == 200
        end = {"offset": 21, "ordinal": 3}
        assert gone.json() == {"name": filled, "epoch": epoch, "end": end}
        assert refusal(http, "GET", "/v1/topic", name=filled)[0] == 404
        client.publish(filled, b"new")
        message = next(messages)
        assert (message.next_offset, message.payload) == (28, b"new")
    again = ask(http, "/v1/topic", name=filled)
    assert (again["start"], again["records"]) == (end, 1)
    assert again["epoch"] > epoch
    assert ask(http, "/v1/position", topic=filled, offset=0)["offset"] == 21


def test_what_was_destroyed_stays_so_over_a_crash(tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        with connect_blocking(server.figg_url) as client:
            client.publish("t", b"foo")
        assert httpx.delete(server.http_url + "/v1/topic?name=t").status_code == 200
        server.kill()
        server.start()
        found = httpx.get(server.http_url + "/v1/topics").json()["topics"]
        assert [topic["name"] for topic in found] == ["$audit"]
        with connect_blocking(server.figg_url) as client:
            client.publish("t", b"bar")
        found = httpx.get(server.http_url + "/v1/topic?name=t").json()
        assert found["start"] == {"offset": 7, "ordinal": 1}


# Health and other endpoints


def test_health_says_that_publishes_are_held_back_and_when_they_no_longer_are(tmp_path):
    small = ("journal.file_bytes=65536", "journal.files=2", "journal.commit_bytes_max=16384")
    flags = [flag for setting in small for flag in ("--set", setting)]
    with ServerProcess(tmp_path / "data", *flags) as server:
        health = server.http_url + "/healthz"
        assert httpx.get(health).json() == {"status": "ok"}
        (applier,) = children(server.pid)
        os.kill(applier, signal.SIGSTOP)
        try:
            with connect_blocking(server.figg_url) as client:
                for _ in range(40):
                    client.publish_nowait("t", bytes(8192))
                wait_until(lambda: httpx.get(health).status_code == 503, 30, "a full journal")
                reason = httpx.get(health).json()["status"]
                assert reason == "the journal is full until the applier has caught up"
                os.kill(applier, signal.SIGCONT)
                client.flush()
        finally:
            os.kill(applier, signal.SIGCONT)
        assert httpx.get(health).status_code == 200


def test_metrics_count_what_happened(http, client, topic, server):
    before = metrics(server)
    for _ in range(3):
        client.publish(topic, b"x")
    with connect_blocking(server.figg_url) as other:
        other.publish(topic, b"x")
    after = metrics(server)
    names = ("headrace_records_published_total", "headrace_connections_total")
    assert [after[name] - before.get(name, 0) for name in names] == [4, 1]
    assert after["headrace_pending_bytes"] == 0
    assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_an_offset_of_any_64_bits_is_answered(http, client, topic):
    client.publish(topic, b"foo")
    assert ask(http, "/v1/position", topic=topic, offset=(1 << 64) - 1)["offset"] == 7


@pytest.mark.parametrize("time", ["0001-01-01", "yesterday", "9" * 30])
def test_a_time_that_is_none_is_refused(http, client, topic, time):
    client.publish(topic, b"foo")
    assert refusal(http, "GET", "/v1/position", topic=topic, time=time)[0] == 400


def test_a_list_of_no_topics_at_all_is_refused(http):
    assert refusal(http, "GET", "/v1/topics", limit=0)[0] == 400


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/topics/t", "/v2/topics"])
def test_an_unknown_path_is_not_found(http, path):
    assert refusal(http, "GET", path)[0] == 404


@pytest.mark.parametrize(
    "path", ["/healthz", "/metrics", "/v1/topics", "/v1/topic", "/v1/position"]
)
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_another_method_is_not_allowed(http, method, path):
    assert refusal(http, method, path)[0] == 405


def test_parameters_that_are_not_known_are_ignored(http):
    assert "topics" in ask(http, "/v1/topics", prefix="none such", pretty=1)


@pytest.mark.parametrize(
    ("error", "status", "facts"),
    [
        (BadTopicNameError("why"), 400, {}),
        (StoreFailedError("why"), 503, {}),
        (ChannelError("gap", "why"), 409, {"code": "gap", "retry": True}),
        (ChannelError("bad-offset", "why"), 400, {"code": "bad-offset", "retry": False}),
    ],
)
async def test_an_error_that_ends_a_request_is_its_answer(
    error: Exception, status: int, facts: dict[str, object]
) -> None:
    async def fail(request: Request) -> Response:
        raise error

    app = Starlette(routes=[Route("/", fail)], exception_handlers=EXCEPTION_HANDLERS)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/")
    assert (answer.status_code, answer.json()) == (status, {"error": "why"} | facts)
