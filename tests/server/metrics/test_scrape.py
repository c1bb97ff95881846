"""Scrapes of a real server: formats, names, and values that follow what happens."""

import json
import math
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import httpx
import pytest
from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from headrace import connect_blocking
from headrace.client import BlockingClient
from headrace.errors import HeadraceError
from headrace.server.metrics.declarations import (
    APPLIER,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LABELLED_GAUGES,
    LIMITED_GAUGES,
    PREFIX,
    PROCESS,
    READERS_SHOWN_MAX,
)
from headrace.server.metrics.page import page
from headrace.testing import ServerProcess, wait_until
from tests.fakes.scraped import Scraped, scraped

ROOT = Path(__file__).parents[3]
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("metrics") / "data") as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[BlockingClient]:
    with connect_blocking(server.figg_url) as client:
        yield client


def families(server: ServerProcess, accept: str) -> dict[str, Metric]:
    answer = httpx.get(server.http_url + "/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    parse = openmetrics if "openmetrics" in accept else parser
    return {one.name: one for one in parse.text_string_to_metric_families(answer.text)}


def test_the_page_is_the_one_that_the_declarations_make():
    shown = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert shown == page(), "run `make docs`"


def test_a_scrape_shows_every_declared_name_and_no_other(server):
    samples = {name for name, _ in scraped(server).values}
    samples -= {f"{PREFIX}{name}" for name in LIMITED_GAUGES}  # some have no series yet
    histograms = {f"{PREFIX}{name}" for name in HISTOGRAMS}
    of_histograms = {f"{n}_{part}" for n, part in product(histograms, ("bucket", "count", "sum"))}
    plain = {*COUNTERS, *GAUGES, *LABELLED_COUNTERS, *LABELLED_GAUGES}
    processes = {*PROCESS, *(f"{APPLIER}_{name}" for name in PROCESS)}
    assert samples == {f"{PREFIX}{name}" for name in plain} | of_histograms | processes


def test_both_formats_are_understood_and_say_the_same(server):
    text, open_metrics = families(server, "text/plain"), families(server, OPEN_METRICS)
    declared = {f"{PREFIX}{name}" for name in (*GAUGES, *HISTOGRAMS, *LABELLED_GAUGES)}
    declared |= {PREFIX + name.removesuffix("_total") for name in LABELLED_COUNTERS}
    declared.add(f"{PREFIX}records_published")
    for found in (text, open_metrics):
        assert declared <= found.keys()
        for name in declared:
            kind = found[name].type
            if name.removeprefix(PREFIX) in HISTOGRAMS:
                assert kind == "histogram"
            else:
                assert kind in ("counter", "gauge")
    # OpenMetrics has one name for a counter and a gauge of the same name.
    assert open_metrics["headrace_connections"].type == "gauge"
    assert open_metrics["headrace_connections_total"].type == "unknown"


def test_a_publish_appears_in_the_counters_and_histograms(server, client):
    before = scraped(server)
    messages = client.subscribe("metrics/seen")
    for _ in range(3):
        client.publish("metrics/seen", b"x" * 100)
    for _ in range(3):
        next(messages)
    after = scraped(server)

    def more(name: str) -> float:
        return after[name] - before[name]

    assert more("headrace_records_published_total") == 3
    assert more("headrace_commit_records_sum") == 3
    assert more("headrace_commit_bytes_sum") >= 300
    commits = more("headrace_commit_records_count")
    assert 1 <= commits <= 3
    for name in ("commit_seconds", "fsync_seconds", "publish_to_ack_seconds"):
        assert more(f"headrace_{name}_count") == commits, name
        assert more(f"headrace_{name}_sum") > 0, name
    assert more("headrace_publish_to_delivery_seconds_count") == commits


def test_buckets_are_cumulative_and_the_last_one_takes_all(server, client):
    client.publish("metrics/buckets", b"x")
    found = scraped(server)
    for name, one in HISTOGRAMS.items():
        buckets = found.by_label(f"{PREFIX}{name}_bucket", "le")
        counts = [buckets[bound] for bound in sorted(buckets, key=float)]
        assert [float(bound) for bound in buckets] == [*one.bounds, math.inf]
        assert counts == sorted(counts)
        assert counts[-1] == found[f"{PREFIX}{name}_count"]


def test_a_commit_of_a_topic_in_memory_has_no_flush(tmp_path):
    with (
        ServerProcess(tmp_path / "data", "--durability", "memory") as server,
        connect_blocking(server.figg_url) as client,
    ):
        client.publish("metrics/memory", b"x")
        found = scraped(server)
        assert found["headrace_publish_to_ack_seconds_count"] == 1
        assert found["headrace_commit_records_sum"] == 1
        assert found["headrace_commit_seconds_count"] == 0
        assert found["headrace_fsync_seconds_count"] == 0


def test_connections_and_subscriptions_are_shown_by_protocol_and_state(server, client):
    def connections(protocol: str) -> float:
        found = scraped(server).values
        return found["headrace_open_connections", (("protocol", protocol), ("state", "open"))]

    def subscriptions(protocol: str, state: str) -> float:
        found = scraped(server).values
        return found["headrace_open_subscriptions", (("protocol", protocol), ("state", state))]

    before = connections("wombat")
    with connect_blocking(server.wombat_url) as wombat:
        live = subscriptions("wombat", "live")
        wombat.subscribe("metrics/states")
        wait_until(lambda: subscriptions("wombat", "live") == live + 1, 30, "a subscription")
        assert connections("wombat") == before + 1
        assert connections("http") >= 1
    wait_until(lambda: connections("wombat") == before, 30, "the end of the connection")
    wait_until(lambda: subscriptions("wombat", "live") == live, 30, "the end of the subscription")


def test_only_the_readers_that_are_furthest_behind_are_shown(server, client):
    count = READERS_SHOWN_MAX + 5
    for number in range(count):
        client.publish("metrics/lag", b"%d" % number)
    known = httpx.get(f"{server.http_url}/v1/topic?name=metrics/lag").json()
    place = {"topic": "metrics/lag", "epoch": known["epoch"], "offset": 0, "ordinal": 0}
    for number in range(count):
        at = place | {"offset": 5 * min(number, 10), "ordinal": min(number, 10)}
        at["offset"] += max(0, at["ordinal"] - 10)
        set_cursor(server, f"reader {number}", at)
    set_cursor(server, "lake", place)

    def lags() -> dict[str, float]:
        return scraped(server).by_label("headrace_reader_lag_records", "reader")

    wait_until(lambda: "reader 0" in lags(), 30, "a measurement of the lags")
    found = lags()
    assert len(found) == READERS_SHOWN_MAX
    assert found["reader 0"] == found["lake"] == count
    assert found["reader 1"] == count - 1
    assert scraped(server)["headrace_lake_lag_records"] == count
    assert scraped(server)["headrace_lake_topics"] == 1
    assert scraped(server)["headrace_cursors"] == count + 1


def set_cursor(server: ServerProcess, reader: str, at: dict[str, object]) -> None:
    body = json.dumps({"reader": reader, "positions": [at]})
    assert httpx.post(f"{server.http_url}/v1/cursors", content=body).is_success


def test_the_recovery_says_what_it_replayed(tmp_path):
    # Nothing is applied before the kill.
    with ServerProcess(tmp_path / "data", "--set=journal.rotate_s=3600") as server:
        with connect_blocking(server.figg_url) as client:
            for _ in range(5):
                client.publish("metrics/replayed", b"x")
        assert scraped(server)["headrace_recovery_replayed_records"] == 0
        server.kill()
        server.start()
        found = scraped(server)
        assert found["headrace_recovery_replayed_records"] == 5
        assert found["headrace_recovery_seconds"] > 0
        assert found["headrace_recovery_damages"] == 0


def test_retention_counts_what_it_deletes(tmp_path):
    settings = ("retention.bytes=4KiB", "retention.check_s=0.05", "journal.rotate_s=0.05")
    sets = (f"--set={one}" for one in (*settings, "segment.bytes=1KiB"))
    with (
        ServerProcess(tmp_path / "data", *sets) as server,
        connect_blocking(server.figg_url) as client,
    ):

        def deleted() -> Scraped:
            client.publish("metrics/deleted", b"x" * 1000)
            return scraped(server)

        name = "headrace_retention_segments_deleted_total"
        wait_until(lambda: deleted()[name] > 0, 60, "retention")
        assert scraped(server)["headrace_retention_bytes_deleted_total"] >= 1000


def test_a_refused_publish_is_counted_with_its_reason(server):
    with connect_blocking(server.figg_url) as client, pytest.raises(HeadraceError):
        client.publish("$reserved", b"x")
    labels = (("protocol", "figg"), ("reason", "reserved_topic"))
    assert ("headrace_refusals_total", labels) in scraped(server).values


# Readiness


def test_a_running_server_is_ready_on_both_listeners(server):
    for url in (server.http_url, server.wombat_url.replace("wombat:", "http:")):
        answer = httpx.get(f"{url}/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        assert httpx.head(f"{url}/readyz").status_code == 200
        assert httpx.post(f"{url}/readyz").status_code == 405
    assert scraped(server)["headrace_ready"] == 1


def test_nothing_that_is_shown_depends_on_names_of_topics(server, client):
    client.publish("metrics/a-name-that-must-not-appear", b"x")
    text = httpx.get(server.http_url + "/metrics").text
    assert not re.search("a-name-that-must", text)
