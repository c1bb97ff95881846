"""Requests, offsets, bodies, events and decisions of Durable Streams, as functions of values."""

import json

import pytest

from headrace.log.records import pack_record
from headrace.log.store import Topic
from headrace.model import PAYLOAD_BYTES_MAX, Durability, Position
from headrace.server.http.streams import content, events, messages, offsets
from headrace.server.http.streams.content import joined, media_type, records_of
from headrace.server.http.streams.messages import (
    Append,
    Claim,
    Create,
    ForkRequest,
    Live,
    Read,
)
from headrace.server.http.streams.offsets import From, Place
from headrace.server.http.streams.refusals import RefusedError
from headrace.server.http.streams.stream import PLAIN, Produced, Stream, is_new

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"


def refusal(call, *args, **named):
    with pytest.raises(RefusedError) as caught:
        call(*args, **named)
    return caught.value


# Offsets


def test_a_token_sorts_like_its_position_and_is_understood_again():
    places = [Position(1, 9, 0), Position(1, 10, 0), Position(1_700_000_000_000, 0, 0)]
    tokens = [offsets.encode(at) for at in places]
    assert tokens == sorted(tokens)
    assert [offsets.parse([one]) for one in tokens] == [Place(at.epoch, at.offset) for at in places]
    assert not set(",&=?/") & set("".join(tokens))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], From.START),
        (["-1"], From.START),
        (["now"], From.NOW),
        (["0000000000000000_0000000000000000"], From.START),
        (["12@34"], Place(12, 34)),
        (["@34"], Place(None, 34)),
        (["_34"], Place(None, 34)),
    ],
)
def test_offsets_of_all_protocols_are_understood(texts, expected):
    assert offsets.parse(texts) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-2",
        "NOW",
        "1,2",
        "1_2_3",
        "a_b",
        "1_2 ",
        "٣_٣",
        "9" * 16 + "_" + "9" * 20,
        "1_",
        "x",
    ],
)
def test_other_offsets_are_refused(text):
    assert refusal(offsets.parse, [text]).status_code == 400


def test_two_offsets_are_refused():
    assert refusal(offsets.parse, ["-1", "now"]).status_code == 400


# Requests


def test_a_stream_is_created_with_headers():
    assert messages.create({}) == Create("", None, None, False)
    asked = {
        "content-type": "text/plain; charset=utf-8",
        "stream-ttl": "60",
        "stream-closed": "TRUE",
    }
    assert messages.create(asked) == Create("text/plain; charset=utf-8", 60, None, True)
    found = messages.create({"stream-expires-at": "2030-01-01T00:00:00Z"})
    assert found.expires_ms == 1_893_456_000_000
    assert messages.create({"stream-closed": "no"}).closes is False


@pytest.mark.parametrize("ttl", ["", "-1", "+1", "01", "1.0", "1e3", "x", "9" * 18])
def test_a_bad_time_to_live_is_refused(ttl):
    assert refusal(messages.create, {"stream-ttl": ttl}).status_code == 400


@pytest.mark.parametrize(
    "text",
    [
        *("", "tomorrow", "2030-01-01", "2030-01-01T00:00:00", "60"),
        "9999-12-31T23:59:59-23:59",  # in UTC in the year 10000
    ],
)
def test_a_bad_expiry_is_refused(text):
    assert refusal(messages.create, {"stream-expires-at": text}).status_code == 400


def test_other_bad_requests_to_create_are_refused():
    both = {"stream-ttl": "1", "stream-expires-at": "2030-01-01T00:00:00Z"}
    assert refusal(messages.create, both).status_code == 400
    assert refusal(messages.create, {"content-type": "nonsense"}).status_code == 400
    assert refusal(messages.create, {"content-type": "text/plain; a=\x01"}).status_code == 400


def test_a_fork_names_its_source_and_a_place_there():
    path = {"stream-forked-from": "/v1/stream/a%2Fb/c"}
    assert messages.create(path).fork == ForkRequest("a/b/c", None, 0)
    found = messages.create(path | {"stream-fork-offset": "1_2", "stream-fork-sub-offset": "3"})
    assert found.fork == ForkRequest("a/b/c", "1_2", 3)


