"""Directories of a version that named reserved topics `channel/…` and `logux/…`: a start renames them."""

import json
import logging
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.channel.notes import read_members
from headrace.broker.logux.event_ids import EventIds
from headrace.errors import DataDirectoryError
from headrace.log import layout
from headrace.log.batch.blocks import read_staged
from headrace.log.catalogue.catalogue import BACKUP_NAME, FILE_NAME, Catalogue
from headrace.log.store import Block, Topic
from headrace.log.verify.verify import verify
from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX, Position
from tests.archives import extract
from tests.fakes.disk import CatalogueCommit, DiskModel, RecordingDisk, Rename, SyncOp, Unlink
from tests.fakes.store import StepStore
from tests.log.damage_matrix.worlds import small

ARCHIVES = Path(__file__).parent / "old_names"
ROOM, MAIN = CHANNEL_PREFIX + "room", LOGUX_PREFIX + "main"
LONG = CHANNEL_PREFIX + "long/" + "x" * 242


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Extract the archive, and return the expected content of `tmp_path / "data"`."""
    monkeypatch.setattr(layout, "SEGMENT_DIRECTORIES", 256)
    extract(ARCHIVES / "served.tar.xz", tmp_path)
    return json.loads((tmp_path / "expected.json").read_text())


def start(data: Path, **given: Any) -> StepStore:
    """Start as on the machine that the directory is from, without a reboot."""
    for name in (FILE_NAME, BACKUP_NAME):
        if (data / name).exists():
            catalogue = Catalogue.open_for_reading(data, name=name)
            boot = catalogue.meta().boot_id
            catalogue.close()
            return StepStore(small(data, 4), boot_id=boot, **given)
    return StepStore(small(data, 4), **given)


def present(name: str) -> str:
    return f"${name}" if name.startswith(("channel/", "logux/")) else name


def exists(store: StepStore, name: str) -> Topic | None:
    found = {topic.name: topic for topic in store.store.topics("", "", 1000)}
    return found.get(name)


def check(store: StepStore, old: dict[str, Any], *, jumped: bool = False) -> None:
    for name, expected in old["topics"].items():
        topic = exists(store, present(name))
        assert topic is not None, name
        assert len(store.payloads(topic.name)) == expected["records"]
        if name != present(name):
            assert exists(store, name) is None
        if not jumped:
            assert topic.epoch == expected["epoch"]
            assert topic.end_offset == expected["end"]["offset"]
            assert topic.end_ordinal == expected["end"]["ordinal"]
    cursors = {(one.topic, one.reader): one.position for one in store.store.cursors(limit=100)}
    assert cursors == {
        (present(one["topic"]), one["reader"]): Position(
            one["epoch"], one["offset"], one["ordinal"]
        )
        for one in old["cursors"]
    }
    for name, channel in old["channels"].items():
        members = {one["processor"] for one in channel["members"]}
        assert {one.name for one in read_members(store.store, name)} == members
    assert store.append_once(MAIN, "producer", 7, b"again").duplicate


def test_the_first_start_renames_everything(old, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    before = verify(tmp_path / "data")
    assert not before.damaged
    store = start(tmp_path / "data")
    assert store.reports == []
    said = "5 topics are renamed: names that began with channel/ and logux/ begin with $channel/ and $logux/"
    assert [f"{said} from now on"] == [
        record.getMessage() for record in caplog.records if "renamed" in record.getMessage()
    ]
    check(store, old)
    catalogue = Catalogue.open_for_reading(tmp_path / "data")
    names = {row.name for row in catalogue.tombstones()}
    assert names == {b"$logux/gone", b"$logux/gone too"}
    catalogue.close()
    store.append("channel/fresh", b"ordinary")
    caplog.clear()
    store.crash()
    store = start(tmp_path / "data")
    assert store.reports == [] and "renamed" not in caplog.text
    check(store, old)
    assert store.payloads("channel/fresh") == [b"ordinary"]
    store.close()
    assert not verify(tmp_path / "data").damaged


def test_readers_of_the_files_see_the_present_names_before_the_first_start(old, tmp_path):
    names = {topic.name for topic in verify(tmp_path / "data").topics}
    assert names == {"$logux/gone too", *map(present, old["topics"])}  # destroyed in the journal
    catalogue = Catalogue.open_for_reading(tmp_path / "data")
    assert catalogue.topic(b"channel/room") is None
    found = catalogue.topic(ROOM.encode())
    assert found is not None and found.name == ROOM.encode()
    assert [row.name for row in catalogue.topics(b"$channel/", b"$channel/long")][-1] == found.name
    assert [row.reader for row in catalogue.cursors(ROOM.encode())] == [b"billing"]
    assert catalogue.tombstone(b"$logux/gone") is not None
    catalogue.close()


def test_a_kill_at_any_step_of_the_first_start_leaves_all_of_it_for_the_next(old, tmp_path):
    data, before = tmp_path / "data", tmp_path / "before"
    for name in (FILE_NAME, BACKUP_NAME):
        database = sqlite3.connect(data / name)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()  # moves everything into one file
    shutil.copytree(data, before)
    disk = RecordingDisk()
    with disk.record_catalogue():
        store = start(data, disk=disk)
        store.crash()
    operations = disk.operations
    assert len(operations) > 10
    for count in range(len(operations) + 1):
        around = operations[max(0, count - 1) : count + 1]
        if not any(isinstance(one, CatalogueCommit | Rename | Unlink | SyncOp) for one in around):
            continue  # the result is the same as after the operation before
        model = DiskModel(data, before)
        for operation in operations[:count]:
            model.do(operation)
        again = tmp_path / "again"
        model.killed(again, None, random.Random(count))
        store = start(again)
        assert store.reports == []
        check(store, old)
        store.crash()
        shutil.rmtree(again)


@pytest.mark.parametrize("lost", [[FILE_NAME], [FILE_NAME, BACKUP_NAME]])
def test_a_catalogue_is_rebuilt_with_present_names(old, tmp_path, lost):
    remove(tmp_path / "data", lost)
    store = start(tmp_path / "data")
    assert any("the catalogue is rebuilt" in line for line in store.reports)
    for name, expected in old["topics"].items():
        assert len(store.payloads(present(name))) == expected["records"]
        assert name == present(name) or exists(store, name) is None
    assert exists(store, "$logux/late") and exists(store, LONG)
    assert [one.topic for one in store.store.cursors(limit=9)] == [ROOM, MAIN]
    store.close()
    assert not verify(tmp_path / "data").damaged


@pytest.mark.parametrize("lost", [[FILE_NAME], [FILE_NAME, BACKUP_NAME]])
@pytest.mark.parametrize("stopped", ["cleanly", "killed"])
def test_a_rebuild_tells_ordinary_topics_of_the_old_names_from_renamed_ones(
    old, tmp_path, lost, stopped
):
    data = tmp_path / "data"
    store = start(data)
    for name in ("channel/room", "channel/new", "logux/main"):
        store.append(name, b"ordinary")
    store.store.set_cursors("r", {"channel/room": store.store.topic("channel/room").end}, print)
    store.runner.run()
    if stopped == "cleanly":
        store.close()
    else:
        store.crash()
    remove(data, lost)
    store = start(data)
    for name, expected in old["topics"].items():
        assert len(store.payloads(present(name))) == expected["records"]
    for name in ("channel/room", "channel/new", "logux/main"):
        assert store.payloads(name) == [b"ordinary"]
    if stopped == "killed" or len(lost) == 1:
        assert ("channel/room", "r") in {
            (one.topic, one.reader) for one in store.store.cursors(limit=9)
        }
    store.crash()


@pytest.mark.parametrize("renamed", [False, True])
def test_a_catalogue_that_does_not_say_its_format_has_the_names_of_its_backup(
    old, tmp_path, renamed
):
    data = tmp_path / "data"
    if renamed:
        store = start(data)
        store.append("channel/room", b"ordinary")
        store.close()
    with sqlite3.connect(data / FILE_NAME) as database:
        database.execute("UPDATE meta SET crc = 0")
    database.close()
    store = StepStore(small(data, 4))
    assert len(store.payloads(ROOM)) == old["topics"]["channel/room"]["records"]
    if renamed:
        assert store.payloads("channel/room") == [b"ordinary"]
    else:
        assert exists(store, "channel/room") is None
    assert {one.topic for one in store.store.cursors(limit=9)} == {ROOM, MAIN}
    store.crash()


def remove(data: Path, names: list[str]) -> None:
    for name in names:
        for suffix in ("", "-wal", "-shm"):
            (data / (name + suffix)).unlink(missing_ok=True)


@pytest.mark.parametrize("state", ["applied", "unapplied"])
@pytest.mark.parametrize("rebuilt", [False, True])
def test_an_ordinary_topic_with_a_reserved_name_stops_the_start(tmp_path, state, rebuilt):
    extract(ARCHIVES / "conflicts.tar.xz", tmp_path)
    data = tmp_path / state
    if rebuilt:
        remove(data, [FILE_NAME, BACKUP_NAME])
    before = contents(data)
    for _ in range(2):
        with pytest.raises(DataDirectoryError) as caught:
            StepStore(small(data, 2))
        assert str(caught.value) == (
            f"the data directory {data} has a topic \"$channel/x\", and names that begin with '$channel/' or "
            "'$logux/' are reserved now: start the earlier version again, export such topics or publish "
            "their records under another name, delete them, and then start this version; nothing was changed"
        )
        assert contents(data) == before


def contents(data: Path) -> dict[str, bytes]:
    """Return the content of all files except SQLite's shared memory and write-ahead log."""
    paths = [path for path in data.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(data)): path.read_bytes()
        for path in paths
        if not path.name.endswith(("-shm", "-wal"))
    }


