"""Backups of a store's directory, and restoring from them."""

import os
import shutil

import pytest

from headrace.errors import DataDirectoryError
from headrace.log import backup as module
from headrace.log.backup import (
    MANIFEST_NAME,
    BackupError,
    Revoked,
    back_up,
    read_manifest,
    restore,
)
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.disk import Disk
from headrace.log.layout import UNFINISHED_NAME, Layout
from headrace.log.store import Note
from headrace.log.verify.verify import verify
from headrace.model import JUMP, Span
from tests.fakes.store import StepStore
from tests.log.conftest import tiny

PAYLOADS = [b"%d" % number * (number % 30) for number in range(40)]


def fill(store, topic="topic", payloads=PAYLOADS):
    for number, payload in enumerate(payloads):
        store.append(topic, payload)
        if number % 6 == 5:
            store.settle()
    store.settle()


def run(store, target):
    return back_up(store.layout.root, target, store.config.rule, "1")


def opened(path):
    return StepStore(tiny(path))


@pytest.fixture
def stopped(open_store):
    store = open_store()
    fill(store)
    store.close()
    return store


def test_a_restored_log_has_everything_and_goes_on_far_ahead(stopped, tmp_path):
    target = tmp_path / "backup"
    made = run(stopped, target)
    assert (made.topics, made.records) == (1, len(PAYLOADS))
    assert not verify(target).damaged
    assert restore(target, tmp_path / "new") == (made, None)
    assert not verify(tmp_path / "new").damaged
    store = opened(tmp_path / "new")
    topic = store.store.topic("topic")
    assert store.payloads("topic") == PAYLOADS
    assert topic.end_ordinal == len(PAYLOADS) + JUMP
    assert store.store.kept(topic).records == len(PAYLOADS)
    store.append("topic", b"more")
    assert store.payloads("topic") == [*PAYLOADS, b"more"]
    assert any("after a restore" in report for report in store.reports)
    store.close()
    again = opened(tmp_path / "new")
    assert again.store.topic("topic").end_ordinal == len(PAYLOADS) + JUMP + 1
    again.close()


def test_the_later_of_two_restores_is_ahead_of_the_earlier(stopped, tmp_path, monkeypatch):
    run(stopped, tmp_path / "backup")
    ends = []
    now = module.time.time()
    for minutes in (0, 5):
        monkeypatch.setattr(module.time, "time", lambda m=minutes: now + 60 * m + 1)
        restore(tmp_path / "backup", tmp_path / f"new-{minutes}")
        monkeypatch.undo()
        store = opened(tmp_path / f"new-{minutes}")
        topic = store.store.topic("topic")
        ends.append(topic.end_ordinal)
        assert store.store.kept(topic).records == len(PAYLOADS)
        store.close()
    assert ends == [len(PAYLOADS) + JUMP, len(PAYLOADS) + 6 * JUMP]


