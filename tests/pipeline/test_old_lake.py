"""Lakes with topics as earlier versions named them: jobs continue with them, and lose or repeat nothing."""

import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import UNSET

from headrace import connect_blocking
from headrace.lake.deduped import DedupedTable
from headrace.lake.files.reading import read_topic
from headrace.lake.format import stored_names
from headrace.lake.manifests import Manifests
from headrace.lake.states import StatesTable, bucket_of
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import open_table
from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX, legacy_name
from headrace.pipeline.aggregate.job import aggregate
from headrace.pipeline.audit.job import audit
from headrace.pipeline.compact import compact
from headrace.pipeline.dedupe.job import dedupe
from headrace.pipeline.dedupe.keys import topic_hash
from headrace.pipeline.export.job import export
from headrace.pipeline.job import EXPORT_APP as APP
from headrace.pipeline.replay import Wanted
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess
from tests.archives import extract
from tests.log.old_versions.kept_names import Api
from tests.pipeline.lakes import rows_of

ROOM, MAIN = CHANNEL_PREFIX + "room", LOGUX_PREFIX + "main"
OLD = {"channel/room", "logux/main", "apple", "zebra"}
TOPICS = [ROOM, MAIN, "channel/room", "apple", "zebra"]
"""All topics but the audit trail, which says that a lake has taken over."""
FLAGS = [
    f"--set={one}" for one in ("journal.file_bytes=65536", "journal.files=2", "retention.age_s=0")
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old lake")
    extract(Path(__file__).parent / "old_names.tar.xz", root)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    """A server with more records than the lakes, and an ordinary topic with a name that was reserved."""
    with ServerProcess(root / "data", *FLAGS) as process:
        assert "2 topics are renamed" in process.stderr
        with httpx.Client(base_url=process.http_url) as client:
            api = Api(client)
            api.join("room", "c")
            api.send("room", 1, "c")
            assert api.topic(ROOM)["end"]["ordinal"] == 7
        with connect_blocking(process.figg_url) as figg:
            figg.publish("channel/room", b"ordinary")
            figg.publish("apple", b"a")
        yield process
        assert "Traceback" not in process.stderr, process.stderr


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_lake_goes_on_where_it_ended(server, root, tmp_path, kind):
    lake, url = copied(root / kind, tmp_path), server.http_url
    before = rows_of(lake)
    assert {row.topic for row in before} == OLD
    done = export(lake, TOPICS, url=url, take_over=True, runner=LocalRunner())
    assert (done.records, done.lost) == (3, 0)
    assert export(lake, TOPICS, url=url, runner=LocalRunner()).records == 0
    check(lake, before, server)
    assert compact(lake, runner=LocalRunner()).merged > 0
    check(lake, before, server)
    assert compact(lake, runner=LocalRunner()).merged == 0


def copied(what: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(what, tmp_path / what.name))


def check(lake, before, server):
    rows = rows_of(lake)
    assert set(before) < set(rows) and len(rows) == len(before) + 3
    new = {(row.topic, row.payload) for row in set(rows) - set(before)}
    assert {topic for topic, _ in new} == {ROOM, "channel/room", "apple"}
    table = open_table(storage_of(lake))
    assert payloads(lake, "channel/room") == [b"ordinary"]
    assert len(payloads(lake, ROOM)) == 7 and len(payloads(lake, MAIN)) == 3
    assert payloads(lake, "logux/main") == []
    assert len(payloads(lake, "apple")) == 4
    assert Manifests(storage_of(lake)).have_old_names(table.last(APP))
    for given in ({}, {"url": server.http_url}):
        found = audit(lake, runner=LocalRunner(), **given)
        assert not list(found.findings), list(found.findings)
        assert {topic.name for topic in found.topics} >= {ROOM, MAIN, "channel/room"}


def payloads(lake: Path, topic: str) -> list[bytes]:
    batches = read_topic(storage_of(lake), open_table(storage_of(lake)), topic)
    return [payload for batch in batches for _, payload in batch]


def test_rows_without_duplicates_and_states_go_on(server, root, tmp_path):
    lake, deduped, made = (copied(root / name, tmp_path) for name in ("delta", "deduped", "states"))
    url = server.http_url
    export(lake, TOPICS, url=url, take_over=True, runner=LocalRunner())
    shape = open_table(storage_of(lake)).shape._replace(by_topic=False)
    known = DedupedTable.open(storage_of(deduped), shape)
    assert known is not None and set(known.last().ends) == {ROOM, MAIN, "apple", "zebra"}
    begin_windows_now(deduped)
    done = dedupe(lake, deduped, payload=True, runner=LocalRunner())
    # One of the new records, that of `apple`, is a duplicate.
    assert (done.rows, done.kept) == (3, 2)
    assert dedupe(lake, deduped, payload=True, runner=LocalRunner()).rows == 0
    assert known.last().secret is UNSET
    states = StatesTable.open(storage_of(made))
    assert states is not None
    assert set(states.covered().ends) == {ROOM, MAIN, "apple", "zebra"}
    aggregate(lake, made, TOPICS, reducer="count", url=url, runner=LocalRunner())
    assert set(states.covered().ends) == {ROOM, MAIN, "apple", "zebra", "channel/room"}


def begin_windows_now(deduped: Path) -> None:
    """Let the windows of all known keys begin now: a day after the files were made, they are over."""
    for path in deduped.glob("_headrace/keys/*.parquet"):
        table = pq.read_table(path)
        now = pa.array([time.time_ns() // 1_000_000] * len(table))
        pq.write_table(table.set_column(table.schema.names.index("ms"), "ms", now), path)


def test_hashes_of_names_are_what_they_were():
    assert topic_hash(ROOM).prefix == b"\0\x0cchannel/room"
    names = [ROOM, "channel/room", MAIN, "logux/main", "apple", "$lost/1"]
    assert len({topic_hash(name) for name in names}) == len(names)
    assert [legacy_name(legacy_name(name)) for name in names] == names
    assert bucket_of(ROOM, 16) == zlib.crc32(b"channel/room") % 16
    one = Wanted(ROOM, "t", "", None, None, None, None)
    assert one.key != one._replace(topic="channel/room").key
    assert stored_names(ROOM) == (ROOM, "channel/room") and stored_names("apple") == ("apple",)


def test_manifests_of_a_lake_are_found_and_have_present_names(root):
    manifests = Manifests(storage_of(root / "delta"))
    last = open_table(storage_of(root / "delta")).last(APP)
    assert last == (2, None)
    names = manifests.names(last)
    assert names == ("folded/000000000001.json", [(1, None), (2, None)])
    merged = manifests.read_merged(names.merged)
    assert merged.batches == 1 and merged.format == 1 and ROOM in merged.end
    assert all(ROOM in manifests.read(one).end for one in names.single)