@pytest.mark.parametrize(
    "headers",
    [
        {"stream-forked-from": "a"},
        {"stream-forked-from": "/v1/stream/%ff"},
        {"stream-forked-from": "/v1/stream/__ds/a"},
        {"stream-fork-offset": "-1"},
        {"stream-fork-sub-offset": "0"},
        {"stream-forked-from": "/v1/stream/a", "stream-fork-sub-offset": "1"},
        {"stream-forked-from": "/v1/stream/a", "stream-fork-offset": "x"},
        *(
            {"stream-forked-from": "/v1/stream/a", "stream-fork-offset": "-1"}
            | {"stream-fork-sub-offset": text}
            for text in ("-1", "+1", "05", "1.5", "x", "")
        ),
    ],
)
def test_bad_headers_of_a_fork_are_refused(headers):
    assert refusal(messages.create, headers).status_code == 400


def test_an_append_has_a_body_or_closes():
    assert messages.append({"content-type": TEXT}, has_body=True) == Append(TEXT, None, None, False)
    closing = {"content-type": TEXT, "stream-closed": "true"}
    assert messages.append(closing, has_body=False) == Append("", None, None, True)
    assert refusal(messages.append, {"content-type": TEXT}, has_body=False).status_code == 400
    assert refusal(messages.append, {}, has_body=True).status_code == 400


def producer(producer="p", epoch="0", seq="0", **more):
    named = {"producer-id": producer, "producer-epoch": epoch, "producer-seq": seq}
    return {"content-type": TEXT} | {
        name: value for name, value in named.items() if value is not None
    }


def test_a_producer_shows_all_of_its_headers():
    found = messages.append(producer("é", "3", "9007199254740991"), has_body=True)
    assert found.claim == Claim("é", 3, 9007199254740991)


@pytest.mark.parametrize(
    "headers",
    [
        producer(None),
        producer(epoch=None),
        producer(seq=None),
        producer(""),
        producer("x" * 256),
        producer(epoch="-1"),
        producer(epoch="1.5"),
        producer(seq="x"),
        producer(seq=""),
        producer(seq="9007199254740992"),
    ],
)
def test_bad_headers_of_a_producer_are_refused(headers):
    assert refusal(messages.append, headers, has_body=True).status_code == 400


def test_reads_are_live_or_not():
    assert messages.read([], [], []) == Read(From.START, None, -1)
    assert messages.read(["now"], ["sse"], ["17"]) == Read(From.NOW, Live.SSE, 17)
    assert messages.read(["-1"], ["long-poll"], ["x"]) == Read(From.START, Live.LONG_POLL, -1)
    assert refusal(messages.read, [], ["sse"], []).status_code == 400
    assert refusal(messages.read, ["-1"], ["other"], []).status_code == 400
    assert refusal(messages.read, ["-1"], ["sse", "sse"], []).status_code == 400


# Bodies


def payloads(body, content_type):
    return [record[4:] for record in records_of(body, content_type)]


def test_bytes_are_one_record_or_as_many_as_needed():
    assert payloads(b"", BYTES) == []
    assert payloads(b"[1]", TEXT) == [b"[1]"]
    long = bytes(2 * PAYLOAD_BYTES_MAX + 1)
    assert [len(one) for one in payloads(long, BYTES)] == [PAYLOAD_BYTES_MAX] * 2 + [1]
    assert joined(payloads(long, BYTES), BYTES) == long


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', [b'{"a":1}']),
        (b' {"a": 1}\n', [b'{"a": 1}']),
        (b'[{"a":1}, 2 ,"x"]', [b'{"a":1}', b"2", b'"x"']),
        (b"[[1,2],[3]]", [b"[1,2]", b"[3]"]),
        (b"[]", []),
        (b"[[]]", [b"[]"]),
        (b"null", [b"null"]),
        ('"é"'.encode(), ['"é"'.encode()]),
    ],
)
def test_a_json_array_is_flattened_once_and_other_values_are_messages(body, expected):
    assert payloads(body, "Application/JSON; charset=utf-8") == expected


