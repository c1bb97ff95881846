"""Helpers for Spark and pipeline tests: a check for Java, clients of both protocols, rows and HTTP answers.

This file knows nothing about the subject of a test.
"""

import random
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec
import pytest

from headrace import connect_blocking
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.spark.session import NoJavaError, check_java
from headrace.testing import ServerProcess, wait_until
from tests.tools import without

JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options for a JVM that starts quickly and leaves the two cores to the tests."""

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    # A task is tried only once, so that its failure is seen once and immediately.
    "spark.task.maxFailures": "1",
    "spark.sql.streaming.stopTimeout": "30s",
}

SMALL = """
[journal]
file_bytes = 1048576
files = 4
rotate_s = 0.2
[segment]
bytes = 262144
"""
"""Configuration with small files: they are soon full, so that reads come from several segments."""

RECORD_HEADER_BYTES = 4

Row = tuple[str, int, int, int, bytes]
"""Topic, offset, next_offset, ordinal, payload."""


def require_java() -> None:
    try:
        check_java()
    except NoJavaError as error:
        without(str(error))


def random_payloads(chance: random.Random, count: int) -> list[bytes]:
    """Return payloads of very different sizes, always including an empty one and one of the maximum size."""
    sizes = [0, PAYLOAD_BYTES_MAX, *chance.choices([0, 1, 30, 300, 3000, 30_000], k=count - 2)]
    chance.shuffle(sizes)
    return [chance.randbytes(chance.randint(size // 2, size)) for size in sizes] + [
        b"",
        chance.randbytes(PAYLOAD_BYTES_MAX),
    ]


def expected_rows(topic: str, payloads: Sequence[bytes]) -> list[Row]:
    """Return the rows of a topic that had these payloads published to it since it was created."""
    rows, offset = [], 0
    for ordinal, payload in enumerate(payloads):
        end = offset + RECORD_HEADER_BYTES + len(payload)
        rows.append((topic, offset, end, ordinal, bytes(payload)))
        offset = end
    return rows


def rows_of(frame: Any) -> list[Row]:
    """Return the rows that Spark reads, ordered by topic and ordinal."""
    columns = frame.select("topic", "offset", "next_offset", "ordinal", "payload")
    found = [(*row[:4], bytes(row[4])) for row in columns.collect()]
    return sorted(found, key=lambda row: (row[0], row[3]))


def publish(url: str, topic: str, payloads: Sequence[bytes]) -> None:
    """Publish over the protocol of the URL; return when everything is acknowledged."""
    with connect_blocking(url) as client:
        for payload in payloads:
            client.window(30)
            client.publish_nowait(topic, payload)
        client.flush(60)


def receive(url: str, topic: str, count: int) -> list[tuple[int, bytes]]:
    """Return the first messages of a topic: the offset just past each one, and its payload."""
    with connect_blocking(url) as client:
        messages = client.subscribe(topic, offset=0, timeout_s=30)
        return [(message.next_offset, message.payload) for message in islice(messages, count)]


def ask(server: ServerProcess, path: str, token: str = "", **query: object) -> Any:
    """Return an answer of the HTTP listener."""
    url = f"{server.http_url}{path}?{urllib.parse.urlencode(query, doseq=True)}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return msgspec.json.decode(answer.read())


def send(
    server: ServerProcess, method: str, path: str, body: object = None, **query: object
) -> Any:
    url = f"{server.http_url}{path}?{urllib.parse.urlencode(query, doseq=True)}"
    data = msgspec.json.encode(body) if body is not None else None
    request = urllib.request.Request(url, data, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return msgspec.json.decode(answer.read())


def topics_of(server: ServerProcess, prefix: str = "", token: str = "") -> dict[str, int]:
    """Return the number of records that each topic has ever had."""
    listed = ask(server, "/v1/topics", token, prefix=prefix)["topics"]
    return {one["name"]: one["end"]["ordinal"] for one in listed}


def wait_applied(server: ServerProcess, *topics: str) -> None:
    """Wait until everything is in segments: a reader of files does not see the content of the journal."""

    def applied(topic: str) -> bool:
        found = ask(server, "/v1/topic", name=topic)
        segments = found["segments"]
        return bool(segments) and segments[-1]["end"] == found["end"]["offset"]

    for topic in topics:
        wait_until(lambda t=topic: applied(t), 120, f"{topic} to be applied")


@contextmanager
def query_of(query: Any) -> Iterator[Any]:
    """Yield a streaming query, and stop it at the end."""
    try:
        yield query
    finally:
        query.stop()


def finish(query: Any, timeout_s: float = 300) -> None:
    """Wait for a query that ends by itself; raise its error."""
    with query_of(query):
        assert query.awaitTermination(timeout_s), "the query goes on"


def error_of(action: Callable[[], object]) -> str:
    """Return the text of the error that a user sees; fail if there is no error."""
    from pyspark.errors import PySparkException

    try:
        action()
    except PySparkException as error:
        return str(error)
    pytest.fail("there was no error")


def with_options(builder: Any, options: Mapping[str, object]) -> Any:
    for key, value in options.items():
        builder = builder.option(key, value)
    return builder
