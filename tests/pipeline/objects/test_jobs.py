"""Every job with a lake on a real S3 server, without Spark: the same results as in a directory."""

from collections.abc import Iterator
from itertools import islice, product

import msgspec
import obstore
import pytest
from deltalake.exceptions import TableNotFoundError

from headrace import connect_blocking
from headrace.lake import manifests
from headrace.pipeline.report.data import ReportData
from headrace.testing import ServerProcess
from tests.pipeline.objects.stored import StoredLake
from tests.pipeline.replayed import payloads_of
from tests.pipeline.test_read_through import CONFIG, WAIT_S, command, forgets
from tests.system.support import get_json
from tests.tools import usually


@pytest.fixture
def lake(server, bucket):
    made = StoredLake(server, bucket)
    made.publish()
    return made


def test_every_record_is_in_the_lake_once(lake):
    done = lake.export()
    assert (done.lake, done.batches, done.records) == (lake.bucket.url, 1, 40)
    lake.check()
    assert lake.export().batches == 0
    lake.publish(7)
    # Small batches and parts give more objects, and the same rows.
    done = lake.export(batch_bytes=500, part_bytes=300)
    assert (done.batches > 2, done.records) == (True, 14)
    lake.check()
    # Other readers get the addresses of the objects from the table.
    assert len(lake.table.file_uris()) == len(lake.table.get_add_actions())
    # Whatever is there counts, or has to be kept.
    assert {path.split("/")[0].partition("=")[0] for path in lake.paths()} == {
        *("_delta_log", "_headrace", "date"),
    }


def test_an_export_that_goes_on_makes_a_batch_of_whatever_is_new(lake, monkeypatch):
    monkeypatch.setattr(manifests, "SINCE_MAX", 2)  # so that manifests are merged on the way
    turns = iter(range(6))

    def stop():
        if next(turns, None) is None:
            return True
        lake.publish(3)
        return False

    done = lake.export(once=False, every_s=0, stop=stop)
    assert done.batches >= 6
    lake.check()
    assert any("_headrace/merged/" in path for path in lake.paths("_headrace"))


@pytest.mark.parametrize("by_topic", [False, True])
def test_a_compaction_keeps_every_row_and_deletes_what_is_old(lake, by_topic, monkeypatch):
    monkeypatch.setattr("headrace.pipeline.job.check", lambda given: None)  # of `sweep_after_s`
    lake.export(batch_bytes=1000, part_bytes=400, by_topic=by_topic)
    before = lake.table.file_uris()
    done = lake.compact(sweep_after_s=7200)
    assert (done.merged, done.made, done.swept) == (len(before), 2 if by_topic else 1, 0)
    lake.check()
    assert lake.compact(sweep_after_s=0, dry_run=True).swept == len(before)
    assert lake.compact(sweep_after_s=0).swept == len(before)
    lake.check()
    found = [path for path in lake.paths() if path.endswith(".parquet")]
    assert len(found) == len(lake.table.file_uris()) == done.made
    lake.publish(2)
    lake.export()
    lake.check()


DAMAGES = {
    "deleted": lambda data: None,
    "truncated": lambda data: data[:-100],
    "empty": lambda data: b"",
    "damaged": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
}


@pytest.mark.parametrize(
    ("prefix", "damage"),
    usually(
        [
            *(("date=", "deleted"), ("date=", "damaged")),
            *(("_headrace/batches/", "truncated"), ("_headrace/batches/", "empty")),
        ],
        product(["date=", "_headrace/batches/"], DAMAGES),
    ),
)
def test_an_audit_finds_and_names_objects_that_are_lost_or_changed(lake, damage, prefix):
    lake.export()
    lake.publish(5)
    lake.export()
    path = min(path for path in lake.paths() if path.startswith(prefix))
    changed = DAMAGES[damage](lake.content(path))
    if changed is None:
        obstore.delete(lake.objects, path)
    else:
        obstore.put(lake.objects, path, changed)
    found = lake.audit()
    assert found.lost
    named = {(one.kind, one.file) for one in found.all_findings() if one.file}
    assert named == {("missing" if changed is None else "damaged", path)}


def test_a_topic_is_replayed_once(lake):
    lake.export(batch_bytes=1000)
    target, url = f"{lake.prefix}-again", lake.server.http_url
    done = lake.run("replay", lake.bucket.url, lake.a, target, url=url)
    assert done.records == 20
    assert lake.run("replay", lake.bucket.url, lake.a, target, url=url).records == 0
    assert payloads_of(lake.server, target) == lake.payloads[lake.a]


def test_a_report_counts_the_lake(lake, tmp_path):
    lake.export()
    page, numbers = tmp_path / "report.html", tmp_path / "report.json"
    url = lake.server.http_url
    given = {"lake": lake.bucket.url, "json": numbers, "url": url}
    lake.run("report", page, **given)
    assert lake.bucket.url in page.read_text("utf-8")
    found = msgspec.json.decode(numbers.read_bytes(), type=ReportData)
    assert found.lake is not None


