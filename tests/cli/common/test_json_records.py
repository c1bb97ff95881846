"""Lines of JSON as records: the lines that `publish --json` accepts, and the errors for all others."""

import json

import pytest

from headrace.cli.publish import JSON_LINE_BYTES_MAX, parse_record
from headrace.model import CHANNEL_PREFIX, PAYLOAD_BYTES_MAX


def test_a_line_of_subscribe_is_a_record():
    line = b'{"topic": "t", "offset": 9, "payload": "w\\u00f6rld"}'
    assert parse_record(line, None) == ("t", "wörld".encode())
    assert parse_record(line, "u") == ("u", "wörld".encode())
    assert parse_record(b'{"payload_base64": "/w=="}', "u") == ("u", b"\xff")


def test_the_largest_payload_fits_whatever_its_escapes():
    line = json.dumps({"payload": "\x01" * PAYLOAD_BYTES_MAX, "topic": "t" * 255}).encode()
    assert len(line) <= JSON_LINE_BYTES_MAX
    assert len(parse_record(line, None)[1]) == PAYLOAD_BYTES_MAX


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "one of payload and payload_base64"),
        (b'{"payload": "a", "payload_base64": "YQ=="}', "one of payload and payload_base64"),
        (b'{"payload": {"a": 1}}', "payload must be a string"),
        (b'{"payload": "\\ud800"}', "valid Unicode"),
        (b'{"payload_base64": "?"}', "base64"),
        (json.dumps({"payload": "x" * (PAYLOAD_BYTES_MAX + 1)}).encode(), "longer than"),
    ],
)
def test_anything_else_is_refused(line, text):
    with pytest.raises(ValueError, match=text):
        parse_record(line, "t")


@pytest.mark.parametrize("topic", [None, 5, "", CHANNEL_PREFIX + "x"])
def test_without_a_topic_the_line_must_have_one(topic):
    with pytest.raises(ValueError, match=r"topic"):
        parse_record(json.dumps({"topic": topic, "payload": ""}).encode(), None)
