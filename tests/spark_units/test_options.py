"""Options of source and sink: each one, all contradictions, all invalid values; secrets stay secret."""

import datetime
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.reader.planning import EARLIEST, LATEST, SourceOptions, Where
from headrace.reader.view import LogLocation, parse_place
from headrace.spark.options import SinkOptions, parse_sink, parse_source

URL = "http://127.0.0.1:8121"


def source(streaming: bool = False, **options: str) -> SourceOptions:
    return parse_source({"path": "/data", "subscribe": "a"} | options, streaming=streaming)


def sink(streaming: bool = False, **options: str) -> SinkOptions:
    return parse_sink({"url": URL} | options, streaming=streaming)


def test_without_options_all_of_the_topics_is_read_and_checked():
    found = source()
    assert found.place == LogLocation(path="/data")
    assert (found.starting, found.ending, found.rows_max, found.bytes_max) == (None,) * 4
    assert (found.partitions_min, found.partition_bytes) == (1, 64 << 20)
    assert (found.fail_on_data_loss, found.verify) == (True, True)
    assert (found.group, found.decode) == ("", "")


def test_names_of_options_are_the_same_in_any_case():
    options = {"PATH": "/data", "SUBSCRIBE": "a", "MinPartitions": "3"}
    assert parse_source(options, streaming=False).partitions_min == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("b, a ,b", ("a", "b")),
        ('["x,y", "é"]', ("x,y", "é")),
        ("$logux/log", ("$logux/log",)),
    ],
)
def test_topics_are_named_with_commas_or_as_json(text, names):
    assert source(subscribe=text).topics.names == names


def test_a_pattern_matches_whole_names():
    options = {"path": "/data", "subscribePattern": "logs/.*"}
    topics = parse_source(options, streaming=False).topics
    assert topics.matches("logs/today")
    assert not topics.matches("old/logs/today")
    assert not topics.matches("logs")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("earliest", Where(EARLIEST)),
        (" Latest ", Where(LATEST)),
        ('{"a": 5}', Where(topics={"a": 5})),
        ('{"a": "earliest"}', Where(topics={"a": EARLIEST})),
        ('{"a": 1, "": -2}', Where(EARLIEST, {"a": 1})),
        ('{"a": -1}', Where(topics={"a": LATEST})),
    ],
)
def test_offsets_are_words_or_json(text, where):
    assert source(streaming=True, startingOffsets=text).starting == where


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1700000000123", 1700000000123),
        ("2023-11-14T22:13:20.123Z", 1700000000123),
        ("2023-11-15T00:13:20.123+02:00", 1700000000123),
        ("2023-11-14T22:13:20.1230001Z", 1700000000123),
        ("2023-11-14T22:13:20.123001Z", 1700000000124),
        ("1960-01-01T00:00:00Z", 0),
    ],
)
def test_times_are_milliseconds_or_iso(text, ms):
    assert source(startingTimestamp=text).starting == Where(ms=ms)
    assert source(endingTimestamp=text).ending == Where(ms=ms)


@given(st.integers(0, 253402300799999))
def test_no_millisecond_of_a_time_is_lost(ms):
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        milliseconds=ms
    )
    assert source(startingTimestamp=moment.isoformat()).starting == Where(ms=ms)


def test_a_time_without_a_zone_is_utc():
    assert source(startingTimestamp="1970-01-02T00:00:01").starting == Where(ms=86_401_000)


def test_streams_have_limits_and_a_group():
    found = source(True, maxRowsPerTrigger="5", maxBytesPerTrigger="6", groupId="g")
    assert (found.rows_max, found.bytes_max, found.group) == (5, 6, "g")
    assert source(True, maxOffsetsPerTrigger="7").rows_max == 7


def test_tasks_have_limits():
    found = source(minPartitions="4", maxBytesPerPartition="1000")
    assert (found.partitions_min, found.partition_bytes) == (4, 1000)


def test_flags_are_true_or_false():
    found = source(failOnDataLoss="FALSE", verifyChecksums=" false ")
    assert (found.fail_on_data_loss, found.verify) == (False, False)


def test_what_spark_adds_is_let_through():
    assert source(True, checkpointLocation="/x", queryName="q").place.path == "/data"


def test_a_token_is_sent_in_clear_only_if_it_is_allowed():
    assert not sink(token="a").place.insecure_token
    assert sink(token="a", insecureToken="true").place.insecure_token
    options = {"url": URL, "subscribe": "a", "InsecureToken": "True"}
    assert parse_source(options, streaming=True).place.insecure_token


