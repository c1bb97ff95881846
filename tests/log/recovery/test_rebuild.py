"""Repairs: what a disk or a person damaged is restored as far as possible, and offsets never go back."""

import os
import shutil
from contextlib import suppress

import pytest

from headrace.log.catalogue.catalogue import BACKUP_NAME, FILE_NAME
from headrace.log.disk import Disk
from headrace.log.read.index import HEADER_BYTES, ROW_BYTES, decode_rows, row_position
from headrace.log.recovery import rebuild
from headrace.log.store import StoredAppend
from headrace.log.verify.verify import verify
from headrace.model import JUMP
from tests.fakes.disk import flip

PAYLOADS = [b"%d" % number * (number % 40) for number in range(40)]


def fill(store, topic="topic", payloads=PAYLOADS, every=6):
    """Append one record at a time, to several segments of several runs."""
    for number, payload in enumerate(payloads):
        store.clock.ms += 40
        store.append(topic, payload)
        if number % every == every - 1:
            store.settle()
    store.settle()


@pytest.fixture
def stopped(open_store):
    """A stopped store with a topic in several segments."""
    store = open_store()
    fill(store)
    store.close()
    return store


def files(store, suffix, topic_id=1):
    found = [file for file in store.layout.files(suffix) if file.topic_id == topic_id]
    return [file.path for file in sorted(found)]


# Index files


@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_missing_index_is_rebuilt_from_its_records(stopped, open_store, number):
    before = open_store().content("topic")
    paths = files(stopped, ".idx")
    open_store().close()
    paths[number].unlink()
    store = open_store()
    assert store.content("topic") == before
    assert [report for report in store.reports if "rebuilt, 0 records" in report]
    store.append("topic", b"more")
    store.settle()
    assert store.payloads("topic") == [*PAYLOADS, b"more"]
    assert open_store().reports == []


@pytest.mark.parametrize(
    "cut", [0, 3, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + ROW_BYTES + 9]
)
def test_an_index_that_was_cut_is_rebuilt_from_its_records(stopped, open_store, cut):
    before = open_store().content("topic")
    open_store().close()
    path = max(files(stopped, ".idx"), key=lambda path: path.stat().st_size)
    os.truncate(path, cut)
    store = open_store()
    assert store.content("topic") == before
    topic = store.store.topic("topic")
    for offset, (ordinal, _) in before.items():
        assert store.store.locate_ordinal(topic, ordinal).offset == offset


def test_who_asks_for_a_time_misses_nothing_after_an_index_was_rebuilt(stopped, open_store):
    store = open_store()
    topic = store.store.topic("topic")
    first, last = store.store.segments(topic)[0].first_ms, topic.last_ms
    before = {ms: store.store.locate_time(topic, ms).offset for ms in range(first, last + 1, 20)}
    store.close()
    for path in files(stopped, ".idx"):
        path.unlink()
    store = open_store()
    topic = store.store.topic("topic")
    for ms, offset in before.items():
        assert store.store.locate_time(topic, ms).offset <= offset
    assert store.store.locate_time(topic, last + 1) == topic.end


def test_records_without_a_payload_are_found_again(open_store):
    store = open_store()
    fill(store, payloads=[b""] * 100)
    store.close()
    for path in files(store, ".idx"):
        path.unlink()
    assert open_store().payloads("topic") == [b""] * 100


def test_zeros_are_not_taken_for_records_without_an_index(open_store):
    store = open_store()
    fill(store, payloads=[b"x" * 36] * 3, every=3)
    store.close()
    (log,), (index,) = files(store, ".log"), files(store, ".idx")
    data = log.read_bytes()
    log.write_bytes(
        data[:40] + bytes(80)
    )  # two records are zeros now, which look like twenty empty records
    index.unlink()
    store = open_store()
    assert [payload for payload in store.payloads("topic") if payload] == [b"x" * 36]
    assert store.store.topic("topic").end[1:] == (120, 3)
    assert len(store.payloads("topic")) <= 3


