"""Jobs while the S3 server, or the way to it, fails: every record counts once."""

import itertools
import re
import threading
from collections import Counter

import pytest

from headrace.lake.format import LakeError
from headrace.lake.storage import objects
from headrace.testing import wait_until
from tests.fakes.s3_proxy import CUT_BODY, LOSE_ANSWER, LOSE_REQUEST, Answer, Cut, S3Proxy
from tests.pipeline.meddling import Meddling
from tests.pipeline.objects.stored import StoredLake
from tests.pipeline.replayed import payloads_of
from tests.tools import TORTURE, usually

COMMIT = "PUT .*/_delta_log/0*2.json"
MANIFEST = "PUT .*/_headrace/batches/"
FILE = "PUT .*/date"
BUSY, BROKEN = Answer(503, "SlowDown"), Answer(500)
SKEWED, DENIED = Answer(403, "RequestTimeTooSkewed"), Answer(403, "AccessDenied")


@pytest.fixture
def lake(server, bucket):
    """Lake with one batch, which is commit 1; commit 0 has made the table."""
    made = StoredLake(server, bucket)
    made.publish()
    made.export()
    made.publish(5)
    return made


@pytest.mark.parametrize(
    ("what", "fault"),
    usually(
        [(COMMIT, LOSE_ANSWER), (MANIFEST, LOSE_REQUEST), (FILE, BUSY), (COMMIT, BROKEN)],
        itertools.product([COMMIT, MANIFEST, FILE], [LOSE_ANSWER, LOSE_REQUEST, BUSY, BROKEN]),
    ),
)
def test_a_put_that_fails_or_whose_answer_is_lost_counts_once(lake, s3_proxy, fault, what):
    times = 2
    s3_proxy.fail(fault, what, times=times)
    done = lake.export(through=s3_proxy)
    assert (done.batches, done.records) == (1, 10)
    assert [one.status for one in s3_proxy.seen if one.line.startswith("PUT")].count(
        getattr(fault, "status", None)
    ) == times
    lake.check()
    lake.publish(1)
    assert lake.export(through=s3_proxy).batches == 1
    lake.check()


KINDS = {
    "put": "PUT ",
    "get": "GET .*/(date|_headrace|_delta_log/.*json)",
    "head": "HEAD ",
    "list": r"GET [^?]*\?.*list-type",
    "delete": "(DELETE|POST) ",
    "any": "",
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    usually(
        [
            *(("put", LOSE_ANSWER), ("get", BUSY), ("head", LOSE_ANSWER), ("list", BUSY)),
            *(("delete", LOSE_ANSWER), ("any", BROKEN), ("any", LOSE_REQUEST)),
        ],
        itertools.product(KINDS, [BUSY, LOSE_ANSWER]),
    ),
)
def test_a_store_that_fails_for_a_while_only_slows_jobs_down(
    lake, s3_proxy, fault, kind, monkeypatch
):
    monkeypatch.setattr("headrace.pipeline.job.check", lambda given: None)  # of `sweep_after_s`
    s3_proxy.fail(fault, KINDS[kind], times=4)
    lake.export(through=s3_proxy)
    lake.check()
    s3_proxy.fail(fault, KINDS[kind], times=4)
    assert lake.compact(through=s3_proxy, sweep_after_s=0).merged == 2
    assert not lake.audit(through=s3_proxy).lost
    lake.check()


DERIVED: dict[str, dict[str, object]] = {
    "dedupe": {"payload": True},
    "aggregate": {"reducer": "count"},
}


