"""Damage to the last frame after an unclean stop, and to a journal file that reads as zeros.

Neither may be taken for a commit, or a file, that was never written to its end. `test_recovery.py` has all
other damage to the journal.
"""

import pytest

from headrace.config.settings import PrefixRule
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit import journal
from headrace.log.commit.journal import FRAME_FOOT_BYTES, FRAME_HEAD_BYTES
from headrace.log.disk import Disk
from headrace.log.records import pack_record
from headrace.log.recovery.frames import read_header
from headrace.log.verify.verify import verify
from headrace.model import JUMP, Durability
from tests.fakes.disk import flip
from tests.fakes.store import BOOT_ID
from tests.log.conftest import tiny
from tests.log.recovery.test_recovery import Journal

OTHER_BOOT = b"the second boot."
RECORDS = [b"%02d" % number * 8 for number in range(20)]


def last_of(store):
    """Kill the store; return file, content and place of its last frame."""
    store.crash()
    path, position, frame = Journal(store).frames()[-1]
    return path, path.read_bytes(), position, frame


@pytest.fixture(autouse=True)
def _same_boot(monkeypatch):
    """Let `verify` see the boot of the stores, unless a test says that the machine has crashed."""
    monkeypatch.setattr(journal, "boot_id", lambda: BOOT_ID)


@pytest.fixture
def two_topics(open_store):
    """A store with twenty acknowledged records of each of two topics in its last frame."""
    store = open_store()
    store.append("a", b"first")
    store.append("b", b"first")
    batches = {store.store.topic(name): list(map(pack_record, RECORDS)) for name in ("a", "b")}
    done = []
    store.store.append(batches, lambda: done.append(True))
    store.runner.run()
    assert done
    return store


def test_a_flipped_bit_in_a_last_frame_with_its_foot_costs_one_entry_and_is_reported(
    two_topics, open_store
):
    end = two_topics.store.topic("a").end
    path, data, _, _ = last_of(two_topics)
    flip(path, data.index(RECORDS[3]))
    report = verify(two_topics.layout.root)
    assert report.damaged
    assert [bool(topic.damages) for topic in report.topics] == [True, False]
    store = open_store()
    assert any("damage: kept in quarantine" in one for one in store.reports)
    assert len(Journal(store).quarantined()) == 1
    assert store.payloads("a") == [b"first"]
    assert store.payloads("b") == [b"first", *RECORDS]
    assert store.store.topic("a").end[1:] == end[1:], "no offset is given twice"
    assert open_store().reports == []


@pytest.mark.parametrize("what", ["an entry's header", "the head"])
def test_what_nobody_can_tell_from_a_last_frame_with_its_foot_makes_topics_jump(
    two_topics, open_store, what
):
    path, data, position, frame = last_of(two_topics)
    if what == "the head":
        # The block with the head is lost, together with the entries in it.
        length = frame.end - FRAME_FOOT_BYTES - position
        path.write_bytes(data[:position] + bytes(length) + data[position + length :])
    else:
        flip(path, position + FRAME_HEAD_BYTES + 9)
    assert verify(two_topics.layout.root).damaged
    store = open_store()
    assert any("damage: kept in quarantine" in one for one in store.reports)
    assert Journal(store).quarantined()
    assert store.store.topic("a").end_offset >= JUMP
    assert store.store.topic("b").end_offset >= JUMP
    assert open_store().reports == []


def test_a_last_frame_without_its_foot_was_never_acknowledged(two_topics, open_store):
    path, data, _, frame = last_of(two_topics)
    path.write_bytes(data[: data.rindex(RECORDS[19])] + bytes(len(data) - data.rindex(RECORDS[19])))
    assert frame.end < len(data)
    assert not verify(two_topics.layout.root).damaged
    store = open_store()
    assert all("never acknowledged" in one for one in store.reports)
    assert store.payloads("b") == [b"first"]
    assert store.store.topic("b").end_offset < JUMP


@pytest.mark.parametrize("content", ["flipped", "zeros"])
def test_after_a_crash_of_the_machine_a_last_frame_with_its_foot_is_in_doubt(
    two_topics, open_store, monkeypatch, content
):
    path, data, _, _ = last_of(two_topics)
    place = data.index(RECORDS[3])
    if content == "zeros":
        # The disk may have written the foot before this sector: nobody can know.
        place -= place % 512
        path.write_bytes(data[:place] + bytes(512) + data[place + 512 :])
    else:
        flip(path, place)
    monkeypatch.setattr(journal, "boot_id", lambda: OTHER_BOOT)
    assert verify(two_topics.layout.root).damaged
    store = open_store(boot_id=OTHER_BOOT)
    assert any("may have been acknowledged" in one for one in store.reports)
    assert Journal(store).quarantined()
    assert store.store.topic("a").end_offset >= JUMP
    assert open_store(boot_id=OTHER_BOOT).reports == []
    assert not verify(two_topics.layout.root).damaged