def test_what_was_dropped_before_the_backup_stays_dropped(open_store, tmp_path):
    store = open_store()
    fill(store)
    fill(store, "destroyed")
    end = store.store.topic("topic").end
    store.store.set_cursors("gone", {"topic": end}, lambda: None)
    store.store.set_cursors("stays", {"topic": end}, lambda: None)
    store.settle()
    store._catalogue.keep_backup(Disk())  # the server's own backup still lists them
    store.store.drop_cursors("gone", ["topic"], lambda: None)
    gone = store.store.topic("destroyed").end
    store.destroy("destroyed")
    store.settle()
    store.close()
    run(store, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    store = opened(tmp_path / "new")
    assert [one.reader for one in store.store.cursors(limit=10)] == ["stays"]
    assert not store.store.look("destroyed").exists
    store.append("destroyed", b"new life")
    assert store.store.topic("destroyed").start_offset >= gone.offset + JUMP
    store.close()


def test_a_killed_server_s_journal_is_applied_to_the_backup(open_store, tmp_path):
    store = open_store()
    fill(store)
    store.append("topic", b"only in the journal")
    store.crash()
    run(store, tmp_path / "backup")
    assert not verify(tmp_path / "backup").damaged
    restore(tmp_path / "backup", tmp_path / "new")
    restored = opened(tmp_path / "new")
    assert restored.payloads("topic") == [*PAYLOADS, b"only in the journal"]
    restored.close()


def test_files_that_grow_and_vanish_while_they_are_copied(open_store, tmp_path, monkeypatch):
    store = open_store()
    fill(store)
    more = [b"later"] * 20

    class Meddled(module.FileCopy):
        passes = 0

        def take(self, files):
            gone = super().take(files)
            Meddled.passes += 1
            if Meddled.passes == 1:
                fill(store, "topic", more)
                at = store.store.locate_ordinal(store.store.topic("topic"), 10)
                store.trim("topic", at)
                store.settle()
            return gone

    monkeypatch.setattr(module, "FileCopy", Meddled)
    monkeypatch.setattr(module, "_wait_until_applied", lambda *_: None)
    lock = store.layout.lock(Disk())  # a running server holds this lock
    try:
        run(store, tmp_path / "backup")
    finally:
        os.close(lock)
    assert Meddled.passes >= 2
    assert not verify(tmp_path / "backup").damaged
    restored = StepStore(tiny(tmp_path / "backup"))
    assert restored.payloads("topic") == [*PAYLOADS, *more][10:]
    kept = restored.store.kept(restored.store.topic("topic"))
    assert kept == Span(len(PAYLOADS) - 10 + len(more), kept.bytes)
    restored.close()
    store.close()


def test_an_interrupted_backup_is_refused_and_made_anew(stopped, tmp_path, monkeypatch):
    target = tmp_path / "backup"
    with monkeypatch.context() as patch:
        patch.setattr(module, "_seal", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(stopped, target)
    assert (target / UNFINISHED_NAME).exists()
    with pytest.raises(BackupError, match="unfinished"):
        restore(target, tmp_path / "new")
    with pytest.raises(DataDirectoryError, match="unfinished"):
        Layout(target).lock(Disk())
    assert not (tmp_path / "new").exists()
    with pytest.raises(BackupError, match="unfinished"):
        back_up(target, tmp_path / "other", stopped.config.rule, "1")
    run(stopped, target)
    assert read_manifest(target).records == len(PAYLOADS)


def test_an_interrupted_restore_is_refused_by_servers_and_made_anew(stopped, tmp_path, monkeypatch):
    run(stopped, tmp_path / "backup")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_set_meta", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            restore(tmp_path / "backup", tmp_path / "new")
    with pytest.raises(DataDirectoryError, match="unfinished"):
        Layout(tmp_path / "new").lock(Disk())
    restore(tmp_path / "backup", tmp_path / "new")
    store = opened(tmp_path / "new")
    assert store.payloads("topic") == PAYLOADS
    store.close()


def test_a_directory_with_anything_in_it_is_not_written_to(stopped, tmp_path):
    run(stopped, tmp_path / "backup")
    target = tmp_path / "new"
    target.mkdir()
    (target / UNFINISHED_NAME).write_text("not ours")
    for attempt in (lambda: restore(tmp_path / "backup", target), lambda: run(stopped, target)):
        with pytest.raises(BackupError, match="is not empty"):
            attempt()
    assert os.listdir(target) == [UNFINISHED_NAME]
    with pytest.raises(BackupError, match="is not empty"):
        restore(tmp_path / "backup", stopped.layout.root)


def test_what_is_no_backup_is_refused(stopped, tmp_path):
    with pytest.raises(BackupError, match="not a backup"):
        restore(stopped.layout.root, tmp_path / "new")
    with pytest.raises(BackupError, match="no directory"):
        restore(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(BackupError, match="lies in the data directory"):
        run(stopped, stopped.layout.root / "backup")
    with pytest.raises(DataDirectoryError, match="holds no Headrace log"):
        back_up(tmp_path / "nothing", tmp_path / "backup", stopped.config.rule, "1")
    run(stopped, tmp_path / "backup")
    opened(tmp_path / "backup").close()
    with pytest.raises(BackupError, match="a server was started on it"):
        restore(tmp_path / "backup", tmp_path / "new")
    (tmp_path / "backup" / MANIFEST_NAME).write_text("{")
    with pytest.raises(BackupError, match="damaged"):
        restore(tmp_path / "backup", tmp_path / "new")


def test_a_backup_is_independent_of_what_it_was_made_from(stopped, tmp_path):
    run(stopped, tmp_path / "backup")
    shutil.rmtree(stopped.layout.root)
    restore(tmp_path / "backup", stopped.layout.root)
    store = opened(stopped.layout.root)
    assert store.payloads("topic") == PAYLOADS
    store.close()


def test_a_backup_of_a_backup_s_restore_jumps_once_more(stopped, tmp_path):
    run(stopped, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    first = opened(tmp_path / "new")
    first.close()
    back_up(tmp_path / "new", tmp_path / "second", first.config.rule, "1")
    catalogue = Catalogue.open(tmp_path / "second")
    assert catalogue.meta().jump_due
    catalogue.close()
    second = opened(tmp_path / "second")
    assert second.store.topic("topic").end_ordinal == len(PAYLOADS) + 2 * JUMP
    second.close()


def test_what_the_old_directory_gave_up_since_is_not_revived(open_store, tmp_path):
    store = open_store()
    for topic in ("topic", "destroyed", "anew", "emptied"):
        fill(store, topic)
    end = store.store.topic("topic").end
    for reader in ("gone", "stays"):
        store.store.set_cursors(reader, {"topic": end}, lambda: None)
    store.change("topic", notes=[Note(b"left", b"1"), Note(b"here", b"1")])
    store.settle()
    store.close()
    run(store, tmp_path / "backup")
    store = open_store()
    store.store.drop_cursors("gone", ["topic"], lambda: None)
    store.change("topic", notes=[Note(b"left", None)])
    store.destroy("destroyed")
    store.destroy("anew")
    store.append("anew", b"another life")
    store.trim("topic", store.store.locate_ordinal(store.store.topic("topic"), 25))
    store.append("emptied", b"later")
    store.trim("emptied", store.store.topic("emptied").end)
    store.settle()
    with pytest.raises(DataDirectoryError, match="clean stop"):
        restore(tmp_path / "backup", tmp_path / "new", old=store.layout.root)
    assert not (tmp_path / "new").exists()
    store.close()
    _, revoked = restore(tmp_path / "backup", tmp_path / "new", old=store.layout.root)
    assert revoked == Revoked(topics=2, trimmed=2, cursors=1, notes=1)
    assert not verify(tmp_path / "new").damaged
    new = opened(tmp_path / "new")
    assert new.payloads("topic") == PAYLOADS[25:]
    assert new.payloads("emptied") == []
    assert new.store.kept(new.store.topic("emptied")) == (0, 0)
    assert [one.name for one in new.store.topics("", "", 10)] == ["emptied", "topic"]
    assert [one.reader for one in new.store.cursors(limit=10)] == ["stays"]
    assert new.store.note(b"left") is None
    assert new.store.note(b"here") is not None
    new.append("anew", b"a third life")
    assert new.payloads("anew") == [b"a third life"]
    new.close()


def test_cursors_of_a_restored_log_lie_where_they_were_in_its_new_life(open_store, tmp_path):
    store = open_store()
    fill(store)
    at = store.store.locate_ordinal(store.store.topic("topic"), 5)
    store.store.set_cursors("reader", {"topic": at}, lambda: None)
    store.close()
    run(store, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    new = opened(tmp_path / "new")
    (found,) = new.store.cursors(limit=10)
    assert found.position == at._replace(epoch=new.store.topic("topic").epoch)
    assert found.position.epoch > at.epoch
    new.close()


def test_a_directory_that_is_not_the_log_of_the_backup_revokes_nothing(open_store, tmp_path):
    store = open_store()
    fill(store)
    store.close()
    run(store, tmp_path / "backup")
    other = opened(tmp_path / "other")
    other.close()
    for many in range(2):
        with pytest.raises(DataDirectoryError, match="is not the log that the backup was made of"):
            restore(tmp_path / "backup", tmp_path / "new", old=tmp_path / "other")
        assert not (tmp_path / "new").exists()
        if not many:
            other = opened(tmp_path / "other")
            for number in range(100):  # more commits than the log has, and in other topics
                other.append(f"other-{number % 3}", b"x")
            other.close()


def test_a_directory_that_nobody_may_write_to_is_backed_up(stopped, tmp_path, monkeypatch):
    (stopped.layout.root / "lock").unlink(missing_ok=True)
    monkeypatch.setattr(module.os, "access", lambda *_: False)  # root may write anywhere
    run(stopped, tmp_path / "backup")
    assert not (stopped.layout.root / "lock").exists()
    assert read_manifest(tmp_path / "backup").records == len(PAYLOADS)
