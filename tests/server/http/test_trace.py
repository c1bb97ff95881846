"""Traces of a real server over HTTP: all protocols, filters, limits, and readers that leave."""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from headrace import channels, connect_blocking
from headrace.server.trace.tracing import TRACES_MAX
from headrace.testing import ServerProcess, wait_until
from tests.fakes.scraped import scraped


class Reader:
    """A trace that a client reads."""

    def __init__(self, server: ServerProcess, **query: str) -> None:
        address = urlsplit(server.http_url)
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)  # type: ignore[arg-type]
        self._connection.request("GET", f"/v1/trace?{urlencode(query)}")
        self.answer = self._connection.getresponse()

    def line(self) -> dict[str, Any] | None:
        """Return the next line; None at the end."""
        while line := self.answer.readline():
            if line.strip():
                return json.loads(line)  # type: ignore[no-any-return]
        return None

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return all lines up to the first that is wanted."""
        found = []
        while line := self.line():
            found.append(line)
            if wanted(line):
                return found
        raise AssertionError(f"the trace ended after {found}")

    def close(self) -> None:
        self._connection.close()


@contextmanager
def traced(server: ServerProcess, **query: str) -> Iterator[Reader]:
    reader = Reader(server, **query)
    try:
        assert reader.answer.status == 200, reader.answer.read()
        assert reader.line() == {"kind": "trace"}
        yield reader
    finally:
        reader.close()


@pytest.fixture(autouse=True)
def no_trace_is_left(server: ServerProcess) -> Iterator[None]:
    """Wait until the server has noticed that the readers of a test are gone: there may be few traces."""
    yield
    wait_until(lambda: scraped(server)["headrace_traces"] == 0, 30, "the end of the traces")


def is_ack(line: dict[str, Any]) -> bool:
    return line["kind"] == "ack"


@pytest.mark.parametrize("protocol", ["figg", "wombat"])
def test_a_trace_of_a_topic_shows_both_directions(server, topic, protocol):
    url = server.figg_url if protocol == "figg" else server.wombat_url
    with traced(server, topic=topic) as trace, connect_blocking(url) as client:
        messages = client.subscribe(topic)
        client.publish(f"{topic}/other", b"foo")
        client.publish(topic, b"secret payload")
        next(messages)
        client.publish(topic, b"last")
        found = trace.until(lambda line: line["kind"] == "publish" and line["bytes"] == 4)
    assert {line["protocol"] for line in found} == {protocol}
    assert {line.get("topic", topic) for line in found} == {topic}
    kinds = [(line["direction"], line["kind"]) for line in found]
    delivery = "data" if protocol == "figg" else "payload"
    for one in (("in", "attach"), ("in", "publish"), ("out", delivery), ("out", "ack")):
        assert one in kinds
    publish = found[kinds.index(("in", "publish"))]
    assert publish["bytes"] == len("secret payload")
    assert "number" in publish
    assert "secret" not in str(found)


def test_payloads_are_shown_if_asked_for(server, topic):
    with (
        traced(server, topic=topic, payloads="true") as trace,
        connect_blocking(server.figg_url) as client,
    ):
        client.publish(topic, "ö".encode() + b"\xff")
        found = trace.until(lambda line: line["kind"] == "publish")
    publish = next(line for line in found if line["kind"] == "publish")
    assert publish["payloads"] == ["ö\\xff"]


def test_a_trace_of_a_channel_and_of_its_processor(server, topic):
    url = server.wombat_url.replace("wombat:", "channel:")
    with (
        traced(server, topic=f"$channel/{topic}") as of_channel,
        traced(server, peer="the-processor") as of_processor,
        channels.join_blocking(f"{url}/{topic}", processor="the-processor") as channel,
    ):
        channel.send({"n": 1})
        for trace in (of_channel, of_processor):
            found = trace.until(lambda line: line["kind"] == "sent")
            send = next(line for line in found if line["kind"] == "send")
            assert (send["protocol"], send["topic"]) == ("channel", f"$channel/{topic}")
            assert (send["number"], send["bytes"]) == (1, len('{"n":1}'))


def test_a_trace_of_logux(server, headrace):
    environ = {"HEADRACE_WS": server.wombat_url.removeprefix("wombat://")}
    with traced(server, topic="$logux/traced") as trace:
        done = headrace("logux", "add", "traced", '{"type": "a"}', environ=environ)
        assert done.returncode == 0, done.stderr
        found = trace.until(lambda line: (line["direction"], line["kind"]) == ("out", "synced"))
    assert {"connect", "connected", "sync"} <= {line["kind"] for line in found}


def test_a_peer_is_followed_by_its_address(server, topic):
    with traced(server, peer="127.0.0.1") as trace, connect_blocking(server.figg_url) as client:
        client.publish(topic, b"foo")
        found = trace.until(lambda line: line.get("topic") == topic)
        port = found[-1]["peer"].rpartition(":")[2]
        with traced(server, peer=f"127.0.0.1:{port}") as of_port:
            client.publish(topic, b"foo")
            assert of_port.until(is_ack)
    assert "opened" in {line["kind"] for line in found}


def test_a_connection_is_shown_from_the_middle_on(server, topic):
    with connect_blocking(server.figg_url) as client:
        client.publish(topic, b"before")
        with traced(server, topic=topic) as trace:
            client.publish(topic, b"foo")
            found = trace.until(is_ack)
    kinds = [line["kind"] for line in found if line["kind"] not in ("ping", "pong")]
    assert kinds == ["publish", "ack"]


def test_traces_are_limited_in_number_and_end_with_their_readers(server, topic):
    with ExitStack() as traces:
        for _ in range(TRACES_MAX):
            traces.enter_context(traced(server, topic=topic))
        assert scraped(server)["headrace_traces"] == TRACES_MAX
        refused = Reader(server, topic=topic)
        assert refused.answer.status == 503
        refused.close()
    wait_until(lambda: scraped(server)["headrace_traces"] == 0, 30, "the end of the traces")
    with traced(server, topic=topic):
        pass


@pytest.mark.parametrize("query", [{}, {"topic": ""}, {"topic": "t", "payloads": "yes"}])
def test_a_trace_says_whom_it_follows(server, query):
    reader = Reader(server, **query)
    assert reader.answer.status == 400
    assert "error" in json.loads(reader.answer.read())
    reader.close()


def test_a_stop_ends_every_trace(tmp_path):
    with ServerProcess(tmp_path / "data") as server, traced(server, topic="t") as trace:
        server.terminate()
        assert trace.line() is None
