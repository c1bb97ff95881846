"""Reading segments: only verified, complete runs, past damaged places, with few open files."""

import errno
import os

import pytest

from headrace.log import disk as file_reads
from headrace.log.catalogue.rows import SegmentRow
from headrace.log.commit.journal import APPEND, Entry
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.read import segment
from headrace.log.read.index import (
    Header,
    encode_header,
    encode_row,
    join_runs,
    row_position,
)
from headrace.log.read.segment import ColdFileError, Segments, Unreadable
from headrace.log.records import pack_record
from headrace.log.store import ColdError
from tests.fakes.disk import flip

BASE = 1000
RUNS = 9
RECORD = pack_record(b"payload")
RUN_BYTES = 3 * len(RECORD)


def make_segment(
    layout: Layout, topic_id: int = 1, runs: int = RUNS, record: bytes = RECORD
) -> SegmentRow:
    """Make a segment of runs of three records, each run 1000 ms after the one before it."""
    entries = [
        Entry(APPEND, topic_id, BASE + n * RUN_BYTES, 50 + 3 * n, 3, 1000 * n, b"", record * 3)
        for n in range(runs)
    ]
    rows = [row for row, _ in join_runs(entries)]
    layout.segment(topic_id, BASE).write_bytes(b"".join(entry.data for entry in entries))
    header = encode_header(Header(topic_id, 1, BASE, 50, "topic"))
    layout.index(topic_id, BASE).write_bytes(header + b"".join(map(encode_row, rows)))
    end = BASE + runs * RUN_BYTES
    return SegmentRow(topic_id, BASE, end, runs, 50, 50 + 3 * runs, 0, 1000 * (runs - 1))


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path)
    layout.make(Disk())
    return layout


@pytest.fixture
def row(layout):
    return make_segment(layout)


@pytest.fixture
def files(layout):
    files = Segments(layout, 4)
    yield files
    files.close()


def offsets(block):
    return [run.offset for run in block.runs]


def all_offsets(without=(), runs=RUNS):
    return [BASE + number * RUN_BYTES for number in range(runs) if number not in without]


def test_runs_are_read_from_the_one_that_contains_the_offset(files, row):
    for number in range(RUNS):
        for inside in (0, 1, RUN_BYTES - 1):
            block = files.read(row, BASE + number * RUN_BYTES + inside, 1 << 20)
            assert offsets(block) == all_offsets()[number:]
            assert block.next_offset == row.end
            assert block.damaged == []


def test_a_read_takes_at_least_one_run_and_goes_on_where_it_ended(files, row):
    at, number, seen = BASE, None, []
    while at < row.end:
        block = files.read(row, at, 1, number)
        assert len(block.runs) == 1
        assert block.runs[0].data == RECORD * 3
        seen += [(run.offset, run.ordinal, run.record_count, run.ms) for run in block.runs]
        at, number = block.next_offset, block.row
    assert seen == [
        (BASE + number * RUN_BYTES, 50 + 3 * number, 3, 1000 * number) for number in range(RUNS)
    ]


def test_bytes_that_no_row_covers_do_not_count(files, layout, row):
    with layout.segment(1, BASE).open("ab") as file:
        file.write(RECORD * 10)
    with layout.index(1, BASE).open("ab") as file:
        file.write(b"half a row")
    assert offsets(files.read(row, BASE, 1 << 20)) == all_offsets()


def test_rows_past_those_the_catalogue_names_do_not_count(files, layout, row):
    fewer = row._replace(rows=4, end=BASE + 4 * RUN_BYTES)
    block = files.read(fewer, BASE, 1 << 20)
    assert offsets(block) == all_offsets()[:4]
    assert block.next_offset == fewer.end


@pytest.mark.parametrize("bad", range(RUNS))
def test_a_damaged_run_is_skipped_and_the_rest_served(files, layout, row, bad):
    flip(layout.segment(1, BASE), bad * RUN_BYTES + 7)
    block = files.read(row, BASE, 1 << 20)
    assert offsets(block) == all_offsets(without=[bad])
    assert block.next_offset == row.end
    (damage,) = block.damaged
    assert (damage.offset, damage.end) == (BASE + bad * RUN_BYTES, BASE + (bad + 1) * RUN_BYTES)
    assert (damage.ordinal, damage.record_count) == (50 + 3 * bad, 3)


@pytest.mark.parametrize("bad", [(0,), (4,), (RUNS - 1,), (0, 1, 2), (3, 5), tuple(range(RUNS))])
def test_damaged_rows_cost_no_record_and_are_reported(files, layout, row, bad):
    for number in bad:
        flip(layout.index(1, BASE), row_position(number) + 3)
    check_restored(files, row)


