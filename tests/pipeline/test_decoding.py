"""Columns of a lake that are decoded from payloads: exported, compacted, read by others; and refusals."""

import json
import uuid

import duckdb
import numpy as np
import pytest
from deltalake import DeltaTable

from headrace import connect_blocking
from headrace.errors import OptionError
from headrace.lake.format import SCHEMA, LakeError, Shape
from headrace.model import Position
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.pipeline import audit, compact, export
from headrace.pipeline.export.task import Decoding, shape_of
from headrace.pipeline.tasks import LocalRunner
from headrace.reader.decode import DecodedRecords
from headrace.reader.view import LogRange
from tests.pipeline.meddling import tree

COLUMNS = "id bigint, tags array<string>, price decimal(6, 2), place struct<x double, y double>"
EVENTS = [
    {"id": 1, "tags": ["a", "b"], "price": 3.5, "place": {"x": 1, "y": 2}, "more": True},
    {"id": 2, "tags": None},
    {"id": "three", "tags": [], "price": "1.25"},
]


@pytest.fixture
def topic(server) -> str:
    """A topic with events, and with a payload that is not an event."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    with connect_blocking(server.figg_url) as client:
        for event in EVENTS:
            client.publish(name, json.dumps(event).encode())
        client.publish(name, b"\xff no JSON")
    return name


def rows(lake):
    names = ["payload", "id", "tags", "price", "place"]
    database = duckdb.connect()
    database.register("lake", DeltaTable(str(lake)).to_pyarrow_dataset())
    found = database.sql(f'select {", ".join(names)} from lake order by "offset"').fetchall()
    return [(*row[1:3], row[3] and str(row[3]), row[4]) for row in found]


def test_members_of_json_are_columns_also_after_a_compaction(server, topic, tmp_path):
    lake = tmp_path / "lake"
    given = {"url": server.http_url, "runner": LocalRunner()}
    export(lake, [topic], decode="json", schema=COLUMNS, **given)
    expected = [
        (1, ["a", "b"], "3.50", {"x": 1.0, "y": 2.0}),
        (2, None, None, None),
        (None, [], "1.25", None),
        (None, None, None, None),
    ]
    assert rows(lake) == expected
    with connect_blocking(server.figg_url) as client:
        client.publish(topic, b'{"id": 5}')
    # The columns of an existing lake need not be named again.
    assert export(lake, [topic], **given).records == 1
    assert compact(lake, runner=LocalRunner()).merged == 2
    assert rows(lake) == [*expected, (5, None, None, None)]
    assert not audit(lake, [topic], url=server.http_url, runner=LocalRunner()).lost


def test_columns_of_a_lake_are_decided_once(server, topic, tmp_path):
    lake, raw = tmp_path / "lake", tmp_path / "raw"
    given = {"url": server.http_url, "runner": LocalRunner()}
    export(lake, [topic], decode="json", schema="id bigint", **given)
    export(raw, [topic], take_over=True, **given)
    before = tree(tmp_path)
    with pytest.raises(LakeError, match="has the columns 'id bigint' of json: leave out --decode"):
        export(lake, [topic], decode="json", schema="id int", **given)
    with pytest.raises(LakeError, match="has no decoded columns: leave out --decode"):
        export(raw, [topic], decode="json", schema="id bigint", **given)
    assert tree(tmp_path) == before
    assert export(lake, [topic], decode="json", schema="id  LONG", **given).batches == 0


@pytest.mark.parametrize(
    ("decode", "schema", "reason"),
    [
        ("", "id bigint", "also give their kind with decode"),
        ("json", "", "decode = json needs a schema, such as"),
        ("json", "id bigint, offset bigint", "every lake has a column 'offset'"),
        ("json", "Date date", "every lake has a column 'date'"),
        ("json", "id nonsense", "the schema is invalid: unknown type 'nonsense'"),
        ("xml", "id bigint", "decode and encode know channel, json, logux, not 'xml'"),
        ("channel", "number string", "the column 'number' must be bigint, not string"),
    ],
)
def test_columns_that_make_no_sense_are_refused(server, topic, tmp_path, decode, schema, reason):
    with pytest.raises(OptionError, match=reason):
        export(
            *(tmp_path / "lake", [topic]),
            url=server.http_url,
            decode=decode,
            schema=schema,
            runner=LocalRunner(),
        )
    assert not (tmp_path / "lake").exists()


def test_what_an_envelope_has_are_its_columns():
    shape = shape_of("channel", "", by_topic=False)
    assert shape.decoded.names == ["processor", "number", "content", "is_json"]
    assert shape.columns.names == [*SCHEMA.names, *shape.decoded.names]
    payload = encode_message(StoredMessage("p", 7, Content(b"[1]", is_json=True)))
    data = len(payload).to_bytes(4, "big") + payload
    zero = np.array([0])
    records = DecodedRecords(
        parts=[LogRange("$channel/c", Position(1, 0, 0), Position(1, len(data), 1))],
        which=zero,
        offsets=zero,
        ordinals=zero,
        ms=zero,
        boundaries=np.array([0, len(data)]),
        data=memoryview(data),
    )
    columns = Decoding(shape).columns(records)
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "processor": ["p"],
        "number": [7],
        "content": [b"[1]"],
        "is_json": [True],
    }
    assert Decoding(Shape()).columns(records) == {}
    # The decoding is also known by the name that Spark's source uses.
    assert shape_of("channel", "content string", by_topic=False).decoded.names == ["content"]
    assert "event" in shape_of("logux", "", by_topic=True).decoded.names
