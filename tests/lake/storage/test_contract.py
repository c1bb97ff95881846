"""The contract of a storage, for a directory, for object storage on a real S3 server, and for a fake HDFS."""

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.lake.format import LakeError
from headrace.lake.storage.storage import HIDDEN, Storage, StoredFile, storage_of

ODD_NAME = "topic=a%2Fb/ü x+y~(1).parquet"


@pytest.fixture(params=["directory", "objects", "hdfs"])
def place(request: pytest.FixtureRequest) -> Callable[[str], Storage]:
    """Return a function that returns the storage at a path of an empty directory, bucket or HDFS."""
    if request.param == "directory":
        root = request.getfixturevalue("tmp_path")
        return lambda path: storage_of(root / path)
    if request.param == "hdfs":
        namenode = request.getfixturevalue("namenode")
        return lambda path: storage_of(f"{namenode.url}/{path}")
    bucket = request.getfixturevalue("bucket")
    return lambda path: storage_of(f"s3://{bucket.name}/{path}", bucket.options)


@pytest.fixture
def storage(place: Callable[[str], Storage]) -> Storage:
    made = place("lake")
    made.prepare()
    return made


def kept(storage: Storage, path: str, content: bytes) -> int:
    file = storage.new_file(path)
    file.content.write(content)
    return file.keep(path)


def paths(storage: Storage, prefix: str = "") -> set[str]:
    return {one.path for one in storage.list(prefix)}


def test_a_created_file_has_its_content(storage):
    assert storage.create("_headrace/manifest-1", b"content")
    assert storage.read("_headrace/manifest-1") == b"content"
    assert storage.size("_headrace/manifest-1") == 7
    assert storage.create("empty", b"")
    assert storage.read("empty") == b""


def test_a_name_is_given_once(storage):
    assert storage.create("a/file", b"content")
    assert not storage.create("a/file", b"other")
    assert storage.read("a/file") == b"content"
    assert storage.create("a/file", b"content")  # an attempt may be repeated


def test_of_many_creators_of_a_name_one_succeeds(storage):
    everybody = threading.Barrier(8)

    def create(number: int) -> bool:
        everybody.wait()
        return storage.create("commit", b"%d" % number)

    with ThreadPoolExecutor(8) as threads:
        succeeded = list(threads.map(create, range(8)))
    assert succeeded.count(True) == 1
    assert storage.read("commit") == b"%d" % succeeded.index(True)


@pytest.mark.parametrize("use", ["read", "open", "size"])
@pytest.mark.parametrize("path", ["missing", "a/fil", "a/file2", "b/file"])
def test_a_missing_file_is_not_found(storage, use, path):
    storage.create("a/file", b"content")
    with pytest.raises(FileNotFoundError, match=path):
        getattr(storage, use)(path)


def test_a_new_file_has_a_name_only_when_it_is_kept(storage):
    file = storage.new_file("date=1/a.parquet")
    file.content.write(b"some ")
    file.content.write(b"bytes")
    assert "date=1/b.parquet" not in paths(storage)
    file.content.seek(0)
    assert file.content.read() == b"some bytes"
    assert file.keep("date=1/b.parquet") == 10
    assert paths(storage) == {"date=1/b.parquet"}
    assert storage.read("date=1/b.parquet") == b"some bytes"
    file.discard()
    assert storage.has("date=1/b.parquet")


def test_a_discarded_file_leaves_nothing(storage):
    file = storage.new_file("date=1/a.parquet")
    file.content.write(b"some bytes")
    file.discard()
    file.discard()
    assert paths(storage) == set()


def test_a_file_is_read_at_any_position(storage):
    content = bytes(range(256)) * 8000
    assert kept(storage, "file", content) == len(content)
    with storage.open("file") as file:
        assert file.size() == len(content)
        for start, size in [
            (5, 10),
            (1_500_000, 400_000),
            (0, 3),
            (len(content) - 2, 10),
            (7, 1_600_000),
        ]:
            file.seek(start)
            assert file.read(size) == content[start : start + size]
        file.seek(len(content) + 5)
        assert file.read(1) == b""
        file.seek(9)
        assert file.read() == content[9:]


def test_an_empty_file_can_be_opened(storage):
    assert kept(storage, "file", b"") == 0
    with storage.open("file") as file:
        assert (file.size(), file.read()) == (0, b"")


