"""Staged files: durable before they count, limited, claimed once, and deleted if nobody claims them."""

import errno
import os
import time

import pytest

from headrace.config.settings import Limits
from headrace.errors import (
    BadBlockError,
    StagedClaimedError,
    StagingFullError,
    UnknownStagedError,
)
from headrace.log.batch import staging
from tests.fakes.disk import FailingDisk, RecordingDisk, Rename, SyncDirectory, SyncOp, Write
from tests.fakes.store import StepClock, block
from tests.log.conftest import tiny


def names(store) -> list[str]:
    return sorted(path.name for path in store.layout.staged.iterdir())


def test_a_staged_file_is_on_disk_before_it_has_its_name(open_store):
    disk = RecordingDisk()
    store = open_store(disk=disk)
    before = len(disk.operations)
    staged_id = store.stage(("a", [b"one"]))
    kinds = [type(one) for one in disk.operations[before:]]
    assert kinds[-4:] == [Write, SyncOp, Rename, SyncDirectory]
    assert names(store) == [staged_id]


def test_staged_records_are_shown_to_nobody(store):
    store.stage(("a", [b"one"]))
    assert not store.store.topic("a").exists
    assert store.payloads("a") == []


def test_nothing_is_kept_of_an_upload_that_is_wrong(store):
    upload = store.store.staging.begin()
    store.store.staging.reserve(upload, 100)
    upload.feed(block("a", [b"good"]))
    with pytest.raises(BadBlockError):
        upload.feed(b"not a block at all")
    assert names(store) == [f"{upload.id}.new"]
    store.store.staging.drop(upload)
    store.runner.run()
    assert names(store) == []
    assert store.store.staging.bytes == 0


def test_what_a_crash_left_of_an_upload_is_gone_after_a_start(open_store):
    store = open_store()
    upload = store.store.staging.begin()
    upload.feed(block("a", [b"good"]))
    kept = store.stage(("a", [b"other"]))
    store = open_store()
    assert names(store) == [kept]


def test_a_full_disk_refuses_the_upload_and_keeps_nothing(open_store):
    full = OSError(errno.ENOSPC, "No space left on device")
    staging = [False]
    disk = FailingDisk(lambda done: full if staging[0] and isinstance(done, Write) else None)
    store = open_store(disk=disk)
    staging[0] = True
    with pytest.raises(StagingFullError, match="no space left on the disk"):
        store.stage(("a", [b"one"]))
    staging[0] = False
    assert names(store) == []
    assert store.store.staging.bytes == 0
    assert store.stage(("a", [b"one"])) in names(store)


def test_all_staged_files_together_are_bounded(open_store, tmp_path):
    config = tiny(tmp_path / "data", limits=Limits(staged_bytes_max=4096))
    store = open_store(config)
    first = store.stage(("a", [bytes(3000)]))
    with pytest.raises(StagingFullError, match="staged_bytes_max allows 4096"):
        store.stage(("a", [bytes(3000)]))
    store = open_store(config)
    with pytest.raises(StagingFullError):
        store.stage(("a", [bytes(3000)]))
    store.batch("p", 1, first)
    store.settle()
    assert store.store.staging.bytes == 0
    store.stage(("a", [bytes(3000)]))


def test_a_staged_file_belongs_to_one_batch(store):
    staging = store.store.staging
    first, second = store.stage(("a", [b"one"])), store.stage(("a", [b"two"]))
    assert [file.id.hex() for file in staging.claim([first])] == [first]
    with pytest.raises(StagedClaimedError, match=f"staged file '{first}' is part of another batch"):
        staging.claim([second, first])
    with pytest.raises(UnknownStagedError, match="there is no staged file 'nope'"):
        staging.claim([second, "nope"])
    assert staging.claim([second])


def test_what_nobody_claims_is_swept_after_a_day(open_store):
    clock = StepClock(int(time.time() * 1000))
    store = open_store(clock=clock)
    old, claimed, new = (store.stage(("a", [b"one"])) for _ in range(3))
    a_day_ago = time.time() - 86_401
    for staged_id in (old, claimed):
        os.utime(store.layout.staged_file(staged_id), (a_day_ago, a_day_ago))
    store = open_store(clock=clock)
    store.store.staging.claim([claimed])
    store.store.tick(store.clock.ms / 1000)
    store.runner.run()
    assert names(store) == sorted([claimed, new])
    store.store.tick(store.clock.ms / 1000 + 86_401)
    store.runner.run()
    assert names(store) == [claimed]


def test_a_wall_clock_that_jumped_makes_no_staged_file_old(open_store):
    store = open_store()
    staged = store.stage(("a", [b"one"]))
    uploaded_s = time.time() - 2 * 86_400  # before the wall clock jumped by two days
    os.utime(store.layout.staged_file(staged), (uploaded_s, uploaded_s))
    store = open_store(clock=StepClock(int(uploaded_s * 1000) + 60_000))
    store.store.tick(store.clock.ms / 1000)
    store.runner.run()
    assert names(store) == [staged]


def test_a_wall_clock_that_is_years_behind_makes_no_later_file_old(open_store):
    now_ms = int(time.time() * 1000) + 5 * 365 * 86_400_000  # the wall clock is years behind
    store = open_store(clock=StepClock(now_ms))
    staged = store.stage(("a", [b"one"]))
    assert store.layout.staged_file(staged).stat().st_mtime == pytest.approx(now_ms / 1000)


def test_files_with_other_names_stay_and_do_not_count(open_store):
    store = open_store()
    (store.layout.staged / "README").write_bytes(b"not ours")
    store = open_store()
    assert store.store.staging.bytes == 0
    store.store.tick(store.clock.ms / 1000 + 86_401)
    assert names(store) == ["README"]


def test_the_number_of_uploads_is_bounded_also_of_empty_ones(open_store, monkeypatch):
    monkeypatch.setattr(staging, "FILES_MAX", 2)
    store = open_store()
    first, _ = store.stage(), store.stage(("a", [b"one"]))
    with pytest.raises(StagingFullError, match="2 uploads wait for their batches"):
        store.stage()
    store.batch("p", 1, first)
    store.settle()
    store.stage()


def test_the_topics_of_uploads_are_remembered_while_they_are_few(open_store, monkeypatch):
    monkeypatch.setattr(staging, "UPLOAD_TOPICS_MAX", 2)
    monkeypatch.setattr(staging, "TOPICS_MAX", 3)
    store = open_store()

    def known(*topics: str) -> frozenset[str] | None:
        staged_id = store.stage(*((topic, [b"x"]) for topic in topics))
        return store.store.staging._files[staged_id].topics

    assert known("a", "b", "a") == {"a", "b"}
    assert known("a", "b", "c") is None
    assert known("c", "d") is None, "all uploads together have more than 3"
    assert known("c") == {"c"}
    store.store.staging.discard(list(store.store.staging._files))
    assert store.store.staging._topics == 0