def test_a_table_without_duplicates_is_made_in_the_bucket(lake):
    for known in lake.payloads.values():
        known.clear()
    with connect_blocking(lake.server.figg_url) as client:
        for number in (1, 2, 1, 3, 2, 1):
            client.publish_nowait(f"{lake.prefix}/c", b"%d" % number)
        client.flush(60)
    lake.export(pattern=f"{lake.prefix}/c")
    into = f"s3://{lake.bucket.name}/rows"
    done = lake.run("dedupe", lake.bucket.url, into, payload=True)
    assert done.kept == 3
    found = lake.table_at("rows").to_pyarrow_table(columns=["offset", "payload"])
    assert found.sort_by("offset")["payload"].to_pylist() == [b"1", b"2", b"3"]
    assert lake.run("dedupe", lake.bucket.url, into, payload=True).kept == 0


def test_states_are_made_in_the_bucket(lake):
    lake.export()
    lake.publish(3)  # which the lake does not have
    into, url = f"s3://{lake.bucket.name}/states", lake.server.http_url
    given = {"reducer": "count", "pattern": lake.pattern, "url": url}
    for _ in range(2):
        done = lake.run("aggregate", lake.bucket.url, into, **given)
        assert (done.topics, done.messages) == (2, 46)
        found = lake.table_at("states").to_pyarrow_table().to_pylist()
        assert {row["topic"]: row["ordinal"] for row in found} == dict.fromkeys(lake.payloads, 23)


def test_states_are_kept_up_to_date_in_the_bucket(lake):
    lake.export()
    steps = steps_of(lake)
    done = lake.run(
        "aggregate_stream",
        f"s3://{lake.bucket.name}/states",
        reducer="count",
        pattern=lake.pattern,
        url=lake.server.http_url,
        lake=lake.bucket.url,
        every_s=0,
        stop=lambda: next(steps, True),
    )
    assert (done.topics, done.incomplete, done.failed) == (2, 0, 0)


def steps_of(lake: StoredLake) -> Iterator[bool]:
    """Yield False until the states have come to each of several ends of the topics."""
    for _ in range(3):
        ends, left = dict.fromkeys(lake.payloads, len(lake.payloads[lake.a])), range(1000)
        for _ in left:
            yield False
            if ordinals(lake) == ends:
                break
        else:
            pytest.fail(f"the states do not come to {ends}")
        lake.publish(2)


def ordinals(lake: StoredLake) -> dict[str, int]:
    try:
        found = lake.table_at("states").to_pyarrow_table(columns=["topic", "ordinal"]).to_pylist()
    except TableNotFoundError:
        return {}
    return {row["topic"]: row["ordinal"] for row in found}


# Reading through


@pytest.fixture
def forgetful(tmp_path, bucket):
    """Lake of a server that deletes what the lake has."""
    (tmp_path / "config.toml").write_text(CONFIG)
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        yield StoredLake(server, bucket)


def test_the_log_waits_for_the_lake_and_clients_read_both(forgetful):
    lines = [f"{number:060}" for number in range(1600)]
    where = ("--url", forgetful.server.figg_url)
    command("publish", "t", *where, stdin="".join(f"{line}\n" for line in lines))
    state = get_json(forgetful.server, "/v1/topic?name=t")
    assert (state["start"]["offset"], state["records"]) == (0, 1600)  # retention waits
    forgetful.export(pattern="t")
    forgets(forgetful.server, "t")
    options = forgetful.bucket.options
    given = {"lake": forgetful.bucket.url, "lake_options": options}
    with connect_blocking(forgetful.server.figg_url, **given) as client:
        found = [*islice(client.subscribe("t", offset=0, timeout_s=WAIT_S), 1600)]
    assert [one.payload.decode() for one in found] == lines
    flags = (word for pair in options.items() for word in ("--storage-option", "=".join(pair)))
    asked = ("subscribe", "t", "--from-offset", "64", "--until-end", *where)
    http = ("--http", "{}:{}".format(*forgetful.server.http))
    shown = command(*asked, *http, "--lake", forgetful.bucket.url, *flags)
    assert shown.splitlines() == lines[1:]


def test_options_of_a_lake_may_be_in_the_environment(forgetful, monkeypatch):
    command("publish", "t", "--url", forgetful.server.figg_url, stdin="1\n2\n")
    for name, value in forgetful.bucket.options.items():
        monkeypatch.setenv(name, value)
    assert (
        forgetful.run(
            "export", forgetful.bucket.url, url=forgetful.server.http_url, storage_options=None
        ).records
        == 2
    )
    assert (
        forgetful.run(
            "audit", forgetful.bucket.url, url=forgetful.server.http_url, storage_options=None
        ).files
        == 1
    )


def test_the_requests_of_a_batch_do_not_grow_with_the_number_of_batches(lake, s3_proxy):
    lake.export(through=s3_proxy)
    counts, before = [], 0

    def stop():
        nonlocal before
        counts.append(len(s3_proxy.seen) - before)
        before = len(s3_proxy.seen)
        lake.publish(1)
        return len(counts) > 35

    lake.export(through=s3_proxy, once=False, every_s=0, stop=stop)
    lake.export()
    lake.check()
    most = [max(counts[first : first + 11]) for first in (12, 23)]
    # One request for each earlier batch would make eleven more. A request may be repeated.
    assert most[1] < most[0] + 11 < 200, counts
