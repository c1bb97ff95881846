"""Columns of the source and of the sink: those that a schema may ask for, and those that are written."""

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

from headrace.errors import OptionError
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.spark.columns import SCHEMA, Stamps, columns_of, default_schema
from headrace.spark.options import SinkOptions, parse_sink
from headrace.spark.sink import written_columns

STAMPS = Stamps("spark", 0)
CHANNEL = {"topic": "$channel/x", "encode": "channel"}
SPARK = {**CHANNEL, "processor": "spark"}


def schema(text: str) -> StructType:
    fields = [one.split(":") for one in text.split()]
    found = StructType()
    for name, kind in fields:
        found = found.add(name, kind)
    return found


def names(fields: list[StructField]) -> list[str]:
    return [field.name for field in fields]


def options(**given: str) -> SinkOptions:
    return parse_sink({"url": "http://h"} | given, streaming=False)


def test_a_schema_may_choose_columns_in_any_order():
    assert columns_of(schema("payload:binary topic:string"), decode="") == []


def test_the_epoch_is_there_for_those_who_ask():
    assert "epoch" not in SCHEMA.fieldNames()
    assert columns_of(schema("epoch:long offset:long"), decode="") == []
    assert names(columns_of(schema("epoch:long n:long"), decode="json")) == ["n"]
    with pytest.raises(OptionError, match="the column 'epoch' must be bigint"):
        columns_of(schema("epoch:string"), decode="")


def test_other_columns_come_out_of_payloads():
    found = columns_of(schema("n:long offset:long s:string"), decode="json")
    assert names(found) == ["n", "s"]


def test_other_columns_need_decode():
    with pytest.raises(OptionError, match=r"column 'n' .* give decode = json"):
        columns_of(schema("topic:string n:long"), decode="")


@pytest.mark.parametrize("text", ["payload:string", "offset:integer", "timestamp:timestamp_ntz"])
@pytest.mark.parametrize("decode", ["", "json"])
def test_the_source_s_own_columns_have_their_types(text, decode):
    with pytest.raises(OptionError, match=f"the column '{text.split(':')[0]}' must be"):
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
    with pytest.raises(OptionError, match="know channel, json, logux, not 'jsn'"):
        columns_of(wanted, decode="jsn")


LOGUX = "event:string type:string created:string id:string time:timestamp origin:string"


def test_columns_of_events_take_the_payload_s_place_where_no_schema_is_given():
    places = "topic:string offset:long next_offset:long ordinal:long timestamp:timestamp"
    expected = schema(f"{places} {LOGUX}")
    found = default_schema("logux")
    assert [(field.name, field.dataType) for field in found] == [
        (field.name, field.dataType) for field in expected
    ]
    assert names(columns_of(found, decode="logux")) == schema(LOGUX).fieldNames()
    assert default_schema("") == default_schema("json") == SCHEMA


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "long", "double"])
def test_the_time_of_an_event_may_be_read_in_several_ways(kind):
    found = columns_of(schema(f"time:{kind} n:integer topic:string"), decode="logux")
    assert names(found) == ["time", "n"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "time:string",
            "the column 'time' must be timestamp or timestamp_ntz or bigint or double, not",
        ),
        ("event:binary", "the column 'event' must be string, not binary"),
        ("Type:string", "write the column 'Type' as 'type'"),
        ("topic:string", "decode = logux needs a schema"),
    ],
)
def test_columns_of_events_have_their_types(text, said):
    with pytest.raises(OptionError, match=said):
        columns_of(schema(text), decode="logux")


# The sink


def test_topic_and_payload_are_written_and_places_are_not():
    found = written_columns(schema("topic:string offset:long epoch:long payload:binary"), options())
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b"]), pa.array([7, 8]), pa.array([b"x", b"y"])],
        names=["topic", "offset", "payload"],
    )
    topics, payloads = found.rows(batch, STAMPS)
    assert (topics.to_pylist(), payloads.to_pylist()) == (["a", "b"], [b"x", b"y"])


def test_one_topic_may_be_for_all_rows():
    found = written_columns(schema("payload:string"), options(topic="t"))
    batch = pa.RecordBatch.from_arrays([pa.array(["é"])], names=["payload"])
    topics, payloads = found.rows(batch, STAMPS)
    assert (topics, payloads.to_pylist()) == ("t", ["é".encode()])


def test_all_columns_but_the_topic_become_json():
    found = written_columns(schema("topic:string n:long payload:string"), options(encode="json"))
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a"]), pa.array([5]), pa.array(["p"])], names=["topic", "n", "payload"]
    )
    topics, payloads = found.rows(batch, STAMPS)
    assert (topics.to_pylist(), payloads.to_pylist()) == (["a"], [b'{"n":5,"payload":"p"}'])