def test_a_rebuilt_index_keeps_the_rows_that_hold(stopped, open_store):
    path = max(files(stopped, ".idx"), key=lambda path: path.stat().st_size)
    rows = list(decode_rows(path.read_bytes()[HEADER_BYTES:]))
    assert len(rows) > 2
    os.truncate(path, row_position(2) + 5)
    open_store()
    again = list(decode_rows(path.read_bytes()[HEADER_BYTES:]))
    assert again[:2] == rows[:2]
    assert again[-1].end == rows[-1].end


def test_a_damaged_row_costs_no_record_and_is_reported(stopped, open_store, caplog):
    before = open_store().content("topic")
    open_store().close()
    path = max(files(stopped, ".idx"), key=lambda path: path.stat().st_size)
    flip(path, row_position(1) + 2)
    assert open_store().content("topic") == before
    assert "its rows are damaged" in caplog.text


# Segments


@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_missing_segment_costs_its_own_records(stopped, open_store, number):
    before = open_store().content("topic")
    open_store().close()
    path = files(stopped, ".log")[number]
    base, size = int(path.stem.split("-")[1]), path.stat().st_size
    path.unlink()
    store = open_store()
    assert store.content("topic") == {
        offset: record for offset, record in before.items() if not base <= offset < base + size
    }
    assert any(f"its last {size} bytes are lost" in report for report in store.reports)
    end = store.store.topic("topic").end_offset
    store.append("topic", b"more")
    store.settle()
    assert store.read("topic")[-1] == (end + 8, b"more")
    assert open_store().payloads("topic")[-1] == b"more"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_segment_that_was_cut_serves_whole_runs_and_goes_on(stopped, open_store, share):
    before = open_store().content("topic")
    open_store().close()
    path = files(stopped, ".log")[-1]
    base, size = int(path.stem.split("-")[1]), path.stat().st_size
    os.truncate(path, int(size * share))
    store = open_store()
    found = store.content("topic")
    assert found.items() <= before.items()
    assert {o for o in before if o < base} <= set(found)
    store.append("topic", b"more")
    store.settle()
    assert store.content("topic").items() >= found.items()
    assert store.payloads("topic")[-1] == b"more"


def test_segment_and_index_missing_together_cost_their_own_records(stopped, open_store):
    before = open_store().content("topic")
    open_store().close()
    path = files(stopped, ".log")[1]
    base, size = int(path.stem.split("-")[1]), path.stat().st_size
    path.unlink()
    path.with_suffix(".idx").unlink()
    store = open_store()
    kept = {offset: one for offset, one in before.items() if not base <= offset < base + size}
    assert store.content("topic") == kept
    store.append("topic", b"more")
    store.settle()
    assert store.payloads("topic")[-1] == b"more"


def test_files_that_the_catalogue_does_not_name_are_deleted(stopped, open_store):
    log, index = files(stopped, ".log")[0], files(stopped, ".idx")[0]
    for path in (log, index):
        shutil.copy(path, path.with_name(path.name.replace("1-", "77-", 1)))
    store = open_store()
    assert files(store, ".log", 0x77) == files(store, ".idx", 0x77) == []
    assert store.payloads("topic") == PAYLOADS


# The catalogue


def lose(store):
    (store.layout.root / FILE_NAME).unlink()
    (store.layout.root / BACKUP_NAME).unlink(missing_ok=True)


def spoil(store):
    (store.layout.root / FILE_NAME).write_bytes(b"not a database " * 1000)
    (store.layout.root / BACKUP_NAME).unlink(missing_ok=True)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("damage", [lose, spoil])
def test_topics_are_found_again_without_a_catalogue(open_store, damage, killed):
    store = open_store()
    fill(store)
    fill(store, "other", PAYLOADS[:9])
    store.append("topic", b"in the journal")
    store.append("new", b"in the journal")
    before = {name: store.content(name) for name in ("topic", "other", "new")}
    spans = {name: store.store.topic(name).end for name in before}
    if killed:
        store.crash()
    else:
        store.close()
    damage(store)
    store = open_store()
    assert {name: store.content(name) for name in before} == before
    for name, end in spans.items():
        topic = store.store.topic(name)
        assert topic.epoch > end.epoch
        assert topic.end_offset == end.offset + JUMP  # nobody knows the true end
        assert topic.end_ordinal == end.ordinal + JUMP
    assert any("3 topics continue with a new epoch" in report for report in store.reports)
    store.append("topic", b"after")
    store.settle()
    assert store.payloads("topic") == [*PAYLOADS, b"in the journal", b"after"]
    assert open_store().reports == []