def check_restored(files, row):
    """Check that all records are served at their offsets, from any start, although rows are restored."""
    block = files.read(row, BASE, 1 << 20)
    assert b"".join(run.data for run in block.runs) == RECORD * 3 * RUNS
    assert [run.ordinal - 50 for run in block.runs] == [
        (run.offset - BASE) // len(RECORD) for run in block.runs
    ]
    assert block.next_offset == row.end
    assert block.damaged
    for number in range(RUNS):
        found = files.read(row, BASE + number * RUN_BYTES, 1).runs[0]
        assert found.offset <= BASE + number * RUN_BYTES < found.end


@pytest.mark.parametrize("bad", range(RUNS))
@pytest.mark.parametrize("other", [0, 3, RUNS - 1])
def test_rows_of_another_place_are_not_believed(files, layout, row, bad, other):
    if other == bad:
        return
    path = layout.index(1, BASE)
    data = path.read_bytes()
    misplaced = data[row_position(other) : row_position(other + 1)]
    path.write_bytes(data[: row_position(bad)] + misplaced + data[row_position(bad + 1) :])
    check_restored(files, row)


def test_damaged_rows_of_a_damaged_segment_cost_their_runs_and_no_others(files, layout, row):
    flip(layout.index(1, BASE), row_position(4) + 3)
    flip(layout.segment(1, BASE), 4 * RUN_BYTES + 3)  # the size of a record
    assert offsets(files.read(row, BASE, 1 << 20)) == all_offsets(without=[4])


def test_an_index_that_begins_with_a_block_of_another_is_restored(files, layout, row):
    make_segment(layout, topic_id=2, record=pack_record(b"PAYLOAD"))
    layout.index(1, BASE).write_bytes(layout.index(2, BASE).read_bytes())
    check_restored(files, row)


@pytest.mark.parametrize("bad", [(0,), (4,), (RUNS - 1,), (0, 1, 2), (3, 5)])
def test_searching_goes_around_damaged_rows(files, layout, row, bad):
    for number in bad:
        flip(layout.index(1, BASE), row_position(number) + 3)
    for number in range(RUNS):
        found = files.first_row(row, lambda row, at=number: row.ms >= 1000 * at)
        # No record is missed: the run that is found begins at that time's run, or before it.
        assert found.ms >= 1000 * number
        assert found.offset <= BASE + number * RUN_BYTES