def test_a_bad_frame_before_the_last_one_was_not_synced_when_the_machine_crashed(open_store):
    rules = (PrefixRule(prefix="w", durability=Durability.WRITTEN),)
    config = tiny(open_store().layout.root, topics=rules)
    store = open_store(config, boot_id=BOOT_ID)
    for payload in (b"made", b"named", RECORDS[0], RECORDS[1]):
        store.append("w", payload)
    path, data, _, _ = last_of(store)
    flip(path, data.index(RECORDS[0]))
    store = open_store(config, boot_id=OTHER_BOOT)
    assert any("never acknowledged: dropped" in one for one in store.reports)
    assert Journal(store).quarantined() == []
    assert store.store.topic("w").end_offset >= JUMP


# Files of zeros


def newest_as_zeros(store):
    path, data, _, _ = last_of(store)
    path.write_bytes(bytes(len(data)))
    return path


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("boot_id", [BOOT_ID, OTHER_BOOT])
def test_a_newest_journal_file_of_zeros_is_damage(open_store, is_first, boot_id):
    store = open_store()
    if not is_first:
        store.append("a", b"applied")
        store.settle()
    for number in range(20):
        store.append("a", b"%d" % number)
    end = store.store.topic("a").end_offset
    newest_as_zeros(store)
    assert verify(store.layout.root).damaged
    store = open_store(boot_id=boot_id)
    assert any("neither copy of its header can be read" in one for one in store.reports)
    assert len(Journal(store).quarantined()) == 1
    assert store.store.topic("a").end_offset > end
    store.append("a", b"goes on")
    assert store.payloads("a")[-1] == b"goes on"
    store = open_store(boot_id=boot_id)
    assert store.reports == []
    assert not verify(store.layout.root).damaged


def test_files_that_were_never_used_are_no_damage(open_store):
    root = open_store().layout.root
    for boot_id in (BOOT_ID, BOOT_ID, OTHER_BOOT):
        store = open_store(boot_id=boot_id)
        assert store.reports == []
        assert not verify(root).damaged
    headers = [read_header(path) for path in store.layout.journal_files()]
    assert [header.first for header in headers] == [0, 0, 0]


@pytest.mark.parametrize("position", journal.HEADER_POSITIONS)
def test_a_bad_block_of_a_file_that_was_never_used_costs_nothing(open_store, position):
    store = open_store()
    store.append("a", b"in the first file")
    store.crash()
    path = store.layout.journal_files()[-1]
    data = path.read_bytes()
    path.write_bytes(data[:position] + bytes(4096) + data[position + 4096 :])
    store = open_store()
    assert store.payloads("a") == [b"in the first file"]
    assert store.reports == []


def test_a_file_that_was_cut_before_its_first_use_is_made_again(open_store):
    store = open_store()
    store.append("a", b"in the first file")
    store.crash()
    path = store.layout.journal_files()[-1]
    path.write_bytes(path.read_bytes()[:20_000])
    assert not verify(store.layout.root).damaged
    store = open_store()
    assert store.reports == []
    assert path.stat().st_size == store.config.journal.file_bytes


def test_blank_files_of_an_earlier_version_get_headers_and_are_no_damage(open_store):
    store = open_store()
    store.append("a", b"in the first file")
    store.crash()
    unused = store.layout.journal_files()[1:]
    for path in unused:
        path.write_bytes(bytes(path.stat().st_size))
    catalogue = Catalogue.open(store.layout.root)
    with catalogue.transaction():
        catalogue.change_meta(journal_headers=False)
    catalogue.close()
    assert not verify(store.layout.root).damaged
    store = open_store()
    assert store.reports == []
    assert store.payloads("a") == [b"in the first file"]
    assert all(map(read_header, unused))
    newest_as_zeros(store)
    assert any("neither copy" in one for one in open_store().reports)


def test_a_kill_between_the_steps_of_a_preparation_looks_like_no_damage(open_store):
    """The steps are: the file without its name, its name, the catalogue."""
    store = open_store()
    store.append("a", b"stored")
    store.crash()
    fourth = store.layout.journal_file(3)
    fourth.with_suffix(".new").write_bytes(bytes(5000))
    assert open_store().reports == []
    journal.prepare_file(Disk(), fourth, 65_536, 1)
    assert not verify(store.layout.root).damaged
    store = open_store()
    assert store.reports == []
    assert store.payloads("a") == [b"stored"]


def test_the_first_start_may_end_after_its_journal_files_and_lose_its_catalogue(open_store):
    store = open_store()
    store.crash()
    for path in store.layout.root.glob("catalogue*"):
        path.unlink()
    assert open_store().reports == []
