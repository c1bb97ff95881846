"""Replacing a file and creating a directory: by several writers at once, and by one that fails."""

from pathlib import Path

import pytest

from headrace.lake.storage import storage as directory
from headrace.lake.storage.storage import make_directory, replace


def test_two_may_replace_a_file_at_the_same_time(tmp_path, monkeypatch):
    path = tmp_path / "file.text"
    sync, meddling = directory.sync, [lambda: replace(path, b"theirs")]

    def meddled(path):
        if meddling:
            meddling.pop()()
        sync(path)

    monkeypatch.setattr(directory, "sync", meddled)
    replace(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.text"
    replace(path, b"old")

    def fail(path):
        raise OSError("the disk is full")

    monkeypatch.setattr(directory, "sync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_another_process_creates_too_is_no_error(tmp_path, monkeypatch):
    path = tmp_path / "a" / "date=2024-10-04"
    is_dir, meddling = Path.is_dir, [lambda: path.mkdir(parents=True)]

    def meddled(self):
        found = is_dir(self)
        if meddling:
            meddling.pop()()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", meddled)
        make_directory(path)
    assert path.is_dir()
    (path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_directory(path / "file" / "below")
