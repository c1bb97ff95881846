"""Batches of a store: appended once and in order, even if repeated, damaged or destroyed."""

import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from headrace.errors import BatchNumberError, StagedClaimedError, UnknownStagedError
from headrace.log.batch import batches, staging
from headrace.log.catalogue.catalogue import (
    BACKUP_NAME,
    FILE_NAME,
    Catalogue,
    DamagedCatalogueError,
)
from headrace.log.catalogue.rows import _SCHEMA_1, FORMAT
from headrace.log.commit import journal
from headrace.log.commit.journal import RECENT_MAX
from headrace.log.store import BatchAnswer, BatchPart, BatchRefusedError, Block
from headrace.log.verify.verify import verify
from headrace.model import LOGUX_PREFIX
from tests.fakes.disk import DiskModel, RecordingDisk, flip
from tests.fakes.store import StepStore
from tests.log.conftest import tiny

NEW = BatchAnswer(duplicate=False, records=3)
DUPLICATE = BatchAnswer(duplicate=True, records=0)


def stage(store: StepStore, name: bytes = b"row", topic: str = "a") -> str:
    return store.stage((topic, [name + b" 1", name + b" 2"]), ("b", [name + b" 3"]))


def staged_names(store: StepStore) -> list[str]:
    return sorted(path.name for path in store.layout.staged.iterdir())


def many(store: StepStore, topic: str, count: int) -> tuple[str, list[bytes]]:
    """Stage a file of `count` blocks, each of which becomes a commit; return its id and all payloads."""
    payloads = [b"%05d" % number + bytes(3000) for number in range(count)]
    return store.stage(*((topic, [payload]) for payload in payloads)), payloads


def test_a_batch_is_appended_in_the_order_in_which_its_files_are_named(store):
    first, second = stage(store, b"x"), stage(store, b"y")
    assert store.batch("p", 0, second, first) == BatchAnswer(duplicate=False, records=6)
    assert store.payloads("a") == [b"y 1", b"y 2", b"x 1", b"x 2"]
    assert store.payloads("b") == [b"y 3", b"x 3"]


def test_a_number_that_was_written_is_a_duplicate(open_store):
    store = open_store()
    assert store.batch("p", 5, stage(store)) == NEW
    assert store.batch("p", 5, stage(store, b"again")) == DUPLICATE
    assert store.batch("q", 5, stage(store, b"q")) == NEW
    store.settle()
    assert store.batch("p", 5, "no such file") == DUPLICATE
    store = open_store()
    assert store.batch("p", 5) == DUPLICATE
    assert store.batch("p", 6, stage(store, b"next")) == NEW
    assert store.payloads("b") == [b"row 3", b"q 3", b"next 3"]


def test_a_number_that_was_passed_over_is_refused(open_store):
    store = open_store()
    for number in (2, 5, 9):
        store.batch("p", number)
    for _ in range(2):
        for number in (0, 1, 3, 4, 6, 8):
            with pytest.raises(BatchNumberError, match=f"batch {number} of producer 'p'"):
                store.batch("p", number)
        for number in (2, 5, 9):
            assert store.batch("p", number) == DUPLICATE
        store.settle()
        store = open_store()


def test_a_number_of_long_ago_is_taken_for_a_duplicate(open_store):
    store = open_store()
    for number in range(10, 10 + 2 * RECENT_MAX, 2):
        store.batch("p", number)
    store.batch("p", 100)
    store = open_store()
    assert store.batch("p", 3) == DUPLICATE
    with pytest.raises(BatchNumberError):
        store.batch("p", 99)


def test_who_was_told_to_ask_again_gets_the_answer(store):
    staged, _ = many(store, "a", 10)
    answers: list[BatchAnswer | None] = []
    first = lambda answer: answers.append(None)  # noqa: E731
    store.store.batches.decide("p", 0, [staged], first)
    store.runner.step()
    store.store.batches.withdraw(first)
    store.store.batches.decide("p", 0, [staged], answers.append)
    store.runner.run()
    assert answers == [BatchAnswer(duplicate=False, records=10)]


def test_the_files_of_a_duplicate_are_deleted(store):
    store.batch("p", 5, stage(store))
    kept = stage(store, b"kept")
    store.batch("p", 5, stage(store, b"again"))
    store.settle()
    assert staged_names(store) == [kept]


