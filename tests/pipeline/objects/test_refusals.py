"""Commands on object storage that is missing, wrong, or another's: one sentence, and nothing changes."""

import obstore
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headrace.lake.format import LakeError
from headrace.lake.storage.storage import storage_of
from tests.fakes.s3_proxy import Answer
from tests.fakes.s3_server import KEY, READER_KEY, READER_SECRET, SECRET, Bucket
from tests.pipeline.lakes import ends_of
from tests.pipeline.meddling import Meddling
from tests.pipeline.objects.stored import StoredLake


@pytest.fixture
def lake(server, bucket):
    made = StoredLake(server, bucket)
    made.publish(2)
    return made


def flags_of(bucket: Bucket, **more: str) -> list[str]:
    options = {**bucket.options, "max_retries": "1", **more}
    return [f"--storage-option={name}={value}" for name, value in options.items()]


@pytest.fixture
def refused(headrace, lake):
    """Run a command that fails, and return what it says."""

    def run(job, *arguments, code=1):
        http = lake.server.http_url.removeprefix("http://")
        place = [] if job == "compact" else ["--http", http]
        done = headrace("pipeline", job, *arguments, *place)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1, done.stderr
        assert SECRET not in done.stderr
        return done.stderr.removeprefix("headrace: ").rstrip()

    return run


@pytest.mark.parametrize("job", ["export", "compact", "audit"])
def test_a_bucket_that_does_not_exist(lake, refused, job):
    said = refused(job, "--lake", "s3://no-such-bucket/lake", *flags_of(lake.bucket))
    assert said.startswith("s3://no-such-bucket/lake")
    assert said.endswith(
        " is in a bucket that does not exist: create the bucket, or correct the address"
    )


def test_credentials_that_are_wrong(lake, refused):
    flags = flags_of(lake.bucket, AWS_SECRET_ACCESS_KEY="wrong")
    assert refused("export", "--lake", lake.bucket.url, *flags) == (
        f"{lake.bucket.url} refuses the credentials (403 SignatureDoesNotMatch): correct the keys, or the "
        "profile"
    )
    flags = flags_of(lake.bucket, AWS_ACCESS_KEY_ID="nobody")
    assert "(403 InvalidAccessKeyId)" in refused("compact", "--lake", lake.bucket.url, *flags)


def test_credentials_that_may_only_read(lake):
    """They are enough for jobs that only read."""
    reader = lake.bucket.options
    reader |= {"AWS_ACCESS_KEY_ID": READER_KEY, "AWS_SECRET_ACCESS_KEY": READER_SECRET}
    with pytest.raises(LakeError, match=r"does not allow this [(]403 AccessDenied[)]: use cred"):
        lake.export(storage_options=reader)
    assert lake.paths() == []
    lake.export()
    assert not lake.audit(storage_options=reader).lost
    lake.publish(1)
    with pytest.raises(LakeError, match=r"does not allow this [(]403 AccessDenied[)]: use cred"):
        lake.export(storage_options=reader)
    assert len(lake.rows) == 4


def test_no_credentials_at_all(lake, refused):
    flags = [one for one in flags_of(lake.bucket) if "KEY" not in one]
    said = refused("compact", "--lake", lake.bucket.url, *flags)
    assert "needs credentials: give keys as options or in the environment" in said


