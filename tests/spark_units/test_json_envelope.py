"""Payloads that are JSON: members as columns and back, for any content."""

import datetime
import decimal
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SinkError
from headrace.spark.envelopes.json import JsonEnvelope

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
UTC = datetime.UTC
UTC_US = pa.timestamp("us", tz="UTC")
NAIVE = datetime.datetime(2024, 2, 29, 12, tzinfo=UTC).replace(tzinfo=None)


def column(payloads: list[bytes], kind: pa.DataType) -> list[object]:
    (array,) = JsonEnvelope().decode(pa.array(payloads, pa.binary()), [pa.field("a", kind)])
    array.validate(full=True)
    assert array.type == kind
    found: list[object] = array.to_pylist()
    return found


def one(value: object, kind: pa.DataType) -> object:
    """Return the column value for a member with this value, decoded between valid payloads."""
    payload = b'{"a": %s}' % (value if isinstance(value, bytes) else json.dumps(value).encode())
    before, found, behind = column([b"{}", payload, b'{"b": 1}'], kind)
    assert before is None and behind is None
    return found


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"5", b"null", b"[]", b'"text"', b"{} trailing", b"\xff\xfe", b'{"a": NaN}', b"{'a': 1}",
     b'{"a": 1e999}', b'{"a": "\\ud800"}', b"[" * 200_000, b'{"a":' * 50_000],
)  # fmt: skip
def test_what_is_no_object_has_no_columns(payload):
    assert column([b'{"a": 1}', payload, b'{"a": 3}'], pa.int64()) == [1, None, 3]


@pytest.mark.parametrize("odd", [b"1e400", b"-1e999", b'"\\ud800"', b"NaN"])
def test_an_odd_member_does_not_cost_the_others(odd):
    fields = [pa.field("s", pa.string()), pa.field("x", pa.float64()), pa.field("t", pa.string())]
    payload = b'{"s": "ok", "x": %s, "t": %s}' % (odd, odd)
    found = JsonEnvelope().decode(pa.array([payload], pa.binary()), fields)
    assert [array.to_pylist() for array in found[:2]] == [["ok"], [None]]


DECIMAL = pa.decimal128(38, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"12345678901234567890.12", "12345678901234567890.12"),
        (b'"12345678901234567890123456789012345.12"', "12345678901234567890123456789012345.12"),
        (b"1e30", "1000000000000000000000000000000.00"),
        (b"0.1", "0.10"),
        (b"5", "5.00"),
        (b"1e40", None),
        (b'"x"', None),
    ],
)
def test_decimals_are_exact(text, expected):
    found = one(text, DECIMAL)
    assert found == (decimal.Decimal(expected) if expected else None)
    assert one(b'{"d": %s}' % text, pa.struct([pa.field("d", DECIMAL)])) == {"d": found}


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (5, pa.int64(), 5),
        (5.0, pa.int64(), 5),
        (5.5, pa.int64(), None),
        (True, pa.int64(), None),
        ("5", pa.int64(), None),
        (1 << 63, pa.int64(), None),
        (-(1 << 63), pa.int64(), -(1 << 63)),
        (b"123456789012345678901234567890", pa.int64(), None),
        (b"1e300", pa.int64(), None),
        (300, pa.int8(), None),
        (5, pa.float64(), 5.0),
        (True, pa.float64(), None),
        ((1 << 60) + 1, pa.float64(), float(1 << 60)),
        (10**400, pa.float64(), None),
        (10**30, pa.float64(), 1e30),
        (True, pa.bool_(), True),
        (1, pa.bool_(), None),
        ("x", pa.string(), "x"),
        (5, pa.string(), "5"),
        ({"x": [1, None]}, pa.string(), '{"x":[1,null]}'),
        (False, pa.string(), "false"),
        ("2024-02-29T12:00:00.5Z", UTC_US, datetime.datetime(2024, 2, 29, 12, 0, 0, 500000, tzinfo=UTC)),
        ("2024-02-29T14:00:00+02:00", UTC_US, datetime.datetime(2024, 2, 29, 12, tzinfo=UTC)),
        ("2024-02-29T12:00:00", UTC_US, datetime.datetime(2024, 2, 29, 12, tzinfo=UTC)),
        (3600, UTC_US, datetime.datetime(1970, 1, 1, 1, tzinfo=UTC)),
        (10**30, UTC_US, None),
        ("yesterday", UTC_US, None),
        ("2024-02-29T14:00:00+02:00", pa.timestamp("us"), NAIVE),
        ("2024-02-29", pa.date32(), datetime.date(2024, 2, 29)),
        ("2023-02-29", pa.date32(), None),
        (5, pa.date32(), None),
        (1.25, pa.decimal128(10, 2), decimal.Decimal("1.25")),
        ("1.5", pa.decimal128(10, 2), decimal.Decimal("1.50")),
        (7, pa.decimal128(10, 2), decimal.Decimal("7.00")),
        (10**12, pa.decimal128(10, 2), None),
        ("x", pa.decimal128(10, 2), None),
        ("YWJj", pa.binary(), b"abc"),
        ("no base64!", pa.binary(), None),
        ([1, "x", None, 2.5], pa.list_(pa.int64()), [1, None, None, None]),
        ("no list", pa.list_(pa.int64()), None),
        ({"b": "x", "c": 2}, pa.struct([("b", pa.int64()), ("c", pa.int64())]), {"b": None, "c": 2}),
        ([1], pa.struct([("b", pa.int64())]), None),
        ({"k": 1, "l": "x"}, pa.map_(pa.string(), pa.int64()), [("k", 1), ("l", None)]),
        (5, pa.map_(pa.string(), pa.int64()), None),
    ],
)  # fmt: skip
def test_a_value_fits_its_column_or_is_null(value, kind, expected):
    found = one(value, kind)
    assert found == expected
    assert type(found) is type(expected)


