"""Payloads that are Logux events: into columns and back, in the form in which clients send them."""

import datetime
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from headrace.errors import SinkError
from headrace.payload.logux import (
    Envelope,
    check_envelope,
    created_of,
    decode_envelope,
    encode_envelope,
    id_of,
    raw_event,
)
from headrace.spark.columns import Stamps
from headrace.spark.envelopes.logux import LoguxEnvelope

UTC = datetime.UTC
UTC_US = pa.timestamp("us", tz="UTC")
TEXTS = ("event", "type", "created", "id", "origin")
MS = 1475316540687
MOMENT = datetime.datetime(2016, 10, 1, 10, 9, 0, 687000, tzinfo=UTC)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
events = st.dictionaries(st.text(max_size=4), json_values, max_size=3).flatmap(
    lambda event: st.text(max_size=5).map(lambda kind: event | {"type": kind})
)
numbers = st.integers(0, 1 << 53) | st.integers(0, 1 << 50).map(lambda n: n + 0.5)
nodes = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" "), max_size=5)
stamps = st.tuples(numbers, nodes | numbers, st.integers(0, 100)).map(list)
times = stamps | st.lists(numbers | st.text(max_size=5), min_size=1, max_size=4)
origins = st.none() | st.text(max_size=5)


def decode(payloads: list[bytes], **kinds: pa.DataType) -> dict[str, list[Any]]:
    fields = [pa.field(name, kind) for name, kind in kinds.items()]
    arrays = LoguxEnvelope().decode(pa.array(payloads, pa.binary()), fields)
    for field, array in zip(fields, arrays, strict=True):
        array.validate(full=True)
        assert array.type == field.type
    return {name: array.to_pylist() for name, array in zip(kinds, arrays, strict=True)}


