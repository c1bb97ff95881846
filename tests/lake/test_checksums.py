"""Checksums of rows equal those of the log's bytes, and two adjacent checksums combine into one."""

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.files.reading import crc_of_records
from headrace.lake.format import RecordRange
from headrace.lake.manifests import joined, joined_ranges
from headrace.log.records import pack_record

payloads = st.lists(st.binary(max_size=40), min_size=1, max_size=20)


@given(payloads, st.integers(0, (1 << 32) - 1))
def test_rows_have_the_checksum_of_the_log_s_bytes(some, before):
    data = b"".join(map(pack_record, some))
    assert crc_of_records(pa.array(some, pa.binary()), before) == crc32c(data, before)


@given(payloads, st.data())
def test_a_part_of_an_array_has_the_checksum_of_its_rows_alone(some, draw):
    first = draw.draw(st.integers(0, len(some) - 1))
    array = pa.array(some, pa.binary()).slice(first)
    assert crc_of_records(array) == crc32c(b"".join(map(pack_record, some[first:])))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_give_that_of_both_stretches(one, other):
    assert joined(crc32c(one), crc32c(other), len(other)) == crc32c(one + other)


@given(payloads, st.randoms(use_true_random=False))
def test_ranges_that_follow_each_other_are_one_with_the_checksum_of_all_bytes(some, chance):
    records = list(map(pack_record, some))
    whole = b"".join(records)
    ranges, offset = [], 0
    for ordinal, record in enumerate(records):
        end = offset + len(record)
        ranges.append(
            RecordRange("a", 1, offset, end, ordinal, ordinal + 1, crc32c(record), ordinal)
        )
        offset = end
    others = [
        RecordRange("a", 2, offset + 9, offset + 14, 99, 100, 5),
        RecordRange("b", 1, 0, 5, 0, 1, 6),
    ]
    mixed = [*ranges, *others]
    chance.shuffle(mixed)
    all_of_a = RecordRange("a", 1, 0, len(whole), 0, len(some), crc32c(whole))
    assert joined_ranges(mixed) == [all_of_a, *others]


def test_the_same_records_twice_are_no_range():
    one = RecordRange("a", 1, 0, 10, 0, 2, 0)
    with pytest.raises(ValueError, match="offsets 5 to 10 of topic 'a' appear twice"):
        joined_ranges([one, one._replace(offset=5, ordinal=1)])
