"""Audits of real logs and lakes: intact data is covered completely, and every fault is named exactly.

These tests use neither a server nor Spark; test_spark.py does.
"""

import importlib
import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headrace.config.settings import Config, Journal, Segment
from headrace.errors import BadTopicNameError, DataDirectoryError, OptionError, UnknownTopicError
from headrace.lake.files.writing import RecordRows
from headrace.lake.format import File, LakeError, LostRange, Manifest, Shape
from headrace.lake.formats.delta import DeltaLake
from headrace.lake.manifests import Manifests
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import make_table
from headrace.log import layout
from headrace.log.verify.checks import VerifiedRange
from headrace.log.verify.verify import verify
from headrace.model import JUMP, Durability, Position
from headrace.pipeline import compact, export
from headrace.pipeline.audit import files as audit_files
from headrace.pipeline.audit import log as audit_log
from headrace.pipeline.audit.job import audit
from headrace.pipeline.audit.plan import AuditReport, Finding, TopicAudit
from headrace.pipeline.job import EXPORT_APP as APP
from headrace.pipeline.tasks import LocalRunner, NotSharedError
from headrace.reader.view import DataLossError, LogBlock, LogLocation, LogRange
from tests.fakes.store import StepStore
from tests.lake.rows import rows, write
from tests.pipeline.lakes import manifests_of
from tests.reader.runs import block, flipped

SIZES = (0, 1, 30, 30, 30, 300, 3000)

MEMORY = Path("/dev/shm")
QUICK = MEMORY if os.access(MEMORY, os.W_OK) else None
"""Parent of the tests' directories: in memory if possible, because no test here is about the disk."""


def config(path: Path, **changes: Any) -> Config:
    given = {"segment": Segment(bytes=4096), "journal": Journal(file_bytes=65_536, files=3)}
    return Config(data_dir=path, **given | changes)


def fill(store: StepStore, topic: str, chance: random.Random, commits: int = 8) -> None:
    for _ in range(commits):
        store.clock.ms += 1000
        store.append(topic, *(chance.randbytes(chance.choice(SIZES)) for _ in range(9)))
    store.settle()


