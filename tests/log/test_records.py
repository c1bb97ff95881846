"""Records in a block of bytes: every function agrees with a plain loop over the records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.records import boundary, holds, nth, pack_record, split_records, walk
from headrace.model import PAYLOAD_BYTES_MAX

payloads = st.lists(st.binary(max_size=12), max_size=20)
equal = st.tuples(st.integers(0, 9), st.integers(2, 20), st.randoms()).map(
    lambda given: [given[2].randbytes(given[0]) for _ in range(given[1])]
)


def naive(data: bytes) -> list[bytes] | None:
    """Return the records, one after another; None if the last one is cut off."""
    records = []
    while data:
        stop = 4 + int.from_bytes(data[:4])
        if len(data) < 4 or len(data) < stop:
            return None
        records.append(data[:stop])
        data = data[stop:]
    return records


@given(payloads | equal)
def test_what_was_packed_is_split_again(payloads):
    records = [pack_record(payload) for payload in payloads]
    data = b"".join(records)
    assert naive(data) == records
    assert split_records(data, len(records)) == records
    assert holds(data, len(records))


@given(st.binary(max_size=40) | equal.map(lambda rows: b"".join(map(pack_record, rows))), st.data())
def test_splitting_any_bytes_is_the_naive_walk_or_refused(data, chosen):
    records = naive(data)
    count = chosen.draw(st.integers(0, 12) | st.just(len(records or ())))
    if records is not None and len(records) == count:
        assert split_records(data, count) == records
        assert holds(data, count)
    else:
        assert not holds(data, count)
        with pytest.raises(ValueError, match="record"):
            split_records(data, count)


@given(payloads, st.data())
def test_a_boundary_is_the_first_at_or_after_a_position(payloads, chosen):
    records = [pack_record(payload) for payload in payloads]
    data = b"".join(records)
    position = chosen.draw(st.integers(0, len(data)))
    ends = [sum(map(len, records[:count])) for count in range(len(records) + 1)]
    at = next(end for end in ends if end >= position)
    assert boundary(data, position) == (at, ends.index(at))
    assert [nth(data, count) for count in range(len(ends))] == ends


@given(payloads, st.binary(max_size=3), st.integers(0, 25))
def test_walking_stops_before_what_is_cut_off(payloads, rest, count_max):
    records = [pack_record(payload) for payload in payloads]
    counted = min(count_max, len(records))
    data = b"".join(records) + rest
    assert walk(data, count_max) == (sum(map(len, records[:counted])), counted)


def test_walking_stops_before_a_size_no_record_may_have():
    too_large = (PAYLOAD_BYTES_MAX + 1).to_bytes(4)
    assert walk(pack_record(b"good") + too_large + bytes(PAYLOAD_BYTES_MAX + 1), 10) == (8, 1)
    largest = pack_record(bytes(PAYLOAD_BYTES_MAX))
    assert walk(largest, 10) == (len(largest), 1)