def test_a_parquet_file_is_written_and_read_by_row_group(storage):
    rows = pa.table({"offset": range(100_000), "payload": [b"x" * 20] * 100_000})
    file = storage.new_file(ODD_NAME)
    with pq.ParquetWriter(file.content, rows.schema) as writer:
        writer.write_table(rows, row_group_size=10_000)
    name = ODD_NAME.replace("(1)", "(2)")
    file.keep(name)
    with storage.file(name).open() as source:
        found = pq.ParquetFile(source)
        assert found.read_row_group(3, columns=["offset"])["offset"][0].as_py() == 30_000
        assert found.read() == rows


def test_a_listing_names_files_below_a_prefix(storage):
    before_s = time.time() - 2  # clocks of file systems and stores are coarse
    names = {"a/1", "a/12", "a/2", "ab/1", ODD_NAME, "a/deep/er/file"}
    for name in names:
        storage.create(name, b"12345")
    assert paths(storage) == names
    assert paths(storage, "a/") == {"a/1", "a/12", "a/2", "a/deep/er/file"}
    assert paths(storage, "a/1") == {"a/1", "a/12"}
    assert paths(storage, "a") == names - {ODD_NAME}
    assert paths(storage, "topic=") == {ODD_NAME}
    assert paths(storage, "nothing/") == set()
    (found,) = (one for one in storage.list() if one.path == "ab/1")
    assert isinstance(found, StoredFile)
    assert before_s < found.modified_s < time.time() + 2
    assert storage.top() - {HIDDEN} == {"a", "ab", ODD_NAME.partition("/")[0]}


def test_a_listing_of_many_files_is_complete(storage):
    names = {f"many/{number:05}" for number in range(1100)}
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda name: storage.create(name, b""), names))
    assert paths(storage, "many/") == names
    storage.delete(names)
    assert paths(storage) == set()


def test_tasks_may_be_the_first_in_a_directory_at_the_same_time(storage):
    with ThreadPoolExecutor(8) as threads:
        for number in range(10):
            names = [f"day{number}/part/{task}" for task in range(8)]
            assert all(threads.map(lambda name: storage.create(name, b""), names))


def test_files_and_directories_are_there_or_not(storage):
    storage.create("_delta_log/00.json", b"{}")
    assert storage.has("_delta_log")
    assert storage.has("_delta_log/00.json")
    for path in ("_delta", "_delta_log/00", "metadata"):
        assert not storage.has(path)


def test_a_place_exists_when_something_is_there(place):
    assert not place("lake").exists()
    place("lake").create("file", b"")
    assert place("lake").exists()
    assert not place("lak").exists()


def test_preparing_a_place_leaves_nothing_that_counts(place):
    storage = place("new/lake")
    storage.prepare()
    storage.prepare()
    assert storage.top() <= {HIDDEN}
    assert paths(storage) == set()


def test_deleting_a_missing_file_is_no_error(storage):
    for name in ("a/1", "a/2", ODD_NAME):
        storage.create(name, b"")
    storage.delete(["a/1", "missing", "missing/too", ODD_NAME])
    assert paths(storage) == {"a/2"}
    storage.delete(iter(["a/2", "a/2"]))
    storage.delete([])
    assert paths(storage) == set()


def test_a_place_can_be_sent_to_tasks(storage):
    assert storage.has("x") is False  # whatever a storage opens is open
    sent: Any = pickle.loads(pickle.dumps(storage))
    assert sent == storage
    assert hash(sent) == hash(storage)
    assert sent.create("file", b"content")
    assert pickle.loads(pickle.dumps(storage.file("file"))).size() == 7
    assert str(sent.file("file")) == f"{storage.address}/file"


def test_places_must_be_apart(place):
    lake = place("a/lake")
    for inside in ("a/lake", "a/lake/states", "a"):
        with pytest.raises(LakeError, match=r"name another"):
            lake.check_apart(place(inside))
    lake.check_apart(place("a/lake2"))
    lake.check_apart(place("b/lake"))


def test_a_table_is_written_with_the_options_of_its_place(storage):
    if storage.address.startswith("hdfs:"):
        pytest.skip("deltalake needs a real HDFS server, and there is none")
    for number in range(2):
        write_deltalake(
            storage.address,
            pa.table({"number": [number]}),
            mode="append",
            storage_options=dict(storage.table_options),
        )
    table = DeltaTable(storage.address, storage_options=dict(storage.table_options))
    assert table.version() == 1
    storage.sync(paths(storage))
    assert storage.has("_delta_log/00000000000000000001.json")


def test_a_lock_is_held_by_one_job_if_there_are_locks(storage):
    with storage.lock("export"):
        pass
    with storage.lock("export"):
        pass
