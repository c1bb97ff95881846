"""From one protocol through Spark to another: every payload exact, in order, at its offset."""

import random
from typing import Any

import pytest

from headrace.testing import ServerProcess
from tests.spark.conftest import Read
from tests.spark.support import (
    expected_rows,
    finish,
    publish,
    random_payloads,
    receive,
    rows_of,
    wait_applied,
)


@pytest.fixture(scope="session")
def published(server: ServerProcess) -> dict[str, list[bytes]]:
    """Topics that were published to over Figg, over Wombat, and over both in turn."""
    chance = random.Random(7)
    figg, wombat, *both = (random_payloads(chance, 120) for _ in range(4))
    publish(server.figg_url, "round/figg", figg)
    publish(server.wombat_url, "round/wombat ö", wombat)
    for url, payloads in zip((server.figg_url, server.wombat_url), both, strict=True):
        publish(url, "round/both", payloads)
    return {"round/figg": figg, "round/wombat ö": wombat, "round/both": both[0] + both[1]}


def rows_expected(published: dict[str, list[bytes]]) -> list[Any]:
    return [row for name in sorted(published) for row in expected_rows(name, published[name])]


def check_received(server: ServerProcess, prefix: str, published: dict[str, list[bytes]]) -> None:
    for name, payloads in published.items():
        expected = [(end, data) for _, _, end, _, data in expected_rows(name, payloads)]
        for url in (server.figg_url, server.wombat_url):
            assert receive(url, f"{prefix}{name}", len(payloads)) == expected


@pytest.mark.parametrize("where", ["url", "path"])
@pytest.mark.parametrize("tasks", [1, 5])
def test_what_was_published_is_read(
    server: ServerProcess, read: Read, published: dict[str, list[bytes]], where: str, tasks: int
) -> None:
    wait_applied(server, *published)
    place = server.http_url if where == "url" else str(server.data_dir)
    frame = read(subscribePattern="round/.*", minPartitions=tasks, **{where: place})
    assert rows_of(frame) == rows_expected(published)
    assert (frame.rdd.getNumPartitions() > 1) == (tasks > 1)


@pytest.mark.parametrize("where", ["url", "path"])
def test_what_spark_writes_in_a_batch_is_received(
    server: ServerProcess, read: Read, published: dict[str, list[bytes]], where: str
) -> None:
    wait_applied(server, *published)
    place = server.http_url if where == "url" else str(server.data_dir)
    frame = read(subscribePattern="round/.*", minPartitions=4, **{where: place})
    copy = frame.selectExpr(f"concat('batch {where}/', topic) as topic", "payload")
    copy.write.format("headrace").mode("append").option("url", server.http_url).save()
    check_received(server, f"batch {where}/", published)


@pytest.mark.parametrize("where", ["url", "path"])
def test_what_spark_writes_in_a_stream_is_received(
    server: ServerProcess,
    read_stream: Read,
    published: dict[str, list[bytes]],
    checkpoint: str,
    where: str,
) -> None:
    wait_applied(server, *published)
    place = server.http_url if where == "url" else str(server.data_dir)
    options = {"startingOffsets": "earliest", "maxRowsPerTrigger": 200, "minPartitions": 3}
    frame = read_stream(subscribePattern="round/.*", **options, **{where: place})
    copy = frame.selectExpr(f"concat('stream {where}/', topic) as topic", "payload")
    writer = copy.writeStream.format("headrace").option("url", server.http_url)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    finish(query)
    assert len([p for p in query.recentProgress if p["numInputRows"]]) >= 3
    check_received(server, f"stream {where}/", published)