def test_names_that_are_not_found_again_start_above_everything(open_store):
    store = open_store()
    fill(store)
    store.append("gone", b"x" * 1000)
    store.destroy("gone")
    ends = [store.store.topic(name).end for name in ("topic", "gone")]
    store.close()
    lose(store)
    store = open_store()
    assert not store.store.topic("gone").exists
    for name in ("gone", "never known"):
        start = store.store.topic(name).end
        assert start.offset > max(end.offset for end in ends)
        assert start.ordinal > max(end.ordinal for end in ends)
        store.append(name, b"new")
        assert store.store.topic(name).epoch > max(end.epoch for end in ends)


def test_a_trimmed_start_is_found_again_as_far_as_segments_say(open_store):
    store = open_store()
    fill(store)
    topic = store.store.topic("topic")
    store.trim("topic", store.store.locate_ordinal(topic, 20))
    store.close()
    lose(store)
    store = open_store()
    found = store.payloads("topic")
    assert found[-20:] == PAYLOADS[20:]
    assert len(found) < 40


def test_the_journal_is_read_when_there_is_nothing_else(open_store):
    store = open_store()
    store.append("topic", b"one", b"two")
    store.crash()
    lose(store)
    store = open_store()
    assert store.payloads("topic") == [b"one", b"two"]


def test_producers_come_back_from_the_backup_and_from_the_journal(open_store):
    store = open_store()
    store.append_once("topic", "early", 3, b"x")
    store.settle()
    store._catalogue.keep_backup(Disk())
    store.append_once("topic", "late", 5, b"y")
    store.settle()
    end = store.store.topic("topic").end_offset
    store.crash()
    (store.layout.root / FILE_NAME).write_bytes(b"")
    store = open_store()
    assert store.append_once("topic", "early", 3, b"x").duplicate
    assert store.append_once("topic", "late", 5, b"y") == StoredAppend(end, duplicate=True)
    assert not store.append_once("topic", "late", 6, b"z").duplicate
    assert any("from the backup" in report for report in store.reports)


def test_a_topic_that_was_destroyed_after_the_backup_does_not_come_back(open_store):
    store = open_store()
    fill(store)
    fill(store, "gone", PAYLOADS[:9])
    store._catalogue.keep_backup(Disk())
    end = store.store.topic("gone").end_offset
    store.append("gone", b"x" * 5000)
    store.destroy("gone")
    store.settle()
    end = store.store.topic("gone").end_offset
    store.crash()
    (store.layout.root / FILE_NAME).unlink()
    store = open_store()
    assert not store.store.topic("gone").exists
    assert store.store.topic("gone").end_offset > end
    assert store.payloads("topic") == PAYLOADS


def test_rows_that_hold_are_taken_from_the_damaged_catalogue_itself(open_store):
    store = open_store()
    fill(store)
    store.append_once("topic", "p", 1, b"x")
    store.settle()
    store._catalogue._db.execute("UPDATE topics SET crc = crc + 1")
    store.crash()
    store = open_store()
    assert store.payloads("topic") == [*PAYLOADS, b"x"]
    assert store.append_once("topic", "p", 1, b"x").duplicate
    assert any("a row of topics is damaged" in report for report in store.reports)
    assert any("from the damaged file" in report for report in store.reports)
    kept = [path for path in store.layout.root.iterdir() if path.name.startswith("damaged-")]
    assert kept, "nothing is thrown away"


