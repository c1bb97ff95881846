"""Runs → records: boundaries against a plain loop, checksums, clipping, portions."""

import logging
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.log.records import pack_record
from headrace.model import Position
from headrace.reader import decode as module
from headrace.reader.decode import DamageError, DecodedRecords, boundaries, decode, to_batch
from headrace.reader.view import DamagedRange, LogBlock, LogRange
from headrace.spark.columns import SCHEMA
from tests.reader.runs import block, flipped, packed, whole

payload = st.integers(0, 2000).map(lambda size: bytes([size % 251]) * size)
alike = st.tuples(st.integers(0, 2000), st.integers(1, 60)).map(lambda p: [bytes(p[0])] * p[1])
run = st.one_of(alike, st.lists(payload, min_size=1, max_size=20))
several = st.lists(run, min_size=1, max_size=12)


def walked(data: bytes, lengths: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Find boundaries one by one; return None if the runs do not have these numbers of records."""
    found, at = [], 0
    for length, count in zip(lengths, counts, strict=True):
        stop = at + length
        for _ in range(count):
            if at + 4 > stop or stop > len(data):
                return None
            found.append(at)
            at += 4 + struct.unpack_from(">I", data, at)[0]
        if at != stop:
            return None
    return [*found, at]


def check(data: bytes, lengths: Sequence[int], counts: Sequence[int]) -> None:
    got = boundaries(memoryview(data), np.array(lengths), np.array(counts))
    assert (None if got is None else got.tolist()) == walked(data, lengths, counts)


@given(several)
def test_boundaries_are_those_of_a_plain_walk(runs):
    rows, data = packed(runs)
    check(data, [row.length for row in rows], [row.record_count for row in rows])


@given(st.integers(0, 2000), st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_records_of_one_size_are_found_without_a_walk(size, counts):
    data = pack_record(bytes(size)) * sum(counts)
    check(data, [count * (size + 4) for count in counts], counts)


@given(several, st.data())
def test_cut_data_is_never_taken_for_records(runs, draw):
    rows, data = packed(runs)
    cut = draw.draw(st.integers(0, len(data)))
    check(data[:cut], [row.length for row in rows], [row.record_count for row in rows])


@given(several, st.data())
def test_sizes_that_lead_anywhere_else_are_found_out(runs, draw):
    rows, data = packed(runs)
    at = draw.draw(st.integers(0, len(data) - 4))
    size = draw.draw(st.one_of(st.integers(0, 3000), st.integers(0, (1 << 32) - 1)))
    data = data[:at] + struct.pack(">I", size) + data[at + 4 :]
    check(data, [row.length for row in rows], [row.record_count for row in rows])


@given(several, st.data())
def test_counts_that_are_wrong_are_found_out(runs, draw):
    rows, data = packed(runs)
    counts = [row.record_count for row in rows]
    number = draw.draw(st.integers(0, len(counts) - 1))
    counts[number] = draw.draw(st.integers(1, 70))
    check(data, [row.length for row in rows], counts)


def test_data_behind_the_runs_is_not_looked_at():
    check(pack_record(b"abc") * 2 + b"rest", [14], [2])
    check(pack_record(b"abc") + pack_record(b"d") + b"rest", [12], [2])


# Checks


def payloads(found: "list[DecodedRecords]") -> list[bytes]:
    return [one for records in found for one in records.payloads().to_pylist()]


def places(found: "list[DecodedRecords]") -> list[tuple[int, int, int, int]]:
    """Return offset, next offset, ordinal and time of each record."""
    rows = []
    for one in found:
        ends = one.offsets + np.diff(one.boundaries)
        columns = (one.offsets, ends, one.ordinals, one.ms)
        rows += list(zip(*(column.tolist() for column in columns), strict=True))
    return rows


def decoded(part: LogRange, *blocks: LogBlock | DamagedRange, verify: bool) -> list[DecodedRecords]:
    return list(decode([(part, one) for one in blocks], verify=verify))


RUNS = [[b"one", b"two"], [b""], [b"three"] * 4, [b"four", b"5"]]
ALL = [one for payloads in RUNS for one in payloads]


@given(several)
def test_records_have_their_payloads_and_places(runs):
    one = block(runs, offset=1 << 40, ordinal=1 << 35)
    found = decoded(whole(one), one, verify=True)
    expected = [payload for run in runs for payload in run]
    assert payloads(found) == expected
    at, rows = 1 << 40, []
    ordinal = 1 << 35
    for number, one_run in enumerate(runs):
        for payload in one_run:
            rows.append((at, at + 4 + len(payload), ordinal, 1000 + number))
            at, ordinal = at + 4 + len(payload), ordinal + 1
    assert places(found) == rows


@pytest.mark.parametrize("number", range(4))
def test_a_wrong_checksum_is_an_error_that_names_it(number):
    one = block(RUNS, offset=100)
    row = one.rows[number]
    broken = one._replace(data=flipped(one.data, int(row["offset"]) - 100 + 4 * (number != 1)))
    start, end = int(row["offset"]), int(row["offset"]) + int(row["length"])
    with pytest.raises(
        DamageError, match=rf"'t', segment x.log, offsets {start} to {end}: a check"
    ):
        decoded(whole(one), broken, verify=True)


@pytest.mark.parametrize("number", range(4))
def test_without_verification_damaged_runs_are_left_out_and_told(number, caplog):
    one = block(RUNS)
    at = int(one.rows[number]["offset"])
    with caplog.at_level(logging.WARNING):
        found = decoded(whole(one), one._replace(data=flipped(one.data, at)), verify=False)
    kept = [run for index, run in enumerate(RUNS) if index != number]
    assert payloads(found) == [payload for run in kept for payload in run]
    assert "these records are left out" in caplog.text
    assert all(row[0] + 4 <= row[1] for row in places(found))


def test_bytes_with_a_right_checksum_that_are_no_records_are_damage():
    wrong = block([[b"abc"]])
    data, changed = wrong.data, wrong.rows.copy()
    changed["count"] = 2
    with pytest.raises(DamageError, match="these bytes are not records"):
        decoded(whole(wrong), LogBlock(changed, data, "x"), verify=True)
    assert decoded(whole(wrong), LogBlock(changed, data, "x"), verify=False) == []


@pytest.mark.parametrize("kept", [0, 3, 7, 14, 20, 40])
def test_a_file_that_was_cut_gives_the_runs_that_are_whole(kept):
    one = block(RUNS)
    cut = one._replace(data=one.data[:kept])
    sound = [n for n, row in enumerate(one.rows) if int(row["offset"]) + int(row["length"]) <= kept]
    found = decoded(whole(one), cut, verify=False)
    assert payloads(found) == [payload for n in sound for payload in RUNS[n]]
    with pytest.raises(DamageError):
        decoded(whole(one), cut, verify=True)


def test_damaged_rows_are_an_error_or_left_out(caplog):
    one = block(RUNS)
    pieces = [DamagedRange(100, 200, "segment y.log"), one]
    with pytest.raises(
        DamageError, match=r"segment y.log, offsets 100 to 200: the index is damaged"
    ):
        decoded(whole(one), *pieces, verify=True)
    assert payloads(decoded(whole(one), *pieces, verify=False)) == ALL


# Selection of records


@given(several, st.data())
def test_only_the_records_of_the_part_are_given(runs, draw):
    one = block(runs, ordinal=50)
    expected = [payload for run in runs for payload in run]
    edge = st.integers(45, 55 + len(expected))
    start, end = draw.draw(edge), draw.draw(edge)
    part = whole(one)._replace(start=Position(1, 0, start), end=Position(1, 1 << 40, end))
    found = decoded(part, one, verify=True)
    assert payloads(found) == expected[max(0, start - 50) : max(0, end - 50)]
    assert [row[2] for row in places(found)] == [
        n for n in range(50, 50 + len(expected)) if start <= n < end
    ]


def test_runs_that_overlap_give_each_record_once():
    """Applying joins the tail's runs differently, so the next answer may begin inside a run."""
    first, later = (
        block([[b"a", b"b"], [b"c"]]),
        block([[b"c", b"d"], [b"e"]], offset=10, ordinal=2),
    )
    part = whole(later)._replace(start=Position(1, 0, 0))
    found = decoded(part, first, later, verify=True)
    assert payloads(found) == [b"a", b"b", b"c", b"d", b"e"]


# Parts together


Fact = tuple[str, int, int, int, int, bytes]


def facts(found: "list[DecodedRecords]") -> list[Fact]:
    """Return topic, offset, next offset, ordinal, time and payload of each record."""
    names = [one.parts[number].topic for one in found for number in one.which.tolist()]
    rows = zip(names, places(found), payloads(found), strict=True)
    return [(name, *place, payload) for name, place, payload in rows]


def part_of(name: int, runs: list[list[bytes]], draw: st.DataObject) -> tuple[LogRange, LogBlock]:
    """Return some of the records of a topic, in a block that may be damaged or cut."""
    one = block(runs, offset=1000 * name, ordinal=10 * name)
    start, end = (10 * name + draw.draw(st.integers(-2, 30)) for _ in "se")
    part = whole(one)._replace(topic=f"t{name}")
    part = part._replace(
        start=part.start._replace(ordinal=start), end=part.end._replace(ordinal=end)
    )
    harm = draw.draw(st.sampled_from(["none", "none", "flipped", "cut", "count"]))
    at = draw.draw(st.integers(0, len(one.data) - 1))
    if harm == "flipped":
        one = one._replace(data=flipped(one.data, at))
    if harm == "cut":
        one = one._replace(data=one.data[:at])
    if harm == "count":
        rows = one.rows.copy()
        rows["count"][at % len(rows)] += 1
        one = one._replace(rows=rows)
    return part, one


@given(st.lists(several, min_size=1, max_size=6), st.integers(1, 20_000), st.data())
def test_parts_that_are_decoded_together_have_the_records_that_each_has_alone(runs, size, draw):
    blocks = [part_of(number, some, draw) for number, some in enumerate(runs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GATHERED_BYTES", size)
        found = list(decode(blocks, verify=False))
    alone = [one for part, block in blocks for one in decoded(part, block, verify=False)]
    assert facts(found) == facts(alone)
    for one in found:
        data = b"".join(map(pack_record, one.payloads().to_pylist()))
        assert one.bytes == data, "the log's bytes of exactly these records"
    pieces = [piece for one in found for piece in one.stretches()]
    assert facts(pieces) == facts(found)
    for piece in pieces:
        rows = places([piece])
        assert len(set(piece.which.tolist())) == 1
        assert [row[0] for row in rows[1:]] == [row[1] for row in rows[:-1]]
        assert [row[2] for row in rows] == list(range(rows[0][2], rows[0][2] + len(rows)))


def test_small_blocks_are_copied_before_the_next_one_is_requested():
    """A view reuses the memory of its blocks."""
    memory = bytearray(100)
    blocks = [block([[bytes([number]) * 9]]) for number in range(5)]

    def reused() -> Iterator[tuple[LogRange, LogBlock]]:
        for one in blocks:
            memory[: len(one.data)] = one.data
            yield whole(one), one._replace(data=memoryview(memory)[: len(one.data)])

    (records,) = decode(reused(), verify=True)
    assert records.payloads().to_pylist() == [bytes([number]) * 9 for number in range(5)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 20))
def test_portions_are_bounded_and_leave_nothing_out(sizes, records_max):
    one = block([[bytes(size) for size in sizes]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_RECORDS_MAX", records_max)
        patch.setattr(module, "BATCH_BYTES_MAX", 500)
        found = decoded(whole(one), one, verify=True)
    assert payloads(found) == [bytes(size) for size in sizes]
    for records in found:
        assert 1 <= records.record_count <= records_max
        length = int(records.boundaries[-1] - records.boundaries[0])
        assert length <= 500 or records.record_count == 1


# Batches


def test_a_batch_has_the_columns_that_are_asked_for_in_their_order():
    one = block([[b"", b"x" * 300], [b"y"]], offset=7, ordinal=3)
    (records,) = decoded(whole(one)._replace(topic="é/☃"), one, verify=True)
    schema = to_arrow_schema(SCHEMA, timezone="UTC")
    batch = to_batch(records, SCHEMA.fieldNames(), {}, schema)
    batch.validate(full=True)
    rows = batch.to_pylist()
    assert [row["topic"] for row in rows] == ["é/☃"] * 3
    assert [row["offset"] for row in rows] == [7, 11, 315]
    assert [row["next_offset"] for row in rows] == [11, 315, 320]
    assert [row["ordinal"] for row in rows] == [3, 4, 5]
    assert [row["timestamp"].timestamp() for row in rows] == [1.0, 1.0, 1.001]
    assert [row["payload"] for row in rows] == [b"", b"x" * 300, b"y"]
    some = pa.schema([pa.field("n", pa.int64()), schema.field("ordinal")])
    values = pa.array([1, 2, None])
    epoch = pa.schema([pa.field("epoch", pa.int64())])
    assert to_batch(records, ["epoch"], {}, epoch)["epoch"].to_pylist() == [1, 1, 1]
    chosen = to_batch(records, ["n", "ordinal"], {"n": values}, some).to_pylist()
    assert chosen == [{"n": n, "ordinal": o} for n, o in ((1, 3), (2, 4), (None, 5))]