@given(
    st.lists(json_values, max_size=6),
    st.sampled_from(
        [pa.int64(), pa.int8(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), UTC_US,
         pa.date32(), pa.binary(), pa.decimal128(10, 2), pa.list_(pa.string()), pa.null(),
         pa.struct([("a", pa.list_(pa.int64()))]), pa.map_(pa.string(), pa.float64())]
    ),
)  # fmt: skip
def test_no_value_breaks_the_others(values, kind):
    payloads = [json.dumps({"a": value}).encode() for value in values]
    together = column(payloads, kind)
    assert len(together) == len(values)
    for payload, found in zip(payloads, together, strict=True):
        assert column([payload], kind) == [found]


def test_the_last_of_members_with_one_name_counts():
    assert column([b'{"a": 1, "a": 2}'], pa.int64()) == [2]


FIELDS = {
    "i": (pa.int64(), [1, None, -(1 << 62)]),
    "f": (pa.float64(), [0.1, None, -1e300]),
    "b": (pa.bool_(), [True, None, False]),
    "s": (pa.string(), ["", None, "é☃\U0001f600\0"]),
    "raw": (pa.binary(), [b"", None, b"\x00\xff"]),
    "t": (UTC_US, [datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC), None, None]),
    "n": (pa.timestamp("us"), [NAIVE, None, NAIVE.replace(microsecond=1)]),
    "d": (pa.date32(), [datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31)]),
    "m": (pa.decimal128(12, 2), [decimal.Decimal("1.50"), None, decimal.Decimal("-123456789.01")]),
    "l": (pa.list_(pa.int64()), [[], None, [1, None]]),
    "o": (pa.struct([("x", pa.binary())]), [{"x": b"\xff"}, None, {"x": None}]),
    "k": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None, []]),
}


def test_what_is_encoded_can_be_decoded():
    arrays = [pa.array(values, kind) for kind, values in FIELDS.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(FIELDS))
    payloads = JsonEnvelope().encode(batch)
    fields = [pa.field(name, kind) for name, (kind, _) in FIELDS.items()]
    for name, array, found in zip(
        FIELDS, arrays, JsonEnvelope().decode(payloads, fields), strict=True
    ):
        assert found.to_pylist() == array.to_pylist(), name


def test_encoded_rows_are_objects_that_anyone_reads():
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1]), pa.array([decimal.Decimal("1.50")]), pa.array([float("nan")])],
        names=["a", "b", "c"],
    )
    (payload,) = JsonEnvelope().encode(batch).to_pylist()
    assert json.loads(payload) == {"a": 1, "b": 1.5, "c": None}


def test_a_map_with_a_key_twice_is_refused():
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(SinkError, match=r"a map in it: .*duplicate key was 'a'"):
        JsonEnvelope().encode(pa.RecordBatch.from_arrays([twice], names=["k"]))
