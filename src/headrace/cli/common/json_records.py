"""Lines of a file descriptor, read in batches, and records in JSON lines that `subscribe --json` prints."""

import asyncio
import base64
import binascii
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator

from headrace.errors import BadTopicNameError
from headrace.model import PAYLOAD_BYTES_MAX, check_publish_topic

JSON_LINE_BYTES_MAX = 6 * PAYLOAD_BYTES_MAX + 4096
"""JSON may encode a byte as six characters; the rest is for the name and the other members."""

Record = tuple[str, bytes]
"""A topic and a payload."""


class WrongRecordError(Exception):
    """A line is not a valid record: correct it, and publish from this line on."""


async def read_records(
    lines: AsyncIterator[list[bytes]], topic: str | None
) -> AsyncIterator[list[Record]]:
    """Yield the records of the lines, for `topic` if it is given; raise WrongRecordError at a wrong line.

    The records before the wrong line are yielded first.
    """
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
    """Return the record of a line; raise ValueError if it is wrong. Unknown members are ignored."""
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


_CHUNK_BYTES = 64 * 1024
_CHUNKS_AHEAD_MAX = 4


class LineTooLongError(Exception):
    """A line is longer than the caller allows."""

    def __init__(self, number: int, bytes_max: int) -> None:
        super().__init__(f"line {number} is longer than {bytes_max:,} bytes")


async def read_lines(fd: int, bytes_max: int) -> AsyncIterator[list[bytes]]:
    """Yield batches of lines as they arrive, without newlines.

    Raises LineTooLongError at a line that is too long, after yielding the lines before it.
    """
    number = 0
    rest = b""
    async for chunk in _read_chunks(fd):
        *lines, rest = (rest + chunk).split(b"\n")
        too_long = next((i for i, line in enumerate(lines) if len(line) > bytes_max), None)
        if too_long is None and len(rest) > bytes_max:
            too_long = len(lines)
        yield lines[:too_long]
        if too_long is not None:
            raise LineTooLongError(number + too_long + 1, bytes_max)
        number += len(lines)
    if rest:
        yield [rest]


async def _read_chunks(fd: int) -> AsyncIterator[bytes]:
    # A daemon thread with `os.read`, so that Ctrl-C ends the command even if a pipe or terminal is silent.
    # The thread has its own descriptor, because it may still read after the caller has closed the other one.
    fd = os.dup(fd)
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD_MAX)

    def read() -> None:
        chunk: bytes | OSError = b"."
        while chunk and not isinstance(chunk, OSError):
            room.acquire()
            try:
                chunk = os.read(fd, _CHUNK_BYTES)
            except OSError as error:
                chunk = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for more
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        os.close(fd)

    threading.Thread(target=read, daemon=True).start()
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk
        room.release()
