"""The check of a file against its ranges: whatever changes in a row is found, in any row group."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.lake.files.reading import check_file, read_checked
from headrace.lake.format import RANGES_KEY, LakeError, RecordRange, encode_ranges
from headrace.lake.storage.storage import storage_of
from headrace.log.records import pack_record
from tests.lake.rows import rows, write

TOPICS = {"a": [b"x", b"", b"yy"], "b": [b"z" * 5], "c": [b"", b"", b"1", b"22"]}
COLUMNS = ("topic", "epoch", "offset", "ordinal", "payload")

payloads = st.lists(st.binary(max_size=6), min_size=1, max_size=7)
topics = st.dictionaries(st.sampled_from("abcdé☃"), payloads, min_size=1, max_size=5)
in_a_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def made(lake: Path, topics: dict[str, list[bytes]]) -> tuple[pa.Table, Sequence[RecordRange]]:
    """Return the rows and the ranges of a file; every topic begins at another place."""
    some = [
        rows(name, found, offset=100 * number, ordinal=10 * number, epoch=number)
        for number, (name, found) in enumerate(sorted(topics.items()), 1)
    ]
    (file,) = write(lake, *some)
    return pq.ParquetFile(lake / file.path).read(), file.ranges


def check(lake: Path, table: pa.Table, ranges: Sequence[RecordRange], group: int = 3) -> None:
    """Check a file with these rows, whose footer has these ranges."""
    metadata = {RANGES_KEY: encode_ranges(list(ranges))}
    pq.write_table(
        table.replace_schema_metadata(metadata), lake / "file.parquet", row_group_size=group
    )
    check_file(storage_of(lake).file("file.parquet"), ranges)


def refused(lake: Path, table: pa.Table, ranges: Sequence[RecordRange], group: int = 3) -> None:
    with pytest.raises(LakeError, match=r"rows are not in their places|a checksum fails|rows inst"):
        check(lake, table, ranges, group)


def changed(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    values = table[name].to_pylist()
    values[row] = value
    field = pa.field(name, table.schema.field(name).type)
    return table.set_column(table.schema.get_field_index(name), field, [pa.array(values)])


@in_a_directory
@given(topics, st.integers(1, 9))
def test_rows_as_they_were_written_pass_in_row_groups_of_any_size(tmp_path, topics, group):
    table, ranges = made(tmp_path, topics)
    check(tmp_path, table, ranges, group)
    found = list(read_checked(storage_of(tmp_path).file("file.parquet"), ranges))
    assert sum(one.rows.num_rows for one in found) == table.num_rows
    for name, some in topics.items():
        mine = [one for one in found if one.range.topic == name]
        assert b"".join(one.records for one in mine) == b"".join(map(pack_record, some))
        assert {topic for one in mine for topic in one.rows["topic"].to_pylist()} == {name}


@in_a_directory
@given(topics, st.data(), st.integers(1, 9))
def test_ranges_that_could_be_one_pass_too(tmp_path, topics, draw, group):
    table, ranges = made(tmp_path, topics)
    one = ranges[0]
    assume(one.rows > 1)
    first = draw.draw(st.integers(1, one.rows - 1))
    name, some = min(topics.items())
    parts = [rows(name, some[:first]), rows(name, some[first:])]
    (left,), (right,) = ([*write(tmp_path, part)[0].ranges] for part in parts)
    middle = one.offset + left.end
    cut = [
        one._replace(end=middle, end_ordinal=one.ordinal + first, crc=left.crc),
        one._replace(offset=middle, ordinal=one.ordinal + first, crc=right.crc),
    ]
    check(tmp_path, table, [*cut, *ranges[1:]], group)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_every_changed_bit_of_a_payload_is_found(tmp_path, group):
    table, ranges = made(tmp_path, TOPICS)
    for row, payload in enumerate(table["payload"].to_pylist()):
        for bit in range(8 * len(payload)):
            number = int.from_bytes(payload) ^ 1 << bit
            other = number.to_bytes(len(payload))
            refused(tmp_path, changed(table, "payload", row, other), ranges, group)


VALUES: dict[str, Callable[[object], list[object]]] = {
    "topic": lambda _: ["d", "", "aa"],
    "epoch": lambda value: [value + 1, value - 1, 0, -1],
    "offset": lambda value: [value + 1, value - 1, value + (1 << 32), -1],
    "ordinal": lambda value: [value + 1, value - 1, value + (1 << 32), -1],
    "payload": lambda value: [value + b"\0", value + b"xyz", value[:-1]],
}


@pytest.mark.parametrize("group", [1, 3, 100])
@pytest.mark.parametrize("name", COLUMNS)
def test_every_changed_value_is_found(tmp_path, name, group):
    table, ranges = made(tmp_path, TOPICS)
    for row, value in enumerate(table[name].to_pylist()):
        others = [*VALUES[name](value), *table[name].to_pylist(), None]
        for other in others:
            if other != value:
                refused(tmp_path, changed(table, name, row, other), ranges, group)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_rows_that_moved_are_missing_or_come_twice_are_found(tmp_path, group):
    table, ranges = made(tmp_path, TOPICS)
    every = range(table.num_rows)
    for one in every:
        others = [row for row in every if row != one]
        refused(tmp_path, table.take(others), ranges, group)
        refused(tmp_path, table.take([*every, one]), ranges, group)
        for other in others:
            order = np.arange(table.num_rows)
            order[[one, other]] = other, one
            refused(tmp_path, table.take(order), ranges, group)
            order[other] = other
            refused(tmp_path, table.take(order), ranges, group)


@pytest.mark.parametrize("field", ["epoch", "offset", "end", "ordinal", "end_ordinal", "crc"])
def test_rows_of_another_range_are_found(tmp_path, field):
    table, ranges = made(tmp_path, TOPICS)
    for number, one in enumerate(ranges):
        for by in (-1, 1):
            other = one._replace(**{field: getattr(one, field) + by})
            refused(tmp_path, table, [*ranges[:number], other, *ranges[number + 1 :]])
    refused(tmp_path, table, [one._replace(topic="d") for one in ranges])
    refused(tmp_path, table, list(reversed(ranges)))
    refused(tmp_path, table, ranges[:-1])
    refused(tmp_path, table, [*ranges, ranges[-1]])
