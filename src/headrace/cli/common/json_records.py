"""Records as lines of JSON: what `subscribe --json` prints, read by `publish --json`. Knows no connection."""

import base64
import binascii
import json
from collections.abc import AsyncIterator

from headrace.errors import BadTopicNameError
from headrace.model import PAYLOAD_BYTES_MAX, check_publish_topic

JSON_LINE_BYTES_MAX = 6 * PAYLOAD_BYTES_MAX + 4096
"""JSON may write a byte as six characters; a name and the other members come to it."""

Record = tuple[str, bytes]
"""A topic and a payload."""


class WrongRecordError(Exception):
    """A line is no record: correct it, and publish from there on."""


async def read_records(
    lines: AsyncIterator[list[bytes]], topic: str | None
) -> AsyncIterator[list[Record]]:
    """Yield the records of the lines, for `topic` if it is given; then WrongRecordError if one is wrong."""
    number = 0
    async for batch in lines:
        records: list[Record] = []
        wrong = None
        for line in batch:
            number += 1
            try:
                if line.strip():
                    records.append(parse_record(line, topic))
            except ValueError as error:
                wrong = f"line {number}: {error}; the lines before it are published"
                break
        yield records
        if wrong is not None:
            raise WrongRecordError(wrong)


def parse_record(line: bytes, topic: str | None) -> Record:
    """One record; ValueError says what is wrong with it. Members that are not known are left alone."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("this is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("this is not a JSON object")
    name = found.get("topic") if topic is None else topic
    if not isinstance(name, str):
        raise ValueError("topic must be a string, unless TOPIC is given")
    try:
        check_publish_topic(name)
    except BadTopicNameError as error:
        raise ValueError(str(error)) from None
    payload = _payload(found)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ValueError(f"the payload is longer than {PAYLOAD_BYTES_MAX:,} bytes")
    return name, payload


def _payload(found: dict[str, object]) -> bytes:
    text, encoded = found.get("payload"), found.get("payload_base64")
    if (text is None) == (encoded is None):
        raise ValueError("give one of payload and payload_base64")
    try:
        if isinstance(text, str):
            return text.encode()
        if isinstance(encoded, str):
            return base64.b64decode(encoded, validate=True)
    except (UnicodeEncodeError, binascii.Error):
        pass
    raise ValueError("payload must be a string of valid Unicode, and payload_base64 one of base64")
