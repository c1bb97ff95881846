"""Columns of the source and of the sink: which a schema may ask for, and which are written."""

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    LongType,
    MapType,
    NullType,
    StructField,
    StructType,
    VariantType,
)

from headrace.spark.columns import SCHEMA, columns_of
from headrace.spark.options import OptionError, SinkOptions, parse_sink
from headrace.spark.sink_columns import written_columns


def schema(text: str) -> StructType:
    fields = [one.split(":") for one in text.split()]
    found = StructType()
    for name, kind in fields:
        found = found.add(name, kind)
    return found


def options(**given: str) -> SinkOptions:
    return parse_sink({"url": "http://h"} | given, streaming=False)


def test_a_schema_may_choose_columns_in_any_order():
    found = columns_of(schema("payload:binary topic:string"), decode="")
    assert found.names == ("payload", "topic")
    assert found.decoded == ()


def test_other_columns_come_out_of_payloads():
    found = columns_of(schema("n:long offset:long s:string"), decode="json")
    assert found.names == ("n", "offset", "s")
    assert [field.name for field in found.decoded] == ["n", "s"]


def test_other_columns_need_decode():
    with pytest.raises(OptionError, match=r"column 'n' .* give decode = json"):
        columns_of(schema("topic:string n:long"), decode="")


@pytest.mark.parametrize("text", ["payload:string", "offset:integer", "timestamp:timestamp_ntz"])
@pytest.mark.parametrize("decode", ["", "json"])
def test_the_source_s_own_columns_have_their_types(text, decode):
    with pytest.raises(OptionError, match=f"the column '{text.split(':')[0]}' is"):
        columns_of(schema(f"{text} n:long" if decode else text), decode=decode)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (StructType(), "the schema has no columns"),
        (schema("n:long n:long"), "the column 'n' twice"),
        (schema("n:long N:long"), "the column 'n' twice"),
        (schema("Offset:long"), "write the column 'Offset' as 'offset'"),
        (StructType([StructField("n", LongType(), False)]), "it cannot be not null"),
        (StructType([StructField("m", MapType(LongType(), LongType()))]), "keys must be strings"),
        (StructType([StructField("v", VariantType())]), "'v' is variant"),
        (
            StructType([StructField("a", ArrayType(StructType([StructField("i", NullType())])))]),
            "'a.i' is void",
        ),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(wanted, said):
    with pytest.raises(OptionError, match=said):
        columns_of(wanted, decode="json")


@pytest.mark.parametrize("wanted", [SCHEMA, schema("offset:long")])
def test_to_decode_without_columns_for_it_is_refused(wanted):
    with pytest.raises(OptionError, match="decode = json needs a schema"):
        columns_of(wanted, decode="json")


@pytest.mark.parametrize("wanted", [SCHEMA, schema("n:long")])
def test_an_unknown_envelope_is_refused_before_anything_is_read(wanted):
    with pytest.raises(OptionError, match="know json, not 'jsn'"):
        columns_of(wanted, decode="jsn")


# The sink


def test_topic_and_payload_are_written_and_places_are_not():
    found = written_columns(SCHEMA, options())
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b"]), pa.array([7, 8]), pa.array([b"x", b"y"])],
        names=["topic", "offset", "payload"],
    )
    topics, payloads = found.rows(batch)
    assert (topics.to_pylist(), payloads.to_pylist()) == (["a", "b"], [b"x", b"y"])


def test_one_topic_may_be_for_all_rows():
    found = written_columns(schema("payload:string"), options(topic="t"))
    batch = pa.RecordBatch.from_arrays([pa.array(["é"])], names=["payload"])
    topics, payloads = found.rows(batch)
    assert (topics, payloads.to_pylist()) == ("t", ["é".encode()])


def test_all_columns_but_the_topic_become_json():
    found = written_columns(schema("topic:string n:long payload:string"), options(encode="json"))
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a"]), pa.array([5]), pa.array(["p"])], names=["topic", "n", "payload"]
    )
    topics, payloads = found.rows(batch)
    assert (topics.to_pylist(), payloads.to_pylist()) == (["a"], [b'{"n":5,"payload":"p"}'])


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("topic:string payload:binary", {"topic": "t"}, "the option topic and the column topic"),
        ("payload:binary", {}, "give the option topic, or a column topic"),
        ("topic:long payload:binary", {}, "the column topic must be string, not bigint"),
        ("topic:string", {}, "there is no column payload"),
        ("topic:string payload:long", {}, "the column payload must be binary or string"),
        ("topic:string payload:binary n:long", {}, "the column 'n' would not be written"),
        ("topic:string", {"encode": "json"}, "needs a column beside topic"),
        ("topic:string n:long", {"encode": "xml"}, "know json, not 'xml'"),
    ],
)
def test_what_cannot_be_written_is_refused(text, given, words):
    with pytest.raises(OptionError, match=words):
        written_columns(schema(text), options(**given))