def test_a_batch_may_be_empty(open_store):
    store = open_store()
    assert store.batch("p", 0) == BatchAnswer(duplicate=False, records=0)
    assert store.batch("p", 1, store.stage()) == BatchAnswer(duplicate=False, records=0)
    store = open_store()
    assert store.batch("p", 1) == DUPLICATE
    assert staged_names(store) == []


def test_nothing_is_decided_when_a_file_is_not_there(store):
    good = stage(store)
    with pytest.raises(UnknownStagedError):
        store.batch("p", 0, good, "f" * 32)
    assert store.batch("p", 0, good) == NEW


def test_a_file_of_a_batch_that_is_being_appended_is_refused_to_others(store):
    staged, payloads = many(store, "a", 10)
    answers: list[BatchAnswer | None] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    with pytest.raises(StagedClaimedError):
        store.store.batches.decide("q", 0, [staged], answers.append)
    store.runner.run()
    with pytest.raises(StagedClaimedError):
        store.batch("q", 0, staged)
    assert store.payloads("a") == payloads


def test_who_asks_while_the_batch_is_being_appended_waits_and_is_told_of_a_duplicate(store):
    staged, payloads = many(store, "a", 10)
    answers: list[BatchAnswer | None] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    for _ in range(6):
        store.runner.step()
    store.store.batches.decide("p", 0, [stage(store)], answers.append)
    assert answers == []
    store.runner.run()
    assert answers == [BatchAnswer(duplicate=False, records=10), DUPLICATE]
    assert store.payloads("a") == payloads


def test_a_batch_of_too_many_topics_is_refused_before_they_are_all_in_memory(store, monkeypatch):
    monkeypatch.setattr(staging, "UPLOAD_TOPICS_MAX", 1)
    monkeypatch.setattr(batches, "TOPICS_MAX", 3)
    fits, large = (store.stage(*((f"t{n}", [b"x"]) for n in range(count))) for count in (3, 4))
    answers, judged = [], []
    store.store.batches.decide("p", 1, [large], answers.append, judged.append)
    store.runner.run()
    [refused] = answers
    assert isinstance(refused, BatchRefusedError) and "a batch may have 3 topics" in str(refused)
    assert not judged and large in staged_names(store)
    store.store.batches.decide("p", 1, [fits], answers.append, judged.append)
    store.runner.run()
    assert answers[1] == NEW
    assert judged == [{"t0", "t1", "t2"}]


def test_the_caller_is_told_when_a_batch_is_over_unless_it_has_refused_the_batch(store):
    told: list[str] = []

    def decide(number: int, name: str, refused: BatchRefusedError | None = None) -> None:
        store.store.batches.decide(
            "p",
            number,
            [stage(store)],
            lambda answer: told.append("answer"),
            lambda topics: refused,
            lambda: told.append(name),
        )

    decide(1, "first")
    assert told == []
    store.runner.run()
    assert told == ["first", "answer"]
    with pytest.raises(BatchRefusedError):
        decide(2, "refused", BatchRefusedError("no"))
    decide(1, "duplicate")
    store.runner.run()
    assert told == ["first", "answer", "answer"]


def test_batches_of_a_producer_are_appended_one_after_another(store):
    answers: list[BatchAnswer | None] = []
    ids = [many(store, "a", 5)[0] for _ in range(3)]
    for number, staged in enumerate(ids):
        store.store.batches.decide("p", number, [staged], answers.append)
    store.runner.run()
    assert [answer.records for answer in answers if answer] == [5, 5, 5]
    assert [payload[:5] for payload in store.payloads("a")] == [b"%05d" % n for n in range(5)] * 3


def test_a_batch_leaves_room_for_other_publishers(store):
    staged, _ = many(store, "a", 60)
    answers: list[BatchAnswer | None] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    others: list[int] = []
    """Progress of the batch at each commit of another publisher's record."""

    def publish() -> None:
        records = [b"\0\0\0\1x"]
        store.store.append({store.store.topic("other"): records}, committed)

    def committed() -> None:
        others.append(store.store.topic("a").end_ordinal)
        if not answers:
            publish()

    publish()
    pending = []
    while store.runner.step():
        pending.append(store.store.pending_bytes)
    assert answers
    assert max(pending) < 3 * 4 * 4096
    assert max(later - one for one, later in pairwise(others)) <= 6


def test_a_batch_waits_while_the_journal_is_full_and_then_goes_on(store):
    store.applying = False
    staged, payloads = many(store, "a", 160)
    answers: list[BatchAnswer | None] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    store.runner.run()
    assert answers == []
    assert store.store.held_back
    assert 0 < len(store.payloads("a")) < 160
    store.applying = True
    store.apply_waiting()
    assert answers == [BatchAnswer(duplicate=False, records=160)]
    assert store.payloads("a") == payloads