@pytest.mark.parametrize("kept", [0, 1, RUN_BYTES, 4 * RUN_BYTES + 5])
def test_a_file_that_was_cut_serves_what_is_left(files, layout, row, kept):
    os.truncate(layout.segment(1, BASE), kept)
    block = files.read(row, BASE, 1 << 20)
    assert offsets(block) == all_offsets()[: kept // RUN_BYTES]
    assert block.next_offset == row.end
    assert len(block.damaged) == RUNS - kept // RUN_BYTES


def test_an_index_that_was_cut_costs_no_record(files, layout, row):
    os.truncate(layout.index(1, BASE), row_position(5) + 7)
    check_restored(files, row)


def test_an_index_that_is_missing_costs_no_record(files, layout, row):
    layout.index(1, BASE).unlink()
    check_restored(files, row)


def test_a_segment_that_is_missing_is_damage_and_no_error(files, layout, row):
    layout.segment(1, BASE).unlink()
    block = files.read(row, BASE, 1 << 20)
    assert block.runs == []
    assert block.next_offset == row.end
    assert len(block.damaged) == RUNS


def test_open_files_are_bounded(layout):
    files = Segments(layout, 4)
    rows = [make_segment(layout, topic_id) for topic_id in range(1, 9)]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for row in rows:
            assert offsets(files.read(row, BASE, 1 << 20)) == all_offsets()
            assert len(os.listdir("/proc/self/fd")) <= before + 4
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_were_deleted_are_let_go(files, layout, row):
    other = make_segment(layout, 2)
    before = len(os.listdir("/proc/self/fd"))
    for one in (row, other):
        files.read(one, BASE, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 4
    layout.segment(1, BASE).unlink()
    layout.index(1, BASE).unlink()
    for _ in range(2):
        files.close_deleted()
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert offsets(files.read(other, BASE, 1 << 20)) == all_offsets()


class Cache:
    """A page cache that only contains bytes which an ordinary read has loaded."""

    def __init__(self, monkeypatch) -> None:
        self.warm = set()
        self.asked = []
        pread = os.pread

        def preadv(fd, buffers, position, flags=0):
            assert flags == os.RWF_NOWAIT
            self.asked.append(position)
            length = len(buffers[0])
            name = os.readlink(f"/proc/self/fd/{fd}")
            ready = 0
            while ready < length and (name, position + ready) in self.warm:
                ready += 1
            if not ready:
                raise OSError(errno.EAGAIN, "cold")
            data = pread(fd, ready, position)
            buffers[0][: len(data)] = data
            return len(data)

        def warm(fd, length, position):
            name = os.readlink(f"/proc/self/fd/{fd}")
            self.warm |= {(name, position + at) for at in range(length)}
            return pread(fd, length, position)

        monkeypatch.setattr(segment.os, "preadv", preadv)
        monkeypatch.setattr(segment.os, "pread", warm)


def test_bytes_that_are_not_in_memory_are_asked_for_and_then_read(layout, row, monkeypatch):
    cache = Cache(monkeypatch)
    files = Segments(layout, 4, wait_for_disk=False)
    for attempt in range(20):
        try:
            block = files.read(row, BASE, 1 << 20)
            break
        except ColdError as cold:
            assert attempt < 19, "each warming brings it further"
            cold.warm()
    assert offsets(block) == all_offsets()
    # Partly cached bytes are not enough, and are not taken for the end of the file.
    name = str(layout.segment(1, BASE))
    cache.warm = {place for place in cache.warm if place[0] != name or place[1] < RUN_BYTES}
    with pytest.raises(ColdError) as raised:
        files.read(row, BASE, 1 << 20)
    raised.value.warm()
    assert offsets(files.read(row, BASE, 1 << 20)) == all_offsets()
    files.close()


def test_warming_a_file_that_is_gone_is_no_error(layout):
    ColdFileError(layout.segment(1, BASE), 0, 10, Unreadable()).warm()


def test_where_the_system_cannot_say_it_is_simply_read(layout, row, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(segment.os, "preadv", unsupported)
    files = Segments(layout, 4, wait_for_disk=False)
    assert offsets(files.read(row, BASE, 1 << 20)) == all_offsets()
    files.close()


class BadDisk:
    """A disk that cannot read some bytes of one file, `times` times or always; behind a cache or not."""

    def __init__(self, monkeypatch, path, *, bad: range, times: float = float("inf")) -> None:
        self.failed = 0
        self.clock_s = 0.0
        self._times = times
        monkeypatch.setattr(file_reads.time, "sleep", lambda _: None)
        monkeypatch.setattr(segment.time, "monotonic", lambda: self.clock_s)
        pread, preadv = os.pread, os.preadv

        def check(fd, position, length):
            """Return the number of bytes that can be read from this position."""
            hit = range(max(position, bad.start), min(position + length, bad.stop))
            is_here = os.readlink(f"/proc/self/fd/{fd}") == str(path)
            if not is_here or not hit or self.failed >= self._times:
                return length
            if hit.start > position:
                return hit.start - position  # a read returns the bytes before the bad place
            self.failed += 1
            raise OSError(errno.EIO, "a bad sector")

        monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, check(fd, at, n), at))
        monkeypatch.setattr(
            os,
            "preadv",
            lambda fd, bufs, at, flags: preadv(
                fd, [memoryview(bufs[0])[: check(fd, at, len(bufs[0]))]], at
            ),
        )


LONG = 2000
"""Number of runs of a segment that takes many pages."""


def read_all(files: Segments, row: SegmentRow) -> tuple[list[int], list[segment.DamagedRun]]:
    found, damaged, offset = [], [], BASE
    while offset < row.end:
        for attempt in range(20):
            try:
                block = files.read(row, offset, 1 << 14)
                break
            except ColdError as cold:
                assert attempt < 19, "each warming brings it further"
                cold.warm()
        found += offsets(block)
        damaged += block.damaged
        offset = block.next_offset
    return found, damaged


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", ["segment", "index"])
def test_an_error_that_passes_is_no_damage(layout, monkeypatch, name, wait):
    row = make_segment(layout, runs=LONG)
    for times in (1, 2):
        with monkeypatch.context() as patch:
            disk = BadDisk(
                patch, getattr(layout, name)(1, BASE), bad=range(9000, 9010), times=times
            )
            files = Segments(layout, 4, wait_for_disk=wait)
            found, damaged = read_all(files, row)
            files.close()
            assert disk.failed == times
            assert damaged == []
            assert found == all_offsets(runs=LONG)


@pytest.mark.parametrize("wait", [True, False])
def test_a_sector_that_cannot_be_read_costs_the_runs_of_its_page(layout, monkeypatch, wait):
    row = make_segment(layout, runs=LONG)
    disk = BadDisk(monkeypatch, layout.segment(1, BASE), bad=range(8192, 12_288))
    files = Segments(layout, 4, wait_for_disk=wait)
    found, damaged = read_all(files, row)
    lost = [at for at in all_offsets(runs=LONG) if -RUN_BYTES < at - BASE - 8192 < 4096]
    assert found == [at for at in all_offsets(runs=LONG) if at not in lost]
    assert [one.offset for one in damaged] == lost
    assert "the disk cannot read it" in damaged[0].reason
    failed = disk.failed
    assert read_all(files, row) == (found, damaged)
    assert disk.failed == failed, "it is not asked for again"
    disk._times = 0
    disk.clock_s += segment.UNREADABLE_S
    assert read_all(files, row) == (all_offsets(runs=LONG), []), "until a minute later"
    files.close()


def test_a_search_that_was_led_astray_finds_no_run_before_its_offset(files, row, monkeypatch):
    monkeypatch.setattr(files, "find", lambda *_: 0)
    wanted = all_offsets()[4]
    assert offsets(files.read(row, wanted, 1 << 20)) == all_offsets()[4:]
