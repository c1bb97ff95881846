"""Rows → blocks, read back with the server's own reader."""

import re
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import PayloadTooLargeError, SinkError
from headrace.log.batch.blocks import HEADER_BYTES, MAGIC, BlockDecoder
from headrace.log.read.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.log.records import split_records
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload import UPLOAD_CHECKS
from headrace.reader import upload as module
from headrace.reader.upload import EncodedBlock, encode_batch
from headrace.spark.columns import Stamps
from headrace.spark.options import parse_sink
from headrace.spark.sink import WrittenColumns


def received(blocks: Iterable[EncodedBlock]) -> dict[str, list[bytes]]:
    """Return the records that the server would append, by topic; fail if a block breaks the format."""
    topics: dict[str, list[bytes]] = {}
    decoder = BlockDecoder(UPLOAD_CHECKS)
    for block in map(b"".join, blocks):
        assert block[:4] == MAGIC
        decoder.feed(block)
        name_bytes = int.from_bytes(block[4:6], "big")
        count = int.from_bytes(block[6:10], "big")
        name, data = block[HEADER_BYTES:][:name_bytes], block[HEADER_BYTES + name_bytes :]
        assert count <= RUN_RECORDS_MAX and len(data) <= RUN_BYTES_MAX
        topics.setdefault(name.decode(), []).extend(one[4:] for one in split_records(data, count))
    decoder.finish()
    return topics


def grouped(rows: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    topics: dict[str, list[bytes]] = {}
    for topic, payload in rows:
        topics.setdefault(topic, []).append(payload)
    return topics


rows = st.lists(
    st.tuples(st.sampled_from(["a", "b", "é/☃", "long" * 50]), st.binary(max_size=40)), max_size=80
)


@given(rows, st.integers(0, 10), st.integers(0, 10))
def test_rows_keep_their_order_within_each_topic(rows, before, behind):
    """This also holds when the arrays are slices of others."""
    padding = [("other", b"not to be written")]
    padded = padding * before + rows + padding * behind
    topics = pa.array([topic for topic, _ in padded], pa.string()).slice(before, len(rows))
    payloads = pa.array([one for _, one in padded], pa.binary()).slice(before, len(rows))
    assert received(encode_batch(topics, payloads)) == grouped(rows)
    assert received(encode_batch("t", payloads)) == grouped(("t", one) for _, one in rows)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=400))
def test_many_topics_are_told_apart(pairs):
    rows = [(f"t/{number}", bytes(size)) for number, size in pairs]
    found = encode_batch(pa.array([t for t, _ in rows]), pa.array([p for _, p in rows]))
    assert received(found) == grouped(rows)


@pytest.mark.parametrize("count", [1, 499, 500, 501, 9001])
def test_a_block_has_no_more_records_than_a_run(count):
    payloads = pa.array([b"%d" % number for number in range(count)], pa.binary())
    blocks = list(encode_batch("t", payloads))
    assert len(blocks) == -(-count // RUN_RECORDS_MAX)
    assert received(blocks)["t"] == payloads.to_pylist()


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_the_largest_payloads_fit_into_blocks(count):
    rows = [bytes([number]) * PAYLOAD_BYTES_MAX for number in range(count)]
    assert received(encode_batch("t", pa.array(rows, pa.binary())))["t"] == rows


def test_payloads_of_no_bytes_are_records_too():
    payloads = pa.array([b""] * 1203, pa.binary())
    assert received(encode_batch("t", payloads)) == {"t": [b""] * 1203}


def test_no_rows_are_no_blocks():
    assert list(encode_batch("t", pa.array([], pa.binary()))) == []


def test_rows_are_joined_a_bounded_number_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "_JOINED_ROWS", 3)
    payloads = pa.array([b"%d" % number for number in range(10)], pa.binary())
    assert received(encode_batch("t", payloads))["t"] == payloads.to_pylist()


def test_a_payload_that_is_too_large_is_refused():
    payloads = pa.array([bytes(PAYLOAD_BYTES_MAX + 1)], pa.binary())
    with pytest.raises(PayloadTooLargeError, match="262145 bytes, a record may have 262144"):
        list(encode_batch("t", payloads))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "a topic name must not be empty"),
        ("x" * 256, "255 bytes"),
        ("$logux/a", "topic '$logux/a' is a log of Logux: give encode = logux"),
        ("$channel/b", "topic '$channel/b' is a channel: give encode = channel"),
    ],
)
def test_a_topic_that_cannot_be_published_to_is_refused(name, said):
    with pytest.raises(SinkError, match=re.escape(said)):
        list(encode_batch(pa.array(["a", name]), pa.array([b"", b""])))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a", "topics that begin with '$logux/', not to 'a'"),
        ("$channel/b", "topics that begin with '$logux/', not to '$channel/b'"),
        ("$logux/", "a name is missing behind it"),
        ("$logux/" + "x" * 250, "256 bytes"),
    ],
)
def test_rows_of_an_envelope_go_to_its_own_topics_only(name, said):
    event = b'{"event":{"type":"t"},"created":[1]}'
    with pytest.raises(SinkError, match=re.escape(said)):
        list(encode_batch(pa.array(["$logux/a", name]), pa.array([event, event]), "$logux/"))
    assert received(encode_batch("$logux/a", pa.array([event]), "$logux/")) == {"$logux/a": [event]}


def test_nothing_is_not_a_payload_and_not_a_topic():
    with pytest.raises(SinkError, match="no payload"):
        list(encode_batch("t", pa.array([b"", None], pa.binary())))
    with pytest.raises(SinkError, match="no topic"):
        list(encode_batch(pa.array(["a", None]), pa.array([b"", b""])))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary()])
def test_text_and_large_types_are_written_as_bytes(kind):
    text = pa.array(["", "é", "☃" * 9], pa.string())
    payloads = text.cast(kind) if kind != pa.large_binary() else text.cast(pa.binary()).cast(kind)
    topics = pa.array(["a", "b", "a"], pa.large_string())
    batch = pa.RecordBatch.from_arrays([payloads, topics], names=["payload", "topic"])
    columns = WrittenColumns(parse_sink({"url": "http://h"}, streaming=False))
    found = received(encode_batch(*columns.rows(batch.slice(1), Stamps("n", 0))))
    assert found == {"b": ["é".encode()], "a": [("☃" * 9).encode()]}
