"""Lakes on a file system without hard links, as some mounted object stores and exFAT are: one sentence."""

import errno
import os

import pytest

from headrace.lake.deduped import DedupedTable
from headrace.lake.format import LakeError, Shape
from headrace.lake.states import StatesTable
from headrace.lake.storage.storage import HIDDEN, storage_of
from headrace.lake.table import make_table, open_table
from tests.lake.rows import token
from tests.lake.test_table import APP, batch, payloads


@pytest.fixture
def no_links(monkeypatch):
    def refused(*given, **more):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def start():
        monkeypatch.setattr(os, "link", refused)

    return start


def sentence(path, kind):
    return (
        f"{path} is on a file system without hard links, which tables of the format {kind} need: name a "
        "directory on another one, or give --format iceberg for a new lake"
    )


def left(path):
    """Return the files below a directory."""
    return [one.name for one in path.rglob("*") if one.is_file()]


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_new_lake_is_refused_before_it_has_a_file(tmp_path, no_links, kind):
    no_links()
    with pytest.raises(LakeError) as refused:
        make_table(storage_of(tmp_path), kind, Shape())
    assert str(refused.value) == sentence(tmp_path, kind)
    assert left(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [HIDDEN]
    # The next attempt may choose another format.
    lake = make_table(storage_of(tmp_path), "iceberg", Shape())
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert payloads(lake) == [b"0"]


@pytest.mark.parametrize(
    "make", [StatesTable.make, lambda place: DedupedTable.make(place, Shape())]
)
def test_so_is_a_table_of_states_or_without_duplicates(tmp_path, no_links, make):
    no_links()
    with pytest.raises(LakeError) as refused:
        make(storage_of(tmp_path))
    assert str(refused.value) == sentence(tmp_path, "delta")
    assert left(tmp_path) == []


def test_a_lake_of_plain_files_that_was_moved_there_stays_as_it_is(tmp_path, no_links):
    made = make_table(storage_of(tmp_path), "parquet", Shape())
    assert made.commit(APP, 0, batch(made, 0), token())
    no_links()
    lake = open_table(storage_of(tmp_path))
    files = batch(lake, 1)
    with pytest.raises(LakeError) as refused:
        lake.commit(APP, 1, files, token())
    assert str(refused.value) == sentence(tmp_path, "parquet")
    assert lake.last(APP).number == 0
    assert payloads(lake) == [b"0"]