def test_a_decided_batch_goes_on_after_a_start_and_asking_again_is_a_duplicate(open_store):
    store = open_store()
    staged, payloads = many(store, "a", 12)
    store.store.batches.decide("p", 0, [staged], lambda _: None)
    while store.store.topic("a").end_ordinal < 4:
        store.runner.step()
    store = open_store()
    assert store.payloads("a") == payloads
    assert store.batch("p", 0, stage(store)) == DUPLICATE
    assert store.payloads("a") == payloads


def test_a_batch_that_is_interrupted_by_a_stop_goes_on_after_it(open_store):
    store = open_store()
    staged, payloads = many(store, "a", 40)
    answers: list[BatchAnswer | None] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    while store.store.topic("a").end_ordinal < 4:
        store.runner.step()
    store.store.batches.stop()
    store.close()
    assert answers == [None]
    assert Catalogue.open_for_reading(store.layout.root).meta().clean
    store = StepStore(store.config)
    assert store.payloads("a") == payloads
    assert store.batch("p", 0) == DUPLICATE
    store.close()


def test_staged_files_are_deleted_when_their_batch_is_applied(store):
    staged = stage(store)
    store.batch("p", 0, staged)
    assert staged_names(store) == [staged]
    store.settle()
    assert staged_names(store) == []
    assert store.store.staging.bytes == 0
    assert list(store._catalogue.batches()) == []
    assert store._catalogue.appended_batches() == []


def test_a_topic_destroyed_while_a_batch_is_appended_does_not_bring_it_back(open_store):
    store = open_store()
    staged, _ = many(store, "a", 12)
    store.store.batches.decide("p", 0, [staged], lambda _: None)
    while store.store.topic("a").end_ordinal < 4:
        store.runner.step()
    destroyed: list[bool] = []
    store.store.destroy(store.store.topic("a"), lambda: destroyed.append(True))
    while not destroyed:
        store.runner.step()
    first = store.store.topic("a").end_ordinal
    store = open_store()
    topic = store.store.topic("a")
    assert (topic.start_ordinal, topic.end_ordinal) == (first, 12)


# Durabilities


def test_a_batch_to_memory_topics_is_shown_and_not_appended_again_after_a_start(open_store):
    store = open_store()
    staged = store.stage(("memory/m", [b"one"]), ("a", [b"two"]), ("memory/m", [b"three"]))
    assert store.batch("p", 0, staged) == NEW
    assert store.payloads("memory/m") == [b"one", b"three"]
    assert store.payloads("a") == [b"two"]
    store = open_store()
    assert store.payloads("memory/m") == []
    assert store.payloads("a") == [b"two"]
    assert store.batch("p", 0) == DUPLICATE
    assert staged_names(store) == []


class Unlucky:
    """Random choices with which a crash loses everything that was not synced."""

    def random(self) -> float:
        return 1.0

    def choice(self, fates):
        assert "missing" in fates
        return "missing"


def test_what_a_crash_of_the_machine_takes_from_written_topics_is_appended_again(
    open_store, tmp_path
):
    disk = RecordingDisk()
    config = tiny(tmp_path / "data")
    with disk.record_catalogue():
        store = open_store(config, disk=disk)
        store.append("written/w", b"before")
        store.store.sync_written()
        store.runner.run()
        staged, payloads = many(store, "written/w", 6)
        assert store.batch("p", 0, staged).records == 6
    model = DiskModel(tmp_path / "data")
    for operation in disk.operations:
        model.do(operation)
    model.crashed(tmp_path / "after", None, Unlucky())
    store = open_store(tiny(tmp_path / "after"), boot_id=b"the second boot.")
    assert store.payloads("written/w") == [b"before", *payloads]
    assert store.batch("p", 0) == DUPLICATE


# Closed topics


def refused(store: StepStore, staged: str, number: int = 0) -> str:
    answers: list[object] = []
    over: list[bool] = []
    try:
        store.store.batches.decide(
            "p", number, [staged], answers.append, over=lambda: over.append(True)
        )
    except BatchRefusedError as error:
        assert over == [True]
        return str(error)
    store.runner.run()
    assert over == [True]
    [answer] = answers
    assert isinstance(answer, BatchRefusedError)
    return str(answer)