@pytest.mark.parametrize(
    ("job", "what", "fault"),
    usually(
        [
            *(("dedupe", COMMIT, LOSE_ANSWER), ("dedupe", "GET ", BUSY)),
            *(("aggregate", COMMIT, LOSE_ANSWER), ("aggregate", "PUT ", BUSY)),
        ],
        itertools.product(DERIVED, [COMMIT, "PUT ", "GET "], [BUSY, LOSE_ANSWER]),
    ),
)
def test_a_table_of_a_job_whose_requests_fail_equals_that_of_an_undisturbed_one(
    lake, s3_proxy, job, what, fault
):
    """Both tables are made by two runs: the second, which is commit 2, is disturbed."""
    tables = [f"s3://{lake.bucket.name}/{name}" for name in ("disturbed", "undisturbed")]
    for into in tables:
        lake.run(job, lake.bucket.url, into, **DERIVED[job])
    lake.export()
    times = 2
    s3_proxy.fail(fault, what, times=times)
    lake.run(job, lake.bucket.url, tables[0], through=s3_proxy, **DERIVED[job])
    assert failures(s3_proxy, fault, what) == times
    lake.run(job, lake.bucket.url, tables[1], **DERIVED[job])
    order = [("topic", "ascending"), ("offset", "ascending")]
    disturbed, undisturbed = (
        lake.table_at(into.rpartition("/")[2]).to_pyarrow_table().sort_by(order) for into in tables
    )
    assert disturbed == undisturbed
    assert disturbed.num_rows


@pytest.mark.parametrize(
    ("what", "fault"),
    usually(
        [("PUT ", LOSE_ANSWER), ("GET .*/date", BUSY)],
        itertools.product(["PUT ", "GET .*/date"], [BUSY, LOSE_ANSWER]),
    ),
)
def test_a_replay_whose_requests_fail_publishes_every_record_once(lake, s3_proxy, what, fault):
    lake.export()
    target, times = f"{lake.prefix}-again", 2
    s3_proxy.fail(fault, what, times=times)
    for records in (25, 0):  # a repeat finds that all is published
        given = {"url": lake.server.http_url, "through": s3_proxy}
        done = lake.run("replay", lake.bucket.url, lake.a, target, **given)
        assert done.records == records
    assert failures(s3_proxy, fault, what) == times
    assert payloads_of(lake.server, target) == lake.payloads[lake.a]


def failures(proxy: S3Proxy, fault: Answer | Cut, what: str) -> int:
    """Return how many requests of this kind got this fault."""
    status = getattr(fault, "status", None)
    return sum(one.status == status for one in proxy.seen if re.match(what, one.line))


def test_answers_that_are_cut_are_read_again(lake, s3_proxy):
    s3_proxy.fail(CUT_BODY, "GET ", times=3)
    lake.export(through=s3_proxy)
    s3_proxy.fail(CUT_BODY, r"GET .*list-type", times=3)
    s3_proxy.fail(CUT_BODY, "GET .*/date", times=3)
    assert not lake.audit(through=s3_proxy).lost
    lake.check()


@pytest.mark.parametrize("fault", [LOSE_ANSWER, LOSE_REQUEST, BUSY])
def test_a_table_is_made_once(server, bucket, s3_proxy, fault):
    lake = StoredLake(server, bucket)
    lake.publish(1)
    s3_proxy.fail(fault, "PUT .*/_delta_log/0*0.json", times=2)
    assert lake.export(through=s3_proxy).records == 2
    lake.check()


FEW_RETRIES = {"max_retries": "1"}


SENTENCES = {
    BUSY: "gets too many requests (503 SlowDown): run fewer jobs at once, or try later",
    BROKEN: "is out of order (500 InternalError): run this again when the store works",
    LOSE_REQUEST: "lost the connection again and again: see whether 127.0.0.1:",
    SKEWED: "the clock of this machine is wrong (403 Requ",
    DENIED: "does not allow this (403 AccessDenied): use credentials",
}


@pytest.mark.parametrize(
    ("what", "fault"),
    usually(
        [
            *(("", DENIED), ("PUT .*", SKEWED), ("GET .*", LOSE_REQUEST)),
            *((FILE, BUSY), (MANIFEST, BROKEN), (COMMIT, BUSY)),
        ],
        itertools.product(["", "PUT .*", "GET .*", FILE, MANIFEST, COMMIT], SENTENCES),
    ),
)
def test_a_store_that_fails_for_good_ends_the_job_with_one_sentence(lake, s3_proxy, fault, what):
    before = lake.rows
    s3_proxy.fail(fault, what, times=10_000)
    options = {**lake.bucket.through(s3_proxy).options, **FEW_RETRIES}
    with pytest.raises(LakeError) as refused:
        lake.export(storage_options=options)
    sentence = str(refused.value)
    assert sentence.startswith(lake.bucket.url)
    assert SENTENCES[fault] in sentence
    assert "\n" not in sentence and len(sentence) < 300
    assert lake.rows == before
    s3_proxy.forget()
    # The next run does the rest.
    assert lake.export(storage_options=options).records == 10
    lake.check()


