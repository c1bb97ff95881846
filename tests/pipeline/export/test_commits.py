"""Commits of exports: two exports at once, an answer that is lost, and a manifest that is damaged."""

import os
from contextlib import nullcontext
from functools import partial

import pytest
from deltalake import DeltaTable

from headrace.lake import manifests
from headrace.lake.format import LakeError, Shape
from headrace.lake.formats.delta import DeltaLake
from headrace.lake.storage.storage import HIDDEN, DirectoryStorage, storage_of
from headrace.pipeline import audit
from headrace.pipeline.job import EXPORT_APP as APP
from headrace.pipeline.tasks import LocalRunner
from tests.pipeline.export.test_job import Published
from tests.pipeline.lakes import expected, rows_of
from tests.pipeline.meddling import Meddling


@pytest.fixture
def published(server):
    made = Published(server)
    made.more(20)
    return made


def test_of_two_exports_one_is_refused(published, tmp_path):
    lake = tmp_path / "lake"
    published.export(lake)
    before = published.cursors()
    with storage_of(lake).lock("export"), pytest.raises(LakeError) as refused:
        published.export(lake)
    assert str(refused.value) == f"another export writes to {lake} (process {os.getpid()})"
    # An export on another machine, where the lock has no effect, loses at the commit.
    published.more(1)
    theirs = partial(DeltaLake(storage_of(lake), Shape()).commit, APP, 1, [], 7)
    with pytest.raises(LakeError, match=r"another export writes to .*: it has committed batch 1"):
        published.export(lake, points=Meddling(noted=theirs))
    assert published.cursors() == before


@pytest.mark.parametrize("point", ["planned", "writing", "written", "noted"])
def test_of_two_exports_at_once_one_commits_each_batch(published, tmp_path, point, monkeypatch):
    """This simulates two machines, where the lock of one does not reach the other."""
    monkeypatch.setattr(DirectoryStorage, "lock", lambda self, job: nullcontext())
    monkeypatch.setattr(manifests, "SINCE_MAX", 1)
    lake = tmp_path / "lake"
    for _ in range(3):
        published.export(lake)
        published.more(1)
    others = []

    def other():
        others.append(published.export(lake))
        published.more(1)
        others.append(published.export(lake))

    with pytest.raises(LakeError, match=r"another export writes to .*: it has committed batch 3"):
        published.export(lake, points=Meddling(**{point: other}))
    assert [one.batches for one in others] == [1, 1]
    assert rows_of(lake) == expected(published.server, published.payloads)
    assert not audit(lake, url=published.server.http_url, runner=LocalRunner()).lost
    published.more(1)
    assert published.export(lake).batches == 1
    assert rows_of(lake) == expected(published.server, published.payloads)


def test_a_commit_whose_answer_was_lost_counts(published, tmp_path, monkeypatch):
    lake = tmp_path / "lake"
    published.export(lake)
    published.more(1)

    class Lost(DeltaTable):
        def create_write_transaction(self, *given, **more):
            super().create_write_transaction(*given, **more)
            raise OSError("connection reset by peer")

    monkeypatch.setattr("headrace.lake.formats.delta.DeltaTable", Lost)
    assert published.export(lake).batches == 1
    assert rows_of(lake) == expected(published.server, published.payloads)


def test_a_damaged_manifest_of_the_last_batch_is_refused(published, tmp_path):
    lake = tmp_path / "lake"
    published.export(lake)
    (path,) = (lake / HIDDEN / "batches").iterdir()
    path.write_bytes(path.read_bytes().replace(b"/a", b"/x"))
    with pytest.raises(LakeError, match=r"is damaged [(]its checksum fails[)]: restore it"):
        published.export(lake)