def test_a_batch_with_records_for_a_closed_topic_is_refused_and_its_uploads_stay(open_store):
    store = open_store()
    store.change("b", b"last", close=True)
    staged = stage(store)
    for _ in range(2):
        assert refused(store, staged) == 'topic "b" is closed: it takes no more records'
        assert store.payloads("a") == [] and store.payloads("b") == [b"last"]
        assert staged_names(store) == [staged]
        store = open_store()
    assert store.batch("p", 0, store.stage(("a", [b"x"]))).records == 1
    store.destroy("b")
    assert store.batch("p", 1, staged) == NEW
    assert store.payloads("b") == [b"row 3"]


def test_records_of_a_decided_batch_never_follow_the_end_of_a_closed_topic(open_store, caplog):
    store = open_store()
    staged, payloads = many(store, "a", 30)
    answers: list[BatchAnswer] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    handle = store.store.topic("a")
    while not handle.end_ordinal:
        assert store.runner.step()
    end = store.change("a", b"last", close=True)
    found = store.payloads("a")
    count = found.index(b"last")
    assert found == [*payloads[:count], b"last"] and 0 < count < 30
    assert store.store.topic("a").end == end
    assert answers == [BatchAnswer(False, count, damaged=30 - count)]
    assert 'are not appended: topic "a" is closed' in caplog.text
    store = open_store()
    assert store.payloads("a") == found
    assert store.batch("p", 0) == DUPLICATE


# Events


EVENT = b'{"event": {"type": "t"}, "created": [1, "x", 0]}'


class Later:
    """Event store that stores events when a test says so."""

    def __init__(self) -> None:
        self.added: list[tuple[list[Block], Callable[[None], None]]] = []

    def check(self, blocks: Callable[[], Iterator[Block]], done: Callable[[None], None]) -> None:
        done(None)

    def add(self, batch: bytes, parts: Sequence[BatchPart], done: Callable[[None], None]) -> None:
        self.added.append(([part.block for part in parts], done))


def test_events_are_left_to_others_and_what_comes_behind_waits_for_them(open_store):
    store = open_store()
    staged = store.stage(("$logux/x", [EVENT]), ("a", [b"one"]), ("$logux/y", [EVENT, EVENT]))
    behind = stage(store)
    answers: list[BatchAnswer | None] = []
    store.store.batches.decide("p", 0, [staged], answers.append)
    store.store.batches.decide("q", 0, [behind], answers.append)
    store.runner.run()
    later = Later()
    store.store.batches.take_over(LOGUX_PREFIX, later)
    store.runner.run()
    [(blocks, done)] = later.added
    assert [(block.topic, block.payloads()) for block in blocks] == [
        ("$logux/x", [EVENT]),
        ("$logux/y", [EVENT, EVENT]),
    ]
    assert store.payloads("a") == [] and answers == []
    done(None)
    store.runner.run()
    assert store.payloads("a") == [b"one", b"row 1", b"row 2"]
    assert answers == [BatchAnswer(duplicate=False, records=4), NEW]
    assert store.payloads("$logux/x") == []
    store = open_store()
    assert store.store.batches.pending == 0


def test_a_stop_waits_for_events_that_are_under_way(open_store):
    store = open_store()
    later = Later()
    store.store.batches.take_over(LOGUX_PREFIX, later)
    staged = store.stage(("$logux/x", [EVENT]), ("a", [b"one"]))
    store.store.batches.decide("p", 0, [staged], lambda _: None)
    store.runner.run()
    store.store.batches.stop()
    settled: list[bool] = []
    store.store.settle(lambda: settled.append(True))
    store.runner.run()
    assert not settled
    later.added[0][1](None)
    store.runner.run()
    assert settled
    assert store.payloads("a") == [b"one"]
    store = open_store()
    assert store.batch("p", 0) == DUPLICATE


def test_events_that_are_not_durable_when_the_server_ends_are_given_again(open_store):
    store = open_store()
    staged = store.stage(("a", [b"one"]), ("$logux/x", [EVENT]), ("a", [b"two"]))
    for _ in range(3):
        later = Later()
        store.store.batches.take_over(LOGUX_PREFIX, later)
        if store.store.batches.pending == 0:
            store.store.batches.decide("p", 0, [staged], lambda _: None)
        store.runner.run()
        assert len(later.added) == 1
        store = open_store()
    store.store.batches.take_over(LOGUX_PREFIX, later := Later())
    later.added[0][1](None)
    store.runner.run()
    assert store.payloads("a") == [b"one", b"two"]


# Damage