def test_no_server_at_the_endpoint(lake, refused):
    flags = flags_of(lake.bucket, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert refused("compact", "--lake", lake.bucket.url, *flags) == (
        f"{lake.bucket.url} cannot be reached, because nothing listens at 127.0.0.1:1: start it, or correct "
        "the endpoint"
    )


def test_a_clock_that_is_wrong(lake, s3_proxy, refused):
    s3_proxy.fail(Answer(403, "RequestTimeTooSkewed"), times=1000)
    assert refused(
        "compact", "--lake", lake.bucket.url, *flags_of(lake.bucket.through(s3_proxy))
    ) == (
        f"{lake.bucket.url} cannot be used, because the clock of this machine is wrong (403 "
        "RequestTimeTooSkewed): set it"
    )


def test_options_that_do_not_exist_or_have_no_value(lake, refused):
    where = ("compact", "--lake", lake.bucket.url)
    said = refused(*where, *flags_of(lake.bucket, AWS_REGON="x"))
    assert "has no option" in said and "AWS_REGON" in said.upper()
    said = refused(*where, "--storage-option", "AWS_REGION", code=2)
    assert "pipeline.storage_options must be a table of texts" in said
    assert "max_retries is 'x': give a number" in refused(
        *where, *flags_of(lake.bucket, max_retries="x")
    )


def test_a_table_of_others_stays_as_it_is(lake, refused):
    options = {**lake.bucket.options, "AWS_ALLOW_HTTP": "true"}
    write_deltalake(lake.bucket.url, pa.table({"n": [1]}), storage_options=options)
    before = lake.paths()
    for job in ("export", "compact"):
        said = refused(job, "--lake", lake.bucket.url, *flags_of(lake.bucket))
        assert said == (
            f"{lake.bucket.url} holds something else than a lake of Headrace (a Delta table of others): "
            "name a new or an empty directory"
        )
    assert lake.paths() == before


@pytest.mark.parametrize("job", ["export", "compact", "audit"])
def test_objects_of_others_stay_as_they_are(lake, refused, job):
    obstore.put(lake.objects, "photos/1.jpg", b"")
    said = refused(job, "--lake", lake.bucket.url, *flags_of(lake.bucket))
    assert "holds something else than a lake of Headrace (photos)" in said
    assert lake.paths() == ["photos/1.jpg"]


def test_a_place_for_a_table_that_is_taken(lake):
    lake.export()
    into = f"s3://{lake.bucket.name}/rows"
    storage_of(into, lake.bucket.options).create("notes.txt", b"")
    for job, given in (("dedupe", {"payload": True}), ("aggregate", {"reducer": "count"})):
        with pytest.raises(LakeError, match=r"holds something else than .* [(]notes.txt[)]"):
            lake.run(job, lake.bucket.url, into, **given)
        for inside in (lake.bucket.url, f"{lake.bucket.url}/rows"):
            with pytest.raises(LakeError, match=r"name (another address|a new or an empty)"):
                lake.run(job, lake.bucket.url, inside, **given)
    lake.check()


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(lake, s3_proxy):
    s3_proxy.ignore_conditions(KEY, SECRET)
    with pytest.raises(LakeError) as refused:
        lake.export(through=s3_proxy)
    assert str(refused.value) == (
        f"{lake.bucket.url} is in a store that replaces objects although it is told not to, so two jobs "
        "could overwrite each other's commits: use a store with conditional writes (If-None-Match)"
    )
    assert lake.paths() == []
    # Also later, when a lake has moved to such a store.
    lake.export()
    before = sorted(lake.paths())
    lake.publish(1)
    with pytest.raises(LakeError, match="replaces objects although it is told not to"):
        lake.export(through=s3_proxy)
    assert sorted(lake.paths()) == before


@pytest.mark.parametrize("job", ["compact", "replay", "dedupe", "aggregate"])
def test_every_job_that_writes_refuses_a_store_that_ignores_conditions(lake, s3_proxy, job):
    lake.export(part_bytes=100)
    s3_proxy.ignore_conditions(KEY, SECRET)
    bucket = storage_of(f"s3://{lake.bucket.name}", lake.bucket.options)
    before = sorted(one.path for one in bucket.list())
    others, url = f"s3://{lake.bucket.name}", lake.server.http_url
    jobs: dict[str, tuple[list[str], dict[str, object]]] = {
        "compact": ([], {}),
        "replay": ([lake.a, f"{lake.prefix}-again"], {"url": url}),
        "dedupe": ([f"{others}/rows"], {"payload": True}),
        "aggregate": ([f"{others}/states"], {"reducer": "count"}),
    }
    arguments, given = jobs[job]
    with pytest.raises(LakeError, match="replaces objects although it is told not to"):
        lake.run(job, lake.bucket.url, *arguments, **given, through=s3_proxy)
    assert sorted(one.path for one in bucket.list()) == before
    assert f"{lake.prefix}-again" not in ends_of(lake.server)


def test_a_store_that_does_not_know_conditions_is_refused(lake, s3_proxy):
    s3_proxy.fail(Answer(501, "NotImplemented"), "PUT ", times=1000)
    with pytest.raises(
        LakeError, match=r"lacks something [(]501 NotImplemented[)]: use one with cond"
    ):
        lake.export(through=s3_proxy)


def test_a_half_written_upload_is_nothing(lake):
    """A job that was killed leaves parts that nobody sees, and that the store may keep."""
    lake.export()
    writer = obstore.open_writer(lake.objects, "date=2026-01-01/part.parquet", buffer_size=5 << 20)
    writer.write(bytes(11 << 20))
    lake.publish(1)
    lake.export()
    assert not any("2026-01-01" in path for path in lake.paths())
    lake.check()


# Another writer


def test_rows_of_another_writer_are_left_alone_and_named(lake):
    lake.export()
    rows = lake.table.to_pyarrow_table().slice(0, 2)
    options = {**lake.bucket.options, "AWS_ALLOW_HTTP": "true"}
    write_deltalake(lake.bucket.url, rows, mode="append", storage_options=options)
    lake.publish(1)
    assert lake.export().records == 2  # exports go on: their own batches are what they were
    (foreign,) = (path for path in lake.paths() if "/part-" in path)
    (finding,) = lake.audit().all_findings()
    assert (finding.kind, finding.file) == ("damaged", foreign)
    others = f"s3://{lake.bucket.name}"
    jobs: dict[str, tuple[list[str], dict[str, object]]] = {
        "compact": ([], {}),
        "replay": ([lake.a, "x"], {"url": lake.server.http_url}),
        "dedupe": ([f"{others}/rows"], {"payload": True}),
        "aggregate": ([f"{others}/states"], {"reducer": "count"}),
    }
    for job, (arguments, given) in jobs.items():
        with pytest.raises(LakeError, match=f"{foreign} does not say which records it has"):
            lake.run(job, lake.bucket.url, *arguments, **given)


def test_another_writer_between_our_steps_only_delays_a_commit(lake):
    lake.export()
    lake.publish(1)
    before = lake.table.version()

    def change():
        lake.table.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})

    assert lake.export(points=Meddling(noted=change)).records == 2
    assert lake.table.version() == before + 2
    lake.check()


def test_a_vacuum_of_others_deletes_nothing_that_counts(lake):
    lake.export(batch_bytes=100)
    lake.compact()
    lake.table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    lake.publish(1)
    lake.export()
    lake.check()


def test_a_batch_that_a_vacuum_has_deleted_before_its_commit_is_not_believed(lake):
    """Nobody should vacuum with a retention of no time. The cursor does not pass such a batch."""
    lake.export()
    lake.publish(1)

    def vacuum():
        lake.table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)

    with pytest.raises(LakeError, match=r"is missing, but the table names it: restore it"):
        lake.export(points=Meddling(noted=vacuum))
    assert lake.audit().lost


def test_plain_files_need_a_directory(lake):
    with pytest.raises(LakeError, match=r"director"):
        lake.export(format="parquet")
    assert lake.paths() == []