@pytest.fixture(autouse=True, scope="module")
def _few_directories() -> Iterator[None]:
    """Use four segment directories instead of 256, which makes the many starts quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SEGMENT_DIRECTORIES", 4)
        yield


@pytest.fixture(scope="module")
def sound(_few_directories: None) -> Iterator[Path]:
    """A stopped log in `data` that is all in segments, and the same records in `lake`, in several batches."""
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        made = StepStore(config(Path(path, "data")))
        for topic in ("a/b", "many", "ü"):
            fill(made, topic, random.Random(topic), 20 if topic == "many" else 3)
        made.close()
        given = {"data_dir": f"{path}/data", "batch_bytes": 20_000, "part_bytes": 9000}
        export(f"{path}/lake", **given, runner=LocalRunner())
        yield Path(path)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield Path(path)


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound / "data", tmp_path / "data"))


@pytest.fixture
def lake(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound / "lake", tmp_path / "lake"))


def look(lake: Path | str = "", *topics: str, **given: Any) -> AuditReport:
    return audit(lake, topics, **{"runner": LocalRunner(), **given})


def found(report: AuditReport) -> list[Finding]:
    return list(report.all_findings())


def of(report: AuditReport, name: str) -> TopicAudit:
    return next(topic for topic in report.topics if topic.name == name)


def files(data: Path, suffix: str) -> list[Path]:
    return sorted(data.glob(f"segments/*/*{suffix}"))


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


# The log


def test_a_sound_log_is_covered_from_its_start_to_its_end(data):
    report = look(data_dir=data)
    checked = verify(data)
    assert (report.lost, report.notes, report.files) == (False, [], 0)
    assert {one.name: one.log for one in report.topics} == {
        one.name: one.ranges for one in checked.topics
    }
    assert [one.records for one in report.topics] == [one.records for one in checked.topics]
    assert report.segments == sum(one.segments for one in checked.topics) > 5
    *_, verdict = report.lines()
    assert verdict == f"nothing lost: 3 topics, {26 * 9} records, {report.segments} segments"
    (line,) = look("", "ü", data_dir=data).lines()
    assert line.startswith("nothing lost: ü: log offsets 0 to ")


def test_nothing_is_read_twice_where_everything_is_right(data, monkeypatch):
    monkeypatch.setattr(audit_log, "check_segments", lambda *_, **__: pytest.fail("read again"))
    assert not look(data_dir=data).lost
    # This also holds when a segment is divided among tasks, or read in small blocks.
    monkeypatch.setattr(audit_log, "TASK_BYTES_MAX", 700)
    monkeypatch.setattr(audit_log, "TASK_BYTES_MIN", 100)
    monkeypatch.setattr(audit_log, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(audit_log, "_EVEN_BLOCK_BYTES", 500)
    monkeypatch.setattr(audit_log, "_READ_BYTES", 100)
    monkeypatch.setattr(audit_log, "_ROWS_AT_ONCE", 2)
    assert not look(data_dir=data).lost


@pytest.mark.parametrize("parts", [1 << 20, 700])
def test_every_flipped_bit_and_cut_is_said_in_the_words_of_verify(data, monkeypatch, parts):
    monkeypatch.setattr(audit_log, "TASK_BYTES_MAX", parts)
    chance = random.Random(parts)
    for file in chance.sample(files(data, ".log"), 4) + chance.sample(files(data, ".idx"), 4):
        original = file.read_bytes()
        for number in range(5):
            if number < 4:
                flip(file, chance.randrange(len(original)), chance.randrange(8))
            else:
                file.write_bytes(original[: chance.randrange(len(original))])
            report = look(data_dir=data)
            damages = [one for topic in verify(data).topics for one in topic.damages]
            assert [(one.file, one.reason, one.range) for one in found(report)] == [
                (one.file, one.reason, one.range) for one in damages
            ]
            assert report.lost
            file.write_bytes(original)
    assert not look(data_dir=data).lost


def test_a_segment_that_is_gone_is_missing(data):
    file = files(data, ".log")[1]
    file.unlink()
    (one,) = found(look(data_dir=data))
    assert (one.kind, one.reason) == ("missing", "the file is missing")
    assert one.file == str(file.relative_to(data))
    assert one.range is not None
    assert one.epoch is not None


def test_damage_in_the_journal_is_found(tmp_path):
    store = StepStore(config(tmp_path / "data"))
    store.append("t", b"applied")
    store.settle()
    store.append("t", b"in the journal")
    store.append("t", b"behind it")
    store.crash()
    report = look(data_dir=tmp_path / "data")
    assert (report.lost, of(report, "t").records) == (False, 3)
    (file,) = [f for f in tmp_path.glob("data/journal/*") if b"in the journal" in f.read_bytes()]
    flip(file, file.read_bytes().index(b"in the journal"))
    (one,) = found(look(data_dir=tmp_path / "data"))
    assert (one.kind, one.reason) == ("damaged", "the checksum is wrong")
    assert (one.file, one.range) == (f"journal/{file.name}", VerifiedRange(11, 29, 1, 2))


def test_a_topic_that_does_not_start_at_a_record_is_found(tmp_path):
    store = StepStore(config(tmp_path / "data"))
    store.append("t", b"first", b"second", b"third")
    store.settle()
    store.trim("t", store.store.locate_ordinal(store.store.topic("t"), 1))
    store.close()
    assert not look(data_dir=tmp_path / "data").lost
    again = StepStore(config(tmp_path / "data"))
    again.trim("t", again.store.locate_ordinal(again.store.topic("t"), 2)._replace(ordinal=3))
    again.close()
    (one,) = found(look(data_dir=tmp_path / "data"))
    assert one.reason == "the topic does not start at a record"


# Log and lake


def test_a_sound_lake_is_covered_and_the_same_as_the_log(data, lake):
    report = look(lake, data_dir=data)
    assert (report.lost, report.notes) == (False, [])
    for topic in report.topics:
        assert topic.lake == topic.log
        (whole,) = topic.lake
        assert topic.compared_bytes == whole.end
    assert report.files > 3
    alone = look(lake)
    assert [topic.lake for topic in alone.topics] == [topic.lake for topic in report.topics]
    assert (alone.lost, alone.log, alone.topics[0].compared_bytes) == (False, None, 0)


def test_some_topics_alone(data, lake):
    report = look(lake, "many", data_dir=data)
    assert [topic.name for topic in report.topics] == ["many"]
    assert of(report, "many").compared_bytes == of(report, "many").log[0].end
    flip(next(f for f in files(data, ".log") if f.name.startswith("1-")), 5)
    assert not look(lake, "many", data_dir=data).lost
    assert look(lake, "a/b", data_dir=data).lost


def test_what_the_log_has_forgotten_is_in_the_lake(data, lake):
    again = StepStore(config(data))
    second = again.store.segments(again.store.topic("many"))[2]
    start = again.store.locate_offset(again.store.topic("many"), second.base)
    again.trim("many", start)
    again.destroy("ü")
    fill(again, "many", random.Random(1), 2)
    again.close()
    report = look(lake, data_dir=data)
    assert (report.lost, found(report)) == (False, [])
    many = of(report, "many")
    assert (many.lake[0].offset, many.log[0].offset) == (0, start.offset)
    assert many.compared_bytes == many.lake[0].end - start.offset
    assert (of(report, "ü").log, look(lake, "ü", data_dir=data).lost) == ([], False)
    # Records that were never exported are missing, whether or not the log has later ones.
    for portions in (0, 1):
        end = StepStore(config(data))
        end.trim("many", end.store.topic("many").end)
        fill(end, "many", random.Random(2), portions)
        end.close()
        (one,) = found(look(lake, data_dir=data))
        assert (one.kind, one.topic) == ("missing", "many")
        assert one.reason == "neither the log nor the lake has these records"
        assert one.range is not None
        assert (one.range.offset, one.range.end) == (many.lake[0].end, many.log[0].end)


def test_what_is_in_the_journal_only_is_not_compared_and_that_is_said(tmp_path):
    data, lake = tmp_path / "data", tmp_path / "lake"
    store = StepStore(config(data))
    store.append("t", b"applied")
    store.settle()
    epoch = store.store.topic("t").end.epoch
    store.append("t", b"in the journal")
    store.crash()
    commit(lake, 0, rows("t", [b"applied", b"in the journal"], epoch=epoch))
    report = look(lake, data_dir=data)
    assert (report.lost, of(report, "t").compared_bytes) == (False, 11)
    assert report.notes[0].startswith("18 bytes that log and lake both have were not compared")


def test_a_named_topic_that_is_only_in_journal_and_lake_is_read_in_both(tmp_path):
    data, lake = tmp_path / "data", tmp_path / "lake"
    store = StepStore(config(data))
    for payload in (b"exported", b"not exported", b"behind it"):
        store.append("t", payload)
    epoch = store.store.topic("t").end.epoch
    store.crash()
    commit(lake, 0, rows("t", [b"exported"], epoch=epoch))
    assert look(lake, "t", data_dir=data).topics == look(lake, data_dir=data).topics
    (file,) = [f for f in data.glob("journal/*") if b"not exported" in f.read_bytes()]
    flip(file, file.read_bytes().index(b"not exported"))
    (one,) = found(look(lake, "t", data_dir=data))
    assert (one.file, one.reason) == (f"journal/{file.name}", "the checksum is wrong")


def test_damage_of_the_log_tells_that_the_lake_has_the_records(data, lake):
    flip(files(data, ".log")[1], 0)
    (one,) = found(look(lake, data_dir=data))
    assert one.reason == "the checksum is wrong; the lake has these records"


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run checks in this process, because another process takes a second to start."""
    checked = lambda work: audit_files._Check(work).run()  # noqa: E731
    monkeypatch.setattr(audit_files, "_in_another_process", checked)