def test_damage_in_a_staged_file_is_reported_and_takes_its_block_only(open_store, caplog):
    store = open_store()
    staged = store.stage(("a", [b"one"]), ("a", [b"two"]), ("a", [b"three"]))
    after = store.stage(("a", [b"four"]))
    path = store.layout.staged_file(staged)
    flip(path, path.read_bytes().index(b"two"))
    with caplog.at_level(logging.ERROR):
        assert store.batch("p", 0, staged, after) == NEW._replace(damaged=1)
    assert store.payloads("a") == [b"one", b"three", b"four"]
    [kept] = store.layout.quarantine.iterdir()
    assert kept.name == f"staged-{staged}.bin"
    assert f"staged file {staged}: 1 records have a wrong checksum" in caplog.text
    assert store.store.batches.damage_count == 1


@pytest.mark.parametrize("last", [False, True])
def test_a_staged_file_that_is_gone_does_not_stop_its_batch(open_store, caplog, last):
    store = open_store()
    gone, after = stage(store, b"gone"), stage(store, b"after")
    store.layout.staged_file(gone).unlink()
    with caplog.at_level(logging.ERROR):
        assert store.batch("p", 0, *((after, gone) if last else (gone, after))) == NEW._replace(
            damaged=1
        )
    assert "No such file or directory: its records are lost" in caplog.text
    store = open_store()
    assert store.payloads("b") == [b"after 3"]
    assert store.store.batches.pending == 0
    assert staged_names(store) == []


def test_a_trouble_that_may_pass_loses_nothing(store, monkeypatch):
    staged = stage(store)
    real = os.open

    def open_(path, *rest):
        if "staged" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *rest)

    answers: list[BatchAnswer | None] = []
    with monkeypatch.context() as patch:
        patch.setattr("headrace.log.batch.blocks.os.open", open_)
        store.store.batches.decide("p", 0, [staged], answers.append)
        store.runner.run()
        store.store.batches.tick()
        store.runner.run()
    assert answers == []
    store.store.batches.tick()
    store.runner.run()
    assert answers == [NEW]


def last_frame(store: StepStore) -> tuple[Path, bytes]:
    current = store.store._ring.current
    assert current is not None
    return current.path, current.path.read_bytes()


def test_a_torn_commit_takes_a_batch_back_to_where_it_still_holds(open_store):
    store = open_store()
    staged = store.stage(("a", [b"one"]), ("b", [b"two"]), ("a", [b"three"]), ("b", [b"four"]))
    store.batch("p", 0, staged)
    path, data = last_frame(store)
    flip(path, data.index(b"two"))
    store = open_store()
    assert store.payloads("a") == [b"one", b"three"]
    assert store.payloads("b") == [b"two", b"four"]


def test_damage_of_appended_records_is_damage_and_the_batch_is_not_appended_again(open_store):
    store = open_store()
    staged = store.stage(("a", [b"one"]), ("b", [b"two"]), ("a", [b"three"]))
    store.batch("p", 0, staged)
    store.append("a", b"four")
    path, data = last_frame(store)
    flip(path, data.index(b"two"))
    store = open_store()
    assert store.payloads("a") == [b"one", b"three", b"four"]
    assert store.payloads("b") == []
    assert store.batch("p", 0) == DUPLICATE


def test_a_decision_that_is_damaged_is_reported_and_not_taken_again(open_store):
    store = open_store()
    staged = stage(store)
    store.store.batches.decide("p", 7, [staged], lambda _: None)
    while store.store.last_sequence < 1 or store.store._writing:
        store.runner.step()
    store.store.batches.stop()
    store.append("a", b"vouches for it")
    path, data = last_frame(store)
    flip(path, data.index(bytes.fromhex(staged)))
    assert "the decision of a batch is damaged" in str(verify(store.layout.root).damages)
    store = open_store()
    assert any('batch 7 of producer "p"' in report for report in store.reports)
    assert store.batch("p", 7) == DUPLICATE
    assert store.payloads("a") == [b"vouches for it"]


def test_verify_checks_the_files_of_batches_that_are_not_appended(open_store):
    store = open_store()
    staged, _ = many(store, "a", 40)
    store.store.batches.decide("p", 0, [staged], lambda _: None)
    while store.store.topic("a").end_ordinal < 4:
        store.runner.step()
    store.store.batches.stop()
    store.settle()
    assert len(list(store._catalogue.batches())) == 1
    assert not verify(store.layout.root).damaged
    path = store.layout.staged_file(staged)
    flip(path, path.stat().st_size - 1)
    (damage,) = verify(store.layout.root).damages
    assert damage.file == f"staged/{staged}"


