"""Checksums from rows are those of the log's bytes, and those of two stretches give that of both."""

import pyarrow as pa
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.checksums import crc_of_records, joined
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