def test_a_path_may_be_a_file_url():
    assert source(path="file:///data/x").place.path == "/data/x"


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        (URL, (URL,)),
        (f" {URL}/ ,https://b", (URL, "https://b")),
        ("http://[::1]:8121", ("http://[::1]:8121",)),
    ],
)
def test_servers_are_one_or_several(text, urls):
    assert parse_place(text, "").urls == urls


# Refusals. Each error is one sentence that names the option.


def refused(call: object, options: dict[str, str], streaming: bool) -> str:
    with pytest.raises(OptionError) as caught:
        call(options, streaming=streaming)  # type: ignore[operator]
    error = str(caught.value)
    assert error and "\n" not in error and len(error) < 600
    return error


WRONG = [
    ("subscribe", ""),
    ("subscribe", "a,,b"),
    ("subscribe", "x" * 256),
    ("subscribe", "[]"),
    ("subscribe", '["a"'),
    ("subscribe", '["a", 1]'),
    ("startingOffsets", "5"),
    ("startingOffsets", "first"),
    ("startingOffsets", ""),
    ("startingOffsets", "{"),
    ("startingOffsets", '{"a": -3}'),
    ("startingOffsets", '{"a": 1.5}'),
    ("startingOffsets", '{"a": true}'),
    ("startingOffsets", '{"a": NaN}'),
    ("startingOffsets", '{"a": {"0": 5}}'),
    ("startingOffsets", json.dumps({"a": 1 << 63})),
    ("startingOffsets", '{"not subscribed": 5}'),
    ("startingTimestamp", "soon"),
    ("startingTimestamp", "-1"),
    ("startingTimestamp", "9" * 30),
    ("startingTimestamp", "9" * 5000),
    ("minPartitions", "0"),
    ("minPartitions", "many"),
    ("minPartitions", "1.0"),
    ("minPartitions", "٣"),
    ("minPartitions", "9" * 5000),
    ("maxBytesPerPartition", "0"),
    ("maxBytesPerPartition", "-1"),
    ("failOnDataLoss", "yes"),
    ("verifyChecksums", ""),
    ("url", "127.0.0.1:8121"),
    ("url", "ftp://x"),
    ("url", "http://"),
    ("url", "http://host:port"),
    ("url", "http://a,"),
    ("url", "http://host/path"),
    ("token", "two words"),
    ("token", "line\nbreak"),
    ("token", "schlüssel"),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_value_that_makes_no_sense_is_refused(key, value, streaming):
    options = {"path": "/data", "subscribe": "a", key: value}
    if key in ("url", "token"):
        del options["path"]
        options.setdefault("url", URL)
    error = refused(parse_source, options, streaming)
    assert key in error
    if key == "token":
        assert value not in error


@pytest.mark.parametrize("key", ["maxRowsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger"])
@pytest.mark.parametrize("value", ["0", "-5", "x", "", "1e3", "9" * 5000])
def test_limits_of_streams_are_whole_numbers(key, value):
    assert key in refused(parse_source, {"path": "/d", "subscribe": "a", key: value}, True)


@pytest.mark.parametrize("value", ["", "g" * 201, "é" * 101])
def test_a_group_has_a_name_of_bounded_length(value):
    assert "groupId" in refused(
        parse_source, {"path": "/d", "subscribe": "a", "groupId": value}, True
    )


def test_a_pattern_must_be_a_regular_expression():
    error = refused(parse_source, {"path": "/d", "subscribePattern": "("}, False)
    assert error.startswith("subscribePattern is not a regular expression")


@pytest.mark.parametrize(
    ("options", "streaming", "words"),
    [
        ({"path": "/d"}, False, ["subscribe", "subscribePattern"]),
        ({"path": "/d", "subscribe": "a", "subscribePattern": "a"}, False, ["subscribePattern"]),
        ({"subscribe": "a"}, False, ["path", "url"]),
        ({"subscribe": "a", "path": "/d", "url": URL}, False, ["path", "url"]),
        ({"subscribe": "a", "path": "/d", "token": "t"}, False, ["token", "url"]),
        (
            {"subscribe": "a", "path": "/d", "maxRowsPerTrigger": "1", "maxOffsetsPerTrigger": "1"},
            True,
            ["maxRowsPerTrigger", "maxOffsetsPerTrigger"],
        ),
        ({"subscribe": "a", "path": "/d", "endingOffsets": "latest"}, True, ["endingOffsets"]),
        ({"subscribe": "a", "path": "/d", "endingTimestamp": "5"}, True, ["endingTimestamp"]),
        ({"subscribe": "a", "path": "/d", "maxRowsPerTrigger": "1"}, False, ["maxRowsPerTrigger"]),
        ({"subscribe": "a", "path": "/d", "groupId": "g"}, False, ["groupId"]),
        ({"subscribe": "a", "path": "/d", "startingOffsets": "latest"}, False, ["startingOffsets"]),
        (
            {"subscribe": "a", "path": "/d", "startingOffsets": '{"a": -1}'},
            False,
            ["startingOffsets"],
        ),
        ({"subscribe": "a", "path": "/d", "endingOffsets": "earliest"}, False, ["endingOffsets"]),
        (
            {
                "subscribe": "a",
                "path": "/d",
                "startingOffsets": "earliest",
                "startingTimestamp": "5",
            },
            False,
            ["startingOffsets", "startingTimestamp"],
        ),
        (
            {"subscribe": "a", "path": "/d", "endingOffsets": "latest", "endingTimestamp": "5"},
            False,
            ["endingOffsets", "endingTimestamp"],
        ),
        ({"subscribe": "a", "path": "/d", "topic": "t"}, False, ["topic", "subscribePattern"]),
    ],
)
def test_contradictions_are_refused(options, streaming, words):
    error = refused(parse_source, options, streaming)
    assert all(word in error for word in words)


@pytest.mark.parametrize(
    "given",
    [
        {"startingTimestamp": "2000", "endingTimestamp": "1999"},
        {"startingOffsets": '{"a": 20}', "endingOffsets": '{"a": 10}'},
    ],
)
def test_a_start_behind_the_end_is_refused(given):
    with pytest.raises(OptionError, match="nothing would be read"):
        source(**given)


@pytest.mark.parametrize("given", [{"path": "http://h:1"}, {"path": "figg://h:1"}])
def test_an_address_is_no_path(given):
    with pytest.raises(OptionError, match=r"path is a directory: give .* as the option url"):
        parse_source({"subscribe": "t"} | given, streaming=False)


def test_a_sink_has_a_topic_a_producer_and_a_number():
    found = sink(topic="t", producer="p", batchId="7", encode="json", token="secret")
    assert (found.topic, found.producer, found.batch, found.encode) == ("t", "p", 7, "json")
    assert found.place == LogLocation(urls=(URL,), token="secret")
    assert sink(True, producer="p").producer == "p"


@pytest.mark.parametrize(
    ("options", "streaming", "word"),
    [
        ({}, False, "url"),
        ({"url": URL, "path": "/d"}, False, "path"),
        ({"url": URL, "topic": ""}, False, "topic"),
        ({"url": URL, "topic": "x" * 256}, False, "topic"),
        ({"url": URL, "producer": "p"}, False, "batchId"),
        ({"url": URL, "batchId": "1"}, False, "producer"),
        ({"url": URL, "producer": "p", "batchId": "-1"}, False, "batchId"),
        ({"url": URL, "producer": "p", "batchId": "1"}, True, "batchId"),
        ({"url": URL, "producer": ""}, True, "producer"),
        ({"url": URL, "producer": "é" * 128}, True, "producer"),
        ({"url": URL, "mode": "x"}, True, "mode"),
        ({"url": URL, "processor": "p", "encode": "json"}, False, "encode = channel"),
        ({"url": URL, "processor": "", "encode": "channel"}, False, "must not be empty"),
        ({"url": URL, "processor": "a\n", "encode": "channel"}, True, "no control characters"),
    ],
)
def test_what_no_sink_can_do_is_refused(options, streaming, word):
    assert word in refused(parse_sink, options, streaming)


# Secrets


def test_a_token_is_never_shown():
    found = parse_source({"url": URL, "token": "hush", "subscribe": "a"}, streaming=False)
    assert found.place.token == "hush"
    for shown in (repr(found), str(found), f"{found.place}", repr(sink(token="hush"))):
        assert "hush" not in shown


def test_a_password_in_an_address_is_refused_and_not_shown():
    error = refused(parse_source, {"url": "http://me:hush@host", "subscribe": "a"}, False)
    assert "hush" not in error


def test_an_authority_is_for_servers_with_tls() -> None:
    with pytest.raises(OptionError, match="token and token_file exclude each other"):
        parse_place("https://host:8121", "a", token_file="/etc/token")
    place = parse_place("https://host:8121", "", "/etc/ca.pem")
    assert place.tls.ca == "/etc/ca.pem"
    with pytest.raises(OptionError, match="ca is for servers with TLS: write https://"):
        parse_place("http://host:8121", "", "/etc/ca.pem")