# The catalogue


def pending_store(open_store) -> tuple[StepStore, str, list[bytes]]:
    """Return a store whose catalogue has a batch that is partly appended."""
    store = open_store()
    staged, payloads = many(store, "a", 40)
    store.store.batches.decide("p", 3, [staged], lambda _: None)
    while store.store.topic("a").end_ordinal < 4:
        store.runner.step()
    store.store.batches.stop()
    store.close()
    return store, staged, payloads


def test_a_rebuilt_catalogue_goes_on_with_batches_from_the_damaged_one(open_store, tmp_path):
    store, _, payloads = pending_store(open_store)
    store = after_damage(tmp_path, "damaged", keep_backup=False)
    assert "cursors, producers, batches and notes are from the damaged file" in str(store.reports)
    assert store.payloads("a") == payloads
    assert store.batch("p", 3) == DUPLICATE
    store.crash()


def test_a_rebuilt_catalogue_goes_on_with_batches_from_the_backup_and_says_so(open_store, tmp_path):
    store, _, payloads = pending_store(open_store)
    store = after_damage(tmp_path, "missing", keep_backup=True)
    assert 'batch 3 of producer "p" continues where the backup says' in str(store.reports)
    assert store.payloads("a") == payloads
    store.crash()


def test_a_batch_of_the_backup_whose_files_are_gone_was_appended(open_store, tmp_path):
    store, staged, payloads = pending_store(open_store)
    store = StepStore(store.config)
    store.settle()
    store.crash()
    assert not store.layout.staged_file(staged).exists()
    store = after_damage(tmp_path, "missing", keep_backup=True)
    assert "continues where" not in str(store.reports)
    assert store.payloads("a") == payloads
    store.crash()


def after_damage(tmp_path: Path, what: str, *, keep_backup: bool) -> StepStore:
    root = tmp_path / "data"
    if not keep_backup:
        (root / BACKUP_NAME).unlink()
    if what == "missing":
        for path in root.glob(f"{FILE_NAME}*"):
            path.unlink()
    else:
        with sqlite3.connect(root / FILE_NAME) as db:
            db.execute("CREATE TABLE strange (x)")
        db.close()
    return StepStore(tiny(root))


def make_format_1(path: Path) -> None:
    """Turn a catalogue into that of an earlier version: the same without batches and notes."""
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE batches")
        db.execute("DROP TABLE notes")
    db.close()
    catalogue = Catalogue.open(path.parent, name=path.name)
    catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), format=1))
    assert catalogue._schema() == _schema(_SCHEMA_1)
    catalogue.close()


def _schema(script: str) -> list[tuple[object, ...]]:
    db = sqlite3.connect(":memory:")
    db.executescript(script)
    found = list(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
    db.close()
    return found


def test_a_directory_of_format_1_is_verified_opened_and_loses_nothing(open_store, tmp_path):
    store = open_store()
    store.append("a", b"one", b"two")
    store.append_once("b", "p", 7, b"numbered")
    store.append("gone", b"x")
    store.destroy("gone")
    end = store.store.topic("gone").end
    store.close()
    shutil.rmtree(store.layout.staged)
    for name in (FILE_NAME, BACKUP_NAME):
        make_format_1(store.layout.root / name)
    assert not verify(store.layout.root).damaged
    store = StepStore(tiny(tmp_path / "data"))
    assert store.reports == []
    assert store._catalogue.meta().format == FORMAT
    store._catalogue.check()
    assert store.payloads("a") == [b"one", b"two"]
    assert store.append_once("b", "p", 7, b"numbered").duplicate
    assert store.store.topic("gone").end[1:] == end[1:]
    assert store.batch("p", 0, stage(store)) == NEW
    store.crash()


def test_a_catalogue_whose_tables_are_not_those_of_its_format_is_damaged(store):
    catalogue = store._catalogue
    catalogue.put_meta(msgspec.structs.replace(catalogue.meta(), format=1))
    with pytest.raises(DamagedCatalogueError, match="not those of its format"):
        catalogue.check()


def test_a_producers_numbers_of_batches_are_not_those_of_a_topic(store):
    store.batch("p", 9, stage(store))
    assert not store.append_once("a", "p", 1, b"numbered").duplicate
    assert store.batch("p", 10, stage(store)) == NEW


def test_entries_of_the_journal_have_the_documented_kinds():
    assert (journal.DECIDE, journal.ADVANCE) == (6, 7)
