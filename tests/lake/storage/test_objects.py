"""Object storage when requests fail, answers are lost, and addresses or credentials are wrong."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.lake.files.reading import check_file
from headrace.lake.format import LakeError
from headrace.lake.storage import objects
from headrace.lake.storage.options import _read_profile as read_profile
from headrace.lake.storage.storage import HIDDEN, storage_of
from headrace.testing import hold_port, wait_until
from tests.fakes.s3_proxy import CUT_BODY, LOSE_ANSWER, LOSE_REQUEST, Answer
from tests.fakes.s3_server import (
    KEY,
    READER_KEY,
    READER_SECRET,
    SECRET,
    S3Server,
    forget_credentials,
)
from tests.lake.rows import rows, write

IMPATIENT = {"max_retries": "2"}
SLOW_DOWN = Answer(503, "SlowDown")


@pytest.fixture
def storage(bucket, s3_proxy, monkeypatch):
    monkeypatch.setattr(objects, "BACKOFF_S", 0.01)
    return storage_of(bucket.url, bucket.through(s3_proxy).options)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)  # stores refuse smaller ones


def kept(storage, path, content):
    file = storage.new_file(path)
    try:
        file.content.write(content)
        return file.keep(path)
    finally:
        file.discard()


def requests(proxy):
    return [one.line.partition(" ")[0] for one in proxy.seen]


# Unknown outcomes


def test_a_file_counts_as_created_if_only_the_answer_was_lost(storage, s3_proxy):
    s3_proxy.fail(LOSE_ANSWER, "PUT")
    assert storage.create("commit", b"ours")
    assert [one.status for one in s3_proxy.seen if one.line.startswith("PUT")] == [None, 412]
    assert storage.read("commit") == b"ours"


def test_a_file_is_created_after_a_request_was_lost(storage, s3_proxy):
    s3_proxy.fail(LOSE_REQUEST, "PUT", times=2)
    assert storage.create("commit", b"ours")
    assert not storage.create("commit", b"theirs")


def test_another_file_is_not_ours_although_an_answer_was_lost(storage, bucket, s3_proxy):
    other = storage_of(bucket.url, bucket.options)
    s3_proxy.fail(LOSE_REQUEST, "PUT")
    with s3_proxy.hold("PUT") as held, ThreadPoolExecutor(1) as thread:
        created = thread.submit(storage.create, "commit", b"ours")
        held.wait()
        assert other.create("commit", b"theirs")
        held.released.set()
        assert created.result() is False
    assert storage.read("commit") == b"theirs"


def test_a_put_that_is_carried_out_after_its_timeout_counts_once(storage, bucket, s3_proxy):
    impatient = storage_of(bucket.url, {**bucket.through(s3_proxy).options, "timeout": "500ms"})
    with (
        s3_proxy.hold("PUT") as first,
        s3_proxy.hold("PUT") as second,
        ThreadPoolExecutor(1) as thread,
    ):
        created = thread.submit(impatient.create, "commit", b"ours")
        second.wait()  # the first attempt was given up, and waits in the proxy
        first.released.set()
        wait_until(lambda: storage.has("commit"), what="the first attempt")
        second.released.set()
        assert created.result() is True
    assert storage.read("commit") == b"ours"


def test_two_puts_at_once_are_not_taken_for_a_file_that_is_there(storage, s3_proxy):
    s3_proxy.fail(Answer(409, "ConditionalRequestConflict"), "PUT", times=2)
    assert storage.create("commit", b"ours")


@pytest.mark.parametrize("fault", [SLOW_DOWN, Answer(500), Answer(429, "SlowDown"), LOSE_ANSWER])
def test_every_request_is_tried_again(storage, s3_proxy, fault):
    kept(storage, "data/file", b"content")

    def again(use):
        s3_proxy.forget()
        s3_proxy.fail(fault, times=3)
        found = use()
        assert len(s3_proxy.seen) > 3
        return found

    assert again(lambda: storage.read("data/file")) == b"content"
    assert again(lambda: storage.size("data/file")) == 7
    assert again(lambda: storage.open("data/file").read()) == b"content"
    assert again(storage.exists)
    assert again(storage.top) == {"data"}
    assert again(lambda: storage.create("commit", b"ours"))
    assert again(lambda: storage.delete(["data/file"])) is None
    assert {one.path for one in again(lambda: list(storage.list()))} == {"commit"}
    assert again(storage.prepare) is None


def test_a_download_that_is_cut_continues(storage, s3_proxy, small_parts):
    content = os.urandom(10 << 20)
    s3_proxy.fail(CUT_BODY, "GET", times=2)
    kept(storage, "file", content)
    s3_proxy.fail(CUT_BODY, "GET", times=2)
    assert storage.read("file") == content
    with storage.open("file") as file:
        s3_proxy.fail(CUT_BODY, "GET", times=2)
        assert file.read() == content


# Uploads


def test_a_large_file_is_sent_in_parts_and_read_back(storage, s3_proxy, small_parts):
    content = os.urandom((10 << 20) + 5)
    assert kept(storage, "file", content) == len(content)
    assert sorted(requests(s3_proxy)) == ["GET", "POST", "POST", "PUT", "PUT", "PUT"]
    assert requests(s3_proxy)[-1] == "GET"
    assert storage.read("file") == content


def test_a_lake_file_is_fetched_once_to_compare_it(storage, s3_proxy):
    (file,) = write(storage, rows("a", [b"x" * 600]))
    assert requests(s3_proxy) == ["PUT", "GET"]
    check_file(storage.file(file.path), file.ranges)


@pytest.mark.parametrize("lost", ["PUT .*partNumber=2", "POST .*uploads", "POST .*uploadId"])
def test_a_large_file_is_kept_although_an_answer_was_lost(storage, s3_proxy, small_parts, lost):
    content = os.urandom(10 << 20)
    s3_proxy.fail(LOSE_ANSWER, lost)
    assert kept(storage, "file", content) == len(content)
    assert storage.read("file") == content


def test_a_large_file_is_kept_if_its_upload_was_completed_and_is_gone(
    storage, s3_proxy, small_parts
):
    s3_proxy.fail(LOSE_ANSWER, "POST .*uploadId")
    s3_proxy.fail(Answer(404, "NoSuchUpload"), "POST .*uploadId")
    assert kept(storage, "file", bytes(10 << 20)) == 10 << 20


def test_a_failed_upload_is_aborted_and_never_visible(storage, s3_proxy, small_parts):
    s3_proxy.fail(Answer(403, "AccessDenied"), "PUT .*partNumber=2")
    with pytest.raises(LakeError, match=r"lake/file does not allow this \(403 AccessDenied\)"):
        kept(storage, "file", bytes(10 << 20))
    assert any(one.line.startswith("DELETE") and one.status == 204 for one in s3_proxy.seen)
    assert not storage.exists()


def test_a_file_whose_bytes_changed_on_the_way_is_refused(storage, bucket, s3_proxy, small_parts):
    other = storage_of(bucket.url, bucket.options)
    file = storage.new_file("file")
    file.content.write(bytes(10 << 20))
    with s3_proxy.hold("GET") as held, ThreadPoolExecutor(1) as thread:
        done = thread.submit(file.keep, "file")
        held.wait()
        other.delete(["file"])
        kept(other, "file", b"\1" * (10 << 20))
        held.released.set()
        with pytest.raises(LakeError, match="does not have the bytes that were sent"):
            done.result()
    file.discard()


def test_a_small_file_does_not_replace_another(storage):
    kept(storage, "file", b"first")
    with pytest.raises(LakeError, match="lake/file exists already"):
        kept(storage, "file", b"second")
    assert storage.read("file") == b"first"


def test_a_new_file_has_no_name_on_the_disk_of_a_task(storage, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = storage.new_file("file")
    file.content.write(b"content")
    file.content.flush()
    assert list(tmp_path.iterdir()) == []
    file.discard()


# Reading


def test_a_lake_may_be_a_whole_bucket(bucket):
    storage = storage_of(f"s3://{bucket.name}", bucket.options)
    storage.prepare()
    assert not storage.exists()
    assert kept(storage, "data/file", b"content") == 7
    assert storage.create("file", b"")
    assert storage.top() - {HIDDEN} == {"data", "file"}  # SeaweedFS shows empty directories
    assert {one.path for one in storage.list()} == {"data/file", "file"}
    inside = storage_of(f"s3://{bucket.name}/data", bucket.options)
    assert inside.read("file") == b"content"
    with pytest.raises(LakeError, match="one is inside the other"):
        storage.check_apart(inside)


def test_a_parquet_file_needs_one_request_for_its_footer_and_one_for_a_row_group(storage, s3_proxy):
    rows = pa.table({"offset": range(100_000), "payload": [os.urandom(60) for _ in range(100_000)]})
    file = storage.new_file("a.parquet")
    pq.write_table(rows, file.content, row_group_size=25_000)
    file.keep("a.parquet")
    s3_proxy.forget()
    found = pq.ParquetFile(storage.open("a.parquet"))
    assert requests(s3_proxy) == ["GET"]
    for number in range(found.num_row_groups - 1):
        found.read_row_group(number)
    assert requests(s3_proxy) == ["GET"] * found.num_row_groups
    found.read_row_group(found.num_row_groups - 1, columns=["offset"])
    assert len(requests(s3_proxy)) == found.num_row_groups + 1


def test_a_small_file_needs_one_request(storage, s3_proxy):
    kept(storage, "file", bytes(objects.TAIL_BYTES))
    s3_proxy.forget()
    with storage.open("file") as file:
        assert len(file.read()) == file.size() == objects.TAIL_BYTES
    assert requests(s3_proxy) == ["GET"]


# A store, an address or credentials that cannot be used


def test_a_store_that_ignores_conditions_is_refused(bucket, s3_proxy):
    storage = storage_of(bucket.url, bucket.through(s3_proxy).options)
    s3_proxy.fail(Answer(200), "PUT", times=2)
    with pytest.raises(LakeError, match=r"replaces objects although .*If-None-Match"):
        storage.prepare()
    assert not storage.exists()


def test_a_missing_bucket_is_named(bucket):
    storage = storage_of("s3://no-such-bucket/lake", bucket.options)
    sentence = "^s3://no-such-bucket/lake.* is in a bucket that does not exist: create the bucket"
    for use in (storage.prepare, storage.exists, storage.top, lambda: storage.read("file")):
        with pytest.raises(LakeError, match=sentence):
            use()
    with pytest.raises(LakeError, match=sentence):
        storage.create("file", b"content")
    with pytest.raises(LakeError, match=sentence):
        storage.delete(["file"])
    with pytest.raises(LakeError, match=sentence):
        storage.open("file")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "wrong-key"}, "InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials_are_refused_in_a_sentence_without_them(bucket, wrong, reason):
    storage = storage_of(bucket.url, {**bucket.options, **wrong})
    sentence = rf"refuses the credentials \(403 {reason}\): correct the keys, or the profile$"
    for use in (storage.prepare, storage.exists, lambda: storage.read("file")):
        with pytest.raises(LakeError, match=sentence) as raised:
            use()
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__
        assert not any(secret in str(raised.value) for secret in (SECRET, *wrong.values()))
    assert not any(secret in repr(storage) for secret in (SECRET, *wrong.values()))


def test_credentials_that_may_only_read_cannot_prepare_a_lake(bucket):
    storage_of(bucket.url, bucket.options).create("file", b"content")
    keys = {"AWS_ACCESS_KEY_ID": READER_KEY, "AWS_SECRET_ACCESS_KEY": READER_SECRET}
    storage = storage_of(bucket.url, {**bucket.options, **keys})
    assert storage.read("file") == b"content"
    with pytest.raises(
        LakeError, match=r"does not allow this \(403 AccessDenied\): use credentials"
    ):
        storage.prepare()


def test_a_machine_without_credentials_is_told_so(bucket):
    options = {name: value for name, value in bucket.options.items() if "KEY" not in name}
    with pytest.raises(LakeError, match="needs credentials: give keys as options"):
        storage_of(bucket.url, {**options, **IMPATIENT}).prepare()


def test_credentials_of_a_profile_are_asked_for_again(bucket, tmp_path, monkeypatch):
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(objects, "CREDENTIALS_S_MAX", 0)  # every request asks
    keys = f"[lake]\naws_access_key_id = {KEY}\naws_secret_access_key = "
    file.write_text(keys + SECRET)
    options = {"AWS_PROFILE": "lake", "AWS_ENDPOINT_URL": bucket.endpoint}
    storage = storage_of(bucket.url, options)
    assert storage.create("file", b"content")
    for content, sentence in [
        (keys + "wrong", "refuses the credentials"),
        ("[lake]\n", "lake/file cannot be used: the AWS profile 'lake' has lost its credentials"),
    ]:
        file.write_text(content)
        read_profile.cache_clear()
        with pytest.raises(LakeError, match=sentence):
            storage.read("file")
    file.write_text(keys + SECRET)
    read_profile.cache_clear()
    assert storage.read("file") == b"content"


def test_a_store_that_nobody_started_is_named(bucket):
    with hold_port() as held:
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        options = {**bucket.options, "AWS_ENDPOINT_URL": f"http://{endpoint}", **IMPATIENT}
        with pytest.raises(LakeError, match=f"because nothing listens at {endpoint}: start it"):
            storage_of(bucket.url, options).prepare()


def test_a_host_that_does_not_exist_is_named(bucket):
    options = {**bucket.options, "AWS_ENDPOINT_URL": "https://store.invalid", **IMPATIENT}
    with pytest.raises(LakeError, match=r"because no host is called store\.invalid: correct"):
        storage_of(bucket.url, options).prepare()


def test_a_file_of_metadata_is_not_taken_for_missing_credentials(bucket, s3_proxy):
    storage = storage_of(bucket.url, {**bucket.through(s3_proxy).options, **IMPATIENT})
    s3_proxy.fail(LOSE_ANSWER, times=9)
    with pytest.raises(LakeError, match="lost the connection"):
        storage.read("metadata/v1.metadata.json")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (SLOW_DOWN, r"gets too many requests \(503 SlowDown\): run fewer jobs at once"),
        (Answer(500), r"is out of order \(500 InternalError\): run this again when"),
        (Answer(403, "RequestTimeTooSkewed"), r".* clock of this machine is wrong \(403"),
        (Answer(400, "Surprise"), r"cannot be used \(400 Surprise\): check the address"),
        (Answer(301, "PermanentRedirect"), r"is in another region.*: give the option AWS_REGION"),
        (LOSE_ANSWER, r"lost the connection again and again: see whether 127\.0\.0\.1"),
    ],
)
def test_a_store_that_keeps_failing_is_described(bucket, s3_proxy, fault, sentence):
    storage = storage_of(bucket.url, {**bucket.through(s3_proxy).options, **IMPATIENT})
    for use in (storage.exists, lambda: storage.read("file"), lambda: storage.create("file", b"")):
        s3_proxy.forget()
        s3_proxy.fail(fault, times=100)
        with pytest.raises(LakeError, match=rf"^{storage.url}(/file)? {sentence}") as raised:
            use()
        assert "\n" not in str(raised.value)


def test_a_store_that_does_not_answer_is_given_up(bucket, s3_proxy):
    options = {**bucket.through(s3_proxy).options, "timeout": "200ms", "max_retries": "0"}
    storage = storage_of(bucket.url, options)
    for use in (lambda: storage.read("file"), lambda: storage.create("file", b"")):
        with (
            s3_proxy.hold(),
            pytest.raises(LakeError, match="lake/file did not answer in time: see"),
        ):
            use()


def test_work_goes_on_when_a_killed_store_is_back(tmp_path, monkeypatch):
    forget_credentials(monkeypatch)
    with S3Server(tmp_path / "s3") as server:
        bucket = server.bucket()
        storage = storage_of(bucket.url, bucket.options)
        kept(storage, "data/file", b"content")
        server.kill()
        with ThreadPoolExecutor(2) as threads:
            created = threads.submit(storage.create, "commit", b"ours")
            found = threads.submit(storage.read, "data/file")
            server.start()
            assert created.result() is True
            assert found.result() == b"content"


# Libraries of tables


def test_a_table_survives_a_store_that_is_busy_for_a_while(storage, s3_proxy):
    rows = pa.table({"number": [1]})
    s3_proxy.fail(SLOW_DOWN, times=5)
    write_deltalake(storage.address, rows, storage_options=dict(storage.table_options))
    s3_proxy.fail(Answer(500), times=5)
    table = DeltaTable(storage.address, storage_options=dict(storage.table_options))
    assert table.version() == 0


def test_options_count_before_the_environment(bucket, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "https://store.invalid")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "environment-secret")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    storage = storage_of(bucket.url, bucket.options)
    storage.prepare()
    rows = pa.table({"number": [1]})
    write_deltalake(storage.address, rows, storage_options=dict(storage.table_options))
    assert storage.has("_delta_log")


def test_the_environment_is_enough(bucket, monkeypatch):
    for name, value in bucket.options.items():
        monkeypatch.setenv(name, value)
    storage = storage_of(bucket.url)
    storage.prepare()
    rows = pa.table({"number": [1]})
    write_deltalake(storage.address, rows, storage_options=dict(storage.table_options))
    assert storage.has("_delta_log")


# Packages that are missing


def test_a_missing_package_is_named():
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from headrace.lake.storage.storage import storage_of\n"
        "from headrace.lake.format import LakeError\n"
        "for address in ('s3://bucket/lake', 'gs://bucket/lake'):\n"
        "    try: storage_of(address)\n"
        "    except LakeError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path("/")
    )
    assert done.stdout.splitlines() == [
        "s3://bucket/lake needs: pip install 'headrace[s3]' (obstore is missing)",
        "gs://bucket/lake needs: pip install 'headrace[objects]' (obstore is missing)",
    ]