def batch(**columns: Any) -> pa.RecordBatch:
    kinds = dict.fromkeys(TEXTS, pa.string())
    arrays = [
        one if isinstance(one, pa.Array) else pa.array(one, kinds.get(name))
        for name, one in columns.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def encode(task: int = 0, **columns: Any) -> list[bytes]:
    """Encode payloads, and check that the server accepts them."""
    found = LoguxEnvelope().encode(batch(**columns), Stamps("spark-u", task)).to_pylist()
    for payload in found:
        check_envelope(payload)
    return found


def payload(event: object = None, **fields: Any) -> bytes:
    return encode_envelope(Envelope(raw_event(event or {"type": "t"}), **fields))


# Reading


def test_every_column_of_an_event():
    found = decode(
        [
            payload({"type": "a", "n": 5}, created=[MS, "client2", 0], origin="client2"),
            payload({"type": "b"}, id=f"{MS} 10:uuid 3", time=MS + 1, meta={"subprotocol": 1}),
        ],
        **dict.fromkeys(TEXTS, pa.string()),
        time=UTC_US,
        n=pa.int64(),
    )
    assert found == {
        "event": ['{"type":"a","n":5}', '{"type":"b"}'],
        "type": ["a", "b"],
        "created": [f'[{MS},"client2",0]', f'[{MS},"10:uuid",3]'],
        "id": [f"{MS} client2 0", f"{MS} 10:uuid 3"],
        "origin": ["client2", None],
        "time": [MOMENT, MOMENT + datetime.timedelta(milliseconds=1)],
        "n": [5, None],
    }


@pytest.mark.parametrize(
    "bad",
    [b"", b"text", b"{}", b"[]", b"5", b"\xff", b'{"event":{"type":"x"}}', b'{"created":[1]}',
     b'{"event":{"type":"x"},"created":5}', b'{"event":{"type":"x"},"created":[]}',
     b'{"event":{"type":"x"},"created":[null]}', b'{"event":{"type":"x"},"created":[true,"a",0]}',
     b'{"event":{"type":"x"},"id":"1 a"}', b'{"event":{"type":"x"},"created":[1],"time":"now"}',
     b"[" * 200_000, b'{"event":' * 50_000],
)  # fmt: skip
def test_what_is_no_event_has_no_columns(bad):
    good = payload({"type": "x", "n": 1}, created=[MS, "a", 0], origin="o")
    kinds = dict.fromkeys(TEXTS, pa.string())
    found = decode([good, bad, good], **kinds, time=UTC_US, n=pa.int64())
    for values in found.values():
        assert values[1] is None
        assert values[0] == values[2] is not None


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"created": [MS, "a", 0]}, pa.int64(), MS),
        ({"created": [MS + 0.5, "a", 0]}, pa.int64(), MS),
        ({"created": [MS + 0.5, "a", 0]}, pa.float64(), MS + 0.5),
        ({"created": [MS + 0.5, "a", 0]}, UTC_US, MOMENT.replace(microsecond=687500)),
        ({"created": [MS, "a", 0]}, pa.timestamp("us"), MOMENT.replace(tzinfo=None)),
        ({"created": [MS, "a", 0], "time": 0}, pa.int64(), 0),
        ({"id": f"{MS} a 0"}, pa.int64(), MS),
        ({"id": f"{MS}.5 a 0", "time": -1.5}, pa.int64(), -2),
        ({"created": [MS]}, pa.int64(), MS),
        ({"created": ["x", MS]}, pa.int64(), None),
        ({"created": ["x"]}, UTC_US, None),
        ({"created": [1e300]}, pa.int64(), None),
        ({"created": [1e18, "a", 0]}, UTC_US, None),
        ({"created": [-1e15, "a", 0]}, UTC_US, None),
        ({"created": [1e15, "a", 0]}, pa.int64(), 10**15),
        ({"created": [1], "time": 1 << 70}, pa.int64(), None),
        ({"created": [253402300799999, "a", 0]}, UTC_US,
         datetime.datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_the_time_is_in_milliseconds_or_a_timestamp(fields, kind, expected):
    assert decode([b"", payload(**fields)], time=kind) == {"time": [None, expected]}


@given(st.lists(st.tuples(events, times, origins | numbers), max_size=4))
def test_what_a_client_has_written_is_read(rows):
    payloads = [payload(event, created=time, origin=origin) for event, time, origin in rows]
    found = decode(payloads, **dict.fromkeys(TEXTS, pa.string()), time=pa.float64())
    assert [json.loads(event) for event in found["event"]] == [event for event, _, _ in rows]
    assert found["type"] == [event["type"] for event, _, _ in rows]
    assert [json.loads(time) for time in found["created"]] == [time for _, time, _ in rows]
    assert found["id"] == [id_of(decode_envelope(one)) for one in payloads]
    assert found["origin"] == [None if one is None else str(one) for _, _, one in rows] or any(
        isinstance(one, float) for _, _, one in rows
    )
    assert found["time"] == [None if isinstance(time[0], str) else time[0] for _, time, _ in rows]


@given(st.lists(st.binary(max_size=30) | json_values.map(lambda v: json.dumps(v).encode())))
def test_nothing_breaks_the_others(payloads):
    found = decode(payloads, **dict.fromkeys(TEXTS, pa.string()), time=UTC_US, n=pa.int64())
    for values in found.values():
        assert values == [None] * len(payloads)


def test_members_of_the_event_are_read_as_those_of_json_are():
    one = payload({"type": "t", "n": "no number", "s": [1], "event": 5}, created=[1])
    found = decode([one], n=pa.int64(), s=pa.string(), event=pa.string())
    assert found == {
        "n": [None],
        "s": ["[1]"],
        "event": [bytes(decode_envelope(one).event).decode()],
    }


# Writing


def test_rows_without_an_id_get_one_that_no_other_row_has():
    rows = [f'{{"type":"t","n":{n}}}' for n in range(3)]
    first, second = (encode(task, event=rows) for task in (4, 5))
    again = LoguxEnvelope()
    same_task = Stamps("spark-u", 6)
    third = [again.encode(batch(event=rows), same_task).to_pylist() for _ in range(2)]
    times = [created_of(decode_envelope(one)) for one in [*first, *second, *third[0], *third[1]]]
    assert len({tuple(time[1:]) for time in times}) == 12
    assert {time[1] for time in times} == {"spark-u"}
    assert [time[2] for time in times[:3]] == [4_000_000_000, 4_000_000_001, 4_000_000_002]
    now = datetime.datetime.now(UTC).timestamp() * 1000
    assert all(now - 60_000 < time[0] <= now for time in times)


def test_numbers_of_tasks_stay_exact_in_javascript():
    (one,) = encode((1 << 62) + 5, event=['{"type":"t"}'])
    assert created_of(decode_envelope(one))[2] < 1 << 53


def test_the_time_of_a_row_is_that_of_the_id_it_gets():
    (one,) = encode(type=["t"], time=pa.array([MOMENT.replace(microsecond=687500)], UTC_US))
    assert decode_envelope(one).created == [MS + 0.5, "spark-u", 0]
    assert decode_envelope(one).time is None


def test_columns_become_members_of_the_event():
    found = encode(
        type=["a", "b"],
        n=[1, None],
        who=pa.array([{"name": "x"}, None]),
        created=[None, f'[{MS}, "c", 0]'],
        origin=["o", None],
    )
    one, two = map(decode_envelope, found)
    assert json.loads(bytes(one.event)) == {"type": "a", "n": 1, "who": {"name": "x"}}
    assert one.created is not None and one.created[1] == "spark-u"
    assert (one.origin, two.origin) == ("o", None)
    assert json.loads(bytes(two.event)) == {"type": "b", "n": None, "who": None}
    assert two.created == [MS, "c", 0]


@pytest.mark.parametrize(
    ("row", "stored"),
    [
        ({"created": f'[{MS}, "c", 0]'}, {"created": [MS, "c", 0]}),
        ({"id": f"{MS} c 0"}, {"id": f"{MS} c 0"}),
        ({"created": f'[{MS},"c",0]', "id": f"{MS} c 0"}, {"created": [MS, "c", 0]}),
        ({"created": f'[{MS}.0,"c",0]', "id": f"{MS} c 0"}, {"created": [float(MS), "c", 0]}),
        ({"created": f'[{MS},"c",0]', "time": MS}, {"created": [MS, "c", 0]}),
        ({"created": f'[{MS}.5,"c",0]', "time": MS}, {"created": [MS + 0.5, "c", 0]}),
        ({"created": f'[{MS},"c",0]', "time": MS + 1}, {"created": [MS, "c", 0], "time": MS + 1}),
        ({"id": f"{MS} c 0", "time": 0}, {"id": f"{MS} c 0", "time": 0}),
        ({"id": f"{MS} c 0", "origin": "o"}, {"id": f"{MS} c 0", "origin": "o"}),
        ({"created": '["any"]', "time": 7}, {"created": ["any"], "time": 7}),
        ({"created": "[1]", "type": "t"}, {"created": [1]}),
    ],
)
def test_a_row_is_stored_as_it_says(row, stored):
    text = '{ "type": "t", "n": 1.50 }'
    (one,) = encode(event=[text], **{name: [value] for name, value in row.items()})
    assert one == encode_envelope(Envelope(Raw(text.encode()), **stored))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"event": None}, "a row has no event: null cannot be written"),
        ({"type": None}, "a row has no type: null cannot be written"),
        ({"event": "{"}, "its event is not JSON"),
        ({"event": "[]"}, "its event is not an object with a string `type`: []"),
        ({"event": '{"n": 1}'}, 'its event is not an object with a string `type`: {"n": 1}'),
        ({"event": '{"type": 5}'}, "its event is not an object with a string `type`"),
        ({"event": '{"type":"t","x":1e999}'}, "its event is not JSON"),
        ({"event": '{"type":"t","x":"\\ud800"}'}, "its event is not JSON"),
        ({"event": '{"type":"t","x":%s}' % ("[" * 100 + "]" * 100)}, "deep in each other"),
        ({"event": '{"type":"t"}', "type": "u"}, "a row's type is 'u', and its event says another"),
        ({"type": "t", "created": "5"}, "its `created` is not an array of numbers and strings"),
        ({"type": "t", "created": "[]"}, "its `created` is not an array of numbers and strings"),
        (
            {"type": "t", "created": "[true]"},
            "its `created` is not an array of numbers and strings",
        ),
        (
            {"type": "t", "created": "[1e19]"},
            "its `created` is not an array of numbers and strings",
        ),
        ({"type": "t", "created": "now"}, "its created 'now' is not JSON"),
        ({"type": "t", "id": "now"}, "'now' is not an id: write `MILLISECONDS NODE NUMBER`"),
        (
            {"type": "t", "id": "1 a 0", "created": "[2]"},
            "its created [2] and its id '1 a 0' differ",
        ),
        ({"type": "t", "id": "x", "created": "[2]"}, "'x' is not an id"),
        ({"type": "t", "time": float("nan")}, "a row's time is not a number of milliseconds"),
        ({"type": "t", "time": 1e30}, "a row's time is not a number of milliseconds"),
    ],
)
def test_a_wrong_row_is_refused_in_one_sentence(row, said):
    good = {"event": '{"type":"u"}', "type": "u", "created": "[2]", "id": "1 a 0", "time": 1.0}
    if "created" in row and "id" in row:
        good = {**good, "created": '[1,"a",0]'}
    columns = {name: [good[name], value] for name, value in row.items()}
    with pytest.raises(SinkError) as caught:
        encode(**columns)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.lists(st.tuples(events, times, origins), max_size=4), st.booleans())
def test_what_is_read_can_be_written_and_is_the_same_event(rows, by_id):
    payloads = []
    for event, time, origin in rows:
        one = Envelope(raw_event(event), created=time, origin=origin)
        if by_id and len(id_of(one).split(" ")[0]) <= 20 and "created-" not in id_of(one):
            one = Envelope(raw_event(event), id=id_of(one), time=5, origin=origin)
        payloads.append(encode_envelope(one))
    columns = decode(payloads, **dict.fromkeys(TEXTS, pa.string()), time=pa.float64())
    columns["time"] = pa.array(columns["time"], pa.float64())
    again = encode(**columns)
    found = decode(again, **dict.fromkeys(TEXTS, pa.string()), time=pa.float64())
    columns["time"] = columns["time"].to_pylist()
    assert found == columns
