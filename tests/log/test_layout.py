"""Layout of a data directory: file names describe their content, and only one server uses a directory."""

import os
import subprocess
import time

import pytest

from headrace.errors import DataDirectoryError, DataDirectoryLockedError
from headrace.log import layout as layout_module
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from tests.fakes.disk import RecordingDisk, SyncDirectory


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path / "data")
    layout.make(Disk())
    return layout


def test_a_segment_is_named_by_its_topic_and_its_first_offset(layout):
    path = layout.segment(0x2A, 1234)
    assert path.name == "2a-00000000000000001234.log"
    assert layout.index(0x2A, 1234) == path.with_suffix(".idx")
    assert path.parent.is_dir()


def test_topics_share_a_fixed_number_of_directories(layout):
    parents = {layout.segment(number, 0).parent for number in range(1000)}
    assert parents == set(layout.segments.iterdir())


def test_files_are_found_with_what_their_names_say(layout):
    made = [(1, 0), (1, 500), (0xABC, (1 << 64) - 1)]
    for topic_id, base in made:
        layout.segment(topic_id, base).write_bytes(b"12345")
        layout.index(topic_id, base).write_bytes(b"")
    found = list(layout.files(".log"))
    assert sorted((file.topic_id, file.base) for file in found) == made
    assert {file.size for file in found} == {5}
    assert all(file.path == layout.segment(file.topic_id, file.base) for file in found)
    assert {file.size for file in layout.files(".idx")} == {0}


@pytest.mark.parametrize("name", ["notes.log", "1.log", "x-00000000000000000000.log", "1-0.log"])
def test_what_has_another_name_is_not_ours(layout, name):
    (layout.segments / "00" / name).write_bytes(b"")
    assert list(layout.files(".log")) == []


def test_making_it_again_changes_nothing(layout):
    layout.segment(1, 0).write_bytes(b"data")
    layout.make(Disk())
    assert layout.segment(1, 0).read_bytes() == b"data"


def test_a_new_directory_is_on_disk_before_it_is_used(tmp_path):
    disk, root = RecordingDisk(), tmp_path / "new" / "data"
    Layout(root).make(disk)
    synced = [one.path for one in disk.operations if isinstance(one, SyncDirectory)]
    assert synced == [tmp_path / "new", tmp_path, root / "segments", root]


def test_a_directory_belongs_to_one_server(layout, monkeypatch):
    monkeypatch.setattr(layout_module, "_LOCK_ATTEMPTS", 1)
    lock = layout.lock(Disk())
    with pytest.raises(DataDirectoryLockedError, match=rf"process {os.getpid()}\b.*--data-dir"):
        layout.lock(Disk())
    os.close(lock)
    os.close(layout.lock(Disk()))


def test_the_applier_of_a_dead_server_is_waited_for(layout, monkeypatch):
    monkeypatch.setattr(layout_module, "_LOCK_ATTEMPTS", 1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = layout.lock(Disk())
    os.pwrite(lock, b"%d\n" % ended.pid, 0)
    os.truncate(lock, len(b"%d\n" % ended.pid))
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 5:
            os.close(lock)  # the applier has noticed the end of its server

    monkeypatch.setattr(time, "sleep", wait)
    os.close(layout.lock(Disk()))
    assert len(waits) == 5


def test_a_path_that_is_no_directory_is_said_in_words(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for bad in (Layout(tmp_path / "file"), Layout(tmp_path / "file" / "inside")):
        with pytest.raises(DataDirectoryError, match="cannot be used"):
            bad.make(Disk())
