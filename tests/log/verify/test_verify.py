"""`verify` on real directories with tiny segments: it covers everything intact and finds all damage."""

import dataclasses
import random
import re
import shutil
import sqlite3
from itertools import islice
from pathlib import Path

import pytest
from crc32c import crc32c

from headrace.config.settings import Config, Journal, Segment
from headrace.errors import BadTopicNameError, DataDirectoryError, UnknownTopicError
from headrace.log.commit import journal
from headrace.log.layout import Layout
from headrace.log.read.index import HEADER_BYTES, ROW_BYTES, Row, decode_row, encode_row
from headrace.log.recovery import frames as journal_reading
from headrace.log.recovery import scan as journal_scan
from headrace.log.verify import checks
from headrace.log.verify.checks import VerifiedRange
from headrace.log.verify.verify import Report, verify
from headrace.model import JUMP, Durability, Position
from tests.fakes.store import BOOT_ID, StepStore

SEGMENT_BYTES = 64


def config(path: Path) -> Config:
    return Config(
        data_dir=path,
        segment=Segment(bytes=SEGMENT_BYTES),
        journal=Journal(file_bytes=65_536, files=3),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(data: Path) -> StepStore:
    return StepStore(config(data))


def fill(store: StepStore, topic: str, commits: int = 6) -> None:
    """Make commits of a few records each. Each commit is a run; two or three runs fill a segment."""
    for number in range(commits):
        store.clock.ms += 1000
        store.append(topic, b"%d" % number, b"", bytes(number), b"a longer payload")
        if number % 2:
            store.settle()
    store.settle()


@pytest.fixture
def sound(store: StepStore, data: Path) -> Path:
    """A stopped store whose records are all in segments."""
    fill(store, "one")
    fill(store, "two", commits=3)
    store.close()
    return data


@pytest.fixture
def killed(store: StepStore, data: Path) -> Path:
    """A log whose last commits are only in the journal."""
    fill(store, "one", commits=2)
    for number in range(5):
        store.clock.ms += 1000
        store.append("one", b"in the journal %d" % number)
    store.append("new", b"foo")
    store.crash()
    return data


def of(report: Report, topic: str):
    return next(one for one in report.topics if one.name == topic)


def reasons(report: Report) -> list[str]:
    damages = [damage for topic in report.topics for damage in topic.damages]
    return [damage.reason for damage in damages + report.damages]


def files(data: Path, suffix: str) -> list[Path]:
    return sorted(data.glob(f"segments/*/*{suffix}"))


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


# Intact logs


def test_a_sound_log_is_covered_from_its_start_to_its_end(sound):
    report = verify(sound)
    assert not report.damaged
    assert (report.damages, report.notes) == ([], [])
    assert [topic.name for topic in report.topics] == ["one", "two"]
    one = of(report, "one")
    size = sum(4 + len(b"%d" % n) + 4 + 4 + n + 4 + len(b"a longer payload") for n in range(6))
    assert one.ranges == [VerifiedRange(0, size, 0, 24)]
    assert (one.records, one.bytes, one.journal_records) == (24, size, 0)
    assert one.segments == len([f for f in files(sound, ".log") if f.name.startswith("1-")]) > 2


def test_another_function_may_check_the_segments_of_all_topics_together(sound):
    flip(files(sound, ".log")[1], 0)
    given: list[str] = []

    def check(works):
        given.extend(f"{work.topic.name.decode()} {work.segment.base}" for work in works)
        for work in reversed(works):
            made = checks.SegmentCheck(Layout(sound), *work)
            made.run(lambda _: None)
            yield made

    assert verify(sound, check=check) == verify(sound)
    assert len(given) == len(set(given)) == len(files(sound, ".log"))
    given.clear()
    assert verify(sound, ["two"], check=check) == verify(sound, ["two"])
    assert {name.split()[0] for name in given} == {"two"}


def test_a_named_topic_may_be_missing_if_the_caller_says_so(sound):
    with pytest.raises(UnknownTopicError, match="there is no topic 'nobody' in "):
        verify(sound, ["one", "nobody"], may_lack=["two"])
    assert verify(sound, ["one", "nobody"], may_lack=["nobody"]) == verify(sound, ["one"])
    assert verify(sound, ["nobody"], may_lack=["nobody"]) == Report([], [], [], False)


def test_an_empty_directory_of_a_server_is_sound(store, data):
    store.close()
    assert verify(data) == Report([], [], [], False)


def test_only_the_named_topics_are_checked(sound):
    flip(files(sound, ".log")[0], 5)
    assert of(verify(sound), "one").damages
    report = verify(sound, ["two"])
    assert [topic.name for topic in report.topics] == ["two"]
    assert not report.damaged


def test_a_name_that_is_no_topic_is_said(sound):
    with pytest.raises(UnknownTopicError, match=r"there is no topic .three. in .*data"):
        verify(sound, ["one", "three"])
    with pytest.raises(BadTopicNameError):
        verify(sound, [""])


def test_a_directory_without_a_log_is_said(tmp_path):
    with pytest.raises(DataDirectoryError, match="there is no such directory"):
        verify(tmp_path / "missing")
    with pytest.raises(DataDirectoryError, match=r"there is no catalogue\.sqlite"):
        verify(tmp_path)


def test_nothing_in_the_directory_is_changed(sound, killed_copy, tmp_path):
    for directory in (sound, killed_copy):
        before = contents(directory)
        verify(directory)
        assert contents(directory) == before


@pytest.fixture
def killed_copy(tmp_path):
    """A copy of a killed server's directory without SQLite's shared memory; the WAL has all data."""
    made = StepStore(config(tmp_path / "original"))
    fill(made, "one", commits=3)
    made.append("one", b"in the journal")
    shutil.copytree(
        tmp_path / "original", tmp_path / "copy", ignore=shutil.ignore_patterns("*-shm")
    )
    made.crash()
    return tmp_path / "copy"


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_copy_of_a_running_server_s_directory_is_read_with_what_sqlite_s_log_holds(killed_copy):
    report = verify(killed_copy)
    assert not report.damaged
    assert (of(report, "one").records, of(report, "one").journal_records) == (13, 1)


def test_progress_reaches_the_end(store, data):
    for _ in range(5):
        store.append("big", *[bytes(200_000)] * 5)
    store.close()
    told: list[tuple[int, int]] = []
    verify(data, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    total = 25 * 200_004
    assert {one[1] for one in told} == {total}
    assert told[-1][0] > total - (1 << 20)


def test_records_of_every_size_are_checked_without_holding_a_segment(store, data, monkeypatch):
    monkeypatch.setattr(checks, "_BLOCK_BYTES", 1000)
    chance = random.Random(7)
    for _ in range(20):
        store.append("t", *[chance.randbytes(chance.choice([0, 1, 40, 5000])) for _ in range(20)])
    store.close()
    report = verify(data)
    assert not report.damaged
    assert of(report, "t").records == 400


# A topic with trims, jumps and destructions


def test_a_trimmed_topic_is_covered_from_where_it_starts(store, data):
    fill(store, "one")
    first, second, *_ = store.store.segments(store.store.topic("one"))
    store.trim("one", Position(0, second.base, second.first_ordinal))
    store.close()
    report = verify(data)
    assert not report.damaged
    assert of(report, "one").ranges[0].offset == first.end
    assert of(report, "one").ranges[0].ordinal == second.first_ordinal


def test_a_start_inside_a_segment_is_checked_to_be_a_record(store, data):
    fill(store, "one")
    store.trim("one", store.store.locate_ordinal(store.store.topic("one"), 2))
    store.close()
    assert not verify(data).damaged
    other = StepStore(config(data))
    other.trim("one", Position(0, 12, 2))
    other.close()
    assert "the topic does not start at a record" in reasons(verify(data))


def test_a_topic_destroyed_and_made_again_is_sound(store, data):
    fill(store, "one", commits=3)
    store.store.destroy(store.store.topic("one"), lambda: None)
    store.runner.run()
    assert not verify(data).damaged
    store.settle()
    assert [topic.name for topic in verify(data).topics] == []
    fill(store, "one", commits=2)
    store.close()
    report = verify(data)
    assert not report.damaged
    assert of(report, "one").ranges[0].offset > 0


def test_the_jump_after_a_crash_of_the_machine_is_no_damage(data):
    rules = dataclasses.replace(config(data), durability=Durability.WRITTEN)
    before = StepStore(rules, boot_id=b"a" * 16)
    fill(before, "one", commits=2)
    before.crash()
    after = StepStore(rules, boot_id=b"b" * 16)
    assert not verify(data).damaged
    after.append("one", b"later")
    after.close()
    report = verify(data)
    assert not report.damaged
    kept, later = of(report, "one").ranges
    assert (later.offset, later.ordinal) == (kept.end + JUMP, kept.end_ordinal + JUMP)


# The journal


def test_what_is_in_the_journal_only_is_checked_too(killed):
    report = verify(killed)
    assert not report.damaged
    one, new = of(report, "one"), of(report, "new")
    assert (one.records, one.journal_records, len(one.ranges)) == (13, 5, 1)
    assert (new.records, new.journal_records, new.segments) == (1, 1, 0)
    assert new.ranges == [VerifiedRange(0, 7, 0, 1)]
    assert not verify(killed, ["new"]).damaged


def test_a_flipped_bit_in_a_payload_of_the_journal_is_found_with_its_place(killed):
    (file,) = [f for f in killed.glob("journal/*") if b"in the journal 2" in f.read_bytes()]
    flip(file, file.read_bytes().index(b"in the journal 2"))
    report = verify(killed)
    (damage,) = of(report, "one").damages
    assert damage.reason == "the checksum is wrong"
    assert damage.file == f"journal/{file.name}"
    assert damage.range is not None
    assert (damage.range.ordinal, damage.range.end_ordinal) == (10, 11)
    assert not of(report, "new").damages
    before, after = of(report, "one").ranges
    assert (before.end, after.offset) == (damage.range.offset, damage.range.end)
    assert not verify(killed, ["new"]).damaged


def test_what_follows_a_damaged_entry_in_its_own_commit_is_covered(store, data):
    store.append("one", *[b"%03d" % number for number in range(1200)])
    store.append("one", b"the last commit")
    store.crash()
    (file,) = [f for f in data.glob("journal/*") if b"000" in f.read_bytes()]
    flip(file, file.read_bytes().index(b"600"))
    one = of(verify(data), "one")
    assert [damage.range for damage in one.damages] == [VerifiedRange(3500, 7000, 500, 1000)]
    assert [(part.ordinal, part.end_ordinal) for part in one.ranges] == [(0, 500), (1000, 1201)]


@pytest.mark.parametrize("boot_id", [BOOT_ID, b"another boot...."])
def test_every_flipped_bit_in_an_acknowledged_frame_of_the_journal_is_found(
    killed, monkeypatch, boot_id
):
    monkeypatch.setattr(journal, "boot_id", lambda: boot_id)
    frames = unapplied_frames(killed)
    chance = random.Random(5)
    missed = []
    for file, begin, length in frames[:-1]:
        for _ in range(8):
            position = begin + chance.randrange(length)
            original = file.read_bytes()
            flip(file, position, chance.randrange(8))
            if not verify(killed).damaged:
                missed.append((file.name, position - begin))
            file.write_bytes(original)
    assert len(frames) == 6
    assert not missed
    assert not verify(killed).damaged


def unapplied_frames(data: Path) -> list[tuple[Path, int, int]]:
    """Return file, position and length without padding of the commits that only the journal has."""
    found = []
    for file in sorted(data.glob("journal/*.journal")):
        header = journal_reading.read_header(file)
        position = journal.FRAMES_POSITION
        for frame in journal_reading.read_frames(file) if header else ():
            assert isinstance(frame, journal_reading.Frame)
            body = sum(
                journal.ENTRY_HEADER_BYTES + len(entry.extra) + len(entry.data)
                for entry in frame.entries
            )
            found.append((frame.sequence, file, position, journal.FRAME_HEAD_BYTES + body))
            position += journal.frame_bytes(body)
    return [(file, position, length) for _, file, position, length in sorted(found)[-6:]]


def test_a_last_write_that_was_not_finished_is_no_damage(killed):
    file, begin, length = unapplied_frames(killed)[-1]
    content = bytearray(file.read_bytes())
    end = -(-(begin + length) // journal.BLOCK_BYTES) * journal.BLOCK_BYTES
    content[begin + length - 5 : end] = bytes(end - begin - length + 5)
    file.write_bytes(content)
    report = verify(killed)
    assert not report.damaged
    assert "never acknowledged" in report.notes[0]


def test_a_commit_that_is_gone_is_damage(killed):
    file, begin, length = unapplied_frames(killed)[2]
    content = bytearray(file.read_bytes())
    content[begin : begin + length] = bytes(length)
    file.write_bytes(content)
    report = verify(killed)
    assert report.damaged
    assert "no entry holds these" in reasons(report)


def test_a_journal_file_that_is_gone_is_damage(store, data):
    store.append("one", b"foo")
    store.settle()
    store.applying = False
    for number in range(30):
        store.append("one", b"%d" % number + bytes(1000))
    store.crash()
    assert not verify(data).damaged
    used = sorted(
        (header.first, file)
        for file in data.glob("journal/*.journal")
        if (header := journal_reading.read_header(file))
    )
    used[-2][1].unlink()
    report = verify(data)
    assert report.damaged
    assert any("missing" in reason for reason in reasons(report))


def test_damage_to_a_journal_that_is_applied_is_of_no_consequence(sound):
    for file in sound.glob("journal/*.journal"):
        file.write_bytes(bytes(100) + random.Random(1).randbytes(16_284))
    assert not verify(sound).damaged


# Segments and index


def test_every_flipped_bit_of_segments_and_indexes_is_found(sound):
    chance = random.Random(3)
    missed = []
    for file in files(sound, ".log") + files(sound, ".idx"):
        original = file.read_bytes()
        for _ in range(15):
            position = chance.randrange(len(original))
            flip(file, position, chance.randrange(8))
            if not verify(sound).damaged:
                missed.append((file.name, position))
            file.write_bytes(original)
    assert not missed
    assert not verify(sound).damaged


def test_every_cut_of_segments_and_indexes_is_found(sound):
    chance = random.Random(4)
    for file in files(sound, ".log") + files(sound, ".idx"):
        original = file.read_bytes()
        for size in {0, len(original) - 1, chance.randrange(len(original))}:
            file.write_bytes(original[:size])
            assert verify(sound).damaged, (file, size)
        file.unlink()
        assert verify(sound).damaged, file
        file.write_bytes(original)
    assert not verify(sound).damaged


def test_a_damaged_run_is_named_and_the_rest_is_covered(sound):
    file = files(sound, ".log")[1]
    base = int(file.stem.partition("-")[2])
    flip(file, 0)
    one = of(verify(sound), "one")
    (damage,) = one.damages
    assert damage.file == str(file.relative_to(sound))
    assert damage.reason == "the checksum is wrong"
    assert damage.range is not None
    assert damage.range.offset == base
    before, after = one.ranges
    assert (before.end, before.end_ordinal) == (damage.range.offset, damage.range.ordinal)
    assert (after.offset, after.ordinal) == (damage.range.end, damage.range.end_ordinal)
    assert one.records + damage.range.end_ordinal - damage.range.ordinal == 24
    assert str(damage) == (
        f"{damage.file}: offsets {base} to {damage.range.end}, "
        f"ordinals {damage.range.ordinal} to {damage.range.end_ordinal}: the checksum is wrong"
    )


def test_a_lost_segment_is_one_damage(sound):
    files(sound, ".log")[1].unlink()
    (damage,) = of(verify(sound), "one").damages
    assert damage.reason == "the file is missing"


def test_bytes_past_the_catalogue_s_end_do_not_count(sound):
    for file in files(sound, ".log") + files(sound, ".idx"):
        with file.open("ab") as out:
            out.write(b"left by a write that was never finished")
    assert not verify(sound).damaged


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ordinal": 1}, "no index row holds these"),
        ({"record_count": 1}, "the records do not fill their run"),
        ({"ms": -5000}, "the time goes back from .*"),
        ({"ms": 5000}, "the last row's time is not the catalogue's"),
        ({"offset": 1, "length": -1}, "no index row holds these"),
        ({"length": -1}, "the checksum is wrong"),
        ({"length": 100_000}, "the index rows are damaged"),
    ],
)
def test_a_row_that_holds_and_says_something_else_is_found(sound, change, reason):
    rewrite_last_row(sound, **change)
    found = reasons(verify(sound))
    assert any(re.fullmatch(reason, one) for one in found), found


def rewrite_last_row(data: Path, **change: int) -> None:
    """Add to fields of a segment's last row, and write the row with a correct checksum."""
    file = files(data, ".idx")[0]
    content = bytearray(file.read_bytes())
    at = len(content) - ROW_BYTES
    row = decode_row(bytes(content), at)
    assert row is not None
    assert at > HEADER_BYTES
    content[at:] = encode_row(row._replace(**{k: getattr(row, k) + v for k, v in change.items()}))
    file.write_bytes(content)


def test_records_that_do_not_end_where_their_run_does_are_found(sound):
    segment, index = files(sound, ".log")[0], files(sound, ".idx")[0]
    content = bytearray(segment.read_bytes())
    rows = bytearray(index.read_bytes())
    row = decode_row(bytes(rows), HEADER_BYTES)
    assert row is not None
    content[3] += 1  # the first record's size
    segment.write_bytes(content)
    changed = Row(*row[:-1], crc32c(bytes(content[: row.length])))
    rows[HEADER_BYTES : HEADER_BYTES + ROW_BYTES] = encode_row(changed)
    index.write_bytes(rows)
    (damage,) = of(verify(sound), "one").damages
    assert damage.reason == "the records do not fill their run"


def test_what_recovery_could_not_save_is_reported_as_lost(killed):
    (file,) = [f for f in killed.glob("journal/*") if b"in the journal 2" in f.read_bytes()]
    flip(file, file.read_bytes().index(b"in the journal 2"))
    again = StepStore(config(killed))
    assert again.reports
    again.close()
    report = verify(killed)
    (damage,) = of(report, "one").damages
    assert damage.range is not None
    assert (damage.range.ordinal, damage.range.end_ordinal) == (10, 11)
    assert "1 files hold data that was found damaged before" in report.notes[0]


# The catalogue


@pytest.mark.parametrize("table", ["topics", "segments", "meta"])
def test_a_row_of_the_catalogue_that_was_changed_is_found(sound, table):
    column = {"topics": "end_offset", "segments": "last_ms", "meta": "value"}[table]
    value = "x'80'" if table == "meta" else f"{column} + 1"
    with sqlite3.connect(sound / "catalogue.sqlite") as db:
        db.execute(f"UPDATE {table} SET {column} = {value}")
    db.close()
    report = verify(sound)
    assert f"a row of {table} is damaged" in reasons(report)


def test_a_catalogue_that_is_none_is_damage(sound):
    (sound / "catalogue.sqlite").write_bytes(b"not a database, and not short either" * 30)
    report = verify(sound)
    assert report.damaged
    assert report.damages[0].file == "catalogue.sqlite"
    assert verify(sound, ["one"]).damaged


def test_a_catalogue_that_is_missing_is_damage(sound):
    (sound / "catalogue.sqlite").unlink()
    assert [str(damage) for damage in verify(sound).damages] == [
        "catalogue.sqlite: the file is missing"
    ]


def test_a_damaged_backup_is_found(sound):
    backup = sound / "catalogue.backup.sqlite"
    shutil.copy(sound / "catalogue.sqlite", backup)
    assert not verify(sound).damaged
    backup.write_bytes(b"not a database, and not short either" * 30)
    (damage,) = verify(sound).damages
    assert damage.file == backup.name


def test_a_damaged_clock_is_found(sound):
    clock = sound / "clock"
    assert not clock.exists()
    clock.write_bytes(bytes(100))
    (damage,) = verify(sound).damages
    assert damage.file == clock.name
    assert damage.reason == "the file is damaged: its checksum does not match"
    assert verify(sound, []).damaged


def test_files_the_catalogue_does_not_name_are_noted(sound):
    (sound / "segments" / "00" / "ff-00000000000000000000.log").write_bytes(b"foo")
    (sound / "segments" / "a note of mine.txt").write_bytes(b"foo")
    report = verify(sound)
    assert not report.damaged
    assert report.notes[0].startswith("2 files, such as ")


# A server at work in the directory


def test_segments_that_retention_takes_while_they_are_read_are_no_damage(store, data, monkeypatch):
    fill(store, "one", commits=40)
    segments = store.store.segments(store.store.topic("one"))
    # However many segments are deleted, the topic stays in the report.
    taken = iter(segments[1:13])
    run = checks.SegmentCheck.run

    def run_after_a_trim(self, advance):
        if segment := next(taken, None):
            store.trim("one", Position(0, segment.base, segment.first_ordinal))
            store.settle()
        run(self, advance)

    monkeypatch.setattr(checks.SegmentCheck, "run", run_after_a_trim)
    report = verify(data)
    assert not report.damaged
    assert of(report, "one").ranges[0].offset == segments[12].base


def test_a_topic_that_is_destroyed_while_it_is_read_is_no_damage(store, data, monkeypatch):
    fill(store, "one")
    run = checks.SegmentCheck.run

    def run_after_the_end(self, advance):
        if store.store.topic("one").exists:
            store.store.destroy(store.store.topic("one"), lambda: None)
            store.runner.run()
            store.settle()
        run(self, advance)

    monkeypatch.setattr(checks.SegmentCheck, "run", run_after_the_end)
    assert verify(data) == Report([], [], [], False)


def test_what_is_appended_and_applied_meanwhile_is_not_counted_twice(store, data, monkeypatch):
    fill(store, "one", commits=2)
    store.append("one", b"in the journal when it is read")
    run = checks.SegmentCheck.run

    def run_after_more(self, advance):
        store.append("one", b"more")
        store.settle()
        run(self, advance)

    monkeypatch.setattr(checks.SegmentCheck, "run", run_after_more)
    report = verify(data)
    assert not report.damaged
    (covered,) = of(report, "one").ranges
    assert covered.end_ordinal == of(report, "one").records == 9


def test_a_journal_file_that_is_used_again_while_it_is_read_is_no_damage(store, data, monkeypatch):
    fill(store, "one", commits=2)
    for number in range(5):
        store.append("one", b"%d" % number + bytes(1000))
    read_frames = journal_reading.read_frames

    def frames_of_a_file_in_use(path, *args, **options):
        frames = read_frames(path, *args, **options)
        yield from islice(frames, 1)
        if next(waiting, None):
            store.settle()
            for number in range(40):
                store.append("one", b"%d" % number + bytes(1000))
        yield from frames

    waiting = iter([True])
    monkeypatch.setattr(journal_scan, "read_frames", frames_of_a_file_in_use)
    report = verify(data)
    assert not report.damaged
    assert not Layout(data).quarantine.exists()