@pytest.mark.usefixtures("_in_this_process")
def test_every_flipped_byte_in_a_lake_file_is_found(data, lake):
    import pyarrow.parquet as pq

    chance = random.Random(9)
    # The names of the files are random, so they are sorted by size.
    paths = sorted(lake.glob("date=*/*.parquet"), key=lambda path: path.stat().st_size)
    for path in chance.sample(paths, 3):
        original = path.read_bytes()
        pages = [
            (column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size)
            for group in [pq.read_metadata(path).row_group(0)]
            for column in map(group.column, range(group.num_columns))
        ]
        end = max(begin + size for begin, size in pages)
        for begin, size in [*pages, (end, len(original) - end), (len(original) - 8, 8)]:
            flip(path, begin + chance.randrange(size), chance.randrange(8))
            report = look(lake, data_dir=data)
            assert {one.file for one in found(report)} == {str(path.relative_to(lake))}
            path.write_bytes(original)


def test_a_file_that_the_library_does_not_survive_is_damage_as_well(data, lake, monkeypatch):
    path = max(lake.glob("date=*/*.parquet"), key=lambda path: path.stat().st_size)
    flip(path, path.stat().st_size // 3)
    one, *_ = found(look(lake, data_dir=data))
    assert (one.file, one.topic is not None) == (str(path.relative_to(lake)), True)
    monkeypatch.setattr(audit_files.sys, "executable", "false")
    ours = [
        (finding.topic, finding.reason, finding.range)
        for finding in found(look(lake, data_dir=data))
    ]
    reason = "its bytes have another checksum than its name says"
    name = str(path.relative_to(lake))
    assert ours == [
        (
            noted.topic,
            reason,
            VerifiedRange(noted.offset, noted.end, noted.ordinal, noted.end_ordinal),
        )
        for manifest in manifests_of(lake)
        for noted in manifest.ranges
        if manifest.files[noted.file].path == name
    ]


@pytest.mark.usefixtures("_in_this_process")
def test_a_lake_file_that_is_cut_or_gone_is_named_with_its_records(data, lake):
    path = next(lake.glob("date=*/*.parquet"))
    name = str(path.relative_to(lake))
    expected = {
        (one.topic, one.epoch, one.offset, one.end)
        for manifest in manifests_of(lake)
        for one in manifest.ranges
        if manifest.files[one.file].path == name
    }
    content = path.read_bytes()
    for change in ("cut", "gone"):
        if change == "cut":
            path.write_bytes(content[:-5])
        else:
            path.unlink()
        report = look(lake, data_dir=data)
        named = [one for one in found(report) if one.topic is not None]
        assert {one.kind for one in named} == {"damaged" if change == "cut" else "missing"}
        assert {one.file for one in named} == {name}
        assert {
            (one.topic, one.epoch, one.range.offset, one.range.end) for one in named if one.range
        } == expected


def test_every_flipped_byte_in_a_manifest_is_found(data, lake):
    chance = random.Random(4)
    # The first one, and the last one, which names it.
    for path in sorted(lake.glob("_headrace/batches/*.json"))[:: len(manifests_of(lake)) - 1]:
        original, name = path.read_bytes(), str(path.relative_to(lake))
        for _ in range(20):
            flip(path, chance.randrange(len(original)), chance.randrange(8))
            (one,) = found(look(lake))
            assert (one.kind, one.file) == ("damaged", name)
            path.write_bytes(original)
        path.unlink()
        (one,) = found(look(lake, data_dir=data))
        assert (one.kind, one.file) == ("missing", name)
        path.write_bytes(original)


def test_a_compacted_lake_is_covered_as_before_and_so_is_what_is_wrong_with_it(data, lake):
    before = look(lake, data_dir=data)
    assert compact(lake, runner=LocalRunner()).merged
    report = look(lake, data_dir=data)
    assert (found(report), report.notes) == ([], [])
    assert [(one.lake, one.compared_bytes) for one in report.topics] == [
        (one.lake, one.compared_bytes) for one in before.topics
    ]
    assert report.files < before.files
    gone = max((lake / path for path in _live(lake)), key=lambda path: path.stat().st_size)
    gone.unlink()
    first, *others = sorted(map(str, found(look(lake, data_dir=data))))
    assert first == f"missing: {gone.relative_to(lake)}: the file is gone"
    assert {text.rpartition(": ")[2] for text in others} == {"no file of the lake has these rows"}


def _live(lake: Path) -> dict[str, int]:
    table = DeltaLake.open(storage_of(lake))
    assert table is not None
    return {path: size for path, size in table.files().items() if (lake / path).exists()}


def test_a_table_that_cannot_be_read_is_damage_and_the_log_is_still_looked_at(data, lake):
    for path in (lake / "_delta_log").glob("*.json"):
        path.write_bytes(path.read_bytes()[:-5])
    flip(files(data, ".log")[1], 0)
    named = {one.file: one.reason for one in found(look(lake, data_dir=data))}
    assert named.pop("_delta_log").startswith("it cannot be read: ")
    assert list(named.values()) == ["the checksum is wrong"]
    assert look(lake, "many").lost


@pytest.mark.parametrize(
    "wrong",
    [
        ('minValues\\": {\\"topic\\": \\"', 'minValues\\": {\\"topic\\": \\"é'),
        ('"numRecords\\": ', '"numRecords\\": 1'),
        ('"partitionValues":{"date":"2', '"partitionValues":{"date":"3'),
    ],
)
def test_what_a_table_says_of_a_file_is_held_against_it(lake, wrong):
    last = max((lake / "_delta_log").glob("*.json"))
    text = last.read_text()
    assert wrong[0] in text
    last.write_text(text.replace(*wrong, 1))
    (one,) = found(look(lake))
    assert one.kind == "damaged"
    assert one.file in _live(lake)
    assert one.reason.startswith("the table says that its ")


def test_a_column_by_another_name_is_damage(lake):
    first = min((lake / "_delta_log").glob("*.json"))
    first.write_text(first.read_text().replace('name\\":\\"payload', 'name\\":\\"qayload', 1))
    (one,) = found(look(lake))
    assert (one.kind, one.file) == ("damaged", "_delta_log")
    assert "qayload" in one.reason


# Lakes made by hand


def commit(
    lake: Path, number: int, *some: RecordRows, noted: bool = True, lost: tuple[LostRange, ...] = ()
) -> None:
    """Commit a batch as an export does; with `noted=False`, its manifest lists no files."""
    table = DeltaLake.open(storage_of(lake)) or make_table(storage_of(lake), "delta", Shape())
    written = write(lake, *some)
    manifests = Manifests(storage_of(lake))
    before = manifests.predecessors(table.last(APP))
    manifest = Manifest(
        number=number,
        start={},
        end={},
        files=tuple(File(one.path, one.bytes, one.rows) for one in written) if noted else (),
        ranges=tuple(
            one._replace(file=place)
            for place, file in enumerate(written if noted else ())
            for one in file.ranges
        ),
        lost=lost,
        merged=before.merged,
        since=before.since,
    )
    manifests.write(manifest)
    assert table.commit(APP, number, written, manifest.crc)


def test_a_gap_in_the_lake_is_missing(tmp_path):
    lake = tmp_path / "lake"
    commit(lake, 0, rows("t", [b"a", b"b"]))
    commit(lake, 1, rows("t", [b"d"], offset=15, ordinal=3))
    (one,) = found(look(lake))
    assert (one.kind, one.topic, one.range) == ("missing", "t", VerifiedRange(10, 15, 2, 3))
    assert [*look(lake).lines()][-1] == "lost: 1 missing"


def test_records_that_an_export_came_too_late_for_are_missing(tmp_path):
    """Also if the lake has no other records of the topic, and the log no longer has the topic."""
    lake = tmp_path / "lake"
    commit(lake, 0, rows("t", [b"a", b"b"]), lost=(LostRange("gone", 4, 7), LostRange("t", 2, 3)))
    reason = "records with ordinals {} to {} were deleted before they could be exported"
    assert [(one.kind, one.topic, one.reason) for one in found(look(lake))] == [
        ("missing", "gone", reason.format(4, 7)),
        ("missing", "t", reason.format(2, 3)),
    ]
    assert [*look(lake, "gone").lines()][-1] == "lost: 1 missing"


def test_rows_in_two_files_are_found(tmp_path):
    lake = tmp_path / "lake"
    commit(lake, 0, rows("t", [b"a", b"b"]))
    commit(lake, 1, rows("t", [b"b", b"c"], offset=5, ordinal=1))
    reasons = [one.reason for one in found(look(lake))]
    assert "these rows are in the lake twice" in reasons
    assert "two batches have written these records" in reasons


def test_rows_that_no_batch_has_noted_are_found(tmp_path):
    lake = tmp_path / "lake"
    commit(lake, 0, rows("t", [b"a", b"b"]))
    commit(lake, 1, rows("t", [b"c"], offset=10, ordinal=2), noted=False)
    (one,) = found(look(lake))
    assert one.reason == "no manifest of a batch names these rows"
    assert one.range == VerifiedRange(10, 15, 2, 3)


def test_other_bytes_with_a_right_checksum_are_found_to_the_record(tmp_path):
    store = StepStore(config(tmp_path / "data"))
    store.append("t", b"one", b"two", b"six")
    epoch = store.store.topic("t").end.epoch
    store.close()
    lake = tmp_path / "lake"
    commit(lake, 0, rows("t", [b"one", b"ten", b"six"], epoch=epoch))
    (one,) = found(look(lake, data_dir=tmp_path / "data"))
    assert one.reason == "log and lake have different bytes here, and both checksums are right"
    assert (one.epoch, one.range) == (epoch, VerifiedRange(7, 14, 1, 2))


def test_a_jump_is_no_gap(tmp_path):
    data, lake = tmp_path / "data", tmp_path / "lake"
    rules = config(data, durability=Durability.WRITTEN)
    before = StepStore(rules, boot_id=b"a" * 16)
    fill(before, "t", random.Random(1), 2)
    before.crash()
    export(lake, data_dir=str(data), runner=LocalRunner())
    after = StepStore(rules, boot_id=b"b" * 16)
    after.append("t", b"later")
    after.close()
    assert not look(lake, data_dir=data).lost
    export(lake, data_dir=str(data), runner=LocalRunner())
    report = look(lake, data_dir=data)
    assert found(report) == []
    first, second = of(report, "t").lake
    assert (second.offset, second.ordinal) == (first.end + JUMP, first.end_ordinal + JUMP)
    assert not look(lake).lost


# Logs and lakes that cannot be audited


def test_bad_input_is_one_sentence(data, lake, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    for place, text in (
        (tmp_path / "none", "it does not exist"),
        (other / "notes.txt", "is not a directory: "),
        (other, r"holds something else than a lake of Headrace \(notes.txt\)"),
        (empty, "there is no table in it"),
    ):
        with pytest.raises(LakeError, match=text):
            look(place, data_dir=data)
    for directory in (tmp_path / "none", empty):
        with pytest.raises(DataDirectoryError, match="holds no Headrace log"):
            look(lake, data_dir=directory)
    with pytest.raises(UnknownTopicError, match="there is no topic 'nobody'"):
        look(lake, "many", "nobody", data_dir=data)
    with pytest.raises(UnknownTopicError, match="there is no topic 'nobody'"):
        look(lake, "nobody")
    with pytest.raises(BadTopicNameError):
        look(lake, "")
    with pytest.raises(OptionError, match="give one of them"):
        look(lake, data_dir=data, url="http://127.0.0.1:1")
    with pytest.raises(OptionError, match="say what to audit"):
        look()
    assert [path.name for path in empty.iterdir()] == []
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


# Other machines, and concurrent changes


def test_what_a_server_still_has_is_checked_when_retention_takes_the_start_of_a_part(monkeypatch):
    runs = [[b"a" * 6, b"b" * 6], [b"c" * 6], [b"d" * 6, b"e" * 6], [b"f" * 6]]
    whole = block(runs)
    # Records c to f are left, and e is damaged.
    left = LogBlock(whole.rows[1:], flipped(whole.data, 45)[20:], whole.place)
    part = LogRange("t", Position(1, 0, 0), Position(1, 60, 6))
    rest = part._replace(start=Position(1, 20, 2))

    class Trimmed:
        def __init__(self, place: LogLocation) -> None: ...
        def expect(self, parts: Any) -> None: ...
        def close(self) -> None: ...

        def read(self, wanted: LogRange) -> Iterator[LogBlock]:
            if wanted == part:
                raise DataLossError("retention has overtaken the read", rest)
            yield left

    monkeypatch.setattr(audit_log, "ServerLog", Trimmed)
    (found,) = audit_log.check_served([part], place=LogLocation())
    assert found.ranges == [VerifiedRange(20, 30, 2, 3), VerifiedRange(50, 60, 5, 6)]
    assert [(one.reason, one.range) for one in found.damages] == [
        ("the checksum is wrong", VerifiedRange(30, 50, 3, 5))
    ]


def test_executors_that_see_another_directory_are_told_apart_from_damage(data):
    class Elsewhere(LocalRunner):
        def run(self, works: Any, function: Any, progress: Any = None) -> Any:
            return super().run(works, partial(function, root=Path("/nowhere")), progress)

    with pytest.raises(NotSharedError, match="mount it at the same path there"):
        look(data_dir=data, runner=Elsewhere())


def test_an_export_that_goes_on_meanwhile_is_no_loss(data, lake, monkeypatch):
    """Retention removes exported records while the audit is between lake and log."""
    again = StepStore(config(data))
    fill(again, "many", random.Random(7), 3)
    again.close()
    module = importlib.import_module("headrace.pipeline.audit.job")
    real = module.audit_directory

    def meanwhile(*arguments: Any) -> Any:
        export(lake, data_dir=str(data), runner=LocalRunner())
        store = StepStore(config(data))
        store.trim("many", store.store.topic("many").end)
        fill(store, "many", random.Random(8), 1)
        store.close()
        return real(*arguments)

    monkeypatch.setattr(module, "audit_directory", meanwhile)
    report = look(lake, data_dir=data)
    assert (found(report), report.notes) == ([], [])
