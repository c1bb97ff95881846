"""A file that several processes change: no change is lost, and no reader sees a part of one."""

import os
import threading

import pytest

from headrace.log import shared_file
from headrace.log.disk import Disk

MAX = 1 << 20


def test_a_change_gets_what_the_last_one_left(tmp_path):
    path = tmp_path / "file"
    seen = []

    def edit(data):
        seen.append(data)
        return b"first" if data is None else data + b", second"

    shared_file.change(path, Disk(), MAX, edit)
    shared_file.change(path, Disk(), MAX, edit)
    assert seen == [None, b"first"]
    assert shared_file.read(path, MAX).data == b"first, second"


def test_no_change_of_several_at_once_is_lost(tmp_path):
    path = tmp_path / "file"

    def add():
        for _ in range(20):
            shared_file.change(path, Disk(), MAX, lambda data: (data or b"") + b"x")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared_file.read(path, MAX).data == b"x" * 80


def test_a_change_that_fails_leaves_the_file(tmp_path):
    path = tmp_path / "file"
    shared_file.change(path, Disk(), MAX, lambda _: b"kept")

    def edit(data):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        shared_file.change(path, Disk(), MAX, edit)
    assert shared_file.read(path, MAX).data == b"kept"
    shared_file.change(path, Disk(), MAX, lambda _: b"next")  # the lock is free again


def test_each_version_has_a_stamp_of_its_own(tmp_path):
    path = tmp_path / "file"
    assert shared_file.stamp_of(path) is None
    assert shared_file.read(path, MAX) is None
    shared_file.change(path, Disk(), MAX, lambda _: b"a")
    first = shared_file.stamp_of(path)
    held = os.open(path, os.O_RDONLY)  # its inode is not used again
    try:
        assert shared_file.read(path, MAX).stamp == first
        shared_file.change(path, Disk(), MAX, lambda _: b"b")
        assert shared_file.stamp_of(path) != first
    finally:
        os.close(held)


def test_the_mode_that_an_operator_set_stays(tmp_path):
    path = tmp_path / "file"
    shared_file.change(path, Disk(), MAX, lambda _: b"a")
    assert path.stat().st_mode & 0o007 == 0
    path.chmod(0o600)
    shared_file.change(path, Disk(), MAX, lambda _: b"b")
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert len(shared_file.read(path, 10).data) == 11