def test_such_a_topic_is_in_nobodys_way_when_it_is_deleted(tmp_path):
    extract(ARCHIVES / "conflicts.tar.xz", tmp_path)
    for _ in range(2):
        store = StepStore(small(tmp_path / "destroyed", 2))
        assert store.payloads("$channel/x") == [b"two"]
        assert exists(store, "channel/x") is None
        store.crash()


def test_staged_files_name_topics_as_their_version_did(old, tmp_path):
    store = start(tmp_path / "data")
    path = store.layout.staged_file(old["staged"])
    topics = staged_topics(path)
    assert topics == ["$logux/main", "$channel/staged"]
    with path.open("r+b") as file:
        file.write(b"\xff")  # in the first header
    assert staged_topics(path) == [None, "$channel/staged"]
    new = store.stage(("channel/x", [b"ordinary"]), ("logux/x", [b"ordinary"]))
    path = store.layout.staged_file(new)
    assert staged_topics(path) == ["channel/x", "logux/x"]
    with path.open("r+b") as file:
        file.write(b"\xff")
    assert staged_topics(path) == [None, "logux/x"]
    store.crash()


def staged_topics(path: Path) -> list[str | None]:
    found = [one.what for one in read_staged(path, 0, path.stat().st_size, 1 << 20)]
    return [one.topic if isinstance(one, Block) else None for one in found]


def test_ids_of_events_are_kept_under_the_new_name(tmp_path):
    place = Position(3, 9, 1)
    ids = EventIds(tmp_path)
    ids.add("logux/ä\0", [(b"id", 0)], {}, place)
    ids.close()
    with sqlite3.connect(tmp_path / "event-ids.sqlite") as database:
        database.execute("PRAGMA user_version = 1")
    database.close()
    for _ in range(2):
        ids = EventIds(tmp_path)
        assert ids.indexed("$logux/ä\0") == place and ids.indexed("logux/ä\0") is None
        assert ids.find("$logux/ä\0", [b"id"], []).ordinals == {b"id": 0}
        ids.close()