@pytest.mark.parametrize(
    "body", [b" ", b"{", b"[1,]", b"NaN", b"1 2", b"1,2", b"]", b'"\xff"', b"[" * 100_000, b"{a:1}"]
)
def test_other_bodies_are_no_json(body):
    assert refusal(records_of, body, JSON).status_code == 400


def test_many_messages_are_refused(monkeypatch):
    monkeypatch.setattr(content, "MESSAGES_MAX", 3)
    assert len(content.records_of(b"[1,2,3]", JSON)) == 3
    assert refusal(content.records_of, b"[1,2,3,4]", JSON).status_code == 413


def test_a_long_message_is_refused_and_a_long_array_is_not():
    message = b'"%b"' % (b"x" * (PAYLOAD_BYTES_MAX - 2))
    assert payloads(b"[%b,%b]" % (message, message), JSON) == [message, message]
    assert refusal(records_of, message[:-1] + b'x"', JSON).status_code == 413


@pytest.mark.parametrize(
    "foreign", [b"[1", b"2],[3", b"", b"\xff", b'"\xff"', b"1,2", b" 4 ", b"{", b'{"a":1}']
)
def test_what_other_protocols_have_stored_never_breaks_the_array(foreign):
    body = joined([b"1", foreign, b"3"], JSON)
    first, found, last = json.loads(body)
    assert (first, last) == (1, 3)
    if foreign in (b" 4 ", b'{"a":1}'):
        assert found == json.loads(foreign)
    else:
        assert set(found) == {"$base64"}


def test_pieces_that_are_valid_together_only_are_told_apart():
    assert len(json.loads(joined([b"[1", b"2],3"], JSON))) == 2
    assert joined([], JSON) == b"[]"
    assert media_type("Text/Plain ; charset=x") == "text/plain"


# Events


def test_an_event_carries_text_in_lines_and_bytes_in_base64():
    assert events.data([b"a\r\nb\rc\n", b"\nd"], TEXT) == (
        b"event: data\ndata:a\ndata:b\ndata:c\ndata:\ndata:d\n\n"
    )
    assert events.data([b" a\n  b\n "], TEXT) == b"event: data\ndata:  a\ndata:   b\ndata:  \n\n"
    assert events.data([b'{"a":\n1}', b"2"], JSON) == b'event: data\ndata:[{"a":\ndata:1},2]\n\n'
    assert events.data([b"\0", b"\xff"], BYTES) == b"event: data\ndata:AP8=\n\n"


@pytest.mark.parametrize("text", ["data:x\n\nevent: control\ndata:{}\n\n", "\u2028\u0085\x0b"])
def test_text_cannot_make_an_event(text):
    lines = events.data([text.encode()], TEXT).decode().removesuffix("\n\n").split("\n")
    assert lines[0] == "event: data"
    assert all(line.startswith("data:") for line in lines[1:])
    assert "\n".join(line.removeprefix("data:") for line in lines[1:]) == text


def test_only_the_last_part_of_a_commit_is_up_to_date():
    topic = Topic("t", Durability.WRITTEN)
    records = [pack_record(b"%d" % number) for number in range(3)]
    encode = events.Encoding(topic, TEXT, lambda: events.CURSORS_BEGIN_MS)
    assert encode.takes("t", Position(7, 0, 0), records)
    for shown in range(2):  # while the commit is written, and afterwards
        first = encode("t", Position(7, 0, 0), records[:2], 0)
        last = encode("t", Position(7, 10, 2), records[2:], 0)
        assert (b"upToDate" in first, b"upToDate" in last) == (False, True), shown
        topic.end_offset = 15