def test_a_frame_of_events_that_was_read_can_be_written():
    found = written_columns(default_schema("logux"), options(encode="logux"))
    assert found.members == ("event", "type", "created", "id", "time", "origin")
    assert found.prefix == "$logux/"


def test_without_a_column_for_it_all_columns_are_members_of_the_event():
    found = written_columns(
        schema("type:string n:long ordinal:long id:string"),
        options(encode="logux", topic="$logux/x"),
    )
    assert (found.options.topic, found.members) == ("$logux/x", ("type", "n", "ordinal", "id"))


def test_a_frame_of_messages_that_was_read_can_be_written():
    found = written_columns(default_schema("channel"), options(encode="channel"))
    assert found.members == ("processor", "number", "payload", "is_json")
    assert found.prefix == "$channel/"


def test_without_a_payload_all_columns_are_members_of_the_content():
    found = written_columns(schema("n:long ordinal:long number:long"), options(**SPARK))
    assert found.members == ("n", "ordinal", "number", "processor")
    batch = pa.RecordBatch.from_pydict({"n": [5], "ordinal": [6], "number": [7]})
    topic, payloads = found.rows(batch, STAMPS)
    message = StoredMessage("spark", 7, Content(b'{"n":5,"ordinal":6}', is_json=True))
    assert (topic, payloads.to_pylist()) == ("$channel/x", [encode_message(message)])


def test_the_payload_of_a_message_is_its_content():
    found = default_schema("channel")
    places = ["topic", "offset", "next_offset", "ordinal", "timestamp"]
    own = ["processor", "number", "payload", "is_json"]
    assert found.fieldNames() == places + own
    assert names(columns_of(found, decode="channel")) == own
    found = columns_of(schema("payload:string n:long ordinal:long"), decode="channel")
    assert names(found) == ["payload", "n"]
    with pytest.raises(OptionError, match="'payload' must be binary or string, not bigint"):
        columns_of(schema("payload:long"), decode="channel")


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("topic:string payload:binary", {"topic": "t"}, "the option topic and the column topic"),
        ("payload:binary", {}, "give the option topic, or a column topic"),
        ("topic:long payload:binary", {}, "the column 'topic' must be string, not bigint"),
        ("topic:string", {}, "there is no column payload"),
        ("topic:string payload:long", {}, "the column 'payload' must be binary or string"),
        ("topic:string payload:binary n:long", {}, "the column 'n' would not be written"),
        ("topic:string", {"encode": "json"}, "needs a column beside topic"),
        (
            "payload:binary",
            {"topic": "$logux/x"},
            "'$logux/x' is a log of Logux: give encode = logux",
        ),
        ("n:long", {"topic": "$logux/x", "encode": "json"}, "give encode = logux"),
        ("payload:binary", {"topic": "$channel/x"}, "is a channel: give encode = channel"),
        ("payload:binary", CHANNEL, "give the option processor, or a column processor"),
        ("number:long", SPARK, "needs a column payload with the content, or columns"),
        ("processor:string payload:binary", SPARK, "the option processor and the column processor"),
        ("payload:long", SPARK, "the column 'payload' must be binary or string, not bigint"),
        ("payload:string number:string", SPARK, "'number' must be bigint or int, not string"),
        (
            "payload:string n:long",
            SPARK,
            "'n' would not be written: the column payload is the whole",
        ),
        ("payload:string Number:long", SPARK, "write the column 'Number' as 'number'"),
        ("n:long", {**SPARK, "topic": "$logux/x"}, "begin with '$channel/', not to '$logux/x'"),
        ("n:long", {**SPARK, "topic": "$channel/"}, "a name is missing behind it"),
        ("event:string", {"topic": "x", "encode": "logux"}, "begin with '$logux/', not to 'x'"),
        ("event:string", {"topic": "$logux/", "encode": "logux"}, "a name is missing behind it"),
        ("topic:string n:long", {"encode": "logux"}, "needs a column event .*, or a column type"),
        ("topic:string payload:string", {"encode": "logux"}, "needs a column event"),
        ("topic:string event:binary", {"encode": "logux"}, "'event' must be string, not binary"),
        ("topic:string type:long", {"encode": "logux"}, "'type' must be string, not bigint"),
        ("topic:string type:string time:date", {"encode": "logux"}, "'time' must be timestamp or"),
        (
            "topic:string type:string Id:string",
            {"encode": "logux"},
            "write the column 'Id' as 'id'",
        ),
        ("topic:string event:string n:long", {"encode": "logux"}, "'n' would not be written"),
        ("topic:string event:string payload:binary", {"encode": "logux"}, "'payload' would not"),
        ("topic:string n:long", {"encode": "xml"}, "know channel, json, logux, not 'xml'"),
    ],
)
def test_what_cannot_be_written_is_refused(text, given, words):
    with pytest.raises(OptionError, match=words.replace("$", r"\$")):
        written_columns(schema(text), options(**given))
