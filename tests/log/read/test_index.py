"""The index: rows are read back, damaged rows are not trusted, runs stay within their limits."""

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.commit.journal import APPEND, Entry
from headrace.log.read.index import (
    HEADER_BYTES,
    ROW_BYTES,
    RUN_BYTES_MAX,
    RUN_RECORDS_MAX,
    Header,
    Row,
    decode_header,
    decode_row,
    decode_rows,
    encode_header,
    encode_row,
    join_runs,
    row_position,
)

u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
names = st.text(min_size=1, max_size=256).filter(lambda name: len(name.encode()) <= 256)
headers = st.builds(Header, u64, u64, u64, u64, names)
rows = st.builds(Row, u64, u32, u64, u32, u64, u32)


@given(headers)
def test_a_header_comes_back(header):
    encoded = encode_header(header)
    assert len(encoded) == HEADER_BYTES
    assert decode_header(encoded + b"rows") == header


@given(headers, st.data())
def test_a_header_with_any_bit_flipped_is_not_believed(header, chosen):
    encoded = bytearray(encode_header(header))
    bit = chosen.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    assert decode_header(bytes(encoded)) is None


def test_a_header_that_is_cut_off_is_not_believed():
    encoded = encode_header(Header(1, 2, 3, 4, "name"))
    assert all(decode_header(encoded[:length]) is None for length in range(len(encoded)))


@given(st.lists(rows, max_size=5), st.data())
def test_rows_come_back_and_a_flipped_bit_costs_one_of_them(rows, chosen):
    encoded = bytearray(b"".join(map(encode_row, rows)))
    assert len(encoded) == len(rows) * ROW_BYTES
    assert list(decode_rows(bytes(encoded))) == rows
    if rows:
        bit = chosen.draw(st.integers(0, 8 * len(encoded) - 1))
        encoded[bit // 8] ^= 1 << bit % 8
        bad = bit // 8 // ROW_BYTES
        assert list(decode_rows(bytes(encoded))) == [*rows[:bad], None, *rows[bad + 1 :]]
        assert decode_row(bytes(encoded), bad * ROW_BYTES) is None


def test_a_row_that_is_cut_off_is_no_row():
    encoded = encode_row(Row(0, 1, 2, 3, 4, 5))
    assert list(decode_rows(encoded + encoded[:-1])) == [Row(0, 1, 2, 3, 4, 5)]


def test_zeros_are_no_rows():
    assert list(decode_rows(bytes(3 * ROW_BYTES))) == [None] * 3


def test_rows_follow_the_header_without_a_gap():
    assert [row_position(number) for number in (0, 1, 7)] == [
        HEADER_BYTES,
        HEADER_BYTES + ROW_BYTES,
        HEADER_BYTES + 7 * ROW_BYTES,
    ]


@st.composite
def pieces(draw):
    offset = ordinal = ms = 1000
    found = []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 5)) == 0:
            offset, ordinal = offset + 77, ordinal + 3  # records in between are lost
        ms += draw(st.sampled_from([0, 0, 1, 100]))
        count = draw(st.sampled_from([1, 2, 200, RUN_RECORDS_MAX]))
        size = draw(st.sampled_from([1, 30, RUN_BYTES_MAX // 3]))
        found.append(Entry(APPEND, 1, offset, ordinal, count, ms, b"", bytes(size)))
        offset, ordinal = offset + size, ordinal + count
    return found


@given(pieces())
def test_runs_hold_every_piece_once_and_keep_their_limits(pieces):
    runs = list(join_runs(pieces))
    assert [part for _, parts in runs for part in parts] == [piece.data for piece in pieces]
    left = iter(pieces)
    for row, parts in runs:
        of_run = [next(left) for _ in parts]
        assert row.offset == of_run[0].offset
        assert row.ordinal == of_run[0].ordinal
        assert row.record_count == sum(piece.record_count for piece in of_run) <= RUN_RECORDS_MAX
        assert row.length == sum(len(part) for part in parts) <= RUN_BYTES_MAX
        assert {piece.ms for piece in of_run} == {row.ms}
        assert row.crc == crc32c(b"".join(parts))
        assert row.end == of_run[-1].offset + len(of_run[-1].data)
