"""HDFS when requests fail and answers are lost: on a fake, because there is no server for the tests."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from headrace.lake.format import LakeError, Shape, StorageError
from headrace.lake.storage import hdfs
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import find_table, make_table, open_table
from headrace.testing import hold_port
from tests.fakes.hdfs import LOST, rpc_error
from tests.lake.rows import token
from tests.lake.test_table import merged, three_batches

AT_ONCE = {"dfs.client.failover.max.attempts": "0"}


@pytest.fixture
def storage(namenode):
    return storage_of(f"{namenode.url}/lake")


def paths(storage):
    return {one.path for one in storage.list()}


def kept(storage, content, path="date=1/a-1.parquet"):
    file = storage.new_file("date=1/a.parquet")
    try:
        file.content.write(content)
        return file.keep(path)
    finally:
        file.discard()


# Writes


def test_a_file_is_synced_before_it_has_its_name(storage, namenode):
    storage.create("commit", b"ours")
    assert namenode.asked == ["create", "write", "hsync", "close", "rename"]


@pytest.mark.parametrize("lost", [LOST, rpc_error("ipc.RetriableException"), TimeoutError("late")])
def test_a_file_counts_as_created_if_only_the_answer_was_lost(storage, namenode, lost):
    namenode.fail("rename", lost, after=True)
    assert storage.create("commit", b"ours")
    assert paths(storage) == {"commit"}


def test_a_rename_that_the_library_repeats_counts_once(storage, namenode):
    namenode.fail("rename", FileNotFoundError("rename source is not found."), after=True)
    assert storage.create("commit", b"ours")


@pytest.mark.parametrize("request_", ["create", "write", "hsync", "close", "rename"])
def test_a_file_that_is_not_created_leaves_nothing(storage, namenode, request_):
    namenode.fail(request_, LOST)
    with pytest.raises(StorageError, match="lost the connection"):
        storage.create("commit", b"ours")
    assert paths(storage) == set()
    assert storage.create("commit", b"ours")


def test_another_file_is_not_ours_although_an_answer_was_lost(storage, namenode):
    storage.create("commit", b"theirs")
    namenode.fail("rename", LOST)
    assert not storage.create("commit", b"ours")
    assert paths(storage) == {"commit"}
    assert storage.read("commit") == b"theirs"


def test_a_large_file_is_read_back_before_it_counts(storage, namenode):
    content = os.urandom(3 * hdfs.PIECE_BYTES + 5)
    assert kept(storage, content) == len(content)
    assert paths(storage) == {"date=1/a-1.parquet"}
    assert storage.read("date=1/a-1.parquet") == content
    assert namenode.asked.index("read") > namenode.asked.index("rename")
    namenode.fail("rename", LOST, after=True)
    assert kept(storage, content, "date=1/a-2.parquet") == len(content)


def test_a_file_that_has_other_bytes_does_not_count(storage, namenode, monkeypatch):
    rename = namenode.rename

    def damage(path, target, overwrite=False):
        rename(path, target, overwrite)
        (namenode.root / target[1:]).write_bytes(b"other bytes")

    monkeypatch.setattr(namenode, "rename", damage)
    with pytest.raises(LakeError, match=r"a-1\.parquet does not have the bytes that were sent"):
        kept(storage, b"some bytes")


def test_a_large_file_whose_name_is_taken_is_refused(storage):
    kept(storage, b"first")
    with pytest.raises(LakeError, match=r"a-1\.parquet cannot be written to: File exists: run"):
        kept(storage, b"second")


def test_leftovers_of_a_killed_job_have_names_that_are_swept(storage, namenode):
    namenode.fail("write", SystemExit())
    with pytest.raises(SystemExit):
        kept(storage, b"some bytes")
    assert paths(storage) == {"date=1/a.parquet"}


def test_a_store_that_replaces_files_is_refused(storage, namenode, monkeypatch):
    rename = namenode.rename
    monkeypatch.setattr(namenode, "rename", lambda path, target: rename(path, target, True))
    with pytest.raises(LakeError, match="replaces files although it is told not to"):
        storage.prepare()


# Tables


def payloads(lake):
    files = (lake._storage.open(path) for path in lake.files())
    return sorted(one for file in files for one in pq.read_table(file)["payload"].to_pylist())


def test_an_iceberg_table_of_a_catalogue_has_all_its_files_in_hdfs(namenode, tmp_path):
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    storage = storage_of(f"{namenode.url}/lake", {}, catalog)
    lake = make_table(storage, "iceberg", Shape())
    paths_of_batches = three_batches(lake)
    namenode.fail("rename", LOST, after=True)
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths_of_batches[:2])
    assert payloads(open_table(storage)) == [b"0", b"1", b"2"]
    assert lake.sweep(-5, dry_run=False) >= 2
    assert payloads(open_table(storage)) == [b"0", b"1", b"2"]
    assert lake.files().keys() <= paths(storage)


def test_an_iceberg_table_without_a_catalogue_is_refused(storage):
    with pytest.raises(LakeError, match="needs a catalogue for an Iceberg table: give one"):
        find_table(storage, "iceberg", Shape())


# Sentences


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (rpc_error("hdfs.server.namenode.SafeModeException"), "cannot be written to, because its"),
        (rpc_error("ipc.StandbyException"), "has no active NameNode: name the nameservice"),
        (rpc_error("security.AccessControlException"), "does not allow this: give the user"),
        (rpc_error("hdfs.protocol.DSQuotaExceededException"), "has no room left in its quota"),
        (RuntimeError('SASLError("no ticket")'), "refuses the credentials: get a Kerberos ticket"),
        (RuntimeError("NoSASLMechanism"), "refuses the credentials: get a Kerberos ticket"),
        (LOST, "lost the connection: see whether HDFS works"),
        (NotImplementedError("hsync is not supported"), "cannot be used: hsync is not supported$"),
        (rpc_error("X", "odd"), r'cannot be used: RPCError\("org.apache.hadoop.X", "odd$'),
    ],
)
def test_a_failure_is_one_sentence(storage, namenode, error, sentence):
    namenode.fail("create", error)
    with pytest.raises(StorageError, match=rf"^{storage.url}/file\.[0-9a-f]+\.tmp {sentence}"):
        storage.create("file", b"")
    namenode.fail("read", error)
    with pytest.raises(StorageError, match=rf"^{storage.url}/file {sentence}") as raised:
        storage.read("file")
    assert "\n" not in str(raised.value)


def test_a_file_in_place_of_the_directory_is_refused(storage, namenode):
    (namenode.root / "lake").write_bytes(b"")
    with pytest.raises(LakeError, match="lake is not a directory: name a new or an empty one"):
        storage.exists()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("hdfs://", "does not begin with a NameNode: give hdfs://HOST:PORT/PATH"),
        ("hdfs://user:secret@node:8020/lake", "does not begin with a NameNode"),
        ("hdfs://node:8020/a b", "has ' ' in it"),
        ("hdfs://node:8020/../lake", r"has '\.\.' in it"),
        (
            "hdfs://unknown/lake",
            "unknown/lake names neither HOST:PORT of a NameNode nor a configur",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address, sentence):
    with pytest.raises(LakeError, match=sentence) as raised:
        storage_of(address, {})
    assert "secret" not in str(raised.value)


def test_an_address_has_one_form_and_tables_get_its_options():
    options = {"dfs.client.socket-timeout": "5000"}
    found = storage_of("hdfs:/node:8020//a/lake/", options)
    assert found.address == "hdfs://node:8020/a/lake"
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.table_options == {**options, "dfs.client.failover.max.attempts": "7"}
    assert storage_of("hdfs://node:8020/lake", AT_ONCE).table_options == AT_ONCE
    (other,) = {found.file_at("hdfs://node:8020/b/file")}
    assert str(other) == "hdfs://node:8020/b/file"


def test_a_nameservice_is_found_in_options_and_in_the_files_of_hadoop(tmp_path, monkeypatch):
    options = {"dfs.ha.namenodes.east": "a", "dfs.namenode.rpc-address.east.a": "node:8020"}
    assert storage_of("hdfs://east/lake", options).table_options == options
    properties = (
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in options.items()
    )
    text = f"<configuration>{''.join(properties)}</configuration>".replace("east", "west")
    (tmp_path / "hdfs-site.xml").write_text(text)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert storage_of("hdfs://west/lake").table_options == {}


# The real libraries, without a server


def test_a_namenode_that_nobody_started_is_named():
    with hold_port() as held:
        url = f"hdfs://127.0.0.1:{held.getsockname()[1]}/lake"
        storage = storage_of(url, AT_ONCE)
        for use in (storage.exists, storage.prepare, lambda: list(storage.list())):
            with pytest.raises(StorageError, match=f"^{url}.* because nothing listens at its Name"):
                use()
        with pytest.raises(OSError, match="Connection refused") as raised:
            DeltaTable(url, storage_options=dict(storage.table_options))
        failure = storage.failure(raised.value, "_delta_log")
        assert str(failure).startswith(f"{url}/_delta_log cannot be reached, because nothing")
        assert storage.failure(ValueError("damaged"), "_delta_log") is None


def test_a_missing_package_is_named():
    script = (
        "import sys; sys.modules['hdfs_native'] = None\n"
        "from headrace.lake.storage.storage import storage_of\n"
        "from headrace.lake.format import LakeError\n"
        "try: storage_of('hdfs://node:8020/lake')\n"
        "except LakeError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path("/")
    )
    assert done.stdout == (
        "hdfs://node:8020/lake needs: pip install 'headrace[hdfs]' (hdfs_native is missing)\n"
    )
