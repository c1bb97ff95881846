"""The audit trail of a real server: which actions it has, who did them, and that a kill loses none."""

import itertools
import json
import signal
from typing import Any

import httpx
import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Start


def trail(server: ServerProcess) -> list[dict[str, Any]]:
    """Return all records of the trail that the server has now."""
    with httpx.Client(base_url=server.http_url, timeout=30) as http:
        answer = http.get("/v1/topic", params={"name": "$audit"})
    if answer.status_code == 404:
        return []
    count = answer.json()["end"]["ordinal"]
    with connect_blocking(server.figg_url) as client:
        read = client.subscribe("$audit", offset=0)
        return [json.loads(message.payload) for message in itertools.islice(read, count)]


def ask(server: ServerProcess, method: str, path: str, **query: str) -> httpx.Response:
    with httpx.Client(base_url=server.http_url, timeout=30) as http:
        return http.request(method, path, params=query)


@pytest.fixture
def server(start: Start) -> ServerProcess:
    server = start("--set=journal.rotate_s=0.2")
    with connect_blocking(server.figg_url) as client:
        client.publish("orders", b"x", timeout_s=60)
    return server


def test_a_deleted_topic_is_in_the_trail_with_its_size_and_who_deleted_it(
    server: ServerProcess,
) -> None:
    assert ask(server, "DELETE", "/v1/topic", name="orders").status_code == 200
    assert ask(server, "DELETE", "/v1/topic", name="orders").status_code == 404
    [entry] = trail(server)
    assert entry["action"] == "topic.delete"
    assert (entry["topic"], entry["records"], entry["bytes"]) == ("orders", 1, 5)
    assert entry["principal"] == "open"
    assert entry["address"].startswith("127.0.0.1:")


def test_the_trail_cannot_be_deleted_or_written_by_a_client(server: ServerProcess) -> None:
    ask(server, "DELETE", "/v1/topic", name="orders")
    refused = ask(server, "DELETE", "/v1/topic", name="$audit")
    assert refused.status_code == 409
    assert "only retention deletes" in refused.json()["error"]
    assert len(trail(server)) == 1


def test_an_action_that_was_answered_is_in_the_trail_after_a_kill(server: ServerProcess) -> None:
    assert ask(server, "DELETE", "/v1/topic", name="orders").status_code == 200
    server.kill()
    server.start()
    assert [entry["action"] for entry in trail(server)] == ["topic.delete"]


def test_settings_that_were_read_again_are_in_the_trail(start: Start) -> None:
    server = start(config="[retention]\nage_s = 1000\n")
    file = next(iter(server.data_dir.parent.glob("config*.toml")))
    file.write_text("[retention]\nage_s = 2000\n")
    server.signal(signal.SIGHUP)
    wait_until(lambda: trail(server))
    [entry] = trail(server)
    assert entry["action"] == "settings.reload"
    assert entry["changed"] == ["retention.age_s"]
    assert (entry["principal"], entry["address"]) == ("operator", "")


def test_cursors_are_in_the_trail_if_a_reader_gets_records_again(server: ServerProcess) -> None:
    found = ask(server, "GET", "/v1/topic", name="orders").json()
    start, end = found["start"], found["end"]
    with httpx.Client(base_url=server.http_url, timeout=30) as http:
        for place in (end, start):
            body = {
                "reader": "billing",
                "positions": [{"topic": "orders", "epoch": found["epoch"], **place}],
            }
            assert http.post("/v1/cursors", json=body).status_code == 200
    assert ask(server, "DELETE", "/v1/cursors", reader="billing").status_code == 200
    back, deleted = trail(server)
    assert (back["action"], deleted["action"]) == ("cursors.back", "cursors.delete")
    assert back["reader"] == deleted["reader"] == "billing"
    assert back["topics"] == deleted["topics"] == ["orders"]
