"""Names of channels and of their topics: the longest name, and ordinary topics beside them."""

import httpx
import pytest

from headrace import connect_blocking
from headrace.model import CHANNEL_PREFIX
from headrace.testing import ServerProcess

LONGEST = "é" * 123 + "x"
"""A channel name of the maximum length, 247 bytes."""
WAIT_S = 30


def ask(server: ServerProcess, what: str, name: str, **given: object) -> httpx.Response:
    query = {"name": name, "processor": "p"} | given
    return httpx.post(f"{server.http_url}/v1/channel/{what}", params=query, json=1, timeout=WAIT_S)


@pytest.mark.parametrize("protocol", ["figg_url", "wombat_url"])
def test_a_channel_with_the_longest_name_can_be_followed(server: ServerProcess, protocol) -> None:
    assert ask(server, "join", LONGEST).status_code == 200
    assert ask(server, "messages", LONGEST, number=1).status_code in (200, 201)
    topic = CHANNEL_PREFIX + LONGEST
    assert len(topic.encode()) == 256
    with connect_blocking(getattr(server, protocol)) as client:
        message = next(iter(client.subscribe(topic, offset=0, timeout_s=WAIT_S)))
        assert message.topic == topic
    found = httpx.get(f"{server.http_url}/v1/topic", params={"name": topic}, timeout=WAIT_S)
    assert found.json()["records"] == 1
    assert ask(server, "join", LONGEST + "x").json()["code"] == "bad-channel"


@pytest.mark.parametrize("protocol", ["figg_url", "wombat_url"])
def test_an_ordinary_topic_may_be_named_like_a_channel_was(server: ServerProcess, protocol) -> None:
    name = f"named {protocol}"
    ask(server, "join", name)
    ask(server, "messages", name, number=1)
    with connect_blocking(getattr(server, protocol)) as client:
        client.publish(f"channel/{name}", b"ordinary")
        client.publish(f"logux/{name}", b"ordinary")
        message = next(iter(client.subscribe(f"channel/{name}", offset=0, timeout_s=WAIT_S)))
        assert message.payload == b"ordinary"
    facts = httpx.get(f"{server.http_url}/v1/channel", params={"name": name}, timeout=WAIT_S)
    assert facts.json()["messages"] == 1
