"""Logs that are damaged, deleted or written to during a read, in both views: no loss is silent."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace import connect_blocking
from headrace.log.read.index import HEADER_BYTES, ROW_BYTES, decode_rows
from headrace.reader.decode import DamageError
from headrace.reader.files import FileLog
from headrace.reader.view import (
    DataLossError,
    LogLocation,
    LogRange,
    LogView,
    SourceError,
    open_log,
)
from headrace.spark.columns import SCHEMA, PartReader, ReadPartition
from headrace.spark.options import parse_source
from headrace.testing import ServerProcess, wait_until
from tests.reader.conftest import VIEWS, Filled, Record, start_server, view_of
from tests.reader.runs import flipped
from tests.reader.test_logs import read, state_of
from tests.system.support import destroy, get_json

Harm = Callable[[Path, Callable[[bytes], bytes]], None]


@pytest.fixture(scope="module")
def twin(filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """A copy of the log with its own server, which tests may damage with `harm`."""
    root = tmp_path_factory.mktemp("twin")
    shutil.copytree(filled.path, root / "data")
    with start_server(root) as server:
        yield Filled(server, filled.records)
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest, twin: Filled) -> Iterator[LogView]:
    with closing(view_of(twin, request.param)) as log:
        yield log


@pytest.fixture
def harm() -> Iterator[Harm]:
    """Change a file until the end of the test."""
    sound: dict[Path, bytes] = {}

    def change(file: Path, how: Callable[[bytes], bytes]) -> None:
        sound.setdefault(file, file.read_bytes())
        file.write_bytes(how(file.read_bytes()))

    yield change
    for file, content in sound.items():
        file.write_bytes(content)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: flipped(data, at)


def rows(segment: Path) -> list[object]:
    return list(decode_rows(segment.with_suffix(".idx").read_bytes()[HEADER_BYTES:]))


def parts(log: LogView, name: str, size: int) -> list[LogRange]:
    state = state_of(log, name)
    return list(log.split(LogRange(name, state.start, state.end), size))


def left(log: LogView, name: str, size: int) -> list[Record]:
    """Return the records that are read without verification."""
    return [one for part in parts(log, name, size) for one in read(log, part, verify=False)]


def read_all(log: LogView, name: str, size: int) -> None:
    for part in parts(log, name, size):
        read(log, part)


SIZES = [1, 1 << 40]


@pytest.mark.parametrize("where", ["first", "middle", "last of a segment", "last of all"])
def test_a_damaged_row_is_an_error_and_the_rest_can_be_read(view, twin, harm, where):
    segments = twin.segments("many")
    segment = segments[{"first": 0, "middle": 1, "last of a segment": 1, "last of all": -1}[where]]
    found = rows(segment)
    number = {"first": 0, "middle": len(found) // 2}.get(where, len(found) - 1)
    row = found[number]
    harm(segment.with_suffix(".idx"), flip(HEADER_BYTES + number * ROW_BYTES + 3))
    kept = [
        one
        for one in twin.records["many"]
        if not row.offset <= one.offset < row.offset + row.length
    ]
    for size in SIZES:
        with pytest.raises(DamageError, match="the index is damaged"):
            read_all(view, "many", size)
        assert left(view, "many", size) == kept


@pytest.mark.parametrize("number", [0, 1, -1])
def test_damaged_records_are_an_error_and_the_rest_can_be_read(view, twin, harm, number):
    segment = twin.segments("many")[1]
    row = rows(segment)[number]
    base = int(segment.stem.split("-")[1])
    harm(segment, flip(row.offset - base + 5))
    kept = [
        one
        for one in twin.records["many"]
        if not row.offset <= one.offset < row.offset + row.length
    ]
    for size in SIZES:
        with pytest.raises(DamageError, match=f"offsets {row.offset} to .*: a checksum fails"):
            read_all(view, "many", size)
        assert left(view, "many", size) == kept


@pytest.mark.parametrize("number", [1, -1])
def test_a_segment_that_was_cut_is_an_error_and_the_rest_can_be_read(view, twin, harm, number):
    segment = twin.segments("many")[number]
    base = int(segment.stem.split("-")[1])
    first = rows(segment)[0]
    size = segment.stat().st_size
    harm(segment, lambda data: data[: first.length + 5])
    kept = [
        one for one in twin.records["many"] if not base + first.length <= one.offset < base + size
    ]
    with pytest.raises(DamageError, match="a checksum fails"):
        read_all(view, "many", 1 << 40)
    assert left(view, "many", 1 << 40) == kept


def test_a_position_inside_of_damage_is_behind_it(view, twin, harm):
    segment = twin.segments("many")[1]
    row = rows(segment)[0]
    state = state_of(view, "many")
    base = int(segment.stem.split("-")[1])
    harm(segment, flip(row.offset - base + 2))
    end = row.offset + row.length, row.ordinal + row.record_count
    assert view.at_offset(state, row.offset + 1)[1:] == end
    assert view.at_ordinal(state, row.ordinal + 1)[1:] in (end, (end[0], row.ordinal + 1))


# Retention and destruction


def options(place: LogLocation, fail: bool) -> PartReader:
    given = {"path": place.path} if place.path else {"url": place.urls[0]}
    given |= {"subscribe": "many", "failOnDataLoss": str(fail)}
    return PartReader(parse_source(given, streaming=False), SCHEMA)


def test_a_segment_deleted_between_planning_and_reading_is_data_loss(filled, tmp_path):
    names = [segment.name for segment in filled.segments("many")]
    for deleted in (0, 1, len(names) - 1):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        shutil.copytree(filled.path, tmp_path / "data")
        log = FileLog(str(tmp_path / "data"))
        planned = parts(log, "many", 1 << 40)
        (gone,) = (tmp_path / "data").glob(f"segments/*/{names[deleted]}")
        base = int(gone.stem.split("-")[1])
        end = base + gone.stat().st_size
        gone.unlink()
        gone.with_suffix(".idx").unlink()
        place = LogLocation(path=str(tmp_path / "data"))
        with pytest.raises(DataLossError, match=rf"its segment {names[deleted]} was deleted"):
            list(options(place, True).read(ReadPartition(planned)))
        found = [
            ordinal
            for batch in options(place, False).read(ReadPartition(planned))
            for ordinal in batch.column("ordinal").to_pylist()
        ]
        kept = [one.ordinal for one in filled.records["many"] if not base <= one.offset < end]
        assert found == kept


def test_a_segment_deleted_while_it_is_planned_is_data_loss_too(filled, tmp_path):
    shutil.copytree(filled.path, tmp_path / "data")
    log = FileLog(str(tmp_path / "data"))
    state = state_of(log, "many")
    first = filled.segments("many")[0].name
    (gone,) = (tmp_path / "data").glob(f"segments/*/{first}")
    gone.unlink()
    gone.with_suffix(".idx").unlink()
    later = next(one for one in filled.records["many"] if one.offset >= rows_end(filled))
    assert log.at_ordinal(state, 1)[1:] == (later.offset, later.ordinal)
    assert log.at_time(state, 1)[1:] == (later.offset, later.ordinal)
    (part,) = log.split(LogRange("many", state.start, state.end), 1 << 40)
    with pytest.raises(DataLossError):
        read(log, part)


def rows_end(filled: Filled) -> int:
    """Return the offset at which the first segment of `many` ends."""
    return int(filled.segments("many")[1].stem.split("-")[1])


def test_what_a_server_has_forgotten_is_data_loss_and_the_rest_is_read(tmp_path):
    config = "durability = 'written'\n[journal]\nrotate_s = 0.1\n[segment]\nbytes = 2048\n"
    config += "[retention]\nbytes = 4096\ncheck_s = 0.1\n"
    with start_server(tmp_path, config) as server, connect_blocking(server.figg_url) as client:
        place = LogLocation(urls=(server.http_url,))
        with closing(open_log(place)) as log:
            for _ in range(10):
                client.publish("many", bytes(300))
            planned = parts(log, "many", 1 << 40)
            for _ in range(10):
                for _ in range(10):
                    client.publish_nowait("many", bytes(300))
                client.flush()
                time.sleep(0.12)  # otherwise all records become one run
            late = planned[0]._replace(end=state_of(log, "many").end)
            wait_until(lambda: state_of(log, "many").start.offset, 30, "retention")
            with pytest.raises(DataLossError, match=r"'many': retention has overtaken the read"):
                list(options(place, True).read(ReadPartition([late])))
            found = [
                ordinal
                for batch in options(place, False).read(ReadPartition([late]))
                for ordinal in batch.column("ordinal").to_pylist()
            ]
            assert found == list(range(found[0], 110))
            assert 0 < found[0] <= state_of(log, "many").start.ordinal
            destroy(server, "many")
            with pytest.raises(DataLossError, match=r"'many' was destroyed"):
                read(log, late)
            assert list(options(place, False).read(ReadPartition([late]))) == []


# Invalid files


def cut_rows(file: Path, count: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - count * ROW_BYTES])


@pytest.mark.parametrize("what", ["a row", "the index", "index and segment"])
@pytest.mark.parametrize("size", [1000, 1 << 40])
def test_what_is_missing_between_segments_is_damage(filled, tmp_path, what, size):
    shutil.copytree(filled.path, tmp_path / "data")
    name = filled.segments("many")[1].name
    (segment,) = (tmp_path / "data").glob(f"segments/*/{name}")
    index = segment.with_suffix(".idx")
    if what == "a row":
        cut_rows(index, 1)
    else:
        index.unlink()
        if what == "index and segment":
            segment.unlink()
    log = FileLog(str(tmp_path / "data"))
    with pytest.raises(DamageError, match=r"'many', segment .*, offsets \d+ to \d+: the index"):
        read_all(log, "many", size)
    found = left(log, "many", size)
    assert found
    assert set(found) < set(filled.records["many"])


def test_the_last_row_of_a_topic_that_is_damaged_is_not_passed_over(filled, tmp_path):
    shutil.copytree(filled.path, tmp_path / "data")
    name = filled.segments("many")[-1].name
    (index,) = (tmp_path / "data").glob(f"segments/*/{Path(name).stem}.idx")
    data = bytearray(index.read_bytes())
    for row in range(HEADER_BYTES, len(data), ROW_BYTES):
        data[row] ^= 1
    index.write_bytes(data)
    log = FileLog(str(tmp_path / "data"))
    with pytest.raises(DamageError, match=f"segment {name}"):
        read_all(log, "many", 1 << 40)


def test_files_that_have_become_shorter_than_they_were_planned_are_damage(filled, tmp_path):
    shutil.copytree(filled.path, tmp_path / "data")
    planned = parts(FileLog(str(tmp_path / "data")), "many", 1 << 40)
    name = Path(filled.segments("many")[-1].name).stem
    (index,) = (tmp_path / "data").glob(f"segments/*/{name}.idx")
    cut_rows(index, 1)
    place = LogLocation(path=str(tmp_path / "data"))
    with pytest.raises(DamageError, match="the index is damaged or too short"):
        list(options(place, True).read(ReadPartition(planned)))


def test_records_without_any_files_are_data_loss(filled, tmp_path):
    shutil.copytree(filled.path, tmp_path / "data")
    log = FileLog(str(tmp_path / "data"))
    state = state_of(log, "one")
    with pytest.raises(DataLossError, match="'gone' has no files any more"):
        log.split(LogRange("gone", state.start, state.end), 1 << 40)


def test_a_server_knows_how_far_a_destroyed_topic_reached(tmp_path):
    with start_server(tmp_path) as server, connect_blocking(server.figg_url) as client:
        for _ in range(3):
            client.publish("t", b"x")
        with closing(open_log(LogLocation(urls=(server.http_url,)))) as log:
            end = state_of(log, "t").end
            destroy(server, "t")
            assert log.ended(["t", "never"]) == {"t": end}
            assert log.topics(["t"]) == {}
        with closing(open_log(LogLocation(path=str(server.data_dir)))) as log:
            assert log.ended(["t"]) == {}


def test_a_path_that_is_no_data_directory_is_refused(tmp_path):
    with pytest.raises(SourceError, match="there is no `segments` in it"):
        FileLog(str(tmp_path))
    with pytest.raises(SourceError, match="there is no such directory"):
        FileLog(str(tmp_path / "nope"))


@pytest.fixture
def copied(filled: Filled, tmp_path: Path) -> Path:
    shutil.copytree(filled.path, tmp_path / "data")
    return tmp_path / "data"


def one_of(copied: Path, segment: Path) -> Path:
    (found,) = copied.glob(f"segments/*/{segment.name}")
    return found


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_damaged_header_loses_nothing_while_others_know_the_name(
    filled, copied, harm, number, caplog
):
    harm(one_of(copied, filled.segments("many")[number]).with_suffix(".idx"), flip(50))
    log = FileLog(str(copied))
    with caplog.at_level(logging.WARNING):
        assert [r for part in parts(log, "many", 1) for r in read(log, part)] == filled.records[
            "many"
        ]
    assert "the header is damaged" in caplog.text


def test_a_topic_whose_only_header_is_damaged_is_not_known_and_told(filled, copied, harm, caplog):
    harm(one_of(copied, filled.segments("one")[0]).with_suffix(".idx"), flip(50))
    with caplog.at_level(logging.WARNING):
        assert "one" not in FileLog(str(copied)).topics(None)
    assert "the header is damaged" in caplog.text


@pytest.mark.parametrize("cut", [1, ROW_BYTES - 1])
def test_a_row_that_is_just_being_written_does_not_count_yet(filled, copied, cut):
    index = one_of(copied, filled.segments("many")[-1]).with_suffix(".idx")
    whole = rows(index.with_suffix(".log"))
    index.write_bytes(index.read_bytes()[:-cut])
    log = FileLog(str(copied))
    kept = [one for one in filled.records["many"] if one.offset < whole[-1].offset]
    assert state_of(log, "many").end[1:] == (kept[-1].end, kept[-1].ordinal + 1)
    assert [r for part in parts(log, "many", 1) for r in read(log, part)] == kept


def test_an_index_that_is_just_being_made_does_not_count_yet(filled, copied):
    before = FileLog(str(copied)).topics(None)
    place = copied / "segments" / "02" / f"2-{10**9:020d}.idx"
    for content in (b"", bytes(HEADER_BYTES - 1)):
        place.write_bytes(content)
        assert FileLog(str(copied)).topics(None) == before


def test_files_of_others_are_left_alone(filled, copied):
    index = one_of(copied, filled.segments("many")[0]).with_suffix(".idx")
    shutil.copy(index, index.with_name("copy of " + index.name))
    (copied / "segments" / "notes.txt").write_text("not a directory")
    log = FileLog(str(copied))
    assert [r for part in parts(log, "many", 1) for r in read(log, part)] == filled.records["many"]


def test_files_are_read_while_the_server_writes(tmp_path):
    """A reader always sees a prefix of the published records, and in the end all of them."""
    with start_server(tmp_path) as server, connect_blocking(server.figg_url) as client:
        log = FileLog(str(server.data_dir))
        sent: list[bytes] = []

        def seen() -> list[bytes]:
            if "t" not in log.topics(["t"]):
                return []
            return [r.payload for part in parts(log, "t", 4096) for r in read(log, part)]

        for turn in range(25):
            for number in range(40):
                sent.append(b"%d/%d " % (turn, number) * (number % 9))
                client.publish_nowait("t", sent[-1])
            client.flush()
            found = seen()
            assert found == sent[: len(found)]
        wait_until(lambda: len(seen()) == len(sent), 30, "the applier")
        assert seen() == sent
        assert len(segments_of(server, "t")) > 1


def segments_of(server: ServerProcess, name: str) -> list[object]:
    found: list[object] = get_json(server, f"/v1/topic?name={name}")["segments"]
    return found


def test_a_topic_made_anew_is_seen_in_files_without_its_first_life(tmp_path):
    with start_server(tmp_path) as server, connect_blocking(server.figg_url) as client:
        log = FileLog(str(server.data_dir))
        client.publish("t", b"old")
        wait_until(lambda: "t" in log.topics(["t"]), 30, "the applier")
        destroy(server, "t")
        client.publish("t", b"new")
        wait_until(
            lambda: log.topics(["t"]).get("t", (0, (0, 0, 0)))[1][2] == 1, 20, "the new life"
        )
        (part,) = parts(log, "t", 100)
        assert read(log, part) == [Record(7, 1, b"new")]
        destroy(server, "t")
        wait_until(lambda: log.topics(["t"]) == {}, 30, "the end of it")