@pytest.mark.parametrize("what", ["", "GET .*/date", "GET .*/_headrace", "GET .*/_delta_log"])
def test_an_audit_does_not_take_a_failing_store_for_damage(lake, s3_proxy, what):
    s3_proxy.fail(BUSY, what, times=10_000)
    options = {**lake.bucket.through(s3_proxy).options, **FEW_RETRIES}
    with pytest.raises(LakeError, match="gets too many requests"):
        lake.audit(storage_options=options)


def test_a_large_upload_that_is_cut_leaves_nothing_visible(lake, s3_proxy, monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)  # the least that S3 accepts
    lake.publish_large(24 if TORTURE else 8)
    s3_proxy.fail(LOSE_REQUEST, "PUT .*partNumber=2", times=10_000)
    options = {**lake.bucket.through(s3_proxy).options, **FEW_RETRIES}
    before = files(lake)
    with pytest.raises(LakeError, match="lost the connection again and again"):
        lake.export(storage_options=options)
    assert any("partNumber=2" in one.line for one in s3_proxy.seen)
    assert files(lake) == before
    s3_proxy.forget()
    lake.export(storage_options=options)
    assert any("partNumber=2" in one.line for one in s3_proxy.seen)
    lake.check()


def test_the_answer_to_a_large_upload_may_be_lost(lake, s3_proxy, monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    lake.publish_large(24 if TORTURE else 8)
    s3_proxy.fail(LOSE_ANSWER, "(PUT|POST) .*uploadId", times=2)
    lake.export(through=s3_proxy)
    lake.check()


def files(lake: StoredLake) -> list[str]:
    return [path for path in lake.paths() if path.endswith(".parquet")]


# Several jobs at once


@pytest.mark.parametrize("point", ["planned", "written", "noted"])
def test_of_two_exports_at_once_one_commits_each_batch(lake, point):
    others = []

    def other():
        others.append(lake.export())
        lake.publish(1)
        others.append(lake.export())

    with pytest.raises(LakeError) as refused:
        lake.export(points=Meddling(**{point: other}))
    assert str(refused.value) == (
        f"another export writes to {lake.bucket.url}: it has committed batch 1"
    )
    assert [one.batches for one in others] == [1, 1]
    lake.check()
    lake.publish(1)
    assert lake.export().batches == 1
    lake.check()


def test_exports_and_compactions_in_threads_lose_and_double_nothing(lake):
    """Each export goes on until another has committed its batch; then it starts again, as a service does."""
    refused, ended = Counter(), threading.Event()

    def until_ended(job):
        while not ended.is_set():
            try:
                job()
            except LakeError as error:
                refused[str(error).rpartition(":")[0]] += 1

    jobs = [lake.export, lake.export, lake.compact]
    threads = [threading.Thread(target=until_ended, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10 if TORTURE else 3):
            lake.publish(2)
            count = len(lake.payloads[lake.a]) * 2
            wait_until(lambda: len(lake.rows) == count, 120, "the records in the lake")  # noqa: B023
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert refused.keys() <= {f"another export writes to {lake.bucket.url}"}
    lake.export()
    lake.check()


@pytest.mark.parametrize("point", ["merging", "merged", "committed"])
def test_an_export_beside_a_compaction_loses_nothing(lake, point):
    lake.export()
    lake.publish(2)
    done = lake.compact(points=Meddling(**{point: lake.export}))
    assert done.merged == 2
    lake.check()


@pytest.mark.parametrize("point", ["merging", "merged", "committed"])
def test_of_two_compactions_at_once_each_file_is_merged_by_one(lake, point):
    lake.export()
    others = []
    done = lake.compact(points=Meddling(**{point: lambda: others.append(lake.compact())}))
    assert done.merged + others[0].merged == 2
    lake.check()