def test_a_control_says_where_the_reader_is():
    at = Position(7, 8, 0)
    event = events.control(at, 5, is_last=True, is_closed=False)
    assert event.startswith(b"event: control\ndata:{") and event.endswith(b"}\n\n")
    assert json.loads(event[len(events.CONTROL) :]) == {
        "streamNextOffset": offsets.encode(at),
        "streamCursor": "5",
        "upToDate": True,
    }


def test_a_cursor_is_the_number_of_an_interval_and_never_goes_back():
    now = events.CURSORS_BEGIN_MS + 41_000
    assert [events.cursor(now, shown) for shown in (-1, 1, 2, 900)] == [2, 2, 3, 901]


# Decisions

STREAM = Stream(TEXT, is_made=True, life=b"life")


def append(content_type=TEXT, claim=None, sequence=None, closes=False):
    return Append(content_type, sequence, claim and Claim("p", *claim), closes)


def test_a_new_request_is_stored():
    assert is_new(append(), STREAM, None, is_closed=False)
    assert is_new(append("TEXT/plain;x=y"), STREAM, None, is_closed=False)
    assert is_new(append("", closes=True), STREAM, None, is_closed=False)
    assert is_new(append(BYTES), PLAIN, None, is_closed=False)


@pytest.mark.parametrize(
    ("claim", "known", "expected"),
    [
        ((0, 0), None, True),
        ((5, 0), None, True),
        ((0, 1), (0, 0), True),
        ((0, 0), (0, 0), False),
        ((0, 3), (0, 7), False),
        ((1, 0), (0, 7), True),
    ],
)
def test_a_producer_is_stored_once(claim, known, expected):
    found = is_new(append(claim=claim), STREAM, known and Produced(*known), is_closed=False)
    assert found is expected


@pytest.mark.parametrize(
    ("claim", "known", "status", "headers"),
    [
        ((0, 2), (0, 0), 409, {"Producer-Expected-Seq": "1", "Producer-Received-Seq": "2"}),
        ((0, 2), None, 409, {"Producer-Expected-Seq": "0", "Producer-Received-Seq": "2"}),
        ((1, 1), (0, 5), 400, {}),
        ((0, 6), (1, 0), 403, {"Producer-Epoch": "1"}),
    ],
)
def test_a_producer_leaves_no_gap_and_is_fenced(claim, known, status, headers):
    found = refusal(
        is_new, append(claim=claim), STREAM, known and Produced(*known), is_closed=False
    )
    assert (found.status_code, found.headers) == (status, headers)


def test_another_type_is_refused():
    assert refusal(is_new, append(JSON), STREAM, None, is_closed=False).status_code == 409
    assert refusal(is_new, append(TEXT), PLAIN, None, is_closed=False).status_code == 409


def test_sequences_grow_and_a_duplicate_is_found_before_them():
    stream = Stream(TEXT, is_made=True, life=b"life", sequence="b")
    assert is_new(append(sequence="c"), stream, None, is_closed=False)
    for text in ("b", "a", "B"):
        found = refusal(is_new, append(sequence=text), stream, None, is_closed=False)
        assert found.status_code == 409
    known = Produced(0, 0)
    assert not is_new(append(claim=(0, 0), sequence="a"), stream, known, is_closed=False)


def test_a_closed_stream_takes_nothing_and_its_closer_may_ask_again():
    closer = Claim("p", 0, 3)
    stream = Stream(TEXT, is_made=True, life=b"life", closer=closer)
    known = Produced(0, 3)

    def asked(request):
        return is_new(request, stream, known, is_closed=True)

    assert not asked(append(claim=(0, 3), closes=True))
    assert not asked(append("", closes=True))
    assert refusal(asked, append(closes=True)).status_code == 409
    assert refusal(asked, append(claim=(0, 4))).status_code == 409
    assert refusal(asked, append(JSON)).status_code == 409
    newer = Produced(1, 0)
    found = refusal(is_new, append(claim=(0, 4)), stream, newer, is_closed=True)
    assert found.status_code == 403


def test_only_a_stream_that_was_created_here_is_closed():
    assert refusal(is_new, append("", closes=True), PLAIN, None, is_closed=False).status_code == 409