@pytest.mark.parametrize("killed", [False, True])
def test_an_older_catalogue_that_someone_put_back_loses_nothing(open_store, tmp_path, killed):
    store = open_store()
    fill(store, payloads=PAYLOADS[:10])
    store.close()
    shutil.copy(store.layout.root / FILE_NAME, tmp_path / "older")
    store = open_store()
    fill(store, payloads=PAYLOADS[10:])  # more than the journal still holds
    end = store.store.topic("topic").end_offset
    store.append("topic", b"the last")
    if killed:
        store.crash()
    else:
        store.close()
    for suffix in ("", "-wal", "-shm"):
        (store.layout.root / f"{FILE_NAME}{suffix}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "older", store.layout.root / FILE_NAME)
    store = open_store()
    assert store.payloads("topic") == [*PAYLOADS, b"the last"]
    assert store.store.topic("topic").end_offset > end
    assert any("it is older than the journal" in report for report in store.reports)


def test_an_older_catalogue_is_good_enough_while_the_journal_is_complete(open_store, tmp_path):
    store = open_store()
    store.append("topic", b"1")
    shutil.copy(store.layout.root / FILE_NAME, tmp_path / "older")
    for payload in (b"2", b"3"):
        store.rotate()
        store.append("topic", payload)
    store.crash()
    for suffix in ("", "-wal", "-shm"):
        (store.layout.root / f"{FILE_NAME}{suffix}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "older", store.layout.root / FILE_NAME)
    store = open_store()
    assert store.reports == []
    assert store.payloads("topic") == [b"1", b"2", b"3"]


def test_of_two_lives_of_a_name_the_later_one_counts(open_store, monkeypatch):
    store = open_store()
    fill(store)
    store.settle()
    # Files of the first life are no longer deleted.
    monkeypatch.setattr(Disk, "unlink", lambda *_: None)
    store.destroy("topic")
    store.append("topic", b"the second life")
    store.settle()
    store.crash()
    monkeypatch.undo()
    lose(store)
    for path in store.layout.journal_files():
        path.unlink()
    store = open_store()
    assert store.payloads("topic") == [b"the second life"]
    assert store.layout.quarantine.exists()


def test_a_rebuild_that_was_killed_is_done_again(stopped, open_store, monkeypatch):
    lose(stopped)
    for name in ("_set_aside", "_set_aside_segments"):

        def killed(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(rebuild, name, killed)
            with pytest.raises(KeyboardInterrupt):
                open_store()
    store = open_store()
    assert store.payloads("topic") == PAYLOADS
    assert store.store.topic("topic").end_offset > JUMP


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_rows_that_hold_survive_a_kill_of_the_rebuild(open_store, monkeypatch, changes):
    store = open_store()
    store.append_once("topic", "p", 1, b"x")
    fill(store)  # more than the journal still holds
    store._catalogue._db.execute("UPDATE topics SET crc = crc + 1")
    store.crash()
    left = iter(range(changes))

    def or_killed(change):
        def call(*args):
            if next(left, None) is None:
                raise KeyboardInterrupt
            change(*args)

        return call

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Disk, "rename", or_killed(Disk.rename))
        patch.setattr(Disk, "link", or_killed(Disk.link))
        open_store()
    store = open_store()
    assert store.payloads("topic") == [b"x", *PAYLOADS]
    assert store.append_once("topic", "p", 1, b"x").duplicate


def test_a_segment_that_nothing_vouches_for_is_kept_aside(stopped, open_store):
    lose(stopped)
    log = files(stopped, ".log")[0]
    data = log.read_bytes()
    log.with_suffix(".idx").unlink()
    for path in stopped.layout.journal_files():
        path.unlink()
    store = open_store()
    assert (store.layout.quarantine / log.name).read_bytes() == data
    assert store.payloads("topic") == PAYLOADS[-len(store.payloads("topic")) :]


def test_a_catalogue_whose_tables_are_not_text_any_more_is_rebuilt(stopped, open_store):
    """SQLite quotes the damaged text in its error, which Python then cannot decode."""
    path = stopped.layout.root / FILE_NAME
    data = bytearray(path.read_bytes())
    data[data.index(b"CREATE TABLE") + 4] = 0xAB
    path.write_bytes(data)
    assert [damage.file for damage in verify(stopped.layout.root).damages] == [FILE_NAME]
    store = open_store()
    assert "the catalogue is rebuilt" in store.reports[0]
    assert store.payloads("topic") == PAYLOADS
